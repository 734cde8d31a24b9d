"""Object detection: the detector's own losses, padded detections, and average precision.

In a batch, `y` are the boxes of its images (n, most, 6): class, x1, y1, x2, y2, difficult; class -1 where there is no
more. Predictions are as a detector gives them (`pfed.models.detectors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from pfed import ap
from pfed.compat import ensure
from pfed.data.base import Samples
from pfed.errors import UserError
from pfed.forward import Batch
from pfed.tasks import Augment

SLICE = 16  # images
SURE, OVERLAP = 0.5, 0.5  # a detection counts as said from this score on, and as right from this IoU on


class Detection:
    """Boxes with classes in every image."""

    main = "ap50"
    names: tuple[str, ...] = ap.SCORES
    shortcuts = False  # the head takes a pyramid of features and not one tensor

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if not hasattr(model, "losses"):
            raise UserError(f"A model for detection must have losses(x, boxes). Got {type(model).__name__}.")
        loss: Tensor = model.losses(batch.x, batch.y)  # type: ignore[operator]
        return loss

    def predict(self, model: nn.Module, samples: Samples) -> Tensor:
        """Detections on the CPU. (n, most, 6)"""
        model.eval()
        with torch.no_grad():
            parts = [model(samples.take(slice(i, i + SLICE))[0]).cpu() for i in range(0, len(samples), SLICE)]
        return torch.cat(parts)

    def scores(
        self, predictions: Tensor, samples: Samples, names: Sequence[str], classes: Sequence[str] = ()
    ) -> Mapping[str, float | None]:
        return ap.scores(predictions, _boxes(samples), names, classes)

    def correct(self, predictions: Tensor, samples: Samples) -> Tensor:
        """Whether all objects of an image were found, and nothing else; difficult ones may be found or not."""
        pairs = zip(predictions, _boxes(samples), strict=True)
        return torch.tensor([_all_and_only(said, true) for said, true in pairs], dtype=torch.uint8)

    def augment(self, rule: str) -> Augment | None:
        known = {"none": None, "flip": flip}
        if rule not in known:
            raise UserError(f"run.augment must be one of {', '.join(known)} for detection. Got {rule!r}.")
        return known[rule]


def flip(x: Tensor, boxes: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each image mirrored or not, and its boxes with it."""
    mirrored = torch.from_numpy(rng.random(len(x)) < 0.5).to(x.device)
    turned = boxes.clone()
    turned[..., 1], turned[..., 3] = x.shape[-1] - boxes[..., 3], x.shape[-1] - boxes[..., 1]
    moved = mirrored[:, None] & (boxes[..., 0] >= 0)
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x), torch.where(moved[..., None], turned, boxes)


def _boxes(samples: Samples) -> Tensor:
    assert samples.boxes is not None  # the run was checked for it
    return samples.boxes[samples.rows].cpu()


def _all_and_only(said: Tensor, true: Tensor) -> bool:
    """Detections (most, 6) take boxes (most, 6) of their class by falling score, each the nearest one left over."""
    ensure()
    from torchvision.ops import box_iou

    said, true = said[said[:, 4] >= SURE], true[true[:, 0] >= 0]
    difficult = true[:, 5] > 0
    near = box_iou(said[:, :4], true[:, 1:5]) * (said[:, 5:] == true[:, 0])  # (said, true)
    left = ~difficult
    for row in near:
        free = row * left
        if len(row) and free.max() >= OVERLAP:
            left[free.argmax()] = False
        elif not (row * difficult >= OVERLAP).any():
            return False
    return not left.any()
