"""The events of a turn.

One stream feeds the caller, logging, telemetry and tests. Events are frozen and plain; `to_json` in `cli` and `server`
is `msgspec.to_builtins`. A delta costs an append to the view and, if somebody listens, one small struct.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from stepwell.loop import StreamMode, Verdict
from stepwell.messages import ToolOutcome, Usage

from ._result import PendingRequest, TurnResult

__all__ = [
    "Accepted",
    "AttemptStarted",
    "CandidateClassified",
    "Committed",
    "HookCalled",
    "Listener",
    "ReasoningDelta",
    "StageEntered",
    "Superseded",
    "TextDelta",
    "ToolFinished",
    "ToolInputDelta",
    "ToolProgress",
    "ToolStarted",
    "TurnEvent",
    "TurnFinished",
    "TurnStarted",
    "TurnSuspended",
    "UnitStarted",
    "Warned",
]


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=lambda name: name):
    pass


class TurnStarted(_Event, frozen=True):
    """The opening commit is done; or, `recovered`, this process goes on with what another one left open."""

    session: str
    run: str
    invocation: str
    flow: str
    recovered: bool = False


class StageEntered(_Event, frozen=True):
    """The cursor, or a visit, is in another stage."""

    stage: str


class UnitStarted(_Event, frozen=True):
    """A unit begins; `kind` is `reply`, `tools`, `logic` or `run`, `mode` the stage's stream mode."""

    step: str
    stage: str
    kind: str
    mode: StreamMode = "live"


class AttemptStarted(_Event, frozen=True):
    """An attempt begins. It shows nothing until its first delta."""

    step: str
    attempt: int
    provider: str
    model: str


class TextDelta(_Event, frozen=True):
    """More text of a step."""

    step: str
    text: str


class ReasoningDelta(_Event, frozen=True):
    """More reasoning of a step."""

    step: str
    text: str


class ToolInputDelta(_Event, frozen=True):
    """More of a proposed call's arguments; provisional."""

    step: str
    index: int
    call: str
    name: str
    delta: str


class Superseded(_Event, frozen=True):
    """Drop everything that step showed so far."""

    step: str


class CandidateClassified(_Event, frozen=True):
    """An attempt ended with this verdict. `usage` is `None` if it was not reported."""

    step: str
    attempt: int
    verdict: Verdict
    stop: str | None = None
    detail: str | None = None
    usage: Usage | None = None


class Accepted(_Event, frozen=True):
    """What the step shows now is final; `text` is all of it."""

    step: str
    text: str


class HookCalled(_Event, frozen=True):
    """A failure hook was asked."""

    step: str
    hook: str
    handled: bool


class ToolStarted(_Event, frozen=True):
    """A handler begins."""

    step: str
    call: str
    name: str
    args: Any = None


class ToolProgress(_Event, frozen=True):
    """A handler reports progress."""

    step: str
    call: str
    name: str
    value: Any = None


class ToolFinished(_Event, frozen=True):
    """A call has its result."""

    step: str
    call: str
    name: str
    outcome: ToolOutcome
    content: Any = None


class Committed(_Event, frozen=True):
    """A unit is in the store."""

    step: str
    revision: int


class Warned(_Event, frozen=True):
    """A line of the session log, level warning."""

    text: str
    data: Any = None


class TurnSuspended(_Event, frozen=True):
    """The turn waits for answers; it is stored."""

    pending: Sequence[PendingRequest]


class TurnFinished(_Event, frozen=True):
    """The last event."""

    result: TurnResult


TurnEvent: TypeAlias = (
    TurnStarted
    | StageEntered
    | UnitStarted
    | AttemptStarted
    | TextDelta
    | ReasoningDelta
    | ToolInputDelta
    | Superseded
    | CandidateClassified
    | Accepted
    | HookCalled
    | ToolStarted
    | ToolProgress
    | ToolFinished
    | Committed
    | Warned
    | TurnSuspended
    | TurnFinished
)

Listener: TypeAlias = Callable[[TurnEvent], None]
"""Called in the loop for every event but deltas; must not raise or wait."""
