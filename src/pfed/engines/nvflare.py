"""Clients that are real sites, reached through NVFlare: steps are pushed to them, one thread per site.

Replies are checked against what the sites have announced. A site that is late or gone is a `Failure`; one that has come
back takes part again once the run is started anew from its checkpoint, for which the run pauses between two rounds.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from nvflare.apis.fl_constant import ReservedTopic, ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.signal import Signal

from pfed import store
from pfed.deploy import manifest, message
from pfed.engines.base import Call, Failure, Reply, States
from pfed.errors import Paused
from pfed.wire import Payload

LOOK = 5.0  # seconds between two looks at sites that have not answered yet
MISSES = 3  # looks without an echo after which a site is gone
REFUSALS = {
    "question": "it does not know what it was asked",
    "round": "its manifest has fewer rounds",
    "calls": "its manifest has fewer calls in a round",
    "budget": "its privacy budget is spent",
    "finite": "its numbers are not finite",
    "lack": "it has less than its manifest lists",
}
MOST = 2**53  # samples that a site may say it has
LISTED = {"step": "a step", "name": "a name", "shape": "a shape", "kind": "a kind of value", "size": "a size"}


class Link:
    """How NVFlare carries a question to a site's process of this run."""

    def __init__(self, engine: Any, abort: Signal):
        self._engine, self._abort = engine, abort

    @property
    def aborted(self) -> bool:
        return bool(self._abort.triggered)

    def ask(
        self, site: str, about: Mapping[str, Any], payload: Payload, timeout: float, given_up: Signal | None = None
    ) -> Shareable | None:
        """A site's reply; None, or one with another code than OK, if there is none."""
        request = message.pack(about, payload)
        request.set_header(ReservedHeaderKey.TASK_NAME, message.TASK)
        request.set_header(ReservedHeaderKey.TASK_ID, f"{site}-{time.time_ns()}")
        return self._send(site, ReservedTopic.DO_TASK, request, timeout, given_up)

    def echo(self, site: str) -> bool:
        """Whether a site's process of this run is there."""
        reply = self._send(site, message.PING, Shareable(), LOOK)
        return reply is not None and reply.get_return_code() == ReturnCode.OK

    def _send(
        self, site: str, topic: str, request: Shareable, timeout: float, given_up: Signal | None = None
    ) -> Shareable | None:
        with self._engine.new_context() as context:
            if given_up is not None:  # else a process could not end while a question to a dead site is open
                context.get_run_abort_signal = lambda: given_up
            replies = self._engine.send_aux_request([site], topic, request, timeout, context, optional=True)
        return (replies or {}).get(site)


