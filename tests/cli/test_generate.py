"""The command line, in process with a runner and for real in a subprocess."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import nanoinfer
from nanoinfer.cli import app as cli
from nanoinfer.cli import generate
from nanoinfer.errors import ChapterError, ModelError, NanoinferError, RequestError, TokenizerError

TINY = "random:tiny-gpt2"


def run(*args: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli.app, list(args), input=stdin)


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "nanoinfer", *args]


def spawn(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=120, **more
    )


def fails(result: Any, word: str, code: int = 1) -> None:
    """One line on standard error that holds the word, nothing on standard output, no traceback."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("nanoinfer: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr


# --- generate -----------------------------------------------------------------------


def test_generate_puts_text_out_and_figures_aside() -> None:
    result = run("generate", TINY, "--prompt", "hello", "--max-tokens", "6")
    assert result.exit_code == 0
    done = nanoinfer.load(TINY).generate("hello", nanoinfer.SamplingParams(max_tokens=6))[0]
    assert result.stdout == done.text + "\n"
    assert "5 prompt + 6 new tokens | TTFT " in result.stderr
    assert "tok/s (1/TPOT)" in result.stderr
    assert result.stderr.endswith("finish: length\n")


def test_one_token_has_no_decode_rate() -> None:
    assert "decode n/a" in run("generate", TINY, "--prompt", "hi", "--max-tokens", "1").stderr
    assert "TTFT n/a" in run("generate", TINY, "--prompt", "hi", "--max-tokens", "0").stderr


def test_generate_json() -> None:
    args = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--seed", "7", "--stop", "@@"]
    result = run("generate", TINY, "--prompt", "hello", "--max-tokens", "5", *args, "--engine", "naive", "--json")
    record = json.loads(result.stdout)
    assert result.stderr == ""
    assert (record["model"], record["engine"], record["device"], record["dtype"]) == (TINY, "naive", "cpu", "float32")
    assert record["prompt_tokens"] == 5
    assert record["output_tokens"] == len(record["token_ids"]) == 5
    assert record["params"]["top_k"] == 50 and record["params"]["stop"] == ["@@"]
    assert 0 < record["seconds"]["ttft"] < record["seconds"]["e2e"]
    assert set(record["definitions"]) == {"ttft", "tpot", "e2e"}
    assert len(record["trace"]["chunks"]) == 5
    again = run("generate", TINY, "--prompt", "hello", "--max-tokens", "5", *args, "--engine", "cached", "--json")
    assert json.loads(again.stdout)["token_ids"] == record["token_ids"]  # the same seed, the same words


def test_every_engine_runs_without_optimizations() -> None:
    plain = [run("generate", TINY, "--prompt", "hello", "--max-tokens", "4", "--speed", "plain")]
    plain += [
        run("generate", TINY, "-p", "hello", "--max-tokens", "4", "--engine", e, "--speed", "plain")
        for e in ("naive", "continuous")
    ]
    assert {(result.exit_code, result.stdout) for result in plain} == {(0, plain[0].stdout)}
    fails(run("generate", TINY, "--prompt", "x", "--speed", "fuse"), "engine 'cached' has no option 'speed'")
    fails(run("generate", TINY, "--prompt", "x", "--speed", "plane"), "plain")


def test_prompt_from_standard_input() -> None:
    piped = run("generate", TINY, "--prompt", "-", "--max-tokens", "4", stdin="hello\n")
    assert piped.exit_code == 0
    assert piped.stdout == run("generate", TINY, "--prompt", "hello", "--max-tokens", "4").stdout


@pytest.mark.parametrize("text", ["", "\n"])
def test_empty_prompt(text: str) -> None:
    fails(run("generate", TINY, "--prompt", "-", stdin=text), "prompt is empty")
    fails(run("generate", TINY, "--prompt", ""), "prompt is empty")


def test_mistakes_are_one_line() -> None:
    fails(run("generate", TINY, "--prompt", "x" * 129), "context is 128")
    fails(run("generate", "random:tiny-gtp2", "--prompt", "x"), "tiny-gpt2")
    fails(run("generate", TINY, "--prompt", "x", "--max-tokens", "-1"), "max_tokens")
    fails(run("generate", TINY, "--prompt", "x", "--temperature", "-1"), "temperature")
    fails(run("generate", TINY, "--prompt", "x", "--temperature", "nan"), "temperature")
    fails(run("generate", TINY, "--prompt", "x", "--stop", ""), "stop")
    fails(run("generate", TINY, "--prompt", "x", "--engine", "cachd"), "cached")
    fails(run("generate", TINY, "--prompt", "x", "--device", "abacus"), "abacus")
    fails(run("generate", TINY, "--prompt", "x", "--dtype", "float3"), "float3")
    fails(run("generate", "nowhere/nothing.gguf", "--prompt", "x"), "nothing.gguf")


