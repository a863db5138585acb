"""What may suspend and what may not, and what handlers and `on_answer` may make of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flow_kit import call, failure, flow_of, harness, stage
from stepwell import Engine, Step, SuspendRequest, ToolCall, ToolContext, TurnResult, go, stay, suspend, tool, tools
from stepwell.errors import FlowDefinitionError, UnknownRequestError
from stepwell.messages import ToolResult
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness
from stepwell.tools import request_id

pytestmark = pytest.mark.anyio

ASK = SuspendRequest("question", "why?")


def returning(value: Any, **members: Any) -> type[Any]:
    """A step whose tool returns a value."""

    async def act(self: Step) -> Any:
        """Act."""
        return value

    return stage("DeskStep", act=tool(act), **members)


@pytest.mark.parametrize(
    "value",
    [
        suspend("why?"),  # type: ignore[arg-type]
        suspend(SuspendRequest("riddle")),  # type: ignore[arg-type]
        suspend(SuspendRequest("question", object())),
        suspend(SuspendRequest("question", "\ud800")),
        suspend(SuspendRequest("question", None, 0)),
        suspend(SuspendRequest("question", None, -1.0)),
        suspend(SuspendRequest("question", None, float("nan"))),
        suspend(SuspendRequest("question", None, float("inf"))),
        suspend(SuspendRequest("question", None, "1")),  # type: ignore[arg-type]
        suspend(SuspendRequest("question", id="")),
        suspend(SuspendRequest("question", id="x" * 256)),
        suspend(SuspendRequest("question", id="\ud800")),
        suspend(ASK).with_tool_feedback("told"),
        suspend(ASK).with_content_type("text/html"),
    ],
)
async def test_a_request_that_is_none_is_refused(value: Any) -> None:
    async with harness(flow_of(returning(value)), call("act")) as h:
        code, names = failure(await h.say("go"))
    assert (code, names["tool"], names["stage"]) == ("invalid_outcome", "act", "DeskStep")


async def test_only_tools_suspend() -> None:
    async def on_response(self: Step, result: Any) -> Any:
        return suspend(ASK)

    async with harness(flow_of(stage("DeskStep", on_response=on_response)), "hello") as h:
        code, names = failure(await h.say("go"))
    assert (code, names["hook"]) == ("invalid_outcome", "on_response")


async def test_a_call_that_routes_and_one_that_waits_are_in_conflict() -> None:
    class DeskStep(Step):
        @tool
        async def ask(self) -> Any:
            return suspend(ASK)

        @tool
        async def leave(self) -> Any:
            return go("OtherStep")

    script = Reply.tool_calls(Call("ask", id="a"), Call("leave", id="b"))
    async with harness(flow_of(DeskStep, stage("OtherStep")), script) as h:
        assert failure(await h.say("go"))[0] == "conflicting_outcomes"
        results = {m.call: m.outcome for m in await h.history("DeskStep") if isinstance(m, ToolResult)}
    assert results == {"a": "not_run", "b": "ok"}


async def test_what_a_handler_wrote_before_it_suspended_counts() -> None:
    class DeskStep(Step):
        @tool
        async def ask(self) -> Any:
            self.save_state({"asked": True})
            return suspend(ASK).with_state({"more": 1})

    async with harness(flow_of(DeskStep), call("ask"), "Thanks.") as h:
        result = await h.say("go")
        assert await h.state("DeskStep") == {"asked": True, "more": 1}
        done = await h.engine.answer(result.session_id, result.pending[0].id, "because")
    assert done.message == "Thanks."


@pytest.mark.parametrize("on_error", ["raise", "report"])
async def test_on_answer_fails_as_a_handler_does(on_error: Any) -> None:
    class DeskStep(Step):
        @tool(on_error=on_error)
        async def ask(self) -> Any:
            return suspend(ASK)

        async def on_answer(self, request: SuspendRequest, value: Any) -> Any:
            raise RuntimeError("no")

    async with harness(flow_of(DeskStep), call("ask"), *(["Sorry."] if on_error == "report" else [])) as h:
        result = await h.say("go")
        done = await h.engine.answer(result.session_id, result.pending[0].id, "because")
        outcomes = [m.outcome for m in await h.history("DeskStep") if isinstance(m, ToolResult)]
    assert outcomes == ["error"]
    assert (done.message, done.error and done.error.code) == (
        ("Sorry.", None) if on_error == "report" else ("", "handler")
    )


async def test_on_answer_may_ask_again() -> None:
    class DeskStep(Step):
        @tool(approval=True)
        async def ask(self) -> Any:
            return suspend(ASK)

        async def on_answer(self, request: SuspendRequest, value: Any) -> Any:
            return stay(value) if value != "dunno" else suspend(SuspendRequest("question", "really?"))

    async with harness(flow_of(DeskStep), call("ask"), "Thanks.") as h:
        result = await h.say("go")
        kinds = []
        for value in (True, "dunno", "because"):
            kinds.append((result.pending[0].kind, result.pending[0].payload))
            result = await h.engine.answer(result.session_id, result.pending[0].id, value)
        results = [m.content for m in await h.history("DeskStep") if isinstance(m, ToolResult)]
    assert [kind for kind, _ in kinds] == ["approval", "question", "question"]
    assert [payload for _, payload in kinds][1:] == ["why?", "really?"]
    assert (result.message, results) == ("Thanks.", ["because"])


async def test_a_tools_handler_cannot_suspend() -> None:
    class DeskStep(Step):
        @tool
        async def one(self) -> Any: ...

        @tool
        async def two(self) -> Any: ...

        @tools("one", "two")
        async def both(self, calls: Any) -> Any:
            return suspend(ASK)

    async with harness(flow_of(DeskStep), Reply.tool_calls(Call("one", id="a"), Call("two", id="b"))) as h:
        assert failure(await h.say("go"))[0] == "invalid_outcome"


async def test_what_is_left_of_a_batch_is_no_set_for_a_tools_handler() -> None:
    """Three calls, two of which wait: the handler of exactly these two was never meant."""

    class DeskStep(Step):
        @tool
        async def one(self) -> Any:
            return suspend(SuspendRequest("question", 1))

        @tool
        async def two(self) -> Any:
            return suspend(SuspendRequest("question", 2))

        @tool
        async def three(self) -> Any:
            return "three"

        @tools("one", "two")
        async def both(self, calls: Any) -> Any:
            return "both"

    script = Reply.tool_calls(Call("one", id="a"), Call("two", id="b"), Call("three", id="c"))
    async with harness(flow_of(DeskStep), script, "Thanks.") as h:
        result = await h.say("go")
        for one in result.pending:
            await h.engine.answer(result.session_id, one.id, one.payload)
        results = {m.call: m.content for m in await h.history("DeskStep") if isinstance(m, ToolResult)}
    assert results == {"a": 1, "b": 2, "c": "three"}


async def test_a_step_that_overrides_run_cannot_suspend() -> None:
    async def run(self: Step, user_message: Any = None) -> Any:
        return await super(type(self), self).run(user_message)

    async with harness(flow_of(returning(suspend(ASK), run=run)), call("act")) as h:
        code, names = failure(await h.say("go"))
    assert (code, names["tool"]) == ("invalid_outcome", "act")


def test_what_cannot_be_registered() -> None:
    class Whole(Step):
        @tool(approval=True)
        async def pay(self) -> Any: ...

        async def run(self, user_message: Any = None) -> Any: ...

    class Together(Step):
        @tool(client=True)
        async def pay(self) -> Any: ...

        @tool
        async def look(self) -> Any: ...

        @tools("pay", "look")
        async def both(self, calls: Any) -> Any: ...

    for step, why in ((Whole, "overrides run"), (Together, "handled alone")):
        with pytest.raises(FlowDefinitionError, match=why) as caught:
            Engine([flow_of(step)], models={"scripted": ScriptedModel([])})
        assert caught.value.ids["tool"] == "pay"
    with pytest.raises(FlowDefinitionError, match="approved and to run on the client"):

        class Both(Step):
            @tool(approval=True, client=True)
            async def pay(self) -> Any: ...


async def written(h: TurnHarness, session: str) -> None:
    """Wait until there is a row in the inbox."""
    for _ in range(100):
        if await h.store.inbox_list(session, pending=True):
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing was written")


async def test_a_client_may_answer_before_the_turn_is_stored_as_one_that_waits() -> None:
    """It has seen the input of its tool, and is quick: its answer waits for the turn, and is not refused."""
    answers: list[asyncio.Task[TurnResult]] = []

    class DeskStep(Step):
        @tool(client=True)
        async def locate(self) -> Any: ...

        @tool
        async def look(self, ctx: ToolContext) -> str:
            key = ctx.idempotency_key.replace("::1", "::0")
            early = h.engine.answer(self.flow.session_id, request_id(ToolCall("a", "locate", {}, key)), "here")
            answers.append(asyncio.ensure_future(early))
            await written(h, self.flow.session_id)
            return "seen"

    script = Reply.tool_calls(Call("locate", id="a"), Call("look", id="b"))
    h = harness(flow_of(DeskStep), script, "Thanks.")
    async with h:
        assert (await h.say("go")).status == "suspended"
        done = await answers[0]
        results = {m.call: m.content for m in await h.history("DeskStep") if isinstance(m, ToolResult)}
    assert (done.message, results) == ("Thanks.", {"a": "here", "b": "seen"})


async def test_an_early_answer_to_what_is_never_asked_is_refused_and_leaves_nothing() -> None:
    answers: list[asyncio.Task[TurnResult]] = []

    class DeskStep(Step):
        @tool
        async def look(self) -> str:
            answers.append(asyncio.ensure_future(h.engine.answer(self.flow.session_id, "never", 1)))
            await written(h, self.flow.session_id)
            return "seen"

    h = harness(flow_of(DeskStep), call("look"), "Thanks.")
    async with h:
        result = await h.say("go")
        with pytest.raises(UnknownRequestError):
            await answers[0]
        assert await h.store.inbox_list(result.session_id) == []
        assert await h.store.due() == []


async def test_a_turn_that_waits_can_be_cancelled() -> None:
    async with harness(flow_of(returning(suspend(ASK))), call("act"), "Again.") as h:
        result = await h.say("go")
        assert await h.engine.cancel(result.session_id, reason="never mind")
        head, _ = await h.store.load(result.session_id)
        assert (head.turn, head.status) == (None, "running")
        assert [m.outcome for m in await h.history("DeskStep") if isinstance(m, ToolResult)] == ["not_run"]
        assert (await h.say("and now?")).message == "Again."
