"""Stepwell: conversations that run in stages.

The names of everyday use are here; each sub-package has the rest. Nothing optional is imported by importing this.
"""

from stepwell.engine import Engine, PendingRequest, Turn, TurnResult
from stepwell.errors import NotDone, StepwellError
from stepwell.flow import Flow, LogicResult, LogicStep, ResponseResult, Step, TerminateSessionStep
from stepwell.loop import (
    AskShorter,
    CallPolicy,
    CallPolicyOverride,
    EmptyPolicy,
    LlmAttemptErrorContext,
    LlmBlockedContext,
    LlmErrorContext,
    RaiseCap,
)
from stepwell.messages import AssistantMessage, DirectMessage, FilePart, TextPart, ToolCall, ToolResult, UserMessage
from stepwell.models import Candidate, ModelCatalog, ModelSelection, Providers, model_stop_reason
from stepwell.outcomes import (
    Direct,
    DirectTo,
    Finish,
    Go,
    Outcome,
    Stay,
    Suspend,
    SuspendRequest,
    direct,
    direct_to,
    finish,
    go,
    retry_with_model,
    stay,
    suspend,
)
from stepwell.sessions import Migration
from stepwell.tools import ToolContext, ToolDefinition, tool, tools

__all__ = [
    "AskShorter",
    "AssistantMessage",
    "CallPolicy",
    "CallPolicyOverride",
    "Candidate",
    "Direct",
    "DirectMessage",
    "DirectTo",
    "EmptyPolicy",
    "Engine",
    "FilePart",
    "Finish",
    "Flow",
    "Go",
    "LlmAttemptErrorContext",
    "LlmBlockedContext",
    "LlmErrorContext",
    "LogicResult",
    "LogicStep",
    "Migration",
    "ModelCatalog",
    "ModelSelection",
    "NotDone",
    "Outcome",
    "PendingRequest",
    "Providers",
    "RaiseCap",
    "ResponseResult",
    "Stay",
    "Step",
    "StepwellError",
    "Suspend",
    "SuspendRequest",
    "TerminateSessionStep",
    "TextPart",
    "ToolCall",
    "ToolContext",
    "ToolDefinition",
    "ToolResult",
    "Turn",
    "TurnResult",
    "UserMessage",
    "direct",
    "direct_to",
    "finish",
    "go",
    "model_stop_reason",
    "retry_with_model",
    "stay",
    "suspend",
    "tool",
    "tools",
]
