"""Residual networks for small images (He et al., CVPR 2016, section 4.2): 6n + 2 layers in three stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from pfed.models.shapes import image

Shortcut = Literal["pad", "conv"]


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut: `pad` adds zero channels (option A), `conv` maps by 1x1 (option B)."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs and shortcut == "pad":
            every_other = nn.AvgPool2d(1, stride)  # of single pixels: picks, does not blend
            self.shortcut = nn.Sequential(every_other, nn.ZeroPad3d((0, 0, 0, 0, 0, outputs - inputs)))
        elif inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu2(y + self.shortcut(x))
        return out


class CifarResNet(nn.Module):
    """A stem of widths[0] channels and three stages of (depth - 2) / 6 blocks with widths[1:] channels."""

    def __init__(
        self, depth: int, widths: Sequence[int], classes: int, channels: int = 3, shortcut: Shortcut = "pad"
    ) -> None:
        super().__init__()
        stem, first, second, third = widths
        self.conv1 = nn.Conv2d(channels, stem, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.relu = nn.ReLU()
        blocks = (depth - 2) // 6
        self.layer1 = _stage(blocks, stem, first, 1, shortcut)
        self.layer2 = _stage(blocks, first, second, 2, shortcut)
        self.layer3 = _stage(blocks, second, third, 2, shortcut)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(third, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        out: Tensor = self.fc(self.flatten(self.pool(x)))
        return out


def _stage(blocks: int, inputs: int, outputs: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
    first = Block(inputs, outputs, stride, shortcut)
    return nn.Sequential(first, *(Block(outputs, outputs, 1, shortcut) for _ in range(blocks - 1)))


def small(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """`resnet20`: widths 16, 16, 32, 64 and padded shortcuts; `resnet8x4`: RepDistiller's, wider, with convolutions."""
    channels, _, _ = image(name, shape)
    depth, _, wide = name.removeprefix("resnet").partition("x")
    if wide:
        return CifarResNet(int(depth), (32, 64, 128, 256), classes, channels, shortcut="conv")
    return CifarResNet(int(depth), (16, 16, 32, 64), classes, channels)
