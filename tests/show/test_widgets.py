from __future__ import annotations

from typing import Any

import nbclient
import nbformat
import pytest

from nanoinfer.errors import NanoinferError
from nanoinfer.show.outputs import HINT, WIDGET_VIEW, Choice, Control, Html, Slider, TextEntry, live_box, panel, table

CELL = """
from matplotlib.axes import Axes
from nanoinfer.show import Choice, Slider, figure, panel

def run(batch, rate):
    alt = f"A line through the origin at batch {batch} with slope {rate}."
    return figure(lambda axes: axes.plot([0, batch], [0, rate * batch]), alt=alt)

panel({"batch": Choice("Batch", [4, 8]), "rate": Slider("Rate", 0.0, 2.0, 0.5, 0.1)}, run)
"""


def show(**values: Any) -> Html:
    return table(("name", "value"), list(values.items()), "The values")


CONTROLS: dict[str, Control] = {
    "batch": Choice("Batch", [1, 2, 4], 2),
    "steps": Slider("Steps", 1, 8, 4),
    "share": Slider("Share", 0.0, 1.0, 0.5, 0.1),
    "prompt": TextEntry("Prompt", "Once"),
}


def test_without_a_kernel_the_first_run_s_figure_shows() -> None:
    shown = panel(CONTROLS, show)
    bundle = shown.bundle()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/plain"].splitlines()[2:] == ["batch | 2", "steps | 4", "share | 0.5000", "prompt | Once"]
    assert bundle["text/html"] == shown.still.html + f"<p><em>{HINT}</em></p>"


def test_in_a_kernel_one_output_holds_controls_and_figure() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "execute_result"
    assert set(output.data) == {WIDGET_VIEW, "text/html", "text/plain"}
    assert output.data["text/plain"] == "A line through the origin at batch 4 with slope 0.5."
    assert output.data["text/html"].count("<img ") == 2 and HINT in output.data["text/html"]
    assert output.data[WIDGET_VIEW]["model_id"]
    assert "Loading widget" not in str(notebook)


def test_each_control_becomes_its_widget() -> None:
    made = {name: control.widget() for name, control in CONTROLS.items()}
    assert {name: (type(one).__name__, one.value, one.description) for name, one in made.items()} == {
        "batch": ("Dropdown", 2, "Batch"),
        "steps": ("IntSlider", 4, "Steps"),
        "share": ("FloatSlider", 0.5, "Share"),
        "prompt": ("Text", "Once", "Prompt"),
    }
    assert made["batch"].options == (1, 2, 4)
    assert (made["share"].min, made["share"].max, made["share"].step) == (0.0, 1.0, 0.1)


def test_the_button_runs_with_the_controls_values_and_replaces_the_output() -> None:
    seen: list[dict[str, Any]] = []

    def run(**values: Any) -> Html:
        assert button.disabled and button.description == "Measuring …"
        seen.append(values)
        return show(**values)

    box = live_box(CONTROLS, run, show(first=1))
    batch, _, _, prompt, button, output = box.children
    assert [one["data"]["text/plain"].splitlines()[-1] for one in output.outputs] == ["first | 1"]
    batch.value, prompt.value = 4, "Twice"
    assert seen == []  # moving a control measures nothing yet
    button.click()
    assert seen == [{"batch": 4, "steps": 4, "share": 0.5, "prompt": "Twice"}]
    assert [one["data"]["text/plain"].splitlines()[-1] for one in output.outputs] == ["prompt | Twice"]
    assert not button.disabled and button.description == "Measure"


def test_a_mistake_shows_as_one_line_and_the_button_comes_back() -> None:
    def run(**values: Any) -> Html:
        raise NanoinferError("the prompt is empty: <type> a word")

    *_, button, output = live_box(CONTROLS, run, show(first=1)).children
    button.click()
    (shown,) = output.outputs
    assert '<p role="alert">the prompt is empty: &lt;type&gt; a word</p>' in shown["data"]["text/html"]
    assert not button.disabled


def test_a_fault_of_ours_is_named_and_not_swallowed(caplog: pytest.LogCaptureFixture) -> None:
    def run(**values: Any) -> Html:
        raise ZeroDivisionError("division by zero")

    *_, button, output = live_box(CONTROLS, run, show(first=1)).children
    with caplog.at_level("WARNING"):
        button.click()
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)
    assert output.outputs[0]["data"]["text/plain"] == "ZeroDivisionError: division by zero"
    assert not button.disabled


def test_the_first_run_s_error_stops_the_chapter() -> None:
    def run(**values: Any) -> Html:
        raise NanoinferError("no such model")

    with pytest.raises(NanoinferError, match="no such model"):
        panel({}, run)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Choice, ([],), "control 'Batch'"),
        (Choice, ([1, 2], 3), r"3 is not one of \[1, 2\]"),
        (Slider, (1, 8, 9), "control 'Batch' must be at least 1 and at most 8, got 9"),
    ],
)
def test_a_control_starts_within_its_range(kind: type[Choice | Slider], settings: Any, message: str) -> None:
    with pytest.raises(NanoinferError, match=message):
        kind("Batch", *settings)
