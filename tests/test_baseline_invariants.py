"""What must hold of the baselines whatever the data, and of every registered method with one client or without a round.

Equality is bit for bit unless a test says otherwise. Runs are those of `test_method_invariants`: dropout, BatchNorm,
Nesterov momentum, weight decay, and half of the clients in each of three rounds, where nothing else is said.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Message, Residual, Run, assert_same, blobs, federation, initial, mlp, run, same
from test_contract import METHODS, QUICK, short
from test_method_arithmetic import START, TwoLayers, Weights, combine, values
from test_method_arithmetic import go as by_hand
from test_method_invariants import ALL, CLIENTS, LOCAL, NOISY, go
from torch import Tensor, nn

from pfed import Experiment, Federation, Tensors, UserError, anatomy, registry
from pfed.engines.base import POOLED
from pfed.forward import Batch
from pfed.runner import Runner
from pfed.tasks import task

PLAIN = {"lr": 0.2, "batch_size": 4, "epochs": 2}
STATS = anatomy.STATS.names(Residual()) & ALL
FULL = {**PLAIN, "batch_size": 100}
OUTSIDE = {  # options of training that belongs to no round: before the first, after the last, before being judged
    "alpha": 0.0,  # Per-FedAvg adapts
    "alternations": 0,
    "calibrate": False,
    "finetune_epochs": 0,
    "ft_epochs": 0,
    "private_epochs": 0,
    "public_epochs": 0,
}
every_method = pytest.mark.parametrize("method", METHODS)
near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)


def mean(models: list[Tensors]) -> Tensors:
    """The simple mean of what may travel of them."""
    names = models[0].keys() & ALL
    return Tensors({name: torch.stack([model[name].double() for model in models]).mean(0).float() for name in names})


@every_method
def test_no_round_is_the_initial_model(method: str, tiny: Federation) -> None:
    """T = 0: server and clients hold what the run's seed draws, and nobody sent anything."""
    outside = {option: value for option, value in OUTSIDE.items() if option in registry.fields(method)}
    experiment = short(method, tiny, "cnn-small-bn", rounds=0, hyper={**QUICK.get(method, {}), **outside})
    result = experiment.run()
    start = experiment._pool()
    assert experiment.session is not None
    assert_same(experiment.session.server, experiment.method.init(start.template(POOLED)))
    for client in range(4):
        assert_same(anatomy.snapshot(experiment.model(client)), anatomy.snapshot(start.take(client)))
    assert result.bytes_up == 0


@every_method
def test_one_client(method: str, tiny: Federation) -> None:
    """N = 1: the run goes through, and the client's weights are not the initial ones."""
    experiment = short(method, dataclasses.replace(tiny, clients=tiny.clients[:1]), "cnn-small-bn", rounds=3)
    result = experiment.run()
    assert (result.state, result.events, list(result.values)) == ("complete", [], [0])
    trained, start = (dict(model.named_parameters()) for model in (experiment.model(0), experiment._pool().take(0)))
    assert trained.keys() == start.keys()
    assert not same(trained, start)


def test_scaffold_with_one_client_is_fedavg() -> None:
    """Its variate is the server's, so that nothing is corrected; up to rounding."""
    one, other = (go(method, model=mlp, data=blobs([12]), rounds=5, local=PLAIN) for method in ("scaffold", "fedavg"))
    near(one.server["params"], other.server["params"])
    near(one.server["control"], one.states[0]["control"])
    assert one.server["control"].sqnorm() > 1e-3


def test_scaffold_of_equal_clients_is_fedavg() -> None:
    """The same data and full batches: all variates are the same; up to rounding."""
    (client,) = blobs([12]).clients
    data = dataclasses.replace(blobs([12]), clients=(client,) * 3)
    one, other = (
        go(method, model=mlp, data=data, rounds=5, fraction=1.0, local=FULL) for method in ("scaffold", "fedavg")
    )
    near(one.server["params"], other.server["params"])
    assert one.server["control"].sqnorm() > 1e-3


