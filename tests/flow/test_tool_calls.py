"""Calls: who handles them, in which order, what becomes of failures, and that histories stay whole."""

from __future__ import annotations

import math
import threading
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from flow_kit import call, failure, flow_of, harness, lines, stage
from stepwell import (
    Flow,
    Step,
    TerminateSessionStep,
    ToolContext,
    ToolDefinition,
    UserMessage,
    direct,
    go,
    stay,
    tool,
    tools,
)
from stepwell.engine import ToolStarted
from stepwell.errors import HandlerError
from stepwell.messages import AssistantMessage, ToolResult
from stepwell.testing import Call, Reply

pytestmark = pytest.mark.anyio


def batch(*names: str) -> Reply:
    return Reply.tool_calls(*(Call(name) for name in names))


def answering(value: Any, **options: Any) -> Any:
    """A tool that returns this."""

    @tool(**options)
    async def answer(self: Any) -> Any:
        """Answer."""
        return value

    return answer


# -- results


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (None, "ok"), ("text", "text"), ({"a": [1]}, {"a": [1]}), (0, 0), (False, False), (stay(), "input validated"),
        (stay("again"), "again"), (stay({"n": 1}), {"n": 1}), (stay(None), "ok"), ("B", "B"),
        (direct("x"), "ok"), (direct("x").with_tool_feedback("seen"), "seen"),
    ],
)  # fmt: skip
async def test_what_a_handler_returns_is_the_calls_result(value: Any, content: Any) -> None:
    more = [] if type(value).__name__ == "Direct" else ["Done."]
    async with harness(flow_of(stage("A", answer=answering(value)), stage("B")), call("answer"), *more) as h:
        assert (await h.say("hi")).success
        result = (await h.history("A"))[2]
    assert isinstance(result, ToolResult)
    assert (result.content, result.outcome) == (content, "ok")


async def test_a_plain_function_runs_in_a_thread() -> None:
    ran: list[int] = []

    @tool
    def act(self: Any) -> str:
        ran.append(threading.get_ident())
        return "done"

    async with harness(flow_of(stage("A", act=act)), call("act"), "Ok.") as h:
        assert (await h.say("hi")).success
    assert ran
    assert ran[0] != threading.get_ident()


async def test_calls_run_in_order_and_the_first_outcome_that_is_not_stay_counts() -> None:
    order: list[str] = []

    def noting(name: str, value: Any) -> Any:
        @tool(name)
        async def act(self: Any) -> Any:
            order.append(name)
            return value

        return act

    a = stage("A", one=noting("one", stay("1")), two=noting("two", go("B")), three=noting("three", stay("3")))
    async with harness(flow_of(a, stage("B")), batch("one", "two", "three"), "B.") as h:
        result = await h.say("hi")
        assert lines(await h.history("A"))[2:] == ["ok: 1", "ok: ok", "ok: 3"]
    assert (order, result.current) == (["one", "two", "three"], "B")


async def test_calls_run_concurrently_where_the_stage_says_so() -> None:
    met = anyio.Event()

    @tool
    async def wait(self: Any) -> str:
        await met.wait()
        return "met"

    @tool
    async def meet(self: Any) -> str:
        met.set()
        return "set"

    async with harness(
        flow_of(stage("A", wait=wait, meet=meet), parallel_tools=True), batch("wait", "meet"), "Ok."
    ) as h:
        assert (await h.say("hi")).success
        assert lines(await h.history("A"))[2:4] == ["ok: met", "ok: set"]


@pytest.mark.parametrize("same", [True, False])
async def test_two_different_outcomes_conflict(same: bool) -> None:
    async with harness(flow_of(_wanting(same), stage("B")), batch("one", "two"), *(["B."] if same else [])) as h:
        result = await h.say("hi")
        if same:
            assert result.current == "B"
        else:
            code, ids = failure(result)
            assert (code, ids["stage"], ids["tool"]) == ("conflicting_outcomes", "A", "two")
            assert (await h.document())["workflow"]["current"] == "A"
        assert lines(await h.history("A"))[2:] == ["ok: ok", "ok: two"]


