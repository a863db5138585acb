"""The event stream of a turn, and the view of what a person should see now.

One stream feeds the caller, logging, telemetry and tests. Events are frozen and plain; `to_json` in `cli` and `server`
is `msgspec.to_builtins`. A delta costs an append to the view and, if somebody listens, one small struct.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from stepwell.loop import Verdict
from stepwell.messages import JsonValue, ToolCall, ToolOutcome, ToolResult, Usage
from stepwell.models import ModelSelection

__all__ = [
    "Accepted",
    "AttemptStarted",
    "CandidateClassified",
    "Committed",
    "HookCalled",
    "Listener",
    "ReasoningDelta",
    "StageEntered",
    "Superseded",
    "TextDelta",
    "ToolFinished",
    "ToolInputDelta",
    "ToolProgress",
    "ToolStarted",
    "TurnEvent",
    "TurnFinished",
    "TurnStarted",
    "TurnStream",
    "UnitStarted",
    "Warned",
]


class _Event(msgspec.Struct, frozen=True, tag_field="type", tag=lambda name: name):
    pass


class TurnStarted(_Event, frozen=True):
    """The opening commit is done."""

    session: str
    run: str
    invocation: str
    flow: str


class StageEntered(_Event, frozen=True):
    """The cursor, or a visit, is in another stage."""

    stage: str


class UnitStarted(_Event, frozen=True):
    """A unit begins; `kind` is `reply`, `tools`, `logic` or `run`."""

    step: str
    stage: str
    kind: str


class AttemptStarted(_Event, frozen=True):
    """An attempt begins. It shows nothing until its first delta."""

    step: str
    attempt: int
    provider: str
    model: str


class TextDelta(_Event, frozen=True):
    """More text of a step."""

    step: str
    text: str


class ReasoningDelta(_Event, frozen=True):
    """More reasoning of a step."""

    step: str
    text: str


class ToolInputDelta(_Event, frozen=True):
    """More of a proposed call's arguments; provisional."""

    step: str
    index: int
    call: str
    name: str
    delta: str


class Superseded(_Event, frozen=True):
    """Drop everything that step showed so far."""

    step: str


class CandidateClassified(_Event, frozen=True):
    """An attempt ended with this verdict. `usage` is `None` if it was not reported."""

    step: str
    attempt: int
    verdict: Verdict
    stop: str | None = None
    detail: str | None = None
    usage: Usage | None = None


class Accepted(_Event, frozen=True):
    """What the step shows now is final; `text` is all of it."""

    step: str
    text: str


class HookCalled(_Event, frozen=True):
    """A failure hook was asked."""

    step: str
    hook: str
    handled: bool


class ToolStarted(_Event, frozen=True):
    """A handler begins."""

    step: str
    call: str
    name: str
    args: Any = None


class ToolProgress(_Event, frozen=True):
    """A handler reports progress."""

    step: str
    call: str
    name: str
    value: Any = None


class ToolFinished(_Event, frozen=True):
    """A call has its result."""

    step: str
    call: str
    name: str
    outcome: ToolOutcome
    content: Any = None


class Committed(_Event, frozen=True):
    """A unit is in the store."""

    step: str
    revision: int


class Warned(_Event, frozen=True):
    """A line of the session log, level warning."""

    text: str
    data: Any = None


class TurnFinished(_Event, frozen=True):
    """The last event; `result` is the turn's `TurnResult` as JSON."""

    result: Any


TurnEvent: TypeAlias = (
    TurnStarted
    | StageEntered
    | UnitStarted
    | AttemptStarted
    | TextDelta
    | ReasoningDelta
    | ToolInputDelta
    | Superseded
    | CandidateClassified
    | Accepted
    | HookCalled
    | ToolStarted
    | ToolProgress
    | ToolFinished
    | Committed
    | Warned
    | TurnFinished
)

Listener: TypeAlias = Callable[[TurnEvent], None]
"""Called in the loop for every event but deltas; must not raise or wait."""

MAX_BUFFERED = 10_000
"""Events waiting for a slow reader before adjacent deltas of one step are joined: the text then bounds the memory."""


