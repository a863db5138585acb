"""The worker of examples/temporal-agent in a process of its own: python worker.py TEMPORAL CHANNELS TASK_QUEUE.

Its model says half a sentence in a first attempt and then nothing more, until it is killed; a whole one in others.
"""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "temporal-agent"))

from temporal_agent.worker import make_worker
from temporalio import activity
from temporalio.client import Client

from stepwell.channels import open_channels

FIRST = "What the first attempt says, as far as it comes. "
SECOND = "And this is said by the second. "


async def model(messages: Sequence[Any]) -> AsyncIterator[dict[str, Any]]:
    assert [message["role"] for message in messages] == ["user"]  # nothing of a dead attempt is in the prompt
    first = activity.info().attempt == 1
    yield {"type": "text-start", "id": "t"}
    for word in (FIRST if first else SECOND).split():
        yield {"type": "text-delta", "id": "t", "delta": f"{word} "}
    if first:
        await asyncio.Event().wait()
    yield {"type": "text-end", "id": "t"}


async def main(temporal: str, channels_url: str, task_queue: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    client = await Client.connect(temporal)
    async with (
        open_channels(channels_url) as channels,
        make_worker(client, channels, model=model, task_queue=task_queue),
    ):
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
