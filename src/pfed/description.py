"""What a record says of a run before its first round: the data, as far as they may be told, and the software."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pfed
from pfed.data.base import ClientData, Federation
from pfed.record import Record

CLIENTS, SAMPLES = 100, 200  # whose images are looked at, and how many of each, at most
NUMBERS = 20_000_000  # of pixels that are looked at in all, so that a run of large images does not wait
WIDE = 64  # columns of a table that are looked at

Array = np.ndarray[Any, Any]


def versions() -> dict[str, str]:
    """Of pfed, torch and Python; and the commit, where pfed runs from a clone."""
    found = {"pfed": pfed.__version__, "torch": torch.__version__, "python": platform.python_version()}
    commit = checked_out(Path(pfed.__file__).parents[2])
    return found if commit is None else {**found, "commit": commit[:12]}


def data_of(federation: Federation) -> dict[str, Any]:
    """By what a run's data are known again."""
    clients = federation.clients
    return {
        "number of clients": len(clients),
        "data set": federation.source,
        "number of training samples": sum(len(client.train) for client in clients),
        "number of test samples": sum(len(client.test) for client in clients),
    }


def data_kept(record: Record) -> dict[str, Any]:
    """The same of a run that is kept."""
    clients = record.clients()
    return {
        "number of clients": len(clients),
        "data set": record.get("source"),
        "number of training samples": sum(client["train"] for client in clients),
        "number of test samples": sum(client["test"] for client in clients),
    }


def checked_out(clone: Path) -> str | None:
    """The commit that a git clone is at; what was changed since is not seen. None where there is no clone."""
    git = clone / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text().strip()
        packed = (line.split() for line in (git / "packed-refs").read_text().splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), None)
    except (OSError, UnicodeDecodeError):
        return None


def feature_skew(federation: Federation) -> float | None:
    """How much the clients' inputs differ beyond their labels: 0, not at all; 1, each client in a world of its own.

    Of every image the mean and the standard deviation of each channel are taken (of a table the columns themselves),
    and from each the mean over its class. What varies then lies between clients or within them; this is the share that
    lies between them, corrected for the number of clients and samples (epsilon squared), the mean over those numbers.
    None for a single client. At most `CLIENTS` clients and `SAMPLES` samples of each are looked at.
    """
    clients = [client for client in federation.clients if len(client.train)]
    stride = -(-len(clients) // CLIENTS) or 1
    some = clients[::stride]
    looks = [_look(client, max(2, NUMBERS // (len(some) * max(1, int(np.prod(federation.shape)))))) for client in some]
    if len(some) < 2:
        return None
    x = np.concatenate([numbers for numbers, _ in looks])  # (samples, numbers)
    kind = np.concatenate([labels for _, labels in looks])
    owner = np.repeat(np.arange(len(looks)), [len(numbers) for numbers, _ in looks])
    x = x - _means(x, kind)
    total, within = (x**2).sum(0), ((x - _means(x, owner)) ** 2).sum(0)
    left = len(x) - len(looks)
    varies = total > 1e-9 * max(1.0, float(np.abs(x).max()) ** 2) * len(x)
    if left <= 0 or not varies.any():
        return 0.0
    between = 1 - (within / left)[varies] / (total / (len(x) - 1))[varies]
    return float(np.clip(between, 0, 1).mean())


def _look(client: ClientData, most: int) -> tuple[Array, Array]:
    """Some numbers about each of some samples, evenly from all; and their classes, where samples have one."""
    samples = client.train
    count = min(len(samples), SAMPLES, most)
    chosen = torch.linspace(0, len(samples) - 1, count).round().long()
    x, y = samples.part(chosen).take()
    if x.dim() > 2:
        planes = x.double().flatten(2 if x.dim() > 3 else 1)
        numbers = torch.cat([planes.mean(-1).reshape(count, -1), planes.std(-1, correction=0).reshape(count, -1)], 1)
    else:
        numbers = x.double().reshape(count, -1)[:, :WIDE]
    labels = y if samples.boxes is None else torch.zeros(count, dtype=torch.long)
    return numbers.cpu().numpy(), labels.cpu().numpy()


def _means(x: Array, group: Array) -> Array:
    """For each row the mean of its group's rows."""
    _, place, size = np.unique(group, return_inverse=True, return_counts=True)
    sums = np.zeros((len(size), x.shape[1]))
    np.add.at(sums, place, x)
    means: Array = (sums / size[:, None])[place]
    return means
