"""What PartialFed-Adaptive is made of: a composite of two copies, its two kinds of steps, the choice and its gradient.

Numbers are the spec's. Equality is bit for bit.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers import Residual, assert_same, blobs, initial, same
from test_method_arithmetic import TwoLayers, gradient
from torch import nn

from pfed import Client, Experiment, Tensors, anatomy, loading, selection
from pfed.composite import Pair, mix, tensors
from pfed.forward import Batch
from pfed.methods.partialfed_adaptive import PartialFedAdaptive
from pfed.pool import Pool
from pfed.runner import Runner
from pfed.selection import Adam, project, relaxed, temperature
from pfed.tasks import task

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
LOCAL = {"lr": 0.2, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
KINDS: list[selection.Parameter] = ["logits", "projected"]


def client(make: Any = Residual, id: int = 1, shape: tuple[int, ...] = (4,)) -> Client:
    """A client of a run of this model, in its first round."""
    model = make()
    model.load_state_dict(initial(make, shape=shape))
    experiment = Experiment("partialfed-adaptive", DATA, model, local=LOCAL)
    return Runner(experiment.method, DATA, Pool([model]), experiment.options, task("classification")).client(id, 1, {})


def moved(model: nn.Module, seed: int) -> Tensors:
    """All float tensors of a model, moved a little."""
    source = torch.Generator().manual_seed(seed)
    params = anatomy.params(model)
    return Tensors({n: t + 0.1 * torch.rand(t.shape, generator=source) for n, t in params.items()})


def pair(owner: Client, distinct: bool = True, apart: bool = True) -> tuple[Pair, tuple[nn.Module, nn.Module]]:
    """Two copies of the client's model, equal or different, and what trains them."""
    like = owner.pool.template(owner.id)
    copies = owner.model(moved(like, 1)), owner.model(moved(like, 2 if distinct else 1))
    return Pair(owner, copies, loading.cut(like, "block"), apart), copies


def batch(owner: Client) -> Batch:
    x, y = owner.data.train.take()
    return Batch(x, y, torch.arange(len(y)))


NOISE = torch.tensor([[0.3, -0.2], [1.1, 0.4], [-0.5, 0.9]], dtype=torch.float64)
CHOICES = list(itertools.product((0, 1), repeat=3))


@pytest.mark.parametrize("choice", CHOICES)
def test_the_composite_is_made_of_the_copies(choice: tuple[int, ...]) -> None:
    """7: each group is the very tensors of L or of G, and the loss is that of a plain model with these values."""
    owner = client()
    both, copies = pair(owner)
    parts = list(loading.cut(copies[0], "block").values())
    chosen = both.composite(choice)
    for picked, part in zip(choice, parts, strict=True):
        for name in part.names(copies[0]):
            assert chosen[name] is tensors(copies[picked])[name]
    plain = owner.model(Tensors({name: tensor.detach() for name, tensor in chosen.items()}))
    assert torch.equal(both.products(choice, batch(owner))[0], owner.loss(plain, batch(owner)).detach())


def test_weight_steps_move_the_chosen_copies_only() -> None:
    """8: with momentum and weight decay the others stay, running statistics and counters too; then choose the others.

    A group that is chosen moves as in a plain model, and momentum is the copy's own.
    """
    owner = client()
    both, copies = pair(owner)
    parts = loading.cut(copies[0], "block")
    for choice in ((0, 1, 1), (1, 0, 1), (0, 1, 0)):
        before = [anatomy.snapshot(copy) for copy in copies]
        both.descend(choice, batch(owner))
        for copy in (0, 1):
            now = anatomy.snapshot(copies[copy])
            for picked, part in zip(choice, parts.values(), strict=True):
                for name in part.names(copies[0]):
                    assert same(now[name], before[copy][name]) == (picked != copy), name


def test_strategy_steps_change_no_weight() -> None:
    """8: nor any statistic or gradient of the copies."""
    owner = client()
    both, copies = pair(owner)
    before = [anatomy.snapshot(copy) for copy in copies]
    both.products((0, 1, 1), batch(owner))
    for copy, old in zip(copies, before, strict=True):
        assert_same(anatomy.snapshot(copy), old)
        assert all(parameter.grad is None for parameter in copy.parameters())


def test_equal_copies() -> None:
    """10: loss and new value do not depend on the choice, which copy moves does; the gradient of theta is zero."""
    losses, values = [], []
    for choice in CHOICES:
        owner = client()
        both, copies = pair(owner, distinct=False)
        old = anatomy.snapshot(copies[0])
        loss, c = both.products(choice, batch(owner))
        assert same(c[:, 0], c[:, 1])
        u = relaxed(torch.zeros(3, 2, dtype=torch.float64), NOISE, 5.0, "logits")
        assert not selection.gradient(torch.zeros(3, 2), u, c, 5.0, "logits").any()
        both.descend(choice, batch(owner))
        losses.append(loss.item())
        values.append({name: tensor.detach().clone() for name, tensor in both.composite(choice).items()})
        rest = both.composite([1 - picked for picked in choice])
        assert all(same(rest[name].detach(), old[name]) for name in rest)
    assert len(set(losses)) == 1
    assert all(same(value, values[0]) for value in values)


