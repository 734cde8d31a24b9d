"""Boxes in the format of PASCAL VOC: one XML file per image, and lists of the images of each set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from pfed.data.boxes import Box, Picture, Scenes, read_scenes
from pfed.errors import UserError

IMAGES, ANNOTATIONS, SETS = "JPEGImages", "Annotations", "ImageSets/Main"
SUFFIXES = (".jpg", ".jpeg", ".png")
CORNERS = ("xmin", "ymin", "xmax", "ymax")


def is_voc(folder: Path) -> bool:
    """It holds images and annotations where VOC has them."""
    return (folder / IMAGES).is_dir() and (folder / ANNOTATIONS).is_dir()


def read_voc(
    folder: Path, size: int, classes: Sequence[str] | None = None, name: str | None = None, strict: bool = True
) -> Scenes:
    """A folder with JPEGImages, Annotations and perhaps ImageSets/Main/{train,val,trainval,test}.txt.

    Test images are those of test.txt, or else of val.txt if train.txt is there too; the other lists are for training.
    Without lists all images with an annotation are taken, and there is no official split.
    """
    train, test = _usual_sets(folder)
    return read_scenes(name or folder.name, voc_pictures(folder, train, test), size, classes, strict)


def voc_pictures(folder: Path, train: Sequence[str], test: Sequence[str], first: int = 1) -> list[Picture]:
    """The images of some sets, sorted, training before test; of neither any: all that have an annotation.

    An image in both is a test image. `first` is what the files call the first pixel: 1 in VOC, 0 in some data that
    only borrow its format.
    """
    if not is_voc(folder):
        raise UserError(f"{folder} must hold the folders {IMAGES} and {ANNOTATIONS}.")
    tests = _members(folder, test)
    trains = (_members(folder, train) if train or test else _annotated(folder)) - tests
    images = _images(folder / IMAGES)
    pictures = []
    for names, held_out in ((trains, False), (tests, True)):
        for name in sorted(names):
            path = folder / ANNOTATIONS / f"{name}.xml"
            boxes, size = read_xml(path, first)
            if name not in images:
                raise UserError(f"There is no image of {path}: {folder / IMAGES} must hold {name}.jpg, .jpeg or .png.")
            pictures.append(Picture(images[name], boxes, held_out, str(path), size))
    return pictures


def _usual_sets(folder: Path) -> tuple[list[str], list[str]]:
    there = {name for name in ("train", "val", "trainval", "test") if (folder / SETS / f"{name}.txt").is_file()}
    test = ["test"] if "test" in there else ["val"] if {"train", "val"} <= there else []
    if test == ["val"]:
        return ["train"], test
    return ["trainval"] if "trainval" in there else sorted(there - {"test"}), test


def _members(folder: Path, sets: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for each in sets:
        path = folder / SETS / f"{each}.txt"
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except FileNotFoundError as error:
            raise UserError(f"There is no list of images {path}.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as a list of images: {error}.") from error
        names |= {line.strip() for line in lines if line.strip()}
    return names


def _annotated(folder: Path) -> set[str]:
    return {path.stem for path in (folder / ANNOTATIONS).glob("*.xml") if not path.name.startswith(".")}


def _images(folder: Path) -> dict[str, Path]:
    """Image files by name without suffix; of .jpg and .png the first."""
    images: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
            images.setdefault(path.stem, path)
    return images


def read_xml(path: Path, first: int = 1) -> tuple[tuple[Box, ...], tuple[int, int] | None]:
    """The boxes of an annotation, and the image's width and height if it tells them.

    The corners in a file are pixels of the box, counted from `first`. Counted from 1, the last one has the number of
    the end in our count: (xmin - 1, ymin - 1, xmax, ymax). Counted from 0 they are taken as they are.
    """
    try:
        content = path.read_bytes()
        entities = b"<!ENTITY" in content  # a few lines of which may stand for gigabytes
        root = ElementTree.Element("none") if entities else ElementTree.fromstring(content)
    except FileNotFoundError as error:
        raise UserError(f"There is no annotation {path}.") from error
    except (OSError, ElementTree.ParseError, LookupError, ValueError) as error:
        raise UserError(f"{path} cannot be read as XML: {error}.") from error
    if entities:
        raise UserError(f"{path} must be XML without entities of its own.")
    if root.tag != "annotation":
        raise UserError(f"{path} must hold an <annotation>. Got <{root.tag}>.")
    boxes = tuple(_box(path, element, first) for element in root.findall("object"))
    sides = [_number(path, root, f"size/{side}", default=0.0) for side in ("width", "height")]
    return boxes, (int(sides[0]), int(sides[1])) if min(sides) >= 1 else None


def _box(path: Path, element: ElementTree.Element, first: int) -> Box:
    label = (element.findtext("name") or "").strip()
    if not label:
        raise UserError(f"Every <object> of {path} must have a <name>. Got none.")
    x1, y1, x2, y2 = (_number(path, element, f"bndbox/{corner}") for corner in CORNERS)
    difficult = _number(path, element, "difficult", default=0.0) != 0
    return Box(label, (x1 - first, y1 - first, x2, y2), difficult)


def _number(path: Path, element: ElementTree.Element, field: str, default: float | None = None) -> float:
    """A field of an element; where there is no default it must be there."""
    text = (element.findtext(field) or "").strip()
    if not text and default is not None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"<{field}> of an <{element.tag}> in {path} must be a number. Got {text or 'nothing'!r}.")
    return number
