"""Images with boxes, of any origin, as tensors of one size: what object detection learns from.

An image is scaled so that its long side fits a square and put into the upper left corner; the rest is grey. A box is
(class, x1, y1, x2, y2, difficult) in pixels of that square, counted from 0, and ends before x2 and y2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pfed import machine
from pfed.data.base import Dataset
from pfed.data.folders import Packed, open_image
from pfed.errors import UserError
from pfed.tables import bytes_text

_LOG = logging.getLogger(__name__)

GREY = 114  # around an image that is not square
NO_BOX = (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
SLACK = 1.0  # pixels by which rounding may have moved the edge of a box over that of the image
Boxes = NDArray[np.float32]  # (k, 6): class, x1, y1, x2, y2, difficult


@dataclass(frozen=True, eq=False)
class Scenes:
    """The images of one domain, and what is to be found in them."""

    name: str
    x: Tensor  # (n, 3, S, S) uint8
    boxes: Tensor  # (n, most, 6) float32; class -1: no box
    classes: tuple[str, ...]
    test: Tensor  # (n,) bool: given as test data; none at all: the domain has no official split


@dataclass(frozen=True)
class Box:
    """What is where, in pixels of the image as it is stored, counted from 0; x2 and y2 are exclusive ends."""

    label: str
    corners: tuple[float, float, float, float]  # x1, y1, x2, y2
    difficult: bool = False


@dataclass(frozen=True)
class Picture:
    """An image that is still to be read, and what an annotation says of it."""

    image: Path | Packed
    boxes: tuple[Box, ...]
    test: bool
    origin: str  # of the boxes: the file that an error must name
    size: tuple[int, int] | None = None  # width and height, where the annotation tells them


def read_scenes(
    name: str, pictures: Sequence[Picture], size: int, classes: Sequence[str] | None = None, strict: bool = True
) -> Scenes:
    """Read all images and bring them and their boxes to `size` x `size` pixels.

    Without `classes` they are the labels that occur, sorted; with it, boxes of other labels are left out. A box that
    is not inside its image is an error. Where `strict` is off, as for published data that cannot be mended, it is cut
    at the edge, and left out if nothing remains.
    """
    if size < 1:
        raise UserError(f"The size of images must be >= 1. Got {size}.")
    if not pictures:
        raise UserError(f"{name} must hold at least one image with its boxes. Got none.")
    names = _class_names(name, pictures, classes)
    position = {label: index for index, label in enumerate(names)}
    _fit(name, len(pictures), size)
    x = np.empty((len(pictures), 3, size, size), np.uint8)
    rows: list[Boxes] = []
    lost: list[str] = []
    for index, picture in enumerate(pictures):
        image = open_image(picture.image).convert("RGB")
        inside = _inside(picture, image.size, strict)
        known = [(position[box.label], *corners, box.difficult) for box, corners in inside if box.label in position]
        lost += [picture.origin] * (len(picture.boxes) - len(inside))
        x[index], own = letterbox(image, np.array(known, np.float32).reshape(-1, 6), size)
        rows.append(own)
    if lost:
        _LOG.warning(f"{name}: boxes left out, for they have no area inside their image: {len(lost)}, in {lost[0]}.")
    test = torch.tensor([picture.test for picture in pictures])
    return Scenes(name, torch.from_numpy(x), padded(rows), names, test)


def _fit(name: str, count: int, size: int) -> None:
    """Images that do not fit into memory are an error before they are read, not a killed process after an hour."""
    needed, free = count * 3 * size * size, machine.free_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{name} needs {bytes_text(needed)} of memory for {count:,} images of {size} pixels, but {bytes_text(free)}"
            " are free: a smaller image_size needs less."
        )


def _class_names(name: str, pictures: Sequence[Picture], classes: Sequence[str] | None) -> tuple[str, ...]:
    found = {box.label for picture in pictures for box in picture.boxes}
    names = tuple(sorted(found) if classes is None else classes)
    if len(set(names)) != len(names):
        raise UserError(f"The names of classes must differ. Got {', '.join(names)}.")
    if found.isdisjoint(names):
        wanted = f" of {', '.join(names)}" if names else ""
        raise UserError(f"{name} must hold at least one box{wanted}. Got {', '.join(sorted(found)) or 'no box'}.")
    return names


def _inside(
    picture: Picture, size: tuple[int, int], strict: bool
) -> list[tuple[Box, tuple[float, float, float, float]]]:
    """The boxes that have an area inside the image, with their corners there."""
    width, height = size
    if strict and picture.size not in (None, size):
        raise UserError(f"{picture.origin} is about an image of {picture.size}, but {picture.image} is {size}.")
    kept = []
    for box in picture.boxes:
        x1, y1, x2, y2 = box.corners
        cut = (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
        empty = not (cut[0] < cut[2] and cut[1] < cut[3])
        moved = max(abs(a - b) for a, b in zip(box.corners, cut, strict=True))
        if strict and (empty or moved > SLACK):
            raise UserError(
                f"A box of {picture.origin} must have an area and lie inside the image of {width}x{height} pixels. "
                f"Got {box.label!r} from ({x1:g}, {y1:g}) to ({x2:g}, {y2:g}), counted from 0."
            )
        if not empty:
            kept.append((box, cut))
    return kept


def letterbox(image: Image.Image, boxes: Boxes, size: int) -> tuple[NDArray[np.uint8], Boxes]:
    """An image in colour and its boxes, scaled into a square: pixels (3, size, size) and boxes (k, 6)."""
    old = image.size
    width, height = (max(1, round(side * size / max(old))) for side in old)
    pixels = np.full((3, size, size), GREY, np.uint8)
    scaled = image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)
    pixels[:, :height, :width] = np.asarray(scaled).transpose(2, 0, 1)
    # By the sides as they were rounded, so that a box keeps to its pixels.
    across, down = width / old[0], height / old[1]
    return pixels, boxes * np.array([1, across, down, across, down, 1], np.float32)


def padded(rows: Sequence[Boxes]) -> Tensor:
    """The boxes of n images as one tensor, as wide as the longest list."""
    most = max((len(own) for own in rows), default=0)
    boxes = torch.tensor(NO_BOX).repeat(len(rows), most, 1)
    for index, own in enumerate(rows):
        boxes[index, : len(own)] = torch.from_numpy(own)
    return boxes


def limited(pictures: Sequence[Picture], limit: int | None) -> list[Picture]:
    """At most `limit` training images and as many test images, evenly over all of them."""
    if limit is None:
        return list(pictures)
    if limit < 1:
        raise UserError(f"The limit of images must be >= 1. Got {limit}.")
    chosen = []
    for test in (False, True):
        own = [picture for picture in pictures if picture.test == test]
        count = min(limit, len(own))
        chosen += [own[index * len(own) // count] for index in range(count)]
    return chosen


def to_dataset(name: str, domains: Sequence[Scenes]) -> Dataset:
    """One data set of all domains, each a group with its own classes where these differ.

    It has an official split if every domain has test images. The label of an image is the class of its largest box.
    A single domain is to be divided among clients like any other data.
    """
    _check(name, domains)
    if len(domains) > 1:  # they are joined by copying
        _fit(name, sum(len(domain.x) for domain in domains), domains[0].x.shape[-1])
    own = tuple(domain.classes for domain in domains)
    classes = tuple(dict.fromkeys(label for names in own for label in names))
    most = max(domain.boxes.shape[1] for domain in domains)
    boxes = torch.cat([_widened(domain.boxes, most) for domain in domains])
    test = torch.cat([domain.test for domain in domains])
    split = all(domain.test.any() for domain in domains)
    return Dataset(
        name,
        torch.cat([domain.x for domain in domains]) if len(domains) > 1 else domains[0].x,
        torch.cat([_labels(domain, classes) for domain in domains]),
        classes,
        train=torch.where(~test)[0] if split else None,
        test=torch.where(test)[0] if split else None,
        groups=torch.cat([torch.full((len(domain.x),), group) for group, domain in enumerate(domains)]),
        group_names=tuple(domain.name for domain in domains),
        domains=len(domains) > 1,
        boxes=boxes,
        group_classes=own if len(set(own)) > 1 else (),
    )


def _check(name: str, domains: Sequence[Scenes]) -> None:
    names = [domain.name for domain in domains]
    if not names or len(set(names)) != len(names):
        raise UserError(f"{name} must have at least one domain, and names that differ. Got {', '.join(names)}.")
    for domain in domains:
        if not len(domain.x) or domain.test.all():
            raise UserError(f"{domain.name} must hold at least one training image. Got none.")
        if domain.x.shape[1:] != domains[0].x.shape[1:]:
            raise UserError(
                f"{domain.name} has images of shape {tuple(domain.x.shape[1:])} "
                f"but {names[0]} of shape {tuple(domains[0].x.shape[1:])}."
            )


def _widened(boxes: Tensor, most: int) -> Tensor:
    more = torch.tensor(NO_BOX).expand(len(boxes), most - boxes.shape[1], 6)
    return torch.cat([boxes, more], 1)


def _labels(domain: Scenes, classes: tuple[str, ...]) -> Tensor:
    """The class of each image's largest box, as its position in `classes`; 0 where there is none. (n,)"""
    if not domain.boxes.shape[1]:
        return torch.zeros(len(domain.x), dtype=torch.int64)
    kind, x1, y1, x2, y2, _ = domain.boxes.unbind(-1)  # (n, most) each
    area = torch.where(kind >= 0, (x2 - x1) * (y2 - y1), -1)
    own = kind.gather(1, area.argmax(1, keepdim=True))[:, 0].long()
    position = torch.tensor([classes.index(label) for label in domain.classes])
    return torch.where(own >= 0, position[own.clamp(min=0)], 0)
