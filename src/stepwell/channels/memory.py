"""Channels in memory: for tests, and for one process that may forget."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from stepwell._clock import Clock, SystemClock
from stepwell._json import json_copy
from stepwell.wire import (
    Capabilities,
    Data,
    Extras,
    WireMessage,
    check_append,
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

from ._encoding import EPHEMERAL_SECONDS
from ._reader import Bounds, LogChannel, Page, Row
from ._refusals import check_epoch, closed, fenced, missing, not_text, out_of_order

__all__ = ["MemoryChannel", "MemoryChannels"]


class _Message:
    """A message as it is now.

    Attributes:
        position: Where it was created.
        version: Position of its newest mutation.
        applied: Appends so far.
        rows: Positions of the rows that it has in the log besides its create.
    """

    __slots__ = (
        "_data",
        "_more",
        "applied",
        "client_id",
        "extras",
        "index",
        "key",
        "name",
        "position",
        "rows",
        "timestamp",
        "version",
    )

    def __init__(self, position: int, index: int, given: WireMessage, timestamp: int) -> None:
        self.position = self.version = position
        self.index = index
        self.name = given.name
        self._data: Data = json_copy(given.data)
        self._more: list[str] = []  # appended since the text was last put together: each time it would be copied whole
        self.extras: Extras | None = json_copy(given.extras)
        self.client_id = given.client_id
        self.key = given.idempotency_id
        self.timestamp = timestamp
        self.applied = 0
        self.rows: list[int] = []

    @property
    def data(self) -> Data:
        if self._more:
            assert isinstance(self._data, str)
            self._data += "".join(self._more)
            self._more.clear()
        return self._data

    @property
    def is_text(self) -> bool:
        return isinstance(self._data, str)

    def append(self, text: str) -> None:
        self._more.append(text)

    def replace(self, data: Data) -> None:
        self._data = data
        self._more.clear()

    def row(self, position: int) -> Row:
        """The whole message, at a position of the log."""
        return Row(
            position,
            self.position,
            self.index,
            self.version,
            self.name,
            self.data,
            self.extras,
            self.client_id,
            self.timestamp,
        )


class _Entry(msgspec.Struct, frozen=True):
    """A row of the log; `delta` None stands for the whole message as it is now."""

    message: _Message
    timestamp: int
    delta: str | None = None
    extras: Extras | None = None


class _State:
    """Everything of one channel. Replaced as a whole when it is deleted."""

    def __init__(self) -> None:
        self.series = new_series()
        self.head = 0
        self.fence = 0
        self.floor = 0
        self.log: list[_Entry | int] = []  # from position `floor` + 1 on; of a row that says nothing more its time
        self.messages: dict[int, _Message] = {}
        self.places: list[int] = []  # positions of the messages that are not ephemeral, in order
        self.ids: dict[str, str] = {}
        self.ephemeral: dict[int, _Message] = {}  # those changed last are last
        self.waiters: dict[asyncio.Future[None], None] = {}  # woken in the order in which they came

    def add(self, entry: _Entry) -> None:
        """Give the next position to a row."""
        self.head += 1
        self.log.append(entry)

    def drop(self, position: int) -> None:
        """A row says nothing more."""
        if position > self.floor:
            entry = self.log[position - self.floor - 1]
            self.log[position - self.floor - 1] = entry if isinstance(entry, int) else entry.timestamp

    def forget(self, now: float, retention: float | None) -> None:
        """Let go what is due."""
        limit = (now - EPHEMERAL_SECONDS) * 1000
        while self.ephemeral:
            position, message = next(iter(self.ephemeral.items()))
            if message.timestamp > limit:
                break
            del self.ephemeral[position], self.messages[position]
            if message.key is not None:
                del self.ids[message.key]
            for row in (position, *message.rows):
                self.drop(row)
        if retention is not None:
            limit = (now - retention) * 1000
            times = (entry if isinstance(entry, int) else entry.timestamp for entry in self.log)
            count = next((i for i, time in enumerate(times) if time > limit), len(self.log))
            self.floor += count
            del self.log[:count]

    def wake(self) -> None:
        """Let the readers look."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)


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
        state.forget(self.clock.time(), self.retention)
        return state

    def knows(self, name: str) -> bool:
        """Whether there is such a channel."""
        self.check_open()
        return name in self._states

    def check_open(self) -> None:
        """Raise `ChannelError` if this was closed."""
        if self.closed:
            raise closed()


class MemoryChannel(LogChannel):
    """A `Channel` of `MemoryChannels`."""

    def __init__(self, provider: MemoryChannels, name: str) -> None:
        self._provider = provider
        self.name = name

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`."""
        self._fenced(epoch).fence = check_epoch(epoch)

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
        position = state.head + 1
        message = _Message(position, index, given, now)
        state.add(_Entry(message, now))
        state.messages[position] = message
        if is_ephemeral(given.extras):
            state.ephemeral[position] = message
        else:
            state.places.append(position)
        serial = serial_at(position, state.series, index)
        if message.key is not None:
            state.ids[message.key] = serial
        return serial

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`."""
        check_append(data, extras)
        state = self._fenced(epoch)
        message = self._message(state, serial)
        if 1 <= seq <= message.applied:
            return version_at(message.version, state.series)
        if seq != message.applied + 1:
            raise out_of_order(self.name, serial, seq, message.applied)
        if not message.is_text:
            raise not_text(self.name, serial)
        message.applied = seq
        message.append(data)
        return self._changed(state, message, data, message.extras if extras is None else json_copy(extras))

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        state = self._fenced(epoch)
        message = self._message(state, serial)
        message.replace(json_copy(data))
        return self._changed(state, message, None, json_copy(extras))

    def _changed(self, state: _State, message: _Message, delta: str | None, extras: Extras | None) -> str:
        now = self._now()
        message.extras, message.timestamp = extras, now
        if delta is not None and is_open_stream(extras):
            state.add(_Entry(message, now, delta, extras))
        else:
            # The message is whole: its rows before this one say nothing more.
            for position in message.rows:
                state.drop(position)
            message.rows.clear()
            state.add(_Entry(message, now))
        message.version = state.head
        message.rows.append(state.head)
        if message.position in state.ephemeral:
            state.ephemeral[message.position] = state.ephemeral.pop(message.position)
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
            entry = state.log[position - state.floor - 1]
            if not isinstance(entry, int):
                rows.append(_row(entry, position))
                if len(rows) == limit:
                    return Page(rows, position)
        return Page(rows, max(after, state.head))

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
        state.waiters[waiter] = None
        try:
            await waiter
        finally:
            state.waiters.pop(waiter, None)


def _row(entry: _Entry, position: int) -> Row:
    message = entry.message
    if entry.delta is None:
        return message.row(position)
    return Row(
        position,
        message.position,
        message.index,
        position,
        None,
        entry.delta,
        entry.extras,
        message.client_id,
        entry.timestamp,
    )
