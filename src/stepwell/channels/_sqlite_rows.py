"""The tables of channels in an SQLite file, and how rows become `Row`s. Everything here runs inside a transaction.

A message is one row, which holds it as of the last time it was whole: when it was created, replaced, or closed. Each
append to a stream that is still open is a row of its own. Closing the stream makes the message whole and frees them.
An ephemeral message is always whole: it goes as one row.
"""

from __future__ import annotations

import sqlite3
from hashlib import blake2b
from heapq import merge
from operator import attrgetter
from typing import Any, Final

from stepwell._sqlite import Part
from stepwell.wire import Extras, new_series

from ._encoding import EPHEMERAL_SECONDS, decode_data, join_extras
from ._reader import Bounds, Page, Row

__all__ = [
    "NEAR",
    "PART",
    "Head",
    "delete_channel",
    "find_head",
    "headers_id",
    "make_head",
    "read_messages",
    "read_page",
    "sweep",
    "text_of",
]

# `floor`: cursors below it cannot be continued from. `swept`: when it was last looked for what is due to go.
_CHANNEL: Final = (
    "CREATE TABLE channel (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, series TEXT NOT NULL,"
    " head INTEGER NOT NULL DEFAULT 0, floor INTEGER NOT NULL DEFAULT 0, fence INTEGER NOT NULL DEFAULT 0,"
    " swept INTEGER NOT NULL DEFAULT 0)"
)
# Headers that several messages have, once. `id` is a hash of them.
_HEADERS: Final = (
    "CREATE TABLE channel_headers (channel INTEGER NOT NULL, id INTEGER NOT NULL, headers TEXT NOT NULL,"
    " PRIMARY KEY (channel, id)) WITHOUT ROWID"
)
# `place`: in its publish call. `data`: text if `text`, else JSON. `headers` and `rest` make up the extras. `client`:
# who published it. `whole`: position of the mutation that the row shows; `version`: of the newest, later than `whole`
# if that is an append. `open`: appends that follow get rows of their own. `changed`: time of the one at `whole`.
_MESSAGES: Final = (
    "CREATE TABLE channel_message (channel INTEGER NOT NULL, position INTEGER NOT NULL, place INTEGER NOT NULL,"
    " name TEXT NOT NULL, text INTEGER NOT NULL, data TEXT, headers INTEGER, rest TEXT, client TEXT, key BLOB,"
    " whole INTEGER NOT NULL, version INTEGER NOT NULL, applied INTEGER NOT NULL, open INTEGER NOT NULL,"
    " ephemeral INTEGER NOT NULL, changed INTEGER NOT NULL, PRIMARY KEY (channel, position)) WITHOUT ROWID"
)
# Without `rest` the extras are those of the message's row.
_APPENDS: Final = (
    "CREATE TABLE channel_append (channel INTEGER NOT NULL, position INTEGER NOT NULL, message INTEGER NOT NULL,"
    " data TEXT NOT NULL, headers INTEGER, rest TEXT, changed INTEGER NOT NULL, PRIMARY KEY (channel, position))"
    " WITHOUT ROWID"
)
_INDEXES: Final = (
    "CREATE UNIQUE INDEX channel_key ON channel_message (channel, key) WHERE key IS NOT NULL",
    "CREATE INDEX channel_whole ON channel_message (channel, whole) WHERE whole > position",
    "CREATE INDEX channel_ephemeral ON channel_message (channel, changed) WHERE ephemeral",
)

PART: Final = Part(name="channel", byte=1, migrations=[[_CHANNEL, _HEADERS, _MESSAGES, _APPENDS, *_INDEXES]])

SWEEP_SECONDS: Final = 5.0
"""How often a channel that is written to is looked through for what is due to go."""

SWEEP_MESSAGES: Final = 200
"""Ephemeral messages that go at once, at most."""

NEAR: Final = 100
"""So many messages are read in the event loop; more in a thread."""


