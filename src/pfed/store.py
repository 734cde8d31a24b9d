"""Where runs live: a folder each, with a record, checkpoints and the clients' states.

A checkpoint is one file with a checksum, written beside its name and moved there, so that it is whole or not there.
The two newest are kept; it says where in the segment files the clients' states lie that belong to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfed import states, wire
from pfed.database import JOURNAL
from pfed.errors import RunError, UserError, unknown
from pfed.record import RECORD, Record
from pfed.states import CAP, ClientStates
from pfed.wire import State

KEPT = 2  # checkpoints
STOP = "stop"  # a file by which anyone may ask a run to stop
PATIENCE = 0.2  # seconds that a lock is tried for: who only looks whether it is held lets go at once
WAYS = {"engine", "workers", "ray_address", "state_memory", "checkpoint_every", "track"}  # they change no result
_LOCKS: set[int] = set()  # descriptors


def _let_go() -> None:
    """A forked process does not hold its parent's locks: the run is free when the parent is gone."""
    for descriptor in _LOCKS:
        os.close(descriptor)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass
class Checkpoint:
    """The state of a run after a round."""

    round: int
    calls: int = 0
    server: State = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)


class Store:
    """One run's folder. Without a folder nothing can be resumed."""

    def __init__(self, folder: Path | None, cap: int = CAP):
        """`cap` is how many bytes of client states are held in memory."""
        self.folder = folder
        self.states = ClientStates(folder, cap)
        self._named: dict[int, set[int]] = {}  # round of a kept checkpoint -> the segments that it names
        self._lock = _lock(folder) if folder else None
        try:
            self.asked_to_stop()  # what came too late for the last process is not meant for this one
            self.record = Record(folder / RECORD if folder else None)
        except BaseException:
            self._unlock()
            raise

    @property
    def run(self) -> str:
        return self.folder.name if self.folder else "unsaved"

    def asked_to_stop(self) -> str | None:
        """Who asked this run to stop, if anyone did since it was last looked for."""
        if self.folder is None or not (self.folder / STOP).is_file():
            return None
        who = (self.folder / STOP).read_text(encoding="utf-8", errors="replace")
        (self.folder / STOP).unlink(missing_ok=True)
        return who

    def close(self) -> None:
        self.asked_to_stop()
        self.record.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            _LOCKS.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint: first the record and the states that changed, then the checkpoint that names them."""
        if self.folder is None:
            return
        try:
            self.record.flush()
            self.states.flush(checkpoint.versions)
            tree = {
                "round": checkpoint.round,
                "calls": checkpoint.calls,
                "server": checkpoint.server,
                "clients": self.states.index(checkpoint.versions),
            }
            write_tree(self.folder / f"checkpoint-{checkpoint.round:06d}", tree)
        except OSError as error:
            last = max((number for number, _ in self._checkpoints()), default=None)
            good = "There is none before it" if last is None else f"The last good one is of round {last}"
            raise RunError(
                f"The checkpoint of round {checkpoint.round} can't be written: {error.strerror or error}."
                f" {good}; make room and go on with 'pfed resume {self.run}'."
            ) from error
        self._named[checkpoint.round] = self.states.segments
        self._clean()

    def retain(self, versions: dict[int, int]) -> None:
        """Forget all client states but these versions and what the kept checkpoints name."""
        self.states.retain(versions)
        if self.folder is not None:
            self._clean()

    def restore(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are told of and deleted."""
        found, good = self._checkpoints(), None
        for number, path in reversed(found):
            try:
                tree = read_tree(path)
                if good is None:
                    self.states.restore(tree["clients"])
                self._named[number] = set(tree["clients"][:, 2].tolist()) - {0}
            except (OSError, ValueError, KeyError) as error:
                then = "the run begins anew" if number == found[0][0] else "the one before is used"
                text = f"The checkpoint of round {number} is damaged ({error}); {then}."
                self.record.event(number, "damaged checkpoint", text)
                warnings.warn(f"Run {self.run!r}: {text[0].lower()}{text[1:]}", stacklevel=2)
                path.unlink(missing_ok=True)
                continue
            versions = {client: version for client, version, *_ in tree["clients"].tolist()}
            good = good or Checkpoint(tree["round"], tree["calls"], tree["server"], versions)
        return good

    def rewind(self, round: int) -> None:
        """Forget all checkpoints of later rounds."""
        for number, path in self._checkpoints():
            if number > round:
                path.unlink()

    def _checkpoints(self) -> list[tuple[int, Path]]:
        return [] if self.folder is None else checkpoints(self.folder)

    def _clean(self) -> None:
        """Keep the newest checkpoints, and the segments that they name or that are in use."""
        assert self.folder is not None
        for number, path in self._checkpoints()[:-KEPT]:
            path.unlink()
            self._named.pop(number, None)
        named = self.states.segments.union(*self._named.values())
        self.states.discard(set(states.numbers(self.folder)) - named)


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Those that are there, by round."""
    return sorted((int(path.name[-6:]), path) for path in folder.glob("checkpoint-??????"))


def write_tree(path: Path, tree: State) -> None:
    """Write a tree with its checksum; the file appears whole or not at all."""
    data = wire.encode(tree)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(hashlib.sha256(data).digest())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_tree(path: Path) -> State:
    """The inverse; a file that is not as it was written is a ValueError."""
    data = path.read_bytes()
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError("its checksum does not match")
    return wire.decode(data[32:])


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() < until:
                time.sleep(PATIENCE / 20)
                continue
            os.close(descriptor)
            raise UserError(f"Run {folder.name!r} is in use by another process.") from None
        _LOCKS.add(descriptor)
        return descriptor


def locked(folder: Path) -> bool:
    """Whether a process is working on this run now. To look makes no file, and two who look see the same."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def state(marked: str | None, folder: Path) -> str:
    """What a run does: what its record says, unless no process works on it any more."""
    if marked is None:
        return "starting" if locked(folder) else "stopped"
    return "died" if marked == "running" and not locked(folder) else marked