def test_the_first_strategy_step_of_a_run_may_not_move_theta() -> None:
    """10: when it comes before every weight step, in a round where both copies are the initial model."""
    owner = client()
    both, _ = pair(owner, distinct=False)
    method = PartialFedAdaptive(theta_optimizer="sgd", lr_theta=100.0)
    _, c = both.products((0, 1, 0), batch(owner))
    theta = torch.zeros(3, 2, dtype=torch.float64)
    u = relaxed(theta, NOISE, 5.0, "logits")
    assert_same(method.move(theta, selection.gradient(theta, u, c, 5.0, "logits"), Tensors())[0], theta)


def test_mixing() -> None:
    """11: soft at one half is the mean; hard at (0.9, 0.1) is L, at (0.1, 0.9) G; counters are taken, not mixed."""
    model = Residual()
    parts = loading.cut(model, "block")

    def mixed(alpha: float, how: Any) -> tuple[Tensors, Tensors, Tensors]:
        owner = client()
        both, copies = pair(owner)
        both.descend((1, 1, 1), batch(owner))  # counters of G are at 1
        left, right = (anatomy.snapshot(copy) for copy in copies)
        rows = torch.tensor([[1 - alpha, alpha]], dtype=torch.float64).repeat(3, 1)
        return left, right, anatomy.snapshot(mix(copies, parts, rows, how))

    left, right, soft = mixed(0.5, "soft")
    for name in anatomy.params(model):
        torch.testing.assert_close(soft[name], (left[name] + right[name]) / 2, rtol=1e-6, atol=1e-7)
    assert soft["bn1.num_batches_tracked"] == left["bn1.num_batches_tracked"] == 0  # as in a tie of hard: L
    left, right, soft = mixed(0.75, "soft")
    for name in anatomy.params(model):
        torch.testing.assert_close(soft[name], 0.25 * left[name] + 0.75 * right[name], rtol=1e-6, atol=1e-7)
    assert soft["bn1.num_batches_tracked"] == 1
    for alpha, how, which in ((0.1, "hard", 0), (0.5, "hard", 0), (0.9, "hard", 1), (0.0, "soft", 0), (1.0, "soft", 1)):
        *copies, result = mixed(alpha, how)
        assert_same(result, copies[which])


@pytest.mark.parametrize("anneal", ["exp", "linear"])
def test_temperature(anneal: Any) -> None:
    """12: from 5 in round 1 to tau_min in the last, never rising; exp falls by one factor a round."""
    taus = [temperature(t, 100, 5.0, 0.1, anneal) for t in range(1, 101)]
    assert taus[0] == 5.0
    assert taus[-1] == pytest.approx(0.1)
    assert all(one > two >= 0.1 for one, two in itertools.pairwise(taus))
    steps = [two / one if anneal == "exp" else two - one for one, two in itertools.pairwise(taus)]
    assert steps == pytest.approx([(0.1 / 5) ** (1 / 99) if anneal == "exp" else -4.9 / 99] * 99)
    assert temperature(1, 1, 5.0, 0.1, anneal) == 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_frozen_surrogate(kind: selection.Parameter) -> None:
    """14: finite differences of Σ u_ij(theta) c_ij in float64, c taken at the hard sample of a real model."""
    owner = client()
    both, _ = pair(owner)
    source = torch.Generator().manual_seed(3)
    theta = torch.rand(3, 2, generator=source, dtype=torch.float64)
    theta = theta if kind == "logits" else torch.softmax(theta, 1)
    noise, tau = torch.rand(3, 2, generator=source, dtype=torch.float64), 0.7
    u = relaxed(theta, noise, tau, kind)
    _, c = both.products(u.argmax(1).tolist(), batch(owner))
    found = selection.gradient(theta, u, c, tau, kind)
    assert (found.abs() > 1e-4).all()
    for i, j in itertools.product(range(3), range(2)):
        sides = []
        for sign in (1, -1):
            near = theta.clone()
            near[i, j] += sign * 1e-6
            sides.append((relaxed(near, noise, tau, kind) * c).sum().item())
        assert found[i, j].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6, abs=1e-9)


