"""What clients publish on a session's channel about calls that wait, as answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from stepwell.errors import InputEventNotFoundError, InvalidInputError
from stepwell.messages import AssistantMessage, JsonValue
from stepwell.sessions import SessionHead, SessionStore
from stepwell.tools import request_id
from stepwell.transport import Codec
from stepwell.wire import Channel, Cursor, Delivery, H, Name, transport_headers

__all__ = ["ClientAnswer", "find_answer", "request_of"]

_PAGE: Final = 100
_RECENT: Final = 64
"""Messages of a namespace among which the reply is that made a call."""


class ClientAnswer(msgspec.Struct, frozen=True):
    """An answer that is on the channel.

    Attributes:
        call: The call that it is for.
        value: What is answered.
        fork: The message in which the client goes on by itself, with a copy of what it has seen (docs/wire.md 4.6);
            `None` where it goes on in the run that waits.
    """

    call: str
    value: JsonValue
    fork: str | None = None


async def find_answer(channel: Channel, codec: Codec[Any, Any], event_id: str) -> ClientAnswer:
    """Read the input of that `event-id`, however long ago it was published.

    Raises:
        InputEventNotFoundError: It is not on the channel.
        InvalidInputError: It says something else.
        ChannelError: The channel cannot be read.
    """
    before: Cursor | None = None
    while True:
        page = await channel.history(before=before, limit=_PAGE)
        for delivery in page.items:
            if delivery.name == Name.INPUT and transport_headers(delivery.extras).get(H.EVENT_ID) == event_id:
                return _read(delivery, codec)
        if page.next is None:
            raise InputEventNotFoundError(
                f"The channel {channel.name} has no input {event_id[:80]!r}: publish it before it is invoked.",
                channel=channel.name,
            )
        before = page.next


def _read(delivery: Delivery, codec: Codec[Any, Any]) -> ClientAnswer:
    headers = transport_headers(delivery.extras)
    fork = None if H.RUN_ID in headers else headers.get(H.CODEC_MESSAGE_ID)
    for event in codec.create_decoder().decode(delivery).inputs:
        match event:
            case {"kind": "tool-approval-response", "toolCallId": str(call)}:
                given: Mapping[str, Any] = event
                reason = {"reason": given["reason"]} if given.get("reason") else {}
                return ClientAnswer(call, {"approved": bool(given.get("approved")), **reason}, fork)
            case {"kind": "tool-result", "toolCallId": str(call)}:
                return ClientAnswer(call, event.get("output"), fork)
            case {"kind": "tool-result-error", "toolCallId": str(call)}:
                return ClientAnswer(call, {"error": event.get("message", "")}, fork)
            case _:
                continue
    raise InvalidInputError(
        "The input answers no call: it is neither an approval nor a tool's result.", "/inputEventId"
    )


async def request_of(store: SessionStore, head: SessionHead, call: str) -> str | None:
    """The request that a call waits for, or is about to wait for, or waited for; `None`: it is not known.

    A client runs its tools as soon as it sees their input, which may be before the turn is stored as suspended; and it
    may answer twice. What a tool asks for by itself has an id that follows from its call.
    """
    pending = head.turn.pending if head.turn is not None else ()
    for one in pending:
        if one.call == call:
            return one.id
    for ns in head.memories:
        for row in reversed(await store.load_messages(head.id, ns, last=_RECENT)):
            if isinstance(row.message, AssistantMessage):
                for made in row.message.calls:
                    if made.id == call:
                        return request_id(made)
    return None
