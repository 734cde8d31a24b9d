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
    planned = [_planned(method, common, hyper or {}, {**options, "seed": seed}) for seed in seeds for method in methods]
    needed = {need for experiment in planned for need in experiment.method.needs} & {"public", "validation"}
    if missing := {need: CARVED for need in sorted(needed) if need not in {**common.run, **options}}:
        return compare(methods, seeds=seeds, hyper=hyper, preset=preset, runs=runs, reuse=reuse, **options, **missing)
    results: list[Result] = []
    before: Experiment | None = None
    while planned:  # so that no more than two are held at a time, with their data and models
        experiment = planned.pop(0)
        if before is not None and before.options.seed == experiment.options.seed:
            experiment.adopt(before.federation())
        found = store.same(Path(runs), experiment.config()) if reuse and runs else None
        results.append(experiment.run(runs) if found is None else experiment.resume(found))
        before = experiment
    return Comparison(results)


def _planned(
    method: str | Any, common: Preset, hyper: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> Experiment:
    if not isinstance(method, str):
        return Experiment(method, **options)
    base = common.of(method)
    local, own = options.get("local"), {**base.pop("hyper"), **hyper.get(method, {})}
    given = local if isinstance(local, Local) else {**base["local"], **(local or {})}
    return Experiment(method, **{**base, **options, "local": given, "hyper": own})
