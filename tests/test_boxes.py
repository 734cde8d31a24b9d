"""Images with boxes: the letterbox, VOC and COCO files, and the data set made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_helpers import DOG, Object, coco, found, picture, voc, xml

from pfed import UserError, machine
from pfed.data.boxes import GREY, Box, Picture, Scenes, letterbox, padded, read_scenes, to_dataset
from pfed.data.coco import read_coco
from pfed.data.voc import read_voc, read_xml, voc_pictures


@pytest.mark.parametrize(
    ("image", "rectangle", "size", "expected"),
    [
        ((100, 60), (20, 10, 60, 40), 50, (10, 5, 30, 20)),  # half as large
        ((30, 50), (5, 10, 20, 30), 100, (10, 20, 40, 60)),  # twice as large, upright
        ((40, 40), (7, 8, 23, 32), 40, (7, 8, 23, 32)),  # as it is
        ((90, 90), (0, 30, 90, 60), 30, (0, 10, 30, 20)),  # from edge to edge
    ],
)
def test_a_box_keeps_to_its_pixels(
    image: tuple[int, int], rectangle: tuple[int, ...], size: int, expected: tuple[int, ...]
) -> None:
    pixels, boxes = letterbox(picture(*image, rectangle), np.array([[3, *rectangle, 1]], np.float32), size)
    assert boxes.tolist() == [[3, *expected, 1]]
    width, height = (side * size // max(image) for side in image)
    white = pixels[:, :height, :width].min(0) > 127
    x1, y1, x2, y2 = expected
    inside = np.zeros_like(white)
    inside[y1:y2, x1:x2] = True
    np.testing.assert_array_equal(white, inside)
    pixels[:, :height, :width] = GREY
    assert (pixels == GREY).all()


def test_sides_are_rounded_and_boxes_follow() -> None:
    """33x10 to 16: the short side is 4.85, so 5; a box as large as the image stays so."""
    pixels, boxes = letterbox(picture(33, 10, (0, 0, 33, 10)), np.array([[0, 0, 0, 33, 10, 0]], np.float32), 16)
    np.testing.assert_allclose(boxes, [[0, 0, 0, 16, 5, 0]])
    assert (pixels[:, :5] == 255).all()
    assert (pixels[:, 5:] == GREY).all()
    assert letterbox(picture(400, 1), np.zeros((0, 6), np.float32), 16)[0][0, :, 0].tolist() == [0] + [GREY] * 15


def test_voc_folder(tmp_path: Path) -> None:
    """Corners in the files count from 1 and include the last pixel; images of 40x30 become 80x60 in 80x80."""
    hard = ("cat", 1, 1, 40, 30, "<difficult>1</difficult>", "<truncated>1</truncated>", "<pose>Unspecified</pose>")
    folder = voc(tmp_path / "pets", {"b": [DOG, hard], "a": [DOG], "c": []}, train=["b", "a"], val=["c"])
    scenes = read_voc(folder, 80)
    assert (scenes.name, scenes.classes, scenes.test.tolist()) == ("pets", ("cat", "dog"), [False, False, True])
    assert (scenes.x.shape, scenes.x.dtype, scenes.boxes.shape) == ((3, 3, 80, 80), torch.uint8, (3, 2, 6))
    assert [found(own) for own in scenes.boxes] == [
        [[1, 4, 8, 20, 40, 0]],
        [[1, 4, 8, 20, 40, 0], [0, 0, 0, 80, 60, 1]],
        [],
    ]
    assert scenes.boxes[2].tolist() == [[-1, 0, 0, 0, 0, 0]] * 2
    assert read_voc(folder, 80, ["dog"]).boxes[1].tolist() == [[0, 4, 8, 20, 40, 0]]


@pytest.mark.parametrize(
    ("sets", "train", "test"),
    [
        ({}, "abcd", ""),
        ({"train": "ab", "val": "c"}, "ab", "c"),
        ({"train": "ab", "val": "c", "trainval": "abc", "test": "d"}, "abc", "d"),
        ({"train": "ab", "val": "c", "test": "d"}, "abc", "d"),
        ({"train": "abc", "test": "cd"}, "ab", "cd"),  # an image in both lists is not trained on
        ({"trainval": "dc"}, "cd", ""),
    ],
)
def test_lists_of_a_voc_folder(tmp_path: Path, sets: dict[str, str], train: str, test: str) -> None:
    folder = voc(tmp_path, {name: [(name, 1, 1, 5, 5)] for name in "dbca"}, ".png", **sets)
    (folder / "Annotations" / "._a.xml").write_text("left by another system")
    scenes = read_voc(folder, 8)
    images = "".join(scenes.classes[int(own[0, 0])] for own in scenes.boxes)
    assert images == train + test
    assert scenes.test.tolist() == [False] * len(train) + [True] * len(test)


def test_image_by_any_suffix_and_pixels_counted_from_zero(tmp_path: Path) -> None:
    folder = voc(tmp_path, {"a": [DOG]}, ".JPEG")
    pictures = voc_pictures(voc(folder, {"b": [DOG]}, ".png"), [], [], first=0)
    assert [Path(str(one.image)).name for one in pictures] == ["a.JPEG", "b.png"]
    assert pictures[0].boxes[0].corners == (3, 5, 10, 20)
    assert pictures[0].size == (40, 30)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("<annotation><object>", "cannot be read as XML"),
        ("", "cannot be read as XML"),
        ('<?xml version="1.0" encoding="no-such"?><annotation/>', "cannot be read as XML"),
        ('<?xml version="1.0" encoding="gbk"?><annotation/>', "cannot be read as XML"),
        ("<html></html>", "must hold an <annotation>. Got <html>"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><annotation>&b;</annotation>', "without entities"),
        (xml([("", 1, 1, 2, 2)]), "must have a <name>"),
        (xml([("dog", "", 1, 2, 2)]), "<bndbox/xmin> of an <object> in"),
        (xml([("dog", 1, 1, "wide", 2)]), "must be a number. Got 'wide'"),
        (xml([("dog", 1, 1, 2, "nan")]), "must be a number. Got 'nan'"),
        (xml([(*DOG, "<difficult>very</difficult>")]), "must be a number. Got 'very'"),
        (xml([("dog", 10, 1, 9, 5)]), r"must have an area .* Got 'dog' from \(9, 0\) to \(9, 5\)"),
        (xml([("dog", 30, 1, 45, 5)]), "lie inside the image of 40x30 pixels"),
        (xml([("dog", 50, 1, 60, 5)]), "lie inside the image of 40x30 pixels"),
        (xml([DOG], size=(30, 40)), r"is about an image of \(30, 40\)"),
        (xml([]), "must hold at least one box. Got no box"),
    ],
)
def test_wrong_annotations_are_named(tmp_path: Path, content: str, words: str) -> None:
    folder = voc(tmp_path / "pets", {"a": []})
    (folder / "Annotations" / "a.xml").write_text(content)
    with pytest.raises(UserError, match=words) as raised:
        read_voc(folder, 32)
    assert "a.xml" in str(raised.value) or "pets" in str(raised.value)


def test_wrong_voc_folders(tmp_path: Path) -> None:
    folder = voc(tmp_path / "pets", {"a": [DOG]}, train=["a", "b"])
    with pytest.raises(UserError, match=r"There is no annotation .*b\.xml"):
        read_voc(folder, 32)
    (folder / "Annotations" / "b.xml").write_text(xml([DOG]))
    with pytest.raises(UserError, match=r"no image of .*b\.xml"):
        read_voc(folder, 32)
    (folder / "JPEGImages" / "b.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"b\.png cannot be read as an image"):
        read_voc(folder, 32)
    with pytest.raises(UserError, match=r"no list of images .*other\.txt"):
        voc_pictures(folder, ["other"], [])
    with pytest.raises(UserError, match="JPEGImages and Annotations"):
        voc_pictures(tmp_path, [], [])
    good = voc(tmp_path / "good", {"a": [DOG]})
    for size, classes, words in (
        (0, None, ">= 1. Got 0"),
        (8, ["cow"], "box of cow. Got dog"),
        (8, ["a", "a"], "differ"),
    ):
        with pytest.raises(UserError, match=words):
            read_voc(good, size, classes)


def test_rounding_may_move_a_box_over_the_edge(tmp_path: Path) -> None:
    """xmin 0 and xmax 41 are a pixel too far in an image 40 wide; sizes may be missing or zero."""
    folder = voc(tmp_path, {"a": [("dog", 0, 0, 41, 31)]})
    assert found(read_voc(folder, 40).boxes[0]) == [[0, 0, 0, 40, 30, 0]]
    for size in (None, (0, 0)):
        (folder / "Annotations" / "a.xml").write_text(xml([DOG], size=size))
        assert read_xml(folder / "Annotations" / "a.xml")[1] is None
        assert len(found(read_voc(folder, 40).boxes[0])) == 1


def test_coco_folder(tmp_path: Path) -> None:
    """Images and categories in order of their ids; a crowd is difficult; 40x30 becomes 20x15."""
    scenes = read_coco(coco(tmp_path), 20)
    assert (scenes.classes, scenes.test.any().item()) == (("car", "bus", "person"), False)
    assert [found(own) for own in scenes.boxes] == [[], [[0, 1, 2, 6.25, 6, 0], [2, 0, 0, 20, 15, 1]]]
    assert (scenes.x[0, 0, 0, :20] > 127).tolist() == [False] * 2 + [True] * 18  # image 4 is white from pixel 4 on


@pytest.mark.parametrize("images", ["images", "images/val2017", "val2017", "other", "."])
def test_sets_of_a_coco_folder(tmp_path: Path, images: str) -> None:
    """Captions have no boxes; where there are instances they are not read."""
    folder = coco(coco(tmp_path, "instances_val2017.json", images), "instances_train2017.json", "images/train2017")
    (folder / "annotations" / "captions_val2017.json").write_text("{}")
    assert read_coco(folder, 8).test.tolist() == [False, False, True, True]
    (folder / "annotations" / "instances_train2017.json").unlink()
    assert read_coco(folder, 8).test.tolist() == [False, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"annotations": None}, "must hold a list 'annotations'"),
        ({"images": [3]}, "Every entry of 'images' .* must be an object"),
        ({"images": [{"id": 1}], "annotations": []}, "Every 'file_name' .* must be a text. Got None"),
        ({"images": [], "annotations": []}, "it names no image"),
        ({"categories": [{"id": 3, "name": "a"}, {"id": 4, "name": "a"}]}, "must differ in id and name"),
        ({"categories": [{"id": "3", "name": "a"}]}, "'id' .* must be a whole number. Got '3'"),
        ({"annotations": [{"image_id": 1, "category_id": 3, "bbox": [0, 0, 1, 1]}]}, "'image_id' .* Got 1"),
        ({"annotations": [{"image_id": 9, "category_id": 1, "bbox": [0, 0, 1, 1]}]}, "'category_id' .* Got 1"),
        ({"annotations": [{"image_id": 9, "category_id": 3, "bbox": [0, 0, 1]}]}, "four numbers"),
        ({"annotations": [{"image_id": 9, "category_id": 3, "bbox": [0, 0, float("nan"), 1]}]}, "four numbers"),
        ({"annotations": [{"image_id": 9, "category_id": 3, "bbox": [0, 0, 0, 1]}]}, "for image 9 must have an area"),
    ],
)
def test_wrong_coco_files_are_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        read_coco(coco(tmp_path, **changes), 8)
    assert "instances_train.json" in str(raised.value)


def test_coco_files_must_agree(tmp_path: Path) -> None:
    folder = coco(coco(tmp_path), "instances_val.json", categories=[{"id": 3, "name": "x"}, {"id": 17, "name": "y"}])
    with pytest.raises(UserError, match=r"val\.json must have the same categories"):
        read_coco(folder, 8)
    (folder / "annotations" / "instances_val.json").write_text("{")
    with pytest.raises(UserError, match=r"val\.json cannot be read as JSON"):
        read_coco(folder, 8)


def domain(name: str, classes: str, rows: Sequence[Sequence[Object]], tests: int, side: int = 8) -> Scenes:
    x = torch.full((len(rows), 3, side, side), len(rows), dtype=torch.uint8)
    boxes = padded([np.array(own, np.float32).reshape(-1, 6) for own in rows])
    return Scenes(name, x, boxes, tuple(classes), torch.arange(len(rows)) >= len(rows) - tests)


def test_domains_to_one_data_set_and_back() -> None:
    small, large, hard = (1, 0, 0, 2, 3, 0), (0, 1, 1, 3, 5, 0), (1, 2, 2, 7, 8, 1)
    first = domain("first", "ab", [[small, large], [], [hard, small]], tests=1)
    second = domain("second", "cb", [[small], [large, small, hard]], tests=1)
    made = to_dataset("both", [first, second])
    assert (made.name, made.classes, made.domains) == ("both", ("a", "b", "c"), True)
    assert (made.group_names, made.group_classes) == (("first", "second"), (("a", "b"), ("c", "b")))
    assert made.y.tolist() == [0, 0, 1, 1, 1]  # of the largest box; none is 0
    assert made.train is not None
    assert made.test is not None
    assert made.groups is not None
    assert made.boxes is not None
    assert (made.train.tolist(), made.test.tolist()) == ([0, 1, 3], [2, 4])
    assert (made.boxes.shape, made.boxes.dtype, made.x.dtype) == ((5, 3, 6), torch.float32, torch.uint8)
    for group, scenes in enumerate((first, second)):
        rows = made.groups == group
        assert torch.equal(made.x[rows], scenes.x)
        assert [found(own) for own in made.boxes[rows]] == [found(own) for own in scenes.boxes]
    assert made.boxes[0, 2].tolist() == [-1, 0, 0, 0, 0, 0]
    untested = to_dataset("both", [first, domain("second", "cb", [[small]], tests=0)])
    assert untested.train is untested.test is None


def test_domains_that_do_not_fit() -> None:
    good = domain("first", "ab", [[(1, 0, 0, 2, 3, 0)]], tests=0)
    for others, words in (
        ([good], "names that differ. Got first, first"),
        ([domain("second", "a", [[]], 0, side=9)], r"second has images of shape \(3, 9, 9\) but first"),
        ([domain("second", "a", [[]], 1)], "second must hold at least one training image"),
    ):
        with pytest.raises(UserError, match=words):
            to_dataset("both", [good, *others])
    with pytest.raises(UserError, match="at least one domain"):
        to_dataset("none", [])
    assert to_dataset("one", [domain("empty", "ab", [[], []], 0)]).y.tolist() == [0, 0]


def test_images_that_memory_can_not_hold_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box("dog", (0.0, 0.0, 1.0, 1.0))
    picture = Picture(tmp_path / "is not there.jpg", (box,), False, "list")
    monkeypatch.setattr(machine, "free_memory", lambda: 10**9)
    words = "coco needs 1.97 GB of memory for 10,000 images of 256 pixels, but 1 GB are free"
    with pytest.raises(UserError, match=words):
        read_scenes("coco", [picture] * 10_000, 256)
    monkeypatch.setattr(machine, "free_memory", lambda: 3 * 6 * 6 * 3)
    two = [domain(name, "a", [[], []], 0, side=6) for name in ("one", "other")]
    with pytest.raises(UserError, match="both needs 432 B of memory for 4 images of 6 pixels, but 324 B are free"):
        to_dataset("both", two)
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    assert len(to_dataset("both", two).x) == 4


def test_free_memory_is_less_than_all_of_it() -> None:
    free = machine.free_memory()
    assert free is not None
    assert 2**20 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
