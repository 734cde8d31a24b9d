"""Classifiers that are made once, from the run's seed, and neither learn nor travel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.errors import UserError
from pfed.pool import Spec


def orthonormal(width: int, classes: int) -> Tensor:
    """Random orthonormal rows. (classes, width)"""
    if classes > width:
        raise UserError(f"A fixed classifier needs at least as many features as classes. Got {width} for {classes}.")
    q: Tensor = torch.linalg.qr(torch.randn(width, classes))[0]
    return q.T.contiguous()


def simplex_frame(width: int, classes: int) -> Tensor:
    """A simplex equiangular tight frame: unit rows with pairwise cosine -1/(classes - 1). (classes, width)"""
    if classes < 2:
        raise UserError(f"A simplex frame needs at least two classes. Got {classes}.")
    centred = torch.eye(classes) - 1 / classes
    return math.sqrt(classes / (classes - 1)) * (centred @ orthonormal(width, classes))


class FixedHead(nn.Module):
    """Scores ⟨weight_y, z/‖z‖⟩, times a learned scale where one is given."""

    def __init__(self, weight: Tensor, scale: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.scale = None if scale is None else nn.Parameter(torch.tensor(float(scale)))

    def forward(self, z: Tensor) -> Tensor:
        scores = F.normalize(z.flatten(1), dim=1) @ self.weight.T
        return scores if self.scale is None else self.scale * scores


def with_fixed_head(spec: Spec, make: Callable[[int, int], nn.Module], method: str) -> nn.Module:
    """The base model with another head; a parameter `weight` of that neither learns nor travels."""
    model = spec.base()
    name, head = anatomy.linear_head(model, method)
    made = spec.add("classifier", lambda: make(head.in_features, head.out_features))
    model.set_submodule(name, made)
    anatomy.set_head(model, name)
    fixed = {f"{where}.weight" for where, module in model.named_modules() if isinstance(module, FixedHead)}
    anatomy.marks(model).fixed |= fixed
    return model
