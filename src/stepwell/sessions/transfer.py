"""A session as one JSON document: export from any store, import into any other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn, cast

import msgspec

from stepwell._json import json_copy
from stepwell.errors import (
    HistoryError,
    InvalidInputError,
    NewerSchemaError,
    NonJsonValueError,
    StoreBusyError,
    StoreDataError,
)
from stepwell.messages import HistoryCheck, JsonObject, Message, decode_message, encode_message

from ._rows import MAX_POSITION
from .document import LogEntry, SequenceEntry, SessionHead, decode_head
from .store import Commit, InboxKind, InboxRow, InboxState, JournalRow, JournalState, NewMessage, SessionStore

__all__ = ["FORMAT", "export_session", "import_session"]

FORMAT: Final = "stepwell.export/1"
"""Name and version of the document."""

ATTEMPTS: Final = 20
SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

_encode: Final = msgspec.json.Encoder().encode


class _Journal(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    state: JournalState
    data: str = ""


class _Inbox(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    kind: InboxKind
    payload: str
    state: InboxState = "new"
    result: str | None = None


class _Export(msgspec.Struct, forbid_unknown_fields=True):
    """The document. Payloads are text and not JSON, because they are compared byte by byte."""

    format: str
    head: JsonObject
    messages: dict[str, list[tuple[int, JsonObject]]]
    sequence: list[SequenceEntry] = []
    log: list[LogEntry] = []
    journal: list[_Journal] = []
    inbox: list[_Inbox] = []


async def export_session(store: SessionStore, session_id: str) -> JsonObject:
    """Put everything a store has of a session into one JSON document.

    The lease, the epoch and the revision's history are not part of it. The document holds the whole conversation: it
    is as confidential as the store.

    Raises:
        UnknownSessionError: There is no such session.
        StoreBusyError: It was written all the time; try again.
        StoreDataError: Something stored cannot be read.
    """
    for _ in range(ATTEMPTS):
        head, _ = await store.load(session_id)
        document: JsonObject = {
            "format": FORMAT,
            "head": msgspec.to_builtins(head),
            "messages": {ns: await _messages(store, session_id, ns) for ns in head.memories},
            "sequence": msgspec.to_builtins(await store.load_sequence(session_id)),
            "log": msgspec.to_builtins(await store.load_log(session_id)),
            "journal": [
                {"key": row.key, "state": row.state, "data": _text(row.data, session_id)}
                for row in await store.journal_load(session_id)
            ],
            "inbox": [_inbox_row(row, session_id) for row in await store.inbox_list(session_id)],
        }
        # The reads were not one transaction: a commit between them would tear the document.
        if (await store.load(session_id))[0] == head:
            return document
    raise StoreBusyError(f"Session {session_id!r} is being written all the time: try again.", session_id=session_id)


async def _messages(store: SessionStore, session_id: str, ns: str) -> list[list[Any]]:
    rows = await store.load_messages(session_id, ns)
    return [[row.position, msgspec.json.decode(encode_message(row.message))] for row in rows]


def _inbox_row(row: InboxRow, session_id: str) -> JsonObject:
    record: JsonObject = {
        "key": row.key,
        "kind": row.kind,
        "payload": _text(row.payload, session_id),
        "state": row.state,
    }
    if row.result is not None:
        record["result"] = _text(row.result, session_id)
    return record


def _text(data: bytes, session_id: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StoreDataError("A stored payload is not UTF-8 text.", session_id=session_id) from error


async def import_session(store: SessionStore, document: JsonObject, *, session_id: str | None = None) -> str:
    """Create a session from an exported document, in one transaction; nothing is written if anything is wrong.

    An open turn stays open, so an engine on this store will take it up.

    Args:
        store: Where to.
        document: From `export_session`, or hostile.
        session_id: Its id here; without one, the id it had.

    Returns:
        The id.

    Raises:
        InvalidInputError: It is not such a document; `pointer` says where.
        NewerSchemaError: It was written by a newer Stepwell.
        SessionExistsError: The id is taken.
    """
    if session_id is not None and not SESSION_ID.fullmatch(session_id):
        raise InvalidInputError("A session id has 1 to 128 letters, digits, _ and -.", "/session_id")
    try:
        document = json_copy(document)
    except NonJsonValueError as error:
        raise InvalidInputError(f"The document is not JSON: {error.message}", _pointer(error.path)) from error
    except RecursionError:
        raise InvalidInputError("The document is nested too deep.") from None
    export = _convert(document)
    head = _head(export.head)
    if session_id is not None:
        head.id = session_id
    elif not SESSION_ID.fullmatch(head.id):
        raise InvalidInputError("A session id has 1 to 128 letters, digits, _ and -.", "/head/id")
    commit = Commit(
        head=head,
        messages=_new_messages(export, head),
        sequence=export.sequence,
        log=export.log,
        inbox=_unique([_inbox(row) for row in export.inbox], "/inbox"),
        journal=_unique([JournalRow(row.key, row.state, row.data.encode()) for row in export.journal], "/journal"),
        release=True,
    )
    try:
        await store.create(commit, owner="import", ttl=0.0)
    except NonJsonValueError as error:  # what only the store's own rules find
        raise InvalidInputError(f"The document cannot be stored: {error.message}", "/head") from error
    return head.id


def _convert(document: Any) -> _Export:
    name: Any = cast("JsonObject", document).get("format") if isinstance(document, dict) else None
    if name != FORMAT:
        kind, _, version = str(name).partition("/")
        if kind == FORMAT.partition("/")[0] and version.isdecimal() and int(version[:9]) > 1:
            raise NewerSchemaError(f"The document has format {name}, this Stepwell reads {FORMAT}: update Stepwell.")
        raise InvalidInputError(f"The document is not an exported session: its format is not {FORMAT}.", "/format")
    try:
        return msgspec.convert(document, _Export)
    except msgspec.ValidationError as error:
        _refuse(error, "")


def _head(record: JsonObject) -> SessionHead:
    try:
        head = decode_head(_encode(record))
    except ValueError as error:  # an integer of thousands of digits
        raise InvalidInputError("A number in the head is out of range.", "/head") from error
    except StoreDataError:
        try:
            msgspec.convert(record, SessionHead)
        except msgspec.ValidationError as error:
            _refuse(error, "/head")
        raise InvalidInputError("The head is not a session document of this version.", "/head/schema") from None
    head.revision = 0
    return head


def _new_messages(export: _Export, head: SessionHead) -> list[NewMessage]:
    rows: list[NewMessage] = []
    for ns in export.messages:
        if ns not in head.memories:
            raise InvalidInputError(
                "There are messages of a namespace that the head does not know.", _join("/messages", ns)
            )
    for ns, memory in head.memories.items():
        where = _join("/messages", ns)
        entries = export.messages.get(ns, [])
        if not 0 <= memory.first <= memory.next <= MAX_POSITION + 1:
            raise InvalidInputError("The positions of the namespace are out of range.", _join("/head/memories", ns))
        if [position for position, _ in entries] != list(range(memory.first, memory.first + len(entries))) or len(
            entries
        ) != memory.count:
            raise InvalidInputError("The messages do not lie at the positions that the head names.", where)
        check = HistoryCheck()
        for index, (position, record) in enumerate(entries):
            message = _message(record, f"{where}/{index}/1")
            try:
                check.add(message)
            except HistoryError as error:
                raise InvalidInputError(error.message, f"{where}/{index}/1") from error
            rows.append(NewMessage(ns, position, encode_message(message)))
        if check.open and head.turn is None:
            raise InvalidInputError("The history ends with calls that have no results, and no turn is open.", where)
    return rows


def _message(record: JsonObject, where: str) -> Message:
    try:
        return decode_message(_encode(record))
    except ValueError as error:
        raise InvalidInputError("A number in the message is out of range.", where) from error
    except StoreDataError as error:
        raise InvalidInputError(error.message, where) from error


def _inbox(row: _Inbox) -> InboxRow:
    result = None if row.result is None else row.result.encode()
    return InboxRow(row.key, row.kind, row.payload.encode(), row.state, result)


def _unique(rows: Sequence[Any], where: str) -> Sequence[Any]:
    seen: set[str] = set()
    for index, row in enumerate(rows):
        if row.key in seen:
            raise InvalidInputError("A key is there twice.", f"{where}/{index}/key")
        seen.add(row.key)
    return rows


def _refuse(error: msgspec.ValidationError, base: str) -> NoReturn:
    text = str(error)
    what, _, path = text.partition(" - at `$")
    path = path.rstrip("`")
    raise InvalidInputError(f"The document is not an exported session: {what}.", base + _pointer(path)) from error


def _pointer(path: str) -> str:
    """A JSON pointer from a path with dots and brackets; `*` where the path does not say which key."""
    parts = re.findall(r"\[([^\]]*)\]|([^.\[\]]+)", path)
    return "".join(_join("", (index if index != "..." else "*") or name) for index, name in parts)


def _join(base: str, key: str) -> str:
    return f"{base}/{key.replace('~', '~0').replace('/', '~1')}"
