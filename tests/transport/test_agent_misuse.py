"""Calls at the wrong time: docs/wire.md 3.6, row by row, with what we do better."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from agent_kit import Stage, held, reply, user
from stepwell.errors import InputEventNotFoundError, MisuseError, StepwellError
from stepwell.transport import AgentRun, AgentSession, Invocation

pytestmark = pytest.mark.anyio


class World:
    """A run in some state, for one row."""

    def __init__(self, stage: Stage, agent: AgentSession[Any, Any], asked: Any) -> None:
        self.stage = stage
        self.agent = agent
        self.asked = asked
        self.run: AgentRun[Any] = agent.create_run(asked.to_invocation(), run_id="run-m", invocation_id="inv-m")

    def adopt(self, run_id: str = "run-m", invocation_id: str = "inv-2") -> AgentRun[Any]:
        return self.agent.adopt_run(
            run_id=run_id, invocation_id=invocation_id, trigger_event_id=self.asked.input_event_id
        )


Row = Callable[[World], Awaitable[Any]]


async def before_start(world: World) -> None:
    pass


async def started(world: World) -> None:
    await world.run.start()


async def ended(world: World) -> None:
    await world.run.start()
    await world.run.end("complete")


async def suspended(world: World) -> None:
    await world.run.start()
    await world.run.suspend()


async def with_step(world: World, call: Callable[[World, Any], Awaitable[Any]]) -> None:
    step = world.run.create_step()
    await step.start()
    await call(world, step)


async def with_pipe(world: World, call: Callable[[World], Awaitable[Any]]) -> None:
    gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run.pipe, held([], gate))
        await world.stage.clock.settle()
        try:
            await call(world)
        finally:
            gate.set()


async def after_step(world: World, call: Callable[[Any], Awaitable[Any]]) -> None:
    async with world.run.create_step() as step:
        pass
    await call(step)


async def from_within(world: World) -> None:
    errors: list[Exception] = []

    async def source() -> AsyncIterator[Any]:
        try:
            await world.run.end("complete")
        except MisuseError as error:
            errors.append(error)
        yield reply([])[0]

    await world.run.pipe(source())
    raise errors[0]


async def pipe_runs(world: World) -> None:
    gate = anyio.Event()
    step = world.run.create_step()
    await step.start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step.pipe, held([], gate))
        await world.stage.clock.settle()
        try:
            await step.end()
        finally:
            gate.set()


ROWS: list[tuple[str, Any, Row]] = [
    ("run.pipe before start", before_start, lambda w: w.run.pipe(reply(["x"]))),
    ("run.end before start", before_start, lambda w: w.run.end("complete")),
    ("run.suspend before start", before_start, lambda w: w.run.suspend()),
    ("step.start before run.start", before_start, lambda w: w.run.create_step().start()),
    ("step.pipe before step.start", started, lambda w: w.run.create_step().pipe(reply(["x"]))),
    ("step.send before step.start", started, lambda w: w.run.create_step().send({"type": "data-a", "data": {}})),
    ("step.pipe after step.end", started, lambda w: after_step(w, lambda step: step.pipe(reply(["x"])))),
    ("step.send after step.end", started, lambda w: after_step(w, lambda step: step.send(reply([])[0]))),
    ("step.start while a step is active", started, lambda w: with_step(w, lambda w, _: w.run.create_step().start())),
    ("run.pipe while a step is active", started, lambda w: with_step(w, lambda w, _: w.run.pipe(reply(["x"])))),
    ("run.suspend while a step is active", started, lambda w: with_step(w, lambda w, _: w.run.suspend())),
    (
        "step.start while a run.pipe is in flight",
        started,
        lambda w: with_pipe(w, lambda w: w.run.create_step().start()),
    ),
    ("concurrent run.pipe", started, lambda w: with_pipe(w, lambda w: w.run.pipe(reply(["x"])))),
    ("run.suspend while a run.pipe is in flight", started, lambda w: with_pipe(w, lambda w: w.run.suspend())),
    ("run.pipe after end", ended, lambda w: w.run.pipe(reply(["x"]))),  # the reference lets it through until the echo
    ("run.pipe after suspend", suspended, lambda w: w.run.pipe(reply(["x"]))),
    ("step.start after end", ended, lambda w: w.run.create_step().start()),
    ("load of an ended run", ended, lambda w: w.adopt().load()),
    ("load of a suspended run", suspended, lambda w: w.adopt().load()),
    ("load of a run that was not adopted", before_start, lambda w: w.run.load()),
    ("start of an adopted run", started, lambda w: w.adopt().start()),
    ("end with an unknown reason", started, lambda w: w.run.end("done")),  # type: ignore[arg-type]
    ("end of a step with an unknown reason", started, lambda w: w.run.create_step().end("error")),  # type: ignore[arg-type]
    ("step.end while its pipe runs", started, pipe_runs),
    ("end from within the source", started, from_within),
]


@pytest.mark.parametrize(("prepare", "call"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_misuse_is_a_typed_error_with_the_code_of_the_wire(prepare: Any, call: Row) -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        world = World(stage, agent, await client.view.send(user("Misuse")))
        await prepare(world)
        with pytest.raises(MisuseError) as raised:
            await _unwrapped(call(world))
        assert raised.value.wire_code == 40003
        assert raised.value.status_code == 400
        assert ":" in raised.value.message, "it says what to do"


async def _unwrapped(call: Awaitable[Any]) -> None:
    """A group of the test's own tasks is not what is tested."""
    try:
        await call
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


