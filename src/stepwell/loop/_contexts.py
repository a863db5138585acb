"""What the failure hooks are told. Frozen; nothing in them can change the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stepwell._signal import CancelSignal
from stepwell.models import Candidate

__all__ = [
    "LlmAttemptErrorContext",
    "LlmBlockedContext",
    "LlmErrorContext",
    "Rejection",
]

RejectReason: TypeAlias = Literal["truncated_tool_call", "malformed_tool_call", "schema", "check_response"]
ErrorKind: TypeAlias = Literal["invocation_error", "empty_response", "response_rejected"]
StoppedBecause: TypeAlias = Literal["retry_declined", "attempts_exhausted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a candidate was not accepted; `detail` is for the author (validation lines, the cap)."""

    reason: RejectReason
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelContext:
    """What every context has.

    Attributes:
        stage_id: The stage.
        provider: Name of the provider.
        model: Bare name of the model.
        cancelled: Set once the turn is cancelled.
    """

    stage_id: str
    provider: str
    model: str
    cancelled: CancelSignal = field(default_factory=CancelSignal)

    @property
    def selection(self) -> str:
        """`provider:name`."""
        return f"{self.provider}:{self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmAttemptErrorContext(_ModelContext):
    """For `should_retry_llm_error`: attempt number `attempt` (from 1) of `max_attempts` raised `error`."""

    error: Exception
    attempt: int
    max_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmErrorContext(_ModelContext):
    """For `on_llm_error`.

    Attributes:
        kind: `invocation_error`, `empty_response` or `response_rejected`.
        error: The thrown error, or `LlmEmptyResponseError` / `LlmResponseRejectedError`.
        attempts_made: Attempts of this model in this round.
        max_attempts: How many there could have been.
        stopped_because: `retry_declined` or `attempts_exhausted`.
        last_response: The last candidate, if there was a whole one.
        rejection: Why it was rejected, for `response_rejected`.
    """

    kind: ErrorKind
    error: Exception
    attempts_made: int
    max_attempts: int
    stopped_because: StoppedBecause
    last_response: Candidate | None = None
    rejection: Rejection | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmBlockedContext(_ModelContext):
    """For `on_llm_blocked`.

    Attributes:
        reason: `safety`, `refusal`, `content_filter`, `recitation`, `blocklist` or `other`.
        raw_reason: The provider's own word.
        phase: `prompt` (refused before answering) or `candidate`.
        text: What the provider says about it (a refusal's text), possibly empty.
        safety_ratings: The provider's ratings, as JSON.
        provider_details: Whatever else it said, as JSON.
        partial_text_shown: Whether some of the blocked reply was already shown.
    """

    reason: str
    phase: Literal["prompt", "candidate"]
    raw_reason: str | None = None
    text: str = ""
    safety_ratings: Any = None
    provider_details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    partial_text_shown: bool = False
