"""A page that holds everything: one file, no script, nothing fetched, readable in light and in the dark.

Each figure is drawn once. Its colours are then put into the style sheet's hands (``var(--line0)``), so the
page follows the reader's scheme. Its alternative text says what it shows and its numbers stand under it.
Names and errors come from servers, so every word is escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from nanoinfer.bench import tables
from nanoinfer.bench.plots import Plot, run_plots, sweep_plots
from nanoinfer.bench.run import Run
from nanoinfer.bench.slo import slo_text
from nanoinfer.bench.sweep import Sweep
from nanoinfer.show.figures import DARK, LIGHT, Theme, render
from nanoinfer.show.html import table
from nanoinfer.show.text import Rows, format_number, ms

SIZE: Final = (6.0, 3.6)  # inches of 96 CSS pixels: its text is still read at a phone's width
#: Colours that nothing else draws in, each to be replaced by a variable of the style sheet.
MARKS: Final = Theme("marks", "#010a01", "#010b01", "#010c01", tuple(f"#020{i}02" for i in range(len(LIGHT.lines))))


def _variables(theme: Theme) -> dict[str, str]:
    lines = {f"--line{i}": colour for i, colour in enumerate(theme.lines)}
    return {"--paper": theme.background, "--ink": theme.text, "--grid": theme.grid, **lines}


def _rules(theme: Theme) -> str:
    return ";".join(f"{name}:{colour}" for name, colour in _variables(theme).items())


CSS: Final = (
    f":root{{color-scheme:light dark;{_rules(LIGHT)};--bad:#a4161a}}"
    f"@media (prefers-color-scheme:dark){{:root{{{_rules(DARK)};--bad:#ff9b9b}}}}"
    "body{background:var(--paper);color:var(--ink);font:1rem/1.5 system-ui,sans-serif;margin:0}"
    "main{max-width:76rem;margin:0 auto;padding:1rem}h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}"
    "figure{margin:1rem 0}svg{max-width:100%;height:auto;display:block}figcaption{margin:.3rem 0}"
    ".ni-scroll{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0}"
    "caption{text-align:left;font-weight:600;padding:.25rem 0}"
    "th,td{padding:.25rem .7rem;border-bottom:1px solid var(--grid);text-align:left;font-weight:400}"
    "thead th{font-weight:600}.figures :is(th,td):not(:first-child){text-align:right;white-space:nowrap;"
    "font-variant-numeric:tabular-nums}.figures th:first-child{min-width:7rem}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:0 1.5rem}"
    "dt{font-weight:600}dd{margin:0 0 .4rem 1rem}summary{cursor:pointer}"
    "pre{overflow-x:auto;border:1px solid var(--grid);padding:.5rem}"
    ".bad{border-left:.4rem solid var(--bad);padding:.1rem .8rem}.lead{font-size:1.1rem}"
)


def html(found: Run | Sweep, summary: Mapping[str, Any]) -> str:
    """The page of a run (with :func:`~nanoinfer.bench.summary.summarise`'s record) or of a sweep (with ``as_dict()``).

    Raises:
        NanoinferError: traces whose clock ran backwards.
    """
    if isinstance(found, Sweep):
        return _page("nanoinfer bench: sweep", _sweep_parts(found, summary))
    return _page("nanoinfer bench: one run", _run_parts(found, summary))


def _page(title: str, parts: Iterable[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body><main><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</main></body></html>\n"
    )


# --- a run ----------------------------------------------------------------------------


def _run_parts(run: Run, record: Mapping[str, Any]) -> Iterable[str]:
    yield f'<p class="lead">{escape(headline(record))}</p>'
    yield from _warnings(record["beyond_budget"], record["notes"])
    yield _table(tables.latency(record), "Latencies of the requests that ended well, ms; the interval is the median's")
    yield _figures(run_plots(run, record))
    yield "<h2>Rates and requests</h2>"
    yield _table(tables.rates(record), "Rates over the window")
    yield _table(tables.requests(record), "How the requests ended")
    if record["requests"]["attempted"] > record["requests"]["ok"]:
        yield _table(
            tables.adjusted(record), "Percentiles with each failed request as infinitely slow, in milliseconds"
        )
    if record["goodput"]:
        yield _table(tables.goodput(record), "Goodput under the SLO")
    yield "<h2>The client itself</h2>"
    yield _table(tables.client(record), "How late the load generator was, in milliseconds")
    yield from _about(tables.definitions(record), record["load"], record["provenance"])


def headline(record: Mapping[str, Any]) -> str:
    """What the run came to, in a sentence or two."""
    found, rates, window = record["requests"], record["rates"], record["window"]
    text = (
        f"{found['ok']:,} of {found['attempted']:,} requests ended well; "
        f"{format_number(rates['output_tok_s']['value'])} output tokens/s "
        f"in a window of {format_number(window['seconds'])} s."
    )
    middle = [
        f"{tables.NAMES[name]} {ms(record['latency'][name]['median'])} ms"
        for name in ("ttft", "tpot", "e2e")
        if record["latency"][name]["median"] is not None
    ]
    if middle:
        text += f" Medians: {', '.join(middle)}."
    if record["goodput"] and record["goodput"]["share"] is not None:
        text += f" {record['goodput']['share']:.1%} met the SLO ({slo_text(record['goodput']['slo_s'])})."
    return text


# --- a sweep --------------------------------------------------------------------------


def _sweep_parts(found: Sweep, record: Mapping[str, Any]) -> Iterable[str]:
    yield f'<p class="lead">{escape(tables.verdict(record))}</p>'
    beyond = [f"At {level}: {reason}" for level, reasons in record["beyond_budget"].items() for reason in reasons]
    yield from _warnings(beyond, [*record["notes"], *([record["stopped"]] if record["stopped"] else [])])
    yield _table(tables.levels(record), "Level by level; times are medians in milliseconds")
    yield _figures(sweep_plots(record))
    rules = [("knee", record["knee"]["definition"]), ("highest good level", record["highest_good"]["definition"])]
    if found.points:
        last = found.points[-1].summary
        yield from _about([*rules, *tables.definitions(last)], last["load"], last["provenance"])


# --- pieces ---------------------------------------------------------------------------


def _warnings(beyond: Sequence[str], notes: Sequence[str]) -> Iterable[str]:
    if beyond:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in beyond)
        yield f'<div class="bad"><p>Beyond its error budget: do not quote these figures.</p><ul>{items}</ul></div>'
    if notes:
        yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _table(rows: Rows, caption: str) -> str:
    return f'<div class="figures">{table(rows[0], list(rows[1]), caption).body}</div>'


def _figures(plots: Iterable[Plot]) -> str:
    return f'<div class="plots">{"".join(_figure(plot, f"f{i}") for i, plot in enumerate(plots))}</div>'


def _figure(plot: Plot, name: str) -> str:
    return (
        f"<div><figure>{_svg(plot, name)}<figcaption>{escape(plot.caption)}</figcaption></figure>"
        f"<details><summary>The figure's numbers</summary>{_table(plot.table, plot.caption)}</details></div>"
    )


def _svg(plot: Plot, name: str) -> str:
    """The drawing as an element of the page: named, its colours the page's, its ids its own."""
    text = render(plot.draw, MARKS, SIZE, "svg", smoke=False).decode()
    text = re.sub(r"<\?xml.*?\?>|<!--.*?-->|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for variable, colour in _variables(MARKS).items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r"\s*\n\s*", " ", text).strip()
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(plot.alt)}"', 1)


def _about(
    definitions: Iterable[tuple[str, str]], load: Mapping[str, Any], provenance: Mapping[str, Any]
) -> Iterable[str]:
    yield "<h2>Definitions</h2>"
    yield f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in definitions)}</dl>"
    yield "<h2>What was asked, and on what</h2>"
    for caption, record in (("Settings", load), ("Provenance", provenance)):
        yield table(("name", "value"), list(_flat(record)), caption).body


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
