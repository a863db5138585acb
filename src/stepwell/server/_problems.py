"""What a client is told when something is refused or fails: problem documents (RFC 9457), in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from stepwell.engine import TurnFailure
from stepwell.errors import (
    ChannelBusyError,
    ChannelDataError,
    ChannelError,
    EngineClosedError,
    FencedError,
    HistoryFetchError,
    IdempotencyConflictError,
    InputEventNotFoundError,
    InputTooLargeError,
    InvalidInputError,
    LeaseHeldError,
    MigrationError,
    MisuseError,
    NewerSchemaError,
    OperationCancelledError,
    RunLifecycleError,
    SessionBusyError,
    SessionClosedError,
    SessionConflictError,
    SessionExistsError,
    SessionSuspendedError,
    StaleWriterError,
    StepwellError,
    StoreBusyError,
    StoreDataError,
    StoreError,
    SubscriptionError,
    TurnCancelledError,
    UnknownFlowError,
    UnknownMessageError,
    UnknownRequestError,
    UnknownSessionError,
)

__all__ = ["STATUS", "Problem", "problem_of", "refusal_of", "stopping"]

STATUS: Final[dict[str, int]] = {
    UnknownFlowError.code: 404,
    UnknownSessionError.code: 404,
    UnknownRequestError.code: 404,
    SessionBusyError.code: 409,
    SessionSuspendedError.code: 409,
    LeaseHeldError.code: 409,
    SessionExistsError.code: 409,
    IdempotencyConflictError.code: 409,
    SessionConflictError.code: 409,
    StaleWriterError.code: 409,
    InputTooLargeError.code: 413,
    InvalidInputError.code: 422,
    UnknownMessageError.code: 404,
    FencedError.code: 409,
    MisuseError.code: 422,
    OperationCancelledError.code: 409,
    InputEventNotFoundError.code: 504,
    EngineClosedError.code: 503,
    SessionClosedError.code: 503,
    StoreBusyError.code: 503,
    ChannelBusyError.code: 503,
    ChannelError.code: 500,
    ChannelDataError.code: 500,
    SubscriptionError.code: 503,
    HistoryFetchError.code: 503,
    RunLifecycleError.code: 503,
    StoreError.code: 500,
    StoreDataError.code: 500,
    NewerSchemaError.code: 500,
    MigrationError.code: 500,
}
"""Status by error code. A turn that fails with one of these is refused with it; any other failure of a turn is a
result. What is not here and no turn's failure is 500."""

_RETRY_AFTER: Final = {
    SessionBusyError.code: "1",
    LeaseHeldError.code: "1",
    EngineClosedError.code: "5",
    StoreBusyError.code: "1",
    ChannelBusyError.code: "1",
}

_HIDDEN: Final = {
    StoreError.code: "The session store failed: whoever runs the service finds the reason in its log.",
    StoreDataError.code: "What is stored cannot be read: whoever runs the service finds the reason in its log.",
    StoreBusyError.code: "The session store is locked or unreachable for now: send the same request again.",
    ChannelError.code: "The channel failed: whoever runs the service finds the reason in its log.",
    ChannelDataError.code: "What is stored cannot be read: whoever runs the service finds the reason in its log.",
    ChannelBusyError.code: "The channel is locked or unreachable for now: send the same request again.",
    LeaseHeldError.code: "The session is worked on elsewhere: send the same request again.",
}
"""Instead of sentences that name files, machines or processes."""

_ELSEWHERE: Final = {"/idempotency_key": {"header": "Idempotency-Key"}, "/after": {"parameter": "after"}}
"""What the engine calls a field and comes from elsewhere than the body."""

_encode: Final = msgspec.json.Encoder().encode


