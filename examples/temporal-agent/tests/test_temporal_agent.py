"""The agent with a worker in this process. That a killed one is replaced shows tests/temporal of the project."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from temporal_agent import __main__ as command
from temporal_agent import agent
from temporal_agent.model import slow_model
from temporal_agent.worker import make_worker
from temporal_agent.workflow import AnswerWorkflow
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError

from stepwell.channels import MemoryChannels, open_channels
from stepwell.transport import ClientRun, ClientSession
from stepwell.transport.codecs import UIMessageCodec

pytestmark = pytest.mark.anyio


class Asked:
    """A question that is being answered."""

    def __init__(
        self, session: ClientSession[Any, Any], run: ClientRun[Any, Any], workflow: WorkflowHandle[Any, Any]
    ) -> None:
        self.session = session
        self.run = run
        self.workflow = workflow

    @property
    def answer(self) -> str:
        parts = [part for one in self.session.view.messages[1:] for part in one.message["parts"]]
        return "".join(part.get("text", "") for part in parts)

    async def until(self, answer: str) -> None:
        changes = self.session.view.changes()
        while self.answer != answer:
            await anext(changes)

    async def ended(self) -> str:
        changes = self.session.view.changes()
        while self.run.status == "active":
            await anext(changes)
        return self.run.status


@asynccontextmanager
async def asked(temporal: str, model: agent.Model) -> AsyncIterator[Asked]:
    client = await Client.connect(temporal)
    channels = MemoryChannels()
    queue = f"agent-{uuid4()}"
    async with (
        make_worker(client, channels, model=model, task_queue=queue),
        ClientSession(await channels.open("conversations:1"), UIMessageCodec()) as session,
        asyncio.timeout(40),
    ):
        run = await session.view.send(session.codec.create_user_message("Why?"))
        workflow = await client.start_workflow(
            AnswerWorkflow.run, run.to_invocation(), id=f"turn-{uuid4()}", task_queue=queue
        )
        yield Asked(session, run, workflow)


async def test_an_answer(temporal: str) -> None:
    async with asked(temporal, functools.partial(slow_model, delay=0)) as one:
        assert await one.workflow.result() == "complete"
        assert await one.ended() == "complete"
        assert one.answer == "This is attempt 1 to answer 'Why?': a long sentence, one word at a time. "
        [run] = one.session.view.runs
        assert [step.step_id for step in run.steps] == [f"{one.workflow.id}-2"]  # the run was opened by activity 1


async def test_a_model_that_fails_is_tried_again(temporal: str) -> None:
    async def model(messages: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": f"attempt {activity.info().attempt}"}
        if activity.info().attempt == 1:
            raise ConnectionError
        yield {"type": "text-end", "id": "t"}

    async with asked(temporal, model) as one:
        assert await one.workflow.result() == "complete"
        assert await one.ended() == "complete"
        assert one.answer == "attempt 2"


async def test_one_that_fails_for_good_ends_the_run_with_an_error(temporal: str) -> None:
    async def model(messages: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-start", "id": "t"}
        raise ApplicationError("The model is not there any more.", non_retryable=True)

    async with asked(temporal, model) as one:
        with pytest.raises(WorkflowFailureError):
            await one.workflow.result()
        assert await one.ended() == "error"
        assert one.run.error is not None
        assert one.run.error.message == "The answer could not be finished."


async def test_a_workflow_that_is_cancelled_stops_its_answer(temporal: str) -> None:
    async def model(messages: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": "and so on"}
        await asyncio.Event().wait()

    async with asked(temporal, model) as one:
        await one.until("and so on")
        await one.workflow.cancel()
        with pytest.raises(WorkflowFailureError):
            await one.workflow.result()
        assert await one.ended() == "cancelled"


async def test_a_client_may_cancel(temporal: str) -> None:
    async def model(messages: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": "and so on"}
        await asyncio.Event().wait()

    async with asked(temporal, model) as one:
        await one.until("and so on")
        await one.run.cancel()
        assert await one.workflow.result() == "cancelled"
        assert await one.ended() == "cancelled"


async def test_an_attempt_that_was_taken_for_dead_spoils_nothing(
    temporal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to its end while the next attempt is still writing."""
    beat, over = agent.beat, asyncio.Event()
    zombie: list[asyncio.Task[Any] | None] = []

    async def silent() -> None:
        if activity.info().attempt > 1:
            await beat()

    async def model(messages: Any) -> AsyncIterator[dict[str, Any]]:
        first = activity.info().attempt == 1
        yield {"type": "text-start", "id": "t"}
        yield {"type": "text-delta", "id": "t", "delta": "one " if first else "two "}
        if first:
            zombie.append(asyncio.current_task())
            await over.wait()
        else:
            over.set()
            await asyncio.wait([task for task in zombie if task])
        yield {"type": "text-delta", "id": "t", "delta": "one" if first else "two"}
        yield {"type": "text-end", "id": "t"}

    monkeypatch.setattr(agent, "beat", silent)
    async with asked(temporal, model) as one:
        assert await one.workflow.result() == "complete"
        assert await one.ended() == "complete"
        assert one.answer == "two two"
        [run] = one.session.view.runs
        assert [(step.status, step.attempt_count) for step in run.steps] == [("complete", 2)]


async def test_the_command(temporal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'channels.db'}"
    options = ["--temporal", temporal, "--channels", url]
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "temporal_agent", *options, "worker", cwd=Path(__file__).parents[1]
    )
    try:
        async with asyncio.timeout(40):
            await command.ask(temporal, url, "Why?")
    finally:
        worker.kill()
        await worker.wait()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("complete: This is attempt 1")
    async with open_channels(url) as channels:
        assert (await (await channels.open("conversations:demo")).history(limit=1)).items
