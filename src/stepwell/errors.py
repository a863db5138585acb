"""Every exception Stepwell raises, sorted by who must act.

```text
StepwellError
├── AuthorError                    the flow's author changes code
│   ├── FlowDefinitionError        the flow is wrong; found at registration or bootstrap
│   ├── InvalidOutcomeError        a hook returned something that is not legal there
│   │   └── ConflictingOutcomesError   two calls of one reply want different things
│   ├── OwnershipError             a worker tried to do what only the cursor's stage may do
│   ├── NonJsonValueError          a value that cannot be stored
│   ├── HistoryError               a message that no provider would accept at this place
│   ├── LogicLoopError             logic steps that never end
│   ├── SecondFallbackError        a second alternate model in one visit
│   ├── AgentRoundLimitError       too many rounds in one visit
│   ├── HandlerError               a tool handler or hook raised; the cause is attached
│   ├── CancelListenerError        an `on_cancel` or `on_steer` callback raised (104002)
│   └── ToolTimeoutError           a tool handler ran out of time
├── OperatorError                  whoever runs the service changes configuration or data
│   ├── LlmSetupError              credentials, unknown provider or model, tool binding
│   ├── StoreError                 the session store could not do it
│   │   ├── StoreBusyError         locked or unreachable for now; may be tried again
│   │   └── StoreDataError         what is stored cannot be read
│   ├── NewerSchemaError           written by a newer version
│   ├── MigrationError             no way from the stored version to this one
│   ├── UsageLimitError            the token budget of a turn is spent
│   └── ChannelError               the channel could not do it
│       ├── ChannelBusyError       locked or unreachable for now; may be tried again
│       ├── ChannelDataError       what is stored or was answered cannot be read
│       ├── InsufficientCapabilityError    the channel refuses this client (40160)
│       ├── EncoderRecoveryError   an output could not be completed (104000)
│       ├── SubscriptionError      reading a channel failed (104001)
│       ├── RunLifecycleError      start, resume, suspend or end of a run was not published (104003)
│       ├── SendError              a client's input was not published (104005)
│       ├── ContinuityLostError    part of the channel's log is gone (104006)
│       ├── StreamError            the source of an output failed, or its publishing (104008)
│       └── HistoryFetchError      a page of history could not be read (104011)
├── CallerError                    whoever called changes the call
│   ├── InvalidInputError          message, config or id is not acceptable
│   │   └── InputTooLargeError
│   ├── UnknownFlowError
│   ├── UnknownSessionError
│   ├── SessionExistsError
│   ├── SessionBusyError           another turn has the session
│   ├── SessionSuspendedError      the session waits for answers, and the message is none
│   ├── UnknownRequestError        nothing waits for an answer under that id
│   ├── IdempotencyConflictError   the key was used with another payload
│   ├── EngineClosedError
│   ├── UnknownMessageError        the channel has no message of that serial
│   ├── AppendGapError             appends before this one are missing
│   ├── MisuseError                a call that is not legal in this state (40003)
│   ├── OperationCancelledError    a run was cancelled before it began (40033)
│   ├── SessionClosedError         use after close, end or detach (104004)
│   ├── ChannelNotReadyError       sending before connecting (104007)
│   ├── InputEventNotFoundError    neither the run nor its input is on the channel (104010)
│   ├── NotInActivityError         called outside a Temporal activity
│   └── TurnCancelledError         the turn was cancelled; says who and why
├── ProviderError                  the model's provider; mostly worth another try
│   ├── ModelInvocationError       an ordinary failure of a model call
│   │   └── ModelTimeoutError      connect, first token, idle or attempt deadline
│   ├── PromptBlockedError         the provider refused the prompt
│   ├── LlmResponseBlockedError    the provider refused to answer, and nobody handled it
│   ├── LlmEmptyResponseError      no text, no call, no object
│   └── LlmResponseRejectedError   the last candidate was rejected
├── RaceError                      nobody: another writer was first
│   ├── SessionConflictError       compare-and-set lost
│   ├── StaleWriterError           the lease has a newer owner
│   ├── LeaseHeldError             the session is leased to somebody else
│   └── FencedError                the channel was taken over by a newer epoch
└── NotDone                        nobody: a tool handler says that nothing happened
```

The numbers are those of the wire: `wire_code` of the error, and `error-code` of a run that ended with it.

Every error has a stable `code` (snake case, part of the public API), `ids` (what it concerns) and `retryable`
(whether the same call may succeed later). No message ever holds a prompt, a customer's text, a tool argument or a
secret.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

__all__ = [
    "AgentRoundLimitError",
    "AppendGapError",
    "AuthorError",
    "CallerError",
    "CancelListenerError",
    "ChannelBusyError",
    "ChannelDataError",
    "ChannelError",
    "ChannelNotReadyError",
    "ConflictingOutcomesError",
    "ContinuityLostError",
    "EncoderRecoveryError",
    "EngineClosedError",
    "FencedError",
    "FlowDefinitionError",
    "HandlerError",
    "HistoryError",
    "HistoryFetchError",
    "IdempotencyConflictError",
    "InputEventNotFoundError",
    "InputTooLargeError",
    "InsufficientCapabilityError",
    "InvalidInputError",
    "InvalidOutcomeError",
    "LeaseHeldError",
    "LlmEmptyResponseError",
    "LlmResponseBlockedError",
    "LlmResponseRejectedError",
    "LlmSetupError",
    "LogicLoopError",
    "MigrationError",
    "MisuseError",
    "ModelInvocationError",
    "ModelTimeoutError",
    "NewerSchemaError",
    "NonJsonValueError",
    "NotDone",
    "NotInActivityError",
    "OperationCancelledError",
    "OperatorError",
    "OwnershipError",
    "PromptBlockedError",
    "ProviderError",
    "RaceError",
    "RunLifecycleError",
    "SecondFallbackError",
    "SendError",
    "SessionBusyError",
    "SessionClosedError",
    "SessionConflictError",
    "SessionExistsError",
    "SessionSuspendedError",
    "StaleWriterError",
    "StepwellError",
    "StoreBusyError",
    "StoreDataError",
    "StoreError",
    "StreamError",
    "SubscriptionError",
    "ToolTimeoutError",
    "TurnCancelledError",
    "UnknownFlowError",
    "UnknownMessageError",
    "UnknownRequestError",
    "UnknownSessionError",
    "UsageLimitError",
]

TimeoutKind = Literal["connect", "first_token", "idle", "attempt"]
"""Which deadline of a model call passed."""

CancelKind = Literal["user", "caller", "deadline", "superseded", "shutdown", "lost"]
"""Who cancelled a turn."""


class StepwellError(Exception):
    """Base of every error of this package.

    Args:
        message: A sentence for the person who must act, with the next step in it.
        ids: What the error concerns, by name: `session_id`, `flow`, `stage`, `tool`, `hook`, `run_id`, ...
            `None` values are dropped.

    Attributes:
        code: Stable name of the kind of error.
        retryable: Whether the same call may succeed when made again later.
        ids: See above.
    """

    code: ClassVar[str] = "error"
    retryable: bool = False

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()

    def __init__(self, message: str, /, **ids: str | int | None) -> None:
        super().__init__(message)
        self.ids: dict[str, str | int] = {k: v for k, v in ids.items() if v is not None}

    @property
    def message(self) -> str:
        """The sentence."""
        return str(self.args[0])


class AuthorError(StepwellError):
    """The flow's author must change code."""