class TurnStream:
    """Implements `LoopObserver` for a turn: keeps the view, tells listeners, and feeds at most one reader."""

    def __init__(self, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        self._heard = bool(listeners)  # whether anybody would see an event
        self._buffer: deque[TurnEvent] | None = None
        self._wake: asyncio.Event | None = None
        self._closed = False
        self._shown: dict[str, list[str]] = {}
        self._step = ""
        self._fresh = True
        self._other = False  # the step shows reasoning or tool input besides text
        self._attempt = 0
        self.warnings: Callable[[str, JsonValue], None] = lambda text, data: None

    # -- reading

    def listen(self) -> None:
        """Keep events for a reader from now on."""
        if self._buffer is None:
            self._buffer = deque()
            self._wake = asyncio.Event()
            self._heard = True

    async def next(self) -> TurnEvent | None:
        """The next event; `None` after the last."""
        buffer, wake = self._buffer, self._wake
        if buffer is None or wake is None:
            return None
        while not buffer:
            if self._closed:
                return None
            wake.clear()
            await wake.wait()
        return buffer.popleft()

    def text(self, text: str) -> None:
        """See `LoopObserver`."""
        parts = self._open() if self._fresh else self._shown[self._step]
        parts.append(text)
        if self._buffer is not None:
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

    def unit(self, step: str, stage: str, kind: str) -> None:
        """A unit begins."""
        self._step = step
        self._fresh = True
        self._other = False
        self._attempt = 0
        if self._heard:
            self.emit(UnitStarted(step, stage, kind))

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
        if self._heard:
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
        if self._buffer is not None:
            self._push(event)

    def close(self) -> None:
        """No more events."""
        self._closed = True
        if self._wake is not None:
            self._wake.set()

    # -- the rest of LoopObserver

    def attempt_started(self, number: int, selection: ModelSelection) -> None:
        """See `LoopObserver`."""
        self._attempt = number
        self._fresh = True
        if self._heard:
            self.emit(AttemptStarted(self._step, number, selection.provider, selection.name))

    def reasoning(self, text: str) -> None:
        """See `LoopObserver`."""
        self._open_other()
        if self._buffer is not None:
            self._push(ReasoningDelta(self._step, text))

    def tool_input(self, index: int, call: str, name: str, delta: str) -> None:
        """See `LoopObserver`."""
        self._open_other()
        if self._buffer is not None:
            self._push(ToolInputDelta(self._step, index, call, name, delta))

    def attempt_ended(self, verdict: Verdict, usage: Usage | None, stop: str | None, detail: str | None) -> None:
        """See `LoopObserver`."""
        if verdict != "accepted":
            self._fresh = True  # what it showed is dead: whatever comes next replaces it
        if self._heard:
            self.emit(CandidateClassified(self._step, self._attempt, verdict, stop, detail, usage))

    def hook_called(self, hook: str, handled: bool) -> None:
        """See `LoopObserver`."""
        self.emit(HookCalled(self._step, hook, handled))

    def tool_started(self, call: ToolCall) -> None:
        """See `LoopObserver`."""
        if self._heard:
            self.emit(ToolStarted(self._step, call.id, call.name, call.args))

    def tool_progress(self, call: ToolCall, value: JsonValue) -> None:
        """See `LoopObserver`."""
        self.emit(ToolProgress(self._step, call.id, call.name, value))

    def tool_finished(self, call: ToolCall, result: ToolResult) -> None:
        """See `LoopObserver`."""
        if self._heard:
            self.emit(ToolFinished(self._step, call.id, call.name, result.outcome, result.content))

    def warn(self, text: str, data: JsonValue = None) -> None:
        """See `LoopObserver`."""
        self.warnings(text, data)
        self.emit(Warned(text, data))

    # -- inside

    def _open(self) -> list[str]:
        """The first output of an attempt: it supersedes what an earlier one showed."""
        self._fresh = False
        if self.shown:
            self.emit(Superseded(self._step))
        self._other = False
        parts: list[str] = []
        self._shown[self._step] = parts
        return parts

    def _open_other(self) -> None:
        if self._fresh:
            self._open()
        self._other = True

    def _push(self, event: TurnEvent) -> None:
        buffer = self._buffer
        assert buffer is not None
        if len(buffer) >= MAX_BUFFERED and type(event) is TextDelta:
            last = buffer[-1]
            if type(last) is TextDelta and last.step == event.step:
                buffer[-1] = TextDelta(event.step, last.text + event.text)
                return
        buffer.append(event)
        if len(buffer) == 1 and self._wake is not None:
            self._wake.set()
