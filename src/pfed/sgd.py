"""Stochastic gradient descent on named parameters, as torch.optim.SGD computes it.

It is here because it keeps momentum by parameter name, so that it can be stored with a client, and because importing
torch's optimisers costs more time than many a first round.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pfed.tensors import Tensors


class SGD:
    """p ← p − lr (momentum ⊛ (∇ + weight_decay p)); a parameter without a gradient is left alone."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        buffers: Mapping[str, Tensor] | None = None,
    ):
        self.params, self.lr = dict(params), lr
        self.momentum, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        kept = {name: buffer for name, buffer in (buffers or {}).items() if name in self.params}
        self.buffers = Tensors({name: torch.empty_like(params[name]).copy_(b) for name, b in kept.items()})

    def zero_grad(self) -> None:
        for parameter in self.params.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        live = [(name, p, p.grad) for name, p in self.params.items() if p.grad is not None]
        if not live:
            return
        params = [p for _, p, _ in live]
        grads: list[Tensor] = [g for _, _, g in live]
        if self.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=self.weight_decay))
        if self.momentum:
            grads = self._with_momentum([name for name, _, _ in live], grads)
        torch._foreach_add_(params, grads, alpha=-self.lr)

    def _with_momentum(self, names: list[str], grads: list[Tensor]) -> list[Tensor]:
        old = [(self.buffers[name], grad) for name, grad in zip(names, grads, strict=True) if name in self.buffers]
        if old:
            buffers = [buffer for buffer, _ in old]
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, [grad for _, grad in old])
        for name, grad in zip(names, grads, strict=True):
            if name not in self.buffers:
                self.buffers[name] = grad.clone()
        moving = [self.buffers[name] for name in names]
        return list(torch._foreach_add(grads, moving, alpha=self.momentum)) if self.nesterov else moving
