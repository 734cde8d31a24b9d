"""The server's side of a run: asks the sites what they are, then runs the ordinary session with them as clients."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.signal import Signal

from pfed.deploy import kits, manifest, message, remote
from pfed.deploy.parents import arrived
from pfed.deploy.remote import Facts, Remote
from pfed.engines.base import Engine, States
from pfed.engines.nvflare import MOST, Link, NVFlare
from pfed.errors import Paused, RunError, UserError
from pfed.runner import Runner
from pfed.store import Store

PATIENCE = 180.0  # seconds until a site's process of a run is expected to be there
TRY = 5.0
REASONS = {
    "approval": "it has not approved the run",
    "facts": "its data are not as they were",
    "run": "it has another run of this name",
}
DEADLINE = 600.0  # seconds for a step, unless told


class RunController(Controller):  # type: ignore[misc]
    """Runs what a job says; the run lies in the server's own folder."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__()
        self._job = job

    def start_controller(self, fl_ctx: FLContext) -> None:
        message.register()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        kit = Path(self._engine.get_workspace().get_root_dir())
        conductor = Conductor(Link(self._engine, abort_signal), self._job, kit)
        with contextlib.suppress(Paused, KeyboardInterrupt):  # a stop that was asked for; the record tells
            conductor.run()


class Conductor:
    """One job of a run: from the first question to the last round, or to a pause."""

    def __init__(self, link: Link, job: Mapping[str, Any], kit: Path):
        self._link, self._job, self._kit = link, job, kit
        self._settings = kits.settings(kit)
        self._folder = Path(self._settings["runs"]) / job["run"]
        self._here: list[str] = job.get("here", job["sites"])  # those that the job was sent to
        self._sent: float = job.get("sent", time.time())

    def run(self) -> None:
        try:
            experiment, job = self._meet()
        except Paused:
            with contextlib.closing(Store(self._folder)) as opened:
                opened.record.set(state="stopped")
            raise
        except (RunError, UserError) as error:
            with contextlib.closing(Store(self._folder)) as opened:
                opened.record.event(0, "failed", str(error))
                opened.record.set(state="failed")
            raise
        state = "stopped"
        try:
            state = experiment.resume(self._folder).state
        finally:
            self._everybody({"kind": "end", "run": job["run"], "state": state}, 2 * TRY)

    def _meet(self) -> tuple[Remote, dict[str, Any]]:
        """Ask the sites what they have, tell them what is planned, and learn what they will send."""
        with contextlib.closing(Store(self._folder)) as opened:
            job, common, here = self._describe(opened)
            experiment = Remote(job["config"], remote.federation(job["sites"], common, self._public()))
            experiment.runner()  # models that do not go with the method: of a site's errors no text would come
            begun = self._begin(opened, job, here)
        clients = {site: client for client, site in enumerate(job["sites"])}
        experiment.sizes = {
            clients[site]: (told["sizes"].get("train", 0), told["sizes"].get("test", 0)) for site, told in begun.items()
        }
        plans = {clients[site]: told["manifest"] for site, told in begun.items()}

        def carrier(runner: Runner, states: States) -> Engine:
            deadline = float(job.get("deadline") or DEADLINE)
            came = partial(arrived, self._kit)
            return NVFlare(
                self._link, job["run"], job["sites"], plans, deadline, self._folder, states, came, self._sent
            )

        experiment.carrier = carrier
        return experiment, job

    def _describe(self, opened: Store) -> tuple[dict[str, Any], Facts, list[str]]:
        """The job with what the sites have in common, that, and the sites that have told it now."""
        known = {site: Facts.of(found) for site, found in opened.record.get("sites", {}).items()}
        answers = self._arrive({"kind": "describe"})
        before = known if opened.record.last_round() > 0 else {}
        unfit = {site: _no_facts(told, before.get(site)) for site, told in answers.items()}
        self._leave_out(opened, unfit)
        facts = known | {site: Facts.of(told) for site, told in answers.items() if not unfit[site]}
        missing = [site for site in self._job["sites"] if site not in facts]
        if missing:
            raise RunError(f"Site {missing[0]} did not answer within {PATIENCE:g} seconds.")
        opened.record.set(sites={site: asdict(found) for site, found in facts.items()})
        common, model = remote.agree({site: facts[site] for site in self._job["sites"]}, self._job["config"]["model"])
        job = {**self._job, "config": {**self._job["config"], "model": model}, "facts": asdict(common)}
        return job, common, [site for site in answers if not unfit[site]]

    def _begin(self, opened: Store, job: dict[str, Any], here: list[str]) -> dict[str, dict[str, Any]]:
        """What the sites that take part say when they begin."""
        if job["privacy"]:  # what it can't cover is said here, too
            manifest.make(job, job["sites"][0], Facts.of(job["facts"]), self._public())
        begun = self._everybody({"kind": "begin", "job": job}, DEADLINE, here)
        if opened.record.last_round() == 0:
            _check_approved(begun)
        unfit = {site: _no_beginning(told, job, site) for site, told in begun.items()}
        self._leave_out(opened, unfit)
        return {site: told for site, told in begun.items() if not unfit[site]}

    def _leave_out(self, opened: Store, unfit: Mapping[str, str | None]) -> None:
        """Sites that can't take part: a run does not begin without them, but goes on while there are enough others."""
        reasons, round = {site: why for site, why in unfit.items() if why}, opened.record.last_round()
        least = min(self._job["config"]["min_clients"], len(self._job["sites"]))
        for site, why in reasons.items():
            text = f"can't begin ({why}); its log says more."
            if round == 0 or len(unfit) - len(reasons) < least:
                raise RunError(f"Site {site} {text}")
            opened.record.event(round, "dropped", text, self._job["sites"].index(site))

    def _public(self) -> Any:
        settings = self._settings
        return remote.public(settings.get("public"), settings.get("classes"), settings.get("image_size"))

    def _arrive(self, question: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The answers of the sites to the first question, which is put again until a site's process has come up."""
        end, answers = time.monotonic() + PATIENCE, dict[str, dict[str, Any]]()
        while len(answers) < len(self._here) and time.monotonic() < end:
            if self._link.aborted:
                raise Paused("The run was stopped.")
            rest = [site for site in self._here if site not in answers and self._link.echo(site)]
            answers |= self._everybody(question, PATIENCE, rest)
            time.sleep(0.2)
        return answers

    def _everybody(
        self, question: Mapping[str, Any], timeout: float, sites: list[str] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Ask several sites at once; those that do not answer are not in it."""
        found: dict[str, dict[str, Any]] = {}

        def ask(site: str) -> None:
            reply = self._link.ask(site, question, {}, timeout)
            if reply is not None and reply.get_return_code() == ReturnCode.OK:
                with contextlib.suppress(ValueError):
                    found[site] = message.unpack(reply)[0]

        chosen = self._here if sites is None else sites
        threads = [threading.Thread(target=ask, args=(site,), daemon=True) for site in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        return {site: found[site] for site in chosen if site in found}


def _no_facts(told: Mapping[str, Any], known: Facts | None) -> str | None:
    """Why a site's description can't be used, if so."""
    if told.get("code") != "ok":
        return _reason(told)
    try:
        found = Facts.of(told)
    except (KeyError, TypeError):
        return "what it says can't be read"
    return REASONS["facts"] if known not in (None, found) else None


def _no_beginning(told: Mapping[str, Any], job: Mapping[str, Any], site: str) -> str | None:
    """Why a site does not take part, if so."""
    if told.get("code") != "ok":
        return _reason(told)
    sizes = told.get("sizes")
    if not manifest.fits(told.get("manifest"), job, site) or not isinstance(sizes, dict):
        return "what it says can't be read"
    counted = all(type(sizes.get(name, 0)) is int and 0 <= sizes.get(name, 0) <= MOST for name in ("train", "test"))
    return None if counted else "what it says can't be read"


def _check_approved(begun: Mapping[str, Mapping[str, Any]]) -> None:
    """All sites must have agreed to a run before it begins."""
    unwilling = sorted(site for site, told in begun.items() if told.get("why") == "approval")
    if unwilling:
        raise RunError(
            f"Not approved yet at {', '.join(unwilling)}. What would be sent lies there, in the kit's folder manifests."
        )


def _reason(told: Mapping[str, Any]) -> str:
    """Why a site does not begin, in the server's own words."""
    known = REASONS.get(str(told.get("why")))
    kind = str(told.get("type") or told.get("code"))
    return known or (kind if kind.isidentifier() else "it does not say why")
