"""Where images with boxes come from: the domains of UODB, .npz files, and folders of one's own."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_helpers import DOG, coco, found, picture, voc, xml

from pfed import UserError
from pfed.data import uodb
from pfed.data.box_archives import read_boxes_archive
from pfed.data.user_boxes import open_boxes


@pytest.fixture
def benchmark(tmp_path: Path) -> Path:
    """Three domains of UODB as their archives unpack."""
    car, van, outside = ("Car", 3, 5, 10, 20), ("Van", 1, 1, 9, 9), ("Cyclist", 60, 1, 70, 9)
    voc(tmp_path / "KITTIVOC", {"a": [van, car, outside], "b": [car]}, train="a", test="b")
    voc(tmp_path / "widerface" / "VOCdevkit", {c: [("face", 4, 6, 20, 20)] for c in "abcde"}, train="abcd", val="e")
    coco(tmp_path / "coco", "instances_valminusminival2014.json", "images/val2014")
    coco(tmp_path / "coco", "instances_minival2014.json", "images/val2014")
    return tmp_path


def test_three_domains_of_uodb(benchmark: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Labels in small letters; a van is no class there; a box without area inside its image is told and left out."""
    with caplog.at_level(logging.WARNING):
        made = uodb.uodb(benchmark, 40, ["kitti", "widerface", "coco"])
    assert made.boxes is not None
    assert made.groups is not None
    assert made.train is not None
    assert made.test is not None
    assert (made.group_names, made.domains) == (("kitti", "widerface", "coco"), True)
    assert made.group_classes == (("pedestrian", "cyclist", "car"), ("face",), ("car", "bus", "person"))
    assert made.classes == ("pedestrian", "cyclist", "car", "face", "bus", "person")
    assert found(made.boxes[0]) == [[2, 2, 4, 10, 20, 0]]
    assert found(made.boxes[2]) == [[0, 4, 6, 20, 20, 0]]  # counted from 0
    assert made.groups.tolist() == [0] * 2 + [1] * 5 + [2] * 4
    assert made.test.tolist() == [1, 6, 9, 10]
    assert made.y.tolist() == [2, 2, 3, 3, 3, 3, 3, 0, 5, 0, 5]
    assert [record.message.split(",")[0] for record in caplog.records] == ["kitti: boxes left out"]


def test_a_limit_takes_images_evenly(benchmark: Path) -> None:
    annotations = benchmark / "widerface" / "VOCdevkit" / "Annotations"
    for index, name in enumerate("abcde"):
        (annotations / f"{name}.xml").write_text(xml([("face", 0, 0, 20 + index, 20)]))
    few = uodb.uodb(benchmark, 40, ["widerface", "kitti"], limit=2)
    assert few.boxes is not None
    assert few.boxes[:, 0, 3].tolist() == [20, 22, 24, 10, 10]  # of a, c and the test image e; two of kitti


def test_missing_domains_of_uodb(benchmark: Path) -> None:
    voc(benchmark / "VOCdevkit2007" / "VOC2007", {"a": [DOG]})
    with pytest.raises(UserError, match=r"Missing: voc \(VOCdevkit2012/VOC2012\), lisa \(LISA\)\. There: kitti, wid"):
        uodb.uodb(benchmark, 8, ["voc", "kitti", "lisa"])
    with pytest.raises(UserError, match="There is no domain of UODB 'kiti'"):
        uodb.uodb(benchmark, 8, ["kiti"])
    with pytest.raises(UserError, match="limit of images must be >= 1"):
        uodb.uodb(benchmark, 8, ["kitti"], limit=0)
    assert len(uodb.DOMAINS) == len({*uodb.VOC_DOMAINS, uodb.COCO}) == 11
    counts = [len(uodb.VOC_DOMAINS[name].classes) for name in uodb.DOMAINS if name != uodb.COCO]
    assert counts == [3, 1, 20, 4, 15, 6, 20, 6, 11, 1]


