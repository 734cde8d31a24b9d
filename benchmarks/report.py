"""How long a report takes, and how large it is, of runs that never ran: made-up records of the given size.

python benchmarks/report.py [--methods 20] [--clients 1000] [--rounds 200] [--logged 3]
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from pfed import report
from pfed.cohort import Ledger
from pfed.evaluate import Evaluation
from pfed.record import RECORD, Record
from pfed.result import MAIN, Result

TEST = 100  # samples of a client


def record(folder: Path, method: str, clients: int, rounds: int, logged: int, rng: np.random.Generator) -> None:
    """One run that evaluates every round, in which every client logs so many numbers."""
    folder.mkdir()
    with contextlib.closing(Record(folder / RECORD)) as made:
        counts = rng.integers(0, 50, (clients, 10))
        made.add_clients((k, f"client-{k}", int(own.sum()), TEST, own.tolist()) for k, own in enumerate(counts))
        config = {"method": method, "data": "digits", "rounds": rounds, "seed": 0, "clients": clients, "local": {}}
        made.set(config=config, method=method, seed=0, state="complete", classes=list("0123456789"))
        skill = rng.uniform(0.4, 0.9, clients)
        for t in range(1, rounds + 1):
            right = rng.random((clients, TEST)) < (skill * t / rounds)[:, None]
            ledger = Ledger(up=dict.fromkeys(range(clients), 10**5), down=dict.fromkeys(range(clients), 10**5))
            noise = rng.random((logged, clients)).tolist()
            ledger.logs = {(k, f"number_{i}"): noise[i][k] for i in range(logged) for k in range(clients)}
            found = Evaluation(clients={(k, MAIN): value for k, value in enumerate(right.mean(1).tolist())})
            if t == rounds:
                found.correct = {(k, MAIN): own for k, own in enumerate(torch.from_numpy(right))}
            made.add_round(t, 1.0, ledger, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in {"methods": 20, "clients": 1000, "rounds": 200, "logged": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as place:
        names = ["local", *(f"method-{i}" for i in range(1, given.methods))]
        for name in names:
            record(Path(place) / name, name, given.clients, given.rounds, given.logged * (name != "local"), rng)
        started, cpu = time.perf_counter(), time.process_time()
        results = [Result.load(Path(place) / name) for name in names]
        read, read_cpu = time.perf_counter() - started, time.process_time() - cpu
        page = report.write(results, Path(place) / "report.html")
        whole, whole_cpu = time.perf_counter() - started, time.process_time() - cpu
        size = page.stat().st_size / 1e6
    print(
        f"{given.methods} methods, {given.clients:,} clients, {given.rounds} rounds, {given.logged} logged numbers each"
    )
    print(f"read    {read:6.1f} s ({read_cpu:.1f} s of CPU)")
    print(f"in all  {whole:6.1f} s ({whole_cpu:.1f} s of CPU)")
    print(f"page    {size:6.2f} MB")


if __name__ == "__main__":
    main()
