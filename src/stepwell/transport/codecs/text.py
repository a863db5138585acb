"""The codec of plain text: outputs are pieces of text, a message is a role and a text.

On the wire the pieces of one `pipe` or `send` are one stream of kind `text` with the id `text`; an input is one
message of kind `user-message` whose data is the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stepwell._clock import Clock
from stepwell.errors import MisuseError
from stepwell.transport._codec import CodecMessage, Decoder, Direction, Encoder, EncoderWriter, FoldMeta, OpenOutput
from stepwell.wire import Delivery, H, Headers, Name, WireMessage, codec_headers, make_extras, transport_headers

from ._fields import text
from ._table import KIND, Event, EventTable, InputEvent, Stream, TableEncoder

__all__ = ["TextCodec", "TextMessage"]

_STREAM = "text"


@dataclass(frozen=True, slots=True)
class TextMessage:
    """A message: who said what."""

    role: Literal["user", "assistant"] | str
    text: str


def _decode_user(delivery: Delivery) -> Event | None:
    if codec_headers(delivery.extras).get(KIND) != "user-message":
        return None
    role = transport_headers(delivery.extras).get(H.ROLE, "user")
    return {
        "kind": "user-message",
        "message": TextMessage(role, delivery.data if isinstance(delivery.data, str) else ""),
    }


_TABLE = EventTable(
    (Stream(kind="text", start="begin", delta="piece", end="end", delta_key="text", fields=(text("id"),)),),
    (InputEvent(kind="regenerate", wire_only=True),),
    decode_user=_decode_user,
)


class _Projection:
    """Texts by message, in pieces."""

    __slots__ = ("pieces", "roles")

    def __init__(self) -> None:
        self.roles: dict[str, str] = {}
        self.pieces: dict[str, list[str]] = {}

    def add(self, message_id: str, role: str, piece: str) -> None:
        self.roles.setdefault(message_id, role)
        self.pieces.setdefault(message_id, []).append(piece)

    def messages(self) -> list[CodecMessage[TextMessage]]:
        for pieces in self.pieces.values():
            if len(pieces) > 1:
                pieces[:] = ["".join(pieces)]
        return [
            CodecMessage(message_id, TextMessage(self.roles[message_id], "".join(pieces)))
            for message_id, pieces in self.pieces.items()
        ]


class TextCodec:
    """Plain text; see the module. It has no tools.

    Args:
        clock: For the roll-up window.
    """

    tag = "stepwell-text"

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock

    def init(self) -> _Projection:
        """See `Codec.init`."""
        return _Projection()

    def fold(self, projection: _Projection, direction: Direction, event: Any, meta: FoldMeta) -> _Projection:
        """See `Codec.fold`."""
        if direction == "output":
            projection.add(meta.message_id, "assistant", event.get("text", ""))
        elif event["kind"] == "user-message":
            projection.add(meta.message_id, event["message"].role, event["message"].text)
        return projection

    def get_messages(self, projection: _Projection) -> Sequence[CodecMessage[TextMessage]]:
        """See `Codec.get_messages`."""
        return projection.messages()

    def create_decoder(self) -> Decoder:
        """See `Codec.create_decoder`."""
        return _TABLE.create_decoder()

    def create_encoder(
        self, writer: EncoderWriter, open_output: OpenOutput, *, message_id: str, roll_up: float = 0.02
    ) -> Encoder:
        """See `Codec.create_encoder`."""
        table = TableEncoder(_TABLE, writer, open_output, message_id=message_id, roll_up=roll_up, clock=self._clock)
        return _TextEncoder(table)

    def encode_input(self, event: Any, headers: Headers) -> list[WireMessage]:
        """See `Codec.encode_input`."""
        if event.get("kind") != "user-message":
            return _TABLE.encode_input(event, headers)
        message: TextMessage = event["message"]
        transport = {**headers, H.ROLE: message.role, H.STREAM: "false", H.DISCRETE: "true"}
        extras = make_extras(transport, {KIND: "user-message"})
        return [WireMessage(name=Name.INPUT, data=message.text, extras=extras)]

    def is_new_message(self, event: Any) -> bool:
        """See `Codec.is_new_message`."""
        return event.get("kind") == "user-message"

    def target_of(self, event: Any) -> str | None:
        """See `Codec.target_of`."""
        return None

    def create_user_message(self, message: TextMessage | str) -> Event:
        """See `Codec.create_user_message`; text is what a user says."""
        return {
            "kind": "user-message",
            "message": TextMessage("user", message) if isinstance(message, str) else message,
        }

    def create_regenerate(self, target: str, parent: str | None) -> Event:
        """See `Codec.create_regenerate`."""
        return {"kind": "regenerate", "target": target, "parent": parent}

    def create_tool_result(self, target: str, tool_call_id: str, output: Any) -> Event:
        """Raises `MisuseError`."""
        raise _no_tools()

    def create_tool_result_error(self, target: str, tool_call_id: str, message: str) -> Event:
        """Raises `MisuseError`."""
        raise _no_tools()

    def create_tool_approval_response(
        self, target: str, tool_call_id: str, *, approved: bool, reason: str | None = None
    ) -> Event:
        """Raises `MisuseError`."""
        raise _no_tools()


def _no_tools() -> MisuseError:
    return MisuseError("Plain text has no tools: use UIMessageCodec.")


class _TextEncoder:
    """One stream, opened by the first piece and closed by `close`, so that what ends well is closed as complete."""

    def __init__(self, table: TableEncoder) -> None:
        self._table = table
        self._open = False
        self.run = table.run

    @property
    def has_output(self) -> bool:
        """See `Encoder.has_output`."""
        return self._table.has_output

    async def publish_output(self, output: Any) -> None:
        """See `Encoder.publish_output`."""
        if not isinstance(output, str):
            raise MisuseError(f"An output of plain text is text, not a {type(output).__name__}.")
        if not self._open:
            self._open = True
            await self._table.publish_output({"type": "begin", "id": _STREAM})
        await self._table.publish_output({"type": "piece", "id": _STREAM, "text": output})

    async def finish(self) -> None:
        """The source came to its end: the text is complete."""
        if self._open:
            self._open = False
            await self._table.publish_output({"type": "end", "id": _STREAM})

    async def cancel_streams(self) -> None:
        """See `Encoder.cancel_streams`."""
        self._open = False
        await self._table.cancel_streams()

    async def close(self) -> None:
        """See `Encoder.close`."""
        await self._table.close()
