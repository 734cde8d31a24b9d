"""Archives of images with boxes: one .npz file of plain arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pfed.data.archives import Arrays, load_arrays, numbers_of, packed_images
from pfed.data.boxes import Box, Picture, Scenes, read_scenes
from pfed.errors import UserError

COLUMNS = 7  # image, class, x1, y1, x2, y2, difficult


def read_boxes_archive(path: Path, size: int, train: int, name: str | None = None) -> Scenes:
    """All images of an archive: the first `train` for training, the others for testing.

    Its arrays are `images` or `jpeg` and `offsets`, as `read_archive` has them; `boxes` (m, 7): image, class, x1, y1,
    x2, y2 and difficult, in pixels of the stored images; and `class_names`. Corners are taken as they are: in an
    archive that was made of VOC's files by scaling alone they count from one old pixel, less than one stored pixel off.
    Boxes are cut at the edge of their image, and left out if nothing remains.
    """
    if not path.is_file():
        raise UserError(f"There is no file {path}.")
    arrays = load_arrays(path, "boxes", "class_names")
    images = packed_images(path, arrays)
    if not 1 <= train <= len(images):
        raise UserError(f"The training images of {path} must be 1..{len(images)}. Got {train}.")
    boxes = _boxes(path, arrays, len(images))
    pictures = [
        Picture(image, tuple(own), index >= train, str(image))
        for index, (image, own) in enumerate(zip(images, boxes, strict=True))
    ]
    classes = [str(label) for label in arrays["class_names"].reshape(-1)]
    return read_scenes(name or path.stem, pictures, size, classes, strict=False)


def _boxes(path: Path, arrays: Arrays, n: int) -> list[list[Box]]:
    """The boxes of each image."""
    table = arrays["boxes"]
    if table.ndim != 2 or table.shape[1] != COLUMNS or table.dtype.kind not in "iuf" or not np.isfinite(table).all():
        raise UserError(
            f"The boxes of {path} must be finite numbers of shape (m, {COLUMNS}). Got {table.dtype} of {table.shape}."
        )
    parts = {
        "image of each box": table[:, 0].astype(np.int64),
        "class of each box": table[:, 1].astype(np.int64),
        "images": np.arange(n),
        "class_names": arrays["class_names"],
    }
    owner = numbers_of(path, parts, "image of each box", len(table), names="images")
    kind = numbers_of(path, parts, "class of each box", len(table), names="class_names")
    labels = [str(label) for label in arrays["class_names"].reshape(-1)]
    boxes: list[list[Box]] = [[] for _ in range(n)]
    for image, label, (x1, y1, x2, y2, difficult) in zip(owner, kind, table[:, 2:].tolist(), strict=True):
        boxes[image].append(Box(labels[label], (x1, y1, x2, y2), difficult != 0))
    return boxes
