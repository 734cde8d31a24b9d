"""Runs as jobs: sent to the server, followed, and sent again from the last checkpoint when something broke."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pfed import store
from pfed.deploy import check_installed, kits, remote
from pfed.errors import RunError, UserError
from pfed.record import RECORD, Record
from pfed.result import Result

POLL = 0.5  # seconds
PATIENCE = 60.0  # seconds to wait for a server, and for sites
IDLE = 3  # jobs in a row that may end without a new round
LOST = "the server was lost in mid-run"
STOPPED = "stopped"  # a file in the server's kit: somebody has asked for an end
Tell = Callable[[str], None]
T = TypeVar("T")


def runs_folder(folder: Path) -> Path:
    """Where the server of a federation keeps its runs."""
    return Path(kits.settings(folder / "server").get("runs") or folder / "runs")


def create(folder: Path, config: Mapping[str, Any], **more: Any) -> Path:
    """A new run's folder, with what is to be done in it."""
    sites = sorted(kits.about(folder)["sites"])
    if not sites:
        raise UserError(f"The federation in {str(folder)!r} has no sites yet.")
    settings = remote.check({**config, "clients": len(sites)})
    deadline = settings["deadline"]
    stem = f"{settings['method']}-sites-s{settings['seed']}"
    with contextlib.closing(store.create(runs_folder(folder), stem)) as opened:
        job = {"run": opened.run, "config": {**settings, "deadline": None}, "sites": sites, "deadline": deadline}
        opened.record.set(job={**job, **more}, config=settings, method=settings["method"], state="stopped")
        assert opened.folder is not None
        return opened.folder


def follow(folder: Path, run: Path, tell: Tell) -> Result:
    """Send a run to the server until it is complete; what it leaves is read from its record."""
    check_installed()
    job = _read(run, "job")
    if job is None:
        raise UserError(f"Run {run.name!r} is not one of a federation.")
    if _read(run, "state") == "complete":
        return Result.load(run)
    idle, done = 0, _round(run)
    while idle < IDLE:
        asked = _events(run, "stopped")
        try:
            _send(folder, run, job, tell)
        except (RunError, UserError):
            raise
        except Exception as error:  # whatever NVFlare raises when its server goes away in mid-sentence
            tell(f"{run.name}: the server is gone ({type(error).__name__})")
        state = _read(run, "state")
        if state == "complete":
            return Result.load(run)
        if state == "failed":
            raise RunError((_events(run, "failed") or ["The run failed; the server's log says more."])[-1])
        if (folder / "server" / STOPPED).exists() or len(_events(run, "stopped")) > len(asked):
            raise KeyboardInterrupt(f"Stopped after round {_round(run)}; go on with --resume {run.name}.")
        idle, done = (0, _round(run)) if _round(run) > done else (idle + 1, done)
        tell(f"{run.name}: goes on after round {_round(run)}{_why(run, state)}")
    raise RunError(f"Run {run.name!r} ended {IDLE} times without a new round; see the server's log.")


def _send(folder: Path, run: Path, job: Mapping[str, Any], tell: Tell) -> None:
    """One job of a run, from its sending to its end."""
    with session(folder) as admin:
        number = _at_work(admin, run)
        if number is None:
            here, seen = _wait_for_sites(admin, job["sites"])
            _check_sites(job, here, fresh=not _read(run, "sites"))
            _forget_end(run)
            number = _submit(admin, {**job, "here": sorted(here), "sent": seen}, here)
            tell(f"{run.name}: sent to {', '.join(sorted(here))}")
        _watch(admin, number, run, tell)


