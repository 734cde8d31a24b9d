"""The papers' image collections as their authors publish them: folders, lists of files, tables of ratings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from PIL import Image

from pfed import Experiment, UserError
from pfed.data import pictures, sources
from pfed.data.base import Dataset
from pfed.data.catalog import SOURCES


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PFED_DATA", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def draw(path: Path, grey: int) -> None:
    """An even picture: PNG, TIFF and JPEG keep it as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), (grey, grey, grey)).save(path)


def seen(data: Dataset) -> list[tuple[str, str, int]]:
    """Client, class and grey of each image, in order."""
    assert data.groups is not None
    return [
        (data.group_names[group], data.classes[label], int(x[0, 0, 0]))
        for group, label, x in zip(data.groups.tolist(), data.y.tolist(), data.x, strict=True)
    ]


def rows(data: Dataset) -> tuple[list[int], list[int]]:
    assert data.train is not None
    assert data.test is not None
    return data.train.tolist(), data.test.tolist()


@pytest.mark.parametrize("place", ["pacs_label", "splits", "", "kfold"])
def test_pacs_has_its_official_lists(root: Path, place: str) -> None:
    """Training and validation lists, in their order; the third list, all images of a domain, is left alone."""
    lists = root / "pacs" / place
    lists.mkdir(parents=True, exist_ok=True)
    for d, domain in enumerate(SOURCES["pacs"].domains):
        for i, label in enumerate(("dog", "house", "person")):
            draw(root / "pacs" / "kfold" / domain / label / f"pic_{i:03}.jpg", 10 * d + i)
        named = [f"{domain}/{label}/pic_{i:03}.jpg {n}" for i, (label, n) in enumerate((("dog", 1), ("house", 6)))]
        (lists / f"{domain}_train_kfold.txt").write_text("\n".join(reversed(named)) + "\n")
        (lists / f"{domain}_crossval_kfold.txt").write_text(f"{domain}/person/pic_002.jpg 7\n")
        (lists / f"{domain}_test_kfold.txt").write_text("nonsense")
    data = sources.load("pacs", image_size=4)
    assert seen(data)[:3] == [("photo", "house", 1), ("photo", "dog", 0), ("photo", "person", 2)]
    assert rows(data)[1] == [2, 5, 8, 11]
    clients = Experiment("local", "pacs", image_size=4).federation().clients
    assert [(client.name, len(client.train), len(client.test)) for client in clients] == [
        (domain, 2, 1) for domain in SOURCES["pacs"].domains
    ]
    (lists / "photo_train_kfold.txt").unlink()
    assert sources.load("pacs", image_size=4).test is None


@pytest.mark.parametrize("last", ["Real World", "Real_World", "RealWorld"])
def test_office_home(root: Path, last: str) -> None:
    for d, folder in enumerate(("Art", "Clipart", "Product", last)):
        for i, label in enumerate(("Alarm_Clock", "TV", "Webcam")):
            draw(root / "office-home" / "OfficeHomeDataset_10072016" / folder / label / "00001.jpg", 10 * d + i)
    (root / "office-home" / "OfficeHomeDataset_10072016" / "ImageInfo.csv").write_text("")
    data = sources.load("office-home", image_size=4)
    assert len(data.classes) == 65
    names = ("Art", "Clipart", "Product", "Real World")
    assert seen(data) == [
        (name, label, 10 * d + i)
        for d, name in enumerate(names)
        for i, label in enumerate(("Alarm_Clock", "TV", "Webcam"))
    ]
    assert (data.domains, data.test, data.x.shape[1:]) == (True, None, (3, 4, 4))
    assert "OfficeHomeDataset_10072016/Art must hold 2427 images. Got 3." in sources.check("office-home")[0]
    assert len(sources.check("office-home")) == 4


def test_office_caltech_10_knows_two_spellings(root: Path) -> None:
    for d, domain in enumerate(("amazon", "caltech", "dslr", "webcam")):
        for i, label in enumerate(("backpack" if d % 2 else "back_pack", "laptop" if d % 2 else "laptop_computer")):
            draw(root / "office_caltech_10" / domain / label / "frame_0001.jpg", 10 * d + i)
    data = sources.load("office-caltech-10", image_size=4)
    assert [label for _, label, _ in seen(data)] == ["back_pack", "laptop_computer"] * 4
    assert [client for client, _, _ in seen(data)][::2] == ["amazon", "caltech", "dslr", "webcam"]


