"""Channels in Redis 7 or newer, shared by the processes of many machines.

What is stored, and the scripts that every write and read is one call of: `_redis_scripts`. Three connections a process:
one for writes, one for reads, so that a page of history delays no write, and one that tells readers to look.
"""

from __future__ import annotations

import contextlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

import msgspec
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from stepwell._clock import Clock
from stepwell.errors import ChannelDataError, InvalidInputError
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

from ._encoding import decode_data, encode_data, join_extras, key_of, split_extras
from ._reader import Bounds, LogChannel, Page, Row
from ._redis_line import Bell, Line
from ._redis_scripts import APPEND, BOUNDS, DELETE, FENCE, MESSAGE, MESSAGES, PUBLISH, ROWS, UPDATE
from ._refusals import check_epoch, closed, fenced, missing, not_text, out_of_order

__all__ = ["RedisChannel", "RedisChannels"]

MAX_POSITION: Final = 2**53
"""Lua's numbers are exact up to here."""

_pack = msgspec.msgpack.Encoder().encode


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """A message; see `_redis_scripts`. False stands for none."""

    kind: str
    index: int
    version: int
    time: int
    applied: int
    whole: int
    same: bool
    ext: int | bool
    rest: str | bool
    data: str | bool
    name: str
    client: str | bool


class _Found(msgspec.Struct, array_like=True, frozen=True):
    place: int
    message: int
    record: _Record
    text: str | bool


class _AppendRow(msgspec.Struct, array_like=True, frozen=True):
    """Extras are those of the message's create unless `rest` is given."""

    time: int
    text: str
    ext: int | bool = False
    rest: str | bool | None = None


_Headers = list[tuple[int, str]]

_read_messages: Final = msgspec.msgpack.Decoder(tuple[list[_Found], _Headers]).decode
_read_rows: Final = msgspec.msgpack.Decoder(
    tuple[int, list[_Found], _Headers, list[tuple[int, int, _AppendRow]], list[tuple[int, _Record]]]
).decode


class RedisChannels:
    """Channels in a Redis server, version 7 or newer.

    What is acknowledged is as safe as the server's `appendfsync` makes it: with `always` on its disk, with `everysec` a
    crash of the server's machine loses up to a second. Replication is asynchronous: a failover may lose what was
    acknowledged last, messages and fences alike. A reader then gets a `Gap` where it can be noticed; a writer whose
    fence was lost is not refused any more. Where that matters, use PostgreSQL.

    The server must not evict these keys: set `maxmemory-policy` to `noeviction`. A user with limited rights needs
    `EVAL`, `EVALSHA`, `TIME`, `SUBSCRIBE`, `PUBLISH` and the commands on hashes, streams, strings and sorted sets, for
    the keys and the pub/sub channels `<prefix>:*`. All keys of a channel are in one slot, but only a single server, or
    a proxy before a cluster, can be connected to.

    Args:
        url: `redis://[user:password@]host:6379/0`, or `rediss://` for TLS, with redis-py's options as query.
        retention: Seconds of log kept; None keeps it.
        prefix: Of all keys.
        timeout: Seconds for a call before `ChannelBusyError`.
        clock: For timestamps and retention instead of the server's clock: for tests.

    Raises:
        InvalidInputError: The URL or the prefix is not one.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        url: str,
        *,
        retention: float | None = None,
        prefix: str = "stepwell",
        timeout: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        if not prefix or not prefix.isascii() or not prefix.isprintable() or set(prefix) & set("{} "):
            raise InvalidInputError("The prefix of the keys must be ASCII text without spaces and braces.", "/prefix")
        self.retention = retention
        self.prefix = prefix
        make = _connector(url, timeout)
        self._clock = clock
        self._closed = False
        self._writes = Line(make, timeout)
        self._reads = Line(make, timeout)
        self._bell = Bell(make, timeout)

    async def open(self, name: str) -> RedisChannel:
        """See `ChannelProvider.open`."""
        self._check_open()
        return RedisChannel(self, check_channel_name(name))

    async def delete(self, name: str) -> None:
        """See `ChannelProvider.delete`."""
        await self.write(DELETE, self.key(check_channel_name(name)))

    async def close(self) -> None:
        """See `ChannelProvider.close`."""
        self._closed = True
        await self._bell.close()
        await self._writes.close()
        await self._reads.close()

    async def __aenter__(self) -> RedisChannels:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    # -- what its channels share

    def key(self, name: str) -> str:
        """Of a channel; its other keys begin with it."""
        return f"{self.prefix}:{{{name}}}"

    def now(self) -> str:
        """The time for the scripts; empty for the server's."""
        return "" if self._clock is None else str(int(self._clock.time() * 1000))

    async def write(self, *command: Any) -> Any:
        """Call a script that writes; once, because repeating is the caller's decision."""
        self._check_open()
        return await self._writes.call(*command)

    async def read(self, *command: Any) -> Any:
        """Call a script that only reads, once."""
        self._check_open()
        return await self._reads.call(*command)

    async def wait(
        self, name: str, known: tuple[int, str], head: Callable[[], Awaitable[tuple[int, str] | None]]
    ) -> None:
        """See `Bell.wait`."""
        self._check_open()
        await self._bell.wait(f"{self.key(name)}:bell", known, head)

    def _check_open(self) -> None:
        if self._closed:
            raise closed()


