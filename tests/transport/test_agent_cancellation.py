"""Cancelling the task that an agent runs in, at every one of its awaits; and cancelling a run from the channel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from agent_kit import Faulty, Stage, agent_on, ask, held, nothing, reply, slowly, stuck, texts, until, user
from stepwell.channels import MemoryChannels
from stepwell.errors import OperationCancelledError, SessionClosedError
from stepwell.testing import FakeClock
from stepwell.transport import AgentRun, AgentSession, Invocation
from stepwell.wire import Delivery, transport_headers

pytestmark = pytest.mark.anyio


class Agent:
    """Works on one run, cleans up when it is cancelled, and notes what was open when it was."""

    def __init__(self, session: AgentSession[Any, Any], invocation: Invocation) -> None:
        self.session = session
        self.run = session.create_run(invocation, run_id="run-1", invocation_id="inv-1")
        self.closed_sources = 0
        self.open_sources = 0

    async def source(self, pieces: list[str]) -> AsyncIterator[Any]:
        self.open_sources += 1
        try:
            async for output in slowly(reply(pieces)):
                yield output
        finally:
            self.closed_sources += 1

    async def work(self) -> None:
        await self.run.start()
        async with self.run.create_step() as step:
            await step.pipe(self.source(["one ", "two"]))
            await step.send({"type": "data-note", "data": {"n": 1}})
        async with self.run.create_step(lazy=True) as step:
            await step.pipe(self.source(["three"]))
        await self.run.pipe(self.source(["four"]))
        await self.run.end("complete")


def check_closed(items: list[Delivery]) -> None:
    """Every attempt that was begun is ended, every stream is closed, and nothing comes behind the run's end."""
    starts = {item.serial for item in items if item.name == "ai-step-start"}
    ends = [transport_headers(item.extras)["step-start-serial"] for item in items if item.name == "ai-step-end"]
    assert sorted(starts) == sorted(ends)
    streaming = [item for item in items if transport_headers(item.extras).get("status") == "streaming"]
    assert not streaming
    names = [item.name for item in items]
    assert names.count("ai-run-start") <= 1
    assert names.count("ai-run-end") <= 1
    if "ai-run-end" in names:
        assert names[-1] == "ai-run-end"


@pytest.mark.parametrize("roll_up", [0, 0.02])
@pytest.mark.parametrize("kind", ["task", "scope"])
async def test_cancelled_at_every_await_an_agent_leaves_nothing_open(kind: str, roll_up: float) -> None:
    finished = False
    turns = 0
    ended = 0
    while not finished:
        clock = FakeClock(auto_advance=True)
        channels = MemoryChannels(clock=FakeClock())
        invocation = await ask(channels, clock)
        channel = Faulty(await channels.open("conversations:faults"), nothing)
        scope = anyio.CancelScope()
        agents: list[Agent] = []
        outcome: list[BaseException | None] = []

        async def serve(
            channel: Any = channel,
            clock: FakeClock = clock,
            invocation: Invocation = invocation,
            scope: anyio.CancelScope = scope,
            agents: list[Agent] = agents,
            outcome: list[BaseException | None] = outcome,
        ) -> None:
            try:
                with scope:
                    async with agent_on(channel, clock, roll_up=roll_up) as session:
                        agents.append(Agent(session, invocation))
                        try:
                            await agents[0].work()
                        except BaseException as error:
                            outcome.append(error)  # noqa: B023
                            with anyio.CancelScope(shield=True):
                                await session.end()
                            raise
            except BaseException as error:
                outcome.append(error)  # noqa: B023
                raise

        task = asyncio.create_task(serve())
        for _ in range(turns):
            await asyncio.sleep(0)
        finished = task.done()
        if kind == "task":
            task.cancel()
        else:
            scope.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert all(isinstance(error, asyncio.CancelledError) for error in outcome), outcome
        items = list(reversed((await (await channels.open("conversations:faults")).history()).items))
        check_closed(items)
        names = [item.name for item in items]
        if agents:
            assert agents[0].open_sources == agents[0].closed_sources
            assert ("ai-run-start" in names) == ("ai-run-end" in names), "`session.end()` ended what was begun"
            ended += "ai-run-end" in names
        turns += 1
    assert turns > 100
    assert ended > 80


