"""What clients publish on a session's channel: what a person says, and answers to calls that wait."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from stepwell.errors import InputEventNotFoundError, InvalidInputError
from stepwell.messages import AssistantMessage, FilePart, JsonValue, TextPart, UserMessage
from stepwell.sessions import SessionHead, SessionStore
from stepwell.tools import request_id
from stepwell.transport import Codec
from stepwell.wire import Channel, Cursor, Delivery, H, Name, transport_headers

__all__ = ["ClientAnswer", "ClientMessage", "event_of", "find_input", "key_of", "request_of"]

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


class ClientMessage(msgspec.Struct, frozen=True):
    """What a person says, as it is on the channel.

    Attributes:
        id: Its `codec-message-id`.
        message: What is said.
        run: The run that it is said into; `None`: it wants a run of its own.
    """

    id: str
    message: UserMessage
    run: str | None = None


def key_of(event_id: str) -> str:
    """The idempotency key of an input on the channel: invoked twice, it is one turn."""
    return f"event:{hashlib.sha256(event_id.encode()).hexdigest()}"


async def find_input(channel: Channel, codec: Codec[Any, Any], event_id: str) -> ClientAnswer | ClientMessage:
    """Read the input of that `event-id`, however long ago it was published.

    Raises:
        InputEventNotFoundError: It is not on the channel.
        InvalidInputError: It is nothing that a flow takes up: an edit, a regeneration, or another application's.
        ChannelError: The channel cannot be read.
    """
    found = await _find(channel, H.EVENT_ID, event_id)
    if not found:
        raise InputEventNotFoundError(
            f"The channel {channel.name} has no input {event_id[:80]!r}: publish it before it is invoked.",
            channel=channel.name,
        )
    headers = transport_headers(found[0].extras)
    if H.FORK_OF in headers or H.MSG_REGENERATE in headers:
        raise InvalidInputError(
            "A flow goes on from where it stands: edits and regenerations of what was said before are not for its "
            "sessions. Say it as a new message.",
            "/inputEventId",
        )
    decoder = codec.create_decoder()
    events = [event for delivery in found for event in decoder.decode(delivery).inputs]
    run, message_id = headers.get(H.RUN_ID), headers.get(H.CODEC_MESSAGE_ID)
    if (answer := _answer(events, None if run is not None else message_id)) is not None:
        return answer
    said = [part for event in events if event.get("kind") == "user-message" for part in event["message"]["parts"]]
    if said and message_id is not None:
        return ClientMessage(message_id, _message(said), run)
    raise InvalidInputError(
        "The input is neither a message nor an answer to a call: neither text, a verdict nor a tool's result.",
        "/inputEventId",
    )


async def event_of(channel: Channel, message_id: str) -> str | None:
    """The `event-id` of the input of that `codec-message-id`; `None`: it is not on the channel."""
    found = await _find(channel, H.CODEC_MESSAGE_ID, message_id)
    return transport_headers(found[0].extras).get(H.EVENT_ID) if found else None


async def _find(channel: Channel, header: str, value: str) -> list[Delivery]:
    """All parts of an input, in order. They are one publish, but a page may end within it."""
    before: Cursor | None = None
    found: list[Delivery] = []
    while True:
        page = await channel.history(before=before, limit=_PAGE)
        for delivery in page.items:
            if delivery.name == Name.INPUT and transport_headers(delivery.extras).get(header) == value:
                found.append(delivery)
            elif found:
                return found[::-1]
        if page.next is None:
            return found[::-1]
        before = page.next


def _message(parts: Sequence[Mapping[str, Any]]) -> UserMessage:
    """What a person says, from the parts of a UI message; what is neither text nor a file is the client's own."""
    content: list[TextPart | FilePart] = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                content.append(TextPart(text))
            case {"type": "file", "url": str(url), "mediaType": str(media)}:
                head, comma, data = url.partition(",")
                inline = comma and head.startswith("data:") and head.endswith(";base64")
                content.append(FilePart(media, data, None) if inline else FilePart(media, None, url))
            case _:
                continue
    if len(content) == 1 and isinstance(content[0], TextPart):
        return UserMessage(content=content[0].text)
    return UserMessage(content=tuple(content))


def _answer(events: Sequence[Mapping[str, Any]], fork: str | None) -> ClientAnswer | None:
    for event in events:
        match event:
            case {"kind": "tool-approval-response", "toolCallId": str(call)}:
                reason = {"reason": event["reason"]} if event.get("reason") else {}
                return ClientAnswer(call, {"approved": bool(event.get("approved")), **reason}, fork)
            case {"kind": "tool-result", "toolCallId": str(call)}:
                return ClientAnswer(call, event.get("output"), fork)
            case {"kind": "tool-result-error", "toolCallId": str(call)}:
                return ClientAnswer(call, {"error": event.get("message", "")}, fork)
            case _:
                continue
    return None


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
