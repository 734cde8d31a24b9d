"""The live page in a real browser: it follows runs without reloading, stops them and compares them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, needed
from test_resume import pfed as command
from test_watch import EVIL, add, begun, finished
from watch_helpers import NAME, Gate, serving

from pfed.store import Store
from pfed.watch import app

with contextlib.suppress(ModuleNotFoundError):
    from playwright.sync_api import Browser, Page, expect

pytestmark = needed
__all__ = ["chromium"]  # a fixture

WAIT = 60_000  # milliseconds, for machines that have other things to do


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are drawn as fast as they can be."""
    monkeypatch.setattr(app, "LEAST", 0.0)
    monkeypatch.setattr(app, "SHARE", 1.0)


Visit = Callable[..., "Page"]


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Visit]:
    """Serves a runs folder and opens its page; afterwards nothing may have been complained about in the console."""
    complaints: list[str] = []
    expect.set_options(timeout=WAIT)
    with contextlib.ExitStack() as stack:

        def opened(runs: Path, *names: str, width: int = 1100, theme: Any = "light") -> Page:
            server = stack.enter_context(serving(runs, *names))
            context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
            stack.callback(context.close)
            context.set_default_timeout(WAIT)
            page = context.new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
            page.goto(server.address())
            return page

        yield opened
    assert complaints == []


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def item(page: Page, run: str) -> Any:
    return page.locator("#runs li", has=page.get_by_text(run, exact=True))


def test_a_run_is_followed_from_its_start_to_its_end(tmp_path: Path, gate: Gate, visit: Visit) -> None:
    """Without reloading: the run appears, its curve grows, what was opened stays open and focused."""
    runs = tmp_path / "runs"
    page = visit(runs)
    assert page.url.endswith("/"), "the token is gone from the address"
    expect(page.locator("#none")).to_be_visible()
    page.evaluate("window.same = true")
    with gate.run(runs, 4) as run:
        row = item(page, NAME)
        expect(row.locator(".state")).to_have_text("running")
        expect(row.locator(".round")).to_have_text("0 of 4")
        expect(page.locator("#report")).to_contain_text("has no evaluation yet")
        gate.open(2)
        expect(row.locator(".round")).to_have_text("2 of 4")
        expect(row.locator(".accuracy")).to_have_text(re.compile(r"^\d+\.\d\d %$"))
        expect(page.locator("#report")).to_contain_text("2 of 4")
        curve = page.locator('#report svg[aria-label="Mean accuracy by round and method"]')
        before = curve.inner_html()
        summary = page.locator("summary", has_text="Configuration of gated")
        summary.click()
        expect(page.locator("#report")).to_contain_text("local.batch_size")
        summary.evaluate("element => { element.same = true; element.scrollIntoView({block: 'end'}) }")
        place = summary.bounding_box()
        gate.open(3)
        expect(page.locator("#report")).to_contain_text("3 of 4")
        assert curve.inner_html() != before
        assert summary.evaluate("element => element.same && element === document.activeElement")
        assert summary.evaluate("element => element.parentElement.open")
        assert abs(summary.bounding_box()["y"] - place["y"]) < 60, "what one reads stays where it is"
        gate.open(4)
        expect(row.locator(".state")).to_have_text("complete")
        assert run.wait(60) == 0
    expect(page.locator("#said")).to_have_text(f"{NAME} is complete after round 4.")
    expect(row.locator(".stop")).to_be_hidden()
    expect(page.locator("#report")).to_contain_text("4 of 4")
    assert page.evaluate("window.same")


def test_a_run_is_stopped_by_the_button(tmp_path: Path, gate: Gate, visit: Visit) -> None:
    """By keyboard: the question can be answered with no, then with yes; the run ends with a checkpoint."""
    runs = tmp_path / "runs"
    page = visit(runs)
    with gate.run(runs, 3) as run:
        button = page.get_by_role("button", name=f"Stop {NAME}")
        button.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name=f"Stop {NAME}?")
        expect(dialog).to_contain_text("If it is part of pfed compare or pfed tune, that whole command ends")
        expect(dialog.get_by_role("button", name="Let it go on")).to_be_focused()
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(button).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        expect(item(page, NAME).locator(".state")).to_have_text(re.compile("^stop"))
        gate.open(1)
        expect(item(page, NAME).locator(".state")).to_have_text("stopped")
        assert run.wait(60) == 130
        expect(page.locator("#said")).to_contain_text(f"{NAME} is stopped after round")
    assert command("resume", NAME, "--runs", runs).code == 0


