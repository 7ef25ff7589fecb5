"""The numbers that a chapter's prose quotes, and where they came from.

No number in prose is typed by hand: it would go stale on the next machine. A smoke run (a tiny random model) is no
measurement, so no sentence can show its numbers as one.

    results = Results("05_kv_cache", profile=PROFILE, model=MODEL, device=DEVICE, dtype=DTYPE, seed=SEED)
    results.add("rate", timing.samples, unit="tok/s", definition="output tokens / decode seconds")
    results.say("The cache takes {cache} a token; decoding ran at {rate:±}.", cache=exact(46_080, "B"))

The last line is a cell's last expression: it keeps what it is given, and shows the sentence.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any, Self

from nanoinfer.errors import ChapterError, NanoinferError, nearest
from nanoinfer.measure.clock import Paired, paired
from nanoinfer.measure.environment import OtherPrograms
from nanoinfer.show.outputs import Html, Prose, table
from nanoinfer.show.text import DASH, format_number
from nanoinfer.store import write_whole

PLACEHOLDER = "(not measured in a smoke run)"
#: Cores that other programs keep busy before a page says so.
BUSY = 0.2
SPACE = "\u00a0"  # a number and its unit stay on one line
Value = float | int | str
SETTINGS = ("chapter", "profile", "model", "device", "dtype", "seed")


@dataclass(frozen=True)
class Number:
    """One named result. ``value`` is the median of the samples where it was measured."""

    value: Value
    unit: str = ""
    definition: str = ""
    measured: bool = True
    samples: tuple[float, ...] = ()

    def __format__(self, spec: str) -> str:
        """``""`` to the digits that the spread bears; ``".1f"`` as Python does; ``"±"`` with the samples' range."""
        if isinstance(self.value, str):
            return format(self.value, spec)
        spread, spec = spec.startswith("±"), spec.removeprefix("±")
        unit = self.unit if self.unit in ("", "x", "×", "%") else SPACE + self.unit
        text = self._digits(self.value, spec) + unit
        if not spread or not self.samples:
            return text
        if len(self.samples) == 1:
            return f"{text} (one run)"
        low, high = self._digits(min(self.samples), spec), self._digits(max(self.samples), spec)
        return f"{text} ({low} to {high} in {len(self.samples)}{SPACE}samples)"

    def _digits(self, number: float, spec: str) -> str:
        if spec:
            return format(number, spec)
        half = (max(self.samples) - min(self.samples)) / 2 if self.samples else 0.0
        if isinstance(number, int) or half == 0:
            return format_number(number)
        # One digit of the spread, two where it begins with 1; and never more than three of the number itself.
        exponent = math.floor(math.log10(half))
        decimals = -exponent + (half < 2 * 10.0**exponent)
        largest = max(abs(sample) for sample in self.samples)
        return f"{number:,.{max(0, min(decimals, 2 - math.floor(math.log10(largest))))}f}"


