"""A site: its data, its private state, its own record, and the manifest that says what may leave."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

import pfed
from pfed import machine, wire
from pfed.cohort import Ledger
from pfed.data.base import ClientData, class_counts
from pfed.data.pool import Pool, class_indices, to_client
from pfed.data.user import read_user
from pfed.deploy import kits, manifest, privacy, remote
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
ME = 0  # a site is the only client in its own record
Answer = tuple[dict[str, Any], Payload]


class Refused(Exception):
    """The site does not do this, for a reason that is one word of a list."""


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
        mark = manifest.digest(plan)
        file = self.kit / "manifests" / f"{job['config']['method']}-{mark[:12]}.json"
        budget = self.settings.get("approve_within")
        if not approved(self.kit, plan) and not (budget is not None and manifest.within(plan, budget)):
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(plan, indent=2, default=list))
            raise Refused("approval")
        return plan


class Run:
    """A run at a site."""

    def __init__(self, site: Site, job: dict[str, Any], agreed: Manifest, runner: Runner, classes: list[str]):
        self.job, self.agreed, self.runner = job, agreed, runner
        self.id: int = job["sites"].index(site.name)
        self.data: ClientData = runner.federation.clients[self.id]
        self._folder = site.kit / "runs" / job["run"]
        self._folder.mkdir(parents=True, exist_ok=True)
        self._versions = Versions(self._folder)
        self._store = Store(self._folder)
        self._calls = Tally(self._folder / "calls.json")
        self._releases = Tally(self._folder / "releases.json")
        self._secret = _secret(site.kit)
        self._ledger, self._round, self._seconds = Ledger(), -1, 0.0
        self._describe(classes)

    def step(self, about: dict[str, Any], payload: Payload) -> Answer:
        """Run a step from the version that the server names, and keep what is private."""
        step, round, version = about["step"], about["round"], about["version"]
        self._permit(step, round, version)
        started = time.perf_counter()
        state = self._versions.load(about["base"])
        reply, client = self.runner(step, self.id, round, payload, state)
        self._seconds += time.perf_counter() - started
        answer = self._evaluated(reply) if version is None else self._protected(reply.payload, payload)
        wrong = manifest.fault(self.agreed["calls"], step, answer)
        if wrong is not None:
            raise Refused(wrong)
        if version is not None:
            self._versions.save(version, client.state)
            self._versions.forget_before(about["since"])
        self._note(round, reply, payload, answer, evaluates=version is None)
        return self._told(reply), answer

    def end(self, state: str) -> None:
        self._store.record.set(state=state)
        self.close()

    def close(self) -> None:
        self._store.close()

    def _permit(self, step: str, round: int, version: int | None) -> None:
        call = self.agreed["calls"].get(step)
        if call is None or (version is None) != (step in EVALUATION):
            raise Refused("step")
        if not 0 <= round <= self.agreed["rounds"] + 1:
            raise Refused("round")
        if version is not None and self._calls.add(f"{step} {round}", version) > call["per_round"]:
            raise Refused("calls")

    def _protected(self, payload: Payload, sent: Payload) -> Payload:
        rule = self.agreed["privacy"]
        if rule is None:
            return payload
        hidden, mark = privacy.protect(rule, payload, sent, self._secret)
        if self._releases.add("all", mark) > rule["releases"]:
            raise Refused("budget")
        return hidden

    def _evaluated(self, reply: Reply) -> Payload:
        """Numbers that the manifest lists; which samples were right stays here."""
        return {key: value for key, value in reply.payload.items() if isinstance(value, float)}

    def _told(self, reply: Reply) -> dict[str, Any]:
        """What is known of a reply beside its payload, as far as the manifest lists it."""
        counted = "train" in self.agreed["sizes"]
        weight = reply.weight if counted else float(reply.weight > 0)
        records = {name: value for name, value in reply.records.items() if name in self.agreed["records"]}
        if self.agreed["privacy"]:
            records["epsilon"] = privacy.epsilon(self.agreed["privacy"], self._releases.count("all"))
        return {"weight": weight, "samples": reply.samples if counted else 0, "records": records}

    def _note(self, round: int, reply: Reply, sent: Payload, answer: Payload, evaluates: bool) -> None:
        """Into the site's own record: all that is known here."""
        if round != self._round:
            self._ledger, self._round, self._seconds = Ledger(), round, 0.0
        ledger, me = self._ledger, ME
        ledger.logs.update({(me, name): value for name, value in reply.records.items()})
        ledger.notes.update(reply.notes)
        evaluation = None
        up, down = wire.nbytes(answer), wire.nbytes(sent)
        if evaluates:
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
        self._store.record.add_round(round, self._seconds, ledger, evaluation)

    def _describe(self, classes: list[str]) -> None:
        record, data = self._store.record, self.data
        row = (ME, data.name, len(data.train), len(data.test), class_counts(self.runner.federation, data))
        record.add_clients([row])
        method, config = self.runner.method, {**self.job["config"], "data": "own data"}
        record.set(config=config, method=method.label, data="own data", seed=config["seed"], engine="nvflare")
        record.set(classes=classes, state="running", versions={"pfed": pfed.__version__})
        if not record.get("created"):
            record.set(created=time.time())
        (self._folder / "manifest.json").write_text(json.dumps(self.agreed, indent=2, default=list))


class Tally:
    """Sets of marks under names, on the disk: a restart does not make a site forget what it has given."""

    def __init__(self, path: Path):
        self._path = path
        self._marks: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, mark: Any) -> int:
        """How many there are under a name, with this one."""
        marks = self._marks.setdefault(name, [])
        if mark not in marks:
            marks.append(mark)
            temporary = self._path.with_name(self._path.name + ".tmp")
            temporary.write_text(json.dumps(self._marks))
            os.replace(temporary, self._path)
        return len(marks)

    def count(self, name: str) -> int:
        return len(self._marks.get(name, []))


def approve(kit: Path, plan: Manifest) -> None:
    """Remember that the site's owner agrees."""
    if plan["site"] != kits.site_name(kit):
        raise UserError(f"The manifest is of site {plan['site']!r}, the kit of {kits.site_name(kit)!r}.")
    folder = kit / "approved"
    folder.mkdir(exist_ok=True)
    (folder / manifest.digest(plan)).write_text(json.dumps(plan, indent=2))


def approved(kit: Path, plan: Manifest) -> bool:
    return (kit / "approved" / manifest.digest(plan)).exists()


def _secret(kit: Path) -> bytes:
    """A number that nobody else knows, for noise."""
    file = kit / "local" / "secret"
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, secrets.token_bytes(32))
        os.close(descriptor)
    return file.read_bytes()
