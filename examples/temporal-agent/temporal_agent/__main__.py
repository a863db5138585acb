"""`python -m temporal_agent worker` and `python -m temporal_agent ask TEXT`."""

import argparse
import asyncio
from uuid import uuid4

from temporalio.client import Client

from stepwell.channels import open_channels
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec

from .worker import TASK_QUEUE, make_worker
from .workflow import AnswerWorkflow


async def work(temporal: str, channels_url: str) -> None:
    """Work until Ctrl-C, or a kill."""
    client = await Client.connect(temporal)
    async with open_channels(channels_url) as channels:
        await make_worker(client, channels).run()


async def ask(temporal: str, channels_url: str, text: str) -> None:
    """Say something, and print the answer as it grows; a line that is shorter is a retry that took over."""
    client = await Client.connect(temporal)
    async with open_channels(channels_url) as channels:
        channel = await channels.open("conversations:demo")
        async with ClientSession(channel, UIMessageCodec(), client_id="ana") as session:
            changes = session.view.changes()
            asked = await session.view.send(session.codec.create_user_message(text))
            await client.start_workflow(
                AnswerWorkflow.run, asked.to_invocation(), id=f"turn-{uuid4()}", task_queue=TASK_QUEUE
            )
            async for _ in changes:
                said = "".join(part.get("text", "") for part in session.view.messages[-1].message["parts"])
                print(f"{asked.status}: {said}")
                if asked.status != "active":
                    break


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m temporal_agent")
    parser.add_argument("--temporal", default="127.0.0.1:7233", metavar="HOST:PORT")
    parser.add_argument("--channels", default="sqlite:///temporal-agent.db", metavar="URL")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("worker")
    commands.add_parser("ask").add_argument("text")
    arguments = parser.parse_args()
    if arguments.command == "worker":
        asyncio.run(work(arguments.temporal, arguments.channels))
    else:
        asyncio.run(ask(arguments.temporal, arguments.channels, arguments.text))


if __name__ == "__main__":
    main()
