"""What each method knows: panels by the names of what was logged, features kept for a picture, safe and in bounds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from report_helpers import tell
from result_helpers import EVIL, run

from pfed import Experiment, Federation, embedding
from pfed.engines.base import POOLED
from pfed.report import panels
from pfed.report.details import CELLS, LOGS, METRICS, _clients, details
from pfed.report.figures import Figure
from pfed.result import Log, Result


def figures(*results: Result) -> dict[str, Figure]:
    return {one.name: one for part in details(results) if isinstance(part, list) for one in part}


def test_numbers_that_belong_together_share_a_panel() -> None:
    logs = {(POOLED, "p"): [0.1, 0.2], (POOLED, "beta"): [0.3, 0.4], (0, "strange"): [1.0, 2.0]}
    found = figures(run("cd2pfed", logs=logs))
    assert sorted(found) == ["cd2pfed-Private-share-and-smoothing", "cd2pfed-strange"]
    both = found["cd2pfed-Private-share-and-smoothing"]
    assert {row["name"] for row in both.rows} == {"p", "beta"}
    assert "In the last round: p 0.2, beta 0.4." in both.caption


def test_a_curve_is_the_mean_over_clients_and_runs() -> None:
    """Clients have 1 and 3 under one seed, 5 and 7 under the other: 4 in the mean, four fifths from 1.6 to 6.4."""
    runs = [run("apfl", logs={(k, "alpha"): [0.0, 1 + 2 * k + 4 * s] for k in (0, 1)}, seed=s) for s in (0, 1)]
    last = figures(*runs)["apfl-Weight-of-the-own-model"].rows[-1]
    assert last == {"name": "alpha", "round": 2, "mean": 4.0, "low": pytest.approx(1.6), "high": pytest.approx(6.4)}


def test_weights_of_clients_are_a_heat_map_with_the_heaviest_first() -> None:
    logs = {(0, "gamma"): [0.2, 0.3], (1, "gamma"): [0.8, 0.7]}
    (found,) = figures(run("fedcd", logs=logs)).values()
    assert {(row["row"], row["column"]): row["value"] for row in found.rows}[("Rome", 2)] == 0.7
    assert "Largest in the mean over rounds: Rome 0.75, Oslo 0.25." in found.caption
    svg = found.inline()
    assert svg.index(">Rome<") < svg.index(">Oslo<")


def test_loading_probabilities_are_by_group_and_client_and_by_round() -> None:
    """Groups stand in the order of the network, which the record knows."""
    logs = {(k, f"load_global/{g}"): [0.5, 0.1 * k + 0.2] for k in (0, 1) for g in ("fc", "s10", "s9")}
    crossing = {"update": {"parts": [[g, 5, 5, 5] for g in ("s9", "s10", "fc")], "down": [], "up": []}}
    found = figures(run("partialfed-adaptive", logs=logs, facts={"crossing": crossing}))
    end, rounds = found.values()
    assert {(row["row"], row["column"]): row["value"] for row in end.rows}[("s9", "Rome")] == pytest.approx(0.3)
    assert [row["value"] for row in rounds.rows[:2]] == pytest.approx([0.5, 0.25])
    assert "Means over clients: s9 0.25, s10 0.25, fc 0.25." in end.caption
    assert end.inline().index(">s9<") < end.inline().index(">s10<")
    assert rounds.draw().title == ["Chance to load the global group", "by round"]  # in one line it is cut off


def test_of_many_rounds_a_few_are_named_and_who_was_away_is_told() -> None:
    """Numbers of 30 columns side by side would lie over each other."""
    names = [f"site {k}" for k in range(30)]
    logs = {(k, "gamma"): [0.5] * 30 for k in range(30)}
    (found,) = figures(run("fedcd", [[0.5] * 30] * 30, names=names, logs=logs)).values()
    labels = re.findall(r">([^<>]+)</text>", found.inline())
    rounds = [int(label) for label in labels if label.isdecimal() and label != "0"]
    assert 2 < len(rounds) <= 6
    assert rounds[-1] == 30
    assert "30 clients" in labels
    assert "took no part" not in found.caption
    log = Log(np.array([1, 2, 2]), np.array([0, 0, 1]), np.array([0.5, 0.5, 0.5]))
    (panel,) = (panel for panel in LOGS if panel.kind == "clients")
    (found,) = _clients("fedcd", panel, {"gamma": log}, run("fedcd"))
    assert "Empty: it took no part in that round." in found.caption


def test_heat_maps_of_many_clients_stay_small() -> None:
    names = [f"site {k}" for k in range(300)]
    logs = {(k, f"load_global/{g}"): [0.5] for k in range(300) for g in range(20)}
    logs |= {(k, "gamma"): [k / 300] for k in range(300)}
    for one in figures(run("both", [[0.5] * 300], names=names, logs=logs)).values():
        assert len(one.rows) <= CELLS


def test_every_log_of_a_method_has_a_pattern_once() -> None:
    names = [name for panel in (*LOGS, *METRICS) for name in panel.names]
    assert len(names) == len(set(names))


def test_a_method_that_logs_nothing_has_no_heading() -> None:
    assert details([run()]) == []
    assert "What each method knows" not in tell(run()).text
    assert "What each method knows" in tell(run(logs={(0, "x"): [1.0, 2.0]})).text


def test_names_of_logs_are_no_html() -> None:
    found = tell(run(EVIL, logs={(0, EVIL): [1.0, 2.0]}))
    assert "img" not in found.tags
    assert found.text.count(EVIL) >= 2


def test_dualfed_shows_its_heads_and_both_representations(tiny: Federation, tmp_path: Path) -> None:
    hyper = {"projector_bn": False, "lam": 1.0}
    result = Experiment("dualfed", tiny, "mlp", rounds=2, representation=True, hyper=hyper).run(tmp_path)
    found = figures(Result.load(result.folder))
    heads = found["dualfed-Models-of-a-client-each-on-its-test-data"]
    wanted = {"personal/local-test", "personal-head/local-test", "global-head/local-test"}
    assert {row["name"] for row in heads.rows} == wanted
    assert {row["name"] for row in found["dualfed-Separation-of-the-classes"].rows} == {
        "separation/pre",
        "separation/post",
    }
    assert {row["name"] for row in found["dualfed-Likeness-of-the-clients-features"].rows} == {"cka/pre", "cka/post"}
    cloud = found["dualfed-tsne-pre-class"]
    assert len(cloud.rows) == sum(len(client.test) for client in tiny.clients)
    assert {row["client"] for row in cloud.rows} == {client.name for client in tiny.clients}
    assert {"dualfed-tsne-pre-client", "dualfed-tsne-post-class", "dualfed-tsne-post-client"} <= set(found)


def test_each_sample_is_seen_by_its_own_client_s_model() -> None:
    """Two clients with two samples and one; the model of client k says 10 k + the sample's number."""
    everything = {k: torch.tensor([[10.0 * k + i] for i in range(3)]) for k in (0, 1)}
    found = embedding.collect({"z": everything}, [2, 1], torch.tensor([5, 6, 7]))
    own = np.array([0.0, 1.0, 12.0]) - 13 / 3
    np.testing.assert_allclose(found.named["z"][:, 0], own / np.abs(own).max(), atol=1e-3)
    assert found.clients.tolist() == [0, 0, 1]
    assert found.labels.tolist() == [5, 6, 7]


