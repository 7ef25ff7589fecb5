"""The charts that most chapters need, from the data alone: lines and bars, with their table of numbers.

A value may be a list of samples: the chart shows the median and the range. A series with "predicted" in its name is
drawn as a dotted line. For anything else there is :func:`nanoinfer.show.figure`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from nanoinfer.show.figures import figure
from nanoinfer.show.outputs import Cell, Html
from nanoinfer.show.text import format_number

Samples = float | Sequence[float]
MARKERS = "os^DvP"


def lines(
    series: Mapping[str, Mapping[float, Samples]],
    *,
    x: str,
    y: str,
    alt: str,
    caption: str = "",
    log: str = "",
    limits: Mapping[str, float] | None = None,
    size: tuple[float, float] = (7, 4),
    smoke: bool = False,
) -> Html:
    """One line for each series, ``{x: y or its samples}``.

    Args:
        x: title of the axis, with its unit; so is ``y``.
        log: axes on a logarithmic scale: ``"x"``, ``"y"`` or ``"xy"``; its base is 2 where the x are powers of two.
        limits: horizontal lines by name, such as a latency limit.
        alt, caption, size, smoke: as in :func:`nanoinfer.show.figure`.
    """
    xs = sorted({at for points in series.values() for at in points})

    def draw(ax: Axes) -> None:
        for i, (name, points) in enumerate(series.items()):
            predicted = "predicted" in name
            look: dict[str, Any] = {"color": f"C{i % 6}", "label": name}
            look |= {"linestyle": ":"} if predicted else {"marker": MARKERS[i % 6]}
            ranges = [_range(value) for value in points.values()]
            middle = [at for _, at, _ in ranges]
            ax.plot(list(points), middle, **look)
            if any(low < high for low, _, high in ranges):
                ax.fill_between(
                    list(points), [r[0] for r in ranges], [r[2] for r in ranges], color=f"C{i % 6}", alpha=0.2
                )
        for name, level in (limits or {}).items():
            ax.axhline(level, color="C5", linestyle="--", linewidth=1.5, label=name)
        for axis, values in (("x", xs), ("y", ())):
            if axis in log:
                base = 2 if all(at > 0 and float(at).hex().startswith("0x1.0000000000000p") for at in values) else 10
                getattr(ax, f"set_{axis}scale")("log", base=base)
                getattr(ax, f"{axis}axis").set_major_formatter("{x:g}")
            elif axis == "y":
                ax.set_ylim(bottom=0)
        ax.set(xlabel=x, ylabel=y)
        if len(series) + len(limits or {}) > 1:
            ax.legend()

    rows: list[list[Cell]] = [[at, *(_cell(points.get(at)) for points in series.values())] for at in xs]
    return figure(draw, alt=alt, caption=caption or f"{y} by {x}", table=([x, *series], rows), size=size, smoke=smoke)


def bars(
    values: Mapping[str, Samples] | Mapping[str, Mapping[str, Samples]],
    *,
    unit: str,
    alt: str,
    caption: str = "",
    log: bool = False,
    stacked: bool = False,
    smoke: bool = False,
) -> Html:
    """Horizontal bars ``{name: value or its samples}``, from the top; ``{name: {part: value}}`` gives each its parts.

    Args:
        unit: title of the axis, with its unit.
        stacked: parts stand end to end, and not side by side.
        alt, caption, smoke: as in :func:`nanoinfer.show.figure`.
    """
    nested = {name: part if isinstance(part, Mapping) else {"": part} for name, part in values.items()}
    parts = list(dict.fromkeys(part for row in nested.values() for part in row))

    def draw(ax: Axes) -> None:
        height = 0.8 if stacked else 0.8 / len(parts)
        start = [0.0] * len(nested)
        for i, part in enumerate(parts):
            ranges = [_range(row.get(part, 0.0)) for row in nested.values()]
            middle = [at for _, at, _ in ranges]
            places = [n if stacked else n + (i - (len(parts) - 1) / 2) * height for n in range(len(nested))]
            errors = None if stacked else [[r[1] - r[0] for r in ranges], [r[2] - r[1] for r in ranges]]
            hatch = ("", "//", "..", "xx", "\\\\", "++")[i % 6] if len(parts) > 1 else None
            look: dict[str, Any] = {"color": f"C{i % 6}", "hatch": hatch, "label": part}
            ax.barh(places, middle, height, start if stacked else None, xerr=errors, **look)
            start = [a + b for a, b in zip(start, middle, strict=True)]
        ax.set_yticks(range(len(nested)), [name.replace("$", r"\$") for name in nested])
        ax.invert_yaxis()
        ax.set_xlabel(unit)
        if log:
            ax.set_xscale("log")
        if len(parts) > 1:
            ax.legend(ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)

    header = ["", *parts] if len(parts) > 1 else ["", unit]
    rows: list[list[Cell]] = [[name, *(_cell(row.get(part)) for part in parts)] for name, row in nested.items()]
    height = 1 + 0.45 * len(nested) * (1 if stacked else max(1.0, len(parts) / 2))
    return figure(draw, alt=alt, caption=caption or unit, table=(header, rows), size=(7, height), smoke=smoke)


def _range(value: Samples) -> tuple[float, float, float]:
    """Lowest, median and highest of the samples."""
    if isinstance(value, Sequence):
        return min(value), statistics.median(value), max(value)
    return value, value, value


def _cell(value: Samples | None) -> Cell:
    return None if value is None else format_number(_range(value)[1])
