"""Distillation among clients: images that all have in common, and the teacher that their logits make together.

Which images these are follows from random streams that the server and all clients share, so none of it is sent. They
are batches of the public set or, where every client holds the same training data, of that.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from pfed.client import Client
from pfed.cohort import Cohort
from pfed.data.base import Federation, Samples
from pfed.forward import Batch
from pfed.method import Replies
from pfed.tensors import Mean


def combine(gamma: Mapping[int, float], replies: Replies) -> Tensor:
    """Σ_j γ_j z_j; where some did not answer, over the others with weights in the same proportions."""
    there = {client: gamma.get(client, 0.0) for client in replies}
    fold = Mean()
    for client, weight in there.items():
        fold.add(replies[client]["logits"], weight if any(there.values()) else 1.0)  # type: ignore[arg-type]
    return fold.value()  # type: ignore[return-value]


@torch.no_grad()
def predict(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits in eval mode."""
    out: Tensor = model.eval()(x)
    return out


def public_images(client: Client, round: int, batches: int, size: int) -> Tensor:
    """The public images of a round: so many batches of this size, one after the other."""
    return _public(client).take(_ids(client, round, batches, size))[0]


def public_labels(cohort: Cohort, round: int, batches: int, size: int) -> Tensor:
    """The labels of the same images."""
    return _public(cohort).labels[_ids(cohort, round, batches, size)]


def public_part(client: Client, round: int, size: int) -> Tensor:
    """So many public images, drawn anew in every round, the same for all clients; all of them if there are fewer."""
    total = len(_public(client))
    drawn = client.common_rng("public_part", round).permutation(total)[: min(size, total)]
    return _public(client).take(torch.from_numpy(drawn))[0]


def _public(side: Client | Cohort) -> Samples:
    assert side.public is not None  # the run was checked for it
    return side.public


def _ids(side: Client | Cohort, round: int, batches: int, size: int) -> Tensor:
    """The public images of a round, known to both sides: without replacement in an epoch, the tail left out."""
    total = len(_public(side))
    parts = []
    for number in range((round - 1) * batches, round * batches):
        epoch, place = divmod(number, total // size)
        order = side.common_rng("common_batch", epoch).permutation(total)
        parts.append(order[place * size : (place + 1) * size])
    return torch.from_numpy(np.concatenate(parts))


def replicated(federation: Federation) -> bool:
    """Whether all clients have the same training data, sample by sample."""
    first, *others = [client.train for client in federation.clients]
    return all(
        torch.equal(first.rows, other.rows)
        and (first.x is other.x or torch.equal(first.x, other.x))
        and (first.y is other.y or torch.equal(first.y, other.y))
        for other in others
    )


def shared_batches(client: Client) -> int:
    """Common training batches in an epoch; a single sample left over makes none."""
    whole, rest = divmod(client.n, client.local.batch_size)
    return whole + (rest > 1)


def shared_batch(client: Client, number: int) -> Batch:
    """The training batch that all clients take in this step, changed at random in the same way."""
    size = client.local.batch_size
    epoch, place = divmod(number, shared_batches(client))
    order = client.common_rng("shared_batch", client.round, epoch).permutation(client.n)
    index = torch.from_numpy(order[place * size : (place + 1) * size])
    x, y = client.data.train.take(index)
    augment = client.task.augment(client.options.augment)
    if augment is not None:
        x, y = augment(x, y, client.common_rng("shared_augmentation", client.round, number))
    return Batch(x, y, index, number, epoch)
