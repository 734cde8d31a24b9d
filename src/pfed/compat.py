"""Make torchvision, and with it timm, importable beside a torch it was not compiled for.

torchvision's wheel carries operators compiled against one build of torch. Beside another build (its CUDA wheel with
a CPU torch, say) they cannot load, and `import torchvision` fails because the operator `nms` does not exist. All that
pfed needs of them is `nms`, so `ensure` defines it in plain torch where it is missing, and does nothing elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch
from torch import Tensor

_defined: list[Any] = []  # operators vanish with the object that defined them


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression: boxes (n, 4) as x1, y1, x2, y2 and scores (n,) -> kept rows, best score first.

    >>> boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9], [5.0, 5.0, 6.0, 6.0]])
    >>> nms(boxes, torch.tensor([0.8, 0.9, 0.1]), 0.5)
    tensor([1, 2])
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes.to(torch.promote_types(boxes.dtype, torch.float32))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = []
    while len(order):
        best, rest = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[rest, :2])
        high = torch.minimum(boxes[best, 2:], boxes[rest, 2:])
        overlap = (high - low).clamp(min=0).prod(1)
        iou = overlap / (area[best] + area[rest] - overlap)
        order = rest[~(iou > iou_threshold)]  # not `<=`: boxes without area give nan and stay
    return torch.stack(kept) if kept else order


@functools.cache
def ensure() -> bool:
    """Import torchvision, mending it first if need be; True when its own compiled operators are in use.

    Call it before the first import of torchvision, timm or torchmetrics. Later calls cost nothing.
    """
    if "torchvision" not in sys.modules:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::" not in str(error):
                raise
            _forget()  # modules that the failed import left behind belong to a package that is gone
            _define()
    boxes: Any = importlib.import_module("torchvision.ops.boxes")
    if _defined:
        boxes._assert_has_ops = _has_ops  # torchvision.ops.nms asks it before it calls the operator
    return not _defined


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def _define() -> None:
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):  # torchvision declares both (qnms is for quantized boxes) when it is imported
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl(operator, nms, "CompositeExplicitAutograd")
    _defined.append(library)


def _has_ops() -> None:
    """A named function without arguments, since TorchScript compiles it."""
