"""What a caller holds of a turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stepwell.errors import CancelKind

from ._events import TurnEvent
from ._result import TurnResult
from ._stream import Reader

if TYPE_CHECKING:
    from ._turn import TurnTask

__all__ = ["Turn"]


class Turn:
    """A caller's hold on a turn: iterate over it for its events; `result` is there after the last.

    Attributes:
        owner: Whether this caller started the turn. One that attached to it by an idempotency key did not, and leaving
            the block of `Engine.stream` does not cancel it.
    """

    __slots__ = ("_reader", "_task", "owner")

    def __init__(self, task: TurnTask, reader: Reader, *, owner: bool) -> None:
        self._task = task
        self._reader = reader
        self.owner = owner

    @property
    def run_id(self) -> str:
        """The run."""
        return self._task.run_id

    @property
    def invocation_id(self) -> str:
        """What it is of that run."""
        return self._task.invocation_id

    @property
    def session_id(self) -> str:
        """The session, `""` until it is known."""
        return self._task.session_id

    @property
    def text(self) -> str:
        """What a person should see of this turn now."""
        return self._task.text

    @property
    def begun(self) -> asyncio.Event:
        """Set when it runs, rather than waits to, or is over."""
        return self._task.begun

    @property
    def result(self) -> TurnResult:
        """The result, once the turn is done."""
        return self._task.result

    @property
    def error(self) -> BaseException | None:
        """The exception behind `result.error`."""
        return self._task.error

    @property
    def done(self) -> asyncio.Event:
        """Set when there is a result."""
        return self._task.done

    @property
    def ended(self) -> asyncio.Event:
        """Set when the session is free again: after compaction, where there is any."""
        return self._task.ended

    def cancel(self, kind: CancelKind = "user", reason: str | None = None) -> bool:
        """Ask the turn to stop. `False`: it is done, or being cancelled already."""
        return self._task.cancel(kind, reason)

    def __aiter__(self) -> Turn:
        return self

    async def __anext__(self) -> TurnEvent:
        event = await self._reader.next()
        if event is None:
            raise StopAsyncIteration
        return event
