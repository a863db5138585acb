"""What a suspended turn waits for, in its record: made, answered, expired, and gone on from.

Answers reach a session as inbox rows, from any process. Whoever holds the lease takes them into the record, in one
commit with whatever follows from it; so an answer counts once, whoever dies in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from stepwell._json import json_copy
from stepwell.errors import (
    InputTooLargeError,
    InvalidInputError,
    InvalidOutcomeError,
    NonJsonValueError,
    SessionSuspendedError,
    UnknownRequestError,
)
from stepwell.loop import Answer, verdict_of
from stepwell.messages import JsonValue, ToolCall, UserMessage
from stepwell.outcomes import SuspendRequest
from stepwell.sessions import (
    DeferredRecord,
    InboxRow,
    InboxUpdate,
    PendingRecord,
    SessionHead,
    SessionStore,
    TurnRecord,
)

from ._ids import new_id
from ._inputs import Limits, too_deep
from ._result import PendingRequest, TurnResult
from ._working import Working

__all__ = [
    "AnswerPayload",
    "answer_by_message",
    "answers_to",
    "check_requests",
    "checked_answer",
    "go_on",
    "pending_of",
    "put_answer",
    "stored_result",
    "suspend_turn",
    "suspended_error",
    "take_answers",
    "unknown_request",
    "waiting",
]


class AnswerPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an inbox row of kind `answer` holds.

    Attributes:
        value: What is answered.
        shown: Whether the client has put the answer on the channel itself.
        fork: See `ClientAnswer`.
    """

    value: JsonValue
    shown: bool = False
    fork: str | None = None


_decoder = msgspec.json.Decoder(AnswerPayload)


# -- a turn suspends


def suspend_turn(working: Working, requests: Sequence[tuple[ToolCall, SuspendRequest]]) -> None:
    """Say in the record what the turn waits for, and what comes behind the results of the calls that wait."""
    turn, now = working.turn, working.clock.time()
    turn.phase = "suspended"
    turn.pending = [
        PendingRecord(
            request.id,
            request.kind,
            call.id,
            call.name,
            request.payload,
            None if request.expires_in is None else now + request.expires_in,
            message=_message_of(turn, call),
        )
        for call, request in requests
    ]
    turn.expires = _first_expiry(turn)
    working.head.tip = turn.tip
    turn.deferred = [
        DeferredRecord(ns, message) for ns, history in working.histories.items() for message in history.deferred
    ]


def _message_of(turn: TurnRecord, call: ToolCall) -> str | None:
    """The message that shows a call: of its key's invocation, unless that said more after it was steered."""
    invocation = call.key.rpartition("-step-")[0]
    return (turn.message if invocation == turn.invocation else None) or invocation or None


async def check_requests(
    store: SessionStore, working: Working, requests: Sequence[tuple[ToolCall, SuspendRequest]]
) -> None:
    """Ids name requests for good: an answer that comes twice must not answer something else.

    Raises:
        InvalidOutcomeError: An id was used before in this session.
    """
    seen: set[str] = set()
    for call, request in requests:
        row = await store.inbox_get(working.session_id, request.id)
        # One that is new is the answer to this very request: a client that saw the call was quicker than the turn.
        is_early = row is not None and row.kind == "answer" and row.state == "new"
        if request.id in seen or (row is not None and not is_early):
            raise InvalidOutcomeError(
                f"Tool {call.name} suspends with a request id that was used before in this session: leave the id out, "
                "or make it unique.",
                session_id=working.session_id,
                stage=working.executing,
                tool=call.name,
            )
        seen.add(request.id)


def waiting(turn: TurnRecord) -> list[PendingRecord]:
    """What is neither answered nor expired."""
    return [one for one in turn.pending if one.state == "waiting"]


def pending_of(turn: TurnRecord) -> tuple[PendingRequest, ...]:
    """As callers see it."""
    return tuple(
        PendingRequest(id=one.id, kind=one.kind, tool=one.tool, call=one.call, payload=one.payload, expires=one.expires)
        for one in waiting(turn)
    )


def _first_expiry(turn: TurnRecord) -> float | None:
    return min((one.expires for one in waiting(turn) if one.expires is not None), default=None)


# -- answers


def checked_answer(request: PendingRecord | None, value: Any, limits: Limits) -> JsonValue:
    """A copy of an answer; `request` is `None` where its kind is not known yet.

    Raises:
        InvalidInputError: It is not acceptable.
    """
    if too_deep(value, limits.depth):
        raise InputTooLargeError(f"The answer is nested deeper than {limits.depth} levels.", "/value")
    try:
        copied = json_copy(value)
    except NonJsonValueError as error:
        raise InvalidInputError(error.message, "/value/" + error.path.replace(".", "/")) from error
    if (size := len(msgspec.json.encode(copied))) > limits.message_bytes:
        raise InputTooLargeError(f"The answer has {size} bytes, the limit is {limits.message_bytes}.", "/value")
    if request is not None and request.kind == "approval" and verdict_of(copied) is None:
        raise InvalidInputError(
            'An approval is answered with true, false, or {"approved": true or false, "reason": text}.', "/value"
        )
    return copied


