"""What a turn came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from stepwell.errors import HandlerError, StepwellError
from stepwell.messages import JsonObject, JsonValue
from stepwell.outcomes import RequestKind
from stepwell.sessions import ModelUsage

__all__ = ["PendingRequest", "TurnFailure", "TurnResult", "failure_of", "wrap"]


class TurnFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a turn failed. `code` is stable; `message` holds no content of the conversation."""

    code: str
    message: str
    retryable: bool = False
    ids: Mapping[str, str | int] = {}


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Something a suspended turn waits for; `Engine.answer` takes its id.

    Attributes:
        id: Names it.
        kind: `approval` (answer `True`, `False` or `{"approved": bool, "reason": str}`), `question`, or `client_tool`
            (the answer is the result of the tool that `payload` describes).
        tool: Name of the tool whose call waits.
        call: Id of that call.
        payload: JSON for whoever answers; of an approval or a client's tool that the framework asks for: `tool` and
            `args`.
        expires: When it stops waiting, Unix time in seconds; `None`: never.
    """

    id: str
    kind: RequestKind
    tool: str
    call: str
    payload: JsonValue = None
    expires: float | None = None


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one turn.

    Attributes:
        success: Whether the turn came to its end.
        completed: Whether the session is completed.
        message: The last stage's reply, `""` where there is none.
        content_type: MIME type of `message`.
        session_id: The session, a new one where an ended one was continued.
        previous_session_id: That ended one.
        resumed: Whether the session existed before this turn.
        run_id: The run.
        invocation_id: The invocation.
        current: Id of the cursor's stage.
        status: `running`, `completed`, `aborted` or `suspended`.
        usage: Tokens of this turn by `provider:name`.
        units: Units committed by this turn.
        pending: What a suspended turn waits for.
        error: Why it failed, or `None`.
    """

    success: bool
    session_id: str
    run_id: str
    invocation_id: str
    current: str
    status: str
    completed: bool = False
    message: str = ""
    content_type: str = "text/plain"
    previous_session_id: str | None = None
    resumed: bool = False
    usage: Mapping[str, ModelUsage] = {}
    units: int = 0
    pending: tuple[PendingRequest, ...] = ()
    error: TurnFailure | None = None

    def to_json(self) -> JsonObject:
        """As plain JSON."""
        data: JsonObject = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TurnResult:
        """From `to_json`."""
        return msgspec.convert(data, cls)


def failure_of(error: Exception) -> TurnFailure:
    """The public form of an error: nothing of the conversation in it."""
    if isinstance(error, StepwellError):
        return TurnFailure(code=error.code, message=error.message, retryable=error.retryable, ids=error.ids)
    wrapped = wrap(error)
    return TurnFailure(code=wrapped.code, message=wrapped.message, ids=wrapped.ids)


def wrap(error: BaseException) -> StepwellError:
    """An error of the author's code as a typed one, with the cause attached."""
    if isinstance(error, StepwellError):
        return error
    wrapped = HandlerError(
        f"A hook raised {type(error).__name__}: its traceback is in the log; the session is as it was before the unit."
    )
    wrapped.__cause__ = error
    return wrapped
