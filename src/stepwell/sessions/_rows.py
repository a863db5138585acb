"""What every store does the same way: encoding a head so that it comes back equal, and the sentences of its errors."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any, Final, cast

import msgspec

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

from .document import LogEntry, SessionHead, SessionSummary, decode_head, encode_head

MAX_DEPTH: Final = 200
"""How deep JSON in a document may nest. Decoders count their recursion against the stack that is left, so what could
be written by a shallow caller might not be readable by a deep one without a bound of our own."""

TURN_NONE: Final = 0
TURN_OPEN: Final = 1
TURN_SUSPENDED: Final = 2

_ATOMS: Final = frozenset({str, bool, type(None)})
_encode: Final = msgspec.json.Encoder().encode


def head_bytes(head: SessionHead) -> bytes:
    """Encode a head for a store's row; the id and the revision are columns beside it and not repeated.

    Raises:
        NonJsonValueError: A value would not come back as it is: not JSON, NaN, a lone surrogate, or too deep.
    """
    for stage in head.stages.values():
        # Nearly every stage is plain; the walk that knows paths runs only to name what is wrong.
        if not _plain(stage.state, 1) or not _plain(stage.model, 1):
            raise refusal(head)
    workflow, turn = head.workflow, head.turn
    if not _plain(workflow.context, 1) or not _plain(workflow.model, 1):
        raise refusal(head)
    if turn is not None and not (
        _plain(turn.result, 1) and _plain(turn.visit.message, 1) and _plain(turn.visit.alternate, 1)
    ):
        raise refusal(head)
    try:
        return encode_head(msgspec.structs.replace(head, id="", revision=0))
    except (UnicodeEncodeError, TypeError, msgspec.MsgspecError) as error:
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
    if entry.data is not None and (why := _why(entry.data, "log data")):
        raise NonJsonValueError(*why)
    return _encode(entry)


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

    workflow: _SummaryWorkflow
    status: str = "running"
    created_at: float = 0.0
    saved_at: float = 0.0


_summary_decoder: Final = msgspec.json.Decoder(_SummaryHead)
_log_decoder: Final = msgspec.json.Decoder(LogEntry)


def summary_from(data: bytes, session: str, revision: int) -> SessionSummary:
    """Make a row of `list` from a stored head; one that cannot be read does not hide the others."""
    try:
        head = _summary_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return SessionSummary(session, "", "unreadable", revision, 0.0, 0.0)
    flow = head.workflow
    return SessionSummary(session, flow.id, head.status, revision, head.created_at, head.saved_at, flow.current)


def text_checked(text: str, what: str) -> str:
    """Refuse text with a lone surrogate: no backend can store it."""
    if not text.isascii() and _broken(text):
        raise NonJsonValueError(f"A text with a lone surrogate cannot be stored ({what}).", what)
    return text


def turn_state(head: SessionHead) -> int:
    """Whether a turn is open, and whether it waits for an answer: the only thing a store knows of the turn."""
    turn = head.turn
    if turn is None:
        return TURN_NONE
    return TURN_SUSPENDED if turn.phase == "suspended" else TURN_OPEN


def is_json(value: object) -> bool:
    """Whether `value` is plain JSON that comes back equal (lone surrogates are found by encoding)."""
    return _plain(value, 1)


def _plain(value: Any, depth: int) -> bool:
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind in _ATOMS:
        return True
    if kind is dict:
        for key in value:
            if type(key) is not str and not isinstance(key, str):
                return False
        items: Iterable[Any] = value.values()
    elif kind is list or kind is tuple:
        items = value
    elif kind is int:
        return -(2**63) <= value < 2**64
    elif kind is float:
        return isfinite(value)  # the encoder writes null for NaN and infinities
    else:
        # Subclasses such as enum members of str; not dates, bytes, sets and decimals, which the encoder would turn
        # into text or lists that do not come back as what they were.
        return isinstance(value, str)
    if depth > MAX_DEPTH:
        return False
    for item in items:  # noqa: SIM110 - all() with a generator takes twice as long, and this runs in every commit
        if type(item) not in _ATOMS and not _plain(item, depth + 1):
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
        parts.append(("turn.result", turn.result))
    for path, value in parts:
        if why := _why(value, path):
            return NonJsonValueError(*why, session_id=_printable(head.id))
    return NonJsonValueError(
        "The session's head holds a text with a lone surrogate, or a value of the wrong type: it cannot be stored.",
        session_id=_printable(head.id),
    )


def _why(value: Any, path: str) -> tuple[str, str] | None:
    """The sentence and the path of the first thing that cannot be stored, depth first; `None` if all is well."""
    stack: list[tuple[Any, str, int]] = [(value, path, 1)]
    while stack:
        item, where, depth = stack.pop()
        what = ""
        if isinstance(item, str):
            what = "a text with a lone surrogate" if _broken(item) else ""
        elif isinstance(item, dict | list | tuple):
            children = _children(item, where)
            if depth > MAX_DEPTH:
                what = f"JSON nested deeper than {MAX_DEPTH} levels"
            for key, child, there in reversed(children):
                if not isinstance(key, str):
                    what = f"a key of type {type(key).__name__}"
                elif _broken(key):
                    what = "a key with a lone surrogate"
                stack.append((child, there, depth + 1))
        elif not _plain(item, depth):
            what = "a number out of range" if isinstance(item, int | float) else f"a {type(item).__name__}"
        if what:
            where = _printable(where[:200])
            return f"Only JSON can be stored, not {what} (at {where}).", where
    return None


def _children(item: Any, where: str) -> list[tuple[Any, Any, str]]:
    if isinstance(item, dict):
        pairs = cast("dict[Any, Any]", item)
        return [(key, child, f"{where}.{key}") for key, child in pairs.items()]
    return [("", child, f"{where}[{index}]") for index, child in enumerate(item)]


def _broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


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


def taken(session: str, ns: str, position: int) -> StoreError:
    """A message position was used twice: the caller's book-keeping is wrong."""
    return StoreError(
        f"Position {position} of namespace {ns!r} in session {session!r} is taken: positions are never reused.",
        session_id=session,
    )
