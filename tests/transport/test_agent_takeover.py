"""Two processes and one run: adoption, superseded attempts, fences, gaps, what history tells."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agent_kit import Stage, agent_on, failing, held, reply, stuck, texts, until, user
from stepwell.channels import MemoryChannels
from stepwell.errors import ContinuityLostError, FencedError
from stepwell.testing import FakeClock
from stepwell.transport import AgentRun, Invocation
from stepwell.wire import WireMessage

pytestmark = pytest.mark.anyio


def reasoning(pieces: list[str], text: list[str], *, end: bool = True) -> list[dict[str, Any]]:
    thought = [{"type": "reasoning-delta", "id": "r1", "delta": piece} for piece in pieces]
    begun: list[dict[str, Any]] = [
        {"type": "start", "messageId": "msg-1"},
        {"type": "start-step"},
        {"type": "reasoning-start", "id": "r1"},
        *thought,
    ]
    return [*begun, {"type": "reasoning-end", "id": "r1"}, *reply(text)[2:]] if end else begun


async def shown(stage: Stage) -> list[Any]:
    """What somebody sees who comes now."""
    async with await stage.client("late") as late:
        await late.view.load_older(50)
        return [one.message["parts"] for one in late.view.messages]


async def two_attempts(stage: Stage, first: Any, second: Any, message_id: str | None = None) -> list[Any]:
    """The first attempt's process dies without a word, the second's begins under the same step id.

    Returns:
        What is shown to somebody who was there, and to those who came between and after.
    """
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        ids = {"run_id": "run-1", "invocation_id": "inv-1"}
        async with await stage.agent("a") as one:
            run = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()
            step = run.create_step("draft")
            await step.start()
            await step.pipe(first, message_id=message_id)
        async with await stage.client("between") as between:
            await between.view.load_older(50)
            async with await stage.agent("b") as other:
                run = other.adopt_run(**ids, trigger_event_id=asked.input_event_id)
                await run.load()
                async with run.create_step("draft") as again:
                    await again.pipe(second, message_id=message_id)
                await run.end("complete")
            await until(lambda: asked.status == "complete")
            views = [[one.message["parts"] for one in each.view.messages] for each in (client, between)]
    return [*views, await shown(stage)]


@pytest.mark.parametrize("message_id", [None, "m-1"])
async def test_scenario_C01_a_retry_supersedes_partial_text(message_id: str | None) -> None:  # noqa: N802
    stage = Stage()
    views = await two_attempts(stage, failing(reply(["Hel", "lo"])[:5]), reply(["Hi"]), message_id)
    for view in views:
        assert [part["text"] for part in view[1] if part["type"] == "text"] == ["Hi"]
        assert len(view) == 2
    data = [item.data for item in await stage.history()]
    assert "Hello" in data, "the raw log has both"
    assert "Hi" in data


async def test_scenario_C02_reasoning_is_reset_too() -> None:  # noqa: N802
    stage = Stage()
    dying = failing(reasoning(["I should", " say "], [], end=False))
    views = await two_attempts(stage, dying, reasoning(["Greet."], ["Hi"]))
    for view in views:
        assert [(part["type"], part.get("text")) for part in view[1]] == [
            ("step-start", None),
            ("reasoning", "Greet."),
            ("text", "Hi"),
        ]


async def test_scenario_C05_a_retry_that_fails_for_good_leaves_the_terminal_reply() -> None:  # noqa: N802
    stage = Stage()
    async with await stage.client() as client, await stage.agent(on_error=lambda error: None) as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation(), on_error=lambda error: None)
        await run.start()
        async with run.create_step() as one:
            await one.pipe(failing(reply(["Your booking is"])[:4]))
        async with run.create_step() as two:
            await two.pipe(failing([]))
        async with run.create_step() as last:
            await last.pipe(reply(["Sorry, that did not work."]))
        assert one.step_id == two.step_id == last.step_id
        await run.end("complete")
        await until(lambda: asked.status == "complete")
        assert texts(client.view.messages) == ["user:Hi", "assistant:Sorry, that did not work."]
    assert [len(view) for view in [await shown(stage)]] == [2]


async def test_scenario_C06_a_zombie_is_fenced_and_nothing_of_it_reaches_a_reader() -> None:  # noqa: N802
    stage = Stage()
    gate = anyio.Event()
    raised: list[BaseException] = []
    zombie_words = [
        *({"type": "text-delta", "id": "t1", "delta": f" zombie {n}"} for n in range(3)),
        {"type": "text-end", "id": "t1"},
    ]
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        ids = {"run_id": "run-1", "invocation_id": "inv-1"}
        async with await stage.agent("a", epoch=1) as one:
            run = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()

            async def first() -> None:
                try:
                    async with run.create_step("draft") as step:
                        await step.pipe(held(reply(["Old"])[:4], gate, zombie_words))
                except FencedError as error:
                    raised.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await until(lambda: texts(client.view.messages)[-1] == "assistant:Old")
                async with await stage.agent("b", epoch=2) as other:
                    adopted = other.adopt_run(**ids, trigger_event_id=asked.input_event_id)
                    await adopted.load()
                    taken_over = len(await stage.history())
                    async with adopted.create_step("draft") as again:
                        gate.set()
                        await until(lambda: bool(raised))
                        await again.pipe(reply(["New"]))
                    await adopted.end("complete")
                await until(lambda: asked.status == "complete")
            assert isinstance(raised[0], FencedError)
            assert (raised[0].epoch, raised[0].fence) == (1, 2)
            assert run.cancelled.is_set()
            assert run.cancel_reason == "fenced"
            for call in (run.end("complete"), run.pipe(reply(["more"])), run.suspend()):
                with pytest.raises(FencedError):
                    await call
            with pytest.raises(FencedError):
                one.create_run(asked.to_invocation())
            before = len(stage.record)
            await one.end()  # there is nothing left to say
            assert len(stage.record) == before
        assert texts(client.view.messages) == ["user:Hi", "assistant:New"]
    items = await stage.history()
    assert not any("zombie" in str(item.data) for item in items)
    assert all(item.client_id != "a" for item in items[taken_over:])


async def test_one_fenced_write_stops_every_run_of_the_session() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent("a", epoch=1) as agent:
        asked = [await client.view.send(user(f"{n}")) for n in range(2)]
        one, other = [agent.create_run(each.to_invocation()) for each in asked]
        await one.start()
        await other.start()
        raised: list[BaseException] = []

        async def work() -> None:
            try:
                await other.pipe(stuck(reply(["Old"])[:4]))
            except FencedError as error:
                raised.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await until(lambda: "assistant:Old" in texts(client.view.messages))
            await (await stage.channel()).raise_fence(2)
            with pytest.raises(FencedError):
                await one.end("complete")
        assert len(raised) == 1, "the stuck one was told too"


async def test_the_fence_is_raised_before_anything_is_read() -> None:
    stage = Stage()
    await (await stage.channel()).raise_fence(5)
    with pytest.raises(FencedError):
        async with await stage.agent("a", epoch=4):
            raise AssertionError("never entered")
    async with await stage.agent("a", epoch=5):
        pass
    async with await stage.agent("hand-written"):
        await (await stage.channel("x")).publish([WireMessage(name="app")])


async def test_history_is_paged_for_a_trigger_that_came_long_before() -> None:
    """The reference waits for ever. The run's place, owner and prompt are those of the input."""
    stage = Stage()
    async with await stage.client() as client:
        first = await client.view.send(user("Long ago"))
        noise = await stage.channel("noise")
        for _ in range(25):
            await noise.publish([WireMessage(name="app-event", data="x")])
        async with await stage.agent(history_page=4) as agent:
            run = agent.create_run(first.to_invocation())
            await run.start()
            assert await run.view.load()
            assert texts(run.view.messages) == ["user:Long ago"]
            assert texts(run.messages) == ["user:Long ago"]
            await run.end("complete")
        await first.started
        assert client.tree.runs[0].client_id == "user-a"


