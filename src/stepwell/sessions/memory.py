"""The store in memory: for tests, demos and sessions that may be forgotten. It isolates like a real one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from stepwell._clock import Clock, SystemClock
from stepwell.messages import decode_message

from ._rows import (
    TURN_NONE,
    TURN_OPEN,
    check_position,
    conflict,
    exists,
    head_bytes,
    head_from,
    held,
    log_bytes,
    log_from,
    number_of,
    stale,
    summary_from,
    taken,
    text_checked,
    turn_state,
    unknown,
    wake_at,
)
from .document import LogEntry, SequenceEntry, SessionHead, SessionSummary
from .store import Acquired, Commit, DueSession, InboxRow, InboxUpdate, JournalRow, Lease, StoredMessage

__all__ = ["MemoryStore"]


class _Session:
    """One session's rows. Everything in it is bytes or immutable, so nothing is shared with a caller."""

    __slots__ = (
        "epoch",
        "expires",
        "fresh",
        "head",
        "inbox",
        "incarnation",
        "journal",
        "log",
        "messages",
        "number",
        "owner",
        "revision",
        "sequence",
        "turn",
        "wake",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.incarnation = secrets.token_hex(4)
        self.head = b""
        self.revision = 0
        self.epoch = 0
        self.owner: str | None = None
        self.expires = 0.0
        self.turn = TURN_NONE
        self.wake: float | None = None
        self.messages: dict[tuple[str, int], bytes] = {}  # by namespace and position
        self.sequence: list[SequenceEntry] = []
        self.log: list[bytes] = []
        self.inbox: dict[str, InboxRow] = {}
        self.fresh: set[str] = set()  # keys of the inbox's rows that are new
        self.journal: dict[str, JournalRow] = {}

    @property
    def idle(self) -> float | None:
        """When it needs somebody, while nobody holds it."""
        return 0.0 if self.turn == TURN_OPEN or self.fresh else self.wake

    def receive(self, row: InboxRow) -> InboxRow:
        """Insert a row; returns the one that is there."""
        there = self.inbox.setdefault(row.key, row)
        if there.state == "new":
            self.fresh.add(there.key)
        return there

    def change(self, row: InboxUpdate) -> None:
        """Change a row, if it is there."""
        old = self.inbox.get(row.key)
        if old is not None:
            self.inbox[row.key] = InboxRow(old.key, old.kind, old.payload, row.state, row.result)
            (self.fresh.add if row.state == "new" else self.fresh.discard)(row.key)


class MemoryStore:
    """A `SessionStore` in this process's memory, for one event loop.

    Heads and messages are kept encoded and decoded for every reader, so that a test on this store finds what would
    not survive a real one. No method waits for anything.

    Args:
        clock: Decides when leases run out.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._sessions: dict[str, _Session] = {}
        self._candidates: dict[str, None] = {}  # may become due; the others never have to be looked at
        self._number = 0

    async def create(self, commit: Commit, *, owner: str, ttl: float) -> Acquired:
        """See `SessionStore.create`."""
        session = text_checked(commit.head.id, "session id")
        if session in self._sessions:
            raise exists(session)
        new = _Session(self._number + 1)
        expires = self._clock.time() + ttl
        new.epoch, new.owner, new.expires = 1, owner, expires
        self._apply(session, new, commit)
        self._number = new.number
        self._sessions[session] = new
        return Acquired(Lease(session, new.incarnation, 1, owner, expires), 1, None, _open_rows(new))

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
        found = self._find(session)
        now = self._clock.time()
        holder = found.owner
        if holder is not None and holder not in (owner, supersede) and found.expires > now:
            raise held(session, holder, found.expires)
        known = known_revision == found.revision and known_incarnation == found.incarnation
        head = None if known else head_from(found.head, session, found.revision)
        found.epoch += 1
        found.owner, found.expires = text_checked(owner, "owner"), now + ttl
        if found.turn != TURN_NONE or found.fresh:
            self._candidates[session] = None
        lease = Lease(session, found.incarnation, found.epoch, owner, found.expires)
        return Acquired(lease, found.revision, head, _open_rows(found))

    async def renew(self, lease: Lease, *, ttl: float) -> Lease:
        """See `SessionStore.renew`."""
        found = self._held(lease)
        found.expires = self._clock.time() + ttl
        return Lease(lease.session, lease.incarnation, lease.epoch, lease.owner, found.expires)

    async def release(self, lease: Lease) -> None:
        """See `SessionStore.release`."""
        found = self._current(lease)
        if found is not None:
            self._give_up(lease.session, found)

    async def save(self, lease: Lease, commit: Commit, expected_revision: int) -> int:
        """See `SessionStore.save`."""
        found = self._held(lease)
        if found.revision != expected_revision:
            raise conflict(lease.session, expected_revision, found.revision)
        self._apply(lease.session, found, commit)
        return found.revision

    async def load(self, session: str) -> tuple[SessionHead, Lease | None]:
        """See `SessionStore.load`."""
        found = self._find(session)
        lease = None
        if found.owner is not None:
            lease = Lease(session, found.incarnation, found.epoch, found.owner, found.expires)
        return head_from(found.head, session, found.revision), lease

    async def load_messages(
        self, session: str, ns: str, *, first: int = 0, before: int | None = None, last: int | None = None
    ) -> list[StoredMessage]:
        """See `SessionStore.load_messages`."""
        rows = self._find(session).messages
        positions = sorted(at for of, at in rows if of == ns and at >= first and (before is None or at < before))
        if last is not None:
            positions = positions[max(0, len(positions) - last) :]
        return [StoredMessage(at, decode_message(rows[ns, at])) for at in positions]

    async def load_sequence(self, session: str) -> list[SequenceEntry]:
        """See `SessionStore.load_sequence`."""
        return list(self._find(session).sequence)

    async def load_log(self, session: str) -> list[LogEntry]:
        """See `SessionStore.load_log`."""
        return [log_from(data) for data in self._find(session).log]

    async def inbox_put(self, session: str, row: InboxRow) -> InboxRow:
        """See `SessionStore.inbox_put`."""
        text_checked(row.key, "inbox key")
        found = self._find(session)
        there = found.receive(row)
        if found.fresh:
            self._candidates[session] = None
        return there

    async def inbox_get(self, session: str, key: str) -> InboxRow | None:
        """See `SessionStore.inbox_get`."""
        return self._find(session).inbox.get(key)

    async def inbox_list(self, session: str, *, pending: bool = False) -> list[InboxRow]:
        """See `SessionStore.inbox_list`."""
        found = self._find(session)
        return list(_open_rows(found) if pending else found.inbox.values())

    async def inbox_withdraw(self, session: str, key: str) -> bool:
        """See `SessionStore.inbox_withdraw`."""
        found = self._find(session)
        if key not in found.fresh:
            return False
        found.fresh.discard(key)
        del found.inbox[key]
        return True

    async def journal_put(self, lease: Lease, row: JournalRow) -> None:
        """See `SessionStore.journal_put`."""
        text_checked(row.key, "journal key")
        self._held(lease).journal[row.key] = row

    async def journal_load(self, session: str, prefix: str = "") -> list[JournalRow]:
        """See `SessionStore.journal_load`."""
        return [row for key, row in self._find(session).journal.items() if key.startswith(prefix)]

    async def due(self, *, limit: int = 100) -> list[DueSession]:
        """See `SessionStore.due`."""
        now = self._clock.time()
        rows: list[DueSession] = []
        for session in self._candidates:
            found = self._sessions[session]
            at = found.idle
            if found.owner is not None and (at is not None or found.turn != TURN_NONE):
                at = found.expires
            if at is not None and at <= now:
                rows.append(DueSession(session, found.owner or "", at))
        return sorted(rows, key=lambda row: (row.expires, row.session))[:limit]

    async def delete(self, session: str) -> bool:
        """See `SessionStore.delete`."""
        self._candidates.pop(session, None)
        return self._sessions.pop(session, None) is not None

    async def list(
        self,
        *,
        flow: str | None = None,
        status: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[SessionSummary], str | None]:
        """See `SessionStore.list`."""
        before = number_of(after) if after is not None else self._number + 1
        rows: list[SessionSummary] = []
        number = 0
        for session, found in reversed(self._sessions.items()):
            if found.number >= before:
                continue
            summary = summary_from(found.head, session, found.revision)
            if flow not in (None, summary.flow) or status not in (None, summary.status):
                continue
            if len(rows) == limit:
                return rows, str(number)
            rows.append(summary)
            number = found.number
        return rows, None

    async def close(self) -> None:
        """See `SessionStore.close`. What is stored stays readable through this object, and is gone with it."""

    def _find(self, session: str) -> _Session:
        found = self._sessions.get(session)
        if found is None:
            raise unknown(session)
        return found

    def _current(self, lease: Lease) -> _Session | None:
        found = self._sessions.get(lease.session)
        if found is None or found.epoch != lease.epoch or found.incarnation != lease.incarnation:
            return None
        return found

    def _held(self, lease: Lease) -> _Session:
        found = self._current(lease)
        if found is None or found.owner is None:
            raise stale(lease.session, lease.epoch)
        return found

    def _give_up(self, session: str, found: _Session) -> None:
        found.owner, found.expires = None, 0.0
        if found.idle is None:
            self._candidates.pop(session, None)

    def _apply(self, session: str, found: _Session, commit: Commit) -> None:
        """Apply a commit. All that can fail comes first, so that it is applied whole or not at all."""
        head = commit.head
        data = head_bytes(head)
        log = [log_bytes(entry) for entry in commit.log] if commit.log else []
        for entry in commit.sequence:
            text_checked(entry.stage, "stage")
        for row in commit.inbox:
            text_checked(row.key, "inbox key")
        for row in commit.journal:
            text_checked(row.key, "journal key")
        rows = found.messages
        new: dict[tuple[str, int], bytes] = {}
        for message in commit.messages:
            ns, position = at = message.ns, message.position
            check_position(session, text_checked(ns, "namespace"), position)
            if at in rows or at in new:
                raise taken(session, ns, position)
            new[at] = message.data
        rows |= new
        if commit.first:
            for at in [at for at in rows if at[1] < commit.first.get(at[0], 0)]:
                del rows[at]
        if commit.sequence:
            found.sequence += commit.sequence
        if log:
            found.log += log
        for row in commit.inbox:
            if isinstance(row, InboxRow):
                found.receive(row)
            else:
                found.change(row)
        if commit.clear_journal is not None:
            for key in [key for key in found.journal if key.startswith(commit.clear_journal)]:
                del found.journal[key]
        for row in commit.journal:
            found.journal[row.key] = row
        found.head = data
        found.revision += 1
        turn = found.turn = turn_state(head)
        found.wake = wake_at(head)
        if turn != TURN_NONE or found.fresh:
            self._candidates[session] = None
        elif session in self._candidates:
            del self._candidates[session]
        if commit.release:
            self._give_up(session, found)


def _open_rows(found: _Session) -> Sequence[InboxRow]:
    if not found.inbox:
        return ()
    return [row for row in found.inbox.values() if row.state != "done"]
