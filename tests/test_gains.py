"""Gains over training alone: their intervals, who gains surely, and the command for a missing Local run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from report_helpers import tell
from result_helpers import run

from pfed.cli import _parse
from pfed.report import commands
from pfed.report.gains import LEAST, bootstrap, gains
from pfed.result import Comparison, Result


def judged(method: str, *bits: Sequence[int], seed: int = 0, **more: Any) -> Result:
    """A run of one round whose clients were right on these samples."""
    names = more.pop("names", [f"site {k}" for k in range(len(bits))])
    values = [sum(own) / len(own) for own in bits]
    return run(method, [values], seed, names, bits=dict(enumerate(bits)), **more)


def found(*results: Result) -> Any:
    return gains(Comparison(results))["fedavg"]


def test_an_interval_is_that_of_resampled_test_samples() -> None:
    """100 samples: 30 won, 10 lost, 60 equal. The check draws samples rather than counts."""
    ours, alone = [1] * 30 + [0] * 10 + [1] * 60, [0] * 30 + [1] * 10 + [1] * 60
    low, high = found(judged("fedavg", ours), judged("local", alone)).intervals["site 0"]
    differences = np.array(ours) - np.array(alone)
    samples = np.random.default_rng(1).choice(differences, size=(20000, 100)).mean(1) * 100
    assert [low, high] == pytest.approx(np.quantile(samples, [0.025, 0.975]), abs=1.0)


def test_intervals_are_paired() -> None:
    """Both right on 50 of 100 samples: the same ones, so the difference is 0 for sure; or others, so it is not."""
    half = [1, 0] * 50
    same = found(judged("fedavg", half), judged("local", half)).intervals["site 0"]
    other = found(judged("fedavg", half), judged("local", half[::-1])).intervals["site 0"]
    assert same == (0.0, 0.0)
    assert other[0] < -10 < 10 < other[1]


def test_the_same_runs_give_the_same_intervals() -> None:
    runs = judged("fedavg", [1] * 9 + [0] * 6), judged("local", [0] * 9 + [1] * 6)
    assert found(*runs).intervals == found(*runs).intervals


def test_who_gains_surely_and_who_is_harmed() -> None:
    """The first client wins 15 of 20, the second loses 15, the third one; the fourth has too few samples to say."""
    many, one, none = [1] * 15 + [0] * 5, [1] + [0] * 19, [0] * 20
    few = [1] * (LEAST - 1)
    ours = judged("fedavg", many, none, none, few)
    alone = judged("local", none, many, one, [0] * len(few))
    counts = found(ours, alone).counts()
    assert counts == {"gain": 2, "surely gain": 1, "lose": 2, "surely lose": 1}
    assert found(ours, alone).overall is None, "of a client without interval nobody knows"
    page = tell(ours, alone)
    assert "2 of 4 clients gain, 2 lose. Surely: 1 gain, 1 lose. The least: -75.00 (site 1)." in page.text
    assert f"A client with fewer than {LEAST} test samples has no interval." in page.text
    assert ["fedavg", "+23.75", "–", "-75.00", "+100.00", "4", "2", "1", "2", "1"] in page.rows


def test_the_mean_over_clients_has_an_interval_of_its_own() -> None:
    """Four clients with the same differences: half as wide as the interval of one."""
    ours, alone = [[1, 0] * 50] * 4, [[0, 1] * 50] * 4
    both = found(judged("fedavg", *ours), judged("local", *alone))
    low, high = both.overall
    one = both.intervals["site 0"]
    assert (high - low) / (one[1] - one[0]) == pytest.approx(0.5, abs=0.1)


def test_over_seeds_a_sample_s_difference_is_their_mean() -> None:
    """A client with a name wins its 20 samples under one seed and ties under the other: +50, whatever is drawn."""
    runs = [judged("fedavg", [1] * 20, seed=s, names=["Oslo"]) for s in (0, 1)]
    runs += [judged("local", [s] * 20, seed=s, names=["Oslo"]) for s in (0, 1)]
    both = found(*runs)
    assert both.values == {"Oslo": 50.0}
    assert both.intervals == {"Oslo": (50.0, 50.0)}


def test_no_interval_where_the_reported_round_is_not_the_last() -> None:
    """By its best round the run has 0.9, at the end 0.5, and only of the end it is known which samples were right."""
    bits = {0: [1, 0] * 10}
    ours = run("fedavg", [(0.9,), (0.5,)], names=["a"], bits=bits, select="best_mean_round")
    alone = run("local", [(0.5,), (0.5,)], names=["a"], bits=bits, select="best_mean_round")
    assert not found(ours, alone).intervals
    page = tell(ours, alone)
    assert "No intervals: the reported round is not the last one" in page.text
    assert "bootstrap" not in page.text


def test_no_interval_of_average_precision() -> None:
    """Which is no mean over images, though it is known of each whether all in it was found."""
    bits = {0: [1, 0] * 10}
    ours, alone = (run(name, [(0.5,)], names=["a"], bits=bits, task="detection") for name in ("fedavg", "local"))
    assert not found(ours, alone).intervals
    assert "No intervals: AP50 is no mean over test images." in tell(ours, alone).text


def test_no_interval_without_samples_or_with_others() -> None:
    bits = [1, 0] * 10
    assert "not known which" in found(run("fedavg"), run("local")).why
    assert "not judged on the same" in found(judged("fedavg", bits), judged("local", bits * 2)).why


def test_a_local_run_of_another_split_is_none() -> None:
    bits = [1, 0] * 10
    assert not gains(Comparison([judged("fedavg", bits), judged("local", bits, test_fraction=0.5)]))


def test_a_thousand_clients_take_no_loop_over_resamples() -> None:
    counts = np.tile([10, 60, 30], (1000, 1))
    low, high, total = bootstrap(counts, np.arange(-1, 2), np.ones(1000))
    assert len(low) == len(high) == 1000
    assert len(total) == 1000
    assert total.mean() / 1000 == pytest.approx(0.2, abs=0.005)


def test_without_local_the_page_has_the_command_that_makes_it() -> None:
    special = {"clients": 7, "alpha": 0.3, "test_split": "matched", "representation": True, "engine": "processes"}
    ours = run("fedavg", **special, local={"lr": 0.1, "epochs": 2, "batch_size": 10})
    command = commands.local([ours])
    assert command == (
        "pfed run local --data digits --clients 7 --alpha 0.3 --test-split matched --rounds 2"
        " --representation true --local.lr 0.1 --local.epochs 2"
    )
    assert f"Make one: {command} Then name it in pfed report , too." in tell(ours).text
    _parse(shlex.split(command)[1:])
    several = commands.local([run("fedavg", seed=s, data="my data.csv") for s in (2, 5)])
    assert several == "pfed compare local --data 'my data.csv' --seeds 2,5 --rounds 2"
    _parse(shlex.split(several)[1:])
    assert commands.local([run("fedavg", seed=3)]) == "pfed run local --data digits --rounds 2 --seed 3"


def test_what_no_command_can_make_is_said_in_python() -> None:
    assert 'Experiment("local", …)' in tell(run("fedavg", data="own data")).text
    assert "To compare: pfed compare local METHOD …" in tell(run("local", sent=0)).text
    other = run("local", seed=1, sent=0)
    assert "Make one: pfed run local" in tell(run("fedavg"), other).text, "a Local of another seed is none"
