"""Data of one's own: from a folder of images, from a table, or from arrays in Python.

>>> import numpy as np
>>> x, y = np.random.rand(10, 4), ["ill", "well"] * 5
>>> federation({"Oslo": (x, y), "Rome": (x + 1, y)}).classes
('ill', 'well')
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from pfed.data.base import Dataset, Federation
from pfed.data.folders import LAYOUTS, read_folder
from pfed.data.pool import Classes, Pool, to_dataset, to_federation
from pfed.data.tables import read_table
from pfed.errors import UserError

_LOG = logging.getLogger(__name__)

Labelled = tuple[Tensor, NDArray[np.str_]]


def open_user(
    path: str | Path,
    *,
    label: str = "label",
    client: str | None = None,
    classes: Classes = None,
    image_size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation | Dataset:
    """The data at a path: a `Federation` where they belong to clients, else a `Dataset` to be divided among them.

    A folder holds images as CLIENT/CLASS/image or CLASS/image, with train and test above CLASS if they are apart.
    A .csv file has a `label` column, perhaps a `client` and a `split` column (train or test), and either numeric
    features or a `path` column of images relative to the file.
    """
    path = Path(path).expanduser().absolute()
    pool = read_user(path, label, client, image_size)
    if pool.clients:
        return to_federation(pool, classes, test_fraction, seed, source=path.name)
    for note in pool.notes:
        _LOG.warning(note)
    return to_dataset(pool, classes, path.name)


def read_user(path: Path, label: str = "label", client: str | None = None, image_size: int | None = None) -> Pool:
    """All samples at a path, as they lie there."""
    if path.is_dir():
        return read_folder(path, image_size)
    if path.is_file() and path.suffix.lower() in (".csv", ".tsv"):
        return read_table(path, label, client, image_size)
    if path.exists():
        raise UserError(f"Data of one's own must be a .csv file or a folder with {LAYOUTS}. Got {str(path)!r}.")
    raise UserError(f"There is no file or folder {str(path)!r}.")


def federation(
    clients: Sequence[Any] | Mapping[str, Any],
    classes: Classes = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Federation:
    """A federation from data in memory, one entry per client.

    An entry is `(x, y)`, arrays of NumPy or torch; `((x, y), (x, y))` for training and test; a torch data set; or
    two of them. A data set is read once, so its random augmentations are drawn once. Labels are numbers or names.
    A client without test data gives `test_fraction` of its samples, class by class, always the same for a `seed`.
    Images in bytes may come as (n, h, w) or (n, h, w, channels) too.
    """
    pairs = clients.items() if isinstance(clients, Mapping) else ((f"client-{i}", c) for i, c in enumerate(clients))
    entries = [(str(name), _parts(str(name), entry)) for name, entry in pairs]
    if not entries:
        raise UserError("A federation needs at least one client. Got none.")
    if len({name for name, _ in entries}) != len(entries):
        raise UserError("The names of clients must differ, as texts too.")
    _check_alike(entries)
    sizes = [
        (index, bool(test), len(y)) for index, (_, parts) in enumerate(entries) for test, (_, y) in enumerate(parts)
    ]
    pool = Pool(
        x=torch.cat([x for _, parts in entries for x, _ in parts]),
        labels=np.concatenate([y for _, parts in entries for _, y in parts]),
        test=np.concatenate([np.full(n, test, np.bool_) for _, test, n in sizes]),
        owner=np.concatenate([np.full(n, index, np.int64) for index, _, n in sizes]),
        clients=tuple(name for name, _ in entries),
    )
    return to_federation(pool, classes, test_fraction, seed, source="own data")


def _parts(name: str, entry: Any) -> list[Labelled]:
    """A client's training samples, and its test samples if they are apart."""
    pair = isinstance(entry, (tuple, list)) and len(entry) == 2
    if pair and entry[1] is None:
        return _parts(name, entry[0])
    if pair and all(_is_part(part) for part in entry):
        return [
            _from_dataset(name, part) if isinstance(part, TorchDataset) else _labelled(name, *part) for part in entry
        ]
    if isinstance(entry, TorchDataset):
        return [_from_dataset(name, entry)]
    if pair and not any(isinstance(part, TorchDataset) for part in entry):
        return [_labelled(name, *entry)]
    kind = type(entry).__name__
    raise UserError(
        f"Client {name!r} must be (x, y), ((x, y), (x, y)), a torch data set or two of them. Got an object of {kind}."
    )


