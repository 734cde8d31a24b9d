"""The report: complete, safe to open, true to the runs, and never in the way."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import xml.etree.ElementTree as ET

import pytest
from report_helpers import Page, show, tell
from result_helpers import EVIL, run

from pfed import report
from pfed.errors import UserError
from pfed.record import Record
from pfed.report import charts, numbers, page
from pfed.report.gains import Gains, gains
from pfed.report.markup import tag
from pfed.result import Comparison, Result


@pytest.fixture(scope="module")
def compared() -> list[Result]:
    local = [run("local", [(0.5, 0.5), (0.6, 0.8)], seed, sent=0) for seed in (0, 1)]
    ours = [run("fedavg", [(0.4, 0.6), (0.5 + seed / 10, 0.9)], seed, failures={0: "went home"}) for seed in (0, 1)]
    return local + ours


@pytest.fixture(scope="module")
def usual(compared: list[Result]) -> Page:
    return show(*compared)


def test_the_file_needs_nothing_beside_it(compared, usual, tmp_path):
    out = report.write(compared, tmp_path / "new" / "folder" / "report.html")
    assert out.read_text(encoding="utf-8") == usual.raw, "the same runs give the same page"
    assert not {"link", "img", "iframe", "image", "use"} & set(usual.tags)
    assert not re.search(r"://|@import|url\(|\s(src|href|style|on\w+)=", usual.raw)


def test_nothing_runs_but_the_page_s_own_script(usual):
    """The policy has the hashes of the one script and the one style that are there; data are no script."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', usual.raw)[1]
    assert policy.startswith("default-src 'none';")
    for kind in ("script", "style"):
        (own,) = re.findall(rf"<{kind}>(.*?)</{kind}>", usual.raw, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert re.findall(r"<script(.*?)>", usual.raw) == [' type="application/json"', ""]


def test_charts_are_sound_and_follow_the_page_colours(usual):
    assert len(usual.svgs) == 7
    for svg in usual.svgs:
        ET.fromstring(svg)
        assert 'fill="currentColor"' in svg
        assert not re.search(r'(fill|stroke)="(#000|#fff|white|black)"', svg)
        assert 'id="' not in svg, "two charts on a page would share it"
    widths = [int(re.search(r'width="(\d+)"', svg)[1]) for svg in usual.svgs]
    assert max(widths) <= 340, "wider than a phone"


def test_the_table_is_that_of_the_terminal(compared, usual):
    header, _, *lines = Comparison(compared).table().splitlines()
    for line in (header, *lines):
        assert re.split(r"\s{2,}", line) in usual.rows
    assert "Of 2 methods fedavg has the highest mean accuracy, 72.50 ± 3.54 %, +2.50 ± 3.54 points" in usual.text


def test_columns_of_other_tests_appear_where_there_are_any():
    results = [run("fedavg"), run("fedper")]
    results[0].metrics["ensemble/new-test"] = 0.25
    header, _, *lines = Comparison(results).table().splitlines()
    rows = tell(*results).rows
    assert all(re.split(r"\s{2,}", line) in rows for line in (header, *lines))


def test_gains_are_means_over_seeds_for_clients_with_a_name(compared):
    """Oslo: 0.5 and 0.6 against 0.6, so -10 and 0; Rome: 0.9 against 0.8 twice."""
    assert gains(Comparison(compared))["fedavg"].values == pytest.approx({"Oslo": -5.0, "Rome": 10.0})


def test_numbered_clients_are_others_under_every_seed():
    names = ("client-0", "client-1")
    results = [run(m, [(a, a)], s, names) for s in (0, 1) for m, a in (("local", 0.5), ("fedavg", 0.6))]
    found = gains(Comparison(results))["fedavg"].values
    assert sorted(found) == ["client-0, seed 0", "client-0, seed 1", "client-1, seed 0", "client-1, seed 1"]
    assert sorted(gains(Comparison(results[:2]))["fedavg"].values) == ["client-0", "client-1"]
    said = "Clients that are only numbered are others under each seed, and all of them are counted."
    assert said in tell(*results).text
    assert said not in tell(*results[:2]).text


def test_gains_show_who_is_helped(usual):
    assert "1 of 2 clients gain, 1 lose. The least: -5.00 (Oslo)." in usual.text
    chart = usual.svgs[0]
    assert chart.index(">Rome<") < chart.index(">Oslo<"), "the best first"
    assert chart.count(f'fill="{charts.UP}"') == chart.count(f'fill="{charts.DOWN}"') == 1


def test_curves_are_means_over_clients_and_seeds(compared):
    """Round 2 of fedavg: (0.5 + 0.9) / 2 and (0.6 + 0.9) / 2. Each client has sent 1000 and got 2000 in each round."""
    rows = [row for row in numbers.curves(compared) if row["method"] == "fedavg"]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[1] == pytest.approx(
        {"method": "fedavg", "round": 2, "bytes": 6000, "mean": 72.5, "low": 70.0, "high": 75.0}
    )


def test_bytes_are_those_of_a_round(compared):
    rows = numbers.traffic(compared)
    assert {"method": "fedavg", "round": 2, "up": 2000, "down": 4000} in rows
    assert {"method": "local", "round": 1, "up": 0, "down": 0} in rows
    assert all(row["round"] for row in rows), "nothing was sent at the start"
    assert "Nothing was sent." in tell(run("local", sent=0)).text


def test_a_round_after_the_last_is_explained():
    said = "A round after the last is what a method does at the end."
    assert said in tell(run(rounds=1)).text, "two rounds are there, one was planned"
    assert said not in tell(run()).text


def test_the_sizes_of_clients_are_told():
    assert "A client trains on 10 to 11 samples, 11 in the middle." in tell(run()).text
    alike = run()
    for row in alike.clients:
        row["train"] = 10
    assert "Every client trains on 10 samples." in tell(alike).text


def test_a_method_that_sends_nothing_is_a_level_line(compared):
    rows = charts._to_the_edge(numbers.curves(compared))
    assert [(row["bytes"], row["mean"]) for row in rows if row["method"] == "local"] == [(0, 70.0), (6000, 70.0)]


def test_long_curves_keep_their_end():
    rows = numbers.thin(numbers.curves([run(accuracies=[(t / 1000,) for t in range(999)], names=["a"])]))
    assert len(rows) <= numbers.POINTS
    assert rows[-1]["round"] == 999


def test_failures_and_notes_are_counted(usual):
    assert ["dropped", "went home", "4", "1 to 2", "Oslo", "fedavg-s0, fedavg-s1"] in usual.rows
    assert ["note", "mind the gap", "1", "0", "–", "fedavg-s0"] in tell(run(note="mind the gap")).rows
    assert "No client failed or dropped out" in tell(run()).text


def test_many_different_failures_are_cut():
    many = run(failures={k: f"reason {k}" for k in range(page.EVENTS + 7)})
    found = tell(many)
    assert sum(row[0] == "dropped" for row in found.rows) == page.EVENTS
    assert "… and 7 more." in found.text


def test_how_it_was_run_is_folded_away(usual):
    assert usual.tags.count("details") == 3
    assert ["local.lr", "0.05"] in usual.rows
    assert ["seed", "0, 1"] in usual.rows
    assert ["fedavg-s1", "fedavg", "1", "complete", "2 of 2", "serial", "3.0 s", "–", "2", "pfed 0.1.0, torch 2.6"] in (
        usual.rows
    )
    finished = tell(run(rounds=1))
    assert "1 of 1" in next(row for row in finished.rows if row[0] == "fedavg-s0"), "tuning at the end is no round"


def test_runs_that_differ_in_more_than_the_seed_are_named(usual):
    mixed = tell(run(fedavg={"mu": 1}), run(fedavg={"mu": 2}, seed=1))
    assert "The runs of fedavg differ in fedavg.mu: their mean mixes settings." in mixed.text
    assert "mixes settings" not in usual.text


def test_variants_of_a_method_are_told_apart_everywhere():
    """Two strategies of one method: a row, gains, costs, a curve and a configuration each, no mean over both."""
    one, two = (
        run(hyper={"strategy": s, "agg": "samples"}, accuracies=[(a, a)]) for s, a in (("fc", 0.75), ("full", 0.5))
    )
    both = [one, two, run("local", accuracies=[(0.5, 0.5)], hyper={})]
    names = ["fedavg strategy=fc", "fedavg strategy=full"]
    told = tell(*both)
    assert [row[:2] for row in told.rows if row[:1] in ([names[0]], [names[1]])] == [
        [names[0], "75.00"],
        [names[1], "50.00"],
        [names[0], "+25.00"],
        [names[1], "+0.00"],
        [names[0], "1, 3 kB"],
        [names[1], "1, 3 kB"],
    ]
    assert [f"Configuration of {name}" in told.text for name in names] == [True, True]
    assert "mixes settings" not in told.text
    assert "agg=samples" not in told.text
    assert told.text.startswith("pfed: fedavg, local on digits")
    curve = next(figure for figure in page.figures(both) if figure.name == "accuracy-by-round")
    assert [row["method"] for row in curve.rows] == [*names, "local"]


def test_accuracy_chosen_on_test_data_is_called_so(usual):
    assert "best_per_client, chosen on the test data, which flatters" in tell(run(select="best_per_client")).text
    assert "Reported round: last." in usual.text


def test_no_text_becomes_html():
    evil = run(EVIL, names=(EVIL, "Rome"), failures={0: EVIL}, data=EVIL, state=EVIL, **{EVIL: {EVIL: EVIL}})
    local = run("local", names=(EVIL, "Rome"), data=EVIL)
    evil.run, evil.classes, evil.versions = EVIL, [EVIL, "dog"], {EVIL: EVIL}
    stopped = run(EVIL, [(), ()], data=EVIL)
    found = show(evil, local, stopped)
    assert "img" not in found.tags
    assert set(re.findall(r"<script(.*?)>", found.raw)) == {' type="application/json"', ""}
    assert EVIL in found.text
    block = re.search(r'<script type="application/json">(.*?)</script>', found.raw)[1]
    assert json.loads(block)[0]["method"] == EVIL
    for svg in found.svgs:
        ET.fromstring(svg)
    assert tag("p", EVIL, title=EVIL).count("<") == 2


def test_names_that_are_no_text_do_not_end_the_process(tmp_path):
    odd = ("a\x1b[2J\x00", "b\udcff")
    results = [run("local"), run("fedavg", failures={1: "\x01"})]
    for result in results:
        for row, name in zip(result.clients, odd, strict=True):
            row["name"] = name  # as the operating system gave it
    assert "a?[2J?" in report.write(results, tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_run_without_evaluation_is_named_and_left_out():
    stopped = run("fedper", [(), ()], state="stopped")
    found = tell(run("fedavg"), stopped)
    assert "Run fedper-s0 (fedper, stopped) has no evaluation" in found.text
    assert not [row for row in found.rows if row[0] == "fedper"]
    assert len(tell(stopped).svgs) == 4, "its bytes and its data are known all the same"


def test_a_run_that_never_began_is_named():
    with contextlib.closing(Record(None)) as record:
        nothing = Result(record, "early")
    assert "Run early (unknown method, stopped) has no evaluation" in tell(nothing).text
    assert "fedavg" in tell(nothing, run()).text


def test_runs_on_other_data_are_apart():
    found = tell(run("fedavg"), run("fedavg", data="cifar10"), run("fedavg", alpha=0.3))
    for heading in ("digits, 2 clients", "cifar10, 2 clients", "digits, 2 clients, alpha 0.3"):
        assert f"<h2>{heading}</h2>" in found.raw
    assert "3 settings, which are not to be compared with each other" in found.text
    assert sum(row[:1] == ["fedavg"] for row in found.rows) == 6, "in the tables of methods and of targets"
    assert "on digits, cifar10" in found.text


def test_many_clients_become_a_histogram():
    names = [f"site {k}" for k in range(250)]
    spread = [0.4 + k / 1000 for k in range(250)]
    found = show(run("local", [[0.5] * 250], names=names), run("fedavg", [spread], names=names))
    assert "149 of 250 clients gain, 100 lose." in found.text
    assert "The first 200 of 250 clients are shown." in found.text
    chart = found.svgs[0]
    assert "site" not in chart
    assert ">clients<" in chart
    assert chart.count(f'fill="{charts.UP}"') < 2 * 24, "bins, each with those who gain surely"
    assert len(found.raw) < 200_000


def test_clients_too_many_for_names_are_bars():
    values = {f"site {k}": k - 40.0 for k in range(100)}
    chart = charts.gains("fedavg", Gains(values), (-40.0, 59.0)).inline()
    assert chart.count(f'fill="{charts.UP}"') == 60
    assert chart.count(f'fill="{charts.DOWN}"') == 40
    assert "site" not in chart


def test_a_bin_holds_gains_or_losses_and_nobody_is_lost():
    values = [-3.7, -0.1, 0.0, 0.1, 5.0, 9.9]
    bins = charts.histogram(values, (-3.7, 9.9))
    assert sum(bin["clients"] for bin in bins) == len(values)
    assert all(bin["end"] <= 0 or bin["gain"] >= 0 for bin in bins)
    assert sum(bin["clients"] for bin in bins if bin["end"] <= 0) == 2
    assert charts.histogram([0.0, 0.0], (0.0, 0.0)) == [{"gain": 0.0, "end": 1.0, "clients": 2, "surely": 2}]


def test_a_federation_of_very_many_cells_is_cut(monkeypatch):
    monkeypatch.setattr(charts, "CELLS", 30)
    clients = [{"name": str(k), "counts": [1] * 7 + [0] * 9} for k in range(50)]
    assert charts.shown(clients) == len(charts.data(clients, [str(c) for c in range(16)], "samples").rows) == 5


def test_impossible_reports_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"^A report needs at least one run\. Got none\.$"):
        report.write([], tmp_path / "report.html")
    with pytest.raises(UserError, match=r"^The report can't be written to '.*': Is a directory\.$"):
        report.write([run()], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^The report can't be written to '.*/file/report\.html': [A-Z].*\.$"):
        report.write([run()], tmp_path / "file" / "report.html")
