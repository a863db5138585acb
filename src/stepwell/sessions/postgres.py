"""The store in PostgreSQL 13 or newer, shared by the processes of many machines.

What is stored and the functions that write it: `_postgres_schema`. Every call is one statement in a transaction of its
own, so a connection is in use for one round trip and never while a model is called.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, Final, LiteralString

import msgspec
import psycopg
from psycopg.rows import TupleRow

from stepwell._clock import Clock
from stepwell._json import is_text_clean
from stepwell._postgres import Connections, repeat_conflicts
from stepwell._postgres.arrays import Blobs, Numbers
from stepwell.errors import InvalidInputError, StoreDataError
from stepwell.messages import decode_message

from ._postgres_schema import HELD, PART, TAKEN, closed
from ._rows import (
    JOURNAL_STATES,
    KINDS,
    MAX_POSITION,
    STATES,
    STATUSES,
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
    taken,
    text_checked,
    unknown,
)
from .document import LogEntry, SequenceEntry, SessionHead, SessionSummary
from .store import Acquired, Commit, DueSession, InboxRow, JournalRow, Lease, StoredMessage

__all__ = ["PostgresStore"]

SEQUENCE: Final = b"s"
LOG: Final = b"l"
MAX_NUMBER: Final = (1 << 62) - 1

# Statements are put together from constants only.
# ruff: noqa: S608
_ROWS: Final[LiteralString] = "%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s"
_HEAD: Final[LiteralString] = "%s, %s, %s, %s, %s, %s, %s, %s, %s"
_GUARD: Final[LiteralString] = "key = %s AND id = %s AND incarnation = %s AND epoch = %s AND owner = %s"

_CREATE: Final[LiteralString] = f"SELECT * FROM stepwell_session_create_1(%s, %s, %s, %s, %s, {_HEAD}, {_ROWS})"
_ACQUIRE: Final[LiteralString] = "SELECT * FROM stepwell_session_acquire_1(%s, %s, %s, %s, %s, %s, %s, %s)"
_SAVE: Final[LiteralString] = f"SELECT * FROM stepwell_session_save_1(%s, %s, %s, %s, %s, %s, {_HEAD}, {_ROWS})"
_RENEW: Final[LiteralString] = (
    f"UPDATE stepwell_session SET expires = stepwell_session_now_1(%s) + %s WHERE {_GUARD} RETURNING expires"
)
_RELEASE: Final[LiteralString] = f"UPDATE stepwell_session SET owner = NULL, expires = NULL WHERE {_GUARD}"
_LOAD: Final[LiteralString] = (
    "SELECT key, incarnation, epoch, owner, expires, revision, head FROM stepwell_session WHERE id = %s"
)
# A row without a position says that the session is there.
_LINES: Final[LiteralString] = (
    "SELECT l.position, l.data FROM stepwell_session s LEFT JOIN stepwell_session_line l"
    " ON l.session = s.key AND l.stream = %s AND l.position >= %s AND l.position < %s WHERE s.id = %s"
    " ORDER BY l.position"
)
_LAST_LINES: Final[LiteralString] = f"{_LINES} DESC LIMIT %s"
_INBOX_PUT: Final[LiteralString] = "SELECT * FROM stepwell_session_inbox_put_1(%s, %s, %s, %s, %s, %s)"
_INBOX: Final[LiteralString] = (
    "SELECT i.name, i.kind, i.state, i.payload, i.result FROM stepwell_session s"
    " LEFT JOIN stepwell_session_inbox i ON i.session = s.key"
)
_INBOX_GET: Final[LiteralString] = f"{_INBOX} AND sha256(i.name) = sha256(%s) WHERE s.id = %s"
_INBOX_ALL: Final[LiteralString] = f"{_INBOX} WHERE s.id = %s ORDER BY i.n"
_INBOX_OPEN: Final[LiteralString] = f"{_INBOX} AND i.state < 2 WHERE s.id = %s ORDER BY i.n"
_INBOX_WITHDRAW: Final[LiteralString] = """
WITH found AS (SELECT key FROM stepwell_session WHERE id = %s FOR NO KEY UPDATE), gone AS (
    DELETE FROM stepwell_session_inbox i USING found
    WHERE i.session = found.key AND sha256(i.name) = sha256(%s) AND i.state = 0 RETURNING i.n
) SELECT (SELECT count(*) FROM gone) FROM found
"""
_JOURNAL_PUT: Final[LiteralString] = "SELECT * FROM stepwell_session_journal_put_1(%s, %s, %s, %s, %s, %s, %s, %s)"
_JOURNAL: Final[LiteralString] = (
    "SELECT j.name, j.state, j.data FROM stepwell_session s LEFT JOIN stepwell_session_journal j"
    " ON j.session = s.key AND substring(j.name FOR octet_length(%s)) = %s WHERE s.id = %s ORDER BY j.n"
)
_DUE: Final[LiteralString] = """
SELECT id, owner, min(at) AS at FROM (
    SELECT id, owner, CASE WHEN owner IS NOT NULL THEN expires WHEN turn = 1 THEN 0 ELSE wake END AS at
    FROM stepwell_session WHERE turn = 1 OR turn = 2 AND (owner IS NOT NULL OR wake IS NOT NULL)
    UNION ALL
    SELECT id, owner, CASE WHEN owner IS NOT NULL THEN expires ELSE 0 END FROM stepwell_session
    WHERE key IN (SELECT session FROM stepwell_session_inbox WHERE state < 2 AND state = 0)
) candidate WHERE at <= stepwell_session_now_1(%s) GROUP BY id, owner ORDER BY at, id LIMIT %s
"""
_LIST: Final[LiteralString] = """
SELECT key, id, flow, status, revision, created, saved, stage FROM stepwell_session
WHERE key < %(before)s AND (%(flow)s::bytea IS NULL OR flow = %(flow)s)
    AND (%(status)s::bigint IS NULL OR status = %(status)s)