class FlowDefinitionError(AuthorError):
    """A flow, step or tool is defined wrongly. Raised at registration, or when a turn bootstraps."""


class InvalidOutcomeError(AuthorError):
    """A hook returned an outcome that is not legal there, names an unknown stage, or holds a value that is not JSON."""


class ConflictingOutcomesError(InvalidOutcomeError):
    """Two calls of one reply returned different outcomes other than `stay`."""


class OwnershipError(AuthorError):
    """A worker tried to route, complete or save what only the cursor's stage may."""


class NonJsonValueError(AuthorError):
    """A value is not JSON. `path` says where, as dotted text.

    Args:
        message: See `StepwellError`.
        path: Where in the value, for example `criteria.dates[0]`.
    """

    def __init__(self, message: str, /, path: str = "", **ids: str | int | None) -> None:
        super().__init__(message, path=path, **ids)
        self.path = path


class HistoryError(AuthorError):
    """A message would make the history one that no provider accepts (promise P8)."""


class LogicLoopError(AuthorError):
    """Logic steps route in a circle, or for longer than `max_logic_hops`."""


class SecondFallbackError(AuthorError):
    """`retry_with_model` was returned a second time in one visit."""


class AgentRoundLimitError(AuthorError):
    """A visit used `max_agent_rounds` rounds without ending."""