@pytest.mark.parametrize("rounds", [1, 5])
def test_scaffolds_variate_is_the_mean_of_all_clients(rounds: int) -> None:
    """c = Σ_k c_k / N, where half take part in a round, and those that never did have zero; up to rounding."""
    done = go("scaffold", rounds=rounds)
    assert (len(done.states) == 2) == (rounds == 1)
    own = [state["control"] for state in done.states.values()]
    near(done.server["control"], functools.reduce(Tensors.__add__, own) / 4)
    assert done.server["control"].sqnorm() > 1e-3


def test_who_could_not_train_has_no_variate_in_scaffold() -> None:
    """With BatchNorm one sample makes no batch: the model is that of the others, whose variates count 3/4."""
    with_it, without = (
        go("scaffold", model=Residual, data=blobs(sizes), rounds=1, fraction=1.0)
        for sizes in ((7, 12, 5, 1), (7, 12, 5))
    )
    assert_same(with_it.server["params"], without.server["params"])
    assert_same(with_it.states[3]["control"], with_it.server["control"].zeros())
    near(with_it.server["control"], 0.75 * without.server["control"])
    assert without.server["control"].sqnorm() > 1e-3


@pytest.mark.parametrize(("plain_sgd", "local"), [(True, PLAIN), (False, LOCAL)], ids=["plain", "momentum"])
def test_scaffold_takes_the_runs_momentum_only_where_told(plain_sgd: bool, local: dict[str, Any]) -> None:
    """The first round, without any correction, is FedAvg's: without momentum and weight decay, or with the run's."""
    done = go("scaffold", {"plain_sgd": plain_sgd}, rounds=1)
    assert_same(done.server["params"], go("fedavg", {"agg": "uniform"}, rounds=1, local=local).server["params"])
    more, less = (go("scaffold", {"plain_sgd": plain_sgd}, local={**LOCAL, "momentum": m}) for m in (0.9, 0.8))
    assert same(more.server, less.server) == plain_sgd


@pytest.mark.parametrize("eta_g", [0.5, 2.0])
def test_statistics_are_averaged_whatever_scaffolds_step(eta_g: float) -> None:
    """BatchNorm's running statistics have no variate. The weights go eta_g of the way, up to rounding."""
    done = go("scaffold", {"eta_g": eta_g}, rounds=1).server["params"]
    plain = go("fedavg", {"agg": "uniform"}, rounds=1, local=PLAIN).server["params"]
    start = initial(NOISY)
    assert len(STATS) == 4
    assert_same(done.only(STATS), plain.only(STATS))
    before = start.only(ALL - STATS)
    near(done.drop(STATS), before + eta_g * (plain.drop(STATS) - before))


