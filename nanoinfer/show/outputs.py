"""What a notebook's cell shows and a page keeps: prose, HTML, tables, and live controls in JupyterLab.

A screen reader needs a caption and header cells, a phone a wide table that scrolls in its own box, a dark page colours
that it can read: settled here, so that no chapter writes HTML. A page has no kernel to move a control with, so the
controls and the figure of the first run are one output: JupyterLab picks the controls, a page picks the figure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeGuard

from nanoinfer.errors import NanoinferError, check
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

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
HINT = "Run this chapter in JupyterLab to move the controls."
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


# --- tables -------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str) -> Html:
    """An accessible table: the first cell heads its row, numbers stand to the right, ``None`` shows as a dash.

    Raises :class:`ValueError` for a row of another length than the header, and for an empty caption, which a screen
    reader announces.
    """
    if not caption.strip():
        raise ValueError("a table needs a caption")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} cells under {len(header)} headings")
    # A column is numeric when all it holds is numbers and gaps: its heading then stands over them.
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    head = "".join(_cell('th scope="col"', title, right) for title, right in zip(header, numeric, strict=True))
    tags = ['th scope="row"', *["td"] * (len(header) - 1)]
    cells = [[_cell(tag, _text(cell), _is_number(cell)) for tag, cell in zip(tags, row, strict=True)] for row in rows]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    html = (
        f'<div class="ni-scroll" role="region" aria-label="{escape(caption)}" tabindex="0"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    return Html(html, "\n".join([caption, *(" | ".join(map(_text, row)) for row in [header, *rows])]))


def _is_value(cell: Cell) -> TypeGuard[float]:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _is_number(cell: Cell) -> bool:
    """Whether a cell reads as a number, formatted by the caller or not; a lone dash stands for one that is missing."""
    if isinstance(cell, str):
        return re.fullmatch(r"[–-]|[–-]?[\d.,]+(e[+-]?\d+)?\s*(%|x|×)?", cell) is not None
    return cell is None or _is_value(cell)


def _text(cell: Cell) -> str:
    return format_number(cell, 4) if cell is None or _is_value(cell) else str(cell)


def _cell(tag: str, text: str, right: bool) -> str:
    style = ' class="ni-num"' if right else ""
    return f"<{tag}{style}>{escape(text)}</{tag[:2]}>"


# --- live controls ------------------------------------------------------------------------


@dataclass
class Choice:
    """A drop-down list; starts at ``value`` or at the first option."""

    label: str
    options: Sequence[str | int | float]
    value: str | int | float | None = None

    def __post_init__(self) -> None:
        if self.value is None and self.options:
            self.value = self.options[0]
        if self.value not in self.options:
            raise NanoinferError(f"control '{self.label}': {self.value!r} is not one of {list(self.options)}")

    def widget(self) -> Any:
        """As an ipywidget."""
        return _widget("Dropdown", self, options=list(self.options))


@dataclass
class Slider:
    """A slider from ``low`` to ``high``, inclusive; over whole numbers if all its numbers are."""

    label: str
    low: float
    high: float
    value: float
    step: float = 1

    def __post_init__(self) -> None:
        check(f"control '{self.label}'", self.value, at_least=self.low, at_most=self.high, error=NanoinferError)

    def widget(self) -> Any:
        """As an ipywidget."""
        whole = all(isinstance(number, int) for number in (self.low, self.high, self.value, self.step))
        name = "IntSlider" if whole else "FloatSlider"
        return _widget(name, self, min=self.low, max=self.high, step=self.step)


@dataclass
class TextEntry:
    """A line of text, for instance a prompt."""

    label: str
    value: str

    def widget(self) -> Any:
        """As an ipywidget."""
        return _widget("Text", self, continuous_update=False, layout={"width": "95%"})


#: What a reader sets, from its ``value`` on; a :class:`NanoinferError` where that cannot be.
Control = Choice | Slider | TextEntry


def _widget(name: str, control: Control, **more: Any) -> Any:
    import ipywidgets

    style = {"description_width": "initial"}
    return getattr(ipywidgets, name)(value=control.value, description=control.label, style=style, **more)


@dataclass(frozen=True, repr=False)
class Panel(Displayed):
    """The figure of the first run, and the controls where there is a kernel."""

    still: Html
    box: Any = None  # an ipywidgets box, or None without ipywidgets or without a kernel

    def bundle(self) -> dict[str, Any]:
        bundle = {"text/html": f"{self.still.html}<p><em>{HINT}</em></p>", "text/plain": self.still.text}
        if self.box is not None:
            bundle[WIDGET_VIEW] = self.box._repr_mimebundle_()[WIDGET_VIEW]
        return bundle


def panel(controls: Mapping[str, Control], run: Callable[..., Html]) -> Panel:
    """Run a small measurement at the controls' starting values, and again at each press of "Measure".

    ``run`` takes the values by the controls' names and returns a :func:`figure` or :func:`table`. Its errors stop the
    chapter in the first run; later a :class:`NanoinferError` shows as one line under the controls.
    """
    still = run(**{name: control.value for name, control in controls.items()})
    return Panel(still, live_box(controls, run, still) if _has_kernel() else None)


def _has_kernel() -> bool:
    try:
        import ipywidgets  # noqa: F401
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def live_box(controls: Mapping[str, Control], run: Callable[..., Html], first: Html) -> Any:
    """The controls, a "Measure" button and an output that starts with ``first``, as one ipywidgets box.

    A button, because each move of a slider would queue a run.
    """
    import ipywidgets

    inputs = {name: control.widget() for name, control in controls.items()}
    button = ipywidgets.Button(description="Measure", button_style="primary")
    output = ipywidgets.Output()

    def show(content: Html) -> None:
        output.outputs = ({"output_type": "display_data", "data": content.bundle(), "metadata": {}},)

    def measure(_: object) -> None:
        button.disabled, button.description = True, "Measuring …"
        try:
            show(run(**{name: widget.value for name, widget in inputs.items()}))
        except Exception as error:
            is_readers = isinstance(error, NanoinferError)
            text = str(error) if is_readers else f"{type(error).__name__}: {error}"
            show(Html(f'<p role="alert">{escape(text)}</p>', text))
            if not is_readers:
                raise  # the traceback goes to the kernel's log
        finally:
            button.disabled, button.description = False, "Measure"

    show(first)
    button.on_click(measure)
    return ipywidgets.VBox([*inputs.values(), button, output])
