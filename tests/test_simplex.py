"""The best convex combination of logits: its certificate, its symmetries, and inputs on which a solver could trip.

And the quadratic programme on the simplex by which heads are combined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pfed import simplex
from pfed.simplex import CrossEntropy, least, quadratic, uniform, weigh


def instance(
    clients: int, scale: float = 3.0, seed: int = 0, samples: int = 32, classes: int = 6
) -> tuple[Tensor, Tensor]:
    """Clients of different skill: each knows about 70 % of the samples, by a margin of its own."""
    source = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (samples,), generator=source)
    z = torch.randn(clients, samples, classes, generator=source)
    for own in z:
        known = torch.rand(samples, generator=source) < 0.7
        own[known, y[known]] += 2 * torch.rand(1, generator=source)
    return scale * z, y


def cross_entropy(gamma: Tensor, z: Tensor, y: Tensor) -> float:
    """Written independently of the solver."""
    combined = sum(weight * own for weight, own in zip(gamma, z.double(), strict=True))
    assert isinstance(combined, Tensor)
    return float(torch.nn.functional.cross_entropy(combined, y))


MANY = [(clients, scale, seed) for clients in (2, 5, 12) for scale in (0.3, 3.0, 20.0) for seed in range(4)]


@pytest.mark.parametrize(("clients", "scale", "seed"), MANY)
def test_it_is_in_the_simplex_and_certified(clients: int, scale: float, seed: int) -> None:
    """Invariants 1 and 2: γ ≥ 0, Σγ = 1, the gap is below 1e-8, and neither the mean nor a single client is better."""
    z, y = instance(clients, scale, seed)
    found = least(z, y)
    assert bool((found.gamma >= 0).all())
    assert abs(float(found.gamma.sum()) - 1) < 1e-12
    assert found.loss == pytest.approx(cross_entropy(found.gamma, z, y), rel=1e-12)
    assert 0 <= found.gap < 1e-8
    assert found.iterations <= 20
    others = [uniform(clients), *torch.eye(clients, dtype=torch.float64)]
    assert found.loss <= min(cross_entropy(gamma, z, y) for gamma in others) + 1e-9


def test_no_point_of_a_grid_is_better() -> None:
    """Three clients, all weights in steps of a fiftieth: the bound that the gap gives holds, and is nearly attained."""
    z, y = instance(3, seed=5)
    found = least(z, y)
    grid = [torch.tensor([i, j, 50 - i - j], dtype=torch.float64) / 50 for i in range(51) for j in range(51 - i)]
    best = min(cross_entropy(gamma, z, y) for gamma in grid)
    assert found.loss - found.gap <= best
    assert found.loss <= best <= found.loss + 1e-2


def test_the_gap_bounds_the_distance_to_the_best() -> None:
    """At any γ the loss minus the gap is no more than the least loss: here at uniform weights and at single clients."""
    z, y = instance(5, seed=2)
    f, best = CrossEntropy(z, y), least(z, y).loss
    for gamma in [uniform(5), *torch.eye(5, dtype=torch.float64)]:
        assert f.loss(gamma) - f.gap(gamma) <= best <= f.loss(gamma)


@pytest.mark.parametrize("seed", range(3))
def test_derivatives(seed: int) -> None:
    """Invariant 11: the analytic gradient is that of central differences, and the Hessian that of the gradient's."""
    z, y = instance(4, scale=1.0, seed=seed)
    f = CrossEntropy(z, y)
    gamma = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    gamma = gamma / gamma.sum()
    h = 1e-5
    units = torch.eye(4, dtype=torch.float64)
    # The loss of the class sees logits relative to the label's, which is the same function of γ.
    slope = [(cross_entropy(gamma + h * e, z, y) - cross_entropy(gamma - h * e, z, y)) / (2 * h) for e in units]
    assert f.gradient(gamma).tolist() == pytest.approx(slope, abs=1e-5)
    bend = torch.stack([(f.gradient(gamma + h * e) - f.gradient(gamma - h * e)) / (2 * h) for e in units])
    torch.testing.assert_close(f.hessian(gamma), bend, atol=1e-5, rtol=0)


