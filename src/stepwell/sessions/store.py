"""The protocol every session store implements, and the records it takes and gives.

A store keeps, per session: the head (JSON text, opaque to it but for the columns below), append-only rows (messages by
namespace and position, sequence, log), the journal, the inbox, and the lease columns. `SessionStoreConformance` in
`stepwell.testing` is the executable form of this page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from stepwell.messages import Message

from .document import LogEntry, SequenceEntry, SessionHead, SessionSummary

__all__ = [
    "Acquired",
    "Commit",
    "DueSession",
    "InboxRow",
    "InboxUpdate",
    "JournalRow",
    "Lease",
    "NewMessage",
    "SessionStore",
    "StoredMessage",
]

InboxKind: TypeAlias = Literal["input", "steer", "answer", "cancel"]
InboxState: TypeAlias = Literal["new", "taken", "done"]
JournalState: TypeAlias = Literal["intent", "done", "refused", "unknown"]


class Lease(msgspec.Struct, frozen=True):
    """The right to write a session for a while.

    Attributes:
        session: Session id.
        incarnation: Tells this session from an earlier one of the same id that was deleted.
        epoch: Grows by one with every acquisition; a lower one is refused everywhere.
        owner: Who holds it, `host:boot:pid:start`.
        expires: Unix time in seconds on the store's clock; for other owners' eyes. Holders count their own time.
    """

    session: str
    incarnation: str
    epoch: int
    owner: str
    expires: float


class NewMessage(msgspec.Struct, frozen=True):
    """A message row to append: `data` is the encoded record, `position` 0 to 4,194,303."""

    ns: str
    position: int
    data: bytes


class StoredMessage(msgspec.Struct, frozen=True):
    """A message row as loaded."""

    position: int
    message: Message


class InboxRow(msgspec.Struct, frozen=True):
    """Something that reached a session from any process. `key` is unique per session."""

    key: str
    kind: InboxKind
    payload: bytes
    state: InboxState = "new"
    result: bytes | None = None


class InboxUpdate(msgspec.Struct, frozen=True):
    """A change of an inbox row that is part of a commit."""

    key: str
    state: InboxState
    result: bytes | None = None


class JournalRow(msgspec.Struct, frozen=True):
    """A record of an effect, by idempotency key; outside the head, guarded by the epoch."""

    key: str
    state: JournalState
    data: bytes = b""


class Commit(msgspec.Struct, kw_only=True):
    """One atomic change of a session.

    Attributes:
        head: The new head. `revision` in it is ignored; the store sets the column to expected + 1.
        messages: Rows to append.
        first: Namespaces whose first position moved: rows below it are removed.
        sequence: Rows to append.
        log: Rows to append.
        inbox: Rows to change; an `InboxRow` in it is inserted (unless the key exists), an `InboxUpdate` changes one
            (none, if there is no such key).
        clear_journal: Remove journal rows whose key starts with this.
        journal: Rows to insert or replace (imports, and tools without an effect), after `clear_journal`.
        release: Give the lease up with this commit.
    """

    head: SessionHead
    messages: Sequence[NewMessage] = ()
    first: dict[str, int] = {}
    sequence: Sequence[SequenceEntry] = ()
    log: Sequence[LogEntry] = ()
    inbox: Sequence[InboxUpdate | InboxRow] = ()
    clear_journal: str | None = None
    journal: Sequence[JournalRow] = ()
    release: bool = False


class Acquired(msgspec.Struct, frozen=True):
    """What an acquisition gives.

    Attributes:
        lease: The new lease.
        revision: The session's revision now.
        head: The head, unless `known_revision` was the current one (then `None`).
        inbox: Rows that are not done.
    """

    lease: Lease
    revision: int
    head: SessionHead | None
    inbox: Sequence[InboxRow] = ()


class DueSession(msgspec.Struct, frozen=True):
    """A session that needs somebody, see `SessionStore.due`.

    Attributes:
        session: Session id.
        owner: Who held it last; empty without a lease.
        expires: When the lease ran out, or the suspension; 0 for a turn that was given up, and for a row that is new.
    """

    session: str
    owner: str
    expires: float


class SessionStore(Protocol):
    """Where sessions live.

    Every method may raise `StoreBusyError` (locked or unreachable, nothing was done unless the answer was lost) and
    `StoreDataError`. Cancelling a call leaves the store as before or after it, never between.
    """

    async def create(self, commit: Commit, *, owner: str, ttl: float) -> Acquired:
        """Create the session `commit.head.id` with its first commit, leased to `owner`, epoch 1, revision 1.

        With `commit.release` the session is created without a lease (imports).

        Raises:
            SessionExistsError: The id is taken.
        """
        ...

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
        """Take the lease: one transaction, epoch + 1, also when `owner` holds it already.

        Args:
            session: Session id.
            owner: Who takes it.
            ttl: Seconds until it may be taken by others, counted by the store's clock.
            known_revision: With `known_incarnation`: leave the head out of the answer if it is still this one.
            known_incarnation: See `known_revision`.
            supersede: An owner known to be dead, whose lease may be taken before it ends.

        Raises:
            UnknownSessionError: There is no such session.
            LeaseHeldError: Another owner's lease has not run out.
        """
        ...

    async def renew(self, lease: Lease, *, ttl: float) -> Lease:
        """Extend the lease; touches neither revision nor head.

        Raises:
            StaleWriterError: It was taken over, given up, or the session was deleted.
        """
        ...

    async def release(self, lease: Lease) -> None:
        """Give the lease up without a commit. Harmless when it is no longer held."""
        ...

    async def save(self, lease: Lease, commit: Commit, expected_revision: int) -> int:
        """Apply `commit` in one short transaction; return the new revision (`expected_revision + 1`).

        Raises:
            StaleWriterError: The lease is not current (epoch or incarnation), or was given up.
            SessionConflictError: The revision moved.
            StoreError: A message position is taken.
            NonJsonValueError: The head holds a value that is not JSON, or a lone surrogate. Nothing was written.
        """
        ...

    async def load(self, session: str) -> tuple[SessionHead, Lease | None]:
        """Read the head (with `revision`) and the lease, if one is held.

        Raises:
            UnknownSessionError: There is no such session.
        """
        ...

    async def load_messages(
        self, session: str, ns: str, *, first: int = 0, before: int | None = None, last: int | None = None
    ) -> list[StoredMessage]:
        """Read messages of a namespace in order: positions `first` to `before - 1`, at most the `last` newest."""
        ...

    async def load_sequence(self, session: str) -> list[SequenceEntry]:
        """Read the sequence, oldest first."""
        ...

    async def load_log(self, session: str) -> list[LogEntry]:
        """Read the log, oldest first."""
        ...

    async def inbox_put(self, session: str, row: InboxRow) -> InboxRow:
        """Insert a row without touching the head; return the row that is there now (the older one if the key exists).

        Raises:
            UnknownSessionError: There is no such session.
        """
        ...

    async def inbox_get(self, session: str, key: str) -> InboxRow | None:
        """Read one row."""
        ...

    async def inbox_list(self, session: str, *, pending: bool = False) -> list[InboxRow]:
        """Read the rows in the order they arrived: all, or with `pending` those that are not done."""
        ...

    async def inbox_withdraw(self, session: str, key: str) -> bool:
        """Remove a row that is still new: nobody waits for it any more. Whether it was; one that was taken stays."""
        ...

    async def journal_put(self, lease: Lease, row: JournalRow) -> None:
        """Insert or replace a journal row, on disk before it returns (power-loss safe where the backend can be).

        Raises:
            StaleWriterError: The lease is not current.
        """
        ...

    async def journal_load(self, session: str, prefix: str = "") -> list[JournalRow]:
        """Read journal rows whose key starts with `prefix`, in the order they were first written."""
        ...

    async def due(self, *, limit: int = 100) -> list[DueSession]:
        """List sessions that need somebody, longest waiting first.

        These are: a turn is open and its lease has run out or was given up; a turn is suspended and its lease has run
        out (its owner died); a turn is suspended, nobody holds it, and it has waited until `TurnRecord.expires` (one
        without that waits for its answer and is not due); or a row of the inbox is new and nobody holds the session.
        """
        ...

    async def delete(self, session: str) -> bool:
        """Remove the session and all its rows; a holder's next write is a `StaleWriterError`. Whether it was there."""
        ...

    async def list(
        self,
        *,
        flow: str | None = None,
        status: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> tuple[list[SessionSummary], str | None]:
        """List sessions, newest first by creation, with a cursor for the next page (`None` at the end)."""
        ...

    async def close(self) -> None:
        """Finish what is under way and close. Idempotent."""
        ...
