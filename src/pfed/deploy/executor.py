"""A site's side of a run: takes the server's questions one at a time and lets a worker answer them."""

from __future__ import annotations

import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from pfed.deploy import message
from pfed.deploy.worker import Worker


class SiteExecutor(Executor):  # type: ignore[misc]
    """The only class of pfed that a run may build at a site."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()  # a question that came too late may still be at work when the next one comes
        self._numbers = itertools.count()
        self._newest = -1
        self._worker: Worker | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            message.register()
            self._worker = Worker(Path(fl_ctx.get_workspace().get_root_dir()))
            self._worker.start()
            fl_ctx.get_engine().register_aux_message_handler(topic=message.PING, message_handle_func=_pong)
        elif event_type == EventType.END_RUN and self._worker is not None:
            self._worker.kill()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        try:
            about, payload = message.unpack(shareable)
        except ValueError:
            return message.pack({"code": "refused", "why": "question"}, {})
        assert self._worker is not None
        self._newest = number = next(self._numbers)
        patience, came = about.get("patience"), time.monotonic()
        with self._lock:
            waited = time.monotonic() - came
            if number < self._newest or waited > (patience if isinstance(patience, int | float) else math.inf):
                return message.pack({"code": "late"}, {})  # nobody waits for the answer any more
            told, found = self._worker.ask(about, payload, lambda: bool(abort_signal.triggered))
        return message.pack(told, found)


def _pong(topic: str, request: Shareable, fl_ctx: FLContext) -> Any:
    return make_reply("OK")
