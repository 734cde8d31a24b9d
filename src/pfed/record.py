"""The record of a run: one SQLite file that says what was asked, what happened and what came out.

Rows are idempotent by (round, client, metric), so a round that is run again after a resume writes the same rows.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pfed.cohort import Ledger
from pfed.engines.base import POOLED
from pfed.errors import RunError, UserError
from pfed.evaluate import Evaluation

SCHEMA = 1
TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS clients (client INTEGER PRIMARY KEY, name TEXT, train INTEGER, test INTEGER, counts TEXT);
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, seconds REAL, simulated REAL, samples INTEGER, participants INTEGER);
CREATE TABLE IF NOT EXISTS traffic (
    round INTEGER, client INTEGER, up INTEGER, down INTEGER, evaluation INTEGER, PRIMARY KEY (round, client));
CREATE TABLE IF NOT EXISTS metrics (
    round INTEGER, client INTEGER, metric TEXT, value REAL, PRIMARY KEY (round, client, metric));
CREATE TABLE IF NOT EXISTS logs (
    round INTEGER, client INTEGER, name TEXT, value REAL, PRIMARY KEY (round, client, name));
CREATE TABLE IF NOT EXISTS samples (client INTEGER, metric TEXT, correct BLOB, PRIMARY KEY (client, metric));
CREATE TABLE IF NOT EXISTS events (
    round INTEGER, client INTEGER, kind TEXT, text TEXT, time REAL, PRIMARY KEY (round, client, kind, text));
"""


class Record:
    """One run's SQLite file, or a record in memory when no folder is given."""

    def __init__(self, path: Path | None, readonly: bool = False):
        self.path = path
        try:
            if readonly:
                self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro" if path else ":memory:", uri=True)
            else:
                self._db = sqlite3.connect(path or ":memory:")
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.executescript(TABLES)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA:
                raise UserError(f"{path} has record version {version}, this pfed reads up to {SCHEMA}.")
            if readonly and version == 0:  # the process died before it wrote anything
                self._db = sqlite3.connect(":memory:")
                self._db.executescript(TABLES)
            elif not readonly:
                self._db.execute(f"PRAGMA user_version = {SCHEMA}")
        except sqlite3.Error as error:
            raise RunError(f"The record {path} can't be opened: {error}.") from error

    def close(self) -> None:
        self._db.close()

    def set(self, **facts: Any) -> None:
        """Remember facts about the run: its state, configuration, versions."""
        with self._db:
            rows = [(name, json.dumps(value)) for name, value in facts.items()]
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    def get(self, fact: str, default: Any = None) -> Any:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (fact,)).fetchone()
        return default if row is None else json.loads(row[0])

    def add_clients(self, rows: Iterable[tuple[int, str, int, int, list[int]]]) -> None:
        with self._db:
            for client, name, train, test, counts in rows:
                readable = name.encode(errors="replace").decode()  # a folder's name may be no Unicode
                row = (client, readable, train, test, json.dumps(counts))
                self._db.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?, ?, ?)", row)

    def add_round(self, round: int, seconds: float, ledger: Ledger, evaluation: Evaluation | None) -> None:
        """Everything about one round, in one transaction."""
        with self._db:
            row = (round, seconds, ledger.simulated, ledger.samples, len(ledger.participants - {POOLED}))
            self._db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", row)
            for client in sorted({*ledger.up, *ledger.down, *ledger.evaluation}):
                sums = (ledger.up.get(client, 0), ledger.down.get(client, 0), ledger.evaluation.get(client, 0))
                self._db.execute("INSERT OR REPLACE INTO traffic VALUES (?, ?, ?, ?, ?)", (round, client, *sums))
            logs = [(round, client, name, value) for (client, name), value in ledger.logs.items()]
            self._db.executemany("INSERT OR REPLACE INTO logs VALUES (?, ?, ?, ?)", logs)
            for client, failure in ledger.failures.items():
                self._event(round, client, failure.kind, failure.reason)
            if evaluation is not None:
                self._add_evaluation(round, evaluation)

    def _add_evaluation(self, round: int, evaluation: Evaluation) -> None:
        rows = [(round, client, metric, value) for (client, metric), value in evaluation.clients.items()]
        rows += [(round, POOLED, metric, value) for metric, value in evaluation.overall.items()]
        self._db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)
        samples = [(client, metric, c.numpy().tobytes()) for (client, metric), c in evaluation.correct.items()]
        self._db.executemany("INSERT OR REPLACE INTO samples VALUES (?, ?, ?)", samples)

    def event(self, round: int, kind: str, text: str, client: int = POOLED) -> None:
        with self._db:
            self._event(round, client, kind, text)

    def _event(self, round: int, client: int, kind: str, text: str) -> None:
        row = (round, client, kind, text, time.time())
        self._db.execute("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?)", row)

    def forget_after(self, round: int) -> None:
        """Drop the rows of rounds later than a checkpoint: they will be run again."""
        with self._db:
            for table in ("rounds", "traffic", "metrics", "logs"):
                self._db.execute(f"DELETE FROM {table} WHERE round > ?", (round,))

    def clients(self) -> list[dict[str, Any]]:
        rows = self._db.execute("SELECT client, name, train, test, counts FROM clients ORDER BY client")
        return [
            {"client": c, "name": name, "train": train, "test": test, "counts": json.loads(counts)}
            for c, name, train, test, counts in rows
        ]

    def rounds(self) -> list[dict[str, Any]]:
        """One row per round: seconds, samples, participants and bytes."""
        rows = self._db.execute(
            "SELECT r.round, r.seconds, r.simulated, r.samples, r.participants, COALESCE(SUM(t.up), 0),"
            " COALESCE(SUM(t.down), 0), COALESCE(SUM(t.evaluation), 0) FROM rounds r LEFT JOIN traffic t"
            " ON t.round = r.round GROUP BY r.round ORDER BY r.round"
        )
        names = ("round", "seconds", "simulated", "samples", "participants", "bytes_up", "bytes_down", "bytes_eval")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def series(self, metric: str) -> list[tuple[int, dict[int, float]]]:
        """A metric's value per client, round by round."""
        found: dict[int, dict[int, float]] = {}
        query = "SELECT round, client, value FROM metrics WHERE metric = ? ORDER BY round, client"
        for round, client, value in self._db.execute(query, (metric,)):
            found.setdefault(round, {})[client] = value
        return list(found.items())

    def metric_names(self) -> list[str]:
        return [name for (name,) in self._db.execute("SELECT DISTINCT metric FROM metrics ORDER BY metric")]

    def logs(self) -> list[tuple[int, int, str, float]]:
        """What methods logged: (round, client or -1 for the server, name, value)."""
        return list(self._db.execute("SELECT round, client, name, value FROM logs ORDER BY name, round, client"))

    def correct(self, metric: str) -> dict[int, bytes]:
        """Which test samples were right in the final evaluation: a byte per sample, per client."""
        query = "SELECT client, correct FROM samples WHERE metric = ? ORDER BY client"
        return dict(self._db.execute(query, (metric,)).fetchall())

    def events(self) -> list[Mapping[str, Any]]:
        rows = self._db.execute("SELECT round, client, kind, text FROM events ORDER BY round, client, time")
        return [dict(zip(("round", "client", "kind", "text"), row, strict=True)) for row in rows]

    def traffic(self) -> dict[int, tuple[int, int]]:
        """Bytes up and down per client over the whole run."""
        rows = self._db.execute("SELECT client, SUM(up), SUM(down) FROM traffic GROUP BY client ORDER BY client")
        return {client: (up, down) for client, up, down in rows}
