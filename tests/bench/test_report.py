"""The page: complete in itself, named for those who do not see it, and safe whatever a server calls itself."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote

import pytest

from nanoinfer.bench.loadgen import Run
from nanoinfer.bench.report import headline, run_page, sweep_page
from nanoinfer.bench.summary import summarise
from nanoinfer.bench.sweep import Sweep, sweep
from nanoinfer.bench.tables import verdict
from nanoinfer.measure import metrics
from nanoinfer.show.figures import DARK, LIGHT
from tests.bench.made import golden, run, trace

SLO = {"ttft": 0.5, "tpot": 0.05}
EVIL = '<script>alert("x")</script> & <img src=http://evil.example/x>'
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes, in order; complains where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def busy() -> Run:
    return run([trace(i / 10, [(0.1 + i / 1000, 1), (0.2 + i / 1000, 2), (0.3 + i / 900, 1)]) for i in range(100)])


def page_of(found: Run, slo: dict[str, float] | None = None) -> str:
    return run_page(found, summarise(found, slo))


@cache
def golden_page() -> str:
    """Drawn once for all tests that read it."""
    return page_of(golden(), SLO)


def made_sweep(slo: dict[str, float] | None = None) -> Sweep:
    async def level(rate: float) -> Run:
        wait = 1 / (10 - rate)
        return run([trace(i / rate, [(wait, 1), (2 * wait, 1)]) for i in range(200)], end=200 / rate)

    return asyncio.run(sweep(level, [1, 2, 4, 8], slo))


@cache
def page_of_sweep(*, judged: bool) -> str:
    return sweep_page(made_sweep(SLO if judged else None).as_dict())


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        (golden_page(), 5),
        (page_of(busy()), 5),
        (page_of(run([])), 0),
        (page_of(run([trace(0.0, [], status="error", error="connect")])), 2),
        (page_of_sweep(judged=True), 2),
        (page_of_sweep(judged=False), 1),
    ],
    ids=["golden", "busy", "empty", "failed", "sweep with an SLO", "sweep"],
)
def test_every_figure_is_named_and_has_its_table(text: str, figures: int) -> None:
    page = Page(text)
    assert len(page.all("figure")) == len(page.all("details")) == figures
    light, dark = (
        [image for image in page.all("img") if image["class"] == f"only-{theme}"] for theme in ("light", "dark")
    )
    assert len(light) == len(dark) == figures == len(page.all("img")) / 2
    assert [image["alt"] for image in light] == [image["alt"] for image in dark]
    assert all(len(image.get("alt") or "") > 40 for image in light)
    # Each figure's numbers follow it, in a table with a caption and heads.
    pieces = re.split(r"</figure>", text)[1:]
    assert all(piece.startswith("<details><summary>The figure's numbers</summary><div") for piece in pieces)
    assert all('<th scope="col"' in piece.split("</details>")[0] for piece in pieces)
    assert len(page.all("caption")) == len(page.all("table")) >= figures
    assert len(page.all("h1")) == 1 and page.found[0] == ("html", {"lang": "en"})


@pytest.mark.parametrize("text", [golden_page(), page_of_sweep(judged=True)], ids=["run", "sweep"])
def test_nothing_is_fetched_and_nothing_runs(text: str) -> None:
    page = Page(text)
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    for _, attributes in page.found:
        assert not any(name.startswith("on") for name in attributes)
        assert "href" not in attributes and (attributes.get("src") or "data:image/").startswith("data:image/")
    drawings = [unquote(image["src"] or "") for image in page.all("img")]
    for drawing in drawings:
        assert all(
            address.startswith("#")
            for address in re.findall(r"url\((.*?)\)|href='(.*?)'", drawing)
            for address in address
            if address
        )
    rest = re.sub(r'src="[^"]*"', "", text)
    assert "http:" not in rest and "https:" not in rest and "//" not in rest and "@import" not in rest
    assert "url(" not in rest


def test_the_page_follows_the_readers_colour_scheme() -> None:
    style = golden_page().split("</style>", 1)[0]
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for theme, rules in ((LIGHT, light), (DARK, dark)):
        assert f"--paper: {theme.background}; --ink: {theme.text}" in rules
    assert ".only-light { display: none }" in dark and ".only-dark { display: block !important }" in dark
    assert 'name="viewport"' in style


def test_every_word_from_outside_is_escaped() -> None:
    evil = run(
        [trace(0.0, [], status="error", error=EVIL), trace(1.0, [(0.1, 1)])],
        settings={EVIL: EVIL, "nested": {"model": EVIL, "lengths": [1, EVIL]}},
        provenance={"machine": {"cpu": EVIL}},
    )
    page = Page(page_of(evil))
    assert page.all("script") == [] and all(
        image["src"].startswith("data:") for image in page.all("img") if image["src"]
    )
    assert page.text.count('<script>alert("x")</script>') >= 5


def test_the_page_says_what_the_record_says() -> None:
    record = summarise(golden(), SLO)
    text = Page(golden_page()).text
    assert headline(record) == (
        "3 of 6 requests ended well; 1.40 output tokens/s in a window of 10.0 s. "
        "Medians: TTFT 500 ms, TPOT 25.7 ms, end to end 500 ms. "
        "20.0% met the SLO (ttft at most 500 ms, tpot at most 50 ms)."
    )
    assert headline(record) in text
    for name in ("ttft", "tpot", "itl", "chunk_gap", "e2e", "throughput", "goodput", "concurrency", "client_delay"):
        assert metrics.DEFINITIONS[name] in text, name
    for needed in ("n too small", "http 429", "a desk", "by hand", "send lag"):
        assert needed in text
    assert "error budget" not in text and "None" not in text and not re.search(r"\bnan\b", text)


def test_a_run_beyond_its_budget_is_marked_at_the_top() -> None:
    late = run([trace(i, [(0.2, 1)], sent=i + 0.1) for i in range(5)])
    text = Page(page_of(late)).text
    assert text.index("Beyond its error budget: do not quote these figures.") < text.index("Latencies of the requests")
    assert "send lag p99 100.0 ms" in text


def test_a_sweep_says_where_the_knee_is() -> None:
    record = made_sweep(SLO).as_dict()
    said = "The knee lies at 4 requests/s. Highest that still meets the SLO (ttft at most 500 ms, tpot at most 50 ms): "
    assert verdict(record) == said + "no level."
    text = Page(page_of_sweep(judged=True)).text
    assert verdict(record) in text and record["knee"]["definition"] in text
    assert verdict(made_sweep({"ttft": 0.2}).as_dict()).endswith("(ttft at most 200 ms): 4 requests/s.")
    assert verdict(Sweep("rate", None, 0.99).as_dict()) == "No level gave a figure."
    Page(sweep_page(Sweep("rate", None, 0.99).as_dict()))


def test_alternative_texts_hold_the_numbers() -> None:
    images = Page(golden_page()).all("img")
    labels: list[Any] = [image["alt"] for image in images if image["class"] == "only-light"]
    assert "from schedule: half at or below 500 ms, 90% at or below 500 ms" in labels[0]
    assert "amortised, a token: half at or below 20.0 ms, 90% at or below 200 ms" in labels[1]
    assert labels[2].endswith("mean 1.40, lowest 0, highest 16.0.")
