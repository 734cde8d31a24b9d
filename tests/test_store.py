"""Where runs live: checkpoints that are whole or not there, the states that they name, locks and lists."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from pfed import states, store
from pfed.cohort import Ledger
from pfed.errors import RunError, UserError
from pfed.record import Record
from pfed.store import Checkpoint, Store
from pfed.tensors import Tensors

CHECKPOINTS, SEGMENTS = "checkpoint-*", "states-*"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "fedrep-digits-s0-1"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def opened(folder: Path) -> Iterator[Store]:
    with closing(Store(folder)) as opened:
        yield opened


def names(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def advance(opened: Store, round: int, *clients: int, versions: dict[int, int] | None = None) -> dict[int, int]:
    """A round in which these clients train and make a version, and its checkpoint."""
    versions = dict(versions or {})
    for client in clients:
        opened.states.save(client, round, {"kept": Tensors(w=torch.full((3,), 100.0 * client + round))})
        versions[client] = round
    opened.retain(versions)
    server = {"params": Tensors(w=torch.full((2,), float(round))), "n": round}
    opened.save(Checkpoint(round, 10 * round, server, versions))
    return versions


def restored(folder: Path) -> tuple[int, dict[int, float]] | None:
    """The round of the newest whole checkpoint and a number from each client's state in it."""
    with closing(Store(folder)) as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = opened.restore()
        if found is None:
            return None
        assert found.calls == 10 * found.round
        assert found.server["params"]["w"].tolist() == [found.round] * 2
        states = {c: opened.states.load(c, v)["kept"]["w"][0].item() for c, v in found.versions.items()}
        return found.round, states


def flip(path: Path, at: int = -1) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damaged_events(folder: Path) -> list[tuple[int, str]]:
    with closing(Record(folder / "record.sqlite", readonly=True)) as record:
        return [(e["round"], e["text"]) for e in record.events() if e["kind"] == "damaged checkpoint"]


def test_a_checkpoint_comes_back(folder: Path, opened: Store) -> None:
    """Server, versions and the states that they name; ids of clients stay numbers."""
    advance(opened, 1, 0, 7)
    opened.close()
    assert restored(folder) == (1, {0: 1.0, 7: 701.0})


def test_nothing_to_restore_in_a_new_folder(folder: Path) -> None:
    assert restored(folder) is None


def test_a_server_without_clients_comes_back(folder: Path, opened: Store) -> None:
    advance(opened, 3)
    opened.close()
    assert restored(folder) == (3, {})
    assert names(folder, SEGMENTS) == []


def test_only_two_checkpoints_are_kept(folder: Path, opened: Store) -> None:
    for round in range(1, 6):
        advance(opened, round, 0)
    assert names(folder, CHECKPOINTS) == ["checkpoint-000004", "checkpoint-000005"]
    assert names(folder, SEGMENTS) == ["states-000001"]


def test_a_state_that_does_not_change_is_written_once(folder: Path, opened: Store) -> None:
    """Client 9 trains in round 1 only."""
    versions = advance(opened, 1, 0, 9)
    one = (folder / "states-000001").stat().st_size // 2
    for round in range(2, 6):
        versions = advance(opened, round, 0, versions=versions)
    assert (folder / "states-000001").stat().st_size == 6 * one
    opened.close()
    assert restored(folder) == (5, {0: 5.0, 9: 901.0})


def test_segments_that_no_checkpoint_names_are_deleted(folder: Path, opened: Store) -> None:
    """As a process leaves one that dies between writing the states and the checkpoint."""
    versions = advance(opened, 1, 0)
    (folder / "states-000077").write_bytes(b"of a round that never got its checkpoint")
    advance(opened, 2, 0, versions=versions)
    assert names(folder, SEGMENTS) == ["states-000001"]


