"""Channels in memory: for tests, and for one process that may forget."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from stepwell._clock import Clock, SystemClock
from stepwell.errors import ChannelError
from stepwell.wire import (
    Capabilities,
    Cursor,
    Data,
    Extras,
    HistoryPage,
    Subscription,
    WireMessage,
    check_change,
    check_channel_name,
    check_messages,
    is_ephemeral,
    is_open_stream,
    new_series,
    serial_at,
    serial_position,
    version_at,
)

from ._folding import EPHEMERAL_SECONDS, fenced, missing, not_text, out_of_order
from ._reader import Bounds, Page, Row, open_reader, read_history

__all__ = ["MemoryChannel", "MemoryChannels"]


class _Message:
    """A message as it is now."""

    __slots__ = (
        "applied",
        "client_id",
        "data",
        "deltas",
        "extras",
        "index",
        "name",
        "position",
        "timestamp",
        "version",
    )

    def __init__(self, position: int, index: int, given: WireMessage, timestamp: int) -> None:
        self.position = position
        self.index = index
        self.name = given.name
        self.data: Data = given.data
        self.extras = given.extras
        self.client_id = given.client_id
        self.version = position
        self.timestamp = timestamp
        self.applied = 0
        self.deltas: list[int] = []  # positions of the rows that hold parts of the text

    def row(self, position: int) -> Row:
        """The whole message, at a position of the log."""
        changed = self.version != self.position
        return Row(
            position,
            self.position,
            self.index,
            self.version,
            "update" if changed else "create",
            self.name,
            self.data,
            self.extras,
            self.client_id,
            self.timestamp,
        )


class _Entry(msgspec.Struct):
    """A mutation in the log; `delta` None stands for the whole message as it is now."""

    message: _Message
    timestamp: int
    delta: str | None = None
    extras: Extras | None = None


class _State:
    """Everything of one channel. Replaced as a whole when it is deleted."""

    def __init__(self) -> None:
        self.series = new_series()
        self.head = 0
        self.floor = 0
        self.fence = 0
        self.log: list[_Entry | None] = []  # from position `base` + 1 on; None where a row says nothing more
        self.base = 0
        self.messages: dict[int, _Message] = {}
        self.places: list[int] = []  # positions of the messages that are not ephemeral, in order
        self.ids: dict[str, str] = {}
        self.ephemeral: list[_Message] = []
        self.waiters: list[asyncio.Future[None]] = []

    def drop(self, position: int) -> None:
        if position > self.base:
            self.log[position - self.base - 1] = None

    def wake(self) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters.clear()


class MemoryChannels:
    """Channels of this process, of one event loop. What is acknowledged is in this process, and dies with it.

    Args:
        retention: Seconds of log kept; None keeps it.
        clock: For timestamps and retention.
    """

    capabilities = Capabilities(cursors=False, shared=False)

    def __init__(self, *, retention: float | None = None, clock: Clock | None = None) -> None:
        self.retention = retention
        self.clock = clock or SystemClock()
        self.closed = False
        self._states: dict[str, _State] = {}

    async def open(self, name: str) -> MemoryChannel:
        """See `ChannelProvider.open`."""
        self.check_open()
        return MemoryChannel(self, check_channel_name(name))

    async def delete(self, name: str) -> None:
        """See `ChannelProvider.delete`."""
        self.check_open()
        state = self._states.pop(check_channel_name(name), None)
        if state is not None:
            state.wake()

    async def close(self) -> None:
        """See `ChannelProvider.close`."""
        self.closed = True
        for state in self._states.values():
            state.wake()

    async def __aenter__(self) -> MemoryChannels:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    def state(self, name: str) -> _State:
        """The channel's state, made with its first use; what is due is forgotten first."""
        self.check_open()
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = _State()
        self._forget(state)
        return state

    def knows(self, name: str) -> bool:
        """Whether there is such a channel."""
        self.check_open()
        return name in self._states

    def check_open(self) -> None:
        """Raise `ChannelError` if this was closed."""
        if self.closed:
            raise ChannelError("These channels are closed: open new ones.")

    def _forget(self, state: _State) -> None:
        now = self.clock.time()
        while state.ephemeral and state.ephemeral[0].timestamp <= (now - EPHEMERAL_SECONDS) * 1000:
            gone = state.ephemeral.pop(0)
            del state.messages[gone.position]
            for position in (gone.position, gone.version, *gone.deltas):
                state.drop(position)
        if self.retention is not None:
            limit = (now - self.retention) * 1000
            kept = (i for i, entry in enumerate(state.log) if entry is not None and entry.timestamp > limit)
            count = next(kept, len(state.log))
            if count:
                state.base += count
                state.floor = state.base
                del state.log[:count]