def test_products_are_those_of_autograd() -> None:
    """c_ij is the derivative of the loss by a_ij in W[i] = a_i0 L[i] + a_i1 G[i] at the sample, for every group."""
    owner = client()
    both, copies = pair(owner)
    choice = (0, 1, 1)
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], requires_grad=True)
    left, right = (tensors(copy) for copy in copies)
    weights = {
        name: a[both.group[name], 0] * left[name].detach() + a[both.group[name], 1] * right[name].detach()
        for name in both.trained
    }
    logits = torch.func.functional_call(copies[0], weights, (batch(owner).x,))
    nn.functional.cross_entropy(logits, batch(owner).y).backward()  # type: ignore[no-untyped-call]
    _, c = both.products(choice, batch(owner))
    assert a.grad is not None
    torch.testing.assert_close(c, a.grad.double(), rtol=1e-4, atol=1e-5)


def test_a_strategy_step_by_hand() -> None:
    """z = b x, logits h z (as in the arithmetic of the other methods), client with x = 1, y = 0 at the composite.

    L = (1; 0, ln 3) and G = (2; 1, 0); body of G and head of L are chosen, so W = (2; 0, ln 3), g = dl/dW by hand, and
    c = ((g_b 1, g_b 2), (g_h0 0 + g_h1 ln 3, g_h0 1 + g_h1 0)). With noise 0 and theta = 0, u is one half each, so the
    gradient by theta[i, 1] at tau = 5 is (c_i1 - c_i0) / 4 / 5, and SGD with rate 1 moves theta by minus that.
    """
    own, shared = (1.0, 0.0, math.log(3)), (2.0, 1.0, 0.0)
    owner = client(TwoLayers, shape=(1,))
    copies = owner.model(_two(own)), owner.model(_two(shared))
    both = Pair(owner, copies, loading.cut(copies[0], "block"))
    one = Batch(torch.tensor([[1.0]]), torch.tensor([0]), torch.tensor([0]))
    loss, c = both.products((1, 0), one)
    g = gradient((shared[0], own[1], own[2]), 0)
    expected = [[g[0] * 1, g[0] * 2], [g[2] * math.log(3), g[1]]]
    torch.testing.assert_close(c, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert loss.item() == pytest.approx(math.log(1 + 9))  # logits (0, 2 ln 3)
    theta = torch.zeros(2, 2, dtype=torch.float64)
    u = relaxed(theta, theta, 5.0, "logits")
    move = PartialFedAdaptive(theta_optimizer="sgd", lr_theta=1.0).move
    after, _ = move(theta, selection.gradient(theta, u, c, 5.0, "logits"), Tensors())
    for i in range(2):
        step = (expected[i][1] - expected[i][0]) / 20
        assert after[i].tolist() == pytest.approx([step, -step], abs=1e-6)


def _two(w: tuple[float, float, float]) -> Tensors:
    return Tensors({"body.weight": torch.tensor([[w[0]]]), "head.weight": torch.tensor([[w[1]], [w[2]]])})


def test_adam_is_torchs() -> None:
    """Ten steps, with the moments stored and given back between them."""
    source = torch.Generator().manual_seed(0)
    ours = torch.rand(4, 2, generator=source, dtype=torch.float64)
    theirs = ours.clone().requires_grad_()
    reference = torch.optim.Adam([theirs], lr=0.01)
    moments = Tensors()
    for _ in range(10):
        grad = torch.randn(4, 2, generator=source, dtype=torch.float64)
        ours, moments = Adam(0.01)(ours, grad, moments)
        theirs.grad = grad
        reference.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-13, atol=1e-15)


def test_projection() -> None:
    """The nearest point of the simplex: none of a fine grid is nearer, and a point of the simplex stays."""
    source = torch.Generator().manual_seed(0)
    rows = torch.cat(
        [torch.randn(50, 2, generator=source, dtype=torch.float64), torch.tensor([[0.3, 0.7], [0.0, 1.0]])]
    )
    found = project(rows)
    torch.testing.assert_close(found.sum(1), torch.ones(52, dtype=torch.float64))
    right = torch.linspace(0, 1, 1001, dtype=torch.float64)
    grid = torch.stack([1 - right, right], dim=1)
    nearest = grid[torch.cdist(rows, grid).argmin(1)]
    torch.testing.assert_close(found, nearest, rtol=0, atol=6e-4)
    torch.testing.assert_close(found[-2:], rows[-2:])


def test_one_change_for_both_copies() -> None:
    """two_copies = False: whichever is chosen, L and G move alike, so their distance stays as it was."""
    owner = client()
    both, copies = pair(owner, apart=False)
    left, right = (anatomy.snapshot(copy) for copy in copies)
    for choice in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        both.descend(choice, batch(owner))
    for name in both.trained:
        one, two = (tensors(copy)[name].detach() for copy in copies)
        torch.testing.assert_close(two - one, right[name] - left[name], rtol=1e-4, atol=1e-6)
        assert not same(one, left[name])
