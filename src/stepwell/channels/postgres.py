"""Channels in PostgreSQL 13 or newer, shared by the processes of many machines.

What is stored and the functions that write it: `_postgres_schema`. How this process talks to the server:
`_postgres_line` and `_postgres_bell`. Writes that are called at the same time share a statement, and so a round trip
and a commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, LiteralString, NoReturn
from zlib import crc32

from psycopg.rows import TupleRow

from stepwell._clock import Clock
from stepwell._postgres import Connections, repeat_conflicts
from stepwell._postgres.arrays import Blobs, Booleans, Numbers, Texts
from stepwell.errors import InvalidInputError
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
    serial_at,
    serial_position,
    version_at,
)

from ._encoding import decode_data, encode_data, join_extras, split_extras
from ._postgres_bell import GONE, Bell
from ._postgres_line import Line
from ._postgres_schema import APPEND, CONTINUE, CREATE, FENCE, FENCED, GAP, NOT_TEXT, OK, PART, UPDATE
from ._reader import Bounds, LogChannel, Page, Row
from ._refusals import check_epoch, closed, fenced, missing, not_text, out_of_order

__all__ = ["PostgresChannel", "PostgresChannels"]

LINES: Final = 2
"""Statements that write at the same time. A channel's writes are all in one line, so that they keep their order."""

MAX_NUMBER: Final = 2**62
"""Above every fence, position and count."""

_COLUMNS: Final = (
    *(Texts, Numbers),
    *(Texts, Numbers, Numbers, Numbers),
    *(Blobs, Blobs, Blobs, Booleans),
    *(Booleans, Blobs, Booleans, Blobs, Blobs, Blobs),
)
"""Types of what `_row_of` makes."""

_WRITE: Final = (
    "SELECT * FROM stepwell_channel_write_1(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s,"
    " %s)"
)

_FIND: Final = "SELECT series, head, floor FROM stepwell_channel WHERE name = %s"
_MAKE: Final = "INSERT INTO stepwell_channel (name) VALUES (%s) ON CONFLICT DO NOTHING"

_NOW: Final[LiteralString] = "coalesce(%(now)s, extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_ALIVE: Final[LiteralString] = f"(NOT m.ephemeral OR m.changed > {_NOW} - 60000)"
_MESSAGE: Final[LiteralString] = (
    "m.position, m.place, m.whole, m.name, m.text, m.data, h.headers, m.rest, m.client, m.changed"
)
_HEADERS: Final[LiteralString] = "LEFT JOIN stepwell_channel_headers h ON h.channel = m.channel AND h.hash = m.headers"

# One statement, so one moment: rows that are freed at the end of a stream are there, or its text is.
_ROWS: Final[LiteralString] = f"""
WITH log AS (SELECT id, head, floor FROM stepwell_channel WHERE series = %(series)s)
SELECT 0, head, floor, 0, 0, NULL::bytea, false, NULL::bytea, NULL::bytea, NULL::bytea, NULL::bytea, 0
FROM log
UNION ALL (
    SELECT 1, m.position, {_MESSAGE}
    FROM stepwell_channel_message m {_HEADERS}
    WHERE m.channel = (SELECT id FROM log) AND m.position > %(after)s AND {_ALIVE}
    ORDER BY m.position LIMIT %(limit)s)
UNION ALL (
    SELECT 1, m.whole, {_MESSAGE}
    FROM stepwell_channel_message m {_HEADERS}
    WHERE m.channel = (SELECT id FROM log) AND m.whole > %(after)s AND m.whole > m.position AND {_ALIVE}
    ORDER BY m.whole LIMIT %(limit)s)
UNION ALL (
    SELECT 1, a.position, m.position, m.place, a.position, NULL, true, a.data, h.headers, coalesce(a.rest, m.rest),
        m.client, a.changed
    FROM stepwell_channel_append a
    JOIN stepwell_channel_message m ON m.channel = a.channel AND m.position = a.message
    LEFT JOIN stepwell_channel_headers h ON h.channel = a.channel
        AND h.hash = CASE WHEN a.rest IS NULL THEN m.headers ELSE a.headers END
    WHERE a.channel = (SELECT id FROM log) AND a.position > %(after)s
    ORDER BY a.position LIMIT %(limit)s)
"""  # noqa: S608 - put together from constants

