"""Writes streams and single outputs: the roll-up, the order, and what happens when an append is lost.

One encoder per `pipe` or `send`. All text of a stream that is kept for the roll-up window goes out in one append, and
before anything else is published: the log has the order of the outputs.

An append carries its number within its message, so the channel knows one that it has stored already. That is why a
text whose append failed or was cut off is frozen: it is repeated under its number exactly as it was, never together
with newer text, which the channel would take for a part of what it has and drop. A failed append is tried once more,
a window later; if it fails again, or if something else must go out behind it, an update with the whole text replaces
the message, from which readers that are there heal too.
"""

from __future__ import annotations

from typing import TypeAlias

import anyio

from stepwell._clock import Clock, SystemClock
from stepwell.errors import (
    AppendGapError,
    ChannelError,
    EncoderRecoveryError,
    InvalidInputError,
    MisuseError,
    SessionClosedError,
)
from stepwell.wire import Data, Extras, H, Headers, Name, WireMessage, make_extras

from ._codec import EncoderWriter, OpenOutput

__all__ = ["MAX_KEPT", "StreamEncoder", "StreamKey"]

StreamKey: TypeAlias = str | tuple[str, str]
"""Tells the open streams of an encoder apart: a `stream-id`, or a kind and one."""

MAX_KEPT = 65_536
"""Characters of text without acknowledgement at which the source is made to wait for the channel."""


class _Stream:
    """A message that is being appended to."""

    __slots__ = ("codec", "extras", "failed", "frozen", "kept", "key", "seq", "serial", "text", "transport")

    def __init__(self, key: StreamKey, serial: str, transport: Headers, codec: Headers) -> None:
        self.key = key
        self.serial = serial
        self.transport = transport
        self.codec = codec
        self.extras = make_extras(transport, codec)
        self.seq = 0  # appends that were acknowledged, or replaced by an update
        self.kept: list[str] = []
        self.frozen: str | None = None  # handed to the channel as append `seq + 1`, not acknowledged
        self.failed = False  # it was refused once
        self.text: list[str] = []  # everything acknowledged, in case the message has to be replaced


