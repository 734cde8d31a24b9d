"""The report in a real browser: it loads, sorts, filters and prints, in both themes, on a phone, by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, needed, watched
from result_helpers import EVIL, run

from pfed import report

__all__ = ["chromium"]  # a fixture
pytestmark = needed
METHODS = ["local", "fedavg", "fedrep", "ditto", "fedper", "fedbn", "apfl", "fedprox", "scaffold"]
SIZES = {"wide": (1200, 900), "phone": (390, 800)}

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Nine methods on three clients; one has a name that would like to be a script."""
    results = []
    for i, method in enumerate(METHODS):
        names = (EVIL, "Oslo", "Rome")
        scores = [[0.3 + i / 50 + k / 20 + t / 10 for k in range(3)] for t in range(3)]
        results.append(run(method, scores, names=names, sent=1000 * 10**i * (method != "local"), failures={0: EVIL}))
    path: Path = report.write(results, tmp_path_factory.mktemp("page") / "report.html")
    return path.as_uri()


@pytest.fixture
def open_page(chromium: Any, address: str) -> Iterator[Open]:
    contexts = []

    def opened(size: str = "wide", theme: str = "light", **options: Any) -> Any:
        width, height = SIZES[size]
        context = chromium.new_context(color_scheme=theme, viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.heard = watched(page)
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()


def first_cells(page: Any) -> list[str]:
    found: list[str] = page.locator("table.filterable").first.locator("tbody tr:visible th").all_inner_texts()
    return found


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_loads_without_complaint_and_fits(open_page: Open, size: str, theme: str) -> None:
    page = open_page(size, theme)
    assert page.heard == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0], "it scrolls sideways"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (theme == "dark")
    assert page.locator("svg").first.is_visible()


def test_a_name_that_is_a_script_does_nothing(open_page: Open) -> None:
    page = open_page()
    said: list[str] = []
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.locator(".slider input").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(100)
    assert said == []
    assert page.locator("img").count() == 0
    assert "<script>alert(1)" in page.inner_text("main")


def test_the_policy_stops_what_gets_in_all_the_same(open_page: Open) -> None:
    """Should a text ever become HTML, its script is refused."""
    page = open_page()
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hurt = 1\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hurt = 1'}))")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hurt") is None
    assert any("Content Security Policy" in text for text in page.heard)


def test_a_click_sorts_by_a_column(open_page: Open) -> None:
    page = open_page()
    assert first_cells(page) == METHODS
    header = page.locator("table.filterable").first.locator("th", has_text="accuracy %")
    header.get_by_role("button").click()
    assert first_cells(page) == METHODS[::-1], "the highest first"
    assert header.get_attribute("aria-sort") == "descending"
    header.get_by_role("button").click()
    assert first_cells(page) == METHODS
    assert header.get_attribute("aria-sort") == "ascending"


def test_the_keyboard_sorts_bytes_by_their_size(open_page: Open) -> None:
    """30 kB is more than 300 B and less than 3 MB."""
    page = open_page()
    page.locator("table.filterable").first.get_by_role("button", name="method").click()
    page.locator("table.filterable").first.get_by_role("button", name="per client").focus()
    page.keyboard.press("Enter")
    assert first_cells(page) == METHODS[::-1]
    page.keyboard.press("Space")
    assert first_cells(page) == METHODS
    assert page.locator("[aria-sort]").count() == 1, "of one column only, though another was sorted before"


def test_what_is_unknown_stays_below(open_page: Open) -> None:
    page = open_page()
    button = page.locator("table.filterable").first.get_by_role("button", name="gain over Local")
    for _ in range(2):
        button.click()
        assert first_cells(page)[-1] == "local"


def test_rows_can_be_filtered(open_page: Open) -> None:
    page = open_page()
    page.get_by_label("Filter rows").first.fill("FEDB")
    assert first_cells(page) == ["fedbn"]
    assert page.get_by_text("1 of 9 rows").is_visible()
    page.get_by_label("Filter rows").first.fill("")
    assert first_cells(page) == METHODS


def test_the_target_moves_by_keyboard(open_page: Open) -> None:
    """The last method has 51, 61 and 71 % in rounds 1 to 3 and sends 3 × 10^11 bytes a round."""
    page = open_page()
    slider = page.get_by_role("slider", name="Target accuracy")
    slider.focus()
    page.keyboard.press("Home")
    last, first = (page.locator(".costs tr", has_text=name).locator("td") for name in ("scaffold", "local"))
    assert last.all_inner_texts() == ["1", "300 GB"]
    page.keyboard.press("End")
    assert last.all_inner_texts() == ["3", "900 GB"]
    assert first.all_inner_texts() == ["not reached", "–"]
    assert page.locator(".slider output").inner_text() == "71 %, reached by 1 of 9"
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    assert last.all_inner_texts() == ["2", "600 GB"]
    assert not page.locator(".static").is_visible()


def test_without_script_everything_can_be_read(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    assert page.locator(".static table").is_visible()
    assert not page.locator(".slider").is_visible()
    assert not page.locator(".theme").is_visible()
    assert page.get_by_text("Does federating help?").is_visible()


def test_the_reader_may_choose_the_colours(open_page: Open) -> None:
    page = open_page(theme="light")
    page.get_by_label("Colours").select_option("dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"


def test_the_keyboard_reaches_everything_and_shows_where_it_is(open_page: Open) -> None:
    page = open_page()
    reached, shown = set(), True
    for _ in range(200):
        page.keyboard.press("Tab")
        now = page.evaluate(
            "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
            " return [e.tagName, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]; })()"
        )
        if now[0] == "BODY":
            break
        reached.add(now[0])
        shown = shown and now[1]
    assert reached >= {"SELECT", "BUTTON", "INPUT", "SUMMARY", "DIV"}
    assert shown


def test_it_prints_with_the_static_table(open_page: Open, tmp_path: Path) -> None:
    page = open_page(theme="dark")
    page.emulate_media(media="print")
    assert page.locator(".static table").is_visible()
    assert not page.locator(".slider").is_visible()
    assert not page.locator(".filter").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 703, "height": 1000})  # A4 without its margins, in CSS's pixels
    one, two = page.locator('figure:has(svg[aria-label^="Mean accuracy by"])').all()
    assert one.bounding_box()["y"] == two.bounding_box()["y"], "two charts side by side"
    printed = page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert printed.startswith(b"%PDF")
