"""What the tests of FedBSD share: data, a run, what it logged, and a look at its phases of training.

Where nothing else is said, the model has dropout right before the head and BatchNorm, the optimiser Nesterov momentum
and weight decay, and half of the clients take part in a round.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import Residual, Run, assert_same, blobs, run
from torch import nn

from pfed import HEAD, Client, Federation, Samples, Tensors, anatomy
from pfed.client import Fit, Loss
from pfed.data.base import ClientData
from pfed.methods.fedbsd import FedBSD

DATA = blobs((7, 12, 5, 9))  # in batches of 4 some are incomplete, and two are single samples
CLIENTS = range(4)
NOISY = functools.partial(Residual, dropout=0.3)
LOCAL = {"lr": 0.2, "batch_size": 4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SHARED = anatomy.params(Residual()).keys()  # all that may travel
NORM = anatomy.NORM.names(Residual())
HEADS, BODY = HEAD.names(Residual()), SHARED - HEAD.names(Residual())


def go(hyper: Mapping[str, Any] | None = None, model: Any = NOISY, data: Federation = DATA, **options: Any) -> Run:
    """Three rounds with half of the clients each, judged at the end, unless the options say otherwise."""
    defaults = {"rounds": 3, "fraction": 0.5, "local": LOCAL, "eval_every": 0}
    return run("fedbsd", data, model, hyper={"head_epochs": 2, **(hyper or {})}, **{**defaults, **options})


def logged(done: Run, name: str) -> list[float]:
    """A logged number by round and client."""
    return [value for _, _, key, value in sorted(done.result.logs) if key == name]


@dataclass
class Phase:
    """One call of `fit`: what trained, on which client, and its model before and after."""

    client: int
    round: int
    head: bool
    before: Tensors
    after: Tensors
    state: dict[str, Any]  # the client's, before the phase


@dataclass
class Watch:
    """The phases of training, and each round's teacher before and after them."""

    phases: list[Phase] = field(default_factory=list)
    teachers: list[tuple[nn.Module, Tensors]] = field(default_factory=list)


def watched(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """From now on all calls of `fit` are noted; and that none of them changes the teacher."""
    seen, fit, loss = Watch(), Client.fit, FedBSD.loss

    def watched_fit(client: Client, model: nn.Module, *args: Any, **settings: Any) -> Fit:
        before, state = anatomy.snapshot(model), dict(client.state)
        done = fit(client, model, *args, **settings)
        is_head = settings["only"] is HEAD
        seen.phases.append(Phase(client.id, client.round, is_head, before, anatomy.snapshot(model), state))
        if not is_head:
            teacher, as_it_was = seen.teachers[-1]
            assert_same(anatomy.snapshot(teacher), as_it_was)
            assert not any(module.training for module in teacher.modules())
            assert all(parameter.grad is None for parameter in teacher.parameters())
        return done

    def watched_loss(method: FedBSD, client: Client, teacher: nn.Module) -> Loss:
        seen.teachers.append((teacher, anatomy.snapshot(teacher)))
        return loss(method, client, teacher)

    monkeypatch.setattr(Client, "fit", watched_fit)
    monkeypatch.setattr(FedBSD, "loss", watched_loss)
    return seen


def images(*sizes: int, classes: int = 10) -> Federation:
    """Clients with random images, as large as CIFAR's."""
    source = torch.Generator().manual_seed(1)
    parts = [Samples.of(torch.randn(n, 3, 32, 32, generator=source), torch.arange(n) % classes) for n in sizes]
    clients = tuple(ClientData(f"client {i}", part, part) for i, part in enumerate(parts))
    return Federation(clients, tuple(map(str, range(classes))), parts[0])