def test_a_restored_store_writes_only_what_changes(folder: Path, opened: Store) -> None:
    """To a file of its own: nothing is ever written behind what another process may have left half done."""
    versions = advance(opened, 1, 0, 1)
    opened.close()
    one = (folder / "states-000001").stat().st_size // 2
    with closing(Store(folder)) as again:
        assert again.restore() is not None
        advance(again, 2, 1, versions=versions)
    assert (folder / "states-000002").stat().st_size == one
    assert restored(folder) == (2, {0: 1.0, 1: 102.0})


def test_files_are_kept_as_long_as_a_kept_checkpoint_names_them(
    folder: Path, opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is needed moves to a new file; the old one stays until the second checkpoint after that."""
    monkeypatch.setattr(states, "FLOOR", 0)
    versions, seen = {}, []
    for round in range(1, 9):
        versions = advance(opened, round, 0, 1, versions=versions)
        seen.append(names(folder, SEGMENTS))
        assert restored_copy(folder) == (round, {0: float(round), 1: 100.0 + round})
        assert restored_copy(folder, without=f"checkpoint-{round:06d}") in (
            None if round == 1 else (round - 1, {0: round - 1.0, 1: 99.0 + round}),
        )
    assert max(map(len, seen)) <= 3
    assert seen[-1] != seen[0]


def test_a_resumed_run_keeps_the_files_of_the_checkpoint_before(folder: Path, opened: Store) -> None:
    """Each process writes to a file of its own; what only the older checkpoint names must outlive a resume."""
    versions = advance(opened, 1, 0)
    opened.close()
    with closing(Store(folder)) as again:
        again.restore()
        versions = advance(again, 2, 0, versions=versions)
    with closing(Store(folder)) as once_more:
        assert once_more.restore() is not None
        once_more.retain(versions)
    flip(folder / "checkpoint-000002")
    assert restored(folder) == (1, {0: 1.0})


def restored_copy(folder: Path, without: str = "") -> Any:
    """What a process would find that came after this moment, perhaps without the newest checkpoint."""
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy)
    (copy / without).unlink() if without else None
    try:
        return restored(copy)
    finally:
        shutil.rmtree(copy)


@pytest.mark.parametrize("at", [0, 31, 32, 200, -1], ids=["checksum", "its end", "header", "middle", "last byte"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: Path, opened: Store, at: int) -> None:
    """One bit is enough. It is noted in the record."""
    versions = advance(opened, 1, 0, 1)
    advance(opened, 2, 0, versions=versions)
    opened.close()
    flip(folder / "checkpoint-000002", at)
    assert restored(folder) == (1, {0: 1.0, 1: 101.0})
    ((round, text),) = damaged_events(folder)
    assert round == 2
    assert "round 2 is damaged" in text
    assert "checksum" in text


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_every_harm_to_a_checkpoint_is_noticed(folder: Path, opened: Store, harm: str) -> None:
    versions = advance(opened, 1, 0)
    advance(opened, 2, 0, versions=versions)
    opened.close()
    spoil(folder / "checkpoint-000002", harm)
    assert restored(folder) == (1, {0: 1.0})
    assert [round for round, _ in damaged_events(folder)] == ([] if harm == "gone" else [2])


def spoil(path: Path, harm: str) -> None:
    if harm == "flip":
        flip(path, 100)
    elif harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -1 if harm == "cut" else 0])


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_every_harm_to_a_state_is_noticed(folder: Path, opened: Store, harm: str) -> None:
    """The state of round 2 lies behind that of round 1, in another file where the run was resumed in between."""
    versions = advance(opened, 1, 0)
    opened.close()
    with closing(Store(folder)) as again:
        again.restore()
        advance(again, 2, 0, versions=versions)
    spoil(folder / "states-000002", harm)
    assert restored(folder) == (1, {0: 1.0})
    assert [round for round, _ in damaged_events(folder)] == [2]


def test_two_damaged_checkpoints_leave_the_beginning(folder: Path, opened: Store) -> None:
    versions = advance(opened, 1, 0)
    advance(opened, 2, 0, versions=versions)
    opened.close()
    flip(folder / "checkpoint-000001")
    flip(folder / "checkpoint-000002")
    assert restored(folder) is None
    assert sorted(round for round, _ in damaged_events(folder)) == [1, 2]


def test_a_damaged_shared_segment_spoils_both_checkpoints(folder: Path, opened: Store) -> None:
    """Client 9's state of round 1 is part of both."""
    versions = advance(opened, 1, 0, 9)
    advance(opened, 2, 0, versions=versions)
    opened.close()
    flip(folder / "states-000001", 150)
    flip(folder / "states-000001", 450)
    with closing(Store(folder)) as again, pytest.warns(UserWarning, match="is damaged") as said:
        assert again.restore() is None
    assert [str(warning.message).partition(");")[2] for warning in said] == [
        " the one before is used.",
        " the run begins anew.",
    ]


def test_the_way_on_after_damage_overwrites_what_was_damaged(folder: Path, opened: Store) -> None:
    """Round 2 is run again and saved under the same names."""
    versions = advance(opened, 1, 0, 1)
    advance(opened, 2, 0, versions=versions)
    opened.close()
    flip(folder / "states-000001")
    with closing(Store(folder)) as again:
        with pytest.warns(UserWarning, match="the checkpoint of round 2 is damaged .* the one before is used"):
            back = again.restore()
        assert back is not None
        advance(again, 2, 0, versions=back.versions)
    assert restored(folder) == (2, {0: 2.0, 1: 101.0})
    assert names(folder, CHECKPOINTS) == ["checkpoint-000001", "checkpoint-000002"]


def test_half_written_files_are_ignored(folder: Path, opened: Store) -> None:
    """They carry another name until they are whole."""
    advance(opened, 1, 0)
    (folder / "checkpoint-000002.tmp").write_bytes(b"half")
    (folder / "states-000002.tmp").write_bytes(b"half")
    opened.close()
    assert restored(folder) == (1, {0: 1.0})
    assert damaged_events(folder) == []


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_last_checkpoint_good(
    folder: Path, opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the round, the reason, the last good round and the command that goes on; no rubbish stays."""
    versions = advance(opened, 1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full_disk)
        with pytest.raises(RunError) as caught:
            advance(opened, 2, 0, versions=versions)
    assert str(caught.value) == (
        "The checkpoint of round 2 can't be written: No space left on device. The last good one is of round 1; "
        "make room and go on with 'pfed resume fedrep-digits-s0-1'."
    )
    assert names(folder, "*.tmp") == []
    assert names(folder, CHECKPOINTS) == ["checkpoint-000001"]
    advance(opened, 2, 0, versions=versions)  # there is room again
    opened.close()
    assert restored(folder) == (2, {0: 2.0})


def test_a_full_disk_between_states_and_checkpoint(
    folder: Path, opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new states are written, the checkpoint is not: the older one still names the older states."""
    versions = advance(opened, 1, 0)
    write = store.write_tree

    def only_states(path: Path, tree: Any) -> None:
        if path.name.startswith("checkpoint"):
            full_disk()
        write(path, tree)

    monkeypatch.setattr(store, "write_tree", only_states)
    with pytest.raises(RunError, match="The last good one is of round 1"):
        advance(opened, 2, 0, versions=versions)
    opened.close()
    assert restored(folder) == (1, {0: 1.0})


def test_a_full_disk_before_any_checkpoint_does_not_name_one(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no good checkpoint of round 0 to go on from."""
    monkeypatch.setattr(store.os, "fsync", full_disk)
    with pytest.raises(RunError, match="No space left on device") as caught:
        advance(opened, 1, 0)
    assert "The last good one is of round" not in str(caught.value)


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Store(None)) as opened:
        advance(opened, 1, 0)
        assert opened.run == "unsaved"
        assert opened.restore() is None
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(folder: Path, opened: Store) -> None:
    assert store.locked(folder)
    with pytest.raises(UserError, match=r"^Run 'fedrep-digits-s0-1' is in use by another process\.$"):
        Store(folder)
    with pytest.raises(UserError, match=r"^Run 'fedrep-digits-s0-1' is running; stop it first\.$"):
        store.remove(folder)
    opened.close()
    assert not store.locked(folder)
    store.remove(folder)
    assert not folder.exists()


def test_a_process_that_was_forked_does_not_hold_the_lock(folder: Path, opened: Store) -> None:
    """Else a run could not be resumed as long as one of its workers is still there."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert store.locked(folder)
        opened.close()
        deadline = time.monotonic() + 10
        while store.locked(folder) and time.monotonic() < deadline:
            time.sleep(0.01)  # it may not have come to let go
        assert not store.locked(folder)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_new_runs_take_the_next_free_name(tmp_path: Path) -> None:
    made = []
    for _ in range(3):
        with closing(store.create(tmp_path / "deep" / "runs", "ditto-digits-s0")) as opened:
            made.append(opened.run)
    assert made == ["ditto-digits-s0-1", "ditto-digits-s0-2", "ditto-digits-s0-3"]


@pytest.mark.parametrize("below", ["file", "file/runs"])
def test_a_runs_folder_that_cannot_be_written(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=rf"^The runs folder '.*{below}' can't be written: .+\.$"):
        store.create(tmp_path / below, "x")


def test_runs_are_found_by_name_or_by_path(folder: Path, opened: Store) -> None:
    runs = folder.parent
    assert store.find(runs, folder.name) == folder
    assert store.find(runs / "elsewhere", str(folder)) == folder
    with pytest.raises(
        UserError, match=r"^There is no run 'fedrep-digits-s0-2'\. Did you mean 'fedrep-digits-s0-1'\?$"
    ):
        store.find(runs, "fedrep-digits-s0-2")
    with pytest.raises(UserError, match=r"^There is no run 'x': '.*elsewhere' has none\.$"):
        store.find(runs / "elsewhere", "x")


def test_a_running_run_without_a_process_has_died(folder: Path, opened: Store) -> None:
    """The record says running until somebody changes it; the lock tells whether it is true."""
    opened.record.set(state="running", config={"rounds": 9}, method="fedrep", created=1.0)
    opened.record.add_round(4, 0.1, Ledger(), None)
    described = store.describe(folder)
    assert described["state"] == "running"
    opened.close()
    described = store.describe(folder)
    assert {key: described[key] for key in ("run", "method", "state", "round", "rounds")} == {
        "run": "fedrep-digits-s0-1",
        "method": "fedrep",
        "state": "died",
        "round": 4,
        "rounds": 9,
    }
    assert described["bytes"] == sum(path.stat().st_size for path in folder.iterdir())


def test_the_listing_has_the_newest_first(tmp_path: Path) -> None:
    for created, stem in [(2.0, "b"), (3.0, "a"), (1.0, "c")]:
        with closing(store.create(tmp_path, stem)) as opened:
            opened.record.set(created=created)
    assert [row["run"] for row in store.listing(tmp_path)] == ["a-1", "b-1", "c-1"]
    assert store.listing(tmp_path / "none") == []


def test_a_run_that_died_at_birth_does_not_hide_the_others(tmp_path: Path) -> None:
    """A process killed before it has written its record leaves an empty file; it is listed, and can be removed."""
    with closing(store.create(tmp_path, "good")) as opened:
        opened.record.set(created=1.0, state="complete")
    (tmp_path / "dead-1").mkdir()
    (tmp_path / "dead-1" / "record.sqlite").touch()
    rows = {row["run"]: row["state"] for row in store.listing(tmp_path)}
    assert rows["good-1"] == "complete"
    store.remove(tmp_path / "dead-1")
    assert {row["run"] for row in store.listing(tmp_path)} == {"good-1"}
