"""``nanoinfer generate`` and ``nanoinfer chat``.

The model's text goes to standard output and everything else to standard error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from nanoinfer.cli.options import Json, command
from nanoinfer.errors import ModelError, RequestError, TokenizerError
from nanoinfer.log import say
from nanoinfer.option_types import MaxTokens, Temperature
from nanoinfer.reply import GenerateOptions, ReplyOptions, TopP, completion_record, summary_line
from nanoinfer.show.text import emit

if TYPE_CHECKING:
    from nanoinfer.engines.engine import Engine
    from nanoinfer.sampling.params import SamplingParams

commands = typer.Typer()


@command(commands, GenerateOptions)
def generate(options: GenerateOptions, as_json: Json = False) -> None:
    """Continue a text: the continuation to standard output, its figures to standard error."""
    options = replace(options, prompt=read_prompt(options.prompt))
    params = options.sampling_params()
    if (options.tp, options.pp) != (1, 1):
        from nanoinfer.parallel import generate as ranks

        record = ranks.generate(options, prints=not as_json)
        if as_json:
            emit(record)
        else:
            say(ranks.figures_line(record))
        return
    engine = options.load()
    if as_json:
        (completion,) = engine.generate(options.prompt, params)
        emit(completion_record(engine, completion, params))
    else:
        stream(engine, options.prompt, params)


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ReplyOptions):
    """As of one reply, with the defaults of a conversation."""

    system: Annotated[str | None, typer.Option(help="System message before the first turn.")] = None
    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.7
    top_p: TopP = 0.9


@command(commands, ChatOptions)
def chat(options: ChatOptions) -> None:
    """Talk with a model. One message a line; Ctrl-D or Ctrl-C ends it."""
    params = options.sampling_params()
    converse(options.load(), params, options.system)


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for ``-`` (less the newline that ends it)."""
    if prompt == "-":
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError:
            raise RequestError("the prompt on standard input is not UTF-8 text") from None
    if not prompt:
        raise RequestError("the prompt is empty: give --prompt TEXT, or --prompt - to read standard input")
    return prompt


def stream(engine: Engine, prompt: str | list[int], params: SamplingParams) -> str:
    """Print a reply as it comes and its figures after it; return its text."""

    generation = engine.stream(prompt, params)
    for event in generation:
        print(event.text, end="", flush=True)
    print(flush=True)
    (completion,) = generation.completions
    say(summary_line(completion.trace, completion.finish_reason))
    return completion.text


def fit_history(engine: Engine, messages: list[dict[str, str]], max_tokens: int) -> list[int]:
    """Ids of the conversation, after dropping its oldest turns (never the system message) from ``messages`` to fit.

    Raises :class:`RequestError` where the last message alone does not fit, and leaves ``messages`` as they were.
    """
    if engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise ModelError(
            f"{engine.loaded.name} has no chat template; use `nanoinfer generate`, or chat with smollm2-135m"
        )
    room, first = engine.config.context - max_tokens, int(messages[0]["role"] == "system")
    if room < 1:
        raise RequestError(
            f"--max-tokens {max_tokens} leaves no room for a message: the context is {engine.config.context} tokens"
        )
    kept, ids = list(messages), engine.tokenizer.encode_chat(messages)
    while len(ids) > room:
        if len(kept) - first < 2:
            raise RequestError(
                f"the message takes {len(ids)} tokens and only {room} fit with --max-tokens {max_tokens}"
            )
        del kept[first : first + 2]  # a question and its answer
        ids = engine.tokenizer.encode_chat(kept)
    messages[:] = kept  # only now: a message that is refused must not cost the turns before it
    return ids


def converse(engine: Engine, params: SamplingParams, system: str | None = None) -> None:
    """Answer line after line until input ends or Ctrl-C; the history is kept within the context."""
    messages = [{"role": "system", "content": system}] if system else []
    # What cannot work is refused before the first question is typed.
    fit_history(engine, [*messages, {"role": "user", "content": "hello"}], params.max_tokens)
    say(f"{engine.loaded.name} is ready: one message a line, Ctrl-D ends.")
    with contextlib.suppress(KeyboardInterrupt):
        for text in input_lines():
            messages.append({"role": "user", "content": text})
            try:
                reply = stream(engine, fit_history(engine, messages, params.max_tokens), params)
            except (RequestError, TokenizerError) as error:
                say(f"nanoinfer: {error}")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": reply})
    say("")


def input_lines() -> Iterator[str]:
    """Lines that are not blank, from standard input until it ends."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if text := line.strip():
            yield text
