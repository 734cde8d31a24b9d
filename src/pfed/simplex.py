"""The convex combination of several models' logits with the least cross-entropy, with a certificate.

Over γ in the simplex (γ_j ≥ 0, Σ γ_j = 1) minimise the mean over samples b of CE(Σ_j γ_j z_jb, y_b). This is convex, as
the cross-entropy of a linear map is, so the duality gap γ·∇ − min_j ∇_j bounds how far a γ is from the best one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Rule = Literal["linear", "mean", "best", "softmax_loss"]
TOLERANCE = 1e-8  # of the duality gap
ITERATIONS = 100
_RIDGE = 1e-12  # relative: two clients with the same logits make the Hessian singular
_SPREAD = 30.0  # of logits; beyond it the loss is a polyhedron with rounded edges, on which Newton's method creeps
_STAGES = 12  # of softer problems, each four times as sharp as the one before
_ROUNDING = 1e-12  # of the logits' spread: a smaller gap is noise
_TRIALS = 60  # of step lengths: enough to reach the last bit of a double


class Weights(NamedTuple):
    """A point of the simplex, and what is known about it."""

    gamma: Tensor  # (clients,) float64
    loss: float  # the cross-entropy of the combination
    gap: float  # the least possible loss is at most this much lower
    iterations: int


class CrossEntropy:
    """CE(Σ_j γ_j z_j, y), mean over the samples, as a function of γ in float64."""

    def __init__(self, logits: Tensor, labels: Tensor):
        """Logits are (clients, samples, classes), labels (samples,)."""
        if logits.dim() != 3 or logits.shape[1:2] != labels.shape or not logits.numel():
            raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} do not fit together")
        if not torch.isfinite(logits).all():
            raise ValueError("logits must be finite")
        z = logits.double()
        own = labels.view(1, -1, 1).expand(len(z), -1, 1)
        # A constant per sample changes nothing. With the label's logit at zero, CE is logsumexp and no digits cancel.
        self._z = z - z.gather(2, own)
        self.clients, self.samples, self.classes = z.shape
        self.spread = self._z.abs().amax((1, 2))  # (clients,)

    def loss(self, gamma: Tensor) -> float:
        return float(self._combined(gamma).logsumexp(-1).mean())

    def gradient(self, gamma: Tensor) -> Tensor:
        """∇_j = mean over b of ⟨p_b − y_b, z_jb⟩ with p = softmax of the combination. (clients,)"""
        p = self._combined(gamma).softmax(-1) / self.samples
        return self._z.flatten(1) @ p.flatten()

    def hessian(self, gamma: Tensor) -> Tensor:
        """The mean over b of the covariance of z_jb and z_kb under p_b. (clients, clients)"""
        p = self._combined(gamma).softmax(-1)
        centred = self._z - (self._z * p).sum(-1, keepdim=True)
        root = (centred * (p / self.samples).sqrt()).flatten(1)
        return root @ root.T

    def gap(self, gamma: Tensor) -> float:
        """The duality gap."""
        gradient = self.gradient(gamma)
        return float(gamma @ (gradient - gradient.min()))

    def alone(self) -> Tensor:
        """The loss of each client without the others. (clients,)"""
        return self._z.logsumexp(-1).mean(1)

    def best(self) -> Tensor:
        """All weight on the client with the least loss. (clients,)"""
        gamma = torch.zeros(self.clients, dtype=torch.float64)
        gamma[self.alone().argmin()] = 1.0
        return gamma

    def sharpened(self, factor: float) -> CrossEntropy:
        """The same problem for logits times a factor."""
        other: CrossEntropy = object.__new__(CrossEntropy)
        other.__dict__.update(self.__dict__, _z=self._z * factor, spread=self.spread * factor)
        return other

    def _combined(self, gamma: Tensor) -> Tensor:
        return (gamma @ self._z.flatten(1)).view(self.samples, self.classes)


def uniform(clients: int) -> Tensor:
    """Everyone alike. (clients,)"""
    return torch.full((clients,), 1 / clients, dtype=torch.float64)


def least(logits: Tensor, labels: Tensor, tolerance: float = TOLERANCE, iterations: int = ITERATIONS) -> Weights:
    """The best combination: sequential quadratic programming from the uniform one until the gap is below tolerance.

    Logits are (clients, samples, classes), labels (samples,). The result is never worse than uniform weights nor than
    any single client. Where logits spread over more than 10,000, the tolerance is 1e-12 of that: the rest is rounding.

    >>> right, wrong = torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    >>> found = least(torch.stack([right, wrong]), torch.tensor([0, 1]))
    >>> [round(weight, 3) for weight in found.gamma.tolist()], found.gap < 1e-8
    ([1.0, 0.0], True)
    """
    f = CrossEntropy(logits, labels)
    gamma, done = uniform(f.clients), 0
    sharp = float(f.spread.max())
    factors = [_SPREAD * 4**k / sharp for k in range(_STAGES) if _SPREAD * 4**k < sharp]
    for stage in map(f.sharpened, factors):  # softer problems lead to where the sharp one is smooth
        gamma, more = _descend(stage, gamma, 1e-3 * float(stage.spread.max()), iterations)
        done += more
    gamma, more = _descend(f, gamma, tolerance, iterations)
    gamma = min([gamma, uniform(f.clients), f.best()], key=f.loss)
    return Weights(gamma, f.loss(gamma), f.gap(gamma), done + more)


def weigh(logits: Tensor, labels: Tensor, rule: Rule = "linear") -> Weights:
    """Weights by a rule: best combination, everyone alike, best client alone, or γ_j in proportion to exp(−CE_j)."""
    if rule == "linear":
        return least(logits, labels)
    f = CrossEntropy(logits, labels)
    gamma = {"mean": uniform(f.clients), "best": f.best(), "softmax_loss": (-f.alone()).softmax(0)}[rule]
    return Weights(gamma, f.loss(gamma), f.gap(gamma), 0)


def _descend(f: CrossEntropy, gamma: Tensor, tolerance: float, iterations: int) -> tuple[Tensor, int]:
    """Newton steps that stay in the simplex, each the solution of a quadratic program; and how many there were."""
    for done in range(iterations):
        gradient = f.gradient(gamma)
        if gamma @ (gradient - gradient.min()) < max(tolerance, _ROUNDING * float(gamma @ f.spread)):
            return gamma, done
        # Directions sum to zero, so a constant may be taken off; what is left is small near the end, and exact.
        level = gamma @ gradient
        hessian = f.hessian(gamma)
        hessian.diagonal().add_(_RIDGE * (hessian.diagonal() + gradient.abs() + 1))
        direction = _newton(hessian, gradient - level, gamma)
        length = _length(f, gamma, direction, level, float((gradient - level) @ direction))
        if not length:
            return gamma, done
        gamma = (gamma + length * direction).clamp(min=0)
        gamma = gamma / gamma.sum()
    return gamma, iterations


def _newton(hessian: Tensor, gradient: Tensor, gamma: Tensor) -> Tensor:
    """The d with the least ∇·d + d·H·d / 2 for which γ + d is in the simplex, by a primal active-set method.

    On the free clients H d + ∇ + ν = 0, the others are held at γ + d = 0. One is held when the way to that solution
    meets its bound, one is freed when its multiplier is negative.
    """
    free, d = gamma > 0, torch.zeros_like(gamma)
    for _ in range(20 + 5 * len(gamma)):
        at = free.nonzero().flatten()
        target = torch.where(free, 0.0, -gamma)
        right = torch.stack([-(gradient + hessian @ target)[at], torch.ones(len(at), dtype=d.dtype)], 1)
        plain, unit = torch.linalg.solve(hessian[at][:, at], right).unbind(1)
        level = (plain.sum() + target.sum()) / unit.sum()  # ν, so that d sums to zero
        target[at] = plain - level * unit
        if bool((gamma + target >= 0)[at].all()):
            d = target
            multiplier = torch.where(free, 0.0, gradient + hessian @ d + level)
            worst = int(multiplier.argmin())
            if multiplier[worst] >= -1e-12 * gradient.abs().max():
                return d
            free[worst] = True
        else:
            way = target - d
            room = torch.where(free & (way < 0), (gamma + d) / -way, torch.inf)
            first = int(room.argmin())
            d = d + min(1.0, float(room[first])) * way
            d[first], free[first] = -gamma[first], False
    return d


def _length(f: CrossEntropy, gamma: Tensor, direction: Tensor, level: Tensor, start: float) -> float:
    """How far to go: all the way where the loss still falls there, else to where at most half of the slope is left.

    Slopes tell what losses no longer can: near the end those differ by less than a rounding error.
    """
    if not start < 0:
        return 0.0
    near, far, t = 0.0, 1.0, 1.0
    before = f.loss(gamma)
    for _ in range(_TRIALS):
        slope = float((f.gradient(gamma + t * direction) - level) @ direction)
        if slope <= 0 and (t == 1 or slope >= start / 2):
            return t
        if 0 < slope <= -start / 2 and f.loss(gamma + t * direction) <= before + 1e-14 * (1 + before):
            return t
        near, far = (t, far) if slope <= 0 else (near, t)
        t = (near + far) / 2
    return near


def quadratic(q: Tensor) -> Tensor:
    """The point of the simplex with the least αᵀQα, for a positive semi-definite Q. (n,) float64

    It is one Newton step, from the best corner. With ∇ = 2Qα, the duality gap α·∇ − min ∇ is below 1e-11 of Q's largest
    element; where several points are best, it is the one nearest to the middle.
    """
    q = q.double()
    alpha = torch.zeros(len(q), dtype=torch.float64)
    alpha[q.diagonal().argmin()] = 1.0
    hessian = 2 * q
    hessian.diagonal().add_(_RIDGE * (float(hessian.diagonal().max()) or 1.0))
    gradient = hessian @ alpha
    alpha = (alpha + _newton(hessian, gradient - alpha @ gradient, alpha)).clamp(min=0)
    return alpha / alpha.sum()
