"""pfed beside pfl-research, Flower, PFLlib and FL-bench on exactly the same work.

A hundred clients with 600 images of Fashion-MNIST's shape (noise), two classes each, ten clients per round, batches of
10, SGD, the CNN with 582,026 parameters, evaluation off. FedAvg has one local epoch; FedRep has one on the body after 1
or 10 on the head. Each contender (benchmarks/peers/) is a process of its own, at its best setting, and they take turns.
The first round is told apart; of the later ones the median counts. All must have trained on as many samples.

    python benchmarks/peers.py [--repeats 5] [--rounds 5] [--peers PYTHON] [--pfllib FOLDER] [--flbench FOLDER]
        [--threads 2]

Two threads in one process burn CPU time while one waits for the other, the more so on a busy machine: there, compare
CPU seconds with --threads 1, which concerns the peers in one process.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from common import memory, ratios

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import shared

FOLDER = Path(shared.__file__).parent
WORKS = {0: "FedAvg", 1: "FedRep, 1 head epoch", 10: "FedRep, 10 head epochs"}
OURS = "pfed"
QUIET = 0.3  # cores that others may use
INSTALL = 'python -m venv DIR && DIR/bin/pip install torch==2.13.0 "pfl[pytorch]==0.6.0" "flwr[simulation]==1.41.0"'
SETTINGS = {
    "RAY_worker_niceness": "0",  # Ray would start its workers at 15
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
}


@dataclass(frozen=True)
class Contender:
    name: str
    script: str
    python: str
    works: tuple[int, ...]
    threads: int = 1
    path: str | None = None


@dataclass(frozen=True)
class Run:
    """Seconds, but for the memory and the cores that others used."""

    wall: float
    cpu: float
    startup: float
    first: float
    peak: float  # MB
    foreign: float


def contenders(given: argparse.Namespace) -> list[Contender]:
    """Those that are there; one line for each that is not."""
    found = [Contender(OURS, "ours.py", sys.executable, (0, 1, *([10] if given.pfllib else [])))]
    python = given.peers or sys.executable
    if given.peers:
        found.append(Contender("pfl-research", "pfl_research.py", python, (0,), given.threads))
        found.append(Contender("Flower", "flower.py", python, (0, 1)))
    else:
        print(f"pfl-research and Flower are left out: {INSTALL}, then --peers DIR/bin/python")
    clones = {"PFLlib": ("pfllib", "TsingZ0", (0, 1, 10)), "FL-bench": ("flbench", "KarhouTam", (0, 1))}
    for name, (option, owner, works) in clones.items():
        if path := getattr(given, option):
            found.append(Contender(name, f"{option}.py", python, works, given.threads, path))
        else:
            needs = "the interpreter of --peers needs its requirements"
            print(f"{name} is left out: git clone https://github.com/{owner}/{name}, then --{option} {name} ({needs})")
    return found


def idle_load(seconds: float = 1.0) -> float:
    """How many cores others use."""
    own, all, started = sum(shared.tree(os.getpid()).values()), shared.busy(), time.perf_counter()
    time.sleep(seconds)
    used = shared.busy() - all - (sum(shared.tree(os.getpid()).values()) - own)
    return max(0.0, used) / (time.perf_counter() - started)


def run(contender: Contender, heads: int, rounds: int) -> Run:
    """One run; raises RuntimeError with the last line of its errors if it fails."""
    before = idle_load()
    command = [contender.python, str(FOLDER / contender.script), "--head-epochs", str(heads), "--rounds", str(rounds)]
    command += ["--threads", str(contender.threads)]
    command += ["--path", contender.path] if contender.path else []
    environment = os.environ | SETTINGS | {"OMP_NUM_THREADS": str(contender.threads)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, memory(process.pid) / 2**20)
            time.sleep(0.5)
        out.seek(0)
        err.seek(0)
        told = [json.loads(line) for line in out if line.startswith(('{"startup"', '{"round"'))]
        last = collections.deque(err, 1)
    if process.returncode or len(told) != rounds + 1:
        raise RuntimeError(last[0].strip() if last else f"exit code {process.returncode}")
    [start, first, *later] = told
    samples = shared.CHOSEN * shared.SAMPLES * (heads + 1)
    assert all(row["samples"] == samples for row in told[1:]), f"{contender.name} must train on {samples}. Got {told}"
    wall, cpu, foreign = (statistics.median(row[key] for row in later) for key in ("wall", "cpu", "foreign"))
    return Run(wall, cpu, start["startup"], first["wall"], peak, max(before, foreign))


def show(work: str, found: dict[str, list[Run]]) -> None:
    """Medians over the repetitions, and each peer's paired ratios to ours."""
    columns = {"s/round": "wall", "CPU-s/round": "cpu", "start-up s": "startup", "first round s": "first"}
    columns |= {"peak PSS MB": "peak", "foreign cores": "foreign"}
    print(f"\n{work:22s}" + "".join(f"{title:>14s}" for title in columns))
    for name, runs in found.items():
        medians = (statistics.median(getattr(run, field) for run in runs) for field in columns.values())
        print(f"{name:22s}" + "".join(f"{value:14.2f}" if value < 100 else f"{value:14.0f}" for value in medians))
    for name, runs in found.items():
        if name != OURS:
            for title, field in (("wall", "wall"), ("CPU", "cpu")):
                pairs = ([getattr(run, field) for run in which] for which in (runs, found[OURS]))
                print(f"{title} of {name} / {OURS}: {ratios(*pairs)}")
    loads = [run.foreign for runs in found.values() for run in runs]
    if max(loads) > QUIET:
        print(f"Others used up to {max(loads):.2f} cores (more than {QUIET}): wall times are not to be trusted,")
        print("nor CPU times of peers with two threads in one process (see --threads); other CPU ratios count.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--pfllib", metavar="FOLDER")
    parser.add_argument("--flbench", metavar="FOLDER")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds must be at least 2, since the first is told apart. Got {given.rounds}.")
    there = contenders(given)
    found: dict[int, dict[str, list[Run]]] = {heads: {} for heads in WORKS}
    lost: set[tuple[str, int]] = set()
    for repeat in range(given.repeats):
        for heads, work in WORKS.items():
            for contender in there:
                if heads not in contender.works or (contender.name, heads) in lost:
                    continue
                try:
                    one = run(contender, heads, given.rounds)
                except RuntimeError as error:
                    if contender.name == OURS:
                        raise
                    print(f"{contender.name} failed at {work} and is left out: {error}")
                    lost.add((contender.name, heads))
                    found[heads].pop(contender.name, None)
                    continue
                found[heads].setdefault(contender.name, []).append(one)
                told = f"{one.wall:.2f} s, {one.cpu:.2f} CPU-s, others {one.foreign:.2f} cores"
                print(f"{repeat + 1}/{given.repeats} {work}: {contender.name} {told}", flush=True)
    for heads, work in WORKS.items():
        if found[heads]:
            show(work, found[heads])


if __name__ == "__main__":
    main()
