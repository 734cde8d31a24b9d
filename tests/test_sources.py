"""The data sets known by name: formats, where files are looked for, and what is said when they are bad."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import os
import pickle
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pfed import Experiment
from pfed.data import formats, sources
from pfed.data.archives import read_archive
from pfed.data.catalog import SOURCES
from pfed.data.fetch import FetchError, File, Package
from pfed.data.forms import Archive, Form, Source
from pfed.errors import UserError

RNG = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def test_idx_reads_any_number_of_dimensions() -> None:
    for shape in [(5,), (2, 3), (2, 3, 4)]:
        array = RNG.integers(0, 256, shape)
        np.testing.assert_array_equal(formats.idx(idx(array)), array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with 00 00 08. Got nothing"),
        (b"\x00\x00\x0d\x01", "Got 00 00 0d"),
        (idx(np.zeros((3, 2)))[:-1], r"shape \(3, 2\) has 18 bytes. Got 17"),
        (idx(np.zeros((3, 2))) + b"0", "Got 19"),
    ],
)
def test_idx_knows_a_bad_file(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        formats.idx(content)


def cifar_batch(n: int) -> tuple[np.ndarray, np.ndarray]:
    return RNG.integers(0, 256, (n, 3072)).astype(np.uint8), RNG.integers(0, 10, n)


def python_2_pickle(x: np.ndarray, y: np.ndarray) -> bytes:
    """{"data": x, "labels": list of y}, opcode by opcode as the original files have it."""
    shape = b"K" + bytes([len(x)]) + b"M" + struct.pack("<H", x.shape[1]) + b"\x86"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    array = empty + b"(K\x01" + shape + dtype + b"\x89T" + struct.pack("<i", x.size) + x.tobytes() + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in y) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."


def test_cifar_forms_agree() -> None:
    batches = [cifar_batch(n) for n in (3, 2, 4)]
    records = [np.concatenate([y.astype(np.uint8)[:, None], x], axis=1).tobytes() for x, y in batches]
    pickles = [python_2_pickle(x, y) for x, y in batches]
    x, y, train = formats.cifar_binary_batches(*records)
    again = formats.cifar_pickle_batches(*pickles)
    assert x.shape == (9, 3, 32, 32)
    assert train == again[2] == 5
    np.testing.assert_array_equal(x, again[0])
    np.testing.assert_array_equal(y, again[1])
    np.testing.assert_array_equal(x[3, 2].reshape(-1), batches[1][0][0, 2048:])  # the blue plane comes last


def test_cifar_records_must_be_whole() -> None:
    for content in (b"", bytes(3072), bytes(3074)):
        with pytest.raises(UserError, match="multiple of 3073"):
            formats.cifar_records(content)


class Evil:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


class EvilDtype:
    def __reduce__(self) -> Any:
        return np.load, ("x",)


@pytest.mark.parametrize("evil", [Evil(), EvilDtype()])
def test_cifar_pickles_build_arrays_only(evil: object) -> None:
    with pytest.raises(UserError, match="holds arrays only"):
        formats.cifar_pickle(pickle.dumps({"data": evil, "labels": []}, protocol=2))


def test_a_pickle_of_something_else() -> None:
    with pytest.raises(UserError, match="dictionary of data and labels"):
        formats.cifar_pickle(pickle.dumps({"images": 1}))


def test_usps_forms_agree() -> None:
    values, y = np.round(RNG.uniform(-1, 1, (5, 256)), 6), np.array([3, 9, 0, 1, 1])
    values[0, :2] = -1, 1
    rows = [",".join(map(str, [float(label), *row])) for label, row in zip(y, values, strict=True)]
    table = "\n".join([",".join(["y_label", *(f"feature{i}" for i in range(256))]), *rows]).encode()
    lines = [
        " ".join([str(label + 1), *(f"{i}:{value}" for i, value in enumerate(row, 1))])
        for label, row in zip(y, values, strict=True)
    ]
    train, test = ("\n".join(part).encode() + b"\n" for part in (lines[:3], lines[3:]))
    x, labels, count = formats.usps_libsvm(bz2.compress(train), bz2.compress(test))
    assert x.shape == (5, 1, 16, 16)
    assert count == 3
    assert x[0, 0, 0, :2].tolist() == [0, 255]
    np.testing.assert_array_equal(labels, y)
    again = formats.usps_csv(table)
    np.testing.assert_array_equal(again[0], x)
    np.testing.assert_array_equal(again[1], y)


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (lambda: formats.usps_csv(b"a,b\n1,2\n"), "257 columns. Got 2"),
        (lambda: formats.usps_csv(b"a,b\n1,x\n"), "numbers only"),
        (lambda: formats.usps_libsvm(bz2.compress(b"1 1:0.5\n"), bz2.compress(b"")), "256 values. Got 3 numbers"),
        (lambda: formats.usps_libsvm(b"plain", b"plain"), "is bzip2"),
    ],
)
def test_bad_usps_files(parse: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse()


def test_digits_are_embedded() -> None:
    digits = sources.load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == torch.uint8
    assert int(digits.x.max()) == 255
    assert digits.train is None
    assert digits.test is None
    scaled = digits.x.double() / 255
    assert scaled.mean() == pytest.approx(digits.mean[0], abs=1e-4)
    assert scaled.std() == pytest.approx(digits.std[0], abs=1e-4)
    assert sources.check("digits") == []
    assert (sources.get("digits") / "digits.csv.gz").is_file()


CLASSES_OF = {"cifar100": 100, "emnist-letters": 26, "femnist": 62, "pacs": 7, "office-home": 65, "flickr-aes": 5}
CLASSES_OF |= {"real-cur": 5, "histology": 9, "composite": 9, "voc-clipart": 20, "uodb": 0}


def test_the_catalog_is_consistent() -> None:
    assert [name for name, source in SOURCES.items() if source.boxes] == ["composite", "voc-clipart", "uodb"]
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.licence
        assert len(set(source.classes)) == len(source.classes) == CLASSES_OF.get(name, 10)
        assert bool(source.origin) == source.by_hand
        assert len(source.mean) == len(source.std)
        assert len(source.mean) in (0, source.shape[0])
        assert all(part in SOURCES for part in source.parts)
        assert all(form in source.forms for _, form in source.routes)
        assert all(not isinstance(form, Archive) for form in source.forms[:-1])  # the originals come first
        for file in (file for form in source.forms if isinstance(form, Form) for file in form.files if file.digest):
            kind, _, value = file.digest.partition(":")
            assert len(bytes.fromhex(value)) == hashlib.new(kind).digest_size


def test_what_is_unpickled_has_a_checksum() -> None:
    forms = [form for source in SOURCES.values() for form in source.forms if isinstance(form, Form)]
    pickles = [form for form in forms if "pickle" in form.parse.__name__]
    assert len(pickles) == 2
    assert all(file.digest for form in pickles for file in form.files)


TOY_X, TOY_Y = RNG.integers(0, 256, (6, 4, 4)), np.array([0, 1, 2, 0, 1, 2])
TOY_FILES = {"tx": idx(TOY_X[:4]), "ty": idx(TOY_Y[:4]), "vx": idx(TOY_X[4:]), "vy": idx(TOY_Y[4:])}


class Route:
    """A route that brings files, or has a reason not to."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files, self.calls = files, 0

    def __str__(self) -> str:
        return "toy route"

    def collect(self, staging: Path, scratch: Path) -> list[Path]:
        self.calls += 1
        if self.files is None:
            raise FetchError("no way")
        for name, content in self.files.items():
            (scratch / name).write_bytes(content)
        return [scratch / name for name in self.files]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("PFED_DATA", raising=False)
    monkeypatch.setenv("PFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data" / "toy"


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[Route]:
    """A data set of six images, called toy, and the routes to it: a closed one, then a good one."""
    routes = [Route(), Route(TOY_FILES)]
    digests = [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in TOY_FILES.values()]
    form = Form(tuple(map(File, TOY_FILES, digests)), formats.idx_pairs)
    toy = Source(
        name="toy",
        title="Toy",
        shape=(1, 4, 4),
        classes=("a", "b", "c"),
        train=4,
        test=2,
        mean=(0.5,),
        std=(0.2,),
        licence="none",
        forms=(form,),
        routes=tuple((route, form) for route in routes),  # type: ignore[misc]
        folders=("Toy/raw",),
    )
    monkeypatch.setitem(SOURCES, "toy", toy)
    return routes


def put(folder: Path, files: dict[str, bytes] = TOY_FILES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def toy_is_cached() -> bool:
    return next(source.cached for source in sources.sources() if source.name == "toy")


def test_load_fetches_once_by_the_first_route_that_works(routes: list[Route], cache: Path) -> None:
    assert not toy_is_cached()
    toy = sources.load("toy")
    np.testing.assert_array_equal(toy.x[:, 0].numpy(), TOY_X)
    np.testing.assert_array_equal(toy.y.numpy(), TOY_Y)
    assert toy.train is not None
    assert toy.test is not None
    assert toy.train.tolist() == [0, 1, 2, 3]
    assert toy.test.tolist() == [4, 5]
    assert toy_is_cached()
    assert sources.load("toy").classes == ("a", "b", "c")
    assert sources.get("toy") == cache
    assert [route.calls for route in routes] == [1, 1]


def test_two_runs_at_once_fetch_once(routes: list[Route], monkeypatch: pytest.MonkeyPatch) -> None:
    collect = routes[1].collect

    def slowly(staging: Path, scratch: Path) -> list[Path]:
        time.sleep(0.1)
        return collect(staging, scratch)

    monkeypatch.setattr(routes[1], "collect", slowly)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(sources.load, ["toy", "toy"]))
    assert [len(toy.y) for toy in found] == [6, 6]
    assert routes[1].calls == 1


def test_get_with_force_fetches_anew(routes: list[Route]) -> None:
    sources.get("toy")
    sources.get("toy", force=True)
    assert routes[1].calls == 2


@pytest.mark.parametrize(
    "damage", [TOY_FILES["vx"][:-1], bytes(byte ^ 1 for byte in TOY_FILES["vx"])], ids=["truncated", "changed"]
)
def test_a_damaged_cached_file_is_named_and_fetched_anew(routes: list[Route], cache: Path, damage: bytes) -> None:
    sources.get("toy")
    (cache / "vx").write_bytes(damage)
    with pytest.raises(UserError, match=r"toy/vx is damaged.*`pfed data get toy --force` fetches it anew"):
        sources.load("toy")
    assert [str(cache / "vx") in problem for problem in sources.check("toy")] == [True]
    sources.get("toy")
    assert routes[1].calls == 2
    assert sources.check("toy") == []


def test_a_lost_cached_file_is_fetched_anew(routes: list[Route], cache: Path) -> None:
    sources.get("toy")
    (cache / "vx").unlink()
    assert not toy_is_cached()
    assert len(sources.load("toy").y) == 6


def test_when_force_fails_the_old_files_stay(routes: list[Route]) -> None:
    sources.get("toy")
    routes[1].files = None
    with pytest.raises(UserError, match="could not be fetched"):
        sources.get("toy", force=True)
    assert len(sources.load("toy").y) == 6


def test_when_nothing_works_all_that_was_tried_is_told(routes: list[Route]) -> None:
    routes[1].files = {**TOY_FILES, "vx": b"rubbish"}
    expected = r"Toy could not be fetched \(toy route: no way; toy route: the checksum of vx differs\): "
    with pytest.raises(UserError, match=expected + ".*tx, ty, vx, vy into a folder named toy and set PFED_DATA"):
        sources.load("toy")
    assert not toy_is_cached()


def test_a_cache_that_cannot_be_written(routes: list[Route], cache: Path) -> None:
    cache.parent.parent.write_text("a file where a folder should be")
    with pytest.raises(UserError, match=r"cannot be written .*set PFED_CACHE"):
        sources.load("toy")


@pytest.mark.parametrize("place", ["toy", "toy/Toy/raw", "Toy/raw", "."])
def test_a_local_folder_comes_first(
    routes: list[Route], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    put(tmp_path / "own" / place)
    monkeypatch.setenv("PFED_DATA", str(tmp_path / "own"))
    assert len(sources.load("toy").y) == 6
    assert sources.get("toy", force=True) == tmp_path / "own" / place
    assert sources.check("toy") == []
    assert toy_is_cached()
    assert [route.calls for route in routes] == [0, 0]


def test_a_local_folder_may_hold_gzipped_files(routes: list[Route], tmp_path: Path) -> None:
    put(tmp_path / "own", {f"{name}.gz": gzip.compress(content) for name, content in TOY_FILES.items()})
    np.testing.assert_array_equal(sources.load("toy", tmp_path / "own").x[:, 0].numpy(), TOY_X)


def test_a_bad_local_folder_is_not_passed_over(
    routes: list[Route], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PFED_DATA", str(tmp_path / "own"))
    with pytest.raises(UserError, match="PFED_DATA must be a folder"):
        sources.load("toy")
    folder = put(tmp_path / "own" / "toy", {"tx": TOY_FILES["tx"]})
    with pytest.raises(UserError, match="own/toy does not hold Toy: it needs the files tx, ty, vx, vy"):
        sources.load("toy")
    assert "does not hold Toy" in sources.check("toy")[0]
    assert not toy_is_cached()
    put(folder, {**TOY_FILES, "ty": b"another"})
    for call in (sources.load, sources.get):
        with pytest.raises(UserError, match=r"toy/ty is damaged or another file.*unset PFED_DATA"):
            call("toy")
    assert [route.calls for route in routes] == [0, 0]


def test_a_folder_given_by_hand_must_hold_the_files(routes: list[Route], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not hold Toy"):
        sources.load("toy", tmp_path)


def test_check_tells_what_is_missing_and_what_differs(routes: list[Route], monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.check("toy") == ["toy is not here: `pfed data get toy` fetches it."]
    assert routes[1].calls == 0
    sources.get("toy")
    wrong = replace(SOURCES["toy"], train=5, classes=("a", "b"))
    monkeypatch.setitem(SOURCES, "toy", wrong)
    assert sources.check("toy") == [
        "toy: samples must be 7. Got 6.",
        "toy: labels must be 7. Got 6.",
        "toy: training samples must be 5. Got 4.",
        "toy: classes must be [0, 1]. Got [0, 1, 2].",
    ]


@pytest.mark.parametrize("call", [sources.load, sources.get, sources.check])
def test_unknown_names_suggest_the_nearest(call: Any) -> None:
    with pytest.raises(UserError, match=r"There is no data set 'fashion_mnist'\. Did you mean 'fashion-mnist'\?"):
        call("fashion_mnist")


DOMAINS, CLASSES = SOURCES["pacs"].domains, SOURCES["pacs"].classes
SMALL = {(d, c): 10 * d + c for d in range(4) for c in (0, 1, 6)}  # (domain, class): how grey its image is


def picture(grey: int, form: str, mode: str = "RGB", size: tuple[int, int] = (12, 10)) -> bytes:
    """An even picture, which JPEG keeps as it is."""
    stream = io.BytesIO()
    Image.new("L", size, grey).convert(mode).save(stream, form)
    return stream.getvalue()


def archive(path: Path, **changes: Any) -> Path:
    """A small archive in PACS's format, its names in another order than the catalog's."""
    contents = [picture(grey, "jpeg") for grey in SMALL.values()]
    arrays = {
        "jpeg": np.frombuffer(b"".join(contents), np.uint8),
        "offsets": np.cumsum([0, *map(len, contents)]),
        "labels": np.array([6 - c for _, c in SMALL], np.int16),
        "domains": np.array([3 - d for d, _ in SMALL], np.int8),
        "class_names": np.array(CLASSES[::-1]),
        "domain_names": np.array(DOMAINS[::-1]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def tree(root: Path) -> Path:
    """The same images as original files; some are grey, some PNG, and strangers stand beside."""
    for (d, c), grey in SMALL.items():
        folder = root / DOMAINS[d] / CLASSES[c]
        folder.mkdir(parents=True)
        form, mode = ("png", "L") if d == 3 or grey == 0 else ("jpeg", "RGB")
        (folder / f"pic_001.{form.replace('jpeg', 'jpg')}").write_bytes(picture(grey, form, mode, (12 + c, 10)))
    (root / "splits" / "deep").mkdir(parents=True)
    (root / "splits" / "photo_train.txt").write_text("photo/dog/pic_001.jpg 1")
    return root


@pytest.mark.parametrize("place", ["pacs_96px.npz", "pacs/pacs_96px.npz", "pacs", "pacs/kfold", ".", "kfold"])
def test_pacs_is_read_from_an_archive_or_from_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / "own" / place
    found = archive(path).parent if place.endswith(".npz") else tree(path)
    monkeypatch.setenv("PFED_DATA", str(tmp_path / "own"))
    pacs = sources.load("pacs", image_size=5)
    assert pacs.x.shape == (12, 3, 5, 5)
    assert pacs.x.dtype == torch.uint8
    assert (pacs.classes, pacs.group_names, pacs.domains) == (CLASSES, DOMAINS, True)
    assert (pacs.train, pacs.test, pacs.mean) == (None, None, SOURCES["pacs"].mean)
    assert pacs.groups is not None
    seen = {(d, c): x.unique().tolist() for d, c, x in zip(pacs.groups.tolist(), pacs.y.tolist(), pacs.x, strict=True)}
    assert seen == {key: [grey] for key, grey in SMALL.items()}
    assert sources.load("pacs").x.shape == (12, 3, 96, 96)
    assert sources.get("pacs") == found
    counts = zip(DOMAINS, (1670, 2048, 2344, 3929), strict=True)
    assert sources.check("pacs") == (
        [
            "pacs: samples must be 9991. Got 12.",
            "pacs: labels must be 9991. Got 12.",
            "pacs: training samples must be 9991. Got 12.",
            "pacs: classes must be [0, 1, 2, 3, 4, 5, 6]. Got [0, 1, 6].",
        ]
        if place.endswith(".npz")
        else [f"{found / domain} must hold {count} images. Got 3." for domain, count in counts]
    )
    assert next(source.cached for source in sources.sources() if source.name == "pacs")


def test_each_domain_of_pacs_is_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive(tmp_path / "pacs_96px.npz")
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    fed = Experiment("local", "pacs", image_size=4, external="pacs").federation()
    assert [client.name for client in fed.clients] == list(DOMAINS)
    assert fed.shape == (3, 4, 4)
    assert [len(client.train) + len(client.test) for client in fed.clients] == [3] * 4
    assert fed.external is not None
    assert fed.external.shape == (3, 4, 4)
    assert len(Experiment("local", "pacs", image_size=4, clients=2, partition="iid").federation().clients) == 2


def test_pacs_is_resized_as_pillow_does_it(tmp_path: Path) -> None:
    drawn = Image.fromarray(RNG.integers(0, 256, (96, 96, 3)).astype(np.uint8))
    stream = io.BytesIO()
    drawn.save(stream, "png")
    content = np.frombuffer(stream.getvalue(), np.uint8)
    one = {"jpeg": content, "offsets": np.array([0, len(content)]), "labels": np.array([0]), "domains": np.array([0])}
    archive(tmp_path / "pacs_96px.npz", **one)
    want = np.asarray(drawn.resize((64, 64), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    np.testing.assert_array_equal(sources.load("pacs", tmp_path, 64).x[0].numpy(), want)
    np.testing.assert_array_equal(sources.load("pacs", tmp_path).x[0].numpy(), np.asarray(drawn).transpose(2, 0, 1))


def test_an_archive_may_hold_pixels_numbers_and_a_split(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (12, 4, 6, 3)).astype(np.uint8)
    without: dict[str, Any] = dict.fromkeys(["jpeg", "offsets", "domains", "class_names", "domain_names"])
    split = np.arange(12) % 2
    pool = read_archive(archive(tmp_path / "a.npz", images=pixels, split=split, labels=np.arange(12), **without))
    np.testing.assert_array_equal(pool.x.numpy(), pixels.transpose(0, 3, 1, 2))
    assert pool.labels.tolist() == list(map(str, range(12)))
    assert pool.test.tolist() == [False, True] * 6
    assert pool.clients == ()
    grey = read_archive(archive(tmp_path / "b.npz", images=pixels[..., 0], **without), image_size=2)
    assert grey.x.shape == (12, 1, 2, 2)
    assert read_archive(tmp_path / "b.npz", mode="RGB").x.shape == (12, 3, 4, 6)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": None}, "must hold the array labels. Got jpeg, offsets, domains,"),
        ({"offsets": None}, "must hold the array offsets. Got jpeg, labels,"),
        ({"domain_names": None}, "must hold the array domain_names."),
        ({"labels": np.zeros(3, np.int64)}, "must be 12 whole numbers. Got int64 of shape (3,)."),
        ({"labels": np.full(12, 0.5)}, "must be 12 whole numbers. Got float64"),
        ({"labels": np.full(12, 7)}, "must be in 0..6. Got 7..7."),
        ({"domains": np.full(12, -1)}, "must be in 0..3. Got -1..-1."),
        ({"class_names": None, "labels": np.full(12, -1)}, "must be >= 0. Got -1..-1."),
        ({"class_names": np.array(["cat"] * 7)}, "Every label must be one of the classes dog, elephant,"),
        ({"domain_names": np.array(["photo", "clipart", "a", "b"])}, "must be among photo, art_painting, cartoon, sk"),
        ({"domains": None}, "must be among photo, art_painting, cartoon, sketch. Got none."),
        ({"offsets": np.arange(1, 14)}, "must rise from 0 to "),
        ({"jpeg": np.zeros(5, np.uint8), "offsets": np.array([0, 4, 2, 5])}, "must rise from 0 to 5, the number of"),
        ({"offsets": np.array([], np.int64)}, "must rise from 0 to "),
        ({"jpeg": np.zeros((0, 2))}, "must be bytes in a row. Got float64 of shape (0, 2)."),
        ({"jpeg": np.zeros(0, np.uint8), "offsets": np.array([0])}, "must hold at least one image. Got none."),
        ({"jpeg": np.zeros(12, np.uint8), "offsets": np.arange(13)}, "Image 0 of "),
        ({"images": np.zeros((12, 4, 4, 2), np.uint8)}, "(n, h, w) or (n, h, w, 3). Got uint8 of shape (12, 4, 4, 2)."),
        ({"images": np.zeros((12, 4, 4))}, "Got float64 of shape (12, 4, 4)."),
        ({"labels": np.array([{}] * 12)}, "is damaged or no .npz file of plain arrays."),
    ],
)
def test_a_bad_archive_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    archive(tmp_path / "pacs_96px.npz", **changes)
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    for call in (sources.load, sources.get):
        with pytest.raises(UserError) as error:
            call("pacs")
        assert sentence in str(error.value)
        assert "\n" not in str(error.value)
    assert sources.check("pacs") == [str(error.value)]


@pytest.mark.parametrize("damage", [b"", b"rubbish", "cut", "npy"])
def test_a_file_that_is_no_archive(tmp_path: Path, damage: bytes | str) -> None:
    path = archive(tmp_path / "pacs_96px.npz")
    if damage == "npy":
        with path.open("wb") as stream:
            np.save(stream, np.zeros(3))
    else:
        path.write_bytes(damage if isinstance(damage, bytes) else path.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"pacs_96px\.npz is damaged or no \.npz file of plain arrays\.$"):
        sources.load("pacs", tmp_path)


def test_pacs_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where to get it is in `test_bad_input`; a folder of its name must hold it."""
    monkeypatch.setenv("PFED_DATA", str(tmp_path))
    needed = "the folders photo, art_painting, cartoon, sketch or the file pacs_96px.npz"
    with pytest.raises(UserError, match=f"PACS is not here and cannot be fetched: .* put {needed} into a folder"):
        sources.load("pacs")
    tree(tmp_path / "pacs")
    for path in (tmp_path / "pacs" / "sketch").rglob("*.png"):
        path.unlink()
    with pytest.raises(UserError, match=r"Client folder .*sketch must hold images in class folders. Got none."):
        sources.load("pacs")
    (tmp_path / "pacs" / "sketch").rename(tmp_path / "pacs" / "sketches")
    with pytest.raises(UserError, match=f"pacs does not hold PACS: it needs {needed}."):
        sources.load("pacs")
    assert sources.check("pacs") == [f"{tmp_path / 'pacs'} does not hold PACS: it needs {needed}."]
    assert not next(source.cached for source in sources.sources() if source.name == "pacs")


def test_a_size_below_one(tmp_path: Path) -> None:
    for name in ("digits", "pacs"):
        with pytest.raises(UserError, match=r"image_size must be >= 1. Got 0"):
            sources.load(name, archive(tmp_path / "pacs_96px.npz").parent if name == "pacs" else None, image_size=0)


network = pytest.mark.skipif(
    os.environ.get("PFED_NETWORK_TESTS") != "1", reason="set PFED_NETWORK_TESTS=1 to fetch for real"
)


@pytest.mark.network
@network
@pytest.mark.parametrize("name", [source.name for source in SOURCES.values() if not source.by_hand])
def test_every_data_set_can_really_be_had(name: str) -> None:
    sources.get(name)
    assert sources.check(name) == []
    dataset, source = sources.load(name), SOURCES[name]
    train = dataset.x if dataset.train is None else dataset.x[dataset.train]
    scaled = train.double().transpose(0, 1).flatten(1) / 255  # (channels, pixels)
    assert scaled.mean(1).tolist() == pytest.approx(source.mean, abs=1e-4)
    assert scaled.std(1).tolist() == pytest.approx(source.std, abs=1e-4)


PACKAGES = [
    (s.name, i) for s in SOURCES.values() for i, (route, _) in enumerate(s.routes) if isinstance(route, Package)
]


@pytest.mark.network
@network
@pytest.mark.parametrize(("name", "route"), PACKAGES)
def test_every_package_serves_by_itself(name: str, route: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES[name]
    monkeypatch.setitem(SOURCES, name, replace(source, routes=source.routes[route : route + 1]))
    sources.get(name)
    assert sources.check(name) == []
