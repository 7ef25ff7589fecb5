"""The commands about services: what is refused before any work, what is printed, what is kept, how they end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nanoinfer.bench import command, sweep
from nanoinfer.bench.loadgen import load_run
from nanoinfer.bench.summary import ErrorBudget, summarise
from nanoinfer.cli.app import app
from nanoinfer.measure.clock import now
from nanoinfer.measure.trace import Trace, save_traces
from nanoinfer.serve.options import ServeOptions
from nanoinfer.workload.items import WorkItem
from tests.bench.made import golden

URL = "http://127.0.0.1:9"
APP = "from nanoinfer.cli.app import app; "


def run(*args: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, list(args), env={"OPENAI_API_KEY": None, "NANOINFER_API_KEY": None, **(env or {})})


def one_line(result: Any, says: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == "" and result.stderr.count("\n") == 1, result.output
    assert result.stderr.startswith("nanoinfer: ") and says in result.stderr, result.stderr


class Fake:
    """A target that answers at once: three tokens a request, in two chunks; or fails, as the test says."""

    def __init__(self) -> None:
        self.name = "fake"
        self.messages: dict[str, str] = {}
        self.settings: dict[str, Any] = {"kind": "fake"}
        self.error: str | None = None
        self.works: list[WorkItem] = []

    async def send(self, work: WorkItem, trace: Trace) -> None:
        self.works.append(work)
        await asyncio.sleep(0.001)
        trace.t_sent = now()
        if self.error:
            trace.status, trace.error = "error", self.error
            self.messages.setdefault(self.error, "as asked")
        else:
            trace.prompt_tokens = 5
            trace.token(now(), 2)
            trace.token(now() + 1e-6, 1)
        trace.t_end = now() + 1e-5

    async def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    target = Fake()

    async def open_target(*_: Any) -> Fake:
        return target

    monkeypatch.setattr(command, "open_target", open_target)
    # A busy machine is no failure of what is tested here.
    monkeypatch.setattr(sweep, "summarise", partial(summarise, budget=ErrorBudget(60, 60, 1)))
    return target


def bench(*args: str) -> Any:
    return run("bench", URL, "--no-floor", *args)


# --- bench: what it does ----------------------------------------------------------------


def test_one_user_and_32_requests_where_nothing_is_asked(fake: Fake) -> None:
    result = bench("--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["requests"] | {"by_status": 0, "failures": 0} == {
        "attempted": 32,
        "ok": 32,
        "by_status": 0,
        "failures": 0,
        "warmup": 1,
        "cut_short": 0,
    }
    load = {"loop": "closed", "users": 1.0, "seed": 0, "prompt_tokens": "128", "output_tokens": "64", "warmup": 1}
    assert record["load"].items() >= load.items() and "arrivals" not in record["load"]
    assert record["load"]["target"]["name"] == "fake"
    assert record["tokens"] == {"prompt": 160, "output": 96, "estimated_requests": 0}
    assert "1 user: 33 of 33 ended" in result.stderr
    assert len({work.prompt for work in fake.works}) == 33  # the warm-up's prompt is none of the measured ones


def test_the_tables_and_their_definitions_are_printed(fake: Fake) -> None:
    result = bench("--requests", "3", "--users", "2", "--slo", "ttft=10s")
    assert result.exit_code == 0, result.output
    for needed in ("TTFT", "n too small", "time to first token: first chunk that holds", "share of good requests"):
        assert needed in result.stdout
    assert re.search(r"^attempted +3$", result.stdout, re.M)
    assert "--no-floor" not in result.stderr


def test_everything_is_kept(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"
    result = bench("--requests", "5", "--users", "2", "--slo", "e2e=10s", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "run.json", "summary.json", "traces.jsonl"]
    summary = json.loads((out / "summary.json").read_text("utf8"))
    assert summary == json.loads(result.stdout)
    # The raw records, scored again tomorrow, say the same.
    assert json.loads(json.dumps(summarise(load_run(out), {"e2e": 10.0}))) == summary
    page = (out / "report.html").read_text("utf8")
    assert "5 of 5 requests ended well" in page
    assert result.stderr.endswith(f"kept in {out}\n")


def test_a_key_is_kept_nowhere(fake: Fake, tmp_path: Path) -> None:
    result = run(
        "bench", URL, "--no-floor", "--requests", "1", "--out", str(tmp_path), "--json", "--api-key", "sk-secret"
    )
    assert result.exit_code == 0, result.output
    assert "sk-secret" not in result.output
    assert all("sk-secret" not in path.read_text("utf8") for path in tmp_path.iterdir())


def test_an_open_loop_sends_by_its_schedule(fake: Fake) -> None:
    record = json.loads(bench("--rate", "200", "--arrivals", "constant", "--requests", "20", "--json").stdout)
    load = {"loop": "open", "rate": 200.0, "arrivals": "constant", "seed": 0, "output_tokens": "64", "requests": 20}
    assert record["load"].items() >= load.items()
    assert record["window"]["seconds"] == pytest.approx(20 / 200)
    assert (record["requests"]["attempted"], record["requests"]["warmup"]) == (20, 4)


def test_a_sweep_keeps_each_level(fake: Fake, tmp_path: Path) -> None:
    result = bench("--sweep", "users:1..4", "--requests", "6", "--slo", "ttft=10s", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    levels = [point["level"] for point in record["points"]]
    assert record["kind"] == "users" and levels == [1, 2, 4][: len(levels)] and len(levels) >= 2
    assert [point["summary"]["load"]["seed"] for point in record["points"]] == [0, 1, 2][: len(levels)]
    for level in levels:
        assert len(load_run(tmp_path / f"level-{level:g}").measured()) == 6
    assert "The knee lies at" in (tmp_path / "report.html").read_text("utf8")
    assert json.loads((tmp_path / "summary.json").read_text("utf8")) == record
    shown = bench("--sweep", "400,800", "--requests", "6").stdout
    assert "The knee lies at" in shown and re.search(r"^400 +6 +6 ", shown, re.M)


def test_a_replay(fake: Fake, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.9985000,100,10\n2023-11-16 23:59:59.9990005,50,1\n"
        "2023-11-17 00:00:00.0000000,2000,5\n2023-11-17 00:00:00.5000001,1,20\n",
        encoding="utf-8",
    )
    record = json.loads(bench("--replay", str(trace), "--speedup", "2", "--warmup", "0", "--json").stdout)
    assert record["requests"]["attempted"] == 4
    assert record["load"]["replay"] == "azure.csv" and record["load"]["speedup"] == 2.0
    assert record["load"]["rate"] == pytest.approx(2 * 5.98205, rel=1e-5)
    assert sorted(work.output for work in fake.works) == [1, 5, 10, 20]
    assert max(work.at for work in fake.works) == pytest.approx(0.5015001 / 2)
    first = bench("--replay", str(trace), "--requests", "2", "--json", "--warmup", "0")
    assert json.loads(first.stdout)["requests"]["attempted"] == 2


def test_real_prompts_and_lengths_from_files(fake: Fake, tmp_path: Path) -> None:
    prompts, pairs = tmp_path / "prompts.txt", tmp_path / "pairs.csv"
    prompts.write_text("\n".join(f"prompt {i}" for i in range(8)) + "\n", encoding="utf-8")
    pairs.write_text("prompt,output\n3,7\n5,9\n", encoding="utf-8")
    assert bench("--prompts", str(prompts), "--requests", "6", "--warmup", "2", "--output-tokens", "9").exit_code == 0
    assert {work.prompt for work in fake.works} == {f"prompt {i}" for i in range(8)}
    assert {work.output for work in fake.works} == {9}
    fake.works.clear()
    assert bench("--lengths", str(pairs), "--requests", "4").exit_code == 0
    assert {(len(str(work.prompt).split()), work.output) for work in fake.works} == {(3, 7), (5, 9)}


# --- bench: how it ends -----------------------------------------------------------------


def test_exit_code_1_where_nothing_succeeded(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.bench.loadgen.AFTER_FAILURE_S", 0.01)
    fake.error = "http 500"
    result = bench("--requests", "2", "--users", "2", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert re.search(r"^failed: http 500 \(as asked\) +2$", result.stdout, re.M)
    assert "No request ended well" in result.stdout and (tmp_path / "traces.jsonl").exists()
    swept = bench("--sweep", "users:1,2", "--requests", "2")
    assert swept.exit_code == 1 and "no request ended well at 1" in swept.stdout


def test_exit_code_1_beyond_the_error_budget(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "summarise", summarise)

    async def late(work: WorkItem, trace: Trace) -> None:
        await asyncio.sleep(0.03)
        trace.t_sent = now()
        trace.token(now())
        trace.t_end = now()

    fake.send = late  # type: ignore[method-assign]
    result = bench("--requests", "2")
    assert result.exit_code == 1
    assert "BEYOND ITS ERROR BUDGET: send lag p99" in result.stdout


def test_the_floor_is_measured_first_and_kept(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.bench import mock as floor

    asked: list[dict[str, Any]] = []

    async def measured(**load: Any) -> floor.Floor:
        assert not fake.works
        asked.append(load)
        slow = 0.002 if load.get("streams") == 7 else 0.0002
        return floor.Floor(
            load.get("rate"), load.get("streams"), 10.0, 7, 100, slow, slow, slow, 0.0, 0.001, 0.001, 0.1, 0.0
        )

    monkeypatch.setattr(floor, "measure_floor", measured)
    good = run("bench", URL, "--users", "2", "--requests", "2", "--json")
    assert good.exit_code == 0, good.output
    assert good.stderr.splitlines()[0] == (
        "the client's own floor at 2 users, against a mock: 0.200 ms a chunk (p99 0.200 ms), "
        "send lag p99 1.00 ms, 10% of a core"
    )
    assert json.loads(good.stdout)["load"]["floor"]["overhead_mean_s"] == 0.0002
    fake.works.clear()
    bad = run("bench", URL, "--users", "7", "--requests", "7")
    assert bad.exit_code == 1
    assert "BEYOND ITS ERROR BUDGET: the floor: overhead 2.00 ms a chunk, budget 1 ms" in bad.stdout
    fake.works.clear()
    assert run("bench", URL, "--sweep", "100,300", "--requests", "2").exit_code == 0
    assert asked == [{"streams": 2}, {"streams": 7}, {"rate": 300.0}]


# --- bench: what it refuses ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--rate 2 --users 3", "--rate and --users are different loads: give one"),
        ("--rate 2 --sweep 1..4", "--sweep sets the level itself: leave --rate out"),
        ("--requests 2 --seconds 3", "--requests and --seconds each say when to end: give one"),
        ("--prompts a --lengths b", "--prompts and --lengths each say what to send"),
        ("--arrivals ramp --rate 1", "a ramp goes from --rate to --to in --seconds"),
        ("--rate 1 --to 3", "--to goes with --arrivals ramp"),
        ("--rate 1 --arrivals gamma", "--arrivals gamma needs --burstiness"),
        ("--rate 1 --burstiness 0.5", "--burstiness goes with --arrivals gamma"),
        ("--arrivals constant", "--arrivals goes with --rate"),
        ("--speedup 2", "--speedup goes with --replay"),
        ("--rate 1 --think 2", "--think goes with --users"),
        ("--rate 1 --arrivals sometimes", "arrivals 'sometimes': write constant, poisson"),
        ("--rate -1", "rate must be above 0, got -1"),
        ("--rate 0.001 --seconds 1", "no request is due within 1 s at 0.001 a second: give more --seconds"),
        ("--users 0", "--users must be above 0, got 0"),
        ("--requests 0", "--requests must be above 0, got 0"),
        ("--seconds nan", "--seconds must be above 0, got nan"),
        ("--timeout 0", "--timeout must be above 0, got 0"),
        ("--warmup -1", "--warmup must be at least 0, got -1"),
        ("--share 1.5", "--share must be above 0 and at most 1"),
        ("--sweep 4..1", "--sweep '4..1'"),
        ("--sweep things:1..4", "write rates as 1..16, or users as users:1..16"),
        ("--sweep users:1.5,2", "users are whole numbers"),
        ("--slo ttft=200", "the units are us, ms, s"),
        ("--prompt-tokens many", "lengths 'many'"),
        ("--replay nowhere.csv", "nowhere.csv"),
        ("--prompts nowhere.txt", "nowhere.txt"),
        ("--speed plain", f"--speed goes with a model in this process, not {URL}"),
        ("--endpoint chats", "endpoint 'chats': known are completions and chat"),
    ],
)
def test_mistakes_are_one_line_before_any_work(args: str, says: str) -> None:
    one_line(bench(*args.split()), says)


def test_a_models_name_takes_no_servers_options() -> None:
    one_line(run("bench", "random:tiny-gpt2", "--endpoint", "chat"), "--endpoint goes with the address of a server")


def test_few_prompts_do_not_do_for_many_levels(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\nthree\n", encoding="utf-8")
    one_line(
        bench("--sweep", "1..4", "--prompts", str(path), "--warmup", "1"), "different prompts are too few for a warm-up"
    )


def test_no_server_there_is_one_line() -> None:
    one_line(bench(), "127.0.0.1:9")


@pytest.mark.parametrize(
    ("args", "package", "extra"),
    [
        (["bench", URL, "--no-floor"], "aiohttp", "bench"),
        (["bench", URL, "--no-floor", "--out", "unused"], "matplotlib", "bench"),
        (["serve", "random:tiny-gpt2"], "fastapi", "serve"),
    ],
)
def test_a_missing_extra_is_one_line(args: list[str], package: str, extra: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; {APP} app({args!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.count("\n") == 1 and package in done.stderr
    assert re.search(rf"pip install ['\"]nanoinfer\[{extra}\]['\"]", done.stderr)
    assert list(tmp_path.iterdir()) == []


# --- for real ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mock() -> Iterator[str]:
    """A server of known timing in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "nanoinfer.bench.mock", "--port", "0", "--with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_real_server(mock: str, endpoint: str) -> None:
    args = ("--endpoint", endpoint, "--users", "3", "--requests", "6", "--output-tokens", "4", "--prompt-tokens", "7")
    record = json.loads(run("bench", mock, "--no-floor", *args, "--json").stdout)
    assert (record["requests"]["ok"], record["tokens"]["output"], record["tokens"]["prompt"]) == (6, 24, 42)
    # The mock answers after 50 ms and every 20 ms: nothing can be quicker, and busy machines are slower.
    assert record["latency"]["ttft"]["min"] >= 0.05 and record["latency"]["tpot"]["min"] > 0.015
    assert record["load"]["target"]["model"] == "mock"


