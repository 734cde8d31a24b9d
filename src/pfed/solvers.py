"""Pieces of local training that several methods share."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from pfed.anatomy import ALL, Part
from pfed.client import Client, Loss
from pfed.tensors import Tensors


def joint(
    client: Client, received: Tensors, part: Part | Callable[[nn.Module], Part] = ALL, loss: Loss | None = None
) -> Tensors:
    """Train the whole model from the received part and the own rest; keep the rest, return the part."""
    model = client.model(received)
    shared = part if isinstance(part, Part) else part(model)
    client.fit(model, loss)
    client.keep(model, ~shared)
    return client.share(model, shared)
