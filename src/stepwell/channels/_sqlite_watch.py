"""Waiting for a channel in an SQLite file to go on: one look-out per event loop and file, for all its readers.

Who writes in the same loop says so, and the readers are woken at once. What others commit, in other processes, other
loops, or for a caller that was cancelled, is found by looking every few milliseconds, while anybody waits.
"""

from __future__ import annotations

import asyncio
import sqlite3
import weakref
from collections.abc import Collection
from typing import Final

from stepwell._sqlite import SqliteOwner
from stepwell.errors import StoreError

__all__ = ["Watch", "watch_of"]

POLL_SECONDS: Final = (0.005, 0.02)
"""Shortest and longest time between two looks; it grows while nothing happens."""


class _Waiter:
    """A reader that has read up to a position."""

    __slots__ = ("after", "future", "series")

    def __init__(self, series: str, after: int) -> None:
        self.series = series
        self.after = after
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def see(self, found: tuple[str, int] | None) -> bool:
        """Whether the channel has gone on, or is another."""
        return found is None or found[0] != self.series or found[1] > self.after

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


class Watch:
    """See the module. Made by `watch_of`."""

    def __init__(self, owner: SqliteOwner) -> None:
        self._owner = owner
        self._waiters: dict[str, set[_Waiter]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = POLL_SECONDS[0]
        self._seen: tuple[int, int] | None = None

    async def wait(self, name: str, series: str, after: int) -> None:
        """Return when the channel goes on behind a position, or is not that one any more, or something else happens."""
        waiter = _Waiter(series, after)
        waiters = self._waiters.setdefault(name, set())
        waiters.add(waiter)
        try:
            # Looked up when the waiter is there: who commits between the reader's last look and now wakes nobody.
            if not waiter.see((await self._owner.read(lambda cursor: _heads(cursor, (name,))))[name]):
                self._poll()
                await waiter.future
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(name) is waiters:
                del self._waiters[name]

    def wake(self, names: Collection[str] | None = None) -> None:
        """Let the readers of these channels look; None: of all."""
        for name in list(self._waiters) if names is None else names:
            for waiter in self._waiters.get(name, ()):
                waiter.wake()

    def _poll(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waiters:
            return
        try:
            self._compare()
        except StoreError:  # the readers find out by themselves, and can say so
            self.wake()
        self._poll()

    def _compare(self) -> None:
        seen = self._owner.commits()
        if seen is None:
            return
        if seen == self._seen:
            self._pause = min(self._pause * 1.5, POLL_SECONDS[1])
            return
        found = self._owner.peek(lambda cursor: _heads(cursor, self._waiters))
        if found is None:
            return
        self._seen, self._pause = seen, POLL_SECONDS[0]
        for name, head in found[0].items():
            for waiter in self._waiters[name]:
                if waiter.see(head):
                    waiter.wake()


def watch_of(owner: SqliteOwner) -> Watch:
    """The running loop's look-out on a file."""
    watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watch]
    watches = owner.shared.setdefault(Watch, weakref.WeakKeyDictionary())
    loop = asyncio.get_running_loop()
    watch = watches.get(loop)
    if watch is None:
        watch = watches[loop] = Watch(owner)
    return watch


def _heads(cursor: sqlite3.Cursor, names: Collection[str]) -> dict[str, tuple[str, int] | None]:
    """Series and head of channels."""
    query = "SELECT series, head FROM channel WHERE name = ?"
    return {name: cursor.execute(query, (name,)).fetchone() for name in names}
