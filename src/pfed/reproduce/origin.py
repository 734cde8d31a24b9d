"""Where a finished run of a table comes from: the data, the command that makes it again, the sources, the processor."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pfed.reproduce.paper import Table


def whole(settings: Mapping[str, Any]) -> str:
    """What the data of these settings call themselves where they are the whole data sets."""
    from pfed.data import sources

    return sources.named(settings.get("data", "digits"), settings.get("external"))


def other_data(table: Table, kept: Mapping[str, Any]) -> str:
    """In how far a finished run in the paper's setting is not of the paper's data; nothing where it is."""
    from pfed.data.catalog import SOURCES

    settings, source = kept["settings"], kept["source"]
    name = settings.get("data", "digits")
    if name in SOURCES and source != whole(settings):
        return f"{source} in place of all of {whole(settings)}"
    clients = kept["result"]["per_client"]
    known = {key for client in clients for key in (str(client["client"]), client["name"])}
    needed = [c.figure.removeprefix("client:") for c in table.columns.values() if c.figure.startswith("client:")]
    by_domain = settings.get("partition") == "domain"
    if not needed and by_domain and name in SOURCES:
        needed = list(SOURCES[name].domains)
    if not needed or (set(needed) <= known and (len(needed) == len(clients) or not by_domain)):
        return ""
    there = ", ".join(client["name"] for client in clients)
    return f"{name} of {len(clients)} clients ({there}), where the paper has {len(needed)}"


def command(table: Table, rows: Sequence[str], seed: int, ways: Mapping[str, Any]) -> str:
    """What makes a run again; the device is told where it is not the CPU."""
    device = ways.get("device", "cpu")
    on = "" if device == "cpu" else f" --device {device}"
    row = shlex.quote(rows[0])
    return f"pfed reproduce {table.source} --scale {table.scale} --methods {row} --seeds 1 --seed {seed}{on}"


def commit() -> str | None:
    """The commit of the sources, with + where they were changed; None where they are in no repository."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", here, *words], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no", "--", "..")
    return None if head is None else head + ("+" if changed else "")


def processor(device: str = "cpu") -> str:
    """What the clients are trained on."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
