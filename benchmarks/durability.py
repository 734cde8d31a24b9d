"""What a checkpoint after every round costs.

A hundred clients with 600 images of Fashion-MNIST's shape (noise), ten of them per round, one epoch in batches of 50,
the CNN with 582,026 parameters, evaluation off. Runs with and without checkpoints take turns. A round lasts from its
beginning to the beginning of the next one, so that a checkpoint in between is part of it. On a noisy machine a ratio of
two runs can't show a few percent, so the share of checkpoints is also measured inside one run.

    python benchmarks/durability.py [--repeats 5] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from common import federation, ratios

from pfed import Experiment
from pfed.session import Session

METHODS = ("fedavg", "ditto")


def seconds(method: str, data: Any, rounds: int, saves: bool) -> tuple[float, float]:
    """The median time of a round, the first left out, and the share of it that went into a checkpoint."""
    act, save, began, saving = Session._act, Session._save, [], []

    def noting(self: Session, t: int) -> None:
        began.append(time.perf_counter())
        act(self, t)

    def timed(self: Session) -> None:
        started = time.perf_counter()
        save(self)
        saving.append(time.perf_counter() - started)

    settings = {"rounds": rounds + 2, "fraction": 0.1, "eval_every": 0, "checkpoint_every": int(saves)}
    experiment = Experiment(method, data, "cnn", local={"batch_size": 50, "lr": 0.05}, **settings)
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(Session, _act=noting, _save=timed):
        experiment.run(Path(folder) if saves else None)
    round = statistics.median(later - earlier for earlier, later in itertools.pairwise(began[2:]))
    return round, statistics.median(saving) / round


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    data = federation(100, 600, (1, 28, 28))
    taken: dict[tuple[str, bool], list[float]] = {(method, saves): [] for method in METHODS for saves in (True, False)}
    shares: dict[tuple[str, bool], list[float]] = {key: [] for key in taken}
    for _ in range(arguments.repeats):
        for key in taken:
            round, share = seconds(key[0], data, arguments.rounds, key[1])
            taken[key].append(round)
            shares[key].append(share)
    for method in METHODS:
        share = 100 * statistics.median(shares[method, True])
        print(f"{method}: {share:.2f} % of a round for its checkpoint", end="; ")
        print(f"with checkpoints / without: {ratios(taken[method, True], taken[method, False])}", flush=True)


if __name__ == "__main__":
    main()
