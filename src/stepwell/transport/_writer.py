"""The way to the channel: every write of an agent's session goes through here.

A write whose answer was lost is repeated, because the channel knows it again: by the idempotency id of a message, by
the number of an append. And a write that was begun is carried to its end even where its caller is cancelled meanwhile:
otherwise nobody could know what is on the channel, so nobody could close it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Final, TypeVar
from uuid import uuid4

import anyio
import anyio.lowlevel
import msgspec

from stepwell._clock import Clock
from stepwell.errors import ChannelBusyError, FencedError, SessionClosedError, StepwellError
from stepwell.wire import (
    Channel,
    Data,
    Extras,
    H,
    WireMessage,
    codec_headers,
    is_open_stream,
    make_extras,
    transport_headers,
)

__all__ = ["LAST_WORDS_SECONDS", "RETRY_SECONDS", "ChannelWriter", "OutputWriter"]

T = TypeVar("T")

RETRY_SECONDS: Final = 30.0
"""For how long a write is repeated while the channel is busy or unreachable, before its error is raised."""

LAST_WORDS_SECONDS: Final = 5.0
"""How long a cancelled task is kept for what it has to finish on the channel."""

_FIRST_DELAY: Final = 0.05
_MAX_DELAY: Final = 2.0


class ChannelWriter:
    """An `EncoderWriter`, for everything else too.

    Args:
        channel: Where to.
        epoch: Goes with every write; None is never fenced.
        client_id: Who writes, as the messages say.
        clock: For the delays.
        on_fenced: Called once, when a newer epoch has taken the channel over.
        patience: Seconds for which a write is repeated while the channel is busy or unreachable, before its error is
            raised; infinity for a writer whose lease says how long it may try.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        epoch: int | None,
        client_id: str | None,
        clock: Clock,
        on_fenced: Callable[[], object],
        patience: float = RETRY_SECONDS,
    ) -> None:
        self._channel = channel
        self._epoch = epoch
        self._client_id = client_id
        self._clock = clock
        self._on_fenced = on_fenced
        self._patience = patience
        self._mute = False
        self.stopped: StepwellError | None = None

    def stop(self, error: StepwellError) -> None:
        """Write nothing any more: every further call raises `error`. Only the first call counts."""
        if self.stopped is None:
            self.stopped = error

    @property
    def detached(self) -> bool:
        """Whether nothing is written because the session was left, not because another writer came."""
        return isinstance(self.stopped, SessionClosedError)

    def check(self) -> None:
        """Raise what the writer was stopped with, if it was."""
        if self.stopped is not None:
            raise self.stopped

    async def raise_fence(self, epoch: int) -> None:
        """See `Channel.raise_fence`. Retried as every write."""
        await self._retry(lambda: self._channel.raise_fence(epoch))

    async def publish(self, messages: Sequence[WireMessage]) -> list[str]:
        """Publish messages. Those without an idempotency id get one, so that retrying is safe.

        Raises:
            ChannelBusyError: The channel was busy for the writer's patience; it is not known whether they were stored.
            FencedError: A newer epoch writes; nothing was stored, now or later.
            SessionClosedError: The session was detached; nothing was stored.
            ChannelError, InvalidInputError: See `Channel.publish`.
        """
        named = [self._named(message) for message in messages]
        return await self._write(lambda: self._channel.publish(named, epoch=self._epoch))

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int) -> str:
        """See `Channel.append`. Raises as `publish`, and `AppendGapError`, `UnknownMessageError`."""
        return await self._write(lambda: self._channel.append(serial, data, extras, seq=seq, epoch=self._epoch))

    async def update(self, serial: str, data: Data, extras: Extras) -> str:
        """See `Channel.update`. Raises as `publish`, and `UnknownMessageError`."""
        return await self._write(lambda: self._channel.update(serial, data, extras, epoch=self._epoch))

    @contextlib.contextmanager
    def last_words(self) -> Generator[None]:
        """Shield what a cancelled task still has to say, for at most `LAST_WORDS_SECONDS`; then it is cut off.

        Once a channel did not answer in that time nobody waits for it again until it has answered something.
        """
        with anyio.CancelScope(shield=True) as scope:

            def give_up() -> None:
                self._mute = True
                scope.cancel()

            if self._mute:
                scope.cancel()
            timer = self._clock.call_at(self._clock.monotonic() + LAST_WORDS_SECONDS, give_up)
            try:
                yield
            finally:
                timer.cancel()

    def _named(self, message: WireMessage) -> WireMessage:
        return msgspec.structs.replace(
            message,
            client_id=message.client_id or self._client_id,
            idempotency_id=message.idempotency_id or str(uuid4()),
        )

    async def _write(self, write: Callable[[], Awaitable[T]]) -> T:
        await anyio.lowlevel.checkpoint_if_cancelled()  # what was not begun need not be finished
        try:
            return await self._retry(write)
        except anyio.get_cancelled_exc_class():
            with self.last_words(), contextlib.suppress(StepwellError):
                await self._retry(write)
            raise

    async def _retry(self, write: Callable[[], Awaitable[T]]) -> T:
        delay, waited = _FIRST_DELAY, 0.0
        while True:
            self.check()
            try:
                result = await write()
            except ChannelBusyError:
                if waited >= self._patience:
                    raise
            except FencedError as error:
                self.stop(error)
                self._on_fenced()
                raise
            else:
                self._mute = False
                return result
            await self._clock.sleep(delay)
            waited += delay
            delay = min(2 * delay, _MAX_DELAY)


class OutputWriter:
    """The writer of one `pipe` or `send`: an `EncoderWriter` over a `ChannelWriter`.

    Keeps the ids of its messages apart from those of every other `pipe`: two may write under one `codec-message-id`,
    and no message of one may be taken for a repetition of the other's.

    Args:
        writer: Where to.
    """

    def __init__(self, writer: ChannelWriter) -> None:
        self._writer = writer
        self._scope = str(uuid4())

    async def publish(self, messages: Sequence[WireMessage]) -> list[str]:
        """See `ChannelWriter.publish`."""
        named = [
            msgspec.structs.replace(message, idempotency_id=f"{self._scope}:{message.idempotency_id or uuid4()}")
            for message in messages
        ]
        try:
            return await self._writer.publish(named)
        except anyio.get_cancelled_exc_class():
            # The encoder never learns the serial, so it cannot close a stream that was opened at this very moment.
            with self._writer.last_words(), contextlib.suppress(StepwellError):
                await self._close_streams(named)
            raise

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int) -> str:
        """See `ChannelWriter.append`."""
        return await self._writer.append(serial, data, extras, seq=seq)

    async def update(self, serial: str, data: Data, extras: Extras) -> str:
        """See `ChannelWriter.update`."""
        return await self._writer.update(serial, data, extras)

    async def _close_streams(self, messages: Sequence[WireMessage]) -> None:
        if not any(is_open_stream(message.extras) for message in messages):
            return
        for message, serial in zip(messages, await self._writer.publish(messages), strict=True):
            if is_open_stream(message.extras):
                headers = {**transport_headers(message.extras), H.STATUS: "cancelled"}
                await self._writer.append(serial, "", make_extras(headers, codec_headers(message.extras)), seq=1)
