"""Loss terms that methods add to the task's own loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def sqdist(model: nn.Module, anchor: Mapping[str, Tensor]) -> Tensor:
    """The squared distance of the model's trainable parameters to those of the same names in `anchor`."""
    parts = [((p - anchor[name]) ** 2).sum() for name, p in model.named_parameters() if name in anchor]
    return torch.stack(parts).sum()
