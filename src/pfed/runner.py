"""Runs one step of one client: the only code that touches a client's state and data."""

from __future__ import annotations

import functools

from torch import Tensor

from pfed import streams, wire
from pfed.client import Client
from pfed.config import RunOptions
from pfed.data.base import ClientData, Federation, pooled
from pfed.engines.base import POOLED, Reply
from pfed.evaluate import READERS, assess, probe, represent
from pfed.method import Method
from pfed.pool import Pool
from pfed.tasks import Task
from pfed.wire import Payload, State


class Runner:
    """Everything that an engine needs to run any step on any client of a federation."""

    def __init__(self, method: Method, federation: Federation, pool: Pool, options: RunOptions, task: Task):
        self.method, self.federation, self.pool, self.options, self.task = method, federation, pool, options, task
        self.ids = range(len(federation.clients))
        self._beside = {"new-test": federation.test}
        if federation.external is not None:
            self._beside["external"] = federation.external
        if options.representation:
            self._beside["probe"] = probe(federation, options.seed)
        self._keeps = method.keep_optimizer if options.keep_optimizer is None else options.keep_optimizer

    def _data(self, id: int) -> ClientData:
        return self._pooled if id == POOLED else self.federation.clients[id]

    @functools.cached_property
    def _pooled(self) -> ClientData:
        return pooled(self.federation)

    def client(self, id: int, round: int, state: State) -> Client:
        return Client(
            id=id,
            round=round,
            state=state,
            data=self._data(id),
            classes=len(self.federation.classes),
            options=self.options,
            pool=self.pool,
            task=self.task,
            public=self.federation.public,
            beside=self._beside,
            keeps_optimizer=self._keeps,
        )

    def __call__(self, step: str, id: int, round: int, payload: Payload, state: State) -> tuple[Reply, Client]:
        """Run a step from a state; the client that comes back holds the state after it."""
        client = self.client(id, round, wire.copy_tree(state))
        reader = READERS.get(step)
        try:
            with streams.torch_scope(self.options.seed, "step", id, round, step):
                if reader is not None:
                    answer = reader(client, self.method, payload)
                else:
                    answer = dict(self.method.step(step)(client, **payload) or {})
                    if self.options.eval_point == "post_local" and client.fitted is not None:
                        client.state["post_local"] = assess(client, client.fitted)
                    if self.options.representation and client.fitted is not None:
                        client.state["representation"] = represent(client, self.method, client.fitted)
        finally:
            self.pool.give_back()
        wire.check_tree(client.state)
        wire.check_types(answer, f"The reply of {type(self.method).__name__}.{step}")
        answer, client.state = (wire.map_tensors(tree, Tensor.contiguous) for tree in (answer, client.state))
        weight = 0.0 if client.starved else float(client.n)
        return Reply(answer, weight, client.samples, client.records, client.notes), client
