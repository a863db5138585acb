"""The roll-up's window when the event loop is late."""

import anyio
import pytest

from stepwell.channels import MemoryChannels
from stepwell.testing import FakeClock
from stepwell.transport.codecs import TextCodec

pytestmark = pytest.mark.anyio


class StrictClock(FakeClock):
    """As the machine's: it refuses to wait for less than no time."""

    async def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("delay must be a non-negative number")
        await super().sleep(seconds)


class Writer:
    """Writes to a channel as it is."""

    def __init__(self, channel) -> None:
        self.publish, self.append, self.update = channel.publish, channel.append, channel.update


async def test_a_window_that_is_over_before_anybody_looked_is_flushed() -> None:
    clock = StrictClock()
    channel = await MemoryChannels(clock=clock).open("c")

    async def headers() -> dict[str, str]:
        return {"run-id": "r", "codec-message-id": "m", "role": "assistant"}

    encoder = TextCodec(clock=clock).create_encoder(Writer(channel), headers, message_id="m", roll_up=0.02)
    async with channel.subscribe() as subscription, anyio.create_task_group() as group:
        await encoder.publish_output("late")
        await clock.advance(1.0)  # the loop was busy with something else
        group.start_soon(encoder.run)
        data = ""
        with anyio.fail_after(5):
            while "late" not in data:
                data += "".join(str(item.data) for item in await subscription.read())
        group.cancel_scope.cancel()
