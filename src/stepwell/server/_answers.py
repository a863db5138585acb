"""What is answered: the shapes of responses, and what is said of a flow."""

from __future__ import annotations

from typing import Literal

import msgspec

from stepwell.flow import FlowDefinition, LogicStep, TerminateSessionStep
from stepwell.models import ToolSchema
from stepwell.sessions import SessionSummary

__all__ = [
    "Cancelled",
    "Ended",
    "Envelope",
    "FlowInfo",
    "FlowList",
    "Health",
    "Invoked",
    "Published",
    "SessionPage",
    "StageInfo",
    "describe",
]


class StageInfo(msgspec.Struct, frozen=True):
    """A stage of a workflow.

    Attributes:
        id: Its id.
        kind: `step` (a model talks), `logic` (code only) or `end` (closes the session).
        tools: What its model may call, as far as the class says.
        dynamic_tools: Whether it may expose others while it runs.
    """

    id: str
    kind: Literal["step", "logic", "end"]
    tools: tuple[ToolSchema, ...]
    dynamic_tools: bool


class FlowInfo(msgspec.Struct, frozen=True):
    """A registered workflow. The transitions of a flow are code, so its topology is its stages and the initial one.

    Attributes:
        id: Its id.
        kind: `flow`.
        aliases: Other names it answers to.
        schema_version: Version of what it stores.
        model: Its model, `provider:name`.
        initial: The stage a new session begins in, unless its context says otherwise.
        requires_user_message: Whether a turn needs a message.
        stages: Its stages, in order of registration.
    """

    id: str
    kind: Literal["flow"]
    aliases: tuple[str, ...]
    schema_version: int
    model: str
    initial: str
    requires_user_message: bool
    stages: tuple[StageInfo, ...]


class FlowList(msgspec.Struct, frozen=True):
    """The registered workflows."""

    flows: tuple[FlowInfo, ...]


class SessionPage(msgspec.Struct, frozen=True):
    """Sessions, newest first. `next` is `after` of the next page, `null` at the end."""

    sessions: list[SessionSummary]
    next: str | None


class Cancelled(msgspec.Struct, frozen=True):
    """Whether a running turn was cancelled. `false`: there was none, or another run."""

    cancelled: bool


class Invoked(msgspec.Struct, frozen=True):
    """The run that answers an input; it has begun."""

    runId: str  # noqa: N815 - the protocol's names
    invocationId: str  # noqa: N815


class Published(msgspec.Struct, frozen=True):
    """Serials of the messages, in order."""

    serials: list[str]


class Envelope(msgspec.Struct, frozen=True, rename="camel"):
    """The answer of the older contract."""

    success: bool
    completed: bool
    message: str
    session: str | None
    content_type: str


class Ended(msgspec.Struct, frozen=True):
    """The session is gone."""

    success: bool
    session: str | None


class Health(msgspec.Struct, frozen=True):
    """`ok`."""

    status: Literal["ok"]


def describe(definition: FlowDefinition) -> FlowInfo:
    """What is said of a flow."""
    cls = definition.cls
    return FlowInfo(
        id=definition.id,
        kind="flow",
        aliases=tuple(cls.aliases),
        schema_version=cls.schema_version,
        model=f"{definition.model.provider}:{definition.model.name}",
        initial=definition.initial,
        requires_user_message=cls.requires_user_message,
        stages=tuple(
            StageInfo(
                id=stage.id,
                kind="logic"
                if issubclass(kind, LogicStep)
                else "end"
                if issubclass(kind, TerminateSessionStep)
                else "step",
                tools=stage.static,
                dynamic_tools=stage.dynamic_tools,
            )
            for kind, stage in definition.steps.items()
        ),
    )