@pytest.mark.parametrize("shape", [(300, 80), (100, 700)])
def test_few_components_keep_the_distances(shape: tuple[int, int]) -> None:
    """Points that vary in 20 directions of many lose nothing."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(shape[0], 20, generator=source) @ torch.randn(20, shape[1], generator=source)
    small = torch.from_numpy(embedding.reduced(x)).double()
    assert small.shape[1] == embedding.DIMENSIONS
    ratio = torch.cdist(small, small) / torch.cdist(x.double(), x.double()).clamp(min=1e-9)
    off = ratio[~torch.eye(shape[0], dtype=torch.bool)]
    assert off.std() / off.mean() < 0.01


def test_the_file_of_features_is_bounded(tmp_path: Path) -> None:
    many = {k: torch.randn(2500, 300) for k in range(5)}
    found = embedding.collect({"a": many, "b": many}, [500] * 5, torch.zeros(2500, dtype=torch.long))
    embedding.save(found, tmp_path)
    assert (tmp_path / embedding.FILE).stat().st_size < 2 * 2 * embedding.SAMPLES * embedding.DIMENSIONS + 20_000
    again = embedding.load(tmp_path)
    assert again is not None
    assert list(again.named) == ["a", "b"]
    assert len(again.clients) == len(again.labels) == len(again.named["a"]) == embedding.SAMPLES
    assert embedding.load(tmp_path / "elsewhere") is None


def test_networks_of_other_widths_are_not_put_into_one_picture() -> None:
    found = embedding.collect({"z": {0: torch.zeros(2, 3), 1: torch.zeros(2, 4)}}, [1, 1], torch.zeros(2))
    assert found.named == {}


def test_the_picture_is_the_same_every_time() -> None:
    points = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    np.testing.assert_array_equal(panels.embedded(points), panels.embedded(points))
    assert not panels.embedded(np.ones((40, 5))).any(), "where all are equal there is nothing to see"
    assert panels.embedded(points[:3]).shape == (3, 2)