class HandlerError(AuthorError):
    """A tool handler or a hook raised something that is not a Stepwell error; see `__cause__`."""


class CancelListenerError(AuthorError):
    """An `on_cancel` or `on_steer` callback raised (104002); the cause is attached."""

    wire_code: ClassVar[int] = 104002
    status_code: ClassVar[int] = 500


class ToolTimeoutError(AuthorError):
    """A tool handler did not finish within its `timeout`."""


class OperatorError(StepwellError):
    """Whoever runs the service must change configuration or data."""


class LlmSetupError(OperatorError):
    """A model cannot be called as configured: credentials, provider, model, parameter, tools. Never retried."""


class StoreError(OperatorError):
    """The session store could not do what was asked."""


class StoreBusyError(StoreError):
    """The store is locked or unreachable for now."""

    retryable = True


class StoreDataError(StoreError):
    """What is stored cannot be read as what it claims to be."""


class ChannelError(OperatorError):
    """The channel could not do what was asked.

    Attributes:
        wire_code: Number that the JavaScript client knows this kind of error by.
        status_code: The HTTP status that goes with it.
    """

    wire_code: ClassVar[int] = 50000
    status_code: ClassVar[int] = 500


class ChannelBusyError(ChannelError):
    """The channel's backend is locked or unreachable for now."""

    retryable = True


class ChannelDataError(ChannelError):
    """What is stored, or what the service answered, cannot be read as what it claims to be."""


class InsufficientCapabilityError(ChannelError):
    """The service refuses this client's publish (40160): give its key or token the capability."""

    wire_code = 40160
    status_code = 401


class EncoderRecoveryError(ChannelError):
    """An output lost an append, and replacing the whole text failed too (104000)."""

    wire_code = 104000


class SubscriptionError(ChannelError):
    """The channel could not be read, or a message on it could not be handled (104001)."""

    wire_code = 104001


class RunLifecycleError(ChannelError):
    """Start, resume, suspend or end of a run could not be published (104003). The same call may be repeated."""

    wire_code = 104003
    retryable = True


class SendError(ChannelError):
    """A client's input could not be published (104005)."""

    wire_code = 104005
    retryable = True


class ContinuityLostError(ChannelError):
    """Part of the channel's log is gone, so messages may have been missed (104006)."""

    wire_code = 104006


class StreamError(ChannelError):
    """The source of an output failed, or its publishing did (104008)."""

    wire_code = 104008


class HistoryFetchError(ChannelError):
    """A page of history could not be read after several attempts (104011)."""

    wire_code = 104011
    retryable = True


class NewerSchemaError(OperatorError):
    """A stored document was written by a newer version of the flow or of Stepwell. It is left untouched."""


class MigrationError(OperatorError):
    """A stored document cannot be brought to the current version: a migration is missing, failed, or broke identity."""


class UsageLimitError(OperatorError):
    """The turn spent `max_total_tokens`."""


class CallerError(StepwellError):
    """Whoever called must change the call."""


class InvalidInputError(CallerError):
    """A message, config or id is not acceptable.

    Args:
        message: See `StepwellError`.
        pointer: JSON pointer of the field at fault, `""` for the whole.
    """

    def __init__(self, message: str, /, pointer: str = "", **ids: str | int | None) -> None:
        super().__init__(message, **ids)
        self.pointer = pointer


