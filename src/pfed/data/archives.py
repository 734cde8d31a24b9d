"""Archives of images: one .npz file of plain arrays."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pfed.data.folders import Packed, read_images
from pfed.data.pool import Pool
from pfed.errors import UserError

Arrays = Mapping[str, NDArray[Any]]


def read_archive(path: Path, image_size: int | None = None, mode: str | None = None) -> Pool:
    """All images of an archive, with owners if it tells their domains.

    Its arrays are `images`, pixels (n, h, w) or (n, h, w, 3), or else `jpeg`, the bytes of n image files in a row, with
    `offsets` (n+1) where each starts and the last ends; `labels` (n,), positions in `class_names` if that is there;
    perhaps `domains` (n,), positions in `domain_names`; and perhaps `split` (n,), 1 for test data.
    """
    arrays = load_arrays(path, "labels")
    images = packed_images(path, arrays)
    n = len(images)
    labels = numbers_of(path, arrays, "labels", n, names="class_names")
    named, domains = "class_names" in arrays, "domains" in arrays
    return Pool(
        x=read_images(images, image_size, mode),
        labels=(arrays["class_names"].reshape(-1)[labels] if named else labels).astype(np.str_),
        test=numbers_of(path, arrays, "split", n) == 1 if "split" in arrays else np.zeros(n, np.bool_),
        owner=numbers_of(path, arrays, "domains", n, names="domain_names") if domains else np.zeros(n, np.int64),
        clients=tuple(map(str, arrays["domain_names"].reshape(-1))) if domains else (),
    )


def load_arrays(path: Path, *needs: str) -> Arrays:
    """All arrays of a file; those that it needs, and images in one of the two forms, must be among them."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged or no .npz file of plain arrays.") from error
    needed = {*needs, *(["images"] if "images" in arrays else ["jpeg", "offsets"])}
    if "domains" in arrays:
        needed.add("domain_names")
    missing = sorted(needed - arrays.keys())
    if missing:
        raise UserError(f"{path} must hold the array {missing[0]}. Got {', '.join(arrays) or 'none'}.")
    return arrays


def packed_images(path: Path, arrays: Arrays) -> list[Packed]:
    """The images of an archive, still to be read."""
    contents = _pixels(path, arrays["images"]) if "images" in arrays else _files(path, arrays)
    images = [Packed(f"Image {index} of {path}", content) for index, content in enumerate(contents)]
    if not images:
        raise UserError(f"{path} must hold at least one image. Got none.")
    return images


def _pixels(path: Path, images: NDArray[Any]) -> Sequence[bytes | NDArray[np.uint8]]:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[3:] not in ((), (3,)):
        raise UserError(
            f"The images of {path} must be bytes of shape (n, h, w) or (n, h, w, 3). "
            f"Got {images.dtype} of shape {images.shape}."
        )
    return list(images)


def _files(path: Path, arrays: Arrays) -> Sequence[bytes | NDArray[np.uint8]]:
    content = arrays["jpeg"]
    if content.dtype != np.uint8 or content.ndim != 1:
        raise UserError(f"The jpeg of {path} must be bytes in a row. Got {content.dtype} of shape {content.shape}.")
    offsets = numbers_of(path, arrays, "offsets", arrays["offsets"].size).tolist()
    if [offsets[:1], offsets[-1:]] != [[0], [len(content)]] or offsets != sorted(offsets):
        raise UserError(f"The offsets of {path} must rise from 0 to {len(content)}, the number of bytes in jpeg.")
    return [content[start:end].tobytes() for start, end in itertools.pairwise(offsets)]


def numbers_of(path: Path, arrays: Arrays, key: str, n: int, names: str = "") -> NDArray[np.int64]:
    """A whole number for each image: below the number of names, where these are in the archive."""
    array = arrays[key]
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise UserError(
            f"The {key} of {path} must be {n} whole numbers. Got {array.dtype} of shape {tuple(array.shape)}."
        )
    numbers: NDArray[np.int64] = array.astype(np.int64)
    most = arrays[names].size if names in arrays else None
    if numbers.min(initial=0) < 0 or (most is not None and numbers.max(initial=0) >= most):
        rule = ">= 0" if most is None else f"in 0..{most - 1}"
        raise UserError(f"The {key} of {path} must be {rule}. Got {numbers.min()}..{numbers.max()}.")
    return numbers
