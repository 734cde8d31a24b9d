"""NVFlare's own processes: started from a kit, found by it, ended with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pfed.deploy.kits import PROJECT, site_name
from pfed.errors import RunError, UserError

LOG = "parent.log"
JOINED = "joined"  # a file in a site's kit: the server has let it in
ARRIVALS = "arrivals"  # a folder in the server's kit: when each site last came
PROGRAMS = ("nvflare.private.fed.app.", "pfed.deploy.worker")  # modules that are run from a kit
PATIENCE = 20.0  # seconds that a process has to end by itself


def start(kit: Path) -> subprocess.Popen[bytes]:
    """Start the process of a server's or a site's kit; it prints to a file there."""
    if running(kit):
        raise UserError(f"{str(kit)!r} is running already; 'pfed deploy stop' ends it.")
    (kit / JOINED).unlink(missing_ok=True)
    with open(kit / LOG, "ab") as log:
        return subprocess.Popen(
            _command(kit), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment()
        )


def joined(kit: Path) -> bool:
    """Whether the server has let a site in since its process was started."""
    return (kit / JOINED).exists()


def arrived(kit: Path, site: str) -> float:
    """When a site last came to the server; 0 if never."""
    file = kit / ARRIVALS / site
    return file.stat().st_mtime if file.exists() else 0.0


def _command(kit: Path) -> list[str]:
    client = (kit / "startup" / "fed_client.json").exists()
    module = "client.client_train" if client else "server.server_train"
    config = "fed_client.json" if client else "fed_server.json"
    words = ["secure_train=true", f"org={PROJECT}", "config_folder="]
    if client:
        words.append(f"uid={site_name(kit)}")
    program = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}"]
    return [*program, "-m", str(kit.absolute()), "-s", config, "--set", *words]


def _environment() -> dict[str, str]:
    """One thread for each process: several of them share a machine in a trial."""
    return {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "4", **os.environ}


def running(kit: Path) -> list[int]:
    """The processes of a kit, whoever started them: the kit is in their command lines, and what they run."""
    if sys.platform != "linux":
        raise UserError("pfed deploy needs Linux.")
    place, found = os.path.realpath(kit), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = os.fsdecode((folder / "cmdline").read_bytes()).split("\0")
                ours = any(word.startswith(PROGRAMS) for word in words)
                if ours and place in map(os.path.realpath, filter(os.path.isabs, words)) and not _ended(folder):
                    found.append(int(folder.name))
    return sorted(found)


def _ended(folder: Path) -> bool:
    """A process that nobody has asked about yet is still listed when it is over."""
    return (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def stop(kit: Path) -> int:
    """End all processes of a kit; how many there were."""
    found = running(kit)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running(kit):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # another's is told of below
                os.kill(process, number)
        end = time.monotonic() + PATIENCE
        while running(kit) and time.monotonic() < end:
            time.sleep(0.1)
    if running(kit):
        raise RunError(f"The processes of {str(kit)!r} can't be ended.")
    return len(found)
