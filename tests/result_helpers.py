"""Runs that never ran, with the numbers that a test wants."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pfed import Result
from pfed.cohort import Ledger
from pfed.engines.base import Failure
from pfed.evaluate import Evaluation
from pfed.record import Record
from pfed.result import MAIN

EVIL = '"><script>alert(1)</script><img src=x>'


def run(
    method: str = "fedavg",
    accuracies: Sequence[Sequence[float]] = ((0.5, 0.6), (0.7, 0.9)),  # of each round, of each client
    seed: int = 0,
    names: Sequence[str] = ("Oslo", "Rome"),
    sent: int = 1000,
    failures: dict[int, str] | None = None,
    state: str = "complete",
    note: str = "",
    bits: Mapping[int, Sequence[int]] | None = None,  # which test samples of a client were right at the end
    logs: Mapping[tuple[int, str], Sequence[float]] | None = None,  # by client and name, of each round
    overall: Mapping[str, float] | None = None,  # metrics of no client, in the last evaluation
    facts: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    **config: Any,
) -> Result:
    """A run that never ran: two classes, and the given accuracies."""
    settings = {"method": method, "data": "digits", "rounds": len(accuracies), "seed": seed, "select": "last"}
    with contextlib.closing(Record(None if folder is None else folder / "record.sqlite")) as record:
        record.add_clients((k, name, 10 + k, 5, [10, k]) for k, name in enumerate(names))
        record.set(config={**settings, "local": {"lr": 0.05}, **config}, method=method, seed=seed, state=state)
        record.set(engine="serial", classes=["cat", "dog"], versions={"pfed": "0.1.0", "torch": "2.6"})
        record.add_round(0, 0.0, Ledger(), None)
        for t, values in enumerate(accuracies, start=1):
            traffic = dict.fromkeys(range(len(names)), sent) if sent else {}
            ledger = Ledger(up=traffic, down={k: 2 * n for k, n in traffic.items()})
            ledger.failures = {k: Failure("dropped", text) for k, text in (failures or {}).items()}
            ledger.logs = {key: given[t - 1] for key, given in (logs or {}).items()}
            judged = Evaluation(clients={(k, MAIN): value for k, value in enumerate(values)})
            judged.correct = {(k, MAIN): torch.tensor(own) for k, own in (bits or {}).items()}
            judged.overall = dict(overall or {}) if values and t == len(accuracies) else {}
            record.add_round(t, 1.5, ledger, judged if values else None)
        if note:
            record.event(0, "note", note)
        record.set(**(facts or {}))
        return Result(record, f"{method}-s{seed}", folder)


def made(
    method: str = "fedavg", accuracies: Sequence[Sequence[float]] = ((0.5, 0.6), (0.5, 0.9)), **more: Any
) -> Result:
    """One that ends with 50 % in Oslo and 90 % in Rome, and has a metric of no client."""
    return run(method, accuracies, overall={"ensemble/new-test": 0.25}, **more)


def alone(**more: Any) -> Result:
    """Training alone: 60 % in Oslo, 80 % in Rome."""
    return made("local", [(0.5, 0.5), (0.6, 0.8)], sent=0, **more)
