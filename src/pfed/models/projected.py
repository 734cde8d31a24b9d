"""A model with DualFed's projector before its head: what the other methods of that paper's tables train."""

from __future__ import annotations

from torch import Tensor, nn

from pfed import anatomy
from pfed.models.twoheaded import projector

DEPTH, HIDDEN = 2, 256  # of the paper's projector


class Projected(nn.Module):
    """Encoder, projector, head: the features that the head receives are u = g(f(x))."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projector, self.head = encoder, projector, head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.projector(self.encoder(x)))
        return out


def projected(model: nn.Module) -> nn.Module:
    """The model, with a projector between its features and its linear head."""
    name, head = anatomy.linear_head(model, "A model with a projector")
    model.set_submodule(name, nn.Identity())
    made = projector(head.in_features, DEPTH, HIDDEN, bn=True)
    return anatomy.set_head(Projected(model, made, head), "head")