NO_OPS: list[tuple[str, Any, Row]] = [
    ("second run.start", started, lambda w: w.run.start()),
    ("second run.end", ended, lambda w: w.run.end("complete")),
    ("run.end after suspend", suspended, lambda w: w.run.end("complete")),
    ("run.suspend after end", ended, lambda w: w.run.suspend()),
    ("second step.start", started, lambda w: with_step(w, lambda w, step: step.start())),
    ("second step.end", started, lambda w: after_step(w, lambda step: step.end())),
    ("step.end before step.start", started, lambda w: w.run.create_step("never-started").end()),
]


@pytest.mark.parametrize(("prepare", "call"), [row[1:] for row in NO_OPS], ids=[row[0] for row in NO_OPS])
async def test_these_do_nothing(prepare: Any, call: Row) -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        world = World(stage, agent, await client.view.send(user("Misuse")))
        await prepare(world)
        before = await stage.names()
        await call(world)
        added = [name for name in (await stage.names())[len(before) :] if not str(name).startswith("ai-step")]
        assert added == []


async def test_a_step_that_was_ended_before_it_began_never_begins() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        run = agent.create_run((await client.view.send(user("Hi"))).to_invocation(), invocation_id="inv")
        await run.start()
        step = run.create_step("draft")
        await step.end("failed")
        await step.start()
        assert run.create_step().step_id == "draft", "it was the last step, and it failed"
        await run.end("complete")
    assert "ai-step-start" not in await stage.names()


@pytest.mark.parametrize(
    ("reason", "step_reason"), [("complete", "complete"), ("cancelled", "cancelled"), ("error", "failed")]
)
async def test_the_end_of_a_run_closes_its_step_first(reason: Any, step_reason: str) -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        await run.create_step().start()
        await run.end(reason)
    names = await stage.names()
    assert names[-2:] == ["ai-step-end", "ai-run-end"]
    step_end = (await stage.history())[-2]
    assert step_end.extras is not None
    assert step_end.extras["ai"]["transport"]["step-reason"] == step_reason


async def test_a_run_that_somebody_else_ended_is_left_alone() -> None:
    """Two processes hold a run; one ends it. The other's end and suspend say nothing, its outputs are refused."""
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as one, await stage.agent() as other:
        asked = await client.view.send(user("Hi"))
        mine = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
        await mine.start()
        theirs = other.adopt_run(run_id="run-1", invocation_id="inv-2", trigger_event_id=asked.input_event_id)
        await theirs.load()
        await theirs.end("complete")
        await stage.clock.settle()
        for call in (mine.pipe(reply(["x"])), mine.create_step().start()):
            with pytest.raises(MisuseError):
                await call
        before = await stage.names()
        await mine.suspend()
        await mine.end("error")
        assert mine.status == "complete"
        assert await stage.names() == before


async def test_ids_are_not_empty() -> None:
    stage = Stage()
    async with await stage.agent() as agent:
        invocation = Invocation(input_event_id="e", session_name="c")
        for call in (
            lambda: agent.create_run(invocation, run_id=""),
            lambda: agent.create_run(invocation, invocation_id=""),
            lambda: agent.adopt_run(run_id="", invocation_id="i", trigger_event_id="e"),
            lambda: agent.adopt_run(run_id="r", invocation_id="", trigger_event_id="e"),
            lambda: agent.create_run(invocation).create_step(""),
        ):
            with pytest.raises(MisuseError):
                call()


async def test_a_session_that_was_not_entered_opens_nothing() -> None:
    stage = Stage()
    agent = await stage.agent()
    run = agent.create_run(Invocation(input_event_id="e", session_name="c"))
    with pytest.raises(MisuseError) as raised:
        await run.start()
    assert raised.value.wire_code == 40003
    with pytest.raises(MisuseError):
        await agent.adopt_run(run_id="r", invocation_id="i", trigger_event_id="e").load()


async def test_a_run_that_is_not_on_the_channel_is_said_to_be_missing_at_once() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        missing = agent.adopt_run(run_id="nope", invocation_id="i", trigger_event_id=asked.input_event_id)
        with pytest.raises(InputEventNotFoundError) as raised:
            await missing.load()
        assert (raised.value.wire_code, raised.value.status_code) == (104010, 504)


@pytest.mark.parametrize("verb", ["start", "load"])
async def test_a_trigger_that_does_not_turn_up_is_waited_for_no_longer_than_asked(verb: str) -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        await agent.create_run(asked.to_invocation(), run_id="run-1").start()
        run = (
            agent.create_run(Invocation(input_event_id="later", session_name="c"))
            if verb == "start"
            else agent.adopt_run(run_id="run-1", invocation_id="i", trigger_event_id="later")
        )
        errors: list[StepwellError] = []

        async def wait() -> None:
            try:
                await (run.start(timeout=7) if verb == "start" else run.load(timeout=7))
            except StepwellError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await stage.clock.advance(6.9)
            assert not errors
            await stage.clock.advance(0.2)
            assert isinstance(errors[0], InputEventNotFoundError)
        assert stage.clock.timers == 0
