"""Scenes in four styles: where items are, that boxes tell it exactly, and that it is always the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pfed import UserError, streams
from pfed.data import scenes, sources
from pfed.data.base import Dataset
from pfed.data.scenes import STYLES, class_order, composite, lay_ground, photographs

PHOTOS = sources._scikit_learn_folder().parent / "images"
SIDE, TRAIN, TEST, SEED = 64, 12, 6, 3


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return sources.load("digits")


@pytest.fixture(scope="module")
def made(digits: Dataset) -> Dataset:
    return composite(digits, PHOTOS, train=TRAIN, test=TEST, side=SIDE, seed=SEED)


def of_style(made: Dataset, style: str) -> tuple[Tensor, Tensor]:
    """Images and boxes of a style."""
    assert made.groups is not None
    assert made.boxes is not None
    rows = made.groups == made.group_names.index(style)
    return made.x[rows], made.boxes[rows]


def corners(boxes: Tensor) -> list[list[int]]:
    rows: list[list[int]] = boxes[boxes[:, 0] >= 0, 1:5].long().tolist()
    return rows


def grounds(style: str) -> Tensor:
    """The scenes of a style before items are put there."""
    parts = []
    for split, count in (("train", TRAIN), ("test", TEST)):
        x = np.empty((count, 3, SIDE, SIDE), np.uint8)
        lay_ground(style, x, photographs(PHOTOS, SIDE), streams.rng(SEED, "composite", style, split, "ground"))
        parts.append(torch.from_numpy(x))
    return torch.cat(parts)


def test_what_it_is_made_of(made: Dataset, digits: Dataset) -> None:
    assert (made.name, made.domains, made.group_names) == ("composite", True, STYLES)
    assert (made.x.shape, made.x.dtype) == ((4 * (TRAIN + TEST), 3, SIDE, SIDE), torch.uint8)
    assert made.boxes is not None
    assert made.train is not None
    assert made.test is not None
    assert made.groups is not None
    assert (made.boxes.shape, made.boxes.dtype) == ((len(made.x), 4, 6), torch.float32)
    assert made.groups[made.train].bincount().tolist() == [TRAIN] * 4
    assert made.groups[made.test].bincount().tolist() == [TEST] * 4
    there = made.boxes[..., 0] >= 0
    assert 1 <= there.sum(1).min() < there.sum(1).max() <= 4
    assert (made.boxes[there][:, 0].unique() == torch.arange(5)).all()
    assert not made.boxes[..., 5].any()
    assert set(made.classes) <= set(digits.classes)


def test_classes_of_each_style(made: Dataset) -> None:
    """Five each, in an order of its own; with fewer classes than ten, those that there are."""
    assert made.group_classes == (tuple("18730"), tuple("18923"), tuple("17548"), tuple("01893"))
    assert [class_order(style, 5) for style in STYLES] == [
        (1, 3, 0, 2, 4),
        (1, 2, 3, 0, 4),
        (1, 4, 0, 2, 3),
        (0, 1, 3, 2, 4),
    ]
    assert all(class_order(style, 100) == scenes.ORDERS[style] for style in STYLES)


@pytest.mark.parametrize("style", STYLES)
def test_boxes_are_tight(made: Dataset, style: str) -> None:
    """What differs from the bare ground lies in boxes, reaches each side of every box to a pixel, and is not all."""
    x, boxes = of_style(made, style)
    changed = (x != grounds(style)).any(1)  # (n, side, side)
    area = sum((x2 - x1) * (y2 - y1) for own in boxes for x1, y1, x2, y2 in corners(own))
    assert changed.sum() < 0.85 * area
    for own, image in zip(boxes, changed, strict=True):
        for x1, y1, x2, y2 in corners(own):
            inside = image[y1:y2, x1:x2]
            down, across = torch.where(inside.any(1))[0], torch.where(inside.any(0))[0]
            assert down[0] <= 1
            assert across[0] <= 1
            assert down[-1] >= y2 - y1 - 2
            assert across[-1] >= x2 - x1 - 2
            assert SIDE / 6 - 1 <= max(x2 - x1, y2 - y1) <= SIDE / 3 + 1
            image[y1:y2, x1:x2] = False
        assert not image.any()


def test_items_do_not_touch(made: Dataset) -> None:
    assert made.boxes is not None
    pairs = 0
    for own in made.boxes:
        assert own[:, 1:5].min() >= 0
        assert own[:, 1:5].max() <= SIDE
        for a, b in itertools.combinations(corners(own), 2):
            assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
            pairs += 1
    assert pairs > 50


def bars() -> Dataset:
    """Items of class k are solid and k+1 times as wide as high, so that a box tells its class."""
    x, y = torch.zeros(40, 1, 12, 60, dtype=torch.uint8), torch.arange(40) // 8
    for row, kind in enumerate(y.tolist()):
        x[row, 0, 1:11, 3 : 3 + 10 * (kind + 1)] = 255
    return Dataset("bars", x, y, tuple("abcde"))


@pytest.mark.parametrize("style", STYLES)
def test_the_class_of_a_box_is_that_of_its_item(style: str) -> None:
    x, boxes = of_style(composite(bars(), PHOTOS, train=20, test=5, side=96, styles=[style]), style)
    kinds = class_order(style, 5)
    found = boxes[boxes[..., 0] >= 0]
    assert len(found) > 25
    for kind, x1, y1, x2, y2, _ in found.long().tolist():
        ratio = (x2 - x1) / (y2 - y1)
        assert abs(ratio - (kinds[kind] + 1)) < 0.12 * (kinds[kind] + 1) + 0.1
    if style == "sketch":  # a black line around a solid item, and paper in it
        x1, y1, x2, y2 = corners(boxes[0])[0]
        shown = x[0, 0, y1:y2, x1:x2].clone()
        assert shown[1:-1, 1:-1].min() >= 240
        shown[1:-1, 1:-1] = 0
        assert not shown.any()


def test_ink_that_is_lost_in_scaling_is_not_boxed() -> None:
    """A faint dot far from a square is gone when the picture is made smaller, so boxes are square."""
    x = torch.zeros(10, 1, 90, 90, dtype=torch.uint8)
    x[:, 0, 20:60, 20:60] = 255
    x[:, 0, 40, 80] = 22
    items = Dataset("dots", x, torch.arange(10) % 5, tuple("abcde"), train=torch.arange(10), test=torch.arange(10))
    for own in of_style(composite(items, PHOTOS, train=5, test=1, side=64, styles=["noise"]), "noise")[1]:
        assert all(abs((x2 - x1) - (y2 - y1)) <= 1 for x1, y1, x2, y2 in corners(own))


def test_grounds_are_parts_of_all_photographs() -> None:
    """One photograph is plain, the other brighter by 2 with each column: some patches are mirrored."""
    photos = [np.full((3, 40, 50), 9, np.uint8), np.broadcast_to(2 * np.arange(90, dtype=np.uint8), (3, 33, 90))]
    x = np.empty((60, 3, 32, 32), np.uint8)
    lay_ground("photo", x, photos, np.random.default_rng(0))
    steps = np.diff(x.astype(np.int64), axis=3)
    assert {int(step) for step in np.unique(steps)} == {-2, 0, 2}
    assert (steps == steps[:, :1, :1, :1]).all()
    starts = x[:, 0, 0, 0][steps[:, 0, 0, 0] == 2]
    assert starts.min() < 30
    assert starts.max() > 80


def test_styles_look_as_they_should(made: Dataset) -> None:
    """Sketch: dark lines on paper. Inverted: dark items on a bright ground. Both are grey, the others in colour."""
    for style, ground in (("sketch", 240), ("inverted", 186)):
        x, boxes = of_style(made, style)
        assert (x == x[:, :1]).all()
        for own, image in zip(boxes, x[:, 0].clone(), strict=True):
            for x1, y1, x2, y2 in corners(own):
                assert image[y1:y2, x1:x2].min() < 100
                image[y1:y2, x1:x2] = 255
            assert image.min() >= ground
    for style in ("photo", "noise"):
        x, _ = of_style(made, style)
        assert (x != x[:, :1]).float().mean() > 0.3
    patches = of_style(made, "photo")[0].float()
    assert (patches[..., 1:] - patches[..., :-1]).abs().mean() < 20  # neighbours are alike in a photograph
    assert patches.mean((2, 3)).std(0).min() > 5  # and scenes are not


def test_same_seed_same_scenes(made: Dataset, digits: Dataset) -> None:
    again = composite(digits, PHOTOS, train=TRAIN, test=TEST, side=SIDE, seed=SEED)
    assert made.boxes is not None
    assert again.boxes is not None
    assert torch.equal(made.x, again.x)
    assert torch.equal(made.boxes, again.boxes)
    other = composite(digits, PHOTOS, train=TRAIN, test=TEST, side=SIDE, seed=SEED + 1, styles=["noise"])
    assert not torch.equal(of_style(made, "noise")[0], other.x)
    alone = composite(digits, PHOTOS, train=TRAIN, test=TEST, side=SIDE, seed=SEED, styles=["noise"])
    assert torch.equal(of_style(made, "noise")[0], alone.x)
    assert (alone.domains, alone.group_names) == (False, ("noise",))


def test_items_in_floats(digits: Dataset) -> None:
    """Floats in [0, 1] are the same items; just below 1 is white."""
    options = {"train": 5, "test": 5, "side": SIDE, "styles": ["inverted"]}
    same = composite(replace(digits, x=digits.x.float() / 255), PHOTOS, **options)
    assert torch.equal(composite(digits, PHOTOS, **options).x, same.x)
    bright = replace(digits, x=torch.full(digits.x.shape, 0.999))
    assert composite(bright, PHOTOS, **options).x.flatten(1).min(1).values.tolist() == [0] * 10


@pytest.mark.parametrize("official", [True, False])
def test_training_and_test_scenes_show_different_items(official: bool) -> None:
    """Test items, or else every fifth of each class, are dull: bright when inverted."""
    x, rows = torch.full((50, 1, 8, 8), 255, dtype=torch.uint8), torch.arange(50)
    dull = rows % 2 == 0 if official else rows % 5 == 4
    x[dull] = 60
    items = Dataset("plain", x, rows // 10, tuple("abcde"))
    if official:
        items = replace(items, train=rows[~dull], test=rows[dull])
    shown = composite(items, PHOTOS, train=6, test=6, side=SIDE, styles=["inverted"]).x.flatten(1).min(1).values
    assert shown.tolist() == [0] * 6 + [round(255 * 0.7 * (1 - 60 / 255))] * 6


def test_pictures_without_ink_are_left_out() -> None:
    x = torch.zeros(10, 1, 8, 8, dtype=torch.uint8)
    x[5:] = 255
    items = Dataset("half", x, torch.arange(10) % 5, tuple("abcde"), train=torch.arange(10), test=torch.arange(10))
    made = composite(items, PHOTOS, train=20, test=5, side=32, styles=["sketch"])
    assert made.boxes is not None
    count = (made.boxes[..., 0] >= 0).sum(1)
    assert 0 < count.float().mean() < 2


def test_wrong_items_and_numbers(digits: Dataset) -> None:
    few = replace(digits, y=digits.y % 4, classes=tuple("abcd"))
    colour = replace(digits, x=digits.x.expand(-1, 3, -1, -1))
    absent = replace(digits, y=digits.y.where(digits.y != 8, 0))
    for items, words in (
        (few, "at least 5 classes. Got 4"),
        (colour, r"grey images \(n, 1, h, w\). Got \(1797, 3, 8, 8\)"),
        (absent, "train images of '8'. Got none"),
    ):
        with pytest.raises(UserError, match=words):
            composite(items, PHOTOS, train=1, test=1, side=SIDE)
    for options, words in (
        ({"train": 0}, "train of the composite scenes must be >= 1. Got 0"),
        ({"test": 0}, "test of the composite scenes must be >= 1. Got 0"),
        ({"side": 31}, "side of the composite scenes must be >= 32. Got 31"),
    ):
        with pytest.raises(UserError, match=words):
            composite(digits, PHOTOS, **options)
    with pytest.raises(UserError, match="There is no style 'foto'"):
        composite(digits, PHOTOS, styles=["foto"])