async def test_an_input_of_several_parts_is_whole_although_a_page_begins_within_it() -> None:
    stage = Stage()
    parts: list[Any] = [{"type": "text", "text": f"part {n}"} for n in range(3)]
    async with await stage.client() as client:
        asked = await client.view.send(client.codec.create_user_message({"id": "u", "role": "user", "parts": parts}))
        for verb in ("start", "load"):
            async with await stage.agent(history_page=1) as agent:
                if verb == "start":
                    run: AgentRun[Any] = agent.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
                    await run.start()
                else:
                    run = agent.adopt_run(run_id="run-1", invocation_id="inv-1", trigger_event_id=asked.input_event_id)
                    await run.load()
                assert texts(run.view.messages) == ["user:part 0|part 1|part 2"]
                assert run.view.complete


async def test_the_prompt_leaves_broken_turns_out_with_what_they_answered() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:

        async def turn(text: str, reason: Any) -> AgentRun[Any]:
            asked = await client.view.send(user(text))
            run = agent.create_run(asked.to_invocation())
            await run.start()
            await run.pipe(reply([f"re {text}"]))
            if reason is not None:
                await run.end(reason)
            await until(lambda: asked.status == (reason or "active"))
            return run

        await turn("one", "complete")
        await turn("two", "cancelled")
        last = await turn("three", None)
        assert texts(last.view.messages) == ["user:one", "assistant:re one", "user:three", "assistant:re three"]
        assert texts(last.messages) == ["user:three", "assistant:re three"]