@dataclass
class Results:
    """One run's results of one chapter.

    ``root`` is the book's folder, by default found from the working directory. Adding a name again replaces it, as
    when a cell is run again.
    """

    chapter: str
    profile: str = field(kw_only=True)
    model: str = field(kw_only=True)
    device: str = field(kw_only=True)
    dtype: str = field(kw_only=True)
    seed: int = field(kw_only=True)
    root: Path | None = field(default=None, kw_only=True)
    numbers: dict[str, Number] = field(default_factory=dict, init=False)
    ledger_rows: list[dict[str, Any]] = field(default_factory=list, init=False)
    provenance: dict[str, Any] | None = field(default=None, init=False)
    _others: OtherPrograms = field(default_factory=OtherPrograms, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.chapter):
            raise ChapterError(f"chapter name {self.chapter!r}: use letters, digits, '_' and '-', as in '05_kv_cache'")

    @property
    def smoke(self) -> bool:
        """True where nothing that was timed may be shown as a measurement."""
        return self.profile == "smoke"

    @property
    def path(self) -> Path:
        """Where :meth:`save` writes. Raises :class:`ChapterError` outside a book."""
        return (self.root or book_root()) / "_build" / "results" / f"{self.chapter}.json"

    def add(self, name: str, value: float | Iterable[float], unit: str = "", definition: str = "") -> None:
        """Keep a measured number, or all its samples with their median as the value.

        Raises:
            NanoinferError: a name that is no word or is taken by a setting, no samples, or one that is no number.
        """
        self._keep(name, measured(value, unit, definition, name))

    def add_exact(self, name: str, value: Value, unit: str = "", definition: str = "") -> None:
        """Keep what was counted, computed or given: true on every machine, and shown in a smoke run too."""
        self._keep(name, exact(value, unit, definition, name))

    def compare(
        self,
        name: str,
        ways: Mapping[str, Callable[[], object]],
        *,
        work: float,
        unit: str,
        change: str,
        predicted: float | None = None,
        rounds: int = 3,
        warmup: int = 1,
    ) -> Paired:
        """Time two ways of doing the same ``work`` in turns, and keep each one's rate and the gain of the second.

        Keeps a number for each way under its name, ``work / seconds`` in ``unit``; the gain, ``seconds of the first /
        seconds of the second`` round by round, under ``name``; and in the ledger the gain beside ``predicted``.
        """
        (first, second), calls = ways, tuple(ways.values())
        timed = paired(*calls, device=self.device, warmup=warmup, repeats=rounds)
        for way, timing in ((first, timed.a), (second, timed.b)):
            self.add(way, [work / s for s in timing.samples], unit, f"{work:g} / seconds")
        gain = [a / b for a, b in zip(timed.a.samples, timed.b.samples, strict=True)]
        self.add(name, gain, "x", f"seconds {first} / seconds {second}, by round")
        self.ledger(change=change, predicted=None if self.smoke else predicted, measured=gain, unit="x")
        return timed

    def ledger(self, *, change: str, predicted: float | None, measured: float | Iterable[float], unit: str) -> None:
        """Enter one change in the book's ledger: what theory predicted (or ``None``) and what this machine did."""
        samples = _samples(measured, change)
        row = {"change": change, "predicted": predicted, "measured": statistics.median_low(samples), "unit": unit}
        kept = [old for old in self.ledger_rows if old["change"] != change]
        self.ledger_rows = [*kept, {**row, "samples": list(samples)}]

    def say(self, template: str, **values: Number | str) -> Prose:
        """Fill a sentence's ``{name}`` and ``{name:.1f}`` and give it as Markdown.

        ``values`` are numbers to keep (:func:`measured`, :func:`exact`) and to write, or words that follow from
        measurements (``verdict="slower"``), which a smoke run hides like numbers. Settings (``{model}``, ``{device}``
        ...) are names too. Every dollar sign is money here: write mathematics in a Markdown cell.

        Raises:
            NanoinferError: a name that was never added, or a format that its value does not bear.
        """
        settings = {name: Number(str(getattr(self, name)), measured=False) for name in SETTINGS}
        words = {name: Number(word) for name, word in values.items() if isinstance(word, str)}
        for name, number in values.items():
            if isinstance(number, Number):
                self._keep(name, number)
        known = {**settings, **self.numbers, **words}
        # Backslashes show inside code spans, so those are filled in without escapes.
        parts = re.split(r"(`[^`]*`)", template)
        return Prose("".join(self._fill(part, known, code=i % 2 == 1) for i, part in enumerate(parts)))

    def quote(self, template: str, **verdicts: str) -> Prose:
        """Like :meth:`say`, for results loaded from a file: the machine and the date are named after the text.

        Raises:
            NanoinferError: the file holds a smoke run.
        """
        if self.smoke:
            raise NanoinferError(f"results of '{self.chapter}' come from a smoke run: there is nothing to quote")
        where = f"stored result: {self.model}, {self.device}, {self.dtype}; {self._origin()}"
        return Prose(f"{self.say(template, **verdicts).markdown} ({_markdown(where)})")

    def provenance_line(self) -> Prose:
        """One line: what ran where, with which versions, when, how often."""
        setting = f"{self.model}, {self.device}, {self.dtype}, seed {self.seed}"
        if self.smoke:
            return Prose(_markdown(f"Smoke run ({setting}): nothing here is a measurement."))
        busy = self._provenance().get("other_programs_cores", 0.0)
        note = f". Other programs kept {busy:.1f} cores busy meanwhile: times are less certain" if busy > BUSY else ""
        return Prose(_markdown(f"Measured with {setting}; {self._origin()}{note}"))

    def save(self) -> None:
        """Write ``_build/results/<chapter>.json``, whole or not at all, with provenance, samples and spread."""
        record = {
            **{name: getattr(self, name) for name in SETTINGS},
            "measurement": not self.smoke,
            "provenance": self._provenance(),
            "numbers": {name: {**asdict(number), **_extremes(number)} for name, number in self.numbers.items()},
            "ledger": self.ledger_rows,
        }
        write_whole(self.path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote; a relative path counts from here or from the book's folder.

        Raises:
            NanoinferError: no such file, or one that holds no results.
        """
        file = Path(path)
        if not file.is_absolute() and not file.exists():
            file = book_root() / file
        record = _read(file)
        try:
            results = cls(**{name: record[name] for name in SETTINGS})
            for name, number in record["numbers"].items():
                kept = {key: number[key] for key in ("value", "unit", "definition", "measured")}
                results.numbers[name] = Number(**kept, samples=tuple(number["samples"]))
            results.ledger_rows = list(record["ledger"])
            results.provenance = dict(record["provenance"])
        except (KeyError, TypeError, AttributeError) as error:
            raise NanoinferError(f"{file}: not a chapter's results ({error!r}); run the chapter again") from None
        return results

    def _keep(self, name: str, number: Number) -> None:
        if not name.isidentifier() or name in SETTINGS:
            raise NanoinferError(f"result name {name!r}: use one word that is not a setting ({', '.join(SETTINGS)})")
        self.numbers[name] = number

    def _provenance(self) -> dict[str, Any]:
        if self.provenance is None:
            from nanoinfer.measure.environment import provenance

            self.provenance = provenance() | {"other_programs_cores": round(self._others.cores(), 3)}
        return self.provenance

    def _origin(self) -> str:
        """``AMD EPYC 7763, 2 cores; torch 2.9.0, python 3.11.7; 2026-01-05; 10 samples``."""
        counts = sorted({len(number.samples) for number in self.numbers.values() if number.samples})
        repeats = [f"{' to '.join(map(str, sorted({counts[0], counts[-1]})))} samples"] if counts else []
        source = self._provenance()
        versions = ", ".join(
            f"{name} {source['versions'][name]}" for name in ("torch", "python") if name in source["versions"]
        )
        return "; ".join([machine_name(source["machine"], self.device), versions, str(source["date"])[:10], *repeats])

    def _fill(self, template: str, known: Mapping[str, Number], code: bool) -> str:
        done = ""
        clipped = False
        for literal, name, spec, conversion in Formatter().parse(template):
            # "${cost:.2f}" and "{gain:.1f}x": a placeholder takes the signs around it along.
            literal = re.sub(r"^(?:[x×]\b|%)", "", literal) if clipped else literal
            done += literal if code else _money(literal)
            if name is None:
                continue
            if name not in known or conversion:
                raise NanoinferError(f"no result named '{name}' in chapter '{self.chapter}': {nearest(name, known)}")
            number = known[name]
            clipped = self.smoke and number.measured
            try:
                text = PLACEHOLDER if clipped else format(number, spec or "")
            except ValueError as error:
                raise NanoinferError(f"result '{name}' cannot be written as '{spec}': {error}") from None
            done = re.sub(r"\\?\$$", "", done) if clipped else done
            done += text if code else _markdown(text)
        return done


def book_root(start: Path | None = None) -> Path:
    """The folder at or above ``start`` (the working directory) that holds ``_toc.yml``; else :class:`ChapterError`."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "_toc.yml").is_file():
            return folder
    raise ChapterError(f"no _toc.yml in {here} or above: run this inside the book's folder")


def machine_name(machine: Mapping[str, Any], device: str) -> str:
    """What did the work: ``2 x NVIDIA L40S`` for a GPU device, else ``AMD EPYC 7763, 2 cores``."""
    if device.startswith("cuda") and machine["gpus"]:
        names = [str(gpu["name"]) for gpu in machine["gpus"]]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)).removeprefix("1 x ")
    return f"{machine['cpu']}, {machine['cores']} cores"


