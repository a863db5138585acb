"""A model that says what the test wrote down."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeAlias

import anyio
import anyio.lowlevel
import msgspec

from stepwell._clock import Clock, SystemClock
from stepwell.errors import LlmSetupError, ModelInvocationError, PromptBlockedError
from stepwell.messages import FilePart, JsonObject, JsonValue, Usage
from stepwell.models import (
    FileEvent,
    Finish,
    ModelEvent,
    ModelRequest,
    ModelSelection,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageEvent,
)

__all__ = ["Call", "Reply", "ScriptError", "Scripted", "ScriptedModel"]

Failure: TypeAlias = BaseException | Callable[[], BaseException]


class ScriptError(LlmSetupError, AssertionError):
    """The code under test and the script of a `ScriptedModel` do not fit: the test fails.

    It is an `LlmSetupError`, which the loop never retries and no hook handles, and the model remembers it: code that
    swallows it still fails at `ScriptedModel.assert_done`.
    """


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a scripted reply.

    Attributes:
        name: The tool's name.
        args: The arguments; sent as JSON text.
        id: The provider's call id. `None`: `call_1`, `call_2`, ... by position in the reply, so that ids repeat between
            replies, as those of some real models do.
        raw: The argument text as it is, instead of `args`: for JSON that does not parse.
        pieces: Into how many deltas the text is split, at most (a text has no more pieces than characters).
        ended: Whether the end of the call is sent; `False` for a call that is cut off.
    """

    name: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    id: str | None = None
    raw: str | None = None
    pieces: int = 3
    ended: bool = True

    def events(self, index: int) -> list[ModelEvent]:
        """What is streamed for the call at this position of the reply."""
        text = msgspec.json.encode(dict(self.args)).decode() if self.raw is None else self.raw
        events: list[ModelEvent] = [
            ToolCallStart(index, f"call_{index + 1}" if self.id is None else self.id, self.name)
        ]
        events += [ToolCallDelta(index, piece) for piece in _cut(text, self.pieces)]
        if self.ended:
            events.append(ToolCallEnd(index))
        return events


@dataclass(frozen=True, slots=True)
class _Delay:
    seconds: float

    async def wait(self, clock: Clock) -> None:
        await clock.sleep(self.seconds)


@dataclass(frozen=True, slots=True)
class _Gate:
    event: anyio.Event

    async def wait(self, clock: Clock) -> None:
        await self.event.wait()


@dataclass(frozen=True, slots=True)
class _Fail:
    error: Failure
    opening: bool = False

    def exception(self) -> BaseException:
        if isinstance(self.error, BaseException):
            return self.error.with_traceback(None)
        return self.error()


class _Stall:
    """The end of a stream that hangs."""


_Pause: TypeAlias = _Delay | _Gate
_STALL = _Stall()


