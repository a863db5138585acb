"""Connections to Redis: a line for calls, a bell that rings when a channel changes, and what their errors mean.

Calls of one tick share a round trip and keep their order: appends to a message arrive in the order in which they were
made, and a call that is cancelled leaves the connection as it is, because nobody but the line reads from it.

The bell is pub/sub and not a blocking read of streams: that would need an entry for every mutation in a stream of each
channel (four kilobytes at least), would name all channels again after each of them, and could name only those of one
slot of a cluster. What pub/sub loses does not matter, as readers pull by position.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby
from typing import Any, Final, cast

from redis import exceptions
from redis.asyncio.connection import AbstractConnection

from stepwell.errors import ChannelBusyError, ChannelDataError, ChannelError

from ._redis_scripts import SCRIPTS

__all__ = ["FAILURES", "Bell", "Line", "to_channel_error"]

MAX_BATCH: Final = 256
"""Calls in one round trip."""

_log: Final = logging.getLogger(__name__)

TICK_SECONDS: Final = 15.0
"""How often the bell's connection is tried, and waiting readers look for themselves."""

RETRY_SECONDS: Final = (0.05, 5.0)
"""First and longest pause before connecting again."""

FAILURES: Final = (exceptions.RedisError, OSError, TimeoutError)
"""What a connection raises."""

Command = tuple[Any, ...]
"""A script's text with its arguments, or a plain command."""


