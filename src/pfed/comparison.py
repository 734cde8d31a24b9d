"""Several methods on the same clients, the same data and the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfed.experiment import Experiment
from pfed.result import Comparison, Result

CARVED = 0.1  # the share of public or validation data where a method needs some and nobody said how much


def compare(
    methods: Sequence[str | Any],
    *,
    seeds: Sequence[int] = (0,),
    hyper: Mapping[str, Mapping[str, Any]] | None = None,
    runs: str | Path | None = None,
    **options: Any,
) -> Comparison:
    """Run each method for each seed and put the results side by side.

    `hyper` gives options by method name. If any method needs public or validation data, they are taken out for all
    methods alike.

    >>> from pfed import compare
    >>> both = compare(["local", "fedavg"], clients=4, rounds=1)
    >>> [row["method"] for row in both.rows()]
    ['local', 'fedavg']
    """
    own = hyper or {}
    planned = []
    for need in _needs(methods, own):
        options.setdefault(need, CARVED)
    for seed in seeds:
        for method in methods:
            given = own.get(method, {}) if isinstance(method, str) else {}
            planned.append(Experiment(method, hyper=given, **{**options, "seed": seed}))
    results: list[Result] = []
    before: Experiment | None = None
    while planned:  # so that no more than two are held at a time, with their data and models
        experiment = planned.pop(0)
        if before is not None and before.options.seed == experiment.options.seed:
            experiment.adopt(before.federation())
        results.append(experiment.run(runs))
        before = experiment
    return Comparison(results)


def _needs(methods: Sequence[str | Any], own: Mapping[str, Mapping[str, Any]]) -> list[str]:
    made = [Experiment(m, hyper=own.get(m, {}) if isinstance(m, str) else {}).method for m in methods]
    return [need for need in ("public", "validation") if any(need in method.needs for method in made)]