class Head:
    """A channel's row."""

    __slots__ = ("fence", "floor", "head", "id", "series", "swept")

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.id: int
        self.series: str
        self.head: int
        self.floor: int
        self.fence: int
        self.swept: int
        self.id, self.series, self.head, self.floor, self.fence, self.swept = row

    @property
    def bounds(self) -> Bounds:
        """As a reader wants it."""
        return Bounds(self.series, self.head, self.floor)


def find_head(cursor: sqlite3.Cursor, name: str) -> Head | None:
    """A channel's row, if there is one."""
    row = cursor.execute("SELECT id, series, head, floor, fence, swept FROM channel WHERE name = ?", (name,)).fetchone()
    return None if row is None else Head(row)


def make_head(cursor: sqlite3.Cursor, name: str) -> Head:
    """A channel's row, made if there is none."""
    head = find_head(cursor, name)
    if head is None:
        cursor.execute("INSERT INTO channel (name, series) VALUES (?, ?)", (name, new_series()))
        head = find_head(cursor, name)
        assert head is not None
    return head


def delete_channel(cursor: sqlite3.Cursor, name: str) -> None:
    """Remove everything of a channel."""
    head = find_head(cursor, name)
    if head is not None:
        for table in ("channel_message", "channel_append", "channel_headers"):
            cursor.execute(f"DELETE FROM {table} WHERE channel = ?", (head.id,))  # noqa: S608
        cursor.execute("DELETE FROM channel WHERE id = ?", (head.id,))


def headers_id(cursor: sqlite3.Cursor, channel: int, headers: str | None) -> int | None:
    """Where these headers are stored; they are if they were not. Others with the same hash have the next number."""
    if headers is None:
        return None
    number = int.from_bytes(blake2b(headers.encode(), digest_size=5).digest())
    while True:
        found = cursor.execute(
            "SELECT headers FROM channel_headers WHERE channel = ? AND id = ?", (channel, number)
        ).fetchone()
        if found is None:
            cursor.execute("INSERT INTO channel_headers VALUES (?, ?, ?)", (channel, number, headers))
            return number
        if found[0] == headers:
            return number
        number += 1


# --- reading ----------------------------------------------------------------------------------------------------------

_ROWS: Final = (
    "SELECT m.position, m.place, m.name, m.text, m.data, h.headers, m.rest, m.client, m.whole, m.version, m.changed"
    " FROM channel_message m LEFT JOIN channel_headers h ON h.channel = m.channel AND h.id = m.headers"
    " WHERE m.channel = ? AND NOT (m.ephemeral AND m.changed <= ?)"
)
_APPEND_ROWS: Final = (
    "SELECT a.position, a.message, m.place, a.data, h.headers, coalesce(a.rest, m.rest), m.client, a.changed"
    " FROM channel_append a JOIN channel_message m ON m.channel = a.channel AND m.position = a.message"
    " LEFT JOIN channel_headers h ON h.channel = a.channel"
    " AND h.id = CASE WHEN a.rest IS NULL THEN m.headers ELSE a.headers END"
    " WHERE a.channel = ? AND a.position > ? ORDER BY a.position LIMIT ?"
)
_position = attrgetter("position")


def ephemeral_limit(now: int) -> int:
    """Ephemeral messages that were not changed since are gone, whether they were removed yet or not."""
    return now - int(EPHEMERAL_SECONDS * 1000)


def read_page(cursor: sqlite3.Cursor, head: Head, after: int, limit: int, now: int) -> Page:
    """See `Log.rows`."""
    if head.head <= after:
        return Page((), after)
    due = ephemeral_limit(now)
    created = cursor.execute(
        f"{_ROWS} AND m.position > ? ORDER BY m.position LIMIT ?", (head.id, due, after, limit)
    ).fetchall()
    changed = cursor.execute(
        f"{_ROWS} AND m.whole > ? AND m.whole > m.position ORDER BY m.whole LIMIT ?", (head.id, due, after, limit)
    ).fetchall()
    appended = cursor.execute(_APPEND_ROWS, (head.id, after, limit)).fetchall()
    parts = [_row(row, row[0]) for row in created], [_row(row, row[8]) for row in changed], map(_append, appended)
    rows = list(merge(*parts, key=_position))
    return Page.cut(rows, limit, head.head)