ORDER BY key DESC LIMIT %(limit)s
"""

_encode: Final = msgspec.json.Encoder().encode
_sequence_decoder: Final = msgspec.json.Decoder(SequenceEntry)


class PostgresStore:
    """A `SessionStore` in a PostgreSQL database, which anything else may share, channels of Stepwell's too.

    Acknowledged is committed: as safe as the server's `synchronous_commit` makes it, which is not changed. Acquisitions
    and journal rows are flushed to the disk also where that is `off`, so no epoch is given twice and no effect's intent
    is lost. After a failover to a standby that was not synchronous the last commits may be missing, epochs among them.

    Leases run out by the database's clock; the clocks of the processes need not agree.

    The tables are made by the first call; their names begin with `stepwell_session`, in the first schema of the
    connection's `search_path`. The user needs the right to create there; when the tables exist, to select, insert,
    update and delete in them is enough. A pooler must keep sessions apart.

    Args:
        url: `postgresql://[user:password@]host:5432/database`, with libpq's options as query. For TLS: `sslmode`; for
            faster commits that a crash of the server may lose: `options=-c%20synchronous_commit%3Doff`.
        pool_size: Connections at most. Each is in use for the length of a statement.
        timeout: Seconds for a call at the server before `StoreBusyError`.
        clock: For leases instead of the database's clock: for tests.

    Raises:
        InvalidInputError: The URL is not one, or the pool is too small. Nothing is connected to before the first call.
    """

    def __init__(self, url: str, *, pool_size: int = 8, timeout: float = 10.0, clock: Clock | None = None) -> None:
        if pool_size < 1:
            raise InvalidInputError(f"A pool of {pool_size} connections is too small: at least 1.")
        self._clock = clock
        self._connections = Connections(url, timeout, PART)
        self._permits = asyncio.Semaphore(pool_size)
        self._calls = 0
        self._idle: asyncio.Event | None = None
        self._closed = False

    async def create(self, commit: Commit, *, owner: str, ttl: float) -> Acquired:
        """See `SessionStore.create`."""
        session = text_checked(commit.head.id, "session id")
        text_checked(owner, "owner")
        number = secrets.randbits(31)
        values = (self._now(), session.encode(), number, owner.encode(), float(ttl), *_columns(Changes(commit)))
        rows = await self._write(_CREATE, values, session, commit)
        if not rows:
            raise exists(session)
        key, expires, *_ = rows[0]
        lease = Lease(session, incarnation_of(key, number), 1, owner, expires)
        return Acquired(lease, 1, None, [_inbox_from(row[2:]) for row in rows[1:]])

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
        name = _name(session)
        text_checked(owner, "owner")
        dead = supersede.encode() if supersede is not None and is_text_clean(supersede) else None
        known = (None, None) if known_incarnation is None else _parse(known_incarnation)
        values = (self._now(), name, owner.encode(), float(ttl), known_revision, *known, dead)
        rows = await self._ask(_ACQUIRE, values)
        if not rows:
            raise unknown(session)
        outcome, key, number, epoch, holder, expires, revision, data, *_ = rows[0]
        if outcome == HELD:
            raise held(session, holder.decode(), expires)
        lease = Lease(session, incarnation_of(key, number), epoch, owner, expires)
        head = None if data is None else head_from(data, session, revision)
        return Acquired(lease, revision, head, [_inbox_from(row[8:]) for row in rows[1:]])

    async def renew(self, lease: Lease, *, ttl: float) -> Lease:
        """See `SessionStore.renew`."""
        rows = await self._ask(_RENEW, (self._now(), float(ttl), *_guard(lease)))
        if not rows:
            raise stale(lease.session, lease.epoch)
        return Lease(lease.session, lease.incarnation, lease.epoch, lease.owner, rows[0][0])

    async def release(self, lease: Lease) -> None:
        """See `SessionStore.release`."""
        await self._ask(_RELEASE, _guard(lease))

    async def save(self, lease: Lease, commit: Commit, expected_revision: int) -> int:
        """See `SessionStore.save`."""
        key, name, *guard = _guard(lease)
        values = (name, key, *guard, expected_revision, *_columns(Changes(commit)))
        [(saved, revision)] = await self._write(_SAVE, values, lease.session, commit)
        if saved:
            return revision
        if revision is None:
            raise stale(lease.session, lease.epoch)
        raise conflict(lease.session, expected_revision, revision)

    async def load(self, session: str) -> tuple[SessionHead, Lease | None]:
        """See `SessionStore.load`."""
        rows = await self._ask(_LOAD, (_name(session),))
        if not rows:
            raise unknown(session)
        key, number, epoch, owner, expires, revision, data = rows[0]
        lease = None
        if owner is not None:
            lease = Lease(session, incarnation_of(key, number), epoch, owner.decode(), expires)
        return head_from(data, session, revision), lease

    async def load_messages(
        self, session: str, ns: str, *, first: int = 0, before: int | None = None, last: int | None = None
    ) -> list[StoredMessage]:
        """See `SessionStore.load_messages`."""
        name = _name(session)
        # A namespace that cannot be: then the session is asked for alone.
        stream = _stream(ns) if is_text_clean(ns) else b""
        end = MAX_POSITION + 1 if before is None else min(max(before, 0), MAX_POSITION + 1)
        values = (stream, min(max(first, 0), MAX_POSITION + 1), end, name)
        if last is None:
            rows = await self._of(session, _LINES, values)
        else:
            rows = await self._of(session, _LAST_LINES, (*values, min(max(last, 1), MAX_NUMBER)))
            rows = rows[::-1] if last > 0 else []
        return [StoredMessage(position, decode_message(data)) for position, data in rows]

    async def load_sequence(self, session: str) -> list[SequenceEntry]:
        """See `SessionStore.load_sequence`."""
        rows = await self._of(session, _LINES, (SEQUENCE, 0, MAX_NUMBER, _name(session)))
        try:
            return [_sequence_decoder.decode(data) for _, data in rows]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreDataError("A stored sequence entry cannot be read.", session_id=session) from error

    async def load_log(self, session: str) -> list[LogEntry]:
        """See `SessionStore.load_log`."""
        rows = await self._of(session, _LINES, (LOG, 0, MAX_NUMBER, _name(session)))
        return [log_from(data) for _, data in rows]

    async def inbox_put(self, session: str, row: InboxRow) -> InboxRow:
        """See `SessionStore.inbox_put`."""
        name = _name(session)
        text_checked(row.key, "inbox key")
        kind, state = KINDS.index(row.kind), STATES.index(row.state)
        rows = await self._ask(_INBOX_PUT, (name, row.key.encode(), kind, state, row.payload, row.result))
        if not rows:
            raise unknown(session)
        return _inbox_from(rows[0])

    async def inbox_get(self, session: str, key: str) -> InboxRow | None:
        """See `SessionStore.inbox_get`."""
        wanted = key.encode() if is_text_clean(key) else None
        rows = await self._of(session, _INBOX_GET, (wanted, _name(session)))
        return _inbox_from(rows[0]) if rows else None

    async def inbox_list(self, session: str, *, pending: bool = False) -> list[InboxRow]:
        """See `SessionStore.inbox_list`."""
        rows = await self._of(session, _INBOX_OPEN if pending else _INBOX_ALL, (_name(session),))
        return [_inbox_from(row) for row in rows]

    async def inbox_withdraw(self, session: str, key: str) -> bool:
        """See `SessionStore.inbox_withdraw`."""
        wanted = key.encode() if is_text_clean(key) else None
        rows = await self._of(session, _INBOX_WITHDRAW, (_name(session), wanted))
        return bool(rows[0][0])

    async def journal_put(self, lease: Lease, row: JournalRow) -> None:
        """See `SessionStore.journal_put`. Flushed to the disk whatever `synchronous_commit` says."""
        text_checked(row.key, "journal key")
        key, name, *guard = _guard(lease)
        values = (name, key, *guard, row.key.encode(), JOURNAL_STATES.index(row.state), row.data)
        if not await self._ask(_JOURNAL_PUT, values):
            raise stale(lease.session, lease.epoch)

    async def journal_load(self, session: str, prefix: str = "") -> list[JournalRow]:
        """See `SessionStore.journal_load`."""
        start = prefix.encode() if is_text_clean(prefix) else None
        rows = await self._of(session, _JOURNAL, (start, start, _name(session)))
        return [JournalRow(name.decode(), JOURNAL_STATES[int(state)], data) for name, state, data in rows]

    async def due(self, *, limit: int = 100) -> list[DueSession]:
        """See `SessionStore.due`."""
        rows = await self._ask(_DUE, (self._now(), limit))
        return [DueSession(name.decode(), "" if owner is None else owner.decode(), at) for name, owner, at in rows]

    async def delete(self, session: str) -> bool:
        """See `SessionStore.delete`."""
        if not is_text_clean(session):
            return False
        return bool(await self._ask("SELECT * FROM stepwell_session_delete_1(%s)", (session.encode(),)))

    async def list(
        self,
        *,
        flow: str | None = None,
        status: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[SessionSummary], str | None]:
        """See `SessionStore.list`."""
        before = MAX_NUMBER if after is None else number_of(after)
        if flow is not None and not is_text_clean(flow):
            return [], None
        wanted = None if flow is None else flow.encode()
        values = {"before": before, "flow": wanted, "status": status_number(status), "limit": limit + 1}
        rows = await self._ask(_LIST, values)
        page = [
            SessionSummary(name.decode(), of.decode(), STATUSES[int(number)], revision, created, saved, stage.decode())
            for _, name, of, number, revision, created, saved, stage in rows[:limit]
        ]
        return page, str(rows[limit - 1][0]) if len(rows) > limit else None

    async def close(self) -> None:
        """See `SessionStore.close`."""
        self._closed = True
        if self._calls:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()
        await self._connections.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _now(self) -> float | None:
        """The time for a statement; None for the database's."""
        return None if self._clock is None else self._clock.time()

    async def _ask(self, query: LiteralString, values: Any) -> list[TupleRow]:
        """Run a statement once: whether a lost one is to be repeated is the caller's decision."""
        if self._closed:
            raise closed()
        self._calls += 1
        try:
            async with self._permits, self._connections.take() as connection:
                cursor = connection.cursor(binary=True)
                return await repeat_conflicts(lambda: _fetch(cursor.execute(query, values)))
        finally:
            self._calls -= 1
            if self._idle is not None and not self._calls:
                self._idle.set()

    async def _of(self, session: str, query: LiteralString, values: Any) -> list[TupleRow]:
        """Read rows of a session that is joined to them, so that a session without any is told from none."""
        rows = await self._ask(query, values)
        if not rows:
            raise unknown(session)
        return [] if rows[0][0] is None else rows

    async def _write(self, query: LiteralString, values: Any, session: str, commit: Commit) -> list[TupleRow]:
        """Run the statement of a commit."""
        try:
            return await self._ask(query, values)
        except _Taken as error:
            message = commit.messages[error.place - 1]
            raise taken(session, message.ns, message.position) from None


