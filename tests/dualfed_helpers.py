"""What the tests of DualFed share: data, a run, the model with which it begins, and its parts.

The model has dropout and BatchNorm, the optimiser momentum and weight decay, unless a test says otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from helpers import Residual, Run, blobs, run
from torch import Tensor, nn

from pfed import Tensors, anatomy
from pfed.forward import View
from pfed.losses import supervised_contrastive
from pfed.methods.dualfed import DualFed
from pfed.models.twoheaded import ENCODER, GLOBAL_HEAD, PERSONAL_HEAD, PROJECTOR, OneHead, TwoHeaded
from pfed.pool import Spec

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SMALL = {"lam": 1.0, "projector_hidden": 6}


def go(hyper: Mapping[str, Any] | None = None, model: Any = NOISY, data: Any = DATA, **options: Any) -> Run:
    """Three rounds of all clients, judged at the end, unless the options say otherwise."""
    defaults = {"rounds": 3, "local": LOCAL, "eval_every": 0}
    return run("dualfed", data, model, hyper={**SMALL, **(hyper or {})}, **{**defaults, **options})


def built(
    hyper: Mapping[str, Any] | None = None, make: Any = NOISY, seed: int = 0, shape: tuple[int, ...] = (4,)
) -> TwoHeaded:
    """The model with which a run begins."""
    model = DualFed(**{**SMALL, **(hyper or {})}).build(Spec(make, classes=3, shape=shape, seed=seed))
    assert isinstance(model, TwoHeaded)
    return model


def alone(model: TwoHeaded, personal: bool) -> nn.Module:
    """The model under one of its heads."""
    return View(model, OneHead(model.heads, personal))


NAMES = {part.label: part.names(built()) for part in (ENCODER, PROJECTOR, PERSONAL_HEAD, GLOBAL_HEAD, anatomy.STATS)}


def only(tensors: Mapping[str, Tensor], *labels: str, stats: bool = False) -> Tensors:
    """The tensors of these parts, without running statistics and counters unless asked."""
    names = frozenset().union(*(NAMES[label] for label in labels))
    return Tensors(tensors).only(names if stats else names - NAMES["stats"])


def contrast(u: Any, y: Any, tau: float = 0.2) -> float:
    return supervised_contrastive(torch.as_tensor(u), torch.as_tensor(y), tau).item()
