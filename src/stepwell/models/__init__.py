"""Talking to a model: gateway protocol, selections and catalogue, stop reasons, providers.

Adapters load their client libraries when a model of theirs is first used; importing this package loads none.
"""

from ._types import (
    Candidate,
    Deadlines,
    FileEvent,
    Finish,
    LlmType,
    ModelEvent,
    ModelGateway,
    ModelRequest,
    ModelSelection,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolSchema,
    UsageEvent,
    model_stop_reason,
)

__all__ = [
    "Candidate",
    "Deadlines",
    "FileEvent",
    "Finish",
    "LlmType",
    "ModelEvent",
    "ModelGateway",
    "ModelRequest",
    "ModelSelection",
    "ReasoningDelta",
    "StopReason",
    "TextDelta",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "ToolSchema",
    "UsageEvent",
    "model_stop_reason",
]