def test_runs_are_chosen_and_compared(tmp_path: Path, visit: Visit) -> None:
    """The newest is shown by itself; others join by a click or the space bar; the address remembers them."""
    for created, method in enumerate(("local", "fedavg", "ditto")):
        config = {"method": method, "data": "digits", "rounds": 2, "seed": 3, "select": "last"}
        finished(tmp_path / method, 2, config=config, method=method, created=created + 1.0)
    page = visit(tmp_path)
    expect(page.locator("#report h1")).to_have_text("ditto on digits")
    item(page, "local").get_by_role("checkbox").focus()
    page.keyboard.press("Space")
    expect(page.locator("#report h1")).to_have_text("local, ditto on digits")
    expect(page.get_by_role("checkbox", name="select runs as they start")).not_to_be_checked()
    assert page.url.endswith("/?run=local&run=ditto")
    page.reload()
    expect(page.locator("#report h1")).to_have_text("local, ditto on digits")
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save it as a file").click()
    assert Path(saved.value.path()).read_text().startswith("<!doctype html>")
    page.get_by_role("button", name="select none").click()
    expect(page.locator("#fresh")).to_contain_text("Select runs to see their report.")
    expect(page.locator("#report")).to_be_empty()


def test_who_comes_in_the_midst_of_a_comparison_sees_it(tmp_path: Path, visit: Visit) -> None:
    """With a run that goes on, those of its settings under other methods are selected, the newest of each."""
    for created, (run, method, rounds) in enumerate(
        [("local-1", "local", 4), ("local-2", "local", 4), ("fedavg-1", "fedavg", 4), ("fedper-1", "fedper", 5)]
    ):
        config = {"method": method, "data": "digits", "rounds": rounds, "seed": 3, "hyper": {"of": method}}
        finished(tmp_path / run, rounds, config=config, method=method, created=created + 1.0)
    config = {"method": "ditto", "data": "digits", "rounds": 4, "seed": 3, "hyper": {"lam": 1.0}, "engine": "processes"}
    with begun(tmp_path / "ditto-1", 4, config=config, method="ditto", created=9.0) as opened:
        add(opened, 1, 0.4)
        page = visit(tmp_path)
        expect(page.locator("#report h1")).to_have_text("local, fedavg, ditto on digits")
        expect(page.locator("#runs li:has(input:checked) .run")).to_have_text(["ditto-1", "fedavg-1", "local-2"])


def test_a_live_redraw_keeps_what_someone_has_done(tmp_path: Path, visit: Visit) -> None:
    """Tables stay sorted as they were, the target stays where it was put, though a round has come in."""
    for created, method in enumerate(("local", "fedavg")):
        config = {"method": method, "data": "digits", "rounds": 2, "seed": 3, "select": "last"}
        finished(tmp_path / method, 2, config=config, method=method, created=created + 1.0)
    config = {"method": "ditto", "data": "digits", "rounds": 9, "seed": 3, "select": "last"}
    with begun(tmp_path / "ditto", 9, config=config, method="ditto", created=3.0) as opened:
        add(opened, 1, 0.4)
        page = visit(tmp_path, "local", "fedavg", "ditto")
        table = page.locator("#report table").first
        header = table.get_by_role("columnheader", name="method")
        header.get_by_role("button").click()
        header.get_by_role("button").click()
        expect(header).to_have_attribute("aria-sort", "descending")
        methods = table.locator("tbody tr td:first-child, tbody tr th:first-child")
        expect(methods).to_have_text(["local", "fedavg", "ditto"])
        slider = page.get_by_role("slider", name="Target accuracy")
        slider.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        put = slider.input_value()
        rounds = table.get_by_role("row", name="ditto")
        before = rounds.inner_text()
        add(opened, 2, 0.7)
        expect(rounds).not_to_have_text(before, use_inner_text=True)
        expect(header).to_have_attribute("aria-sort", "descending")
        expect(methods).to_have_text(["local", "fedavg", "ditto"])
        assert slider.input_value() == put
        expect(slider).to_be_focused()


