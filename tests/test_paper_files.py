"""The papers' data sets in the formats of their authors: .mat files, LEAF's JSON, CIFAR-100, EMNIST, fonts."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from pfed import Experiment, UserError
from pfed.data import fonts, formats, leaf, matlab, partition, sources, styles
from pfed.data.catalog import SOURCES
from pfed.data.fetch import File
from pfed.data.forms import Form

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def mat(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    savemat(stream, arrays)
    return stream.getvalue()


def pickled(x: np.ndarray, fine: list[int], coarse: list[int]) -> bytes:
    """A CIFAR-100 file, opcode by opcode as Python 2 wrote it."""
    shape = b"K" + bytes([len(x)]) + b"M" + struct.pack("<H", x.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    array = empty + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", x.size) + x.tobytes() + b"tb"
    lists = [b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e" for labels in (fine, coarse)]
    named = b"U\x0bfine_labels" + lists[0] + b"U\x0dcoarse_labels" + lists[1]
    return b"\x80\x02}(U\x04data" + array + named + b"u."


def test_cifar100_forms_agree_and_have_the_fine_labels() -> None:
    parts = [(RNG.integers(0, 256, (n, 3072)).astype(np.uint8), RNG.integers(20, 100, n).tolist()) for n in (3, 2)]
    records = [
        np.concatenate([np.full((len(y), 1), 7), np.array(y)[:, None], x], 1).astype(np.uint8).tobytes()
        for x, y in parts
    ]
    x, y, train = formats.cifar100_binary(*records)
    again = formats.cifar100_pickle(*(pickled(x, y, [7] * len(y)) for x, y in parts))
    assert (x.shape, train, again[2]) == ((5, 3, 32, 32), 3, 3)
    assert y.tolist() == again[1].tolist() == [*parts[0][1], *parts[1][1]]
    np.testing.assert_array_equal(x, again[0])
    np.testing.assert_array_equal(x[0].reshape(-1), parts[0][0][0])
    with pytest.raises(UserError, match=r"multiple of 3074 bytes long. Got 3073"):
        formats.cifar100_binary(bytes(3073), bytes(3074))


def test_cropped_digits_of_svhn_and_synthdigits() -> None:
    """X is (height, width, colour, n), and 10 stands for 0."""
    x = RNG.integers(0, 256, (5, 32, 32, 3)).astype(np.uint8)  # (n, h, w, c)
    y = np.array([10, 1, 9, 0, 5])
    files = [mat(X=x[rows].transpose(1, 2, 3, 0), y=y[rows][:, None].astype(np.uint8)) for rows in ([0, 1, 2], [3, 4])]
    found, labels, train = matlab.cropped_digits(*files)
    np.testing.assert_array_equal(found, x.transpose(0, 3, 1, 2))
    assert (labels.tolist(), train) == ([0, 1, 9, 0, 5], 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged or no MATLAB file"),
        (b"x" * 200, "is damaged or no MATLAB file"),
        (mat(X=np.zeros((2, 2, 3, 1), np.uint8)), "arrays X and y. Got no y"),
        (
            mat(X=np.zeros((2, 2, 3, 2)), y=np.zeros((2, 1))),
            r"must be bytes of shape \(height, width, 3, 2\). Got float64",
        ),
        (mat(X=np.zeros((2, 2, 3, 2), np.uint8), y=np.zeros((3, 1))), r"\(height, width, 3, 3\). Got uint8 of \(2, 2"),
    ],
)
def test_bad_files_of_cropped_digits(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        matlab.cropped_digits(content, content)


def test_emnist_forms_agree() -> None:
    """Both hold images lying on their side, and labels from 1 to 26."""
    x, y = RNG.integers(0, 256, (5, 28, 28)).astype(np.uint8), np.array([1, 26, 3, 4, 5])
    lying = x.transpose(0, 2, 1)
    found, labels, train = formats.emnist_idx(*(idx(part) for part in (lying[:3], y[:3], lying[3:], y[3:])))
    np.testing.assert_array_equal(found[:, 0], x)
    assert (labels.tolist(), train) == ([0, 25, 2, 3, 4], 3)
    halves = {
        kind: {"images": lying[part].reshape(-1, 784), "labels": y[part][:, None], "writers": y[part][:, None]}
        for kind, part in (("train", slice(3)), ("test", slice(3, 5)))
    }
    again = matlab.emnist(mat(dataset=halves | {"mapping": np.eye(2)}))
    np.testing.assert_array_equal(again[0], found)
    assert (again[1].tolist(), again[2]) == (labels.tolist(), 3)
    with pytest.raises(UserError, match=r"has a dataset with train and test images and labels. Got KeyError"):
        matlab.emnist(mat(other=np.eye(2)))


def writers(**users: tuple[list[int], list[int]]) -> str:
    """A LEAF file: each writer's labels, and how grey (0 to 255) each image is."""
    data = {
        name: {"x": [[round(grey / 255, 4)] * 784 for grey in greys], "y": labels}
        for name, (labels, greys) in users.items()
    }
    return json.dumps({"users": list(users), "num_samples": [len(v["y"]) for v in data.values()], "user_data": data})


