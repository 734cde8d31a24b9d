"""Learning to choose one of two for each of k groups: Gumbel-softmax samples, their gradients, the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pfed.tensors import Tensors

FLOOR = 1e-3  # a probability that is itself the parameter counts as at least this, so that no choice dies out
Parameter = Literal["logits", "projected"]


def temperature(t: int, rounds: int, first: float, last: float, anneal: Literal["exp", "linear"]) -> float:
    """From `first` in round 1 to `last` in the last round."""
    share = (t - 1) / (rounds - 1) if rounds > 1 else 0.0
    if anneal == "linear":
        return max(last, first + (last - first) * share)
    return max(last, float(first * (last / first) ** share))


def initial(groups: int, gap: float, kind: Parameter) -> Tensor:
    """The parameters at the start: logits (0, gap) for each group, or the probabilities that they stand for."""
    logits = torch.tensor([[0.0, gap]], dtype=torch.float64).repeat(groups, 1)  # (k, 2)
    return logits if kind == "logits" else torch.softmax(logits, dim=1)


def probabilities(theta: Tensor, kind: Parameter) -> Tensor:
    """alpha, whose rows sum to 1. (k, 2)"""
    return torch.softmax(theta, dim=1) if kind == "logits" else theta


def relaxed(theta: Tensor, noise: Tensor, tau: float, kind: Parameter) -> Tensor:
    """u = softmax((log alpha + noise) / tau); the sample itself is the larger of the two. (k, 2)"""
    log = torch.log_softmax(theta, dim=1) if kind == "logits" else theta.clamp(min=FLOOR).log()
    return torch.softmax((log + noise) / tau, dim=1)


def gradient(theta: Tensor, u: Tensor, c: Tensor, tau: float, kind: Parameter) -> Tensor:
    """The gradient of Σ u_ij c_ij by theta, c held fixed: that of the loss by the straight-through rule. (k, 2)

    By log alpha it is u_0 u_1 (c_1 − c_0) / tau for column 1 and minus that for column 0. As the row sums to zero, it
    is also the gradient by the logits.
    """
    right = u[:, 0] * u[:, 1] * (c[:, 1] - c[:, 0]) / tau
    by_log = torch.stack([-right, right], dim=1)
    return by_log if kind == "logits" else by_log / theta.clamp(min=FLOOR)


def project(alpha: Tensor) -> Tensor:
    """The nearest probabilities: each row (of two) projected on the simplex."""
    right = ((1 + alpha[:, 1] - alpha[:, 0]) / 2).clamp(0, 1)
    return torch.stack([1 - right, right], dim=1)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, ICLR 2015) on one tensor, as torch.optim.Adam computes it; its memory is plain state."""

    lr: float
    first: float = 0.9
    second: float = 0.999
    eps: float = 1e-8

    def __call__(self, value: Tensor, grad: Tensor, memory: Mapping[str, Tensor]) -> tuple[Tensor, Tensors]:
        """The value after a step, and the moments to give to the next one (none at the first)."""
        zero = torch.zeros_like(value)
        t = memory.get("t", torch.zeros((), dtype=torch.int64)) + 1
        m = self.first * memory.get("m", zero) + (1 - self.first) * grad
        v = self.second * memory.get("v", zero) + (1 - self.second) * grad**2
        rate = self.lr / (1 - self.first ** int(t))
        step = rate * m / ((v / (1 - self.second ** int(t))).sqrt() + self.eps)
        return value - step, Tensors(t=t, m=m, v=v)