def _wanting(same: bool) -> type[Step]:
    class A(Step):
        @tool
        async def one(self) -> Any:
            return go("B").with_state({"n": 1})

        @tool
        async def two(self) -> Any:
            return (go("B") if same else direct("x")).with_state({"n": 1}).with_tool_feedback("two")

    return A


# -- who handles


async def test_a_tool_that_is_not_exposed_gets_a_result_and_the_log_a_warning() -> None:
    a = stage("A", answer=answering("x"))
    async with harness(flow_of(a), batch("nothing", "answer"), "Ok.") as h:
        assert (await h.say("hi")).success
        history = lines(await h.history("A"))
        assert history[2:4] == ["error: {'accepted': False, 'error': 'There is no tool nothing here.'}", "ok: x"]
        (entry,) = await h.log()
    assert (entry.level, entry.data) == ("warning", {"tool": "nothing", "stage": "A"})
    assert [e.name for e in h.of(ToolStarted)] == ["answer"]


async def test_exposure_is_asked_every_round() -> None:
    class A(Step):
        def use_tools(self) -> list[str]:
            return ["more"] if self.get_state("open", default=False) else []

        def define_tools(self) -> list[ToolDefinition]:
            return [ToolDefinition("more")]

        @tool
        async def unlock(self) -> str:
            self.save_state({"open": True})
            return "open"

        @tool("more", defined=False)
        async def handle_more(self) -> str:
            return "more"

    async with harness(flow_of(A), batch("more"), call("unlock"), call("more"), "Ok.") as h:
        assert (await h.say("hi")).success
        exposed = [[t.name for t in r.tools] for r in h.model.requests]  # type: ignore[attr-defined]
        assert lines(await h.history("A"))[2].startswith("error: {'accepted': False")
        assert lines(await h.history("A"))[6] == "ok: more"
    assert exposed == [["unlock"], ["unlock"], ["unlock", "more"], ["unlock", "more"]]


class Base(Step):
    @tool
    async def first(self) -> str:
        """First."""
        return "base first"

    @tool
    async def second(self) -> str:
        """Second."""
        return "base second"


class Middle(Base):
    async def first(self) -> str:  # not decorated again: same tool, nearer body
        return "middle first"

    @tool
    async def third(self) -> str:
        """Third."""
        return await super().second()


class Leaf(Middle):
    @tool("second", description="Nearer.")
    async def nearer(self) -> str:
        return "leaf second"


async def test_exposure_adds_up_base_first_and_dispatch_takes_the_nearest_class() -> None:
    async with harness(flow_of(Leaf), batch("first", "second", "third"), "Ok.") as h:
        await h.say("hi")
        shown = h.model.requests[0].tools  # type: ignore[attr-defined]
        assert lines(await h.history("Leaf"))[2:5] == ["ok: middle first", "ok: leaf second", "ok: base second"]
    assert [(t.name, t.description) for t in shown] == [("first", "First."), ("second", "Nearer."), ("third", "Third.")]


async def test_steps_may_share_inherited_tools() -> None:
    b = stage("B", base=Base)
    async with harness(flow_of(stage("A", base=Base), b), call("first"), "Ok.") as h:
        assert (await h.say("hi")).success


class Sets(Step):
    got: Any = None

    @tool
    async def a(self) -> str:
        return "single a"

    @tool
    async def b(self) -> str:
        return "single b"

    @tools("b", "a")
    async def both(self, calls: Any) -> Any:
        """Both."""
        type(self).got = [c.name for c in calls]
        return stay("both").with_state({"n": 1}).with_message("noted once")

    @tools("only")
    async def only(self, calls: Any) -> Any:
        return "only"

    def define_tools(self) -> list[ToolDefinition]:
        return [ToolDefinition("only")]


