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
    from nanoinfer.show.html import Html as Html
    from nanoinfer.show.html import table as table
    from nanoinfer.show.widgets import Choice as Choice
    from nanoinfer.show.widgets import Slider as Slider
    from nanoinfer.show.widgets import TextEntry as TextEntry
    from nanoinfer.show.widgets import panel as panel

_HOMES = {"bars": "charts", "lines": "charts", "figure": "figures", "Html": "html", "table": "html"}
_HOMES |= dict.fromkeys(("Choice", "TextEntry", "Slider", "panel"), "widgets")
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanoinfer.show' has no attribute '{name}'")
    return getattr(importlib.import_module(f"nanoinfer.show.{_HOMES[name]}"), name)
