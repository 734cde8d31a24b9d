"""Two copies of a model that train as one: every group of tensors comes from the one or the other, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfed import anatomy, forward
from pfed.anatomy import Part
from pfed.client import Client, Loss
from pfed.forward import Batch


class _Objective(nn.Module):
    """A loss as a function of the model's tensors."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)


class Pair:
    """A local and a global copy at a client. A choice gives for each group the copy (0 or 1) that it comes from."""

    def __init__(self, client: Client, copies: Sequence[nn.Module], groups: Mapping[str, Part], apart: bool = True):
        """Unless `apart`, a step moves both copies alike, so that the distance between them stays."""
        self.client, self.apart, self.groups = client, apart, len(groups)
        self.tensors = [tensors(copy) for copy in copies]
        self.group = places(copies[0], groups)
        fixed = anatomy.marks(copies[0]).fixed
        self.trained = [name for name, _ in copies[0].named_parameters() if name not in fixed]
        for copy in copies:
            for name, parameter in copy.named_parameters():
                parameter.requires_grad_(name not in fixed)
        self.optimizers = {
            memory: client.sgd({name: held[name] for name in self.trained}, memory)
            for memory, held in zip(("local", "global") if apart else ("both",), self.tensors, strict=False)
        }
        self._model = copies[0]
        self._objective = _Objective(copies[0], client.loss)

    def composite(self, choice: Sequence[int]) -> dict[str, Tensor]:
        """The chosen copies' own tensors, not copies of them."""
        return {name: self.tensors[choice[group]][name] for name, group in self.group.items()}

    def loss(self, choice: Sequence[int], batch: Batch) -> Tensor:
        chosen = {f"model.{name}": tensor for name, tensor in self.composite(choice).items()}
        value: Tensor = functional_call(self._objective, chosen, (batch,))
        return value

    def descend(self, choice: Sequence[int], batch: Batch) -> None:
        """A step of the chosen copies; what was not chosen has no gradient, so neither momentum nor decay moves it."""
        if not self.apart:
            chosen = self.composite(choice)
            self.optimizers["both"].params = {name: chosen[name] for name in self.trained}
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        self.loss(choice, batch).backward()  # type: ignore[no-untyped-call]
        before = None if self.apart else {n: p.detach().clone() for n, p in self.optimizers["both"].params.items()}
        for optimizer in self.optimizers.values():
            optimizer.step()
        if before is not None:
            with torch.no_grad():
                for name, old in before.items():
                    picked = choice[self.group[name]]
                    self.tensors[1 - picked][name] += self.tensors[picked][name] - old

    def products(self, choice: Sequence[int], batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and <dl/dW[i], L[i]> and <dl/dW[i], G[i]> for each group. Nothing changes. (), (k, 2)"""
        with forward.quiet(self._model):
            loss = self.loss(choice, batch)
        chosen = self.composite(choice)
        grads = torch.autograd.grad(loss, [chosen[name] for name in self.trained], allow_unused=True)
        c = torch.zeros(self.groups, 2, dtype=torch.float64)
        with torch.no_grad():
            for name, grad in zip(self.trained, grads, strict=True):
                for j, held in enumerate(self.tensors) if grad is not None else ():
                    c[self.group[name], j] += (grad * held[name]).sum()
        return loss.detach(), c

    def remember(self) -> None:
        """Keep the momentum where the run says so."""
        if self.client.keeps_optimizer:
            kept = {memory: optimizer.buffers for memory, optimizer in self.optimizers.items()}
            self.client.state["momentum"] = {**self.client.state.get("momentum", {}), **kept}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters and stored buffers, each once also where it has two names."""
    stored = set(anatomy.state_names(model))
    return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in stored}}


def places(model: nn.Module, groups: Mapping[str, Part]) -> dict[str, int]:
    """Each tensor's group."""
    return {name: i for name in tensors(model) for i, part in enumerate(groups.values()) if name in part.names(model)}


@torch.no_grad()
def mix(
    copies: Sequence[nn.Module], groups: Mapping[str, Part], alpha: Tensor, how: Literal["soft", "hard"]
) -> nn.Module:
    """The first copy, now holding alpha[i, 0] L[i] + alpha[i, 1] G[i], or the likelier of the two; so also counters."""
    group, others = places(copies[0], groups), tensors(copies[1])
    for name, tensor in tensors(copies[0]).items():
        left, right = alpha[group[name]].tolist()
        if how == "soft" and tensor.is_floating_point():
            tensor.lerp_(others[name], right)  # exact at 0 and 1, and where both are equal
        elif right > left:
            tensor.copy_(others[name])
    return copies[0]
