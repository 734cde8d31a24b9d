"""Where runs live: a folder each, with a record, checkpoints and the clients' states.

A checkpoint is one file with a checksum, written beside its name and moved there, so that it is whole or not there.
The two newest are kept; the states that a checkpoint names lie in segment files, each written once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfed import wire
from pfed.errors import RunError, UserError, unknown
from pfed.record import Record
from pfed.wire import State

KEPT = 2  # checkpoints


@dataclass
class Checkpoint:
    """The state of a run after a round."""

    round: int
    calls: int = 0
    server: State = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)


class ClientStates:
    """The states of all clients, by client and version."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], State] = {}

    def load(self, client: int, version: int) -> State:
        return self._states[client, version] if version else {}

    def save(self, client: int, version: int, state: State) -> None:
        self._states[client, version] = state

    def retain(self, *kept: dict[int, int]) -> None:
        """Forget every version that none of these names."""
        named = {item for versions in kept for item in versions.items()}
        self._states = {key: state for key, state in self._states.items() if key in named}


class Store:
    """One run's folder. Without a folder everything stays in memory and nothing can be resumed."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.states = ClientStates()
        self._segments: dict[int, tuple[int, str]] = {}  # client -> the version on disk and its segment
        self._lock = _lock(folder) if folder else None
        self.record = Record(folder / "record.sqlite" if folder else None)

    @property
    def run(self) -> str:
        return self.folder.name if self.folder else "unsaved"

    def close(self) -> None:
        self.record.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint: first the states that changed since the last one, then the checkpoint that names them."""
        if self.folder is None:
            return
        segment = f"states-{checkpoint.round:06d}"
        changed = {
            client: version
            for client, version in checkpoint.versions.items()
            if self._segments.get(client, (0, ""))[0] != version
        }
        segments = {**self._segments, **{client: (version, segment) for client, version in changed.items()}}
        tree = {
            "round": checkpoint.round,
            "calls": checkpoint.calls,
            "server": checkpoint.server,
            "versions": checkpoint.versions,
            "segments": {client: name for client, (_, name) in segments.items()},
        }
        try:
            if changed:
                states = {client: self.states.load(client, version) for client, version in changed.items()}
                _write(self.folder / segment, states)
            _write(self.folder / f"checkpoint-{checkpoint.round:06d}", tree)
        except OSError as error:
            last = max((number for number, _ in self._checkpoints()), default=None)
            good = "There is none before it" if last is None else f"The last good one is of round {last}"
            raise RunError(
                f"The checkpoint of round {checkpoint.round} can't be written: {error.strerror or error}."
                f" {good}; make room and go on with 'pfed resume {self.run}'."
            ) from error
        self._segments = segments
        self._clean()

    def restore(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are noted in the record and passed over."""
        for number, path in reversed(self._checkpoints()):
            try:
                tree = _read(path)
                states = {name: _read(path.with_name(name)) for name in set(tree["segments"].values())}
            except (OSError, ValueError, KeyError) as error:
                text = f"The checkpoint of round {number} is damaged ({error}); the one before is used."
                self.record.event(number, "damaged checkpoint", text)
                path.unlink(missing_ok=True)
                continue
            for client, version in tree["versions"].items():
                self.states.save(client, version, states[tree["segments"][client]][client])
            self._segments = {c: (v, tree["segments"][c]) for c, v in tree["versions"].items()}
            return Checkpoint(tree["round"], tree["calls"], tree["server"], tree["versions"])
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        found = [] if self.folder is None else self.folder.glob("checkpoint-??????")
        return sorted((int(path.name[-6:]), path) for path in found)

    def _clean(self) -> None:
        """Keep the newest checkpoints and the segments that they name."""
        checkpoints = self._checkpoints()
        for _, path in checkpoints[:-KEPT]:
            path.unlink()
        named: set[str] = set()
        for _, path in checkpoints[-KEPT:]:
            with contextlib.suppress(OSError, ValueError):
                named |= set(_read(path)["segments"].values())
        assert self.folder is not None
        for path in self.folder.glob("states-??????"):
            if path.name not in named:
                path.unlink()


def _write(path: Path, tree: State) -> None:
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


def _read(path: Path) -> State:
    data = path.read_bytes()
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError("its checksum does not match")
    return wire.decode(data[32:])


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UserError(f"Run {folder.name!r} is in use by another process.") from None
    return descriptor


def locked(folder: Path) -> bool:
    """Whether a process is working on this run now."""
    try:
        os.close(_lock(folder))
    except UserError:
        return True
    return False


def create(runs: Path, stem: str) -> Store:
    """A new run folder under a free name: STEM-1, STEM-2, …"""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            folder = runs / f"{stem}-{number}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return Store(folder)
            number += 1
    except OSError as error:
        raise UserError(f"The runs folder {str(runs)!r} can't be written: {error.strerror}.") from error


def find(runs: Path, run: str) -> Path:
    """The folder of a run by name, or by path."""
    path = Path(run)
    if (path / "record.sqlite").is_file():
        return path
    known = [folder.name for folder in folders(runs)]
    if run not in known:
        raise unknown("run", run, known) if known else UserError(f"There is no run {run!r}: {str(runs)!r} has none.")
    return runs / run


def folders(runs: Path) -> list[Path]:
    """All runs."""
    return sorted(path.parent for path in runs.glob("*/record.sqlite"))


def remove(folder: Path) -> None:
    """Delete a run, unless it is running."""
    if locked(folder):
        raise UserError(f"Run {folder.name!r} is running; stop it first.")
    shutil.rmtree(folder)


def listing(runs: Path) -> list[dict[str, Any]]:
    """What `pfed runs` shows, newest first."""
    return sorted(map(describe, folders(runs)), key=lambda run: run["created"] or 0, reverse=True)


def describe(folder: Path) -> dict[str, Any]:
    """What `pfed runs` shows of a run."""
    record = Record(folder / "record.sqlite", readonly=True)
    try:
        state = record.get("state", "stopped")
        rounds = [row["round"] for row in record.rounds()]
        facts = {name: record.get(name) for name in ("method", "data", "seed", "created")}
        planned = record.get("config", {}).get("rounds", 0)
    finally:
        record.close()
    if state == "running" and not locked(folder):
        state = "stopped"
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {
        "run": folder.name,
        **facts,
        "state": state,
        "round": max(rounds, default=0),
        "rounds": planned,
        "bytes": size,
    }
