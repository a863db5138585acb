"""Talking to a model: gateway protocol, selections and catalogue, stop reasons, providers.

Adapters load their client libraries when a model of theirs is first used; importing this package loads none.
"""

from ._adapters import Anthropic, Endpoint, Google, OpenAIChat, OpenAICompatible, OpenAIResponses
from ._langchain import LangChainGateway
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
from .catalog import ModelCatalog, ModelInfo
from .providers import Providers

__all__ = [
    "Anthropic",
    "Candidate",
    "Deadlines",
    "Endpoint",
    "FileEvent",
    "Finish",
    "Google",
    "LangChainGateway",
    "LlmType",
    "ModelCatalog",
    "ModelEvent",
    "ModelGateway",
    "ModelInfo",
    "ModelRequest",
    "ModelSelection",
    "OpenAIChat",
    "OpenAICompatible",
    "OpenAIResponses",
    "Providers",
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
