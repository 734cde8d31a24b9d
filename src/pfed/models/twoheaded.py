"""An encoder with two heads: a global one on its features z, a personal one behind a projector, on u = g(z)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pfed.anatomy import under
from pfed.forward import View

ENCODER = under("encoder", "encoder")
PROJECTOR = under("projector", "projector")
PERSONAL_HEAD = under("heads.personal_head", "personal head")
GLOBAL_HEAD = under("heads.global_head", "global head")


def projector(width: int, depth: int, hidden: int, bn: bool) -> nn.Module:
    """`depth` linear layers from z to a u of the same width, each with BatchNorm, all but the last with ReLU before it.

    >>> sum(parameter.numel() for parameter in projector(512, depth=2, hidden=256, bn=True).parameters())
    264448
    """
    layers: list[nn.Module] = []
    widths = [width, *[hidden] * (depth - 1), width]
    for i in range(depth):
        layers.append(nn.Linear(widths[i], widths[i + 1]))
        if i < depth - 1:
            layers.append(nn.ReLU())
        if bn:
            layers.append(nn.BatchNorm1d(widths[i + 1]))
    return nn.Sequential(*layers)


class Heads(nn.Module):
    """Both heads on z and u side by side: the score of a class is the sum of theirs.

    `probs` sums probabilities instead; what comes out is the logarithm of their mean, so it can stand for logits.
    """

    def __init__(self, personal: nn.Module, general: nn.Module, pre: bool = True, probs: bool = False) -> None:
        super().__init__()
        self.personal_head, self.global_head = personal, general
        self.pre, self.probs = pre, probs

    def forward(self, zu: Tensor) -> Tensor:
        a, b = self.personal(zu), self.general(zu)
        if self.probs:
            return torch.logaddexp(a.log_softmax(-1), b.log_softmax(-1)) - math.log(2)
        return a + b

    def personal(self, zu: Tensor) -> Tensor:
        """The scores of the personal head. (n, classes)"""
        out: Tensor = self.personal_head(post(zu))
        return out

    def general(self, zu: Tensor) -> Tensor:
        """The scores of the global head. (n, classes)"""
        out: Tensor = self.global_head(pre(zu) if self.pre else post(zu))
        return out


def pre(zu: Tensor) -> Tensor:
    """z, before the projector. (n, d)"""
    return zu.chunk(2, -1)[0].contiguous()


def post(zu: Tensor) -> Tensor:
    """u, after it. (n, d)"""
    return zu.chunk(2, -1)[1].contiguous()


class TwoHeaded(nn.Module):
    """Encoder, projector and heads; what the heads receive, the model's features, is z and u side by side."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, heads: Heads) -> None:
        super().__init__()
        self.encoder, self.projector, self.heads = encoder, projector, heads

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        out: Tensor = self.heads(torch.cat((z, self.projector(z)), -1))
        return out


class OneHead(nn.Module):
    """One of the two heads alone, on z and u side by side."""

    def __init__(self, heads: Heads, personal: bool) -> None:
        super().__init__()
        self.heads, self.only_personal = heads, personal

    def forward(self, zu: Tensor) -> Tensor:
        return self.heads.personal(zu) if self.only_personal else self.heads.general(zu)


def heads_of(model: nn.Module) -> Heads:
    """Both heads of such a model."""
    heads = model.heads
    assert isinstance(heads, Heads)
    return heads


def judged(model: nn.Module) -> dict[str, nn.Module]:
    """Both heads together, which is the personal model, and each alone."""
    heads = heads_of(model)
    alone = {f"{name}-head": View(model, OneHead(heads, name == "personal")) for name in ("personal", "global")}
    return {"personal": model, **alone}
