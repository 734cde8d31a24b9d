"""The record of a run: what was written comes back, rounds are there once, and damage is mended from the journal."""

from __future__ import annotations

import json
import re
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from pfed.cohort import Ledger
from pfed.database import JOURNAL, VERSION
from pfed.engines.base import POOLED, Failure
from pfed.errors import RunError, UserError
from pfed.evaluate import Evaluation
from pfed.record import Record


def evaluation(value: float) -> Evaluation:
    return Evaluation(
        clients={(0, "personal/local-test"): value, (1, "personal/local-test"): value / 2},
        overall={"ensemble/new-test": value},
        correct={(0, "personal/local-test"): torch.tensor([True, False, True])},
    )


def ledger(up: int) -> Ledger:
    made = Ledger(up={0: up}, down={0: 2 * up, 1: up}, evaluation={1: 5}, participants={0, POOLED}, samples=7)
    made.logs[0, "loss"] = 0.5
    made.failures[1] = Failure("dropped", "did not answer (simulated)")
    return made


def contents(record: Record) -> dict[str, Any]:
    tables = ("facts", "clients", "rounds", "traffic", "metrics", "logs", "samples")
    rows = {table: sorted(record._db.read(f"SELECT * FROM {table}")) for table in tables}
    return {**rows, "events": record.events()}


def test_the_record_gives_back_what_was_written(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "record.sqlite")) as record:
        record.set(state="running", config={"rounds": 2})
        record.add_clients([(0, "Oslo", 5, 3, [2, 3]), (1, "Rome", 4, 2, [4, 0])])
        record.add_round(1, 0.25, ledger(10), evaluation(0.5))
        record.add_round(2, 0.5, ledger(20), evaluation(0.75))
        assert record.get("config") == {"rounds": 2}
        assert record.get("nothing", "else") == "else"
        assert record.clients()[1] == {"client": 1, "name": "Rome", "train": 4, "test": 2, "counts": [4, 0]}
        assert record.rounds()[0] == {
            "round": 1,
            "seconds": 0.25,
            "simulated": 0.0,
            "samples": 7,
            "participants": 1,
            "bytes_up": 10,
            "bytes_down": 30,
            "bytes_eval": 5,
        }
        assert record.series("personal/local-test") == [(1, {0: 0.5, 1: 0.25}), (2, {0: 0.75, 1: 0.375})]
        assert record.series("ensemble/new-test") == [(1, {POOLED: 0.5}), (2, {POOLED: 0.75})]
        assert record.metric_names() == ["ensemble/new-test", "personal/local-test"]
        assert record.logs() == [(1, 0, "loss", 0.5), (2, 0, "loss", 0.5)]
        assert record.correct("personal/local-test") == {0: b"\x01\x00\x01"}
        assert record.traffic() == {0: (30, 60), 1: (0, 30)}
        assert [(e["round"], e["client"], e["kind"]) for e in record.events()] == [(1, 1, "dropped"), (2, 1, "dropped")]


def test_a_round_written_twice_is_there_once(tmp_path: Path) -> None:
    """Rows are known by round, client and metric, so a round that is run again changes nothing."""
    with closing(Record(tmp_path / "record.sqlite")) as record:
        record.add_round(1, 0.25, ledger(10), evaluation(0.5))
        before = contents(record)
        record.add_round(1, 0.25, ledger(10), evaluation(0.5))
        assert contents(record) == before


def test_rounds_after_a_checkpoint_are_forgotten(tmp_path: Path) -> None:
    with closing(Record(tmp_path / "record.sqlite")) as record:
        for round in range(4):
            record.add_round(round, 0.25, ledger(10), evaluation(0.5))
        record.forget_after(1)
        assert [row["round"] for row in record.rounds()] == [0, 1]
        assert [round for round, _ in record.series("personal/local-test")] == [0, 1]
        assert [round for round, *_ in record.logs()] == [0, 1]
        assert record.traffic() == {0: (20, 40), 1: (0, 20)}
        record.forget_after(-1)
        assert record.rounds() == []


def test_a_round_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The second part of a round fails: the first must not stay."""
    with closing(Record(tmp_path / "record.sqlite")) as record:
        before = contents(record)
        bad = evaluation(0.5)
        bad.clients[2, "personal/local-test"] = [1.0]  # type: ignore[assignment]
        with pytest.raises(sqlite3.Error):
            record.add_round(1, 0.25, ledger(10), bad)
        assert contents(record) == before
    assert opened(tmp_path / "record.sqlite") == (before, [])  # nor in the journal


def of_version(folder: Path, version: int) -> Path:
    path = folder / "record.sqlite"
    path.with_name(JOURNAL).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute(f"PRAGMA user_version = {version}")
    return path


def test_a_record_of_a_later_pfed_is_refused(tmp_path: Path) -> None:
    path = of_version(tmp_path, VERSION + 1)
    for readonly in (True, False):
        with pytest.raises(UserError, match=rf"has record version {VERSION + 1}, this pfed reads up to {VERSION}\.$"):
            Record(path, readonly=readonly)


def test_a_record_of_an_earlier_pfed_can_be_shown_only(tmp_path: Path) -> None:
    path = of_version(tmp_path, VERSION - 1)
    with closing(Record(path, readonly=True)) as record:
        assert record.get("state") is None
    with pytest.raises(UserError, match=rf"has record version {VERSION - 1}; this pfed can show it"):
        Record(path)


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "record.sqlite"
    path.write_text(json.dumps({"not": "a database"}) * 100)
    for readonly in (True, False):
        with pytest.raises(RunError, match=r"record\.sqlite can't be opened: file is not a database\.$"):
            Record(path, readonly=readonly)


def test_reading_a_record_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record.sqlite"
    Record(path).close()
    with closing(Record(path, readonly=True)) as record, pytest.raises(sqlite3.OperationalError, match="readonly"):
        record.set(state="changed")


def filled(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A record with something of everything, and what it holds."""
    path = folder / "record.sqlite"
    with closing(Record(path)) as record:
        record.set(state="running", config={"rounds": 2})
        record.add_clients([(0, "Oslo", 5, 3, [2, 3]), (1, "Rome", 4, 2, [4, 0])])
        for round in range(3):
            record.add_round(round, 0.25, ledger(10), evaluation(0.5))
        record.forget_after(1)
        record.event(1, "note", "one class only")
        return path, contents(record)


