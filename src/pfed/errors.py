"""The errors that pfed raises on purpose, and the sentence that goes with each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what was asked for: one clear sentence, exit code 2, nothing lost."""


class RunError(RuntimeError):
    """Something failed while running: exit code 1, the last checkpoint stays good."""


class Paused(RunError):
    """A run that ends for now, as it was told to: it goes on from its last checkpoint."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest one that does.

    >>> str(unknown("method", "fedrepp", ["fedavg", "fedrep"]))
    "There is no method 'fedrepp'. Did you mean 'fedrep'?"
    """
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(options)}."
    return UserError(f"There is no {kind} {name!r}. {hint}")
