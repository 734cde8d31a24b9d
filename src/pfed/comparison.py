"""Several methods on the same clients, the same data and the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfed import presets, store
from pfed.config import Local
from pfed.experiment import Experiment
from pfed.presets import Preset
from pfed.result import Comparison, Result

CARVED = 0.1  # the share of public or validation data where a method needs some and nobody said how much


def compare(
    methods: Sequence[str | Any],
    *,
    seeds: Sequence[int] = (0,),
    hyper: Mapping[str, Mapping[str, Any]] | None = None,
    preset: str | Path | None = None,
    runs: str | Path | None = None,
    reuse: bool = False,
    **options: Any,
) -> Comparison:
    """Run each method for each seed and put the results side by side.

    `hyper` gives options by method name, a `preset` settings of the run and of methods. If any method needs public or
    validation data, they are taken out for all methods alike. With `reuse`, runs of the same settings that are in the
    runs folder are taken as they are, and gone on with where they were stopped.

    >>> from pfed import compare
    >>> both = compare(["local", "fedavg"], clients=4, rounds=1)
    >>> [row["method"] for row in both.rows()]
    ['local', 'fedavg']
    """
    common = presets.load(preset) if preset is not None else Preset()

    def plan(method: str | Any, seed: int, **more: Any) -> Experiment:
        return _planned(method, common, hyper or {}, {**more, **options, "seed": seed})

    needed = {need for method in methods for need in plan(method, 0).method.needs} & {"public", "validation"}
    carved = dict.fromkeys(needed - common.run.keys(), CARVED)
    planned = [plan(method, seed, **carved) for seed in seeds for method in methods]
    results: list[Result] = []
    before: Experiment | None = None
    while planned:  # so that no more than two are held at a time, with their data and models
        experiment = planned.pop(0)
        found = store.same(Path(runs), experiment.config()) if reuse and runs else None
        if found is not None and (kept := Result.load(found)).state == "complete":
            results.append(kept)
            continue
        if before is not None and before.division() == experiment.division():
            experiment.adopt(before.federation())
        results.append(experiment.run(runs) if found is None else experiment.resume(found))
        before = experiment
    return Comparison(results)


def _planned(
    method: str | Any, common: Preset, hyper: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Experiment:
    """A method that is not given by name has its options already, and takes those of the run only."""
    base = common.of(method) if isinstance(method, str) else common.of("")
    own = {**base["hyper"], **hyper.get(method, {})} if isinstance(method, str) else {}
    local = options.get("local")
    given = local if isinstance(local, Local) else {**base["local"], **(local or {})}
    return Experiment(method, **{**base, **options, "local": given, "hyper": own})
