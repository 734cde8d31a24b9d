"""Digits in five styles: made of other data sets, always in the same way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pfed import Experiment, UserError
from pfed.data import sources, styles
from pfed.data.base import Dataset

DIGITS = tuple("0123456789")


def some(side: int, train: int, test: int) -> Dataset:
    """Noise in place of digits; its first pixel tells the row."""
    total = train + test
    x = torch.randint(256, (total, 1, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(side))
    x[:, 0, 0, 0] = torch.arange(total) % 256
    split = (torch.arange(train), torch.arange(train, total)) if test else (None, None)
    return Dataset("some", x, torch.arange(total) % 10, DIGITS, *split)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> tuple[Dataset, ...]:
    monkeypatch.setattr(styles, "TRAIN", 40)
    monkeypatch.setattr(styles, "TEST", 10)
    return some(28, 100, 30), some(16, 60, 20), some(8, 30, 0)


@pytest.fixture
def photos() -> Path:
    return sources._scikit_learn_folder().parent / "images"


def test_five_styles_one_task(few: tuple[Dataset, ...], photos: Path) -> None:
    made = styles.digits_5s(photos, *few)
    assert (made.x.dtype, tuple(made.x.shape[1:]), made.classes) == (torch.uint8, (3, 28, 28), DIGITS)
    assert made.train is not None
    assert made.test is not None
    assert made.groups is not None
    assert made.groups[made.train].bincount().tolist() == [40, 40, 24, 40, 40]
    assert made.groups[made.test].bincount().tolist() == [10, 10, 6, 10, 10]
    assert sorted([*made.train.tolist(), *made.test.tolist()]) == list(range(len(made.y)))
    again = styles.digits_5s(photos, *few)
    assert torch.equal(made.x, again.x)
    assert torch.equal(made.y, again.y)


def test_digits_over_photographs_are_others_than_the_plain_ones(few: tuple[Dataset, ...], photos: Path) -> None:
    """Where a digit has no ink its patch shows; no MNIST digit is in both styles."""
    mnist = few[0]
    mnist.x[:, 0, 1:] = 0
    made = styles.digits_5s(photos, *few)
    assert made.groups is not None
    plain, over = (made.x[made.groups == style].numpy() for style in (0, 3))
    rows = set(plain[:40, 0, 0, 0].tolist())
    assert rows == set(range(40))
    patch = over[0, :, 1:].transpose(1, 2, 0)
    found = [
        (np.lib.stride_tricks.sliding_window_view(image, patch.shape)[:, :, 0] == patch).all((2, 3, 4)).any()
        for image in (np.asarray(Image.open(photos / name).convert("RGB")) for name in styles.PHOTOS)
    ]
    assert any(found)
    assert torch.equal(made.y[made.groups == 3][:40], mnist.y[40:80])


def test_rendered_digits_differ_by_chance_and_by_digit() -> None:
    one, same, other = (styles._rendered(d, np.random.default_rng(s)) for d, s in ((3, 0), (3, 0), (8, 0)))
    assert (one == same).all()
    assert (one != other).any()
    assert (one != styles._rendered(3, np.random.default_rng(1))).any()


def test_it_has_no_files_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="digits-5s is made of mnist, usps, digits; it has no files of its own"):
        sources.load("digits-5s", tmp_path)


def test_each_style_is_a_client(few: tuple[Dataset, ...], photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = dict(zip(("mnist", "usps", "digits"), few, strict=True))
    read = sources._read
    monkeypatch.setattr(sources, "_read", lambda source, *more: parts.get(source.name) or read(source, *more))
    federation = Experiment("fedbn", "digits-5s", "cnn-small-bn").federation()
    assert [client.name for client in federation.clients] == list(styles.STYLES)
    assert federation.shape == (3, 28, 28)
