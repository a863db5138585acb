"""Runs framed by workflows, on a real server. Workflows are evicted and replayed after each of their tasks."""

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import CancelledError
from temporalio.testing import ActivityEnvironment
from temporalio.worker import Worker

from stepwell.channels import MemoryChannels
from stepwell.errors import InputEventNotFoundError, NotInActivityError
from stepwell.temporal import Framing, RunRef, step_id_for
from stepwell.transport import ClientRun, ClientSession, Invocation
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import H, Name, transport_headers
from temporal_kit import Framed

pytestmark = pytest.mark.anyio


class Stage:
    """A conversation, its client, and a worker with the activities of the test's own framing."""

    def __init__(self, client: Client) -> None:
        self.temporal = client
        self.channels = MemoryChannels()
        self.framing: Framing[Any, Any] = Framing(self.channels, UIMessageCodec(), client_id="agent")
        self.queue = f"framing-{uuid4()}"
        self.session: ClientSession[Any, Any]

    async def ask(self, **options: Any) -> ClientRun[Any, Any]:
        return await self.session.view.send(self.session.codec.create_user_message("hello"), **options)

    async def start(self, invocation: Invocation, how: str) -> WorkflowHandle[Any, str]:
        return await self.temporal.start_workflow(
            Framed.run, args=[invocation, how], id=f"turn-{uuid4()}", task_queue=self.queue
        )

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        @activity.defn(name="ends")
        async def ends(ref: RunRef) -> None:
            await self.framing.end_run(ref, "cancelled")

        async with (
            Worker(
                self.temporal,
                task_queue=self.queue,
                workflows=[Framed],
                activities=[*self.framing.activities, ends],
                max_cached_workflows=0,
                max_concurrent_workflow_tasks=2,
            ),
            asyncio.timeout(30),
        ):
            yield

    async def log(self) -> list[tuple[str | None, str | None]]:
        """Names of messages, with the reason of an end."""
        channel = await self.channels.open("conversations:1")
        page = await channel.history(limit=1000)
        return [(one.name, transport_headers(one.extras).get(H.RUN_REASON)) for one in reversed(page.items)]


@pytest.fixture
async def stage(temporal_address: str) -> AsyncIterator[Stage]:
    stage = Stage(await Client.connect(temporal_address))
    channel = await stage.channels.open("conversations:1")
    async with ClientSession(channel, UIMessageCodec(), client_id="ana") as stage.session:
        yield stage


async def until(session: ClientSession[Any, Any], true: Callable[[], bool]) -> None:
    changes = session.view.changes()
    while not true():
        await anext(changes)


async def cancelled(workflow: WorkflowHandle[Any, Any]) -> None:
    """Cancel it, and wait until it has been told so."""
    await workflow.cancel()
    told = False
    async for event in workflow.fetch_history_events(wait_new_event=True):
        told = told or event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED
        if told and event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED:
            return


# -- ways to leave a run

ASKED = [(Name.INPUT, None), (Name.RUN_START, None)]


@pytest.mark.parametrize(
    ("how", "rest"),
    [
        ("leave", [(Name.RUN_END, "complete")]),
        ("end", [(Name.RUN_END, "error")]),
        ("suspend", [(Name.RUN_SUSPEND, None)]),
        ("activity ends", [(Name.RUN_END, "cancelled")]),
        ("continue as new", [(Name.RUN_END, "complete")]),
    ],
)
async def test_a_run_is_closed_once(stage: Stage, how: str, rest: list[Any]) -> None:
    asked = await stage.ask()
    async with stage.working():
        workflow = await stage.start(asked.to_invocation(), how)
        assert await workflow.result() == workflow.id  # the run's id is the workflow's
        assert await stage.log() == [*ASKED, *rest]
        await until(stage.session, lambda: asked.run_id == workflow.id and asked.status != "active")
        assert (asked.error.message if asked.error else None) == ("No rooms left." if how == "end" else None)


async def test_a_workflow_that_fails_ends_its_run_with_an_error(stage: Stage) -> None:
    asked = await stage.ask()
    async with stage.working():
        workflow = await stage.start(asked.to_invocation(), "raise")
        with pytest.raises(WorkflowFailureError) as failure:
            await workflow.result()
        assert failure.value.cause.message == "A secret."  # the workflow's own failure, not one of the clean-up
        assert await stage.log() == [*ASKED, (Name.RUN_END, "error")]
        await until(stage.session, lambda: asked.status != "active")
        assert asked.error is not None
        assert (asked.error.code, asked.error.message) == (104008, "The answer could not be finished.")


