"""What the live page tells of every run: seen by file stamps, read where something changed, and only what is new."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfed import store
from pfed.database import JOURNAL
from pfed.errors import RunError, UserError, unknown
from pfed.record import RECORD, Record
from pfed.result import MAIN, SCORES
from pfed.store import STOP, WAYS
from pfed.tables import bytes_text, duration_text, percent

FILES = (RECORD, f"{RECORD}-wal", JOURNAL)  # the journal is written first, so it alone would be seen too early
START = (-1, 0.0)  # a round that is none, and its seconds
GOING = ("running", "starting")  # states that may end without a change of a file
RECENT = 10  # rounds by which the time of the coming ones is judged
Stamp = tuple[tuple[int, int], ...]


@dataclass
class Run:
    """One run: what was read of its record so far, and what the page shows of it."""

    folder: Path
    shown: dict[str, Any] = field(default_factory=dict)
    version: int = 0  # counts the changes of what is shown
    _stamp: Stamp | None = None
    _facts: dict[str, Any] = field(default_factory=dict)
    _bytes: int = 0
    _accuracy: float | None = None
    _last: tuple[int, float] = START  # the last round, its seconds
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _first: tuple[float, int] | None = None  # when it was first seen to go on, and in which round

    def look(self) -> bool:
        """Whether anything changed that the page shows."""
        stamp = _stamp(self.folder)
        if stamp == self._stamp and self.shown["state"] not in GOING:
            return False
        if stamp != self._stamp:
            self._stamp = stamp if self._read() else None
        shown = self._show()
        if shown == self.shown:
            return False
        self.shown = shown
        self.version += 1
        return True

    def _read(self) -> bool:
        """Take what is new from the record; False if it can't be read now."""
        try:
            with contextlib.closing(Record(self.folder / RECORD, readonly=True)) as record:
                names = ("method", "data", "seed", "created", "config", "state")
                self._facts = {name: record.get(name) for name in names}
                rows = record.progress(MAIN, self._last[0] - 1)
                if [row[:2] for row in rows[:1]] == [self._last]:
                    rows = rows[1:]
                elif self._last != START:  # it was rolled back: rounds that were seen are run again
                    self._bytes, self._accuracy, self._last, self._first = 0, None, START, None
                    self._recent.clear()
                    rows = record.progress(MAIN)
                for row in rows:
                    self._add(*row)
        except (RunError, UserError, sqlite3.DatabaseError):
            return False
        return True

    def _add(self, round: int, seconds: float, sent: int, accuracy: float | None) -> None:
        self._last = (round, seconds)
        self._bytes += sent
        self._accuracy = self._accuracy if accuracy is None else accuracy
        if round > 0:
            self._recent.append(seconds)

    def _show(self) -> dict[str, Any]:
        facts = self._facts
        config = facts.get("config") or {}
        state = store.state(facts.get("state"), self.folder)
        if not facts and state == "stopped":
            state = "damaged"
        rounds = int(config.get("rounds", 0))
        round = max(0, min(self._last[0], rounds))
        going = state == "running"
        if not going:
            self._first = None
        per_round = sum(self._recent) / len(self._recent) if self._recent else None
        return {
            "run": name(self.folder),
            "about": _about(facts),
            "setting": _setting(config),
            "created": facts.get("created") or 0,
            "state": state,
            "stopping": going and (self.folder / STOP).exists(),
            "round": round,
            "rounds": rounds,
            "score": SCORES.get(str(config.get("task")), SCORES["classification"]),
            "accuracy": percent(self._accuracy),
            "sent": bytes_text(self._bytes),
            "per_round": "–" if per_round is None else _seconds(per_round),
            "rest": self._rest(rounds - round, per_round) if going else "–",
        }

    def _rest(self, left: int, per_round: float | None) -> str:
        """How long the rounds that are left will take: as long as those that were watched, evaluation and all."""
        now = (max(time for time, _ in self._stamp or [(0, 0)]) / 1e9, self._last[0])
        self._first = self._first or now
        watched = now[1] - self._first[1]
        pace = (now[0] - self._first[0]) / watched if watched > 0 else per_round
        return "–" if pace is None else duration_text(pace * left)


class Runs:
    """All runs of a folder, which may come and go."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[str, Run] = {}
        self._looking = threading.Lock()

    def look(self) -> bool:
        """See what changed; whether anything did."""
        with self._looking:
            return self._look()

    def _look(self) -> bool:
        found = {name(folder): folder for folder in store.folders(self.folder)}
        gone = self.known.keys() - found.keys()
        for key in gone:
            del self.known[key]
        changed = bool(gone)
        for key, folder in found.items():
            with contextlib.suppress(OSError):  # it may be deleted just now
                changed |= self.known.setdefault(key, Run(folder)).look()
        return changed

    def find(self, key: str) -> Run:
        """A run by its name alone: no path leads anywhere else."""
        if key not in self.known:
            raise unknown("run", key, self.known) if self.known else UserError(f"There is no run {key!r}.")
        return self.known[key]


def name(folder: Path) -> str:
    """A folder's name need not be valid Unicode, but what goes to a browser must be."""
    return folder.name.encode("utf-8", "replace").decode()


def _stamp(folder: Path) -> Stamp:
    """When each file of the record last changed, and its size."""
    found = []
    for file in FILES:
        try:
            stat = os.stat(f"{folder}/{file}")  # without Path, for this is done each second
        except FileNotFoundError:
            continue
        if stat.st_size:  # an empty -wal comes with reading
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def _about(facts: dict[str, Any]) -> str:
    seed = facts.get("seed")
    words = [facts.get("method"), facts.get("data"), None if seed is None else f"seed {seed}"]
    return ", ".join(str(word) for word in words if word is not None)


def _setting(config: dict[str, Any]) -> str:
    """The same for runs that differ in method and seed at most, and in what changes no result."""
    apart = {"method", "seed", "hyper", "local", *WAYS}
    kept = json.dumps({name: value for name, value in config.items() if name not in apart}, sort_keys=True)
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else duration_text(seconds)
