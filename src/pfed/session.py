"""A run in progress: the state of server and clients, and the loop that takes them from round to round."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pfed import embedding, machine, streams, wire
from pfed.cohort import Cohort, Exchange, Ledger
from pfed.config import RunOptions
from pfed.data.base import Federation
from pfed.engines import engine
from pfed.engines.base import POOLED, Engine, States
from pfed.errors import RunError
from pfed.evaluate import Evaluator
from pfed.method import Each, Method
from pfed.pool import Pool
from pfed.progress import Progress
from pfed.runner import Runner
from pfed.store import Checkpoint, Store
from pfed.tasks import task
from pfed.trackers import Trackers

Carrier = Callable[[Runner, States], Engine]


class Session:
    """Rounds 1 to T are the method's; round 0 is its start, round T + 1 its finish, if it has one.

    Where the clients' data lie elsewhere, the federation has their names and shapes only, and `carrier` makes the
    engine that reaches them; such an engine may lose clients at any time, in an evaluation too.
    """

    def __init__(
        self,
        method: Method,
        options: RunOptions,
        federation: Federation,
        pool: Pool,
        store: Store,
        carrier: Carrier | None = None,
    ):
        self.method, self.options, self.store = method, options, store
        self.clients = range(len(federation.clients))
        self._runner = Runner(method, federation, pool, options, task(options.task))
        names = {i: client.name for i, client in enumerate(federation.clients)} | {POOLED: "all clients"}
        made = carrier(self._runner, store.states) if carrier else engine(options.engine, self._runner, store.states)
        self.exchange = Exchange(made, method, options, pool, self._runner.task, names, federation.public)
        self.exchange.lenient = carrier is not None
        self._evaluate = Evaluator(self.exchange, federation, options, method)
        self.last = options.rounds + (type(method).finish is not Method.finish)
        restored = store.restore()
        self._saved = restored.round if restored else -1
        self.done = restored or Checkpoint(-1, server=method.init(pool.template(POOLED)))
        self.server = self.done.server
        self.exchange.versions, self.exchange.calls = dict(self.done.versions), self.done.calls
        self._crossing: dict[str, Any] = store.record.get("crossing", {})
        self.exchange.crossed = dict(self._crossing)
        self._said = {event["text"] for event in store.record.events() if event["kind"] == "note"}

    def run(self, *watchers: Progress | Trackers) -> None:
        """All rounds that are not done yet. Whatever stops it, a checkpoint of the last whole round is left."""
        self.store.record.forget_after(self.done.round)
        machine.keep_freed_memory()
        try:
            for t in range(self.done.round + 1, self.last + 1):
                self._heed()
                started = time.perf_counter()
                self.exchange.ledger = Ledger()
                self._act(t)
                seconds = time.perf_counter() - started
                evaluation = self._evaluate(self.server, t, final=t == self.last) if self._judges(t) else None
                self.exchange.ledger.notes -= self._said
                self._said |= self.exchange.ledger.notes
                self.store.record.add_round(t, seconds, self.exchange.ledger, evaluation)
                self._note_crossing()
                if evaluation is not None and evaluation.features is not None and self.store.folder is not None:
                    with contextlib.suppress(OSError):  # a picture that can't be drawn later stops no run
                        embedding.save(evaluation.features, self.store.folder)
                versions = dict(self.exchange.versions)
                self.done = Checkpoint(t, self.exchange.calls, wire.copy_tree(self.server), versions)
                self.store.retain(versions)
                for watcher in watchers:
                    watcher.round(t, seconds, self.exchange.ledger, evaluation)
                if self._saves(t):
                    self._save()
        except BaseException:
            self.exchange.engine.close()
            with contextlib.suppress(RunError):  # what stopped the run is the error that counts
                if self.done.round > self._saved:
                    self._save()
            raise
        finally:
            self.exchange.engine.close()

    def personal(self, client: int) -> nn.Module:
        """A copy of the client's personal model as it is now."""
        state = self.store.states.load(client, self.exchange.versions.get(client, 0))
        download = {
            key: value.of(client) if isinstance(value, Each) else value
            for key, value in self.method.download(self.server).items()
        }
        owner = self._runner.client(client, self.done.round, wire.copy_tree(state))
        with torch.enable_grad():  # some adapt first, wherever they are asked for
            models = self.method.predictor(owner, **download)
        model = models if isinstance(models, nn.Module) else next(iter(models.values()))
        own = copy.deepcopy(model).eval().cpu()
        owner.pool.give_back()
        return own

    def _heed(self) -> None:
        """End as by Ctrl-C if someone asked for it."""
        who = self.store.asked_to_stop()
        if who is not None:
            self.store.record.event(max(self.done.round, 0), "stopped", f"{who or 'Someone'} asked for it.")
            raise KeyboardInterrupt

    def _act(self, t: int) -> None:
        try:
            if t == 0:
                self.method.start(self.server, Cohort(self.exchange, self.clients, t))
            elif t <= self.options.rounds:
                self.method.round(self.server, Cohort(self.exchange, self._chosen(t), t))
            else:
                self.method.finish(self.server, Cohort(self.exchange, self.clients, t))
        finally:
            self.exchange.pool.give_back()  # what the method ran at the server

    def _chosen(self, t: int) -> list[int]:
        """The clients of a round: a share of all, at least one, drawn without replacement."""
        if self.method.participation == "all":
            return list(self.clients)
        size = max(1, math.floor(self.options.fraction * len(self.clients) + 1e-9))
        draw = streams.rng(self.options.seed, "client_sampling", t).permutation(len(self.clients))
        return sorted(int(client) for client in draw[:size])

    def _judges(self, t: int) -> bool:
        return t == self.last or self.options.judged(t)

    def _saves(self, t: int) -> bool:
        every = self.options.checkpoint_every
        return t in (self.options.rounds, self.last) or (t > 0 and every > 0 and t % every == 0)

    def _note_crossing(self) -> None:
        """With most methods it is the same in every round."""
        if self.exchange.crossed != self._crossing:
            self._crossing = dict(self.exchange.crossed)
            self.store.record.set(crossing=self._crossing)

    def _save(self) -> None:
        self.store.save(self.done)
        self._saved = self.done.round
