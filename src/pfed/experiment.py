"""An experiment: a method, data, a model and options; `run()` does it and gives back what came out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pfed import anatomy, machine, options, pictures, pool, registry, store, tasks, trackers
from pfed.client import step_fractions
from pfed.config import Local, RunOptions, SplitOptions
from pfed.data.base import Dataset, Federation, Samples, class_counts
from pfed.description import data_kept, data_of, feature_skew, versions
from pfed.engines import cluster
from pfed.errors import Paused, RunError, UserError, unknown
from pfed.method import Method
from pfed.pool import Pool, Spec
from pfed.progress import Progress
from pfed.result import Result
from pfed.session import Carrier, Session
from pfed.store import Store
from pfed.trackers import Trackers

BOX_SIZE = 256  # pixels of images with boxes of a user's own, unless asked otherwise
ModelLike = str | nn.Module | Callable[[], nn.Module]


class Experiment:
    """What is to be run.

    `method` is a name, a class or an instance; `data` a name, a path, a `Federation`, a `Dataset` or per-client arrays
    or torch datasets; `model` a name, a module or a function that makes one (or several, dealt to the clients in
    turn). `hyper` are the method's options, `local` those of local training; all else is an option of the run.

    >>> from pfed import Experiment
    >>> result = Experiment(method="fedper", data="digits", clients=5, classes_per_client=2, rounds=2).run()
    >>> sorted(result.metrics)[:1]
    ['personal/local-test']
    """

    carrier: Carrier | None = None  # what makes the engine, where the data lie elsewhere

    def __init__(
        self,
        method: str | Method | type[Method] = "fedavg",
        data: Any = "digits",
        model: ModelLike | Sequence[ModelLike] = "auto",
        *,
        hyper: Mapping[str, Any] | None = None,
        local: Local | Mapping[str, Any] | None = None,
        **run_options: Any,
    ):
        self.method = _method(method, hyper or {})
        self._method_name = method if isinstance(method, str) else self.method.label
        self._data, self._model = data, model
        if local is not None:
            run_options["local"] = local if isinstance(local, Local) else options.make(Local, local, "local")
        run_options["data"] = data if isinstance(data, str) else "own data"
        run_options["model"] = model if isinstance(model, str) else "own model"
        self.options: RunOptions = options.make(RunOptions, run_options, "the run")
        self._federation: Federation | None = None
        self.session: Session | None = None
        _check(self.method, self.options)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Experiment:
        """From the nested names of a TOML file or of a run's record: method, run options, [local] and [hyper]."""
        values = dict(config)
        name = values.pop("method", "fedavg")
        if not isinstance(name, str):
            raise UserError(f"method must be the name of a method. Got {name!r}.")
        known = {*options.hints(RunOptions), "method", "hyper"}
        for key, value in values.items():
            if key not in known:
                raise unknown("option of the run", key, known)
            if key in ("local", "hyper") and not isinstance(value, Mapping):
                raise UserError(f"{key} must be a table of options. Got {value!r}.")
            if key in ("data", "model") and not isinstance(value, str):
                raise UserError(f"run.{key} must be a text. Got {value!r}.")
        return cls(name, **values)

    def config(self) -> dict[str, Any]:
        """The inverse of `from_config`: every option explicit."""
        run = {field.name: getattr(self.options, field.name) for field in dataclasses.fields(self.options)}
        run["local"] = dataclasses.asdict(self.options.local)
        return {"method": self._method_name, "hyper": self.method.hyperparameters(), **run}

    def federation(self) -> Federation:
        """The data, divided among the clients."""
        if self._federation is None:
            self.adopt(_federation(self._data, self.options))
        assert self._federation is not None
        return self._federation

    def division(self) -> dict[str, Any]:
        """The settings that decide what each client has, and how its pixels are normalised."""
        names = {f.name for f in dataclasses.fields(SplitOptions)} | {"data", "external", "seed", "task", "normalise"}
        return {key: value for key, value in self.config().items() if key in names}

    def adopt(self, federation: Federation) -> None:
        """Take what another experiment with the same data, options and seed has divided already."""
        _check_needs(self.method, federation)
        _check_task(self.options.task, federation)
        self.method.check(self.options, federation)
        self._federation = federation

    def run(self, runs: str | Path | None = None) -> Result:
        """Run from the start. With a runs folder (or PFED_RUNS) the run is kept and can be resumed."""
        self.federation()  # a mistake in the data shows before a folder is made
        models = self._pool()
        folder = runs or os.environ.get("PFED_RUNS")
        with contextlib.closing(
            store.create(Path(folder), self._stem, self._cap) if folder else Store(None, self._cap)
        ) as opened:
            return self._run(opened, models)

    def resume(self, folder: str | Path) -> Result:
        """Go on from the last good checkpoint of a run of this experiment, which may have more rounds than planned."""
        folder = Path(folder)
        if not store.holds_run(folder):
            raise UserError(f"There is no run in {str(folder)!r}.")
        models = self._pool()
        with contextlib.closing(Store(folder, self._cap)) as opened:
            self._check_own(opened)
            self._extend(opened)
            return self._run(opened, models)

    @property
    def _cap(self) -> int:
        return self.options.state_memory * 10**6

    @property
    def _stem(self) -> str:
        return f"{self.method.label}-{Path(self.options.data).stem.replace(' ', '-')}-s{self.options.seed}"

    def _check_own(self, opened: Store) -> None:
        """Refuse to go on with a run of another method, seed or federation."""
        record = opened.record
        found = {"method": record.get("method"), "seed": record.get("seed"), **data_kept(record)}
        own = {"method": self.method.label, "seed": self.options.seed, **data_of(self.federation())}
        if self.carrier is not None:  # whose sites may have more samples by now
            own = {key: own[key] for key in ("method", "seed", "number of clients")}
        for key, value in own.items():
            if record.get("created") and found[key] not in (None, value):
                raise UserError(f"Run {opened.run!r} is another experiment's: its {key} is {found[key]}. Got {value}.")

    @property
    def extensible(self) -> bool:
        """Whether rounds can be added to a run: neither method nor schedule depend on how many there are."""
        return not self.method.fixed_rounds and self.options.local.schedule == "constant"

    def _extend(self, opened: Store) -> None:
        """Make a run that was planned with another number of rounds this one, where that makes no difference."""
        planned = opened.record.get("config", {}).get("rounds", self.options.rounds)
        rounds, done = self.options.rounds, opened.record.last_round()
        if rounds == planned:
            return
        what = f"{self.method.label} does" if self.method.fixed_rounds else "local.schedule says"
        if not self.extensible:
            raise UserError(f"Run {opened.run!r} must have {planned} rounds: what {what} depends on it. Got {rounds}.")
        if rounds < min(done, planned):
            raise UserError(f"Run {opened.run!r} has done {min(done, planned)} rounds already. Got {rounds}.")
        opened.rewind(planned)
        opened.record.set(config=self.config(), state="stopped")

    def model(self, client: int) -> nn.Module:
        """The personal model of a client, as the run left it."""
        if self.session is None:
            raise UserError("There are no personal models yet: run or resume the experiment first.")
        if client not in self.session.clients:
            raise UserError(f"client must be one of 0 to {len(self.session.clients) - 1}. Got {client}.")
        return self.session.personal(client)

    def _run(self, opened: Store, models: Pool) -> Result:
        try:
            return self._go(opened, models)
        except sqlite3.Error as error:
            raise RunError(f"The record of run {opened.run!r} can't be written: {error}.") from error

    def _go(self, opened: Store, models: Pool) -> Result:
        record = opened.record
        if not record.get("created"):
            self._describe(opened)
        with machine.one_thread():
            self.session = session = Session(self.method, self.options, self.federation(), models, opened, self.carrier)
            if record.get("state") == "complete" and session.done.round == session.last:
                return Result(record, opened.run, opened.folder)
            record.set(state="running")
            try:
                tracked = Trackers(self.options.track, opened, self._stem, self.config(), session.done.round)
                with Progress(self.method.label, self.options.rounds) as progress, tracked:
                    session.run(progress, tracked)
            except KeyboardInterrupt:
                record.set(state="stopped")
                raise KeyboardInterrupt(
                    f"Stopped after round {max(session.done.round, 0)}; go on with 'pfed resume {opened.run}'."
                    if opened.folder
                    else "Stopped; without a runs folder nothing is kept."
                ) from None
            except Paused as pause:
                record.event(max(session.done.round, 0), "paused", str(pause))
                record.set(state="stopped")
                raise
            except Exception as error:
                text = str(error).partition("\n")[0] or type(error).__name__
                with contextlib.suppress(sqlite3.Error):
                    record.event(session.done.round + 1, "failed", text)
                    record.set(state="failed")
                raise
            if self.options.task == "detection" and opened.folder is not None:
                drawn = {c.name: pictures.draw(session.personal(i), c) for i, c in enumerate(self.federation().clients)}
                pictures.save(drawn, opened.folder)
            record.set(state="complete")
            return Result(record, opened.run, opened.folder)

    def _pool(self) -> Pool:
        """The models: one template for each architecture, initial values of their own where there are several."""
        federation = self.federation()
        makers = _makers(self._model, self.options, federation)
        if self.method.same_start and len(makers) > 1:  # then each client has initial values of its own
            raise UserError(f"{self.method.label} starts all clients from one model. Got {len(makers)} models.")
        clients = range(len(federation.clients))
        kinds = [(c % len(makers), len(federation.clients[c].classes or federation.classes)) for c in clients]
        found = list(dict.fromkeys(kinds))
        templates = [self._template(makers[maker], classes) for maker, classes in found]
        for template in templates:
            anatomy.marks(template).shape = federation.shape
        self.method.check_models(templates)
        # Of data in one place there is one model, in which no client has statistics of its own.
        pool.mark(templates, "share" if "pooled" in self.method.needs else self.options.bn, federation.shape)
        if self.options.channels_last:
            pool.channels_last(templates)
        if len(found) == 1:
            return Pool(templates)
        architecture = {c: found.index(kind) for c, kind in enumerate(kinds)}
        if len(makers) == 1:  # one architecture whose heads differ in size: what is alike starts alike
            pool.align(templates)
            return Pool(templates, architecture)
        initial = {
            c: anatomy.snapshot(self._template(makers[maker], classes, own=str(c)))
            for c, (maker, classes) in enumerate(kinds)
        }
        return Pool(templates, architecture, initial)

    def _template(self, make: Callable[[int], nn.Module], classes: int, own: str = "") -> nn.Module:
        shape, seed = self.federation().shape, self.options.seed
        return self.method.build(Spec(lambda: make(classes), classes, shape, seed, own=own))

    def _describe(self, opened: Store) -> None:
        federation = self.federation()
        rows = [
            (i, client.name, len(client.train), len(client.test), class_counts(federation, client))
            for i, client in enumerate(federation.clients)
        ]
        opened.record.add_clients(rows)
        for note in federation.notes:
            opened.record.event(0, "note", note)
        opened.record.set(
            config=self.config(),
            method=self.method.label,
            data=self.options.data,
            source=federation.source,
            seed=self.options.seed,
            engine=self.options.engine,
            classes=list(federation.classes),
            created=time.time(),
            feature_skew=feature_skew(federation),
            versions=versions(),
        )


