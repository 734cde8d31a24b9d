"""FedPAC and FedProto by hand: which heads are combined, from which statistics, and where features are pulled to.

What is expected is computed in float64 by other means: SciPy, autograd and torch's own optimiser, plain numbers.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, federation, initial, mlp, run
from scipy.optimize import minimize
from test_method_arithmetic import TwoLayers
from torch import Tensor, nn

from pfed import Experiment, Tensors
from pfed.methods import fedpac
from pfed.prototypes import Prototypes, merged

Table = dict[int, Tensor]  # a vector for each class that has one


def solved(q: np.ndarray) -> np.ndarray:
    """The least αᵀQα on the simplex by SciPy's SLSQP, the best from several starts; small weights are cut."""
    n = len(q)
    scale = np.abs(q).max()
    starts = [np.full(n, 1 / n), *np.eye(n), *np.random.default_rng(0).dirichlet(np.ones(n), 5)]
    found = [
        minimize(
            lambda a: a @ q @ a / scale,
            start,
            jac=lambda a: 2 * q @ a / scale,
            bounds=[(0, 1)] * n,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        for start in starts
    ]
    alpha = min(found, key=lambda one: one.fun).x
    alpha = np.where(alpha < 1e-3, 0.0, alpha)
    weights: np.ndarray = alpha / alpha.sum()
    return weights


def apart(means: np.ndarray, i: int) -> np.ndarray:
    """D_i[j,k] = Σ_y ⟨H_i,y − H_j,y, H_i,y − H_k,y⟩, as it is printed."""
    clients, classes, _ = means.shape
    d = np.zeros((clients, clients))
    for j, k, y in itertools.product(range(clients), range(clients), range(classes)):
        d[j, k] += (means[i, y] - means[j, y]) @ (means[i, y] - means[k, y])
    return d


@pytest.mark.parametrize("clients", [2, 5, 12])
@pytest.mark.parametrize("noise", [1.0, 0.01])
def test_the_weights_are_those_of_an_independent_solver(clients: int, noise: float) -> None:
    source = np.random.default_rng(clients)
    for _ in range(3):
        means = source.normal(size=(clients, 3, 4))
        variance = noise * source.uniform(0.01, 2, clients)
        for i in range(clients):
            d = apart(means, i)
            assert np.linalg.eigvalsh(d).min() >= -1e-12
            alpha = fedpac.combination(torch.from_numpy(variance), torch.from_numpy(means), i).numpy()
            assert alpha.min() >= 0
            assert alpha.sum() == pytest.approx(1, abs=1e-12)
            assert not ((alpha > 0) & (alpha < 1e-3)).any()
            np.testing.assert_allclose(alpha, solved(np.diag(variance) + d), atol=1e-4)


def test_a_variance_below_zero_takes_the_eigenvalues_of_at_least_a_hundredth() -> None:
    """As the authors do; the same programme with the matrix that these rebuild, here for the clients with V > 0."""
    means, variance = 0.1 * np.random.default_rng(3).normal(size=(5, 3, 4)), np.array([0.5, -0.4, 0.3, -0.3, 0.6])
    for i in (0, 2, 4):
        values, vectors = np.linalg.eigh(np.diag(variance) + apart(means, i))
        assert values[0] < 0
        rebuilt = sum(value * np.outer(v, v) for value, v in zip(values, vectors.T, strict=True) if value >= 0.01)
        alpha = fedpac.combination(torch.from_numpy(variance), torch.from_numpy(means), i).numpy()
        assert alpha @ rebuilt @ alpha == pytest.approx(solved(rebuilt) @ rebuilt @ solved(rebuilt), abs=1e-6)
        assert alpha.sum() == pytest.approx(1, abs=1e-12)


def test_a_variance_never_rounds_below_zero() -> None:
    """Clients with copies of one sample: V is a difference of equal numbers, and for each the best head is its own.

    In float32 it would be as low as -1e-10, for which the eigenvalues would be cut and most of D_i with them.
    """
    data = federation(*(([[x]] * 97, [k % 2] * 97) for k, x in enumerate((0.1, 0.05, 0.7, 0.03))))
    done = run("fedpac", data, TwoLayers, rounds=1, local={"lr": 0.5})
    sent: dict[int, Any] = {message.client: message.up for message in done.messages}
    for k in range(4):
        assert 0 <= sent[k]["variance"] < 1e-15
        torch.testing.assert_close(done.server["heads"][k], sent[k]["head"], atol=1e-6, rtol=0)


def test_statistics_and_combination_by_hand() -> None:
    """Client 0 has x = 1, 2 of class 0 and x = 4 of class 1, client 1 has x = 3 of class 1; z = x before training.

    Client 0: p = (2/3, 1/3), means (3/2, 4), mean squares (5/2, 16), so H = (1, 4/3) and V = (2/3 · 5/2 + 1/3 · 16 -
    4/9 · 9/4 - 1/9 · 16)/3 = 38/27. Client 1: H = (0, 3), V = 0. Between them D = 1 + 25/9 = 34/9. For client 0, a² V +
    (1 - a)² D is least at a = D/(V + D) = 51/70; for client 1 its own head costs nothing.
    """
    data = federation(([[1.0], [2.0], [4.0]], [0, 0, 1]), ([[3.0]], [1]))
    done = run("fedpac", data, TwoLayers, rounds=2, local={"lr": 0.25, "batch_size": 8})
    one, other = (dict[str, Any](message.up) for message in done.messages[:2])
    assert [one["variance"], other["variance"]] == [pytest.approx(38 / 27), 0]
    assert one["shares"].flatten().tolist() == pytest.approx([1, 4 / 3])
    assert other["shares"].flatten().tolist() == [0, 3]
    assert not torch.allclose(one["head"]["head.weight"], other["head"]["head.weight"], atol=0.1)
    again = done.messages[2:]
    torch.testing.assert_close(again[0].down["head"], one["head"] * (51 / 70) + other["head"] * (19 / 70))
    torch.testing.assert_close(again[1].down["head"], other["head"])


def replica(tensors: Mapping[str, Tensor]) -> nn.Sequential:
    """The tests' network in float64 with these values."""
    model = mlp().double()
    model.load_state_dict({name: tensor.double() for name, tensor in tensors.items()})
    assert isinstance(model, nn.Sequential)
    return model


def step(params: Any, loss: Tensor, rate: float) -> None:
    """One step of gradient descent."""
    params = list(params)
    with torch.no_grad():
        for parameter, slope in zip(params, torch.autograd.grad(loss, params), strict=True):
            parameter -= rate * slope


def samples(data: Any, client: int) -> tuple[Tensor, Tensor]:
    x, y = data.clients[client].train.take()
    return x.double(), y


def own_means(z: Tensor, y: Tensor) -> Table:
    return {label: z[y == label].mean(0).detach() for label in y.unique().tolist()}


def common_means(found: list[tuple[Tensor, Tensor]]) -> Table:
    """Over all samples of all clients: clients count by samples."""
    return own_means(torch.cat([z for z, _ in found]), torch.cat([y for _, y in found]))


def objective(model: nn.Sequential, x: Tensor, y: Tensor, targets: Table, lam: float, reduction: str) -> Tensor:
    """CE + λ MSE(z, c_y); a sample whose class has no target adds nothing."""
    z = model[:-1](x)
    terms = [(z[i] - targets[label]) ** 2 for i, label in enumerate(y.tolist()) if label in targets]
    total = torch.stack(terms).sum() if terms else torch.zeros(())
    return F.cross_entropy(model[-1](z), y) + lam * (total if reduction == "sum" else total / z.numel())


def assert_near(found: Mapping[str, Tensor], expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        if name in found:
            torch.testing.assert_close(found[name].double(), tensor, atol=2e-5, rtol=0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_rounds_of_fedproto(reduction: str) -> None:
    """Round 1 has no prototypes and is plain training; in round 2 features are pulled to those of round 1."""
    data, rate, lam = blobs((6, 9)), 0.3, 0.8
    hyper = {"lam": lam, "reduction": reduction}
    done = run("fedproto", data, mlp, rounds=2, hyper=hyper, local={"lr": rate, "batch_size": 16})
    models = [replica(initial()) for _ in range(2)]
    parts = [samples(data, k) for k in range(2)]
    targets: Table = {}
    for _ in range(2):
        for model, (x, y) in zip(models, parts, strict=True):
            step(model.parameters(), objective(model, x, y, targets, lam, reduction), rate)
        targets = common_means([(model[:-1](x), y) for model, (x, y) in zip(models, parts, strict=True)])
    for k in range(2):
        assert_near(done.personal[k], models[k])
    prototypes = done.server["prototypes"]
    assert {int(label) for label in prototypes} == set(targets)
    for label, target in targets.items():
        torch.testing.assert_close(prototypes[f"{label}"].double(), target, atol=2e-5, rtol=0)
    assert {round for round, _, name, _ in done.result.logs if name == "distance"} == {2}


def test_two_rounds_of_fedpac() -> None:
    """Each round a step on the head, with a rate of its own, then one on the base, from round 2 on with the pull."""
    data, rate, head_rate, lam = blobs((6, 9)), 0.3, 0.7, 0.8
    hyper = {"lam": lam, "combine": False, "head_lr": head_rate}
    done = run("fedpac", data, mlp, rounds=2, hyper=hyper, local={"lr": rate, "batch_size": 16})
    base = replica(initial())
    heads = [copy.deepcopy(base[-1]) for _ in range(2)]
    parts = [samples(data, k) for k in range(2)]
    targets: Table = {}
    for _ in range(2):
        models = [nn.Sequential(*copy.deepcopy(base[:-1]), head) for head in heads]
        for model, (x, y) in zip(models, parts, strict=True):
            step(model[-1].parameters(), F.cross_entropy(model(x), y), head_rate)
            step(model[:-1].parameters(), objective(model, x, y, targets, lam, "mean"), rate)
        targets = common_means([(model[:-1](x), y) for model, (x, y) in zip(models, parts, strict=True)])
        with torch.no_grad():
            for mean, one, other in zip(base.parameters(), *(model.parameters() for model in models), strict=True):
                mean.copy_(6 / 15 * one + 9 / 15 * other)
    assert_near(done.server["body"], base)
    for k in range(2):
        assert_near(done.personal[k], nn.Sequential(*base[:-1], heads[k]))
    assert {round for round, _, name, _ in done.result.logs if name == "alignment"} == {2}


def updated(method: str, hyper: dict[str, Any], rate: float, **down: Any) -> tuple[nn.Module, Tensor, Tensor]:
    """A client's model after its step in a second round in which it got this, and its data."""
    data = blobs((9,))
    experiment = Experiment(method, data, mlp, rounds=0, hyper=hyper, local={"lr": rate, "batch_size": 16})
    experiment.run()
    assert experiment.session is not None
    client = experiment.session._runner.client(0, 2, {})
    experiment.method.update(client, **down)  # type: ignore[attr-defined]
    assert isinstance(client.fitted, nn.Module)
    x, y = samples(data, 0)
    assert y.unique().tolist() == [0, 1, 2]
    return client.fitted, x, y


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fedproto_pulls_nothing_to_a_class_without_a_prototype(reduction: str) -> None:
    """Its samples count zero in the mean, which is still one over all of the batch."""
    known = Tensors({"0": torch.full((5,), 0.5), "2": torch.linspace(-1, 1, 5)})
    fitted, x, y = updated("fedproto", {"reduction": reduction}, 0.3, prototypes=known)
    model = replica(initial())
    targets = {int(label): target.double() for label, target in known.items()}
    step(model.parameters(), objective(model, x, y, targets, 1.0, reduction), 0.3)
    assert_near(fitted.state_dict(), model)


def test_fedpac_pulls_to_its_own_mean_where_there_is_no_prototype() -> None:
    """The client's mean features of that class from before training."""
    known = Tensors({"0": torch.full((5,), 0.5), "2": torch.linspace(-1, 1, 5)})
    model = replica(initial())
    body = initial().only(name for name in initial() if name.startswith("0."))
    fitted, x, y = updated("fedpac", {}, 0.3, body=body, head=None, prototypes=known)
    targets = own_means(model[:-1](x), y) | {int(label): target.double() for label, target in known.items()}
    step(model[-1].parameters(), F.cross_entropy(model(x), y), 0.3)
    step(model[:-1].parameters(), objective(model, x, y, targets, 1.0, "mean"), 0.3)
    assert_near(fitted.state_dict(), model)


def test_the_scores_of_the_nearest_prototype() -> None:
    """Minus the squared distances: of (1, 1) to (1, 0) it is 1, to (0, 3) it is 5; a class without one never wins."""
    head = Prototypes({"0": torch.tensor([1.0, 0.0]), "2": torch.tensor([0.0, 3.0])}, 3).nearest()
    found = head(torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
    assert found.tolist() == [[-1.0, -torch.inf, -5.0], [-10.0, -torch.inf, 0.0]]


@pytest.mark.parametrize("count", [0.0, -2.0, torch.inf, torch.nan])
@pytest.mark.parametrize("by_samples", [True, False])
def test_a_class_with_a_senseless_count_is_left_out(count: float, by_samples: bool) -> None:
    """What others say of it counts, else it keeps the prototype of before."""

    def reply(means: dict[str, float], counts: dict[str, float]) -> dict[str, Any]:
        return {
            key: Tensors({name: torch.tensor([value]) for name, value in numbers.items()})
            for key, numbers in (("means", means), ("counts", counts))
        }

    strange = reply({"0": 50.0, "1": 50.0, "2": 50.0}, {"0": count, "1": count, "2": 1.0})
    honest = reply({"0": 3.0}, {"0": 4.0})
    found = merged(Tensors({"1": torch.tensor([7.0])}), [strange, honest], by_samples)
    assert {label: mean.item() for label, mean in found.items()} == {"0": 3.0, "1": 7.0, "2": 50.0}


def test_the_momentum_of_the_head_is_kept_where_the_run_wants_it() -> None:
    """Two rounds on the head alone are two steps of one optimiser, at the rate of its own."""
    data = blobs((9,))
    hyper = {"combine": False, "head_lr": 0.4, "lam": 0.0}
    local = {"lr": 0.01, "epochs": 0, "momentum": 0.5, "batch_size": 16}
    done = run("fedpac", data, mlp, rounds=2, hyper=hyper, keep_optimizer=True, local=local)
    model, (x, y) = replica(initial()), samples(data, 0)
    optimizer = torch.optim.SGD(model[-1].parameters(), 0.4, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert_near(done.personal[0], model)


def test_a_rate_of_its_own_holds_where_clients_train_as_one() -> None:
    """Companions train with the run's rate, so they must leave this phase alone."""
    settings: dict[str, Any] = {"rounds": 1, "hyper": {"head_lr": 0.4}, "exact_shortcuts": False}
    one, two = (run("fedpac", blobs((9, 9)), mlp, together=size, **settings) for size in (1, 2))
    for k in range(2):
        torch.testing.assert_close(one.server["heads"][k], two.server["heads"][k], atol=1e-6, rtol=0)
