"""Whether time and memory grow with the federation.

Ten clients of 100, 1,000 and 10,000 train in a round, on 600 images each in batches of 10; every client has a private
CNN of 2.3 MB from the start (Ditto, whose personal models are put in place before the first round). Then FedAvg with
100 and 1,000 clients in one round, 20 images each, where only a mean is kept. Two workers; each case is a process of
its own. Memory is the largest sum of proportional shares (PSS) of a process and its workers.

    python benchmarks/scaling.py [--rounds 6] [--folder DIR]     DIR needs room for 24 GB
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from common import federation, memory

CASES = [
    ("ditto", 100, 10),
    ("ditto", 1_000, 10),
    ("ditto", 10_000, 10),
    ("fedavg", 100, 100),
    ("fedavg", 1_000, 1_000),
]
BEAT = 0.2  # seconds between two looks at memory


def child(method: str, clients: int, each: int, rounds: int, folder: str, started: float) -> None:
    """One case; prints what it measured."""
    from pfed import Experiment, step
    from pfed.methods.ditto import Ditto
    from pfed.session import Session
    from pfed.tensors import Tensors

    @dataclass(frozen=True)
    class Placed(Ditto):
        """Ditto whose clients all have their personal model before the first round."""

        def start(self, server: Any, cohort: Any) -> None:
            cohort.mean(self.place, "done", **self.download(server))

        @step
        def place(self, client: Any, params: Tensors) -> dict[str, Any]:
            client.state["v"] = params
            return {"done": 1.0}

    act, began = Session._act, []

    def noting(self: Session, t: int) -> None:
        began.append(time.time())
        act(self, t)

    settings = {"rounds": rounds + 1, "fraction": each / clients, "eval_every": 0, "checkpoint_every": 0}
    local = {"batch_size": 10, "lr": 0.05}
    data = federation(clients, 600 if method == "ditto" else 20, (1, 28, 28))
    experiment = Experiment(
        Placed() if method == "ditto" else method, data, "cnn", local=local, engine="processes", workers=2, **settings
    )
    with mock.patch.object(Session, "_act", noting), mock.patch.object(Session, "_judges", return_value=False):
        experiment.run(Path(folder))
    seconds = [later - earlier for earlier, later in itertools.pairwise(began[2:])]
    print(json.dumps({"start": began[0] - started, "placed": began[1] - began[0], "seconds": seconds}))


def run(case: tuple[str, int, int], rounds: int, folder: str) -> tuple[dict[str, Any], int]:
    """What a case measured, and the most memory that it took."""
    argv = [sys.executable, __file__, "--case", *map(str, case), "--rounds", str(rounds), "--folder", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STARTED": str(time.time())}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
    peak, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(BEAT):
            peak[0] = max(peak[0], memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    return json.loads(out.splitlines()[-1]), peak[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        method, clients, each = arguments.case
        child(method, int(clients), int(each), arguments.rounds, arguments.folder, float(os.environ["STARTED"]))
        return
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found, peak = run(case, arguments.rounds if case[0] == "ditto" else 3, folder)
        seconds = found["seconds"]
        print(
            f"{case[0]}, {case[1]:,} clients, {case[2]:,} per round: start-up {found['start']:.1f} s,"
            f" round {statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}),"
            f" peak PSS {peak / 2**20:,.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
