"""How results are shown: terminal text, accessible HTML tables, figures for both themes, live controls.

Read `text` first. A chapter imports from here; the names are loaded when they are first used, since figures need
matplotlib and a terminal does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoinfer.show.charts import bars as bars
    from nanoinfer.show.charts import lines as lines
    from nanoinfer.show.figures import figure as figure
    from nanoinfer.show.outputs import Choice as Choice
    from nanoinfer.show.outputs import Html as Html
    from nanoinfer.show.outputs import Slider as Slider
    from nanoinfer.show.outputs import TextEntry as TextEntry
    from nanoinfer.show.outputs import panel as panel
    from nanoinfer.show.outputs import table as table

_HOMES = {"bars": "charts", "lines": "charts", "figure": "figures"}
_HOMES |= dict.fromkeys(("Choice", "Html", "Slider", "TextEntry", "panel", "table"), "outputs")
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoinfer.show' has no attribute '{name}'")
    return getattr(importlib.import_module(f"nanoinfer.show.{_HOMES[name]}"), name)
