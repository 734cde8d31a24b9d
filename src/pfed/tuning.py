"""Settings that suit a method: tried on validation data, never on test data."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pfed import presets, registry
from pfed.config import Local
from pfed.errors import RunError, UserError, unknown
from pfed.experiment import Experiment
from pfed.options import hints
from pfed.presets import Preset
from pfed.result import Result
from pfed.store import WAYS
from pfed.tables import percent, table

RATES = (0.01, 0.03, 0.1)  # learning rates that are tried unless others are given
FACTOR = 3  # of halving: a third of the settings goes on, with three times the rounds
CARVED = 0.2  # the share of each client's training data that settings are judged on
JUDGED = "personal/validation"
NOTHING = "There are no validation data to tune on. Set run.validation, for example to 0.2."
NOT_KEPT = {"validation", "eval_every", "seed", "local", "hyper", *WAYS}  # of the run's settings in a preset
Settings = Mapping[str, Any]


@dataclass
class Trial:
    """One choice of settings, and what came of it."""

    settings: Settings  # names as in --set: local.lr, lam
    rounds: int = 0
    score: float = 0.0  # accuracy on validation data: mean over clients, then over seeds
    failed: str = ""  # why there is none
    folders: dict[int, Path] = field(default_factory=dict)  # by seed


@dataclass(frozen=True)
class Tuning:
    """All trials of one method, the best first."""

    method: str
    trials: Sequence[Trial]
    run: Settings
    same: Mapping[str, Settings]  # of `local` and `hyper`: what all trials had in common

    @property
    def best(self) -> Settings:
        return self.trials[0].settings

    def table(self) -> str:
        names = list(self.best)
        rows = [
            [*(str(t.settings[name]) for name in names), str(t.rounds), "failed" if t.failed else percent(t.score)]
            for t in self.trials
        ]
        return table([*names, "rounds", "validation"], rows, left=0)

    def json(self) -> dict[str, Any]:
        trials = [
            {"settings": dict(t.settings), "rounds": t.rounds, "validation": None if t.failed else t.score}
            for t in self.trials
        ]
        return {"method": self.method, "best": dict(self.best), "trials": trials}

    def save(self, path: Path) -> None:
        """Put the best settings into a preset file, beside those that it has of other methods."""
        before = presets.before(path)
        own = {table: dict(self.same[table]) for table in ("local", "hyper")}
        for name, value in self.best.items():
            own["local" if name.startswith("local.") else "hyper"][name.removeprefix("local.")] = value
        about = before.about or "Found by `pfed tune` on validation data."
        presets.save(Preset(about, self.run, {**before.methods, self.method: own}), path)

    __repr__ = table


def tune(
    method: str,
    tries: Mapping[str, Sequence[Any]] | None = None,
    *,
    search: Literal["grid", "halving"] = "halving",
    least: int = 1,
    seeds: Sequence[int] = (0,),
    runs: str | Path | None = None,
    **options: Any,
) -> Tuning:
    """Try settings of a method on validation data, which are taken out of the training data.

    `tries` has the values to try by name (`local.lr`, or an option of the method); without it they are some learning
    rates and what the method's own options say. A grid gives all of them all rounds; halving starts with few rounds,
    at `least` so many, and goes on with the better third. Where few clients take part in a round, give it enough
    rounds for each to have had its turn.

    >>> from pfed import tune
    >>> found = tune("fedper", {"local.lr": [0.01, 0.1]}, clients=4, rounds=2)
    >>> sorted(found.best)
    ['local.lr']
    """
    if search not in ("grid", "halving"):
        raise UserError(f"search must be 'grid' or 'halving'. Got {search!r}.")
    if least < 1:
        raise UserError(f"least must be >= 1. Got {least}.")
    given = {name: list(values) for name, values in (tries or defaults(method)).items()}
    _check(method, given)
    same = {table: _table(options.pop(table, None)) for table in ("local", "hyper")}
    options = {"validation": CARVED, "eval_every": 0, **options}
    trials = [Trial(dict(zip(given, values, strict=True))) for values in itertools.product(*given.values())]
    tuner = _Tuner(method, tuple(seeds), options, same)
    (whole,) = {tuner.experiment(trial, 0, None).options.rounds for trial in trials}  # mistakes show before the first
    if isinstance(options.get("data", ""), str) and not options["validation"]:
        raise UserError(NOTHING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(runs or scratch)
        done: list[Trial] = []
        for rounds in _rungs(whole, len(trials), least) if search == "halving" else [whole]:
            for trial in trials:
                tuner.extend(trial, rounds, folder)
            trials.sort(key=lambda trial: (bool(trial.failed), -trial.score))  # of equals the first
            going = trials if rounds == whole else trials[: math.ceil(len(trials) / FACTOR)]
            if going[0].failed:
                raise RunError(f"All settings of {method} failed. The first: {going[0].failed}")
            done = [*trials[len(going) :], *done]
            trials = going
        kept = {key: value for key, value in options.items() if key not in NOT_KEPT and _plain(value)}
        return Tuning(method, [*trials, *done], kept, same)


def _table(given: Local | Settings | None) -> Settings:
    return asdict(given) if isinstance(given, Local) else dict(given or {})


def _plain(value: Any) -> bool:
    """Whether a file can say it: not so data and models from Python, nor what is left to the run."""
    return isinstance(value, (str, int, float))


def defaults(method: str, rates: Sequence[float] = RATES) -> dict[str, list[Any]]:
    """What is tried of a method where nobody says what: learning rates, and what its options name."""
    found: dict[str, list[Any]] = {} if registry.make(method, {}).own_rates else {"local.lr": list(rates)}
    for name, cls in registry.fields(method).items():
        tries = cls.__dataclass_fields__[name].metadata.get("tries")  # type: ignore[attr-defined]
        if tries:
            found[name] = list(tries)
    return found


def _check(method: str, given: Mapping[str, Sequence[Any]]) -> None:
    known = [*registry.fields(method), *(f"local.{name}" for name in hints(Local))]
    for name, values in given.items():
        if name not in known:
            raise unknown(f"option to tune of {method}", name, known)
        if not values:
            raise UserError(f"{name} needs at least one value to try.")


def _rungs(rounds: int, settings: int, least: int) -> list[int]:
    """The rounds after which the better third is chosen, the last for one setting or a few.

    >>> _rungs(50, 9, 1), _rungs(50, 9, 10), _rungs(2, 9, 1)
    ([6, 17, 50], [17, 50], [1, 2])
    """
    steps = max(math.ceil(math.log(settings, FACTOR) - 1e-9), 0)
    found = {max(1, round(rounds / FACTOR**step)) for step in range(steps + 1)} if rounds else set()
    return sorted({rounds, *(rung for rung in found if rung >= least)})


@dataclass
class _Tuner:
    method: str
    seeds: tuple[int, ...]
    options: Mapping[str, Any]
    same: Mapping[str, Settings]

    def experiment(self, trial: Trial, seed: int, rounds: int | None) -> Experiment:
        hyper = {name: value for name, value in trial.settings.items() if not name.startswith("local.")}
        local = {name[6:]: value for name, value in trial.settings.items() if name.startswith("local.")}
        tables = {"local": {**self.same["local"], **local}, "hyper": {**self.same["hyper"], **hyper}}
        changed = {} if rounds is None else {"rounds": rounds}
        return Experiment(self.method, **{**self.options, **changed, **tables, "seed": seed})

    def extend(self, trial: Trial, rounds: int, folder: Path) -> None:
        """Go on with a trial until it has so many rounds, or run it anew where rounds can't be added.

        One that stops by itself, as where numbers grow beyond all bounds, has failed.
        """
        scores = []
        trial.rounds, trial.failed = rounds, ""
        for seed in self.seeds:
            experiment = self.experiment(trial, seed, rounds)
            before = trial.folders.get(seed)
            try:
                result = experiment.resume(before) if before and experiment.extensible else experiment.run(folder)
            except RunError as error:
                trial.failed = str(error)
                return
            trial.folders[seed] = folder / result.run
            scores.append(_score(result))
        trial.score = sum(scores) / len(scores)


def _score(result: Result) -> float:
    if JUDGED not in result.metrics:
        raise UserError(NOTHING)
    return result.metrics[JUDGED]
