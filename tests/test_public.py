"""The public surface: what users may rely on."""

from __future__ import annotations

import subprocess
import sys

import pfed

NAMES = [
    "ALL", "BACKBONE", "Batch", "Client", "Cohort", "Comparison", "Dataset", "Each", "Experiment", "Federation", "HEAD",
    "Local", "Method", "NONE", "NORM", "Part", "Reduction", "Result", "RunError", "STATS", "Samples", "Tensors",
    "UserError", "compare", "features", "federate", "federation", "head", "load", "option", "params", "register",
    "set_head", "snapshot", "step", "tune",
]  # fmt: skip


def test_exported_names() -> None:
    """A name is added here on purpose, and never taken away by accident."""
    assert pfed.__all__ == NAMES
    assert all(getattr(pfed, name) is not None for name in NAMES)
    assert set(NAMES) <= set(dir(pfed))


def test_importing_pfed_does_not_import_torch() -> None:
    """The command line answers at once because nothing heavy is imported before it is used."""
    code = "import sys, pfed, pfed.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
