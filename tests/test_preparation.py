"""What is done to images before they are learned from: the papers' augmentations, and ways to normalise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from pfed import Experiment, UserError, federation
from pfed.data.federate import IMAGENET
from pfed.tasks.classification import Classification, flip_rotate


class Told:
    """A generator that draws what it is told."""

    def __init__(self, mirrored: list[bool], degrees: list[float]) -> None:
        self.mirrored, self.degrees = mirrored, degrees

    def random(self, n: int) -> np.ndarray:
        return np.where(self.mirrored, 0.0, 1.0)

    def uniform(self, low: float, high: float, n: int) -> np.ndarray:
        assert (low, high, n) == (-30, 30, len(self.degrees))
        return np.array(self.degrees)


def test_no_turn_leaves_images_as_they_are_or_mirrored() -> None:
    x = torch.rand(2, 3, 9, 9)
    out = flip_rotate(x, Told([False, True], [0, 0]))  # type: ignore[arg-type]
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[1], x[1].flip(-1))


@pytest.mark.parametrize(("height", "width"), [(33, 33), (24, 24), (20, 31)])
def test_a_turn_is_that_of_pillow(height: int, width: int) -> None:
    """The authors turn Pillow's images: the nearest pixel, and black where there was none.

    Where a source lies half way between two pixels rounding may go either way, so a few may differ.
    """
    x = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (4, 1, height, width))).float()
    degrees = [-30.0, -7.5, 12.0, 29.0]
    out = flip_rotate(x, Told([False] * 4, degrees))  # type: ignore[arg-type]
    for image, turned, angle in zip(x[:, 0], out[:, 0], degrees, strict=True):
        drawn = Image.fromarray(image.numpy().astype(np.uint8))
        want = torch.from_numpy(np.array(drawn.rotate(angle, Image.Resampling.NEAREST)))
        assert (turned != want).double().mean() < 0.02
    assert out[3, 0, 0, 0] == 0


def test_turns_differ_by_image_and_lie_within_thirty_degrees() -> None:
    """A bright pixel right of the centre tells the angle."""
    x = torch.zeros(200, 1, 101, 101)
    x[:, :, 49:52, 88:91] = 1
    out = flip_rotate(x, np.random.default_rng(0))
    rows, columns = torch.arange(101.0).view(-1, 1) - 50, torch.arange(101.0).view(1, -1) - 50
    mass = out.sum((1, 2, 3))
    y, x_ = ((out[:, 0] * where).sum((1, 2)) / mass for where in (rows, columns))
    angles = torch.rad2deg(torch.atan2(y, x_.abs()))
    assert angles.abs().max() <= 31
    assert angles.std() == pytest.approx(60 / math.sqrt(12), rel=0.15)
    assert 0.4 < (x_ > 0).double().mean() < 0.6  # half of them mirrored


def test_labels_stay() -> None:
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6)
    change = Classification().augment("flip-rotate")
    assert change is not None
    changed, same = change(x, y, np.random.default_rng(0))
    assert same is y
    assert changed.shape == x.shape
    assert not torch.equal(changed, x)


def test_a_run_with_turned_images_repeats_itself() -> None:
    options = {"clients": 2, "rounds": 1, "train_cap": 20, "model": "cnn-small", "augment": "flip-rotate"}
    first, again, plain = (
        Experiment("fedavg", "digits", **{**options, **other}).run().metrics for other in ({}, {}, {"augment": "none"})
    )
    assert first == again
    assert first != plain


IMAGES = {
    "a": (np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4), [0, 1]),
    "b": (np.full((2, 3, 4, 4), 255, np.uint8), [0, 1]),
}


@pytest.mark.parametrize(
    ("rule", "white"),
    [("data", 1.0), ("none", 1.0), ("half", 1.0), ("imagenet", (1 - IMAGENET[0][0]) / IMAGENET[1][0])],
)
def test_ways_to_normalise(rule: str, white: float) -> None:
    made = Experiment("local", federation(IMAGES), normalise=rule).federation()
    x, _ = made.clients[1].train.take()
    assert x[0, 0, 0, 0] == pytest.approx(white)
    black, _ = made.clients[0].train.take()
    assert black.min() == pytest.approx(
        {"half": -1.0, "imagenet": -IMAGENET[0][0] / IMAGENET[1][0]}.get(rule, 0), abs=0.4
    )


def test_every_part_of_a_federation_is_normalised_alike() -> None:
    made = Experiment("local", "digits", clients=2, normalise="half", public=0.1, validation=0.1).federation()
    assert made.public is not None
    assert made.clients[0].validation is not None
    parts = (made.clients[0].train, made.clients[1].test, made.clients[0].validation, made.test, made.public)
    for samples in parts:
        x, _ = samples.take()
        assert (float(x.min()), float(x.max())) == (-1, 1)
    usual = Experiment("local", "digits", clients=2).federation()
    assert float(usual.test.take()[0].max()) > 1.5


@pytest.mark.parametrize(
    ("rule", "data", "message"),
    [
        ("imagenet", "digits", r"run.normalise 'imagenet' needs colour images. Got samples of shape \(1, 8, 8\)"),
        (
            "half",
            federation({"a": (np.random.rand(10, 4), [0, 1] * 5)}),
            r"'half' needs images. Got samples of shape \(4,",
        ),
    ],
)
def test_what_cannot_be_normalised(rule: str, data: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Experiment("local", data, clients=2, normalise=rule).federation()