async def test_a_workflow_that_is_cancelled_ends_its_run_as_cancelled(stage: Stage) -> None:
    asked = await stage.ask()
    async with stage.working():
        workflow = await stage.start(asked.to_invocation(), "wait")
        await asked.started
        await workflow.cancel()
        with pytest.raises(WorkflowFailureError) as failure:
            await workflow.result()
        assert isinstance(failure.value.cause, CancelledError)
        assert await stage.log() == [*ASKED, (Name.RUN_END, "cancelled")]


async def test_an_input_that_continues_a_run_does_so_under_the_run_s_id(stage: Stage) -> None:
    first = await stage.ask()
    async with stage.working():
        run_id = await (await stage.start(first.to_invocation(), "suspend")).result()
        await until(stage.session, lambda: first.status == "suspended")
        again = await stage.ask(run_id=run_id)
        workflow = await stage.start(again.to_invocation(), "leave")
        assert await workflow.result() == run_id != workflow.id
        assert (await stage.log())[3:] == [(Name.INPUT, None), (Name.RUN_RESUME, None), (Name.RUN_END, "complete")]


# -- cancelled at a bad moment


class Slow(Framing[Any, Any]):
    """Tells that it has done something, and waits before it answers."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.channels, UIMessageCodec())
        self.done = asyncio.Event()
        self.answer = asyncio.Event()

    async def _hold(self) -> None:
        self.done.set()
        await self.answer.wait()


class SlowToOpen(Slow):
    @activity.defn(name="stepwell.open_run")
    async def open_run(self, invocation: Invocation, invocation_id: str) -> RunRef:
        ref = await super().open_run(invocation, invocation_id)
        await self._hold()
        return ref


class SlowToClean(Slow):
    @activity.defn(name="stepwell.cleanup_run")
    async def cleanup_run(self, ref: RunRef, reason: Any) -> None:
        await self._hold()
        await super().cleanup_run(ref, reason)


async def test_cancelled_while_it_is_opened_a_run_is_ended(stage: Stage) -> None:
    suspended = await stage.ask()
    async with stage.working():
        run_id = await (await stage.start(suspended.to_invocation(), "suspend")).result()
    await until(stage.session, lambda: suspended.status == "suspended")
    again = await stage.ask(run_id=run_id)  # only the opener's answer says which run it is
    stage.framing = framing = SlowToOpen(stage)
    async with stage.working():
        workflow = await stage.start(again.to_invocation(), "leave")
        await framing.done.wait()
        await cancelled(workflow)
        assert (await workflow.describe()).status == WorkflowExecutionStatus.RUNNING
        framing.answer.set()
        with pytest.raises(WorkflowFailureError) as failure:
            await workflow.result()
        assert isinstance(failure.value.cause, CancelledError)
        assert (await stage.log())[4:] == [(Name.RUN_RESUME, None), (Name.RUN_END, "cancelled")]


async def test_cancelled_while_it_is_cleaned_up_a_workflow_waits_for_it(stage: Stage) -> None:
    asked = await stage.ask()
    stage.framing = framing = SlowToClean(stage)
    async with stage.working():
        workflow = await stage.start(asked.to_invocation(), "raise")
        await framing.done.wait()
        await cancelled(workflow)
        assert (await workflow.describe()).status == WorkflowExecutionStatus.RUNNING
        framing.answer.set()
        with pytest.raises(WorkflowFailureError):
            await workflow.result()
        assert await stage.log() == [*ASKED, (Name.RUN_END, "error")]


# -- activities that are retried


class AnswersLost(Framing[Any, Any]):
    """Each activity does what it has to, and fails then: in its first attempt, or always."""

    def __init__(self, stage: Stage, always: str = "") -> None:
        super().__init__(stage.channels, UIMessageCodec())
        self.always = always
        self.calls: list[str] = []

    def _lose(self, name: str) -> None:
        self.calls.append(name)
        if activity.info().attempt == 1 or name == self.always:
            raise ConnectionError("The answer is lost.")

    @activity.defn(name="stepwell.open_run")
    async def open_run(self, invocation: Invocation, invocation_id: str) -> RunRef:
        ref = await super().open_run(invocation, invocation_id)
        self._lose("open")
        return ref

    @activity.defn(name="stepwell.end_run")
    async def end_run(self, ref: RunRef, reason: Any, message: str | None = None) -> None:
        await super().end_run(ref, reason, message)
        self._lose("end")

    @activity.defn(name="stepwell.suspend_run")
    async def suspend_run(self, ref: RunRef) -> None:
        await super().suspend_run(ref)
        self._lose("suspend")

    @activity.defn(name="stepwell.cleanup_run")
    async def cleanup_run(self, ref: RunRef, reason: Any) -> None:
        await super().cleanup_run(ref, reason)
        self._lose("cleanup")


@pytest.mark.parametrize(
    ("how", "calls", "rest"),
    [
        ("leave", ["open", "open", "end", "end"], [(Name.RUN_END, "complete")]),
        ("suspend", ["open", "open", "suspend", "suspend"], [(Name.RUN_SUSPEND, None)]),
    ],
)
async def test_a_retried_opener_re_enters_the_run(stage: Stage, how: str, calls: list[str], rest: list[Any]) -> None:
    """And whoever closes it again closes nothing."""
    asked = await stage.ask()
    stage.framing = framing = AnswersLost(stage)
    async with stage.working():
        workflow = await stage.start(asked.to_invocation(), how)
        assert await workflow.result() == workflow.id
        assert framing.calls == calls
        assert await stage.log() == [*ASKED, *rest]


@pytest.mark.parametrize(
    ("always", "calls", "reason"),
    [
        ("open", ["open", "open", "cleanup", "cleanup"], "error"),  # opened, though nobody knows
        ("cleanup", ["open", "open", "cleanup", "cleanup"], "error"),
        ("end", ["open", "open", "end", "end"], "complete"),
    ],
)
async def test_an_activity_that_never_answers(stage: Stage, always: str, calls: list[str], reason: str) -> None:
    """The workflow fails with what failed first, and the run is over all the same."""
    asked = await stage.ask()
    stage.framing = framing = AnswersLost(stage, always)
    async with stage.working():
        workflow = await stage.start(asked.to_invocation(), "raise" if always == "cleanup" else "leave")
        with pytest.raises(WorkflowFailureError) as failure:
            await workflow.result()
        cause = failure.value.cause if always == "cleanup" else failure.value.cause.cause
        assert cause.message == ("A secret." if always == "cleanup" else "The answer is lost.")
        assert framing.calls == calls
        assert await stage.log() == [*ASKED, (Name.RUN_END, reason)]


async def test_a_run_that_was_never_opened_is_cleaned_up_by_nothing(stage: Stage) -> None:
    asked = await stage.ask()
    ref = RunRef(session_name="conversations:1", run_id="r", invocation_id="r", trigger_event_id=asked.input_event_id)
    await stage.framing.cleanup_run(ref, "error")
    assert await stage.log() == [(Name.INPUT, None)]
    with pytest.raises(InputEventNotFoundError):
        await stage.framing.end_run(ref, "complete")


# -- step ids


async def test_the_step_id_is_the_same_in_every_attempt_of_an_activity() -> None:
    async def step_id() -> str:
        return step_id_for("turn-7")

    ids: dict[tuple[str, int], str] = {}
    for activity_id, attempt in (("1", 1), ("1", 2), ("2", 1)):
        environment = ActivityEnvironment()
        environment.info = dataclasses.replace(environment.info, activity_id=activity_id, attempt=attempt)
        ids[activity_id, attempt] = await environment.run(step_id)
    assert ids == {("1", 1): "turn-7-1", ("1", 2): "turn-7-1", ("2", 1): "turn-7-2"}


def test_there_is_no_step_id_outside_an_activity() -> None:
    with pytest.raises(NotInActivityError, match="in the activity") as error:
        step_id_for("turn-7")
    assert (error.value.code, error.value.ids) == ("not_in_activity", {"invocation_id": "turn-7"})


def test_without_temporalio_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[:2] == ["stepwell", "temporal"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "temporalio", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'stepwell\[temporal\]'"):
        __import__("stepwell.temporal")
