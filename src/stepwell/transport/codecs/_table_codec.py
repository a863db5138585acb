"""Encoder, decoder and codec over a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from stepwell._clock import Clock
from stepwell.errors import MisuseError
from stepwell.transport._codec import CodecMessage, Decoder, Direction, Encoder, EncoderWriter, FoldMeta, OpenOutput
from stepwell.transport._decoder import StreamDecoder, StreamState
from stepwell.transport._encoder import StreamEncoder
from stepwell.wire import Data, H, Headers, Name, WireMessage, make_extras

from ._fields import Field
from ._table import KIND, PART_TYPE, USER_MESSAGE, Event, EventTable, Input, Output, Stream

__all__ = ["TableCodec", "TableEncoder"]

M = TypeVar("M")
P = TypeVar("P")

_NOTHING: Final[Sequence[Event]] = ()


class TableCodec(ABC, Generic[M, P]):
    """A codec whose wire form is a table. What is left to write is what its messages are: three methods.

    `M` is the type of a message, `P` of a projection.

    Args:
        clock: For the roll-up window.
    """

    tag: str
    """Names the codec in the channel's agent parameter."""

    table: ClassVar[EventTable]
    """The wire form."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock

    @abstractmethod
    def init(self) -> P:
        """See `Codec.init`."""

    @abstractmethod
    def fold(self, projection: P, direction: Direction, event: Any, meta: FoldMeta) -> P:
        """See `Codec.fold`."""

    @abstractmethod
    def get_messages(self, projection: P) -> Sequence[CodecMessage[M]]:
        """See `Codec.get_messages`."""

    def create_decoder(self) -> Decoder:
        """See `Codec.create_decoder`."""
        return StreamDecoder(_Hooks(self.table))

    def create_encoder(
        self, writer: EncoderWriter, open_output: OpenOutput, *, message_id: str, roll_up: float = 0.02
    ) -> Encoder:
        """See `Codec.create_encoder`."""
        return TableEncoder(self.table, writer, open_output, message_id=message_id, roll_up=roll_up, clock=self._clock)

    def encode_input(self, event: Any, headers: Headers) -> list[WireMessage]:
        """See `Codec.encode_input`."""
        kind = event.get("kind")
        entry = self.table.inputs.get(kind)
        if entry is not None:
            codec = _headers(kind, entry.fields, event)
            return [_input(_data(entry, event, kind), {**headers, H.STREAM: "false"}, codec)]
        if kind != USER_MESSAGE or self.table.user is None:
            raise MisuseError(f"This codec has no input of kind {str(kind)[:80]!r}.")
        return self._encode_message(event["message"], headers)

    def _encode_message(self, message: M, headers: Headers) -> list[WireMessage]:
        user = self.table.user
        assert user is not None
        common = user.headers(message)
        transport = {**headers, H.ROLE: user.role(message), H.STREAM: "false", H.DISCRETE: "true"}
        found: list[WireMessage] = []
        for part in user.explode(message):
            kind = part["type"]
            entry = self.table.part(kind)
            if entry is not None:
                codec = {**_headers(USER_MESSAGE, entry.fields, part), **common, PART_TYPE: kind}
                found.append(_input(_data(entry, part, kind), transport, codec))
        if not found:
            raise MisuseError("The message has no part that can be sent.")
        return found

    def is_new_message(self, event: Any) -> bool:
        """See `Codec.is_new_message`."""
        return event.get("kind") == USER_MESSAGE

    def target_of(self, event: Any) -> str | None:
        """See `Codec.target_of`."""
        return event.get("codecMessageId")

    def create_user_message(self, message: M) -> Any:
        """See `Codec.create_user_message`."""
        return {"kind": USER_MESSAGE, "message": message}

    def create_regenerate(self, target: str, parent: str | None) -> Any:
        """See `Codec.create_regenerate`."""
        return {"kind": "regenerate", "target": target, "parent": parent}

    def create_tool_result(self, target: str, tool_call_id: str, output: Any) -> Any:
        """Raises `MisuseError`: this codec has no tools."""
        raise self._no_tools()

    def create_tool_result_error(self, target: str, tool_call_id: str, message: str) -> Any:
        """Raises `MisuseError`: this codec has no tools."""
        raise self._no_tools()

    def create_tool_approval_response(
        self, target: str, tool_call_id: str, *, approved: bool, reason: str | None = None
    ) -> Any:
        """Raises `MisuseError`: this codec has no tools."""
        raise self._no_tools()

    def _no_tools(self) -> MisuseError:
        return MisuseError(f"The codec {self.tag!r} has no tools: use UIMessageCodec, or one that has.")


def _input(data: Data, transport: Headers, codec: Headers) -> WireMessage:
    return WireMessage(name=Name.INPUT, data=data, extras=make_extras(transport, codec))


def _headers(kind: str, fields: Sequence[Field], event: Mapping[str, Any]) -> dict[str, str]:
    headers = {KIND: kind}
    for field in fields:
        field.write(event, headers)
    return headers


def _data(entry: Output | Input, event: Mapping[str, Any], kind: str) -> Data:
    try:
        return entry.encode(event)
    except KeyError as error:
        raise MisuseError(f"An event of type {kind[:80]!r} needs {error}.") from None


class TableEncoder:
    """An `Encoder` over a table. Used by one task, beside `run`."""

    def __init__(
        self,
        table: EventTable,
        writer: EncoderWriter,
        open_output: OpenOutput,
        *,
        message_id: str,
        roll_up: float,
        clock: Clock | None = None,
    ) -> None:
        self._table = table
        self._phases = table.phases
        self._core = StreamEncoder(writer, open_output, message_id=message_id, roll_up=roll_up, clock=clock)
        self._message_id = message_id
        self.run = self._core.run
        self.finish = self._core.cancel_streams  # a stream that its source forgot to end is closed as `cancelled`
        self.cancel_streams = self._core.cancel_streams
        self.close = self._core.close

    @property
    def has_output(self) -> bool:
        """See `Encoder.has_output`."""
        return self._core.has_output

    async def publish_output(self, output: Any) -> None:
        """See `Encoder.publish_output`."""
        name = output.get("type") if isinstance(output, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if not isinstance(name, str):
            raise MisuseError("An output is an object with a type: see the codec's table.")
        event = cast("Mapping[str, Any]", output)
        found = self._phases.get(name)
        if found is None:
            await self._single(name, event)
            return
        entry, phase = found
        stream_id = entry.stream_id(event)
        key = entry.kind, stream_id
        if phase == "delta":
            await self._core.delta(key, event.get(entry.delta_key))  # pyright: ignore[reportArgumentType] - told apart there
        elif phase == "start":
            await self._core.start(stream_id, _headers(entry.kind, entry.fields, event), key=key)
        elif self._core.is_open(key) or entry.whole is None:
            codec = _headers(entry.kind, entry.closing_fields(), event)
            await self._core.end(key, codec)
        else:
            await self._core.discrete(entry.whole(event), _headers(entry.kind, entry.fields, event))

    async def _single(self, name: str, event: Mapping[str, Any]) -> None:
        entry = self._table.output(name)
        if entry is None:
            raise MisuseError(f"This codec has no output of type {name[:80]!r}.")
        codec = _headers(name, entry.fields, event)
        if entry.named is not None:
            codec.setdefault(entry.named, self._message_id)
        await self._core.discrete(_data(entry, event, name), codec, ephemeral=entry.ephemeral(event))


class _Hooks:
    """Makes events of what the stream decoder finds."""

    def __init__(self, table: EventTable) -> None:
        self._table = table
        self._repair = table.repair()

    def on_input(self, transport: Headers, codec: Headers, data: Any) -> Sequence[Event]:
        kind = codec.get(KIND, "")
        if kind == USER_MESSAGE:
            return self._on_user_message(transport, codec, data)
        entry = self._table.inputs.get(kind)
        if entry is None or entry.wire_only:
            return _NOTHING
        event: Event = {"kind": kind, "codecMessageId": transport.get(H.CODEC_MESSAGE_ID, "")}
        return (_read(event, entry, codec, data),)

    def _on_user_message(self, transport: Headers, codec: Headers, data: Any) -> Sequence[Event]:
        user, kind = self._table.user, codec.get(PART_TYPE, "")
        entry = self._table.part(kind)
        if user is None or entry is None:
            return _NOTHING
        part = _read({"type": kind}, entry, codec, data)
        message = user.assemble(part, codec, transport.get(H.ROLE, "user"))
        return ({"kind": USER_MESSAGE, "message": message},)

    def on_output(self, transport: Headers, codec: Headers, data: Any) -> Sequence[Event]:
        kind, run_id = codec.get(KIND, ""), transport.get(H.RUN_ID, "")
        stream = self._table.streams.get(kind)
        if stream is None:
            entry = self._table.output(kind)
            if entry is None:
                return _NOTHING
            event = _read({"type": kind}, entry, codec, data)
            return [*self._repair.before(run_id, kind, codec, stream=False), event]
        if stream.unwhole is None:
            return _NOTHING
        fields = _fields(stream.fields, codec)
        return [*self._repair.before(run_id, kind, codec, stream=True), *stream.unwhole(fields, data)]

    def on_start(self, stream: StreamState) -> Sequence[Event]:
        entry = self._table.streams.get(stream.codec.get(KIND, ""))
        if entry is None or stream.name != Name.OUTPUT:
            return _NOTHING
        own = {} if entry.only is not None else {entry.key: stream.codec.get(entry.key, stream.stream_id)}
        stream.memo = entry, own
        event: Event = {"type": entry.start, **_fields(entry.fields, stream.codec), **own}
        before = self._repair.before(stream.transport.get(H.RUN_ID, ""), entry.kind, stream.codec, stream=True)
        return [*before, event]

    def on_delta(self, stream: StreamState, text: str) -> Sequence[Event]:
        if stream.memo is None:
            return _NOTHING
        entry, own = cast("tuple[Stream, Event]", stream.memo)
        return ({"type": entry.delta, **own, entry.delta_key: text},)

    def on_end(self, stream: StreamState, codec: Headers) -> Sequence[Event]:
        if stream.memo is None:
            return _NOTHING
        entry, own = cast("tuple[Stream, Event]", stream.memo)
        fields = _fields(entry.closing_fields(), {**stream.codec, **codec})
        return ({"type": entry.end, **fields, **own, **entry.finish(stream.text)},)


def _fields(fields: Sequence[Field], headers: Headers) -> Event:
    event: Event = {}
    for field in fields:
        field.read(headers, event)
    return event


def _read(event: Event, entry: Output | Input, codec: Headers, data: Any) -> Event:
    for field in entry.fields:
        field.read(codec, event)
    event.update(entry.decode(data))
    return event
