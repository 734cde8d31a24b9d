"""Client states: every version comes back, memory has a cap that holds, and files do not grow without end."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pfed import files, states
from pfed.errors import RunError
from pfed.states import ClientStates
from pfed.tensors import Tensors

MIXED: list[dict[Any, Any]] = [
    {"kept": Tensors({"fc.weight": torch.arange(6.0).view(2, 3), "fc.bias": torch.zeros(2)})},
    {"kept": Tensors({"conv.weight": torch.ones(4, 1, 3, 3)}), "momentum": {"train": Tensors(w=torch.ones(3))}},
    {"counts": torch.tensor([1, 2, 3]), "tau": 0.5, "mode": "soft", 7: {-1: None}},
    {"half": torch.ones(5, dtype=torch.bfloat16), "flags": torch.tensor([True, False]), "none": torch.empty(0, 3)},
    {},
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b


def block(value: float, size: int = 1000) -> dict[str, Any]:
    """A state of about four kilobytes."""
    return {"kept": Tensors(w=torch.full((size,), value))}


def number(state: dict[str, Any]) -> float:
    return float(state["kept"]["w"][0])


@pytest.fixture(params=["in memory", "on disk", "in a nameless file"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> ClientStates:
    """States that all fit, that all have to be written, and those of a run without a folder that have to be."""
    if request.param == "in memory":
        return ClientStates(tmp_path)
    return ClientStates(tmp_path if request.param == "on disk" else None, cap=0)


def test_states_of_all_kinds_come_back(kept: ClientStates) -> None:
    """Of different architectures, and of one client whose layout changes from version to version."""
    for version, state in enumerate(MIXED, 1):
        kept.save(3, version, state)
        kept.save(version, 100, state)
    for version, state in enumerate(MIXED, 1):
        assert same(kept.load(3, version), state)
        assert same(kept.load(version, 100), state)
    assert kept.load(3, 0) == {}


def test_what_nobody_names_is_forgotten(kept: ClientStates) -> None:
    for version in (1, 2):
        kept.save(4, version, block(version))
    kept.save(5, 2, block(5))
    kept.retain({4: 2, 5: 2})
    assert number(kept.load(4, 2)) == 2
    assert number(kept.load(5, 2)) == 5
    with pytest.raises(KeyError):
        kept.load(4, 1)


def test_a_version_saved_again_is_the_later_one(kept: ClientStates) -> None:
    """As a retry does: the answer that is accepted is the last."""
    kept.save(4, 1, block(1))
    kept.save(4, 1, block(2))
    assert number(kept.load(4, 1)) == 2
    kept.save(4, 1, {})
    assert kept.load(4, 1) == {}


def test_the_cap_holds_and_the_least_used_go_first(tmp_path: Path) -> None:
    one = states.size(block(0))
    kept = ClientStates(tmp_path, cap=3 * one)
    for client in range(10):
        kept.save(client, 1, block(client))
        kept.load(0, 1)
        assert kept.held <= 3 * one
    assert {client for client, _ in kept._memory} == {0, 8, 9}
    assert [number(kept.load(client, 1)) for client in range(10)] == list(range(10))
    assert kept.held <= 3 * one


def test_a_state_larger_than_the_cap(tmp_path: Path) -> None:
    kept = ClientStates(tmp_path, cap=10)
    kept.save(1, 1, block(7))
    assert kept.held == 0
    assert number(kept.load(1, 1)) == 7


MEMORY = """
import resource, sys
import torch
from pfed.states import ClientStates
from pfed.tensors import Tensors
from pathlib import Path
kept = ClientStates(Path(sys.argv[1]), cap=20_000_000)
torch.zeros(250_000) + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for round in range(1, 3):
    for client in range(1200):
        found = kept.load(client, round - 1)
        kept.save(client, round, {"kept": Tensors(w=torch.full((62_500,), float(client)))})
    kept.retain({client: round for client in range(1200)})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000)
"""


def test_memory_of_a_real_process_stays_low(tmp_path: Path) -> None:
    """1,200 clients with a quarter of a megabyte each under a cap of 20 MB: far from 300 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 100


