"""Who may call, what every response carries, and what is logged: around every route."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import time
import uuid
from collections.abc import Collection, Iterable
from typing import Final, Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stepwell.errors import InvalidInputError

from ._problems import Problem, problem_of

__all__ = ["ANONYMOUS", "Access", "Guard", "is_loopback", "principal_of"]

ANONYMOUS: Final = "-"
"""Who calls where no key is asked for; no key can have this name."""

_VARIABLE: Final = "STEPWELL_API_KEYS"
_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,47}")
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})

_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]

_access_log = logging.getLogger("stepwell.server.access")
_logger = logging.getLogger("stepwell.server")


def is_loopback(host: str) -> bool:
    """Whether a host name or address never leaves this machine."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class Access:
    """The rule who may call.

    * `keys`: whoever presents a key.
    * `local`: without keys. Only callers on this machine, that came neither through a proxy nor from a page of another
      site.
    * `open`: everybody; something around this application decides.

    Args:
        keys: API keys, each `KEY` or `NAME:KEY`; `None` for those of the environment variable `STEPWELL_API_KEYS`
            (comma separated).
        no_auth: `open`, whatever keys there are.
        local: With `no_auth`, `local` instead.
        origins: Origins whose pages may call although they are others; only `local` asks.

    Raises:
        InvalidInputError: A key cannot be one.
    """

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        *,
        no_auth: bool = False,
        local: bool = False,
        origins: Collection[str] = (),
    ) -> None:
        if keys is None:
            keys = [key for key in os.environ.get(_VARIABLE, "").split(",") if key.strip()]
        # Digests: of equal length whatever the key, so that comparing them says nothing.
        self._digests: list[tuple[bytes, str]] = [_parse(key) for key in keys] if not no_auth else []
        self._origins = origins
        self.mode: Literal["keys", "local", "open"] = (
            "keys" if self._digests else "open" if no_auth and not local else "local"
        )

    def check(self, scope: Scope, headers: Headers) -> str:
        """The name of the caller.

        Raises:
            Problem: 401, 403 or 421.
        """
        if self.mode == "open":
            return ANONYMOUS
        if self.mode == "keys":
            return self._holder(headers)
        _check_local(scope, headers, self._origins)
        return ANONYMOUS

    def _holder(self, headers: Headers) -> str:
        kind, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "").strip()
        digest = hashlib.sha256(key.encode("latin-1")).digest()
        found = ""
        for known, name in self._digests:
            if hmac.compare_digest(known, digest):
                found = name
        if found:
            return found
        raise Problem(
            401,
            "unauthenticated",
            "Send a valid API key in the header Authorization: Bearer KEY, or X-API-Key: KEY.",
            headers={"WWW-Authenticate": 'Bearer realm="stepwell"'},
        )


def _parse(given: str) -> tuple[bytes, str]:
    name, separator, key = given.strip().rpartition(":")
    name = name if separator else "default"
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidInputError("An API key is printable ASCII without spaces, commas and colons.", "/api_keys")
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            "The name of an API key has 1 to 48 letters, digits, _, . and -, and does not begin with . or -.",
            "/api_keys",
        )
    return hashlib.sha256(key.encode()).digest(), name


def _check_local(scope: Scope, headers: Headers, origins: Collection[str]) -> None:
    peer = scope.get("client")
    if peer is None or not is_loopback(peer[0]) or any(name in headers for name in _FORWARDED):
        raise Problem(
            401,
            "unauthenticated",
            "This server has no API keys and answers callers on its own machine only: give it keys "
            "(STEPWELL_API_KEYS) and send one.",
            headers={"WWW-Authenticate": 'Bearer realm="stepwell"'},
        )
    host = headers.get("host", "")
    # A page of another site may come in by a name that it lets point to this machine, or post without asking.
    if not is_loopback(_without_port(host)):
        raise Problem(
            421, "misdirected_request", "Without API keys this server answers to localhost only, not to other names."
        )
    origin = headers.get("origin")
    if origin is None or scope["method"] in _SAFE or origin in origins or "*" in origins:
        return
    if origin.partition("://")[2] != host:
        raise Problem(403, "cross_origin", "Without API keys pages of other origins may not call this server.")


def _without_port(host: str) -> str:
    return host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]


def principal_of(scope: Scope) -> str:
    """The name of the caller that `Guard` let through."""
    return str(scope["stepwell.principal"])


class Guard:
    """ASGI: checks the caller, adds security headers, logs, and turns whatever is raised into a problem.

    Of a request the log has method, route (not the path, which names sessions), status, milliseconds and the name of
    the key; never a body, a header or an id.

    Args:
        app: What is guarded.
        access: See `Access`.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            try:
                scope["stepwell.principal"] = self._principal(scope)
                await self._app(scope, receive, sending)
            except Exception as error:
                if status:
                    raise  # half a response is out: the server closes the connection
                await _problem(error).response()(scope, receive, sending)
        finally:
            _access_log.info(
                "%s %s %s %.1f ms %s",
                scope["method"],
                scope.get("stepwell.route", "-"),
                status or "-",
                (time.perf_counter() - start) * 1000,
                scope.get("stepwell.principal", "-"),
            )

    def _principal(self, scope: Scope) -> str:
        path: str = scope["path"]
        if path.removeprefix(scope.get("root_path", "")) in _OPEN_PATHS:
            return ANONYMOUS
        return self._access.check(scope, Headers(scope=scope))


def _problem(error: Exception) -> Problem:
    problem = problem_of(error)
    if problem is None:
        instance = uuid.uuid4().urn
        _logger.error("an unexpected error, %s", instance, exc_info=error)
        return Problem(
            500,
            "internal",
            "Something unexpected happened: whoever runs the service finds it in its log by its instance.",
            instance=instance,
        )
    if problem.status == 500:
        _logger.error("a request failed: %s", problem.code, exc_info=error)
    return problem
