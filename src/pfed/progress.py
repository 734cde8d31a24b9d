"""One line that tells how a run goes; quiet where nobody looks."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from tqdm import tqdm

from pfed.cohort import Ledger
from pfed.evaluate import Evaluation


class _Bar(tqdm):  # type: ignore[misc]
    """A bar without a thread and without a semaphore of its own: processes are forked, and may be killed."""

    monitor_interval = 0
    _lock = threading.RLock()


class Progress:
    """Round, accuracy, samples per second, bytes and time left."""

    def __init__(self, label: str, rounds: int):
        self._bar: Any = _Bar(total=rounds, desc=label, unit="round", disable=None, leave=False, dynamic_ncols=True)
        self._bytes = 0
        self._shown: dict[str, str] = {}

    def round(self, t: int, seconds: float, ledger: Ledger, evaluation: Evaluation | None) -> None:
        self._bytes += sum(ledger.up.values()) + sum(ledger.down.values())
        if evaluation is not None:
            values = [value for (_, name), value in evaluation.clients.items() if name == "personal/local-test"]
            if values:
                self._shown["accuracy"] = f"{100 * sum(values) / len(values):.1f}%"
        if seconds and ledger.samples:
            self._shown["samples/s"] = f"{ledger.samples / seconds:.0f}"
        self._shown["MB"] = f"{self._bytes / 1e6:.1f}"
        self._bar.set_postfix(self._shown, refresh=False)
        if t > 0:
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
