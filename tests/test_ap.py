"""Average precision, against what can be computed by hand."""

from __future__ import annotations

import sys

import pytest
import torch
from detection_helpers import boxes, detections
from torch import Tensor

from pfed import ap
from pfed.errors import UserError

pytest.importorskip("faster_coco_eval", reason="needs the extra: pip install 'pfed[detection]'")

A, B = (0.0, 0.0, 10.0, 10.0), (20.0, 20.0, 40.0, 30.0)
FAR = (50.0, 50.0, 60.0, 60.0)


def said(*rows: tuple[tuple[float, ...], float, int]) -> list[tuple[float, ...]]:
    """Place, score and class, as a row of detections."""
    return [(*place, score, number) for place, score, number in rows]


def true(*rows: tuple[tuple[float, ...], int], difficult: int = 0) -> list[tuple[float, ...]]:
    return [(number, *place, difficult) for place, number in rows]


def test_perfect_detections(capfd: pytest.CaptureFixture[str]) -> None:
    """And nothing is printed on the way."""
    truth = boxes(true((A, 0), (B, 2)), true((B, 0)))
    found = detections(said((A, 0.9, 0), (B, 0.8, 2)), said((B, 0.3, 0)))
    wanted = {"ap50": 1.0, "ap50-voc07": 1.0, "ap": 1.0, "ap50/0": 1.0, "ap50/2": 1.0}
    assert ap.scores(found, truth, ap.SCORES) == pytest.approx(wanted)
    assert list(ap.scores(found, truth)) == ["ap50"]
    assert capfd.readouterr() == ("", "")


def test_no_detections() -> None:
    truth = boxes(true((A, 0), (B, 2)), [])
    for nothing in (detections([], []), torch.zeros(2, 0, 6)):
        wanted = {"ap50": 0.0, "ap50-voc07": 0.0, "ap": 0.0, "ap50/0": 0.0, "ap50/2": 0.0}
        assert ap.scores(nothing, truth, ap.SCORES) == wanted


def test_nothing_to_be_found() -> None:
    found = detections(said((A, 0.9, 0)), [])
    for truth in (boxes([], []), torch.zeros(2, 0, 6), boxes(true((A, 0), difficult=1), [])):
        assert ap.scores(found, truth, ap.SCORES) == {"ap50": None, "ap50-voc07": None, "ap": None}


def two_images() -> tuple[Tensor, Tensor]:
    truth = boxes(true((A, 0), (B, 0)), true((A, 0)))
    return detections(said((A, 0.9, 0)), said((FAR, 0.8, 0), (A, 0.7, 0))), truth


def test_two_images_by_hand() -> None:
    """Three objects; by falling score a hit, a miss, a hit, and one object is never found.

    Precision and recall are 1 and 1/3, then 1/2 and 1/3, then 2/3 and 2/3. So precision is 1 up to recall 1/3, 2/3 up
    to 2/3, and 0 beyond. Of the points 0, 0.01, ..., 34 lie up to 1/3 and 33 up to 2/3: (34 + 33 * 2/3) / 101. Of the
    points 0, 0.1, ..., 4 and 3: (4 + 3 * 2/3) / 11.
    """
    found = ap.scores(*two_images(), ap.SCORES)
    assert found["ap50"] == found["ap50/0"] == pytest.approx(56 / 101)
    assert found["ap50-voc07"] == pytest.approx(6 / 11)
    assert found["ap"] == pytest.approx(56 / 101)


def test_a_recall_that_falls_on_a_point_counts_there() -> None:
    """N of ten objects, 3 say: precision is 1 at the points up to 0.3, of which there are 31, or 4."""
    places = [(20.0 * i, 0.0, 20.0 * i + 10, 10.0) for i in range(10)]
    truth = boxes(true(*((place, 0) for place in places)), most=10)
    for n in range(1, 10):
        found = detections(said(*((place, 0.9 - i / 100, 0) for i, place in enumerate(places[:n]))), most=10)
        wanted = {"ap50": (10 * n + 1) / 101, "ap50-voc07": (n + 1) / 11}
        assert ap.scores(found, truth, ("ap50", "ap50-voc07")) == pytest.approx(wanted)


