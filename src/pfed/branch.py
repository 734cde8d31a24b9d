"""Fine-tuning that starts from a finished run of its base method, instead of running all rounds again.

NAME+ft and NAME do the same, bit for bit, until the last round: streams are named by seed, client and round, not by
method. So the base run's folder is copied, its copy becomes a run of NAME+ft that stands after its last round, and is
gone on with.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfed import store
from pfed.experiment import Experiment
from pfed.record import RECORD, Record
from pfed.registry import SUFFIX
from pfed.result import Result
from pfed.store import Store


def base(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of the run that a fine-tuned one begins with; None for other methods."""
    if not config["method"].endswith(SUFFIX):
        return None
    hyper = {key: value for key, value in config["hyper"].items() if not key.startswith("ft_")}
    return {**config, "method": config["method"].removesuffix(SUFFIX), "hyper": hyper}


def finished(runs: Path, config: Mapping[str, Any]) -> Path | None:
    """A finished run of the base method of these settings, if it can be gone on with to the same figures."""
    wanted = base(config)
    if wanted is None or not _judges_last(config):
        return None
    found = store.same(runs, wanted)
    if found is None:
        return None
    with contextlib.closing(Record(found / RECORD, readonly=True)) as record:
        return found if record.get("state") == "complete" else None


def finetune(experiment: Experiment, base: Path, runs: Path) -> Result:
    """Run NAME+ft from a finished run of NAME with the same settings."""
    name, number = f"{experiment.method.label}-{base.name}", 1
    while (runs / f"{name}-{number}").exists():
        number += 1
    unfinished = runs / "copy" / base.name  # where no run is looked for, until it is whole
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(base, unfinished, ignore=shutil.ignore_patterns("lock", "pictures"))
    with contextlib.closing(Store(unfinished)) as opened:
        opened.record.set(config=experiment.config(), method=experiment.method.label, state="stopped")
        opened.record.set(taken_rounds=experiment.options.rounds)
        opened.record.flush()
        opened.rewind(experiment.options.rounds)
    whole = unfinished.rename(runs / f"{name}-{number}")
    unfinished.parent.rmdir()
    return experiment.resume(whole)


def _judges_last(config: Mapping[str, Any]) -> bool:
    """Whether the last round is judged also where it is not the end: else the base run has a figure too many."""
    every = config["eval_every"]
    return bool(config["eval_last"] > 0 or (every > 0 and config["rounds"] % every == 0))