async def put_answer(
    store: SessionStore, head: SessionHead, request_id: str, given: AnswerPayload, limits: Limits, now: float
) -> InboxRow:
    """Write an answer down; returns the row that is there now: an older one, if it was answered before.

    Raises:
        UnknownRequestError: Nothing waits, or waited, under that id.
        InvalidInputError: The answer is not acceptable.
    """
    row = await store.inbox_get(head.id, request_id)
    if row is None:
        turn = head.turn
        asked = next((one for one in turn.pending if one.id == request_id), None) if turn is not None else None
        is_late = asked is not None and (asked.state != "waiting" or (asked.expires or now + 1.0) <= now)
        # Of a turn that is at work a client may know more than the store does: what it asks for is shown first.
        may_come = turn is not None and head.status != "suspended"
        if is_late or (asked is None and not may_come):
            raise unknown_request(head.id, request_id)
        given = msgspec.structs.replace(given, value=checked_answer(asked, given.value, limits))
        row = await store.inbox_put(head.id, InboxRow(request_id, "answer", msgspec.json.encode(given)))
    if row.kind != "answer" or (row.state == "done" and row.result is None):
        raise unknown_request(head.id, request_id)
    return row


def unknown_request(session: str, request_id: str) -> UnknownRequestError:
    """Nothing waits under that id."""
    return UnknownRequestError(
        f"Session {session} waits for no answer to request {request_id!r}: it was never asked for, has expired, or its "
        "run was given up.",
        session_id=session,
        request_id=request_id,
    )


def suspended_error(turn: TurnRecord, session: str) -> SessionSuspendedError:
    """What was said is no answer."""
    left = [one.id for one in waiting(turn)]
    return SessionSuspendedError(
        f"Session {session} waits for answers to {len(left)} requests ({', '.join(left)}): answer them, or send the "
        'message with on_suspended="abandon".',
        left,
        session_id=session,
        run_id=turn.run,
    )


def take_answers(turn: TurnRecord, rows: Sequence[InboxRow], now: float) -> list[InboxUpdate]:
    """Take what was answered into the record of a suspended turn, then what expired.

    What was written down counts, also where nobody came to take it before its request expired. Returns what becomes of
    the rows: those that answer nothing are done with.
    """
    updates: list[InboxUpdate] = []
    for row in rows:
        if row.kind != "answer" or row.key in turn.answers:
            continue
        asked = next((one for one in waiting(turn) if one.id == row.key), None)
        given = _read(row)
        if asked is None or given is None or (asked.kind == "approval" and verdict_of(given.value) is None):
            updates.append(InboxUpdate(row.key, "done"))
            continue
        asked.state, asked.answer, asked.shown = "answered", given.value, given.shown
        asked.said, asked.fork = given.fork, given.fork is not None
        turn.answers = [*turn.answers, row.key]
        updates.append(InboxUpdate(row.key, "taken"))
    for one in waiting(turn):
        if one.expires is not None and one.expires <= now:
            one.state = "expired"
    turn.expires = _first_expiry(turn)
    return updates


def _read(row: InboxRow) -> AnswerPayload | None:
    try:
        return _decoder.decode(row.payload)
    except msgspec.MsgspecError:
        return None


def answer_by_message(turn: TurnRecord, message: UserMessage, message_id: str, *, shown: bool) -> bool:
    """Let what a person says answer the question, if a single one is all that is waited for. Whether it does.

    Args:
        turn: What waits.
        message: What is said.
        message_id: Its `codec-message-id`.
        shown: Whether it is on the channel.
    """
    left = waiting(turn)
    if len(left) != 1 or left[0].kind != "question":
        return False
    asked = left[0]
    asked.state, asked.said, asked.parent, asked.shown = "answered", message_id, turn.tip, shown
    asked.answer = message.content if isinstance(message.content, str) else msgspec.to_builtins(message.content)
    return True


# -- it goes on


def go_on(turn: TurnRecord, invocation: str, key: str | None) -> None:
    """Begin the invocation that goes on with a suspended turn, all of whose requests are answered or expired.

    Where the client that answered goes on in a run of its own, it is another run.
    """
    if any(one.fork for one in turn.pending):
        turn.run = new_id()
    said = next((one.said for one in turn.pending if one.said is not None), None)
    turn.follows = said or (turn.tip if turn.shown or turn.steers else turn.follows)
    turn.message, turn.steers = None, ()
    turn.phase, turn.invocation, turn.unit = "open", invocation, 0
    turn.outs, turn.shown, turn.expires, turn.key = (), False, None, key
    turn.hops, turn.tokens, turn.usage = 0, 0, {}


def answers_to(turn: TurnRecord) -> Mapping[str, Answer]:
    """What was answered, by call."""
    return {
        one.call: Answer(
            SuspendRequest(one.kind, one.payload, None, one.id), one.answer, expired=one.state == "expired"
        )
        for one in turn.pending
    }


def stored_result(row: InboxRow) -> TurnResult | None:
    """What the turn came to that an inbox row led to, if it is over."""
    if row.state != "done" or row.result is None:
        return None
    return TurnResult.from_json(cast("dict[str, Any]", msgspec.json.decode(row.result)))
