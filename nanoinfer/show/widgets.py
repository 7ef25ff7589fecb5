"""Live controls in JupyterLab; the same figure, still, on a built page.

A page has no kernel to move a control with, so the controls and the figure of the first run are published in one
output: JupyterLab picks the controls, a page picks the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.show.html import Displayed, Html

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
HINT = "Run this chapter in JupyterLab to move the controls."


class Control:
    """What a reader sets; it starts at ``value``."""

    label: str
    value: Any

    @property
    def start(self) -> Any:
        """The value of the first run."""
        return self.value

    def problem(self) -> str:
        """Why the starting value cannot be, or an empty text."""
        return ""

    def widget(self) -> Any:
        """The control as an ipywidget."""
        import ipywidgets

        kind, more = self.kind(ipywidgets)
        return kind(value=self.start, description=self.label, style={"description_width": "initial"}, **more)

    def kind(self, widgets: Any) -> tuple[Any, dict[str, Any]]:
        """The class in the module ``ipywidgets``, and its own arguments."""
        raise NotImplementedError


@dataclass(frozen=True)
class Choice(Control):
    """A drop-down list; starts at ``value`` or at the first option."""

    label: str
    options: Sequence[str | int | float]
    value: str | int | float | None = None

    @property
    def start(self) -> str | int | float:
        return self.options[0] if self.value is None else self.value

    def problem(self) -> str:
        fits = bool(self.options) and self.start in self.options
        return "" if fits else f"{self.value!r} is not one of {list(self.options)}"

    def kind(self, widgets: Any) -> tuple[Any, dict[str, Any]]:
        return widgets.Dropdown, {"options": list(self.options)}


@dataclass(frozen=True)
class Slider(Control):
    """A slider from ``low`` to ``high``, inclusive; over whole numbers if all its numbers are."""

    label: str
    low: float
    high: float
    value: float
    step: float = 1

    def problem(self) -> str:
        fits = self.low <= self.value <= self.high
        return "" if fits else f"{self.value} is not within {self.low} to {self.high}"

    def kind(self, widgets: Any) -> tuple[Any, dict[str, Any]]:
        whole = all(isinstance(number, int) for number in (self.low, self.high, self.value, self.step))
        limits = {"min": self.low, "max": self.high, "step": self.step}
        return widgets.IntSlider if whole else widgets.FloatSlider, limits


@dataclass(frozen=True)
class TextEntry(Control):
    """A line of text, for instance a prompt."""

    label: str
    value: str

    def kind(self, widgets: Any) -> tuple[Any, dict[str, Any]]:
        return widgets.Text, {"continuous_update": False, "layout": {"width": "95%"}}


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

    Args:
        controls: one for each argument of ``run``.
        run: measures and returns a :func:`figure` or :func:`table`. Its errors stop the chapter in the first
            run; later a :class:`NanoinferError` shows as one line under the controls.

    Raises:
        NanoinferError: a control that starts outside its range, or from ``run`` itself.
    """
    for name, control in controls.items():
        if problem := control.problem():
            raise NanoinferError(f"control '{name}': {problem}")
    still = run(**{name: control.start for name, control in controls.items()})
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

    def show_error(text: str) -> None:
        show(Html(f'<p role="alert">{escape(text)}</p>', text))

    def measure(_: object = None) -> None:
        button.disabled, button.description = True, "Measuring …"
        try:
            show(run(**{name: widget.value for name, widget in inputs.items()}))
        except NanoinferError as error:
            show_error(str(error))
        except Exception as error:
            show_error(f"{type(error).__name__}: {error}")
            raise  # not the reader's mistake: the traceback goes to the kernel's log
        finally:
            button.disabled, button.description = False, "Measure"

    show(first)
    button.on_click(measure)
    return ipywidgets.VBox([*inputs.values(), button, output])
