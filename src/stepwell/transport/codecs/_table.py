"""A codec from a table: which events are single messages, which are streams, and what is in them.

An output event is an object with a `type`; an input event one with a `kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from stepwell._clock import Clock
from stepwell.errors import MisuseError
from stepwell.transport._codec import EncoderWriter, OpenOutput
from stepwell.transport._decoder import StreamDecoder, StreamState
from stepwell.transport._encoder import StreamEncoder
from stepwell.wire import Data, Delivery, H, Headers, Name, WireMessage, codec_headers, make_extras, transport_headers

from ._fields import Field

__all__ = ["Event", "EventTable", "InputEvent", "Output", "Repair", "Stream", "TableEncoder"]

Event: TypeAlias = dict[str, Any]

KIND = "kind"
"""The codec header that tells the events of a codec apart."""


def _nothing(event: Mapping[str, Any]) -> Data:
    return ""


def _no_keys(data: Any) -> Event:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An output that is one message.

    Attributes:
        type: Of the event; with a trailing `*`, of all that begin so.
        fields: Headers.
        encode: Event to data.
        decode: Data to keys of the event.
        ephemeral: Whether an event is live only.
    """

    type: str
    fields: Sequence[Field] = ()
    encode: Callable[[Mapping[str, Any]], Data] = _nothing
    decode: Callable[[Any], Event] = _no_keys
    ephemeral: Callable[[Mapping[str, Any]], bool] = lambda event: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Three events that make one message which grows.

    Attributes:
        kind: On the wire.
        start: Type of the event that opens it.
        delta: Of the one that holds text, under `delta_key`.
        end: Of the one that closes it.
        delta_key: See above.
        key: The event's key that tells streams apart; its value is the `stream-id`.
        fields: Headers; the first is `key`.
        closing: Names of fields that the end event may change.
        whole: Data of an end event whose stream was never opened, sent as one message; None refuses it.
        unwhole: The events of such a message.
        finish: Keys of the end event from all the text.
    """

    kind: str
    start: str
    delta: str
    end: str
    delta_key: str = "delta"
    key: str = "id"
    fields: Sequence[Field] = ()
    closing: Sequence[str] = ()
    whole: Callable[[Mapping[str, Any]], Data] | None = None
    unwhole: Callable[[Event, Any], Sequence[Event]] | None = None
    finish: Callable[[str], Event] = _no_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class InputEvent:
    """An input that is one message. With `wire_only` it decodes to nothing: its headers say everything."""

    kind: str
    fields: Sequence[Field] = ()
    encode: Callable[[Mapping[str, Any]], Data] = _nothing
    decode: Callable[[Any], Event] = _no_keys
    wire_only: bool = False


class Repair:
    """Events that a reader inserts because a writer left them out; one per decoder. This one inserts none."""

    def before(self, run_id: str, kind: str, headers: Headers, *, stream: bool) -> Sequence[Event]:
        """What has to come before an event of a run."""
        return ()


class EventTable:
    """A table, with what is looked up in it.

    Raises:
        ValueError: Two entries have the same name.
    """

    def __init__(
        self,
        outputs: Sequence[Output | Stream],
        inputs: Sequence[InputEvent] = (),
        *,
        decode_user: Callable[[Delivery], Event | None] = lambda delivery: None,
        repair: Callable[[], Repair] = Repair,
    ) -> None:
        self.single: dict[str, Output] = {}
        self.prefixes: list[tuple[str, Output]] = []
        self.streams: dict[str, Stream] = {}
        self.by_event: dict[str, tuple[Stream, str]] = {}
        self.inputs = {entry.kind: entry for entry in inputs}
        self.decode_user = decode_user
        self.repair = repair
        names: list[str] = [entry.kind for entry in inputs]
        for entry in outputs:
            if isinstance(entry, Stream):
                self.streams[entry.kind] = entry
                for part, name in (("start", entry.start), ("delta", entry.delta), ("end", entry.end)):
                    self.by_event[name] = entry, part
                    names.append(name)
            elif entry.type.endswith("*"):
                self.prefixes.append((entry.type[:-1], entry))
                names.append(entry.type)
            else:
                self.single[entry.type] = entry
                names.append(entry.type)
        if len(set(names)) < len(names):
            raise ValueError("Two entries of the table have the same name.")

    def output(self, name: str) -> Output | None:
        """The entry of a single output."""
        found = self.single.get(name)
        if found is None:
            found = next((entry for prefix, entry in self.prefixes if name.startswith(prefix)), None)
        return found

    def create_decoder(self) -> StreamDecoder:
        """A decoder for one session."""
        return StreamDecoder(_Hooks(self))

    def encode_input(self, event: Mapping[str, Any], headers: Headers) -> list[WireMessage]:
        """The message of an input that is one message.

        Raises:
            MisuseError: The table has no such input.
        """
        entry = self.inputs.get(event.get("kind", ""))
        if entry is None:
            raise MisuseError(f"This codec has no input of kind {str(event.get('kind'))[:80]!r}.")
        codec = {KIND: entry.kind}
        for field in entry.fields:
            field.write(event, codec)
        extras = make_extras({**headers, H.STREAM: "false"}, codec)
        return [WireMessage(name=Name.INPUT, data=entry.encode(event), extras=extras)]


class TableEncoder:
    """An `Encoder` over a table."""

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
        self._core = StreamEncoder(writer, open_output, message_id=message_id, roll_up=roll_up, clock=clock)
        self._message_id = message_id
        self.run = self._core.run
        self.finish = self._core.cancel_streams  # a stream that its source forgot to end
        self.cancel_streams = self._core.cancel_streams
        self.close = self._core.close

    @property
    def has_output(self) -> bool:
        """See `Encoder.has_output`."""
        return self._core.has_output

    async def publish_output(self, output: Any) -> None:
        """See `Encoder.publish_output`."""
        event: Mapping[str, Any] = cast("Mapping[str, Any]", output) if isinstance(output, Mapping) else {}
        name = event.get("type")
        if not isinstance(name, str):
            raise MisuseError("An output is an object with a type: see the codec's table.")
        found = self._table.by_event.get(name)
        if found is not None:
            await self._stream(*found, event)
            return
        entry = self._table.output(name)
        if entry is None:
            raise MisuseError(f"This codec has no output of type {name[:80]!r}.")
        codec = {KIND: name}
        for field in entry.fields:
            field.write(event, codec)
        if entry.type == "start" and "messageId" not in codec:
            codec["messageId"] = self._message_id
        await self._core.discrete(entry.encode(event), codec, ephemeral=entry.ephemeral(event))

    async def _stream(self, entry: Stream, part: str, event: Mapping[str, Any]) -> None:
        stream_id = str(event.get(entry.key, ""))
        if part == "delta":
            await self._core.delta(stream_id, event[entry.delta_key])
            return
        codec = {KIND: entry.kind}
        for field in entry.fields:
            field.write(event, codec)
        if part == "start":
            await self._core.start(stream_id, codec)
        elif self._core.is_open(stream_id) or entry.whole is None:
            await self._core.end(stream_id, {key: codec[key] for key in entry.closing if key in codec})
        else:
            await self._core.discrete(entry.whole(event), codec)


class _Hooks:
    """Makes events of what the stream decoder finds."""

    def __init__(self, table: EventTable) -> None:
        self._table = table
        self._repair = table.repair()

    def on_input(self, delivery: Delivery) -> Sequence[Event]:
        headers = codec_headers(delivery.extras)
        kind = headers.get(KIND, "")
        entry = self._table.inputs.get(kind)
        if entry is None:
            event = self._table.decode_user(delivery)
            return () if event is None else (event,)
        if entry.wire_only:
            return ()
        target = transport_headers(delivery.extras).get(H.CODEC_MESSAGE_ID, "")
        event = {"kind": kind, "codecMessageId": target, **entry.decode(delivery.data)}
        for field in entry.fields:
            field.read(headers, event)
        return (event,)

    def on_output(self, delivery: Delivery) -> Sequence[Event]:
        headers = codec_headers(delivery.extras)
        kind = headers.get(KIND, "")
        run_id = transport_headers(delivery.extras).get(H.RUN_ID, "")
        stream = self._table.streams.get(kind)
        if stream is not None:
            if stream.unwhole is None:
                return ()
            event: Event = {}
            for field in stream.fields:
                field.read(headers, event)
            before = self._repair.before(run_id, kind, headers, stream=True)
            return [*before, *stream.unwhole(event, delivery.data)]
        entry = self._table.output(kind)
        if entry is None:
            return ()
        event = {"type": kind, **entry.decode(delivery.data)}
        for field in entry.fields:
            field.read(headers, event)
        return [*self._repair.before(run_id, kind, headers, stream=False), event]

    def on_start(self, stream: StreamState) -> Sequence[Event]:
        entry = self._table.streams.get(stream.codec.get(KIND, ""))
        if entry is None or stream.name != Name.OUTPUT:
            return ()
        event: Event = {"type": entry.start}
        for field in entry.fields:
            field.read(stream.codec, event)
        before = self._repair.before(stream.transport.get(H.RUN_ID, ""), entry.kind, stream.codec, stream=True)
        return [*before, event]

    def on_delta(self, stream: StreamState, text: str) -> Sequence[Event]:
        entry = self._table.streams.get(stream.codec.get(KIND, ""))
        if entry is None or stream.name != Name.OUTPUT:
            return ()
        return ({"type": entry.delta, entry.key: self._key(entry, stream), entry.delta_key: text},)

    def on_end(self, stream: StreamState, codec: Headers) -> Sequence[Event]:
        entry = self._table.streams.get(stream.codec.get(KIND, ""))
        if entry is None or stream.name != Name.OUTPUT:
            return ()
        event: Event = {"type": entry.end, entry.key: self._key(entry, stream), **entry.finish(stream.text)}
        for field in entry.fields:
            if field.name in entry.closing:
                field.read({**stream.codec, **codec} if field.name != "providerMetadata" else codec, event)
        return (event,)

    @staticmethod
    def _key(entry: Stream, stream: StreamState) -> str:
        return stream.codec.get(entry.key, stream.stream_id)
