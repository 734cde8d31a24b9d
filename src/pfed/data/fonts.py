"""Digits rendered in many fonts: what a font file says is how a digit looks, so its originals are font files."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from pfed import streams
from pfed.data.formats import Split
from pfed.errors import UserError

SIDE = 28
TRAIN, TEST = 5000, 1000
Pixels = NDArray[np.uint8]  # (3, SIDE, SIDE)
Colours = tuple[NDArray[np.int64], NDArray[np.int64]]  # paper and ink, (3,) each
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def rendered_digits(*files: bytes) -> Split:
    """As many of each digit and each font, always the same, training set first."""
    rng = streams.rng(0, "rendered-digits")
    y = np.concatenate([rng.permutation(np.arange(count) % 10) for count in (TRAIN, TEST)]).astype(np.int64)
    which = np.concatenate([rng.permutation(np.arange(count) % len(files)) for count in (TRAIN, TEST)])
    try:
        fonts = {(i, size): _open(content, size) for i, content in enumerate(files) for size in range(32, 50, 2)}
    except OSError as error:
        raise UserError(f"A font file cannot be read ({error}).") from error
    x = [
        rendered(digit, fonts[font, 2 * int(rng.integers(16, 25))], _colours(rng), rng)
        for digit, font in zip(y.tolist(), which.tolist(), strict=True)
    ]
    return np.stack(x), y, TRAIN


def _open(content: bytes, size: int) -> Font:
    return ImageFont.truetype(io.BytesIO(content), size)


def _colours(rng: np.random.Generator) -> Colours:
    """Paper and ink, far enough apart to be read."""
    paper, ink = rng.integers(0, 256, (2, 3))
    if abs(int(paper.sum()) - int(ink.sum())) < 200:
        ink = np.full(3, 255 if paper.sum() < 383 else 0)
    return paper, ink


def rendered(digit: int, font: Font, colours: Colours, rng: np.random.Generator, centred: bool = True) -> Pixels:
    """A digit in a font: weight, slant, turn and place by chance.

    `centred` starts from the middle of the digit itself, for fonts have their digits at any height.
    """
    wide = 2 * SIDE  # drawn larger, so that edges are smooth
    paper, ink = colours
    glyph = Image.new("L", (wide, wide))
    place = np.array([wide / 2 + rng.uniform(-5, 5), wide / 2 + rng.uniform(-5, 5)])
    draw = ImageDraw.Draw(glyph)
    if centred:
        left, top, right, bottom = draw.textbbox((0, 0), str(digit), font, anchor="mm")
        place -= (left + right) / 2, (top + bottom) / 2
    draw.text(tuple(place.tolist()), str(digit), 255, font, anchor="mm", stroke_width=int(rng.integers(0, 3)))
    slant = rng.uniform(-0.3, 0.3)
    glyph = glyph.transform(glyph.size, Image.Transform.AFFINE, (1, slant, -slant * wide / 2, 0, 1, 0))
    glyph = glyph.rotate(rng.uniform(-20, 20), Image.Resampling.BILINEAR).resize((SIDE, SIDE), Image.Resampling.BOX)
    share = np.asarray(glyph, np.float32)[None] / 255
    mixed: Pixels = (ink[:, None, None] * share + paper[:, None, None] * (1 - share)).round().astype(np.uint8)
    return mixed