async def test_a_cancelled_task_waits_five_seconds_for_a_dead_channel_and_no_longer() -> None:
    clock = FakeClock()
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    dead = False
    channel = Faulty(await channels.open("conversations:faults"), lambda number, what: "refused" if dead else None)
    async with agent_on(channel, clock) as session:
        run = session.create_run(invocation)
        await run.start()

        async def work() -> None:
            async with run.create_step() as step:
                await step.pipe(stuck(reply(["one"])[:4]))

        task = asyncio.create_task(work())
        await until(lambda: channel.calls[-1] == "append")
        await clock.settle()
        dead = True
        task.cancel()
        await clock.advance(4.9)
        assert not task.done(), "it is still trying to close what is open"
        await clock.advance(0.2)
        assert task.cancelled()
        assert clock.timers == 0, "no timer is left behind"


# -- cancels from the channel


async def test_a_cancel_reaches_a_source_that_is_stuck_and_closes_it() -> None:
    stage = Stage()
    closed: list[str] = []

    async def source() -> AsyncIterator[Any]:
        try:
            for output in reply(["one"])[:4]:
                yield output
            await anyio.sleep_forever()
        finally:
            closed.append("closed")

    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_later, lambda: texts(client.view.messages)[-1] == "assistant:one", asked.cancel)
            async with run.create_step() as step:
                result = await step.pipe(source())
        assert result.reason == "cancelled"
        assert closed == ["closed"]
        assert not run.has_input()
        await run.end("cancelled")
    check_closed(await stage.history())


async def _later(condition: Any, call: Any) -> None:
    await until(condition)
    await call()


@pytest.mark.parametrize("raises", [False, True])
async def test_a_source_that_does_not_like_to_be_cancelled_is_left_all_the_same(raises: bool) -> None:
    """One takes the cancellation for a reason to give one more output, the other for one to fail."""
    stage = Stage()

    class Source:
        def __init__(self) -> None:
            self.given = iter(reply(["one"])[:4])

        def __aiter__(self) -> Source:
            return self

        async def __anext__(self) -> Any:
            for output in self.given:
                return output
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                if raises:
                    raise ValueError("connection closed") from None
            return {"type": "text-delta", "id": "t1", "delta": " and more"}

    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_later, lambda: texts(client.view.messages)[-1] == "assistant:one", asked.cancel)
            result = await run.pipe(Source())
        assert (result.reason, result.error) == ("cancelled", None)
        await run.end("cancelled")
        await until(lambda: asked.status == "cancelled")
        assert texts(client.view.messages)[-1] == "assistant:one"


async def test_a_source_that_never_waits_is_cancelled_too() -> None:
    stage = Stage()
    seen = 0

    def endless() -> Iterator[Any]:
        nonlocal seen
        yield from reply([])[:3]
        while True:
            seen += 1
            yield {"type": "text-delta", "id": "t1", "delta": "x"}

    async with await stage.client() as client, await stage.agent(roll_up=10.0) as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_later, lambda: seen > 0, asked.cancel)
            result = await run.pipe(endless())
        assert result.reason == "cancelled"
        assert seen < 1000
        await run.end("cancelled")
    check_closed(await stage.history())


async def test_a_cancel_while_a_publish_is_on_its_way_cuts_nothing() -> None:
    """The write that is under way is finished, and the stream that it opened is there for the last words."""
    stage = Stage()

    async def on_cancelled(write: Any) -> None:
        await write({"type": "text-delta", "id": "t1", "delta": "[stopped]"})

    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        channel = Faulty(await stage.channel("agent-1"), nothing)
        async with agent_on(channel, stage.clock) as agent:
            run = agent.create_run(asked.to_invocation(), on_cancelled=on_cancelled)
            await run.start()
            original = channel.publish

            async def publish(messages: Any, *, epoch: int | None = None) -> list[str]:
                if transport_headers(messages[0].extras).get("status") == "streaming":
                    run.cancel()
                return await original(messages, epoch=epoch)

            channel.publish = publish  # type: ignore[method-assign]
            result = await run.pipe(slowly(reply(["never"])))
            assert result.reason == "cancelled"
            assert run.cancel_reason == "caller"
            await run.end("cancelled")
    items = await stage.history()
    check_closed(items)
    assert [item.data for item in items if item.name == "ai-output"][-1] == "[stopped]"