class _Taken(Exception):
    """The server found a message's position taken, and undid the statement."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


async def _fetch(executed: Awaitable[psycopg.AsyncCursor[TupleRow]]) -> list[TupleRow]:
    try:
        cursor = await executed
    except psycopg.Error as error:
        if error.sqlstate == TAKEN:
            raise _Taken(int(error.diag.message_primary or 0)) from None
        raise
    return await cursor.fetchall() if cursor.description else []


def _name(session: str) -> bytes:
    """A session's id as it is stored; a name under which nothing can be stored is unknown."""
    if not is_text_clean(session):
        raise unknown(session)
    return session.encode()


def _stream(ns: str) -> bytes:
    return b"m" + ns.encode()


def _parse(incarnation: str) -> tuple[int, int]:
    key, number = parse_incarnation(incarnation)
    return (key, number) if max(key, number) <= MAX_NUMBER else (-1, -1)


def _guard(lease: Lease) -> tuple[int, bytes, int, int, bytes]:
    """What tells that a lease is the current one, as the statements have it.

    The owner too: after a failover that lost an acquisition, the same epoch may have been given to somebody else.
    """
    if not (is_text_clean(lease.session) and is_text_clean(lease.owner)):
        raise stale(lease.session, lease.epoch)
    key, number = _parse(lease.incarnation)
    return key, lease.session.encode(), number, lease.epoch, lease.owner.encode()


