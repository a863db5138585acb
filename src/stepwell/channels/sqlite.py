"""Channels in an SQLite file: the embedded default, shared by the processes of one machine.

What is stored: `_sqlite_rows`. A message is its position, and positions are given out in the transaction that stores
the row: SQLite has one writer at a time, so a reader that goes by position misses none.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar

from stepwell._clock import Clock, SystemClock
from stepwell._sqlite import SqliteOwner, acquire_owner, release_owner
from stepwell.errors import ChannelBusyError, ChannelDataError, ChannelError, StoreBusyError, StoreDataError, StoreError
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

from ._encoding import encode_data, key_of, plain_copy, split_extras
from ._reader import Bounds, LogChannel, Page, Row
from ._refusals import check_epoch, closed, fenced, missing, not_text, out_of_order
from ._sqlite_rows import (
    NEAR,
    PART,
    Head,
    delete_channel,
    find_head,
    headers_id,
    make_head,
    read_messages,
    read_page,
    sweep,
    text_of,
)
from ._sqlite_watch import watch_of

__all__ = ["SqliteChannel", "SqliteChannels"]

T = TypeVar("T")
Synchronous = Literal["normal", "full"]

_FAR: Final = Page((), -1)
"""There is too much to read for the event loop."""


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
        with _mapped:
            self._owner: SqliteOwner | None = acquire_owner(path, PART, busy_timeout)

    async def open(self, name: str) -> SqliteChannel:
        """See `ChannelProvider.open`."""
        self.owner()
        return SqliteChannel(self, check_channel_name(name))

    async def delete(self, name: str) -> None:
        """See `ChannelProvider.delete`."""
        check_channel_name(name)
        await self.write(name, lambda cursor: delete_channel(cursor, name), aside=True)

    async def close(self) -> None:
        """See `ChannelProvider.close`."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        watch_of(owner).wake()
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
            raise closed()
        return self._owner

    async def write(self, name: str, job: Callable[[sqlite3.Cursor], T], *, aside: bool = False) -> T:
        """Run a job in a transaction, then wake the channel's readers."""
        with _mapped:
            owner = self.owner()
            done = owner.write(job, full=self._full, aside=aside)
            # Not after the await: whoever is cancelled there has written all the same.
            done.add_done_callback(lambda _: watch_of(owner).wake((name,)))
            return await done

    async def read(self, job: Callable[[sqlite3.Cursor], T], *, aside: bool = False) -> T:
        """Run a job on what is committed; aside if it may take long."""
        with _mapped:
            owner = self.owner()
            return await (owner.read_aside(job) if aside else owner.read(job))

    async def wait(self, name: str, series: str, after: int) -> None:
        """See `Watch.wait`."""
        with _mapped:
            await watch_of(self.owner()).wait(name, series, after)

    def now(self) -> int:
        """The time, milliseconds."""
        return int(self.clock.time() * 1000)