def ledger_table(root: Path | None = None) -> Html:
    """The ledger of all chapters that have run here, in their order: change, predicted, measured, on which machine."""
    folder = (root or book_root()) / "_build" / "results"
    rows: list[tuple[str, str, str, str, str]] = []
    for path in sorted(folder.glob("*.json")):
        results = Results.load(path)
        for row in results.ledger_rows:
            number = Number(row["measured"], row["unit"], samples=tuple(row["samples"]))
            predicted = DASH if row["predicted"] is None else format(Number(row["predicted"], row["unit"]), "")
            measured = PLACEHOLDER if results.smoke else format(number, "±")
            machine = machine_name(results._provenance()["machine"], results.device)
            rows.append((row["change"], results.chapter, predicted, measured, machine))
    header = ("Change", "Chapter", "Predicted", "Measured", "Machine")
    return table(header, rows, "Ledger: each change, predicted and measured")


def measured(value: float | Iterable[float], unit: str = "", definition: str = "", name: str = "") -> Number:
    """A measured number, or all its samples with their median; :class:`NanoinferError` for what is no number."""
    samples = _samples(value, name)
    return Number(statistics.median_low(samples), unit, definition, True, samples)


def exact(value: Value, unit: str = "", definition: str = "", name: str = "") -> Number:
    """What was counted, computed or given: true on every machine, and shown in a smoke run too."""
    if not isinstance(value, str) and not math.isfinite(value):
        raise NanoinferError(f"result '{name}': {value} is no number that prose can quote")
    return Number(value, unit, definition, False)


def _samples(value: float | Iterable[float], name: str) -> tuple[float, ...]:
    try:
        samples = tuple(float(sample) for sample in value) if isinstance(value, Iterable) else (float(value),)
    except (TypeError, ValueError):
        raise NanoinferError(f"result '{name}': {value!r} is no number and no list of numbers") from None
    if not samples or not all(map(math.isfinite, samples)):
        raise NanoinferError(f"result '{name}': {'no samples' if not samples else 'a sample is not finite'}")
    return samples


def _extremes(number: Number) -> dict[str, float]:
    return {"low": min(number.samples), "high": max(number.samples)} if number.samples else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        raise NanoinferError(f"{path}: no such results; run the chapter first") from None
    except ValueError as error:
        raise NanoinferError(f"{path}: not a results file ({error}); run the chapter again") from None
    return record


def _money(text: str) -> str:
    return re.sub(r"\\?\$", r"\\$", text)


def _markdown(text: str) -> str:
    """Escape what Markdown or MyST would take for mark-up in a value (a model's own words, a processor's name)."""
    return re.sub(r"([\\`*_\[\]<>#$~|&{}])", r"\\\1", text.replace("\n", " "))
