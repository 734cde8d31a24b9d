"""Classifiers of timm and torchvision, as they are or with another stem."""

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


def resnet_for_small_images(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """`resnet18`, `resnet34` or `resnet50` for CIFAR: a 3x3 stem and no pooling after it, as in CD2-pFed and FedCD.

    With 100 classes `resnet50` has the 23,705,252 parameters of FedCD's Table III.
    """
    channels, _, _ = image(name, shape)
    ensure()
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1, model.maxpool = stem, nn.Identity()
    return model
