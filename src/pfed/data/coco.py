"""Boxes in the format of COCO: one JSON file for all images of a set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfed.data.boxes import Box, Picture, Scenes, read_scenes
from pfed.errors import UserError

FOLDER = "annotations"
PREFIX = "instances_"
Categories = dict[int, str]  # name by id


def is_coco(folder: Path) -> bool:
    """It holds annotations where COCO has them."""
    return bool(_files(folder))


def read_coco(
    folder: Path, size: int, classes: Sequence[str] | None = None, name: str | None = None, strict: bool = True
) -> Scenes:
    """A folder with annotations/*.json and the images, in `images`, in a folder of the set's name, or in both.

    If there are files `instances_SET.json`, no others are read. A file with `test` in its name, or else with `val`, is
    test data if another is there to train with. The classes are all categories, in order of their ids, unless given.
    """
    files = _files(folder)
    if not files:
        raise UserError(f"{folder} must hold {FOLDER}/*.json. Got none.")
    tests = [path for path in files if "test" in path.stem.lower()]
    tests = tests or [path for path in files if "val" in path.stem.lower()]
    if len(tests) == len(files):
        tests = []
    pictures: list[Picture] = []
    categories: Categories | None = None
    for path in files:
        own, found = coco_pictures(path, folder, test=path in tests)
        if categories is not None and found != categories:
            raise UserError(f"{path} must have the same categories as {files[0]}. Got others.")
        categories = found
        pictures += own
    return read_scenes(name or folder.name, pictures, size, classes or in_order(categories or {}), strict)


def in_order(categories: Categories) -> tuple[str, ...]:
    """The names of categories in order of their ids."""
    return tuple(categories[key] for key in sorted(categories))


def coco_pictures(path: Path, folder: Path, test: bool) -> tuple[list[Picture], Categories]:
    """The images of one annotation file, in order of their ids, and its categories.

    `folder` is the one of the whole data set. Boxes around a crowd count as difficult.
    """
    content = _load(path)
    categories: Categories = {}
    for entry in content["categories"]:
        categories[_id(path, entry, "id")] = _text(path, entry, "name")
    if len(set(categories.values())) != len(content["categories"]):
        raise UserError(f"The categories of {path} must differ in id and name.")
    entries = {_id(path, entry, "id"): entry for entry in content["images"]}
    boxes: dict[int, list[Box]] = {key: [] for key in entries}
    for entry in content["annotations"]:
        image = _id(path, entry, "image_id", boxes)
        boxes[image].append(_box(path, entry, categories))
    root = _image_folder(path, folder, [_text(path, entry, "file_name") for entry in entries.values()])
    pictures = []
    for key, entry in sorted(entries.items()):
        origin = f"{path} for image {key}"
        pictures.append(Picture(root / entry["file_name"], tuple(boxes[key]), test, origin, _size(entry)))
    return pictures, categories


def _files(folder: Path) -> list[Path]:
    files = [path for path in sorted((folder / FOLDER).glob("*.json")) if not path.name.startswith(".")]
    return [path for path in files if path.name.startswith(PREFIX)] or files


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"There is no file {path}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}.") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise UserError(f"{path} must hold a list {key!r}, as COCO's files of instances do.")
        if not all(isinstance(entry, dict) for entry in content[key]):
            raise UserError(f"Every entry of {key!r} in {path} must be an object.")
    result: dict[str, list[Any]] = content
    return result


def _box(path: Path, entry: Mapping[str, Any], categories: Categories) -> Box:
    label = categories[_id(path, entry, "category_id", categories)]
    numbers = entry.get("bbox")
    if not isinstance(numbers, list) or len(numbers) != 4 or not all(map(_is_number, numbers)):
        raise UserError(f"Every 'bbox' in {path} must be four numbers: x, y, width, height. Got {numbers!r}.")
    x, y, width, height = map(float, numbers)
    return Box(label, (x, y, x + width, y + height), difficult=bool(entry.get("iscrowd", 0)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _id(path: Path, entry: Mapping[str, Any], key: str, known: Mapping[int, Any] | None = None) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or (known is not None and value not in known):
        rule = "a whole number" if known is None else "the id of an entry in this file"
        raise UserError(f"Every {key!r} in {path} must be {rule}. Got {value!r}.")
    return value


def _text(path: Path, entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise UserError(f"Every {key!r} in {path} must be a text. Got {value!r}.")
    return value


def _size(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    width, height = entry.get("width"), entry.get("height")
    return (width, height) if isinstance(width, int) and isinstance(height, int) else None


def _image_folder(path: Path, folder: Path, names: Sequence[str]) -> Path:
    """Where the images of an annotation file lie: the first usual place that has one of the first ten."""
    own = path.stem.removeprefix(PREFIX)
    roots = [folder / "images", folder]
    below = [place for root in roots if root.is_dir() for place in sorted(root.iterdir()) if place.is_dir()]
    for place in (roots[0] / own, roots[0], roots[1] / own, roots[1], *below):
        if any((place / name).is_file() for name in names[:10]):
            return place
    such = f"such as {names[0]}" if names else "for it names no image"
    raise UserError(f"The images of {path} must lie in a folder 'images' or {own!r} of {folder}. Got none, {such}.")
