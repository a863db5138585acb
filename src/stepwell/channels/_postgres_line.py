"""Writes to channels in PostgreSQL, in lines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Final

from psycopg.rows import TupleRow

from stepwell.errors import ChannelBusyError, StepwellError

__all__ = ["Line"]

MAX_ROWS: Final = 1_000
"""Rows in one write."""

MAX_BYTES: Final = 4_000_000
"""And about how much they may hold together."""


class _Call:
    """Rows of one call to one channel, and who waits for what came of them."""

    __slots__ = ("channel", "future", "rows", "size")

    def __init__(self, channel: str, rows: Sequence[Any], size: int) -> None:
        self.channel = channel
        self.rows = rows
        self.size = size
        self.future: asyncio.Future[list[TupleRow]] = asyncio.get_running_loop().create_future()


Write = Callable[[list[str], list[int], list[Any]], Awaitable[list[TupleRow]]]
"""Writes rows: the channels in order, how many rows each has, the rows. Returns a result for each row."""


class Line:
    """Writes in the order of their calls. What is called while one is under way goes together into the next.

    Args:
        write: See `Write`.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: deque[_Call] = deque()
        self._task: asyncio.Task[None] | None = None

    async def call(self, channel: str, rows: Sequence[Any], size: int) -> list[TupleRow]:
        """Write rows of about `size` bytes to a channel and return a result for each.

        Raises:
            ChannelError: It failed; `ChannelBusyError` where it is not known whether it was done.
        """
        call = _Call(channel, rows, size)
        self._waiting.append(call)
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await call.future

    async def finish(self) -> None:
        """Let what was called come to its end."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        try:
            while self._waiting:
                calls = self._next()
                try:
                    await self._serve(calls)
                except Exception as error:  # noqa: BLE001 - a bug is its callers' to see, and not the others' end
                    _fail(calls, error)
                except BaseException:
                    for call in calls:
                        call.future.cancel()
                    raise
        finally:
            self._task = None

    def _next(self) -> list[_Call]:
        calls: list[_Call] = []
        rows = size = 0
        while self._waiting:
            call = self._waiting[0]
            if calls and (rows + len(call.rows) > MAX_ROWS or size + call.size > MAX_BYTES):
                break
            self._waiting.popleft()
            if not call.future.done():  # else it was cancelled before it was sent
                calls.append(call)
                rows += len(call.rows)
                size += call.size
        calls.sort(key=lambda call: call.channel)
        return calls

    async def _serve(self, calls: list[_Call]) -> None:
        try:
            await self._send(calls)
        except ChannelBusyError as error:
            _fail(calls, error)
        except StepwellError as error:
            # Nothing was done. If only one of them is to blame, it is the only one to fail.
            if len(calls) == 1:
                _fail(calls, error)
            else:
                for call in calls:
                    await self._serve([call])

    async def _send(self, calls: list[_Call]) -> None:
        if not calls:
            return
        channels: list[str] = []
        sizes: list[int] = []
        for call in calls:
            if channels and channels[-1] == call.channel:
                sizes[-1] += len(call.rows)
            else:
                channels.append(call.channel)
                sizes.append(len(call.rows))
        results = iter(await self._write(channels, sizes, [row for call in calls for row in call.rows]))
        for call in calls:
            own = list(islice(results, len(call.rows)))
            if not call.future.done():
                call.future.set_result(own)


def _fail(calls: list[_Call], error: Exception) -> None:
    for call in calls:
        if not call.future.done():  # each has its own: a traceback is added to it where it is raised
            call.future.set_exception(type(error)(*error.args))
