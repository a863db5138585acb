"""A call to the channel that is repeated a few times."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from stepwell._clock import Clock
from stepwell.errors import ChannelError

__all__ = ["in_four_attempts"]

T = TypeVar("T")

_DELAYS = (0.1, 0.2, 0.4)
"""Seconds between the attempts."""


async def in_four_attempts(call: Callable[[], Awaitable[T]], clock: Clock, again: type[ChannelError]) -> T:
    """Call until it does not raise `again`; the fourth failure is raised, and any other at once."""
    for delay in _DELAYS:
        try:
            return await call()
        except again:
            await clock.sleep(delay)
    return await call()
