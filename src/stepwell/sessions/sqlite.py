"""The store in an SQLite file: WAL, one owner per process and file, a few tables made for short transactions."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from stepwell._clock import Clock, SystemClock
from stepwell._json import is_text_clean
from stepwell._sqlite import Part, Undo, acquire_owner, release_owner
from stepwell.errors import StoreDataError, StoreError
from stepwell.messages import decode_message

from ._rows import (
    JOURNAL_STATES,
    KINDS,
    MAX_POSITION,
    STATES,
    Changes,
    conflict,
    exists,
    head_from,
    held,
    incarnation_of,
    log_from,
    number_of,
    parse_incarnation,
    stale,
    status_number,
    summary_from,
    taken,
    text_checked,
    unknown,
)
from .document import LogEntry, SequenceEntry, SessionHead, SessionSummary
from .store import Acquired, Commit, DueSession, InboxRow, InboxUpdate, JournalRow, Lease, StoredMessage

__all__ = ["SqliteStore"]

T = TypeVar("T")
Cursor = sqlite3.Cursor

SCHEMA_1: Final = (
    # Identity and lease: small rows of their own, so that acquiring and renewing never rewrite a head.
    """CREATE TABLE session(
        id TEXT PRIMARY KEY, key INTEGER NOT NULL, inc INTEGER NOT NULL, epoch INTEGER NOT NULL,
        turn INTEGER NOT NULL, owner TEXT, expires REAL) WITHOUT ROWID""",
    """CREATE INDEX session_due ON session(turn)
        WHERE turn = 1 OR (turn = 2 AND owner IS NOT NULL)""",
    # `names`: namespaces and stages by index, as a JSON list; rows refer to them by number.
    """CREATE TABLE head(
        key INTEGER PRIMARY KEY, rev INTEGER NOT NULL, status INTEGER NOT NULL, flow TEXT NOT NULL,
        names TEXT NOT NULL, data BLOB NOT NULL)""",
    # All that only grows, clustered by session and stream; see `_base`.
    "CREATE TABLE line(id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    """CREATE TABLE inbox(
        n INTEGER PRIMARY KEY, key INTEGER NOT NULL, name TEXT NOT NULL, kind INTEGER NOT NULL,
        state INTEGER NOT NULL, payload BLOB NOT NULL, result BLOB)""",
    "CREATE UNIQUE INDEX inbox_name ON inbox(key, name)",
    "CREATE INDEX inbox_open ON inbox(key) WHERE state < 2",
    """CREATE TABLE journal(
        key INTEGER NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, state INTEGER NOT NULL, data BLOB NOT NULL,
        PRIMARY KEY(key, name)) WITHOUT ROWID""",
)

SCHEMA_2: Final = (
    "ALTER TABLE session ADD COLUMN wake REAL",
    "DROP INDEX session_due",
    # Holds only what may become due, so it is empty but for the sessions that are at work, or wait with an end.
    """CREATE INDEX session_due ON session(turn)
        WHERE turn = 1 OR (turn = 2 AND (owner IS NOT NULL OR wake IS NOT NULL))""",
)

PART: Final = Part("session", 0, (SCHEMA_1, SCHEMA_2))

# A line's rowid is session (28 bits), stream (13), position (22): one B-tree without an index, in which a session's
# rows lie together and a stream's in order. Rows in a table with a composed primary key and no rowid would spill every
# message over a kilobyte to a page of its own.
POSITION_BITS: Final = MAX_POSITION.bit_length()
STREAM_BITS: Final = 13
SESSION_BITS: Final = 28
SEQUENCE: Final = 0
LOG: Final = 1
FIRST_NAMESPACE: Final = 2
MAX_NAMES: Final = (1 << STREAM_BITS) - FIRST_NAMESPACE

SAVE: Final = """UPDATE head SET rev = rev + 1, status = ?, flow = ?, data = ? WHERE key = ? AND rev = ?
    AND EXISTS (SELECT 1 FROM session WHERE id = ? AND key = ? AND inc = ? AND epoch = ? AND turn = ? AND wake IS ?
                AND owner IS NOT NULL)"""
REVISION: Final = """SELECT h.rev FROM session s JOIN head h ON h.key = s.key
    WHERE s.id = ? AND s.key = ? AND s.inc = ? AND s.epoch = ? AND s.owner IS NOT NULL"""
RENEW: Final = """UPDATE session SET expires = ?
    WHERE id = ? AND key = ? AND inc = ? AND epoch = ? AND owner IS NOT NULL"""
RELEASE: Final = """UPDATE session SET owner = NULL, expires = NULL
    WHERE id = ? AND key = ? AND inc = ? AND epoch = ?"""
LIST: Final = """SELECT key, rev, data FROM head
    WHERE key < ? AND (? IS NULL OR flow = ?) AND (? IS NULL OR status = ?) ORDER BY key DESC LIMIT ?"""
DELETE: Final = (
    "DELETE FROM head WHERE key = ?",
    "DELETE FROM inbox WHERE key = ?",
    "DELETE FROM journal WHERE key = ?",
)
DUE: Final = """SELECT id, owner, min(at) AS at FROM (
        SELECT id, owner, CASE WHEN owner IS NOT NULL THEN expires WHEN turn = 1 THEN 0.0 ELSE wake END AS at
        FROM session WHERE turn = 1 OR (turn = 2 AND (owner IS NOT NULL OR wake IS NOT NULL))
        UNION ALL
        SELECT id, owner, CASE WHEN owner IS NOT NULL THEN expires ELSE 0.0 END FROM session
        WHERE key IN (SELECT key FROM inbox WHERE state < 2 AND state = 0))
    WHERE at <= ? GROUP BY id, owner ORDER BY at, id LIMIT ?"""

INBOX_GET: Final = "SELECT name, kind, state, payload, result FROM inbox WHERE key = ? AND name = ?"
INBOX_ALL: Final = "SELECT name, kind, state, payload, result FROM inbox WHERE key = ? ORDER BY n"
INBOX_OPEN: Final = "SELECT name, kind, state, payload, result FROM inbox WHERE key = ? AND state < 2 ORDER BY n"
INBOX_WITHDRAW: Final = "DELETE FROM inbox WHERE key = ? AND name = ? AND state = 0"
INBOX_INSERT: Final = """INSERT INTO inbox(key, name, kind, state, payload, result) VALUES(?, ?, ?, ?, ?, ?)
    ON CONFLICT(key, name) DO NOTHING"""
JOURNAL_INSERT: Final = """INSERT INTO journal
    VALUES(?, ?, (SELECT coalesce(max(n), 0) + 1 FROM journal WHERE key = ?), ?, ?)
    ON CONFLICT(key, name) DO UPDATE SET state = excluded.state, data = excluded.data"""

CACHED_NAMES: Final = 10_000
LARGE: Final = 256_000

_names_decoder: Final = msgspec.json.Decoder(list[str])


class _SequenceLine(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A sequence entry as stored; `name` is an index into the session's names."""

    name: int
    at: float
    level: int = 0