class RedisChannel(LogChannel):
    """A `Channel` of `RedisChannels`."""

    def __init__(self, provider: RedisChannels, name: str) -> None:
        self._provider = provider
        self._key = provider.key(name)
        self.name = name

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`."""
        reply = await self._provider.write(FENCE, self._key, "", new_series(), str(check_epoch(epoch)))
        if reply[0] == b"fenced":
            raise fenced(self.name, epoch, int(reply[1]))

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """See `Channel.publish`."""
        check_messages(messages)
        retention = self._provider.retention
        reply = await self._provider.write(
            PUBLISH,
            self._key,
            self._provider.now(),
            new_series(),
            _text(epoch),
            "" if retention is None else str(int(retention * 1000)),
            *(_given(message) for message in messages),
        )
        if reply[0] == b"fenced":
            raise fenced(self.name, epoch or 0, int(reply[1]))
        series = reply[1].decode()
        return [serial_at(reply[i], series, reply[i + 1]) for i in range(2, len(reply), 2)]

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`."""
        check_append(data, extras)
        mode, shared, rest = "keep", None, None
        if extras is not None:
            mode = "open" if is_open_stream(extras) else "closed"
            shared, rest = split_extras(extras)
        return await self._change(APPEND, serial, epoch, str(seq), data, mode, shared or "", rest or "", seq=seq)

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        kind, stored = _kind(data, extras)
        shared, rest = split_extras(extras)
        return await self._change(UPDATE, serial, epoch, kind, stored or "", shared or "", rest or "")

    async def _change(self, script: str, serial: str, epoch: int | None, *args: str, seq: int = 0) -> str:
        series = serial.rpartition("@")[2][:10]
        position, index = serial_position(serial, series), int(serial[-3:])
        if position > MAX_POSITION:
            raise missing(self.name, serial)
        reply = await self._provider.write(
            script, self._key, self._provider.now(), series, _text(epoch), str(position), str(index), *args
        )
        if reply[0] != b"ok":
            self._refuse(reply, serial, epoch or 0, seq)
        return version_at(int(reply[1]), series)

    def _refuse(self, reply: Any, serial: str, epoch: int, seq: int) -> NoReturn:
        if reply[0] == b"fenced":
            raise fenced(self.name, epoch, int(reply[1]))
        if reply[0] == b"gap":
            raise out_of_order(self.name, serial, seq, int(reply[1]))
        raise not_text(self.name, serial) if reply[0] == b"text" else missing(self.name, serial)

    # -- the `Log` of its readers

    async def bounds(self) -> Bounds:
        """See `Log`."""
        # A script of the writing line: it makes the log if there is none.
        return _bounds(await self._provider.write(BOUNDS, self._key, "", new_series()))

    async def find(self) -> Bounds | None:
        """See `Log`."""
        found = await self._provider.read("HMGET", self._key, "series", "head", "floor")
        return None if found[0] is None else _bounds(found)

    async def rows(self, series: str, after: int, limit: int) -> Page | None:
        """See `Log`."""
        reply = await self._provider.read(ROWS, self._key, series, str(after), str(limit), self._provider.now())
        if reply is None:
            return None
        with _readable():
            head, found, headers, appends, heads = _read_rows(reply)
            shared, created = dict(headers), dict(heads)
            rows = [_row(one, shared) for one in found]
            rows += [_append_row(*one, created, shared) for one in appends]
        rows.sort(key=_place)
        return Page.cut(rows, limit, max(head, after))

    async def message(self, position: int) -> Row | None:
        """See `Log`."""
        rows = _rows(await self._provider.read(MESSAGE, self._key, str(position), self._provider.now()))
        return rows[0] if rows else None

    async def messages(self, after: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return _rows(await self._provider.read(MESSAGES, self._key, "after", str(after), str(limit)))

    async def messages_before(self, before: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return _rows(await self._provider.read(MESSAGES, self._key, "before", str(before), str(limit)))

    async def wait(self, series: str, after: int) -> None:
        """See `Log`."""
        await self._provider.wait(self.name, (after, series), self._head)

    async def _head(self) -> tuple[int, str] | None:
        found = await self.find()
        return None if found is None else (found.head, found.series)


def _connector(url: str, timeout: float) -> Callable[[], AbstractConnection]:
    """What makes connections to a URL."""
    try:
        pool: ConnectionPool = ConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]
            url,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            maint_notifications_config=MaintNotificationsConfig(enabled=False),  # a managed service's, needs RESP 3
        )
        # Whatever the URL says: replies are bytes, in the protocol where what is published comes as a reply, and how
        # long to wait for one is decided by who waits.
        pool.connection_kwargs.update(decode_responses=False, protocol=2, socket_timeout=None, health_check_interval=0)
        pool.make_connection()  # finds options that there are not
    except (ValueError, TypeError):
        # The URL and what is said about it are not repeated: it may hold a password.
        raise InvalidInputError(
            "The URL of the channels is not one of Redis: write redis://host:6379/0.", "/channels"
        ) from None
    return pool.make_connection


def _text(epoch: int | None) -> str:
    return "" if epoch is None else str(epoch)


def _kind(data: Data, extras: Extras | None) -> tuple[str, str | None]:
    is_text, stored = encode_data(data)
    if stored is None:
        return "n", None
    if not is_text:
        return "j", stored
    return ("s" if is_open_stream(extras) else "t"), stored


def _given(message: WireMessage) -> bytes:
    """A message as the script takes it."""
    key: str | bool = False
    if message.idempotency_id is not None:
        key = b64encode(key_of(message.idempotency_id)).decode()
    kind, data = _kind(message.data, message.extras)
    shared, rest = split_extras(message.extras)
    parts = (message.client_id, shared, rest, data)
    given = (key, kind, message.name, *(False if part is None else part for part in parts))
    return _pack((*given, is_ephemeral(message.extras)))


def _bounds(found: Sequence[bytes]) -> Bounds:
    return Bounds(found[0].decode(), int(found[1]), int(found[2]))


@contextlib.contextmanager
def _readable():
    try:
        yield
    except (msgspec.DecodeError, KeyError) as error:
        raise ChannelDataError("What this channel holds cannot be read: was it written by a newer Stepwell?") from error


def _rows(reply: bytes) -> list[Row]:
    with _readable():
        found, headers = _read_messages(reply)
        shared = dict(headers)
        return [_row(one, shared) for one in found]


def _row(found: _Found, shared: dict[int, str]) -> Row:
    record = found.record
    stored = found.text if found.text is not False else record.data
    return Row(
        found.place,
        found.message,
        record.index,
        record.version,
        record.name,
        decode_data(record.kind != "j", _or_none(stored)),
        _extras(record.ext, record.rest, shared),
        _or_none(record.client),
        record.time,
    )


def _append_row(place: int, message: int, row: _AppendRow, created: dict[int, _Record], shared: dict[int, str]) -> Row:
    record = created[message]
    ext, rest = (record.ext, record.rest) if row.rest is None else (row.ext, row.rest)
    return Row(
        place,
        message,
        record.index,
        place,
        None,
        row.text,
        _extras(ext, rest, shared),
        _or_none(record.client),
        row.time,
    )


def _extras(ext: int | bool, rest: str | bool, shared: dict[int, str]) -> Extras | None:
    return join_extras(None if ext is False else shared[ext], _or_none(rest))


def _or_none(value: str | bool) -> str | None:
    return value if isinstance(value, str) else None


def _place(row: Row) -> int:
    return row.position
