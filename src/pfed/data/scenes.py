"""Scenes made of small grey images: a set for object detection in four styles that can be had anywhere.

Items, of Fashion-MNIST for example, lie on a background without overlap. Each style is a domain of its own, with five
classes in an order of its own, as real domains have: `photo` has tinted items on parts of photographs, `sketch` their
outlines on paper, `inverted` dark ones on a bright ground, and `noise` coloured ones with noise in and around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from pfed import streams
from pfed.data.base import Dataset
from pfed.data.boxes import Boxes, Scenes, padded, to_dataset
from pfed.data.styles import PHOTOS
from pfed.errors import UserError, unknown

STYLES = ("photo", "sketch", "inverted", "noise")
CLASSES = 5  # of each style
ORDERS = {  # of Fashion-MNIST's classes; with fewer classes, those there are, then the others
    "photo": (1, 8, 7, 3, 0),
    "sketch": (1, 8, 9, 2, 3),
    "inverted": (1, 7, 5, 4, 8),
    "noise": (0, 1, 8, 9, 3),
}
MOST = 4  # items in a scene; the least is one
EXTENT = (1 / 6, 1 / 3)  # of an item's long side, as a share of the scene's
INK = 0.08  # a pixel of an item is brighter than that
ZOOMS = (1.0, 1.5, 2.0, 3.0)  # the height of a photograph, as a multiple of the scene's
TRIES = 20  # places for an item before it is left out
LEAST_SIDE = 32

Rows = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Grey = NDArray[np.float32]  # (h, w) in [0, 1]
Colour = NDArray[np.float32]  # (3, h, w) in [0, 1]


def composite(
    items: Dataset,
    photos: Path,
    *,
    train: int = 200,
    test: int = 100,
    side: int = 128,
    seed: int = 0,
    styles: Sequence[str] = STYLES,
) -> Dataset:
    """Scenes of `side` x `side` pixels, `train` and `test` of each style, the same for the same seed.

    `items` is any data set of grey images of at least five classes, bright on dark; training and test scenes show
    different ones. `photos` is the folder of scikit-learn's photographs.
    """
    _check(items, train, test, side, styles)
    grounds = photographs(photos, side) if "photo" in styles else []
    pictures = items.x[:, 0].numpy()
    domains = []
    for style in styles:
        kinds = class_order(style, len(items.classes))
        x, boxes = np.empty((train + test, 3, side, side), np.uint8), []
        for split, part in (("train", x[:train]), ("test", x[train:])):
            pools = [_pool(items, kind, split) for kind in kinds]
            lay_ground(style, part, grounds, streams.rng(seed, "composite", style, split, "ground"))
            boxes += _fill(style, part, pictures, pools, streams.rng(seed, "composite", style, split, "items"))
        names = tuple(items.classes[kind] for kind in kinds)
        domains.append(Scenes(style, torch.from_numpy(x), padded(boxes), names, torch.arange(len(x)) >= train))
    return to_dataset("composite", domains)


def class_order(style: str, classes: int) -> tuple[int, ...]:
    """The classes of a style, in its own order.

    >>> class_order("inverted", 6)
    (1, 5, 4, 0, 2)
    """
    usual = (kind for kind in ORDERS[style] if kind < classes)
    return tuple(dict.fromkeys([*usual, *range(classes)]))[:CLASSES]


def _check(items: Dataset, train: int, test: int, side: int, styles: Sequence[str]) -> None:
    for style in styles:
        if style not in STYLES:
            raise unknown("style", style, STYLES)
    for what, value, least in (("train", train, 1), ("test", test, 1), ("side", side, LEAST_SIDE)):
        if value < least:
            raise UserError(f"{what} of the composite scenes must be >= {least}. Got {value}.")
    if items.x.dim() != 4 or items.x.shape[1] != 1:
        raise UserError(f"The items of scenes must be grey images (n, 1, h, w). Got {tuple(items.x.shape)}.")
    if len(items.classes) < CLASSES:
        raise UserError(f"The items of scenes must have at least {CLASSES} classes. Got {len(items.classes)}.")


def _pool(items: Dataset, kind: int, split: str) -> Rows:
    """The training or test rows of a class: the official ones, or every fifth for testing."""
    y: Rows = items.y.numpy()
    official = items.test if split == "test" else items.train
    if items.train is None or items.test is None or official is None:
        rows: Rows = np.flatnonzero(y == kind)
        rows = rows[(np.arange(len(rows)) % 5 == 4) == (split == "test")]
    else:
        rows = official.numpy()[y[official.numpy()] == kind]
    if not len(rows):
        raise UserError(f"The items of scenes must have {split} images of {items.classes[kind]!r}. Got none.")
    return rows


def _fill(
    style: str, x: Pixels, pictures: NDArray[Any], pools: Sequence[Rows], rng: np.random.Generator
) -> list[Boxes]:
    """Put items on the backgrounds `x` (n, 3, side, side), and tell where they are."""
    side = x.shape[-1]
    every: list[Boxes] = []
    for scene in x:
        boxes: list[tuple[int, ...]] = []
        for _ in range(rng.integers(1, MOST + 1)):
            kind = int(rng.integers(len(pools)))
            picture = pictures[pools[kind][rng.integers(len(pools[kind]))]]
            item = _item(picture, round(side * rng.uniform(*EXTENT)))
            place = _place(item.shape, boxes, side, rng) if item.size else None
            if place is not None:
                top, left = place
                height, width = item.shape
                _paint(style, scene[:, top : top + height, left : left + width], item, rng)
                boxes.append((kind, left, top, left + width, top + height, 0))
        every.append(np.array(boxes, np.float32).reshape(-1, 6))
    return every


def _item(picture: NDArray[Any], extent: int) -> Grey:
    """An item alone, its long side brought to `extent` pixels; empty where a picture is."""
    bare = _trimmed(picture if picture.dtype == np.uint8 else np.rint(255 * picture).astype(np.uint8))
    if bare.size:
        height, width = (max(1, round(length * extent / max(bare.shape))) for length in bare.shape)
        bare = _trimmed(np.asarray(Image.fromarray(bare).resize((width, height), Image.Resampling.BILINEAR)))
    item: Grey = (bare / 255).astype(np.float32)
    return item


def _trimmed(picture: Pixels) -> Pixels:
    """The part of a picture between its first and last row and column with ink."""
    ink = picture > INK * 255
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    if not len(rows):
        return picture[:0, :0]
    return np.ascontiguousarray(picture[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


def _place(
    shape: tuple[int, ...], boxes: Sequence[tuple[int, ...]], side: int, rng: np.random.Generator
) -> tuple[int, int] | None:
    """Top and left of a place with at least a pixel between it and all boxes so far."""
    height, width = shape
    tops, lefts = rng.integers(0, side - height + 1, TRIES), rng.integers(0, side - width + 1, TRIES)
    free = np.ones(TRIES, np.bool_)
    for _, x1, y1, x2, y2, _ in boxes:
        free &= (lefts > x2) | (lefts + width < x1) | (tops > y2) | (tops + height < y1)
    found = int(free.argmax())
    return (int(tops[found]), int(lefts[found])) if free[found] else None


def _paint(style: str, window: Pixels, item: Grey, rng: np.random.Generator) -> None:
    """Draw an item into its part of a scene, (3, h, w): where its share is 0 the background stays."""
    ink = item > INK
    if style == "photo":
        share = np.minimum(0.3 + 2 * item, 1) * ink
        colour: Colour = item * rng.uniform(0.5, 1, (3, 1, 1)).astype(np.float32)
    elif style == "sketch":
        share, colour = _outline(item, ink), np.zeros((3, 1, 1), np.float32)
    elif style == "inverted":
        share, colour = ink.astype(np.float32), 0.7 * (1 - item)[None]
    else:
        hue = rng.random((3, 1, 1), dtype=np.float32)
        speckle = rng.random((3, *item.shape), dtype=np.float32) - 0.5
        share, colour = ink.astype(np.float32), (0.35 + 0.65 * item) * hue + 0.5 * speckle
    mixed = window * (1 - share) + 255 * share * colour.clip(0, 1)
    window[:] = np.rint(mixed).astype(np.uint8)


def _outline(item: Grey, ink: NDArray[np.bool_]) -> Grey:
    """A line around the item, and lighter ones where its brightness changes."""
    around = np.zeros([length + 2 for length in ink.shape], np.bool_)
    around[1:-1, 1:-1] = ink
    inner = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
    lines = np.zeros_like(item)
    lines[1:] += np.abs(item[1:] - item[:-1])
    lines[:, 1:] += np.abs(item[:, 1:] - item[:, :-1])
    share: Grey = np.where(ink & ~inner, np.float32(1), np.minimum(2 * lines, 1) * ink)
    return share


def photographs(folder: Path, side: int) -> list[Pixels]:
    """Each photograph in several sizes, (3, h, w): cutting squares from these is far faster than resizing each."""
    photos = []
    for name in PHOTOS:
        image = Image.open(folder / name).convert("RGB")
        for zoom in ZOOMS:
            height = round(side * zoom)
            resized = image.resize((round(height * image.width / image.height), height), Image.Resampling.BILINEAR)
            photos.append(np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1)))
    return photos


def lay_ground(style: str, x: Pixels, photos: Sequence[Pixels], rng: np.random.Generator) -> None:
    """Fill scenes (n, 3, side, side) with what items will lie on."""
    n, _, side, _ = x.shape
    if style == "noise":
        x[:] = rng.integers(0, 256, x.shape, np.uint8)
    elif style == "sketch":
        x[:] = rng.integers(240, 248, (n, 1, side, side), np.uint8)
    else:
        for scene in x:
            scene[:] = _patch(photos, side, rng) if style == "photo" else _haze(side, rng)


def _patch(photos: Sequence[Pixels], side: int, rng: np.random.Generator) -> Pixels:
    """A square of a photograph, perhaps mirrored. (3, side, side)"""
    photo = photos[int(rng.integers(len(photos)))]
    top, left = (int(rng.integers(length - side + 1)) for length in photo.shape[1:])
    patch = photo[:, top : top + side, left : left + side]
    return patch[:, :, ::-1] if rng.random() < 0.5 else patch


def _haze(side: int, rng: np.random.Generator) -> Pixels:
    """A bright grey ground with soft shades and a little noise. (side, side)"""
    cells = Image.fromarray(rng.integers(0, 64, (4, 4), np.uint8))
    shades = np.minimum(np.asarray(cells.resize((side, side), Image.Resampling.BICUBIC)), 63)
    haze: Pixels = shades + rng.integers(186, 193, shades.shape, np.uint8)
    return haze
