"""Make torchvision, and with it timm, importable beside a torch it was not compiled for.

torchvision's wheel carries operators compiled against one build of torch. Beside another build (its CUDA wheel with
a CPU torch, say) they cannot load, and `import torchvision` fails because the operator `nms` does not exist. All that
pfed needs of them is `nms` and `roi_align`, so `ensure` defines these in plain torch where they are missing, and does
nothing elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pfed.errors import UserError

BLOCK = 512  # boxes compared with all others at a time
_defined: list[Any] = []  # operators vanish with the object that defined them


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression: boxes (n, 4) as x1, y1, x2, y2 and scores (n,) -> kept rows, best score first.

    >>> boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9], [5.0, 5.0, 6.0, 6.0]])
    >>> nms(boxes, torch.tensor([0.8, 0.9, 0.1]), 0.5)
    tensor([1, 2])
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = boxes[order].to(torch.promote_types(boxes.dtype, torch.float32))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept, alive = [], np.ones(len(order), dtype=bool)
    for start in range(0, len(order), BLOCK):
        block, rest = slice(start, start + BLOCK), slice(start, None)
        low = torch.maximum(boxes[block, None, :2], boxes[rest, :2])
        high = torch.minimum(boxes[block, None, 2:], boxes[rest, 2:])
        width, height = (high - low).clamp_(min=0).unbind(2)
        overlap = width * height
        iou = overlap / (area[block, None] + area[rest] - overlap)
        for place, over in enumerate(
            (iou > iou_threshold).cpu().numpy(), start
        ):  # nan, of boxes without area: not over
            if alive[place]:
                kept.append(place)
                alive[rest][over] = False
    return order[torch.tensor(kept, dtype=torch.int64, device=order.device)]


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Features (n, c, h, w) averaged over the bins of boxes (k, 5: image, x1, y1, x2, y2) -> (k, c, height, width).

    A bin is the mean of `sampling_ratio` x `sampling_ratio` points in it, or of one for each pixel that it is high and
    wide if that is 0 or less. A point on the rim of the features, up to one pixel outside, counts as on their edge, one
    further outside as zero.
    """
    low, high = (rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)).view(-1, 2, 2).flip(2).unbind(1)
    side = high - low if aligned else (high - low).clamp(min=1)  # (k, 2): y, x, as all that follows
    bins = (pooled_height, pooled_width)
    each = side / side.new_tensor(bins)
    points = torch.full_like(each, sampling_ratio) if sampling_ratio > 0 else each.ceil()
    out = input.new_zeros(len(rois), input.shape[1], *bins)
    kinds, kind = points.long().unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    for number, counts in enumerate(kinds.tolist()):
        if min(counts) > 0:  # a box without area has no points
            chosen = (kind == number).nonzero().flatten()
            axes = [_axis(low[chosen, i], each[chosen, i], bins[i], counts[i], input.shape[2 + i]) for i in range(2)]
            out = out.index_copy(0, chosen, _gather(input, rois[chosen, 0].long(), axes[0], axes[1]))
    return out


def _axis(low: Tensor, each: Tensor, bins: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Along one axis, for bins of the width `each` from `low` on: the pixels in them, and their weights.

    Every point stands for the pixels on both sides of it. (k, bins, 2 * count) each
    """
    at = low[:, None] + (torch.arange(bins * count).to(low) + 0.5) * each[:, None] / count
    near = ((at >= -1) & (at <= size)).to(at) / count
    at = at.clamp(0, size - 1)
    left = at.floor()
    pixels = torch.stack([left, (left + 1).clamp(max=size - 1)], -1).long()
    weights = torch.stack([near * (left + 1 - at), near * (at - left)], -1)
    return pixels.view(-1, bins, 2 * count), weights.view(-1, bins, 2 * count)


def _gather(input: Tensor, image: Tensor, y: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor]) -> Tensor:
    """The weighted sums of the pixels in each bin. (k, c, height, width)

    With the channels of a pixel as a row this is a sum over rows of a table: many times faster than `grid_sample`.
    """
    _, c, h, w = input.shape
    rows = (image.view(-1, 1, 1) * h + y[0])[:, :, None, :, None] * w + x[0][:, None, :, None, :]
    weights = y[1][:, :, None, :, None] * x[1][:, None, :, None, :]  # (k, height, width, pixels, pixels)
    table = input.permute(0, 2, 3, 1).reshape(-1, c)
    summed = F.embedding_bag(
        rows.flatten(3).flatten(0, 2), table, mode="sum", per_sample_weights=weights.flatten(3).flatten(0, 2).to(table)
    )
    return summed.view(*rows.shape[:3], c).permute(0, 3, 1, 2)


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
    rois: Any = importlib.import_module("torchvision.ops.roi_align")
    if _defined:  # torchvision.ops asks these before it calls an operator
        boxes._assert_has_ops = rois._assert_has_ops = _complain_not
        rois._has_ops = lambda: True
    return not _defined


def optional(module: str, extra: str) -> Any:
    """A module that one of pfed's extras brings; where it is missing, an error names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"The package {error.name} is missing: pip install 'pfed[{extra}]'.") from error


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def _define() -> None:
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):  # torchvision declares both (qnms is for quantized boxes) when it is imported
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl(operator, nms, "CompositeExplicitAutograd")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width,"
        " int sampling_ratio, bool aligned) -> Tensor"
    )
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    _defined.append(library)


def _complain_not() -> None:
    """A named function without arguments, since TorchScript compiles it."""
