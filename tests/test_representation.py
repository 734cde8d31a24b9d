"""Representation metrics: class separation and CKA of the features that clients have right after local training."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same, blobs, mlp, run
from torch import Tensor, nn

from pfed import Experiment, Federation, Result, anatomy, metrics
from pfed.evaluate import PROBE, probe
from pfed.methods.dualfed import DualFed
from pfed.session import Session

LOCAL = {"lr": 0.1, "batch_size": 8}


def go(method: str, data: Federation, model: str = "mlp", **options: Any) -> Result:
    return Experiment(method, data, model, **{"rounds": 1, "local": LOCAL, "representation": True, **options}).run()


def features(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return anatomy.features(model.eval(), x)


def cka(found: list[Tensor]) -> float:
    pairs = [metrics.linear_cka(x, y) for x, y in itertools.combinations(found, 2)]
    return sum(value for value in pairs if value is not None) / len(pairs)


def test_features_right_after_training(tiny: Federation) -> None:
    """After one round of FedAvg they are those of training alone, on each client's test data and on all of them."""
    result = go("fedavg", tiny)
    alone = Experiment("local", tiny, "mlp", rounds=1, local=LOCAL)
    alone.run()
    models = [alone.model(client) for client in range(4)]
    ((t, values),) = result.series["separation/features"]
    assert t == 1
    for client, model in enumerate(models):
        x, y = tiny.clients[client].test.take()
        assert values[client] == pytest.approx(metrics.class_separation(features(model, x), y), abs=1e-6)
    common = torch.cat([client.test.take()[0] for client in tiny.clients])
    assert result.metrics["cka/features"] == pytest.approx(cka([features(model, common) for model in models]), abs=1e-6)
    assert result.metrics["separation/features"] == pytest.approx(sum(values.values()) / 4)
    assert 0 < result.metrics["cka/features"] < 1


def test_clients_that_never_trained_are_judged_as_downloaded(tiny: Federation) -> None:
    """In a round without training all have the initial model, so all features agree."""
    result = go("fedavg", tiny, rounds=0)
    assert result.metrics["cka/features"] == pytest.approx(1)
    assert sorted(result.series["separation/features"][-1][1]) == [0, 1, 2, 3]


def test_a_client_keeps_what_its_last_training_left(tiny: Federation) -> None:
    """Half of the clients a round: those that trained change, those that ever did but not now keep their value.

    All are there at every evaluation.
    """
    done = run("fedavg", tiny, "mlp", rounds=4, fraction=0.5, local={**LOCAL, "epochs": 3}, representation=True)
    series = dict(done.result.series["separation/features"])
    trained = {t: {message.client for message in done.messages if message.round == t} for t in series}
    assert [(t, sorted(values)) for t, values in series.items()] == [(t, [0, 1, 2, 3]) for t in (1, 2, 3, 4)]
    assert [t for t, _ in done.result.series["cka/features"]] == [1, 2, 3, 4]
    for t in (2, 3, 4):
        ever = set().union(*(trained[s] for s in range(1, t)))
        changed = {client for client in range(4) if series[t][client] != series[t - 1][client]}
        assert trained[t] <= changed
        assert not changed & ever - trained[t]
    assert any(trained[s] != trained[1] for s in trained)


@pytest.mark.parametrize("model", ["cnn-small", "cnn-small-bn"])
@pytest.mark.parametrize("method", ["fedper", "dualfed", "ditto+ft"])
def test_looking_changes_nothing(method: str, model: str, tiny: Federation) -> None:
    """With the option on, the run is the same: its server, its accuracies, its traffic, and all of a client's state."""
    settings: dict[str, Any] = {"rounds": 2, "fraction": 0.5, "local": LOCAL}
    off, on = (run(method, tiny, model, representation=choice, **settings) for choice in (False, True))
    assert_same(on.server, off.server)
    assert_same(on.personal, off.personal)
    for state in on.states.values():
        assert state.pop("representation")
    assert_same(on.states, off.states)
    names = {"separation", "cka"}
    assert not [name for name in off.result.metrics if name.partition("/")[0] in names]
    kept = {name: value for name, value in on.result.metrics.items() if name.partition("/")[0] not in names}
    assert kept == off.result.metrics
    assert (on.result.bytes_up, on.result.bytes_down) == (off.result.bytes_up, off.result.bytes_down)


def test_its_traffic_is_that_of_evaluation(tiny: Federation) -> None:
    """Each client gets the model once more and sends 40 rows of 200 features, in each of two evaluations."""
    on, off = (go("fedavg", tiny, rounds=2, representation=choice) for choice in (True, False))
    model = off.bytes_down // (2 * 4)
    assert on.bytes_eval - off.bytes_eval == 2 * 4 * (model + 40 * 200 * 4)


