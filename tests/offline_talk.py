"""Talking to the offline model without an engine: requests made by hand, replies read back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Any

from stepwell.messages import AssistantMessage, DirectMessage, Message, ToolCall, ToolResult, UserMessage
from stepwell.models import ModelRequest, ModelSelection, ToolSchema
from stepwell.models._offline.dialogue import decide
from stepwell.models._offline.language import Reading
from stepwell.models._offline.slots import Known, fill, slots_of

TODAY = date(2026, 11, 30)
SELECTION = ModelSelection("offline", "rules")


def tool(name: str, description: str = "", required: Sequence[str] = (), /, **properties: Any) -> ToolSchema:
    """A tool; a property is a schema, or its description alone for a text."""
    parts = {k: {"type": "string", "description": v} if isinstance(v, str) else v for k, v in properties.items()}
    return ToolSchema(name, description, {"type": "object", "properties": parts, "required": list(required)})


def user(text: str, by: Any = "user") -> UserMessage:
    return UserMessage(content=text, by=by)


def called(name: str, result: Any, /, *, outcome: Any = "ok", **args: Any) -> tuple[Message, Message]:
    """A call and its result."""
    return (
        AssistantMessage(calls=(ToolCall("c", name, args),)),
        ToolResult(call="c", name=name, content=result, outcome=outcome),
    )


def request(
    *messages: Message | str, tools: Sequence[ToolSchema] = (), system: str = "", schema: Any = None
) -> ModelRequest:
    """A request; a text is the user's, a text that begins with `<` was shown to them."""

    def message(item: Message | str) -> Message:
        if isinstance(item, str):
            return DirectMessage(text=item[1:].strip()) if item.startswith("<") else user(item)
        return item

    history = [message(item) for item in messages]
    return ModelRequest(selection=SELECTION, messages=history, tools=tools, system=system, output_schema=schema)


def answer(*messages: Message | str, **kwargs: Any) -> Any:
    """What it does: the text, or the call as `(name, arguments)`."""
    reply = decide(request(*messages, **kwargs), TODAY)
    return (reply.call.name, reply.call.args) if reply.call else reply.text


def filled(text: str, expected: str = "", phrases: Sequence[str] = (), /, **properties: Any) -> dict[str, Any]:
    """What a text gives for the slots of one object, all required."""
    schema = tool("t", "", list(properties), **properties).parameters
    found = fill(slots_of(schema), Reading(text, TODAY), Known(expected, tuple(phrases)))
    return {name: one.value for name, one in found.items()}