def _is_part(value: Any) -> bool:
    """A data set, or a pair that starts with an array: the outer pair is training and test, not x and y."""
    if isinstance(value, TorchDataset):
        return True
    return isinstance(value, (tuple, list)) and len(value) == 2 and isinstance(value[0], (np.ndarray, Tensor))


def _labelled(name: str, x: Any, y: Any) -> Labelled:
    inputs, labels = _inputs(name, x), _labels(name, y)
    if len(inputs) != len(labels):
        raise UserError(
            f"Client {name!r} must have a label per sample. Got {len(inputs)} samples, {len(labels)} labels."
        )
    return inputs, labels


def _inputs(name: str, x: Any) -> Tensor:
    try:
        tensor = x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
    except (TypeError, ValueError) as error:
        raise UserError(f"The samples of client {name!r} must be numbers of one shape. Got: {error}.") from error
    if tensor.dim() < 2 or tensor.is_complex():
        raise UserError(
            f"The samples of client {name!r} must be real numbers of shape (n, ...). "
            f"Got {tensor.dtype} of shape {tuple(tensor.shape)}."
        )
    if tensor.dtype == torch.uint8:
        return _channels_first(tensor)
    tensor = tensor.float()
    if not torch.isfinite(tensor).all():
        raise UserError(f"The samples of client {name!r} must be finite. Got nan or inf.")
    return tensor


def _channels_first(images: Tensor) -> Tensor:
    """Bytes are pixels: (n, h, w) and (n, h, w, c) are how NumPy and Pillow have images."""
    if images.dim() == 3:
        return images.unsqueeze(1)
    if images.dim() == 4 and images.shape[3] in (1, 3) and images.shape[1] not in (1, 3):
        return images.permute(0, 3, 1, 2).contiguous()
    return images


def _labels(name: str, y: Any) -> NDArray[np.str_]:
    """Labels as texts; whole numbers in floats lose their point."""
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(f"The labels of client {name!r} must have one dimension. Got shape {array.shape}.")
    if array.dtype.kind == "f" and np.isfinite(array).all() and (array == np.round(array)).all():
        array = array.astype(np.int64)
    if array.dtype.kind == "b":
        array = array.astype(np.int64)
    strange = [] if array.dtype.kind in "iuU" else array.tolist()
    if array.dtype.kind == "O":
        strange = [label for label in strange if not isinstance(label, (int, str))]
    if strange:
        raise UserError(f"The labels of client {name!r} must be whole numbers or texts. Got {strange[0]!r}.")
    return array.astype(np.str_)


def _from_dataset(name: str, dataset: Any) -> Labelled:
    """A map-style torch data set as two arrays."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(f"The data set of client {name!r} must have a length and an index. Got a stream.")
    inputs, labels = [], []
    for index in range(len(dataset)):
        item = dataset[index]
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise UserError(f"Item {index} of client {name!r} must be (x, y). Got an object of {type(item).__name__}.")
        inputs.append(item[0] if isinstance(item[0], Tensor) else torch.from_numpy(np.array(item[0])))
        labels.append(item[1].item() if isinstance(item[1], (Tensor, np.generic)) else item[1])
        if inputs[-1].shape != inputs[0].shape:
            raise UserError(
                f"Item {index} of client {name!r} has shape {tuple(inputs[-1].shape)} "
                f"but item 0 has shape {tuple(inputs[0].shape)}."
            )
    if not inputs:
        raise UserError(f"Client {name!r} must hold at least one sample. Got none.")
    return _labelled(name, torch.stack(inputs), labels)


def _check_alike(entries: Sequence[tuple[str, list[Labelled]]]) -> None:
    """Clients must agree in what a sample is."""
    first, ((model, _), *_) = entries[0]
    for name, parts in entries:
        if not len(parts[0][0]):
            raise UserError(f"Client {name!r} must hold at least one sample. Got none.")
        for x, _ in parts:
            if x.shape[1:] != model.shape[1:]:
                raise UserError(
                    f"Client {name!r} has samples of shape {tuple(x.shape[1:])} "
                    f"but client {first!r} has samples of shape {tuple(model.shape[1:])}."
                )
            if x.dtype != model.dtype:
                raise UserError(
                    f"Client {name!r} has samples of {x.dtype} but client {first!r} of {model.dtype}: "
                    f"give all of them bytes in 0..255 or all of them floats."
                )
