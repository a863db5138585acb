"""Tools of an accepted reply: all calls run, all get results; in order, side by side, in threads; and how they fail."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import anyio
import pydantic
import pytest

from loop_flows import FAST, Other, Talk, chat
from stepwell import Flow, Step, direct, go, retry_with_model, stay, tool, tools
from stepwell.engine import ToolFinished, ToolProgress, ToolStarted, Warned
from stepwell.errors import ConflictingOutcomesError, HandlerError, InvalidOutcomeError, ToolTimeoutError
from stepwell.messages import HistoryCheck, ToolResult
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, TurnHarness
from stepwell.tools import ToolContext, ToolDefinition

pytestmark = pytest.mark.anyio


class Several(Talk):
    """Handlers of every kind; coroutines and plain functions."""

    order: list[str]

    @tool
    async def slow(self) -> str:
        """Slow."""
        await self.flow.clock.sleep(5)
        self.order.append("slow")
        self.save_state({"slow": True})
        return "slow is done"

    @tool
    async def boom(self) -> str:
        """Fail."""
        self.order.append("boom")
        self.save_state({"boom": True})
        raise KeyError("secret")

    @tool
    async def fast(self) -> str:
        """Fast."""
        self.order.append("fast")
        self.save_state({"fast": True})
        return "fast is done"


class InThreads(Talk):
    """The same in plain functions, which run in worker threads: `slow` waits for `fast`, if that can come first."""

    order: list[str]
    came: threading.Event

    @tool
    def slow(self) -> str:
        """Slow."""
        if self.flow.parallel_tools:
            assert self.came.wait(30)
        self.order.append("slow")
        self.save_state({"slow": True})
        return "slow is done"

    @tool
    def boom(self) -> str:
        """Fail."""
        self.order.append("boom")
        self.save_state({"boom": True})
        raise KeyError("secret")

    @tool
    def fast(self) -> str:
        """Fast."""
        self.order.append("fast")
        self.save_state({"fast": True})
        self.came.set()
        return "fast is done"


THREE = Reply.tool_calls(Call("slow", id="1"), Call("boom", id="2"), Call("fast", id="3"))


def several(base: Any = Several, **flow: Any) -> tuple[Any, list[str], FakeClock]:
    order: list[str] = []
    clock = FakeClock(auto_advance=True)
    step = {"order": order, "came": threading.Event()}
    return chat(policy=FAST, base=base, step=step, flow={"clock": clock, **flow}), order, clock


def results(history: Any) -> list[ToolResult]:
    return [m for m in history if isinstance(m, ToolResult)]


@pytest.mark.parametrize("base", [Several, InThreads])
@pytest.mark.parametrize("parallel", [False, True])
async def test_scenario_C25_one_of_three_tools_fails_and_is_reported(  # noqa: N802
    base: Any, parallel: bool
) -> None:
    flow, order, clock = several(base, parallel_tools=parallel, tool_errors="report")
    async with TurnHarness(flow, model=ScriptedModel([THREE, "Two of three."]), clock=clock) as h:
        result = await h.say("hi")
        history = await h.history("Talk")
        assert await h.state("Talk") == {"slow": True, "fast": True}
    assert result.message == "Two of three."
    HistoryCheck().add_all(history)
    assert [(r.call, r.outcome) for r in results(history)] == [("1", "ok"), ("2", "error"), ("3", "ok")]
    assert results(history)[1].content == {"error": "The tool failed: KeyError: 'secret'"}
    assert order == ["slow", "boom", "fast"] if not parallel else order.index("fast") < order.index("slow")
    assert len(h.of(ToolFinished)) == 3


@pytest.mark.parametrize("base", [Several, InThreads])
@pytest.mark.parametrize("parallel", [False, True])
async def test_scenario_C25_fail_fast_still_records_what_finished(  # noqa: N802
    base: Any, parallel: bool
) -> None:
    flow, order, clock = several(base, parallel_tools=parallel)
    async with TurnHarness(flow, model=ScriptedModel([THREE, "Next turn."]), clock=clock) as h:
        result = await h.say("hi")
        history = await h.history("Talk")
        state = await h.state("Talk")
        assert (await h.say("more")).message == "Next turn."
    assert not result.success
    assert result.error is not None
    assert (result.error.code, result.error.ids["tool"]) == ("handler", "boom")
    HistoryCheck().add_all(history)
    outcomes = {r.name: r.outcome for r in results(history)}
    assert len(results(history)) == 3
    if parallel:
        assert outcomes == {"slow": "ok", "boom": "error", "fast": "ok"}
        assert state == {"slow": True, "fast": True}
    else:
        assert outcomes == {"slow": "ok", "boom": "error", "fast": "not_run"}
        assert state == {"slow": True}
        assert order == ["slow", "boom"]
    assert "secret" not in str(results(history))


async def test_the_error_of_a_failed_turn_has_the_cause_and_no_exception_group() -> None:
    flow, _, clock = several(parallel_tools=True)
    async with TurnHarness(flow, model=ScriptedModel([THREE]), clock=clock) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, HandlerError)
    assert isinstance(h.turn.error.__cause__, KeyError)


class Picky(Talk):
    exposed: dict[str, bool]

    def use_tools(self) -> list[str]:
        return ["hidden"] if self.exposed["hidden"] else []

    def define_tools(self) -> list[ToolDefinition]:
        return [ToolDefinition("hidden", parameters={"type": "object", "properties": {"x": {}}})]

    @tool("hidden", defined=False)
    async def hide(self, x: int = 0) -> str:
        """Hidden at times."""
        self.exposed["hidden"] = False
        return "ok"

    @tool
    async def first(self) -> str:
        """Hide the other tool."""
        self.exposed["hidden"] = False
        return "hidden from now on"

    @tool
    async def odd(self) -> Any:
        """Return what no handler may return."""
        return self.value

    value: Any = None


async def test_calls_of_tools_that_are_not_there_get_a_result_and_a_warning() -> None:
    async with TurnHarness(chat(), model=ScriptedModel([Reply.tool_call("nope"), "Sorry."])) as h:
        result = await h.say("hi")
        (told,) = results(await h.history("Talk"))
    assert result.success
    assert told.content == {"accepted": False, "error": "There is no tool nope here."}
    assert [event.data["tool"] for event in h.of(Warned)] == ["nope"]
    assert h.of(ToolStarted) == []


async def test_what_is_exposed_is_decided_before_the_batch_runs() -> None:
    calls = Reply.tool_calls(Call("first"), Call("hidden", {"x": 1}))
    model = ScriptedModel([calls, Reply.tool_call("hidden"), "Done."])
    async with TurnHarness(chat(base=Picky, step={"exposed": {"hidden": True}}), model=model) as h:
        await h.say("hi")
        told = results(await h.history("Talk"))
    assert [r.outcome for r in told] == ["ok", "ok", "error"]
    assert [[schema.name for schema in request.tools] for request in model.requests][1:] == [
        ["look", "first", "odd"]
    ] * 2


NAMES = ("elsewhere", "here", "neither")


class Declared(Talk):
    """Tools that are declared apart from their handlers."""

    def define_tools(self) -> list[ToolDefinition]:
        return [
            ToolDefinition("elsewhere", on_error="report"),
            ToolDefinition("here", on_error="raise"),
            ToolDefinition("neither"),
        ]

    def use_tools(self) -> list[str]:
        return list(NAMES)


def failing(name: str, **options: Any) -> Any:
    async def handler(self: Any) -> str:
        raise KeyError

    return tool(name, defined=False, **options)(handler)


@pytest.mark.parametrize(
    ("name", "handler", "stage", "reported"),
    [
        ("elsewhere", {}, "raise", True),
        ("here", {"on_error": "report"}, "raise", True),
        ("here", {}, "report", False),
        ("neither", {}, "report", True),
        ("neither", {}, "raise", False),
    ],
)
async def test_who_says_what_a_failure_means_handler_then_definition_then_stage(
    name: str, handler: dict[str, Any], stage: str, reported: bool
) -> None:
    handlers = {f"on_{known}": failing(known, **(handler if known == name else {})) for known in NAMES}
    flow = chat(base=Declared, step={**handlers, "tool_errors": stage})
    script = [Reply.tool_call(name), *(["Sorry."] if reported else [])]
    async with TurnHarness(flow, model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    assert result.success is reported


class Value:
    """Not JSON."""


@pytest.mark.parametrize("value", [Value(), {"x": Value()}, retry_with_model("scripted:spare"), stay(Value())])
async def test_what_a_handler_may_not_return_fails_the_turn_even_where_errors_are_reported(value: Any) -> None:
    flow = chat(base=Picky, step={"value": value, "exposed": {"hidden": True}}, flow={"tool_errors": "report"})
    async with TurnHarness(flow, model=ScriptedModel([Reply.tool_call("odd")])) as h:
        await h.say("hi")
        (told,) = results(await h.history("Talk"))
    assert isinstance(h.turn.error, InvalidOutcomeError)
    assert h.turn.error.ids["tool"] == "odd"
    assert told.outcome == "error"


class Outcomes(Talk):
    @tool
    async def leave(self, to: str = "Other", note: str = "") -> Any:
        """Leave."""
        return go(to).with_tool_feedback(f"leaving {note}")

    @tool
    async def remain(self) -> Any:
        """Stay."""
        return stay()

    @tool
    async def say(self, text: str) -> Any:
        """Answer from code."""
        return direct(text)

    @tool
    async def by_class(self) -> Any:
        """Return a stage class."""
        return Other


async def test_the_first_outcome_that_is_not_stay_is_applied() -> None:
    calls = Reply.tool_calls(Call("remain"), Call("leave", {"note": "1"}), Call("leave", {"note": "2"}))
    async with TurnHarness(chat(base=Outcomes), model=ScriptedModel([calls, "I can help."])) as h:
        result = await h.say("hi")
        told = results(await h.history("Talk"))
    assert result.current == "Other"
    assert [r.content for r in told] == ["input validated", "leaving 1", "leaving 2"]


async def test_a_second_different_outcome_is_a_conflict() -> None:
    calls = Reply.tool_calls(Call("say", {"text": "a"}), Call("leave"))
    async with TurnHarness(chat(base=Outcomes), model=ScriptedModel([calls])) as h:
        await h.say("hi")
        told = results(await h.history("Talk"))
    assert isinstance(h.turn.error, ConflictingOutcomesError)
    assert "say" in h.turn.error.message
    assert "leave" in h.turn.error.message
    assert h.turn.error.ids["tool"] == "leave"
    assert len(told) == 2


async def test_a_returned_class_and_go_are_the_same() -> None:
    async with TurnHarness(chat(base=Outcomes), model=ScriptedModel([Reply.tool_call("by_class"), "I can help."])) as h:
        assert (await h.say("hi")).current == "Other"


class Counting(Talk):
    seen: list[Any]

    @tool
    async def count(self) -> str:
        """Count."""
        before = self.get_state("n", default=0)
        self.seen.append(before)
        self.save_state({"n": before + 1})
        self.seen.append(self.get_state("n"))
        return "ok"


@pytest.mark.parametrize(("parallel", "seen", "n"), [(False, [0, 1, 1, 2], 2), (True, [0, 1, 0, 1], 1)])
async def test_calls_in_order_read_the_writes_of_earlier_ones_concurrent_ones_do_not(
    parallel: bool, seen: list[int], n: int
) -> None:
    log: list[int] = []
    flow = chat(base=Counting, step={"seen": log}, flow={"parallel_tools": parallel})
    calls = Reply.tool_calls(Call("count"), Call("count"))
    async with TurnHarness(flow, model=ScriptedModel([calls, "Done."])) as h:
        await h.say("hi")
        assert await h.state("Talk") == {"n": n}
    assert log == seen


async def test_a_call_that_is_refused_does_not_hide_the_writes_before_it() -> None:
    log: list[int] = []
    calls = Reply.tool_calls(Call("count"), Call("nope"), Call("count"))
    flow = chat(base=Counting, step={"seen": log})
    async with TurnHarness(flow, model=ScriptedModel([calls, "Done."])) as h:
        await h.say("hi")
    assert log == [0, 1, 1, 2]


# -- time


class Late(Talk):
    log: list[Any]

    @tool(timeout=3)
    async def waits(self, ctx: ToolContext) -> str:
        """Wait."""
        self.log.append((ctx.deadline, ctx.cancelled, ctx.call_id, ctx.run_id, ctx.idempotency_key, ctx.attempt))
        ctx.progress({"done": 1})
        await self.flow.clock.sleep(10)
        return "never"

    @tool
    async def writes_late(self) -> str:
        """Start something that writes when the call has ended."""
        gate: anyio.Event = self.flow.gate

        async def later() -> None:
            await gate.wait()
            try:
                self.save_state({"late": True})
            except HandlerError as error:
                self.log.append(error)

        self.flow.group.start_soon(later)
        return "ok"


async def test_a_handler_that_is_out_of_time() -> None:
    for on_error, told in (("raise", False), ("report", True)):
        log: list[Any] = []
        clock = FakeClock(auto_advance=True)
        flow = chat(base=Late, step={"log": log}, flow={"clock": clock, "tool_errors": on_error})
        script = [Reply.tool_call("waits", id="c1"), *(["Sorry."] if told else [])]
        async with TurnHarness(flow, model=ScriptedModel(script), clock=clock) as h:
            result = await h.say("hi")
            (recorded,) = results(await h.history("Talk"))
        assert result.success is told
        assert told or isinstance(h.turn.error, ToolTimeoutError)
        assert recorded.outcome == "error"
        assert "ToolTimeoutError" in recorded.content["error"]
        ((deadline, cancelled, call, run, key, attempt),) = log
        assert (deadline, call, run, attempt) == (3, "c1", result.run_id, 1)
        assert key.startswith(f"{result.invocation_id}-step-")
        assert cancelled.is_set()
        assert [event.value for event in h.of(ToolProgress)] == [{"done": 1}]
        assert clock.monotonic() == 3


async def test_writes_after_the_call_has_ended_are_refused() -> None:
    log: list[Any] = []
    gate = anyio.Event()
    async with anyio.create_task_group() as group:
        flow = chat(base=Late, step={"log": log}, flow={"gate": gate, "group": group})
        async with TurnHarness(flow, model=ScriptedModel([Reply.tool_call("writes_late"), "Done."])) as h:
            await h.say("hi")
            gate.set()
            await h.clock.settle()
            assert await h.state("Talk") == {}
    assert isinstance(log[0], HandlerError)


@pytest.mark.parametrize(("parallel", "outcomes"), [(False, ["unknown", "not_run"]), (True, ["unknown", "ok"])])
async def test_a_cancelled_batch_says_what_began_and_what_did_not(parallel: bool, outcomes: list[str]) -> None:
    log: list[Any] = []
    clock = FakeClock()
    flow = chat(base=Late, step={"log": log}, flow={"clock": clock, "parallel_tools": parallel})
    calls = Reply.tool_calls(Call("waits"), Call("look", {"city": "Rome"}))
    async with (
        TurnHarness(flow, model=ScriptedModel([calls, "Next turn."]), clock=clock) as h,
        anyio.create_task_group() as group,
    ):
        group.start_soon(h.say, "hi")
        await clock.settle()
        assert len(log) == 1
        h.turn.cancel()
        await clock.settle()
        told = results(await h.history("Talk"))
        assert [r.outcome for r in told] == outcomes
        assert log[0][1].is_set()
        assert (await h.say("more")).message == "Next turn."


# -- one handler for several calls


class Together(Talk):
    log: list[Any]
    result: Any = None

    def define_tools(self) -> list[ToolDefinition]:
        return [ToolDefinition("left"), ToolDefinition("right")]

    def use_tools(self) -> list[str]:
        return ["left", "right"] if self.flow.exposes else []

    @tool("left", defined=False)
    async def one_left(self, n: int = 0) -> str:
        """One call alone."""
        return f"left {n}"

    @tools("left", "right", timeout=5)
    async def both(self, calls: Any, ctx: ToolContext) -> Any:
        """Both at once."""
        self.log.append([(call.name, call.args) for call in calls])
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def together(result: Any = None, *, exposes: bool = True, **flow: Any) -> tuple[Any, list[Any]]:
    log: list[Any] = []
    return chat(base=Together, step={"log": log, "result": result}, flow={"exposes": exposes, **flow}), log


BOTH = Reply.tool_calls(Call("right", {"any": 1}), Call("left", {"n": "2"}))


async def test_a_set_handler_gets_all_calls_and_gives_one_outcome() -> None:
    flow, log = together(go("Other").with_tool_feedback("both"))
    async with TurnHarness(flow, model=ScriptedModel([BOTH, "I can help."])) as h:
        result = await h.say("hi")
        told = results(await h.history("Talk"))
    assert log == [[("right", {"any": 1}), ("left", {"n": 2})]]
    assert result.current == "Other"
    assert [r.content for r in told] == ["both", "both"]


async def test_a_set_handler_wins_only_where_exactly_its_tools_are_called() -> None:
    flow, log = together()
    script = [Reply.tool_call("left", {"n": 1}), Reply.tool_calls(Call("left"), Call("look")), "Done."]
    async with TurnHarness(flow, model=ScriptedModel(script)) as h:
        await h.say("hi")
    assert log == []


@pytest.mark.parametrize("bad", [{"n": "x"}, "raw"])
async def test_a_set_handler_is_not_called_when_one_calls_arguments_are_wrong(bad: Any) -> None:
    flow, log = together()
    wrong = Call("left", bad) if isinstance(bad, dict) else Call("right", raw=bad)
    other = Call("right") if isinstance(bad, dict) else Call("left", {"n": 1})
    async with TurnHarness(flow, model=ScriptedModel([Reply.tool_calls(wrong, other), "Sorry."])) as h:
        await h.say("hi")
        told = results(await h.history("Talk"))
    assert log == []
    assert all(r.outcome == "error" and not r.content["accepted"] for r in told)
    assert "Not run" in told[1].content["error"]


async def test_a_set_handler_that_raises() -> None:
    for on_error in ("raise", "report"):
        flow, _ = together(RuntimeError("x"), tool_errors=on_error)
        script = [BOTH, *(["Sorry."] if on_error == "report" else [])]
        async with TurnHarness(flow, model=ScriptedModel(script)) as h:
            result = await h.say("hi")
            told = results(await h.history("Talk"))
        assert [r.outcome for r in told] == ["error", "error"]
        assert result.success is (on_error == "report")


async def test_a_set_handler_does_not_expose_its_tools() -> None:
    flow, log = together("x", exposes=False)
    async with TurnHarness(flow, model=ScriptedModel([BOTH, "Sorry."])) as h:
        await h.say("hi")
        told = results(await h.history("Talk"))
    assert log == []
    assert [r.outcome for r in told] == ["error", "error"]


def broken(value: Any) -> Any:
    raise KeyError("x")


class Broken(Talk):
    @tool
    async def strange(self, x: Annotated[Any, pydantic.BeforeValidator(broken)]) -> str:
        """Has a validator that fails in its own way."""
        return "never"


async def test_an_exception_of_an_arguments_validator_is_the_handlers() -> None:
    for parallel in (False, True):
        call = Reply.tool_calls(Call("strange", {"x": 1}), Call("look", {"city": "Rome"}))
        async with TurnHarness(chat(base=Broken, flow={"parallel_tools": parallel}), model=ScriptedModel([call])) as h:
            await h.say("hi")
            told = results(await h.history("Talk"))
        assert isinstance(h.turn.error, HandlerError)
        assert isinstance(h.turn.error.__cause__, KeyError)
        assert [r.outcome for r in told] == ["error", "ok" if parallel else "not_run"]


async def test_idempotency_keys_differ_even_where_a_visit_is_one_unit() -> None:
    keys: list[str] = []

    class Whole(Talk):
        async def run(self, user_message: str | None = None) -> Any:
            return await super().run(user_message)

        @tool
        async def pay(self, ctx: ToolContext) -> str:
            """Pay."""
            keys.append(ctx.idempotency_key)
            return "paid"

    pay = Reply.tool_calls(Call("pay"), Call("pay"))
    async with TurnHarness(chat(base=Whole), model=ScriptedModel([pay, pay, "Done."])) as h:
        await h.say("hi")
    assert h.results[0].units == 1
    assert len(keys) == len(set(keys)) == 4


async def test_a_part_of_a_set_is_told_that_it_runs_only_as_a_whole() -> None:
    class PairStep(Step):
        def define_tools(self) -> list[ToolDefinition]:
            return [ToolDefinition("left"), ToolDefinition("right")]

        def use_tools(self) -> list[str]:
            return ["left", "right"]

        @tools("left", "right")
        async def both(self, calls: Any) -> str:
            return f"{len(calls)} of 2"

    class PairFlow(Flow):
        def config_model(self) -> str:
            return "scripted:m"

        def define_steps(self) -> list[Step[Any, Any]]:
            return [PairStep(self)]

    script = [Reply.tool_call("left"), Reply.tool_calls(Call("left", id="a"), Call("right", id="b")), "Done."]
    async with TurnHarness(PairFlow, model=ScriptedModel(script)) as h:
        await h.say("go")
        results = [m for m in await h.history("PairStep") if isinstance(m, ToolResult)]
        assert [m.outcome for m in results] == ["error", "ok", "ok"]
        assert "only runs together" in results[0].content["error"]
        assert not [line for line in await h.log() if "not exposed" in line.text]