def read_messages(cursor: sqlite3.Cursor, head: Head, which: str, position: int, limit: int, now: int) -> list[Row]:
    """Messages as they are now; see `Log`. `which` compares `m.position` with a position, and orders."""
    found = cursor.execute(f"{_ROWS} AND {which} LIMIT ?", (head.id, ephemeral_limit(now), position, limit)).fetchall()
    return [_newest(cursor, head.id, row) for row in found]


def text_of(cursor: sqlite3.Cursor, channel: int, position: int) -> str:
    """What was appended to a message since it was whole."""
    rows = cursor.execute(
        "SELECT data FROM channel_append WHERE channel = ? AND position > ? AND message = ? ORDER BY position",
        (channel, position, position),
    )
    return "".join(row[0] for row in rows)


def _row(row: tuple[Any, ...], at: int) -> Row:
    """A message as its row shows it, at a position of the log."""
    position, place, name, text, data, headers, rest, client, whole, _, changed = row
    extras = join_extras(headers, rest)
    return Row(at, position, place, whole, name, decode_data(text, data), extras, client, changed)


def _append(row: tuple[Any, ...]) -> Row:
    position, message, place, data, headers, rest, client, changed = row
    extras = join_extras(headers, rest)
    return Row(position, message, place, position, None, data, extras, client, changed)


def _newest(cursor: sqlite3.Cursor, channel: int, found: tuple[Any, ...]) -> Row:
    """A message as it is now, put together from its appends if it is open."""
    row, version = _row(found, found[0]), found[9]
    if version == row.version:
        return row
    extras: Extras | None
    headers, rest, changed = cursor.execute(
        "SELECT h.headers, a.rest, a.changed FROM channel_append a"
        " LEFT JOIN channel_headers h ON h.channel = a.channel AND h.id = a.headers"
        " WHERE a.channel = ? AND a.position = ?",
        (channel, version),
    ).fetchone()
    extras = row.extras if rest is None else join_extras(headers, rest)
    assert isinstance(row.data, str)
    text = row.data + text_of(cursor, channel, row.position)
    return Row(row.position, row.message, row.index, version, row.name, text, extras, row.client_id, changed)


# --- what is due to go ------------------------------------------------------------------------------------------------

_NEWER: Final = (
    "SELECT position FROM channel_message WHERE channel = ? AND position > ? AND changed > ?",
    "SELECT whole FROM channel_message WHERE channel = ? AND whole > ? AND whole > position AND changed > ?",
    "SELECT position FROM channel_append WHERE channel = ? AND position > ? AND changed > ?",
)


def sweep(cursor: sqlite3.Cursor, head: Head, now: int, retention: float | None) -> None:
    """Let go what is due, now and then: ephemeral messages, and cursors that the log is not kept for any more."""
    if now - head.swept < SWEEP_SECONDS * 1000:
        return
    floor = head.floor
    if retention is not None:
        # A message that was changed within the retention keeps the log from its create on: rather too long than short.
        values = head.id, head.floor, now - int(retention * 1000)
        newer = (cursor.execute(f"{query} ORDER BY 1 LIMIT 1", values).fetchone() for query in _NEWER)
        floor = min([head.head, *(found[0] - 1 for found in newer if found is not None)])
    cursor.execute("UPDATE channel SET swept = ?, floor = ? WHERE id = ?", (now, floor, head.id))
    cursor.execute(
        "DELETE FROM channel_message WHERE channel = ?1 AND position IN (SELECT position FROM channel_message"
        " WHERE channel = ?1 AND ephemeral AND changed <= ?2 LIMIT ?3)",
        (head.id, ephemeral_limit(now), SWEEP_MESSAGES),
    )