@pytest.mark.parametrize("kind", ["task", "scope"])
async def test_text_that_came_while_an_append_was_on_its_way_is_not_lost_by_a_cancellation(kind: str) -> None:
    """An append that is cut cannot be told from one that was not sent: more text under its number would be dropped."""
    stage = Stage()
    gate, sent, second = anyio.Event(), anyio.Event(), anyio.Event()

    async def source() -> AsyncIterator[Any]:
        for output in reply(["a"])[:4]:
            yield output
        await sent.wait()
        yield {"type": "text-delta", "id": "t1", "delta": "b"}
        second.set()
        await anyio.sleep_forever()

    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        channel = await stage.channel("agent-1")
        original = channel.append

        async def append(*args: Any, **options: Any) -> str:
            version = await original(*args, **options)
            sent.set()
            await gate.wait()
            return version

        channel.append = append  # type: ignore[method-assign]
        async with agent_on(channel, stage.clock, roll_up=0.02) as agent:
            run = agent.create_run(asked.to_invocation())
            await run.start()
            scope = anyio.CancelScope()

            async def work() -> None:
                with scope:
                    await run.pipe(source())

            task = asyncio.create_task(work())
            await stage.clock.advance(0.03)
            await second.wait()
            (task if kind == "task" else scope).cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            assert not task.done()
            gate.set()
            await until(task.done)
            assert task.cancelled() or scope.cancelled_caught
            await run.end("cancelled")
    items = await stage.history()
    check_closed(items)
    assert "ab" in [item.data for item in items]


async def test_last_words_of_a_pipe_that_has_said_nothing_yet_are_in_a_step() -> None:
    """The reference publishes them without the serial of an attempt, so they could never be superseded."""
    stage = Stage()

    async def on_cancelled(write: Any) -> None:
        await write({"type": "data-note", "data": {"n": 1}})

    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation(), on_cancelled=on_cancelled)
        await run.start()
        run.cancel()
        assert (await run.pipe(reply(["never"]))).reason == "cancelled"
        await run.end("cancelled")
    items = await stage.history()
    check_closed(items)
    (output,) = [item for item in items if item.name == "ai-output"]
    assert transport_headers(output.extras)["step-start-serial"]


async def test_last_words_that_fail_are_the_pipes_error() -> None:
    stage = Stage()

    def on_cancelled(write: Any) -> None:
        raise ValueError("speechless")

    async with await stage.client() as client, await stage.agent(on_error=lambda error: None) as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation(), on_cancelled=on_cancelled)
        await run.start()
        run.cancel()
        result = await run.pipe(reply(["never"]))
        assert isinstance(result.error, ValueError)


@pytest.mark.parametrize("by", ["input", "run"])
async def test_a_cancel_that_came_while_nobody_listened_is_honoured_by_the_next_process(by: str) -> None:
    """An agent died; somebody cancelled; the next process finds the cancel in history."""
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        ids = {"run_id": "run-1", "invocation_id": "inv-1"}
        async with await stage.agent() as first:
            run = first.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()
            step = run.create_step("draft")
            await step.start()
        await (asked.cancel() if by == "input" else client.cancel("run-1"))
        async with await stage.agent() as second:
            adopted = second.adopt_run(**ids, trigger_event_id=asked.input_event_id)
            await adopted.load()
            assert adopted.cancelled.is_set()
            async with adopted.create_step("draft") as again:
                assert (await again.pipe(reply(["never"]))).reason == "cancelled"
            await adopted.end("cancelled")
        await until(lambda: asked.status == "cancelled")
        (info,) = client.tree.runs[0].steps
        assert (info.attempt_count, info.status) == (2, "cancelled")


async def test_a_cancel_goes_to_the_adopter_and_ends_its_step() -> None:
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        async with await stage.agent() as first:
            await first.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1").start()
        async with await stage.agent() as second:
            run = second.adopt_run(run_id="run-1", invocation_id="inv-1", trigger_event_id=asked.input_event_id)
            await run.load()
            step = run.create_step("draft")
            await step.start()
            await client.cancel("run-1")
            await run.cancelled.wait()
            await step.end()
            await second.end()
        await until(lambda: asked.status == "cancelled")
        assert [one.status for one in client.tree.runs[0].steps] == ["cancelled"]


async def test_a_cancel_of_the_invocation_before_does_not_stop_the_next() -> None:
    """It was for work that is over: the run was suspended, and somebody has answered since."""
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        async with await stage.agent() as first:
            run = first.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()
            await client.cancel("run-1")
            await run.cancelled.wait()
            await run.suspend()
        await until(lambda: asked.status == "suspended")
        answer = await client.view.send(user("Go on"), run_id="run-1")
        async with await stage.agent() as second:
            run2 = second.create_run(answer.to_invocation(), invocation_id="inv-2")
            await run2.start()
            assert not run2.cancelled.is_set()
            await second.detach()
        async with await stage.agent() as third:
            run3 = third.adopt_run(run_id="run-1", invocation_id="inv-2", trigger_event_id=answer.input_event_id)
            await run3.load()
            assert not run3.cancelled.is_set()


async def test_two_hundred_cancels_are_kept_and_the_oldest_goes() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = [await client.view.send(user(f"{n}")) for n in range(2)]
        await asked[0].cancel()
        await asked[1].cancel()
        for n in range(199):
            await client.publish_cancel(None, f"input-{n}")
        seen = [agent.create_run(one.to_invocation()) for one in asked]
        await until(lambda: len(agent._registry._kept._requests) == 200)
        for run in seen:
            await run.start()
        assert [run.cancelled.is_set() for run in seen] == [False, True]


