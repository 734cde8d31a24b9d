"""Balanced losses and fixed classifiers by hand: Fed-RoD, SphereFed, FedETF.

What is expected is plain numbers, or what torch's own optimiser does.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Run, assert_same, blobs, federation, mlp, run
from test_method_arithmetic import LN3, TwoLayers, near
from torch import Tensor, nn

from pfed import Experiment, Federation, anatomy
from pfed.client import Client
from pfed.losses import balanced


def begun(method: str, hyper: dict[str, Any], **options: Any) -> tuple[Experiment, Client]:
    """A run of one client before its first round, and that client in it."""
    experiment = Experiment(method, blobs((9,)), mlp, rounds=0, hyper=hyper, **options)
    experiment.run()
    assert experiment.session is not None
    return experiment, experiment.session._runner.client(0, 1, {})


def download(experiment: Experiment) -> dict[str, Any]:
    assert experiment.session is not None
    return experiment.method.download(experiment.session.server)


def test_balanced_logits() -> None:
    """Plus the logarithm of the class's samples; without any, of 1e-9."""
    found = balanced(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([2, 8, 0]))
    assert found.tolist() == [pytest.approx([math.log(2), math.log(8), math.log(1e-9)])]
    logits = torch.tensor([[1.0, -2.0, 0.5]])
    assert torch.equal(balanced(logits, torch.ones(3)), logits)


def weights(done: Run, name: str, client: int | None = None) -> list[float]:
    tensors = done.server["params"] if client is None else done.states[client]["kept"]
    found: list[float] = tensors[name].flatten().tolist()
    return found


def test_a_round_of_fedrod() -> None:
    """At b = 1, h = (0, ln 3), q = 0 and lr 1, with e = p - onehot(y), mean over a client's samples.

    Client 0: x = 1, three times class 0 and once class 1. g(z) + log n = (ln 3, ln 3), so p = (1/2, 1/2) and e = (-1/4,
    1/4), which moves b by -1/4 ln 3 and h by (1/4, -1/4). g(z) + q(z) = (0, ln 3), so p = (1/4, 3/4) and e = (-1/2,
    1/2): q gets the weight and the bias (1/2, -1/2).

    Client 1: x = 2, twice class 1. The class that it has not counts 1e-9 of a sample, so p = (0, 1) and nothing moves b
    and h. g(z) + q(z) = (0, 2 ln 3), so e = (1/10, -1/10): q gets the weight (-1/5, 1/5) and the bias (-1/10, 1/10).

    By samples they count 2/3 and 1/3.
    """
    data = federation(([[1.0]] * 4, [0, 0, 0, 1]), ([[2.0]] * 2, [1, 1]))
    done = run("fedrod", data, TwoLayers, rounds=1, local={"lr": 1.0, "batch_size": 8})
    assert weights(done, "encoder.body.weight") == near(1 - LN3 / 6)
    assert weights(done, "heads.global_head.weight") == near(1 / 6, LN3 - 1 / 6)
    assert weights(done, "heads.personal_head.weight", 0) == near(1 / 2, -1 / 2)
    assert weights(done, "heads.personal_head.bias", 0) == near(1 / 2, -1 / 2)
    assert weights(done, "heads.personal_head.weight", 1) == near(-1 / 5, 1 / 5)
    assert weights(done, "heads.personal_head.bias", 1) == near(-1 / 10, 1 / 10)


def test_fedrod_without_balance_is_fedavg_beside_its_personal_heads() -> None:
    """Also where classes are not alike in number, which the balanced loss would tell."""
    data = federation(([[1.0]] * 4, [0, 0, 0, 1]), ([[2.0]] * 2, [1, 1]))
    local = {"lr": 0.5, "batch_size": 8, "momentum": 0.5}
    plain, balancing = (
        run("fedrod", data, TwoLayers, rounds=3, hyper={"balance": balance}, local=local) for balance in (False, True)
    )
    other = run("fedavg", data, TwoLayers, rounds=3, local=local).server["params"]
    pairs = (("encoder.body.weight", "body.weight"), ("heads.global_head.weight", "head.weight"))
    for name, theirs in pairs:
        assert torch.equal(plain.server["params"][name], other[theirs])
        assert not torch.allclose(balancing.server["params"][name], other[theirs], atol=1e-2)


