"""The detection task: loss, predictions in slices, what counts as correct, mirrored boxes, and a client that trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from detection_helpers import OBJECTS, boxes, detections, scene
from torch import Tensor, nn

from pfed import HEAD, Samples, UserError, ap, codistillation, metrics
from pfed.client import Client
from pfed.config import Local, RunOptions
from pfed.data.base import ClientData
from pfed.forward import Batch
from pfed.models.detectors import build_detector
from pfed.pool import Pool
from pfed.tasks import task
from pfed.tasks.classification import Classification
from pfed.tasks.detection import SLICE, Detection, flip


def samples(n: int = 4) -> Samples:
    """Pictures as they are stored, in an order that is not that of the pool."""
    x, y = scene(n)
    labels = torch.zeros(n, dtype=torch.int64)
    return Samples((x * 255).round().to(torch.uint8), labels, torch.arange(n - 1, -1, -1), boxes=y)


def client(n: int = 4, **options: Any) -> Client:
    torch.manual_seed(0)
    pool = Pool([build_detector("fcos:seresnet18-small", 2, (3, 64, 64))])
    run = RunOptions(rounds=1, task="detection", local=Local(lr=0.01, batch_size=2), **options)
    return Client(0, 1, {}, ClientData("one", samples(n), samples(n)), 2, run, pool, Detection())


class Oracle(nn.Module):
    """Says that there is one box, whose score is the brightness of an image; notes how it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append((len(x), self.training, torch.is_grad_enabled()))
        out = detections(*[[(0, 0, 1, 1, 0, 0)]] * len(x))
        out[:, 0, 4] = x.mean((1, 2, 3))
        return out


def test_what_a_task_says_of_itself() -> None:
    both = task("detection"), task("classification")
    assert [type(one) for one in both] == [Detection, Classification]
    assert [one.main for one in both] == ["ap50", "accuracy"]
    assert [one.names for one in both] == [ap.SCORES, metrics.SCORES]
    assert [one.shortcuts for one in both] == [False, True]
    assert all(one.main in one.names for one in both)
    with pytest.raises(UserError, match=r"There is no task 'detecting'\. Did you mean 'detection'"):
        task("detecting")


def test_the_loss_is_the_detectors() -> None:
    one = client()
    x, y = scene(2)
    batch = Batch(x, y, torch.arange(2))
    model = one.model()
    assert torch.equal(Detection().loss(model, batch), model.losses(x, y))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"must have losses\(x, boxes\)\. Got Linear"):
        Detection().loss(nn.Linear(2, 2), batch)


def test_predictions_come_in_slices_and_in_order() -> None:
    n = 2 * SLICE + 3
    x = torch.arange(n).view(n, 1, 1, 1).expand(n, 3, 4, 4).to(torch.uint8)
    data = Samples(x, torch.zeros(n, dtype=torch.int64), torch.arange(n).flip(0), boxes=boxes(*[[]] * n))
    oracle = Oracle().train()
    found = Detection().predict(oracle, data)
    assert oracle.asked == [(size, False, False) for size in (SLICE, SLICE, 3)]
    assert found.shape == (n, 4, 6)
    torch.testing.assert_close(found[:, 0, 4] * 255, torch.arange(n).flip(0).float())


def test_scores_are_those_of_the_rows_of_a_part() -> None:
    """The part's order is another than the pool's: what is said of one picture is not taken for another's."""
    pytest.importorskip("faster_coco_eval", reason="needs the extra: pip install 'pfed[detection]'")
    data = samples()
    said = [[(*row[1:5], 0.9, row[0]) for row in rows] for rows in OBJECTS]
    found = Detection().scores(detections(*said[::-1]), data, ("ap50", "ap50/*"))
    assert found == pytest.approx({"ap50": 1.0, "ap50/0": 1.0, "ap50/1": 1.0})
    wrong = Detection().scores(detections(*said), data, ("ap50",))
    assert wrong["ap50"] == 0.0


A, B, FAR = (0, 0, 10, 10), (20, 20, 40, 30), (50, 50, 60, 60)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ([(*A, 0.9, 0), (*B, 0.6, 1)], True),
        ([(*B, 0.6, 1), (*A, 0.5, 0)], True),  # in any order
        ([(*A, 0.9, 0), (*B, 0.6, 1), (*FAR, 0.4, 0)], True),  # what is not sure is not said
        ([(*A, 0.9, 0)], False),  # one is missing
        ([(*A, 0.9, 0), (*B, 0.49, 1)], False),
        ([(*A, 0.9, 0), (*B, 0.6, 0)], False),  # of another class
        ([(*A, 0.9, 0), (*B, 0.6, 1), (*FAR, 0.6, 0)], False),  # one too many
        ([(*A, 0.9, 0), (*A, 0.8, 0), (*B, 0.6, 1)], False),  # twice the same
        ([(0, 0, 10, 5.1, 0.9, 0), (*B, 0.6, 1)], True),  # IoU 0.51
        ([(0, 0, 10, 4.9, 0.9, 0), (*B, 0.6, 1)], False),
        ([], False),
    ],
)
def test_correct_is_all_and_only_the_objects(said: list[Any], right: bool) -> None:
    data = Samples.of(torch.zeros(1, 3, 64, 64), torch.zeros(1))
    data = Samples(data.x, data.y, data.rows, boxes=boxes([(0, *A, 0), (1, *B, 0)]))
    found = Detection().correct(detections(said), data)
    assert found.dtype == torch.uint8
    assert found.tolist() == [right]


