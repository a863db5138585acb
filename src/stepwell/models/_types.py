"""Requests, events, candidates: what passes between the loop and a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from stepwell.errors import LlmSetupError
from stepwell.messages import FilePart, JsonObject, JsonValue, Message, ReasoningPart, ToolCall, Usage

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

BlockReason: TypeAlias = Literal["safety", "refusal", "content_filter", "recitation", "blocklist", "other"]


class StopReason(StrEnum):
    """Why a model stopped, normalised."""

    COMPLETE = "complete"
    TOOL_CALLS = "tool_calls"
    TRUNCATED = "truncated"
    BLOCKED = "blocked"
    MALFORMED_TOOL_CALL = "malformed_tool_call"
    UNSPECIFIED = "unspecified"


class LlmType(StrEnum):
    """Wire family of a provider."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    GEMINI = "gemini"
    UNSUPPORTED = "unsupported"


SECRET_KEYS = frozenset(
    {"api_key", "apikey", "authorization", "credential", "credentials", "password", "secret", "token"}
)
"""Keys (any case, any depth) that never enter a stored or logged selection or configuration (design: security)."""


def strip_secrets(value: JsonValue) -> JsonValue:
    """Copy `value` without the entries whose keys are in `SECRET_KEYS`, at any depth."""
    if isinstance(value, Mapping):
        return {k: strip_secrets(v) for k, v in value.items() if str(k).lower() not in SECRET_KEYS}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [strip_secrets(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value


@dataclass(frozen=True, slots=True)
class ModelSelection:
    """A model and its parameters.

    Attributes:
        provider: Name of a registered provider.
        name: The model's bare name, as its provider knows it.
        params: Parameters, validated against the catalogue or by the provider's adapter. Read-only.
        attempts: Tries of one round, over the policies' `attempts`; `None` inherits.

    Raises:
        LlmSetupError: Blank provider or name, `attempts` below 1, or a secret among the parameters.
    """

    provider: str
    name: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    attempts: int | None = None
    id: str = field(init=False, repr=False, compare=False)
    """`provider:name`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.provider}:{self.name}")
        if not self.provider.strip() or not self.name.strip():
            raise LlmSetupError('A model selection needs a provider and a name, written "provider:name".')
        if self.attempts is not None and self.attempts < 1:
            raise LlmSetupError(f"attempts of {self.id} must be at least 1.", model=self.id)
        if strip_secrets(dict(self.params)) != dict(self.params):
            raise LlmSetupError(
                f"The parameters of {self.id} hold a secret: give credentials to the provider's adapter instead.",
                model=self.id,
            )
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))

    def __hash__(self) -> int:
        return hash(self.id)

    @classmethod
    def parse(cls, value: ModelSelection | str) -> ModelSelection:
        """Accept `"provider:name"` or a selection.

        Raises:
            LlmSetupError: The text has no `provider:` in front.
        """
        return value if isinstance(value, ModelSelection) else _parsed(value)

    def to_json(self) -> JsonObject:
        """As plain JSON, as stored."""
        data: JsonObject = {"provider": self.provider, "name": self.name}
        if self.params:
            data["params"] = dict(self.params)
        if self.attempts is not None:
            data["attempts"] = self.attempts
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSelection:
        """From `to_json`."""
        return cls(data["provider"], data["name"], data.get("params") or {}, data.get("attempts"))


@lru_cache(maxsize=256)
def _parsed(text: str) -> ModelSelection:
    """Flows name their model anew in every turn, and nearly always the same one."""
    provider, colon, name = text.partition(":")
    if not colon:
        raise LlmSetupError(f'{text!r} names no provider: write "provider:name", for example "openai:{text}".')
    return ModelSelection(provider.strip(), name.strip())


class ToolSchema(msgspec.Struct, frozen=True):
    """What a model is told of a tool: `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: JsonObject


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, `None` for no limit. The loop enforces all but `connect`, which only an adapter can see."""

    connect: float | None = None
    first_token: float | None = None
    idle: float | None = None
    attempt: float | None = None


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a model call.

    Attributes:
        selection: Model and parameters (with `max_tokens` already raised where the policy asked for it).
        system: System prompt, or `None`.
        messages: The history, provider-neutral, every call with its result.
        tools: Tools the model may call.
        output_schema: JSON schema the reply must match, or `None` for text.
        deadlines: See `Deadlines`.
        conversation: Stable, opaque id of the conversation, for caches and traces of the adapter.
    """

    selection: ModelSelection
    messages: Sequence[Message]
    system: str | None = None
    tools: Sequence[ToolSchema] = ()
    output_schema: JsonObject | None = None
    deadlines: Deadlines = Deadlines()
    conversation: str = ""


class TextDelta(msgspec.Struct, frozen=True):
    """More text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More reasoning text."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A tool call begins. `index` tells the calls of one reply apart; `id` may be empty if the provider gives none."""

    index: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text."""

    index: int
    args: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """A call's arguments are complete. `args`, if not `None`, replaces what the deltas said (text or object)."""

    index: int
    args: str | JsonObject | None = None


class FileEvent(msgspec.Struct, frozen=True):
    """A file the model made, whole."""

    file: FilePart


class UsageEvent(msgspec.Struct, frozen=True):
    """Tokens of this attempt so far; the last one counts."""

    usage: Usage


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """The model finished. A stream that ends without it is broken.

    Attributes:
        stop: Normalised reason.
        raw: The provider's own word.
        details: Refusal text, safety ratings, and whatever else the provider said, as JSON. Keys the loop reads:
            `refusal` (text), `category`, `safety_ratings`, `block_reason` (one of the reasons of `LlmBlockedContext`).
        provider_data: Opaque JSON to keep with the message for the same provider.
        model: The name the provider says answered, if it says.
    """

    stop: StopReason
    raw: str | None = None
    details: JsonObject = {}
    provider_data: JsonObject | None = None
    model: str | None = None


ModelEvent: TypeAlias = (
    TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd | FileEvent | UsageEvent | Finish
)


@runtime_checkable
class ModelGateway(Protocol):
    """What the loop needs from a model provider.

    A gateway makes exactly one call and never retries; it honours cancellation at every await; it raises
    `ModelInvocationError` or `ModelTimeoutError` for ordinary failures, `PromptBlockedError` when the provider refuses
    the prompt, and `LlmSetupError` for configuration and tool binding.
    """

    def stream(self, request: ModelRequest) -> AbstractAsyncContextManager[AsyncIterator[ModelEvent]]:
        """Open one attempt. Leaving the context closes the connection; the iterator ends after `Finish`."""
        ...

    def validate(self, selection: ModelSelection) -> None:
        """Check model and parameters without any I/O.

        Raises:
            LlmSetupError: Unknown model, illegal parameter, missing capability or credentials.
        """
        ...


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply that has not been accepted yet: what `check_response` judges.

    Attributes:
        text: All text.
        reasoning: Visible reasoning.
        tool_calls: Calls as proposed; a call whose arguments are not a JSON object has them as raw text.
        object: The parsed output where the stage has an output schema and the text is JSON.
        files: Files the model made.
        stop: Normalised stop reason.
        raw_reason: The provider's word for it.
        details: See `Finish.details`.
        truncated: Whether the output cap was hit.
        usage: Tokens of this attempt, as far as known.
        provider: Name of the provider.
        model: Bare name of the model.
        provider_data: See `Finish.provider_data`.
    """

    text: str
    stop: StopReason
    provider: str
    model: str
    reasoning: tuple[ReasoningPart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    object: JsonValue = None
    files: tuple[FilePart, ...] = ()
    raw_reason: str | None = None
    details: Mapping[str, Any] = {}
    usage: Usage = Usage()
    provider_data: JsonObject | None = None

    @property
    def truncated(self) -> bool:
        """Whether the reply hit the output cap."""
        return self.stop is StopReason.TRUNCATED


@dataclass(frozen=True, slots=True)
class _Stop:
    category: StopReason
    raw: str | None


def model_stop_reason(candidate: Candidate) -> _Stop:
    """Category and raw reason of a candidate's stop, as `.category` and `.raw`."""
    return _Stop(candidate.stop, candidate.raw_reason)