async def test_a_step_that_began_has_nothing_of_the_dead_attempt_in_its_prompt() -> None:
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        async with await stage.agent() as one:
            run = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()
            step = run.create_step("draft")
            await step.start()
            await step.pipe(failing(reply(["Dead"])[:4]))
        async with await stage.agent() as other:
            adopted = other.adopt_run(run_id="run-1", invocation_id="inv-1", trigger_event_id=asked.input_event_id)
            await adopted.load()
            assert texts(adopted.view.messages) == ["user:Hi", "assistant:Dead"]
            async with adopted.create_step("draft"):
                assert texts(adopted.view.messages) == ["user:Hi"]
            await adopted.end("complete")


async def test_steps_are_numbered_behind_those_on_the_channel() -> None:
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        ids = {"run_id": "run-1", "invocation_id": "inv-1"}
        async with await stage.agent() as one:
            run = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()
            for _ in range(3):
                await run.pipe(reply(["x"]))
        async with await stage.agent() as other:
            adopted = other.adopt_run(**ids, trigger_event_id=asked.input_event_id)
            await adopted.load()
            assert adopted.create_step().step_id == "inv-1-step-3"
            fresh = other.adopt_run(run_id="run-1", invocation_id="inv-2", trigger_event_id=asked.input_event_id)
            await fresh.load()
            assert fresh.create_step().step_id == "inv-2-step-0"


async def test_who_takes_part_in_a_step() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as one, await stage.agent() as other:
        asked = await client.view.send(user("Hi"))
        run = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
        await run.start()
        for given in (None, "bob", None):
            async with run.create_step(step_client_id=given):
                pass
        adopted = other.adopt_run(run_id="run-1", invocation_id="inv-2", trigger_event_id=asked.input_event_id)
        await adopted.load()
        async with adopted.create_step():
            pass
        await stage.clock.settle()
        assert [step.step_client_id for step in client.tree.runs[0].steps] == ["user-a", "bob", "bob", "bob"]


async def test_a_lazy_step_is_on_the_channel_only_with_output() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation(), invocation_id="inv")
        await run.start()
        async with run.create_step(lazy=True) as empty:
            await empty.pipe([])
            assert empty.start_serial is None
        async with run.create_step(lazy=True) as step:
            assert "ai-step-start" not in await stage.names()
            await step.send({"type": "data-note", "data": {"n": 1}})
        await run.end("complete")
    items = await stage.history()
    assert [item.name for item in items] == [
        "ai-input",
        "ai-run-start",
        "ai-step-start",
        "ai-output",
        "ai-step-end",
        "ai-run-end",
    ]
    assert step.start_serial == items[2].serial


