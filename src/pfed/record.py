"""The record of a run: one SQLite file that says what was asked, what happened and what came out.

Rows are idempotent by (round, client, metric), so a round that is run again after a resume writes the same rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pfed.cohort import Ledger
from pfed.database import Database
from pfed.engines.base import POOLED
from pfed.evaluate import Evaluation

RECORD = "record.sqlite"
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
CREATE TABLE IF NOT EXISTS samples (client INTEGER, metric TEXT, correct TEXT, PRIMARY KEY (client, metric));
CREATE TABLE IF NOT EXISTS events (
    round INTEGER, client INTEGER, kind TEXT, text TEXT, time REAL, PRIMARY KEY (round, client, kind, text));
"""


class Record:
    """One run's SQLite file, or a record in memory when no folder is given."""

    def __init__(self, path: Path | None, readonly: bool = False):
        self.path = path
        self._db = Database(path, TABLES, readonly)

    def close(self) -> None:
        self._db.close()

    def flush(self) -> None:
        """What was written is on the disk after this."""
        self._db.flush()

    def set(self, **facts: Any) -> None:
        """Remember facts about the run: its state, configuration, versions."""
        self._db.write({"put": {"facts": [[name, json.dumps(value)] for name, value in facts.items()]}})

    def get(self, fact: str, default: Any = None) -> Any:
        rows = self._db.read("SELECT value FROM facts WHERE name = ?", fact)
        return json.loads(rows[0][0]) if rows else default

    def add_clients(self, rows: Iterable[tuple[int, str, int, int, list[int]]]) -> None:
        readable = [  # a folder's name may be no Unicode
            [client, name.encode(errors="replace").decode(), train, test, json.dumps(counts)]
            for client, name, train, test, counts in rows
        ]
        self._db.write({"put": {"clients": readable}})

    def add_round(self, round: int, seconds: float, ledger: Ledger, evaluation: Evaluation | None) -> None:
        """Everything about one round, in one transaction."""
        moved = sorted({*ledger.up, *ledger.down, *ledger.evaluation})
        rows: dict[str, list[Any]] = {
            "rounds": [[round, seconds, ledger.simulated, ledger.samples, len(ledger.participants - {POOLED})]],
            "traffic": [
                [round, client, *(counter.get(client, 0) for counter in (ledger.up, ledger.down, ledger.evaluation))]
                for client in moved
            ],
            "logs": [[round, client, name, value] for (client, name), value in ledger.logs.items()],
            "events": [_event(round, client, f.kind, f.reason) for client, f in ledger.failures.items()],
        }
        rows["events"] += [_event(round, POOLED, "note", text) for text in sorted(ledger.notes)]
        if evaluation is not None:
            rows["metrics"] = [[round, client, metric, value] for (client, metric), value in evaluation.clients.items()]
            rows["metrics"] += [[round, POOLED, metric, value] for metric, value in evaluation.overall.items()]
            rows["samples"] = [[client, metric, _text(c)] for (client, metric), c in evaluation.correct.items()]
        self._db.write({"put": rows})

    def event(self, round: int, kind: str, text: str, client: int = POOLED) -> None:
        self._db.write({"put": {"events": [_event(round, client, kind, text)]}})

    def forget_after(self, round: int) -> None:
        """Drop the rows of rounds later than a checkpoint: they will be run again."""
        self._db.write({"forget": {"after": round, "tables": ["rounds", "traffic", "metrics", "logs"]}})

    def clients(self) -> list[dict[str, Any]]:
        rows = self._db.read("SELECT client, name, train, test, counts FROM clients ORDER BY client")
        return [
            {"client": c, "name": name, "train": train, "test": test, "counts": json.loads(counts)}
            for c, name, train, test, counts in rows
        ]

    def rounds(self) -> list[dict[str, Any]]:
        """One row per round: seconds, samples, participants and bytes."""
        rows = self._db.read(
            "SELECT r.round, r.seconds, r.simulated, r.samples, r.participants, COALESCE(SUM(t.up), 0),"
            " COALESCE(SUM(t.down), 0), COALESCE(SUM(t.evaluation), 0) FROM rounds r LEFT JOIN traffic t"
            " ON t.round = r.round GROUP BY r.round ORDER BY r.round"
        )
        names = ("round", "seconds", "simulated", "samples", "participants", "bytes_up", "bytes_down", "bytes_eval")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def progress(self, metric: str, after: int = -1) -> list[tuple[int, float, int, float | None]]:
        """Of each round after a given one: its number, seconds, bytes up and down, and the mean of a metric."""
        return self._db.read(
            "SELECT round, seconds,"
            " (SELECT COALESCE(SUM(up + down), 0) FROM traffic t WHERE t.round = r.round),"
            " (SELECT AVG(value) FROM metrics m WHERE m.round = r.round AND metric = ? AND client != ?)"
            " FROM rounds r WHERE round > ? ORDER BY round",
            *(metric, POOLED, after),
        )

    def last_round(self) -> int:
        """The last round that was done, 0 if none."""
        return int(self._db.read("SELECT COALESCE(MAX(round), 0) FROM rounds")[0][0])

    def series(self, metric: str) -> list[tuple[int, dict[int, float]]]:
        """A metric's value per client, round by round."""
        found: dict[int, dict[int, float]] = {}
        query = "SELECT round, client, value FROM metrics WHERE metric = ? ORDER BY round, client"
        for round, client, value in self._db.read(query, metric):
            found.setdefault(round, {})[client] = value
        return list(found.items())

    def metric_names(self) -> list[str]:
        return [name for (name,) in self._db.read("SELECT DISTINCT metric FROM metrics ORDER BY metric")]

    def logs(self, rounds: Sequence[int] | None = None) -> list[tuple[int, int, str, float]]:
        """What methods logged: (round, client or -1 for the server, name, value), in all rounds or in these."""
        if rounds is None:
            return self._db.read("SELECT round, client, name, value FROM logs ORDER BY name, round, client")
        query = "SELECT round, client, name, value FROM logs WHERE round = ? ORDER BY client, name"
        return [row for round in rounds for row in self._db.read(query, round)]

    def correct(self, metric: str) -> dict[int, bytes]:
        """Which test samples were right in the final evaluation: a byte per sample, per client."""
        query = "SELECT client, correct FROM samples WHERE metric = ? ORDER BY client"
        rows = self._db.read(query, metric)
        return {client: bytes(map(int, correct)) for client, correct in rows}

    def events(self) -> list[Mapping[str, Any]]:
        rows = self._db.read("SELECT round, client, kind, text FROM events ORDER BY round, client, rowid")
        return [dict(zip(("round", "client", "kind", "text"), row, strict=True)) for row in rows]

    def traffic(self) -> dict[int, tuple[int, int]]:
        """Bytes up and down per client over the whole run."""
        rows = self._db.read("SELECT client, SUM(up), SUM(down) FROM traffic GROUP BY client ORDER BY client")
        return {client: (up, down) for client, up, down in rows}


def _event(round: int, client: int, kind: str, text: str) -> list[Any]:
    return [round, client, kind, text, time.time()]


def _text(correct: Tensor) -> str:
    """A 1 or a 0 for each sample."""
    return "".join("01"[value] for value in correct.int().tolist())