def test_names_of_a_method_with_several_features(tiny: Federation) -> None:
    """DualFed: before and after the projector; with fine-tuning they are its base's."""
    settings: dict[str, Any] = {"rounds": 1, "local": LOCAL, "representation": True}
    for name in ("dualfed", "dualfed+ft"):
        done = run(name, tiny, "mlp", **settings)
        assert {f"{what}/{where}" for what in ("separation", "cka") for where in ("pre", "post")} <= {
            *done.result.metrics
        }
        stored = done.states[0]["representation"]["features"]
        assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == {"pre": (40, 200), "post": (40, 200)}
        assert not torch.equal(stored["pre"], stored["post"])


def test_post_local_features_of_dualfed() -> None:
    """z of the model that the client trained, which the mean of the encoders has replaced by the next evaluation."""
    data = blobs((9, 12))
    done = run("dualfed", data, mlp, rounds=1, local=LOCAL, representation=True)
    experiment = Experiment("dualfed", data, mlp, rounds=1, local=LOCAL)
    experiment.run()
    x = torch.cat([client.test.take()[0] for client in data.clients])
    for client in (0, 1):
        with torch.no_grad():
            downloaded = DualFed().representations(experiment.model(client), x)
        stored = done.states[client]["representation"]["features"]
        assert stored["pre"].shape == downloaded["pre"].shape
        assert not torch.allclose(stored["pre"], downloaded["pre"])


def test_engines_agree(tiny: Federation) -> None:
    """Through bytes, the same bits."""
    one, two = (run("dualfed", tiny, "mlp", rounds=2, representation=True, engine=e) for e in ("serial", "debug"))
    assert_same(one.states, two.states)
    assert one.result.metrics == two.result.metrics


def test_resume_is_exact(tiny: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in round 3 and resumed, half of the clients a round: every number as if never stopped."""
    settings: dict[str, Any] = {"rounds": 4, "fraction": 0.5, "local": LOCAL, "representation": True}
    straight = Experiment("fedper", tiny, "mlp", **settings).run()
    broken = Experiment("fedper", tiny, "mlp", **settings)
    original = Session._act

    def stop(self: Any, t: int) -> None:
        original(self, t)
        if t == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_act", stop)
    with pytest.raises(KeyboardInterrupt):
        broken.run(tmp_path)
    monkeypatch.setattr(Session, "_act", original)
    (folder,) = tmp_path.iterdir()
    resumed = Experiment("fedper", tiny, "mlp", **settings).resume(folder)
    assert resumed.metrics == straight.metrics
    assert resumed.series == straight.series


def test_probe() -> None:
    """At most 200 samples of each client's test data, none twice, the same for a seed, others for another."""
    data = blobs((500, 30, 201))
    one, again, other = (probe(data, seed)[0].take()[0] for seed in (0, 0, 1))
    assert PROBE == 200
    assert len(one) == 200 + 30 + 200
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one.unique(dim=0)) == len(one)
    for part, client in zip(one.split([200, 30, 200]), data.clients, strict=True):
        own = {tuple(row) for row in client.test.take()[0].tolist()}
        assert all(tuple(row) in own for row in part.tolist())


def test_clients_without_test_data(tiny: Federation) -> None:
    """Such a client's classes can't be told apart, but its features are compared; without any test data, nothing is."""
    bare = [dataclasses.replace(client, test=client.test.part([])) for client in tiny.clients]
    some = go("fedper", dataclasses.replace(tiny, clients=(bare[0], *tiny.clients[1:])))
    assert sorted(some.series["separation/features"][-1][1]) == [1, 2, 3]
    assert 0 < some.metrics["cka/features"] < 1
    none = go("fedper", dataclasses.replace(tiny, clients=tuple(bare)))
    assert not [name for name in none.metrics if name.startswith(("separation", "cka"))]


def test_one_client_has_nobody_to_compare_with(tiny: Federation) -> None:
    result = go("fedper", dataclasses.replace(tiny, clients=tiny.clients[:1]))
    assert "separation/features" in result.metrics
    assert "cka/features" not in result.metrics


def test_central_training(tiny: Federation) -> None:
    """One model for all: the features agree."""
    assert go("all", tiny).metrics["cka/features"] == pytest.approx(1)


def test_constant_features_have_no_value(tiny: Federation) -> None:
    """A dead layer: neither metric is defined, and the run goes on."""

    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(torch.ones(len(x), 4))
            return out

    result = Experiment("fedper", tiny, Dead, rounds=1, local=LOCAL, representation=True).run()
    assert result.state == "complete"
    assert not [name for name in result.metrics if name.startswith(("separation", "cka"))]
