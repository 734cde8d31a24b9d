"""The baselines at their edges: several architectures, fixed heads, own rates, clients that miss something."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import blobs, mlp, run
from torch import nn

from pfed import Experiment, Federation, Tensors, UserError, cli
from pfed.anatomy import marks
from pfed.models.fixedheads import simplex_frame

TWO = ["mlp", "cnn-small"]


@pytest.mark.parametrize(("method", "hyper"), [("fedproto", {"width": 16}), ("feddistill", {}), ("fedmd", {})])
def test_methods_without_weights_take_several_architectures(
    method: str, hyper: dict[str, Any], tiny: Federation
) -> None:
    done = run(method, tiny, TWO, rounds=2, hyper=hyper, local={"lr": 0.05, "batch_size": 8})
    kept = [set(done.states[client]["kept"]) for client in range(4)]
    assert kept[0] == kept[2] != kept[1] == kept[3]
    names = set().union(*kept)
    for message in done.messages:
        sent = {name for value in message.up.values() if isinstance(value, Tensors) for name in value}
        assert not sent & names
    assert any(message.up for message in done.messages)


def test_prototypes_need_features_of_one_width(tiny: Federation) -> None:
    message = "FedProto needs features of one width at all clients. Got 64, 200; set width, as to 64."
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        Experiment("fedproto", tiny, TWO).run()


@pytest.mark.parametrize("method", ["spherefed", "fedetf"])
def test_a_fixed_classifier_is_the_same_everywhere(method: str, tiny: Federation) -> None:
    """Also where each client's model has initial values of its own."""
    experiment = Experiment(method, tiny, ["mlp", "mlp"])
    pool = experiment._pool()
    models = [pool.take(client) for client in range(4)]
    (name,) = marks(models[0]).fixed
    frames = [model.state_dict()[name] for model in models]
    bodies = [model.state_dict()["fc1.weight"] for model in models]
    assert all(torch.equal(frames[0], frame) for frame in frames)
    assert not torch.equal(bodies[0], bodies[1])


def test_the_head_of_fedbabu_is_the_same_everywhere(tiny: Federation) -> None:
    pool = Experiment("fedbabu", tiny, ["mlp", "mlp"])._pool()
    states = [pool.take(client).state_dict() for client in range(4)]
    assert all(torch.equal(states[0]["fc2.weight"], state["fc2.weight"]) for state in states)
    assert not torch.equal(states[0]["fc1.weight"], states[1]["fc1.weight"])


@pytest.mark.parametrize(("method", "key"), [("apfl", "v"), ("pfedme", "theta"), ("pfedsd", "personal")])
def test_a_client_that_never_trained_has_no_model_of_its_own(method: str, key: str, tiny: Federation) -> None:
    """With BatchNorm, one sample makes no batch."""
    single = dataclasses.replace(tiny.clients[0], train=tiny.clients[0].train.part([0]))
    data = dataclasses.replace(tiny, clients=(single, *tiny.clients[1:]))
    done = run(method, data, "cnn-small-bn", rounds=1)
    assert [key in done.states[client] for client in range(4)] == [False, True, True, True]


def test_an_aggregation_of_l2gd_that_somebody_missed_is_repeated(tiny: Federation) -> None:
    """Without training in between, everybody would go to the mean that it has, which may be an older one."""
    local: dict[str, Any] = {"hyper": {"p": 0.9}, "rounds": 12, "seed": 2}
    all_there, some = (run("l2gd", tiny, "mlp", dropout=dropout, **local) for dropout in (0.0, 0.4))
    aggregations = {m.round for m in all_there.messages if m.step == "mixed"}
    sent, again = ({m.round for m in done.messages if m.step == "send"} for done in (all_there, some))
    assert sent < again <= aggregations


def test_a_fixed_head_can_not_be_tuned(tiny: Federation) -> None:
    with pytest.raises(
        UserError, match=r"spherefed\+ft has nothing to tune: the head is fixed\. Set ft_scope to 'all'"
    ):
        Experiment("spherefed+ft", tiny, "mlp").run()
    Experiment("spherefed+ft", tiny, "mlp", rounds=1, hyper={"ft_scope": "all", "ft_epochs": 1}).run()


