"""Time: the real clock and the protocol a fake one implements. Nothing else here asks the system for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import anyio

__all__ = ["Clock", "SystemClock", "Timer", "stamp"]


class Timer(Protocol):
    """A callback that has not fired yet."""

    def cancel(self) -> None:
        """Do not fire. Harmless when it has fired already."""
        ...


class Clock(Protocol):
    """Where time comes from. All times in seconds."""

    def time(self) -> float:
        """Unix time."""
        ...

    def monotonic(self) -> float:
        """A clock that never jumps, for deadlines."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait; always a point of cancellation."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back in the event loop at monotonic time `when`."""
        ...


def stamp(now: float) -> float:
    """A time as it is stored: to the millisecond."""
    return round(now * 1000) / 1000  # `round(now, 3)` goes through decimal text, which takes five times as long


class SystemClock:
    """The machine's clocks."""

    # As they are: they are asked so often that a method around them would show.
    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await anyio.sleep(seconds)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back in the event loop at monotonic time `when`."""
        return asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), callback)
