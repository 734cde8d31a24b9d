"""What the benchmarks share: federations of noise, since the content of images takes no time, ratios, memory."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from pfed import Federation, Samples
from pfed.data.base import ClientData


def federation(clients: int, samples: int, shape: tuple[int, ...], public: int = 0) -> Federation:
    """Clients with so many training images each, ten classes, and ten test images that all have in common.

    Of more than a hundred clients each has the images of the hundredth before it.
    """
    source = torch.Generator().manual_seed(0)
    distinct = min(clients, 100)
    x = torch.randint(256, (distinct * samples + public, *shape), dtype=torch.uint8, generator=source)
    pool = Samples.of(x, torch.randint(10, (len(x),), generator=source))
    test = pool.part(range(10))
    held = [pool.part(torch.arange(samples) + k % distinct * samples) for k in range(clients)]
    named = tuple(ClientData(f"client-{k}", part, test) for k, part in enumerate(held))
    rest = pool.part(range(distinct * samples, len(x))) if public else None
    return Federation(named, tuple("0123456789"), test, public=rest)


def ratios(one: Sequence[float], other: Sequence[float]) -> str:
    """Of what was measured in turns: the median and the range of the ratios within a turn."""
    found = [a / b for a, b in zip(one, other, strict=True)]
    return f"median {statistics.median(found):.3f}, range {min(found):.3f} to {max(found):.3f}"


def memory(pid: int) -> int:
    """Bytes of a process and all below it, shared pages counted once (PSS)."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total = 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory(int(descendant)) for descendant in (task / "children").read_text().split())
    return total
