"""The stand-in for torchvision's compiled operators."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pfed import compat


def naive(boxes: list[list[float]], scores: list[float], threshold: float) -> list[int]:
    """By the definition: take boxes by falling score, drop one that overlaps a better kept one too much."""

    def iou(a: list[float], b: list[float]) -> float:
        width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
        height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
        union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
        return width * height / union if union else 0.0

    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if all(iou(boxes[i], boxes[k]) <= threshold for k in kept):
            kept.append(i)
    return kept


def draw(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    corner, size = torch.rand(2, n, 2, generator=generator, dtype=torch.float64) * 10
    return torch.cat([corner, corner + size], 1), torch.rand(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_nms_is_the_definition(threshold: float) -> None:
    for seed in range(5):
        boxes, scores = draw(40, seed)
        assert compat.nms(boxes, scores, threshold).tolist() == naive(boxes.tolist(), scores.tolist(), threshold)


def test_nms_of_nothing_of_equals_and_of_boxes_without_area() -> None:
    assert compat.nms(torch.zeros(0, 4), torch.zeros(0), 0.5).tolist() == []
    same = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).repeat(3, 1)
    assert compat.nms(same, torch.tensor([0.5, 0.5, 0.5]), 0.5).tolist() == [0]
    assert compat.nms(torch.zeros(2, 4), torch.tensor([0.1, 0.2]), 0.5).tolist() == [1, 0]
    large = torch.tensor([[0, 0, 300, 300], [0, 0, 300, 290]], dtype=torch.float16)  # their areas overflow float16
    assert compat.nms(large, torch.tensor([1, 2]), 0.5).tolist() == [1]


def averaged(input: Tensor, rois: Tensor, scale: float, bins: tuple[int, int], points: int, aligned: bool) -> Tensor:
    """roi_align by the definition: the mean of points in every bin, each interpolated between four pixels."""
    height, width = input.shape[2:]
    shift = 0.5 if aligned else 0.0

    def at(features: Tensor, y: float, x: float) -> Tensor:
        if not (-1 <= y <= height and -1 <= x <= width):
            return features.new_zeros(len(features))
        y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
        top, left = int(y), int(x)
        down, right = min(top + 1, height - 1), min(left + 1, width - 1)
        upper = features[:, top, left] * (left + 1 - x) + features[:, top, right] * (x - left)
        lower = features[:, down, left] * (left + 1 - x) + features[:, down, right] * (x - left)
        return upper * (top + 1 - y) + lower * (y - top)

    out = input.new_zeros(len(rois), input.shape[1], *bins)
    for k, (image, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (scale * corner - shift for corner in corners)
        sides = (y2 - y1, x2 - x1) if aligned else (max(y2 - y1, 1.0), max(x2 - x1, 1.0))
        high, wide = sides[0] / bins[0], sides[1] / bins[1]
        rows, columns = (points if points > 0 else math.ceil(side) for side in (high, wide))
        for i, j, p, q in itertools.product(range(bins[0]), range(bins[1]), range(rows), range(columns)):
            y, x = y1 + (i + (p + 0.5) / rows) * high, x1 + (j + (q + 0.5) / columns) * wide
            out[k, :, i, j] += at(input[int(image)], y, x) / (rows * columns)
    return out


def features_and_boxes() -> tuple[Tensor, Tensor]:
    """Two images 9 x 7 at a quarter of the size, and boxes inside, across every edge, far outside and without area."""
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(12, 2, generator=generator, dtype=torch.float64) * 60 - 15
    size = torch.rand(12, 2, generator=generator, dtype=torch.float64) * 40
    size[0] = 0
    image = torch.arange(12, dtype=torch.float64)[:, None] % 2
    input = torch.randn(2, 3, 9, 7, generator=generator, dtype=torch.float64)
    return input, torch.cat([image, corner, corner + size], 1)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("points", [2, 3, 0])
def test_roi_align_is_the_definition(points: int, aligned: bool) -> None:
    input, rois = features_and_boxes()
    out = compat.roi_align(input, rois, 0.25, 3, 4, points, aligned)
    torch.testing.assert_close(out, averaged(input, rois, 0.25, (3, 4), points, aligned), rtol=0, atol=1e-13)


def test_roi_align_one_pixel_outside_and_further() -> None:
    """Features of one pixel, all 1: a point counts up to one pixel outside of it, beyond that it is zero."""
    input = torch.ones(1, 1, 1, 1)

    def column(x: float) -> float:
        return float(compat.roi_align(input, torch.tensor([[0.0, x - 0.5, 0.0, x + 0.5, 1.0]]), 1.0, 1, 1, 1, False))

    assert [column(x) for x in (-1.1, -1.0, 0.0, 1.0, 1.1)] == [0, 1, 1, 1, 0]


def test_torchvision_uses_this_roi_align() -> None:
    """Where it has none of its own, which gives the same; gradients go through, and no boxes give nothing."""
    compat.ensure()
    from torchvision.ops import roi_align

    input, rois = features_and_boxes()
    out = roi_align(input, rois, (3, 4), 0.25, 2)
    torch.testing.assert_close(out, compat.roi_align(input, rois, 0.25, 3, 4, 2, False))
    assert roi_align(input, rois[:0], 2).shape == (0, 3, 2, 2)
    input.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois[:4], 2, 0.25, 2), (input,))


def test_nms_of_many_boxes_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes, scores = draw(40, 0)
    whole = compat.nms(boxes, scores, 0.3)
    for block in (1, 7, 40):
        monkeypatch.setattr(compat, "BLOCK", block)
        assert torch.equal(compat.nms(boxes, scores, 0.3), whole)


def test_torchvision_uses_it() -> None:
    native = compat.ensure()
    assert compat.ensure() is native
    from torchvision.ops import batched_nms, nms

    boxes, scores = draw(30, 0)
    assert nms(boxes, scores, 0.4).tolist() == naive(boxes.tolist(), scores.tolist(), 0.4)
    classes = torch.arange(30) % 2
    kept = set(batched_nms(boxes, scores, classes, 0.4).tolist())
    for c in (0, 1):
        rows = (classes == c).nonzero()[:, 0]
        assert kept & set(rows.tolist()) == set(rows[nms(boxes[rows], scores[rows], 0.4)].tolist())


def test_it_imports_torchvision_only_when_asked_and_mends_an_import_that_failed() -> None:
    code = """
import contextlib, sys
from pfed import compat
assert "torchvision" not in sys.modules
with contextlib.suppress(RuntimeError):
    import torchvision
compat.ensure()
import torchvision
loaded = {name.split(".")[1] for name in sys.modules if name.startswith("torchvision.")}
assert "ops" in loaded and all(hasattr(torchvision, name) for name in loaded), "a half-imported package"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
