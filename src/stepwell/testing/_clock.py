"""A clock that only tests move."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from collections.abc import Callable

import anyio.lowlevel

from stepwell._clock import Timer

__all__ = ["FakeClock"]

_QUIET_HOPS = 2
"""Empty passes of the event loop that count as settled. Two: what one pass wrote to a socket or a pipe of this very
process is seen by the `select` of the next."""

_MAX_HOPS = 1000
"""Passes after which the loop counts as settled although it still has work (a task that polls, an anyio scope that
waits for a shielded task)."""

_COMPACT_AT = 64


class _Entry:
    """A timer or a sleeper. Fires once; lives in the clock's heap until its time comes or it is cancelled."""

    __slots__ = ("_forget", "action", "args", "context", "deadline", "done", "loop", "sleeper")

    def __init__(
        self,
        forget: Callable[[_Entry], None],
        deadline: float,
        action: Callable[..., object],
        *args: object,
        sleeper: bool = False,
    ) -> None:
        self._forget = forget
        self.deadline = deadline
        self.action = action
        self.args = args
        self.sleeper = sleeper
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        self.done = False

    def cancel(self) -> None:
        self._forget(self)

    def fire(self) -> None:
        # Through the loop, as a real timer: what a callback raises goes to the loop's exception handler.
        self.loop.call_soon(self.action, *self.args, context=self.context)


class FakeClock:
    """A `Clock` that stands still until the test moves it, so that no test waits for real time.

    By hand: `advance` moves the time from one deadline to the next, in order of deadlines (then of registration), and
    lets the event loop settle after each.

    With `auto_advance`: whenever the loop has settled and some task is in `sleep`, the time moves to the next deadline
    by itself. So code that sleeps needs no driver task and costs no real time. Timers of `call_at` never make the time
    move: they fire only when a sleep, or `advance`, passes them. A deadline of 120 s therefore never fires because the
    code under test waits for a thread, a callback or I/O. `sleep(math.inf)` is a task that hangs: it lets one timer
    after the other fire until somebody cancels it. A thread of another task is not waited for by a sleep either.

    Args:
        start: Unix time at the beginning, seconds. The monotonic clock begins at 0.
        auto_advance: See above.

    Attributes:
        slept: Every finite time that was asked of `sleep`, in order, also where the sleep was cancelled.
    """

    START = 1_735_732_800.0
    """Default beginning: 2025-01-01 12:00:00 UTC."""

    def __init__(self, start: float = START, *, auto_advance: bool = False) -> None:
        self.slept: list[float] = []
        self._start = start
        self._auto = auto_advance
        self._now = 0.0
        self._heap: list[tuple[float, int, _Entry]] = []
        self._count = 0
        self._sleepers = 0
        self._timers = 0
        self._settling = 0
        self._pumped: asyncio.AbstractEventLoop | None = None

    @property
    def auto_advance(self) -> bool:
        """Whether sleeping moves the time."""
        return self._auto

    @property
    def sleepers(self) -> int:
        """Tasks that are in `sleep` now."""
        return self._sleepers

    @property
    def timers(self) -> int:
        """Timers that have neither fired nor been cancelled: what a test checks for leaks."""
        return self._timers

    def time(self) -> float:
        """Unix time."""
        return self._start + self._now

    def monotonic(self) -> float:
        """Seconds since the clock was made, as far as the test has moved it."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved so far. Always a point of cancellation; zero or less is nothing but that."""
        if seconds < math.inf:
            self.slept.append(seconds)
        if seconds <= 0:
            await anyio.lowlevel.checkpoint()
            return
        woken = asyncio.get_running_loop().create_future()
        entry = self._add(_Entry(self._forget, self._now + seconds, _wake, woken, sleeper=True))
        try:
            await woken
        finally:
            entry.cancel()

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back in the event loop at monotonic time `when`; soon, if that is not later than now."""
        if when <= self._now:
            return asyncio.get_running_loop().call_soon(callback)
        return self._add(_Entry(self._forget, when, callback))

    async def advance(self, seconds: float) -> None:
        """Move the time, stopping at every deadline on the way; returns when the event loop has settled at the end.

        Work outside the event loop (threads, other processes) is not waited for.

        Args:
            seconds: How far, from the time of the call. Zero only lets the loop settle.

        Raises:
            ValueError: `seconds` is negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"A clock cannot advance by {seconds} seconds: pass a finite number that is not negative.")
        target = self._now + seconds
        await self.settle()
        while (entry := self._next()) is not None and entry.deadline <= target:
            self._fire(entry)
            await self.settle()
        self._now = max(self._now, target)

    async def settle(self) -> None:
        """Let the event loop run until nothing is ready any more, without moving the time (bounded: 1000 passes)."""
        loop = asyncio.get_running_loop()
        self._settling += 1
        try:
            quiet = 0
            for _ in range(_MAX_HOPS):
                await asyncio.sleep(0)
                quiet = quiet + 1 if self._idle(loop, self._settling - 1 + (self._pumped is loop)) else 0
                if quiet == _QUIET_HOPS:
                    return
        finally:
            self._settling -= 1

    def _idle(self, loop: asyncio.AbstractEventLoop, pollers: int) -> bool:
        # What is ready is no public knowledge. Loops that do not have this attribute always get all passes.
        ready = getattr(loop, "_ready", None)
        return ready is not None and len(ready) <= pollers

    def _add(self, entry: _Entry) -> _Entry:
        self._count += 1
        heapq.heappush(self._heap, (entry.deadline, self._count, entry))
        if entry.sleeper:
            self._sleepers += 1
        else:
            self._timers += 1
        if self._auto and self._sleepers and self._pumped is not entry.loop:
            self._pumped = entry.loop
            entry.loop.call_soon(self._pump, entry.loop, 0, 0, context=contextvars.Context())
        return entry

    def _forget(self, entry: _Entry) -> None:
        if entry.done:
            return
        entry.done = True
        if entry.sleeper:
            self._sleepers -= 1
        else:
            self._timers -= 1
        # A deadline that is renewed with every token leaves its dead predecessors in the heap.
        if len(self._heap) > _COMPACT_AT + 2 * (self._sleepers + self._timers):
            self._heap = [item for item in self._heap if not item[2].done]
            heapq.heapify(self._heap)

    def _next(self) -> _Entry | None:
        while self._heap:
            entry = self._heap[0][2]
            if not entry.done and not entry.loop.is_closed():
                return entry
            heapq.heappop(self._heap)
            self._forget(entry)
        return None

    def _fire(self, entry: _Entry) -> None:
        self._now = max(self._now, entry.deadline)
        self._forget(entry)
        entry.fire()

    def _pump(self, loop: asyncio.AbstractEventLoop, quiet: int, hops: int) -> None:
        """Advance to the next deadline once the loop has settled, for as long as somebody sleeps."""
        if self._sleepers:
            quiet = quiet + 1 if self._idle(loop, self._settling) else 0
            if quiet < _QUIET_HOPS and hops < _MAX_HOPS:
                loop.call_soon(self._pump, loop, quiet, hops + 1)
                return
            if (entry := self._next()) is not None and entry.deadline < math.inf:
                self._fire(entry)
                loop.call_soon(self._pump, loop, 0, 0)
                return
        self._pumped = None


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
