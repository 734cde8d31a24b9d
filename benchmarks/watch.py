"""What it costs a run that someone watches it, and what a watch costs when nothing happens.

FedAvg on eight clients with 600 images (noise), LeNet-5, evaluation after every round. Runs with a watch, which one
client follows as a browser does (the stream, and the report whenever a round is done), and without take turns. CPU
seconds of the run's process tell what is added to its work; wall time tells what it waits for, if the machine is quiet.

    python benchmarks/watch.py [--repeats 5] [--rounds 20] [--idle 30] [--runs 50]
"""

from __future__ import annotations

import argparse
import contextlib
import http.cookiejar
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from common import federation, ratios

from pfed import Experiment


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


def measured(experiment: Experiment, runs: Path) -> tuple[float, float]:
    before, started = time.process_time(), time.perf_counter()
    experiment.run(runs)
    return time.process_time() - before, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--idle", type=float, default=30)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.follow:
        follow(arguments.follow)
        return
    torch.set_num_threads(1)
    data = federation(8, 600, (1, 28, 28))
    local = {"batch_size": 10, "lr": 0.05}
    taken: dict[str, list[tuple[float, float]]] = {"alone": [], "watched": []}
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats + 1):
            for way in taken:
                experiment = Experiment("fedavg", data, "lenet5", rounds=arguments.rounds, local=local)
                runs = Path(folder, way)
                with watched(runs) if way == "watched" else contextlib.nullcontext(0) as pid:
                    before = cpu(pid) if pid else 0.0
                    found = measured(experiment, runs)
                    share = (cpu(pid) - before) / found[1] if pid else 0.0
                if repeat:  # the first of each warms up
                    taken[way].append(found)
                    shares += [share] if pid else []
        for place, what in enumerate(("CPU", "wall")):
            pair = ([found[place] for found in taken[way]] for way in ("watched", "alone"))
            print(f"{what} of a run that is watched / alone: {ratios(*pair)}")
        print(f"CPU of the watch meanwhile: {100 * statistics.median(shares):.1f} % of a core")
        many, (first, *_) = Path(folder, "many"), sorted(Path(folder, "alone").iterdir())
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
