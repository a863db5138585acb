"""How readers learn that there is something to read, in this process and in others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Final

import psycopg
from psycopg import sql

from stepwell._postgres import Connection, Connections
from stepwell.errors import ChannelError

__all__ = ["GONE", "Bell"]

RETRY_SECONDS: Final = (0.05, 5.0)
"""First and longest pause before listening again."""

BELL: Final = "stepwell_channel"
"""The one name that everybody notifies and listens to."""

MAX_NEWS: Final = 250
"""Logs in one notification: its text is at most 8,000 bytes, and a position at most 19 digits."""

GONE: Final = -1
"""Head of a log that was deleted."""


class _Ear:
    """Somebody of this process reads a log."""

    __slots__ = ("doubted", "idle", "newest", "waiters")

    def __init__(self) -> None:
        self.doubted: int | None = None  # position at which somebody was last told that there is more
        self.newest: int | None = None  # head, as last heard; `GONE`
        self.waiters: set[asyncio.Future[None]] = set()
        self.idle = False

    def hear(self, head: int) -> None:
        if head == GONE or self.newest != GONE:
            self.newest = head if head == GONE else max(head, self.newest or 0)
        self.wake()

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class Bell:
    """Wakes readers, of this process at once, of others by `NOTIFY`.

    Notified is after the commit, what came meanwhile in one: inside the transaction it would line up all commits of the
    database behind each other. So a process that dies in between notifies nobody. For that, and for notifications that
    are lost in other ways, everybody looks every few seconds, and after every new connection.

    Args:
        connections: Where from.
        poll: Seconds after which readers look for themselves.
    """

    def __init__(self, connections: Connections, poll: float) -> None:
        self._connections = connections
        self._poll = poll
        self._ears: dict[str, _Ear] = {}
        self._listener: asyncio.Task[None] | None = None
        self._listening = 0  # number of the connection that listens; 0: none does
        self._connected = 0
        self._news: dict[str, int] = {}
        self._ringer: asyncio.Task[None] | None = None

    def ring(self, series: str, head: int) -> None:
        """Tell everybody where a log's head is."""
        ear = self._ears.get(series)
        if ear is not None:
            ear.hear(head)
        if self._news.get(series, 0) != GONE:
            self._news[series] = head if head == GONE else max(head, self._news.get(series, 0))
        if self._ringer is None:
            self._ringer = asyncio.create_task(self._ring())

    async def wait(self, series: str, after: int, head: Callable[[], Awaitable[int]]) -> None:
        """Return when a log goes on behind a position, or is gone; maybe sooner.

        Args:
            series: The log.
            after: The position.
            head: Asks the server for the head; `GONE`.
        """
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen())
        ear = self._ears.get(series)
        if ear is None:
            ear = self._ears[series] = _Ear()
        ear.idle = False
        listening = self._listening
        if ear.newest is None and listening:
            # Asked only now that it is listened: whatever follows the answer will be heard.
            ear.hear(await head())
            if self._listening != listening or self._ears.get(series) is not ear:
                return
        if ear.newest is not None and (ear.newest == GONE or ear.newest > after):
            # Back at the same place: then it is not true (anybody may notify), and the server is asked the next time.
            if ear.doubted == after:
                ear.newest = None
            ear.doubted = after
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ear.waiters.add(waiter)
        try:
            await waiter
        finally:
            ear.waiters.discard(waiter)

    async def close(self) -> None:
        """Tell what is to be told, then wake everybody."""
        if self._ringer is not None:
            await asyncio.wait([self._ringer], timeout=self._poll)
        tasks = [task for task in (self._ringer, self._listener) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget()

    def _forget(self) -> None:
        """Nothing is known any more: readers look for themselves."""
        for ear in self._ears.values():
            ear.newest = None
            ear.wake()

    # -- telling others

    async def _ring(self) -> None:
        try:
            while self._news:
                news = dict(islice(self._news.items(), MAX_NEWS))
                for series in news:
                    del self._news[series]
                text = " ".join(f"{series}:{head}" for series, head in news.items())
                try:
                    async with self._connections.take() as connection:
                        await connection.execute("SELECT pg_notify(%s, %s)", (BELL, text))
                except ChannelError:
                    pass  # those who read look for themselves before long
        finally:
            self._ringer = None

    # -- listening to others

    async def _listen(self) -> None:
        first, longest = RETRY_SECONDS
        pause = first
        while True:
            try:
                async with await self._connections.connect() as connection:
                    with self._connections.deadline(connection):
                        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(BELL)))
                    pause = first
                    self._connected += 1
                    self._listening = self._connected
                    self._forget()
                    while True:
                        async for notify in connection.notifies(timeout=self._poll):
                            self._hear(notify.payload)
                        with self._connections.deadline(connection):
                            await self._look(connection)
            except (ChannelError, psycopg.Error, OSError):
                pass  # the readers' own calls say what is wrong
            finally:
                self._listening = 0
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads the processes
            pause = min(pause * 2, longest)
            self._forget()  # whatever it is that keeps from listening, it need not keep from reading

    def _hear(self, text: str) -> None:
        for entry in text.split():
            series, _, head = entry.partition(":")
            ear = self._ears.get(series)
            if ear is not None and len(head) < 20 and head.removeprefix("-").isdecimal():  # anybody may notify
                ear.hear(int(head))

    async def _look(self, connection: Connection) -> None:
        """Ask for the heads of all logs that are read; no more of those that nobody reads."""
        for series, ear in list(self._ears.items()):
            if ear.idle and not ear.waiters:
                del self._ears[series]
            ear.idle = not ear.waiters
        wanted = list(self._ears)
        if wanted:
            query = "SELECT series, head FROM stepwell_channel WHERE series = ANY(%s)"
            found = dict(await (await connection.execute(query, (wanted,))).fetchall())
            for series in wanted:
                ear = self._ears[series]
                if ear.newest != found.get(series, GONE):
                    ear.hear(found.get(series, GONE))
