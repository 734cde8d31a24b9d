"""pFedMe and FedBABU: what moves, what stays as it is bit for bit, and the steps in plain floats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Residual, assert_same, blobs, federation, run
from test_method_arithmetic import START, TwoLayers, Weights, combine, descend, go, gradient, mean, near, values
from torch import Tensor, nn

from pfed import Experiment, UserError, anatomy
from pfed.anatomy import BACKBONE, HEAD, STATS

LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2}


@pytest.mark.parametrize("agg", ["uniform", "samples"])
@pytest.mark.parametrize("still", [{"lam": 0.0}, {"beta": 0.0}], ids=["lam", "beta"])
def test_nothing_moves_the_model_of_pfedme(still: dict[str, float], agg: str) -> None:
    """Without a pull nothing comes from θ to w; without a step the server keeps w. θ moves, and BatchNorm's statistics.

    With lam = 0 each client sends what it got.
    """
    hyper = {"personal_lr": 0.1, "agg": agg, **still}
    done = run("pfedme", blobs((7, 12, 5)), Residual, rounds=3, hyper=hyper, local=LOCAL)
    template = Experiment("pfedme", blobs((7, 12, 5)), Residual)._pool().template(0)
    assert_same(done.server["params"], anatomy.params(template, ~STATS))
    start = anatomy.params(template)
    assert all(not torch.equal(tensor, start[name]) for name, tensor in done.server["statistics"].items())
    for client in range(3):
        theta = done.states[client]["theta"]
        assert all(not torch.equal(theta[name], start[name]) for name in ("fc1.weight", "fc.weight"))
    sent = [message.up["params"] for message in done.messages]
    moved = [name for w in sent for name, tensor in w.items() if not torch.equal(tensor, start[name])]  # type: ignore[union-attr]
    assert bool(moved) == (still == {"beta": 0.0})


Batch = list[tuple[float, int]]  # inputs and labels
LAM, RATE, ETA, BETA, STEPS = 2.0, 0.1, 0.3, 0.5, 2


def slope(w: Weights, batch: Batch) -> Weights:
    """The gradient of the mean cross-entropy of a batch: with e = p - onehot(y), x (e · h) for b and b x e for h."""
    parts = []
    for x, y in batch:
        powers = torch.tensor([w[1] * w[0] * x, w[2] * w[0] * x], dtype=torch.float64).exp()
        e0, e1 = (powers / powers.sum() - torch.eye(2, dtype=torch.float64)[y]).tolist()
        parts.append((1 / len(batch), (x * (e0 * w[1] + e1 * w[2]), w[0] * x * e0, w[0] * x * e1)))
    return combine(*parts)


def round_of_pfedme(w: Weights, batches: list[Batch]) -> tuple[Weights, Weights]:
    """θ and w_k after a round. Both start at w; θ goes on where the last batch left it, and is pulled towards w_k."""
    theta, own = w, w
    for batch in batches:
        for _ in range(STEPS):
            theta = combine((1, theta), (-RATE, slope(theta, batch)), (-RATE * LAM, theta), (RATE * LAM, own))
        own = combine((1 - ETA * LAM, own), (ETA * LAM, theta))
    return theta, own


def test_pfedme_over_batches_epochs_and_rounds() -> None:
    """Two clients with two batches, two epochs, two rounds, β = 1/2."""
    data = federation(([[1.0], [2.0], [-0.5]], [0, 1, 1]), ([[-1.0], [3.0]], [1, 0]))
    hyper = {"lam": LAM, "inner_steps": STEPS, "personal_lr": RATE, "eta": ETA, "beta": BETA}
    options: dict[str, Any] = {"rounds": 2, "hyper": hyper, "local": {"batch_size": 2, "epochs": 2}}
    done = run("pfedme", data, TwoLayers, **options)
    again = Experiment("pfedme", data, TwoLayers, **options)
    again.run()
    assert again.session is not None
    w = START
    for round in (1, 2):
        ends = []
        for k in (0, 1):
            found = again.session._runner.client(k, round, {}).batches(2)
            batches = [list(zip(b.x.flatten().tolist(), b.y.tolist(), strict=True)) for b in found]
            assert len(batches) == (4 if k == 0 else 2)
            ends.append(round_of_pfedme(w, batches))
        sent = [message.up["params"] for message in done.messages if message.round == round]
        assert [values(own) for own in sent] == [near(*own) for _, own in ends]  # type: ignore[arg-type]
        w = combine((1 - BETA, w), (BETA, mean(ends[0][1], ends[1][1], share=0.5)))
    assert [values(done.personal[k]) for k in (0, 1)] == [near(*theta) for theta, _ in ends]
    assert values(done.server["params"]) == near(*w)


def test_two_rounds_of_fedbabu_and_its_tuning() -> None:
    """Under the head that was drawn b goes b - g_b(b, h) at each client, by samples 1/4 and 3/4 of both, twice.

    Then each client makes one step of its own on all weights.
    """
    clients = federation(([[1.0]], [0]), ([[2.0]] * 3, [1] * 3))
    b, *h = values(anatomy.snapshot(Experiment("fedbabu", clients, TwoLayers)._pool().template(0)))
    assert h != near(*START[1:])
    for _ in (1, 2):
        first, second = (b - gradient((b, h[0], h[1]), k)[0] for k in (0, 1))
        assert first != pytest.approx(second, abs=1e-2)
        b = first / 4 + 3 * second / 4
    done = go("fedbabu", 2, {"ft_epochs": 1})
    assert values(done.server["body"]) == near(b)
    assert [values(done.personal[k]) for k in (0, 1)] == [near(*descend((b, h[0], h[1]), k)) for k in (0, 1)]


@pytest.mark.parametrize("scope", ["all", "head", "body"])
def test_fedbabu_tunes_what_it_was_told_to(scope: str) -> None:
    """The rest stays bit for bit, BatchNorm's statistics too; what travels is the body, by name, and nothing else."""
    hyper = {"ft_epochs": 3, "ft_scope": scope}
    done = run("fedbabu", blobs((7, 12, 5)), Residual, rounds=2, hyper=hyper, local=LOCAL)
    template = Experiment("fedbabu", blobs((7, 12, 5)), Residual)._pool().template(0)
    body, head = BACKBONE.names(template), HEAD.names(template)
    travels = {name for name in body if not name.endswith("num_batches_tracked")}
    assert {message.step for message in done.messages} == {"update", "tune"}
    for message in done.messages:
        assert message.down["body"].keys() == travels  # type: ignore[union-attr]
        assert message.names == travels
        assert message.up.keys() == ({"body"} if message.step == "update" else set())
    start = anatomy.snapshot(template)
    for state in done.states.values():
        tuned = state["tuned"]
        same_head = [torch.equal(tuned[name], start[name]) for name in head]
        same_body = {name: torch.equal(tuned[name], done.server["body"][name]) for name in travels}
        assert all(same_head) if scope == "body" else not any(same_head)
        some = [same_body[name] for name in ("fc1.weight", "bn1.bias", "bn1.running_mean", "downsample.0.weight")]
        assert all(same_body.values()) if scope == "head" else not any(some)


