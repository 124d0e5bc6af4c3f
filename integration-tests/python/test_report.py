"""The report of a comparison in a real browser: it fits a phone, needs no network, and everything in it is reachable."""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install playwright (no browser download needed)")
from playwright.sync_api import sync_playwright  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
BATON = os.environ.get("BATON_BIN", str(ROOT / "target" / "release" / "baton"))


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    subprocess.run([BATON, "report", "--example", "--out", folder], check=True, capture_output=True, timeout=120)
    return folder / "report.html"


@pytest.fixture(scope="session")
def browser():
    found = subprocess.run([ROOT / "scripts" / "get-chromium"], capture_output=True, text=True, check=False)
    if found.returncode == 4:
        pytest.skip(found.stderr)
    assert found.returncode == 0, found.stderr
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, and the page is ours.
        chromium = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, report):
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    faults, asked = [], []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda message: faults.append(message.text))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(report.as_uri())
    yield opened
    opened.close()
    assert faults == []
    assert set(asked) == {report.as_uri()}, "one file, and nothing else"


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (400, "dark"), (2200, "light")])
def test_nothing_is_wider_than_the_window(page, width, scheme):
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    # What is wide lies in a box that scrolls; every other element ends inside the window.
    wide = page.evaluate(
        """() => [...document.querySelectorAll("body *")]
            .filter((e) => !e.closest(".scroll, pre, .skip, script") && e.getBoundingClientRect().right > innerWidth + 0.5)
            .map((e) => e.tagName + "." + e.className)"""
    )
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_words_in_pictures_do_not_leave_them_or_lie_on_each_other(page):
    bad = page.evaluate(
        """() => {
            const found = [];
            for (const svg of document.querySelectorAll("figure svg")) {
                const frame = svg.getBoundingClientRect();
                const boxes = [...svg.querySelectorAll("text.tick, text.label, text.bar-name")].map((t) => [t, t.getBoundingClientRect()]);
                for (const [at, [text, box]] of boxes.entries()) {
                    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1)
                        found.push("outside: " + text.textContent);
                    for (const [other, its] of boxes.slice(at + 1))
                        if (box.left < its.right - 1 && its.left < box.right - 1 && box.top < its.bottom - 1 && its.top < box.bottom - 1)
                            found.push(text.textContent + " on " + other.textContent);
                }
            }
            return found;
        }"""
    )
    assert bad == []


def test_readers_and_keyboards_reach_everything(page):
    assert page.locator("section > h2").count() == page.locator("nav li").count() > 15
    assert page.locator("main svg:not([role=img]):not([aria-hidden])").count() == 0
    assert page.locator("main svg[role=img]:not([aria-label])").count() == 0
    assert page.locator("th:not([scope])").count() == 0
    # The figures behind a picture open by keyboard, and a box that scrolls takes the focus.
    first = page.locator("details > summary").first
    first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open] table").first.is_visible()
    assert page.locator(".scroll:has(table):not([tabindex])").count() == 0


def test_it_prints_on_a4(page):
    page.emulate_media(media="print")
    # 210 mm less two margins of 12 mm, at 96 pixels an inch.
    page.set_viewport_size({"width": 702, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") <= 702
    assert page.pdf(prefer_css_page_size=True, print_background=True).startswith(b"%PDF")
