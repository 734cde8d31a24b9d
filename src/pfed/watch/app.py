"""The live page's server: one watcher of files for all browsers, one report at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from importlib import resources

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pfed import store
from pfed.errors import RunError, UserError
from pfed.report.page import render
from pfed.result import Result
from pfed.watch.runs import Runs

EVERY = 1.0  # seconds between two looks at the files
ALIVE = 15.0  # seconds after which a silent stream says that it is there
SHARE = 0.05  # of the time, at most, reports are drawn that were drawn before: on a busy machine fewer
LEAST, MOST = 2.0, 60.0  # seconds between two of them
KEPT = 8  # reports
MAIN = re.compile(rb"<main\b.*</main>", re.DOTALL)  # what the live page takes of a report: it has the style already
ASSETS = {  # what is sent as it lies in a package
    "page.js": ("pfed.watch", "page.js", "text/javascript"),
    "page.css": ("pfed.watch", "page.css", "text/css"),
    "report.css": ("pfed.report", "style.css", "text/css"),
    "report.js": ("pfed.report", "script.js", "text/javascript"),
}


class Watcher:
    """Looks at the files while anyone watches, and wakes all streams when something changed."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self.viewers = 0
        self.ended = False
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """See what there is now, if nobody is looking anyway."""
        if not self.viewers:
            await to_thread.run_sync(self.runs.look)

    async def stream(self) -> AsyncIterator[str]:
        """First all runs, then those that changed and the names of those that are gone."""
        await self.look()
        self.viewers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._go_on_looking())
            self._task.add_done_callback(lambda _: self._tell())
        try:
            sent: dict[str, int] = {}
            yield self._changes(sent, always=True)
            while not self.ended:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), ALIVE)
                if self._task.done():  # it ends before us only by an error, which the server shows
                    self._task.result()
                yield self._changes(sent) or ": still here\n\n"
        finally:
            self.viewers -= 1

    def end(self) -> None:
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _go_on_looking(self) -> None:
        while self.viewers and not self.ended:
            if await to_thread.run_sync(self.runs.look):
                self._tell()
            await asyncio.sleep(EVERY)

    def _changes(self, sent: dict[str, int], always: bool = False) -> str:
        """What a stream has not told yet; a slow one skips what is outdated."""
        known = dict(self.runs.known)
        changed = {key: run.version for key, run in known.items() if sent.get(key) != run.version and run.shown}
        gone = [key for key in sent if key not in known]
        sent |= changed
        for key in gone:
            del sent[key]
        if not (changed or gone or always):
            return ""
        rows = [{**known[key].shown, "version": version} for key, version in changed.items()]
        return f"data: {json.dumps({'runs': rows, 'gone': gone})}\n\n"


class Reports:
    """The report of the runs that someone selected, drawn when these changed: one at a time, and not too often."""

    def __init__(self, watcher: Watcher):
        self._watcher = watcher
        self._drawn: dict[tuple[str, ...], tuple[list[int], str]] = {}
        self._read: dict[str, tuple[int, Result]] = {}
        self._drawing = asyncio.Lock()
        self._next = 0.0

    async def get(self, keys: Sequence[str], request: Request) -> str:
        """The newest report of these runs; where it may be an older one, that if there is one."""
        await self._watcher.look()
        chosen = tuple(dict.fromkeys(keys))
        self._versions(chosen)  # there are such runs
        if "older" in request.query_params and chosen in self._drawn:
            return self._drawn[chosen][1]
        while chosen in self._drawn and not self._fresh(chosen) and time.monotonic() < self._next:
            await asyncio.sleep(min(0.2, max(0.0, self._next - time.monotonic())))
            if self._watcher.ended or await request.is_disconnected():
                return ""
        async with self._drawing:
            if not self._fresh(chosen):
                await self._draw(chosen)
            return self._drawn[chosen][1]

    def _versions(self, chosen: Sequence[str]) -> list[int]:
        return [self._watcher.runs.find(key).version for key in chosen]

    def _fresh(self, chosen: tuple[str, ...]) -> bool:
        return chosen in self._drawn and self._drawn[chosen][0] == self._versions(chosen)

    async def _draw(self, chosen: tuple[str, ...]) -> None:
        versions, began = self._versions(chosen), time.monotonic()
        # A thread that is still drawing when the server ends is left alone: it ends with the process.
        page = await to_thread.run_sync(self._page, chosen, versions, abandon_on_cancel=True)
        self._drawn.pop(chosen, None)
        self._drawn[chosen] = (versions, page)
        while len(self._drawn) > KEPT:
            del self._drawn[next(iter(self._drawn))]
        took = time.monotonic() - began
        self._next = time.monotonic() + min(MOST, max(LEAST, took / SHARE - took))

    def _page(self, chosen: Sequence[str], versions: Sequence[int]) -> str:
        read = {}
        for key, version in zip(chosen, versions, strict=True):
            known, result = self._read.get(key, (-1, None))
            if result is None or known != version:
                result = Result.load(self._watcher.runs.find(key).folder)
            read[key] = (version, result)
        self._read = read
        return render([result for _, result in read.values()])


def application(runs: Runs) -> tuple[Starlette, Watcher]:
    """All that is behind the guard."""
    watcher = Watcher(runs)
    reports = Reports(watcher)

    async def page(request: Request) -> Response:
        return HTMLResponse(_content("pfed.watch", "page.html"))

    async def asset(request: Request) -> Response:
        package, file, kind = ASSETS[request.url.path.removeprefix("/")]
        return Response(_content(package, file), media_type=kind)

    async def events(request: Request) -> Response:
        return StreamingResponse(watcher.stream(), media_type="text/event-stream")

    async def report(request: Request) -> Response:
        keys = request.query_params.getlist("run")
        try:
            text = await reports.get(keys, request)
        except UserError as error:
            return PlainTextResponse(str(error), 404)
        except (RunError, sqlite3.Error) as error:  # it is damaged, or being mended
            return PlainTextResponse(str(error), 409)
        content = text.encode("utf-8", "replace")
        if "save" in request.query_params:
            return HTMLResponse(content, headers={"Content-Disposition": 'attachment; filename="report.html"'})
        return HTMLResponse(b"".join(MAIN.findall(content)))

    async def stop(request: Request) -> Response:
        try:
            await watcher.look()
            run = runs.find(request.query_params.get("run", ""))
            await to_thread.run_sync(store.ask_to_stop, run.folder, "The live page")
        except UserError as error:
            return JSONResponse({"error": str(error)}, 409)
        return JSONResponse({"run": run.shown["run"]})

    routes = [
        Route("/", page),
        Route("/events", events),
        Route("/report", report),
        Route("/stop", stop, methods=["POST"]),
        *(Route(f"/{name}", asset) for name in ASSETS),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return app, watcher


def _content(package: str, file: str) -> str:
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")
