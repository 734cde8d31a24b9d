"""Experiment trackers: the numbers of a run as it goes, in TensorBoard, MLflow or Weights & Biases.

A tracker is a class with three verbs in `TRACKERS`. Its package is imported when it is asked for. One that fails says
so once and is silent from then on: the run goes on, and its record has all numbers anyway.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pfed import compat, metrics
from pfed.cohort import Ledger
from pfed.errors import unknown
from pfed.evaluate import Evaluation
from pfed.result import Result
from pfed.store import Store

PROJECT = "pfed"  # MLflow's experiment, wandb's project, unless their variables say otherwise
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """What a tracker must know of a run: its folder, the first round to come, and the id that the tracker gave it."""

    name: str
    folder: Path | None
    first: int
    id: str | None


class Tracker(Protocol):
    package: str  # what is imported
    replaces: bool  # whether a round that is told again takes the place of what was told before

    def begin(self, run: Run, config: Mapping[str, Any]) -> str | None: ...  # the id to go on with
    def round(self, t: int, numbers: Numbers) -> None: ...
    def end(self, state: str, summary: Numbers) -> None: ...  # complete (with a summary), stopped or failed


class TensorBoard:
    package, replaces = "torch.utils.tensorboard", True

    def begin(self, run: Run, config: Mapping[str, Any]) -> None:
        folder = run.folder / "tensorboard" if run.folder else Path("tensorboard", run.name)
        package, self._last = load("tensorboard"), run.first
        self._writer = package.SummaryWriter(str(folder), purge_step=run.first)  # hides that round and later ones
        plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in config.items()}
        _, settings, _ = package.summary.hparams(plain, {})
        self._writer.file_writer.add_summary(settings, run.first)

    def round(self, t: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, t)
        self._writer.flush()
        self._last = t

    def end(self, state: str, summary: Numbers) -> None:
        self.round(self._last, summary)
        self._writer.close()


class MLflow:
    package, replaces = "mlflow", False

    def begin(self, run: Run, config: Mapping[str, Any]) -> str:
        self._mlflow, self._last = load("mlflow"), run.first
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table that it makes
        local = f"sqlite:///{(run.folder.parent if run.folder else Path()).resolve() / 'mlflow.db'}"
        self._client = self._mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(project)
        owner = found.experiment_id if found else self._client.create_experiment(project)
        self._id = run.id or str(self._client.create_run(owner, run_name=run.name).info.run_id)
        params = [self._mlflow.entities.Param(name, str(value)) for name, value in config.items()]
        self._client.log_batch(self._id, params=[] if run.id else params)  # they can't be changed
        self._client.update_run(self._id, status="RUNNING")
        return self._id

    def round(self, t: int, numbers: Numbers) -> None:
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        self._client.log_batch(self._id, [metric(name, value, now, t) for name, value in numbers.items()])
        self._last = t

    def end(self, state: str, summary: Numbers) -> None:
        self.round(self._last, summary)
        self._client.set_terminated(self._id, {"complete": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


class WandB:
    package, replaces = "wandb", False

    def begin(self, run: Run, config: Mapping[str, Any]) -> str:
        wandb, id = load("wandb"), run.id or uuid.uuid4().hex[:8]
        where = {"project": os.environ.get("WANDB_PROJECT") or PROJECT, "dir": run.folder, "id": id, "name": run.name}
        self._run = wandb.init(**where, resume="allow", settings={"console": "off", "silent": not sys.stderr.isatty()})
        self._run.config.update(dict(config), allow_val_change=True)  # a run may be made longer
        return id

    def round(self, t: int, numbers: Numbers) -> None:
        self._run.log(dict(numbers), step=t)

    def end(self, state: str, summary: Numbers) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(state != "complete"))


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def load(name: str) -> Any:
    """A tracker's package; an error where there is no such tracker, or its package is missing."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
    with warnings.catch_warnings(action="ignore"):
        return compat.optional(TRACKERS[name].package, name)


def make(track: str | None) -> dict[str, Tracker]:
    """The trackers that are asked for, none of them begun."""
    names = [name.strip() for name in (track or "").split(",") if name.strip()]
    return {name: TRACKERS[name]() for name in names if load(name)}


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """All trackers of a run, from its start, or from where it goes on after round `done`, to its end."""

    def __init__(self, track: str | None, store: Store, stem: str, config: dict[str, Any], done: int):
        self._store, self._record, self._first = store, store.record, done + 1
        self._name = store.run if store.folder else f"{stem}-{uuid.uuid4().hex[:8]}"
        tables = {f"{table}.{key}": value for table in ("local", "hyper") for key, value in config[table].items()}
        self._config = {key: value for key, value in (config | tables).items() if key not in ("local", "hyper")}
        self._active = make(track)
        before = [row for row in self._record.rounds() if row["round"] <= done] if self._active else []
        self._up, self._down = (sum(row[way] for row in before) for way in ("bytes_up", "bytes_down"))
        self._kept: dict[str, Any] = {name: {"id": None, "round": -1} for name in self._active}
        self._kept |= self._record.get("trackers", {})

    def __enter__(self) -> Trackers:
        for name, tracker in list(self._active.items()):
            with self._may_fail(name):
                run = Run(self._name, self._store.folder, self._first, self._kept[name]["id"])
                self._kept[name]["id"] = tracker.begin(run, self._config)
        return self

    def round(self, t: int, seconds: float, ledger: Ledger, evaluation: Evaluation | None) -> None:
        if not self._active:
            return
        self._up, self._down = self._up + sum(ledger.up.values()), self._down + sum(ledger.down.values())
        numbers = {"bytes_up": self._up, "bytes_down": self._down, "seconds": seconds, "samples": ledger.samples}
        numbers |= {"failures": len(ledger.failures)} | _summary(evaluation or Evaluation())
        for name, tracker in list(self._active.items()):
            with self._may_fail(name):
                if tracker.replaces or t > self._kept[name]["round"]:
                    tracker.round(t, numbers)
                    self._kept[name]["round"] = t

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        state, summary = "failed" if kind and issubclass(kind, Exception) else "stopped", {}
        if kind is None and self._active:
            found = Result(self._record, self._store.run).metrics
            state, summary = "complete", {f"final/{name}": value for name, value in found.items()}
        for name, tracker in list(self._active.items()):
            with self._may_fail(name):
                tracker.end(state, summary)

    @contextlib.contextmanager
    def _may_fail(self, name: str) -> Iterator[None]:
        try:
            with warnings.catch_warnings(action="ignore"):  # what packages tell their developers
                yield
        except Exception as error:
            del self._active[name]
            why = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            warnings.warn(f"The tracker {name} failed and is left out from now on: {why}.", stacklevel=3)
        else:
            self._record.set(trackers=self._kept)


def _summary(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation by the names of `Result.metrics`: means over clients, and worst deciles."""
    found = dict(evaluation.overall)
    for name in sorted({name for _, name in evaluation.clients}):
        each = {client: value for (client, metric), value in evaluation.clients.items() if metric == name}
        summary = metrics.summarise(each, dict.fromkeys(each, 1))
        found[name] = summary["mean"]
        found |= {f"{name}/worst-decile": summary["worst-decile"]} if name.count("/") == 1 else {}
    return found