@pytest.mark.parametrize(
    ("names", "results"),
    [
        (["a", "b"], ["both", "both"]), (["b", "a"], ["both", "both"]), (["a", "b", "a"], ["both"] * 3),
        (["a"], ["single a"]), (["a", "a"], ["single a"] * 2),
    ],
    ids="+".join,
)  # fmt: skip
async def test_a_set_handler_wins_for_exactly_its_set(names: list[str], results: list[str]) -> None:
    Sets.got = None
    async with harness(flow_of(Sets), batch(*names), "Ok.") as h:
        assert (await h.say("hi")).success
        history = lines(await h.history("Sets"))
        assert history[2 : 2 + len(names)] == [f"ok: {r}" for r in results]
        assert history.count("code: noted once") == ("both" in results)
        assert [t.name for t in h.model.requests[0].tools] == ["a", "b"]  # type: ignore[attr-defined]
    assert Sets.got == (names if "both" in results else None)


async def test_a_set_handler_exposes_nothing() -> None:
    async with harness(flow_of(Sets), batch("only"), "Ok.") as h:
        assert (await h.say("hi")).success
        assert "There is no tool only here" in lines(await h.history("Sets"))[2]


async def test_a_set_handler_may_route_and_may_fail() -> None:
    class Routes(Step):
        @tool
        async def a(self) -> str:
            return "a"

        @tool
        async def b(self) -> str:
            return "b"

        @tools("a", "b", on_error="report")
        async def both(self, calls: Any, ctx: ToolContext) -> Any:
            if not self.get_state("tried", default=False):
                self.flow.save_step_state(Routes, {"never": 1})
                raise RuntimeError("not yet")
            return go("B")

        async def on_visit(self, message: Any) -> None:
            self.save_state({"tried": message.text == "again"})

    async with harness(flow_of(Routes, stage("B")), batch("a", "b"), "Sorry.", batch("a", "b"), "B.") as h:
        await h.say("hi")
        assert (
            lines(await h.history("Routes"))[2:4] == ["error: {'error': 'The tool failed: RuntimeError: not yet'}"] * 2
        )
        assert "never" not in await h.state("Routes")
        assert (await h.say("again")).current == "B"


async def test_terminate_session_is_a_definition_to_expose_and_handle() -> None:
    class A(Step):
        def use_tools(self) -> list[str]:
            return ["terminate_session"]

        @tool("terminate_session", defined=False)
        async def end(self) -> Any:
            return go(TerminateSessionStep).with_prompt("Say bye.")

    async with harness(flow_of(A, TerminateSessionStep), call("terminate_session"), "Bye.") as h:
        result = await h.say("stop")
        first, second = h.model.requests  # type: ignore[attr-defined]
    assert (result.message, result.completed, result.current) == ("Bye.", True, "TerminateSessionStep")
    assert "End the conversation" in first.tools[0].description
    assert (second.system, second.tools) == ("Say bye.", ())


# -- failures


def failing(**options: Any) -> Any:
    @tool(**options)
    async def fail(self: Any) -> str:
        """Fail."""
        raise LookupError("the key of a customer")

    return fail