def test_two_clients_by_hand() -> None:
    """One sample with two classes and margins a = (2, -1): the combined margin is m = 3γ - 1, the best has γ = 1.

    With a second sample on which the margins are (-1, 2) the problem is symmetric, so γ = 1/2 and both margins are 1/2:
    CE = log(1 + exp(-1/2)).
    """
    one = torch.tensor([[[2.0, 0.0]], [[-1.0, 0.0]]])
    assert least(one, torch.tensor([0])).gamma.tolist() == [1.0, 0.0]
    two = torch.tensor([[[2.0, 0.0], [-1.0, 0.0]], [[-1.0, 0.0], [2.0, 0.0]]])
    found = least(two, torch.tensor([0, 0]))
    assert found.gamma.tolist() == pytest.approx([0.5, 0.5])
    assert found.loss == pytest.approx(math.log1p(math.exp(-0.5)))


def test_an_interior_optimum_by_hand() -> None:
    """Margins (3, -1) on one sample and (-1, 2) on the other: m1 = 4γ - 1, m2 = 2 - 3γ.

    The derivative of the sum of log(1 + exp(-m)) is -4 s(-m1) + 3 s(-m2) with s the logistic function: zero there.
    """
    z = torch.tensor([[[3.0, 0.0], [-1.0, 0.0]], [[-1.0, 0.0], [2.0, 0.0]]])
    gamma = float(least(z, torch.tensor([0, 0])).gamma[0])
    m1, m2 = 4 * gamma - 1, 2 - 3 * gamma
    assert 0.3 < gamma < 0.6
    assert -4 / (1 + math.exp(m1)) + 3 / (1 + math.exp(m2)) == pytest.approx(0, abs=1e-7)


def test_one_client() -> None:
    """Invariant 3: n = 1 gives γ = [1], with nothing to do."""
    z, y = instance(1)
    found = least(z, y)
    assert found.gamma.tolist() == [1.0]
    assert (found.gap, found.iterations) == (0.0, 0)
    assert found.loss == pytest.approx(cross_entropy(found.gamma, z, y))


def test_equal_clients() -> None:
    """Invariant 5: with z_1 = z_2 any γ gives the same teacher, and the loss is that of each."""
    z, y = instance(1)
    found = least(torch.cat([z, z]), y)
    assert found.loss == pytest.approx(cross_entropy(torch.ones(1), z, y), rel=1e-12)
    combined = found.gamma[0] * z[0].double() + found.gamma[1] * z[0].double()
    torch.testing.assert_close(combined, z[0].double())


def test_copies_among_others() -> None:
    """Copies make the Hessian singular; the loss is that without them, and the gap is closed."""
    z, y = instance(4, seed=3)
    plain, doubled = least(z, y), least(torch.cat([z, z[1:3], z[1:2]]), y)
    assert doubled.gap < 1e-8
    assert doubled.loss == pytest.approx(plain.loss, abs=1e-8)


