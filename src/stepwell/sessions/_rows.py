"""What every store does the same way: encoding a head so that it comes back equal, and the sentences of its errors."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any, Final

import msgspec

from stepwell._json import MAX_DEPTH, check_text, json_copy
from stepwell.errors import (
    InvalidInputError,
    LeaseHeldError,
    NonJsonValueError,
    SessionConflictError,
    SessionExistsError,
    StaleWriterError,
    StoreDataError,
    StoreError,
    UnknownSessionError,
)

from .document import LogEntry, SessionHead, SessionStatus, SessionSummary, decode_head
from .store import Commit, InboxKind, InboxState, JournalState

MAX_POSITION: Final = (1 << 22) - 1
"""The last position of a namespace. No conversation comes near; it leaves room in a row's number for the rest."""

TURN_NONE: Final = 0
TURN_OPEN: Final = 1
TURN_SUSPENDED: Final = 2

# Numbers in databases are places in these: they are only ever added to.
STATUSES: Final[tuple[SessionStatus, ...]] = ("running", "completed", "suspended", "aborted")
KINDS: Final[tuple[InboxKind, ...]] = ("input", "steer", "answer", "cancel")
STATES: Final[tuple[InboxState, ...]] = ("new", "taken", "done")
JOURNAL_STATES: Final[tuple[JournalState, ...]] = ("intent", "done", "refused", "unknown")

_ATOMS: Final = frozenset[type]({str, bool, type(None)})
_TEXT: Final = frozenset[type]({str})
_encode: Final = msgspec.json.Encoder().encode


def head_bytes(head: SessionHead) -> bytes:
    """Encode a head for a store's row; the revision is a column beside it and not repeated.

    Raises:
        NonJsonValueError: A value would not come back as it is: not JSON, NaN, a lone surrogate, or too deep.
    """
    for stage in head.stages.values():
        # Nearly every stage is plain; the walk that knows paths runs only to name what is wrong.
        if (stage.state and not _plain(stage.state, 1)) or (stage.model and not _plain(stage.model, 1)):
            raise refusal(head)
    workflow, turn = head.workflow, head.turn
    if (workflow.context and not _plain(workflow.context, 1)) or not _plain(workflow.model, 1):
        raise refusal(head)
    if turn is not None:
        visit = turn.visit
        if (visit.message or visit.alternate) and not (_plain(visit.message, 1) and _plain(visit.alternate, 1)):
            raise refusal(head)
        if turn.result and not _plain(turn.result, 1):
            raise refusal(head)
        if turn.pending and not all(_plain(one.payload, 1) and _plain(one.answer, 1) for one in turn.pending):
            raise refusal(head)
        if turn.outs and not all(_plain(out.parts, 1) for out in turn.outs):
            raise refusal(head)
    try:
        revision, head.revision = head.revision, 0  # a column; put back below, cheaper than a copy of the head
        try:
            return _encode(head)
        finally:
            head.revision = revision
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise refusal(head) from error


def head_from(data: bytes, session: str, revision: int) -> SessionHead:
    """Decode a stored head and put its columns back in."""
    try:
        head = decode_head(data)
    except StoreDataError as error:
        error.ids["session_id"] = session
        raise
    head.id = session
    head.revision = revision
    return head


def log_bytes(entry: LogEntry) -> bytes:
    """Encode a log entry.

    Raises:
        NonJsonValueError: Its text or data cannot be stored.
    """
    text_checked(entry.text, "log text")
    if entry.data is not None:
        _check(entry.data, "log data")
    try:
        return _encode(entry)
    except ValueError as error:  # an integer of thousands of digits
        raise NonJsonValueError("A number in log data is out of range.", "log data") from error


def log_from(data: bytes) -> LogEntry:
    """Decode a stored log entry."""
    try:
        return _log_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreDataError("A stored log entry cannot be read.") from error


def number_of(cursor: str) -> int:
    """Decode a cursor of `list`."""
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise InvalidInputError("The cursor was not given by this store.", "/after")
    return int(cursor)


class _SummaryWorkflow(msgspec.Struct):
    id: str
    current: str = ""


class _SummaryHead(msgspec.Struct):
    """The few fields of a head that `list` shows; decoding only them skips the state, however large."""

    id: str
    workflow: _SummaryWorkflow
    status: str = "running"
    created_at: float = 0.0
    saved_at: float = 0.0


_summary_decoder: Final = msgspec.json.Decoder(_SummaryHead)
_log_decoder: Final = msgspec.json.Decoder(LogEntry)


def summary_from(data: bytes, session: str, revision: int) -> SessionSummary:
    """Make a row of `list` from a stored head; one that cannot be read does not hide the others.

    An empty `session` is read from the head.
    """
    try:
        head = _summary_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return SessionSummary(session, "", "unreadable", revision, 0.0, 0.0)
    flow = head.workflow
    return SessionSummary(
        session or head.id, flow.id, head.status, revision, head.created_at, head.saved_at, flow.current
    )


def text_checked(text: str, what: str) -> str:
    """Refuse text with a lone surrogate: no backend can store it."""
    return text if text.isascii() else check_text(text, what)


def turn_state(head: SessionHead) -> int:
    """Whether a turn is open, and whether it waits for an answer: the only thing a store knows of the turn."""
    if head.turn is None:
        return TURN_NONE
    return TURN_SUSPENDED if head.status == "suspended" else TURN_OPEN


def wake_at(head: SessionHead) -> float | None:
    """When a suspended turn is due though nobody holds the session."""
    turn = head.turn
    return turn.expires if turn is not None and head.status == "suspended" else None


