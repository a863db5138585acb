"""Who may call, what every response carries, and what is logged: around every route."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ._access import Access, Caller
from ._metrics import Metrics
from ._problems import Problem, problem_of

__all__ = ["Guard"]

_OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})

_HEADERS: Final = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; sandbox"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]

_access_log = logging.getLogger("stepwell.server.access")
_logger = logging.getLogger("stepwell.server")


class Guard:
    """ASGI: checks the caller, adds security headers, logs, and turns whatever is raised into a problem.

    Of a request the log has method, route (not the path, which names sessions), status, milliseconds and the name of
    the key; never a body, a header or an id.

    Args:
        app: What is guarded.
        access: See `Access`.
        metrics: Count the requests.
    """

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app = app
        self._access = access
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the class."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status, caller = 0, Caller()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            try:
                scope["stepwell.caller"] = caller = self._caller(scope)
                await self._app(scope, receive, sending)
            except Exception as error:
                if status:
                    raise  # half a response is out: the server closes the connection
                await _problem(error).response()(scope, receive, sending)
        finally:
            route = scope.get("stepwell.route", "-")
            if status:
                self._metrics.answered(scope["method"], route, status)
            _access_log.info(
                "%s %s %s %.1f ms %s",
                scope["method"],
                route,
                status or "-",
                (time.perf_counter() - start) * 1000,
                caller.name,
            )

    def _caller(self, scope: Scope) -> Caller:
        path: str = scope["path"]
        if path.removeprefix(scope.get("root_path", "")) in _OPEN_PATHS:
            return Caller()
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
