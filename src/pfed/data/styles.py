"""Digits in five styles, made of data that can be had anywhere: the same task with other pixels at every client.

`digits-5s` has MNIST, USPS, the small digits of scikit-learn, MNIST digits over photographs (the difference of the two,
as in MNIST-M) and digits rendered in a font. It is not Digits-Five, and its figures are not comparable with those.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pfed import streams
from pfed.data.base import Dataset

SIDE = 28
TRAIN, TEST = 5000, 1000  # of each style, where there are so many
STYLES = ("mnist", "usps", "small", "photo", "rendered")
PHOTOS = ("china.jpg", "flower.jpg")
Pixels = NDArray[np.uint8]  # (3, SIDE, SIDE), or (n, 3, SIDE, SIDE)
Labels = NDArray[np.int64]


def digits_5s(photos: Path, mnist: Dataset, usps: Dataset, digits: Dataset) -> Dataset:
    """The data set from its parts; `photos` is the folder of scikit-learn's photographs. Always the same."""
    rng = streams.rng(0, "digits-5s")
    train: list[tuple[Pixels, Labels]] = []
    test: list[tuple[Pixels, Labels]] = []
    for source in (mnist, usps, digits):
        official, held_out = _rows(source)
        train.append(_resized(source, official[:TRAIN]))
        test.append(_resized(source, held_out[:TEST]))
    images = [np.asarray(Image.open(photos / name).convert("RGB")) for name in PHOTOS]
    official, held_out = _rows(mnist)
    for split, rows in ((train, official[TRAIN : 2 * TRAIN]), (test, held_out[TEST : 2 * TEST])):
        x, y = _resized(mnist, rows)
        split.append((_over_photos(x, images, rng), y))
    for split, count in ((train, TRAIN), (test, TEST)):
        y = rng.permutation(np.arange(count) % 10)
        split.append((np.stack([_rendered(digit, rng) for digit in y.tolist()]), y))
    parts = [*train, *test]
    groups = np.concatenate([np.full(len(y), i % len(STYLES)) for i, (_, y) in enumerate(parts)])
    pixels, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    first = sum(len(own) for _, own in train)
    return Dataset(
        "digits-5s",
        pixels,
        labels,
        mnist.classes,
        train=torch.arange(first),
        test=torch.arange(first, len(labels)),
        groups=torch.from_numpy(groups),
        group_names=STYLES,
        domains=True,
    )


def _rows(source: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Training and test rows: the official ones, or every fifth for testing."""
    if source.train is not None and source.test is not None:
        return source.train.numpy(), source.test.numpy()
    rows = np.arange(len(source.y))
    return rows[rows % 5 != 0], rows[rows % 5 == 0]


def _resized(source: Dataset, rows: NDArray[np.int64]) -> tuple[Pixels, Labels]:
    """Grey images of any size as colour images of one size."""
    chosen = torch.from_numpy(rows)
    x = source.x[chosen].float() * (1 if source.x.dtype == torch.uint8 else 255)
    grey = F.interpolate(x, (SIDE, SIDE), mode="bilinear").round().to(torch.uint8)
    return grey.expand(-1, 3, -1, -1).numpy(), source.y[chosen].numpy()


def _over_photos(digits: Pixels, photos: list[NDArray[np.uint8]], rng: np.random.Generator) -> Pixels:
    """|patch - digit|, each with a patch of its own."""
    out = np.empty_like(digits)
    for i, digit in enumerate(digits):
        photo = photos[rng.integers(len(photos))]
        top, left = (rng.integers(side - SIDE) for side in photo.shape[:2])
        patch = photo[top : top + SIDE, left : left + SIDE].transpose(2, 0, 1)
        out[i] = np.abs(patch.astype(np.int16) - digit)
    return out


def _rendered(digit: int, rng: np.random.Generator) -> Pixels:
    """A digit in Pillow's own font: size, weight, slant, turn, place and both colours by chance."""
    wide = 2 * SIDE  # drawn larger, so that edges are smooth
    font = _font(int(rng.integers(36, 56)))
    paper, ink = rng.integers(0, 256, (2, 3))
    if abs(int(paper.sum()) - int(ink.sum())) < 200:  # to be read at all
        ink = 255 - paper
    glyph = Image.new("L", (wide, wide))
    place = (wide / 2 + rng.uniform(-5, 5), wide / 2 + rng.uniform(-5, 5))
    ImageDraw.Draw(glyph).text(place, str(digit), 255, font, anchor="mm", stroke_width=int(rng.integers(0, 3)))
    slant = rng.uniform(-0.3, 0.3)
    glyph = glyph.transform(glyph.size, Image.Transform.AFFINE, (1, slant, -slant * wide / 2, 0, 1, 0))
    glyph = glyph.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR).resize((SIDE, SIDE), Image.Resampling.BOX)
    share = np.asarray(glyph, np.float32)[None] / 255
    mixed: Pixels = (ink[:, None, None] * share + paper[:, None, None] * (1 - share)).round().astype(np.uint8)
    return mixed


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
