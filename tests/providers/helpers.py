"""What the provider tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stepwell.messages import AssistantMessage, Message, ReasoningPart, ToolCall, Usage, UserMessage
from stepwell.models import (
    FileEvent,
    Finish,
    ModelEvent,
    ModelGateway,
    ModelRequest,
    ModelSelection,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolSchema,
    UsageEvent,
)

API_KEY = "sk-not-to-be-seen-anywhere"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = ToolSchema("get_weather", "The weather of a city", CITY)
Adapters: TypeAlias = dict[str, Any]


@dataclass
class Seen:
    """What came of one attempt, put together as the loop does it."""

    events: list[ModelEvent] = field(default_factory=list)
    error: Exception | None = None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TextDelta))

    @property
    def reasoning(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, ReasoningDelta))

    @property
    def files(self) -> list[Any]:
        return [event.file for event in self.events if isinstance(event, FileEvent)]

    @property
    def usage(self) -> Usage | None:
        return next((event.usage for event in reversed(self.events) if isinstance(event, UsageEvent)), None)

    @property
    def finish(self) -> Finish:
        assert self.error is None, repr(self.error)
        assert isinstance(self.events[-1], Finish)
        assert sum(isinstance(event, Finish) for event in self.events) == 1
        return self.events[-1]

    @property
    def calls(self) -> list[tuple[str, str, Any]]:
        """Id, name and arguments of each call; the arguments as text or object, as they came."""
        starts = {event.index: event for event in self.events if isinstance(event, ToolCallStart)}
        args: dict[int, Any] = dict.fromkeys(starts, "")
        ended: set[int] = set()
        for event in self.events:
            if isinstance(event, ToolCallDelta):
                assert event.index not in ended
                args[event.index] += event.args
            elif isinstance(event, ToolCallEnd):
                ended.add(event.index)
                if event.args is not None:
                    args[event.index] = event.args
        assert ended == set(starts)
        return [(starts[index].id, starts[index].name, args[index]) for index in sorted(starts)]

    def message(self, model: str) -> AssistantMessage:
        """As it would be stored."""
        return AssistantMessage(
            id="s|t|x",
            text=self.text,
            reasoning=(ReasoningPart(self.reasoning),) if self.reasoning else (),
            calls=tuple(ToolCall(id=call, name=name, args=args) for call, name, args in self.calls),
            files=tuple(self.files),
            model=model,
            provider_data=self.finish.provider_data,
        )


def request_for(gateway: Any, name: str, messages: Sequence[Message] | None = None, **fields: Any) -> ModelRequest:
    params: Mapping[str, Any] = fields.pop("params", {})
    return ModelRequest(
        selection=ModelSelection(gateway.name, name, params),
        messages=messages if messages is not None else [UserMessage(content="hi", id="s|t|u")],
        **fields,
    )


async def attempt(gateway: ModelGateway, request: ModelRequest) -> Seen:
    seen = Seen()
    try:
        async with gateway.stream(request) as events:
            async for event in events:
                seen.events.append(event)
    except Exception as error:  # noqa: BLE001
        seen.error = error
    return seen


async def ask(gateway: Any, name: str, messages: Sequence[Message] | None = None, **fields: Any) -> Seen:
    return await attempt(gateway, request_for(gateway, name, messages, **fields))
