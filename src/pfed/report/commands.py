"""The command that makes the run which is missing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pfed.config import Local, RunOptions
from pfed.result import Result
from pfed.store import WAYS

RUNS = "runs"


def local(runs: Sequence[Result]) -> str | None:
    """What runs Local with the settings and seeds of these runs; None for data or a model from Python."""
    first = runs[0]
    config = first.config
    if any(str(config.get(name, "")).startswith("own ") for name in ("data", "model")):
        return None
    seeds = sorted({run.seed for run in runs})
    words = ["pfed", "run", "local", "--data", str(config.get("data"))]
    if len(seeds) > 1:
        words = ["pfed", "compare", "local", "--data", str(config.get("data")), "--seeds", ",".join(map(str, seeds))]
    left_out = {"data", "local", *WAYS} | ({"seed"} if len(seeds) > 1 else set())
    words += _flags(RunOptions, config, "", left_out) + _flags(Local, config.get("local", {}), "local.", ())
    folder = first.folder.parent if first.folder is not None else Path(RUNS)
    words += [] if folder == Path(RUNS) else ["--runs", str(folder)]
    return shlex.join(words)


def _flags(cls: type, config: Mapping[str, Any], prefix: str, left_out: Any) -> list[str]:
    """Options that are not as they are by default."""
    found = []
    for field in fields(cls):
        value = config.get(field.name, field.default)
        if field.name not in left_out and value != field.default and value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            found += [f"--{prefix}{field.name.replace('_', '-')}", text]
    return found
