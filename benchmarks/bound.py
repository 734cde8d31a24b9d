"""What share of the machine's matrix multiplication training reaches, in one thread.

FLOPs of a step are counted by torch, forward and backward; the bound is what a product of two square matrices of 1,024
rows reaches at its best. FedAvg with two clients, CPU seconds of its round without evaluation; both take turns.

    python benchmarks/bound.py [--repeats 5] [--profile]

With --profile it also prints where the time of a plain training step of the network goes.
"""

from __future__ import annotations

import argparse
import time
from unittest import mock

import torch
import torch.nn.functional as F
from common import federation, ratios
from torch.utils.flop_counter import FlopCounterMode

from pfed import Experiment, Federation, machine, models
from pfed.session import Session

CASES = [("cnn", (1, 28, 28), 10, 600), ("cnn", (1, 28, 28), 50, 600), ("torchvision:resnet18", (3, 64, 64), 32, 192)]


def flops(model: str, shape: tuple[int, ...]) -> float:
    """Of one sample's forward and backward pass."""
    net = models.build(model, classes=10, shape=shape)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(net(torch.rand(4, *shape)), torch.arange(4)).backward()
    return counter.get_total_flops() / 4


def peak() -> float:
    """FLOPs per second of a matrix product, the best of ten."""
    a, b = torch.rand(2, 1024, 1024)
    times = []
    for _ in range(10):
        started = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - started)
    return 2 * 1024**3 / min(times)


def speed(data: Federation, model: str, batch: int) -> float:
    """Samples per CPU second."""
    local = {"batch_size": batch, "lr": 0.01}
    act, taken = Session._act, []

    def timed(self: Session, t: int) -> None:
        started = time.process_time()
        act(self, t)
        taken.append(time.process_time() - started)

    with mock.patch.object(Session, "_act", timed):
        result = Experiment("fedavg", data, model, rounds=1, eval_every=0, local=local).run()
    return sum(row["samples"] for row in result.rounds) / sum(taken)


def print_profile(model: str, shape: tuple[int, ...], batch: int, steps: int = 10) -> None:
    """The operators that take most of a step."""
    net = models.build(model, classes=10, shape=shape).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = list(net.parameters())
    x, y = torch.rand(batch, *shape), torch.arange(batch) % 10

    def step() -> None:
        gradients = torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.01)

    machine.keep_freed_memory()
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    for row in rows[:8]:
        share = row.self_cpu_time_total / total
        print(f"    {row.key:40} {row.self_cpu_time_total / steps / 1000:7.2f} ms  {share:4.0%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model, shape, batch, samples in CASES:
        data, each = federation(2, samples, shape), flops(model, shape)
        reached, bounds = [], []
        for repeat in range(arguments.repeats + 1):
            found = speed(data, model, batch) * each, peak()
            if repeat:  # the first warms up
                reached.append(found[0])
                bounds.append(found[1])
        print(
            f"{model}, batch {batch}: {each / 1e6:.1f} MFLOP per sample, bound {max(bounds) / 1e9:.0f} GFLOP/s,"
            f" reached / bound: {ratios(reached, bounds)}",
            flush=True,
        )
        if arguments.profile:
            print_profile(model, shape, batch)


if __name__ == "__main__":
    main()
