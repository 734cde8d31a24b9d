"""Digits in five styles, made of other data sets: the same task with other pixels at every client.

`digits-five` has the five sets of the papers. `digits-5r` has digits rendered in many fonts in place of SynthDigits.
`digits-5s` is of data that can be had anywhere: MNIST, USPS, the small digits of scikit-learn, MNIST digits over
photographs (the difference of the two, as in MNIST-M) and digits rendered in a font. The latter two are not
Digits-Five, and their figures are not comparable with those.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageFont

from pfed import streams
from pfed.data.base import Dataset
from pfed.data.fonts import SIDE, Font, rendered

TRAIN, TEST = 5000, 1000  # of each style, where there are so many
FIVE_TRAIN = 7438  # of each style of digits-five: FedBN cuts all of them to the smallest
STYLES = ("mnist", "usps", "small", "photo", "rendered")
STYLES_5R = ("mnist", "usps", "mnist-m", "svhn", "rendered")
STYLES_FIVE = ("mnist", "svhn", "usps", "synthdigits", "mnist-m")
PHOTOS = ("china.jpg", "flower.jpg")
Pixels = NDArray[np.uint8]  # (3, SIDE, SIDE), or (n, 3, SIDE, SIDE)
Labels = NDArray[np.int64]
Part = tuple[Pixels, Labels]


def digits_five(*parts: Dataset) -> Dataset:
    """Digits-Five: at most 7,438 training digits of each style, and all test digits."""
    return _cut("digits-five", STYLES_FIVE, parts, FIVE_TRAIN, None)


def digits_5r(*parts: Dataset) -> Dataset:
    """The first training and test digits of each part."""
    return _cut("digits-5r", STYLES_5R, parts, TRAIN, TEST)


def _cut(name: str, styles: Sequence[str], parts: Sequence[Dataset], train: int, test: int | None) -> Dataset:
    rows = [_rows(part) for part in parts]
    first = [_resized(part, own[:train]) for part, (own, _) in zip(parts, rows, strict=True)]
    held_out = [_resized(part, own[:test]) for part, (_, own) in zip(parts, rows, strict=True)]
    return _together(name, styles, first, held_out)


def digits_5s(photos: Path, mnist: Dataset, usps: Dataset, digits: Dataset) -> Dataset:
    """The data set from its parts; `photos` is the folder of scikit-learn's photographs. Always the same."""
    rng = streams.rng(0, "digits-5s")
    train: list[Part] = []
    test: list[Part] = []
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
    return _together("digits-5s", STYLES, train, test)


def _together(name: str, styles: Sequence[str], train: Sequence[Part], test: Sequence[Part]) -> Dataset:
    parts = [*train, *test]
    groups = np.concatenate([np.full(len(y), i % len(styles)) for i, (_, y) in enumerate(parts)])
    pixels, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    first = sum(len(own) for _, own in train)
    return Dataset(
        name,
        pixels,
        labels,
        tuple("0123456789"),
        train=torch.arange(first),
        test=torch.arange(first, len(labels)),
        groups=torch.from_numpy(groups),
        group_names=tuple(styles),
        domains=True,
    )


def _rows(source: Dataset) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Training and test rows: the official ones, or every fifth for testing."""
    if source.train is not None and source.test is not None:
        return source.train.numpy(), source.test.numpy()
    rows = np.arange(len(source.y))
    return rows[rows % 5 != 0], rows[rows % 5 == 0]


def _resized(source: Dataset, rows: NDArray[np.int64]) -> Part:
    """Images of any size as colour images of one size."""
    chosen = torch.from_numpy(rows)
    x = source.x[chosen].float() * (1 if source.x.dtype == torch.uint8 else 255)
    if x.shape[1:] != (3, SIDE, SIDE):
        x = F.interpolate(x, (SIDE, SIDE), mode="bilinear").round()
    return x.to(torch.uint8).expand(-1, 3, -1, -1).numpy(), source.y[chosen].numpy()


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
    """A digit in Pillow's own font, in a size and colours by chance."""
    font = _font(int(rng.integers(36, 56)))
    paper, ink = rng.integers(0, 256, (2, 3))
    if abs(int(paper.sum()) - int(ink.sum())) < 200:  # to be read at all
        ink = 255 - paper
    return rendered(digit, font, (paper, ink), rng, centred=False)


@functools.cache
def _font(size: int) -> Font:
    return ImageFont.load_default(size)
