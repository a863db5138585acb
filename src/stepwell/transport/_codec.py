"""What a codec is: how application events become messages on the wire, and messages a conversation.

The transport moves runs, steps and streams and knows nothing of what is in them. A codec encodes outputs and inputs,
decodes them again, and folds decoded events into a projection. The transport promises: each decoded event is folded
once and in serial order, from `init()` again where order or a supersede demands it. So `fold` must be deterministic
and does not look for duplicates.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from stepwell.wire import Data, Delivery, Extras, Headers, WireMessage

__all__ = [
    "Codec",
    "CodecMessage",
    "Decoded",
    "Decoder",
    "Direction",
    "Encoder",
    "EncoderWriter",
    "FoldMeta",
    "OpenOutput",
]

Direction: TypeAlias = Literal["input", "output"]
"""`input`: said by a client. `output`: by an agent."""

M = TypeVar("M")
P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class FoldMeta:
    """Where a decoded event came from.

    Attributes:
        serial: Of its message; empty for an input that was inserted locally and has not come back yet.
        message_id: The `codec-message-id` header: which message of the conversation it belongs to.
    """

    serial: str
    message_id: str


@dataclass(frozen=True, slots=True)
class CodecMessage(Generic[M]):
    """A message of the conversation.

    Attributes:
        codec_message_id: Its identity on the wire.
        message: What the application shows; the codec's type.
    """

    codec_message_id: str
    message: M


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one delivery holds. Both are empty for other applications' messages and for what cannot be read."""

    inputs: Sequence[Any] = field(default=())
    outputs: Sequence[Any] = field(default=())


class Decoder(Protocol):
    """Reads deliveries of one channel in the order of delivery; keeps the state of open streams. One per session."""

    def decode(self, delivery: Delivery) -> Decoded:
        """Decode one delivery. Never raises for what is on the wire: unreadable content decodes to nothing."""
        ...


class EncoderWriter(Protocol):
    """Where an encoder writes: a channel with the writer's epoch and its retries of infrastructure failures."""

    async def publish(self, messages: Sequence[WireMessage]) -> list[str]:
        """See `Channel.publish`."""
        ...

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int) -> str:
        """See `Channel.append`."""
        ...

    async def update(self, serial: str, data: Data, extras: Extras) -> str:
        """See `Channel.update`."""
        ...


OpenOutput: TypeAlias = Callable[[], Awaitable[Headers]]
"""Called once, right before an encoder's first output: opens a step that opens lazily, and gives the transport headers
of every output of this encoder: run, step, attempt, parent, `codec-message-id`, role."""


class Encoder(Protocol):
    """Writes the outputs of one `pipe` or `send`. Used by one task, beside `run`."""

    async def publish_output(self, output: Any) -> None:
        """Write one output.

        Text of an open stream is kept for the roll-up window and then appended together with what came after it;
        everything else is written, behind the text kept so far, before this returns.

        Raises:
            MisuseError: The codec does not know this kind of output, something in it is missing or of the wrong type,
                or it belongs to a stream that is not open. Nothing of it was written.
            InvalidInputError: Its data is a bare number or boolean, or a text holds half a surrogate pair. The same.
            SessionClosedError: The encoder was closed.
            EncoderRecoveryError: Text was lost and could not be restored.
            ChannelError, FencedError: As the writer.
        """
        ...

    async def run(self) -> None:
        """Append kept text when its window is over, until cancelled. In a task beside the writer's own.

        Raises:
            EncoderRecoveryError, ChannelError, FencedError: As `publish_output`.
        """
        ...

    async def finish(self) -> None:
        """The source came to its end: close what it left open, as the codec sees fit. Raises as `publish_output`."""
        ...

    async def cancel_streams(self) -> None:
        """Write what is kept, then close every open stream with status `cancelled`."""
        ...

    async def close(self) -> None:
        """Write what is kept and refuse more. Open streams stay as they are. May be called again."""
        ...

    @property
    def has_output(self) -> bool:
        """Whether anything was handed to the channel, acknowledged or not."""
        ...


class Codec(Protocol[M, P]):
    """See the module. `M` is the type of a message, `P` of a projection.

    `tag` names the codec in the channel's agent parameter.
    """

    @property
    def tag(self) -> str:
        """Name, as in `vercel-ai-sdk-ui-message`."""
        ...

    def init(self) -> P:
        """An empty projection."""
        ...

    def fold(self, projection: P, direction: Direction, event: Any, meta: FoldMeta) -> P:
        """Take one decoded event in. May change the projection in place and return it."""
        ...

    def get_messages(self, projection: P) -> Sequence[CodecMessage[M]]:
        """The messages of a projection, in order. Their content must not change when the projection is folded on."""
        ...

    def create_decoder(self) -> Decoder:
        """A decoder for one session."""
        ...

    def create_encoder(
        self, writer: EncoderWriter, open_output: OpenOutput, *, message_id: str, roll_up: float = 0.02
    ) -> Encoder:
        """An encoder for one `pipe` or `send`.

        Args:
            writer: Where to.
            open_output: See `OpenOutput`.
            message_id: The `codec-message-id` of what is written (also among the headers).
            roll_up: Seconds for which text is kept to be appended together; 0 appends each delta by itself.
        """
        ...

    def encode_input(self, event: Any, headers: Headers) -> list[WireMessage]:
        """The messages of one input: one for each part of a user message, to be published in one call.

        Args:
            event: As made by the functions below.
            headers: Transport headers of all of them.

        Raises:
            MisuseError: The codec does not know this input.
        """
        ...

    def is_new_message(self, event: Any) -> bool:
        """Whether an input is a message of its own in the conversation, as a user message is.

        Others say something about a message: a tool's result, an approval, a regeneration.
        """
        ...

    def target_of(self, event: Any) -> str | None:
        """The `codec-message-id` of the message that an input is about; None for a message of its own."""
        ...

    def create_user_message(self, message: M) -> Any:
        """The input for something that a user says."""
        ...

    def create_regenerate(self, target: str, parent: str | None) -> Any:
        """The input that asks for a message anew: `target` and `parent` are codec-message-ids."""
        ...

    def create_tool_result(self, target: str, tool_call_id: str, output: Any) -> Any:
        """The input for the result of a tool that the client ran; `target` is the message with the call.

        Raises:
            MisuseError: The codec has no tools.
        """
        ...

    def create_tool_result_error(self, target: str, tool_call_id: str, message: str) -> Any:
        """The input for a tool that failed at the client. Raises as `create_tool_result`."""
        ...

    def create_tool_approval_response(
        self, target: str, tool_call_id: str, *, approved: bool, reason: str | None = None
    ) -> Any:
        """The input that answers an approval request. Raises as `create_tool_result`."""
        ...