@pytest.fixture
def femnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two writers; label 36 is a, 45 is j, 46 is k, 10 is A."""
    for kind, text in (
        ("train", writers(f01=([36, 45, 46], [1, 2, 3]), f02=([10, 36], [4, 5]))),
        ("test", writers(f01=([36], [6]), f02=([9], [7]))),
    ):
        (tmp_path / "femnist" / "data" / kind).mkdir(parents=True)
        (tmp_path / "femnist" / "data" / kind / "all_data_0_niid_0.json").write_text(text)
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    return tmp_path


def test_femnist_has_writers_and_62_classes(femnist: Path) -> None:
    data = sources.load("femnist")
    assert (data.x.shape, data.group_names, len(data.classes)) == ((7, 1, 28, 28), ("f01", "f02"), 62)
    assert [data.classes[label] for label in data.y.tolist()] == list("ajkAaa9")
    assert data.x[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert data.groups is not None
    assert data.groups.tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert data.test is not None
    assert data.test.tolist() == [5, 6]
    clients = Experiment("local", "femnist", partition="natural").federation().clients
    assert [(len(client.train), len(client.test)) for client in clients] == [(3, 1), (2, 1)]
    assert sources.check("femnist") == []
    assert sources.load("femnist", image_size=14).x.shape == (7, 1, 14, 14)


def test_femnist_10_has_the_letters_a_to_j(femnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = sources.load("femnist-10")
    assert data.classes == tuple("abcdefghij")
    assert data.x[:, 0, 0, 0].tolist() == [1, 2, 5, 6]
    assert data.y.tolist() == [0, 9, 0, 0]
    assert leaf.MOST_LETTERS == partition.MOST_PER_CLASS
    monkeypatch.setattr(leaf, "MOST_LETTERS", {"train": 1, "test": 1})
    data = sources.load("femnist-10")  # a letter that is frequent in training still has test images
    assert data.x[:, 0, 0, 0].tolist() == [1, 2, 6]
    assert data.test is not None
    assert data.test.tolist() == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a LEAF file: users, and user_data with x and y. Got JSONDecodeError"),
        ('{"users": ["a"], "user_data": {}}', "Got KeyError"),
        (writers(a=([62], [1])), "must be in 0..61. Got 62..62"),
        (writers(a=([1], [256])), r"must be in 0..1. Got 1.0\d+..1.0"),
        (writers(a=([1], [1, 2])), "Got ValueError"),
        (writers(), "must hold images of 0, 1, 2, "),
    ],
)
def test_bad_leaf_files(tmp_path: Path, text: str, message: str) -> None:
    for kind in ("train", "test"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "a.json").write_text(text)
    with pytest.raises(UserError, match=message):
        sources.load("femnist", tmp_path)


def font_file() -> bytes:
    """The font that Pillow carries."""
    from PIL import ImageFont

    return ImageFont.load_default(20).font_bytes  # type: ignore[union-attr]


def test_rendered_digits_are_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "TRAIN", 40)
    monkeypatch.setattr(fonts, "TEST", 20)
    x, y, train = fonts.rendered_digits(font_file(), font_file())
    assert (x.shape, x.dtype, train) == ((60, 3, 28, 28), np.uint8, 40)
    assert np.bincount(y[:40]).tolist() == [4] * 10
    assert np.bincount(y[40:]).tolist() == [2] * 10
    np.testing.assert_array_equal(fonts.rendered_digits(font_file(), font_file())[0], x)
    contrast = x.astype(int).sum(1).max((1, 2)) - x.astype(int).sum(1).min((1, 2))
    assert contrast.min() > 100  # every digit can be read
    with pytest.raises(UserError, match="A font file cannot be read"):
        fonts.rendered_digits(b"rubbish")


def put(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Files of a data set, with these as the ones that the catalog knows."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    source = SOURCES[name]
    form = source.forms[0]
    assert isinstance(form, Form)
    known = tuple(File(file, f"md5:{hashlib.md5(content).hexdigest()}") for file, content in files.items())
    monkeypatch.setitem(SOURCES, name, replace(source, forms=(Form(known, form.parse), *source.forms[1:])))


def test_five_styles_from_their_original_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`digits-5r` and `digits-five`: each style is a client, and so many of each are taken."""
    grey = RNG.integers(0, 256, (12, 28, 28)).astype(np.uint8)
    digits = np.arange(12) % 10
    halves = (slice(8), slice(8, 12))
    mnist = [part for rows in halves for part in (idx(grey[rows]), idx(digits[rows]))]
    put(tmp_path / "mnist", "mnist", monkeypatch, dict(zip("abcd", mnist, strict=True)))
    colour = RNG.integers(0, 256, (12, 32, 32, 3)).astype(np.uint8)
    crops = [mat(X=colour[rows].transpose(1, 2, 3, 0), y=digits[rows][:, None]) for rows in halves]
    put(tmp_path / "svhn", "svhn", monkeypatch, dict(zip("ab", crops, strict=True)))
    put(tmp_path / "synthdigits", "synthdigits", monkeypatch, dict(zip("ab", crops, strict=True)))
    put(tmp_path / "rendered-digits", "rendered-digits", monkeypatch, {"a": font_file()})
    usps = sources._from_split(SOURCES["usps"], (grey[:, None, :16, :16], digits, 8))
    read = sources._read
    monkeypatch.setattr(sources, "_read", lambda source, *more: usps if source.name == "usps" else read(source, *more))
    images = {"images": colour[:, 2:30, 2:30], "labels": digits, "split": (np.arange(12) >= 8).astype(np.uint8)}
    np.savez(tmp_path / "mnist_m_28px.npz", **images)
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    for module, name, value in ((styles, "TRAIN", 6), (styles, "TEST", 3), (fonts, "TRAIN", 10), (fonts, "TEST", 10)):
        monkeypatch.setattr(module, name, value)
    made = sources.load("digits-5r")
    assert made.groups is not None
    assert (made.group_names, made.domains) == (("mnist", "usps", "mnist-m", "svhn", "rendered"), True)
    assert made.groups.bincount().tolist() == [9] * 5
    assert torch.equal(made.x[made.groups == 2][:6], torch.from_numpy(colour[:6, 2:30, 2:30]).permute(0, 3, 1, 2))
    assert torch.equal(made.x[0, 1], torch.from_numpy(grey[0]))
    five = sources.load("digits-five")
    assert five.groups is not None
    assert five.groups.bincount().tolist() == [12] * 5
    clients = Experiment("local", "digits-five").federation().clients
    assert [client.name for client in clients] == ["mnist", "svhn", "usps", "synthdigits", "mnist-m"]
    assert all((len(client.train), len(client.test)) == (8, 4) for client in clients)