def test_the_mean_over_ious() -> None:
    """7.2 of 10 rows are covered: right at the IoUs 0.5 to 0.7, five of the ten."""
    found = detections(said(((0.0, 0.0, 10.0, 7.2), 0.9, 0)))
    assert ap.scores(found, boxes(true((A, 0))), ap.SCORES[:3]) == pytest.approx(
        {"ap50": 1, "ap50-voc07": 1, "ap": 0.5}
    )
    less = detections(said(((0.0, 0.0, 10.0, 4.9), 0.9, 0)))
    assert ap.scores(less, boxes(true((A, 0)))) == {"ap50": 0.0}


def test_the_mean_over_classes() -> None:
    """Class 0 is found, class 2 is not, and class 1 is said but does not occur: it is not judged."""
    truth = boxes(true((A, 0), (B, 2)))
    found = detections(said((A, 0.9, 0), (FAR, 0.95, 1), (B, 0.5, 1)))
    assert ap.scores(found, truth, ("ap50", "ap50/*")) == pytest.approx({"ap50": 0.5, "ap50/0": 1.0, "ap50/2": 0.0})
    named = ap.scores(found, truth, ("ap50/*",), classes=("cat", "dog", "cow"))
    assert named == pytest.approx({"ap50/cat": 1.0, "ap50/cow": 0.0})


def test_a_second_detection_of_an_object_is_a_mistake() -> None:
    """A hit, a second one of the same object, a hit: precision 1 at recall 1/2, then 2/3 at 1: (51 + 50 * 2/3) / 101"""
    found = detections(said((A, 0.9, 0), (A, 0.8, 0), (B, 0.7, 0)))
    assert ap.scores(found, boxes(true((A, 0), (B, 0)))) == pytest.approx({"ap50": (51 + 50 * 2 / 3) / 101})


def test_difficult_boxes_need_not_be_found_and_may_be() -> None:
    """Twice even; and a detection elsewhere is as wrong as ever: precision 1/2 at recall 1."""
    truth = boxes([*true((A, 0)), *true((B, 0), difficult=1)])
    assert ap.scores(detections(said((A, 0.5, 0))), truth) == {"ap50": 1.0}
    assert ap.scores(detections(said((A, 0.5, 0), (B, 0.9, 0), (B, 0.8, 0))), truth) == {"ap50": 1.0}
    assert ap.scores(detections(said((A, 0.5, 0), (FAR, 0.9, 0))), truth) == {"ap50": 0.5}


def test_more_than_a_hundred_objects() -> None:
    places = [(20.0 * (i % 15), 20.0 * (i // 15), 20.0 * (i % 15) + 9, 20.0 * (i // 15) + 9) for i in range(150)]
    truth = boxes(true(*((place, 0) for place in places)), most=150)
    found = detections(said(*((place, 0.5, 0) for place in places)), most=150)
    assert ap.scores(found, truth) == pytest.approx({"ap50": 1.0})


def test_a_detection_that_is_no_number_is_none() -> None:
    found = detections(said((A, 0.9, 0), ((torch.nan, 0.0, 1.0, 1.0), 0.95, 0)))
    assert ap.scores(found, boxes(true((A, 0)))) == {"ap50": 1.0}


def test_an_unknown_score() -> None:
    with pytest.raises(UserError, match="There is no score 'accuracy'"):
        ap.scores(*two_images(), ("accuracy",))


@pytest.mark.parametrize("package", ["faster_coco_eval", "torchmetrics.detection"])
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(UserError, match=rf"The package {package} is missing: pip install 'pfed\[detection\]'"):
        ap.scores(*two_images())
