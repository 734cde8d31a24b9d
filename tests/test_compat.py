"""The stand-in for torchvision's compiled operators."""

from __future__ import annotations

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
