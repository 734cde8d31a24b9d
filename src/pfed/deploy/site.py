"""A site: its data, its private state, its own record, and the manifest that says what may leave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import pfed
from pfed import machine, wire
from pfed.cohort import Ledger
from pfed.data.base import ClientData, class_counts
from pfed.data.pool import Pool, class_indices, to_client
from pfed.data.user import read_user
from pfed.deploy import Refused, kits, limits, manifest, privacy, remote
from pfed.deploy.manifest import EVALUATION, Manifest
from pfed.deploy.remote import Facts, Remote
from pfed.deploy.versions import Versions
from pfed.engines.base import Reply
from pfed.errors import UserError
from pfed.evaluate import Evaluation
from pfed.runner import Runner
from pfed.store import Store
from pfed.wire import Payload

RUN = re.compile(r"[a-z0-9][\w+-]*")
SECRET = 32  # bytes
ME = 0  # a site is the only client in its own record
Answer = tuple[dict[str, Any], Payload]


class Site:
    """What answers the server's questions at a site; it runs in the worker process."""

    def __init__(self, kit: Path):
        self.kit, self.name = kit, kits.site_name(kit)
        self.settings = kits.settings(kit)
        self._samples: Pool | None = None
        self._run: Run | None = None

    def answer(self, about: dict[str, Any], payload: Payload) -> Answer:
        """One question: describe, begin, step or end."""
        kind = about.get("kind")
        if kind == "describe":
            return asdict(self.facts()), {}
        if kind == "begin":
            return self._begin(about["job"]), {}
        if kind == "step" and self._run is not None and about["run"] == self._run.job["run"]:
            return self._run.step(about, payload)
        if kind == "end" and self._run is not None:
            self._run.end(about["state"])
            self._run = None
            return {}, {}
        raise Refused("question")

    def facts(self) -> Facts:
        """What is said before anything is approved: how inputs look, and how many classes there are."""
        samples = self._data()
        _, names = class_indices(samples.labels, self.settings.get("classes"))
        labels = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        shape, pixels = tuple(samples.x.shape[1:]), not samples.x.is_floating_point()
        return Facts(shape, pixels, len(names), labels, self.settings.get("model") or "")

    def plan(self, job: dict[str, Any]) -> Manifest:
        """What a run would send from here."""
        settings = self.settings
        public = remote.public(settings.get("public"), settings.get("classes"), settings.get("image_size"))
        return manifest.make(job, self.name, Facts.of(job["facts"]), public)

    def _data(self) -> Pool:
        if self._samples is None:
            path, size = Path(self.settings["data"]), self.settings.get("image_size")
            self._samples = read_user(path, self.settings.get("label_column") or "label", image_size=size)
            if self._samples.clients:
                raise UserError(f"A site's data must be CLASS/image or train/CLASS/image, without clients. Got {path}.")
        return self._samples

    def _begin(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._run is not None:
            self._run.close()
            self._run = None
        if not RUN.fullmatch(job["run"]):  # it becomes a folder
            raise Refused("question")
        if Facts.of(job["facts"]) != replace(self.facts(), model=""):
            raise Refused("facts")
        job["config"] = {**remote.check(job["config"]), "device": self.settings.get("device") or "cpu"}
        agreed = self._approved(job)
        self._run = Run(self, job, agreed, *self._own(job))
        data = self._run.data
        sizes = {"train": len(data.train), "test": len(data.test)}
        return {"manifest": agreed, "sizes": {name: sizes[name] for name in agreed["sizes"]}}

    def _own(self, job: dict[str, Any]) -> tuple[Runner, list[str]]:
        """What runs steps on this site's data."""
        config, settings = job["config"], self.settings
        index = job["sites"].index(self.name)
        classes = settings.get("classes")
        split = (config["test_fraction"], config["seed"], index, self.name)
        data, names = to_client(self._data(), classes, *split)
        public = remote.public(settings.get("public"), classes, settings.get("image_size"))
        federation = remote.federation(job["sites"], Facts.of(job["facts"]), public, {index: data})
        runner = Remote(config, federation).runner()
        runner.move(machine.device(config["device"]))
        return runner, list(names)

    def _approved(self, job: dict[str, Any]) -> Manifest:
        """The run's manifest, if the site's owner agrees to it; else it is left for them to read."""
        plan = self.plan(job)
        budget = self.settings.get("approve_within")
        if approved(self.kit, plan, job["run"]):
            return plan
        if budget is not None and manifest.within(plan, budget):
            if plan["privacy"]:
                limits.allow(self.kit, plan["privacy"], job["run"])
            return plan
        file = self.kit / "manifests" / f"{job['config']['method']}-{manifest.digest(plan)[:12]}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(plan, indent=2, default=list))
        raise Refused("approval")


class Run:
    """A run at a site."""

    def __init__(self, site: Site, job: dict[str, Any], agreed: Manifest, runner: Runner, classes: list[str]):
        self.job, self.agreed, self.runner = job, agreed, runner
        self.id: int = job["sites"].index(site.name)
        self.data: ClientData = runner.federation.clients[self.id]
        self._folder = site.kit / "runs" / job["run"]
        self._claim()
        self._versions = Versions(self._folder)
        self._store = Store(self._folder)
        self._calls = limits.Tally(self._folder / "calls.json")
        rule = agreed["privacy"]
        self._releases = limits.Releases(site.kit, job["run"], rule) if rule else None
        self._secret = _secret(site.kit)
        self._ledger, self._round, self._seconds = Ledger(), -1, 0.0
        self._describe(classes)

    def step(self, about: dict[str, Any], payload: Payload) -> Answer:
        """Run a step from the version that the server names, and keep what is private."""
        step, round, version = about["step"], about["round"], about["version"]
        self._permit(about, payload)
        started = time.perf_counter()
        state = self._versions.load(about["base"])
        reply, client = self.runner(step, self.id, round, payload, state)
        seconds = time.perf_counter() - started
        answer = self._evaluated(reply) if version is None else self._protected(reply.payload, payload, about)
        wrong = manifest.fault(self.agreed["calls"], step, answer)
        if wrong is not None:
            raise Refused(wrong)
        if not wire.finite(answer):
            raise Refused("finite")
        if version is not None:
            self._versions.save(version, client.state)
            self._versions.forget_before(about["since"])
        self._note(round, reply, payload, answer, None if version is None else seconds)
        return self._told(reply), answer

    def end(self, state: str) -> None:
        self._store.record.set(state=state)
        self.close()

    def close(self) -> None:
        self._store.close()

    def _permit(self, about: dict[str, Any], payload: Payload) -> None:
        """Refuse a call that the manifest has not, or has not so often: what counts is what is asked, by its digest."""
        step, round, version, base = (about[name] for name in ("step", "round", "version", "base"))
        numbers = [round, base, about["since"], *([] if version is None else [version])]
        if type(step) is not str or any(type(number) is not int or number < 0 for number in numbers):
            raise Refused("question")
        call = self.agreed["calls"].get(step)
        if call is None or (version is None) != (step in EVALUATION):
            raise Refused("step")
        if round > self.agreed["rounds"] + 1:
            raise Refused("round")
        mark = wire.digest({"version": version, "base": base, "payload": payload})
        if not self._calls.admits(f"{step} {round}", mark, call["per_round"] + self.agreed["repeats"]):
            raise Refused("calls")

    def _protected(self, payload: Payload, sent: Payload, about: dict[str, Any]) -> Payload:
        if self._releases is None or not any(True for _ in wire.tensors(payload)):
            return payload
        call = [self.job["run"], *(about[name] for name in ("step", "round", "version", "base"))]
        hidden, mark = privacy.protect(self.agreed["privacy"], payload, sent, self._secret, call)
        if not self._releases.admits(mark):
            raise Refused("budget")
        return hidden

    def _evaluated(self, reply: Reply) -> Payload:
        """Numbers that the manifest lists; which samples were right stays here."""
        return {key: value for key, value in reply.payload.items() if isinstance(value, float)}

    def _told(self, reply: Reply) -> dict[str, Any]:
        """What is known of a reply beside its payload, as far as the manifest lists it."""
        counted = "train" in self.agreed["sizes"]
        weight = reply.weight if counted else float(reply.weight > 0)
        listed = {name: reply.records[name] for name in self.agreed["records"] if name in reply.records}
        records = {name: value for name, value in listed.items() if math.isfinite(value)}
        if self._releases is not None:
            records["epsilon"] = self._releases.epsilon()
        return {"weight": weight, "samples": reply.samples if counted else 0, "records": records}

    def _note(self, round: int, reply: Reply, sent: Payload, answer: Payload, seconds: float | None) -> None:
        """Into the site's own record: all that is known here; of an evaluation no time."""
        if round != self._round:
            self._ledger, self._round, self._seconds = Ledger(), round, 0.0
        ledger, me = self._ledger, ME
        ledger.logs.update({(me, name): value for name, value in reply.records.items()})
        ledger.notes.update(reply.notes)
        evaluation = None
        up, down = wire.nbytes(answer), wire.nbytes(sent)
        if seconds is None:
            ledger.evaluation[me] = ledger.evaluation.get(me, 0) + up + down
            values = reply.payload.items()
            evaluation = Evaluation(
                clients={(me, name): value for name, value in values if isinstance(value, float)},
                correct={(me, n.removeprefix("correct:")): v for n, v in values if isinstance(v, Tensor)},
            )
        else:
            ledger.up[me], ledger.down[me] = ledger.up.get(me, 0) + up, ledger.down.get(me, 0) + down
            ledger.participants.add(me)
            ledger.samples += reply.samples
            self._seconds += seconds
        self._store.record.add_round(round, self._seconds, ledger, evaluation)

    def _claim(self) -> None:
        """The run's folder. Under its name lies the private state of one manifest: no other run may build on that."""
        file = self._folder / "manifest.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        if file.exists():
            if manifest.digest(manifest.load(file)) != manifest.digest(self.agreed):
                raise Refused("run")
        elif any(self._folder.iterdir()):
            raise Refused("run")
        else:
            temporary = self._folder.with_name(f".{self._folder.name}.tmp")
            temporary.write_text(json.dumps(self.agreed, indent=2, default=list))
            os.replace(temporary, file)

    def _describe(self, classes: list[str]) -> None:
        record, data = self._store.record, self.data
        row = (ME, data.name, len(data.train), len(data.test), class_counts(self.runner.federation, data))
        record.add_clients([row])
        method, config = self.runner.method, {**self.job["config"], "data": "own data"}
        record.set(config=config, method=method.label, data="own data", seed=config["seed"], engine="nvflare")
        record.set(classes=classes, state="running", versions={"pfed": pfed.__version__})
        if not record.get("created"):
            record.set(created=time.time())


def approve(kit: Path, plan: Manifest) -> None:
    """Remember that the site's owner agrees."""
    if plan["site"] != kits.site_name(kit):
        raise UserError(f"The manifest is of site {plan['site']!r}, the kit of {kits.site_name(kit)!r}.")
    folder = kit / "approved"
    folder.mkdir(exist_ok=True)
    (folder / manifest.digest(plan)).write_text(json.dumps(plan, indent=2))
    if plan["privacy"]:
        limits.allow(kit, plan["privacy"])


def approved(kit: Path, plan: Manifest, run: str) -> bool:
    """Whether the site's owner agrees; of privacy, to what all runs with this one cost together."""
    known = (kit / "approved" / manifest.digest(plan)).exists()
    return known and (not plan["privacy"] or limits.allows(kit, plan["privacy"], run))


def _secret(kit: Path) -> bytes:
    """A number that nobody else knows, for noise; the file appears whole or not at all, and never changes."""
    file = kit / "local" / "secret"
    if not file.exists():
        descriptor, temporary = tempfile.mkstemp(dir=file.parent)  # for nobody else to read
        with open(descriptor, "wb") as new:
            new.write(secrets.token_bytes(SECRET))
            new.flush()
            os.fsync(new.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, file)
        os.unlink(temporary)
    found = file.read_bytes()
    if len(found) != SECRET:
        raise UserError(f"{str(file)!r} must have {SECRET} bytes. Got {len(found)}.")
    return found