class InputTooLargeError(InvalidInputError):
    """The input is larger or deeper than the engine's limits."""


class UnknownFlowError(CallerError):
    """No flow is registered under that id or alias."""


class UnknownSessionError(CallerError):
    """No session is stored under that id."""


class SessionExistsError(CallerError):
    """A session with that id exists already."""


class SessionBusyError(CallerError):
    """Another turn has the session and the busy policy, or its time, did not allow to wait longer."""

    retryable = True


class SessionSuspendedError(CallerError):
    """The session waits for answers, and what was said is none of them.

    Args:
        message: See `StepwellError`.
        pending: Ids of the requests that are waited for.
    """

    def __init__(self, message: str, /, pending: Sequence[str], **ids: str | int | None) -> None:
        super().__init__(message, pending=", ".join(pending), **ids)
        self.pending = tuple(pending)


class UnknownRequestError(CallerError):
    """Nothing waits for an answer under that id: it was never asked for, has expired, or its run was given up."""


class IdempotencyConflictError(CallerError):
    """The idempotency key was used before with another payload."""


class EngineClosedError(CallerError):
    """The engine is closed or not started."""


class TurnCancelledError(CallerError):
    """The turn was cancelled.

    Args:
        message: See `StepwellError`.
        kind: Who: `user`, `caller`, `deadline`, `superseded`, `shutdown` or `lost`.
        reason: Why, in the words of whoever cancelled.
    """

    def __init__(self, message: str, /, kind: CancelKind, reason: str | None = None, **ids: str | int | None) -> None:
        super().__init__(message, kind=kind, **ids)
        self.kind: CancelKind = kind
        self.reason = reason
        # Another process goes on with it: the same input, given again, has its result.
        self.retryable = kind in ("shutdown", "lost")


class UnknownMessageError(CallerError):
    """The channel has no message of that serial."""


class AppendGapError(CallerError):
    """Appends before this one are missing: repeat them first. `applied` is how many the message has."""

    def __init__(self, message: str, /, applied: int, **ids: str | int | None) -> None:
        super().__init__(message, applied=applied, **ids)
        self.applied = applied


class MisuseError(CallerError):
    """A call that is not legal in this state, or an argument that cannot be (40003)."""

    wire_code: ClassVar[int] = 40003
    status_code: ClassVar[int] = 400


class OperationCancelledError(CallerError):
    """The run was cancelled before it was started or loaded (40033)."""

    wire_code: ClassVar[int] = 40033
    status_code: ClassVar[int] = 400


class SessionClosedError(CallerError):
    """The session was closed, ended or detached (104004): make a new one."""

    wire_code: ClassVar[int] = 104004
    status_code: ClassVar[int] = 400


class ChannelNotReadyError(CallerError):
    """The session is not connected (104007): enter it first."""

    wire_code: ClassVar[int] = 104007
    status_code: ClassVar[int] = 400


class InputEventNotFoundError(CallerError):
    """The run or the input that it answers is not on the channel (104010)."""

    wire_code: ClassVar[int] = 104010
    status_code: ClassVar[int] = 504


class NotInActivityError(CallerError):
    """Called outside a Temporal activity: call it in one."""


class ProviderError(StepwellError):
    """The provider of a model must act, or time must pass."""

    retryable = True


class ModelInvocationError(ProviderError):
    """An ordinary failure of a model call: an HTTP error, a broken connection, a stream without a finish.

    Args:
        message: See `StepwellError`.
        status: HTTP status, if there was one.
        provider_code: The provider's own error code, if it sent one.
        retry_after: Seconds the provider asked to wait, if it did.
        cause: The exception of the client library. It is not chained: a traceback would print the provider's answer.
    """

    def __init__(
        self,
        message: str,
        /,
        *,
        status: int | None = None,
        provider_code: str | None = None,
        retry_after: float | None = None,
        cause: BaseException | None = None,
        **ids: str | int | None,
    ) -> None:
        super().__init__(message, status=status, provider_code=provider_code, **ids)
        self.status = status
        self.provider_code = provider_code
        self.retry_after = retry_after
        self.cause = cause