def ask_to_stop(folder: Path, who: str) -> None:
    """Let a run end after the round that it is in, with a checkpoint, as by Ctrl-C."""
    if not locked(folder):
        raise UserError(f"Run {folder.name!r} is not running.")
    (folder / STOP).write_text(who, encoding="utf-8")


def create(runs: Path, stem: str, cap: int = CAP) -> Store:
    """A new run folder under a free name: STEM-1, STEM-2, …"""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = runs / f"{stem}-{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return Store(folder, cap)
            number += 1
    except OSError as error:
        raise UserError(f"The runs folder {str(runs)!r} can't be written: {error.strerror}.") from error


def holds_run(folder: Path) -> bool:
    """Whether a run can be read there, or mended from its journal."""
    return any((folder / name).is_file() for name in (RECORD, JOURNAL))


def find(runs: Path, run: str) -> Path:
    """The folder of a run by name, or by path."""
    path = Path(run)
    if holds_run(path):
        return path
    known = [folder.name for folder in folders(runs)]
    if run not in known:
        raise unknown("run", run, known) if known else UserError(f"There is no run {run!r}: {str(runs)!r} has none.")
    return runs / run


def folders(runs: Path) -> list[Path]:
    """All runs."""
    return sorted({path.parent for name in (RECORD, JOURNAL) for path in runs.glob(f"*/{name}")})


def same(runs: Path, config: Mapping[str, Any]) -> Path | None:
    """The newest run with these settings, whatever engine ran it; none for data or models from Python.

    Nor one whose data were not those that are here by the same name, such as a part of cifar100.
    """
    from pfed.data import sources

    if config["data"].startswith("own ") or config["model"].startswith("own "):
        return None
    here, found = sources.labels(config["data"], config["external"]), []
    for folder in folders(runs):
        try:
            with contextlib.closing(Record(folder / RECORD, readonly=True)) as record:
                there = record.get("source")
                if (None in (here, there) or here == there) and settings(record.get("config", {})) == settings(config):
                    found.append((record.get("created") or 0, folder))
        except (RunError, sqlite3.DatabaseError):
            continue
    return max(found)[1] if found else None


def settings(config: Mapping[str, Any]) -> Any:
    """As they are after a record was read, without those that change no result."""
    return json.loads(json.dumps({key: value for key, value in config.items() if key not in WAYS}))


def mend(folder: Path) -> None:
    """Repair a run's record if it is damaged."""
    Store(folder).close()


def remove(folder: Path) -> None:
    """Delete a run, unless it is running."""
    if locked(folder):
        raise UserError(f"Run {folder.name!r} is running; stop it first.")
    shutil.rmtree(folder)


def listing(runs: Path) -> list[dict[str, Any]]:
    """What `pfed runs` shows, newest first."""
    return sorted(map(describe, folders(runs)), key=lambda run: run["created"] or 0, reverse=True)


def describe(folder: Path) -> dict[str, Any]:
    """What `pfed runs` shows of a run; one whose record can't be read is damaged."""
    found: dict[str, Any] = {
        "run": folder.name,
        "method": None,
        "data": None,
        "seed": None,
        "created": None,
        "state": "damaged",
    }
    found |= {"round": 0, "rounds": 0, "bytes": 0}
    try:
        with contextlib.closing(Record(folder / RECORD, readonly=True)) as record:
            found |= {name: record.get(name) for name in ("method", "data", "seed", "created")}
            found |= {"round": record.last_round(), "rounds": record.get("config", {}).get("rounds", 0)}
            found["state"] = state(record.get("state"), folder)
    except (RunError, sqlite3.DatabaseError):
        pass
    found["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    return found