class Tied(nn.Module):
    """A layer that is used twice, under one name or under two."""

    def __init__(self, names: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        if names == 2:
            self.again = self.first
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return out


@pytest.mark.parametrize(
    ("method", "hyper"),
    [("scaffold", {"eta_g": 0.5}), ("apfl", {}), ("perfedavg", {"variant": "hf"}), ("l2gd", {}), ("pfedsd", {})],
)
def test_tied_weights(method: str, hyper: dict[str, Any]) -> None:
    """Under how many names they travel makes no difference."""
    once, twice = (go(method, hyper, functools.partial(Tied, names), rounds=4) for names in (1, 2))
    for client in CLIENTS:
        model = twice.personal[client]
        assert_same(model.only(once.personal[client]), once.personal[client])
        assert same(model["again.weight"], model["first.weight"])


def batches(data: Federation, model: Any, local: dict[str, Any]) -> list[Batch]:
    """Those of client 0 in an epoch of round 1."""
    experiment = Experiment("perfedavg", data, model, rounds=1, local=local)
    runner = Runner(experiment.method, data, experiment._pool(), experiment.options, task("classification"))
    return list(runner.client(0, 1, {}).batches(1))


def gradient(w: Weights, batch: Batch) -> Weights:
    """That of `test_method_arithmetic` for any sample."""
    (b, *h), x, y = w, float(batch.x), int(batch.y)
    powers = [math.exp(weight * b * x) for weight in h]
    e = [power / sum(powers) - (label == y) for label, power in enumerate(powers)]
    return (e[0] * h[0] + e[1] * h[1]) * x, e[0] * b * x, e[1] * b * x


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_perfedavg_takes_three_different_batches(variant: str) -> None:
    """One step: w~ = w − α g(w; D), d = g(w~; D'), w − d, or w − (d − α (g(w + δd; D'') − g(w − δd; D'')) / 2δ)."""
    alpha, delta = 0.5, 0.01
    data, local = federation(([[1.0], [2.0], [0.5]], [0, 1, 0])), {"lr": 1.0, "batch_size": 1}
    first, second, third = batches(data, TwoLayers, local)
    step = d = gradient(combine((1, START), (-alpha, gradient(START, first))), second)
    if variant == "hf":
        above, below = (gradient(combine((1, START), (sign * delta, d)), third) for sign in (1, -1))
        step = combine((1, d), (-alpha / (2 * delta), above), (alpha / (2 * delta), below))
    hyper = {"variant": variant, "alpha": alpha, "delta": delta}
    done = run("perfedavg", data, TwoLayers, rounds=1, hyper=hyper, local=local)
    assert values(done.server["params"]) == pytest.approx(list(combine((1, START), (-1, step))), abs=1e-4)


def test_hessian_free_without_adaptation_is_first_order() -> None:
    """alpha = 0; with full batches, as one variant takes two batches for a step and the other three."""
    one, other = (go("perfedavg", {"variant": variant, "alpha": 0.0}, local=FULL) for variant in ("fo", "hf"))
    assert_same(one.server, other.server)
    assert not same(one.server["params"], initial(NOISY).only(ALL))


def test_hessian_free_tends_to_first_order() -> None:
    """Their distance falls like alpha."""
    apart = []
    for alpha in (0.1, 0.01, 0.001):
        hyper = {"alpha": alpha, "delta": 0.01}
        one, other = (
            go("perfedavg", {"variant": variant, **hyper}, mlp, rounds=1, local={**FULL, "lr": 1.0})
            for variant in ("fo", "hf")
        )
        apart.append(float((one.server["params"] - other.server["params"]).sqnorm().sqrt()))
    assert apart[0] > 1e-3
    assert [apart[0] / apart[1], apart[1] / apart[2]] == pytest.approx([10, 10], rel=0.2)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_statistics_of_perfedavg_are_of_the_pass_after_the_trial_step(variant: str) -> None:
    """At w~ on D': one update a step, by torch itself; the passes on D and D'' leave them alone. Up to rounding."""
    data, local = blobs([6]), {"lr": 0.2, "batch_size": 2}
    first, second, _ = batches(data, Residual, local)
    trial, model = Residual(), Residual()
    for each in (trial, model):
        each.load_state_dict(initial(Residual))
    F.cross_entropy(trial(first.x), first.y).backward()
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), trial.parameters(), strict=True):
            assert other.grad is not None
            parameter -= 0.5 * other.grad
        model(second.x)
    done = run("perfedavg", data, Residual, rounds=1, hyper={"variant": variant, "alpha": 0.5}, local=local)
    near(done.server["params"].only(STATS), anatomy.snapshot(model).only(STATS))
    assert done.states[0]["kept"]["bn1.num_batches_tracked"] == 1


def at_an_aggregation(mix: float, **options: Any) -> tuple[Run, dict[int, Message]]:
    """A run of L2GD that ends with the first aggregation after local training, and what was sent in it."""
    long = go("l2gd", {"p": 0.5, "mix": mix}, rounds=10, **options)
    last = next(message.round for message in long.messages if message.step == "send")
    done = go("l2gd", {"p": 0.5, "mix": mix}, rounds=last, **options)
    return done, {message.client: message for message in done.messages if message.step == "send"}


def test_l2gd_all_the_way_makes_all_models_the_mean() -> None:
    """mix = 1; that it is the mean holds up to rounding."""
    done, sent = at_an_aggregation(1.0)
    shared = [done.personal[client].only(ALL) for client in CLIENTS]
    assert all(same(model, shared[0]) for model in shared)
    near(shared[0], mean([sent[client].up["model"] for client in CLIENTS]))
    assert not same(sent[0].up["model"], sent[1].up["model"])


