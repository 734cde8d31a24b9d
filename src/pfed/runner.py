"""Runs one step of one client: the only code that touches a client's state and data."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pfed import streams, wire
from pfed.client import Client, Companion
from pfed.config import RunOptions
from pfed.data.base import ClientData, Federation, Samples, pooled
from pfed.engines.base import POOLED, Reply
from pfed.evaluate import READERS, assess_fitted, probe, represent
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
            self._beside["probe"], _ = probe(federation, options.seed)
        self.companion: Companion | None = None
        self.device = torch.device("cpu")
        self._moved: dict[int, Tensor] = {}  # of a pool of samples that clients share, what lies on the device
        self._keeps = method.keep_optimizer if options.keep_optimizer is None else options.keep_optimizer

    def move(self, device: torch.device) -> None:
        """From now on steps run on this device. What they get and what they leave lies where the server is."""
        if device != self.device:
            self.device, self.pool = device, self.pool.on(device)
            self._moved.clear()

    def _data(self, id: int) -> ClientData:
        data = self._pooled if id == POOLED else self.federation.clients[id]
        if self.device.type == "cpu":
            return data
        validation = None if data.validation is None else self._here(data.validation)
        return replace(data, train=self._here(data.train), test=self._here(data.test), validation=validation)

    def _here(self, samples: Samples) -> Samples:
        """The samples on the device; a pool that many clients share is moved once."""
        if self.device.type == "cpu":
            return samples
        boxes = None if samples.boxes is None else self._once(samples.boxes)
        x, y = self._once(samples.x), self._once(samples.y)
        return replace(samples, x=x, y=y, boxes=boxes, rows=samples.rows.to(self.device))

    def _once(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor.to(self.device)
        return self._moved[id(tensor)]

    @functools.cached_property
    def _pooled(self) -> ClientData:
        return pooled(self.federation)

    def client(self, id: int, round: int, state: State) -> Client:
        data = self._data(id)
        return Client(
            id=id,
            round=round,
            state=state,
            data=data,
            classes=len(data.classes or self.federation.classes),
            options=self.options,
            pool=self.pool,
            task=self.task,
            public=None if self.federation.public is None else self._here(self.federation.public),
            beside={name: self._here(samples) for name, samples in self._beside.items()},
            keeps_optimizer=self._keeps,
            companion=self.companion,
        )

    def __call__(self, step: str, id: int, round: int, payload: Payload, state: State) -> tuple[Reply, Client]:
        """Run a step from a state; the client that comes back holds the state after it."""
        client = self.client(id, round, self._to(self.device, state))
        payload = self._to(self.device, payload)
        reader = READERS.get(step)
        try:
            with streams.torch_scope(self.options.seed, "step", id, round, step), self._makes_tensors():
                if reader is not None:
                    answer = reader(client, self.method, payload)
                else:
                    answer = dict(self.method.step(step)(client, **payload) or {})
                    if self.options.eval_point == "post_local":
                        assess_fitted(client)
                    if self.options.representation and client.fitted is not None:
                        client.state["representation"] = represent(client, self.method, client.fitted)
        finally:
            self.pool.give_back()
        wire.check_tree(client.state)
        wire.check_types(answer, f"The reply of {type(self.method).__name__}.{step}")
        server = torch.device("cpu")
        answer, client.state = (self._to(server, tree) for tree in (answer, client.state))
        weight = 0.0 if client.starved else float(client.n)
        return Reply(answer, weight, client.samples, client.records, client.notes), client

    def _to(self, device: torch.device, tree: Any) -> Any:
        """A tree with new dicts around its tensors, which lie as after a journey to that device."""
        return wire.map_tensors(tree, lambda tensor: tensor.to(device).contiguous())

    def _makes_tensors(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, tensors that a method makes are on the device."""
        return contextlib.nullcontext() if self.device.type == "cpu" else self.device
