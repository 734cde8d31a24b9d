"""A SQLite file that can be trusted: a journal beside it has all that was written, with checksums.

SQLite does not notice a changed byte in a row. Here every change goes to the journal first; when the file is opened for
writing it is compared with the journal and, if it is damaged, made anew. A process that dies between the two leaves a
file that lacks the last change, which is then made up for.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfed.errors import RunError, UserError
from pfed.journal import Journal

VERSION = 2
JOURNAL = "journal"
COUNTER = "CREATE TABLE IF NOT EXISTS applied (one INTEGER PRIMARY KEY, entries INTEGER);"

Entry = Mapping[str, Any]  # {"put": {table: rows}}, {"forget": {"after": round, "tables": tables}}, {"version": n}


class Database:
    """One file, or memory where there is no path. `schema` makes its tables where they are not there yet."""

    def __init__(self, path: Path | None, schema: str, readonly: bool = False):
        self._schema = schema + COUNTER
        self._journal: Journal | None = None
        try:
            if path is None:
                self._db = self._empty()
            elif readonly:
                self._db = self._read_only(path)
            else:
                self._journal = Journal(path.with_name(JOURNAL))
                self._db = self._mended(path, self._journal)
        except sqlite3.Error as error:
            raise RunError(f"The record {path} can't be opened: {error}.") from error

    def close(self) -> None:
        self._db.close()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def flush(self) -> None:
        """What was written is on the disk after this."""
        if self._journal is not None:
            self._journal.flush()

    def read(self, query: str, *values: Any) -> list[Any]:
        return self._db.execute(query, values).fetchall()

    def write(self, entry: Entry) -> None:
        """All of a change or nothing."""
        if self._journal is None:
            _apply(self._db, entry)
            return
        before = self._journal.end
        try:
            self._journal.add(entry)
        except OSError as error:
            raise sqlite3.OperationalError(str(error.strerror)) from error
        try:
            _apply(self._db, entry)
        except sqlite3.Error:
            self._journal.cut(before)
            raise

    def _mended(self, path: Path, journal: Journal) -> sqlite3.Connection:
        """The file, as the journal says it should be."""
        there = path.exists() and path.stat().st_size > 0
        entries, damaged = journal.read()
        if not there and not entries and not damaged:
            journal.add({"version": VERSION})
            return self._replace(path, self._replayed([{"version": VERSION}]))
        if damaged or not entries:
            found, fault = self._open(path)
            if found is None:
                raise RunError(f"The record {path} can't be opened: {fault}.")
            _check_version(_version(found), path)
            if damaged:
                _tell(path, "the journal of its record was damaged; it was made anew from the record")
            journal.replace([{"version": VERSION}, _contents(found)])
            _apply(found, {"applied": 2})
            return found
        _check_version(entries[0].get("version", 0), path)
        meant = self._replayed(entries)
        found, fault = self._open(path) if there else (None, "it is missing")
        if found is not None:
            if _agree(found, meant, entries):
                return found
            found.close()
            fault = "its rows are not those that were written"
        _tell(path, f"its record was damaged ({fault}); it was made anew from its journal")
        return self._replace(path, meant)

    def _empty(self) -> sqlite3.Connection:
        db = sqlite3.connect(":memory:")
        db.executescript(f"{self._schema} PRAGMA user_version = {VERSION};")
        return db

    def _replayed(self, entries: list[Entry]) -> sqlite3.Connection:
        db = self._empty()
        for entry in entries:
            _apply(db, entry)
        return db

    def _open(self, path: Path) -> tuple[sqlite3.Connection | None, str]:
        """The file, or None and what is wrong with it."""
        db = sqlite3.connect(path)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")  # it is the journal that must survive a power cut
            db.executescript(COUNTER)
            (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            verdict = str(error)
        if verdict == "ok":
            return db, ""
        db.close()
        return None, verdict.splitlines()[-1]

    def _read_only(self, path: Path) -> sqlite3.Connection:
        # Where nobody writes there is no -wal file, and SQLite would make one to read by.
        still = "" if path.with_name(path.name + "-wal").exists() else "&immutable=1"
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{still}", uri=True)
        db.execute("BEGIN")  # all that is read is of one moment
        version = _version(db)
        if version > VERSION:
            _check_version(version, path)
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:  # it was made, but nothing written
            db.close()
            return self._empty()
        return db

    def _replace(self, path: Path, meant: sqlite3.Connection) -> sqlite3.Connection:
        """What is in memory as the file, which is there whole or as it was."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)
        target = sqlite3.connect(temporary)
        meant.backup(target)
        target.close()
        for leftover in ("-wal", "-shm"):
            path.with_name(path.name + leftover).unlink(missing_ok=True)
        os.replace(temporary, path)
        db, fault = self._open(path)
        if db is None:
            raise sqlite3.DatabaseError(fault)
        return db


def _apply(db: sqlite3.Connection, entry: Entry) -> None:
    """Do what an entry of the journal says, in one transaction."""
    with db:
        for table, rows in entry.get("put", {}).items():
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", rows)
        if "forget" in entry:
            for table in entry["forget"]["tables"]:
                db.execute(f"DELETE FROM {table} WHERE round > ?", (entry["forget"]["after"],))
        count = entry.get("applied", _applied(db) + 1)
        db.execute("INSERT OR REPLACE INTO applied VALUES (0, ?)", (count,))


def _applied(db: sqlite3.Connection) -> int:
    """How many entries of the journal are in the file."""
    row = db.execute("SELECT entries FROM applied").fetchone()
    return int(row[0]) if row else 0


def _agree(found: sqlite3.Connection, meant: sqlite3.Connection, entries: list[Entry]) -> bool:
    """Whether the file holds what the journal says, once what a process that died did not write is made up for."""
    try:
        for entry in entries[_applied(found) :]:
            _apply(found, entry)
        return _version(found) == VERSION and _contents(found) == _contents(meant)
    except (sqlite3.DatabaseError, ValueError, TypeError):  # what a damaged file may hold
        return False


def _contents(db: sqlite3.Connection) -> dict[str, Any]:
    """All rows, as one entry of a journal."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'applied' ORDER BY name"
    tables = [name for (name,) in db.execute(query)]
    return {"put": {table: sorted(db.execute(f"SELECT * FROM {table}").fetchall(), key=repr) for table in tables}}


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _check_version(version: int, path: Path) -> None:
    if version > VERSION:
        raise UserError(f"{path} has record version {version}, this pfed reads up to {VERSION}.")
    if version < VERSION:
        raise UserError(f"{path} has record version {version}; this pfed can show it, but goes on with {VERSION} only.")


def _tell(path: Path, text: str) -> None:
    warnings.warn(f"Run {path.parent.name!r}: {text}.", stacklevel=2)
