"""How results are shown: terminal text, accessible HTML tables, figures for both themes, live controls.

Read `text` first. A chapter imports from here.
"""

from nanoinfer.show.figure import figure
from nanoinfer.show.html import Html, table
from nanoinfer.show.widgets import Choice, Entry, Slider, panel

__all__ = ["Choice", "Entry", "Html", "Slider", "figure", "panel", "table"]
