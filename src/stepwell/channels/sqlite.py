"""Channels in an SQLite file: the embedded default, shared by the processes of one machine.

One row per message, holding its text as of the last time it was whole; one row per append to a stream that is still
open. Closing a stream writes the whole text and frees the appends in the same transaction. A message is its position,
and positions are given out in the transaction that stores the row: SQLite has one writer at a time, so a reader that
goes by position misses none.

Readers of this process are woken by its own commits. Other processes' commits are noticed by a look at
`PRAGMA data_version` every few milliseconds, while anybody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b
from heapq import merge
from typing import Any, Final, Literal, TypeVar

from stepwell._clock import Clock, SystemClock
from stepwell._sqlite import Part, SqliteOwner, acquire_owner, release_owner
from stepwell.errors import ChannelBusyError, ChannelDataError, ChannelError, StoreBusyError, StoreDataError, StoreError
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

from ._folding import (
    EPHEMERAL_SECONDS,
    decode_data,
    encode_data,
    fenced,
    join_extras,
    missing,
    not_text,
    out_of_order,
    split_extras,
)
from ._reader import Bounds, Page, Row, open_reader, read_history

__all__ = ["SqliteChannel", "SqliteChannels"]

T = TypeVar("T")
Synchronous = Literal["normal", "full"]

POLL_SECONDS: Final = 0.01
"""How often the commits of other processes are looked for, while anybody reads."""

HOUSEKEEPING_SECONDS: Final = 5.0
"""How often a channel that is written to is looked through for what is due to go."""

# `floor`: cursors below it cannot be continued from. `swept`: when housekeeping was done last.
_CHANNEL: Final = (
    "CREATE TABLE channel (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, series TEXT NOT NULL,"
    " head INTEGER NOT NULL DEFAULT 0, floor INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL DEFAULT 0,"
    " swept INTEGER NOT NULL DEFAULT 0)"
)
# `whole`: the position at which data and extras were last stored whole; `version`: that of the newest mutation.
# `shared`: headers that later messages share; null where `base` is the message that has them.
_MESSAGES: Final = (
    "CREATE TABLE channel_message (channel INTEGER NOT NULL, position INTEGER NOT NULL, place INTEGER NOT NULL,"
    " name TEXT NOT NULL, text INTEGER NOT NULL, data TEXT, shared TEXT, base INTEGER, rest TEXT, client TEXT,"
    " whole INTEGER NOT NULL, version INTEGER NOT NULL, applied INTEGER NOT NULL, open INTEGER NOT NULL,"
    " ephemeral INTEGER NOT NULL, changed INTEGER NOT NULL, PRIMARY KEY (channel, position)) WITHOUT ROWID"
)
_APPENDS: Final = (
    "CREATE TABLE channel_append (channel INTEGER NOT NULL, position INTEGER NOT NULL, message INTEGER NOT NULL,"
    " data TEXT NOT NULL, extras TEXT, changed INTEGER NOT NULL, PRIMARY KEY (channel, position)) WITHOUT ROWID"
)
# Twelve bytes of a hash: an id is only ever compared.
_KEYS: Final = (
    "CREATE TABLE channel_key (channel INTEGER NOT NULL, key BLOB NOT NULL, position INTEGER NOT NULL,"
    " PRIMARY KEY (channel, key)) WITHOUT ROWID"
)
_INDEX_CHANGED: Final = "CREATE INDEX channel_changed ON channel_message (channel, whole) WHERE whole > position"
_INDEX_EPHEMERAL: Final = "CREATE INDEX channel_ephemeral ON channel_message (channel, changed) WHERE ephemeral"

_PART: Final = Part(
    name="channel",
    byte=1,
    migrations=[[_CHANNEL, _MESSAGES, _APPENDS, _KEYS, _INDEX_CHANGED, _INDEX_EPHEMERAL]],
)

_NEWER: Final = (
    "SELECT position FROM channel_message WHERE channel = ? AND position > ? AND changed > ? ORDER BY position LIMIT 1",
    "SELECT whole FROM channel_message WHERE channel = ? AND whole > ? AND whole > position AND changed > ? ORDER BY 1",
    "SELECT position FROM channel_append WHERE channel = ? AND position > ? AND changed > ? ORDER BY position LIMIT 1",
)

_MESSAGE: Final = (
    "SELECT m.position, m.place, m.name, m.text, m.data, coalesce(m.shared, b.shared), m.rest, m.client, m.whole,"
    " m.version, m.open, m.changed FROM channel_message m"
    " LEFT JOIN channel_message b ON b.channel = m.channel AND b.position = m.base"
)


class SqliteChannels:
    """Channels in one file, which a session store may share.

    Args:
        path: The file; it is made if there is none. Its directory must exist.
        synchronous: `normal`: acknowledged is what a killed process cannot lose. `full`: nor can a power loss.
        retention: Seconds of log kept; None keeps it.
        clock: For timestamps and retention.
        busy_timeout: Seconds to wait for other processes before `ChannelBusyError`.

    Raises:
        ChannelError: The file cannot be opened; `ChannelDataError` when it is another program's.
        NewerSchemaError: It was written by a newer Stepwell.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Synchronous = "normal",
        retention: float | None = None,
        clock: Clock | None = None,
        busy_timeout: float = 5.0,
    ) -> None:
        self.retention = retention
        self.clock = clock or SystemClock()
        self._full = synchronous == "full"
        with _mapped():
            self._owner: SqliteOwner | None = acquire_owner(path, _PART, busy_timeout)
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._poll: asyncio.TimerHandle | None = None
        self._seen: int | None = None
        self._bases: dict[tuple[int, str], tuple[str, int]] = {}

    async def open(self, name: str) -> SqliteChannel:
        """See `ChannelProvider.open`."""
        self.owner()
        return SqliteChannel(self, check_channel_name(name))

    async def delete(self, name: str) -> None:
        """See `ChannelProvider.delete`."""
        check_channel_name(name)

        def job(cursor: sqlite3.Cursor) -> None:
            found = cursor.execute("SELECT id FROM channel WHERE name = ?", (name,)).fetchone()
            if found is not None:
                cursor.execute("DELETE FROM channel_message WHERE channel = ?", found)
                cursor.execute("DELETE FROM channel_append WHERE channel = ?", found)
                cursor.execute("DELETE FROM channel_key WHERE channel = ?", found)
                cursor.execute("DELETE FROM channel WHERE id = ?", found)

        await self.write(name, job)

    async def close(self) -> None:
        """See `ChannelProvider.close`."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        if self._poll is not None:
            self._poll.cancel()
        self._wake(list(self._waiters))
        await release_owner(owner)

    async def __aenter__(self) -> SqliteChannels:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    # -- what its channels share

    def owner(self) -> SqliteOwner:
        """The connections.

        Raises:
            ChannelError: These channels are closed.
        """
        if self._owner is None:
            raise ChannelError("These channels are closed: open new ones.")
        return self._owner

    async def write(self, name: str, job: Callable[[sqlite3.Cursor], T]) -> T:
        """Run a job in a transaction, then wake the channel's readers."""
        with _mapped():
            result = await self.owner().write(job, full=self._full)
        self._wake([name])
        return result

    async def read(self, job: Callable[[sqlite3.Cursor], T]) -> T:
        """Run a job on what is committed."""
        with _mapped():
            return await self.owner().read(job)

    def base_of(self, channel: int, series: str, shared: str) -> int | None:
        """The message that holds these headers already, if it is the last one known to."""
        known = self._bases.get((channel, series))
        return known[1] if known is not None and known[0] == shared else None

    def keep_base(self, channel: int, series: str, shared: str, position: int) -> None:
        """Later messages may share this message's headers."""
        if len(self._bases) >= 10_000:
            self._bases.clear()
        self._bases[channel, series] = shared, position

    # -- waking readers

    async def wait(self, name: str, moved: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a commit that may have changed a channel, unless it has moved on already."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(name, set())
        waiters.add(waiter)
        if self._poll is None:
            self._look()
        try:
            # Asked when the waiter is there: a commit between the last read and now would wake nobody.
            if not await moved():
                await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(name) is waiters:
                del self._waiters[name]

    def _look(self) -> None:
        """Wake everybody if another connection committed; again in a moment, while anybody waits."""
        self._poll = None
        if not self._waiters or self._owner is None:
            return
        with contextlib.suppress(StoreError):  # readers find out by themselves, and say so
            seen = self._owner.foreign_commits()
            if seen is not None and seen != self._seen:
                self._seen = seen
                self._wake(list(self._waiters))
        self._poll = asyncio.get_running_loop().call_later(POLL_SECONDS, self._look)

    def _wake(self, names: Sequence[str]) -> None:
        for name in names:
            for waiter in self._waiters.get(name, ()):
                if not waiter.done():
                    waiter.set_result(None)


class _Head:
    """A channel's row, inside a transaction."""

    __slots__ = ("fence", "floor", "head", "id", "series", "swept")

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.id, self.series, self.head, self.floor, self.fence, self.swept = row


class SqliteChannel:
    """A `Channel` of `SqliteChannels`."""

    def __init__(self, provider: SqliteChannels, name: str) -> None:
        self._provider = provider
        self.name = name

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`."""

        def job(cursor: sqlite3.Cursor) -> None:
            head = self._head(cursor, epoch)
            cursor.execute("UPDATE channel SET fence = ? WHERE id = ?", (epoch, head.id))

        await self._provider.write(self.name, job)

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """See `Channel.publish`."""
        check_messages(messages)
        now = self._now()
        return await self._provider.write(self.name, lambda cursor: self._publish(cursor, messages, epoch, now))

    def _publish(
        self, cursor: sqlite3.Cursor, messages: Sequence[WireMessage], epoch: int | None, now: int
    ) -> list[str]:
        head = self._head(cursor, epoch)
        first = head.head
        serials: list[str] = []
        for message in messages:
            key = None if message.idempotency_id is None else _key(message.idempotency_id)
            if key is not None:
                known = cursor.execute(
                    "SELECT m.position, m.place FROM channel_key k JOIN channel_message m"
                    " ON m.channel = k.channel AND m.position = k.position WHERE k.channel = ? AND k.key = ?",
                    (head.id, key),
                ).fetchone()
                if known is not None:
                    serials.append(serial_at(known[0], head.series, known[1]))
                    continue
            head.head += 1
            place = head.head - first - 1
            self._insert(cursor, head, message, place, now)
            if key is not None:
                cursor.execute("INSERT OR REPLACE INTO channel_key VALUES (?, ?, ?)", (head.id, key, head.head))
            serials.append(serial_at(head.head, head.series, place))
        if head.head != first:
            cursor.execute("UPDATE channel SET head = ? WHERE id = ?", (head.head, head.id))
            self._sweep(cursor, head, now)
        return serials

    def _insert(self, cursor: sqlite3.Cursor, head: _Head, message: WireMessage, place: int, now: int) -> None:
        text, data = encode_data(message.data)
        shared, rest = split_extras(message.extras)
        ephemeral = is_ephemeral(message.extras)
        base: int | None = None
        if shared is not None:
            base = self._provider.base_of(head.id, head.series, shared)
            # The transaction that stored it may have been undone, and an ephemeral one goes.
            if base is not None and self._shares(cursor, head.id, base, shared):
                shared = None
            else:
                base = None
                if not ephemeral:
                    self._provider.keep_base(head.id, head.series, shared, head.head)
        position, is_open = head.head, is_open_stream(message.extras)
        cursor.execute(
            "INSERT INTO channel_message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
            (
                *(head.id, position, place, message.name, text, data, shared, base, rest, message.client_id),
                *(position, position, is_open, ephemeral, now),
            ),
        )

    @staticmethod
    def _shares(cursor: sqlite3.Cursor, channel: int, base: int, shared: str) -> bool:
        found = cursor.execute(
            "SELECT shared FROM channel_message WHERE channel = ? AND position = ?", (channel, base)
        ).fetchone()
        return found is not None and found[0] == shared

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`."""
        check_change(data, extras)
        now = self._now()
        encoded = None if extras is None else split_extras(extras)
        closing = extras is not None and not is_open_stream(extras)

        def job(cursor: sqlite3.Cursor) -> str:
            head = self._head(cursor, epoch)
            position, row = self._find(cursor, head, serial)
            is_text, stored, shared, rest, applied, is_open, version = row
            if 1 <= seq <= applied:
                return version_at(version, head.series)
            if seq != applied + 1:
                raise out_of_order(self.name, serial, seq, applied)
            if not is_text or stored is None:
                raise not_text(self.name, serial)
            head.head += 1
            changed = encoded is not None and encoded != (shared, rest)
            if closing or not is_open:
                text = stored + "".join(self._appends(cursor, head.id, position)) + data
                self._replace(cursor, head, position, True, text, encoded if changed else None, seq, closing=True)
            else:
                kept = None
                if changed and encoded is not None:
                    kept = "\0".join(part or "" for part in encoded)
                cursor.execute(
                    "INSERT INTO channel_append VALUES (?, ?, ?, ?, ?, ?)",
                    (head.id, head.head, position, data, kept, now),
                )
                cursor.execute(
                    "UPDATE channel_message SET applied = ?, version = ?, changed = ?"
                    " WHERE channel = ? AND position = ?",
                    (seq, head.head, now, head.id, position),
                )
            cursor.execute("UPDATE channel SET head = ? WHERE id = ?", (head.head, head.id))
            return version_at(head.head, head.series)

        return await self._provider.write(self.name, job)

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        text, encoded_data = encode_data(data)
        encoded = split_extras(extras)
        closing = not is_open_stream(extras)

        def job(cursor: sqlite3.Cursor) -> str:
            head = self._head(cursor, epoch)
            position, row = self._find(cursor, head, serial)
            head.head += 1
            self._replace(cursor, head, position, text, encoded_data, encoded, row[4], closing=closing)
            cursor.execute("UPDATE channel SET head = ? WHERE id = ?", (head.head, head.id))
            return version_at(head.head, head.series)

        return await self._provider.write(self.name, job)

    def _replace(
        self,
        cursor: sqlite3.Cursor,
        head: _Head,
        position: int,
        text: bool,
        data: str | None,
        extras: tuple[str | None, str | None] | None,
        applied: int,
        *,
        closing: bool,
    ) -> None:
        """Store a message whole, as of the channel's head, and free the appends that it consisted of."""
        cursor.execute(
            "UPDATE channel_message SET text = ?, data = ?, whole = ?, version = ?, applied = ?, open = ?, changed = ?"
            " WHERE channel = ? AND position = ?",
            (text, data, head.head, head.head, applied, not closing, self._now(), head.id, position),
        )
        if extras is not None:
            shared, rest = extras
            base = cursor.execute(
                "SELECT coalesce(m.base, m.position), b.shared FROM channel_message m LEFT JOIN channel_message b"
                " ON b.channel = m.channel AND b.position = m.base WHERE m.channel = ? AND m.position = ?",
                (head.id, position),
            ).fetchone()
            if shared is not None and base[1] == shared:  # the same headers as those it shares
                cursor.execute(
                    "UPDATE channel_message SET rest = ? WHERE channel = ? AND position = ?", (rest, head.id, position)
                )
            else:
                self._keep_shared(cursor, head, position, shared)
                cursor.execute(
                    "UPDATE channel_message SET shared = ?, base = NULL, rest = ? WHERE channel = ? AND position = ?",
                    (shared, rest, head.id, position),
                )
        cursor.execute(
            "DELETE FROM channel_append WHERE channel = ? AND position > ? AND message = ?",
            (head.id, position, position),
        )

    @staticmethod
    def _keep_shared(cursor: sqlite3.Cursor, head: _Head, position: int, shared: str | None) -> None:
        """A message's own headers change: give those that share the old ones a copy."""
        cursor.execute(
            "UPDATE channel_message SET base = NULL, shared ="
            " (SELECT shared FROM channel_message WHERE channel = ?1 AND position = ?2)"
            " WHERE channel = ?1 AND position > ?2 AND base = ?2"
            " AND (SELECT shared FROM channel_message WHERE channel = ?1 AND position = ?2) IS NOT ?3",
            (head.id, position, shared),
        )

    # -- inside a transaction

    def _head(self, cursor: sqlite3.Cursor, epoch: int | None) -> _Head:
        """The channel's row, made if there is none.

        Raises:
            FencedError: The epoch is stale.
        """
        head = self._known(cursor)
        if head is None:
            cursor.execute("INSERT INTO channel (name, series) VALUES (?, ?)", (self.name, new_series()))
            head = self._known(cursor)
            assert head is not None
        if epoch is not None and epoch < head.fence:
            raise fenced(self.name, epoch, head.fence)
        return head

    def _known(self, cursor: sqlite3.Cursor) -> _Head | None:
        row = cursor.execute(
            "SELECT id, series, head, floor, fence, swept FROM channel WHERE name = ?", (self.name,)
        ).fetchone()
        return None if row is None else _Head(row)

    def _find(self, cursor: sqlite3.Cursor, head: _Head, serial: str) -> tuple[int, tuple[Any, ...]]:
        position = serial_position(serial, head.series)
        row = cursor.execute(
            "SELECT m.text, m.data, coalesce(m.shared, b.shared), m.rest, m.applied, m.open, m.version, m.place"
            " FROM channel_message m LEFT JOIN channel_message b ON b.channel = m.channel AND b.position = m.base"
            " WHERE m.channel = ? AND m.position = ?",
            (head.id, position),
        ).fetchone()
        if row is None or serial_at(position, head.series, row[7]) != serial:
            raise missing(self.name, serial)
        return position, row[:7]

    @staticmethod
    def _appends(cursor: sqlite3.Cursor, channel: int, position: int) -> list[str]:
        rows = cursor.execute(
            "SELECT data FROM channel_append WHERE channel = ? AND position > ? AND message = ? ORDER BY position",
            (channel, position, position),
        )
        return [row[0] for row in rows]

    def _sweep(self, cursor: sqlite3.Cursor, head: _Head, now: int) -> None:
        """Let go what is due, now and then: ephemeral messages, and the log behind its retention."""
        if now - head.swept < HOUSEKEEPING_SECONDS * 1000:
            return
        cursor.execute("UPDATE channel SET swept = ? WHERE id = ?", (now, head.id))
        limit = now - int(EPHEMERAL_SECONDS * 1000)
        cursor.execute("DELETE FROM channel_message WHERE channel = ? AND ephemeral AND changed <= ?", (head.id, limit))
        if self._provider.retention is not None:
            self._raise_floor(cursor, head, now - int(self._provider.retention * 1000))

    @staticmethod
    def _raise_floor(cursor: sqlite3.Cursor, head: _Head, limit: int) -> None:
        """Nothing newer than the retention lies at or below the floor."""
        floor = head.head
        for query in _NEWER:
            found = cursor.execute(query, (head.id, head.floor, limit)).fetchone()
            if found is not None:
                floor = min(floor, found[0] - 1)
        if floor > head.floor:
            cursor.execute("UPDATE channel SET floor = ? WHERE id = ?", (floor, head.id))

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
        found = await self.find()
        if found is not None:
            return found
        head = await self._provider.write(self.name, lambda cursor: self._head(cursor, None))
        return Bounds(head.series, head.head, head.floor)

    async def find(self) -> Bounds | None:
        """See `Log`."""
        head = await self._provider.read(self._known)
        return None if head is None else Bounds(head.series, head.head, head.floor)

    async def rows(self, series: str, after: int, limit: int) -> Page | None:
        """See `Log`."""
        return await self._provider.read(lambda cursor: self._rows(cursor, series, after, limit))

    def _rows(self, cursor: sqlite3.Cursor, series: str, after: int, limit: int) -> Page | None:
        head = self._known(cursor)
        if head is None or head.series != series or after < head.floor:
            return None
        if head.head <= after:
            return Page((), after)
        created = cursor.execute(
            f"{_MESSAGE} WHERE m.channel = ? AND m.position > ? ORDER BY m.position LIMIT ?", (head.id, after, limit)
        ).fetchall()
        changed = cursor.execute(
            f"{_MESSAGE} WHERE m.channel = ? AND m.whole > ? AND m.whole > m.position ORDER BY m.whole LIMIT ?",
            (head.id, after, limit),
        ).fetchall()
        appended = cursor.execute(
            "SELECT a.position, a.message, m.place, a.data, a.extras, coalesce(m.shared, b.shared), m.rest, m.client,"
            " a.changed FROM channel_append a"
            " JOIN channel_message m ON m.channel = a.channel AND m.position = a.message"
            " LEFT JOIN channel_message b ON b.channel = m.channel AND b.position = m.base"
            " WHERE a.channel = ? AND a.position > ? ORDER BY a.position LIMIT ?",
            (head.id, after, limit),
        ).fetchall()
        rows = [_row(row, row[0]) for row in created]
        if changed or appended:
            rows = list(
                merge(
                    rows,
                    [_row(row, row[8]) for row in changed],
                    [_append(row) for row in appended],
                    key=lambda row: row.position,
                )
            )
        if len(rows) >= limit:
            rows = rows[:limit]
            return Page(rows, rows[-1].position)
        return Page(rows, head.head)

    async def message(self, position: int) -> Row | None:
        """See `Log`."""

        def job(cursor: sqlite3.Cursor) -> Row | None:
            head = self._known(cursor)
            found = None
            if head is not None:
                found = cursor.execute(
                    f"{_MESSAGE} WHERE m.channel = ? AND m.position = ?", (head.id, position)
                ).fetchone()
            return None if head is None or found is None else self._whole(cursor, head.id, found)

        return await self._provider.read(job)

    async def messages(self, after: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return await self._list("m.position > ? AND NOT m.ephemeral ORDER BY m.position", after, limit)

    async def messages_before(self, before: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return await self._list("m.position <= ? AND NOT m.ephemeral ORDER BY m.position DESC", before, limit)

    async def _list(self, which: str, position: int, limit: int) -> list[Row]:
        def job(cursor: sqlite3.Cursor) -> list[Row]:
            head = self._known(cursor)
            if head is None:
                return []
            found = cursor.execute(
                f"{_MESSAGE} WHERE m.channel = ? AND {which} LIMIT ?", (head.id, position, limit)
            ).fetchall()
            return [self._whole(cursor, head.id, row) for row in found]

        return await self._provider.read(job)

    def _whole(self, cursor: sqlite3.Cursor, channel: int, found: tuple[Any, ...]) -> Row:
        """A message as it is now, put together from its appends if it is open."""
        row = _row(found, found[0])
        if found[9] == found[8]:  # nothing came since it was whole
            return row
        parts = cursor.execute(
            "SELECT position, data, extras, changed FROM channel_append"
            " WHERE channel = ? AND position > ? AND message = ? ORDER BY position",
            (channel, row.position, row.position),
        ).fetchall()
        if not parts:
            return row
        position, _, kept, changed = parts[-1]
        return Row(
            row.position,
            row.message,
            row.index,
            position,
            "update",
            row.name,
            (row.data if isinstance(row.data, str) else "") + "".join(part[1] for part in parts),
            row.extras if kept is None else _kept(kept),
            row.client_id,
            changed,
        )

    async def wait(self, series: str, after: int) -> None:
        """See `Log`."""
        await self._provider.wait(self.name, lambda: self._moved(series, after))

    async def _moved(self, series: str, after: int) -> bool:
        bounds = await self.find()
        return bounds is None or bounds.series != series or bounds.head > after


def _key(idempotency_id: str) -> bytes:
    return blake2b(idempotency_id.encode(), digest_size=12).digest()


def _row(row: tuple[Any, ...], at: int) -> Row:
    """A message's row as of the time when it was last whole, at a position of the log."""
    position, place, name, text, data, shared, rest, client, whole, _, _, changed = row
    action = "create" if whole == position else "update"
    return Row(
        at, position, place, whole, action, name, decode_data(text, data), join_extras(shared, rest), client, changed
    )


def _append(row: tuple[Any, ...]) -> Row:
    position, message, place, data, kept, shared, rest, client, changed = row
    extras = join_extras(shared, rest) if kept is None else _kept(kept)
    return Row(position, message, place, position, "append", None, data, extras, client, changed)


def _kept(kept: str) -> Extras | None:
    shared, _, rest = kept.partition("\0")
    return join_extras(shared or None, rest or None)


@contextlib.contextmanager
def _mapped() -> Generator[None]:
    """What the connections say is said as a channel's error: the file is the same, its users differ."""
    try:
        yield
    except StoreBusyError as error:
        raise ChannelBusyError(error.message) from error
    except StoreDataError as error:
        raise ChannelDataError(error.message) from error
    except StoreError as error:
        raise ChannelError(error.message) from error
