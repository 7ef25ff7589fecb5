"""The comparison with other engines: what it makes of workers that behave, fall silent, lie or die."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import compare
from benchmarks.compare import NEW, PROMPT, REFERENCE, Disagreement
from benchmarks.peers import environment, worker
from benchmarks.peers.environment import Recipe
from benchmarks.peers.worker import Program, Worker, WorkerError
from nanoinfer.errors import ModelError

OURS = "nanoinfer, plain"
PEER = "another"
FAKE = """
import os, sys, threading, time
sys.path.insert(0, {scripts!r})
import protocol

def load(settings):
    how = settings.get("how", "")
    if how == "refuses":
        raise ValueError("no such model")
    if how == "spins":
        threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()

    def run(engine, prompts, new):
        print("not an answer")
        if how == "dies at 2" and len(prompts) == 2:
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(1)
        if how == "hangs":
            time.sleep(60)
        n = new - 1 if how == "short" else new
        out = [[sum(ids) % 100 + i for i in range(n)] for ids in prompts]
        if how == "differs":
            out[0][new // 4] += 1
        return out, 1.0, 1.0 + settings.get("seconds", 1.0)

    return run, "7.0"

protocol.serve(load)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "fake.py"
    path.write_text(FAKE.format(scripts=str(compare.SCRIPTS)))
    return path


def program(script: Path, name: str, how: str = "", **settings: Any) -> Program:
    return Program((name,), script, {"how": how, **settings})


def found_by(script: Path, *others: Program, exact: bool = False) -> compare.Found:
    return compare.compare([program(script, REFERENCE), *others], 100, [1, 2], rounds=2, seed=0, exact=exact)


# --- turn about -------------------------------------------------------------------------------------------------------


def test_rates_ratios_and_agreement(script: Path) -> None:
    both = Program((OURS, "nanoinfer, kernel"), script, {"seconds": 0.5})
    found = found_by(script, both, exact=True)
    assert found.versions == dict.fromkeys((REFERENCE, OURS, "nanoinfer, kernel"), "7.0")
    assert found.failed == {}
    measured = found.samples[OURS][2]
    assert measured.first == [1.0, 1.0]
    assert measured.decode == [2 * (NEW - 1) / 0.5] * 2
    assert (measured.same_rows, measured.same_tokens) == (2, 1.0)
    ratios = compare.ratios(found.samples)
    assert list(ratios) == [f"{OURS} / {REFERENCE}", f"nanoinfer, kernel / {REFERENCE}"]
    assert [r["value"] for r in ratios[f"{OURS} / {REFERENCE}"].values()] == [2.0, 2.0]


def test_a_peer_that_dies_is_named_and_the_rest_go_on(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = found_by(script, program(script, OURS), program(script, PEER, "dies at 2"))
    assert list(found.samples[PEER]) == [1]
    assert len(found.samples[OURS][2].decode) == len(found.samples[REFERENCE][2].decode) == 2
    assert found.failed[PEER].startswith("another ended without an answer")
    assert "out of memory" in found.failed[PEER]
    assert "left out: another ended" in capsys.readouterr().out
    assert list(compare.ratios(found.samples)[f"{OURS} / {PEER}"]) == [1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("refuses", "another: ValueError: no such model"),
        ("short", f"another did not generate {NEW} tokens for each of 1 prompts"),
    ],
)
def test_a_peer_that_never_works_is_named(script: Path, how: str, reason: str) -> None:
    found = found_by(script, program(script, PEER, how))
    assert found.failed == {PEER: reason}
    assert list(found.samples) == [REFERENCE]


@pytest.mark.parametrize("how", ["refuses", "short", "dies at 2"])
@pytest.mark.parametrize("name", [OURS, REFERENCE])
def test_ours_or_the_reference_failing_ends_it(script: Path, name: str, how: str) -> None:
    others = [program(script, other) for other in (OURS, REFERENCE) if other != name]
    with pytest.raises(WorkerError):
        compare.compare([*others, program(script, name, how)], 100, [1, 2], rounds=1, seed=0, exact=False)


def test_other_tokens_end_it_where_they_must_be_the_same(script: Path) -> None:
    with pytest.raises(Disagreement, match=r"plain: 1 of 1 rows differ from transformers's"):
        found_by(script, program(script, OURS, "differs"), exact=True)


def test_other_tokens_of_a_peer_are_counted(script: Path) -> None:
    measured = found_by(script, program(script, PEER, "differs"), exact=True).samples[PEER][2]
    assert measured.same_rows == 1
    assert measured.same_tokens == (NEW // 4 + NEW) / (2 * NEW)


# --- one worker -------------------------------------------------------------------------------------------------------


def test_what_is_no_answer_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "babbles.py"
    path.write_text("print('hello', flush=True)\ninput()\n")
    with pytest.raises(WorkerError, match=r"another said what is no answer: 'hello\\n'"):
        Worker(Program((PEER,), path, {}))


def test_one_that_hangs_is_ended(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Worker(program(script, PEER, "hangs"))
    monkeypatch.setattr(worker, "LIMIT_S", 0.3)
    with pytest.raises(WorkerError, match=r"another gave no answer within 0\.3 s"):
        one.run(PEER, [[1]], NEW)
    one.close()


def test_one_that_waits_takes_no_time_from_the_others(script: Path) -> None:
    one = Worker(program(script, PEER, "spins"))
    try:
        one.run(PEER, [[1]], NEW)
        (process,) = (p for p in psutil.Process().children() if str(script) in p.cmdline())
        time.sleep(0.1)
        before = process.cpu_times()
        time.sleep(0.5)
        assert process.cpu_times()[:2] == before[:2]
        one.run(PEER, [[1]], NEW)
    finally:
        one.close()
    assert not process.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a stopped process when its parent is killed")
def test_no_worker_outlives_the_benchmark(script: Path) -> None:
    code = (
        "from benchmarks.peers.worker import Program, Worker; from pathlib import Path; import sys, time\n"
        f"Worker(Program(('x',), Path({str(script)!r}), {{}})); print('there', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "there\n"
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    child.wait(timeout=10)


# --- who takes part ---------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, empty but for its shape; nothing of the user's cache is seen."""
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compare, "folder", lambda *_: tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def test_peers_that_are_not_installed_are_named(files: Path) -> None:
    chosen, left_out = compare.programs("smollm2-135m", "bfloat16", 8, quick=False)
    compiled = ("transformers, static cache, compiled",)
    assert [p.names for p in chosen] == [tuple(compare.OURS), (REFERENCE,), compiled]
    assert list(left_out) == ["vLLM", "llama.cpp, bf16", "llama.cpp, q8_0"]
    assert left_out["vLLM"] == "not installed: python -m benchmarks.compare --install vllm"
    chosen, left_out = compare.programs("random:gpt2", "float32", 8, quick=True)
    assert [p.names for p in chosen] == [(OURS, "nanoinfer, kernel"), (REFERENCE,)]
    assert left_out[compiled[0]] == "it takes minutes to start (--quick)"


def test_a_large_model_is_run_by_ours_and_the_reference(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LARGE", 10)
    (files / "model.safetensors").write_bytes(b"0" * 11)
    chosen, left_out = compare.programs("random:gpt2-xl", "float32", 16, quick=False)
    assert len(chosen) == 2
    assert set(left_out.values()) == {"the model is large"}


def test_what_does_not_fit_is_refused(files: Path) -> None:
    with (files / "model.safetensors").open("wb") as file:
        file.truncate(10**12)  # takes no room on the disk
    with pytest.raises(ModelError, match=r"3 copies of random:gpt2-xl in float32 at work take 3600\.0 GB"):
        compare.programs("random:gpt2-xl", "float32", 16, quick=False)


def test_a_run_is_stored_and_told(
    files: Path, script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [program(script, REFERENCE), program(script, OURS, seconds=0.5), program(script, PEER, "dies at 2")]
    monkeypatch.setattr(compare, "programs", lambda *_: (chosen, {"vLLM": "not installed"}))
    compare.run("random:tiny-gpt2", ["float32"], [1, 2], rounds=2, seed=0, quick=False, out=files / "out.json")
    stored = json.loads((files / "out.json").read_text())
    assert stored["provenance"]["versions"]["nanoinfer"]
    assert (stored["model"], stored["prompt"], stored["new"], stored["rounds"]) == ("random:tiny-gpt2", PROMPT, NEW, 2)
    part = stored["float32"]
    assert part["samples"][OURS]["2"]["decode"] == [252.0, 252.0]
    assert part["ratios"][f"{OURS} / {REFERENCE}"]["1"]["value"] == 2.0
    assert list(part["failed"]) == [PEER]
    printed = capsys.readouterr().out
    assert f"{OURS} / {REFERENCE}: 1 rows 2.00 (2.00 to 2.00), 2 rows 2.00 (2.00 to 2.00)" in printed
    assert "252.0   1000 ms  2/2" in printed
    assert "left out: vLLM: not installed" in printed


def test_each_model_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    monkeypatch.setattr(compare, "run", lambda *args: outs.append(args[-1]))
    for model in ("smollm2-135m", "random:gpt2-xl"):
        monkeypatch.setattr(sys, "argv", ["compare", "--model", model])
        compare.main()
    assert outs == [Path("results/compare-smollm2-135m.json"), Path("results/compare-random-gpt2-xl.json")]


def test_the_real_workers_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(compare, "OURS", {OURS: {}})  # the kernel would be built anew for this cache
    chosen, _ = compare.programs("random:tiny-llama", "float32", 2, quick=True)
    found = compare.compare(chosen, 256, [2], rounds=1, seed=0, exact=True)
    assert found.samples[OURS][2].same_rows == 2


# --- environments -----------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str) -> str:
    """A package with nothing in it."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return str(path)


def imports(peer: str, name: str) -> bool:
    return not subprocess.run([environment.python(peer), "-c", f"import {name}"], capture_output=True).returncode


def test_an_environment_counts_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path / "cache"))
    good, bad, lost = wheel(tmp_path, "good"), wheel(tmp_path, "bad"), str(tmp_path / "lost-1.0-py3-none-any.whl")
    monkeypatch.setitem(environment.RECIPES, "vllm", Recipe((lost,), hint="look for it"))
    with pytest.raises(ModelError, match="vllm was not installed: pip's reason stands above; look for it"):
        environment.install("vllm")
    assert environment.python("vllm").exists()
    assert not environment.installed("vllm")
    monkeypatch.setitem(environment.RECIPES, "vllm", Recipe((good, bad), removed=("bad",)))
    environment.install("vllm")
    assert environment.installed("vllm")
    assert imports("vllm", "good") and not imports("vllm", "bad")
    monkeypatch.setitem(environment.RECIPES, "vllm", Recipe((good,)))
    assert not environment.installed("vllm")


def test_what_is_installed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("nothing is to be run"))
    environment.python("vllm").parent.mkdir(parents=True)
    environment.python("vllm").touch()
    (environment.home("vllm") / environment.STAMP).write_text(environment.RECIPES["vllm"].stamp)
    environment.install("vllm")
    assert "installed already" in capsys.readouterr().out