async def test_an_agent_may_begin_by_itself() -> None:
    stage = Stage()
    async with await stage.client() as client, await stage.agent() as agent:
        run = agent.create_run(Invocation(input_event_id="", session_name="c"))
        await run.start()
        await run.pipe(reply(["Good morning"]))
        await run.end("complete")
        await stage.clock.settle()
        assert texts(client.view.messages) == ["assistant:Good morning"]
        assert run.view.complete


async def test_a_retried_opener_opens_once() -> None:
    """It died after the channel had stored the start: the next attempt says the same under the same ids."""
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        for _ in range(2):
            async with await stage.agent() as agent:
                await agent.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1").start()
    assert (await stage.names()).count("ai-run-start") == 1


async def test_steering_survives_a_take_over() -> None:
    """What the dead process had answered is answered; what it had not is for the next one."""
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Plan"))
        async with await stage.agent() as one:
            run = one.create_run(asked.to_invocation(), run_id="run-1", invocation_id="inv-1")
            await run.start()
            await asked.started
            await asked.steer(user("Five days")).published
            await until(lambda: run.has_input() and texts(run.view.messages)[-1] == "user:Five days")
            await run.pipe(reply(["Five."]))
            assert not run.has_input()
            await asked.steer(user("By train")).published
        told: list[int] = []
        async with await stage.agent() as other:
            adopted = other.adopt_run(
                run_id="run-1",
                invocation_id="inv-2",
                trigger_event_id=asked.input_event_id,
                on_steer=lambda: told.append(1),
            )
            await adopted.load()
            await until(lambda: told == [1])
            assert texts(adopted.view.messages)[-1] == "user:By train"
            assert adopted.has_input()
            failed = await adopted.pipe(failing([]))
            assert failed.reason == "error"
            result = await adopted.pipe(reply(["By train."], stream_id="t2"))
            assert result.reason == "complete"
            assert not adopted.has_input()
            await adopted.end("complete")
        stamps = [
            item.extras["ai"]["transport"].get("steer-codec-message-ids")
            for item in await stage.history()
            if item.name == "ai-output" and item.extras is not None
        ]
        assert None not in stamps
        assert len(set(stamps)) == 2, "nothing was written by the pipe that failed, so the next one carries the stamp"


async def test_what_an_earlier_invocation_began_with_is_no_steering_input() -> None:
    stage = Stage()
    told: list[int] = []
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        for answer in ("yes", "no"):
            await run.start()
            await run.pipe(reply(["Sure?"]))
            await run.suspend()
            await until(lambda: asked.status == "suspended")
            answered = await client.view.send(user(answer), run_id=asked.run_id)
            run = agent.create_run(answered.to_invocation(), on_steer=lambda: told.append(1))
        await run.start()
        assert run.has_input()
        await run.pipe(reply(["Done."]))
        await run.end("complete")
    assert told == []
    stamps = ["steer-codec-message-ids" in str(item.extras) for item in await stage.history()]
    assert not any(stamps)


async def test_the_prompt_holds_what_was_just_written_however_slowly_it_comes_back() -> None:
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        async with agent_on(SlowReader(await stage.channel("agent-1"), lag=50), stage.clock) as agent:
            run = agent.create_run(asked.to_invocation())
            await run.start()
            await run.pipe(reply(["one"]))
            assert texts(run.view.messages)[-1] == "assistant:one"
            async with run.create_step() as step:
                await step.pipe(reply(["two"]))
            assert texts(run.view.messages)[-1] == "assistant:two"
            await run.end("complete")


async def test_a_step_does_not_wait_for_an_echo_for_ever() -> None:
    stage = Stage()
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        slow = SlowReader(await stage.channel("agent-1"))
        async with agent_on(slow, stage.clock) as agent, anyio.create_task_group() as tasks:
            run = agent.create_run(asked.to_invocation())
            await run.start()
            await stage.clock.settle()
            slow.gate = anyio.Event()
            await slow.waits()
            done: list[Any] = []

            async def work() -> None:
                done.append(await run.pipe(reply(["one"])))

            tasks.start_soon(work)
            await stage.clock.advance(0.9)
            assert not done
            await stage.clock.advance(0.2)
            assert done[0].reason == "complete"
            await run.end("complete")
        assert stage.clock.timers == 0