class SqliteChannel(LogChannel):
    """A `Channel` of `SqliteChannels`."""

    def __init__(self, provider: SqliteChannels, name: str) -> None:
        self._provider = provider
        self.name = name
        self._repeated: _Change | None = None  # of the append before: of every token of a stream they are the same

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`."""
        check_epoch(epoch)

        def job(cursor: sqlite3.Cursor) -> None:
            head = self._fenced(make_head(cursor, self.name), epoch)
            if epoch > head.fence:
                cursor.execute("UPDATE channel SET fence = ? WHERE id = ?", (epoch, head.id))

        await self._provider.write(self.name, job)

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """See `Channel.publish`."""
        check_messages(messages)
        given = [_Given(message) for message in messages]
        return await self._provider.write(self.name, partial(self._publish, given, epoch))

    def _publish(self, messages: Sequence[_Given], epoch: int | None, cursor: sqlite3.Cursor) -> list[str]:
        head = self._fenced(make_head(cursor, self.name), epoch)
        first, now = head.head, self._provider.now()
        serials: list[str] = []
        for message in messages:
            known = None
            if message.key is not None:
                known = cursor.execute(
                    "SELECT position, place FROM channel_message WHERE channel = ? AND key = ?", (head.id, message.key)
                ).fetchone()
            if known is None:
                known = head.head + 1, head.head - first
                message.insert(cursor, head.id, *known, now)
                head.head += 1
            serials.append(serial_at(known[0], head.series, known[1]))
        if head.head != first:
            self._move(cursor, head)
            sweep(cursor, head, now, self._provider.retention)
        return serials

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`."""
        change = self._repeated
        if extras is None or change is None or change.plain != extras:
            check_append(data, extras)
            change = self._repeated = _Change(extras)
            change.plain = plain_copy(extras)
        else:
            check_append(data, None)
        return await self._provider.write(self.name, partial(self._append, serial, data, change, seq, epoch))

    def _append(
        self, serial: str, data: str, change: _Change, seq: int, epoch: int | None, cursor: sqlite3.Cursor
    ) -> str:
        head, message = self._find(cursor, serial, epoch)
        if 1 <= seq <= message.applied:
            return version_at(message.version, head.series)
        if seq != message.applied + 1:
            raise out_of_order(self.name, serial, seq, message.applied)
        if not message.is_text:
            raise not_text(self.name, serial)
        head.head += 1
        self._move(cursor, head)
        headers, rest = message.extras
        if change.is_given:
            if change.headers != message.headers:  # nearly always they are those of the append before
                headers = headers_id(cursor, head.id, change.headers)
            rest = change.rest
        is_open = change.is_open and not message.is_ephemeral if change.is_given else message.is_open
        now = self._provider.now()
        if is_open:
            kept = (None, None) if (headers, rest) == message.stored else (headers, rest)
            cursor.execute(
                "INSERT INTO channel_append VALUES (?, ?, ?, ?, ?, ?, ?)",
                (head.id, head.head, message.position, data, *kept, now),
            )
            cursor.execute(
                "UPDATE channel_message SET version = ?, applied = ?, open = 1 WHERE channel = ? AND position = ?",
                (head.head, seq, head.id, message.position),
            )
        else:
            [stored] = cursor.execute(
                "SELECT data FROM channel_message WHERE channel = ? AND position = ?", (head.id, message.position)
            ).fetchone()
            text = stored + text_of(cursor, head.id, message.position) + data
            message.replace(cursor, head, (True, text), (headers, rest), seq, is_open, now)
        return version_at(head.head, head.series)

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        change = _Change(extras)
        return await self._provider.write(self.name, partial(self._update, serial, encode_data(data), change, epoch))

    def _update(
        self, serial: str, data: tuple[bool, str | None], change: _Change, epoch: int | None, cursor: sqlite3.Cursor
    ) -> str:
        head, message = self._find(cursor, serial, epoch)
        head.head += 1
        self._move(cursor, head)
        extras = headers_id(cursor, head.id, change.headers), change.rest
        is_open = change.is_open and not message.is_ephemeral
        message.replace(cursor, head, data, extras, message.applied, is_open, self._provider.now())
        return version_at(head.head, head.series)

    # -- inside a transaction

    def _fenced(self, head: Head, epoch: int | None) -> Head:
        """Return `head`.

        Raises:
            FencedError: The epoch is stale.
        """
        if epoch is not None and epoch < head.fence:
            raise fenced(self.name, epoch, head.fence)
        return head

    def _find(self, cursor: sqlite3.Cursor, serial: str, epoch: int | None) -> tuple[Head, _Stored]:
        """The channel and a message of it.

        Raises:
            FencedError, UnknownMessageError: See `Channel.append`.
        """
        head = find_head(cursor, self.name)
        if head is None:
            raise missing(self.name, serial)
        self._fenced(head, epoch)
        position = serial_position(serial, head.series)
        row = cursor.execute(_STORED, (head.id, position)).fetchone()
        if row is None or serial_at(position, head.series, row[0]) != serial:
            raise missing(self.name, serial)
        return head, _Stored(position, row)

    @staticmethod
    def _move(cursor: sqlite3.Cursor, head: Head) -> None:
        cursor.execute("UPDATE channel SET head = ? WHERE id = ?", (head.head, head.id))

    # -- the `Log` of its readers

    async def bounds(self) -> Bounds:
        """See `Log`."""
        found = await self.find()
        if found is None:
            found = (await self._provider.write(self.name, lambda cursor: make_head(cursor, self.name))).bounds
        return found

    async def find(self) -> Bounds | None:
        """See `Log`."""
        head = await self._provider.read(lambda cursor: find_head(cursor, self.name))
        return None if head is None else head.bounds

    async def rows(self, series: str, after: int, limit: int) -> Page | None:
        """See `Log`."""
        page = await self._provider.read(partial(self._rows, series, after, limit, NEAR))
        if page is _FAR:
            return await self._provider.read(partial(self._rows, series, after, limit, None), aside=True)
        return page

    def _rows(self, series: str, after: int, limit: int, near: int | None, cursor: sqlite3.Cursor) -> Page | None:
        head = find_head(cursor, self.name)
        if head is None or head.series != series or after < head.floor:
            return None
        if near is not None and min(head.head - after, limit) > near:
            return _FAR
        return read_page(cursor, head, after, limit, self._provider.now())

    async def message(self, position: int) -> Row | None:
        """See `Log`."""
        rows = await self._messages("m.position = ?", position, 1)
        return rows[0] if rows else None

    async def messages(self, after: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return await self._messages("m.position > ? AND NOT m.ephemeral ORDER BY m.position", after, limit)

    async def messages_before(self, before: int, limit: int) -> Sequence[Row]:
        """See `Log`."""
        return await self._messages("m.position <= ? AND NOT m.ephemeral ORDER BY m.position DESC", before, limit)

    async def _messages(self, which: str, position: int, limit: int) -> list[Row]:
        def job(cursor: sqlite3.Cursor) -> list[Row]:
            head = find_head(cursor, self.name)
            return [] if head is None else read_messages(cursor, head, which, position, limit, self._provider.now())

        return await self._provider.read(job, aside=limit > NEAR)

    async def wait(self, series: str, after: int) -> None:
        """See `Log`."""
        await self._provider.wait(self.name, series, after)


class _Change:
    """Extras as they are to be stored, encoded before the transaction begins.

    Attributes:
        is_given: Whether there are any; else the old ones stay.
        is_open: Whether more appends are expected.
        headers: See `split_extras`.
        rest: See `split_extras`.
        plain: See `plain_copy`; if it was asked for.
    """

    __slots__ = ("headers", "is_given", "is_open", "plain", "rest")

    def __init__(self, extras: Extras | None) -> None:
        self.is_given = extras is not None
        self.is_open = is_open_stream(extras)
        self.headers, self.rest = split_extras(extras)
        self.plain: Extras | None = None


class _Given:
    """A message that is to be published, encoded before the transaction begins."""

    __slots__ = ("_change", "_client_id", "_data", "_ephemeral", "_name", "key")

    def __init__(self, message: WireMessage) -> None:
        self.key = None if message.idempotency_id is None else key_of(message.idempotency_id)
        self._name = message.name
        self._data = encode_data(message.data)
        self._change = _Change(message.extras)
        self._client_id = message.client_id
        self._ephemeral = is_ephemeral(message.extras)

    def insert(self, cursor: sqlite3.Cursor, channel: int, position: int, place: int, now: int) -> None:
        """Store it."""
        headers = headers_id(cursor, channel, self._change.headers)
        cursor.execute(
            "INSERT INTO channel_message VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
            (
                *(channel, position, place, self._name, *self._data, headers, self._change.rest, self._client_id),
                *(self.key, position, position, self._change.is_open and not self._ephemeral, self._ephemeral, now),
            ),
        )


_STORED: Final = (
    "SELECT m.place, m.text AND m.data IS NOT NULL, m.headers, m.rest, a.headers, a.rest, m.version, m.applied, m.open,"
    " m.ephemeral, h.headers"
    " FROM channel_message m LEFT JOIN channel_append a ON a.channel = m.channel AND a.position = m.version"
    " LEFT JOIN channel_headers h ON h.channel = m.channel"
    " AND h.id = CASE WHEN a.rest IS NULL THEN m.headers ELSE a.headers END"
    " WHERE m.channel = ? AND m.position = ?"
)


class _Stored:
    """What a change needs to know of a message.

    Attributes:
        position: Where it was created.
        is_text: It can be appended to.
        stored: Headers and rest of its extras in its row.
        extras: The same as of its newest mutation.
        headers: Those of its newest mutation as JSON.
        version: Position of that.
        applied: How many appends it has.
        is_open: Whether appends that follow get rows of their own.
        is_ephemeral: They do not: it is always whole.
    """

    __slots__ = ("applied", "extras", "headers", "is_ephemeral", "is_open", "is_text", "position", "stored", "version")

    def __init__(self, position: int, row: tuple[Any, ...]) -> None:
        self.position = position
        _, self.is_text, headers, rest, last_headers, last_rest, self.version, self.applied = row[:8]
        self.headers: str | None
        self.is_open, self.is_ephemeral, self.headers = row[8:]
        self.stored: tuple[int | None, str | None] = headers, rest
        self.extras = self.stored if last_rest is None else (last_headers, last_rest)

    def replace(
        self,
        cursor: sqlite3.Cursor,
        head: Head,
        data: tuple[bool, str | None],
        extras: tuple[int | None, str | None],
        applied: int,
        is_open: bool,
        now: int,
    ) -> None:
        """Make it whole, as of the channel's head, and free the appends that it consisted of."""
        cursor.execute(
            "UPDATE channel_message SET text = ?, data = ?, headers = ?, rest = ?, whole = ?, version = ?, applied = ?,"
            " open = ?, changed = ? WHERE channel = ? AND position = ?",
            (*data, *extras, head.head, head.head, applied, is_open, now, head.id, self.position),
        )
        cursor.execute(
            "DELETE FROM channel_append WHERE channel = ? AND position > ? AND message = ?",
            (head.id, self.position, self.position),
        )


class _Mapped:
    """What the connections say is said as a channel's error: the file is the same, its users differ."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Raise the channel's error."""
        if isinstance(error, StoreBusyError):
            raise ChannelBusyError(error.message) from error
        if isinstance(error, StoreDataError):
            raise ChannelDataError(error.message) from error
        if isinstance(error, StoreError):
            raise ChannelError(error.message) from error


_mapped: Final = _Mapped()  # a generator in its place would be a tenth of what an append costs
