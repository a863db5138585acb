"""A worker is killed with -9 in the middle of its text; Temporal retries on another one; three clients end equal."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client

from stepwell.channels import open_channels
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Channel, H, Name, transport_headers

pytestmark = pytest.mark.anyio

WORKER = Path(__file__).with_name("worker.py")
FIRST = "What the first attempt says, as far as it comes. "
SECOND = "And this is said by the second. "
QUESTION = "Say something"

Session = ClientSession[Any, Any]


@asynccontextmanager
async def worker(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(WORKER), *arguments)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def join(stack: AsyncExitStack, channel: Channel) -> Session:
    session = await stack.enter_async_context(ClientSession(channel, UIMessageCodec()))
    await session.view.load_older(50)
    return session


def shown(session: Session) -> list[str]:
    return ["".join(part.get("text", "") for part in one.message["parts"]) for one in session.view.messages]


async def until(session: Session, true: Callable[[], bool]) -> None:
    changes = session.view.changes()
    async with asyncio.timeout(30):
        while not true():
            await anext(changes)


async def log(channel: Channel) -> list[tuple[str | None, dict[str, str], Any]]:
    page = await channel.history(limit=1000)
    return [(one.name, transport_headers(one.extras), one.data) for one in reversed(page.items)]


def of(said: list[tuple[str | None, dict[str, str], Any]], name: str) -> list[dict[str, str]]:
    return [headers for what, headers, _ in said if what == name]


async def test_killed_in_the_middle_of_the_text(temporal_address: str, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'channels.db'}"
    run_id = f"turn-{uuid4()}"
    client = await Client.connect(temporal_address)
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(open_channels(url))
        channel = await channels.open("conversations:1")
        connected = await join(stack, channel)
        asked = await connected.view.send(connected.codec.create_user_message(QUESTION))
        first = await stack.enter_async_context(worker(temporal_address, url, run_id))
        workflow = await client.start_workflow("AnswerWorkflow", asked.to_invocation(), id=run_id, task_queue=run_id)

        await until(connected, lambda: shown(connected) == [QUESTION, FIRST])
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        between = await join(stack, channel)
        await until(between, lambda: shown(between) == [QUESTION, FIRST])
        [run] = between.view.runs
        assert (run.status, [(step.status, step.attempt_count) for step in run.steps]) == ("active", [("active", 1)])

        await stack.enter_async_context(worker(temporal_address, url, run_id))
        async with asyncio.timeout(30):
            assert await workflow.result() == "complete"
        after = await join(stack, channel)
        views = []
        for session in (connected, between, after):
            await until(session, lambda session=session: session.view.runs[0].status == "complete")
            assert shown(session) == [QUESTION, SECOND]
            views.append([(one.codec_message_id, one.message) for one in session.view.messages])
            assert session.view.runs == connected.view.runs
        assert views[0] == views[1] == views[2]
        [run] = connected.view.runs
        assert run.run_id == run_id
        assert [(step.status, step.attempt_count) for step in run.steps] == [("complete", 2)]

        said = await log(channel)
        starts = of(said, Name.STEP_START)
        assert len(starts) == 2
        [step_id] = {headers[H.STEP_ID] for headers in starts}
        assert step_id.startswith(f"{run_id}-")
        # The log keeps what both said; which attempt counts is for readers to say.
        texts = {headers[H.STEP_START_SERIAL]: data for _, headers, data in said if data in (FIRST, SECOND)}
        assert [texts[serial] for serial in sorted(texts)] == [FIRST, SECOND]
        [step_end] = of(said, Name.STEP_END)
        assert step_end[H.STEP_START_SERIAL] == max(texts)
        assert len(of(said, Name.RUN_START)) == 1
        assert [headers[H.RUN_REASON] for headers in of(said, Name.RUN_END)] == ["complete"]