REPORTS = [
    ({"on_error": "report"}, {}, {}, True), ({"on_error": "raise"}, {"tool_errors": "report"}, {}, False),
    ({}, {"tool_errors": "report"}, {}, True), ({}, {"tool_errors": "raise"}, {"tool_errors": "report"}, False),
    ({}, {}, {"tool_errors": "report"}, True), ({}, {}, {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("on_tool", "on_step", "on_flow", "reported"), REPORTS)
async def test_the_nearest_word_on_errors_counts(on_tool: Any, on_step: Any, on_flow: Any, reported: bool) -> None:
    members: dict[str, Any] = {"fail": failing(**on_tool), "answer": answering("x"), **on_step}
    script = [batch("answer", "fail"), *(["Sorry."] if reported else [])]
    async with harness(flow_of(stage("A", **members), **on_flow), *script) as h:
        result = await h.say("hi")
        history = lines(await h.history("A"))
    assert history[2] == "ok: x"  # what finished stands
    if reported:
        assert result.message == "Sorry."
        assert history[3] == "error: {'error': 'The tool failed: LookupError: the key of a customer'}"
    else:
        code, ids = failure(result)
        assert (code, ids) == ("handler", {"stage": "A", "tool": "fail"})
        assert "customer" not in result.error.message  # type: ignore[union-attr]
        assert history[3] == "error: {'error': 'The tool failed: LookupError'}"


async def test_in_order_nothing_runs_behind_a_call_that_fails_the_turn() -> None:
    async with harness(flow_of(stage("A", fail=failing(), answer=answering("x"))), batch("fail", "answer")) as h:
        assert failure(await h.say("hi"))[0] == "handler"
        assert lines(await h.history("A"))[3].startswith("not_run: ")


async def test_definitions_carry_on_error_and_timeout_too() -> None:
    @tool("slow", defined=False)
    async def slow(self: Any) -> None:
        await h.clock.sleep(math.inf)

    shared = [ToolDefinition("slow", timeout=5, on_error="report")]
    a = stage("A", slow=slow, use_tools=lambda self: ["slow"])
    async with harness(flow_of(a, define_tools=lambda self: shared), call("slow"), "Sorry.") as h:
        assert (await h.say("hi")).message == "Sorry."
        assert "ToolTimeoutError: Tool slow of stage A did not finish within 5 s" in lines(await h.history("A"))[2]


async def test_a_handler_out_of_time_fails_the_turn_with_its_name() -> None:
    ended: list[Any] = []

    @tool(timeout=3)
    async def slow(self: Any, ctx: ToolContext) -> None:
        try:
            await h.clock.sleep(math.inf)
        finally:
            ended.append((ctx.deadline, h.clock.monotonic()))

    async with harness(flow_of(stage("A", slow=slow)), call("slow")) as h:
        code, ids = failure(await h.say("hi"))
        assert (code, ids["tool"], ids["stage"]) == ("tool_timeout", "slow", "A")
        assert lines(await h.history("A"))[2].startswith("error: ")
    assert ended == [(3.0, 3.0)]


async def test_a_thread_out_of_time_is_left_alone_and_its_late_writes_are_refused() -> None:
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()
    late: list[Exception] = []

    @tool(timeout=3)
    def slow(self: Any, ctx: ToolContext) -> None:
        begun.set()
        assert ctx.cancelled.wait(30)
        over.wait()
        try:
            self.save_state({"late": 1})
        except HandlerError as error:
            late.append(error)
        ended.set()

    async with harness(flow_of(stage("A", slow=slow)), call("slow")) as h, anyio.create_task_group() as group:
        group.start_soon(h.say, "hi")
        await anyio.to_thread.run_sync(begun.wait)
        await h.clock.advance(4)
        while not h.results:
            await anyio.lowlevel.checkpoint()
        over.set()
        await anyio.to_thread.run_sync(ended.wait)
        assert failure(h.results[0])[0] == "tool_timeout"
        assert await h.state("A") == {}
    assert len(late) == 1


# -- attachments


async def test_attachments_follow_the_results_and_cleanup_follows_the_model() -> None:
    log: list[str] = []

    @tool
    async def show(self: Any, n: int) -> Any:
        async def clean() -> None:
            log.append(f"cleaned {n} after {len(h.model.requests)} requests")  # type: ignore[attr-defined]

        return stay(f"shown {n}").with_messages(f"picture {n}", UserMessage(content="caption")).with_cleanup(clean)

    async def on_response(self: Any, result: str) -> None:
        log.append("responded")

    script = [Reply.tool_calls(Call("show", {"n": 1}), Call("show", {"n": 2})), "Nice."]
    async with harness(flow_of(stage("A", show=show, on_response=on_response)), *script) as h:
        await h.say("hi")
        assert lines(await h.history("A"))[2:] == [
            "ok: shown 1", "ok: shown 2", "code: picture 1", "user: caption", "code: picture 2", "user: caption",
            "model: Nice.",
        ]  # fmt: skip
    assert log == ["cleaned 1 after 2 requests", "cleaned 2 after 2 requests", "responded"]


def cleaning(log: list[str], outcome: Any) -> Any:
    @tool
    async def clean(self: Any) -> Any:
        async def done() -> None:
            log.append("cleaned")

        return outcome.with_cleanup(done)

    return clean


@pytest.mark.parametrize("outcome", [go("B"), direct("x"), go("Logic")], ids=["go", "direct", "logic"])
async def test_cleanup_is_awaited_whatever_the_outcome_is(outcome: Any) -> None:
    from stepwell import LogicStep

    class Logic(LogicStep):
        async def run_logic(self) -> Any:
            return go("B")

    log: list[str] = []
    more = [] if type(outcome).__name__ == "Direct" else ["B."]
    async with harness(flow_of(stage("A", clean=cleaning(log, outcome)), stage("B"), Logic), call("clean"), *more) as h:
        assert (await h.say("hi")).success
    assert log == ["cleaned"]


@pytest.mark.parametrize("how", ["model-fails", "sibling-fails", "conflict", "cancelled", "next-stage-fails"])
async def test_cleanup_is_awaited_on_every_error_path(how: str) -> None:
    log: list[str] = []
    script: list[Any] = [batch("clean")]
    members: dict[str, Any] = {"clean": cleaning(log, go("B") if how in ("conflict", "next-stage-fails") else stay())}
    b: dict[str, Any] = {}
    match how:
        case "model-fails":
            script.append(Reply.error(status=400))
        case "sibling-fails":
            members["fail"], script = failing(), [batch("clean", "fail")]
        case "conflict":
            members["answer"], script = answering(direct("x")), [batch("clean", "answer")]
        case "cancelled":
            script.append(Reply.text("never").stalling())
        case _:
            b["on_enter"] = _raises
    async with harness(flow_of(stage("A", **members), stage("B", **b)), *script) as h:
        if how == "cancelled":
            async with anyio.create_task_group() as group:
                group.start_soon(h.say, "hi")
                await h.model.wait_stalled()  # type: ignore[attr-defined]
                h.turn.cancel()  # type: ignore[union-attr]
            assert h.results[-1].error.code == "turn_cancelled"  # type: ignore[union-attr]
        else:
            assert not (await h.say("hi")).success
    assert log == ["cleaned"]


async def _raises(self: Any) -> None:
    raise RuntimeError("no")


async def test_a_cleanup_that_fails_fails_the_turn_after_the_others() -> None:
    log: list[str] = []

    async def broken() -> None:
        log.append("broken")
        raise RuntimeError("no")

    async def fine() -> None:
        log.append("fine")

    a = stage("A", answer=answering(stay().with_cleanup(broken).with_cleanup(broken).with_cleanup(fine)))
    async with harness(flow_of(a), call("answer"), "Ok.") as h:
        assert failure(await h.say("hi"))[0] == "handler"
    assert log == ["broken", "broken", "fine"]


# -- call ids


async def test_repeated_and_missing_call_ids() -> None:
    replies = [
        Reply.tool_calls(*(Call("answer", id=i) for i in ("same", "same", "", "x" * 600))),
        Reply.tool_call("answer", id="same"),
        "Ok.",
    ]  # fmt: skip
    async with harness(flow_of(stage("A", answer=answering("x"))), *replies) as h:
        assert (await h.say("hi")).success
        history = await h.history("A")
    lines(history)
    made = [c for m in history if isinstance(m, AssistantMessage) for c in m.calls]
    assert made[0].id == made[4].id == "same"
    assert len({c.id for c in made[:4]}) == 4
    assert all(0 < len(c.id) <= 512 for c in made)
    assert len({c.key for c in made}) == 5
    results = [m.call for m in history if isinstance(m, ToolResult)]
    assert results == [c.id for c in made]


def test_the_decorators_leave_the_method_a_method() -> None:
    assert Base.first.__name__ == "first"
    assert issubclass(flow_of(Base), Flow)