async def test_a_run_cancelled_here_before_it_began_is_not_begun() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        run.cancel()
        with pytest.raises(OperationCancelledError) as raised:
            await run.start()
        assert raised.value.wire_code == 40033
        adopted = agent.adopt_run(run_id="r", invocation_id="i", trigger_event_id=asked.input_event_id)
        adopted.cancel()
        with pytest.raises(OperationCancelledError):
            await adopted.load()
    assert await stage.names() == ["ai-input"]


@pytest.mark.parametrize("how", ["cancel", "detach"])
async def test_waiting_for_a_trigger_ends_with_a_cancel_or_a_detach(how: str) -> None:
    stage = Stage()
    async with await stage.agent() as agent, anyio.create_task_group() as tasks:
        run = agent.create_run(Invocation(input_event_id="never", session_name="c"))
        errors: list[Exception] = []

        async def start() -> None:
            try:
                await run.start()
            except Exception as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        tasks.start_soon(start)
        await stage.clock.settle()
        if how == "cancel":
            run.cancel()
        else:
            await agent.detach()
        await until(lambda: bool(errors))
        assert isinstance(errors[0], OperationCancelledError if how == "cancel" else SessionClosedError)


# -- detach and end


@pytest.mark.parametrize("explicit", [False, True])
async def test_detaching_while_a_pipe_runs_publishes_nothing_and_raises_nothing(explicit: bool) -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        results: list[Any] = []

        async def work() -> None:
            if explicit:
                async with run.create_step() as step:
                    results.append(await step.pipe(stuck(reply(["one"])[:4])))
            else:
                results.append(await run.pipe(stuck(reply(["one"])[:4])))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await until(lambda: texts(client.view.messages)[-1] == "assistant:one")
            before = len(stage.record)
            await agent.detach()
        assert results[0].reason == "cancelled"
        assert len(stage.record) == before
        assert asked.status == "active"
        for call in (run.end("complete"), run.suspend(), run.pipe([]), run.start()):
            with pytest.raises(SessionClosedError) as raised:
                await call
            assert raised.value.wire_code == 104004
        with pytest.raises(SessionClosedError):
            agent.create_run(asked.to_invocation())
    with pytest.raises(SessionClosedError):
        await agent.__aenter__()


async def test_ending_a_session_stops_the_pipe_that_runs_and_ends_what_is_open() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        first, second, third = [await client.view.send(user(f"{n}")) for n in range(3)]
        run = agent.create_run(first.to_invocation())
        await run.start()
        over = agent.create_run(second.to_invocation())
        await over.start()
        await over.end("complete")
        agent.create_run(third.to_invocation())  # never opened: nothing of it is published
        results: list[Any] = []

        async def work() -> None:
            async with run.create_step() as step:
                results.append(await step.pipe(stuck(reply(["one"])[:4])))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await until(lambda: "ai-output" in [_name(one) for one in stage.record])
            await agent.end()
        assert results[0].reason == "cancelled"
        assert run.status == "cancelled"
        await until(lambda: first.status == "cancelled")
        assert (second.status, third.status) == ("complete", "active")
    items = await stage.history()
    check_closed([item for item in items if transport_headers(item.extras).get("run-id") == run.run_id])


def _name(operation: Any) -> str | None:
    return operation["messages"][0]["name"] if operation["op"] == "publish" else None


async def test_ending_a_run_from_another_task_stops_its_pipe_first() -> None:
    stage = Stage()
    gate = anyio.Event()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.pipe, held(reply(["one"])[:4], gate))
            await until(lambda: texts(client.view.messages)[-1] == "assistant:one")
            await run.end("complete")
        assert run.status == "complete"
    items = await stage.history()
    check_closed(items)
    names = [item.name for item in items if item.name != "ai-output"]
    assert names == ["ai-input", "ai-run-start", "ai-step-start", "ai-step-end", "ai-run-end"]


async def test_a_block_that_raises_ends_its_step_as_failed_and_raises_on() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is what is tested
            async with run.create_step() as step:
                await step.pipe(reply(["one"]))
                raise ZeroDivisionError
        await run.end("error", ZeroDivisionError("1/0 with a customer's name"))
        await until(lambda: asked.status == "error")
        assert [one.status for one in client.tree.runs[0].steps] == ["failed"]
        assert asked.error is not None
        assert "customer" not in asked.error.message


def test_the_types_are_what_they_say() -> None:
    assert AgentRun.cancelled is not None