def test_nothing_is_written_that_fits(tmp_path: Path) -> None:
    kept = ClientStates(tmp_path)
    for version in range(1, 5):
        kept.save(0, version, block(version))
        kept.retain({0: version})
    assert list(tmp_path.iterdir()) == []
    kept.flush({0: 4})
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 2 * states.size(block(0))


def test_files_do_not_grow_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more than half is dead, the rest moves to a new file; what is needed is untouched by that."""
    monkeypatch.setattr(states, "FLOOR", 0)
    kept = ClientStates(tmp_path, cap=0)
    kept.save(9, 1, block(99))
    for version in range(2, 40):
        kept.save(0, version, block(version))
        kept.retain({0: version, 9: 1})
        kept.discard(set(states.numbers(tmp_path)) - kept.segments)
        assert number(kept.load(0, version)) == version
        assert number(kept.load(9, 1)) == 99
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 6 * states.size(block(0))
    assert states.numbers(tmp_path)[0] > 5


def test_files_of_a_run_without_a_folder_do_not_grow_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "FLOOR", 0)
    kept = ClientStates(None, cap=0)
    for version in range(1, 40):
        kept.save(0, version, block(version))
        kept.retain({0: version})
    assert len(kept._files) == 1
    assert os.fstat(next(iter(kept._files.values()))).st_size <= 3 * states.size(block(0))


def test_an_index_brings_states_back_in_another_process(tmp_path: Path) -> None:
    kept = ClientStates(tmp_path)
    for client, state in enumerate(MIXED):
        kept.save(client, 5, state)
    versions = dict.fromkeys(range(len(MIXED)), 5)
    kept.flush(versions)
    again = ClientStates(tmp_path)
    again.restore(kept.index(versions))
    assert all(same(again.load(client, 5), state) for client, state in enumerate(MIXED))


def test_every_byte_of_a_state_counts(tmp_path: Path) -> None:
    """One that is turned anywhere in the record, also in whose state it says it is, is noticed."""
    kept = ClientStates(tmp_path)
    kept.save(1, 3, block(1, size=5))
    kept.flush({1: 3})
    index = kept.index({1: 3})
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="the checksum of client 1's state does not match"):
            ClientStates(tmp_path).restore(index)
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="the state of client 1 is cut short"):
        ClientStates(tmp_path).restore(index)
    file.write_bytes(whole)
    ClientStates(tmp_path).restore(index)


def test_damage_while_a_run_goes_on_stops_it(tmp_path: Path) -> None:
    kept = ClientStates(tmp_path, cap=0)
    kept.save(1, 3, block(1))
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        RunError, match=r"^A stored state can't be read: the checksum of client 1's state does not match"
    ):
        kept.load(1, 3)


def test_a_write_that_fails_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a record is on disk when the disk is full; with room again, the next one takes its place."""
    kept = ClientStates(tmp_path)
    kept.save(1, 1, block(1))
    kept.flush({1: 1})
    kept.save(2, 1, block(2))
    write = files.write

    def half(descriptor: int, parts: Any, offset: int) -> None:
        write(descriptor, [b"".join(parts)[:500]], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", half)
        with pytest.raises(OSError, match="No space"):
            kept.flush({1: 1, 2: 1})
    kept.flush({1: 1, 2: 1})
    again = ClientStates(tmp_path)
    again.restore(kept.index({1: 1, 2: 1}))
    assert [number(again.load(client, 1)) for client in (1, 2)] == [1, 2]


def test_a_move_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "FLOOR", 0)
    kept = ClientStates(tmp_path, cap=0)
    for client in range(6):
        kept.save(client, 1, block(client))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(RunError, match=r"^Client states can't be written: No space left on device\. Make room"):
            kept.retain({0: 1, 1: 1})
    assert [number(kept.load(client, 1)) for client in (0, 1)] == [0, 1]
    kept.save(2, 2, block(22))
    kept.retain({0: 1, 1: 1, 2: 2})
    assert [number(kept.load(client, version)) for client, version in ((0, 1), (1, 1), (2, 2))] == [0, 1, 22]
