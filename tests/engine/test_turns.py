"""Turns in one process: results, queueing, roll-back, cancellation, recovery, idempotency."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import anyio
import pytest

from engine_flows import BookFlow, FaultyStore, TalkFlow, TalkStep
from flow_kit import flow_of
from stepwell import Engine, FilePart, Step, TextPart, UserMessage, tool
from stepwell.engine import Accepted, Committed, Limits, Superseded, TextDelta, ToolFinished, TurnFinished, TurnStarted
from stepwell.engine._owner import owner_id
from stepwell.errors import (
    EngineClosedError,
    FlowDefinitionError,
    HandlerError,
    IdempotencyConflictError,
    InputTooLargeError,
    InvalidInputError,
    SessionBusyError,
    StaleWriterError,
    UnknownFlowError,
    UnknownSessionError,
)
from stepwell.messages import AssistantMessage, HistoryCheck, ToolResult
from stepwell.sessions import MemoryStore
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio


def roles(messages: list[Any]) -> list[str]:
    return [str(m.__struct_config__.tag) for m in messages]


# -- results


async def test_a_first_turn_makes_a_session_and_says_everything_about_itself() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel([Reply.text("Hello.").with_usage(7, 3)])) as h:
        result = await h.say("hi")
    assert (result.success, result.message, result.content_type) == (True, "Hello.", "text/plain")
    assert (result.completed, result.status, result.current, result.units) == (False, "running", "TalkStep", 1)
    assert not result.resumed
    assert result.previous_session_id is None
    assert result.error is None
    assert result.usage["scripted:m"].usage.total == 10
    assert len({result.session_id, result.run_id, result.invocation_id}) == 3
    kinds = [type(e).__name__ for e in h.events if not isinstance(e, TextDelta)]
    assert kinds == [
        "TurnStarted", "UnitStarted", "StageEntered", "AttemptStarted", "CandidateClassified", "Accepted", "Committed",
        "TurnFinished",
    ]  # fmt: skip
    assert h.shown == "Hello."


async def test_a_tool_may_run_a_turn_of_another_session() -> None:
    """What that turn writes is its own, and no part of the call."""

    class Outer(Step):
        @tool
        async def ask(self) -> str:
            inner = await h.engine.run("TalkFlow", "inside")
            self.save_state({"inner": inner.session_id})
            return inner.message

    model = ScriptedModel([Reply.tool_calls(Call("ask")), "Inner.", "Outer."])
    h = TurnHarness(flow_of(Outer), model=model, also=(TalkFlow,))
    async with h:
        assert (await h.say("hi")).message == "Outer."
        inner = (await h.state("Outer"))["inner"]
        messages = [row.message for row in await h.store.load_messages(inner, "TalkStep")]
        assert [m.text for m in messages] == ["inside", "Inner."]  # type: ignore[union-attr]
        assert roles(await h.history("Outer")) == ["user", "assistant", "tool", "assistant"]


async def test_the_next_turn_goes_on_with_the_same_session() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two."])) as h:
        first = await h.say("a")
        second = await h.say("b")
        history = await h.history("TalkStep")
    assert second.session_id == first.session_id
    assert second.resumed
    assert [m.text for m in history] == ["a", "One.", "b", "Two."]  # type: ignore[union-attr]


async def test_a_result_survives_json() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One."])) as h:
        result = await h.say("a")
    assert type(result).from_json(json.loads(json.dumps(result.to_json()))) == result


async def test_files_reach_the_model() -> None:
    model = ScriptedModel(["Seen."])
    message = UserMessage(content=(TextPart("look"), FilePart("image/png", data="aGk=")))
    async with TurnHarness(TalkFlow, model=model) as h:
        assert (await h.say(message)).success
    sent = model.requests[0].messages[0]
    assert isinstance(sent, UserMessage)
    assert sent.content == message.content


async def test_a_completed_session_is_followed_by_a_new_one() -> None:
    script = [Reply.tool_call("save_name", {"name": "Ada"}), "Right?", Reply.tool_call("done"), "Bye.", "Name?", "Hm?"]
    async with TurnHarness(BookFlow, model=ScriptedModel(script)) as h:
        first = await h.say("Ada")
        ended = await h.say("yes")
        assert ended.completed
        assert ended.status == "completed"
        assert ended.current == "TerminateSessionStep"
        fresh = await h.say("hello again")
        assert (fresh.resumed, fresh.previous_session_id) == (False, first.session_id)
        again = await h.say("still me", session_id=first.session_id)
        assert again.session_id == fresh.session_id
        assert again.previous_session_id == first.session_id
        old = await h.engine.get_session(first.session_id)
        assert old["successor"] == fresh.session_id


# -- misuse


async def test_unknown_flow_names_the_registered_ones() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel()) as h:
        with pytest.raises(UnknownFlowError, match="TalkFlow"):
            await h.engine.run("Nope", "hi")


async def test_unknown_session_is_raised_and_nothing_is_made() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel()) as h:
        with pytest.raises(UnknownSessionError):
            await h.engine.run("TalkFlow", "hi", session_id="nobody")
        assert (await h.engine.list_sessions())[0] == []


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (None, InvalidInputError),
        ("  ", InvalidInputError),
        (42, InvalidInputError),
        ("\ud800", InvalidInputError),
        ("x" * 5_000_000, InputTooLargeError),
        (UserMessage(content=(TextPart(" "),)), InvalidInputError),
    ],
)
async def test_bad_messages_are_refused(message: Any, error: type[Exception]) -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel()) as h:
        with pytest.raises(error) as caught:
            await h.engine.run("TalkFlow", message)
        assert caught.value.pointer == "/message"  # type: ignore[attr-defined]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("options", "pointer"),
    [
        ({"config": [1]}, "/config"),
        ({"config": deep(200)}, "/config"),
        ({"config": {"a": {"b": object()}}}, "/config/a/b"),
        ({"config": {"a": "\udc00"}}, "/config/a"),
        ({"config": {"a": "x" * 2_000_000}}, "/config"),
        ({"session_id": "../etc"}, "/session_id"),
        ({"session_id": 7}, "/session_id"),
        ({"idempotency_key": ""}, "/idempotency_key"),
        ({"idempotency_key": "x" * 300}, "/idempotency_key"),
    ],
)
async def test_bad_options_are_refused_with_a_pointer(options: Any, pointer: str) -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel()) as h:
        with pytest.raises(InvalidInputError) as caught:
            await h.engine.run("TalkFlow", "hi", **options)
        assert caught.value.pointer == pointer


async def test_unknown_options_are_a_type_error() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel()) as h:
        with pytest.raises(TypeError):
            await h.engine.run_or_raise("TalkFlow", "hi", nonsense=1)  # type: ignore[call-arg]


async def test_a_session_belongs_to_its_flow() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One."]), also=(BookFlow,)) as h:
        first = await h.say("a")
        with pytest.raises(InvalidInputError, match="belongs to flow TalkFlow"):
            await h.engine.run("BookFlow", "a", session_id=first.session_id)


async def test_an_engine_that_is_not_running_says_so() -> None:
    engine = Engine([TalkFlow], models={"scripted": ScriptedModel()})
    with pytest.raises(EngineClosedError):
        await engine.run("TalkFlow", "hi")
    await engine.close()
    await engine.start()
    with pytest.raises(EngineClosedError):
        await engine.start()
    await engine.close()
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.run("TalkFlow", "hi")


async def test_create_and_close_may_happen_in_different_tasks() -> None:
    engine = await asyncio.create_task(Engine.create([TalkFlow], models={"scripted": ScriptedModel(["Yes."])}))
    assert (await engine.run("TalkFlow", "hi")).message == "Yes."
    await asyncio.create_task(engine.close())


async def test_a_close_that_is_cancelled_while_it_waits_closes_all_the_same() -> None:
    model = ScriptedModel([Reply.text("never").stalling()])
    engine = await Engine.create([TalkFlow], models={"scripted": model})
    running = asyncio.create_task(engine.run("TalkFlow", "hi"))
    await model.wait_stalled()
    closing = asyncio.create_task(engine.close(grace=60))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    error = (await running).error
    assert error is not None
    assert error.ids["kind"] == "shutdown"


def test_two_flows_of_one_name_are_refused() -> None:
    other = type("Other", (TalkFlow,), {"aliases": ("TalkFlow",)})
    with pytest.raises(FlowDefinitionError, match="TalkFlow"):
        Engine([TalkFlow, other], models={"scripted": ScriptedModel()})


def test_a_flow_whose_provider_is_unknown_is_refused_at_registration() -> None:
    with pytest.raises(FlowDefinitionError, match="scripted"):
        Engine([TalkFlow], models={})


# -- one after the other


async def test_turns_of_one_session_run_in_the_order_they_came() -> None:
    model = ScriptedModel([Reply.text(f"r{i}").delayed(0.05) for i in range(6)])
    async with TurnHarness(TalkFlow, model=model) as h:
        first = await h.say("m0")
        results: list[str] = []

        async def post(i: int) -> None:
            result = await h.engine.run("TalkFlow", f"m{i}", session_id=first.session_id)
            results.append(result.message)

        async with anyio.create_task_group() as group:
            for i in range(1, 6):
                group.start_soon(post, i)
        history = await h.history("TalkStep")
    assert results == [f"r{i}" for i in range(1, 6)]
    assert [m.text for m in history] == [x for i in range(6) for x in (f"m{i}", f"r{i}")]  # type: ignore[union-attr]


async def test_reject_refuses_while_another_turn_runs() -> None:
    gate = anyio.Event()
    model = ScriptedModel(["One.", Reply.text("Two.").gated(gate)])
    async with TurnHarness(TalkFlow, model=model) as h:
        session = (await h.say("a")).session_id
        async with h.engine.stream("TalkFlow", "b", session_id=session) as turn:
            async for event in turn:
                if isinstance(event, TurnStarted):
                    break
            busy = await h.engine.run("TalkFlow", "c", session_id=session, on_busy="reject")
            assert busy.error is not None
            assert (busy.error.code, busy.error.retryable) == ("session_busy", True)
            with pytest.raises(SessionBusyError):
                await h.engine.run_or_raise("TalkFlow", "c", session_id=session, on_busy="reject")
            gate.set()
            async for _ in turn:
                pass
            assert turn.result.message == "Two."


async def test_queueing_ends_after_busy_timeout() -> None:
    clock = FakeClock()
    gate = anyio.Event()
    model = ScriptedModel(["One.", Reply.text("Two.").gated(gate)])
    async with TurnHarness(TalkFlow, model=model, clock=clock) as h:
        session = (await h.say("a")).session_id
        async with anyio.create_task_group() as group, h.engine.stream("TalkFlow", "b", session_id=session) as turn:
            async for event in turn:
                if isinstance(event, TurnStarted):
                    break
            results: list[Any] = []

            async def wait() -> None:
                results.append(await h.engine.run("TalkFlow", "c", session_id=session, busy_timeout=3))

            group.start_soon(wait)
            await clock.settle()
            await clock.advance(3)
            await clock.settle()
            assert results[0].error.code == "session_busy"
            gate.set()
            async for _ in turn:
                pass


# -- failure rolls back to the last unit


async def test_a_failing_handler_fails_the_turn_and_keeps_what_was_committed(caplog: Any) -> None:
    script = [
        Reply.tool_call("note", {"text": "kept"}),
        Reply.tool_calls(
            Call("note", {"text": "sibling"}, id="a"), Call("fail", id="b"), Call("note", {"text": "never"}, id="c")
        ),
        "Fine now.",
    ]  # fmt: skip
    model = ScriptedModel(script)
    with caplog.at_level(logging.DEBUG, "stepwell"):
        async with TurnHarness(BookFlow, model=model) as h:
            result = await h.say("go")
            assert not result.success
            assert result.error is not None
            assert (result.error.code, result.status) == ("handler", "running")
            assert "secret" not in result.error.message
            assert await h.state("AskStep") == {"notes": {"kept": True, "sibling": True}}
            history = await h.history("AskStep")
            outcomes = {m.call: m.outcome for m in history if isinstance(m, ToolResult)}
            assert outcomes == {"call_1": "ok", "a": "ok", "b": "error", "c": "not_run"}
            HistoryCheck().add_all(history)
            assert (await h.document()).get("turn") is None
            assert any(line.level == "error" and line.text == "turn failed" for line in await h.log())
            assert (await h.say("again")).message == "Fine now."
    assert not any("kept" in r.message or "customer" in r.message for r in caplog.records if r.levelno > logging.DEBUG)


async def test_the_log_says_where_but_not_what_unless_asked(caplog: Any) -> None:
    for capture in (False, True):
        caplog.clear()
        async with TurnHarness(BookFlow, model=ScriptedModel([Reply.tool_call("fail")]), capture_content=capture) as h:
            await h.say("go")
        assert "engine_flows.py" in caplog.text
        assert "RuntimeError" in caplog.text
        assert ("a secret of the customer" in caplog.text) is capture


async def test_a_gateway_that_breaks_is_not_taken_for_a_hook(caplog: Any) -> None:
    model = ScriptedModel([Reply.error(AttributeError("secret"))] * 3)
    async with TurnHarness(TalkFlow, model=model) as h:
        result = await h.say("go")
    assert result.error is not None
    assert result.error.code == "model_invocation"
    assert "AttributeError" in result.error.message
    assert "secret" not in caplog.text


async def test_run_or_raise_raises_the_typed_error_with_its_cause() -> None:
    async with TurnHarness(BookFlow, model=ScriptedModel([Reply.tool_call("fail")])) as h:
        with pytest.raises(HandlerError) as caught:
            await h.engine.run_or_raise("BookFlow", "go")
        assert isinstance(caught.value.__cause__, RuntimeError)


class ShakyStep(Step):
    broken = True

    def get_prompt(self) -> str:
        if ShakyStep.broken:
            raise ValueError("no prompt")
        return "Talk."


class ShakyFlow(TalkFlow):
    def define_steps(self) -> list[Step[Any, Any]]:
        return [ShakyStep(self)]


async def test_a_failed_first_unit_keeps_the_users_message() -> None:
    async with TurnHarness(ShakyFlow, model=ScriptedModel(["Hello."])) as h:
        ShakyStep.broken = True
        failed = await h.say("first")
        assert failed.error is not None
        assert failed.error.code == "handler"
        assert failed.units == 0
        ShakyStep.broken = False
        assert (await h.say("second")).message == "Hello."
        assert [m.text for m in await h.history("ShakyStep")] == ["first", "second", "Hello."]  # type: ignore[union-attr]


async def test_a_failure_nobody_handled_blanks_the_dead_text() -> None:
    model = ScriptedModel([Reply.text(["Your ", "booking"]).failing(after=2, status=400)])
    async with TurnHarness(TalkFlow, model=model) as h:
        result = await h.say("hi")
    assert result.error is not None
    assert result.error.code == "model_invocation"
    assert result.error.retryable
    assert h.shown == ""
    assert [type(e) for e in h.events if isinstance(e, (TextDelta, Superseded))] == [TextDelta, TextDelta, Superseded]


async def test_usage_of_a_failed_turn_is_counted() -> None:
    model = ScriptedModel([Reply.text("x").failing(after=1, status=400).with_usage(5, 1)])
    async with TurnHarness(TalkFlow, model=model) as h:
        result = await h.say("hi")
        document = await h.document()
    assert result.usage["scripted:m"].usage.total == 6
    assert document["usage"]["scripted:m"]["usage"] == {"input": 5, "output": 1}


# -- cancellation


async def wait_for(turn: Any, kind: type[Any]) -> None:
    async for event in turn:
        if isinstance(event, kind):
            return


async def test_a_user_cancel_is_recorded_and_the_text_stays_shown() -> None:
    model = ScriptedModel(["One.", Reply.text(["Hal", "f"]).stalling(after=1), "Three."], clock=FakeClock())
    clock = FakeClock()
    async with TurnHarness(TalkFlow, model=model, clock=clock) as h:
        session = (await h.say("a")).session_id
        async with h.engine.stream("TalkFlow", "b", session_id=session) as turn:
            await wait_for(turn, TextDelta)
            assert await h.engine.cancel(session, reason="changed my mind")
            assert not await h.engine.cancel(session)
            assert not turn.cancel()
        result = turn.result
        assert result.error is not None
        assert (result.error.code, result.error.ids["kind"]) == ("turn_cancelled", "user")
        assert turn.text == "Hal"
        assert [m.text for m in await h.history("TalkStep")] == ["a", "One.", "b"]  # type: ignore[union-attr]
        assert any(line.text == "turn cancelled (user)" for line in await h.log())
        assert (await h.say("c")).message == "Three."
    assert model.open == 0
    assert model.cancelled == 1


async def test_cancel_of_another_run_or_no_turn_does_nothing() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One."])) as h:
        session = (await h.say("a")).session_id
        assert not await h.engine.cancel(session)
        assert not await h.engine.cancel(session, run_id="other")
        with pytest.raises(UnknownSessionError):
            await h.engine.cancel("nobody")


async def test_cancelling_the_caller_cancels_the_turn() -> None:
    model = ScriptedModel([Reply.text("x").stalling(after=0)], clock=FakeClock())
    async with TurnHarness(TalkFlow, model=model, clock=FakeClock()) as h:
        task = asyncio.create_task(h.engine.run("TalkFlow", "a"))
        await model.wait_stalled()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sessions, _ = await h.engine.list_sessions()
        log = await h.engine.store.load_log(sessions[0].id)
    assert [line.text for line in log] == ["turn cancelled (caller)"]


async def test_leaving_the_block_cancels_unless_detached() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("x").gated(gate), Reply.text("y").gated(gate)])
    async with TurnHarness(TalkFlow, model=model) as h:
        async with h.engine.stream("TalkFlow", "a") as turn:
            await wait_for(turn, TurnStarted)
        assert turn.result.error is not None
        assert turn.result.error.ids["kind"] == "caller"
        async with h.engine.stream("TalkFlow", "a", detached=True) as turn:
            await wait_for(turn, TurnStarted)
        assert not turn.done.is_set()
        gate.set()
        await turn.done.wait()
        assert turn.result.message == "y"


class HurriedFlow(TalkFlow):
    turn_timeout = 5


async def test_a_turn_deadline_cancels_with_its_own_kind() -> None:
    clock = FakeClock(auto_advance=True)
    model = ScriptedModel([Reply.text("slow").delayed(30)], clock=clock)
    async with TurnHarness(HurriedFlow, model=model, clock=clock) as h:
        result = await h.say("a")
    assert result.error is not None
    assert result.error.ids["kind"] == "deadline"


async def test_a_cancel_during_a_commit_waits_for_it() -> None:
    store = FaultyStore()
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One."]), store=store) as h:
        store.gate = anyio.Event()
        async with h.engine.stream("TalkFlow", "a") as turn:
            await wait_for(turn, Accepted)
            assert turn.cancel()
            await anyio.wait_all_tasks_blocked()
            store.gate.set()
            await turn.done.wait()
        document = await h.engine.get_session(turn.session_id)
        assert document.get("turn") is None
        assert document["memories"]["TalkStep"]["next"] == 2


async def test_cancel_in_a_tool_batch_pairs_every_call() -> None:
    started = anyio.Event()

    class SlowStep(Step):
        @tool
        async def quick(self) -> str:
            self.save_state({"quick": True})
            return "done"

        @tool
        async def slow(self) -> str:
            started.set()
            await anyio.sleep_forever()
            return "never"

    class SlowFlow(TalkFlow):
        def define_steps(self) -> list[Step[Any, Any]]:
            return [SlowStep(self)]

    calls = Reply.tool_calls(Call("quick", id="a"), Call("slow", id="b"), Call("quick", id="c"))
    async with TurnHarness(SlowFlow, model=ScriptedModel([calls, "On we go."])) as h:
        async with h.engine.stream("SlowFlow", "go") as turn:
            await wait_for(turn, ToolFinished)
            await started.wait()
            turn.cancel()
        h.session_id = turn.session_id
        history = await h.history("SlowStep")
        assert {m.call: m.outcome for m in history if isinstance(m, ToolResult)} == {
            "a": "ok", "b": "unknown", "c": "not_run"
        }  # fmt: skip
        HistoryCheck().add_all(history)
        assert await h.state("SlowStep") == {"quick": True}
        assert (await h.say("next")).message == "On we go."


# -- leases and recovery


async def test_shutdown_leaves_the_turn_for_another_engine_and_committed_units_stay() -> None:
    clock = FakeClock()
    model = ScriptedModel(
        [Reply.tool_call("note", {"text": "x"}), Reply.text("part").stalling(after=1), "Recovered.", "Next."],
        clock=clock,
    )
    async with TurnHarness(BookFlow, model=model, clock=clock) as h:
        async with h.engine.stream("BookFlow", "go", detached=True) as turn:
            await model.wait_stalled()
        h.session_id = turn.session_id
        await h.restart()
        assert turn.result.error is not None
        assert turn.result.error.ids["kind"] == "shutdown"
        assert (await h.document())["turn"]["unit"] == 2
        result = await h.say("and then?")
        assert result.message == "Next."
        history = await h.history("AskStep")
        assert roles(history) == ["user", "assistant", "tool", "assistant", "user", "assistant"]
        assert [m.text for m in history if isinstance(m, AssistantMessage)] == ["", "Recovered.", "Next."]
    assert len(model.requests) == 4


async def test_a_recovered_turn_that_fails_is_closed_and_does_not_fail_the_next() -> None:
    clock = FakeClock(auto_advance=True)
    model = ScriptedModel([Reply.text("part").stalling(after=1), Reply.error(status=400), "Next."], clock=FakeClock())
    harness = TurnHarness(TalkFlow, model=model, clock=clock)
    model.clock = FakeClock()
    async with harness as h:
        async with h.engine.stream("TalkFlow", "go", detached=True) as turn:
            await model.wait_stalled()
        h.session_id = turn.session_id
        await h.restart()
        # Its failure is the old run's: whoever asked for the new turn must not be told of it.
        assert (await h.engine.run_or_raise("TalkFlow", "b", session_id=h.session_id)).message == "Next."
        assert "turn failed" in [line.text for line in await h.log()]


async def test_another_engine_waits_for_the_lease_and_takes_it_when_it_ends() -> None:
    clock = FakeClock(auto_advance=True)
    store = MemoryStore(clock)
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two.", "Three."]), store=store, clock=clock) as h:
        session = (await h.say("a")).session_id
        held = await store.acquire(session, "elsewhere:boot:1:1", ttl=15)
        rejected = await h.engine.run("TalkFlow", "b", session_id=session, on_busy="reject")
        assert rejected.error is not None
        assert rejected.error.code == "session_busy"
        assert (await h.engine.run("TalkFlow", "b", session_id=session, busy_timeout=60)).message == "Two."
        with pytest.raises(StaleWriterError):
            await store.renew(held.lease, ttl=15)
        await store.acquire(session, "elsewhere:boot:1:1", ttl=1000)
        late = await h.engine.run("TalkFlow", "c", session_id=session, busy_timeout=2)
        assert late.error is not None
        assert late.error.code == "session_busy"
        await store.release((await store.acquire(session, "elsewhere:boot:1:1", ttl=1)).lease)
        assert (await h.say("c")).message == "Three."


async def test_a_stale_writer_is_fenced_out_and_writes_nothing() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    gate = anyio.Event()
    model = ScriptedModel(["One.", Reply.text("Zombie.").gated(gate)])
    async with TurnHarness(TalkFlow, model=model, store=store, clock=clock) as h:
        session = (await h.say("a")).session_id
        async with h.engine.stream("TalkFlow", "b", session_id=session) as turn:
            await wait_for(turn, TurnStarted)
            taken = await store.acquire(session, "other:b:1:1", ttl=15, supersede=owner_id())
            gate.set()
            await turn.done.wait()
        assert turn.result.error is not None
        assert turn.result.error.code == "stale_writer"
        head, lease = await store.load(session)
        assert lease is not None
        assert lease.epoch == taken.lease.epoch
        assert head.turn is not None


async def test_a_lost_lease_is_noticed_at_the_next_renewal() -> None:
    clock = FakeClock()
    store = MemoryStore(clock)
    model = ScriptedModel(["One.", Reply.text("x").stalling(after=0)], clock=clock)
    async with TurnHarness(TalkFlow, model=model, store=store, clock=clock) as h:
        session = (await h.say("a")).session_id
        async with h.engine.stream("TalkFlow", "b", session_id=session, detached=True) as turn:
            await model.wait_stalled()
        await clock.advance(6)
        assert not turn.done.is_set()
        await store.acquire(session, "other:b:1:1", ttl=15, supersede=owner_id())
        await clock.advance(6)
        await turn.done.wait()
        assert turn.result.error is not None
        assert turn.result.error.ids["kind"] == "lost"


async def test_a_lease_that_cannot_be_renewed_ends_the_turn_when_it_runs_out() -> None:
    clock = FakeClock()
    store = FaultyStore(clock)
    model = ScriptedModel(["One.", Reply.text("x").stalling(after=0)], clock=clock)
    async with TurnHarness(TalkFlow, model=model, store=store, clock=clock) as h:
        session = (await h.say("a")).session_id
        store.refuse_renewals = 100
        async with h.engine.stream("TalkFlow", "b", session_id=session, detached=True) as turn:
            await model.wait_stalled()
        await clock.advance(9)
        assert not turn.done.is_set()
        await clock.advance(7)
        await turn.done.wait()
        assert turn.result.error is not None
        assert turn.result.error.ids["kind"] == "lost"


async def test_a_writer_whose_own_lease_clock_ran_out_does_not_write() -> None:
    clock = FakeClock()
    store = FaultyStore(clock)
    gate = anyio.Event()
    model = ScriptedModel(["One.", Reply.text("late").gated(gate)])
    async with TurnHarness(TalkFlow, model=model, store=store, clock=clock, lease_ttl=15) as h:
        session = (await h.say("a")).session_id
        async with h.engine.stream("TalkFlow", "b", session_id=session, detached=True) as turn:
            await wait_for(turn, TurnStarted)
        turn._task._hold._until = clock.monotonic()  # as if the process had been stopped for that long
        gate.set()
        await turn.done.wait()
        assert turn.result.error is not None
        assert turn.result.error.code == "stale_writer"


async def test_a_lost_answer_of_a_commit_is_recognised_as_ours() -> None:
    store = FaultyStore()
    async with TurnHarness(
        BookFlow, model=ScriptedModel([Reply.tool_call("note", {"text": "x"}), "Ok."]), store=store
    ) as h:
        store.lose_answers = 3
        result = await h.say("a")
        assert result.success
        assert result.message == "Ok."
        assert roles(await h.history("AskStep")) == ["user", "assistant", "tool", "assistant"]


async def test_a_busy_store_is_tried_again() -> None:
    store = FaultyStore()
    async with TurnHarness(TalkFlow, model=ScriptedModel(["Ok."]), store=store) as h:
        store.refuse_saves = 2
        assert (await h.say("a")).message == "Ok."


async def test_a_dead_process_of_this_machine_loses_its_lease_at_once() -> None:
    code = "from stepwell.engine._owner import owner_id; print(owner_id())"
    dead = (await anyio.run_process([sys.executable, "-c", code])).stdout.decode().strip()
    clock = FakeClock()
    store = MemoryStore(clock)
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two."]), store=store, clock=clock) as h:
        session = (await h.say("a")).session_id
        await store.acquire(session, dead, ttl=1000)
        assert (await h.say("b")).message == "Two."


# -- warm sessions


async def test_a_warm_session_is_not_loaded_again() -> None:
    store = FaultyStore()
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two.", "Three."]), store=store) as h:
        await h.say("a")
        await h.say("b")
        assert "load_messages" not in store.calls
        await h.restart()
        await h.say("c")
        assert store.calls.count("load_messages") == 1


async def test_a_warm_session_that_moved_on_elsewhere_is_loaded() -> None:
    clock = FakeClock(auto_advance=True)
    store = MemoryStore(clock)
    model = ScriptedModel(["One.", "Elsewhere.", "Three."])
    async with TurnHarness(TalkFlow, model=model, store=store, clock=clock) as h:
        session = (await h.say("a")).session_id
        async with Engine([TalkFlow], models={"scripted": model}, store=store, clock=clock) as other:
            await other.run("TalkFlow", "b", session_id=session)
        await h.say("c")
        assert [m.text for m in model.requests[-1].messages] == ["a", "One.", "b", "Elsewhere.", "c"]  # type: ignore[union-attr]


async def test_warm_sessions_are_bounded() -> None:
    store = FaultyStore()
    async with TurnHarness(TalkFlow, model=ScriptedModel(["x"] * 3), store=store, warm_sessions=1) as h:
        first = (await h.say("a")).session_id
        await h.say("b", session_id=None)
        await h.say("c", session_id=first)
        assert store.calls.count("load_messages") == 1
    async with TurnHarness(TalkFlow, model=ScriptedModel(["x"] * 2), store=store, warm_sessions=0) as h:
        await h.say("a")
        await h.say("b")
        assert store.calls.count("load_messages") == 2


async def test_a_deleted_session_ends_its_running_turn() -> None:
    clock = FakeClock()
    model = ScriptedModel(["One.", Reply.text("x").stalling(after=0)], clock=clock)
    async with TurnHarness(TalkFlow, model=model, clock=clock) as h:
        session = (await h.say("a")).session_id
        async with h.engine.stream("TalkFlow", "b", session_id=session, detached=True) as turn:
            await model.wait_stalled()
        assert await h.engine.delete_session(session)
        await turn.done.wait()
        assert turn.result.error is not None
        assert turn.result.error.ids["kind"] == "lost"
        assert not await h.engine.delete_session(session)
        with pytest.raises(UnknownSessionError):
            await h.engine.get_session(session)


# -- idempotent input


async def test_the_same_key_attaches_to_the_running_turn() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("Once.").gated(gate)])
    async with TurnHarness(TalkFlow, model=model) as h:
        results: list[Any] = []

        async def post() -> None:
            results.append(await h.engine.run("TalkFlow", "pay", idempotency_key="k1"))

        async with anyio.create_task_group() as group:
            group.start_soon(post)
            group.start_soon(post)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        assert results[0] == results[1]
        assert results[0].message == "Once."
        later = await h.engine.run("TalkFlow", "pay", idempotency_key="k1")
        assert later == results[0]
        assert len((await h.engine.list_sessions())[0]) == 1


async def test_the_same_key_with_another_payload_is_a_conflict() -> None:
    gate = anyio.Event()
    async with TurnHarness(TalkFlow, model=ScriptedModel([Reply.text("Once.").gated(gate)])) as h:
        async with h.engine.stream("TalkFlow", "pay", idempotency_key="k") as turn:
            await wait_for(turn, TurnStarted)
            with pytest.raises(IdempotencyConflictError):
                await h.engine.run("TalkFlow", "pay more", idempotency_key="k")
            gate.set()
            await turn.done.wait()
        with pytest.raises(IdempotencyConflictError):
            await h.engine.run("TalkFlow", "pay more", idempotency_key="k")


async def test_a_stored_result_survives_a_restart() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two."])) as h:
        session = (await h.say("a")).session_id
        first = await h.say("b", idempotency_key="k")
        await h.restart()
        again = await h.engine.run("TalkFlow", "b", session_id=session, idempotency_key="k")
    assert again == first


async def test_a_turn_that_failed_retryably_may_run_again_and_its_message_is_there_once() -> None:
    model = ScriptedModel(["One.", Reply.error(status=400), "Two."])
    async with TurnHarness(TalkFlow, model=model) as h:
        await h.say("a")
        failed = await h.say("b", idempotency_key="k")
        assert failed.error is not None
        assert failed.error.retryable
        assert (await h.say("b", idempotency_key="k")).message == "Two."
        assert [m.text for m in await h.history("TalkStep")] == ["a", "One.", "b", "Two."]  # type: ignore[union-attr]


# -- sessions


async def test_sessions_can_be_listed_exported_and_imported() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two."])) as h:
        session = (await h.say("a")).session_id
        document = await h.engine.export_session(session)
        copy = await h.engine.import_session(json.loads(json.dumps(document)), session_id="copy")
        assert copy == "copy"
        assert (await h.say("b", session_id="copy")).message == "Two."
        listed, cursor = await h.engine.list_sessions(flow="TalkFlow")
        assert {s.id for s in listed} == {session, "copy"}
        assert cursor is None


async def test_a_later_config_is_ignored_with_a_warning() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["One.", "Two."])) as h:
        await h.say("a", config={"plan": "gold"})
        await h.say("b", config={"plan": "free"})
        assert (await h.document())["workflow"]["context"] == {"config": {"plan": "gold"}}
        assert [line.level for line in await h.log()] == ["warning"]


async def test_limits_can_be_set() -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["x"]), limits=Limits(message_bytes=3)) as h:
        assert (await h.say("abc")).success
        with pytest.raises(InputTooLargeError, match="limit is 3"):
            await h.say("äbc")


# -- events


async def test_a_slow_reader_costs_no_more_than_the_text(monkeypatch: Any) -> None:
    import stepwell.engine._stream as stream

    monkeypatch.setattr(stream, "MAX_BUFFERED", 50)
    async with TurnHarness(TalkFlow, model=ScriptedModel([Reply.text(["x"] * 500)])) as h:
        async with h.engine.stream("TalkFlow", "a") as turn:
            await turn.done.wait()
            seen = [event async for event in turn]
        deltas = [e.text for e in seen if isinstance(e, TextDelta)]
        assert "".join(deltas) == "x" * 500
        assert len(deltas) < 60
        assert isinstance(seen[-1], TurnFinished)
        assert seen[-1].result == turn.result


async def test_listeners_hear_everything_but_deltas() -> None:
    heard: list[Any] = []
    async with TurnHarness(TalkFlow, model=ScriptedModel(["Hello."]), listeners=[heard.append]) as h:
        await h.engine.run("TalkFlow", "a")
    assert not any(isinstance(e, TextDelta) for e in heard)
    assert any(isinstance(e, Committed) for e in heard)


async def test_the_debug_log_holds_no_content_unless_asked(caplog: Any) -> None:
    for capture in (False, True):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "stepwell.turn"):
            script = [Reply.tool_call("note", {"text": "blue elephant"}), "Your elephant."]
            async with TurnHarness(BookFlow, model=ScriptedModel(script), capture_content=capture) as h:
                await h.say("my elephant")
        text = "\n".join(r.message for r in caplog.records)
        assert "ToolStarted" in text
        assert "Committed" in text
        assert ("elephant" in text) is capture


async def test_no_public_call_raises_an_exception_group() -> None:
    class GroupStep(Step):
        async def on_visit(self, message: Any) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(self._boom)

        async def _boom(self) -> None:
            raise ValueError("inner")

    class GroupFlow(TalkFlow):
        def define_steps(self) -> list[Step[Any, Any]]:
            return [GroupStep(self)]

    async with TurnHarness(GroupFlow, model=ScriptedModel()) as h:
        with pytest.raises(HandlerError):
            await h.engine.run_or_raise("GroupFlow", "a")


async def test_one_who_attaches_sees_the_turn_and_leaves_it_alone() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text(["On", "ce."]).gated(gate, after=1)])
    async with TurnHarness(TalkFlow, model=model) as h, h.engine.stream("TalkFlow", "pay", idempotency_key="k") as turn:
        await wait_for(turn, TextDelta)
        async with h.engine.stream("TalkFlow", "pay", idempotency_key="k") as other:
            assert not other.owner
            assert other.text == "On"
        task = asyncio.create_task(h.engine.run("TalkFlow", "pay", idempotency_key="k"))
        await anyio.wait_all_tasks_blocked()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with h.engine.stream("TalkFlow", "pay", idempotency_key="k") as other:
            gate.set()
            seen = [event async for event in other]
            assert [e.text for e in seen if isinstance(e, TextDelta)] == ["ce."]
            assert other.result.message == "Once."
        async for _ in turn:
            pass
        assert turn.owner
        assert turn.result == other.result


async def test_an_open_turn_whose_stage_is_gone_closes_as_an_error() -> None:
    class OldStep(Step):
        @tool
        async def look(self) -> str:
            return "seen"

    class MovingFlow(TalkFlow):
        gone = False

        def define_steps(self) -> list[Step[Any, Any]]:
            return [TalkStep(self)] if MovingFlow.gone else [OldStep(self), TalkStep(self)]

    clock = FakeClock()
    model = ScriptedModel([Reply.tool_call("look"), Reply.text("x").stalling(after=0)], clock=clock)
    async with TurnHarness(MovingFlow, model=model, clock=clock) as h:
        async with h.engine.stream("MovingFlow", "go", detached=True) as turn:
            await model.wait_stalled()
        h.session_id = turn.session_id
        MovingFlow.gone = True
        await h.restart()
        result = await h.say("more")
        assert result.error is not None
        assert (result.error.code, result.error.ids["stage"]) == ("migration", "OldStep")
        assert (await h.document()).get("turn") is None
        HistoryCheck().add_all(await h.history("OldStep"))


async def test_a_failed_turn_that_cannot_be_closed_is_left_for_recovery(caplog: Any) -> None:
    store = FaultyStore()
    async with TurnHarness(ShakyFlow, model=ScriptedModel(["One.", "Two."]), store=store) as h:
        ShakyStep.broken = True
        store.break_saves = True
        result = await h.say("first")
        assert result.error is not None
        assert result.error.code == "handler"
        assert "could not be closed" in caplog.text
        store.break_saves = False
        ShakyStep.broken = False
        assert (await h.document())["turn"]["run"] == result.run_id
        # Another turn finishes the first one before it begins.
        assert (await h.say("second")).message == "Two."
        assert [m.text for m in await h.history("ShakyStep")] == ["first", "One.", "second", "Two."]  # type: ignore[union-attr]


@pytest.mark.parametrize("on_busy", ["queue", "reject"])
async def test_the_first_turn_of_a_new_session_holds_its_line_too(on_busy: Any) -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("One.").gated(gate), *(["Two."] if on_busy == "queue" else [])])
    async with TurnHarness(TalkFlow, model=model) as h, h.engine.stream("TalkFlow", "x") as turn:
        await wait_for(turn, TurnStarted)
        results: list[Any] = []

        async def second() -> None:
            session = turn.session_id
            results.append(await h.engine.run("TalkFlow", "y", session_id=session, on_busy=on_busy))

        async with anyio.create_task_group() as group:
            group.start_soon(second)
            await anyio.wait_all_tasks_blocked()
            assert len(model.requests) == 1
            gate.set()
        async for _ in turn:
            pass
        assert turn.result.message == "One."
        if on_busy == "queue":
            assert results[0].message == "Two."
        else:
            assert results[0].error.code == "session_busy"


async def test_two_inputs_for_an_ended_session_make_one_successor() -> None:
    script = [Reply.tool_call("save_name", {"name": "Ada"}), "Right?", Reply.tool_call("done"), "Bye."]
    gate = anyio.Event()
    model = ScriptedModel([*script, Reply.text("First.").gated(gate), "Second."])
    async with TurnHarness(BookFlow, model=model) as h:
        ended = await h.say("Ada")
        await h.say("yes")
        results: dict[str, Any] = {}

        async def post(text: str) -> None:
            results[text] = await h.engine.run("BookFlow", text, session_id=ended.session_id)

        async with anyio.create_task_group() as group:
            group.start_soon(post, "a")
            await anyio.wait_all_tasks_blocked()
            group.start_soon(post, "b")
            await anyio.wait_all_tasks_blocked()
            gate.set()
        assert results["a"].session_id == results["b"].session_id
        assert [results["a"].message, results["b"].message] == ["First.", "Second."]
        assert len((await h.engine.list_sessions())[0]) == 2
