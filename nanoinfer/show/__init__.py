"""What a chapter shows: figures, tables, live controls, and the numbers its prose quotes."""

from nanoinfer.book.results import Results, ledger_table
from nanoinfer.show.figure import figure
from nanoinfer.show.html import Html, table
from nanoinfer.show.widgets import Choice, Entry, Slider, panel

__all__ = ["Choice", "Entry", "Html", "Results", "Slider", "figure", "ledger_table", "panel", "table"]
