"""Reads streams and single messages: SPEC 2.4 as a state per message.

The decoder tells what a delivery adds to what was delivered before. It drops what it has seen (by version) and what
comes after a stream was closed; everything else about order and duplicates is the conversation tree's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stepwell.wire import Delivery, H, Headers, Name, codec_headers, transport_headers

from ._codec import Decoded

__all__ = ["DecoderHooks", "StreamDecoder", "StreamState"]

NOTHING = Decoded()


class StreamState:
    """An open or closed stream.

    Attributes:
        name: Of its message.
        stream_id: Of the codec.
        codec: Headers of its start.
        transport: The same.
        version: The newest seen.
        closed: Nothing more is taken from it.
        text: What was appended so far; dropped at the end.
    """

    __slots__ = ("closed", "codec", "name", "parts", "stream_id", "transport", "version")

    def __init__(self, name: str, transport: Headers, codec: Headers, version: str) -> None:
        self.name = name
        self.stream_id = transport.get(H.STREAM_ID, "")
        self.transport = transport
        self.codec = codec
        self.version = version
        self.closed = False
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


class DecoderHooks(Protocol):
    """What a codec makes of it. Each returns events of the codec, none for what it does not know."""

    def on_input(self, delivery: Delivery) -> Sequence[Any]:
        """An input, whole."""
        ...

    def on_output(self, delivery: Delivery) -> Sequence[Any]:
        """An output that is no stream, whole."""
        ...

    def on_start(self, stream: StreamState) -> Sequence[Any]:
        """A stream begins."""
        ...

    def on_delta(self, stream: StreamState, text: str) -> Sequence[Any]:
        """Text of it."""
        ...

    def on_end(self, stream: StreamState, codec: Headers) -> Sequence[Any]:
        """It ends, with these headers; `stream.text` is all of it."""
        ...


class StreamDecoder:
    """A `Decoder` over a codec's hooks."""

    def __init__(self, hooks: DecoderHooks) -> None:
        self._hooks = hooks
        self._streams: dict[str, StreamState] = {}

    def decode(self, delivery: Delivery) -> Decoded:
        """See `Decoder.decode`."""
        stream = self._streams.get(delivery.serial)
        if stream is None:
            return self._first(delivery)
        if delivery.action == "create" or stream.closed or delivery.version <= stream.version:
            return NOTHING
        if delivery.action == "delete":
            self._close(stream)
            return NOTHING
        stream.version = delivery.version
        text = delivery.data if isinstance(delivery.data, str) else ""
        if delivery.action == "update":
            known = stream.text
            if not text.startswith(known):
                # Replaced by another text: readers of the reference keep what they show, and so do we. The next full
                # version that goes on from here is told as what it adds.
                stream.parts = [text]
                stream.codec, stream.transport = codec_headers(delivery.extras), transport_headers(delivery.extras)
                return NOTHING
            text = text[len(known) :]
        return Decoded(outputs=self._go_on(stream, text, delivery))

    def _first(self, delivery: Delivery) -> Decoded:
        """A message that this session has not met, or no stream."""
        name, transport = delivery.name, transport_headers(delivery.extras)
        if delivery.action in ("append", "delete") or name not in (Name.INPUT, Name.OUTPUT):
            return NOTHING  # an append without a name cannot be dispatched; its next full version can
        if transport.get(H.STREAM) != "true":
            if name == Name.INPUT:
                return Decoded(inputs=self._hooks.on_input(delivery))
            return Decoded(outputs=self._hooks.on_output(delivery))
        stream = StreamState(name, transport, codec_headers(delivery.extras), delivery.version)
        self._streams[delivery.serial] = stream
        started = self._hooks.on_start(stream)
        if delivery.action == "create":
            return Decoded(outputs=started)  # text in a create is not shown live, and must not be written
        text = delivery.data if isinstance(delivery.data, str) else ""
        return Decoded(outputs=[*started, *self._go_on(stream, text, delivery)])

    def _go_on(self, stream: StreamState, text: str, delivery: Delivery) -> list[Any]:
        events: list[Any] = []
        if text:
            stream.parts.append(text)
            events.extend(self._hooks.on_delta(stream, text))
        status = transport_headers(delivery.extras).get(H.STATUS)
        if status == "complete":
            events.extend(self._hooks.on_end(stream, codec_headers(delivery.extras)))
        if status in ("complete", "cancelled"):
            self._close(stream)
        return events

    @staticmethod
    def _close(stream: StreamState) -> None:
        stream.closed = True
        stream.parts = []
        stream.codec = stream.transport = {}
