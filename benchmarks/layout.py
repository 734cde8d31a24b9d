"""Training steps with the channels of a pixel side by side beside torch's usual layout, for each kind of network.

One thread, the same weights and batches, and both take turns; a ratio above 1 says how much faster `channels_last` is.

    python benchmarks/layout.py [--repeats 9]
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from common import ratios
from torch import nn

from pfed import machine, models

CASES = [
    ("cnn", (1, 28, 28), 10),
    ("cnn", (1, 28, 28), 50),
    ("lenet5", (3, 32, 32), 10),
    ("lenet5", (3, 32, 32), 128),
    ("cnn-fedrep", (3, 32, 32), 10),
    ("cnn-cifar100", (3, 32, 32), 50),
    ("cnn-small-bn", (1, 8, 8), 10),
    ("digits-cnn", (3, 28, 28), 32),
    ("alexnet-bn", (3, 96, 96), 32),
    ("resnet8", (3, 32, 32), 64),
    ("torchvision:resnet18", (3, 32, 32), 32),
    ("torchvision:resnet18", (3, 64, 64), 32),
    ("torchvision:resnet50", (3, 64, 64), 16),
    ("torchvision:mobilenet_v2", (3, 64, 64), 16),
]
TURN = 0.15  # seconds


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> float:
    """Seconds of so many steps."""
    parameters = list(net.parameters())
    started = time.perf_counter()
    for _ in range(steps):
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.001)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine.keep_freed_memory()
    for name, shape, size in CASES:
        usual = models.build(name, classes=10, shape=shape)
        ours = copy.deepcopy(usual).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x, y = torch.rand(size, *shape), torch.arange(size) % 10
        for net in (usual, ours):
            train(net, x, y, 2)
        steps = max(1, int(TURN / train(usual, x, y, 1)))
        times = [(train(usual, x, y, steps), train(ours, x, y, steps)) for _ in range(arguments.repeats)]
        print(f"{name} {shape}, batch {size}: {ratios(*zip(*times, strict=True))}", flush=True)


if __name__ == "__main__":
    main()