@dataclass
class NVFlare:
    """The engine of a run between sites."""

    link: Link
    run: str
    sites: Sequence[str]
    plans: Mapping[int, manifest.Manifest]  # of the sites that are there, by client
    deadline: float  # seconds for a step
    folder: Path  # the run's, whose checkpoints say which versions may still be needed
    states: States
    arrived: Callable[[str], float]  # when a site last came to the server
    sent: float  # when it was seen who is there
    _round: int | None = None
    _bases: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # by client: round, version it began with

    def __post_init__(self) -> None:
        self.ids = range(len(self.sites))
        self._gone = {client for client in self.ids if client not in self.plans}
        self._first: int | None = None
        self._seen: dict[int, float] = {}  # when a site last answered

    def map(self, call: Call) -> Iterator[tuple[int, Reply | Failure]]:
        if call.version is not None:
            self._turn(call.round)
        answers: SimpleQueue[tuple[int, Shareable | None]] = SimpleQueue()
        waiting: dict[int, int] = {}  # by client: looks without an echo
        given_up = {client: Signal() for client in call.own}
        for client in sorted(call.own):
            if client in self._gone:
                yield client, Failure("dropped", "is not connected")
                continue
            waiting[client] = 0
            threading.Thread(target=self._ask, args=(call, client, answers, given_up[client]), daemon=True).start()
        end = time.monotonic() + self.deadline
        try:
            while waiting:
                with contextlib.suppress(Empty):
                    client, found = answers.get(timeout=max(0.0, min(LOOK, end - time.monotonic())))
                    if waiting.pop(client, None) is not None:
                        yield client, self._judge(call, client, found)
                    continue
                yield from self._look(waiting, late=time.monotonic() >= end)
        finally:
            for signal in given_up.values():
                signal.trigger(True)

    def close(self) -> None:
        pass

    def _turn(self, round: int) -> None:
        """Between two rounds: a good time to take in who has come back."""
        if round == self._round:
            return
        self._round = round
        self._first = round if self._first is None else self._first
        came = {client: self.arrived(self.sites[client]) for client in self._gone}
        back = sorted(self.sites[client] for client in came if came[client] > self._seen.get(client, self.sent))
        if back:
            raise Paused(f"{', '.join(back)} came back: the run goes on with it from round {round}.")

    def _ask(
        self, call: Call, client: int, answers: SimpleQueue[tuple[int, Shareable | None]], given_up: Signal
    ) -> None:
        about = {"kind": "step", "run": self.run, "step": call.step, "round": call.round, "version": call.version}
        about |= {"base": call.base[client], "since": self._since(client, call), "patience": self.deadline}
        payload = {**call.common, **call.own[client]}
        answers.put((client, self.link.ask(self.sites[client], about, payload, self.deadline, given_up)))

    def _since(self, client: int, call: Call) -> int:
        """The oldest version of a site's state that a kept checkpoint names; 0 where that is not known."""
        bases = self._bases.setdefault(client, [])
        if call.version is not None and (not bases or bases[-1][0] != call.round):
            bases.append((call.round, call.base[client]))
        kept = [round for round, _ in store.checkpoints(self.folder)]
        if not kept:  # a resume would begin anew: only what this round began with may be needed
            del bases[:-1]
            return bases[-1][1] if bases else call.base[client]
        if self._first is None or kept[0] < self._first - 1:
            return 0
        while len(bases) > 1 and bases[1][0] <= kept[0] + 1:
            bases.pop(0)
        return next((base for round, base in bases if round > kept[0]), call.base[client])

    def _look(self, waiting: dict[int, int], late: bool) -> Iterator[tuple[int, Failure]]:
        """Give up sites that are late or gone."""
        self._check_stopped()
        for client in list(waiting):
            echo = self.link.echo(self.sites[client])
            waiting[client] = 0 if echo else waiting[client] + 1
            if waiting[client] >= MISSES or (late and not echo):
                self._gone.add(client)
                yield client, Failure("dropped", "is not connected any more")
            elif late:
                yield client, Failure("late", f"did not answer within {self.deadline:g} seconds")
            else:
                continue
            del waiting[client]

    def _check_stopped(self, patience: float = 0.0) -> None:
        """End for now, if somebody has asked for it or does so soon."""
        end = time.monotonic() + patience
        while not self.link.aborted and time.monotonic() < end:
            time.sleep(0.1)
        if self.link.aborted:
            raise Paused("The run was stopped.")

    def _judge(self, call: Call, client: int, found: Shareable | None) -> Reply | Failure:
        """A site's reply, if it is one and as announced."""
        if found is None or found.get_return_code() != ReturnCode.OK:
            code = "no answer" if found is None else found.get_return_code()
            self._check_stopped(LOOK if code == ReturnCode.TASK_ABORTED else 0.0)  # sites may know before the server
            if code == ReturnCode.TIMEOUT and self.link.echo(self.sites[client]):
                return Failure("late", f"did not answer within {self.deadline:g} seconds")
            self._gone.add(client)
            return Failure("dropped", f"is not connected any more ({code})")
        self._seen[client] = time.time()
        try:
            about, payload = message.unpack(found)
            if about["code"] == "stopped":
                self._check_stopped(LOOK)
            if about["code"] != "ok":
                return _failure(call.step, about)
            wrong = manifest.fault(self.plans[client]["calls"], call.step, payload)
            if wrong is not None:
                listed = f"{LISTED[wrong]} that its manifest does not list" if wrong in LISTED else "less than it lists"
                return Failure("bad reply", f"sent {listed}")
            died = f"{self.sites[client]}: its process died in round {call.round} and was started again"
            notes = [died] if about.get("deaths") else []
            reply = Reply(payload, *_beside(about, self.plans[client]), notes)
        except (KeyError, TypeError, ValueError) as error:
            return Failure("bad reply", f"sent what can't be read: {error}")
        if call.version is not None:
            self.states.save(client, call.version, {})  # the state is the site's; here is only which one it is
        return reply


def _failure(step: str, about: Mapping[str, Any]) -> Failure:
    """What a site says of a step that it has not done; texts are the server's own."""
    code = about["code"]
    if code == "raised":
        kind = about.get("type", "Exception")
        return Failure("error", f"{step} raised {kind if str(kind).isidentifier() else 'Exception'}; its log says more")
    if code == "died":
        return Failure("died", f"the process that ran {step} died, twice")
    if code == "lost":
        return Failure("error", "has lost the private state that this round builds on")
    if code == "refused":
        why = about.get("why", "")
        listed = f"{LISTED[why]} is not in its manifest" if why in LISTED else REFUSALS.get(why, "it does not say why")
        return Failure("error", f"refused {step}: {listed}")
    if code == "late":
        return Failure("late", "was still at work on what it was asked before")
    return Failure("dropped", "was stopped")


def _beside(about: Mapping[str, Any], plan: manifest.Manifest) -> tuple[float, int, dict[str, float]]:
    """What a site tells beside a payload: weight, samples and records. A ValueError says what is wrong with it."""
    weight, samples, records = about["weight"], about["samples"], about["records"]
    if type(weight) not in (int, float) or not 0 <= weight <= MOST:
        raise ValueError("its weight is no number of samples")
    if type(samples) is not int or not 0 <= samples <= MOST:
        raise ValueError("its samples are no number of samples")
    if not isinstance(records, dict) or not records.keys() <= {
        *plan["records"],
        *(["epsilon"] if plan["privacy"] else []),
    }:
        raise ValueError("its records are not those of its manifest")
    if not all(type(value) in (int, float) and math.isfinite(value) for value in records.values()):
        raise ValueError("its records are not finite numbers")
    return float(weight), samples, {name: float(value) for name, value in records.items()}
