"""Random streams: every draw in a run comes from a stream named by (seed, purpose, key).

The name alone fixes the stream, so no result depends on which client, worker or process comes first, and a method
that does not open a stream cannot disturb those who do.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def rng(seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """The NumPy generator of one stream: Philox under a 128-bit hash of the whole name.

    >>> first, second = (rng(0, "batch_order", 3, 1).integers(100, size=5) for _ in range(2))
    >>> bool((first == second).all())
    True
    """
    # JSON writes 1 and "1" differently and delimits its parts, so no two names have the same text.
    name = json.dumps([seed, purpose, *key], default=operator.index)
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(int.from_bytes(digest, "little"))))


_HEADER = 24  # bytes before the words in torch's state: seed (8), left (4), seeded (4), next (8)
_WORDS = 624


def torch_rng(seed: int, purpose: str, *key: int | str) -> torch.Generator:
    """The torch (CPU) generator of one stream.

    `manual_seed` keeps 32 bits of a seed, so that among 100,000 streams two would probably be equal. Here all 624
    words of the Mersenne Twister's state are drawn from the NumPy stream of the same name.
    """
    words = rng(seed, purpose, *key).integers(0, 2**32, _WORDS, dtype=np.uint64)
    generator = torch.Generator().manual_seed(0)  # leaves a header that says: all words used up, twist first
    state = generator.get_state()
    state.numpy()[_HEADER : _HEADER + 8 * _WORDS] = words.view(np.uint8)  # each word sits in the low half of 8 bytes
    return generator.set_state(state)


@contextmanager
def torch_scope(seed: int, purpose: str, *key: int | str) -> Iterator[None]:
    """Inside, whatever draws from torch's global generator (dropout, initialisers) draws from this stream.

    The generator's former state comes back at the end, also after an exception.
    """
    before = torch.get_rng_state()
    # A CUDA context is never created here: worker processes could not be forked afterwards.
    before_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    torch.set_rng_state(torch_rng(seed, purpose, *key).get_state())
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(int(rng(seed, purpose, *key, "cuda").integers(2**63)))
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if before_cuda:
            torch.cuda.set_rng_state_all(before_cuda)
