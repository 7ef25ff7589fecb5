"""Live controls in JupyterLab; the same figure, still, on a built page.

A page has no kernel to move a control with, and a blank widget tells a reader nothing.
So the controls and the figure of the first run are published in one output: JupyterLab
picks the controls, a page picks the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.show.html import Html

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
HINT = "Run this chapter in JupyterLab to move the controls."


@dataclass(frozen=True)
class Choice:
    """A drop-down list; starts at ``value`` or at the first option."""

    label: str
    options: Sequence[str | int | float]
    value: str | int | float | None = None

    @property
    def start(self) -> str | int | float:
        return self.options[0] if self.value is None else self.value


@dataclass(frozen=True)
class Slider:
    """A slider from ``low`` to ``high``, both within reach; over whole numbers if all its numbers are."""

    label: str
    low: float
    high: float
    value: float
    step: float = 1

    @property
    def start(self) -> float:
        return self.value


@dataclass(frozen=True)
class Entry:
    """A line of text, for instance a prompt."""

    label: str
    value: str

    @property
    def start(self) -> str:
        return self.value


Control = Choice | Slider | Entry


@dataclass(frozen=True)
class Panel:
    """The figure of the first run, and the controls where there is a kernel; shows as a cell's last expression."""

    still: Html
    box: Any = None  # an ipywidgets box, or None without ipywidgets or without a kernel

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = {"text/html": f"{self.still.html}<p><em>{HINT}</em></p>", "text/plain": self.still.text}
        if self.box is not None:
            bundle[WIDGET_VIEW] = self.box._repr_mimebundle_()[WIDGET_VIEW]
        return bundle


def panel(controls: Mapping[str, Control], run: Callable[..., Html]) -> Panel:
    """Run a small measurement at the controls' starting values, and again at each press of "Measure".

    Args:
        controls: one control for each argument of ``run``.
        run: measures and returns a :func:`figure` or :func:`table`. Its errors stop the chapter in the first
            run; later a :class:`NanoinferError` shows as one line under the controls.

    Raises:
        NanoinferError: a control that starts outside its own range, or ``run`` itself.
    """
    for name, control in controls.items():
        _check(name, control)
    still = run(**{name: control.start for name, control in controls.items()})
    return Panel(still, _live(controls, run, still) if _has_kernel() else None)


def _check(name: str, control: Control) -> None:
    if isinstance(control, Choice) and (not control.options or control.start not in control.options):
        raise NanoinferError(f"control '{name}': {control.value!r} is not one of {list(control.options)}")
    if isinstance(control, Slider) and not control.low <= control.value <= control.high:
        raise NanoinferError(f"control '{name}': {control.value} is not within {control.low} to {control.high}")


def _has_kernel() -> bool:
    try:
        import ipywidgets  # noqa: F401
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def _widget(control: Control) -> Any:
    import ipywidgets as widgets

    look = {"description": control.label, "style": {"description_width": "initial"}}
    if isinstance(control, Choice):
        return widgets.Dropdown(options=list(control.options), value=control.start, **look)
    if isinstance(control, Entry):
        return widgets.Text(value=control.value, continuous_update=False, layout={"width": "95%"}, **look)
    numbers = (control.low, control.high, control.value, control.step)
    kind = widgets.IntSlider if all(isinstance(number, int) for number in numbers) else widgets.FloatSlider
    return kind(min=control.low, max=control.high, step=control.step, value=control.value, **look)


def _live(controls: Mapping[str, Control], run: Callable[..., Html], first: Html) -> Any:
    """The controls, a button and an output. A slider's every move would queue a run; a button runs once."""
    import ipywidgets as widgets

    inputs = {name: _widget(control) for name, control in controls.items()}
    button = widgets.Button(description="Measure", button_style="primary")
    output = widgets.Output()
    _replace(output, first)

    def measure(_: object = None) -> None:
        button.disabled, button.description = True, "Measuring …"
        try:
            shown = run(**{name: widget.value for name, widget in inputs.items()})
        except NanoinferError as error:
            shown = Html(f'<p role="alert">{escape(str(error))}</p>', str(error))
        except Exception as error:
            # Not the reader's mistake: say so here, and leave the traceback to the kernel's log.
            message = f"{type(error).__name__}: {error}"
            _replace(output, Html(f'<p role="alert">{escape(message)}</p>', message))
            raise
        finally:
            button.disabled, button.description = False, "Measure"
        _replace(output, shown)

    button.on_click(measure)
    return widgets.VBox([*inputs.values(), button, output])


def _replace(output: Any, shown: Html) -> None:
    output.outputs = ({"output_type": "display_data", "data": shown._repr_mimebundle_(), "metadata": {}},)
