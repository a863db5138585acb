"""What a turn shows: the view of what a person should see now, and the events on the way to it.

A delta costs an append to the view and, for each reader, one small struct.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from stepwell.loop import StreamMode, Verdict
from stepwell.messages import JsonValue, ToolCall, ToolResult, Usage
from stepwell.models import ModelSelection

from ._events import (
    Accepted,
    AttemptStarted,
    CandidateClassified,
    HookCalled,
    Listener,
    ReasoningDelta,
    Superseded,
    TextDelta,
    ToolFinished,
    ToolInputDelta,
    ToolProgress,
    ToolStarted,
    TurnEvent,
    UnitStarted,
    Warned,
)

__all__ = ["Reader", "TurnStream"]

R = TypeVar("R", bound="EventReader")

MAX_BUFFERED = 10_000
"""Events waiting for a slow reader before adjacent deltas of one step are joined: the text then bounds the memory."""


class Reader:
    """One reader of a stream: it pulls at its own pace, and a slow one costs no more than the text."""

    __slots__ = ("_buffer", "_closed", "_wake")

    def __init__(self) -> None:
        self._buffer: deque[TurnEvent] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    @classmethod
    def closed(cls) -> Reader:
        """One that hears nothing."""
        reader = cls()
        reader.close()
        return reader

    async def next(self) -> TurnEvent | None:
        """The next event; `None` after the last."""
        while not self._buffer:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._buffer.popleft()

    def push(self, event: TurnEvent) -> None:
        """Keep an event until it is read."""
        buffer = self._buffer
        if len(buffer) >= MAX_BUFFERED and type(event) is TextDelta:
            last = buffer[-1]
            if type(last) is TextDelta and last.step == event.step:
                buffer[-1] = TextDelta(event.step, last.text + event.text)
                return
        buffer.append(event)
        if len(buffer) == 1:
            self._wake.set()

    def close(self) -> None:
        """There is no more."""
        self._closed = True
        self._wake.set()


class EventReader(Protocol):
    """Takes the events of a stream as they come."""

    def push(self, event: TurnEvent) -> None:
        """Take one. Must not wait or raise."""
        ...

    def close(self) -> None:
        """There is no more."""
        ...


class TurnStream:
    """Implements `LoopObserver` for a turn: keeps the view, tells listeners, and feeds its readers."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        self._readers: list[EventReader] = []
        self.heard = bool(listeners)  # whether anybody would see an event: else none need be made
        self._closed = False
        self._shown: dict[str, list[str]] = {}
        self._step = ""
        self._fresh = True
        self._other = False  # the step shows reasoning or tool input besides text
        self._attempt = 0
        self.warnings: Callable[[str, JsonValue], None] = lambda text, data: None

    # -- reading

    def listen(self) -> Reader:
        """A reader of everything from now on."""
        return self.add(Reader())

    def add(self, reader: R) -> R:
        """Let a reader have everything from now on."""
        if self._closed:
            reader.close()
        self._readers.append(reader)
        self.heard = True
        return reader

    def leave(self, reader: EventReader) -> None:
        """A reader wants no more events."""
        if reader in self._readers:
            self._readers.remove(reader)

    def text(self, text: str) -> None:
        """See `LoopObserver`."""
        parts = self._open() if self._fresh else self._shown[self._step]
        parts.append(text)
        if self._readers:
            self._push(TextDelta(self._step, text))

    @property
    def visible(self) -> str:
        """Everything a person should see of this turn now."""
        texts = ("".join(self._shown[step]) for step in self._shown)
        return "\n\n".join(text for text in texts if text)

    @property
    def shown(self) -> bool:
        """Whether the current step shows anything now."""
        return bool(self._shown.get(self._step)) or self._other

    # -- units

    def unit(self, step: str, stage: str, kind: str, mode: StreamMode) -> None:
        """A unit begins."""
        self._step = step
        self._fresh = True
        self._other = False
        self._attempt = 0
        if self.heard:
            self.emit(UnitStarted(step, stage, kind, mode))

    def settle(self, text: str) -> None:
        """What the unit shows from now on, whatever its attempts showed."""
        parts = self._shown.get(self._step)
        current = "".join(parts) if parts else ""
        if current != text or (self._other and self._fresh):
            self._fresh = True
            if text:
                self.text(text)
            else:
                self.blank()
        if self.heard:
            self.emit(Accepted(self._step, text))

    def blank(self) -> None:
        """Remove what the current step shows: dead text of a failure that nobody handled."""
        if self.shown:
            self.emit(Superseded(self._step))
        self._shown.pop(self._step, None)
        self._other = False

    def emit(self, event: TurnEvent) -> None:
        """Tell everybody."""
        for listener in self._listeners:
            listener(event)
        self._push(event)

    def close(self) -> None:
        """No more events."""
        self._closed = True
        for reader in self._readers:
            reader.close()

    # -- the rest of LoopObserver

    def attempt_started(self, number: int, selection: ModelSelection) -> None:
        """See `LoopObserver`."""
        self._attempt = number
        self._fresh = True
        if self.heard:
            self.emit(AttemptStarted(self._step, number, selection.provider, selection.name))

    def reasoning(self, text: str) -> None:
        """See `LoopObserver`."""
        self._open_other()
        if self._readers:
            self._push(ReasoningDelta(self._step, text))

    def tool_input(self, index: int, call: str, name: str, delta: str) -> None:
        """See `LoopObserver`."""
        self._open_other()
        if self._readers:
            self._push(ToolInputDelta(self._step, index, call, name, delta))

    def attempt_ended(self, verdict: Verdict, usage: Usage | None, stop: str | None, detail: str | None) -> None:
        """See `LoopObserver`."""
        if verdict != "accepted":
            self._fresh = True  # what it showed is dead: whatever comes next replaces it
        if self.heard:
            self.emit(CandidateClassified(self._step, self._attempt, verdict, stop, detail, usage))

    def hook_called(self, hook: str, handled: bool) -> None:
        """See `LoopObserver`."""
        self.emit(HookCalled(self._step, hook, handled))

    def tool_started(self, call: ToolCall) -> None:
        """See `LoopObserver`."""
        if self.heard:
            self.emit(ToolStarted(self._step, call.id, call.name, call.args))

    def tool_progress(self, call: ToolCall, value: JsonValue) -> None:
        """See `LoopObserver`."""
        self.emit(ToolProgress(self._step, call.id, call.name, value))

    def tool_finished(self, call: ToolCall, result: ToolResult) -> None:
        """See `LoopObserver`."""
        if self.heard:
            self.emit(ToolFinished(self._step, call.id, call.name, result.outcome, result.content))

    def warn(self, text: str, data: JsonValue = None) -> None:
        """See `LoopObserver`."""
        self.warnings(text, data)
        self.emit(Warned(text, data))

    # -- inside

    def _open(self) -> list[str]:
        """The first output of an attempt: it supersedes what an earlier one showed."""
        self._fresh = False
        step, shown = self._step, self._shown
        if shown.get(step) or self._other:
            self.emit(Superseded(step))
        self._other = False
        parts: list[str] = []
        shown[step] = parts
        return parts

    def _open_other(self) -> None:
        if self._fresh:
            self._open()
        self._other = True

    def _push(self, event: TurnEvent) -> None:
        for reader in self._readers:
            reader.push(event)
