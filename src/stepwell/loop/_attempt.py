"""One attempt: a stream of events becomes a candidate."""

from __future__ import annotations

from typing import Any

import msgspec
from anyio.lowlevel import checkpoint_if_cancelled

from stepwell._json import is_text_clean
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

from ._host import LoopHost, LoopObserver, StreamMode
from ._watch import Watchdog

__all__ = ["Attempt"]


UNKNOWN = Usage()
"""Of a provider that did not report it."""


class _Call:
    """A call while it is being streamed."""

    __slots__ = ("args", "id", "name", "whole")

    def __init__(self, call: str, name: str) -> None:
        self.id = call
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
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return value
        return data if isinstance(data, dict) else value  # pyright: ignore[reportUnknownVariableType]


class Attempt:
    """Collects one attempt. What arrived before a failure stays readable, above all the usage.

    Args:
        mode: `live` shows deltas as they come, `held` keeps them until `release`, `off` shows nothing.
    """

    __slots__ = ("_calls", "_files", "_halves", "_held", "_live", "_off", "_reasoning", "_text", "finish", "usage")

    def __init__(self, mode: StreamMode) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._files: list[FilePart] = []
        self._held: list[TextDelta | ReasoningDelta] = []
        self._halves: dict[str | int, str] = {}
        self._off = mode == "off"
        self._live = mode == "live"
        self.finish: Finish | None = None
        self.usage: Usage | None = None

    async def run(self, host: LoopHost, gateway: ModelGateway, request: ModelRequest) -> None:
        """Stream until the events end.

        Raises:
            ModelTimeoutError: A deadline of the request passed.
            ModelInvocationError: The stream ended without a finish.
            Exception: Whatever the gateway raises.
        """
        observer = host.observer
        text = self._text
        halves = self._halves
        shown = False  # live, and something that is not blank came
        now = host.clock.monotonic
        with Watchdog(host.alarm, request.deadlines) as watchdog:
            async with gateway.stream(request) as events:
                async for event in events:
                    watchdog.last = now()
                    if type(event) is TextDelta:
                        said = event.text
                        if halves or not said.isascii():
                            said = self._mend("text", said)
                        text.append(said)
                        if shown:
                            observer.text(said)
                        else:
                            shown = self._first(TextDelta(said), observer)
                    else:
                        # Not left at `Finish`: an iterator that is run to its end needs no task to be closed.
                        shown = self._other(event, observer, shown)
        if self.finish is not None:
            return
        if watchdog.expired:
            await checkpoint_if_cancelled()  # a scope that was cancelled in the same moment counts more
            limit = getattr(request.deadlines, watchdog.expired)
            raise ModelTimeoutError(
                f"{request.selection.id} passed the {watchdog.expired} deadline of {limit:g} s: raise it in the call "
                "policy if that is normal for this model.",
                watchdog.expired,
                stage=host.stage_id,
                model=request.selection.id,
            )
        raise ModelInvocationError(
            f"The stream of {request.selection.id} ended without a finish: the reply is not whole.",
            stage=host.stage_id,
            model=request.selection.id,
        )

    def _first(self, event: TextDelta | ReasoningDelta, observer: LoopObserver) -> bool:
        """A delta while nothing is shown yet; returns whether something is now.

        Blank deltas wait for one that is not: an attempt that says nothing must not supersede what is shown.
        """
        if self._off:
            return False
        self._held.append(event)
        if not self._live or not event.text.strip():
            return False
        self.release(observer)
        return True

    def _other(self, event: Any, observer: LoopObserver, shown: bool) -> bool:
        """Any event but text; returns whether something is shown now."""
        kind = type(event)  # pyright: ignore[reportUnknownVariableType]
        if kind is Finish:  # the one event besides text that every reply has
            self.finish = event
        elif kind is ReasoningDelta:
            thought = self._mend("reasoning", event.text)
            self._reasoning.append(thought)
            if not shown:
                return self._first(ReasoningDelta(thought), observer)
            observer.reasoning(thought)
        elif kind is ToolCallStart:
            self._calls[event.index] = _Call(event.id, event.name)
            return self._input(event.index, "", observer)
        elif kind is ToolCallDelta:
            args = self._mend(event.index, event.args)
            self._calls.setdefault(event.index, _Call("", "")).args.append(args)
            return self._input(event.index, args, observer)
        elif kind is ToolCallEnd:
            if event.args is not None:
                self._calls.setdefault(event.index, _Call("", "")).whole = event.args
        elif kind is FileEvent:
            self._files.append(event.file)
        elif kind is UsageEvent:
            self.usage = event.usage
        else:
            raise ModelInvocationError(f"The gateway sent {type(event).__name__}, which is not a model event.")
        return shown

    def _mend(self, lane: str | int, text: str) -> str:
        """The text as valid Unicode, which is what can be stored and sent.

        Some providers cut a surrogate pair in two: its first half waits for the second. Any other half is replaced.
        """
        if lane in self._halves:
            text = self._halves.pop(lane) + text
        if is_text_clean(text):
            return text
        if "\ud800" <= text[-1] <= "\udbff":
            self._halves[lane] = text[-1]
            text = text[:-1]
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _input(self, index: int, delta: str, observer: LoopObserver) -> bool:
        if self._live:
            if self._held:
                self.release(observer)
            call = self._calls[index]
            observer.tool_input(index, call.id, call.name, delta)
        return self._live

    def release(self, observer: LoopObserver) -> None:
        """Show what was held, part by part."""
        for event in self._held:
            if type(event) is TextDelta:
                observer.text(event.text)
            else:
                observer.reasoning(event.text)
        self._held.clear()

    def candidate(self, request: ModelRequest) -> Candidate:
        """The whole reply. Only after `run` returned."""
        finish, selection = self.finish, request.selection
        assert finish is not None
        stop = finish.stop
        calls: tuple[ToolCall, ...] = ()
        if self._calls:
            ordered = [call for _, call in sorted(self._calls.items()) if call.name]
            calls = tuple([ToolCall(call.id, call.name, call.parsed()) for call in ordered])
            if stop is StopReason.COMPLETE and calls:
                stop = StopReason.TOOL_CALLS
        reasoning = "".join(self._reasoning)
        return Candidate(
            text="".join(self._text),
            stop=stop,
            provider=selection.provider,
            model=selection.name,
            reasoning=(ReasoningPart(reasoning),) if reasoning else (),
            tool_calls=calls,
            files=tuple(self._files),
            raw_reason=finish.raw,
            details=finish.details,
            usage=self.usage or UNKNOWN,
            provider_data=finish.provider_data,
        )