@pytest.mark.parametrize("place", ["", "splits"])
def test_domainnet_has_lists_and_ten_classes(root: Path, place: str) -> None:
    base = root / "DomainNet"
    (base / place).mkdir(parents=True)
    for d, domain in enumerate(SOURCES["domainnet-10"].domains):
        for i, label in enumerate(("bird", "zebra", "aircraft_carrier")):
            draw(base / domain / label / f"{domain}_{i:03}_000001.jpg", 10 * d + i)
        train = [f"{domain}/zebra/{domain}_001_000001.jpg 344", f"{domain}/aircraft_carrier/not_there.jpg 0"]
        (base / place / f"{domain}_train.txt").write_text("\n".join(train))
        (base / place / f"{domain}_test.txt").write_text(f"{domain}/bird/{domain}_000_000001.jpg 20\n\n")
    data = sources.load("domainnet-10", image_size=4)
    assert seen(data)[:4] == [
        ("clipart", "zebra", 1),
        ("clipart", "bird", 0),
        ("infograph", "zebra", 11),
        ("infograph", "bird", 10),
    ]
    assert rows(data) == ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])
    (base / place / "real_test.txt").write_text("real/bird 20\n")
    with pytest.raises(UserError, match=r"real_test.txt must be DOMAIN/CLASS/image and a number. Got 'real/bird'"):
        sources.load("domainnet-10")
    (base / place / "real_test.txt").write_text("real/../../bird/x.jpg 20\n")
    with pytest.raises(UserError, match="must be DOMAIN/CLASS/image"):
        sources.load("domainnet-10")


def test_mnist_m_has_images_and_lists_of_labels(root: Path) -> None:
    base = root / "mnist_m"
    for kind, labels in (("train", [5, 0, 4]), ("test", [7])):
        for i, label in enumerate(labels):
            draw(base / f"mnist_m_{kind}" / f"{i:08}.png", 10 * label + i)
        text = "".join(f"{i:08}.png {label}\n" for i, label in enumerate(labels))
        (base / f"mnist_m_{kind}_labels.txt").write_text(text)
    data = sources.load("mnist-m")
    assert (data.x.shape, data.y.tolist()) == ((4, 3, 28, 28), [5, 0, 4, 7])
    assert data.x[:, 0, 0, 0].tolist() == [50, 1, 42, 70]
    assert rows(data) == ([0, 1, 2], [3])
    (base / "mnist_m_test_labels.txt").write_text("00000000.png\n")
    with pytest.raises(UserError, match=r"must be a name and a number. Got '00000000.png'"):
        sources.load("mnist-m")
    (base / "mnist_m_test_labels.txt").write_text("00000009.png 3\n")
    with pytest.raises(UserError, match=r"There is no image .*00000009.png"):
        sources.load("mnist-m")


def rated(path: Path, table: Iterable[tuple[str, str, object]], header: str = " worker, imagePair, score") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(f"{rater}, {image}, {rating}" for rater, image, rating in table)]))


