"""Evaluation: which model on which data, at which point, in which round."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pfed import Client, Cohort, Comparison, Experiment, Federation, Tensors, evaluate
from pfed.methods.fedavg import FedAvg
from pfed.wire import State

LOCAL = {"lr": 0.1, "batch_size": 8}


def probabilities(experiment: Experiment, federation: Federation) -> torch.Tensor:
    """Each client's model on the whole test set. (clients, samples, classes)"""
    x, _ = federation.test.take()
    with torch.no_grad():
        return torch.stack([experiment.model(k)(x).softmax(1) for k in range(len(federation.clients))])


@pytest.mark.parametrize("rule", ["mean_prob", "mean_logprob", "majority", "weight_average"])
def test_new_test(rule: str, tiny: Federation) -> None:
    """All models judge every image of the whole test set, combined by the rule."""
    experiment = Experiment("fedper", tiny, "mlp", rounds=2, local=LOCAL, new_test=rule)
    result = experiment.run()
    p = probabilities(experiment, tiny)
    y = tiny.test.labels
    if rule == "mean_prob":
        predicted = p.mean(0).argmax(1)
    elif rule == "mean_logprob":
        predicted = p.log().mean(0).argmax(1)
    elif rule == "majority":
        votes = torch.nn.functional.one_hot(p.argmax(2), 10).sum(0)
        predicted = (votes + p.mean(0) / 2).argmax(1)  # a tie goes to the higher mean probability
    else:
        model = experiment.model(0)
        states = [Tensors(experiment.model(k).state_dict()) for k in range(4)]
        model.load_state_dict((states[0] + states[1] + states[2] + states[3]) / 4)
        with torch.no_grad():
            predicted = model(tiny.test.take()[0]).argmax(1)
    expected = (predicted == y).double().mean().item()
    assert result.metrics["ensemble/new-test"] == pytest.approx(expected, abs=1e-9)


def test_new_test_of_one_global_model_is_its_accuracy(tiny: Federation) -> None:
    result = Experiment("fedavg", tiny, "mlp", rounds=2, local=LOCAL, new_test="mean_prob").run()
    assert result.metrics["ensemble/new-test"] == pytest.approx(result.metrics["personal/local-test/weighted"])


def test_external_test(tiny: Federation) -> None:
    """A domain that no client has: the ensemble's accuracy, and the mean of the clients' own."""
    outside = dataclasses.replace(tiny, external=tiny.clients[3].test)
    experiment = Experiment("local", outside, "mlp", rounds=2, local=LOCAL)
    result = experiment.run()
    x, y = outside.external.take()  # type: ignore[union-attr]
    with torch.no_grad():
        alone = [(experiment.model(k)(x).argmax(1) == y).double().mean().item() for k in range(4)]
    assert result.metrics["personal/external"] == pytest.approx(sum(alone) / 4)
    assert 0 <= result.metrics["ensemble/external"] <= 1


def test_every_judged_model_has_an_external_test(tiny: Federation) -> None:
    """CD2-pFed's shared channels alone are one of them."""
    outside = dataclasses.replace(tiny, external=tiny.clients[3].test)
    hyper = {"judge_subnets": True, "progressive": False}
    metrics = Experiment("cd2pfed", outside, "mlp", rounds=1, local=LOCAL, hyper=hyper).run().metrics
    assert {f"{name}/external" for name in ("ensemble", "personal", "private-subnet", "shared-subnet")} <= set(metrics)


def test_post_local_judges_the_model_right_after_training(tiny: Federation) -> None:
    """FedAvg: before the average each client has its own model; both points are named in the result."""
    download, local = (
        Experiment("fedavg", tiny, "mlp", rounds=1, local=LOCAL, eval_point=point).run()
        for point in ("post_download", "post_local")
    )
    alone = Experiment("local", tiny, "mlp", rounds=1, local=LOCAL).run()
    assert local.values == alone.values  # after one round, training from w is training alone
    assert local.values != download.values
    assert (local.json()["eval_point"], download.json()["eval_point"]) == ("post_local", "post_download")


def test_post_local_with_sampling_keeps_the_last_value(tiny: Federation) -> None:
    """A client that did not train in a round is judged by what it last trained."""
    result = Experiment("fedavg", tiny, "mlp", rounds=4, fraction=0.5, local=LOCAL, eval_point="post_local").run()
    series = dict(result.series["personal/local-test"])
    session_rounds = [set(values) for values in series.values()]
    assert all(clients == {0, 1, 2, 3} for clients in session_rounds)


