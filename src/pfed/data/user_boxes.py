"""Images with boxes of one's own: a folder in the layout of VOC or COCO, or one such folder per client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pfed.data.base import Dataset
from pfed.data.boxes import Scenes, to_dataset
from pfed.data.coco import is_coco, read_coco
from pfed.data.voc import is_voc, read_voc
from pfed.errors import UserError

LAYOUTS = "JPEGImages and Annotations/*.xml (VOC), or images and annotations/*.json (COCO)"


def open_boxes(path: str | Path, size: int, classes: Sequence[str] | None = None, strict: bool = True) -> Dataset:
    """The data of a folder, its images brought to `size` x `size` pixels.

    A folder with one of the layouts is one pool, to be divided among clients; a folder of such folders has a client in
    each. Every client has the classes of its own files, unless `classes` are given for all. Boxes outside their image
    are an error; with `strict` off they are cut at its edge, and left out if nothing remains.
    """
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        raise UserError(f"There is no folder {str(root)!r}.")
    if _known(root):
        return to_dataset(root.name, [_read(root, size, classes, strict)])
    clients = [place for place in sorted(root.iterdir()) if place.is_dir() and not place.name.startswith((".", "__"))]
    strange = [place.name for place in clients if not _known(place)]
    if not clients or strange:
        got = f"a folder {strange[0]!r} with neither" if strange else "no folder at all"
        raise UserError(f"{root}, or each folder in it, one per client, must hold {LAYOUTS}. Got {got}.")
    return to_dataset(root.name, [_read(place, size, classes, strict) for place in clients])


def _known(folder: Path) -> bool:
    return is_voc(folder) or is_coco(folder)


def _read(folder: Path, size: int, classes: Sequence[str] | None, strict: bool) -> Scenes:
    return (read_voc if is_voc(folder) else read_coco)(folder, size, classes, strict=strict)