# Messages as they are now: a stream that is open with its appends, and the extras of the last of them.
_WHOLE: Final[LiteralString] = """
SELECT m.position, m.place, coalesce(a.position, m.whole), m.name, m.text,
    CASE WHEN a.position IS NULL THEN m.data ELSE m.data || (
        SELECT string_agg(data, '' ORDER BY seq) FROM stepwell_channel_append
        WHERE channel = m.channel AND message = m.position) END,
    h.headers, coalesce(a.rest, m.rest), m.client, coalesce(a.changed, m.changed)
FROM stepwell_channel_message m
LEFT JOIN LATERAL (
    SELECT position, headers, rest, changed FROM stepwell_channel_append
    WHERE channel = m.channel AND message = m.position ORDER BY seq DESC LIMIT 1
) a ON m.open
LEFT JOIN stepwell_channel_headers h ON h.channel = m.channel
    AND h.hash = CASE WHEN a.rest IS NULL THEN m.headers ELSE a.headers END
WHERE m.channel = (SELECT id FROM stepwell_channel WHERE name = %(name)s) AND """
_ONE: Final[LiteralString] = f"{_WHOLE} m.position = %(position)s AND {_ALIVE}"
_AFTER: Final[LiteralString] = (
    f"{_WHOLE} m.position > %(position)s AND NOT m.ephemeral ORDER BY m.position LIMIT %(limit)s"
)
_BEFORE: Final[LiteralString] = (
    f"{_WHOLE} m.position <= %(position)s AND NOT m.ephemeral ORDER BY m.position DESC LIMIT %(limit)s"
)

_place = attrgetter("position")


class PostgresChannels:
    """Channels in a PostgreSQL database, which anything else may share.

    Acknowledged is committed: as safe as the server's `synchronous_commit` makes it. The tables are made by the first
    call; their names begin with `stepwell_channel`, in the first schema of the connection's `search_path`. The user
    needs the right to create there; when the tables exist, to select, insert, update and delete in them is enough.

    Every process holds one connection that listens (`LISTEN`), so a pooler must keep sessions apart.

    Args:
        url: `postgresql://[user:password@]host:5432/database`, with libpq's options as query. For TLS: `sslmode`.
        retention: Seconds of log kept; None keeps it. By the server's clock.
        pool_size: Connections at most, besides the one that listens.
        timeout: Seconds for a call at the server before `ChannelBusyError`.
        poll: Seconds after which a reader looks for itself, should a notification have been lost.
        clock: For timestamps and retention instead of the server's clock: for tests.

    Raises:
        InvalidInputError: The URL is not one, or the pool is too small. Nothing is connected to before the first call.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        url: str,
        *,
        retention: float | None = None,
        pool_size: int = 8,
        timeout: float = 10.0,
        poll: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        if pool_size < LINES + 2:
            raise InvalidInputError(f"A pool of {pool_size} connections is too small: at least {LINES + 2}.")
        self.retention = retention
        self._clock = clock
        self._connections = Connections(url, timeout, PART)
        self._lines = [Line(self._send) for _ in range(LINES)]
        self._readers = asyncio.Semaphore(pool_size - LINES - 1)  # so that no page of history delays a write
        self._bell = Bell(self._connections, poll)
        self._closed = False

    async def open(self, name: str) -> PostgresChannel:
        """See `ChannelProvider.open`."""
        self._check_open()
        return PostgresChannel(self, check_channel_name(name))

    async def delete(self, name: str) -> None:
        """See `ChannelProvider.delete`."""
        check_channel_name(name)
        for (series,) in await self.read("SELECT stepwell_channel_delete_1(%s)", (name,)):
            self._bell.ring(series, GONE)
        more = True
        while more:
            [(more,)] = await self.read("SELECT stepwell_channel_purge_1()", ())

    async def close(self) -> None:
        """See `ChannelProvider.close`."""
        self._closed = True
        for line in self._lines:
            await line.finish()
        await self._bell.close()
        await self._connections.close()

    async def __aenter__(self) -> PostgresChannels:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    # -- what its channels share

    def now(self) -> int | None:
        """The time for a statement; None for the server's."""
        return None if self._clock is None else int(self._clock.time() * 1000)

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]], size: int) -> list[TupleRow]:
        """Write rows, as `_row_of` makes them, to a channel; once, because repeating is the caller's decision."""
        self._check_open()
        results = await self._lines[crc32(name.encode()) % LINES].call(name, rows, size)
        last = results[-1]
        if last[0] == OK and last[2] is not None:
            self._bell.ring(last[1], last[2])
        return results

    async def _send(self, channels: list[str], sizes: list[int], rows: list[tuple[Any, ...]]) -> list[TupleRow]:
        retention = None if self.retention is None else int(self.retention * 1000)
        columns = (made(column) for made, column in zip(_COLUMNS, zip(*rows, strict=True), strict=True))
        values = (self.now(), retention, Texts(channels), Numbers(sizes), *columns)
        async with self._connections.take() as connection:
            cursor = connection.cursor(binary=True)
            return await repeat_conflicts(lambda: _fetch(cursor.execute(_WRITE, values)))

    async def read(self, query: LiteralString, values: Any) -> list[TupleRow]:
        """Run a statement once."""
        self._check_open()
        async with self._readers, self._connections.take() as connection:
            cursor = connection.cursor(binary=True)
            return await repeat_conflicts(lambda: _fetch(cursor.execute(query, values)))

    async def wait(self, series: str, after: int, head: Callable[[], Awaitable[int]]) -> None:
        """See `Bell.wait`."""
        self._check_open()
        await self._bell.wait(series, after, head)

    def _check_open(self) -> None:
        if self._closed:
            raise closed()


