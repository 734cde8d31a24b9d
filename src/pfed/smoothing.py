"""A moving average of the private elements of a model's parameters, kept while it trains; a ramp for its weight."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from pfed import anatomy
from pfed.channels import Split


def rampup(t: int, rounds: int) -> float:
    """exp(−5 (1 − t/t0)²) up to t0, a tenth of the rounds, then 1 (Laine and Aila, 2017).

    >>> [round(rampup(t, 50), 3) for t in (0, 1, 4, 5, 50)]
    [0.007, 0.041, 0.819, 1.0, 1.0]
    """
    t0 = max(1, (rounds + 5) // 10)
    return math.exp(-5 * (1 - t / t0) ** 2) if t < t0 else 1.0


class Smoothing:
    """v ← β v + (1 − β) v_before for the private elements of a model's parameters, after every epoch or step.

    `client.fit(model, extra=[average], each_epoch=average.epoch)` has it done.
    """

    def __init__(self, model: nn.Module, split: Split, beta: float, every: Literal["epoch", "step"] = "step") -> None:
        self.beta, self.every = beta, every
        own = {name: ~split.shared[name] for name in anatomy.trainable(model)} if beta < 1 else {}
        self.private = {name: mask for name, mask in own.items() if mask.any()}
        self.live = {name: anatomy.trainable(model)[name] for name in self.private}
        self.before = {name: v.detach().clone() for name, v in self.live.items()}

    @torch.no_grad()
    def __call__(self) -> None:
        """One time."""
        for name, v in self.live.items():
            mixed = self.beta * v + (1 - self.beta) * self.before[name]
            v.copy_(torch.where(self.private[name], mixed, v))
            self.before[name].copy_(v)

    def epoch(self, model: nn.Module) -> None:
        """At the end of an epoch."""
        if self.every == "epoch":
            self()

    def step(self) -> None:
        """At the end of a step, as the last of its optimisers."""
        if self.every == "step":
            self()

    def zero_grad(self) -> None:
        """It has no gradients."""
