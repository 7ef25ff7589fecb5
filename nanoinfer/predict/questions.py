"""Which question decides how a model is to be spread, and what the numbers answer to it.

Five of them settle most deployments: one large model or many small ones? is it weights or KV cache that memory is
short of? lower latency, higher throughput, or both? do requests share long prefixes? does one device hold the model?
The second and the last are arithmetic. The others only who asks can answer, so an answer that was not given is not
guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError, nearest
from nanoinfer.predict.choices import Choice, choices
from nanoinfer.theory.capacity import Bytes
from nanoinfer.theory.parameters import check_sizes
from nanoinfer.theory.ragged import mixed_step
from nanoinfer.theory.roofline import Machine
from nanoinfer.theory.split import Split, memory

QUESTIONS: Final = (
    "one large model or many small ones?",
    "is memory short of room for weights, or for the KV cache?",
    "lower latency, higher throughput, or both?",
    "are requests independent, or do they share long prefixes?",
    "does one device hold the model, or must it be split?",
)
WANTS: Final = ("latency", "throughput", "both")
#: Splits of as many devices that are laid side by side, beside the one that was asked for.
MOST_SHOWN: Final = 6
NOT_GIVEN: Final = ("--models", "", "--want", "--shared-prefix", "")


@dataclass(frozen=True)
class Asked:
    """What only who asks can know; ``None`` is not given.

    Attributes:
        want: ``latency``, ``throughput`` or ``both``.
        shared_prefix: tokens with which all prompts begin.
        models: how many models of this size are to be served.
    """

    want: str | None = None
    shared_prefix: int | None = None
    models: int | None = None

    def check(self, context: int) -> None:
        """Raise :class:`RequestError` for a wish that is none of those, or a prefix longer than the prompt."""
        if self.want is not None and self.want not in WANTS:
            raise RequestError(f"--want {self.want}: {nearest(self.want, WANTS)}")
        if self.models is not None:
            check_sizes(models=self.models)
        if self.shared_prefix is not None and not 0 <= self.shared_prefix < context:
            raise RequestError(
                f"--shared-prefix {self.shared_prefix}: a prefix has 0 tokens or more and is shorter than the prompt "
                f"({context})"
            )


@dataclass(frozen=True)
class _Case:
    """All that the answers need. ``longest`` is what a row holds at its end."""

    config: ModelConfig
    machine: Machine
    memory_bytes: float
    batch: int
    context: int
    longest: int
    asked: Asked

    @property
    def one(self) -> Bytes:
        """Bytes of one device with one row."""
        return memory(self.config, Split(), 1, self.longest, self.machine.dtype)

    @property
    def all_rows(self) -> Bytes:
        """Bytes of one device with all rows of a replica."""
        return memory(self.config, Split(), self.batch, self.longest, self.machine.dtype)


def answer(
    config: ModelConfig,
    machine: Machine,
    memory_bytes: float,
    split: Split,
    batch: int,
    context: int,
    longest: int,
    asked: Asked,
) -> dict[str, Any]:
    """The five answers, which of them decides and why, and what it suggests; for the record of ``predict``.

    Args:
        config: the model.
        machine: one device, with its links.
        memory_bytes: of one device.
        split: as it was asked for; others of as many devices are weighed against it.
        batch: rows of each replica.
        context: tokens of each prompt.
        longest: tokens that a row holds in the end.
        asked: what was said.
    """
    case = _Case(config, machine, memory_bytes, batch, context, longest, asked)
    answers = (_models(case), _memory(case), asked.want, _prefix(case), _holds(case))
    number, reason = _decides(case, answers)
    order = asked.want or ("smallest" if number in (2, 5) and not _fits(case) else "latency")
    found = choices(config, machine, memory_bytes, split.devices, batch * split.replicas, context, longest, order)
    return {
        "answers": [
            {
                "question": i + 1,
                "asks": QUESTIONS[i],
                "answer": said,
                "from": "the numbers" if i in (1, 4) else None if said is None else "given",
                "give": NOT_GIVEN[i] if said is None else None,
            }
            for i, said in enumerate(answers)
        ],
        "decides": number,
        "why": reason,
        "suggestion": _suggestion(case, number, found),
        "choices": [
            {**choice.record(), "as_asked": choice.split == split}
            for i, choice in enumerate(found)
            if i < MOST_SHOWN or choice.split == split
        ],
    }


def _fits(case: _Case) -> bool:
    return case.all_rows.total <= case.memory_bytes


# --- the answers ----------------------------------------------------------------------


def _models(case: _Case) -> str | None:
    n = case.asked.models
    if n is None:
        return None
    return (
        "one"
        if n == 1
        else f"{n}, of which one device holds the weights of {int(case.memory_bytes // case.one.weights)}"
    )


def _memory(case: _Case) -> str:
    weights, kv = case.all_rows.weights, case.all_rows.kv
    larger = "weights" if weights >= kv else "the KV cache"
    rows = f"{case.batch:,} row{'s' if case.batch > 1 else ''} of {case.longest:,} tokens"
    return f"{larger}: {weights / 1e9:.1f} GB of weights, {kv / 1e9:.1f} GB of cache for {rows}"


def _prefix(case: _Case) -> str | None:
    shared = case.asked.shared_prefix
    if shared is None:
        return None
    return f"{shared:,} of {case.context:,} tokens are shared" if shared else "independent"


def _holds(case: _Case) -> str:
    held = "holds" if case.one.total <= case.memory_bytes else "does not hold"
    return (
        f"one device ({case.memory_bytes / 1e9:.0f} GB) {held} the weights and one row, {case.one.total / 1e9:.1f} GB"
    )


# --- which of them decides --------------------------------------------------------------


def _decides(case: _Case, answers: tuple[str | None, ...]) -> tuple[int, str]:
    """The number of the first question whose answer leaves no choice, and why."""
    gb, one, every = case.memory_bytes / 1e9, case.one, case.all_rows
    if one.total > case.memory_bytes:
        return 5, (
            f"One device has {gb:.0f} GB and the model needs {one.total / 1e9:.1f} GB with a single row: it must be "
            "split, whatever else is wanted."
        )
    if every.total > case.memory_bytes:
        return 2, (
            f"One device holds the weights ({every.weights / 1e9:.1f} GB) but not the cache of all rows beside them "
            f"({every.kv / 1e9:.1f} GB): the KV cache asks for more devices, or for fewer rows on each."
        )
    if (case.asked.models or 1) > 1:
        return 1, f"Each of {case.asked.models} models fits one device: they are to be placed, not split."
    shared = case.asked.shared_prefix or 0
    if 2 * shared >= case.context:
        alone = mixed_step(case.config, case.machine, [(0, case.context)], 1).seconds
        rest = mixed_step(case.config, case.machine, [(shared, case.context - shared)], 1).seconds
        return 4, (
            f"The shared prefix is most of the prompt: found in a cache, it leaves {1e3 * rest:.3g} of "
            f"{1e3 * alone:.3g} ms of prefill, more than a split would save."
        )
    if case.asked.want is not None:
        return 3, f"One device holds the model and all rows, so what is wanted decides: {case.asked.want}."
    return 5, "One device holds the model and all rows, so nothing must be split; whether to is question 3 (--want)."


def _suggestion(case: _Case, number: int, found: list[Choice]) -> str:
    if number == 1:
        return "A device for each model, or several to a device where they are idle; no split."
    if number == 4:
        return "Replicas with a prefix cache each, and requests with one beginning sent to the same replica."
    if number == 5 and _fits(case) and case.asked.want is None:
        return "Replicas: as many as the load asks for, each a device of its own."
    best = found[0]
    figures = f"{1e3 * best.decode_s:.3g} ms a token, up to {best.tokens_per_s:,.0f} tokens/s"
    return f"Of {best.split.devices} device{'s' if best.split.devices > 1 else ''}: {best.split}, {figures}."