_line_decoder: Final = msgspec.json.Decoder(_SequenceLine)
_encode: Final = msgspec.json.Encoder().encode


class _Changes(Changes):
    """A commit, with the names that its rows refer to by number."""

    __slots__ = ("names",)

    def __init__(self, commit: Commit) -> None:
        super().__init__(commit)
        names = {message.ns: None for message in commit.messages}
        names |= {entry.stage: None for entry in commit.sequence}
        self.names = list(names)
        if len(names) > MAX_NAMES:
            raise _too_many_names(commit.head.id)

    @property
    def large(self) -> bool:
        """Whether writing it would hold the event loop for longer than handing it to the thread."""
        return len(self.head) > LARGE


class SqliteStore:
    """A `SessionStore` in an SQLite file.

    Several stores, and channels, of one process may name the same file: they share one owner. Several processes may
    use it at once. In `normal` mode a commit survives the death of the process, and a power loss may take the last
    commits of the whole machine, never a part of one; journal rows survive both, always. In `full` mode everything
    survives both.

    Args:
        path: The file; it is made if its directory exists.
        synchronous: `normal` or `full`.
        clock: Decides when leases run out; processes that share a file need clocks that agree.
        busy_timeout: Seconds to wait for other processes before `StoreBusyError`.

    Raises:
        StoreError: The file cannot be opened; `StoreDataError` when it is not a database, or another program's.
        NewerSchemaError: It was written by a newer Stepwell.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["normal", "full"] = "normal",
        clock: Clock | None = None,
        busy_timeout: float = 5.0,
    ) -> None:
        self._clock = clock or SystemClock()
        self._full = synchronous == "full"
        self._owner = acquire_owner(path, PART, busy_timeout)
        self._closed = False
        # Which number a name has in a session. Names are only ever added, so what is known stays true; what is not
        # known is read again in the transaction, because another process may have added it.
        self._names: OrderedDict[str, dict[str, int]] = OrderedDict()

    @property
    def path(self) -> str:
        """The file."""
        return self._owner.path

    async def create(self, commit: Commit, *, owner: str, ttl: float) -> Acquired:
        """See `SessionStore.create`."""
        session = text_checked(commit.head.id, "session id")
        text_checked(owner, "owner")
        changes = _Changes(commit)
        expires = self._clock.time() + ttl
        inc = secrets.randbits(31)

        def job(cursor: Cursor) -> tuple[int, Sequence[InboxRow]]:
            if cursor.execute("SELECT 1 FROM session WHERE id = ?", (session,)).fetchone() is not None:
                raise exists(session)
            flow, text = commit.head.workflow.id, _names_text(names)
            row = (changes.status, flow, text, changes.head)
            key = cursor.execute("INSERT INTO head VALUES(NULL, 1, ?, ?, ?, ?) RETURNING key", row).fetchone()[0]
            if key >> SESSION_BITS:
                raise Undo(StoreError(f"{self.path} cannot hold more sessions: use another file."))
            lease = (None, None) if commit.release else (owner, expires)
            new = (session, key, inc, changes.turn, *lease, changes.wake)
            cursor.execute("INSERT INTO session VALUES(?, ?, ?, 1, ?, ?, ?, ?)", new)
            _append(cursor, session, key, names, changes)
            return key, _open_rows(cursor, key) if commit.inbox else ()

        names = {name: index for index, name in enumerate(changes.names)}
        key, inbox = await self._write(job, aside=changes.large)
        incarnation = incarnation_of(key, inc)
        self._remember(incarnation, names)
        return Acquired(Lease(session, incarnation, 1, owner, expires), 1, None, inbox)

    async def acquire(
        self,
        session: str,
        owner: str,
        *,
        ttl: float,
        known_revision: int | None = None,
        known_incarnation: str | None = None,
        supersede: str | None = None,
    ) -> Acquired:
        """See `SessionStore.acquire`."""
        _storable(session)
        text_checked(owner, "owner")
        known_inc = -1 if known_incarnation is None else parse_incarnation(known_incarnation)[1]

        def job(cursor: Cursor) -> tuple[Lease, int, bytes | None, Sequence[InboxRow]]:
            now = self._clock.time()
            row = cursor.execute(
                """SELECT s.key, s.inc, s.epoch, s.owner, s.expires, h.rev,
                          CASE WHEN h.rev = ? AND s.inc = ? THEN NULL ELSE h.data END
                   FROM session s JOIN head h ON h.key = s.key WHERE s.id = ?""",
                (known_revision, known_inc, session),
            ).fetchone()
            if row is None:
                raise unknown(session)
            key, inc, epoch, holder, until, revision, data = row
            if holder is not None and holder not in (owner, supersede) and until > now:
                raise held(session, holder, until)
            lease = Lease(session, incarnation_of(key, inc), epoch + 1, owner, now + ttl)
            cursor.execute(
                "UPDATE session SET epoch = ?, owner = ?, expires = ? WHERE id = ?",
                (lease.epoch, owner, lease.expires, session),
            )
            return lease, revision, data, _open_rows(cursor, key)

        lease, revision, data, inbox = await self._write(job)
        return Acquired(lease, revision, None if data is None else head_from(data, session, revision), inbox)

    async def renew(self, lease: Lease, *, ttl: float) -> Lease:
        """See `SessionStore.renew`."""
        guard = _guard(lease)

        def job(cursor: Cursor) -> float:
            expires = self._clock.time() + ttl
            if cursor.execute(RENEW, (expires, *guard)).rowcount == 0:
                raise stale(lease.session, lease.epoch)
            return expires

        return Lease(lease.session, lease.incarnation, lease.epoch, lease.owner, await self._write(job))

    async def release(self, lease: Lease) -> None:
        """See `SessionStore.release`."""
        guard = _guard(lease)

        def job(cursor: Cursor) -> None:
            cursor.execute(RELEASE, guard)

        await self._write(job)

    async def save(self, lease: Lease, commit: Commit, expected_revision: int) -> int:
        """See `SessionStore.save`."""
        session = lease.session
        guard = _guard(lease)
        key = guard[1]
        changes = _Changes(commit)
        known = self._names.get(lease.incarnation)
        head = (changes.status, commit.head.workflow.id, changes.head, key)

        def job(cursor: Cursor) -> dict[str, int] | None:
            # One statement where nothing but the head changes, which is nearly always: the session's own row is
            # written only when a turn begins, ends or is suspended, and when the lease is given up.
            if cursor.execute(SAVE, (*head, expected_revision, *guard, changes.turn, changes.wake)).rowcount == 0:
                self._check(cursor, lease, guard, expected_revision)
                cursor.execute("UPDATE head SET rev = rev + 1, status = ?, flow = ?, data = ? WHERE key = ?", head)
                sql = "UPDATE session SET turn = ?, wake = ? WHERE id = ?"
                cursor.execute(sql, (changes.turn, changes.wake, session))
            if commit.release:
                cursor.execute("UPDATE session SET owner = NULL, expires = NULL WHERE id = ?", (session,))
            names = known
            if changes.names and (names is None or not all(name in names for name in changes.names)):
                names = _add_names(cursor, session, key, changes.names)
            _append(cursor, session, key, names or {}, changes)
            return names

        names = await self._write(job, aside=changes.large)
        if names is not known and names is not None:
            self._remember(lease.incarnation, names)
        return expected_revision + 1

    def _check(self, cursor: Cursor, lease: Lease, guard: tuple[str, int, int, int], expected: int) -> None:
        row = cursor.execute(REVISION, guard).fetchone()
        if row is None:
            raise stale(lease.session, lease.epoch)
        if row[0] != expected:
            raise conflict(lease.session, expected, row[0])

    async def load(self, session: str) -> tuple[SessionHead, Lease | None]:
        """See `SessionStore.load`."""

        def job(cursor: Cursor) -> Any:
            return cursor.execute(
                """SELECT s.key, s.inc, s.epoch, s.owner, s.expires, h.rev, h.data
                   FROM session s JOIN head h ON h.key = s.key WHERE s.id = ?""",
                (session,),
            ).fetchone()

        row = await self._read(job, session)
        if row is None:
            raise unknown(session)
        key, inc, epoch, owner, expires, revision, data = row
        lease = None if owner is None else Lease(session, incarnation_of(key, inc), epoch, owner, expires)
        return head_from(data, session, revision), lease

    async def load_messages(
        self, session: str, ns: str, *, first: int = 0, before: int | None = None, last: int | None = None
    ) -> list[StoredMessage]:
        """See `SessionStore.load_messages`."""
        limit = 1 << POSITION_BITS
        start, end = min(max(first, 0), limit), limit if before is None else min(max(before, 0), limit)

        def job(cursor: Cursor) -> tuple[int, list[tuple[int, bytes]]]:
            key, names = _find(cursor, session)
            if ns not in names:
                return 0, []
            base = _base(key, FIRST_NAMESPACE + names.index(ns))
            if last is None:
                sql = "SELECT id, data FROM line WHERE id >= ? AND id < ? ORDER BY id"
                return base, cursor.execute(sql, (base + start, base + end)).fetchall()
            sql = "SELECT id, data FROM line WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?"
            return base, cursor.execute(sql, (base + start, base + end, max(last, 0))).fetchall()[::-1]

        base, rows = await self._read(job, session)
        return [StoredMessage(at - base, decode_message(data)) for at, data in rows]

    async def load_sequence(self, session: str) -> list[SequenceEntry]:
        """See `SessionStore.load_sequence`."""
        names, rows = await self._lines(session, SEQUENCE)
        try:
            return [_sequence_from(names, data) for data in rows]
        except (msgspec.MsgspecError, LookupError, ValueError) as error:
            raise StoreDataError("A stored sequence entry cannot be read.", session_id=session) from error

    async def load_log(self, session: str) -> list[LogEntry]:
        """See `SessionStore.load_log`."""
        return [log_from(data) for data in (await self._lines(session, LOG))[1]]

    async def _lines(self, session: str, stream: int) -> tuple[list[str], list[bytes]]:
        def job(cursor: Cursor) -> tuple[list[str], list[bytes]]:
            key, names = _find(cursor, session)
            base = _base(key, stream)
            sql = "SELECT data FROM line WHERE id >= ? AND id < ? ORDER BY id"
            return names, [data for (data,) in cursor.execute(sql, (base, base + (1 << POSITION_BITS)))]

        return await self._read(job, session)

    async def inbox_put(self, session: str, row: InboxRow) -> InboxRow:
        """See `SessionStore.inbox_put`."""
        _storable(session)
        text_checked(row.key, "inbox key")
        values = (row.key, KINDS.index(row.kind), STATES.index(row.state), row.payload, row.result)

        def job(cursor: Cursor) -> InboxRow:
            found = cursor.execute("SELECT key FROM session WHERE id = ?", (session,)).fetchone()
            if found is None:
                raise unknown(session)
            if cursor.execute(INBOX_INSERT, (found[0], *values)).rowcount:
                return row
            return _inbox_from(cursor.execute(INBOX_GET, (found[0], row.key)).fetchone())

        return await self._write(job)

    async def inbox_get(self, session: str, key: str) -> InboxRow | None:
        """See `SessionStore.inbox_get`."""

        def job(cursor: Cursor) -> Any:
            found = _key(cursor, session)
            return cursor.execute(INBOX_GET, (found, key)).fetchone() if is_text_clean(key) else None

        row = await self._read(job, session)
        return None if row is None else _inbox_from(row)

    async def inbox_list(self, session: str, *, pending: bool = False) -> list[InboxRow]:
        """See `SessionStore.inbox_list`."""

        def job(cursor: Cursor) -> Sequence[InboxRow]:
            found = _key(cursor, session)
            if pending:
                return _open_rows(cursor, found)
            return [_inbox_from(row) for row in cursor.execute(INBOX_ALL, (found,))]

        return list(await self._read(job, session))

    async def inbox_withdraw(self, session: str, key: str) -> bool:
        """See `SessionStore.inbox_withdraw`."""

        def job(cursor: Cursor) -> bool:
            found = _key(cursor, session)
            return is_text_clean(key) and cursor.execute(INBOX_WITHDRAW, (found, key)).rowcount > 0

        return await self._write(job)

    async def journal_put(self, lease: Lease, row: JournalRow) -> None:
        """See `SessionStore.journal_put`. Synchronised to the disk in either mode."""
        text_checked(row.key, "journal key")
        guard = _guard(lease)

        def job(cursor: Cursor) -> None:
            if cursor.execute(REVISION, guard).fetchone() is None:
                raise stale(lease.session, lease.epoch)
            _journal_insert(cursor, guard[1], row)

        # An effect must not run before its intent would survive a power loss, or a second one could run after it.
        await self._write(job, full=True)

    async def journal_load(self, session: str, prefix: str = "") -> list[JournalRow]:
        """See `SessionStore.journal_load`."""

        def job(cursor: Cursor) -> list[tuple[str, int, bytes]]:
            sql = "SELECT name, state, data FROM journal WHERE key = ? AND substr(name, 1, ?) = ? ORDER BY n"
            found = _key(cursor, session)
            return cursor.execute(sql, (found, len(prefix), prefix)).fetchall() if is_text_clean(prefix) else []

        rows = await self._read(job, session)
        return [JournalRow(name, JOURNAL_STATES[state], data) for name, state, data in rows]

    async def due(self, *, limit: int = 100) -> list[DueSession]:
        """See `SessionStore.due`."""
        now = self._clock.time()

        def job(cursor: Cursor) -> list[tuple[str, str | None, float]]:
            return cursor.execute(DUE, (now, limit)).fetchall()

        rows = await self._read(job, aside=True)
        return [DueSession(session, owner or "", at) for session, owner, at in rows]

    async def delete(self, session: str) -> bool:
        """See `SessionStore.delete`."""

        def job(cursor: Cursor) -> bool:
            found = cursor.execute("SELECT key FROM session WHERE id = ?", (session,)).fetchone()
            if found is None:
                return False
            cursor.execute("DELETE FROM session WHERE id = ?", (session,))
            for sql in DELETE:
                cursor.execute(sql, found)
            cursor.execute("DELETE FROM line WHERE id >= ? AND id < ?", (_base(found[0], 0), _base(found[0] + 1, 0)))
            return True

        if not is_text_clean(session):
            return False
        return await self._write(job, aside=True)

    async def list(
        self,
        *,
        flow: str | None = None,
        status: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[SessionSummary], str | None]:
        """See `SessionStore.list`."""
        before = (1 << 62) if after is None else number_of(after)
        number = status_number(status)

        def job(cursor: Cursor) -> list[tuple[int, SessionSummary]]:
            rows = cursor.execute(LIST, (before, flow, flow, number, number, limit + 1)).fetchall()
            return [(key, _summary(cursor, key, revision, data)) for key, revision, data in rows]

        if flow is not None and not is_text_clean(flow):
            return [], None
        rows = await self._read(job, aside=True)
        page = [summary for _, summary in rows[:limit]]
        return page, str(rows[limit - 1][0]) if len(rows) > limit else None

    async def close(self) -> None:
        """See `SessionStore.close`."""
        if not self._closed:
            self._closed = True
            await release_owner(self._owner)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _write(self, job: Callable[[Cursor], T], *, full: bool = False, aside: bool = False) -> T:
        if self._closed:
            raise StoreError(f"The store {self.path} is closed.")
        return await self._owner.write(job, full=full or self._full, aside=aside)

    async def _read(self, job: Callable[[Cursor], T], session: str = "", *, aside: bool = False) -> T:
        if self._closed:
            raise StoreError(f"The store {self.path} is closed.")
        _storable(session)
        return await (self._owner.read_aside(job) if aside else self._owner.read(job))

    def _remember(self, incarnation: str, names: dict[str, int]) -> None:
        self._names[incarnation] = names
        self._names.move_to_end(incarnation)
        if len(self._names) > CACHED_NAMES:
            self._names.popitem(last=False)


def _base(key: int, stream: int) -> int:
    """Rowid of position 0 of a stream."""
    return (key << STREAM_BITS | stream) << POSITION_BITS


def _guard(lease: Lease) -> tuple[str, int, int, int]:
    if not is_text_clean(lease.session):
        raise stale(lease.session, lease.epoch)
    return lease.session, *parse_incarnation(lease.incarnation), lease.epoch


def _storable(session: str) -> None:
    """Answer for the database where a name is one under which nothing can be stored."""
    if not is_text_clean(session):
        raise unknown(session)


def _key(cursor: Cursor, session: str) -> int:
    row = cursor.execute("SELECT key FROM session WHERE id = ?", (session,)).fetchone()
    if row is None:
        raise unknown(session)
    return row[0]


def _find(cursor: Cursor, session: str) -> tuple[int, list[str]]:
    sql = "SELECT h.key, h.names FROM session s JOIN head h ON h.key = s.key WHERE s.id = ?"
    row = cursor.execute(sql, (session,)).fetchone()
    if row is None:
        raise unknown(session)
    return row[0], _names_from(row[1], session)


def _names_from(text: str, session: str) -> list[str]:
    try:
        return _names_decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise StoreDataError("The names of a stored session cannot be read.", session_id=session) from error


def _names_text(names: Iterable[str]) -> str:
    return _encode(list(names)).decode()


def _add_names(cursor: Cursor, session: str, key: int, wanted: Sequence[str]) -> dict[str, int]:
    """Number the names that have no number yet, after what is in the database now."""
    text: str = cursor.execute("SELECT names FROM head WHERE key = ?", (key,)).fetchone()[0]
    try:
        names = {name: index for index, name in enumerate(_names_from(text, session))}
    except StoreDataError as error:
        raise Undo(error) from error
    known = len(names)
    for name in wanted:
        names.setdefault(name, len(names))
    if len(names) > known:
        if len(names) > MAX_NAMES:
            raise Undo(_too_many_names(session))
        cursor.execute("UPDATE head SET names = ? WHERE key = ?", (_names_text(names), key))
    return names


def _too_many_names(session: str) -> StoreError:
    return StoreError(
        f"Session {session!r} has too many namespaces and stages: at most {MAX_NAMES}.", session_id=session
    )


def _append(cursor: Cursor, session: str, key: int, names: dict[str, int], changes: _Changes) -> None:
    """Write all that a commit holds beside the head."""
    commit = changes.commit
    for message in commit.messages:
        row = (_base(key, FIRST_NAMESPACE + names[message.ns]) + message.position, message.data)
        try:
            cursor.execute("INSERT INTO line VALUES(?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise Undo(taken(session, message.ns, message.position)) from error
    for ns, first in commit.first.items():
        if ns not in names:  # not in this commit's names, and perhaps not cached: only then does it cost a look
            names = {name: index for index, name in enumerate(_find(cursor, session)[1])}
        if ns in names:
            base = _base(key, FIRST_NAMESPACE + names[ns])
            end = base + min(max(first, 0), 1 << POSITION_BITS)
            cursor.execute("DELETE FROM line WHERE id >= ? AND id < ?", (base, end))
    for entry in commit.sequence:
        line = _SequenceLine(names[entry.stage], entry.at, entry.level)
        _append_line(cursor, _base(key, SEQUENCE), _encode(line))
    for data in changes.log:
        _append_line(cursor, _base(key, LOG), data)
    for row in commit.inbox:
        if isinstance(row, InboxUpdate):
            sql = "UPDATE inbox SET state = ?, result = ? WHERE key = ? AND name = ?"
            cursor.execute(sql, (STATES.index(row.state), row.result, key, row.key))
        else:
            values = (key, row.key, KINDS.index(row.kind), STATES.index(row.state), row.payload, row.result)
            cursor.execute(INBOX_INSERT, values)
    if commit.clear_journal is not None:
        prefix = commit.clear_journal
        sql = "DELETE FROM journal WHERE key = ? AND substr(name, 1, ?) = ?"
        cursor.execute(sql, (key, len(prefix), prefix))
    for row in commit.journal:
        _journal_insert(cursor, key, row)


def _append_line(cursor: Cursor, base: int, data: bytes) -> None:
    sql = "INSERT INTO line SELECT coalesce(max(id) + 1, ?), ? FROM line WHERE id >= ? AND id < ?"
    cursor.execute(sql, (base, data, base, base + (1 << POSITION_BITS)))


def _journal_insert(cursor: Cursor, key: int, row: JournalRow) -> None:
    cursor.execute(JOURNAL_INSERT, (key, row.key, key, JOURNAL_STATES.index(row.state), row.data))


def _open_rows(cursor: Cursor, key: int) -> Sequence[InboxRow]:
    return [_inbox_from(row) for row in cursor.execute(INBOX_OPEN, (key,))]


def _inbox_from(row: tuple[str, int, int, bytes, bytes | None]) -> InboxRow:
    name, kind, state, payload, result = row
    return InboxRow(name, KINDS[kind], payload, STATES[state], result)


def _sequence_from(names: Sequence[str], data: bytes) -> SequenceEntry:
    entry = _line_decoder.decode(data)
    return SequenceEntry(names[entry.name], entry.at, entry.level)


def _summary(cursor: Cursor, key: int, revision: int, data: bytes) -> SessionSummary:
    summary = summary_from(data, "", revision)
    if not summary.id:  # a damaged head: its id is elsewhere too, without an index
        row = cursor.execute("SELECT id FROM session WHERE key = ?", (key,)).fetchone()
        return summary_from(data, row[0] if row else "", revision)
    return summary