class Line:
    """Calls over one connection.

    Args:
        make: Gives a connection that is not connected yet.
        timeout: Seconds for a round trip.
    """

    def __init__(self, make: Callable[[], AbstractConnection], timeout: float) -> None:
        self._make = make
        self._timeout = timeout
        self._connection: AbstractConnection | None = None
        self._waiting: deque[tuple[Command, asyncio.Future[Any]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def call(self, *command: Any) -> Any:
        """Send a command and return its reply.

        Raises:
            ChannelError: It failed; `ChannelBusyError` where it is not known whether it was done.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((command, future))
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await future

    async def close(self) -> None:
        """Let what was called come to its end, then disconnect."""
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._connection is not None:
            await self._connection.disconnect()

    async def _drain(self) -> None:
        try:
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
                await self._serve([entry for entry in batch if not entry[1].done()])
        finally:
            self._task = None

    async def _serve(self, batch: Sequence[tuple[Command, asyncio.Future[Any]]]) -> None:
        if not batch:  # all were cancelled before they were sent
            return
        replies: Sequence[Any] = ()
        try:
            async with asyncio.timeout(self._timeout):
                replies = await self._exchange([command for command, _ in batch])
        except FAILURES as error:
            await self._drop()
            replies = [to_channel_error(error) for _ in batch]
        except BaseException:
            await self._drop()
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), reply in zip(batch, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(to_channel_error(reply))
            else:
                future.set_result(reply)
        if any(isinstance(reply, exceptions.ReadOnlyError) for reply in replies):
            await self._drop()  # after a failover the same name may lead to the new primary

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        replies = await self._send([_by_name(command) for command in commands])
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if unknown:
            # A server that was restarted, or whose scripts were flushed: nothing was done, and with its text each is
            # loaded. In their order, before anything that was called later.
            for i, reply in zip(unknown, await self._send([_by_text(commands[i]) for i in unknown]), strict=True):
                replies[i] = reply
        return replies

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        connection = await self._connected()
        await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except exceptions.ResponseError as error:
                replies.append(error)
        return replies

    async def _connected(self) -> AbstractConnection:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._make()
        # One that the server closed is noticed before anything is sent, so that nothing is in doubt.
        if connection.is_connected and await connection.can_read():
            await connection.disconnect(nowait=True)
        await connection.connect()
        return connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(*FAILURES):
                await connection.disconnect(nowait=True)


def _by_name(command: Command) -> Command:
    name = SCRIPTS.get(command[0])
    return command if name is None else ("EVALSHA", name, 1, *command[1:])


def _by_text(command: Command) -> Command:
    return ("EVAL", command[0], 1, *command[1:])


class _Ear:
    """Somebody of this process listens to a channel."""

    __slots__ = ("idle", "newest", "ready", "waiters")

    def __init__(self) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the server knows
        self.newest: tuple[int, str] | None = None  # head and series, as last heard
        self.waiters: set[asyncio.Future[None]] = set()
        self.idle = False

    def wake(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


class Bell:
    """Wakes this process's readers, over one connection of its own.

    Every mutation is published with its position, to those who listen at that moment. So that none is missed, a reader
    is told to wait only if the server confirmed that it listens, and the log's head was asked for after that.

    Args:
        make: Gives a connection that is not connected yet.
        timeout: Seconds for connecting.
    """

    def __init__(self, make: Callable[[], AbstractConnection], timeout: float) -> None:
        self._make = make
        self._timeout = timeout
        self._ears: dict[bytes, _Ear] = {}
        self._orders: list[tuple[str, bytes]] = []
        self._ordered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(
        self, topic: str, known: tuple[int, str], head: Callable[[], Awaitable[tuple[int, str] | None]]
    ) -> None:
        """Return when the log at `topic` is not at this position any more, or maybe sooner.

        Args:
            topic: Where its mutations are published.
            known: Position and series up to which the reader has read.
            head: Asks the server for these; None if there is no log.
        """
        ear = self._listen(topic.encode())
        ear.idle = False
        await asyncio.shield(ear.ready)
        if ear.newest is None or ear.newest[1] != known[1]:
            # Nothing was heard yet, or of another log: this one was deleted, or another database of the server has one
            # of the same name. What is heard meanwhile is as good as the answer: whatever follows is heard too.
            ear.newest = None
            found = await head()
            ear.newest = ear.newest or found
        if ear.newest is None or ear.newest[1] != known[1] or ear.newest[0] > known[0]:
            return
        if self._ears.get(topic.encode()) is not ear:  # forgotten meanwhile, so it would not be woken
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ear.waiters.add(waiter)
        try:
            await waiter
        finally:
            ear.waiters.discard(waiter)

    async def close(self) -> None:
        """Hang up and wake everybody."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._forget_all()

    def _listen(self, topic: bytes) -> _Ear:
        ear = self._ears.get(topic)
        if ear is None:
            ear = self._ears[topic] = _Ear()
            self._order("SUBSCRIBE", topic)
            if self._task is None:
                self._task = asyncio.create_task(self._run())
        return ear

    def _order(self, verb: str, topic: bytes) -> None:
        self._orders.append((verb, topic))
        self._ordered.set()

    def _forget_all(self) -> None:
        """Nothing is known any more: readers look for themselves, and listen anew when they have."""
        ears = list(self._ears.values())
        self._ears.clear()
        self._orders.clear()
        for ear in ears:
            ear.wake()

    # -- the connection

    async def _run(self) -> None:
        first, longest = RETRY_SECONDS
        pause = first
        while True:
            connection = self._make()
            try:
                async with asyncio.timeout(self._timeout):
                    await connection.connect()
                pause = first
                await self._serve(connection)
            except FAILURES:
                pass  # the readers' own calls say what is wrong
            finally:
                with contextlib.suppress(*FAILURES):
                    await connection.disconnect(nowait=True)
            self._forget_all()
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - spreads the callers
            pause = min(pause * 2, longest)

    async def _serve(self, connection: AbstractConnection) -> None:
        sender = asyncio.create_task(self._give_orders(connection))
        try:
            while True:
                reply = cast("Any", await connection.read_response(timeout=2 * TICK_SECONDS))
                if reply is None:  # not even an answer to the ping
                    return
                self._hear(reply)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _give_orders(self, connection: AbstractConnection) -> None:
        """Send what is to be listened to. Where sending fails the connection is closed, which the reader notices."""
        while True:
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._ordered.wait()
            except TimeoutError:
                await connection.send_command("PING", check_health=False)
                self._tidy()
            self._ordered.clear()
            orders, self._orders = self._orders, []
            for verb, group in groupby(orders, key=lambda order: order[0]):
                await connection.send_command(verb, *(topic for _, topic in group), check_health=False)

    def _tidy(self) -> None:
        """Stop listening where nobody waits; let the others look whether the log is still what it was."""
        for topic, ear in list(self._ears.items()):
            if ear.idle and not ear.waiters:
                del self._ears[topic]
                self._order("UNSUBSCRIBE", topic)
            ear.idle = not ear.waiters
            ear.newest = None
            ear.wake()

    def _hear(self, reply: Any) -> None:
        kind, topic = reply[0], reply[1]
        ear = self._ears.get(topic)
        if ear is None:
            return
        if kind == b"subscribe" and not ear.ready.done():
            ear.ready.set_result(None)
        elif kind == b"message":
            head, _, series = reply[2].decode().partition("@")
            ear.newest = (int(head), series) if series else None
            ear.wake()


def to_channel_error(error: BaseException) -> ChannelError:
    """What a failure means and what to do. Redis's own words are left out: they may repeat what was sent."""
    if isinstance(error, ChannelError):
        return error
    kind, text = _explain(error)
    made = kind(text)
    made.__cause__ = (
        error if isinstance(error, (OSError, exceptions.ConnectionError, exceptions.TimeoutError)) else None
    )
    return made


def _explain(error: BaseException) -> tuple[type[ChannelError], str]:
    if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return ChannelError, "Redis refuses this user or password: correct the URL of the channels."
    if isinstance(error, exceptions.NoPermissionError):
        return ChannelError, (
            "Redis does not permit this user what channels need: allow it EVAL, EVALSHA, SUBSCRIBE, PUBLISH and the"
            " data commands, on the keys and channels that begin with the prefix."
        )
    if isinstance(error, exceptions.BusyLoadingError):
        return ChannelBusyError, "Redis is still loading its data: try again in a moment."
    if isinstance(error, exceptions.ReadOnlyError):
        return ChannelBusyError, (
            "This Redis is a replica and takes no writes: try again when a failover is over, or point the URL of the"
            " channels to the primary."
        )
    if isinstance(error, exceptions.OutOfMemoryError):
        return ChannelError, "Redis is out of memory: raise maxmemory, or delete channels that are not needed."
    if isinstance(error, (TimeoutError, exceptions.TimeoutError)):
        return ChannelBusyError, "Redis did not answer in time: try again."
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return ChannelBusyError, "The connection to Redis was lost or cannot be made: try again."
    word = _first_word(error)
    # NOREPLICAS: fewer than `min-replicas-to-write`. BUSY: a script of somebody's runs and runs.
    if isinstance(error, (exceptions.ClusterDownError, exceptions.TryAgainError)) or word in ("NOREPLICAS", "BUSY"):
        return ChannelBusyError, f"Redis cannot do it for now ({word or type(error).__name__}): try again."
    if word == "MISCONF":
        return ChannelBusyError, "Redis cannot save to its disk and takes no writes: free space there, then try again."
    if isinstance(error, exceptions.AskError):  # and MOVED
        return ChannelError, "This Redis is one node of a cluster: point the URL to a proxy or to a server of its own."
    if word == "WRONGTYPE" or "equal or smaller than the target" in str(error):
        return ChannelDataError, (
            "The keys of this channel are damaged: part of them was evicted, or something else writes them. Set"
            " maxmemory-policy to noeviction, and delete the channel."
        )
    _log.debug("Redis refused a call: %s", error)
    return ChannelError, f"Redis refused ({word or type(error).__name__}): Redis 7 or newer with Lua is needed."


def _first_word(error: BaseException) -> str:
    word = str(error).split(" ", 1)[0]
    return word if word.isascii() and word.isupper() else ""
