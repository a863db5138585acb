"""Turns: an input becomes units, every unit a commit, and the caller sees events and a result."""

from ._engine import Engine, TurnOptions
from ._events import (
    Accepted,
    AttemptStarted,
    CandidateClassified,
    Committed,
    HookCalled,
    Listener,
    ReasoningDelta,
    StageEntered,
    Superseded,
    TextDelta,
    ToolFinished,
    ToolInputDelta,
    ToolProgress,
    ToolStarted,
    TurnEvent,
    TurnFinished,
    TurnStarted,
    TurnSuspended,
    UnitStarted,
    Warned,
)
from ._handle import Turn
from ._inputs import Limits
from ._result import PendingRequest, TurnFailure, TurnResult

__all__ = [
    "Accepted",
    "AttemptStarted",
    "CandidateClassified",
    "Committed",
    "Engine",
    "HookCalled",
    "Limits",
    "Listener",
    "PendingRequest",
    "ReasoningDelta",
    "StageEntered",
    "Superseded",
    "TextDelta",
    "ToolFinished",
    "ToolInputDelta",
    "ToolProgress",
    "ToolStarted",
    "Turn",
    "TurnEvent",
    "TurnFailure",
    "TurnFinished",
    "TurnOptions",
    "TurnResult",
    "TurnStarted",
    "TurnSuspended",
    "UnitStarted",
    "Warned",
]
