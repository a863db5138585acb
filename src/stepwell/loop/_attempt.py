"""One attempt: a stream of events becomes a candidate."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from stepwell.errors import ModelInvocationError, ModelTimeoutError
from stepwell.messages import FilePart, ReasoningPart, ToolCall, Usage
from stepwell.models import (
    Candidate,
    FileEvent,
    Finish,
    ModelGateway,
    ModelRequest,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageEvent,
)

from ._host import LoopHost, LoopObserver
from ._watch import Watchdog

__all__ = ["Attempt"]


class _Call:
    """A call while it is being streamed."""

    __slots__ = ("args", "id", "name", "whole")

    def __init__(self, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self.args: list[str] = []
        self.whole: Any = None

    def parsed(self) -> Any:
        """The arguments as an object, or the raw text if they are not one (empty text is no arguments)."""
        value: Any = "".join(self.args) if self.whole is None else self.whole
        if not isinstance(value, str):
            return value
        if not value.strip():
            return {}
        try:
            data = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return value
        return data if isinstance(data, dict) else value  # pyright: ignore[reportUnknownVariableType]


class Attempt:
    """Collects one attempt. What arrived before a failure stays readable, above all the usage."""

    __slots__ = ("_calls", "_files", "_reasoning", "_text", "finish", "held", "usage")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._files: list[FilePart] = []
        self.finish: Finish | None = None
        self.usage: Usage | None = None
        self.held: list[TextDelta | ReasoningDelta] = []

    async def run(self, host: LoopHost, gateway: ModelGateway, request: ModelRequest, live: bool, hold: bool) -> None:
        """Stream until `Finish`.

        Args:
            host: For clock and observer.
            gateway: Whom to ask.
            request: What.
            live: Show deltas as they come.
            hold: Keep them, to be shown by `release`.

        Raises:
            ModelTimeoutError: A deadline of the request passed.
            ModelInvocationError: The stream ended without a finish.
            Exception: Whatever the gateway raises.
        """
        observer = host.observer
        text = self._text
        with Watchdog(host.clock, request.deadlines) as watchdog:
            alive = watchdog.alive
            async with gateway.stream(request) as events:
                async for event in events:
                    alive()
                    if type(event) is TextDelta:
                        text.append(event.text)
                        if live:
                            observer.text(event.text)
                        elif hold:
                            self.held.append(event)
                    else:
                        # Not left at `Finish`: an iterator that is run to its end needs no task of its own to be closed.
                        self._other(event, observer, live, hold)
        if watchdog.expired and self.finish is None:
            limit = {
                "attempt": request.deadlines.attempt,
                "first_token": request.deadlines.first_token,
                "idle": request.deadlines.idle,
            }[cast("Any", watchdog.expired)]
            raise ModelTimeoutError(
                f"{request.selection.id} passed the {watchdog.expired} deadline of {limit:g} s: raise "
                f"it in the call policy if that is normal for this model.",
                watchdog.expired,
                stage=host.stage_id,
                model=request.selection.id,
            )
        if self.finish is None:
            raise ModelInvocationError(
                f"The stream of {request.selection.id} ended without a finish: the reply is not whole.",
                stage=host.stage_id,
                model=request.selection.id,
            )

    def _other(self, event: Any, observer: LoopObserver, live: bool, hold: bool) -> None:
        match event:
            case ReasoningDelta():
                self._reasoning.append(event.text)
                if live:
                    observer.reasoning(event.text)
                elif hold:
                    self.held.append(event)
            case ToolCallStart():
                self._calls[event.index] = _Call(event.id, event.name)
                if live:
                    observer.tool_input(event.index, event.id, event.name, "")
            case ToolCallDelta():
                call = self._calls.setdefault(event.index, _Call("", ""))
                call.args.append(event.args)
                if live:
                    observer.tool_input(event.index, call.id, call.name, event.args)
            case ToolCallEnd():
                if event.args is not None:
                    self._calls.setdefault(event.index, _Call("", "")).whole = event.args
            case FileEvent():
                self._files.append(event.file)
            case UsageEvent():
                self.usage = event.usage
            case Finish():
                self.finish = event
            case _:
                raise ModelInvocationError(f"The gateway sent {type(event).__name__}, which is not a model event.")

    def release(self, observer: LoopObserver) -> None:
        """Show what was held, part by part."""
        for event in self.held:
            if type(event) is TextDelta:
                observer.text(event.text)
            else:
                observer.reasoning(event.text)
        self.held.clear()

    def candidate(self, request: ModelRequest) -> Candidate:
        """The whole reply. Only after `run` returned."""
        finish = cast("Finish", self.finish)
        calls = tuple(
            ToolCall(call.id, call.name, call.parsed()) for _, call in sorted(self._calls.items()) if call.name
        )
        reasoning = "".join(self._reasoning)
        stop = finish.stop
        if stop is StopReason.COMPLETE and calls:
            stop = StopReason.TOOL_CALLS
        return Candidate(
            text="".join(self._text),
            stop=stop,
            provider=request.selection.provider,
            model=request.selection.name,
            reasoning=(ReasoningPart(reasoning),) if reasoning else (),
            tool_calls=calls,
            files=tuple(self._files),
            raw_reason=finish.raw,
            details=finish.details,
            usage=self.usage or Usage(),
            provider_data=finish.provider_data,
        )
