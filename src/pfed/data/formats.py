"""The file formats of the known data sets: bytes in, NumPy arrays out.

Each parser of a whole data set takes the contents of its files in order and returns all images, all labels and
how many of them, from the start, are the official training set.
"""

from __future__ import annotations

import bz2
import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfed.errors import UserError

Images = NDArray[np.uint8]  # (n, channels, height, width)
Labels = NDArray[np.int64]  # (n,)
Split = tuple[Images, Labels, int]

_UNSIGNED_BYTE = 0x08  # idx's code of the only element type that these data sets use


def idx(content: bytes) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the element type, the number of dimensions, each dimension, the elements."""
    if len(content) < 4 or content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
        raise UserError(f"An idx file of bytes starts with 00 00 08. Got {content[:3].hex(' ') or 'nothing'}.")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    expected = start + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise UserError(f"An idx file of shape {shape} has {expected} bytes. Got {len(content)}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def idx_pairs(train_x: bytes, train_y: bytes, test_x: bytes, test_y: bytes) -> Split:
    """MNIST and its kin: images and labels of the training set, then of the test set."""
    x = np.concatenate([idx(train_x), idx(test_x)])[:, None]  # (n, 1, h, w)
    y = np.concatenate([idx(train_y), idx(test_y)]).astype(np.int64)
    return x, y, len(idx(train_y))


def emnist_idx(train_x: bytes, train_y: bytes, test_x: bytes, test_y: bytes) -> Split:
    """EMNIST's letters: as MNIST, but each image lies on its side, and labels count from 1."""
    x, y, train = idx_pairs(train_x, train_y, test_x, test_y)
    return np.ascontiguousarray(x.transpose(0, 1, 3, 2)), y - 1, train


CIFAR_SHAPE = (3, 32, 32)
_CIFAR_PIXELS = 3 * 32 * 32


def cifar_records(content: bytes, labels: int = 1) -> tuple[Images, Labels]:
    """CIFAR's binary form: records of label bytes (CIFAR-100: coarse, fine), then the red, green and blue planes."""
    record = labels + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise UserError(f"A CIFAR batch is a multiple of {record} bytes long. Got {len(content)}.")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, *CIFAR_SHAPE), records[:, labels - 1].astype(np.int64)


def cifar_pickle(content: bytes, labels: str = "labels") -> tuple[Images, Labels]:
    """CIFAR's Python form. Only for content whose checksum has matched; what it may build is limited besides."""
    try:
        batch = _BatchUnpickler(io.BytesIO(content), encoding="latin1").load()
        x, y = np.asarray(batch["data"], np.uint8), np.asarray(batch[labels], np.int64)
        return x.reshape(len(y), *CIFAR_SHAPE), y
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"A CIFAR batch is a dictionary of data and {labels}. Got {error!r}.") from error


class _BatchUnpickler(pickle.Unpickler):
    """Builds plain containers and NumPy arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        # The files name numpy.core, which NumPy 2 deprecates: an empty array to be filled serves as well.
        known = {"_reconstruct": lambda *_: np.empty(0, np.uint8), "ndarray": np.ndarray, "dtype": np.dtype}
        if name not in known:
            raise UserError(f"A CIFAR batch holds arrays only. Got {module}.{name}.")
        return known[name]


def cifar_binary_batches(*batches: bytes) -> Split:
    """The five training batches, then the test batch."""
    return _joined([cifar_records(batch) for batch in batches])


def cifar_pickle_batches(*batches: bytes) -> Split:
    """As `cifar_binary_batches`, for the Python form."""
    return _joined([cifar_pickle(batch) for batch in batches])


def cifar100_binary(*files: bytes) -> Split:
    """CIFAR-100: the training file, then the test file; the fine labels."""
    return _joined([cifar_records(file, labels=2) for file in files])


def cifar100_pickle(*files: bytes) -> Split:
    """As `cifar100_binary`, for the Python form."""
    return _joined([cifar_pickle(file, "fine_labels") for file in files])


def _joined(parts: list[tuple[Images, Labels]]) -> Split:
    x, y = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return x, y, len(y) - len(parts[-1][1])


USPS_TRAIN = 7291
_USPS_PIXELS = 16 * 16


def usps_csv(content: bytes) -> Split:
    """USPS in one table: a header, then a label in 0..9 and 256 values in [-1, 1] a row, training set first."""
    try:
        table = np.loadtxt(io.BytesIO(content), np.float32, delimiter=",", skiprows=1, ndmin=2)
    except ValueError as error:
        raise UserError(f"A USPS table holds numbers only. Got: {error}.") from error
    if table.shape[1] != 1 + _USPS_PIXELS:
        raise UserError(f"A USPS table has {1 + _USPS_PIXELS} columns. Got {table.shape[1]}.")
    return _usps_images(table[:, 1:]), table[:, 0].astype(np.int64), USPS_TRAIN


def usps_libsvm(train: bytes, test: bytes) -> Split:
    """USPS as the LIBSVM page has it: two bzip2 files of lines `label 1:value ... 256:value`, labels in 1..10."""
    parts = []
    for content in (train, test):
        try:
            numbers = np.array(bz2.decompress(content).replace(b":", b" ").split(), np.float32)
        except (OSError, ValueError) as error:
            raise UserError(f"A USPS file is bzip2 of label and index:value pairs. Got: {error}.") from error
        if len(numbers) % (1 + 2 * _USPS_PIXELS):
            raise UserError(f"A line of a USPS file has a label and {_USPS_PIXELS} values. Got {len(numbers)} numbers.")
        lines = numbers.reshape(-1, 1 + 2 * _USPS_PIXELS)  # label, then index and value by turns
        parts.append((_usps_images(lines[:, 2::2]), lines[:, 0].astype(np.int64) - 1))
    return _joined(parts)


def _usps_images(values: NDArray[np.float32]) -> Images:
    # Cut, not rounded: so torchvision's USPS has them.
    return ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 1, 16, 16)
