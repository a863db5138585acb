"""Deadlines of model calls, on whatever clock, without a timer per call or per token."""

from __future__ import annotations

import asyncio
from contextvars import Context
from math import inf
from types import TracebackType
from typing import Any

from stepwell._clock import Clock, Timer
from stepwell.errors import TimeoutKind
from stepwell.models import Deadlines

__all__ = ["Alarm", "Watchdog"]

_AGAIN = 5.0
"""Seconds a call that was cut has for closing its connection. Then it is cancelled again, should it have gone on."""


class Alarm:
    """One timer for the watchdogs of an engine.

    Nearly every call ends long before its deadlines, so it sets no timer of its own: the one there is was set by an
    earlier call and rings too early, which costs a look at the calls that run then.

    Args:
        clock: Whose time counts.
    """

    __slots__ = ("_at", "_dogs", "_timer", "clock")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._dogs: set[Watchdog] = set()
        self._timer: Timer | None = None
        self._at = inf  # when the timer rings

    def add(self, dog: Watchdog, due: float) -> None:
        """Look after `dog` from `due` on, at the latest."""
        self._dogs.add(dog)
        if due < self._at:
            self._set(due)

    def remove(self, dog: Watchdog) -> None:
        """`dog` needs no more looking after; the timer stays for the next."""
        self._dogs.discard(dog)

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._at = due
        # In a context of its own: that of the call which happens to set the timer would be kept until it rings.
        self._timer = Context().run(self.clock.call_at, due, self._ring)

    def _ring(self) -> None:
        self._timer, self._at = None, inf
        now = self.clock.monotonic()
        due = min((dog.look(now) for dog in self._dogs), default=inf)
        if due < inf:
            self._set(due)


class Watchdog:
    """Cancels the task that entered it when a deadline passes, and swallows that cancellation at its end.

    It is for what is at the mercy of a peer and honours cancellation, as gateways do: it cancels the task itself, as
    `asyncio.timeout` does, and not through an anyio scope, which would cost as much as the rest of a fake model's call.
    So an anyio shield does not hold it off.

    Args:
        alarm: The engine's.
        deadlines: `connect` is not looked at: only an adapter can see that.

    Attributes:
        last: When something arrived last, on the alarm's clock; set it with each event. It moves the idle deadline.
        expired: The deadline that passed.
    """

    __slots__ = ("_alarm", "_cuts", "_deadlines", "_pending", "_start", "_task", "expired", "last")

    def __init__(self, alarm: Alarm, deadlines: Deadlines) -> None:
        self._alarm = alarm
        self._deadlines = deadlines
        self._cuts = 0
        self.last: float | None = None
        self.expired: TimeoutKind | None = None

    def _due(self, now: float) -> tuple[float, TimeoutKind | None]:
        """When to look next, and which deadline that is (`None`: only a look, the first token may move it)."""
        deadlines, start, last = self._deadlines, self._start, self.last
        first, idle, whole = deadlines.first_token, deadlines.idle, deadlines.attempt
        when = inf
        kind: TimeoutKind | None = None
        if whole is not None:
            when, kind = start + whole, "attempt"
        if last is None:
            if first is not None and start + first < when:
                when, kind = start + first, "first_token"
            if idle is not None and now + idle < when:
                when, kind = now + idle, None
        elif idle is not None and last + idle < when:
            when, kind = last + idle, "idle"
        return when, kind

    def look(self, now: float) -> float:
        """Cut the work if its time is over; returns when to look again. Only `Alarm` calls it."""
        if self.expired is None:
            when, kind = self._due(now)
            if kind is None or when > now:
                return when
            self.expired = kind
        # The alarm rings in the event loop, so the task is not running: it gets the cancellation where it waits now,
        # or, if it is about to run, instead of what it waited for. None is left over for after the block.
        self._cuts += 1
        self._task.cancel()
        return now + _AGAIN

    def __enter__(self) -> Watchdog:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._pending = task.cancelling()
        self._start = now = self._alarm.clock.monotonic()
        deadlines = self._deadlines
        soonest = min(deadlines.first_token or inf, deadlines.idle or inf, deadlines.attempt or inf)
        if soonest < inf:
            self._alarm.add(self, now + soonest)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Swallow the cancellation that this deadline caused, and no other; then `expired` says which it was."""
        self._alarm.remove(self)
        if self.expired is None:
            return False
        for _ in range(self._cuts):
            self._task.uncancel()
        # Whoever else has cancelled the task meanwhile must still see it.
        return kind is asyncio.CancelledError and self._task.cancelling() <= self._pending
