"""What results show of themselves in a terminal and in a notebook, their charts, and how they are found again."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import altair as alt
import pytest
from result_helpers import EVIL, alone, made

from pfed import Comparison, Experiment, Federation, Result, UserError, display
from pfed.result import MAIN


def cells(html: str) -> list[list[str]]:
    """The texts of a table, row by row."""
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_clients_are_rows_that_show_themselves() -> None:
    clients = made().clients
    assert clients[1]["counts"] == [10, 1]
    assert clients[1][MAIN] == 0.9
    header, _, *lines = repr(clients).splitlines()
    assert re.split(r"\s{2,}", header) == ["client", "train", "test", "accuracy %", "sent", "received"]
    assert [re.split(r"\s{2,}", line) for line in lines] == [
        ["Oslo", "10", "5", "50.00", "2 kB", "4 kB"],
        ["Rome", "11", "5", "90.00", "2 kB", "4 kB"],
    ]
    assert cells(clients._repr_html_()) == [re.split(r"\s{2,}", line) for line in (header, *lines)]


def test_clients_that_were_not_judged_have_no_number() -> None:
    assert "–" in repr(made(accuracies=[()]).clients)


def test_of_many_clients_the_first_are_shown() -> None:
    many = made(accuracies=[[0.5] * 1100], names=[f"site {k}" for k in range(1100)]).clients
    assert len(many) == 1100
    assert repr(many).splitlines()[-1] == "… and 1,070 more clients"
    assert len(cells(many._repr_html_())) == display.SHOWN + 1
    assert "<p>… and 1,070 more clients</p>" in many._repr_html_()


def test_a_notebook_shows_the_table_of_the_terminal_and_the_notes() -> None:
    compared = Comparison([alone(), made(note="mind the gap")])
    for shown in (compared, made(note="mind the gap")):
        header, _, *lines = shown.table().splitlines()
        assert cells(shown._repr_html_()) == [re.split(r"\s{2,}", line) for line in (header, *lines)]
    assert "<p>fedavg: mind the gap</p>" in compared._repr_html_()
    assert "<p>mind the gap</p>" in made(note="mind the gap")._repr_html_()
    assert repr(made()) == "<Result fedavg-s0: 70.00 %>"
    assert not re.search(r"color|background|#[0-9a-f]{3}", display.STYLE), "a dark notebook has its own"


def test_no_text_becomes_html() -> None:
    evil = made(EVIL, names=(EVIL, "Rome"), note=EVIL)
    for shown in (evil, Comparison([evil, alone()]), evil.clients):
        html = shown._repr_html_()
        assert "&lt;script&gt;" in html
        assert not re.search("<(script|img)", html)


def points(chart: alt.TopLevelMixin) -> list[dict[str, Any]]:
    """The rows of a chart's data."""
    rows: list[dict[str, Any]] = chart.to_dict()["data"]["values"]
    return rows


def test_curves_are_those_of_the_report() -> None:
    compared = Comparison([alone(), made(), made(seed=1, accuracies=[(0.5, 0.5), (0.7, 0.9)])])
    rows = points(compared.plot())
    last = next(row for row in rows if row["method"] == "fedavg" and row["round"] == 2)
    assert (last["mean"], last["low"], last["high"]) == pytest.approx((75.0, 70.0, 80.0))
    assert {row["method"] for row in points(compared.plot("bytes"))} == {"local", "fedavg"}
    assert points(made().plot("bytes"))[-1]["bytes"] == 6000
    across = [compared.plot(kind).to_dict()["layer"][1]["encoding"]["x"]["field"] for kind in ("rounds", "bytes")]
    assert across == ["round", "bytes"]


def test_settings_of_one_method_have_curves_of_their_own() -> None:
    compared = Comparison([made(hyper={"mu": 0.1}), made(hyper={"mu": 1.0})])
    assert {row["method"] for row in points(compared.plot())} == {"fedavg mu=0.1", "fedavg mu=1.0"}
    assert {result.method for result in compared.results} == {"fedavg"}, "the results are as they were"