def archive(path: Path, **changes: Any) -> Path:
    """Three images of 20x10 pixels; the middle one has two boxes, one of them over the edge, the last none inside."""
    files = []
    for _ in range(3):
        stream = io.BytesIO()
        picture(20, 10).save(stream, "JPEG")
        files.append(stream.getvalue())
    boxes = [[1, 1, 2, 2, 6, 8, 1], [0, 0, 0, 0, 10, 10, 0], [1, 0, 10, 4, 20.5, 10, 0], [2, 1, 30, 0, 40, 9, 0]]
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "boxes": np.array(boxes, np.float32),
        "class_names": np.array(["cat", "dog"]),
    } | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_archive(tmp_path: Path) -> None:
    scenes = read_boxes_archive(archive(tmp_path / "pets.npz"), 40, train=2)
    assert (scenes.name, scenes.classes, scenes.test.tolist()) == ("pets", ("cat", "dog"), [False, False, True])
    boxes = [found(own) for own in scenes.boxes]
    assert boxes == [[[0, 0, 0, 20, 20, 0]], [[1, 4, 4, 12, 16, 1], [0, 20, 8, 40, 20, 0]], []]
    assert not read_boxes_archive(tmp_path / "pets.npz", 8, train=3).test.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boxes": None}, "must hold the array boxes"),
        ({"class_names": None}, "must hold the array class_names"),
        ({"boxes": np.zeros((2, 6))}, r"of shape \(m, 7\)"),
        ({"boxes": np.full((1, 7), np.nan)}, "finite"),
        ({"boxes": np.array([[3.0, 0, 1, 1, 2, 2, 0]])}, r"image of each box of .*must be in 0\.\.2\. Got 3"),
        ({"boxes": np.array([[0.0, 2, 1, 1, 2, 2, 0]])}, r"class of each box of .*must be in 0\.\.1\. Got 2"),
        ({"offsets": np.array([0, 1])}, "offsets of"),
        ({"jpeg": np.zeros(8, np.uint8), "offsets": np.array([0, 8]), "boxes": np.zeros((1, 7))}, "as an image"),
    ],
)
def test_wrong_archives(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        read_boxes_archive(archive(tmp_path / "pets.npz", **changes), 8, train=1)
    assert "pets.npz" in str(raised.value)


def test_wrong_archive_files(tmp_path: Path) -> None:
    path = archive(tmp_path / "pets.npz")
    for train in (0, 4):
        with pytest.raises(UserError, match=rf"training images of .*pets\.npz must be 1\.\.3\. Got {train}"):
            read_boxes_archive(path, 8, train)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged"):
        read_boxes_archive(path, 8, 1)
    with pytest.raises(UserError, match="There is no file"):
        read_boxes_archive(tmp_path / "none.npz", 8, 1)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    """One folder is a pool to be divided; folders in it are clients, each with its own classes and layout."""
    voc(tmp_path / "Oslo", {"a": [DOG], "b": [("cow", 1, 1, 9, 9)]}, train="a", val="b")
    coco(tmp_path / "Rome")
    (tmp_path / ".cache").mkdir()
    one, two = open_boxes(tmp_path / "Oslo", 8), open_boxes(str(tmp_path), 8)
    assert (one.name, one.domains, one.group_classes, one.classes) == ("Oslo", False, (), ("cow", "dog"))
    assert one.test is not None
    assert one.test.tolist() == [1]
    assert (two.domains, two.group_names) == (True, ("Oslo", "Rome"))
    assert two.group_classes == (("cow", "dog"), ("car", "bus", "person"))
    assert two.train is two.test is None  # Rome has no test images
    alike = open_boxes(tmp_path, 8, ["person", "dog"])
    assert (alike.classes, alike.group_classes, alike.domains) == (("person", "dog"), (), True)
    (tmp_path / "notes").mkdir()
    with pytest.raises(UserError, match="Got a folder 'notes' with neither"):
        open_boxes(tmp_path, 8)
    with pytest.raises(UserError, match="Got no folder at all"):
        open_boxes(tmp_path / "notes", 8)
    with pytest.raises(UserError, match="There is no folder"):
        open_boxes(tmp_path / "none", 8)
    (tmp_path / "Oslo" / "Annotations" / "a.xml").write_text(xml([DOG, ("dog", 50, 1, 60, 5)]))
    with pytest.raises(UserError, match="inside the image"):
        open_boxes(tmp_path / "Oslo", 8)
    assert open_boxes(tmp_path / "Oslo", 8, strict=False).x.shape == (2, 3, 8, 8)