class PostgresChannel(LogChannel):
    """A `Channel` of `PostgresChannels`."""

    def __init__(self, provider: PostgresChannels, name: str) -> None:
        self._provider = provider
        self.name = name

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`."""
        [(outcome, _, number, _)] = await self._provider.write(self.name, [_row_of(FENCE, check_epoch(epoch))], 0)
        if outcome == FENCED:
            raise fenced(self.name, epoch, number)

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """See `Channel.publish`."""
        check_messages(messages)
        rows: list[tuple[Any, ...]] = []
        size = 0
        for message in messages:
            content = _content(message.data, message.extras)
            size += _size(content)
            rows.append(
                _row_of(
                    CONTINUE if rows else CREATE,
                    epoch,
                    create=(
                        message.name.encode(),
                        None if message.client_id is None else message.client_id.encode(),
                        None if message.idempotency_id is None else _hash(message.idempotency_id.encode()),
                        is_ephemeral(message.extras),
                    ),
                    content=content,
                )
            )
        results = await self._provider.write(self.name, rows, size)
        outcome, _, number, _ = results[0]
        if outcome == FENCED:  # one epoch, so all of them are
            raise fenced(self.name, epoch or 0, number)
        return [serial_at(position, series, place) for _, series, position, place in results]

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`."""
        check_append(data, extras)
        return await self._change(APPEND, serial, epoch, seq, _content(data, extras))

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        return await self._change(UPDATE, serial, epoch, 0, _content(data, extras))

    async def _change(self, kind: str, serial: str, epoch: int | None, seq: int, content: tuple[Any, ...]) -> str:
        series = serial.rpartition("@")[2][:10]
        position = serial_position(serial, series)
        target = (series, position, int(serial[-3:]), _limited(seq))
        row = _row_of(kind, epoch, target=target, content=content)
        [(outcome, _, number, _)] = await self._provider.write(self.name, [row], _size(content))
        if outcome != OK:
            self._refuse(outcome, number, serial, epoch or 0, seq)
        return version_at(number, series)

    def _refuse(self, outcome: str, number: int, serial: str, epoch: int, seq: int) -> NoReturn:
        if outcome == FENCED:
            raise fenced(self.name, epoch, number)
        if outcome == GAP:
            raise out_of_order(self.name, serial, seq, number)
        raise not_text(self.name, serial) if outcome == NOT_TEXT else missing(self.name, serial)

    # -- the `Log` of its readers

    async def bounds(self) -> Bounds:
        """See `Log`."""
        while True:
            found = await self.find()
            if found is not None:
                return found
            await self._provider.read(_MAKE, (self.name,))

    async def find(self) -> Bounds | None:
        """See `Log`."""
        found = await self._provider.read(_FIND, (self.name,))
        return Bounds(*found[0]) if found else None

    async def rows(self, series: str, after: int, limit: int) -> Page | None:
        """See `Log`."""
        values = {"series": series, "after": after, "limit": limit, "now": self._provider.now()}
        found = await self._provider.read(_ROWS, values)
        bounds = next((row for row in found if row[0] == 0), None)
        if bounds is None or after < bounds[2]:
            return None
        rows = [_row(place, message) for kind, place, *message in found if kind]
        rows.sort(key=_place)
        return Page.cut(rows, limit, max(bounds[1], after))

    async def message(self, position: int) -> Row | None:
        """See `Log`."""
        rows = await self._list(_ONE, position, 1)
        return rows[0] if rows else None

    async def messages(self, after: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return await self._list(_AFTER, after, limit)

    async def messages_before(self, before: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return await self._list(_BEFORE, before, limit)

    async def _list(self, query: LiteralString, position: int, limit: int) -> list[Row]:
        values = {"name": self.name, "position": position, "limit": limit, "now": self._provider.now()}
        return [_row(message[0], message) for message in await self._provider.read(query, values)]

    async def wait(self, series: str, after: int) -> None:
        """See `Log`."""
        await self._provider.wait(series, after, partial(self._head, series))

    async def _head(self, series: str) -> int:
        found = await self._provider.read("SELECT head FROM stepwell_channel WHERE series = %s", (series,))
        return found[0][0] if found else GONE


async def _fetch(executed: Awaitable[Any]) -> list[TupleRow]:
    cursor = await executed
    return await cursor.fetchall() if cursor.description else []


def _limited(number: int) -> int:
    """What PostgreSQL can compare, with a result that is the same."""
    return max(-1, min(number, MAX_NUMBER))


def _row_of(
    kind: str,
    epoch: int | None,
    *,
    target: tuple[Any, ...] = (None, None, None, None),
    create: tuple[Any, ...] = (None, None, None, False),
    content: tuple[Any, ...] = (False, None, False, None, None, None),
) -> tuple[Any, ...]:
    """A row of a write, as the function's arrays have it."""
    return (kind, None if epoch is None else _limited(epoch), *target, *create, *content)


def _content(data: Data, extras: Extras | None) -> tuple[Any, ...]:
    is_text, stored = encode_data(data)
    shared, rest = split_extras(extras)
    headers = None if shared is None else shared.encode()
    return (
        is_text,
        None if stored is None else stored.encode(),
        is_open_stream(extras),
        None if headers is None else _hash(headers),
        headers,
        None if rest is None else rest.encode(),
    )


def _size(content: tuple[Any, ...]) -> int:
    return sum(len(part) for part in content if isinstance(part, bytes))


def _hash(value: bytes) -> bytes:
    return blake2b(value, digest_size=16).digest()


def _row(at: int, found: Sequence[Any]) -> Row:
    message, place, version, name, text, data, headers, rest, client, changed = found
    return Row(
        at,
        message,
        place,
        version,
        _text(name),
        decode_data(text, _text(data)),
        join_extras(_text(headers), _text(rest)),
        _text(client),
        changed,
    )


def _text(stored: bytes | None) -> str | None:
    return None if stored is None else stored.decode()
