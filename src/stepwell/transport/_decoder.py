"""Reads streams and single messages: docs/wire.md 2.4 as a state per message.

The decoder tells what a delivery adds to what was delivered before. It drops what it has seen (by version) and what
comes after a stream was closed; everything else about order and duplicates is the conversation tree's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from stepwell.wire import Delivery, H, Headers, Name, codec_headers, transport_headers

from ._codec import Decoded

__all__ = ["MAX_CLOSED", "DecoderHooks", "StreamDecoder", "StreamState"]

_log = logging.getLogger("stepwell.transport")

MAX_CLOSED: Final = 4096
"""Closed streams that are remembered, to drop what still comes for them. Of one that was closed that long ago nothing
new comes: its writer's last word is its close, or a repair right behind it. What may come is a version that was
delivered before, from history or a snapshot, and that the tree drops by its version."""

_NOTHING: Final = Decoded()


class StreamState:
    """An open stream.

    Attributes:
        name: Of its message.
        stream_id: Of the codec.
        transport: Headers of its start.
        codec: The same.
        version: The newest seen.
        memo: Free for the hooks.
    """

    __slots__ = ("codec", "memo", "name", "parts", "stream_id", "transport", "version")

    def __init__(self, name: str, transport: Headers, codec: Headers, version: str) -> None:
        self.name = name
        self.stream_id = transport.get(H.STREAM_ID, "")
        self.transport = transport
        self.codec = codec
        self.version = version
        self.memo: Any = None
        self.parts: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


class DecoderHooks(Protocol):
    """What a codec makes of it. Each returns events of the codec, none for what it does not know. Headers are text."""

    def on_input(self, transport: Headers, codec: Headers, data: Any) -> Sequence[Any]:
        """An input, whole."""
        ...

    def on_output(self, transport: Headers, codec: Headers, data: Any) -> Sequence[Any]:
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
        self._open: dict[str, StreamState] = {}
        self._closed: dict[str, None] = {}  # serials, oldest close first

    def decode(self, delivery: Delivery) -> Decoded:
        """See `Decoder.decode`."""
        stream = self._open.get(delivery.serial)
        try:
            if stream is not None:
                return self._next(stream, delivery)
            return self._first(delivery)
        except Exception:  # noqa: BLE001 - a codec's own functions on what anybody may have written
            _log.warning("The message %s cannot be read by the codec.", delivery.serial, exc_info=True)
            return _NOTHING

    def _next(self, stream: StreamState, delivery: Delivery) -> Decoded:
        """A mutation of an open stream."""
        action = delivery.action
        if action == "create" or delivery.version <= stream.version:
            return _NOTHING
        if action == "delete":
            self._close(delivery.serial)
            return _NOTHING
        stream.version = delivery.version
        text = delivery.data if isinstance(delivery.data, str) else ""
        if action == "update":
            known = stream.text
            if not text.startswith(known):
                # Replaced by another text. The reference says nothing about it, so its readers keep what they show,
                # and so must ours: both look at the same conversation. (Writers here only ever replace a text by one
                # that goes on from it.) The next full version that goes on from this one is told as what it adds.
                stream.parts = [text]
                stream.codec = _texts(codec_headers(delivery.extras))
                stream.transport = _texts(transport_headers(delivery.extras))
                return _NOTHING
            text = text[len(known) :]
        return Decoded(outputs=self._go_on(stream, text, delivery))

    def _first(self, delivery: Delivery) -> Decoded:
        """A message without an open stream."""
        # An append without its message cannot be read: it has no name. The reference takes it for the beginning of a
        # stream that it then never shows; here the message's next full version is read as what it is.
        if delivery.action in ("append", "delete") or delivery.serial in self._closed:
            return _NOTHING
        name = delivery.name
        if name not in (Name.INPUT, Name.OUTPUT):
            return _NOTHING
        transport, codec = _texts(transport_headers(delivery.extras)), _texts(codec_headers(delivery.extras))
        if transport.get(H.STREAM) != "true":
            if name == Name.INPUT:
                return Decoded(inputs=self._hooks.on_input(transport, codec, delivery.data))
            return Decoded(outputs=self._hooks.on_output(transport, codec, delivery.data))
        stream = StreamState(name, transport, codec, delivery.version)
        self._open[delivery.serial] = stream
        started = self._hooks.on_start(stream)
        if delivery.action == "create":
            # Text in a create is not shown live (and must not be written): the reference ignores it. Whoever comes
            # later gets it with the full version.
            return Decoded(outputs=started)
        text = delivery.data if isinstance(delivery.data, str) else ""
        return Decoded(outputs=[*started, *self._go_on(stream, text, delivery)])

    def _go_on(self, stream: StreamState, text: str, delivery: Delivery) -> Sequence[Any]:
        status = transport_headers(delivery.extras).get(H.STATUS)
        events: Sequence[Any] = ()
        if text:
            stream.parts.append(text)
            events = self._hooks.on_delta(stream, text)
        if status == "complete":
            self._close(delivery.serial)
            events = [*events, *self._hooks.on_end(stream, _texts(codec_headers(delivery.extras)))]
        elif status == "cancelled":
            self._close(delivery.serial)
        return events

    def _close(self, serial: str) -> None:
        del self._open[serial]
        self._closed[serial] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]


def _texts(headers: Headers) -> Headers:
    """Without what is no text, which other writers may have put there: a real `true` is not `"true"`."""
    try:
        "".join(headers.values())  # each header of each message comes by here
    except TypeError:
        return {key: value for key, value in headers.items() if type(value) is str}
    return headers