class Plane(nn.Module):
    """z = v x in the plane, from v = (3, 4), under a head for two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 2, bias=False), nn.Linear(2, 2)
        with torch.no_grad():
            self.body.weight.copy_(torch.tensor([[3.0], [4.0]]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def drawn(method: str, data: Federation) -> dict[str, Tensor]:
    """The model that all start from, its fixed classifier too, in double precision."""
    template = Experiment(method, data, Plane)._pool().template(0)
    return {name: tensor.double() for name, tensor in template.state_dict().items()}


def test_two_rounds_of_spherefed() -> None:
    """With u = v/|v| and orthonormal rows W_y, of which u has the scores s, the loss is the mean of (s - onehot(y))².

    Its slope for u is Wᵀ(s - onehot(y)) = u - W_y; across u, through the norm, that is -(W_y - s_y u)/|z| for z = v x,
    and for v the same with x/|z| = 1/|v|, whatever x > 0 is. So a client moves v by lr (W_y - s_y u)/|v|.
    """
    data = federation(([[1.0]], [0]), ([[2.0]] * 3, [1] * 3))
    w = drawn("spherefed", data)["head.weight"]
    v = torch.tensor([3.0, 4.0], dtype=torch.float64)
    for _ in (1, 2):
        u = v / v.norm()
        own = [v + 8 * (w[y] - (w[y] @ u) * u) / v.norm() for y in (0, 1)]
        v = own[0] / 4 + 3 * own[1] / 4
    done = run("spherefed", data, Plane, rounds=2, hyper={"lr": 8.0}, local={"batch_size": 8})
    assert done.server["params"].keys() == {"body.weight"}
    assert weights(done, "body.weight") == near(*v.tolist())


def test_two_rounds_of_fedetf() -> None:
    """Two prototypes are m and -m. With p = A z + a, u = p/|p|, c = ⟨m, u⟩, the logits are (s c, -s c) + log n.

    With e = softmax - onehot(y), e_1 = -e_0: the slope is 2 e_0 c for s and 2 s e_0 (m - c u)/|p| for p, hence that
    times zᵀ for A, itself for a, and x Aᵀ times it for v. Client 0 has x = 1, three times class 0 and once class 1;
    client 1 has x = 2, once each; by samples they count 2/3 and 1/3.
    """
    data = federation(([[1.0]] * 4, [0, 0, 0, 1]), ([[2.0]] * 2, [0, 1]))
    start = drawn("fedetf", data)
    m = start.pop("head.classifier.weight")[0]
    at = start
    for _ in (1, 2):
        own = []
        for x, counts in ((1.0, (3, 1)), (2.0, (1, 1))):
            v, matrix = at["body.weight"], at["head.projection.weight"]
            bias, s = at["head.projection.bias"], at["head.classifier.scale"]
            z = v[:, 0] * x
            p = matrix @ z + bias
            u = p / p.norm()
            c = m @ u
            likely = torch.sigmoid(2 * s * c + math.log(counts[0] / counts[1]))
            e = likely - counts[0] / sum(counts)  # the mean over the client's samples, which have the same logits
            slope = 2 * s * e * (m - c * u) / p.norm()
            slopes = (x * (matrix.T @ slope)[:, None], torch.outer(slope, z), slope, 2 * e * c)
            names = ("body.weight", "head.projection.weight", "head.projection.bias", "head.classifier.scale")
            own.append({name: at[name] - 0.7 * g for name, g in zip(names, slopes, strict=True)})
        at = {name: 2 * own[0][name] / 3 + own[1][name] / 3 for name in start}
    done = run("fedetf", data, Plane, rounds=2, hyper={"alternations": 0}, local={"lr": 0.7, "batch_size": 8})
    assert done.server["params"].keys() == at.keys()
    for name, tensor in at.items():
        assert (tensor - start[name]).abs().max() > 1e-3
        assert weights(done, name) == near(*tensor.flatten().tolist())


@pytest.mark.parametrize("method", ["spherefed", "fedetf"])
def test_a_fixed_classifier_stays_as_it_was(method: str) -> None:
    """Neither gradients nor weight decay change it, while all else is trained."""
    experiment, client = begun(method, {}, local={"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "epochs": 3})
    before = anatomy.snapshot(client.model())
    experiment.method.update(client, **download(experiment))  # type: ignore[attr-defined]
    assert isinstance(client.fitted, nn.Module)
    (fixed,) = anatomy.marks(client.fitted).fixed
    after = client.fitted.state_dict()
    assert [name for name in before if torch.equal(before[name], after[name])] == [fixed]


def test_the_rate_of_spherefed_makes_up_for_the_mean_over_classes() -> None:
    """0.01 C at a mean over C classes is 0.01 at their sum."""
    settings: dict[str, Any] = {"rounds": 3, "local": {"lr": 0.01, "momentum": 0.9, "batch_size": 4}}
    one, other = (
        run("spherefed", blobs((7, 12)), mlp, hyper={"reduction": reduction}, **settings).server["params"]
        for reduction in ("mean", "sum_classes")
    )
    start = run("spherefed", blobs((7, 12)), mlp, rounds=0).server["params"]
    assert float((one - start).sqnorm()) > 1e-3
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=1e-6, rtol=0)


def test_the_momentum_of_spherefed_is_kept_where_the_run_wants_it() -> None:
    """With one client, two rounds of an epoch are two epochs of one optimiser."""
    settings: dict[str, Any] = {"momentum": 0.9, "batch_size": 16}
    apart, kept, once = (
        run(
            "spherefed",
            blobs((9,)),
            mlp,
            rounds=rounds,
            hyper={"lr": 0.5},
            keep_optimizer=keep,
            local={"epochs": 2 // rounds, **settings},
        ).server["params"]
        for rounds, keep in ((2, False), (2, True), (1, False))
    )
    assert float((apart - once).sqnorm()) > 1e-4
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor, once[name], atol=1e-6, rtol=0)


def turn(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Steps on all data at once by torch's optimiser."""
    for _ in range(epochs):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def test_the_personalization_of_fedetf() -> None:
    """From the model after the epochs on its own data, turn by turn: M by plain SGD, P with momentum and weight decay.

    A new optimiser in each turn. Body and scale stay as those epochs left them, to the bit.
    """
    local = {"lr": 0.2, "batch_size": 16, "epochs": 2}
    found = []
    for turns in (0, 2):
        experiment, client = begun("fedetf", {"alternations": turns, "turn_epochs": 3}, local=local)
        experiment.method.personalize(client, **download(experiment))  # type: ignore[attr-defined]
        found.append(client.state["personal"])
    tuned, personal = found
    model = copy.deepcopy(client.model(tuned)).eval()
    head: Any = model.get_submodule(anatomy.head_name(model))
    x, y = client.data.train.take()
    for _ in range(2):
        turn(model, x, y, torch.optim.SGD([head.classifier.weight], 0.1), 3)
        opt = torch.optim.SGD(head.projection.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
        turn(model, x, y, opt, 3)
    own = {
        f"{anatomy.head_name(model)}.{name}" for name in ("classifier.weight", "projection.weight", "projection.bias")
    }
    assert_same(personal.drop(own), tuned.drop(own))
    for name in own:
        torch.testing.assert_close(personal[name], model.state_dict()[name], atol=2e-6, rtol=0)
        assert not torch.allclose(personal[name], tuned[name], atol=1e-3)


def test_before_its_turns_a_client_of_fedetf_trains_as_in_a_round() -> None:
    """With the balanced loss and the run's optimiser, on all but M."""
    local = {"lr": 0.2, "batch_size": 16, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
    experiment, client = begun("fedetf", {"alternations": 0}, local=local)
    model = copy.deepcopy(client.model())
    experiment.method.personalize(client, **download(experiment))  # type: ignore[attr-defined]
    (fixed,) = anatomy.marks(model).fixed
    x, y = client.data.train.take()
    live = [parameter for name, parameter in model.named_parameters() if name != fixed]
    optimizer = torch.optim.SGD(live, 0.2, momentum=0.5, weight_decay=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x) + torch.bincount(y, minlength=3).log(), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(client.state["personal"][name], tensor, atol=2e-6, rtol=0)
