"""What all tests share: one thread, no settings from outside, and a tiny federation of real digits."""

from __future__ import annotations

import signal

import pytest
import torch

from pfed.data.base import ClientData, Federation, Samples
from pfed.data.sources import load


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PFED_RUNS", "PFED_DATA"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes inherit it if a shell has it ignored


@pytest.fixture(scope="session")
def tiny() -> Federation:
    """Four clients with 17 to 26 training digits of three classes each, and ten test digits; 80 public ones."""
    digits = load("digits")
    pool = Samples.of(digits.x, digits.y)
    clients = []
    for k, size in enumerate((17, 20, 23, 26)):
        rows = torch.cat([torch.where(digits.y == (k + j) % 10)[0][20 * k :][:12] for j in range(3)])
        rows = rows[torch.arange(36) * 7 % 36]  # classes mixed, in a fixed order
        clients.append(ClientData(f"client-{k}", pool.part(rows[:size]), pool.part(rows[26:])))
    everything = torch.cat([client.test.rows for client in clients])
    public = pool.part(range(len(digits.y) - 80, len(digits.y)))
    return Federation(tuple(clients), digits.classes, pool.part(everything), public, source="tiny digits")