def _columns(changes: Changes) -> tuple[Any, ...]:
    """A commit as the functions' arguments have it."""
    commit = changes.commit
    head = commit.head
    messages, inbox, journal = commit.messages, commit.inbox, commit.journal
    rows = [row if isinstance(row, InboxRow) else None for row in inbox]
    first = {ns: at for ns, at in commit.first.items() if is_text_clean(ns)}
    return (
        changes.turn,
        None if changes.wake is None else float(changes.wake),
        head.workflow.id.encode(),
        changes.status,
        head.workflow.current.encode(),
        float(head.created_at),
        float(head.saved_at),
        changes.head,
        commit.release,
        Blobs([_stream(message.ns) for message in messages]),
        Numbers([message.position for message in messages]),
        Blobs([message.data for message in messages]),
        Blobs([_stream(ns) for ns in first]),
        Numbers([min(max(at, 0), MAX_POSITION + 1) for at in first.values()]),
        Blobs([_encode(entry) for entry in commit.sequence]),
        Blobs(changes.log),
        Blobs([row.key.encode() for row in inbox]),
        Numbers([None if row is None else KINDS.index(row.kind) for row in rows]),
        Numbers([STATES.index(row.state) for row in inbox]),
        Blobs([None if row is None else row.payload for row in rows]),
        Blobs([row.result for row in inbox]),
        commit.clear_journal.encode("utf-8", "surrogatepass") if commit.clear_journal is not None else None,
        Blobs([row.key.encode() for row in journal]),
        Numbers([JOURNAL_STATES.index(row.state) for row in journal]),
        Blobs([row.data for row in journal]),
    )


def _inbox_from(row: Sequence[Any]) -> InboxRow:
    name: bytes
    kind: int
    state: int
    name, kind, state, payload, result = row
    return InboxRow(name.decode(), KINDS[kind], payload, STATES[state], result)