class Cosine(nn.Module):
    """A head that can't be drawn anew, under a scale."""

    def __init__(self, scale: float = 10.0) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.tensor(scale))

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.scale * nn.functional.normalize(z, dim=1) @ nn.functional.normalize(self.weight, dim=1).T
        return out


class Drawn(Cosine):
    """One that can."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)


class Scaled(nn.Module):
    """A linear layer, which can be drawn, under a scale, which nobody draws."""

    def __init__(self, scale: float = 10.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(scale))

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.scale * self.linear(z)
        return out


class Small(nn.Module):
    """A body under the given head."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


@pytest.mark.parametrize("head", [Drawn, Scaled])
def test_several_models_of_fedbabu_have_one_head(head: type[nn.Module]) -> None:
    """Where clients have initial values of their own."""
    make = [lambda: Small(head())] * 2
    pool = Experiment("fedbabu", blobs((7, 12, 5)), make, head="head")._pool()
    states = [pool.take(client).state_dict() for client in range(3)]
    names = [name for name in states[0] if name.startswith("head.")]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in names)
    assert not torch.equal(states[0]["body.weight"], states[1]["body.weight"])


def test_a_head_that_would_differ_is_refused() -> None:
    """By FedBABU, if there are several models; one model is the same for all clients as it is."""
    data = blobs((7, 12, 5))
    message = r"FedBABU draws one head for several models, by its reset_parameters\(\)\. Got Cosine, whose weight is"
    for method in ("fedbabu", "fedbabu+ft"):
        with pytest.raises(UserError, match=message + r" not drawn by it and would differ\."):
            Experiment(method, data, [lambda: Small(Cosine())] * 2, head="head")._pool()
    with pytest.raises(UserError, match="Got Scaled, whose scale is not drawn by it"):
        Experiment("fedbabu", data, [lambda: Small(Scaled(1.0)), lambda: Small(Scaled(2.0))], head="head")._pool()
    done = run("fedbabu", data, lambda: Small(Cosine()), head="head", rounds=2, hyper={"ft_epochs": 0}, local=LOCAL)
    heads = [model.only(["head.weight"]) for model in done.personal.values()]
    assert_same(heads[0], heads[1])