class ModelTimeoutError(ModelInvocationError):
    """A deadline of a model call passed.

    Args:
        message: See `StepwellError`.
        kind: Which: `connect`, `first_token`, `idle` or `attempt`.
        cause: See `ModelInvocationError`.
    """

    def __init__(
        self, message: str, /, kind: TimeoutKind, *, cause: BaseException | None = None, **ids: str | int | None
    ) -> None:
        super().__init__(message, cause=cause)
        self.ids.update({k: v for k, v in {**ids, "kind": kind}.items() if v is not None})
        self.kind: TimeoutKind = kind


class PromptBlockedError(ProviderError):
    """The provider refused the prompt itself; raised by gateways, handled by `on_llm_blocked(phase="prompt")`.

    Args:
        message: See `StepwellError`.
        reason: Normalised: `safety`, `refusal`, `content_filter`, `recitation`, `blocklist` or `other`.
        raw_reason: The provider's own word.
        safety_ratings: The provider's ratings, as JSON.
        details: Whatever else the provider said, as JSON.
    """

    retryable = False

    def __init__(
        self,
        message: str,
        /,
        *,
        reason: str = "other",
        raw_reason: str | None = None,
        safety_ratings: Any = None,
        details: dict[str, Any] | None = None,
        cause: BaseException | None = None,
        **ids: str | int | None,
    ) -> None:
        super().__init__(message, reason=reason, raw_reason=raw_reason, **ids)
        self.reason = reason
        self.raw_reason = raw_reason
        self.safety_ratings = safety_ratings
        self.details = details or {}
        if cause is not None:
            self.__cause__ = cause


class LlmResponseBlockedError(ProviderError):
    """The provider refused to answer, and no `on_llm_blocked` hook handled it. `context` is the hook's context."""

    retryable = False

    def __init__(self, message: str, /, context: Any = None, **ids: str | int | None) -> None:
        super().__init__(message, **ids)
        self.context = context


class LlmEmptyResponseError(ProviderError):
    """The model kept answering with nothing."""


class LlmResponseRejectedError(ProviderError):
    """The last candidate of a round was rejected.

    Args:
        message: See `StepwellError`; names the output cap where the candidate was truncated.
        reason: `truncated_tool_call`, `malformed_tool_call`, `schema` or `check_response`.
        detail: What exactly, for the author.
    """

    def __init__(self, message: str, /, reason: str = "", detail: str | None = None, **ids: str | int | None) -> None:
        super().__init__(message, reason=reason, **ids)
        self.reason = reason
        self.detail = detail


class RaceError(StepwellError):
    """Another writer was first."""

    retryable = True


class SessionConflictError(RaceError):
    """The session moved on since it was read (compare-and-set lost)."""


class StaleWriterError(RaceError):
    """The lease was taken over, or the session was deleted; nothing was written."""


class LeaseHeldError(RaceError):
    """The session is leased to somebody else until `expires` (Unix time, seconds)."""

    def __init__(self, message: str, /, owner: str, expires: float, **ids: str | int | None) -> None:
        super().__init__(message, owner=owner, **ids)
        self.owner = owner
        self.expires = expires


class FencedError(RaceError):
    """The channel was taken over by a newer epoch; nothing was written. Stop: another writer goes on."""

    retryable = False

    def __init__(self, message: str, /, epoch: int, fence: int, **ids: str | int | None) -> None:
        super().__init__(message, epoch=epoch, fence=fence, **ids)
        self.epoch = epoch
        self.fence = fence


class NotDone(StepwellError):
    """Raise it in a tool handler to say that nothing happened outside, whatever was tried.

    The model is told the text, whatever `on_error` says, as a result `not_run`, and the conversation goes on. The
    handler's writes do not count. After a crash an effect that ended so may run again.
    """