class StreamEncoder:
    """See the module. Used by one task, beside `run`.

    Args:
        writer: Where to.
        open_output: Called once, before the first output.
        message_id: Stands in the idempotency ids: `<message_id>:<n>`, n counting the messages from 0.
        roll_up: Seconds for which text is kept, from the first that is kept; 0 appends each delta at once. Two streams
            that are open at a time are appended to one after the other.
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
        self._streams: dict[StreamKey, _Stream] = {}
        self._count = 0
        self._kept = 0  # characters in `kept` and `frozen` of all streams
        self._armed = False  # a window is running
        self._due = 0.0  # its end
        self._window = anyio.Event()
        self._lock = anyio.Lock()
        self._closed = False
        self.has_output = False

    # -- outputs

    async def discrete(self, data: Data, codec: Headers, *, ephemeral: bool = False) -> None:
        """Publish one output that is whole.

        Raises:
            InvalidInputError: The data is a bare number or boolean; nothing was written.
            SessionClosedError: The encoder was closed.
            EncoderRecoveryError: Text before it was lost and could not be restored.
            ChannelError, FencedError: As the writer.
        """
        if not isinstance(data, (str, dict, list, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance] - callers err
            raise InvalidInputError(
                f'The data of an output is a {type(data).__name__}: wrap it in an object, as in {{"value": ...}}.'
            )
        async with self._lock:
            self._check_open()
            await self._flush(last_chance=True)
            await self._publish(data, {H.STREAM: "false"}, codec, ephemeral)

    async def start(self, stream_id: str, codec: Headers, *, key: StreamKey | None = None) -> None:
        """Open a stream; one of the same key that is open is left as it is. Raises as `discrete`.

        Args:
            stream_id: For the header.
            codec: Its codec headers.
            key: By which the stream is called from here on; the `stream_id` by default.
        """
        key = stream_id if key is None else key
        async with self._lock:
            self._check_open()
            await self._flush(last_chance=True)
            own = {H.STREAM: "true", H.STATUS: "streaming", H.STREAM_ID: stream_id}
            serial, transport = await self._publish("", own, codec, False)
            self._streams[key] = _Stream(key, serial, transport, codec)

    async def delta(self, key: StreamKey, text: str) -> None:
        """Append text to an open stream, within the window. Waits only if the channel is behind by `MAX_KEPT`.

        Raises:
            MisuseError: There is no such stream open, or the text is none.
            InvalidInputError: The text holds half a surrogate pair.
            SessionClosedError, EncoderRecoveryError, ChannelError, FencedError: As `discrete`.
        """
        stream = self._streams.get(key)
        if stream is None or self._closed:
            stream = self._stream(key)
        if type(text) is not str:
            raise MisuseError(f"Text of a stream is a str, not a {type(text).__name__}.")
        if not text:
            return
        if not text.isascii():
            _check_unicode(text)
        stream.kept.append(text)
        self._kept += len(text)
        if self._roll_up and self._kept < MAX_KEPT:
            if not self._armed:
                self._arm()
            return
        async with self._lock:
            await self._flush(last_chance=False)

    async def end(self, key: StreamKey, codec: Headers | None = None) -> None:
        """Close a stream as complete; text that is still kept goes out with the close.

        Args:
            key: Which.
            codec: Laid over the headers of its start.

        Raises:
            MisuseError, SessionClosedError, EncoderRecoveryError, ChannelError, FencedError: As `delta`.
        """
        async with self._lock:
            await self._close_stream(self._stream(key), "complete", codec or {})

    def is_open(self, key: StreamKey) -> bool:
        """Whether such a stream is open."""
        return key in self._streams

    async def cancel_streams(self) -> None:
        """See `Encoder.cancel_streams`."""
        async with self._lock:
            self._check_open()
            for stream in list(self._streams.values()):
                await self._close_stream(stream, "cancelled", {})

    async def close(self) -> None:
        """See `Encoder.close`."""
        async with self._lock:
            self._closed = True
            await self._flush(last_chance=True)

    async def run(self) -> None:
        """See `Encoder.run`."""
        while True:
            await self._window.wait()
            due = self._due
            # A loop that was busy comes late, and a clock refuses to wait for less than no time.
            await self._clock.sleep(max(0.0, due - self._clock.monotonic()))
            if self._due == due:  # else everything went out meanwhile, and another window has begun
                async with self._lock:
                    await self._flush(last_chance=False)

    def _arm(self) -> None:
        self._armed = True
        self._due = self._clock.monotonic() + self._roll_up
        self._window.set()

    def _disarm(self) -> None:
        if self._armed:
            self._armed = False
            self._window = anyio.Event()

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

    async def _flush(self, *, last_chance: bool) -> None:
        """Append what is kept, stream by stream.

        `last_chance`: something else is published next, so text that cannot be appended is not left for later.
        """
        self._disarm()
        for stream in list(self._streams.values()):
            await self._drain(stream, last_chance)

    async def _drain(self, stream: _Stream, last_chance: bool) -> None:
        rolled = False
        while stream.frozen is not None or (stream.kept and (last_chance or not rolled)):
            if stream.frozen is None:
                # Rolled up: all of it. Text that comes while this append is under way has begun a window of its own:
                # appended at once, a fast source would have an append for what it says in each turn of the loop.
                rolled = bool(self._roll_up)
                taken = len(stream.kept) if self._roll_up else 1
                stream.frozen = "".join(stream.kept[:taken])
                del stream.kept[:taken]
            try:
                await self._append(stream, stream.frozen, stream.extras)
            except ChannelError as error:
                if not (last_chance or stream.failed):
                    stream.failed = True
                    self._arm()
                    return
                await self._replace(stream, stream.frozen, stream.extras, error)
            self._kept -= len(stream.frozen)
            stream.frozen, stream.failed = None, False

    async def _close_stream(self, stream: _Stream, status: str, codec: Headers) -> None:
        self._disarm()
        for other in list(self._streams.values()):
            if other is not stream or stream.frozen is not None or not self._roll_up:
                await self._drain(other, last_chance=True)
        extras = make_extras({**stream.transport, H.STATUS: status}, {**stream.codec, **codec})
        text = "".join(stream.kept)
        try:
            await self._append(stream, text, extras)
        except ChannelError as error:
            await self._replace(stream, text, extras, error)
        # Not before: cut off here, it is closed again under the same number, and the channel knows what it has.
        self._forget(stream)

    async def _append(self, stream: _Stream, text: str, extras: Extras) -> None:
        try:
            await self._writer.append(stream.serial, text, extras, seq=stream.seq + 1)
        except AppendGapError as error:
            # An append before was replaced by an update, and had indeed not been stored: the count goes on from there.
            stream.seq = error.applied
            await self._writer.append(stream.serial, text, extras, seq=stream.seq + 1)
        stream.seq += 1
        stream.text.append(text)

    async def _replace(self, stream: _Stream, text: str, extras: Extras, cause: ChannelError) -> None:
        try:
            await self._writer.update(stream.serial, "".join((*stream.text, text)), extras)
        except ChannelError:
            self._forget(stream)
            raise EncoderRecoveryError(
                "Text of an output could neither be appended nor replaced as a whole: try the step again.",
                serial=stream.serial,
            ) from cause
        # The append may have been stored after all. Counted as if it was: where it was not, the channel says so.
        stream.seq += 1
        stream.text.append(text)

    def _forget(self, stream: _Stream) -> None:
        self._kept -= sum(map(len, stream.kept)) + len(stream.frozen or "")
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]

    def _stream(self, key: StreamKey) -> _Stream:
        self._check_open()
        stream = self._streams.get(key)
        if stream is None:
            name = " ".join(key) if isinstance(key, tuple) else key
            raise MisuseError(f"No stream {name[:80]!r} is open: begin it first.")
        return stream

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("This output was closed: make a new step.")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(
            "Text of an output holds half a surrogate pair: join the pieces of a character before they are written."
        ) from None
