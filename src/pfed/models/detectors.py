"""Object detectors: torchvision's FCOS and Faster R-CNN over a body of timm's with a feature pyramid.

A detector takes images (n, 3, S, S) as they are and says (n, 100, 6): x1, y1, x2, y2, score, class, best score first,
score and class -1 where there is no more to say. `losses(x, boxes)` is what it is trained by.

    backbone.body.layer2.0.…    stage 2, first block
    backbone.fpn.…              the pyramid
    head.… (FCOS), or rpn.… and roi_heads.… (Faster R-CNN)

How many classes there are shows in the tensors of the class predictor only. These never leave a client, whose classes
are its own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfed import anatomy
from pfed.compat import ensure
from pfed.errors import UserError, unknown
from pfed.models.shapes import image
from pfed.models.weights import load_body

MOST = 100  # detections in an image
LEAST = 0.05  # score of a detection
CANDIDATES = 300  # of each level of the pyramid before overlapping ones are dropped; comparing more takes long on a CPU
STRIDES = (4, 8, 16, 32)  # of the four stages of a body
# For CPUs: timm's model, channels of its stages where they are fewer than timm's. What stands behind it is narrow too.
SMALL = {"seresnet18-small": ("seresnet18", (16, 32, 64, 128)), "mobilenetv2-small": ("mobilenetv2_100", None)}


@dataclass(frozen=True)
class _Size:
    """How wide a detector is behind its body."""

    pyramid: int = 256  # channels
    hidden: int = 1024  # units of Faster R-CNN's second stage
    sampled: int = 512  # boxes of an image from which that one learns


@dataclass(frozen=True)
class _Kind:
    """What differs between the two detectors."""

    make: Callable[[nn.Module, int, int, _Size], nn.Module]
    head: str
    predictor: str  # the module whose tensors depend on the classes
    levels: int  # of the body's stages, how many of the last ones the pyramid stands on
    first: int  # what torchvision calls class 0


class Detector(nn.Module):
    """A detector of torchvision's, from padded boxes to padded detections.

    Whether it detects or computes losses depends on what is asked for and not on train or eval mode, which concerns the
    layers only.
    """

    _net: nn.Module

    def __init__(self, net: nn.Module, first: int) -> None:
        super().__init__()
        for name, module in net.named_children():
            self.add_module(name, module)
        self.__dict__["_net"] = net  # not as a module: what it is made of are this one's modules already
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        with self._torchvision(training=False) as net:
            found = net(x)
        out = torch.cat([x.new_zeros(len(x), MOST, 4), x.new_full((len(x), MOST, 2), -1.0)], 2)
        for i, said in enumerate(found):
            columns = (said["boxes"], said["scores"][:, None], (said["labels"].to(x) - self.first)[:, None])
            out[i, : len(columns[0])] = torch.cat(columns, 1)
        return out

    def losses(self, x: Tensor, boxes: Tensor) -> Tensor:
        """The sum of torchvision's losses for boxes (n, most, 6: class, x1, y1, x2, y2, difficult).

        Difficult boxes and those without area are left out. Faster R-CNN draws from torch's global generator.
        """
        with self._torchvision(training=True) as net:
            parts: dict[str, Tensor] = net(x, [self._target(rows) for rows in boxes])
        return torch.stack(list(parts.values())).sum()

    def _target(self, rows: Tensor) -> dict[str, Tensor]:
        solid = (rows[:, 3:5] > rows[:, 1:3]).all(1)
        rows = rows[(rows[:, 0] >= 0) & (rows[:, 5] == 0) & solid]
        return {"boxes": rows[:, 1:5], "labels": rows[:, 0].long() + self.first}

    @contextlib.contextmanager
    def _torchvision(self, training: bool) -> Iterator[nn.Module]:
        """torchvision's model, for which the mode says what it is to do: set where it asks for it, and set back."""
        asked = [self._net, *(module for name, module in self.named_children() if name in ("rpn", "roi_heads"))]
        modes = [module.training for module in asked]
        try:
            for module in asked:
                module.training = training
            yield self._net
        finally:
            for module, mode in zip(asked, modes, strict=True):
                module.training = mode


class _Backbone(nn.Module):
    """The body's last stages, and the pyramid over them."""

    def __init__(self, body: nn.Module, fpn: nn.Module, levels: int, channels: int) -> None:
        super().__init__()
        self.body, self.fpn = body, fpn
        self.levels, self.out_channels = levels, channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.body(x)[-self.levels :]
        out: dict[str, Tensor] = self.fpn(OrderedDict((str(i), features) for i, features in enumerate(maps)))
        return out


class _AsTheyAre(nn.Module):
    """In place of torchvision's transform: images stay as they are, or get a black rim up to a multiple of 32."""

    def forward(self, x: Tensor, targets: Any = None) -> tuple[Any, Any]:
        from torchvision.models.detection.image_list import ImageList

        height, width = x.shape[-2:]
        down, right = -height % STRIDES[-1], -width % STRIDES[-1]
        whole = F.pad(x, (0, right, 0, down)) if down or right else x
        return ImageList(whole, [(height, width)] * len(x)), targets

    def postprocess(self, result: Any, *sizes: Any) -> Any:
        return result


