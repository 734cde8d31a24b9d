"""What the tests of FedCD share: data, models, a run, and what it sent and logged."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from helpers import Message, Residual, Run, blobs, mlp, run
from torch import Tensor, nn

from pfed import Federation, Samples, registry, streams

BATCH = 6
LOCAL = {"lr": 0.2, "batch_size": 4, "epochs": 2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
NOISY = functools.partial(Residual, dropout=0.3)
MODELS = [NOISY, mlp, nn.Sequential(nn.Linear(4, 3))]  # 89, 43 and 15 parameters


def public(size: int, seed: int = 3) -> Samples:
    source = torch.Generator().manual_seed(seed)
    return Samples.of(torch.randn(size, 4, generator=source), torch.randint(3, (size,), generator=source))


DATA = dataclasses.replace(blobs((7, 12, 6, 9)), public=public(15))


def go(data: Federation = DATA, model: Any = MODELS, rounds: int = 3, method: str = "fedcd", **options: Any) -> Run:
    """Heterogeneous clients, judged at the end, unless the options say otherwise. What is no run's option is hyper."""
    fields = registry.fields("fedcd")
    hyper = {"batch": BATCH} | {name: options.pop(name) for name in list(options) if name in fields}
    settings = {"local": LOCAL, "eval_every": 0, **options}
    return run(method, data, model, rounds=rounds, hyper=hyper if method == "fedcd" else {}, **settings)


def logged(done: Run, name: str) -> dict[int, dict[int, float]]:
    """Values by round and client."""
    found: dict[int, dict[int, float]] = {}
    for round, client, label, value in done.result.logs:
        if label == name:
            found.setdefault(round, {})[client] = value
    return found


def sent(done: Run, step: str = "update") -> dict[int, dict[int, Message]]:
    """Messages by round and client."""
    found: dict[int, dict[int, Message]] = {}
    for message in done.messages:
        if message.step == step:
            found.setdefault(message.round, {})[message.client] = message
    return found


def logits(messages: dict[int, Message]) -> Tensor:
    return torch.stack([message.up["logits"] for message in messages.values()])  # type: ignore[misc]


def ids(data: Federation, round: int, batch: int = BATCH, seed: int = 0) -> Tensor:
    """The common images of a round as the specification has them, for one batch a round."""
    assert data.public is not None
    epoch, place = divmod(round - 1, len(data.public) // batch)
    order = streams.rng(seed, "common", "common_batch", epoch).permutation(len(data.public))
    return torch.from_numpy(order[place * batch :][:batch])


def labels(data: Federation, round: int) -> Tensor:
    assert data.public is not None
    return data.public.labels[ids(data, round)]
