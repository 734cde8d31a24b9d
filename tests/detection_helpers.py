"""What tests of detection share: a few pictures with coloured rectangles, and padded rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Row = Sequence[float]
OBJECTS: list[list[Row]] = [  # class, x1, y1, x2, y2, difficult: red ones are of class 0, blue ones of class 1
    [(0, 6, 8, 30, 34, 0), (1, 36, 30, 60, 58, 0)],
    [(1, 4, 30, 28, 58, 0)],
    [],
    [(0, 30, 4, 62, 30, 0)],
]


def boxes(*images: Sequence[Row], most: int = 3) -> Tensor:
    """Boxes of images, padded. (n, most, 6)"""
    return _padded(images, [-1, 0, 0, 0, 0, 0], most)


def detections(*images: Sequence[Row], most: int = 4) -> Tensor:
    """Detections (x1, y1, x2, y2, score, class) in images, padded. (n, most, 6)"""
    return _padded(images, [0, 0, 0, 0, -1, -1], most)


def _padded(images: Sequence[Sequence[Row]], empty: Row, most: int) -> Tensor:
    return torch.tensor([[*rows, *[empty] * (most - len(rows))] for rows in images], dtype=torch.float32)


def scene(n: int = 2, size: int = 64) -> tuple[Tensor, Tensor]:
    """The first pictures of `OBJECTS`, and their boxes. (n, 3, size, size), (n, 3, 6)"""
    x = torch.full((n, 3, size, size), 0.2)
    for i, rows in enumerate(OBJECTS[:n]):
        for c, x1, y1, x2, y2, _ in rows:
            x[i, 2 * int(c), int(y1) : int(y2), int(x1) : int(x2)] = 1.0
    return x, boxes(*OBJECTS[:n])