@contextlib.contextmanager
def session(folder: Path, patience: float = PATIENCE) -> Iterator[Any]:
    """A connection of the admin to the server."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    end = time.monotonic() + patience
    while True:
        try:
            with _quiet():
                made = new_secure_session(kits.ADMIN, str((folder / "admin").absolute()), timeout=5.0)
            break
        except Exception as error:
            if time.monotonic() > end:
                raise RunError(f"The server of {str(folder)!r} does not answer; is it running?") from error
            time.sleep(POLL)
    try:
        yield made
    finally:
        with contextlib.suppress(Exception):
            made.close()


def connected(admin: Any) -> set[str]:
    """The sites that the server knows."""
    return {client.name for client in admin.get_system_info().client_info}


def abort_all(folder: Path) -> None:
    """End what is running; the runs keep their last checkpoints."""
    with session(folder, patience=0.0) as admin:
        for job in admin.get_system_info().job_info:
            with contextlib.suppress(Exception):
                admin.abort_job(job.job_id)
        end = time.monotonic() + PATIENCE / 3
        while admin.get_system_info().job_info and time.monotonic() < end:
            time.sleep(POLL)


def _wait_for_sites(admin: Any, sites: list[str]) -> tuple[set[str], float]:
    """Those that are there, and when they were looked for: who comes later is not among them."""
    end = time.monotonic() + PATIENCE / 2
    while True:
        now = time.time()
        here = connected(admin) & set(sites)
        if len(here) == len(sites) or time.monotonic() > end:
            return here, now
        time.sleep(POLL)


def _check_sites(job: Mapping[str, Any], here: set[str], fresh: bool) -> None:
    missing = sorted(set(job["sites"]) - here)
    if fresh and missing:
        raise RunError(
            f"Not all sites are there: {', '.join(missing)} did not join. Start them with 'pfed deploy join'."
        )
    least = min(job["config"]["min_clients"], len(job["sites"]))
    if len(here) < least:
        raise RunError(f"{len(here)} sites are there, min_clients is {least}; missing: {', '.join(missing)}.")


def _submit(admin: Any, job: Mapping[str, Any], here: set[str]) -> str:
    """A job is three JSON files; no code."""
    controller = {"id": "pfed", "path": "pfed.deploy.controller.RunController", "args": {"job": job}}
    executor = {"path": "pfed.deploy.executor.SiteExecutor", "args": {}}
    filters: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}
    files = {
        "meta.json": {
            "name": job["run"],
            "resource_spec": {},
            "deploy_map": {"app": ["server", *sorted(here)]},
            "min_clients": min(job["config"]["min_clients"], len(here)),
        },
        "app/config/config_fed_server.json": {**filters, "workflows": [controller], "components": []},
        "app/config/config_fed_client.json": {
            **filters,
            "executors": [{"tasks": ["pfed"], "executor": executor}],
            "components": [],
        },
    }
    with tempfile.TemporaryDirectory() as work:
        for name, content in files.items():
            file = Path(work) / job["run"] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(content))
        with _quiet():
            return str(admin.submit_job(str(Path(work) / job["run"])))


def _at_work(admin: Any, run: Path) -> str | None:
    """The job that is at work on a run already: somebody may have sent it and gone away."""
    if not store.locked(run):
        return None
    for job in admin.list_jobs(name_prefix=run.name) or []:  # that of run-1 is the beginning of run-10's, too
        if job["status"] == "RUNNING" and job["job_name"] == run.name:
            return str(job["job_id"])
    return None


def _forget_end(run: Path) -> None:
    """How the last job of a run ended is not how the next one does; of one that ended in mid-run the record tells."""
    with contextlib.closing(Record(run / RECORD)) as record:
        if record.get("state") == "running":
            record.event(record.last_round(), "note", f"{LOST}: the run goes on from its last checkpoint")
        record.set(state="stopped")


def _watch(admin: Any, number: str, run: Path, tell: Tell) -> None:
    """Until the job is over, or the server is gone; tells of every new round."""
    shown, end = _round(run), time.monotonic() + PATIENCE
    while True:
        try:
            status = str(admin.get_job_meta(number).get("status"))
        except Exception:  # the server died: whatever NVFlare raises then
            status = "FINISHED:LOST"
        now = _round(run)
        for round in range(shown + 1, now + 1):
            tell(f"{run.name}: round {round}")
        shown = max(shown, now)
        if status.startswith("FINISHED"):
            return
        if status == "SUBMITTED" and time.monotonic() > end:  # a site that it was meant for has gone since
            with contextlib.suppress(Exception):
                admin.abort_job(number)
            return
        time.sleep(POLL)


def rule(run: Path) -> dict[str, float] | None:
    """What a run asks of differential privacy."""
    return (_read(run, "job") or {}).get("privacy")


def _read(run: Path, fact: str) -> Any:
    """A fact of a run's record."""
    return _look(run, lambda record: record.get(fact), None)


def _round(run: Path) -> int:
    return _look(run, lambda record: record.last_round(), 0)


def _events(run: Path, kind: str) -> list[str]:
    """What the record says of events of a kind."""
    return _look(run, lambda record: [event["text"] for event in record.events() if event["kind"] == kind], [])


def _look(run: Path, read: Callable[[Record], T], otherwise: T) -> T:
    """What is read in a run's record, which another process may be writing."""
    for _ in range(20):
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(Record(run / RECORD, readonly=True)) as record,
        ):
            return read(record)
        time.sleep(0.1)
    return otherwise


def _why(run: Path, state: str) -> str:
    """What has ended a run's last job, as far as it is known."""
    said = [LOST] if state == "running" else _events(run, "paused")
    return f": {said[-1]}" if said else ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """NVFlare prints what it does."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