def test_ctrl_c_keeps_what_was_measured(mock: str, tmp_path: Path) -> None:
    args = [
        "bench",
        mock,
        "--no-floor",
        "--users",
        "2",
        "--output-tokens",
        "2",
        "--requests",
        "100000",
        "--warmup",
        "0",
    ]
    args += ["--out", str(tmp_path), "--seed", "77"]
    with subprocess.Popen(
        [sys.executable, "-c", f"{APP} app({args!r})"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        before, deadline = len(_log(mock)), time.monotonic() + 60
        while len(_log(mock)) < before + 9 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    kept = load_run(tmp_path)
    assert kept.interrupted and sum(trace.status == "ok" for trace in kept.measured()) >= 5
    assert "Interrupted: " in out and "Traceback" not in err
    summary = json.loads((tmp_path / "summary.json").read_text("utf8"))
    assert summary["requests"]["attempted"] == summary["requests"]["ok"] and summary["requests"]["cut_short"] <= 2
    assert process.returncode == bool(summary["beyond_budget"])


def _log(mock: str) -> list[Any]:
    with urllib.request.urlopen(f"{mock}/log", timeout=10) as answer:
        return list(json.load(answer)["requests"])


def test_a_model_in_this_process() -> None:
    args = ("--speed", "plain", "--dtype", "float32", "--users", "2", "--requests", "4", "--prompt-tokens", "9")
    result = run("bench", "random:tiny-gpt2", *args, "--output-tokens", "uniform:2-5", "--json")
    record = json.loads(result.stdout)
    assert (record["requests"]["ok"], record["tokens"]["prompt"]) == (4, 36)
    assert record["load"]["target"]["model"] == "random:tiny-gpt2" and "floor" not in record["load"]
    assert "floor" not in result.stderr


# --- lens, simulate, serve ----------------------------------------------------------------


def test_lens_reads_a_file_or_a_folder(tmp_path: Path) -> None:
    from nanoinfer.bench.loadgen import save_run

    save_run(golden(), tmp_path)
    whole = json.loads(run("lens", str(tmp_path / "traces.jsonl"), "--json").stdout)
    inside = json.loads(run("lens", str(tmp_path), "--json").stdout)
    assert (whole["requests"], inside["requests"]) == (7, 6)  # a folder knows what was warm-up
    shown = run("lens", str(tmp_path)).stdout
    assert "TTFT" in shown and "vLLM" in shown and "rule" in shown


def test_lens_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    one_line(run("lens", str(tmp_path / "nowhere.jsonl")), "nowhere.jsonl")
    one_line(run("lens", str(tmp_path)), "run.json is missing")
    save_traces(tmp_path / "none.jsonl", [])
    one_line(run("lens", str(tmp_path / "none.jsonl")), "no traces")
    (tmp_path / "bad.jsonl").write_text('{"t_scheduled": 0}\n', encoding="utf-8")
    one_line(run("lens", str(tmp_path / "bad.jsonl")), "bad.jsonl, line 1: not a trace record")


SIMULATE = ("simulate", "--model", "llama-3-8b", "--gpu", "H100", "--rate", "20", "--requests", "200")


def test_simulate() -> None:
    result = run(*SIMULATE, "--slo", "ttft=500ms,tpot=50ms", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["load"]["rate_per_s"] == 20 and record["goodput"]["slo_s"] == {"ttft": 0.5, "tpot": 0.05}
    assert 0 < record["latency"]["ttft"]["median"] < record["latency"]["e2e"]["median"]
    shown = run(*SIMULATE).stdout
    assert "Simulated: llama-3-8b on H100" in shown and "TTFT" in shown


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--rate -1", "rate must be above 0, got -1.0"),
        ("--gpu H1000", "unknown device 'H1000'"),
        ("--slo ttft=5", "5 of what?"),
        ("--find", "give one (--slo ttft=200ms)"),
    ],
)
def test_simulate_refuses(args: str, says: str) -> None:
    one_line(run(*SIMULATE, *args.split()), says)


def test_serve_hands_on_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.serve import run as serving

    calls: list[Any] = []
    monkeypatch.setattr(serving, "serve", calls.append)
    args = ("--port", "0", "--queue", "9", "--timeout", "5", "--speed", "plain", "--dtype", "float32", "--name", "m")
    result = run("serve", "random:tiny-gpt2", *args, env={"NANOINFER_API_KEY": "k"})
    assert result.exit_code == 0, result.output
    (options,) = calls
    assert options == ServeOptions(
        model="random:tiny-gpt2", port=0, queue=9, timeout=5.0, speed="plain", dtype="float32", name="m", api_key="k"
    )


def test_help_is_light() -> None:
    code = (
        f"import sys; {APP}\n"
        "for name in ('serve', 'bench', 'lens', 'simulate'):\n"
        "    try: app([name, '--help'])\n    except SystemExit as error: assert error.code == 0\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'fastapi', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for option in ("--max-running", "--sweep", "--slo", "--token-budget"):
        assert option in done.stdout
