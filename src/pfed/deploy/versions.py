"""The private states of a site in a run: a file for each version that may still be asked for.

A state is on the disk before the reply that it belongs to leaves, for the server's next checkpoint may count on it.
"""

from __future__ import annotations

from pathlib import Path

from pfed import store, wire
from pfed.wire import State


class Lost(Exception):
    """The version that the server builds on is not here, or not whole."""


class Versions:
    """A site's states by version. Version 0 is the empty one."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._newest: tuple[int, State] = (0, {})

    def load(self, version: int) -> State:
        if version == 0:
            return {}
        if version != self._newest[0]:
            try:
                self._newest = version, store.read_tree(self._path(version))
            except (OSError, ValueError, KeyError) as error:
                raise Lost(version) from error
        state: State = wire.copy_tree(self._newest[1])
        return state

    def save(self, version: int, state: State) -> None:
        store.write_tree(self._path(version), state)
        self._newest = version, wire.copy_tree(state)

    def forget_before(self, version: int) -> None:
        """Those before this one are in no checkpoint that the server keeps."""
        for path in self._folder.glob("version-????????"):
            if int(path.name[8:]) < version:
                path.unlink()

    def _path(self, version: int) -> Path:
        return self._folder / f"version-{version:08d}"
