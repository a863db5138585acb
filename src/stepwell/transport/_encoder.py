"""Writes streams and single outputs: the roll-up, the order, and what happens when an append is lost.

One encoder per `pipe` or `send`. All text of a stream that is kept for the roll-up window goes out in one append, and
before anything else is published: the log has the order of the outputs. An append carries its number in its message, so
one whose acknowledgement was lost is repeated without harm by the writer. One that fails for good is replaced at once
by an update with the whole text, before anything behind it: so readers get what is missing, live ones too.
"""

from __future__ import annotations

import anyio

from stepwell._clock import Clock, SystemClock
from stepwell.errors import AppendGapError, ChannelError, EncoderRecoveryError, MisuseError, SessionClosedError
from stepwell.wire import Data, Extras, H, Headers, Name, WireMessage, make_extras

from ._codec import EncoderWriter, OpenOutput

__all__ = ["StreamEncoder"]

MAX_KEPT = 65_536
"""Characters of kept text at which the source is made to wait for the channel."""


class _Stream:
    """A message that is being appended to."""

    __slots__ = ("codec", "extras", "kept", "seq", "serial", "text", "transport")

    def __init__(self, serial: str, transport: Headers, codec: Headers) -> None:
        self.serial = serial
        self.transport = transport
        self.codec = codec
        self.extras = make_extras(transport, codec)
        self.seq = 0
        self.kept: list[str] = []
        self.text: list[str] = []  # everything, in case the message has to be replaced


class StreamEncoder:
    """See the module.

    Args:
        writer: Where to.
        open_output: Called once, before the first output.
        message_id: Stands in the idempotency ids.
        roll_up: Seconds for which text is kept; 0 appends each delta at once.
        clock: For the window.
    """

    def __init__(
        self,
        writer: EncoderWriter,
        open_output: OpenOutput,
        *,
        message_id: str,
        roll_up: float = 0.02,
        clock: Clock | None = None,
    ) -> None:
        self._writer = writer
        self._open_output = open_output
        self._message_id = message_id
        self._roll_up = roll_up
        self._clock = clock or SystemClock()
        self._headers: Headers | None = None
        self._streams: dict[str, _Stream] = {}
        self._count = 0
        self._kept = 0
        self._waiting = anyio.Event()
        self._lock = anyio.Lock()
        self._closed = False
        self.has_output = False

    # -- outputs

    async def discrete(self, data: Data, codec: Headers, *, ephemeral: bool = False) -> None:
        """Publish one output that is whole.

        Raises:
            SessionClosedError: The encoder was closed.
            ChannelError, FencedError: As the writer.
        """
        async with self._lock:
            self._check_open()
            await self._flush()
            await self._publish(data, {H.STREAM: "false"}, codec, ephemeral)

    async def start(self, stream_id: str, codec: Headers) -> None:
        """Open a stream; one of the same id that is open is forgotten as it is. Raises as `discrete`."""
        async with self._lock:
            self._check_open()
            await self._flush()
            own = {H.STREAM: "true", H.STATUS: "streaming", H.STREAM_ID: stream_id}
            serial, transport = await self._publish("", own, codec, False)
            self._streams[stream_id] = _Stream(serial, transport, codec)

    async def delta(self, stream_id: str, text: str) -> None:
        """Append text to an open stream, within the window.

        Raises:
            MisuseError: There is no such stream open.
            SessionClosedError, ChannelError, FencedError: As `discrete`.
        """
        stream = self._stream(stream_id)
        if not text:
            return
        stream.kept.append(text)
        self._kept += len(text)
        if self._roll_up and self._kept < MAX_KEPT:
            if not self._waiting.is_set():
                self._waiting.set()
            return
        async with self._lock:
            await self._flush()

    async def end(self, stream_id: str, codec: Headers | None = None) -> None:
        """Close a stream as complete.

        Args:
            stream_id: Which.
            codec: Laid over the headers of its start.

        Raises:
            MisuseError, SessionClosedError, ChannelError, FencedError: As `delta`.
        """
        async with self._lock:
            await self._close_stream(self._stream(stream_id), stream_id, "complete", codec or {})

    def is_open(self, stream_id: str) -> bool:
        """Whether a stream of this id is open."""
        return stream_id in self._streams

    async def cancel_streams(self) -> None:
        """See `Encoder.cancel_streams`."""
        async with self._lock:
            for stream_id, stream in list(self._streams.items()):
                await self._close_stream(stream, stream_id, "cancelled", {})

    async def close(self) -> None:
        """See `Encoder.close`."""
        async with self._lock:
            if not self._closed:
                self._closed = True
                await self._flush()

    async def run(self) -> None:
        """See `Encoder.run`."""
        while True:
            await self._waiting.wait()
            await self._clock.sleep(self._roll_up)
            async with self._lock:
                await self._flush()

    # -- the channel, under the lock

    async def _publish(self, data: Data, own: Headers, codec: Headers, ephemeral: bool) -> tuple[str, Headers]:
        if self._headers is None:
            self._headers = await self._open_output()
        transport = {**self._headers, **own}
        message = WireMessage(
            name=Name.OUTPUT,
            data=data,
            extras=make_extras(transport, codec, ephemeral=ephemeral),
            idempotency_id=f"{self._message_id}:{self._count}",
        )
        self._count += 1
        self.has_output = True
        return (await self._writer.publish([message]))[0], transport

    async def _flush(self) -> None:
        """Append what is kept, oldest stream first."""
        self._waiting = anyio.Event()
        for stream in list(self._streams.values()):
            while stream.kept:
                await self._append(stream)

    async def _append(self, stream: _Stream) -> None:
        """One append of what is kept for a stream: all of it, or one delta if nothing is to be rolled up."""
        taken = len(stream.kept) if self._roll_up else 1
        text = "".join(stream.kept[:taken])
        await self._send(stream, text, stream.extras)
        del stream.kept[:taken]
        self._kept -= len(text)

    async def _send(self, stream: _Stream, text: str, extras: Extras) -> None:
        try:
            await self._writer.append(stream.serial, text, extras, seq=stream.seq + 1)
        except AppendGapError as error:
            # An append before was given up and replaced, and had not been applied.
            stream.seq = error.applied
            await self._writer.append(stream.serial, text, extras, seq=stream.seq + 1)
        except ChannelError as error:
            try:
                await self._writer.update(stream.serial, "".join((*stream.text, text)), extras)
            except ChannelError:
                raise EncoderRecoveryError(
                    "Text of an output could neither be appended nor replaced as a whole: try the step again.",
                    serial=stream.serial,
                ) from error
        stream.seq += 1
        stream.text.append(text)

    async def _close_stream(self, stream: _Stream, stream_id: str, status: str, codec: Headers) -> None:
        await self._flush()
        del self._streams[stream_id]
        extras = make_extras({**stream.transport, H.STATUS: status}, {**stream.codec, **codec})
        await self._send(stream, "", extras)

    def _stream(self, stream_id: str) -> _Stream:
        self._check_open()
        stream = self._streams.get(stream_id)
        if stream is None:
            raise MisuseError(f"No stream {stream_id[:80]!r} is open: begin it first.")
        return stream

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("This output was closed: make a new step.")
