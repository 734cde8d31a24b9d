"""The seam between methods and machines: an engine runs a named step on named clients."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pfed.wire import Payload, State

POOLED = -1  # the id of the union of all clients' data, for central training in a simulation


@dataclass(frozen=True)
class Call:
    """One step on several clients.

    `base` names for each client the version of its state to start from, `version` the one that a reply makes; it
    counts only once the server has accepted the reply. Evaluation reads state and makes no version.
    """

    step: str
    round: int
    common: Payload
    own: Mapping[int, Payload]
    base: Mapping[int, int]
    version: int | None


@dataclass(frozen=True)
class Reply:
    """A client's answer, and what is known about it beside the payload."""

    payload: Payload
    weight: float = 0.0  # training samples; 0 if it could not train
    samples: int = 0  # trained on in this step
    records: Mapping[str, float] = field(default_factory=dict)
    notes: Collection[str] = ()  # to be said once in a run


@dataclass(frozen=True)
class Failure:
    """A client that gave no usable answer."""

    kind: Literal["error", "died", "dropped", "late", "bad reply"]
    reason: str
    detail: str = ""  # a traceback, which stays where the client is

    @classmethod
    def of(cls, error: BaseException, where: str) -> Failure:
        text = str(error).splitlines()[0] if str(error) else ""
        detail = "".join(traceback.format_exception(error))
        return cls("error", f"{where} raised {type(error).__name__}: {text}".rstrip(": "), detail)


class States(Protocol):
    """Where client state lives between steps, by client and version. Version 0 is the empty state."""

    def load(self, client: int, version: int) -> State: ...
    def save(self, client: int, version: int, state: State) -> None: ...


class Engine(Protocol):
    """Anything that can run steps on clients."""

    @property
    def ids(self) -> Sequence[int]: ...

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        """Run the call's step on each of its clients; answers come in any order."""
        ...

    def close(self) -> None: ...