async def test_a_steer_handler_that_raises_is_told_of() -> None:
    stage = Stage()
    errors: list[Any] = []

    async def on_steer() -> None:
        raise ValueError("boom")

    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Plan"))
        run = agent.create_run(asked.to_invocation(), on_steer=on_steer, on_error=errors.append)
        await run.start()
        await asked.started
        await asked.steer(user("Five days")).published
        await until(lambda: bool(errors))
        assert errors[0].wire_code == 104002
        assert run.has_input()
        await run.end("complete")


async def test_a_gap_is_told_and_runs_go_on_with_what_it_hid() -> None:
    """A slow reader lost part of the log: the snapshot holds it all, a cancel and a steer among it."""
    clock = FakeClock()
    channels = MemoryChannels(clock=clock, retention=10.0)
    channel = await channels.open("c")
    stage = Stage()
    stage.channels, stage.clock = channels, clock
    errors: list[Any] = []
    told: list[int] = []
    async with await stage.client() as client:
        asked = await client.view.send(user("Hi"))
        second = await client.view.send(user("Hi again"))
        slow = SlowReader(await stage.channel("agent-1"))
        async with agent_on(slow, clock, on_error=errors.append) as agent:
            refused: list[Any] = []

            def refuse(request: Any) -> bool:
                refused.append(request)
                return False

            run = agent.create_run(asked.to_invocation(), on_steer=lambda: told.append(1), on_cancel=refuse)
            await run.start()
            await asked.cancel()
            other = agent.create_run(second.to_invocation())
            await other.start()
            await asked.started
            await clock.settle()
            slow.gate = anyio.Event()  # from here on nothing is read
            await slow.waits()
            await second.cancel()
            await asked.steer(user("And this")).published
            await clock.advance(11)
            slow.gate.set()
            await until(lambda: bool(errors))
            assert isinstance(errors[0], ContinuityLostError)
            assert errors[0].wire_code == 104006
            await until(other.cancelled.is_set)
            await until(lambda: told == [1])
            assert not run.cancelled.is_set()
            assert len(refused) == 1, "the snapshot has it again, and it was answered"
            assert run.has_input()
            assert (await run.pipe(reply(["Both."]))).reason == "complete"
            await run.end("complete")
            await other.end("cancelled")
        await until(lambda: asked.status == "complete")
    assert channel.name == "c"


class SlowReader:
    """A channel whose subscription stops reading while there is a gate that is not open, or lags by some turns."""

    def __init__(self, channel: Any, lag: int = 0) -> None:
        self._channel = channel
        self.lag = lag
        self.gate: anyio.Event | None = None
        self.waiting = anyio.Event()
        self.name = channel.name
        self.publish = channel.publish
        self.append = channel.append
        self.update = channel.update
        self.history = channel.history
        self.raise_fence = channel.raise_fence

    async def waits(self) -> None:
        """Wake the reader with something, so that it comes to the gate."""
        await self.publish([WireMessage(name="app-event")])
        await self.waiting.wait()

    def subscribe(self, **options: Any) -> Any:
        slow = self

        class Slow:
            async def __aenter__(self) -> Any:
                self.manager = slow._channel.subscribe(**options)
                self.inner = await self.manager.__aenter__()
                self.start = self.inner.start
                return self

            async def __aexit__(self, *args: Any) -> None:
                await self.manager.__aexit__(*args)

            async def read(self, limit: int = 256) -> Any:
                if slow.gate is not None:
                    slow.waiting.set()
                    await slow.gate.wait()
                items = await self.inner.read(limit)
                for _ in range(slow.lag):
                    await anyio.lowlevel.checkpoint()
                return items

        return Slow()
