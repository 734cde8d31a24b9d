"""Who may see the live page: whoever has the token, and no page of another site on their behalf."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Collection
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WILD = ("0.0.0.0", "::")  # all addresses of the machine
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NO_TOKEN = "Open the address that 'pfed watch' printed: it has the token that this page asks for."


class Guard:
    """Stands before the whole application. A token in the address is exchanged for a cookie."""

    def __init__(self, app: ASGIApp, host: str, port: int, token: str):
        self._app, self._token = app, token
        self._hosts, self._port = hosts(host), port
        self._any_address = host in WILD
        self._once: set[str] = set()
        self._secret = secrets.token_urlsafe(32)
        self._cookie = f"pfed-watch-{port}"  # cookies know no ports, and there may be several watches

    def once(self) -> str:
        """A token for one use: what a browser is started with can be read by other users of the machine."""
        token = secrets.token_urlsafe(32)
        self._once.add(token)
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(Request(scope)) if scope["type"] == "http" else PlainTextResponse("", 404)
        await (refused or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        """What to answer instead, unless this request is welcome."""
        given = request.headers.getlist("host")
        if len(given) != 1 or not self._is_own(given[0]):
            return PlainTextResponse("This server does not go by that name.", 421)
        token = request.query_params.get("token")
        if token is not None and request.method == "GET":
            return self._exchange(request, token)
        if not _equal(request.cookies.get(self._cookie, ""), self._secret):
            return PlainTextResponse(NO_TOKEN, 403)
        if request.method not in ("GET", "HEAD") and request.headers.get("origin") != f"http://{given[0]}":
            return PlainTextResponse("Only the live page itself may ask for that.", 403)
        return None

    def _exchange(self, request: Request, token: str) -> Response:
        used = {other for other in self._once if _equal(token, other)}
        self._once -= used
        if not used and not _equal(token, self._token):
            return PlainTextResponse(NO_TOKEN, 403)
        kept = urlencode([(key, value) for key, value in request.query_params.multi_items() if key != "token"])
        answer = RedirectResponse(f"/?{kept}" if kept else "/", 303)
        answer.set_cookie(self._cookie, self._secret, httponly=True, samesite="strict")
        return answer

    def _is_own(self, given: str) -> bool:
        """Whether a Host header means this server: a foreign name that leads here belongs to a foreign page."""
        host, _, port = given.lower().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if port != str(self._port):
            return False
        return host in self._hosts or (self._any_address and _is_address(host))


def hosts(host: str) -> Collection[str]:
    """The names that a server bound to this host goes by."""
    own = {socket.gethostname().lower()} if host in WILD else {host.lower()}
    return {*own, *LOOPBACK}


def _is_address(host: str) -> bool:
    """An address, unlike a name, can't be made to lead elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _equal(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(), other.encode())
