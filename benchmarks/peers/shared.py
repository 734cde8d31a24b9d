"""What all contenders share: the work, the network, the data, and the meter. Needs only torch and NumPy.

A contender runs as `python NAME.py --head-epochs N --rounds T [--threads 2] [--path FOLDER]`, where no head epochs mean
FedAvg and N mean FedRep with N epochs on the head and one on the body; threads and path are for peers that run in one
process and for peers that are not packages. It prints JSON lines: {"startup": seconds} when the first round begins,
then {"round": t, "wall": s, "cpu": s, "foreign": cores, "samples": n} at the end of each round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS, SAMPLES, CLASSES, SHAPE = 100, 600, 10, (1, 28, 28)
CHOSEN, BATCH, LR = 10, 10, 0.05
PARAMETERS = 582_026
TICK = os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-epochs", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--path", type=Path)
    return parser.parse_args()


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    """Noise, uint8, and two classes per client. (clients, samples, 1, 28, 28), (clients, samples)"""
    source = torch.Generator().manual_seed(0)
    x = torch.randint(256, (CLIENTS, SAMPLES, *SHAPE), dtype=torch.uint8, generator=source)
    return x, (torch.arange(CLIENTS)[:, None] + torch.arange(SAMPLES) % 2) % CLASSES


@functools.cache
def client(k: int) -> tuple[Tensor, Tensor]:
    """A client's images, scaled to [0, 1], and labels."""
    x, y = data()
    return x[k].float().div_(255), y[k]


class Cnn(nn.Module):
    """The CNN of FedAvg without padding."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [
            nn.Conv2d(1, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        self.body = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU())
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


cnn = functools.cache(Cnn)


def checked(model: nn.Module) -> nn.Module:
    """The model, if it has the agreed size."""
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size == PARAMETERS, f"the network must have {PARAMETERS} parameters. Got {size}."
    return model


def epoch(model: nn.Module, part: nn.Module, x: Tensor, y: Tensor) -> int:
    """SGD on one part of a model while the rest is frozen, for peers that leave the loop to their users."""
    model.requires_grad_(False)
    part.requires_grad_(True)
    optimizer = torch.optim.SGD(part.parameters(), lr=LR, foreach=True)
    for index in torch.randperm(len(y)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
    return len(y)


def tree(root: int) -> dict[int, float]:
    """The processes below and including one: CPU seconds of each, with those of its children that are gone."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid = int(entry.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        seconds[pid] = sum(int(ticks) for ticks in fields[11:15]) / TICK
    found, line = {}, [root]
    while line:
        pid = line.pop()
        found[pid] = seconds.get(pid, 0.0)
        line += children.get(pid, [])
    return found


def busy() -> float:
    """CPU seconds of the whole machine since it started, idle time left out."""
    user, nice, system, _, _, irq, soft, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(int(ticks) for ticks in (user, nice, system, irq, soft, steal)) / TICK


def age() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / TICK
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


class Meter:
    """`mark` it when round 1 begins and whenever a round is over; add to `samples` what is trained on.

    What was spent on files that a user has ready is set `aside` from the start-up.
    """

    def __init__(self) -> None:
        self.samples, self.round, self.aside = 0, 0, 0.0
        self._last: tuple[float, ...] = ()

    def mark(self) -> None:
        now = (time.perf_counter(), sum(tree(os.getpid()).values()), busy())
        if not self._last:
            say(startup=age() - self.aside)
        else:
            self.round += 1
            wall, cpu, all = (b - a for a, b in zip(self._last, now, strict=True))
            say(round=self.round, wall=wall, cpu=cpu, foreign=max(0.0, all - cpu) / wall, samples=self.samples)
        self.samples, self._last = 0, (time.perf_counter(), *now[1:])


meter = Meter()


def count(_: nn.Module, inputs: Iterable[Tensor]) -> None:
    """A forward pre-hook: with evaluation off, whatever goes through a network is trained on."""
    meter.samples += len(next(iter(inputs)))


def say(**found: float) -> None:
    print(json.dumps(found), flush=True)
