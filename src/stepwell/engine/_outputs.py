"""What one attempt says, on its way to the channel: messages are gathered and go out together."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from stepwell.transport import ChannelWriter
from stepwell.wire import Data, Extras, WireMessage

__all__ = ["Outputs"]


class Outputs:
    """An `EncoderWriter` that publishes when it must: before text is appended, and when it is told to.

    What it is given is written in the same order and under the same ids whenever it is written again, by whatever
    process: nothing in it depends on time, and nothing is said because its caller was cancelled.

    Args:
        writer: Where to.
        scope: Begins the idempotency ids.
    """

    def __init__(self, writer: ChannelWriter, scope: str) -> None:
        self._writer = writer
        self._scope = scope
        self._waiting: list[WireMessage] = []
        self._serials: list[str] = []
        self._lock = anyio.Lock()  # the encoder's roll-up flushes too

    async def publish(self, messages: Sequence[WireMessage]) -> list[str]:
        """Keep messages; what is returned stands for their serials in `append` and `update`."""
        first = len(self._serials) + len(self._waiting)
        self._waiting += [
            msgspec.structs.replace(message, idempotency_id=f"{self._scope}:{message.idempotency_id}")
            for message in messages
        ]
        return [str(first + index) for index in range(len(messages))]

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int) -> str:
        """See `ChannelWriter.append`."""
        return await self._writer.append(await self._serial(serial), data, extras, seq=seq)

    async def update(self, serial: str, data: Data, extras: Extras) -> str:
        """See `ChannelWriter.update`."""
        return await self._writer.update(await self._serial(serial), data, extras)

    async def _serial(self, place: str) -> str:
        await self.flush()
        return self._serials[int(place)]

    async def flush(self) -> None:
        """Publish what is kept. Raises as `ChannelWriter.publish`; then it is still kept."""
        if not self._waiting:
            return
        async with self._lock:
            if waiting := list(self._waiting):
                self._serials += await self._writer.publish(waiting)
                del self._waiting[: len(waiting)]

    def rest(self) -> list[WireMessage]:
        """Take what is kept, to publish it together with what follows."""
        rest, self._waiting = self._waiting, []
        return rest
