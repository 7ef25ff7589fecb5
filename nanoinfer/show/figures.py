"""Figures that can be read in light, in the dark, and by ear.

A transparent figure loses its text on a white page or on a black one. So each is drawn twice, by one function under two
sets of colours, and the page shows the one that fits; alt text and a table of the numbers travel with it.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from nanoinfer.errors import NanoinferError
from nanoinfer.show.outputs import Cell, Html
from nanoinfer.show.outputs import table as html_table

CSS_PIXELS_PER_INCH = 96
DPI = 2 * CSS_PIXELS_PER_INCH
# A page stays under 1.5 MB with some eight figures drawn twice; a crowded drawing is smaller as a PNG.
SVG_LIMIT = 60_000  # characters of the data URI
SHORTEST_ALT = 20


@dataclass(frozen=True)
class Theme:
    """The colours of one drawing. ``lines`` are what ``"C0"``, ``"C1"`` ... mean inside ``draw``."""

    name: str
    background: str
    text: str
    grid: str
    lines: tuple[str, ...]


# Okabe and Ito's hues, in the same order in both themes, darkened for white and lightened for black until each
# stands out from its background by 3:1 or more (text and grid 4.5:1): a test computes it.
LIGHT_LINES = ("#0072b2", "#c75000", "#00805f", "#a8458a", "#8a6d00", "#2b8cc4")
DARK_LINES = ("#56b4e9", "#f08a4b", "#2fc79b", "#de92c0", "#f0e442", "#7f9cf5")
LIGHT = Theme("light", "#ffffff", "#222832", "#6b7280", LIGHT_LINES)
DARK = Theme("dark", "#14181e", "#ced6dd", "#8b949e", DARK_LINES)
# Colour is never the only sign: lines differ in their dashes too.
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))


def _rc(theme: Theme) -> dict[Any, Any]:
    # All that matplotlib draws in black or white by default.
    dark = ["text", "xtick", "ytick", "lines", "hatch", *(f"boxplot.{part}props" for part in ("box", "whisker", "cap"))]
    edges = ("axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "patch.edgecolor")
    ink = [*(f"{name}.color" for name in dark), *edges]
    paper = [f"{name}.facecolor" for name in ("figure", "axes", "legend", "savefig")]
    return {
        **dict.fromkeys(ink, theme.text),
        **dict.fromkeys(paper, theme.background),
        "axes.prop_cycle": cycler(color=theme.lines) + cycler(linestyle=DASHES),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.grid,
        "grid.linestyle": ":",
        "grid.linewidth": 0.6,
        "legend.handlelength": 3.2,
        "legend.edgecolor": theme.grid,
        "legend.labelcolor": theme.text,
        "lines.linewidth": 2.2,
        "lines.markersize": 7,
        "font.size": 12,
        "font.family": ["DejaVu Sans"],  # ships with matplotlib: the same picture on every machine
        "svg.fonttype": "path",
        "svg.hashsalt": "nanoinfer",
    }


def figure(
    draw: Callable[[Axes], object],
    *,
    alt: str,
    caption: str = "",
    table: tuple[Sequence[str], Sequence[Sequence[Cell]]] | None = None,
    size: tuple[float, float] = (7, 4),
    smoke: bool = False,
) -> Html:
    """Draw a figure for light and dark pages. It shows when it is the cell's last expression.

    Args:
        draw: fills the axes; called twice, so it must only draw. Use ``"C0"`` ... ``"C5"`` for colours.
        alt: a sentence that says what the figure shows; a shorter one is a :class:`NanoinferError`.
        table: ``(header, rows)``, the figure's numbers, folded away under it.
        size: width and height in inches of 96 CSS pixels.
        smoke: pass ``results.smoke``; a smoke run's figure is stamped, and its numbers are left out.
    """
    if len(alt.strip()) < SHORTEST_ALT:
        raise NanoinferError(f"alt text {alt!r} is too short: say in a sentence what the figure shows")
    images = "".join(_image(draw, theme, alt, size, smoke) for theme in (LIGHT, DARK))
    if smoke:
        caption, table = f"Smoke run on a tiny model: not a measurement. {caption}".strip(), None
    # The images have their own box: the theme hides a caption that is the sibling of a hidden image.
    body = f"<div>{images}</div>" + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "")
    body = f"<figure>{body}</figure>"
    if table is not None:
        numbers = html_table(*table, caption or alt)
        body += f"<details><summary>The figure's numbers</summary>{numbers.body}</details>"
    return Html(body, alt)


def _image(draw: Callable[[Axes], object], theme: Theme, alt: str, size: tuple[float, float], smoke: bool) -> str:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_rc(theme))
        # No pyplot: it would keep the figure alive and let the notebook show it a second time.
        picture = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(picture)
        draw(picture.add_subplot())
        if smoke:
            stamp: dict[str, Any] = {"rotation": 20, "alpha": 0.6, "fontsize": 26, "ha": "center", "va": "center"}
            picture.text(0.5, 0.5, "smoke run: no measurement", **stamp)
        uri = _svg_uri(picture)
        if len(uri) > SVG_LIMIT:
            uri = _png_uri(picture)
    width, height = (round(inches * CSS_PIXELS_PER_INCH) for inches in size)
    # Without any style sheet the light one shows alone.
    hidden = "" if theme is LIGHT else ' style="display:none"'
    return f'<img class="only-{theme.name}"{hidden} src="{uri}" alt="{escape(alt)}" width="{width}" height="{height}">'


def _svg_uri(picture: Figure) -> str:
    """The drawing alone, percent-encoded: smaller than base64, and it compresses on its way to the reader."""
    out = io.StringIO()
    picture.savefig(out, format="svg", dpi=DPI, metadata={"Date": None})
    text = re.sub(r"<!--.*?-->|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    text = re.sub(r'="([^"\']*)"', r"='\1'", re.sub(r"\s*\n\s*", " ", text))
    return "data:image/svg+xml," + quote(text, safe=" /:;=,'()!*@?+-._~")


def _png_uri(picture: Figure) -> str:
    """A drawing has few colours: a palette makes the file three times smaller."""
    drawn, out = io.BytesIO(), io.BytesIO()
    picture.savefig(drawn, format="png", dpi=DPI)
    Image.open(drawn).convert("RGB").quantize(128).save(out, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"