def test_usage_errors_exit_with_2() -> None:
    assert run("generate", TINY).exit_code == 2
    assert run("generate", TINY, "--prompt", "x", "--max-tokens", "ten").exit_code == 2
    assert run("genrate").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (NanoinferError("two\nlines"), 1, "nanoinfer: two lines\n"),
        (
            OSError(28, "No space left on device", "weights.part"),
            1,
            "nanoinfer: No space left on device: weights.part\n",
        ),
        (MemoryError(), 1, "nanoinfer: out of memory: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "nanoinfer: out of memory: "),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_becomes_of_errors(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("nanoinfer.engines.load.load_model", broken)
    result = run("generate", TINY, "--prompt", "x")
    assert result.exit_code == code
    assert result.stderr.startswith(line)
    assert "Traceback" not in result.output


def test_our_own_mistakes_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoinfer.engines.load.load_model", lambda *a, **k: 1 / 0)
    assert isinstance(run("generate", TINY, "--prompt", "x").exception, ZeroDivisionError)


# --- in a process of its own ----------------------------------------------------------


def test_help_and_version_are_quick_and_bring_no_torch() -> None:
    code = (
        "import sys, time\nstart = time.perf_counter()\nfrom nanoinfer.cli.app import app\n"
        "for option in ('--help', '--version'):\n"
        "    try: app([option])\n    except SystemExit as error: code = error.code\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, code, time.perf_counter() - start < 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    # Far below a second on an idle machine; torch alone takes longer.
    assert done.stdout.endswith(f"nanoinfer {nanoinfer.__version__}\nFalse False 0 True\n")


def test_a_real_process_generates_and_fails_cleanly() -> None:
    good = spawn("generate", TINY, "--prompt", "-", "--max-tokens", "3", input="héllo")
    assert good.returncode == 0
    assert "6 prompt + 3 new tokens" in good.stderr
    bad = spawn("lens", "no-such-file")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("nanoinfer: ") and bad.stderr.count("\n") == 1


def test_any_text_prints_in_any_locale() -> None:
    args = ["generate", TINY, "--prompt", "x", "--max-tokens", "40", "--temperature", "2", "--seed", "1"]
    result = CliRunner(charset="ascii").invoke(cli.app, args)
    assert result.exit_code == 0 and "?" in result.stdout, result.output


def test_input_that_is_not_text() -> None:
    result = CliRunner().invoke(cli.app, ["generate", TINY, "--prompt", "-"], input=b"\xff\xfe\x00")
    assert result.exit_code == 1
    assert result.stderr == "nanoinfer: the prompt on standard input is not UTF-8 text\n"


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        command("gpus"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    with subprocess.Popen(
        command("generate", TINY, "--prompt", "-"), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        _until_reading(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert b"Traceback" not in process.stderr.read()


def _until_reading(pid: int) -> None:
    """Wait until the process sleeps in a read of its standard input (or long enough where /proc does not say)."""
    stat = Path(f"/proc/{pid}/syscall")
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            if stat.read_text().startswith("0 0x0 "):  # read(0, ...) on x86-64
                return
        except OSError:
            pass
        time.sleep(0.02)


# --- chat ---------------------------------------------------------------------------


class FakeTokenizer:
    chat_template: str | None = "{{ messages }}"

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [1] * sum(len(message["content"]) for message in messages)


def fake_engine(context: int = 20) -> Any:
    return SimpleNamespace(
        tokenizer=FakeTokenizer(), config=SimpleNamespace(context=context), loaded=SimpleNamespace(name="fake")
    )


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def test_history_keeps_within_the_context_and_drops_the_oldest_turn() -> None:
    messages = [message("user", "a" * 6), message("assistant", "b" * 6), message("user", "c" * 5)]
    assert len(generate.fit_history(fake_engine(), messages, 3)) == 17  # fits exactly
    assert len(messages) == 3
    assert len(generate.fit_history(fake_engine(), messages, 4)) == 5
    assert messages == [message("user", "c" * 5)]


def test_history_keeps_the_system_message() -> None:
    messages = [message("system", "s" * 4), *[message(r, "x" * 4) for r in ("user", "assistant", "user")]]
    generate.fit_history(fake_engine(), messages, 10)
    assert [m["role"] for m in messages] == ["system", "user"]


def test_an_answer_that_leaves_no_room() -> None:
    with pytest.raises(RequestError, match="--max-tokens 20 leaves no room for a message: the context is 20 tokens"):
        generate.fit_history(fake_engine(), [message("user", "x")], 20)


def test_a_message_that_cannot_fit_is_refused() -> None:
    with pytest.raises(RequestError, match="takes 21 tokens and only 10 fit"):
        generate.fit_history(fake_engine(), [message("user", "x" * 21)], 10)


def test_chat_needs_a_template() -> None:
    fails(run("chat", TINY, stdin="hello\n"), "no chat template")
    engine = fake_engine()
    engine.tokenizer = None
    with pytest.raises(ModelError, match="no chat template"):
        generate.fit_history(engine, [message("user", "x")], 1)


def test_chat_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def reply(engine: Any, ids: list[int], params: Any) -> str:
        asked.append(len(ids))
        print("yes")
        return "yes"

    monkeypatch.setattr(nanoinfer, "load", lambda *a, **k: fake_engine(), raising=False)
    monkeypatch.setattr(generate, "stream", reply)
    result = run("chat", "fake", "--max-tokens", "4", stdin="hello\n\n" + "z" * 30 + "\nagain\n")
    assert result.exit_code == 0
    assert result.stdout == "yes\nyes\n"
    assert asked == [5, 13]  # the refused message is forgotten, the first turn is not
    assert "takes 30 tokens and only 16 fit with --max-tokens 4" in result.stderr


def test_a_line_that_is_not_text_ends_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(engine: Any, ids: list[int], params: Any) -> str:
        print("yes")
        return "yes"

    engine = fake_engine()
    plain = engine.tokenizer.encode_chat

    def encode(messages: list[dict[str, str]]) -> list[int]:
        if "bad" in messages[-1]["content"]:
            raise TokenizerError("the text is not valid Unicode")
        return list(plain(messages))

    engine.tokenizer.encode_chat = encode
    monkeypatch.setattr(nanoinfer, "load", lambda *a, **k: engine, raising=False)
    monkeypatch.setattr(generate, "stream", reply)
    result = run("chat", "fake", "--max-tokens", "4", stdin="bad\ngood\n")
    assert (result.exit_code, result.stdout) == (0, "yes\n")
    assert "nanoinfer: the text is not valid Unicode\n" in result.stderr


def test_a_warning_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back at the end
    monkeypatch.setattr(cli, "app", lambda **options: None)
    cli.main()
    assert warnings.formatwarning("two\nlines", UserWarning, "file.py", 1) == "warning: two lines\n"


def test_ctrl_c_ends_a_chat_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(nanoinfer, "load", lambda *a, **k: fake_engine(), raising=False)
    monkeypatch.setattr(generate, "stream", interrupted)
    result = run("chat", "fake", "--max-tokens", "4", stdin="hello\n")
    assert result.exit_code == 0
    assert "Traceback" not in result.output


# --- models, run, book ----------------------------------------------------------------


def test_models_lists_every_name() -> None:
    table, rows = run("models").stdout, json.loads(run("models", "--json").stdout)
    names = [row["name"] for row in rows]
    assert {"smollm2-135m", "gpt2", "gpt2-xl", TINY} <= set(names)
    assert all(name in table for name in names)
    assert "134,515,008" in table
    assert next(row for row in rows if row["name"] == TINY)["on_disk"] is True


@pytest.mark.parametrize(
    "pairs", [["-p", "SEED", "7", "-p", "LIST=a=b"], ["--parameter", "SEED=7", "-p", "LIST", "a=b"]]
)
def test_run_hands_on_what_was_asked(monkeypatch: pytest.MonkeyPatch, pairs: list[str]) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("nanoinfer.book.execute.run_chapters", lambda *args: calls.append(args))
    result = run("run", "1", *pairs, "05_kv_cache", "--profile", "smoke", "--fresh")
    assert result.exit_code == 0, result.output
    assert calls == [(Path.cwd(), ["1", "05_kv_cache"], "smoke", {"SEED": "7", "LIST": "a=b"}, True)]
    assert run("run").exit_code == 0
    assert calls[1] == (Path.cwd(), None, "laptop", {}, False)


@pytest.mark.parametrize("pair", [["-p", "SEED"], ["-p"], ["-p", "=7"]])
def test_run_refuses_half_a_parameter(pair: list[str]) -> None:
    assert run("run", *pair).exit_code == 2


def test_book_runs_then_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("nanoinfer.book.execute.run_chapters", lambda *args: calls.append(f"run {args[2]}"))
    monkeypatch.setattr("nanoinfer.book.build.build_book", lambda root: calls.append("build"))
    assert run("book", "--profile", "smoke").exit_code == 0
    assert calls == ["run smoke", "build"]


def test_a_failed_chapter_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ChapterError("01_naive failed in cell 3")

    monkeypatch.setattr("nanoinfer.book.execute.run_chapters", broken)
    monkeypatch.setattr("nanoinfer.book.build.build_book", lambda root: pytest.fail("built all the same"))
    fails(run("book"), "cell 3")
