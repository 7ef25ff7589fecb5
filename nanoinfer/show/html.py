"""HTML that a notebook displays and a page keeps: the mimebundle, its style sheet, and tables.

A screen reader needs a caption and header cells, a phone a wide table that scrolls in its own box, a dark page colours
that it can read: settled here, so that no chapter writes HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeGuard

from nanoinfer.show.text import format_number

# Each output carries its own few rules: JupyterLab loads no style sheet of the book's.
# On dark pages the theme paints a light panel under HTML outputs and images, and hides a caption that follows a hidden
# image; the rules for [data-theme=dark] undo the panel for our outputs only.
STYLE = (
    "<style>"
    ".ni figure{margin:1rem 0}.ni img{max-width:100%;height:auto}"
    ".ni figcaption,.ni caption{color:inherit!important;font:inherit!important;text-align:left!important}"
    ".ni summary{cursor:pointer}.ni-scroll{overflow-x:auto}"
    ".ni table{border-collapse:collapse;margin:.5rem 0}.ni caption{caption-side:top}"
    ".ni th,.ni td{padding:.25rem .7rem;border:0;border-bottom:1px solid #808080;"
    "text-align:left;color:inherit;background:none}"
    ".ni .ni-num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}"
    "html[data-theme=dark] .ni .only-dark,body[data-jp-theme-light=false] .ni .only-dark{display:block!important}"
    "html[data-theme=dark] .ni .only-light,body[data-jp-theme-light=false] .ni .only-light{display:none!important}"
    "html[data-theme=dark] .bd-content div.cell_output .text_html:has(.ni)"
    "{background:none!important;color:inherit!important;padding:0!important}"
    "html[data-theme=dark] .bd-content div.cell_output .ni img{background:none!important;padding:0!important}"
    "</style>"
)

Cell = str | int | float | None


class Displayed:
    """Shows in a notebook when it is a cell's last expression, and in no other way."""

    def bundle(self) -> dict[str, Any]:
        """The same content by MIME type, ``text/plain`` among them."""
        raise NotImplementedError

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return str(self.bundle()["text/plain"])


@dataclass(frozen=True, repr=False)
class Prose(Displayed):
    """A sentence or more of Markdown."""

    markdown: str

    def bundle(self) -> dict[str, Any]:
        return {"text/markdown": self.markdown, "text/plain": self.markdown}


@dataclass(frozen=True, repr=False)
class Html(Displayed):
    """HTML (style sheet apart) and the plain text that says the same."""

    body: str
    text: str

    @property
    def html(self) -> str:
        """The HTML with its style sheet, complete in itself."""
        return f'{STYLE}<div class="ni">{self.body}</div>'

    def bundle(self) -> dict[str, Any]:
        return {"text/html": self.html, "text/plain": self.text}


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str) -> Html:
    """An accessible table: a caption, header cells with a scope, numbers to the right.

    Args:
        header: one title a column.
        rows: ``None`` shows as a dash. The first cell heads its row.
        caption: required, because a screen reader announces it.

    Raises:
        ValueError: a row's length differs from the header's, or the caption is empty.
    """
    if not caption.strip():
        raise ValueError("a table needs a caption")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} cells under {len(header)} headings")
    # A column is numeric when all it holds is numbers and gaps: its heading then stands over them.
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    columns = zip(header, numeric, strict=True)
    head = "".join(f'<th scope="col"{_right(right)}>{escape(title)}</th>' for title, right in columns)
    body = "".join(f"<tr>{''.join(_cell(cell, i == 0) for i, cell in enumerate(row))}</tr>" for row in rows)
    html = (
        f'<div class="ni-scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    lines = [caption, " | ".join(header), *(" | ".join(_text(cell) for cell in row) for row in rows)]
    return Html(html, "\n".join(lines))


def _is_value(cell: Cell) -> TypeGuard[float]:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _is_number(cell: Cell) -> bool:
    """Whether a cell reads as a number, formatted by the caller or not; a lone dash stands for one that is missing."""
    if isinstance(cell, str):
        return re.fullmatch(r"[–-]|[–-]?[\d.,]+(e[+-]?\d+)?\s*(%|x|×)?", cell) is not None
    return cell is None or _is_value(cell)


def _text(cell: Cell) -> str:
    return format_number(cell, 4) if cell is None or _is_value(cell) else str(cell)


def _right(right: bool) -> str:
    return ' class="ni-num"' if right else ""


def _cell(cell: Cell, first: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    return f"<{tag}{scope}{_right(_is_number(cell))}>{escape(_text(cell))}</{tag}>"