class MemoryChannel:
    """A `Channel` of `MemoryChannels`."""

    def __init__(self, provider: MemoryChannels, name: str) -> None:
        self._provider = provider
        self.name = name

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`."""
        state = self._fenced(epoch)
        state.fence = epoch

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """See `Channel.publish`."""
        check_messages(messages)
        state = self._fenced(epoch)
        now = self._now()
        serials: list[str] = []
        index = 0
        for message in messages:
            key = message.idempotency_id
            serial = state.ids.get(key) if key is not None else None
            if serial is None:
                serial = self._create(state, message, index, now)
                index += 1
            serials.append(serial)
        if index:
            state.wake()
        return serials

    def _create(self, state: _State, given: WireMessage, index: int, now: int) -> str:
        state.head += 1
        message = _Message(state.head, index, given, now)
        state.messages[message.position] = message
        state.log.append(_Entry(message, now))
        if is_ephemeral(given.extras):
            state.ephemeral.append(message)
        else:
            state.places.append(message.position)
        serial = serial_at(message.position, state.series, index)
        if given.idempotency_id is not None:
            state.ids[given.idempotency_id] = serial
        return serial

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`."""
        check_change(data, extras)
        state = self._fenced(epoch)
        message = self._message(state, serial)
        if 1 <= seq <= message.applied:
            return version_at(message.version, state.series)
        if seq != message.applied + 1:
            raise out_of_order(self.name, serial, seq, message.applied)
        if not isinstance(message.data, str):
            raise not_text(self.name, serial)
        message.applied = seq
        message.data += data
        return self._changed(state, message, data, message.extras if extras is None else extras)

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        state = self._fenced(epoch)
        message = self._message(state, serial)
        message.data = data
        return self._changed(state, message, None, extras)

    def _changed(self, state: _State, message: _Message, delta: str | None, extras: Extras | None) -> str:
        state.head += 1
        message.version = state.head
        message.extras = extras
        message.timestamp = self._now()
        if delta is None or not is_open_stream(extras):
            # The text is whole, in the message: the rows before this one say nothing more.
            for position in message.deltas:
                state.drop(position)
            message.deltas.clear()
            delta = None
        else:
            message.deltas.append(state.head)
        state.log.append(_Entry(message, message.timestamp, delta, extras))
        state.wake()
        return version_at(state.head, state.series)

    def _fenced(self, epoch: int | None) -> _State:
        state = self._provider.state(self.name)
        if epoch is not None and epoch < state.fence:
            raise fenced(self.name, epoch, state.fence)
        return state

    def _message(self, state: _State, serial: str) -> _Message:
        message = state.messages.get(serial_position(serial, state.series))
        if message is None or serial_at(message.position, state.series, message.index) != serial:
            raise missing(self.name, serial)
        return message

    def _now(self) -> int:
        return int(self._provider.clock.time() * 1000)

    # -- reading

    def subscribe(self, *, after: Cursor | None = None) -> AbstractAsyncContextManager[Subscription]:
        """See `Channel.subscribe`."""
        return open_reader(self, after)

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        """See `Channel.history`."""
        return await read_history(self, before, limit)

    # -- the `Log` of its readers

    async def bounds(self) -> Bounds:
        """See `Log`."""
        state = self._provider.state(self.name)
        return Bounds(state.series, state.head, state.floor)

    async def find(self) -> Bounds | None:
        """See `Log`."""
        return await self.bounds() if self._provider.knows(self.name) else None

    async def rows(self, series: str, after: int, limit: int) -> Page | None:
        """See `Log`."""
        state = self._provider.state(self.name)
        if series != state.series or after < state.floor:
            return None
        rows: list[Row] = []
        for position in range(after + 1, state.head + 1):
            entry = state.log[position - state.base - 1]
            if entry is not None:
                rows.append(_row(entry, position))
                if len(rows) == limit:
                    return Page(rows, position)
        return Page(rows, state.head)

    async def message(self, position: int) -> Row | None:
        """See `Log`."""
        message = self._provider.state(self.name).messages.get(position)
        return message.row(position) if message is not None else None

    async def messages(self, after: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        state = self._provider.state(self.name)
        first = bisect_right(state.places, after)
        return [state.messages[place].row(place) for place in state.places[first : first + limit]]

    async def messages_before(self, before: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        state = self._provider.state(self.name)
        end = bisect_right(state.places, before)
        return [state.messages[place].row(place) for place in reversed(state.places[max(0, end - limit) : end])]

    async def wait(self, series: str, after: int) -> None:
        """See `Log`."""
        state = self._provider.state(self.name)
        if series != state.series or state.head > after:
            return
        waiter = asyncio.get_running_loop().create_future()
        state.waiters.append(waiter)
        try:
            await waiter
        finally:
            with contextlib.suppress(ValueError):
                state.waiters.remove(waiter)


def _row(entry: _Entry, position: int) -> Row:
    message = entry.message
    if entry.delta is None:
        return message.row(position)
    return Row(
        position,
        message.position,
        message.index,
        position,
        "append",
        None,
        entry.delta,
        entry.extras,
        message.client_id,
        entry.timestamp,
    )