class Problem(Exception):
    """A refusal, and the document that says so.

    Args:
        status: HTTP status.
        code: Stable name of the kind of problem.
        detail: A sentence that says what to do. Nothing of a conversation, no secret, no internals.
        session_id: The session it concerns.
        retryable: Whether the same request may succeed later.
        errors: For each field at fault `pointer` (JSON pointer into the body), `parameter` or `header`, and `detail`.
        instance: Names this one occurrence, to find it in the log.
        headers: Header fields of the response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        session_id: str | None = None,
        retryable: bool = False,
        errors: Sequence[Mapping[str, str]] = (),
        instance: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.session_id = session_id
        self.headers = dict(headers or {})
        self.more: dict[str, Any] = {"errors": list(errors)} if errors else {}
        if instance is not None:
            self.more["instance"] = instance
        self._retryable = retryable

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {
            "type": f"urn:stepwell:problem:{self.code}",
            "title": self.code.replace("_", " ").capitalize(),
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "session_id": self.session_id,
            "retryable": self._retryable,
            **self.more,
        }

    def explain(self) -> str:
        """All of it in one text."""
        fields = (f"{next(iter(field.values())) or '/'}: {field['detail']}" for field in self.more.get("errors", ()))
        return "\n".join((self.detail, *fields))

    def response(self) -> Response:
        """The response."""
        return Response(_encode(self.to_json()), self.status, self.headers, media_type="application/problem+json")


def stopping() -> Problem:
    """What is said while the server stops."""
    return Problem(
        503,
        EngineClosedError.code,
        "The server is stopping: send the same request again, with the same Idempotency-Key.",
        retryable=True,
        headers={"Retry-After": "5", "Connection": "close"},
    )


def problem_of(error: Exception) -> Problem | None:
    """What a client is told of an exception; `None` for one that nobody expected."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, StepwellError):
        problem = _typed(error.code, error.message, error.retryable, error.ids)
        if isinstance(error, InvalidInputError) and error.pointer:
            where = _ELSEWHERE.get(error.pointer, {"pointer": error.pointer})
            problem.more["errors"] = [{**where, "detail": error.message}]
        return problem
    if isinstance(error, HTTPException):
        return _of_router(error)
    return None


def refusal_of(failure: TurnFailure) -> Problem | None:
    """The problem that a failed turn is answered with; `None` where its result is the answer.

    A turn that ran and failed has a result that says so. A problem is what did not begin (a busy session), what the
    store could not do, and what goes on later or elsewhere (a stopping server, a lease that was lost).
    """
    if failure.code in STATUS:
        return _typed(failure.code, failure.message, failure.retryable, failure.ids)
    if failure.code != TurnCancelledError.code:
        return None
    session, kind = _session(failure.ids), failure.ids.get("kind")
    if kind == "shutdown":
        return Problem(
            503,
            failure.code,
            "The server is stopping. What the turn committed is kept, and it goes on with the next request to its "
            "session: send this one again with the same Idempotency-Key.",
            session_id=session,
            retryable=True,
            headers={"Retry-After": "5"},
        )
    if kind == "lost":
        return Problem(
            409,
            failure.code,
            "The session was deleted or taken over while the turn ran: look at the session before you go on.",
            session_id=session,
        )
    return None


def _typed(code: str, message: str, retryable: bool, ids: Mapping[str, str | int]) -> Problem:
    status = STATUS.get(code)
    if status is None:
        status, message = 500, "The request failed: whoever runs the service finds the reason in its log."
    headers = {"Retry-After": _RETRY_AFTER[code]} if code in _RETRY_AFTER else None
    return Problem(
        status,
        code,
        _HIDDEN.get(code, message),
        session_id=_session(ids),
        retryable=retryable or status == 503,
        headers=headers,
    )


def _session(ids: Mapping[str, str | int]) -> str | None:
    session = ids.get("session_id")
    return str(session) if session is not None else None


def _of_router(error: HTTPException) -> Problem | None:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return Problem(404, "unknown_route", "There is nothing here: /openapi.json lists every route.")
    if error.status_code == 405:
        allowed = headers.get("Allow", "")
        return Problem(405, "method_not_allowed", f"This route knows {allowed} only.", headers=headers)
    return None
