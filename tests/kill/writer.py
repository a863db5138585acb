"""An agent in a process of its own, to be killed: python writer.py URL CHANNEL EVENT_ID RUN_ID TEXT."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from stepwell.channels import open_channels
from stepwell.transport import AgentSession, Invocation
from stepwell.transport.codecs import UIMessageCodec


def say(word: str) -> None:
    """A moment at which this process may be killed."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


async def pieces(text: str) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "text-start", "id": "t"}
    for word in text.split(" "):
        say("piece")
        yield {"type": "text-delta", "id": "t", "delta": word + " "}
        await asyncio.sleep(0.002)
    yield {"type": "text-end", "id": "t"}


async def main(url: str, name: str, event_id: str, run_id: str, text: str) -> None:
    async with open_channels(url) as channels:
        channel = await channels.open(name)
        say("open")
        async with AgentSession(channel, UIMessageCodec(), roll_up=0.004) as session:
            run = session.create_run(
                Invocation(input_event_id=event_id, session_name=name), run_id=run_id, invocation_id=run_id
            )
            await run.start()
            if run.status != "active":
                say("over")  # it was ended by the one before
                return
            say("started")
            async with run.create_step(f"{run_id}-step-0") as step:
                say("step")
                await step.pipe(pieces(text))
                say("piped")
            say("ended step")
            await run.end("complete")
            say("ended")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:6]))
