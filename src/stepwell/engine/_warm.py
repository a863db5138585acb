"""Sessions that this process worked on lately: head and history are kept, `acquire` says whether they are current."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from stepwell._clock import Clock

from ._working import Working

__all__ = ["Warm", "WarmSessions"]

MAX_MESSAGES = 200_000
"""Messages of all warm sessions together."""

MAX_IDLE = 900.0
"""Seconds after which a warm session is dropped."""


class Warm(msgspec.Struct):
    """One kept session."""

    working: Working
    incarnation: str
    revision: int
    since: float
    messages: int


class WarmSessions:
    """The newest sessions, bounded in number, messages and time."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._kept: OrderedDict[str, Warm] = OrderedDict()
        self._messages = 0

    def put(self, session: str, working: Working, incarnation: str) -> None:
        """Keep a session; its oldest neighbours go when there are too many."""
        if self._limit < 1:
            return
        self.take(session)
        now = self._clock.monotonic()
        messages = 0
        for history in working.histories.values():
            messages += len(history.messages)
        self._kept[session] = Warm(working, incarnation, working.head.revision, now, messages)
        self._messages += messages
        while True:
            oldest, warm = next(iter(self._kept.items()))
            if len(self._kept) <= self._limit and self._messages <= MAX_MESSAGES and warm.since >= now - MAX_IDLE:
                break
            self.take(oldest)

    def peek(self, session: str) -> Warm | None:
        """Look, without taking."""
        return self._kept.get(session)

    def take(self, session: str) -> Warm | None:
        """Remove and return; whoever works on it owns it."""
        found = self._kept.pop(session, None)
        if found is not None:
            self._messages -= found.messages
        return found