def test_a_report_that_takes_its_time_is_announced(tmp_path: Path, visit: Visit) -> None:
    for created, method in enumerate(("local", "fedavg")):
        finished(tmp_path / method, 2, method=method, created=created + 1.0)
    page = visit(tmp_path, "local")
    expect(page.locator("#drawn")).to_contain_text("Report of 1 run")
    held: list[Any] = []
    page.route("**/report?*", lambda route: held.append(route))
    item(page, "fedavg").get_by_role("checkbox").check()
    expect(page.locator("#drawn")).to_have_text("Drawing the report …")
    held[0].continue_()
    page.unroute("**/report?*")
    expect(page.locator("#drawn")).to_contain_text("Report of 2 runs")


def test_many_runs_can_be_searched(tmp_path: Path, visit: Visit) -> None:
    for number in range(12):
        finished(tmp_path / f"run-{number}", 1, created=float(number))
    page = visit(tmp_path, "run-3")
    assert page.url.endswith("/?run=run-3")
    expect(page.locator("#runs li")).to_have_count(12)
    assert page.locator("#runs li .run").all_inner_texts()[:2] == ["run-11", "run-10"]
    page.get_by_label("find").fill("RUN-1")
    expect(page.locator("#runs li:visible .run")).to_have_text(["run-11", "run-10", "run-1"])


def test_names_with_html_do_nothing(tmp_path: Path, visit: Visit) -> None:
    with begun(tmp_path / EVIL, method=EVIL, data=EVIL) as opened:
        page = visit(tmp_path)
        expect(page.locator("#runs .run")).to_have_text(EVIL)
        add(opened, 1, 0.5)
        expect(page.locator("#report h1")).to_contain_text(EVIL)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#question")).to_have_text(f"Stop {EVIL}?")
        page.keyboard.press("Escape")
        assert page.locator("img, #report script:not([type='application/json'])").count() == 0


CONTRAST = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const gamma = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const linear = parts(color).slice(0, 3).map((v) => gamma(v / 255));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const color = getComputedStyle(element).backgroundColor;
      if (parts(color)[3] !== 0) return color;
    }
  };
  const words = [...document.querySelectorAll("section *, #fresh *")].filter((e) => e.innerText && e.offsetParent);
  return words.map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.className, e.innerText];
  });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_both_themes_and_a_phone(tmp_path: Path, visit: Visit, theme: str, width: int) -> None:
    """Nothing is wider than the screen, and every word can be told from what is behind it."""
    with begun(tmp_path / "a-run-with-a-name-that-is-very-much-longer-than-most-others-are") as opened:
        add(opened, 1, 0.5)
        for state in ("failed", "stopped", "running"):
            finished(tmp_path / state, 2)
            with contextlib.closing(Store(tmp_path / state)) as other:
                other.record.set(state=state)
        page = visit(tmp_path, width=width, theme=theme)
        expect(page.locator("#report svg").first).to_be_visible()
        assert sorted(page.locator("#runs .state").all_inner_texts()) == ["died", "failed", "running", "stopped"]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        right = page.locator("#runs li > *:visible").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect().right)"
        )
        assert max(right) <= width
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[theme]
        assert [word for word in page.evaluate(CONTRAST) if word[0] < 4.5] == []
        page.keyboard.press("Tab")
        focused = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert focused == "solid", "who uses the keyboard sees where they are"


def test_the_end_of_the_watch_is_told(tmp_path: Path, chromium: Browser) -> None:
    with serving(tmp_path) as server:
        page = chromium.new_page()
        page.goto(server.address())
        expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#link")).to_have_text(re.compile("connection lost"))
    page.close()
