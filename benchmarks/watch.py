"""What it costs a run that someone watches it, and what a watch costs when nothing happens.

FedAvg on eight clients with 600 images (noise), LeNet-5, evaluation after every round. A watch, which one client
follows as a browser does (the stream, and the report whenever a round is done), is stopped and let go on in turns of
some rounds of the same run, so that whatever else the machine does meets both alike. CPU seconds of the run's process
tell what is added to its work (its workers' are not counted); wall time tells what it waits for. With as many workers
as cores, the watch and the run have to share these.

    python benchmarks/watch.py [--workers 1] [--turns 20] [--rounds 8] [--idle 30] [--runs 50]
"""

from __future__ import annotations

import argparse
import contextlib
import http.cookiejar
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from common import federation, ratios

from pfed import Experiment
from pfed.cohort import Cohort
from pfed.methods.fedavg import FedAvg
from pfed.wire import State


def follow(address: str) -> None:
    """As the page does: after each change, the report of all runs that go on."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    opener.open(address).read()
    base = address.partition("?")[0]
    print("following", flush=True)
    for line in opener.open(f"{base}events"):
        if line.startswith(b"data: "):
            names = [run["run"] for run in json.loads(line[6:])["runs"] if run["state"] == "running"]
            if names:
                opener.open(f"{base}report?{urllib.parse.urlencode([('run', name) for name in names])}").read()


@contextlib.contextmanager
def watched(runs: Path) -> Iterator[int]:
    """A watch with one client; the process id of the watch."""
    pipe = {"stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "pfed", "watch", "--json", "--no-open", "--port", "0", "--runs", str(runs)]
    watch = subprocess.Popen(command, **pipe)
    address = json.loads(watch.stdout.readline())["address"]
    client = subprocess.Popen([sys.executable, __file__, "--follow", address], **pipe)
    client.stdout.readline()
    try:
        yield watch.pid
    finally:
        for process in (client, watch):
            process.terminate()
            process.communicate()


def cpu(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Turns:
    """The first rounds warm up; then turns without the watch and with it, each of so many rounds."""

    def __init__(self, pid: int, rounds: int):
        self._pid, self._rounds = pid, rounds
        self._marks: list[tuple[float, ...]] = []  # wall, CPU of the run, CPU of the watch

    def round(self, number: int) -> None:
        """A round begins; perhaps a turn does."""
        turn, place = divmod(number - 1, self._rounds)
        if place == 0:
            self._marks.append((time.perf_counter(), time.process_time(), cpu(self._pid)))
            os.kill(self._pid, signal.SIGSTOP if turn % 2 else signal.SIGCONT)

    def taken(self) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """What turns with the watch took, and those without just before them."""
        spans = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(self._marks)]
        return spans[2::2], spans[1::2]


@dataclass(frozen=True)
class Timed(FedAvg):
    turns: ClassVar[Turns]

    def round(self, server: State, cohort: Cohort) -> None:
        self.turns.round(cohort.round)
        super().round(server, cohort)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--idle", type=float, default=30)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        follow(arguments.follow)
        return
    torch.set_num_threads(1)
    data = federation(8, 600, (1, 28, 28))
    rounds = arguments.rounds * (2 * arguments.turns + 1) + 1
    engine = {"engine": "processes", "workers": arguments.workers} if arguments.workers > 1 else {}
    experiment = Experiment(Timed(), data, "lenet5", rounds=rounds, local={"batch_size": 10, "lr": 0.05}, **engine)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        with watched(runs) as pid:
            Timed.turns = Turns(pid, arguments.rounds)
            try:
                experiment.run(runs)
            finally:
                os.kill(pid, signal.SIGCONT)
        watching, alone = Timed.turns.taken()
        print(
            f"{len(watching)} turns of {arguments.rounds} rounds, {statistics.median(t[0] for t in alone):.1f} s each"
        )
        for place, what in ((1, "CPU"), (0, "wall")):
            pair = [[turn[place] for turn in turns] for turns in (watching, alone)]
            whole = sum(pair[0]) / sum(pair[1])
            print(f"{what} of a run that is watched / alone: {ratios(*pair)}, in all {whole:.3f}")
        share = sum(turn[2] for turn in watching) / sum(turn[0] for turn in watching)
        print(f"CPU of the watch meanwhile: {100 * share:.1f} % of a core")
        many, (first,) = Path(folder, "many"), runs.iterdir()
        for number in range(arguments.runs):
            shutil.copytree(first, many / f"run-{number}")
        with watched(many) as pid:
            time.sleep(5)
            before = cpu(pid)
            time.sleep(arguments.idle)
            share = (cpu(pid) - before) / arguments.idle
        print(f"CPU of a watch of {arguments.runs} finished runs: {100 * share:.2f} % of a core")


if __name__ == "__main__":
    main()