def test_an_aggregation_of_l2gd_leaves_the_mean() -> None:
    """Up to rounding; each of the models moves."""
    done, sent = at_an_aggregation(0.25)
    before, after = [sent[client].up["model"] for client in CLIENTS], list(done.personal.values())
    near(mean(after), mean(before))
    assert not any(same(new.only(ALL), old) for old, new in zip(before, after, strict=True))


def test_who_could_not_train_weighs_nothing_in_the_mean_of_l2gd() -> None:
    """With BatchNorm one sample makes no batch. Its model moves to the mean of the others all the same."""
    done, sent = at_an_aggregation(1.0, data=blobs((7, 12, 1, 9)), model=Residual)
    assert same(sent[2].up["model"], initial(Residual).only(ALL))
    others = mean([sent[client].up["model"] for client in (0, 1, 3)])
    for message in done.messages[-4:]:
        assert message.step == "mixed"
        near(message.down["mean"], others)
        near(done.personal[message.client].only(ALL), others)


def test_l2gd_without_aggregations_is_local() -> None:
    """p = 0: both train in every round, and both keep momentum unless the run says otherwise."""
    kept, fresh = (go("l2gd", {"p": 0.0}, keep_optimizer=keep) for keep in (None, False))
    assert_same(kept.personal, go("local").personal)
    assert_same(fresh.personal, go("local", keep_optimizer=False).personal)
    assert not same(kept.personal, fresh.personal)


def test_l2gd_refuses_models_that_do_not_start_alike() -> None:
    with pytest.raises(UserError) as refused:
        go("l2gd", model=[mlp, mlp])
    assert str(refused.value) == "l2gd starts all clients from one model. Got 2 models."


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_apfl_without_own_models_is_fedavg(keep: bool) -> None:
    """alpha = 0, fixed."""
    one = go("apfl", {"alpha": 0.0, "adaptive": False}, keep_optimizer=keep)
    other = go("fedavg", {"agg": "uniform"}, keep_optimizer=keep)
    assert_same(one.personal, other.personal)
    assert not same(one.states[min(one.states)]["v"], one.personal[min(one.states)])


@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_apfl_with_own_models_alone_is_local(keep: bool) -> None:
    """alpha = 1, fixed: for those that took part, and without dropout, of which the mixture has its own."""
    one = go("apfl", {"alpha": 1.0, "adaptive": False}, Residual, rounds=5, keep_optimizer=keep)
    other = go("local", {"matched_participation": True}, Residual, rounds=5, keep_optimizer=keep)
    assert len(one.states) == 3
    for client in CLIENTS:
        took_part = client in one.states
        assert same(one.personal[client], other.personal[client]) == took_part
        assert same(one.personal[client].only(ALL), one.server["params"]) != took_part  # else judged with w


@pytest.mark.parametrize("hyper", [{}, {"alpha": 0.25, "adaptive": False}], ids=["learned", "fixed"])
@pytest.mark.parametrize("keep", [False, True], ids=["fresh", "kept"])
def test_apfls_global_branch_is_fedavg(hyper: dict[str, Any], keep: bool) -> None:
    """Whatever alpha, and whether momentum is kept over rounds or not."""
    one, other = go("apfl", hyper, keep_optimizer=keep), go("fedavg", {"agg": "uniform"}, keep_optimizer=keep)
    assert_same(one.server, other.server)


def test_alpha_of_apfl_stays_between_0_and_1() -> None:
    """With a large rate it is cut on either side: in round 2 it falls in one client and rises in the other."""
    done = by_hand("apfl", 2, {"alpha": 0.25, "alpha_lr": 1000.0})
    assert [done.states[client]["alpha"] for client in (0, 1)] == [0.0, 1.0]


def test_pfedsd_without_distillation_is_fedavg_for_the_server() -> None:
    """lam = 0; with it the second participation of a client already differs."""
    plain = go("fedavg", {"agg": "uniform"}).server
    assert_same(go("pfedsd", {"lam": 0.0}).server, plain)
    assert not same(go("pfedsd").server, plain)
