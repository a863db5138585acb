"""Lost requests and lost acknowledgements, at every operation of a run: what is on the channel is what it would be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from agent_kit import CODEC, Faulty, Stage, agent_on, ask, failing, nothing, renamed, reply, slowly, texts, until, user
from stepwell.channels import MemoryChannels
from stepwell.errors import ChannelBusyError, ChannelError, EncoderRecoveryError, RunLifecycleError
from stepwell.testing import FakeClock
from stepwell.transport import AgentSession, ClientSession, Invocation
from stepwell.wire import Delivery

pytestmark = pytest.mark.anyio


def at(place: int, fault: str) -> Callable[[int, str], str | None]:
    return lambda number, what: fault if number == place else None


async def turn(session: AgentSession[Any, Any], invocation: Invocation) -> None:
    """A run with every kind of step and output."""
    run = session.create_run(invocation, run_id="run-1", invocation_id="inv-1")
    await run.start()
    async with run.create_step() as step:
        await step.send({"type": "data-note", "data": {"n": 1}}, message_id="m-0")
        result = await step.pipe(slowly(reply(["one ", "two ", "three"])), message_id="m-1")
        assert result.reason == "complete"
    async with run.create_step(lazy=True) as step:
        await step.pipe(slowly(reply(["four ", "five"])[2:]), message_id="m-1")
    assert (await run.pipe(slowly(reply(["six"])), message_id="m-2")).reason == "complete"
    await run.end("complete")


async def outcome(channels: MemoryChannels, clock: FakeClock) -> tuple[Any, Any]:
    """History, up to serials, and what a client shows that reads it."""
    channel = await channels.open("conversations:faults")
    items: list[Delivery] = list(reversed((await channel.history(limit=1000)).items))
    record = [
        {
            "op": item.action,
            "by": item.client_id,
            "message": {"serial": item.serial, "name": item.name, "data": item.data, "extras": item.extras},
        }
        for item in items
    ]
    async with ClientSession(channel, CODEC, clock=clock) as client:
        await client.view.load_older(50)
        return renamed(record), (texts(client.view.messages), client.tree.runs)


async def disturbed(plan: Callable[[int, str], str | None], *, roll_up: float = 0) -> tuple[Any, Any, list[str]]:
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    faulty = Faulty(await channels.open("conversations:faults"), plan)
    async with agent_on(faulty, clock, roll_up=roll_up, epoch=1) as session:
        await turn(session, invocation)
    return *(await outcome(channels, clock)), faulty.calls


@pytest.mark.parametrize("roll_up", [0, 0.02])
@pytest.mark.parametrize("fault", ["lost", "refused"])
async def test_a_fault_at_any_operation_leaves_no_trace(fault: str, roll_up: float) -> None:
    history, view, calls = await disturbed(nothing, roll_up=roll_up)
    assert view[0] == ["user:Count", "assistant:", "assistant:one two three|four five", "assistant:six"]
    assert len(calls) > 15
    for place, what in enumerate(calls):
        again, view_again, calls_again = await disturbed(at(place, fault), roll_up=roll_up)
        assert again == history, (place, what)
        assert view_again == view, (place, what)
        assert len(calls_again) >= len(calls)


async def test_every_operation_may_lose_its_answer_once() -> None:
    history, view, _ = await disturbed(nothing)
    again, view_again, _ = await disturbed(lambda number, what: "lost" if number % 2 == 0 else None)
    assert again == history
    assert view_again == view


async def test_a_channel_that_is_away_for_a_while_costs_only_time() -> None:
    history, view, calls = await disturbed(nothing)
    for place in range(0, len(calls), 3):
        away = range(place, place + 6)
        if any(one == "history" for one in calls[place : place + 1]):
            continue  # a page of history is given up after four attempts, as documented
        again, view_again, _ = await disturbed(lambda number, what, away=away: "refused" if number in away else None)
        assert again == history, place
        assert view_again == view


@pytest.mark.parametrize("fault", ["lost", "refused"])
@pytest.mark.parametrize("name", ["ai-run-start", "ai-run-suspend", "ai-run-end"])
async def test_a_lifecycle_message_that_failed_is_published_by_calling_again(name: str, fault: str) -> None:
    """More failures than the writer's patience: the caller is told, and calls again on the same object."""
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    failing = True
    faulty = Faulty(
        await channels.open("conversations:faults"),
        lambda number, what: fault if failing and what == f"publish {name}" else None,
    )
    async with agent_on(faulty, clock) as session:
        run = session.create_run(invocation, run_id="run-1", invocation_id="inv-1")

        async def certainly(call: Callable[[], Awaitable[None]], own: str) -> None:
            nonlocal failing
            if own == name:
                with pytest.raises(RunLifecycleError) as raised:
                    await call()
                assert raised.value.wire_code == 104003
                assert isinstance(raised.value.__cause__, ChannelBusyError)
                failing = False
            await call()
            await call()

        await certainly(run.start, "ai-run-start")
        if name == "ai-run-suspend":
            await certainly(run.suspend, "ai-run-suspend")
        else:
            await certainly(lambda: run.end("complete"), "ai-run-end")
    history, _ = await outcome(channels, clock)
    names = [one["messages"][0]["name"] for one in history]
    assert names == ["ai-input", "ai-run-start", "ai-run-suspend" if name == "ai-run-suspend" else "ai-run-end"]


