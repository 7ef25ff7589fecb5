from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.axes import Axes

from nanoinfer.errors import NanoinferError
from nanoinfer.show.figures import DARK, DASHES, LIGHT, SVG_LIMIT, Theme, figure

ALT = "Tokens per second rise with the batch size."


def draw(axes: Axes) -> None:
    axes.plot([1, 2, 4], [10, 19, 36], label="cached & fast")
    axes.set_xlabel("batch")
    axes.legend()


class Images(HTMLParser):
    """The attributes of every ``<img>``."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self.found.append(dict(attrs))


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance of ``#rrggbb``."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_itself() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_colours_stand_out_from_their_background(theme: Theme) -> None:
    assert contrast(theme.text, theme.background) >= 4.5
    assert contrast(theme.grid, theme.background) >= 4.5
    assert [
        round(contrast(line, theme.background), 1) for line in theme.lines if contrast(line, theme.background) < 3
    ] == []
    assert len(set(theme.lines)) == len(DASHES) == 6


def test_backgrounds_are_the_page_theme_s() -> None:
    assert (LIGHT.background, DARK.background) == ("#ffffff", "#14181e")


def test_both_images_carry_the_alt_text_and_a_size() -> None:
    shown = figure(draw, alt=ALT, size=(6, 3))
    light, dark = Images(shown.html).found
    for image, name in ((light, "light"), (dark, "dark")):
        assert image["class"] == f"only-{name}"
        assert (image["alt"], image["width"], image["height"]) == (ALT, "576", "288")
    # With no style sheet at all the light one shows alone.
    assert "style" not in light and dark["style"] == "display:none"
    assert shown._repr_mimebundle_()["text/plain"] == ALT == repr(shown)


@pytest.mark.parametrize("index", [0, 1])
def test_the_picture_is_a_small_svg_that_needs_no_font(index: int) -> None:
    source = Images(figure(draw, alt=ALT).html).found[index]["src"] or ""
    kind, _, text = source.partition(",")
    assert kind == "data:image/svg+xml" and len(source) < SVG_LIMIT
    svg = ElementTree.fromstring(unquote(text))
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert not list(svg.iter("{http://www.w3.org/2000/svg}text"))
    assert (LIGHT, DARK)[index].lines[0] in unquote(text)
    assert (LIGHT, DARK)[index].background in unquote(text)
    assert "matplotlib.org" not in text and "http" not in re.sub(r"http://www\.w3\.org/[\w/]+", "", unquote(text))


def test_the_same_drawing_gives_the_same_bytes() -> None:
    assert figure(draw, alt=ALT) == figure(draw, alt=ALT)


def test_a_crowded_drawing_becomes_a_small_png() -> None:
    shown = figure(lambda axes: axes.scatter(range(2000), [i * i % 997 for i in range(2000)], s=4), alt=ALT)
    for image in Images(shown.html).found:
        assert (image["src"] or "").startswith("data:image/png;base64,")
        assert len(image["src"] or "") < 150_000


def test_a_caption_is_no_sibling_of_a_hidden_image() -> None:
    # pydata-sphinx-theme: .only-dark ~ figcaption {display: none}
    html = figure(draw, alt=ALT, caption="Fast <and> right").body
    assert re.sub(r"<img [^>]*>", "", html) == (
        "<figure><div></div><figcaption>Fast &lt;and&gt; right</figcaption></figure>"
    )


def test_rules_for_the_page_and_for_jupyterlab() -> None:
    html = figure(draw, alt=ALT).html
    for theme in ("html[data-theme=dark]", "body[data-jp-theme-light=false]"):
        assert f"{theme} .ni .only-dark" in html and f"{theme} .ni .only-light" in html
    assert ".ni img{max-width:100%;height:auto}" in html


def test_the_table_is_folded_under_the_figure() -> None:
    html = figure(draw, alt=ALT, table=(("batch", "tok/s"), [(1, 10.0), (2, 19.0)])).body
    assert "</figure><details><summary>The figure's numbers</summary><div" in html
    assert f"<caption>{ALT}</caption>" in html
    assert '<th scope="row" class="ni-num">1</th><td class="ni-num">10.00</td>' in html
    assert html.endswith("</details>")


@pytest.mark.parametrize("alt", ["", "   ", "A plot.", "nineteen characters" + " " * 9])
def test_an_alt_text_is_a_sentence(alt: str) -> None:
    with pytest.raises(NanoinferError, match="say in a sentence what the figure shows"):
        figure(draw, alt=alt)


def test_markup_in_an_alt_text_stays_text() -> None:
    alt = 'A "quoted" <b> & twenty characters.'
    assert [image["alt"] for image in Images(figure(draw, alt=alt).html).found] == [alt, alt]


def test_a_smoke_run_s_figure_says_so_and_hides_its_numbers() -> None:
    shown = figure(draw, alt=ALT, caption="Speed.", table=(("a",), [(10,)]), smoke=True)
    assert "<figcaption>Smoke run on a tiny model: not a measurement. Speed.</figcaption>" in shown.html
    assert "<table" not in shown.html
    assert Images(shown.html).found[0]["src"] != Images(figure(draw, alt=ALT).html).found[0]["src"]


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    figure(draw, alt=ALT)
    assert dict(matplotlib.rcParams) == before
