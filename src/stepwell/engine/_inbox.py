"""What reaches a session from any process, as rows of its inbox, and the way of an input into a session that is busy.

A row is written without touching the session. An input is taken by the commit that opens its turn, steering by a commit
before the next model call, a cancel by the one that closes the turn. So nothing is lost with the process that was told,
and nothing is done twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from stepwell.errors import CancelKind, IdempotencyConflictError, LeaseHeldError, SessionBusyError
from stepwell.flow import FlowDefinition
from stepwell.messages import JsonObject, UserMessage
from stepwell.sessions import Acquired, InboxRow, SessionStore, TurnRecord

from ._hold import Hold
from ._ids import new_id
from ._inputs import TurnInput
from ._owner import owner_is_dead
from ._warm import Warm

__all__ = ["Cancel", "Door", "cancel_of", "cancel_row", "input_of", "input_row", "is_same", "waiting_before"]

_DIGEST: Final = 64
_FIRST_WAIT: Final = 0.02
_MAX_WAIT: Final = 0.5
"""Seconds between two looks at a session that another process works on."""

RowKind: TypeAlias = Literal["input", "steer"]


class _Said(msgspec.Struct, omit_defaults=True):
    """What an input's row holds behind its digest."""

    message: UserMessage | None = None
    config: JsonObject | None = None
    published: str | None = None


class Cancel(msgspec.Struct, omit_defaults=True):
    """A request to cancel.

    Attributes:
        kind: As what it is recorded.
        reason: Of whoever asks.
        run: The run that is meant; `None` is whatever is open.
        key: Or the input that is meant, also one whose turn has not begun.
    """

    kind: CancelKind = "user"
    reason: str | None = None
    run: str | None = None
    key: str | None = None

    def means(self, turn: TurnRecord) -> bool:
        """Whether an open turn is what it is about."""
        if self.run is None and self.key is None:
            return True
        return self.run == turn.run or (self.key is not None and self.key == turn.key)


_said: Final = msgspec.json.Decoder(_Said)
_cancel: Final = msgspec.json.Decoder(Cancel)


def input_row(given: TurnInput, kind: RowKind) -> InboxRow:
    """An input that waits, under its key."""
    assert given.key is not None
    said = msgspec.json.encode(_Said(given.message, given.config, given.published))
    return InboxRow(given.key, kind, given.digest + said)


def input_of(row: InboxRow, definition: FlowDefinition, session: str) -> TurnInput:
    """What waits in a row."""
    said = _said.decode(row.payload[_DIGEST:])
    return TurnInput(
        definition=definition,
        message=said.message,
        session_id=session,
        config=said.config,
        key=row.key,
        on_busy="queue",
        busy_timeout=definition.cls.busy_timeout,
        published=said.published,
    )


def is_same(row: InboxRow, given: TurnInput) -> bool:
    """Whether the row of an input's key is of the same input."""
    return row.payload[:_DIGEST] == given.digest


def cancel_row(request: Cancel) -> InboxRow:
    """A request, under a key of its own."""
    return InboxRow(f"cancel:{new_id()}", "cancel", msgspec.json.encode(request))


def cancel_of(row: InboxRow) -> Cancel:
    """What is asked for."""
    return _cancel.decode(row.payload)


class Door:
    """The way of one input to a session's lease, which another process may hold.

    Args:
        store: Where the session lives.
        hold: Gets the lease.
        given: The input. One that has to wait gets a key, if it has none: it waits as a row.
    """

    def __init__(self, store: SessionStore, hold: Hold, given: TurnInput) -> None:
        self._store = store
        self._hold = hold
        self.given = given
        self._waits: str | None = None  # the session in whose inbox a row of ours may be

    async def enter(self, session: str, warm: Warm | None) -> Acquired | InboxRow:
        """Take the lease; where another process has it, wait for it as the busy policy says.

        Returns:
            The lease, or the row of this very input once another process has its result.

        Raises:
            SessionBusyError: Another process has it, and the policy, or its time, does not allow to wait longer. The
                input does not wait any more.
            IdempotencyConflictError: The key was used for another input.
            UnknownSessionError: There is no such session.
        """
        given, clock = self.given, self._hold.clock
        now = clock.monotonic()
        give_up = now if given.on_busy == "reject" else now + given.busy_timeout
        force = now + given.definition.cls.cancellation_grace if given.on_busy == "interrupt" else math.inf
        supersede: str | None = None
        wait = _FIRST_WAIT
        while True:
            try:
                return await self._hold.acquire(session, warm, supersede)
            except LeaseHeldError as error:
                owner = error.owner
            if owner != supersede and (owner_is_dead(owner) or clock.monotonic() >= force):
                supersede = owner
                continue
            row = await self._look(session)
            if row is not None and row.result is not None:
                return row
            # One that was taken is under way: it is not refused any more.
            if clock.monotonic() >= give_up and (row is None or await self._withdraw()):
                raise SessionBusyError(
                    f"Session {session} is worked on by another process: try again when its turn is over.",
                    session_id=session,
                )
            await clock.sleep(wait)
            wait = min(wait * 1.5, _MAX_WAIT)

    async def _look(self, session: str) -> InboxRow | None:
        """The row of this input, if it waits or is under way."""
        key, policy = self.given.answer or self.given.key, self.given.on_busy
        row = await self._store.inbox_get(session, key) if key else None
        if self.given.answer is not None:
            return row
        if row is not None:
            _check_same(row, self.given, session)
        elif policy != "reject":
            if policy == "interrupt":
                await self._interrupt(session)
            row = await self.wait(session)
        return row

    async def wait(self, session: str) -> InboxRow:
        """Put the input into the inbox, so that whoever works on the session next finds it; returns its row.

        Raises:
            IdempotencyConflictError: The key was used for another input.
        """
        given = self.given
        if given.key is None:
            given = self.given = msgspec.structs.replace(given, key=f"wait:{new_id()}")
        self._waits = session
        kind = "steer" if given.on_busy == "steer" and given.message is not None else "input"
        row = await self._store.inbox_put(session, input_row(given, kind))
        _check_same(row, given, session)
        return row

    async def _interrupt(self, session: str) -> None:
        """Ask whoever works on the session to stop."""
        head, _ = await self._store.load(session)
        if head.turn is not None:
            request = Cancel("superseded", "another input came", run=head.turn.run)
            await self._store.inbox_put(session, cancel_row(request))

    async def _withdraw(self) -> bool:
        """Take the row back. `False`: nothing waits, or a turn has begun with it."""
        return self._waits is not None and await self._store.inbox_withdraw(self._waits, self.given.key or "")

    async def leave(self, kind: CancelKind, reason: str | None) -> None:
        """Nobody waits any more: the input is taken back, or what it has become elsewhere is to be cancelled."""
        if self._waits is not None and not await self._withdraw():
            await self._store.inbox_put(self._waits, cancel_row(Cancel(kind, reason, key=self.given.key)))


def _check_same(row: InboxRow, given: TurnInput, session: str) -> None:
    if not is_same(row, given):
        raise IdempotencyConflictError(
            "This idempotency key was used with another message or config: use a new key for a new input.",
            session_id=session,
        )


def waiting_before(rows: Sequence[InboxRow], key: str | None) -> list[InboxRow]:
    """The inputs that came before the one of a key and that nobody has taken; all of them, if it has none."""
    found: list[InboxRow] = []
    for row in rows:
        if row.key == key:
            break
        if row.state == "new" and row.kind in ("input", "steer"):
            found.append(row)
    return found