async def test_the_writer_is_patient_for_thirty_seconds_and_not_longer() -> None:
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    faulty = Faulty(
        await channels.open("conversations:faults"),
        lambda number, what: "refused" if what == "publish ai-run-start" else None,
    )
    async with agent_on(faulty, clock) as session:
        begun = clock.monotonic()
        with pytest.raises(RunLifecycleError):
            await session.create_run(invocation).start()
        assert 30 <= clock.monotonic() - begun <= 33
    assert clock.slept[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


async def test_a_step_start_that_failed_is_the_same_attempt_when_called_again() -> None:
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    failing = True
    faulty = Faulty(
        await channels.open("conversations:faults"),
        lambda number, what: "lost" if failing and what == "publish ai-step-start" else None,
    )
    async with agent_on(faulty, clock) as session:
        run = session.create_run(invocation, run_id="run-1", invocation_id="inv-1")
        await run.start()
        step = run.create_step("draft")
        with pytest.raises(ChannelBusyError):  # raw: it is not a message of the run
            await step.start()
        failing = False
        await step.start()
        await step.end()
        other = run.create_step("draft")
        await other.start()
        await other.end()
        await run.end("complete")
    _, (_, runs) = await outcome(channels, clock)
    (info,) = runs[0].steps
    assert (info.step_id, info.attempt_count) == ("draft", 2), "a lost answer makes no attempt, another object does"


async def test_an_end_of_a_step_that_failed_is_published_by_calling_again() -> None:
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    failing = True
    faulty = Faulty(
        await channels.open("conversations:faults"),
        lambda number, what: "refused" if failing and what == "publish ai-step-end" else None,
    )
    async with agent_on(faulty, clock) as session:
        run = session.create_run(invocation, run_id="run-1", invocation_id="inv-1")
        await run.start()
        step = run.create_step()
        await step.start()
        with pytest.raises(ChannelBusyError):
            await step.end()
        failing = False
        await step.end()
        await run.end("complete")
    history, _ = await outcome(channels, clock)
    names = [one["messages"][0]["name"] for one in history]
    assert names == ["ai-input", "ai-run-start", "ai-step-start", "ai-step-end", "ai-run-end"]


async def test_the_end_of_a_run_does_not_wait_for_its_step() -> None:
    """The step's end cannot be published; the run's can. The run's is what counts."""
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    errors: list[Any] = []
    faulty = Faulty(
        await channels.open("conversations:faults"),
        lambda number, what: "broken" if what == "publish ai-step-end" else None,
    )
    async with agent_on(faulty, clock) as session:
        run = session.create_run(invocation, on_error=errors.append)
        await run.start()
        await run.create_step().start()
        await run.end("error")
        assert run.status == "error"
        second = session.create_run(invocation, on_error=errors.append)
        await second.start()
        result = await second.pipe(reply(["shown"]))
        assert result.reason == "complete", "only told, as nothing is wrong with the output"
        await second.end("complete")
    assert [type(error) for error in errors] == [ChannelError, ChannelError]


@pytest.mark.parametrize("what", ["publish ai-output", "append"])
async def test_a_channel_that_breaks_fails_the_pipe_not_the_caller(what: str) -> None:
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    errors: list[Any] = []
    closed: list[bool] = []

    async def source() -> AsyncIterator[Any]:
        try:
            for output in reply(["one", "two"]):
                yield output
        finally:
            closed.append(True)

    broken = ("append", "update") if what == "append" else (what,)
    faulty = Faulty(
        await channels.open("conversations:faults"), lambda number, call: "broken" if call in broken else None
    )
    async with agent_on(faulty, clock) as session:
        run = session.create_run(invocation, on_error=errors.append)
        await run.start()
        result = await run.pipe(source())
        assert result.reason == "error"
        assert isinstance(result.error, EncoderRecoveryError if what == "append" else ChannelError)
        assert closed == [True]
        assert [error.wire_code for error in errors] == [104008]
        await run.end("error", result.error)
    _, (_, runs) = await outcome(channels, clock)
    assert runs[0].status == "error"
    assert [step.status for step in runs[0].steps] == ["failed"]
    assert runs[0].error.code == (104000 if what == "append" else 50000)


async def test_a_failed_flush_ends_a_source_that_waits() -> None:
    """Kept text is appended beside the source. When that fails for good, a source that is silent must not hide it."""
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    faulty = Faulty(
        await channels.open("conversations:faults"),
        lambda number, call: "broken" if call in ("append", "update") else None,
    )

    async def source() -> AsyncIterator[Any]:
        for output in reply(["kept"])[:4]:
            yield output
        await anyio.sleep_forever()

    async with agent_on(faulty, clock, roll_up=0.02) as session:
        run = session.create_run(invocation)
        await run.start()
        result = await run.pipe(source())
        assert isinstance(result.error, EncoderRecoveryError)
        await run.end("error")


async def test_two_pipes_may_write_one_message() -> None:
    """An engine's run is one message; its pipes must not take each other's outputs for repetitions."""
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        async with run.create_step() as step:
            await step.pipe(reply(["one "]), message_id="m-1")
            await step.pipe(reply(["two "], stream_id="t2"), message_id="m-1")
        await run.pipe(reply(["three"], stream_id="t3"), message_id="m-1")
        await run.end("complete")
        await until(lambda: asked.status == "complete")
        assert texts(client.view.messages) == ["user:Hi", "assistant:one |two |three"]


async def test_a_stream_that_its_source_forgot_to_end_is_closed() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        assert (await run.pipe(reply(["one"])[:4])).reason == "complete"
        await run.end("complete")
    (text,) = [item for item in await stage.history() if item.data == "one"]
    assert text.extras is not None
    assert text.extras["ai"]["transport"]["status"] == "cancelled"


async def test_a_pipe_that_wrote_nothing_is_no_step_to_be_tried_again() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent(on_error=lambda error: None) as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation(), invocation_id="inv")
        await run.start()
        assert (await run.pipe(failing([]))).reason == "error"
        assert run.create_step().step_id == "inv-step-1"
        assert (await run.pipe(failing(reply(["x"])))).reason == "error"
        assert run.create_step().step_id == "inv-step-2", "this one wrote something, failed, and is tried again"
    assert (await stage.names()).count("ai-step-start") == 1