@pytest.mark.parametrize("place", ["40K", "FLICKR-AES-001/40K"])
def test_flickr_aes_has_a_client_for_each_rater(root: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Who rated too few or too many images is left out; a rating is a class, other for each rater."""
    monkeypatch.setattr(pictures, "FLICKR_LEAST", 2)
    monkeypatch.setattr(pictures, "FLICKR_MOST", 3)
    base = root / "flickr-aes"
    for i in range(4):
        draw(base / place / f"{i}.jpg", i)
    table = [
        ("B", "1.jpg", 5),
        ("B", "0.jpg", 1),
        ("A", "1.jpg", 2),
        ("A", "2.jpg", 4),
        ("A", "3.jpg", 2),
        ("C", "0.jpg", 3),
    ]
    rated(base / pictures.FLICKR_TABLE, [*table, *(("D", f"{i}.jpg", 1) for i in range(4))])
    data = sources.load("flickr-aes", image_size=4)
    assert seen(data) == [("A", "2", 1), ("A", "4", 2), ("A", "2", 3), ("B", "1", 0), ("B", "5", 1)]
    assert data.classes == tuple("12345")
    clients = Experiment("local", "flickr-aes", image_size=4, partition="natural").federation().clients
    assert [client.name for client in clients] == ["A", "B"]


@pytest.mark.parametrize(
    ("table", "header", "message"),
    [
        ([("A", "0.jpg", 6)], " worker, imagePair, score", r"a rating in 1..5. Got 'A, 0.jpg, 6'"),
        ([("A", "0.jpg", "3, 4")], "worker,imagePair,score", "a rater, an image and a rating"),
        ([], "worker, image", "must have the columns worker, imagePair, score. Got worker, image"),
        ([("A", "0.jpg", 3)], "worker,imagePair,score", "must have raters of 60 to 290 images. Got none"),
    ],
)
def test_bad_tables_of_ratings(root: Path, table: list[tuple[str, str, object]], header: str, message: str) -> None:
    (root / "flickr-aes" / "40K").mkdir(parents=True)
    rated(root / "flickr-aes" / pictures.FLICKR_TABLE, table, header)
    with pytest.raises(UserError, match=message):
        sources.load("flickr-aes")


def test_real_cur_has_albums_with_a_folder_for_each_rating(root: Path) -> None:
    for a, album in enumerate(("album1", "album2")):
        for rating in (1, 5):
            draw(root / "real-cur" / album / str(rating) / "photo.jpg", 10 * a + rating)
    data = sources.load("real-cur", image_size=4)
    assert seen(data) == [("album1", "1", 1), ("album1", "5", 5), ("album2", "1", 11), ("album2", "5", 15)]


def test_real_cur_serves_as_external_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "FLICKR_LEAST", 2)
    for i in range(3):
        draw(root / "flickr-aes" / "40K" / f"{i}.jpg", i)
    rated(root / "flickr-aes" / pictures.FLICKR_TABLE, [("A", f"{i}.jpg", i + 1) for i in range(3)])
    draw(root / "real-cur" / "album" / "4" / "photo.jpg", 9)
    made = Experiment("local", "flickr-aes", partition="natural", external="real-cur", image_size=4).federation()
    assert made.external is not None
    assert made.external.labels.tolist() == [3]
    assert made.external.shape == made.shape == (3, 4, 4)


TISSUES = SOURCES["histology"].classes


def patches(folder: Path, first: int, each: int = 1) -> None:
    for c, tissue in enumerate(TISSUES):
        for i in range(each):
            draw(folder / tissue / f"{tissue}-{i:03}.tif", first + c + 10 * i)


def test_histology_has_a_client_for_each_centre(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two public ones first, others after them; with a cap on the clients the rest is external."""
    base = root / "histology"
    patches(base / "NCT-CRC-HE-100K", 0, each=4)
    patches(base / "CRC-VAL-HE-7K", 100)
    patches(base / "A-clinic", 200)
    draw(base / "NCT-CRC-HE-100K" / "notes" / "a.tif", 0)
    (base / "scripts").mkdir()
    monkeypatch.setattr(pictures, "HISTOLOGY_MOST", 18)
    data = sources.load("histology", image_size=4)
    assert data.group_names == ("NCT-CRC-HE-100K", "CRC-VAL-HE-7K", "A-clinic")
    assert data.groups is not None
    assert data.groups.bincount().tolist() == [18, 9, 9]
    assert [entry[1:] for entry in seen(data)[:3]] == [("ADI", 0), ("ADI", 20), ("BACK", 1)]
    made = Experiment("local", "histology", image_size=4, clients=2, test_fraction=0.5).federation()
    assert [client.name for client in made.clients] == ["NCT-CRC-HE-100K", "CRC-VAL-HE-7K"]
    assert made.external is not None
    assert len(made.external) > 0
    assert "NCT-CRC-HE-100K must hold 100000 images. Got 37." in sources.check("histology")[0]


@pytest.mark.parametrize(
    "name", ["office-home", "office-caltech-10", "domainnet-10", "flickr-aes", "real-cur", "histology"]
)
def test_what_is_not_there_is_told_with_its_origin(name: str) -> None:
    source = SOURCES[name]
    with pytest.raises(UserError) as caught:
        sources.load(name)
    said = str(caught.value)
    assert said.startswith(f"{source.title} is not here and cannot be fetched: get it from {source.origin}, put the f")
    assert said.endswith(f"into a folder named {name} and set PFED_DATA to the folder above it.")
