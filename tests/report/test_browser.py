"""The page in a real browser, both themes, wide and narrow: what readers do works, and every text can be read.

Needs playwright and a Chromium; `REPORT_PAGE=FILE` has the checks look at that page instead of the made one, and
`REPORT_SHOTS=FOLDER` keeps the pictures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longgraft.config import TokenLogprob
from longgraft.report.page import report_html, write_report
from tests import small_tokenizers as small
from tests.report.outputs import C, D, F, G, H, P, R, S, V, X, made
from tests.report.test_contrast import contrast

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SIZES = {"wide": (1360, 900), "narrow": (360, 740)}
TOKENIZER = small.byte_level()
TEXT = "def scale(values):\n    return 1\n\n<script>fail()</script> Ω שלום 😀 " * 4

# Colour of every text against what lies under it, opaque colours only: the style has no others.
READ = """() => {
  const two = (number) => (+number).toString(16).padStart(2, '0');
  const hex = (text) => '#' + text.match(/[0-9.]+/g).slice(0, 3).map(two).join('');
  const clear = (text) => text === 'transparent' || /, 0\\)$/.test(text);
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || element.closest('svg, script, style') || !element.checkVisibility()) continue;
    let under = element;
    while (under && clear(getComputedStyle(under).backgroundColor)) under = under.parentElement;
    const style = getComputedStyle(element);
    found.push([walk.currentNode.data.slice(0, 30), hex(style.color), hex(getComputedStyle(under).backgroundColor)]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("REPORT_PAGE"):
        return Path(given).resolve().as_uri()
    path = tmp_path_factory.mktemp("report") / "r.html"
    token_ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    kinds = [P, P, P, R, H, H, D, D, R, S, V, V, C, C, R, X, X, X, F, F, G, R]
    sources = [kinds[i // 2 % len(kinds)] for i in range(len(token_ids))]
    logprobs = tuple(TokenLogprob(token_id, -0.1) for token_id in token_ids)
    origins = [(0, 0) if source == P else (-1, -1) for source in sources]
    output = made(token_ids, sources, TEXT, wrong=7, logprobs=logprobs, origins=origins, lines=(1,) * len(sources))
    write_report(path, report_html(output, TOKENIZER, token_ids[:30], about={"model": "small"}))
    return path.as_uri()


@pytest.fixture(params=[(theme, size) for theme in ("light", "dark") for size in SIZES], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    theme, size = request.param
    width, height = SIZES[size]
    context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": height})
    opened, said = context.new_page(), list[str]()
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda asked: said.append(asked.url) if asked.url != address else None)
    opened.goto(address)
    opened.label = f"{theme}-{size}"
    yield opened
    context.close()
    assert said == [], "errors, or something was fetched"


def picture(page: Any, name: str) -> bytes:
    folder = os.environ.get("REPORT_SHOTS")
    path = str(Path(folder) / f"{page.label}-{name}.png") if folder else None
    return bytes(page.screenshot(path=path))


def choose(page: Any, i: int) -> str:
    page.evaluate("i => keep(i, true)", i)
    return str(page.locator("#panel").inner_text())


def test_it_fits_its_window_and_every_text_can_be_read(page: Any) -> None:
    first = page.evaluate("nodeOf.findIndex((node) => node > 0)")
    choose(page, first)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait_for_selector("#panel ol li")
    page.wait_for_selector("#table tbody tr")
    wide, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner
    found = page.evaluate(READ)
    assert len(found) > 100
    assert [one for one in found if contrast(one[1], one[2]) < 4.5] == []
    assert len(picture(page, "open")) > 10_000


def test_pointing_shows_and_leaving_lets_go(page: Any) -> None:
    token = page.locator("#text span").nth(2)
    token.hover()
    panel = page.locator("#panel")
    assert "Token 3 of" in panel.inner_text() and "Round 1 of" in panel.inner_text()
    page.locator("h1").hover()
    assert "Token 3 of" not in panel.inner_text()


def test_the_keyboard_reaches_every_token_and_round(page: Any) -> None:
    page.locator("#text span").first.focus()
    assert "Token 1 of" in page.locator("#panel").inner_text()
    page.keyboard.press("ArrowRight")
    assert "Token 2 of" in page.locator("#panel").inner_text()
    page.keyboard.press("ArrowDown")
    assert "Round 2 of" in page.locator("#panel").inner_text()
    page.keyboard.press("End")
    count = page.evaluate("spans.length")
    assert f"Token {count} of {count}" in page.locator("#panel").inner_text()
    assert page.evaluate("document.querySelectorAll('#text [tabindex]').length") == 1, "one stop for Tab"
    page.keyboard.press("Escape")
    assert page.locator("#panel .token").count() == 0
    page.locator("#line").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator("#line").get_attribute("aria-valuenow") == "2"
    assert "Round 2 of" in page.locator("#line").get_attribute("aria-valuetext")
    assert "Round 2 of" in page.locator("#panel").inner_text()
    picture(page, "round")


def test_every_token_shows_its_own_source_and_a_tree_that_is_one(page: Any) -> None:
    n, letters = page.evaluate("[spans.length, data.tokens.source]")
    for i in range(0, n, max(1, n // 40)):
        said = choose(page, i)
        assert page.evaluate("letter => data.called[letter]", letters[i]) in said
        nodes, links, rows, parents = page.evaluate(
            "[document.querySelectorAll('#panel .node').length, document.querySelectorAll('#panel .link').length,"
            f" rounds[roundOf[{i}]].rows, withDrawn(rounds[roundOf[{i}]]).parents.length]"
        )
        assert (nodes, links) == ((parents + 1, parents) if rows > 1 else (0, 0))


def test_the_theme_can_be_chosen(page: Any) -> None:
    system = page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen = {}
    for name in ("light", "dark", "system"):
        page.locator("#theme").click()
        assert page.locator("#theme").inner_text() == f"Theme: {name}"
        seen[name] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert seen["light"] != seen["dark"] and seen["system"] == system


def test_text_is_copied_as_it_is(page: Any) -> None:
    assert page.locator("#text").evaluate("one => one.textContent") == page.evaluate(
        "[...text.querySelectorAll('span')].map((s) => s.textContent).join('')"
    )
    assert page.locator("#text script").count() == 0
