"""What pfed costs over a bare PyTorch loop that does the same training steps, and what a second worker gains.

All train FedAvg on the same clients, batches and network, evaluation off, and take turns. CPU seconds (with those of
workers) tell what is added to the work; wall time tells what a second worker is good for, if the machine is quiet.

    python benchmarks/overhead.py [--repeats 5] [--rounds 3] [--batch 10] [--models lenet5,cnn]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import federation, ratios

from pfed import Experiment, Federation, machine, models, streams

LR = 0.05
WAYS = {"serial": ("serial", None), "1 worker": ("processes", 1), "2 workers": ("processes", 2)}


def bare(data: Federation, model: str, rounds: int, batch: int) -> int:
    """FedAvg by hand; returns the number of samples trained on."""
    net = models.build(model, classes=len(data.classes), shape=data.shape).to(memory_format=torch.channels_last)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    samples = 0
    for t in range(1, rounds + 1):
        total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()}
        for k, client in enumerate(data.clients):
            x, y = client.train.take()
            net.load_state_dict(weights)
            optimizer = torch.optim.SGD(net.parameters(), lr=LR, foreach=True)
            order = torch.from_numpy(streams.rng(0, "batch_order", k, t, "train").permutation(len(y)))
            for i in range(0, len(y), batch):
                index = order[i : i + batch]
                optimizer.zero_grad()
                F.cross_entropy(net(x[index]), y[index]).backward()
                optimizer.step()
                samples += len(index)
            for name, tensor in net.state_dict().items():
                total[name] += tensor.double() * len(y)
        size = sum(len(client.train) for client in data.clients)
        weights = {name: (tensor / size).float() for name, tensor in total.items()}
    return samples


def ours(data: Federation, model: str, rounds: int, batch: int, engine: str, workers: int | None) -> int:
    local = {"batch_size": batch, "lr": LR}
    settings = {"rounds": rounds, "eval_every": 0, "local": local, "engine": engine, "workers": workers}
    result = Experiment("fedavg", data, model, **settings).run()
    return sum(row["samples"] for row in result.rounds)


def measured(work: Callable[[], int], samples: int) -> tuple[float, float]:
    """CPU and wall seconds, children's too; the samples must be as many as agreed."""
    before, started = os.times(), time.perf_counter()
    assert work() == samples
    after = os.times()
    return sum(after[:4]) - sum(before[:4]), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--models", default="lenet5,cnn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine.keep_freed_memory()  # for the bare loop too
    data = federation(8, 600, (1, 28, 28))
    samples = arguments.rounds * 8 * 600
    for model in arguments.models.split(","):
        job = (data, model, arguments.rounds, arguments.batch)
        work: dict[str, Callable[[], int]] = {"bare": lambda job=job: bare(*job)}
        work |= {name: lambda job=job, way=way: ours(*job, *way) for name, way in WAYS.items()}
        taken = {name: [] for name in work}
        for repeat in range(arguments.repeats + 1):
            for name, run in work.items():
                found = measured(run, samples)
                if repeat:  # the first of each warms up
                    taken[name].append(found)
        cpu, wall = ({name: [both[i] for both in found] for name, found in taken.items()} for i in (0, 1))
        for name in WAYS:
            print(f"{model}: CPU of {name} / bare loop: {ratios(cpu[name], cpu['bare'])}")
        print(f"{model}: wall of 1 worker / 2 workers: {ratios(wall['1 worker'], wall['2 workers'])}")


if __name__ == "__main__":
    main()