def opened(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a record holds when it is opened, and what is said about it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with closing(Record(path)) as record:
            return contents(record), [str(warning.message) for warning in said]


def test_opening_a_good_record_says_nothing(tmp_path: Path) -> None:
    path, before = filled(tmp_path)
    for _ in range(2):
        assert opened(path) == (before, [])


def test_a_byte_anywhere_in_the_file_is_noticed_and_mended(tmp_path: Path) -> None:
    """In its header, in its pages, in a number: the rows are those that were written, and one sentence tells."""
    path, before = filled(tmp_path)
    whole = path.read_bytes()
    told = 0
    texts = [found.start() for found in re.finditer(b"Oslo|one class|simulated", whole)]
    assert len(texts) > 8  # that of an event is in its table and in the table's index
    for at in [*range(0, 100, 7), *range(100, len(whole), 997), *texts]:
        for leftover in path.parent.glob("record.sqlite-*"):
            leftover.unlink()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        found, said = opened(path)
        assert found == before, at
        assert len(said) <= 1
        told += len(said)
        if at in (0, whole.index(b"Oslo")):
            (sentence,) = said
            assert sentence.startswith(f"Run '{path.parent.name}': its record was damaged (")
            assert sentence.endswith("); it was made anew from its journal.")
    assert told >= len(texts)  # other bytes are of no account: free space, or counters


@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "rubbish"])
def test_any_harm_to_the_file_is_mended(tmp_path: Path, harm: str) -> None:
    path, before = filled(tmp_path)
    data = {"cut": path.read_bytes()[:5000], "empty": b"", "rubbish": b"rubbish" * 2000}
    path.unlink()
    if harm in data:
        path.write_bytes(data[harm])
    found, said = opened(path)
    assert found == before
    assert len(said) == 1
    assert opened(path) == (before, [])


def test_the_file_catches_up_with_the_journal(tmp_path: Path) -> None:
    """The process died between the two: no damage, nothing to say."""
    path, _ = filled(tmp_path)
    with closing(Record(path)) as record:
        assert record._db._journal is not None
        record._db._journal.add({"put": {"facts": [["state", '"complete"']]}})
    found, said = opened(path)
    assert ("state", '"complete"') in found["facts"]
    assert said == []


def test_half_an_entry_at_the_end_of_the_journal_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    path, before = filled(tmp_path)
    journal = path.with_name(JOURNAL)
    whole = journal.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for cut in (1, len(last) // 2, len(last) - 1):
        journal.write_bytes(whole + last[:cut])
        assert opened(path) == (before, [])
        assert journal.read_bytes() == whole


@pytest.mark.parametrize("at", [0, 40, 200], ids=["checksum", "entry", "later"])
def test_a_damaged_journal_is_made_anew_from_the_file(tmp_path: Path, at: int) -> None:
    path, before = filled(tmp_path)
    journal = path.with_name(JOURNAL)
    data = bytearray(journal.read_bytes())
    data[at] ^= 1
    journal.write_bytes(data)
    found, (said,) = opened(path)
    assert found == before
    assert said == f"Run '{tmp_path.name}': the journal of its record was damaged; it was made anew from the record."
    assert opened(path) == (before, [])
    path.unlink()
    assert opened(path)[0] == before  # the new journal is as good as the old one


def test_both_damaged_is_the_end_of_it(tmp_path: Path) -> None:
    path, _ = filled(tmp_path)
    path.write_bytes(b"rubbish" * 2000)
    path.with_name(JOURNAL).write_bytes(b"rubbish\nrubbish\n")
    with pytest.raises(RunError, match=r"record\.sqlite can't be opened: file is not a database\.$"):
        Record(path)


def test_events_keep_their_order_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2000.0, 1000.0, 3000.0])
    monkeypatch.setattr("pfed.record.time.time", lambda: next(times))
    with closing(Record(tmp_path / "record.sqlite")) as record:
        for text in ("first", "second", "third"):
            record.event(1, "note", text)
        assert [event["text"] for event in record.events()] == ["first", "second", "third"]