def build_detector(name: str, classes: int, shape: tuple[int, ...], pretrained: bool = False) -> Detector:
    """A new detector: `fcos:BACKBONE` or `fasterrcnn:BACKBONE`.

    BACKBONE is a model of timm's with stages at strides 4, 8, 16 and 32, such as seresnet50, or one of SMALL.
    Initial values come from torch's global generator; `pretrained` gives the body weights trained on ImageNet.
    """
    detector, _, inner = name.partition(":")
    if detector not in KINDS or not inner:
        raise unknown("detector", name, [f"{kind}:BACKBONE" for kind in KINDS])
    if classes < 1:
        raise UserError(f"A detector must have at least 1 class. Got {classes}.")
    channels, height, width = image(name, shape, least=STRIDES[-1])
    kind, size = KINDS[detector], _Size(64, 256, 128) if inner in SMALL else _Size()
    body = _body(name, inner, channels, pretrained)
    net = kind.make(_backbone(body, kind, size), classes, max(height, width), size)
    net.transform = _AsTheyAre()
    model = Detector(net, kind.first)
    anatomy.set_head(model, kind.head)
    anatomy.marks(model).local |= anatomy.names_under(model, kind.predictor)
    return model


def _backbone(body: Any, kind: _Kind, size: _Size) -> nn.Module:
    from torchvision.ops import feature_pyramid_network as pyramid

    maps = body.feature_info.channels()[-kind.levels :]
    wide = size.pyramid
    more = pyramid.LastLevelMaxPool() if kind.levels == len(STRIDES) else pyramid.LastLevelP6P7(wide, wide)
    return _Backbone(body, pyramid.FeaturePyramidNetwork(maps, wide, more), kind.levels, wide)


def _body(name: str, inner: str, channels: int, pretrained: bool) -> Any:
    """timm's model without its head, giving the maps of its last four stages."""
    ensure()
    import timm

    library, widths = SMALL.get(inner, (inner, None))
    if not timm.is_model(library):
        raise unknown("timm model", inner, [*SMALL, *timm.list_models()])
    own: dict[str, Any] = {} if widths is None else {"channels": widths}
    wrong = f"Detector {name!r} wants a timm model with stages at strides {', '.join(map(str, STRIDES))}."
    try:
        body: Any = timm.create_model(
            library, pretrained=False, features_only=True, out_indices=(-4, -3, -2, -1), in_chans=channels, **own
        )
    except Exception as error:  # timm raises several kinds for a model that gives no maps, or fewer
        raise UserError(f"{wrong} Got {inner!r}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
    strides = tuple(body.feature_info.reduction())
    if strides != STRIDES:
        raise UserError(f"{wrong} Got {inner!r} with {', '.join(map(str, strides))}.")
    if pretrained:
        _check_fits_imagenet(name, widths, channels)
        load_body(body, library)
    return body


def _check_fits_imagenet(name: str, widths: tuple[int, ...] | None, channels: int) -> None:
    if widths is not None:
        raise UserError(f"There are no ImageNet weights for the narrow body of {name!r}: pretrained must be false.")
    if channels != 3:
        raise UserError(f"ImageNet weights are for images of 3 channels. Got {channels}.")


def _fcos(backbone: nn.Module, classes: int, side: int, size: _Size) -> nn.Module:
    from torchvision.models.detection import FCOS

    net: nn.Module = FCOS(backbone, classes, score_thresh=LEAST, detections_per_img=MOST, topk_candidates=CANDIDATES)
    return net


def _faster_rcnn(backbone: nn.Module, classes: int, side: int, size: _Size) -> nn.Module:
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

    least = 32 if side > 256 else 16
    sizes = tuple((least << level,) for level in range(len(STRIDES) + 1))
    net: nn.Module = FasterRCNN(
        backbone,
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(sizes)),
        rpn_pre_nms_top_n_train=CANDIDATES,
        rpn_pre_nms_top_n_test=CANDIDATES,
        rpn_post_nms_top_n_train=CANDIDATES,
        rpn_post_nms_top_n_test=CANDIDATES,
        box_head=TwoMLPHead(size.pyramid * 7 * 7, size.hidden),
        box_predictor=FastRCNNPredictor(size.hidden, classes + 1),  # with background, as class 0
        box_batch_size_per_image=size.sampled,
        box_score_thresh=LEAST,
        box_detections_per_img=MOST,
    )
    return net


KINDS = {
    "fcos": _Kind(_fcos, "head", "head.classification_head.cls_logits", levels=3, first=0),
    "fasterrcnn": _Kind(_faster_rcnn, "roi_heads", "roi_heads.box_predictor", levels=4, first=1),
}