def test_a_frame_needs_two_classes() -> None:
    with pytest.raises(UserError, match=r"A simplex frame needs at least two classes\. Got 1"):
        simplex_frame(4, 1)


def test_the_frame_of_fedetf_changes_in_personalization_only(tiny: Federation) -> None:
    before, after = (
        run("fedetf", tiny, "mlp", rounds=1, hyper={"alternations": turns}, local={"lr": 0.1}) for turns in (0, 1)
    )
    (name,) = marks(Experiment("fedetf", tiny, "mlp")._pool().take(0)).fixed
    assert all(name not in message.names for message in [*before.messages, *after.messages])
    assert "personal" not in before.states[0]
    frames = [state["personal"][name] for state in after.states.values()]
    assert not torch.equal(frames[0], frames[1])


def test_without_tuning_fedbabu_sends_nothing_more(tiny: Federation) -> None:
    none, some = (run("fedbabu", tiny, "mlp", rounds=2, hyper={"ft_epochs": epochs}) for epochs in (0, 1))
    assert [message.step for message in none.messages] == ["update"] * 8
    assert [message.step for message in some.messages] == ["update"] * 8 + ["tune"] * 4


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, 3))


def test_a_hessian_product_is_taken_under_one_dropout_mask() -> None:
    """With two masks the difference of the gradients would not shrink with the distance, and the quotient explode."""
    data = blobs((12,))
    moved = []
    for delta in (1e-3, 1e-2):
        hyper = {"variant": "hf", "alpha": 0.5, "delta": delta}
        done = run("perfedavg", data, dropping, rounds=1, hyper=hyper, local={"lr": 0.1, "batch_size": 4})
        (message,) = done.messages
        moved.append(message.up["params"] - message.down["params"])
    assert float((moved[0] - moved[1]).sqnorm()) < 1e-4 * float(moved[0].sqnorm())


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("perfedavg", {"beta": 0.1}),
        ("spherefed", {"lr": 0.1}),
        ("pfedme", {"personal_lr": 0.01, "eta": 0.01, "inner_steps": 1}),
    ],
)
def test_own_rates_follow_the_schedule(method: str, hyper: dict[str, Any]) -> None:
    """At a tenth of the rate the first step goes, nearly, a tenth of the way."""
    data = blobs((8,))
    local = {"lr": 0.7, "batch_size": 8}
    steps = []
    for schedule in ("constant", "step:0"):
        done = run(method, data, mlp, rounds=1, hyper=hyper, local={**local, "schedule": schedule})
        first = done.messages[0]
        steps.append(float((first.up["params"] - first.down["params"]).sqnorm()) ** 0.5)
    assert steps[1] == pytest.approx(steps[0] / 10, rel=0.2)


def test_a_client_that_missed_the_preparation_of_fedmd_makes_up_for_it(tiny: Federation) -> None:
    hyper = {"public_epochs": 1, "private_epochs": 1}
    done = run("fedmd", tiny, "mlp", rounds=4, hyper=hyper, dropout=0.5, seed=1)
    early = {message.client for message in done.messages if message.step == "prepare"}
    later = {message.client for message in done.messages if message.step == "look"}
    assert later - early
    assert all(done.states[client]["prepared"] for client in early | later)


def test_an_option_that_run_and_method_have_is_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "apfl", "--set", "alpha=0.3"]) == 2
    assert capsys.readouterr().err == "pfed: alpha is an option of the run and of apfl. Write --alpha or apfl.alpha.\n"


@pytest.mark.parametrize("settings", [{"bn": "local-stats"}, {"bn": "local-all"}, {"deadline": 1e-6}, {"dropout": 0.9}])
def test_central_training_has_no_clients_that_keep_or_miss_anything(settings: dict[str, Any]) -> None:
    common: dict[str, Any] = {"model": "cnn-small-bn", "clients": 3, "rounds": 2, "train_cap": 40, "eval_every": 0}
    assert Experiment("all", **common, **settings).run().metrics == Experiment("all", **common).run().metrics