def test_correct_without_objects_and_with_difficult_ones() -> None:
    """A difficult one may be found, even twice, and of two objects side by side each takes the nearest."""
    truth = [
        [],
        [],
        [(0, *A, 1)],
        [(0, *A, 1)],
        [(0, *A, 1)],
        [(0, *A, 1)],
        [(0, 0, 0, 10, 10, 0), (0, 0, 3, 10, 13, 0)],
    ]
    said: list[Any] = [
        [],
        [(*FAR, 0.9, 0)],
        [],
        [(*A, 0.9, 0), (*A, 0.8, 0)],
        [(*FAR, 0.9, 0)],
        [(*A, 0.9, 1)],
        [(0, 3, 10, 13, 0.9, 0), (0, 0, 10, 10, 0.8, 0)],
    ]
    x, n = torch.zeros(7, 3, 64, 64), torch.arange(7)
    found = Detection().correct(detections(*said), Samples(x, n, n, boxes=boxes(*truth)))
    assert found.tolist() == [1, 0, 1, 1, 0, 0, 1]


class Always:
    """A generator that draws these numbers."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def random(self, n: int) -> Any:
        return np.array(self.numbers[:n])


def test_mirrored_boxes_by_hand() -> None:
    """In a picture 8 wide, columns 1 to 3 become 5 to 7. Rows, classes, marks and empty rows stay."""
    x = torch.arange(2 * 3 * 8 * 8).view(2, 3, 8, 8).float()
    y = boxes([(4, 1, 2, 3, 7, 0), (2, 0, 0, 8, 5, 1)], [(1, 1, 2, 3, 7, 0)])
    before = x.clone(), y.clone()
    turned, moved = flip(x, y, Always(0.4, 0.6))  # type: ignore[arg-type]
    assert torch.equal(turned, torch.stack([x[0].flip(-1), x[1]]))
    assert torch.equal(moved, boxes([(4, 5, 2, 7, 7, 0), (2, 0, 0, 8, 5, 1)], [(1, 1, 2, 3, 7, 0)]))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_which_changes_there_are() -> None:
    assert Detection().augment("none") is None
    assert Detection().augment("flip") is flip
    with pytest.raises(UserError, match=r"augment must be one of none, flip for detection\. Got 'crop-flip'"):
        Detection().augment("crop-flip")
    with pytest.raises(UserError, match="Got 'crop-flip'"):
        client(augment="crop-flip")


@pytest.mark.parametrize("rule", ["flip", "crop-flip"])
def test_labels_stay_when_pictures_change(rule: str) -> None:
    x, y = torch.rand(6, 3, 8, 8), torch.arange(6)
    change = Classification().augment(rule)
    assert change is not None
    changed, same = change(x, y, np.random.default_rng(0))
    assert not torch.equal(changed, x)
    assert same is y


def inside(batch: Batch) -> bool:
    """Whether every box holds the colour of its class and nothing else."""
    for x, rows in zip(batch.x, batch.y, strict=True):
        blank = x.clone()
        for c, x1, y1, x2, y2, _ in rows[rows[:, 0] >= 0].long().tolist():
            if not (x[2 * c, y1:y2, x1:x2] == 1).all():
                return False
            blank[:, y1:y2, x1:x2] = 0
        if (blank == 1).any():
            return False
    return True


def test_a_clients_batches_mirror_both() -> None:
    """Own batches and those that all clients have in common."""
    plain, mirrored = (client(augment=rule) for rule in ("none", "flip"))
    seen = [*mirrored.batches(4), *(codistillation.shared_batch(mirrored, number) for number in range(4))]
    still = [*plain.batches(4), *(codistillation.shared_batch(plain, number) for number in range(4))]
    assert all(inside(batch) for batch in [*seen, *still])
    moved = [not torch.equal(a.y, b.y) for a, b in zip(seen, still, strict=True)]
    assert any(moved[:8])
    assert any(moved[8:])


def test_a_client_trains() -> None:
    """The whole detector, then its head alone: no features are kept for that, and no note is made of it."""
    phases = []

    def noted(model: nn.Module, batch: Batch) -> Tensor:
        phases.append(batch.phase)
        return Detection().loss(model, batch)

    one = client(exact_shortcuts=True)
    model = one.model()
    first = one.fit(model, epochs=1)
    assert first.steps == 2
    frozen = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in HEAD.names(model)}
    second = one.fit(model, noted, epochs=2, only=HEAD)
    assert second.steps == 4
    assert np.isfinite([first.loss, second.loss]).all()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in frozen.items())
    assert phases == [None] * 4
    assert not one.notes


def test_what_leaves_a_client() -> None:
    one = client()
    model = one.model()
    own = {name for name in model.state_dict() if name.startswith("head.classification_head.cls_logits.")}
    assert len(own) == 2
    assert not own & set(one.share(model))
    one.keep(model)
    assert own <= set(one.state["kept"])