def status_number(status: str | None) -> int | None:
    """Number of a status in a database, None for None; -1, which no session has, for one that there is not."""
    return None if status is None else STATUSES.index(status) if status in STATUSES else -1


def incarnation_of(key: int, number: int) -> str:
    """An incarnation: the session's number in the database, and a random one."""
    return f"{key}.{number}"


def parse_incarnation(incarnation: str) -> tuple[int, int]:
    """Key and random number of an incarnation; what another store made matches nothing."""
    key, _, number = incarnation.partition(".")
    try:
        return int(key), int(number)
    except ValueError:
        return -1, -1


class Changes:
    """A commit, checked and encoded before its transaction begins, so that nothing but the database can fail in it."""

    __slots__ = ("commit", "head", "log", "status", "turn", "wake")

    def __init__(self, commit: Commit) -> None:
        head = commit.head
        self.commit = commit
        self.head = head_bytes(head)
        self.status = STATUSES.index(head.status)
        self.turn = turn_state(head)
        self.wake = wake_at(head)
        self.log = [log_bytes(entry) for entry in commit.log]
        for message in commit.messages:
            check_position(head.id, text_checked(message.ns, "namespace"), message.position)
        for entry in commit.sequence:
            text_checked(entry.stage, "stage")
        for row in commit.inbox:
            text_checked(row.key, "inbox key")
        for row in commit.journal:
            text_checked(row.key, "journal key")


def _plain(value: Any, depth: int) -> bool:
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in _ATOMS:
        return True
    if kind is dict:
        if not _TEXT.issuperset(map(type, value)) and not all(isinstance(key, str) for key in value):
            return False
        items: Iterable[Any] = value.values()
    elif kind is list or kind is tuple:
        items = value
    elif kind is int:
        return True
    elif kind is float:
        return isfinite(value)  # the encoder writes null for NaN and infinities
    else:
        # Subclasses such as enum members of str; not dates, bytes, sets and decimals, which the encoder would turn
        # into text or lists that do not come back as what they were.
        return isinstance(value, str)
    if depth > MAX_DEPTH:  # decoders count their recursion against the stack that is left
        return False
    if _ATOMS.issuperset(map(type, items)):
        return True
    for item in items:  # noqa: SIM110 - one frame a level: a generator has its own, and the deepest would be too deep
        if not _plain(item, depth + 1):
            return False
    return True


def refusal(head: SessionHead) -> NonJsonValueError:
    """Find what in a head cannot be stored, and say where."""
    workflow, turn = head.workflow, head.turn
    parts: list[tuple[str, Any]] = [("workflow.context", workflow.context), ("workflow.model", workflow.model)]
    for name, stage in head.stages.items():
        parts += [(f"stages.{name}.state", stage.state), (f"stages.{name}.model", stage.model)]
    if turn is not None:
        visit = turn.visit
        parts += [("turn.visit.message", visit.message), ("turn.visit.alternate", visit.alternate)]
        parts += [("turn.result", turn.result), ("turn.outs", [out.parts for out in turn.outs])]
        parts += [("turn.pending", [[one.payload, one.answer] for one in turn.pending])]
    try:
        for path, value in parts:
            _check(value, path)
    except NonJsonValueError as error:
        error.ids["session_id"] = _printable(head.id)
        return error
    return NonJsonValueError(
        "The session's head holds a text with a lone surrogate, or a value of the wrong type: it cannot be stored.",
        session_id=_printable(head.id),
    )


def _check(value: Any, path: str) -> None:
    try:
        json_copy(value, path)
    except RecursionError:  # less of the stack is left than the depth that is allowed
        raise NonJsonValueError(f"The value at {path} is nested too deep to be stored.", path) from None


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def unknown(session: str) -> UnknownSessionError:
    """No such session."""
    name = _printable(session)
    return UnknownSessionError(f"There is no session {name!r} in the store.", session_id=name)


def exists(session: str) -> SessionExistsError:
    """The id is taken."""
    return SessionExistsError(f"A session {session!r} exists already.", session_id=session)


def stale(session: str, epoch: int) -> StaleWriterError:
    """The lease is not current."""
    return StaleWriterError(
        f"The lease of session {session!r} (epoch {epoch}) was taken over or given up, or the session was deleted: "
        "nothing was written.",
        session_id=session,
        epoch=epoch,
    )


def conflict(session: str, expected: int, found: int) -> SessionConflictError:
    """The revision moved."""
    return SessionConflictError(
        f"Session {session!r} is at revision {found}, not {expected}: nothing was written, load it again.",
        session_id=session,
        expected=expected,
        revision=found,
    )


def held(session: str, owner: str, expires: float) -> LeaseHeldError:
    """Another owner's lease has not run out."""
    return LeaseHeldError(
        f"Session {session!r} is leased to {owner!r} until {expires:.3f}.", owner, expires, session_id=session
    )


def check_position(session: str, ns: str, position: int) -> None:
    """Refuse a message position that no store takes."""
    if not 0 <= position <= MAX_POSITION:
        raise StoreError(
            f"Position {position} of namespace {ns!r} in session {session!r} is out of range: 0 to {MAX_POSITION}.",
            session_id=session,
        )


def taken(session: str, ns: str, position: int) -> StoreError:
    """A message position was used twice: the caller's book-keeping is wrong."""
    return StoreError(
        f"Position {position} of namespace {ns!r} in session {session!r} is taken: positions are never reused.",
        session_id=session,
    )