def _method(method: str | Method | type[Method], hyper: Mapping[str, Any]) -> Method:
    if isinstance(method, Method):
        if hyper:
            raise UserError("hyper goes with a method's name or class. Got a method that has its values already.")
        return method
    if isinstance(method, str):
        return registry.make(method, hyper)
    if isinstance(method, type) and issubclass(method, Method):
        return options.make(method, hyper)
    raise UserError(f"method must be a name, a Method class or an instance of one. Got {method!r}.")


def _check(method: Method, opts: RunOptions) -> None:
    if opts.task not in method.tasks:
        raise UserError(f"{method.label} does not do {opts.task}; it does {', '.join(sorted(method.tasks))}.")
    tasks.task(opts.task).augment(opts.augment)
    trackers.make(opts.track)
    cluster.check(opts)
    if opts.task == "detection":
        for name in ("new_test", "external", "representation"):
            if getattr(opts, name) not in ("none", None, False):
                raise UserError(f"run.{name} is for classification. Got it with run.task 'detection'.")
    if opts.select == "validation" and not opts.validation and opts.data != "own data":
        raise UserError("run.select 'validation' needs validation data. Set run.validation, for example to 0.1.")
    if opts.local.nesterov and not opts.local.momentum:
        raise UserError("local.nesterov needs local.momentum > 0. Got 0.")
    rule = opts.local.schedule
    if rule not in ("constant", "cosine"):
        try:
            step_fractions(rule)
        except ValueError:
            raise UserError(f"local.schedule must be constant, cosine or step:F,F,…. Got {rule!r}.") from None
    if opts.min_clients > opts.clients and opts.data != "own data":
        raise UserError(f"run.min_clients must be <= run.clients ({opts.clients}). Got {opts.min_clients}.")


