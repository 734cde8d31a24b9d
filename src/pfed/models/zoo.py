"""Classifiers of timm and torchvision."""

from __future__ import annotations

from torch import nn

from pfed.compat import ensure
from pfed.errors import UserError, unknown
from pfed.models.shapes import image


def from_timm(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """timm's model of this name, for images of any number of channels."""
    channels, _, _ = image(f"timm:{name}", shape)
    ensure()
    import timm

    if not timm.is_model(name):
        raise unknown("timm model", name, timm.list_models())
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels)
    return model


def from_torchvision(name: str, classes: int, shape: tuple[int, ...], pretrained: bool = False) -> nn.Module:
    """torchvision's classifier of this name; they all take images of three channels."""
    channels, _, _ = image(f"torchvision:{name}", shape)
    ensure()
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise unknown("torchvision model", name, known)
    if channels != 3:
        raise UserError(f"Model 'torchvision:{name}' wants images of 3 channels (timm's take any). Got {channels}.")
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    if pretrained:
        from pfed.models.weights import load_imagenet

        load_imagenet(model, name)
    return model