def test_post_local_scores_are_computed_only_where_they_count(
    tiny: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All take part: in rounds with an evaluation. Else a client's last training may be one of any round."""
    scored: list[int] = []
    assess = evaluate.assess

    def noted(client: Client, *args: Any) -> Any:
        scored.append(client.round)
        return assess(client, *args)

    monkeypatch.setattr(evaluate, "assess", noted)
    settings: dict[str, Any] = {"rounds": 5, "local": LOCAL, "eval_point": "post_local"}
    often = Experiment("fedavg", tiny, "mlp", **settings).run()
    assert scored == [t for t in (1, 2, 3, 4, 5) for _ in range(4)]
    scored.clear()
    seldom = Experiment("fedavg", tiny, "mlp", eval_every=3, **settings).run()
    assert scored == [3] * 4 + [5] * 4
    of_often = dict(often.series["personal/local-test"])
    assert seldom.series["personal/local-test"] == [(t, of_often[t]) for t in (3, 5)]
    assert seldom.metrics == often.metrics
    scored.clear()
    Experiment("fedavg", tiny, "mlp", eval_every=0, fraction=0.5, **settings).run()
    assert [scored.count(t) for t in (1, 2, 3, 4)] == [2] * 4


def test_post_local_without_training_judges_the_model_as_it_is(tiny: Federation) -> None:
    """In a round in which all could have trained but none did, whether the one before it was judged or not."""

    class Pausing(FedAvg):
        def round(self, server: State, cohort: Cohort) -> None:
            if cohort.round % 2:
                super().round(server, cohort)

    def values(every: int, **options: Any) -> dict[int, float]:
        return Experiment(Pausing(), tiny, "mlp", rounds=2, local=LOCAL, eval_every=every, **options).run().values

    downloaded = values(1)
    assert values(1, eval_point="post_local") == values(2, eval_point="post_local") == downloaded
    trained = Experiment(Pausing(), tiny, "mlp", rounds=1, local=LOCAL, eval_point="post_local").run().values
    assert trained != downloaded


def test_ditto_judges_the_personal_model(tiny: Federation) -> None:
    result = Experiment("ditto", tiny, "mlp", rounds=2, local=LOCAL, eval_point="post_local").run()
    again = Experiment("ditto", tiny, "mlp", rounds=2, local=LOCAL).run()
    assert result.values == again.values
    assert "global/local-test" in again.metrics


def test_fine_tuning_is_reported_beside_the_untuned(tiny: Federation) -> None:
    result = Experiment("fedavg+ft", tiny, "mlp", rounds=2, local=LOCAL).run()
    plain = Experiment("fedavg", tiny, "mlp", rounds=2, local=LOCAL).run()
    assert result.metrics["untuned/local-test"] == plain.metrics["personal/local-test"]
    assert result.metrics["finetuned/local-test"] == result.metrics["personal/local-test"]


def test_evaluation_cadence(tiny: Federation) -> None:
    def rounds(**options: Any) -> list[int]:
        result = Experiment("fedavg", tiny, "mlp", rounds=5, local=LOCAL, **options).run()
        return [t for t, _ in result.series["personal/local-test"]]

    assert rounds() == [1, 2, 3, 4, 5]
    assert rounds(eval_every=2) == [2, 4, 5]
    assert rounds(eval_every=0) == [5]


def test_selection_rules(tiny: Federation) -> None:
    settings = {"rounds": 12, "local": LOCAL, "seed": 2}
    last = Experiment("fedavg", tiny, "mlp", **settings).run()
    series = [values for _, values in last.series["personal/local-test"]]
    mean = Experiment("fedavg", tiny, "mlp", **settings, select="mean_last_10").run()
    assert mean.values[1] == pytest.approx(sum(values[1] for values in series[-10:]) / 10)
    best = Experiment("fedavg", tiny, "mlp", **settings, select="best_per_client").run()
    assert best.values == {k: max(values[k] for values in series) for k in range(4)}
    assert last.values == series[-1]


def test_validation_selects_the_round(tiny: Federation) -> None:
    """The reported round is the best on validation data, which are neither trained nor tested on."""
    clients = tuple(
        dataclasses.replace(c, validation=c.train.part(range(5)), train=c.train.part(range(5, len(c.train))))
        for c in tiny.clients
    )
    data = dataclasses.replace(tiny, clients=clients)
    result = Experiment("fedavg", data, "mlp", rounds=8, local=LOCAL, select="validation").run()
    means = {t: sum(v.values()) / len(v) for t, v in result.series["personal/validation"]}
    best = max(means, key=lambda t: (means[t], -t))
    assert result.values == dict(result.series["personal/local-test"])[best]


def test_gain_over_local(tiny: Federation) -> None:
    alone = Experiment("local", tiny, "mlp", rounds=2, local=LOCAL).run()
    together = Experiment("fedper", tiny, "mlp", rounds=2, local=LOCAL).run()
    rows = Comparison([alone, together]).json()
    expected = sum(together.values[k] - alone.values[k] for k in range(4)) / 4
    assert rows[1]["metrics"]["gain-over-local"] == pytest.approx(expected)
    assert Comparison([together]).gain(together) is None


def test_bytes_of_evaluation_are_apart(tiny: Federation) -> None:
    often, once = (Experiment("fedavg", tiny, "mlp", rounds=3, eval_every=every).run() for every in (1, 0))
    assert often.bytes_up == once.bytes_up
    assert often.bytes_down == once.bytes_down
    assert often.bytes_eval > once.bytes_eval > 0
