"""Average precision: how well detections match the boxes of a set of images.

A detection is right if its IoU with a box of its class reaches a threshold, each box counting once, best scores first.
The precision at every recall, made non-increasing, is averaged over points of recall, and then over the classes.

    ap50          at IoU 0.5, over the 101 points 0, 0.01, ..., 1 (COCO)
    ap50-voc07    at IoU 0.5, over the 11 points 0, 0.1, ..., 1 (VOC until 2007, and UODB)
    ap            over 101 points, and over the IoUs 0.5, 0.55, ..., 0.95 (COCO)
    ap50/*        ap50 of each class that there is to be found, as ap50/CLASS

Boxes marked as difficult need not be found, and finding them is no mistake. They are treated as COCO's crowds: a
detection belongs to one if half of the detection is inside, where VOC asks for an IoU of 0.5.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pfed.compat import ensure, optional
from pfed.errors import unknown

SCORES = ("ap50", "ap50-voc07", "ap", "ap50/*")
IOUS = [i / 100 for i in range(50, 100, 5)]
RECALLS = [i / 100 for i in range(101)]


def scores(
    detections: Tensor, boxes: Tensor, names: Sequence[str] = ("ap50",), classes: Sequence[str] = ()
) -> dict[str, float | None]:
    """Scores of detections (n, most, 6) against boxes (n, most, 6); None where there is nothing to be found.

    `classes` are the names in `ap50/CLASS`, else a class goes by its number.
    """
    for name in names:
        if name not in SCORES:
            raise unknown("score", name, SCORES)
    counted = boxes[(boxes[..., 0] >= 0) & (boxes[..., 5] == 0)]
    present = sorted({int(c) for c in counted[:, 0]})
    if not present:
        return dict.fromkeys(name for name in names if name != "ap50/*")
    precision = _precision(detections, boxes, IOUS if "ap" in names else IOUS[:1])[:, :, present]
    out: dict[str, float | None] = {}
    for name in names:
        if name == "ap50/*":
            each = precision[0].mean(0).tolist()
            out |= {f"ap50/{classes[c] if classes else c}": ap for c, ap in zip(present, each, strict=True)}
        else:
            chosen = precision if name == "ap" else precision[:1, ::10] if name == "ap50-voc07" else precision[:1]
            out[name] = float(chosen.mean())
    return out


def _precision(detections: Tensor, boxes: Tensor, ious: list[float]) -> Tensor:
    """The precision at each IoU and recall. (ious, 101, classes) float64, -1 for a class that does not occur"""
    ensure()
    optional("faster_coco_eval", "detection")
    metric = optional("torchmetrics.detection", "detection").MeanAveragePrecision(
        iou_thresholds=ious,
        rec_thresholds=RECALLS,
        max_detection_thresholds=[1, 10, max(100, detections.shape[1])],
        extended_summary=True,
        backend="faster_coco_eval",
    )
    metric.warn_on_many_detections = False
    metric.update([_said(rows) for rows in detections.cpu()], [_true(rows) for rows in boxes.cpu()])
    found = metric.compute()
    numbers = found["classes"].reshape(-1).long()  # in rising order, of those that occur in either
    out = torch.full((len(ious), len(RECALLS), int(numbers.max()) + 1), -1.0, dtype=torch.float64)
    out[:, :, numbers] = found["precision"][:, :, :, 0, -1].double()  # boxes of any size, all detections
    return out


def _said(rows: Tensor) -> dict[str, Tensor]:
    rows = rows[(rows[:, 4] >= 0) & rows.isfinite().all(1)]
    return {"boxes": rows[:, :4], "scores": rows[:, 4], "labels": rows[:, 5].long()}


def _true(rows: Tensor) -> dict[str, Tensor]:
    rows = rows[rows[:, 0] >= 0]
    return {"boxes": rows[:, 1:5], "labels": rows[:, 0].long(), "iscrowd": rows[:, 5].long()}
