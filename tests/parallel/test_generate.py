"""``nanoinfer generate --tp`` and ``--pp``: several processes print what one does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from nanoinfer.cli import app as cli
from nanoinfer.configs.config import SHAPES
from nanoinfer.errors import ModelError
from nanoinfer.theory.communication import sent_bytes, tensor_parallel
from tests.parallel.rank_results import REPLIES, answers, reply_task

TINY = "random:tiny-llama"
SAMPLED = ["--temperature", "1.2", "--top-p", "0.9", "--seed", "7"]


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["generate", *args])


def record(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_tensor_parallel_prints_what_one_process_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """The real model, which two ranks cannot share evenly."""
    args = ["smollm2-135m", "--prompt", "La capitale de la France est", "--max-tokens", "12"]
    alone = run(*args)
    capfd.readouterr()
    result = run(*args, "--tp", "2")
    assert result.exit_code == 0, result.output
    assert capfd.readouterr().out == alone.stdout  # the ranks write past the runner
    first, second = result.stderr.splitlines()
    assert first == (
        "nanoinfer: 2 ranks share 9 query heads and 3 KV heads unevenly, and the largest share decides the speed"
    )
    reduces = 61 * 576 * 4  # two a layer and one after the embedding: of two ranks each sends as much as a message
    logits = 49_152 // 2 * 4
    each = 2 * (reduces + logits) / 1000
    assert re.search(r"\d prompt \+ 12 new tokens \| TTFT .* \| finish: length \|", second)
    assert second.endswith(f"| 2 ranks, tensor parallel: {each:.1f} kB sent a token, by all together")


def record_of_ranks(split: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of one process and of two ranks, which were started for all tests."""

    def launched(task: str, ranks: int, options: dict[str, Any], **more: Any) -> list[Any]:
        assert (task, ranks, more["device"]) == ("nanoinfer.parallel.generate:reply", 2, "cpu")
        assert json.loads(json.dumps(options)) == json.loads(json.dumps(reply_task(split)))
        return [replies[split] for replies in answers(2, "replies")]

    monkeypatch.setattr("nanoinfer.parallel.generate.launch", launched)
    args = [TINY, "--prompt", "hello", "--max-tokens", "9", "--engine", REPLIES[split].engine, *SAMPLED]
    return record(*args), record(*args, f"--{split}", "2")


def test_tensor_parallel_record(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, sharded = record_of_ranks("tp", monkeypatch)
    parallel = sharded.pop("parallel")
    for key in ("token_ids", "text", "engine", "model", "source", "finish_reason", "prompt_tokens", "params"):
        assert sharded[key] == alone[key]
    assert set(sharded) == set(alone)
    prompt, token = (tensor_parallel(SHAPES["tiny-llama"], n, 2, 4, 1) for n in (5, 1))
    assert (parallel["split"], parallel["ranks"]) == ("tensor parallel", 2)
    assert parallel["sent_bytes"] == {"prompt": [sent_bytes(prompt)] * 2, "tokens": [8 * sent_bytes(token)] * 2}
    assert parallel["sent_bytes_per_token"] == 2 * sent_bytes(token)
    for phase, passes, of in (("prompt", 1, prompt), ("tokens", 8, token)):
        for part in of:
            call = parallel["rank_0"][phase].pop(part.kind)
            assert (call["calls"], call["sent_bytes"]) == (passes * part.calls, passes * part.sent)
            assert call["seconds"] > 0
        assert parallel["rank_0"][phase] == {}


def test_pipeline_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, sharded = record_of_ranks("pp", monkeypatch)
    assert sharded["token_ids"] == alone["token_ids"]
    parallel = sharded["parallel"]
    assert (parallel["split"], parallel["ranks"], sharded["engine"]) == ("pipeline parallel", 2, "pipeline")
    hidden, chosen = 4 * SHAPES["tiny-llama"].d_model, 8
    assert parallel["sent_bytes"] == {"prompt": [5 * hidden, chosen], "tokens": [8 * hidden, 8 * chosen]}


def test_without_a_seed_one_is_drawn_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []

    def launched(task: str, ranks: int, options: dict[str, Any], **more: Any) -> None:
        seeds.append(options["params"]["seed"])
        raise ModelError("enough")

    monkeypatch.setattr("nanoinfer.parallel.generate.launch", launched)
    for seed in ([], [], ["--seed", "0"]):
        assert run(TINY, "--prompt", "x", "--temperature", "1", "--tp", "2", *seed).stderr == "nanoinfer: enough\n"
    assert seeds[0] != seeds[1] and seeds[2] == 0
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_mistakes_are_one_line() -> None:
    for words, args in {
        "--tp and --pp do not go together": ["--tp", "2", "--pp", "2"],
        "--tp must be at least 1, got 0": ["--tp", "0"],
        "--pp must be at least 1, got -2": ["--pp", "-2"],
        "--speed does not go with --tp": ["--tp", "2", "--speed", "kernel"],
        "no engine 'auto' for several ranks": ["--tp", "2", "--engine", "auto"],
        "--pp runs the cached engine over stages, not 'naive'": ["--pp", "2", "--engine", "naive"],
        "unknown device 'abacus'": ["--tp", "2", "--device", "abacus"],
        "ranks must be 1 to 64, got 65": ["--tp", "65"],
    }.items():
        result = run(TINY, "--prompt", "x", *args)
        assert (result.exit_code, result.stdout) == (1, ""), words
        assert result.stderr.startswith("nanoinfer: ") and words in result.stderr and result.stderr.count("\n") == 1
    unknown = run("random:tiny-lama", "--prompt", "x", "--tp", "2")
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "tiny-llama" in unknown.stderr


@pytest.mark.slow
def test_a_mistake_that_ranks_find_is_one_line() -> None:
    result = run(TINY, "--prompt", "x", "--tp", "3")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "tp 3 does not divide 4 query heads" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ranks_print_and_ctrl_c_ends_all() -> None:
    command = [sys.executable, "-m", "nanoinfer", "generate", TINY, "--prompt", "x", "--max-tokens", "200", "--tp", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)  # the ranks are at work
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        process.stdout.read()  # ends only when no process is left that could write
        assert process.stderr.read() == b""
