"""Models by name: those of the papers, built by hand, and every classifier of timm and torchvision.

>>> model = build("lenet5", classes=10, shape=(3, 32, 32))
>>> sum(parameter.numel() for parameter in model.parameters())
64102

Initial values come from torch's global generator, so the caller's seed decides them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pfed.errors import UserError, unknown

if TYPE_CHECKING:
    from torch import nn

_PLAIN = (
    "mlp",
    "mlp-femnist",
    "mlp-fedrep",
    "lenet5",
    "cnn",
    "cnn-fedrep",
    "cnn-cifar100",
    "cnn-small",
    "cnn-small-bn",
    "digits-cnn",
    "alexnet-bn",
)
PROJECTED = "+projector"  # NAME+projector: DualFed's projector between the model NAME and its head
_RESNETS = (*(f"resnet{depth}" for depth in (8, 14, 20, 32, 44, 56, 110)), "resnet8x4", "resnet32x4")
_LARGE_RESNETS = ("resnet18", "resnet34", "resnet50")
_DETECTORS = ("fcos", "fasterrcnn")


def names() -> list[str]:
    """The models built by hand; `timm:NAME`, `torchvision:NAME` and `NAME+projector` are understood as well."""
    return [*_PLAIN, *_RESNETS, *_LARGE_RESNETS]


def build(name: str, *, classes: int, shape: tuple[int, ...], pretrained: bool = False) -> nn.Module:
    """A new model for inputs of this shape (without the batch) and this many classes.

    `pretrained` gives a model of torchvision's all but its head, and a detector its body, weights trained on ImageNet.
    """
    from pfed.models import plain, resnet, zoo  # here, so that a list of names costs no import of torch

    if classes < 1:
        raise UserError(f"A model must have at least 1 class. Got {classes}.")
    if pretrained and not name.startswith(("torchvision:", *(f"{kind}:" for kind in _DETECTORS))):
        raise UserError(f"ImageNet weights are there for torchvision:NAME models and detectors only. Got {name!r}.")
    if name.endswith(PROJECTED):
        from pfed.models.projected import projected

        return projected(build(name.removesuffix(PROJECTED), classes=classes, shape=shape, pretrained=pretrained))
    if name in _PLAIN:
        model: nn.Module = getattr(plain, name.replace("-", "_"))(classes, shape)
        return model
    if name in _RESNETS:
        return resnet.small(name, classes, shape)
    if name in _LARGE_RESNETS:
        return zoo.resnet_for_small_images(name, classes, shape)
    library, _, inner = name.partition(":")
    if library == "timm" and inner:
        return zoo.from_timm(inner, classes, shape)
    if library in _DETECTORS and inner:
        from pfed.models.detectors import build_detector

        return build_detector(name, classes, shape, pretrained)
    if library == "torchvision" and inner:
        return zoo.from_torchvision(inner, classes, shape, pretrained)
    raise unknown(
        "model",
        name,
        [*names(), "timm:NAME", "torchvision:NAME", "NAME+projector", *(f"{kind}:BACKBONE" for kind in _DETECTORS)],
    )


def default(shape: tuple[int, ...], task: str = "classification") -> str:
    """A sensible model for inputs of this shape.

    >>> default((1, 28, 28)), default((64,))
    ('cnn', 'mlp')
    """
    if task == "detection":
        return "fcos:seresnet18-small"
    if len(shape) != 3:
        return "mlp"
    side = min(shape[1:])
    if side < 16:  # two 5x5 convolutions with pooling leave nothing of it
        return "cnn-small"
    if side < 32:
        return "cnn"
    return "cnn-fedrep" if side == 32 else "timm:resnet18"