async def test_a_session_ends_the_runs_that_it_can_and_says_that_it_could_not_end_all() -> None:
    clock = FakeClock(auto_advance=True)
    channels = MemoryChannels(clock=FakeClock())
    invocation = await ask(channels, clock)
    ends = 0

    def plan(number: int, what: str) -> str | None:
        nonlocal ends
        ends += what == "publish ai-run-end"
        return "broken" if what == "publish ai-run-end" and ends == 1 else None

    async with agent_on(Faulty(await channels.open("conversations:faults"), plan), clock) as session:
        runs = [session.create_run(invocation, run_id=f"run-{n}") for n in range(3)]
        for run in runs:
            await run.start()
        with pytest.raises(RunLifecycleError):
            await session.end()
        assert session.closed
    _, (_, infos) = await outcome(channels, clock)
    assert [info.status for info in infos] == ["active", "cancelled", "cancelled"]


class Interrupt(BaseException):
    """What is no `Exception`: an interpreter that is told to stop."""


async def test_what_is_no_exception_comes_out_of_a_pipe_as_it_is() -> None:
    stage = Stage()

    async def source() -> AsyncIterator[Any]:
        yield reply([])[0]
        raise Interrupt

    async with await stage.client() as client, await stage.agent() as agent:
        run = agent.create_run((await client.view.send(user("Hi"))).to_invocation())
        await run.start()
        with pytest.raises(Interrupt):
            await run.pipe(source())
        await run.end("error")
    assert [name for name in await stage.names() if str(name).startswith("ai-step")] == ["ai-step-start", "ai-step-end"]


async def test_how_a_source_is_closed_is_its_own_matter() -> None:
    stage = Stage()

    class Source:
        def __init__(self) -> None:
            self.closed = 0

        def __iter__(self) -> Source:
            return self

        def __next__(self) -> Any:
            raise StopIteration

        def close(self) -> None:
            self.closed += 1
            raise ValueError("already gone")

    source = Source()
    async with await stage.client() as client, await stage.agent() as agent:
        run = agent.create_run((await client.view.send(user("Hi"))).to_invocation())
        await run.start()
        assert (await run.pipe(source)).reason == "complete"
        assert source.closed == 1
        not_iterable: Any = 7
        assert isinstance((await run.pipe(not_iterable)).error, TypeError)
        await run.end("complete")
