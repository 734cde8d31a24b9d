"""What a site has given already, on its disk: the calls of a run, and the noisy updates of all runs.

A restart does not make it forget, and another run's name does not begin afresh.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pfed.deploy import privacy

RELEASES = "releases.json"  # in a kit: by run and noise, the marks of the updates that have left
ALLOWED = "epsilon.json"  # in a kit: by delta, the epsilon that its owner has agreed to, over all runs
SLACK = 1e-9  # of sums of floats


class Tally:
    """The marks of calls under names."""

    def __init__(self, path: Path):
        self._path = path
        self._marks: dict[str, list[str]] = _read(path)

    def admits(self, name: str, mark: str, most: int) -> bool:
        """Whether a call is one of at most so many; it is counted then. The same one counts once."""
        marks = self._marks.setdefault(name, [])
        if mark in marks:
            return True
        if len(marks) >= most:
            return False
        marks.append(mark)
        _write(self._path, self._marks)
        return True


class Releases:
    """The noisy updates of a run, among those of all runs of the kit."""

    def __init__(self, kit: Path, run: str, rule: Mapping[str, Any]):
        self._kit, self._run, self._rule = kit, run, rule

    def admits(self, mark: str) -> bool:
        """Whether an update may leave: the run has so many, and the owner has agreed to what all of them cost."""
        with _alone(self._kit):
            found = _read(self._kit / RELEASES)
            marks = found.setdefault(self._run, {}).setdefault(repr(float(self._rule["noise"])), [])
            if mark in marks:
                return True
            if len(marks) >= self._rule["releases"]:
                return False
            marks.append(mark)
            delta = self._rule["delta"]
            if privacy.epsilon(_counts(found), delta) > _allowed(self._kit, delta) + SLACK:
                return False
            _write(self._kit / RELEASES, found)
        return True

    def epsilon(self) -> float:
        """What all updates that have left this site cost, of whichever run."""
        return spent(self._kit, self._rule["delta"])


def spent(kit: Path, delta: float) -> float:
    """Epsilon of all updates that have left a site."""
    return privacy.epsilon(_counts(_read(kit / RELEASES)), delta)


def total(kit: Path, rule: Mapping[str, Any], run: str | None = None) -> float:
    """Epsilon over all runs once this one has sent all that it may; a run that has begun counts once."""
    found, noise = _read(kit / RELEASES), repr(float(rule["noise"]))
    left = len(found.get(run or "", {}).get(noise, []))
    counts = _counts(found)
    counts[float(noise)] += max(0, rule["releases"] - left)
    return privacy.epsilon(counts, rule["delta"])


def allow(kit: Path, rule: Mapping[str, Any], run: str | None = None) -> float:
    """The owner agrees to one more run by this rule; to which epsilon over all runs."""
    with _alone(kit):
        agreed = max(total(kit, rule, run), _allowed(kit, rule["delta"]))
        _write(kit / ALLOWED, {**_read(kit / ALLOWED), repr(float(rule["delta"])): agreed})
    return agreed


def allows(kit: Path, rule: Mapping[str, Any], run: str) -> bool:
    """Whether the owner has agreed to so much that a run may send all that it wants."""
    return total(kit, rule, run) <= _allowed(kit, rule["delta"]) + SLACK


def _allowed(kit: Path, delta: float) -> float:
    return float(_read(kit / ALLOWED).get(repr(float(delta)), 0.0))


def _counts(found: Mapping[str, Mapping[str, list[str]]]) -> Counter[float]:
    counts = Counter[float]()
    for by_noise in found.values():
        for noise, marks in by_noise.items():
            counts[float(noise)] += len(marks)
    return counts


@contextlib.contextmanager
def _alone(kit: Path) -> Iterator[None]:
    """Two runs may be at work at a site."""
    with open(kit / f"{RELEASES}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.write(json.dumps(content))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
