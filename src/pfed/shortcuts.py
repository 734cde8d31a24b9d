"""Exact shortcuts: what does not change while a client trains is computed once.

That are the features below a head that trains alone, and those of a fixed teacher. No method has code for it: a model
that is run on a batch of a training phase is looked up here. It is run as usual where its features depend on chance or
on the batch (augmentation, dropout, BatchNorm in training mode), where gradients are to flow into it, or where a phase
sees only part of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfed import anatomy
from pfed.anatomy import BACKBONE
from pfed.data.base import Samples

SLICE = 512  # rows per forward pass where no gradient is needed
LIMIT = 2**26  # elements of features that one model may take


@dataclass
class Known:
    """The features of all examples by a model, as long as it is as it was."""

    model: nn.Module
    features: Tensor  # (examples, ...)

    def __post_init__(self) -> None:
        names = BACKBONE.names(self.model)
        self.below = {n: t for n, t in self.model.state_dict(keep_vars=True).items() if n in names}
        self.modules = list(self.model.modules())
        self.head = self.model.get_submodule(anatomy.head_name(self.model))
        self.versions, self.modes = self._versions(), self._modes()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.below.values()]

    def _modes(self) -> list[bool]:
        return [module.training for module in self.modules]

    @property
    def holds(self) -> bool:
        return self.versions == self._versions() and self.modes == self._modes()

    def same(self, other: nn.Module) -> bool:
        """Whether another model has the same parts, and below its head the values that these features come from."""
        if self.versions != self._versions():
            return False
        if type(other) is not type(self.model) or anatomy.state_names(other) != anatomy.state_names(self.model):
            return False
        state = other.state_dict(keep_vars=True)
        return all(torch.equal(state[name], tensor) for name, tensor in self.below.items())


class Shortcuts:
    """The features of a client's examples during one step, by model.

    `steady` tells whether a model in its present modes always gives the same; `told` hears why features can't be kept.
    """

    def __init__(self, data: Samples, steady: Callable[[nn.Module], bool], told: Callable[[str], None]):
        self._data, self._steady, self._told = data, steady, told
        self._known: dict[int, Known] = {}
        self._large: set[int] = set()

    def of(self, model: nn.Module, again: bool) -> Known | None:
        """A model's features of all examples in their order; None if they are not the same at each pass.

        It is told only where there are passes to be saved: the examples are seen `again`.
        """
        known = self._known.get(id(model))
        if known is not None and known.holds:
            return known
        if id(model) in self._large:
            return None
        if not self._steady(model):
            if again:
                self._told("dropout or BatchNorm below the head is in training mode, or the head has not the last word")
            return None
        same = next((other for other in self._known.values() if other.same(model)), None)
        features = self._compute(model) if same is None else same.features
        if features is None:
            self._large.add(id(model))
            if again:
                self._told(f"they are more than {LIMIT:,} numbers")
            return None
        self._known[id(model)] = Known(model, features)
        return self._known[id(model)]

    @torch.no_grad()
    def _compute(self, model: nn.Module) -> Tensor | None:
        """None if they are too many to be kept."""
        parts = []
        for i in range(0, len(self._data), SLICE):
            parts.append(anatomy.features(model, self._data.take(slice(i, i + SLICE))[0]))
            if parts[0][0].numel() * len(self._data) > LIMIT:
                return None
        return torch.cat(parts)


@dataclass
class Phase:
    """What a batch knows of the training phase that it belongs to."""

    shortcuts: Shortcuts
    trained: nn.Module
    head_only: bool  # nothing below its head is trained
    again: bool  # the examples are seen more than once

    def features(self, model: nn.Module, index: Tensor) -> Tensor | None:
        """A model's features of the examples at these positions, if they were or can be computed once for all."""
        known = self._known(model)
        return None if known is None else known.features[index]

    def output(self, model: nn.Module, index: Tensor) -> Tensor | None:
        """The model's output by way of its features."""
        known = self._known(model)
        if known is None:
            return None
        out: Tensor = known.head(known.features[index])
        return out

    def _known(self, model: nn.Module) -> Known | None:
        if not self.head_only if model is self.trained else _learns(model):
            return None
        return self.shortcuts.of(model, self.again)


def _learns(model: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())