def _check_needs(method: Method, federation: Federation) -> None:
    has = {
        "public": federation.public is not None,
        "validation": all(client.validation is not None for client in federation.clients),
    }
    for need, there in has.items():
        if need in method.needs and not there:
            raise UserError(f"{method.label} needs {need} data. Set run.{need}, for example to 0.1.")


def _check_task(task: str, federation: Federation) -> None:
    boxes = federation.clients[0].train.boxes is not None
    if boxes != (task == "detection"):
        has, other = ("boxes", "detection") if boxes else ("labels", "classification")
        hint = "" if boxes else "; data with boxes are 'composite', for example"
        raise UserError(f"The data have {has}, which is for run.task {other!r}. Got {task!r}{hint}.")


def _federation(data: Any, opts: RunOptions) -> Federation:
    from pfed.data import sources, user
    from pfed.data.catalog import SOURCES
    from pfed.data.federate import federate, normalised, with_validation

    if isinstance(data, str):
        own = data not in SOURCES and Path(data).exists()
        data = _open(data, opts) if own else sources.load(data, image_size=opts.image_size)
    elif not isinstance(data, (Dataset, Federation)):
        data = user.federation(data, test_fraction=opts.test_fraction, seed=opts.seed)
    federation: Federation = federate(data, opts, opts.seed) if isinstance(data, Dataset) else data
    if isinstance(data, Federation) and (opts.public or opts.public_in_train):
        raise UserError("run.public takes a share of a data set that pfed divides; these clients have their own data.")
    if isinstance(data, Federation) and opts.validation:
        federation = with_validation(federation, opts.validation, opts.seed)
    if opts.external is not None:
        outside = sources.load(opts.external, image_size=opts.image_size)
        if outside.x.shape[1:] != torch.Size(federation.shape):
            raise UserError(
                f"run.external must have the clients' shape {federation.shape}."
                f" Got {opts.external!r} of shape {tuple(outside.x.shape[1:])}."
            )
        samples = dataclasses.replace(Samples.of(outside.x, outside.y), mean=outside.mean, std=outside.std)
        whole = sources.named(federation.source, outside.name)
        federation = dataclasses.replace(federation, external=samples, source=whole)
    return normalised(federation, opts.normalise)


