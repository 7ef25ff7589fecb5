"""``nanoinfer generate`` and ``nanoinfer chat``.

The model's text goes to standard output and everything else to standard error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoinfer.cli.options import Device, Dtype, Json, Model
from nanoinfer.errors import ModelError, RequestError, TokenizerError
from nanoinfer.log import say
from nanoinfer.show.text import emit

if TYPE_CHECKING:
    from nanoinfer.engines.engine import Engine
    from nanoinfer.sampling.params import SamplingParams

commands = typer.Typer()

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass; 1 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling, and of random weights.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")]
EngineName = Annotated[str, typer.Option("--engine", help="naive, cached, batched, continuous, speculative or auto.")]
SpeedWords = Annotated[
    str | None, typer.Option("--speed", help="Such as kernel,int8 or fuse,pack (see `Optimizations`).")
]


def _params(
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingParams:
    from nanoinfer import SamplingParams

    return SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed=seed, stop=tuple(stop or ()))


def _speed(words: str | None) -> dict[str, Any]:
    """An engine's option, where it was asked for."""
    from nanoinfer.optimize.options import Optimizations

    return {} if words is None else {"speed": Optimizations.parse(words)}


@commands.command()
def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to go on from; - reads standard input.")],
    model: Model = "smollm2-135m",
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    engine: EngineName = "cached",
    speed: SpeedWords = None,
    tp: Annotated[int, typer.Option(help="Processes that share every layer (tensor parallel).")] = 1,
    pp: Annotated[int, typer.Option(help="Processes that have some of the layers each (pipeline parallel).")] = 1,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Continue a text: the continuation to standard output, its figures to standard error."""
    text = read_prompt(prompt)
    params = _params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    if (tp, pp) != (1, 1):
        from nanoinfer.parallel import generate as ranks

        record = ranks.generate(
            model,
            text,
            params,
            tp=tp,
            pp=pp,
            engine=engine,
            speed=speed,
            device=device,
            dtype=dtype,
            seed=seed or 0,
            prints=not as_json,
        )
        if as_json:
            emit(record)
        else:
            say(ranks.figures_line(record))
        return
    from nanoinfer import load

    ready = load(model, engine, device=device, dtype=dtype, seed=seed or 0, **_speed(speed))
    if as_json:
        emit(reply_record(ready, text, params))
    else:
        stream(ready, text, params)


@commands.command()
def chat(
    model: Model = "smollm2-135m",
    system: Annotated[str | None, typer.Option(help="What the model is told about itself first.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.9,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    engine: EngineName = "cached",
    speed: SpeedWords = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Talk with a model. One message a line; Ctrl-D or Ctrl-C ends it."""
    from nanoinfer import load

    params = _params(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    ready = load(model, engine, device=device, dtype=dtype, seed=seed or 0, **_speed(speed))
    converse(ready, params, system)


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
    from nanoinfer.engines.record import summary_line

    generation = engine.stream(prompt, params)
    for event in generation:
        print(event.text, end="", flush=True)
    print(flush=True)
    (done,) = generation.completions
    say(summary_line(done.trace, done.finish_reason))
    return done.text


def reply_record(engine: Engine, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """A reply as data: text, ids, times by definition, and what it ran on."""
    from nanoinfer.engines.record import completion_record

    (done,) = engine.generate(prompt, params)
    return completion_record(engine, done, params)


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
                f"the message takes {len(ids)} tokens and only {room} fit beside --max-tokens {max_tokens}"
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
        for text in lines():
            messages.append({"role": "user", "content": text})
            try:
                reply = stream(engine, fit_history(engine, messages, params.max_tokens), params)
            except (RequestError, TokenizerError) as error:
                say(f"nanoinfer: {error}")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": reply})
    say("")


def lines() -> Iterable[str]:
    """Lines that hold something, from standard input until it ends."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if text := line.strip():
            yield text
