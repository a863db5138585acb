"""A writer is killed with -9 anywhere in its run; another process finishes it; three clients end equal."""

import asyncio
import os
import random
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from stepwell.channels import open_channels
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import H, Name, transport_headers

# Each starts some fifty processes one after another.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

RUNS = int(os.environ.get("STEPWELL_KILLS", "25"))
"""Of each backend."""

WRITER = str(Path(__file__).with_name("writer.py"))
FIRST = "This is what the first process says before it dies"
SECOND = "And this is what is left of it"


async def write(url: str, name: str, event_id: str, run_id: str, text: str, *, kill_after: int | None) -> int:
    """Run a writer, and kill it after so many words of it. Returns how many there were."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, WRITER, url, name, event_id, run_id, text, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    words = 0
    while await process.stdout.readline():
        words += 1
        if words == kill_after:
            process.send_signal(signal.SIGKILL)
            break
    code = await process.wait()
    assert code == (0 if kill_after is None or words < kill_after else -signal.SIGKILL)
    return words


def shown(client: ClientSession[Any, Any]) -> list[str]:
    return ["".join(part.get("text", "") for part in one.message["parts"]) for one in client.view.messages]


async def settled(client: ClientSession[Any, Any]) -> None:
    changes = client.view.changes()
    async with asyncio.timeout(20):
        while [run.status for run in client.view.runs] != ["complete"]:
            await anext(changes)


async def killed_once(url: str, number: int, kill_after: int) -> None:
    name, run_id = f"kill:{number}", f"run-{number}"
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(open_channels(url))
        channel = await channels.open(name)

        async def join() -> ClientSession[Any, Any]:
            client = await stack.enter_async_context(ClientSession(channel, UIMessageCodec()))
            await client.view.load_older(50)
            return client

        connected = await join()
        asked = await connected.view.send(connected.codec.create_user_message("Say something"))
        event_id = asked.to_invocation().input_event_id
        await write(url, name, event_id, run_id, FIRST, kill_after=kill_after)
        between = await join()
        await write(url, name, event_id, run_id, SECOND, kill_after=None)
        after = await join()
        clients = connected, between, after
        for client in clients:
            await settled(client)
        said = [shown(client) for client in clients]
        assert said[0] == said[1] == said[2]
        # The first process may have been killed when all was said: then the second had nothing to do.
        assert said[0] in (["Say something", SECOND + " "], ["Say something", FIRST + " "])
        assert [one.message for one in connected.view.messages] == [one.message for one in after.view.messages]
        for client in clients:
            [run] = client.view.runs
            assert [step.status for step in run.steps] == ["complete"]
        page = await channel.history(limit=1000)
        log = [(one.name, transport_headers(one.extras)) for one in page.items]
        assert [name for name, _ in log].count(Name.RUN_START) == 1
        ends = [headers[H.RUN_REASON] for name, headers in log if name == Name.RUN_END]
        assert ends == ["complete"]


async def all_kills(url: str) -> None:
    dice = random.Random(7)
    moments = 6 + len(FIRST.split(" "))
    for number in range(RUNS):
        await killed_once(url, number, 1 + (number % moments if number < moments else dice.randrange(moments)))


async def test_sqlite(tmp_path: Path) -> None:
    await all_kills(f"sqlite:///{tmp_path / 'channels.db'}")


async def test_postgres(postgres_database: str) -> None:
    await all_kills(postgres_database)


async def test_redis(redis_database: str) -> None:
    await all_kills(redis_database)