def _open(path: str, opts: RunOptions) -> Dataset | Federation:
    from pfed.data.user import open_user
    from pfed.data.user_boxes import open_boxes

    if opts.task == "detection":
        return open_boxes(path, opts.image_size or BOX_SIZE)
    return open_user(
        path,
        label=opts.label_column,
        client=opts.client_column,
        image_size=opts.image_size,
        test_fraction=opts.test_fraction,
        seed=opts.seed,
    )


def _makers(
    model: ModelLike | Sequence[ModelLike], opts: RunOptions, federation: Federation
) -> list[Callable[[int], nn.Module]]:
    """What makes a model for so many classes, for each model that was asked for."""
    from pfed import models

    given: Sequence[ModelLike] = [model] if isinstance(model, (str, nn.Module)) or callable(model) else model
    parts: list[ModelLike] = []
    for item in given:
        parts += [name.strip() for name in item.split(",")] if isinstance(item, str) else [item]

    def maker(item: ModelLike) -> Callable[[int], nn.Module]:
        def make(classes: int) -> nn.Module:
            if isinstance(item, str):
                name = models.default(federation.shape, opts.task) if item == "auto" else item
                made = models.build(name, classes=classes, shape=federation.shape, pretrained=opts.pretrained)
            else:
                made = copy.deepcopy(item) if isinstance(item, nn.Module) else item()
            return anatomy.set_head(made, opts.head) if opts.head else made

        return make

    return [maker(item) for item in parts]
