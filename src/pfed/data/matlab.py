"""Data sets in MATLAB's files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from pfed.data.formats import Images, Labels, Split
from pfed.errors import UserError


def cropped_digits(train: bytes, test: bytes) -> Split:
    """SVHN and SynthDigits: X (height, width, 3, n), and y (n, 1) in which 10 may stand for 0."""
    parts = [_digits(content) for content in (train, test)]
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return x, y, len(parts[0][1])


def _digits(content: bytes) -> tuple[Images, Labels]:
    file = _load(content)
    try:
        x, y = np.asarray(file["X"]), np.asarray(file["y"]).reshape(-1).astype(np.int64)
    except KeyError as error:
        raise UserError(f"A file of cropped digits has the arrays X and y. Got no {error.args[0]}.") from error
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[2:] != (3, len(y)):
        raise UserError(
            f"The X of cropped digits must be bytes of shape (height, width, 3, {len(y)}). Got {x.dtype} of {x.shape}."
        )
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def emnist(content: bytes) -> Split:
    """EMNIST's letters: `dataset` with train and test, each with images (n, 784), column by column, and labels."""
    try:
        parts = [_letters(_load(content)["dataset"][kind]) for kind in ("train", "test")]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UserError(
            f"An EMNIST file has a dataset with train and test images and labels. Got {error!r}."
        ) from error
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return x, y, len(parts[0][1])


def _letters(part: Any) -> tuple[Images, Labels]:
    x = np.asarray(part["images"], np.uint8).reshape(-1, 1, 28, 28).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(x), np.asarray(part["labels"]).reshape(-1).astype(np.int64) - 1


def _load(content: bytes) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        loaded: dict[str, Any] = loadmat(io.BytesIO(content), simplify_cells=True)
    except Exception as error:  # whatever scipy meets in a damaged file
        raise UserError(f"A .mat file is damaged or no MATLAB file ({error}).") from error
    return loaded
