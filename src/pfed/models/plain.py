"""Plain networks: layers in a row, the head last. The first linear layer fits the size of the images.

A ReLU stands after its pooling: that is the same to the bit, gradients too, and a quarter of the work.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn

from pfed.models.shapes import image


def _row(**layers: nn.Module) -> nn.Module:
    """These layers, one after the other, under these names."""
    return nn.Sequential(OrderedDict(layers))


def mlp(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """One hidden layer of 200."""
    return _row(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(shape), 200),
        relu1=nn.ReLU(),
        fc2=nn.Linear(200, classes),
    )


def mlp_femnist(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two hidden layers, 512 and 256: FEMNIST in FedBSD."""
    return _row(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(shape), 512),
        relu1=nn.ReLU(),
        fc2=nn.Linear(512, 256),
        relu2=nn.ReLU(),
        fc3=nn.Linear(256, classes),
    )


class Softmax(nn.Linear):
    """A head that gives probabilities."""

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z).softmax(1)


def mlp_fedrep(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """FedRep's code for FEMNIST: three hidden layers and a softmax, which the loss applies once more.

    For comparison only: it learns slowly. 550,346 parameters.
    """
    return _row(
        flatten=nn.Flatten(),
        fc1=nn.Linear(math.prod(shape), 512),
        relu1=nn.ReLU(),
        fc2=nn.Linear(512, 256),
        relu2=nn.ReLU(),
        fc3=nn.Linear(256, 64),
        relu3=nn.ReLU(),
        fc4=Softmax(64, classes),
    )


def lenet5(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """LeNet-5 as in LG-FedAvg's code: 64,102 parameters for CIFAR-10."""
    return _lenet("lenet5", classes, shape, maps=(6, 16), hidden=(120, 100))


def cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """FedAvg's network for MNIST, without padding: 582,026 parameters."""
    return _lenet("cnn", classes, shape, maps=(32, 64), hidden=(512,))


def cnn_fedrep(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """FedRep's network for CIFAR-10: 307,842 parameters."""
    return _lenet("cnn-fedrep", classes, shape, maps=(64, 64), hidden=(120, 64))


def cnn_cifar100(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """FedRep's network for CIFAR-100, with dropout before the head."""
    return _lenet("cnn-cifar100", classes, shape, maps=(64, 128), hidden=(256, 128), dropout=0.6)


def _lenet(
    name: str, classes: int, shape: tuple[int, ...], maps: tuple[int, int], hidden: tuple[int, ...], dropout: float = 0
) -> nn.Module:
    """Two 5x5 convolutions without padding, each pooled 2x2, then linear layers."""
    channels, height, width = image(name, shape, least=16)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, maps[0], 5),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(maps[0], maps[1], 5),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
    )
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    inputs = maps[1] * rows * columns
    for i, outputs in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(inputs, outputs)
        layers[f"relu{i + 2}"] = nn.ReLU()
        inputs = outputs
    if dropout:
        layers["dropout"] = nn.Dropout(dropout)
    layers[f"fc{len(hidden) + 1}"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)


def cnn_small(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """For 8x8 digits."""
    return _small("cnn-small", classes, shape, norm=False)


def cnn_small_bn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """`cnn-small` with BatchNorm after the convolutions."""
    return _small("cnn-small-bn", classes, shape, norm=True)


def _small(name: str, classes: int, shape: tuple[int, ...], norm: bool) -> nn.Module:
    channels, height, width = image(name, shape, least=2)
    return _row(
        conv1=nn.Conv2d(channels, 16, 3, padding=1),
        bn1=nn.BatchNorm2d(16) if norm else nn.Identity(),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        bn2=nn.BatchNorm2d(32) if norm else nn.Identity(),
        pool=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(32 * (height // 2) * (width // 2), 64),
        relu3=nn.ReLU(),
        fc2=nn.Linear(64, classes),
    )


def digits_cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """FedBN's network for digits of five styles: BatchNorm after every layer but the head."""
    channels, height, width = image("digits-cnn", shape, least=4)
    return _row(
        conv1=nn.Conv2d(channels, 64, 5, padding=2),
        bn1=nn.BatchNorm2d(64),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(64, 64, 5, padding=2),
        bn2=nn.BatchNorm2d(64),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(64, 128, 5, padding=2),
        bn3=nn.BatchNorm2d(128),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(128 * (height // 4) * (width // 4), 2048),
        bn4=nn.BatchNorm1d(2048),
        relu4=nn.ReLU(),
        fc2=nn.Linear(2048, 512),
        bn5=nn.BatchNorm1d(512),
        relu5=nn.ReLU(),
        fc3=nn.Linear(512, classes),
    )


def alexnet_bn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """FedBN's network for DomainNet: AlexNet with BatchNorm after every layer but the head."""
    channels, _, _ = image("alexnet-bn", shape, least=63)
    return _row(
        conv1=nn.Conv2d(channels, 64, 11, stride=4, padding=2),
        bn1=nn.BatchNorm2d(64),
        pool1=nn.MaxPool2d(3, stride=2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(64, 192, 5, padding=2),
        bn2=nn.BatchNorm2d(192),
        pool2=nn.MaxPool2d(3, stride=2),
        relu2=nn.ReLU(),
        conv3=nn.Conv2d(192, 384, 3, padding=1),
        bn3=nn.BatchNorm2d(384),
        relu3=nn.ReLU(),
        conv4=nn.Conv2d(384, 256, 3, padding=1),
        bn4=nn.BatchNorm2d(256),
        relu4=nn.ReLU(),
        conv5=nn.Conv2d(256, 256, 3, padding=1),
        bn5=nn.BatchNorm2d(256),
        pool5=nn.MaxPool2d(3, stride=2),
        relu5=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(6),
        flatten=nn.Flatten(),
        fc1=nn.Linear(256 * 6 * 6, 4096),
        bn6=nn.BatchNorm1d(4096),
        relu6=nn.ReLU(),
        fc2=nn.Linear(4096, 4096),
        bn7=nn.BatchNorm1d(4096),
        relu7=nn.ReLU(),
        fc3=nn.Linear(4096, classes),
    )
