"""Features of some test samples of every client, which a run leaves for a picture: reduced, in one small file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE = "features.npz"
DIMENSIONS, SAMPLES = 50, 2000  # at most; principal components, and samples of all clients

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Features:
    """By representation the features of each client's own samples, (n, d); and whose they are, of which class. (n,)"""

    named: Mapping[str, Array]
    clients: Array
    labels: Array


def collect(features: Mapping[str, Mapping[int, Tensor]], sizes: list[int], labels: Tensor) -> Features:
    """What each client's model makes of its own samples, out of what all make of everyone's.

    The samples lie client after client, `sizes` of each.
    """
    starts = np.cumsum([0, *sizes]).tolist()
    named = {}
    for name, by_client in features.items():
        own = [by_client[k][starts[k] : starts[k + 1]].flatten(1) for k in range(len(sizes))]
        # Networks of several architectures have features of several widths, which are in no common space.
        if len({part.shape[1] for part in own}) == 1:
            named[name] = reduced(torch.cat(own)[:SAMPLES])
    clients = np.repeat(np.arange(len(sizes)), sizes)[:SAMPLES]
    return Features(named, clients, labels[:SAMPLES].cpu().numpy())


def reduced(x: Tensor) -> Array:
    """The first principal components, scaled to a largest value of 1: distances keep their proportions."""
    x = x.double().cpu()
    x = torch.where(x.isfinite(), x, 0.0)
    x = x - x.mean(0)
    if x.shape[1] > DIMENSIONS:
        # From the smaller of the two matrices of products; eigenvalues come in ascending order.
        wide = x.shape[1] > len(x)
        values, axes = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
        top, kept = values[-DIMENSIONS:].flip(0), axes[:, -DIMENSIONS:].flip(1)
        x = kept * top.clamp(min=0).sqrt() if wide else x @ kept
    return (x / x.abs().max().clamp(min=1e-30)).to(torch.float16).numpy()


def save(found: Features, folder: Path) -> None:
    """Into a run's folder; the file appears whole or not at all."""
    names = np.array(list(found.named), dtype=np.str_)
    arrays: dict[str, Any] = {f"features-{i}": array for i, array in enumerate(found.named.values())}
    temporary = folder / f"{FILE}.tmp"
    with open(temporary, "wb") as file:
        np.savez_compressed(file, names=names, clients=found.clients, labels=found.labels, **arrays)
    os.replace(temporary, folder / FILE)


def load(folder: Path | None) -> Features | None:
    """What a run left, if it did."""
    if folder is None or not (folder / FILE).is_file():
        return None
    with np.load(folder / FILE, allow_pickle=False) as found:
        named = {str(name): found[f"features-{i}"].astype(np.float32) for i, name in enumerate(found["names"])}
        return Features(named, found["clients"], found["labels"])
