"""Cancels: the event that a run looks at, and the requests that came before anybody could take them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter
from typing import Final

import anyio

from stepwell.wire import CancelRequest

__all__ = ["CancelEvent", "KeptCancels"]

MAX_KEPT: Final = 200
"""Requests kept for runs that nobody has taken up yet; then the oldest go."""

_by_serial = attrgetter("message.serial")


class CancelEvent:
    """Whether a run is to stop. Set once, never reset; setting it says nothing on the channel and ends nothing.

    Attributes:
        reason: None, or who wanted it: `request` (somebody on the channel), `detached`, `ended`, `fenced`, or what was
            given to `AgentRun.cancel`.
    """

    __slots__ = ("_event", "_listeners", "reason")

    def __init__(self) -> None:
        self.reason: str | None = None
        self._event = anyio.Event()
        self._listeners: set[Callable[[], object]] = set()

    def is_set(self) -> bool:
        """Whether it is to stop."""
        return self.reason is not None

    async def wait(self) -> None:
        """Wait until it is to stop."""
        await self._event.wait()

    def fire(self, reason: str) -> None:
        """Set it. Only the first reason counts."""
        if self.reason is None:
            self.reason = reason
            self._event.set()
            for listener in tuple(self._listeners):
                listener()

    def listen(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` when it is set: at once, if it is. Returns what stops that."""
        self._listeners.add(listener)
        if self.is_set():
            listener()

        def stop() -> None:
            self._listeners.discard(listener)

        return stop


class KeptCancels:
    """Requests that no run of this session has taken, in the order of the channel."""

    def __init__(self) -> None:
        self._requests: list[CancelRequest] = []

    def keep(self, request: CancelRequest) -> None:
        """Keep one. Known ones are not kept twice."""
        serial = request.message.serial
        if any(kept.message.serial == serial for kept in self._requests):
            return
        insort(self._requests, request, key=_by_serial)
        del self._requests[:-MAX_KEPT]

    def take(self, wanted: Callable[[CancelRequest], bool]) -> list[CancelRequest]:
        """Give those of a run, and keep them no longer."""
        taken = [request for request in self._requests if wanted(request)]
        self._requests = [request for request in self._requests if not wanted(request)]
        return taken