def test_what_an_archive_holds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduced data say so wherever the data's name stands; the originals come first where both are there."""
    pixels = RNG.integers(0, 256, (6, 32, 32, 3)).astype(np.uint8)
    split = np.array([0, 0, 0, 0, 1, 1], np.uint8)
    np.savez(tmp_path / "cifar100_12k.npz", images=pixels, labels=np.arange(6) * 10, split=split)
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    data = sources.load("cifar100")
    assert data.name == "cifar100 (12k pool)"
    assert [data.classes[label] for label in data.y[:3].tolist()] == ["apple", "bowl", "chair"]
    assert data.test is not None
    assert data.test.tolist() == [4, 5]
    assert "cifar100: samples must be 12000. Got 6." in sources.check("cifar100")
    made = Experiment("local", "cifar100", clients=2).federation()
    assert (made.source, made.notes) == ("cifar100 (12k pool)", ("reduced data (12k pool): cifar100_12k.npz",))
    parts = [
        pickled(part.reshape(len(part), -1), [9] * len(part), [1] * len(part)) for part in (pixels[:4], pixels[4:])
    ]
    put(tmp_path / "cifar-100-python", "cifar100", monkeypatch, dict(zip(("train", "test"), parts, strict=True)))
    assert sources.load("cifar100").name == "cifar100"
    assert sources.load("cifar100").y.tolist() == [9] * 6


def test_any_images_can_be_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sources.load("digits")
    small = sources.load("digits", image_size=4)
    assert small.x.shape == (1797, 1, 4, 4)
    want = Image.fromarray(whole.x[5, 0].numpy()).resize((4, 4), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(small.x[5, 0].numpy(), np.asarray(want))
    assert torch.equal(sources.load("digits", image_size=8).x, whole.x)
