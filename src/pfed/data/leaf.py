"""FEMNIST as LEAF prepares it: JSON files of writers, each with images as 784 numbers in [0, 1] and labels.

Reference: Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pfed.data.folders import Packed, read_images
from pfed.data.pool import Pool
from pfed.errors import UserError

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)  # label 0 to 61
LETTERS = tuple("abcdefghij")  # FedRep's ten
MOST_LETTERS = {"train": 3600, "test": 400}  # images of each: FedRep's 4,000, a tenth of them for testing
SIDE = 28

Writer = tuple[str, NDArray[np.uint8], NDArray[np.str_]]  # name, images (n, 28, 28), classes


def femnist(folder: Path, image_size: int, mode: str) -> Pool:
    """All images; the writers are the owners."""
    return _pool(folder, image_size, mode, None)


def femnist_letters(folder: Path, image_size: int, mode: str) -> Pool:
    """The letters a to j, at most 3,600 of each for training and 400 for testing, in the order of the files."""
    return _pool(folder, image_size, mode, LETTERS)


def _pool(folder: Path, image_size: int, mode: str, letters: tuple[str, ...] | None) -> Pool:
    names: dict[str, int] = {}
    parts: list[tuple[NDArray[np.uint8], NDArray[np.str_], int, bool]] = []
    for kind in ("train", "test"):
        left = dict.fromkeys(letters or (), MOST_LETTERS[kind])
        for path in sorted((folder / kind).glob("*.json")):
            for name, x, y in _writers(path):
                if letters is not None:
                    x, y = _within(x, y, left)
                if len(y):
                    parts.append((x, y, names.setdefault(name, len(names)), kind == "test"))
    if not parts:
        raise UserError(f"The files in {folder} must hold images of {', '.join(letters or CLASSES)}. Got none.")
    x = np.concatenate([x for x, _, _, _ in parts])
    same = image_size == SIDE and mode == "L"
    return Pool(
        x=torch.from_numpy(x[:, None]) if same else read_images([Packed("image", i) for i in x], image_size, mode),
        labels=np.concatenate([y for _, y, _, _ in parts]),
        test=np.concatenate([np.full(len(y), test, np.bool_) for _, y, _, test in parts]),
        owner=np.concatenate([np.full(len(y), owner, np.int64) for _, y, owner, _ in parts]),
        clients=tuple(names),
    )


def _within(
    x: NDArray[np.uint8], y: NDArray[np.str_], left: dict[str, int]
) -> tuple[NDArray[np.uint8], NDArray[np.str_]]:
    """Only as many of each class as are `left`, which are fewer then."""
    keep = np.zeros(len(y), np.bool_)
    for index, label in enumerate(y.tolist()):
        if left.get(label, 0):
            keep[index] = True
            left[label] -= 1
    return x[keep], y[keep]


def _writers(path: Path) -> Iterator[Writer]:
    try:
        content = json.loads(path.read_bytes())
        data = content["user_data"]
        for name in content["users"]:
            yield _writer(path, str(name), data[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} must be a LEAF file: users, and user_data with x and y. Got {error!r}.") from error


def _writer(path: Path, name: str, own: Any) -> Writer:
    y = np.asarray(own["y"], np.int64)
    x = np.asarray(own["x"], np.float64).reshape(len(y), SIDE * SIDE)
    if len(y) and not (y.min() >= 0 and y.max() < len(CLASSES)):
        raise UserError(f"Labels in {path} must be in 0..{len(CLASSES) - 1}. Got {y.min()}..{y.max()}.")
    if x.size and not (x.min() >= 0 and x.max() <= 1):
        raise UserError(f"Pixels in {path} must be in 0..1. Got {x.min()}..{x.max()}.")
    return name, (x * 255).round().astype(np.uint8).reshape(-1, SIDE, SIDE), np.array(CLASSES)[y]
