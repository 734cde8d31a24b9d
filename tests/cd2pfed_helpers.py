"""What the tests of CD2-pFed share: data, models, a run, and what it logged.

Where nothing else is said, the model is residual with dropout and BatchNorm, and local training has Nesterov momentum
and weight decay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from helpers import Residual, Run, blobs, run
from torch import nn

from pfed import Federation
from pfed.channels import Channels, channels
from pfed.data.base import ClientData, Samples

DATA = blobs((7, 12, 5, 9))
CLIENTS = range(4)
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.2, "batch_size": 6, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
PLAIN = {"progressive": False, "smoothing": False, "distillation": False}


def go(hyper: Mapping[str, Any] | None = None, model: Any = NOISY, data: Federation = DATA, **options: Any) -> Run:
    """Four rounds with all clients, unless the options say otherwise."""
    defaults = {"rounds": 4, "local": LOCAL, "eval_every": 0, "method": "cd2pfed"}
    settings = {**defaults, **options}
    return run(settings.pop("method"), data, model, hyper=hyper, **settings)


def wide() -> nn.Module:
    """Ten hidden units, so that in four rounds with p = 0.8 the private ones are 2, 4, 6, 8."""
    return nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3))


def layout(model: Callable[[], nn.Module], shape: tuple[int, ...] = (4,)) -> Channels:
    return channels(model(), torch.zeros(1, *shape))


def logged(done: Run, name: str, client: int = -1) -> list[float]:
    """A logged number by round."""
    found = {round: value for round, who, what, value in done.result.logs if (who, what) == (client, name)}
    return [found[round] for round in sorted(found)]


def images(clients: int, n: int, size: int = 32) -> Federation:
    """Clients with random colour images of ten classes."""
    source = torch.Generator().manual_seed(2)
    parts = [
        Samples.of(torch.rand(n, 3, size, size, generator=source), torch.randint(10, (n,), generator=source))
        for _ in range(clients)
    ]
    named = tuple(ClientData(f"client {i}", part, part) for i, part in enumerate(parts))
    return Federation(named, tuple("abcdefghij"), parts[0])
