"""What a hook or tool handler may return to say what happens next.

Outcomes are immutable values; each `with_...` returns a new one. A string is always text for the user or the model,
never a route: by name, only `go("Name")` routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Self, TypeAlias
from uuid import uuid4

import msgspec

from .messages import JsonValue, Message
from .models import ModelSelection
from .models.catalog import ModelCatalog

__all__ = [
    "Direct",
    "DirectTo",
    "Finish",
    "Go",
    "Outcome",
    "RequestKind",
    "RetryWithModel",
    "Stay",
    "Suspend",
    "SuspendRequest",
    "direct",
    "direct_to",
    "finish",
    "go",
    "retry_with_model",
    "stay",
    "suspend",
]

Target: TypeAlias = "type[Any] | str"
RequestKind: TypeAlias = Literal["approval", "question", "client_tool"]
Cleanup: TypeAlias = Callable[[], Awaitable[object]]

_NOT_ROUTE = frozenset({"feedback", "messages", "cleanup"})

VALIDATED = "input validated"
"""What the model is told of a call whose handler gives no feedback of its own."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all outcomes; made by the functions below, not by hand.

    Attributes:
        feedback: What the model is told as the call's result (tool handlers only).
        state: Patch of the destination's state, top-level keys replaced.
        prompt: The destination's `_prompt`.
        message: A message for the destination's memory, after the tool results.
        content_type: MIME type of the reply.
        messages: Attachments for the current history, model-visible (tool handlers only).
        cleanup: Awaited after the model has seen the attachments, and on every error path (tool handlers only).
    """

    feedback: JsonValue = None
    state: Mapping[str, Any] | None = None
    prompt: str | None = None
    message: Message | str | None = None
    content_type: str | None = None
    messages: tuple[Message | str, ...] = ()
    cleanup: tuple[Cleanup, ...] = ()

    def with_tool_feedback(self, text: JsonValue) -> Self:
        """Tell the model this as the call's result."""
        return msgspec.structs.replace(self, feedback=text)

    def with_state(self, patch: Mapping[str, Any]) -> Self:
        """Save this in the destination's state (each top-level key given is replaced)."""
        return msgspec.structs.replace(self, state={**(self.state or {}), **patch})

    def with_prompt(self, text: str) -> Self:
        """Give the destination this prompt, unless its `get_prompt` says otherwise."""
        return msgspec.structs.replace(self, prompt=text)

    def with_message(self, message: Message | str) -> Self:
        """Put a message into the destination's memory, after the tool results."""
        return msgspec.structs.replace(self, message=message)

    def with_content_type(self, content_type: str) -> Self:
        """Set the MIME type of the reply."""
        return msgspec.structs.replace(self, content_type=content_type)

    def with_messages(self, *messages: Message | str) -> Self:
        """Attach messages to the current history, after the tool results, for the model to see."""
        return msgspec.structs.replace(self, messages=self.messages + messages)

    def with_cleanup(self, fn: Cleanup) -> Self:
        """Await `fn` once the model has seen the attachments, and on every error path."""
        return msgspec.structs.replace(self, cleanup=(*self.cleanup, fn))

    @property
    def route(self) -> tuple[Any, ...]:
        """What makes two outcomes of one batch the same: everything but feedback, attachments and cleanup."""
        return (type(self), *(getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_ROUTE))


class Go(Outcome, frozen=True):
    """Move the cursor and continue in this turn."""

    target: Target


class Stay(Outcome, frozen=True):
    """Same stage; the model gets the feedback as the tool's result."""


class Direct(Outcome, frozen=True):
    """Answer from code, no further model call, cursor unchanged."""

    content: JsonValue


class DirectTo(Outcome, frozen=True):
    """Answer from code; the cursor moves for the next turn, the target does not run now."""

    target: Target
    content: JsonValue


class Finish(Outcome, frozen=True):
    """The session is completed, with this answer."""

    content: JsonValue = None


class SuspendRequest(msgspec.Struct, frozen=True):
    """What a suspended call waits for.

    Attributes:
        kind: `approval` (yes or no), `question` (a person answers in words, or however the client asks), or
            `client_tool` (the client has something to do).
        payload: JSON for whoever answers.
        expires_in: Seconds after which the call's result is `{"expired": true}`; `None`: it waits until it is answered.
        id: Names the request to whoever answers; unique in its session.
    """

    kind: RequestKind
    payload: JsonValue = None
    expires_in: float | None = None
    id: str = msgspec.field(default_factory=lambda: uuid4().hex)


class Suspend(Outcome, frozen=True):
    """The run waits until the request is answered; the answer gives the call its result."""

    request: SuspendRequest


class RetryWithModel(Outcome, frozen=True):
    """One temporary alternate model, from `on_llm_error` only."""

    selection: ModelSelection


def go(target: Target) -> Go:
    """Move the cursor to `target` (a registered class, or its id) and continue in this turn."""
    return Go(target)


def stay(feedback: JsonValue = VALIDATED) -> Stay:
    """Stay in this stage; the model gets `feedback` as the call's result. Tool handlers only."""
    return Stay(feedback=feedback)


def direct(content: JsonValue) -> Direct:
    """Answer from code without another model call; objects become JSON text. The cursor does not move."""
    return Direct(content)


def direct_to(target: Target, content: JsonValue) -> DirectTo:
    """Answer from code; `target` gets the next turn and does not run now."""
    return DirectTo(target, content)


def finish(content: JsonValue = None) -> Finish:
    """Complete the session, with this answer."""
    return Finish(content)


def suspend(request: SuspendRequest) -> Suspend:
    """Let the run wait for an answer: the turn ends as `suspended`, and `Engine.answer` goes on with it.

    The handler is not run again. What it wrote counts; the call's result comes from the stage's `on_answer`, by default
    it is the answer. Tool handlers only.
    """
    return Suspend(request)


def retry_with_model(selection: ModelSelection | str) -> RetryWithModel:
    """Go on with another model until the visit ends, one attempt per call. From `on_llm_error` only.

    Raises:
        LlmSetupError: The selection is not well formed, or the catalogue refuses it. Whether its provider is
            registered is checked by the runner.
    """
    parsed = ModelSelection.parse(selection)
    ModelCatalog.check(parsed)
    return RetryWithModel(parsed)