def test_gains_are_bars_on_one_scale() -> None:
    """Oslo: 0.5 and 0.6 against 0.6; Rome: 0.9 and 0.7 against 0.8."""
    parts = Comparison([alone(), made(), made("fedper", [(0.6, 0.7)])]).plot("gains").to_dict()["concat"]
    assert [part["title"] for part in parts] == ["fedavg", "fedper"]
    bars = [part["layer"][0] for part in parts]
    found = [{row["client"]: row["gain"] for row in part["data"]["values"]} for part in bars]
    assert found == [pytest.approx({"Rome": 10.0, "Oslo": -10.0}), pytest.approx({"Oslo": 0.0, "Rome": -10.0})]
    assert [part["encoding"]["x"]["scale"]["domain"] for part in bars] == [pytest.approx([-10.0, 10.0])] * 2


def test_data_are_counts_by_client_and_class() -> None:
    cells = made().plot("data").to_dict()["hconcat"][0]["data"]["values"]
    assert {(row["client"], row["class"], row["samples"]) for row in cells} == {
        ("Oslo", "cat", 10), ("Rome", "cat", 10), ("Rome", "dog", 1),
    }  # fmt: skip


def test_charts_can_be_put_together_and_saved(tmp_path: Path) -> None:
    compared = Comparison([alone(), made()])
    drawn = (compared.plot() | compared.plot("bytes")) & compared.plot("gains") & compared.plot("data")
    drawn.save(tmp_path / "all.svg")
    assert "accuracy %" in (tmp_path / "all.svg").read_text()
    told = compared.plot().to_dict()["layer"][-1]["encoding"]["tooltip"]
    assert [field["field"] for field in told] == ["method", "round", "mean", "low", "high"]


@pytest.mark.parametrize("kind", ["rounds", "bytes", "gains", "data"])
def test_no_name_ends_the_script_that_a_chart_is_in_a_notebook(kind: str) -> None:
    evil = made(EVIL, names=(EVIL, "Rome"), hyper={EVIL: EVIL})
    evil.classes = [EVIL, "dog"]
    html = Comparison([alone(names=(EVIL, "Rome")), evil]).plot(kind).to_html()
    assert "alert(1)" in html
    assert not re.search("<script>alert|<img", html)
    assert evil.clients[0]["name"] == evil.method == EVIL, "the result is as it was"


@pytest.mark.parametrize(
    ("kind", "results", "sentence"),
    [
        ("gain", [made()], "There is no kind of plot 'gain'. Did you mean 'gains'?"),
        ("rounds", [made(accuracies=[()])], "There is nothing to plot: no run was evaluated."),
        ("rounds", [], "There is nothing to plot: no run was evaluated."),
        ("bytes", [alone()], "There are no bytes to plot: nothing was sent."),
        (
            "gains",
            [made(), alone(seed=1)],
            "Gains need a run of another method and one of 'local' on the same clients, in one comparison.",
        ),
        ("data", [], "There are no data to plot: the run counted no samples by class."),
    ],
)
def test_charts_that_cannot_be_drawn(kind: str, results: list[Result], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        Comparison(results).plot(kind)
    assert str(error.value) == sentence


def test_frames_need_pandas_and_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^There is no kind of frame 'client'\. Did you mean 'clients'\?$"):
        made().frame("client")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"^The package pandas is missing: pip install 'pfed\[notebook\]'\.$"):
        made().frame()


def test_a_run_is_loaded_by_name_or_folder(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Experiment("local", tiny, "mlp", rounds=1).run(tmp_path / "runs")
    assert done.folder is not None
    monkeypatch.chdir(tmp_path)
    found = [Result.load(done.run), Result.load(done.folder), Result.load(str(done.folder))]
    monkeypatch.chdir("/")
    found.append(Result.load(done.run, runs=tmp_path / "runs"))
    monkeypatch.setenv("PFED_RUNS", str(tmp_path / "runs"))
    found.append(Result.load(done.run))
    assert [result.json() for result in found] == [done.json()] * 5
    with pytest.raises(UserError, match=rf"^There is no run '{done.run}1'\. Did you mean '{done.run}'\?$"):
        Result.load(f"{done.run}1")
