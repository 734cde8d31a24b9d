"""What a round of each method costs, as a multiple of FedAvg's.

Clients with images of CIFAR's shape (noise: only the time counts), LeNet-5, one epoch, evaluation off, one thread; the
methods take turns in one process. The ratio of CPU seconds is what counts; wall time on a shared machine is noise.
CD2-pFed has its final share of private channels from the start, so that its sub-networks are run in every round.

    python benchmarks/methods.py [--repeats 5] [--samples 1024] [--batch 128]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import federation

from pfed import Experiment, Federation

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "local": {},
    "fedrep": {"head_epochs": 10},
    "fedbsd": {"head_epochs": 10},
    "ditto": {},
    "dualfed": {"lam": 1.0},
    "fedcd": {},
    "partialfed-fix": {"strategy": "wo_fc", "finetune_epochs": 0},
    "partialfed-adaptive": {"finetune_epochs": 0},
    "cd2pfed": {"progressive": False},
    "cd2pfed, masks": {"progressive": False},
}


def seconds(method: str, data: Federation, batch: int, shortcuts: bool) -> float:
    """CPU time of two rounds."""
    settings = {"rounds": 2, "eval_every": 0, "local": {"batch_size": batch, "lr": 0.01}, "exact_shortcuts": shortcuts}
    experiment = Experiment(method.partition(",")[0], data, "lenet5", hyper=METHODS[method], **settings)
    started = time.process_time()
    experiment.run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = federation(2, arguments.samples, (3, 32, 32), public=64)
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    for repeat in range(arguments.repeats + 1):
        taken = {method: seconds(method, data, arguments.batch, "masks" not in method) for method in METHODS}
        for method in METHODS if repeat else ():  # the first of each warms up
            ratios[method].append(taken[method] / taken["fedavg"])
    for method, found in ratios.items():
        print(f"{method:20} median {statistics.median(found):.2f}, range {min(found):.2f} to {max(found):.2f}")


if __name__ == "__main__":
    main()
