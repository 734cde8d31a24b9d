"""How long rounds take: with a checkpoint after each beside none, and with two workers beside one.

A hundred clients with 600 images of Fashion-MNIST's shape (noise), ten of them per round, one epoch in batches of 50,
the CNN with 582,026 parameters, evaluation off. The settings take turns; what counts are ratios within a repetition.
A round lasts from its beginning to the beginning of the next one, so that a checkpoint in between is part of it. On a
noisy machine a ratio of two runs can't show a few percent, so the share of checkpoints is also measured inside one run.

    python benchmarks/rounds.py [--repeats 5] [--rounds 4]
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

from noise import federation

from pfed import Experiment
from pfed.session import Session

SETTINGS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg, checkpoints": {"checkpoint_every": 1},
    "ditto": {},
    "ditto, checkpoints": {"checkpoint_every": 1},
    "fedavg, 1 worker": {"engine": "processes", "workers": 1},
    "fedavg, 2 workers": {"engine": "processes", "workers": 2},
}
PAIRS = [
    ("fedavg, checkpoints", "fedavg"),
    ("ditto, checkpoints", "ditto"),
    ("fedavg, 1 worker", "fedavg"),
    ("fedavg, 2 workers", "fedavg, 1 worker"),
    ("fedavg, 2 workers", "fedavg"),
]


def seconds(name: str, data: Any, rounds: int) -> tuple[float, float]:
    """The median time of a round, the first left out, and the share of it that went into a checkpoint."""
    act, save, began, saving = Session._act, Session._save, [], []

    def noting(self: Session, t: int) -> None:
        began.append(time.perf_counter())
        act(self, t)

    def timed(self: Session) -> None:
        started = time.perf_counter()
        save(self)
        saving.append(time.perf_counter() - started)

    local = {"batch_size": 50, "lr": 0.05}
    method = name.partition(",")[0]
    experiment = Experiment(
        method, data, "cnn", rounds=rounds + 2, fraction=0.1, eval_every=0, local=local, **SETTINGS[name]
    )
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(Session, _act=noting, _save=timed):
        experiment.run(Path(folder) if "checkpoints" in name else None)
    round = statistics.median(later - earlier for earlier, later in itertools.pairwise(began[2:]))
    return round, statistics.median(saving) / round


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    data = federation(100, 600, (1, 28, 28))
    taken: dict[str, list[float]] = {name: [] for name in SETTINGS}
    shares: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for _ in range(arguments.repeats):
        for name in SETTINGS:
            round, share = seconds(name, data, arguments.rounds)
            taken[name].append(round)
            shares[name].append(share)
    for name, found in taken.items():
        said = f", {100 * statistics.median(shares[name]):.2f} % of it for its checkpoint" if "check" in name else ""
        print(f"{name:22} {statistics.median(found):.3f} s per round{said}")
    for one, other in PAIRS:
        ratios = [a / b for a, b in zip(taken[one], taken[other], strict=True)]
        middle = statistics.median(ratios)
        print(f"{one} / {other}: median {middle:.3f}, range {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
