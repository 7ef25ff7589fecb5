"""The built pages in a real browser: light, dark, phone width, keyboard, and not one request to another host.

Looks at the book in ``_build/html`` where there is one (CI builds it first), else at a small one built for the test.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from nanoinfer.book.build import build_book
from nanoinfer.book.execute import run_chapters
from tests.book.helpers import ROOT, copy_book, write

pytestmark = pytest.mark.browser

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = ROOT / "_build" / "html"
    if (built / "index.html").is_file():
        return built
    root = tmp_path_factory.mktemp("book")
    copy_book(root, ["01_small"])
    wide = "$$ " + " + ".join(f"x_{{{n}}}" for n in range(60)) + " $$"
    write(root, "01_small", [("markdown", wide), ("code", "print('wide ' * 60)")])
    run_chapters(root, None, "smoke")
    return build_book(root).parent


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = os.environ.get("NANOINFER_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


def pages(site: Path) -> list[Path]:
    return sorted([*site.glob("book/*.html"), *site.glob("notebooks/*.html")])


def watch(page: Page, name: str, wrong: list[str]) -> None:
    """Note every error in the console and every request that fails or leaves the site."""
    page.on("console", lambda m: wrong.append(f"{name}: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(f"{name}: {e}"))
    page.on("requestfailed", lambda r: wrong.append(f"{name}: failed {r.url[:120]}"))
    here = ("file:", "data:")
    page.on("request", lambda r: None if r.url.startswith(here) else wrong.append(f"{name}: asks {r.url}"))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_every_page_is_whole(site: Path, browser: Browser, scheme: str, width: int) -> None:
    wrong: list[str] = []
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    for path in pages(site):
        page = context.new_page()
        watch(page, path.name, wrong)
        page.goto(path.as_uri(), wait_until="load")
        if page.locator(".math").count():
            page.wait_for_selector("mjx-container")
            assert page.locator("mjx-assistive-mml").count(), f"{path.name}: no MathML for screen readers"
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wrong.append(f"{path.name}: wider than the screen at {width} px")
        body = page.locator("article").inner_text()
        wrong += [
            f"{path.name}: {text}"
            for text in ("Loading widget", "IProgress not found", "Math Processing")
            if text in body
        ]
        page.close()
    context.close()
    assert wrong == []


def test_one_version_of_each_figure_shows(site: Path, browser: Browser) -> None:
    for scheme, hidden in (("light", ".only-dark"), ("dark", ".only-light")):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        for path in pages(site):
            page.goto(path.as_uri())
            for image in page.locator(f"article img{hidden}").all():
                assert not image.is_visible(), f"{path.name}: both versions of a figure show in {scheme}"
        context.close()


def test_the_keyboard_reaches_the_text_and_the_next_page(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "book" / "setup.html").as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").strip() == "Skip to main content"
    page.keyboard.press("Enter")
    assert "#main-content" in page.url
    page.locator("a.right-next").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/book/notation.html")
    page.close()


def test_index_leads_to_the_preface(site: Path, browser: Browser) -> None:
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.wait_for_url("**/book/preface.html")
    assert page.locator("article h1").count() == 1
    page.close()