@dataclass(frozen=True)
class Reply:
    """One scripted reply: output events, pauses between them, and how it ends. Immutable; one may be used many times.

    Made with the class methods, changed with the methods that return a new reply::

        Reply.text("Two rooms are free.").with_usage(120, 8)
        Reply.tool_call("search", {"city": "Rome"})
        Reply.text("I will look th").failing(after=3, status=529)

    Positions (`after=k`) count output events: text, reasoning and argument deltas, starts and ends of calls, files.
    `after=0` is before the first. A position beyond the last raises `ValueError`. Usage, where given, is reported right
    before whatever ends the stream: the finish, the failure or the stall.
    """

    outputs: tuple[ModelEvent, ...] = ()
    end: Finish | _Fail | _Stall | None = None
    usage: Usage | None = None
    pauses: tuple[tuple[int, _Pause], ...] = ()

    # -- What the model says -------------------------------------------------------------------------------------

    @classmethod
    def of(cls, *events: ModelEvent) -> Reply:
        """Exactly these events. Without a `Finish` at the end the stream is a broken one."""
        if events and isinstance(finish := events[-1], Finish):
            return cls(events[:-1], finish)
        return cls(events)

    @classmethod
    def text(cls, text: str | Iterable[str]) -> Reply:
        """Text, complete. A string is sent word by word, anything else delta by delta as given."""
        return cls(_text(text), Finish(stop=StopReason.COMPLETE, raw="stop"))

    @classmethod
    def tool_call(
        cls,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        id: str | None = None,  # noqa: A002
        raw: str | None = None,
        text: str | Iterable[str] = "",
    ) -> Reply:
        """One tool call, after `text`; see `Call`."""
        return cls.tool_calls(Call(name, args or {}, id, raw), text=text)

    @classmethod
    def tool_calls(cls, *calls: Call, text: str | Iterable[str] = "") -> Reply:
        """A batch of tool calls, after `text`."""
        return cls(_text(text) + _calls(calls), Finish(stop=StopReason.TOOL_CALLS, raw="tool_calls"))

    @classmethod
    def structured(cls, value: JsonValue, *, pieces: int = 3) -> Reply:
        """A structured output: `value` as JSON text in so many deltas."""
        return cls.text(_cut(msgspec.json.encode(value).decode(), pieces))

    @classmethod
    def reasoning(cls, reasoning: str | Iterable[str], text: str | Iterable[str] = "") -> Reply:
        """Visible reasoning, then text. With blank text it counts as an empty reply."""
        thoughts = tuple(map(ReasoningDelta, _words(reasoning)))
        return cls(thoughts + _text(text), Finish(stop=StopReason.COMPLETE, raw="stop"))

    @classmethod
    def file(cls, file: FilePart, text: str | Iterable[str] = "") -> Reply:
        """Text, then a file."""
        return cls((*_text(text), FileEvent(file)), Finish(stop=StopReason.COMPLETE, raw="stop"))

    @classmethod
    def empty(cls, stop: StopReason | str = StopReason.COMPLETE, *, raw: str | None = None, blank: str = "") -> Reply:
        """No output, or only `blank` text.

        Args:
            stop: `complete`, `unspecified`, `truncated`, `malformed_tool_call`, or any other reason.
            raw: The provider's word; `None`: the same as `stop`.
            blank: White space to send.
        """
        return cls(_text(blank)).stopping(stop, raw=raw)

    @classmethod
    def refusal(cls, text: str, category: str | None = None, *, partial: str | Iterable[str] = "") -> Reply:
        """The model refuses.

        Args:
            text: What it says about it (`details["refusal"]`); not part of the reply's text.
            category: `details["category"]`.
            partial: Text that was streamed before.
        """
        details: JsonObject = {"refusal": text, "block_reason": "refusal"}
        if category is not None:
            details["category"] = category
        return cls(_text(partial)).stopping(StopReason.BLOCKED, raw="refusal", details=details)

    @classmethod
    def blocked(
        cls,
        reason: str = "content_filter",
        *,
        raw: str | None = None,
        text: str | Iterable[str] = "",
        calls: Sequence[Call] = (),
        safety_ratings: JsonValue = None,
    ) -> Reply:
        """A candidate that the provider blocks, possibly after text and tool calls.

        Args:
            reason: `details["block_reason"]`: `safety`, `content_filter`, `recitation`, `blocklist` or `other`.
            raw: The provider's word; `None`: the same as `reason`.
            text: Text that was streamed before.
            calls: Calls that were streamed before.
            safety_ratings: `details["safety_ratings"]`.
        """
        details: JsonObject = {"block_reason": reason}
        if safety_ratings is not None:
            details["safety_ratings"] = safety_ratings
        return cls(_text(text) + _calls(calls)).stopping(StopReason.BLOCKED, raw=raw or reason, details=details)

    @classmethod
    def prompt_blocked(
        cls,
        reason: str = "safety",
        *,
        raw: str | None = None,
        safety_ratings: JsonValue = None,
        details: JsonObject | None = None,
    ) -> Reply:
        """The provider refuses the prompt: opening the stream raises `PromptBlockedError`."""

        def error() -> PromptBlockedError:
            return PromptBlockedError(
                "The scripted model refuses the prompt.",
                reason=reason,
                raw_reason=raw,
                safety_ratings=safety_ratings,
                details=details,
            )

        return cls(end=_Fail(error, opening=True))

    @classmethod
    def truncated(cls, text: str | Iterable[str] = "", *, calls: Sequence[Call] = (), raw: str = "length") -> Reply:
        """The output cap was hit after `text` and `calls` (`Call(raw='{"ci', ended=False)` for one that is cut off)."""
        return cls(_text(text) + _calls(calls)).stopping(StopReason.TRUNCATED, raw=raw)

    @classmethod
    def error(
        cls, error: Failure | None = None, *, status: int | None = 503, retry_after: float | None = None
    ) -> Reply:
        """The call fails when the stream is opened (`Reply.of().failing()`: when the first event is awaited).

        Args:
            error: What is raised: an exception, or something that makes one. `None`: a `ModelInvocationError` with
                `status` and `retry_after`.
            status: HTTP status.
            retry_after: Seconds.
        """
        return cls(end=_Fail(_failure(error, status, retry_after), opening=True))

    # -- Changes -------------------------------------------------------------------------------------------------

    def stopping(
        self,
        stop: StopReason | str,
        *,
        raw: str | None = None,
        details: JsonObject | None = None,
        provider_data: JsonObject | None = None,
        model: str | None = None,
    ) -> Reply:
        """End with this finish (see `Finish`); `raw=None`: the same as `stop`."""
        reason = StopReason(stop)
        finish = Finish(
            stop=reason, raw=raw or reason.value, details=details or {}, provider_data=provider_data, model=model
        )
        return dataclasses.replace(self, end=finish)

    def with_usage(
        self,
        input: int | None = None,  # noqa: A002
        output: int | None = None,
        *,
        reasoning: int | None = None,
        cache_read: int | None = None,
        cache_write: int | None = None,
    ) -> Reply:
        """Report these tokens (see `Usage`)."""
        return dataclasses.replace(self, usage=Usage(input, output, reasoning, cache_read, cache_write))

    def failing(
        self,
        *,
        after: int | None = None,
        error: Failure | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> Reply:
        """Fail after that many outputs, by default after all of them but before the finish; see `error`."""
        return self._cut(after, _Fail(_failure(error, status, retry_after)))

    def without_finish(self, *, after: int | None = None) -> Reply:
        """End the stream without a finish, after that many outputs (all)."""
        return self._cut(after, None)

    def stalling(self, *, after: int | None = None) -> Reply:
        """Hang after that many outputs (all) until cancelled.

        The hang is `clock.sleep(math.inf)` on the model's clock: under a `FakeClock` with `auto_advance` time passes,
        so the deadlines of the code under test fire by themselves.
        """
        return self._cut(after, _STALL)

    def delayed(self, seconds: float, *, after: int = 0) -> Reply:
        """Sleep on the model's clock after that many outputs: by default before the first."""
        return self._pause(after, _Delay(seconds))

    def paced(self, seconds: float) -> Reply:
        """Sleep on the model's clock between every two outputs."""
        pauses = tuple((position, _Delay(seconds)) for position in range(1, len(self.outputs)))
        return dataclasses.replace(self, pauses=self.pauses + pauses)

    def gated(self, event: anyio.Event, *, after: int = 0) -> Reply:
        """Wait for `event` after that many outputs: the test decides when the stream goes on."""
        return self._pause(after, _Gate(event))

    # -- Inside --------------------------------------------------------------------------------------------------

    def _position(self, after: int | None) -> int:
        count = len(self.outputs)
        if after is None:
            return count
        if not 0 <= after <= count:
            raise ValueError(f"after={after} is no position of a reply with {count} outputs: use 0 to {count}.")
        return after

    def _pause(self, after: int, pause: _Pause) -> Reply:
        return dataclasses.replace(self, pauses=(*self.pauses, (self._position(after), pause)))

    def _cut(self, after: int | None, end: _Fail | _Stall | None) -> Reply:
        position = self._position(after)
        pauses = tuple(item for item in self.pauses if item[0] <= position)
        return dataclasses.replace(self, outputs=self.outputs[:position], pauses=pauses, end=end)

    @cached_property
    def segments(self) -> tuple[tuple[tuple[_Pause, ...], tuple[ModelEvent, ...]], ...]:
        """Pauses, each with the events after it: built once, so that an event costs nothing but its `yield`."""
        tail: tuple[ModelEvent, ...] = () if self.usage is None else (UsageEvent(self.usage),)
        if isinstance(self.end, Finish):
            tail = (*tail, self.end)
        starts = sorted({0} | {position for position, _ in self.pauses})
        segments: list[tuple[tuple[_Pause, ...], tuple[ModelEvent, ...]]] = []
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            pauses = tuple(pause for position, pause in self.pauses if position == start)
            segments.append((pauses, self.outputs[start:stop] if stop is not None else self.outputs[start:] + tail))
        return tuple(segments)


Scripted: TypeAlias = Reply | str | BaseException | Callable[[ModelRequest], "Reply | str | BaseException"]
"""One item of a script: a reply; a string for `Reply.text`; an exception for `Reply.error`; or a function that computes
one of these from the request. A function states a failure by returning it; what it raises is a `ScriptError`."""


class ScriptedModel:
    """A model gateway whose replies are written in the test, used one per call, in order.

    As a context manager it checks on leaving that the script was used up, see `assert_done`.

    Args:
        script: The replies; or several scripts by model, as bare name or `provider:name` (which goes first).
        default: What every call gets that has no reply left; without it such a call is a `ScriptError`.
        clock: Where delays and stalls sleep; the machine's clock by default. May be set later as `model.clock`.
        models: Names (bare or `provider:name`) that `validate` accepts; `None`: any.

    Attributes:
        requests: Every request, in order, with its messages and tools copied to tuples.
        open: Streams that are open now.
        cancelled: Streams that were cancelled while they were open or being opened.
    """

    def __init__(
        self,
        script: Sequence[Scripted] | Mapping[str, Sequence[Scripted]] = (),
        *,
        default: Scripted | None = None,
        clock: Clock | None = None,
        models: Collection[str] | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.requests: list[ModelRequest] = []
        self.open = 0
        self.cancelled = 0
        self._default = None if default is None else _prepare(default)
        self._models = models
        self._scripts: dict[str | None, deque[Reply | Callable[[ModelRequest], Reply | str | BaseException]]] = {}
        self._used: dict[str | None, int] = {}
        self._errors: list[ScriptError] = []
        self._stalls = 0
        self._stalled = asyncio.Event()
        if isinstance(script, Mapping):
            for name, replies in script.items():
                self.add(*replies, model=name)
        else:
            self.add(*script)

    @property
    def remaining(self) -> int:
        """Replies nobody has asked for yet."""
        return sum(map(len, self._scripts.values()))

    def add(self, *replies: Scripted, model: str | None = None) -> None:
        """Append to the script of `model`, or to the one of all models that have none of their own."""
        self._scripts.setdefault(model, deque()).extend(map(_prepare, replies))

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncGenerator[AsyncIterator[ModelEvent]]:
        """Open one attempt, with the next reply of the script.

        Raises:
            ScriptError: On entering: no reply is left, or a function of the script raised.
        """
        reply = self._take(request)
        attempt = _Attempt()
        self.open += 1
        try:
            # Opening is I/O with a real provider: a point of cancellation, where other tasks run.
            await anyio.lowlevel.checkpoint()
            if isinstance(reply.end, _Fail) and reply.end.opening:
                for _, pause in reply.pauses:
                    await pause.wait(self.clock)
                raise reply.end.exception()
            events = self._play(reply, attempt)
            try:
                yield events
            finally:
                await events.aclose()
        except asyncio.CancelledError:
            attempt.cancelled = True
            raise
        finally:
            self.open -= 1
            self.cancelled += attempt.cancelled

    def validate(self, selection: ModelSelection) -> None:
        """Check that the model is known.

        Raises:
            LlmSetupError: It is not among `models`.
        """
        if self._models is not None and not any(name in self._models for name in _names(selection)):
            raise LlmSetupError(f"The scripted model does not know {selection.id}: add it to `models`.")

    def assert_done(self) -> None:
        """Check that the script was used exactly.

        Raises:
            ScriptError: Also if it was swallowed before: a call had no reply, or a function of the script raised. Or
                replies are left, or a stream is still open.
        """
        if self._errors:
            raise self._errors[0]
        left = [f"{len(replies)} of {name or 'the script'}" for name, replies in self._scripts.items() if replies]
        if left:
            raise ScriptError(
                f"Replies of the scripted model were never asked for: {', '.join(left)} "
                f"(after {len(self.requests)} calls)."
            )
        if self.open:
            raise ScriptError(f"{self.open} streams of the scripted model are still open.")

    async def wait_stalled(self) -> None:
        """Wait until a stream is at its stall (see `Reply.stalling`): the moment to cancel it."""
        await self._stalled.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.assert_done()
        elif self._errors and exc is not self._errors[0]:
            # Do not hide why the test failed, but say what came first.
            exc.add_note(f"Before that: {self._errors[0].message}")

    # -- For the stream ------------------------------------------------------------------------------------------

    def _take(self, request: ModelRequest) -> Reply:
        """Record the request and take the reply that is due."""
        request = msgspec.structs.replace(request, messages=tuple(request.messages), tools=tuple(request.tools))
        self.requests.append(request)
        name = next((name for name in _names(request.selection) if name in self._scripts), None)
        used = self._used[name] = self._used.get(name, 0) + 1
        if script := self._scripts.get(name):
            item = script.popleft()
        elif self._default is not None:
            item = self._default
        else:
            raise self._error(
                f"Call {used} of the scripted model ({request.selection.id}) has no reply: the script of "
                f"{name or 'all models'} ends after {used - 1}."
            )
        if isinstance(item, Reply):
            return item
        try:
            computed = item(request)
        except Exception as error:
            raise self._error(
                f"The function that computes reply {used} of the scripted model ({request.selection.id}) raised "
                f"{type(error).__name__}: {error}. To script a failure, return it."
            ) from error
        return _reply(computed)

    def _error(self, message: str) -> ScriptError:
        error = ScriptError(message)
        self._errors.append(error)
        return error

    async def _play(self, reply: Reply, attempt: _Attempt) -> AsyncGenerator[ModelEvent]:
        try:
            for pauses, events in reply.segments:
                for pause in pauses:
                    await pause.wait(self.clock)
                for event in events:
                    yield event
            if isinstance(reply.end, _Fail):
                raise reply.end.exception()
            if isinstance(reply.end, _Stall):
                await self._stall()
        except asyncio.CancelledError:
            # Seen here only, where the caller's time-out is around one event and not around the stream.
            attempt.cancelled = True
            raise

    async def _stall(self) -> None:
        self._stalls += 1
        self._stalled.set()
        try:
            while True:
                await self.clock.sleep(math.inf)
        finally:
            self._stalls -= 1
            if not self._stalls:
                self._stalled.clear()


@dataclass(slots=True)
class _Attempt:
    cancelled: bool = False


_WORD = re.compile(r"\S+\s*|\s+")


def _text(text: str | Iterable[str]) -> tuple[ModelEvent, ...]:
    return tuple(map(TextDelta, _words(text)))


def _words(text: str | Iterable[str]) -> Iterable[str]:
    return _WORD.findall(text) if isinstance(text, str) else text


def _calls(calls: Sequence[Call]) -> tuple[ModelEvent, ...]:
    return tuple(event for index, call in enumerate(calls) for event in call.events(index))


def _cut(text: str, pieces: int) -> list[str]:
    size = max(1, math.ceil(len(text) / max(1, pieces)))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _failure(error: Failure | None, status: int | None, retry_after: float | None) -> Failure:
    if error is not None:
        return error

    def make() -> ModelInvocationError:
        return ModelInvocationError("The scripted model fails.", status=status, retry_after=retry_after)

    return make


def _reply(item: Reply | str | BaseException) -> Reply:
    if isinstance(item, Reply):
        return item
    return Reply.text(item) if isinstance(item, str) else Reply.error(item)


def _prepare(item: Scripted) -> Reply | Callable[[ModelRequest], Reply | str | BaseException]:
    return _reply(item) if isinstance(item, (Reply, str, BaseException)) else item


def _names(selection: ModelSelection) -> tuple[str, str]:
    """The names a script may use for a model; the most exact one first."""
    return selection.id, selection.name
