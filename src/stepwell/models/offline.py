"""The bundled offline model: rules, no weights, no network.

It exists so that a conversation can be tried before any key is there, in demos and in tests. It understands typed
English to the extent that a tool's schema says what to look for, and it is honest about what it is when asked. The
same request always gets the same reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from typing import Any

import anyio.lowlevel
import msgspec

from stepwell._clock import Clock, SystemClock
from stepwell.errors import LlmSetupError
from stepwell.messages import Usage

from ._offline.dialogue import Reply, decide
from ._types import (
    Finish,
    ModelEvent,
    ModelRequest,
    ModelSelection,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageEvent,
)

__all__ = ["OfflineModel"]

_PARAMS = {"max_tokens": int, "today": str, "word_delay": (int, float)}


class OfflineModel:
    """A gateway that answers by rules; register it as the provider `offline` and select `"offline:rules"`.

    What it does, in this order: it fills an output schema from the text; it calls the tool that fits what the user
    said, with what the text gives for its parameters; it says in its own words what a tool answered; it asks for the
    first thing that is missing; it makes small talk. Of a system prompt it uses the date ("Today is 2026-05-01") and
    the lines `Greeting: ...` and `Ask next: ...`, which it says as they are.

    Token counts are an estimate: a quarter of the characters.

    Parameters of a selection: `max_tokens` (the reply is cut there, as real models do), `today` (ISO date) and
    `word_delay` (seconds between words).

    Args:
        today: The date it takes for today where the system prompt names none; default: the clock's, in UTC.
        word_delay: Seconds between the words of a streamed reply.
        clock: Where the time comes from.
    """

    name = "offline"
    """The name it is registered under."""

    def __init__(self, *, today: date | None = None, word_delay: float = 0.0, clock: Clock | None = None) -> None:
        self._today = today
        self._word_delay = word_delay
        self._clock = clock or SystemClock()

    def validate(self, selection: ModelSelection) -> None:
        """Check model name and parameters.

        Raises:
            LlmSetupError: The name is not `rules`, or a parameter is unknown or wrong.
        """
        if selection.name != "rules":
            raise LlmSetupError(f'The offline provider has one model: select "{selection.provider}:rules".')
        for name, value in selection.params.items():
            if name not in _PARAMS or isinstance(value, bool) or not isinstance(value, _PARAMS[name]):
                raise LlmSetupError(
                    f"The offline model does not take {name}={value!r}: it knows max_tokens (a positive integer), "
                    "today (an ISO date) and word_delay (seconds).",
                    model=selection.id,
                )
        if selection.params.get("max_tokens", 1) < 1 or selection.params.get("word_delay", 0) < 0:
            raise LlmSetupError("max_tokens must be positive and word_delay not negative.", model=selection.id)
        _date(selection)

    def require(self, selection: ModelSelection, capabilities: Iterable[str]) -> None:
        """Check capabilities: it has `tools` and `structured_output`.

        Raises:
            LlmSetupError: Another one is required.
        """
        missing = sorted(set(capabilities) - {"tools", "structured_output"})
        if missing:
            raise LlmSetupError(
                f"The offline model has no {' and no '.join(missing)}: select a real model.", model=selection.id
            )

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncGenerator[AsyncIterator[ModelEvent]]:
        """Open one attempt; every event is a point of cancellation.

        Raises:
            LlmSetupError: See `validate`.
        """
        self.validate(request.selection)
        events = self._events(request)
        try:
            yield events
        finally:
            await events.aclose()

    async def _events(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        params: Mapping[str, Any] = request.selection.params
        now = datetime.fromtimestamp(self._clock.time(), UTC).date()
        reply = decide(request, _date(request.selection) or self._today or now)
        delay = float(params.get("word_delay", self._word_delay))
        limit = params.get("max_tokens")
        spent = 0
        cut = False
        for event, cost in _pieces(reply, f"call_{len(request.messages)}"):
            if delay:
                await self._clock.sleep(delay)
            await anyio.lowlevel.checkpoint()
            if limit is not None and spent + cost > limit:
                cut = True
                break
            spent += cost
            yield event
        yield UsageEvent(Usage(input=_input_tokens(request), output=max(1, spent)))
        done = StopReason.TOOL_CALLS if reply.call else StopReason.COMPLETE
        yield Finish(stop=StopReason.TRUNCATED if cut else done, raw="length" if cut else "rules")


def _date(selection: ModelSelection) -> date | None:
    given = selection.params.get("today")
    if given is None:
        return None
    try:
        return date.fromisoformat(given)
    except ValueError:
        raise LlmSetupError(f"today={given!r} is not an ISO date, such as 2026-05-01.", model=selection.id) from None


def _pieces(reply: Reply, call_id: str) -> Iterator[tuple[ModelEvent, int]]:
    """The reply's events with their cost in tokens, word by word."""
    if reply.call is None:
        for match in re.finditer(r"\s*\S+\s*", reply.text):
            yield TextDelta(match.group()), _tokens(match.group())
        return
    args = json.dumps(reply.call.args, ensure_ascii=False)
    yield ToolCallStart(0, call_id, reply.call.name), _tokens(reply.call.name)
    for at in range(0, len(args), 24):
        yield ToolCallDelta(0, args[at : at + 24]), _tokens(args[at : at + 24])
    yield ToolCallEnd(0), 0


def _tokens(text: str) -> int:
    return -(-len(text) // 4)


def _input_tokens(request: ModelRequest) -> int:
    encoder = msgspec.json.Encoder(enc_hook=str)
    sizes = [len(encoder.encode(item)) for item in (*request.messages, *request.tools)]
    return max(1, (len(request.system or "") + sum(sizes)) // 4)
