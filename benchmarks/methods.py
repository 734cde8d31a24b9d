"""What a round of each method costs, with and without the exact shortcuts.

Two clients with images of CIFAR's shape (noise: only the time counts), LeNet-5, one epoch, evaluation off, one thread;
all take turns in one process, FedAvg among them. What counts are CPU seconds beside FedAvg's of the same turn. CD2-pFed
has its final share of private channels from the start, so that its sub-networks are run in every round. Samples are
those trained on, in all phases together; bytes are those of one client in one round, up and down.

    python benchmarks/methods.py [--repeats 5] [--samples 1024] [--batch 128]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import federation, ratios

from pfed import Experiment, Federation

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "local": {},
    "ditto": {},
    "fedrep": {"head_epochs": 10},
    "cd2pfed": {"progressive": False},
    "fedcd": {},
    "dualfed": {"lam": 1.0, "stage2_bn": "eval"},
    "fedbsd": {"head_epochs": 10},
    "partialfed-fix": {"strategy": "wo_fc", "finetune_epochs": 0},
    "partialfed-adaptive": {"finetune_epochs": 0},
}
ROUNDS = 2


def measured(method: str, data: Federation, batch: int, shortcuts: bool) -> tuple[float, float, float]:
    """CPU seconds, samples and bytes of one round."""
    local = {"batch_size": batch, "lr": 0.01}
    settings = {"rounds": ROUNDS, "eval_every": 0, "local": local, "exact_shortcuts": shortcuts}
    experiment = Experiment(method, data, "lenet5", hyper=METHODS[method], **settings)
    started = time.process_time()
    result = experiment.run()
    taken = time.process_time() - started
    rounds = [row for row in result.rounds if 1 <= row["round"] <= ROUNDS]
    moved = sum(row["bytes_up"] + row["bytes_down"] for row in rounds) / len(data.clients)
    return taken / ROUNDS, sum(row["samples"] for row in rounds) / ROUNDS, moved / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = federation(2, arguments.samples, (3, 32, 32), public=64)
    keys = [(method, shortcuts) for method in METHODS for shortcuts in (True, False)]
    taken: dict[tuple[str, bool], list[float]] = {key: [] for key in keys}
    for repeat in range(arguments.repeats + 1):
        found = {key: measured(key[0], data, arguments.batch, key[1]) for key in keys}
        for key in keys if repeat else ():  # the first of each warms up
            taken[key].append(found[key][0])
    for key in keys:
        method, shortcuts = key
        seconds, (_, samples, moved) = statistics.median(taken[key]), found[key]
        print(
            f"{method:20} {'' if shortcuts else 'without shortcuts':18} {seconds:6.2f} CPU-s per round,"
            f" {samples / seconds:7,.0f} samples per CPU-s, {moved / 1e6:6.3f} MB per client;"
            f" beside FedAvg: {ratios(taken[key], taken['fedavg', True])}"
        )


if __name__ == "__main__":
    main()
