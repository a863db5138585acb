"""The codec of plain text: outputs are pieces of text, a message is a role and a text.

On the wire the pieces of one `pipe` or `send` are one stream of kind `text` with the stream-id `text`; what a user says
is one message of kind `user-message` with part type `text` whose data is the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from stepwell.errors import MisuseError
from stepwell.transport._codec import CodecMessage, Direction, Encoder, EncoderWriter, FoldMeta, OpenOutput
from stepwell.transport._encoder import StreamEncoder

from ._table import KIND, Event, EventTable, Output, Stream, UserMessage
from ._table_codec import TableCodec

__all__ = ["TextCodec", "TextMessage"]


@dataclass(frozen=True, slots=True)
class TextMessage:
    """A message: who said what.

    Attributes:
        role: `user` or `assistant`.
        text: All of it so far.
    """

    role: str
    text: str


_STREAM = "text"

_TABLE = EventTable(
    (Stream(kind=_STREAM, start="begin", delta="piece", end="end", delta_key="text", only=_STREAM),),
    user=UserMessage(
        parts=(
            Output(
                type="text",
                encode=lambda part: part["text"],
                decode=lambda data: {"text": data if isinstance(data, str) else ""},
            ),
        ),
        explode=lambda message: [{"type": "text", "text": message.text}],
        assemble=lambda part, codec, role: TextMessage(role, part["text"]),
        role=lambda message: message.role,
    ),
)


class _Message:
    """A message whose text is joined when somebody asks for it."""

    __slots__ = ("known", "pieces", "role")

    def __init__(self, role: str) -> None:
        self.role = role
        self.pieces: list[str] = []
        self.known: TextMessage | None = None

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.known = None

    def snapshot(self) -> TextMessage:
        if self.known is None:
            self.pieces = ["".join(self.pieces)]
            self.known = TextMessage(self.role, self.pieces[0])
        return self.known


TextProjection = dict[str, _Message]


class TextCodec(TableCodec[TextMessage, TextProjection]):
    """Plain text; see the module. It has no tools."""

    tag = "stepwell-text"
    table: ClassVar = _TABLE

    def init(self) -> TextProjection:
        """See `Codec.init`."""
        return {}

    def fold(self, projection: TextProjection, direction: Direction, event: Any, meta: FoldMeta) -> TextProjection:
        """See `Codec.fold`."""
        if direction == "output":
            message = projection.setdefault(meta.message_id, _Message("assistant"))
            if event["type"] == "piece":
                message.add(event["text"])
        elif event["kind"] == "user-message":
            said: TextMessage = event["message"]
            projection.setdefault(meta.message_id, _Message(said.role)).add(said.text)
        return projection

    def get_messages(self, projection: TextProjection) -> Sequence[CodecMessage[TextMessage]]:
        """See `Codec.get_messages`."""
        return [CodecMessage(message_id, message.snapshot()) for message_id, message in projection.items()]

    def create_encoder(
        self, writer: EncoderWriter, open_output: OpenOutput, *, message_id: str, roll_up: float = 0.02
    ) -> Encoder:
        """See `Codec.create_encoder`."""
        core = StreamEncoder(writer, open_output, message_id=message_id, roll_up=roll_up, clock=self._clock)
        return _TextEncoder(core)

    def create_user_message(self, message: TextMessage | str) -> Event:
        """The input for something that a user says: a message, or its text."""
        return super().create_user_message(TextMessage("user", message) if isinstance(message, str) else message)


class _TextEncoder:
    """Text that opens its stream with the first piece and closes it with the last."""

    def __init__(self, core: StreamEncoder) -> None:
        self._core = core
        self.run = core.run
        self.cancel_streams = core.cancel_streams
        self.close = core.close

    @property
    def has_output(self) -> bool:
        """See `Encoder.has_output`."""
        return self._core.has_output

    async def publish_output(self, output: Any) -> None:
        """See `Encoder.publish_output`."""
        if not isinstance(output, str):
            raise MisuseError(f"An output of plain text is text, not a {type(output).__name__}.")
        if not self._core.is_open(_STREAM):
            await self._core.start(_STREAM, {KIND: _STREAM})
        await self._core.delta(_STREAM, output)

    async def finish(self) -> None:
        """The source came to its end: the text is complete."""
        if self._core.is_open(_STREAM):
            await self._core.end(_STREAM)