def test_constants_per_sample_do_not_matter() -> None:
    """Invariant 6: adding a number per client and sample to all its logits leaves loss, γ and the teacher's softmax."""
    z, y = instance(5, seed=4)
    shift = 40 * torch.randn(5, z.shape[1], 1, generator=torch.Generator().manual_seed(9))
    one, two = least(z, y), least(z + shift, y)
    assert two.loss == pytest.approx(one.loss, abs=1e-5)  # the shifted logits are rounded to float32
    torch.testing.assert_close(one.gamma, two.gamma, atol=1e-4, rtol=0)
    exact = least(z.double() + shift.double(), y)
    torch.testing.assert_close(one.gamma, exact.gamma, atol=1e-9, rtol=0)
    teachers = [
        torch.tensordot(found.gamma, logits, dims=1).softmax(-1)
        for found, logits in ((one, z.double()), (exact, z.double() + shift.double()))
    ]
    torch.testing.assert_close(*teachers, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_clients_does_not_matter(seed: int) -> None:
    """Invariant 7: permuted clients have permuted weights and the same teacher, to 1e-6."""
    z, y = instance(7, seed=seed)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    one, two = least(z, y), least(z[order], y)
    torch.testing.assert_close(one.gamma[order], two.gamma, atol=1e-6, rtol=0)
    teachers = [torch.tensordot(found.gamma, own.double(), dims=1) for found, own in ((one, z), (two, z[order]))]
    torch.testing.assert_close(*teachers, atol=1e-6, rtol=0)


@pytest.mark.parametrize("margin", [5.0, 7.0, 10.0])
def test_who_is_right_gets_all(margin: float) -> None:
    """Invariant 12: a client that is right by a margin of 5 to 10 has γ > 0.99 among overconfident wrong ones."""
    y = torch.arange(64) % 10
    right = margin * torch.nn.functional.one_hot(y, 10)
    wrong = [30.0 * torch.nn.functional.one_hot((y + k) % 10, 10) for k in (1, 2, 3)]
    found = least(torch.stack([*wrong, right]).float(), y)
    assert float(found.gamma[-1]) > 0.99


@pytest.mark.parametrize("scale", [1e3, 1e4, 1e6, 1e30, 3e37])
def test_huge_logits(scale: float) -> None:
    """Nothing overflows, the weights are better than any simple ones, and the gap closes as far as rounding lets it."""
    z, y = instance(6, scale, seed=1)
    found = least(z, y)
    assert bool(torch.isfinite(found.gamma).all())
    assert math.isfinite(found.loss)
    f = CrossEntropy(z, y)
    assert found.loss <= min(f.loss(uniform(6)), float(f.alone().min()))
    if scale <= 1e6:
        assert found.gap < max(1e-8, 1e-11 * float(f.spread.max()))


def test_nothing_to_choose() -> None:
    """All logits zero, or so small that they are: every γ is best, and the uniform one comes out."""
    z, y = instance(4)
    for factor in (0.0, 1e-30):
        found = least(factor * z, y)
        assert found.gamma.tolist() == [0.25] * 4
        assert found.loss == pytest.approx(math.log(6))
        assert found.iterations == 0


def test_clients_of_very_different_sizes() -> None:
    """Logits from 1e-2 to 1e4, a copy, and a client that says nothing."""
    z, y = instance(8, scale=1.0, seed=6)
    z = z * torch.logspace(-2, 4, 8).view(-1, 1, 1)
    z[3], z[5] = z[2], 0.0
    found = least(z, y)
    assert found.gap < 1e-7
    assert found.loss <= math.log(6)


@pytest.mark.parametrize("scale", [1e8, 1e30])
def test_a_client_that_diverged(scale: float) -> None:
    """One client's wrong logits are beyond all measure: it has no weight, and the others have theirs as without it."""
    z, y = instance(6, seed=7)
    strange = scale * torch.nn.functional.one_hot((y + 1) % 6, 6)
    without, found = least(z, y), least(torch.cat([z[:3], strange[None], z[3:]]), y)
    assert found.gap < 1e-8
    assert float(found.gamma[3]) == 0
    assert found.loss == pytest.approx(without.loss, abs=1e-8)


def test_many_clients_with_sharp_logits() -> None:
    """Where the loss is nearly a polyhedron, softer problems first save most of the way."""
    source = torch.Generator().manual_seed(0)
    z, y = 1e4 * torch.randn(30, 64, 10, generator=source), torch.randint(10, (64,), generator=source)
    found = least(z, y)
    assert found.gap < 1e-6
    assert found.iterations < 60


@pytest.mark.parametrize("skilled", [False, True])
def test_it_stops_where_it_is_told(skilled: bool) -> None:
    """No iteration: the better of uniform weights and the best client alone, with its gap."""
    z, y = instance(5)
    z[2, torch.arange(len(y)), y] += 9.0 * skilled
    none, some = least(z, y, iterations=0), least(z, y)
    f = CrossEntropy(z, y)
    assert none.iterations == 0
    assert none.loss == pytest.approx(min(f.loss(uniform(5)), float(f.alone().min())), rel=1e-12)
    assert none.gamma.tolist() == ([0, 0, 1, 0, 0] if skilled else [0.2] * 5)
    assert none.gap > 1e-8 > some.gap
    assert none.loss - none.gap <= some.loss < none.loss


def test_it_changes_nothing() -> None:
    """A pure function: the same input gives the same bits, and is left as it was."""
    z, y = instance(5)
    before = z.clone()
    assert torch.equal(least(z, y).gamma, least(z, y).gamma)
    assert torch.equal(z, before)


def test_rules() -> None:
    """mean is 1/n, best all on the least loss, softmax_loss in proportion to exp(-CE_j), linear no worse than any."""
    z, y = instance(3, scale=1.0)
    alone = [cross_entropy(e, z, y) for e in torch.eye(3, dtype=torch.float64)]
    assert CrossEntropy(z, y).alone().tolist() == pytest.approx(alone)
    assert weigh(z, y, "mean").gamma.tolist() == [1 / 3] * 3
    assert weigh(z, y, "best").gamma.argmax() == min(range(3), key=alone.__getitem__)
    assert sorted(weigh(z, y, "best").gamma.tolist()) == [0, 0, 1]
    powers = [math.exp(-loss) for loss in alone]
    assert weigh(z, y, "softmax_loss").gamma.tolist() == pytest.approx([power / sum(powers) for power in powers])
    assert torch.equal(weigh(z, y).gamma, least(z, y).gamma)
    rules: list[simplex.Rule] = ["mean", "best", "softmax_loss"]
    for rule in rules:
        found = weigh(z, y, rule)
        assert found.loss == pytest.approx(cross_entropy(found.gamma, z, y))
        assert weigh(z, y).loss <= found.loss <= weigh(z, y).loss + found.gap + 1e-12


SHAPES: list[tuple[str, Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]]] = [
    ("ordinary", lambda r: (r.normal(size=(20, 30)), r.uniform(0.01, 2, 20))),
    ("few dimensions", lambda r: (r.normal(size=(20, 2)) * np.exp(r.normal(size=(20, 1))), r.uniform(0, 1e-5, 20))),
    ("no variance", lambda r: (r.normal(size=(20, 30)), np.zeros(20))),
    ("copies", lambda r: (np.repeat(r.normal(size=(4, 30)), 5, 0), np.full(20, 1e-3))),
    ("all the same", lambda r: (np.ones((20, 30)), np.zeros(20))),
    ("variances of all sizes", lambda r: (r.normal(size=(20, 30)), 10 ** r.uniform(-12, 2, 20))),
    ("huge", lambda r: (1e15 * r.normal(size=(20, 30)), r.uniform(0.01, 2, 20))),
    ("tiny", lambda r: (1e-15 * r.normal(size=(20, 30)), 1e-30 * r.uniform(0.01, 2, 20))),
    ("alone", lambda r: (r.normal(size=(1, 30)), np.ones(1))),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_a_quadratic_programme_is_solved_to_rounding(shape: Any) -> None:
    """The duality gap certifies it, also where the matrix is singular or its sizes differ; no corner is better."""
    for seed in range(5):
        means, variance = map(torch.from_numpy, shape[1](np.random.default_rng(seed)))
        for i in {0, len(means) - 1}:
            q = torch.diag(variance) + (means[i] - means) @ (means[i] - means).T
            alpha = quadratic(q)
            assert alpha.min() >= 0
            assert float(alpha.sum()) == pytest.approx(1, abs=1e-12)
            gradient = 2 * q @ alpha
            assert float(alpha @ gradient - gradient.min()) <= 1e-11 * float(q.diagonal().max())
            assert float(alpha @ q @ alpha) <= float(q.diagonal().min() + 1e-11 * q.diagonal().max())


def test_equal_corners_of_a_quadratic_programme_share_alike() -> None:
    """Where nothing distinguishes them, also where the matrix is zero."""
    for value in (0.0, 1e-20, 1.0):
        assert quadratic(torch.full((4, 4), value)).tolist() == pytest.approx([0.25] * 4)


def test_bad_input() -> None:
    z, y = instance(2)
    with pytest.raises(ValueError, match="do not fit together"):
        least(z, y[:-1])
    with pytest.raises(ValueError, match="do not fit together"):
        least(z[0], y)
    with pytest.raises(ValueError, match="do not fit together"):
        least(z[:0], y)
    z[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="must be finite"):
        least(z, y)
