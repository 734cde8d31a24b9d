"""Results as frames: every row and column is what the record says."""

from __future__ import annotations

import math

import pytest
from result_helpers import alone, made

from pfed import Comparison, Experiment, Federation
from pfed.result import MAIN

pytest.importorskip("pandas", reason="needs pandas: pip install 'pfed[notebook]'")


def test_a_row_per_client() -> None:
    frame = made().frame()
    assert list(frame.columns) == ["client", "name", "train", "test", "bytes_up", "bytes_down", MAIN]
    assert frame.to_dict("records")[1] == {
        "client": 1, "name": "Rome", "train": 11, "test": 5, "bytes_up": 2000, "bytes_down": 4000, MAIN: 0.9,
    }  # fmt: skip


def test_a_comparison_knows_the_gain_of_each_client() -> None:
    """Oslo: 0.5 against 0.6; Rome: 0.9 against 0.8."""
    frame = Comparison([alone(), made()]).frame()
    assert list(frame.columns[:4]) == ["run", "method", "seed", "client"]
    assert frame["gain"].tolist() == pytest.approx([0.0, 0.0, -0.1, 0.1])
    assert frame.groupby("method")[MAIN].mean().to_dict() == pytest.approx({"fedavg": 0.7, "local": 0.7})
    assert frame["run"].tolist() == ["local-s0", "local-s0", "fedavg-s0", "fedavg-s0"]


def test_the_gain_is_missing_where_there_is_no_local_run() -> None:
    assert "gain" not in Comparison([made(), alone(seed=1)][:1]).frame()
    mixed = Comparison([alone(seed=1), made(seed=0), made(seed=1)]).frame()
    assert mixed["gain"].isna().tolist() == [False, False, True, True, False, False]


def test_settings_of_one_method_are_told_apart() -> None:
    both = Comparison([made(hyper={"mu": 0.1}), made(hyper={"mu": 1.0})])
    for kind in ("clients", "rounds", "history", "runs"):
        assert sorted(set(both.frame(kind)["method"])) == ["fedavg mu=0.1", "fedavg mu=1.0"], kind


def test_a_row_per_round() -> None:
    """A decile of two clients is one: 0.5 in both rounds. Nothing was judged at the start."""
    frame = made().frame("rounds").set_index("round")
    assert frame.index.tolist() == [0, 1, 2]
    assert frame.loc[2, [MAIN, f"{MAIN}/worst-decile", "seconds", "bytes_up", "bytes_down"]].tolist() == pytest.approx(
        [0.7, 0.5, 1.5, 2000, 4000]
    )
    assert math.isnan(frame.loc[0, MAIN])
    assert frame["ensemble/new-test"].tolist()[2] == 0.25, "a metric of all clients together"


def test_a_row_per_round_and_client() -> None:
    frame = Comparison([made(accuracies=[(0.5, 0.6), (), (0.5, 0.9)])]).frame("history")
    assert list(frame.columns) == ["run", "method", "seed", "round", "client", "name", MAIN]
    found = list(zip(frame["round"], frame["name"], frame[MAIN], strict=True))
    assert found == [(1, "Oslo", 0.5), (1, "Rome", 0.6), (3, "Oslo", 0.5), (3, "Rome", 0.9)]


def test_a_row_per_run() -> None:
    frame = Comparison([alone(), made()]).frame("runs")
    assert frame["gain-over-local"].tolist() == pytest.approx([0.0, 0.0])
    assert frame["harmed-clients"].tolist() == [0.0, 0.5]
    assert frame["bytes_up"].tolist() == [0, 4000]
    assert frame[f"{MAIN}/worst-decile"].tolist() == [0.6, 0.5]
    assert "per_client" not in frame


def test_a_real_run_agrees_with_its_metrics(tiny: Federation) -> None:
    result = Experiment("cd2pfed", tiny, "mlp", rounds=2, hyper={"judge_subnets": True}).run()
    clients, rounds, history = (result.frame(kind) for kind in ("clients", "rounds", "history"))
    names = [name for name in result.metrics if name.endswith("/local-test")]
    assert len(names) > 1, "that of each sub-network"
    for name in names:
        assert clients[name].mean() == pytest.approx(result.metrics[name])
        assert rounds[name].iloc[-1] == pytest.approx(result.metrics[name])
        assert history[history["round"] == 2][name].mean() == pytest.approx(result.metrics[name])
    assert rounds["bytes_up"].sum() == clients["bytes_up"].sum() == result.bytes_up > 0
