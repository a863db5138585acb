"""`ScriptedModel`: replies exactly as written, and no way to use the script wrongly without a failing test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from stepwell.errors import LlmSetupError, ModelInvocationError, PromptBlockedError
from stepwell.messages import FilePart, Message, Usage, UserMessage
from stepwell.models import (
    FileEvent,
    Finish,
    ModelEvent,
    ModelGateway,
    ModelRequest,
    ModelSelection,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolSchema,
    UsageEvent,
)
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, ScriptError

pytestmark = pytest.mark.anyio

COMPLETE = Finish(stop=StopReason.COMPLETE, raw="stop")


def request(model: str = "test:model-a", *, messages: list[Message] | None = None) -> ModelRequest:
    return ModelRequest(selection=ModelSelection.parse(model), messages=messages or [])


async def play(model: ScriptedModel, model_name: str = "test:model-a") -> list[ModelEvent]:
    async with model.stream(request(model_name)) as events:
        return [event async for event in events]


async def events_of(reply: Reply) -> list[ModelEvent]:
    with ScriptedModel([reply], clock=FakeClock(auto_advance=True)) as model:
        return await play(model)


async def until(model: ScriptedModel, error: type[BaseException]) -> tuple[list[ModelEvent], BaseException]:
    """What was streamed before the stream raised."""
    got: list[ModelEvent] = []
    try:
        async with model.stream(request()) as events:
            async for event in events:
                got.append(event)  # noqa: PERF401
    except error as raised:
        return got, raised
    pytest.fail(f"The stream did not raise {error.__name__}.")


def text_of(events: list[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def finish(stop: str, raw: str | None = None, **details: Any) -> Finish:
    return Finish(stop=StopReason(stop), raw=raw or stop, details=details)


# -- Replies -------------------------------------------------------------------------------------------------------

CALL = [
    ToolCallStart(0, "call_1", "search"),
    ToolCallDelta(0, '{"cit'),
    ToolCallDelta(0, 'y":"R'),
    ToolCallDelta(0, 'ome"}'),
    ToolCallEnd(0),
]
FILE = FilePart("image/png", data="AA==")

REPLIES: dict[str, tuple[Reply, list[ModelEvent]]] = {
    "words": (Reply.text("Two rooms "), [TextDelta("Two "), TextDelta("rooms "), COMPLETE]),
    "leading blanks": (Reply.text("\n Two"), [TextDelta("\n "), TextDelta("Two"), COMPLETE]),
    "deltas as given": (Reply.text(["Tw", "", "o"]), [TextDelta("Tw"), TextDelta(""), TextDelta("o"), COMPLETE]),
    "one call": (Reply.tool_call("search", {"city": "Rome"}), [*CALL, finish("tool_calls")]),
    "call without arguments": (
        Reply.tool_call("stop", id="x"),
        [
            ToolCallStart(0, "x", "stop"),
            ToolCallDelta(0, "{"),
            ToolCallDelta(0, "}"),
            ToolCallEnd(0),
            finish("tool_calls"),
        ],
    ),
    "malformed arguments": (
        Reply.tool_call("search", raw='{"a'),
        [
            ToolCallStart(0, "call_1", "search"),
            ToolCallDelta(0, "{"),
            ToolCallDelta(0, '"'),
            ToolCallDelta(0, "a"),
            ToolCallEnd(0),
            finish("tool_calls"),
        ],
    ),
    "batch": (
        Reply.tool_calls(Call("search", {"city": "Rome"}), Call("b", raw="", id=""), text="Wait."),
        [TextDelta("Wait."), *CALL, ToolCallStart(1, "", "b"), ToolCallEnd(1), finish("tool_calls")],
    ),
    "structured": (
        Reply.structured({"nights": 3}, pieces=2),
        [TextDelta('{"nigh'), TextDelta('ts":3}'), COMPLETE],
    ),
    "reasoning": (
        Reply.reasoning("Hm, two.", "Two"),
        [ReasoningDelta("Hm, "), ReasoningDelta("two."), TextDelta("Two"), COMPLETE],
    ),
    "reasoning alone": (Reply.reasoning(["Hm"]), [ReasoningDelta("Hm"), COMPLETE]),
    "file": (Reply.file(FILE, "Here"), [TextDelta("Here"), FileEvent(FILE), COMPLETE]),
    "empty": (Reply.empty(), [finish("complete")]),
    "empty unspecified": (Reply.empty("unspecified", raw="OTHER"), [finish("unspecified", "OTHER")]),
    "empty truncated": (Reply.empty("truncated"), [finish("truncated")]),
    "empty malformed": (Reply.empty("malformed_tool_call"), [finish("malformed_tool_call")]),
    "blank": (Reply.empty(blank=" \n"), [TextDelta(" \n"), finish("complete")]),
    "refusal": (
        Reply.refusal("I will not.", "violence", partial="Well"),
        [
            TextDelta("Well"),
            finish("blocked", "refusal", refusal="I will not.", block_reason="refusal", category="violence"),
        ],
    ),
    "refusal without category": (
        Reply.refusal("No."),
        [finish("blocked", "refusal", refusal="No.", block_reason="refusal")],
    ),
    "blocked": (Reply.blocked(), [finish("blocked", "content_filter", block_reason="content_filter")]),
    "blocked after output": (
        Reply.blocked("safety", raw="SAFETY", text="Go", calls=[Call("search", {"city": "Rome"})], safety_ratings=[1]),
        [TextDelta("Go"), *CALL, finish("blocked", "SAFETY", block_reason="safety", safety_ratings=[1])],
    ),
    "truncated text": (Reply.truncated("Two ro"), [TextDelta("Two "), TextDelta("ro"), finish("truncated", "length")]),
    "truncated calls": (
        Reply.truncated(calls=[Call("search", {"city": "Rome"}), Call("b", raw='{"c', pieces=1, ended=False)]),
        [*CALL, ToolCallStart(1, "call_2", "b"), ToolCallDelta(1, '{"c'), finish("truncated", "length")],
    ),
    "usage": (
        Reply.text("Two").with_usage(12, 3, reasoning=1, cache_read=4, cache_write=5),
        [TextDelta("Two"), UsageEvent(Usage(12, 3, 1, 4, 5)), COMPLETE],
    ),
    "events as given": (Reply.of(TextDelta("Two"), COMPLETE), [TextDelta("Two"), COMPLETE]),
    "events without finish": (Reply.of(TextDelta("Two")), [TextDelta("Two")]),
    "no events": (Reply.of(), []),
    "no finish": (
        Reply.text("a b").with_usage(1, 2).without_finish(),
        [TextDelta("a "), TextDelta("b"), UsageEvent(Usage(1, 2))],
    ),
    "no finish after one": (Reply.text("a b").without_finish(after=1), [TextDelta("a ")]),
    "other finish": (
        Reply.text("a").stopping("unspecified", raw="X", details={"d": 1}, provider_data={"p": 2}, model="m-1"),
        [
            TextDelta("a"),
            Finish(stop=StopReason.UNSPECIFIED, raw="X", details={"d": 1}, provider_data={"p": 2}, model="m-1"),
        ],
    ),
}


@pytest.mark.parametrize(("reply", "expected"), REPLIES.values(), ids=REPLIES.keys())
async def test_reply(reply: Reply, expected: list[ModelEvent]) -> None:
    assert await events_of(reply) == expected


def test_changing_a_reply_leaves_it_as_it_was() -> None:
    reply = Reply.text("a b")
    same = Reply.text("a b")
    assert reply == same
    reply.with_usage(1, 2)
    reply.failing(after=1)
    reply.delayed(3)
    reply.stopping("truncated")
    assert reply == same


# -- Failures ------------------------------------------------------------------------------------------------------


async def test_failure_when_opening() -> None:
    model = ScriptedModel([Reply.error(status=529, retry_after=7)])
    with pytest.raises(ModelInvocationError) as raised:
        await model.stream(request()).__aenter__()
    assert (raised.value.status, raised.value.retry_after) == (529, 7)
    assert (model.open, model.cancelled) == (0, 0)
    model.assert_done()


@pytest.mark.parametrize("error", [OSError("boom"), lambda: OSError("boom"), KeyboardInterrupt()], ids=repr)
async def test_any_failure(error: BaseException | Callable[[], BaseException]) -> None:
    model = ScriptedModel([Reply.error(error), Reply.text("a").failing(error=error)])
    for expected in ([], [TextDelta("a")]):
        got, raised = await until(model, KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OSError)
        assert got == expected
        assert raised is error or str(raised) == "boom"
    model.assert_done()


@pytest.mark.parametrize(("after", "text"), [(0, ""), (2, "a b "), (None, "a b c")])
async def test_failure_after_tokens(after: int | None, text: str) -> None:
    model = ScriptedModel([Reply.text("a b c").failing(after=after, status=500, retry_after=2)])
    got, raised = await until(model, ModelInvocationError)
    assert text_of(got) == text
    assert all(isinstance(event, TextDelta) for event in got)
    assert isinstance(raised, ModelInvocationError)
    assert (raised.status, raised.retry_after) == (500, 2)


async def test_usage_is_reported_before_a_failure() -> None:
    got, _ = await until(ScriptedModel([Reply.text("a").with_usage(5, 1).failing()]), ModelInvocationError)
    assert got == [TextDelta("a"), UsageEvent(Usage(5, 1))]


async def test_the_same_exception_can_be_raised_again_without_growing() -> None:
    error = OSError("boom")
    model = ScriptedModel(default=error)
    depths: list[int] = []
    for _ in range(2):
        _, raised = await until(model, OSError)
        traceback, depth = raised.__traceback__, 0
        while traceback:
            traceback, depth = traceback.tb_next, depth + 1
        depths.append(depth)
    assert depths[0] == depths[1]


async def test_prompt_block() -> None:
    reply = Reply.prompt_blocked("blocklist", raw="BLOCKLIST", safety_ratings=[1], details={"a": 2})
    got, raised = await until(ScriptedModel([reply]), PromptBlockedError)
    assert got == []
    assert isinstance(raised, PromptBlockedError)
    assert (raised.reason, raised.raw_reason, raised.safety_ratings, raised.details) == (
        "blocklist",
        "BLOCKLIST",
        [1],
        {"a": 2},
    )


@pytest.mark.parametrize("after", [-1, 3])
@pytest.mark.parametrize("change", [Reply.failing, Reply.without_finish, Reply.stalling])
def test_positions_that_do_not_exist_are_refused(change: Callable[..., Reply], after: int) -> None:
    with pytest.raises(ValueError, match="use 0 to 2"):
        change(Reply.text("a b"), after=after)


def test_pauses_at_positions_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="use 0 to 1"):
        Reply.text("a").delayed(1, after=2)


# -- Time ----------------------------------------------------------------------------------------------------------


async def times(reply: Reply) -> list[tuple[float, str]]:
    clock = FakeClock(auto_advance=True)
    model = ScriptedModel([reply], clock=clock)
    got: list[tuple[float, str]] = []
    async with model.stream(request()) as events:
        async for event in events:
            got.append((clock.monotonic(), event.text if isinstance(event, TextDelta) else "end"))  # noqa: PERF401
    return got


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply.text("a b").delayed(2), [(2, "a "), (2, "b"), (2, "end")]),
        (Reply.text("a b").delayed(2, after=1), [(0, "a "), (2, "b"), (2, "end")]),
        (Reply.text("a b").delayed(2, after=2), [(0, "a "), (0, "b"), (2, "end")]),
        (Reply.text("a b c").paced(1), [(0, "a "), (1, "b "), (2, "c"), (2, "end")]),
        (Reply.text("a b").delayed(1).paced(2).delayed(3, after=1), [(1, "a "), (6, "b"), (6, "end")]),
        (Reply.text("a b c").paced(1).without_finish(after=1), [(0, "a ")]),
        (Reply.empty().delayed(1), [(1, "end")]),
    ],
)
async def test_delays(reply: Reply, expected: list[tuple[float, str]]) -> None:
    assert await times(reply) == expected


async def test_a_failure_when_opening_can_be_late() -> None:
    clock = FakeClock(auto_advance=True)
    await until(ScriptedModel([Reply.error().delayed(4)], clock=clock), ModelInvocationError)
    assert clock.slept == [4]


async def test_pauses_after_a_failure_are_dropped() -> None:
    clock = FakeClock(auto_advance=True)
    got, _ = await until(
        ScriptedModel([Reply.text("a b c").paced(1).failing(after=1)], clock=clock), ModelInvocationError
    )
    assert (text_of(got), clock.slept) == ("a ", [1])


async def test_a_gate_holds_the_stream_until_the_test_opens_it() -> None:
    gate, got = anyio.Event(), list[ModelEvent]()
    model = ScriptedModel([Reply.text("a b").gated(gate, after=1)])

    async def consume() -> None:
        async with model.stream(request()) as events:
            async for event in events:
                got.append(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await FakeClock().settle()
        assert (got, model.open) == ([TextDelta("a ")], 1)
        gate.set()
    assert got == [TextDelta("a "), TextDelta("b"), COMPLETE]


async def test_a_stall_lasts_until_the_deadline_of_the_caller() -> None:
    clock, got = FakeClock(auto_advance=True), list[ModelEvent]()
    with ScriptedModel([Reply.text("a b").with_usage(3, 1).stalling(after=1)], clock=clock) as model:
        with anyio.CancelScope() as scope:
            clock.call_at(60, scope.cancel)
            async with model.stream(request()) as events:
                async for event in events:
                    got.append(event)
        assert scope.cancelled_caught
    assert got == [TextDelta("a "), UsageEvent(Usage(3, 1))]
    assert (clock.monotonic(), model.open, model.cancelled) == (60, 0, 1)


async def test_wait_stalled_says_when_to_cancel() -> None:
    # On the machine's clock: a stall needs no fake one.
    model = ScriptedModel(default=Reply.text("a").stalling())
    for stalled in (1, 2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(play, model)
            tasks.start_soon(play, model)
            await model.wait_stalled()
            tasks.cancel_scope.cancel()
        assert (model.open, model.cancelled) == (0, 2 * stalled)
    with anyio.move_on_after(0) as scope:
        await model.wait_stalled()
    assert scope.cancelled_caught


# -- Cancellation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        Reply.text("a").stalling(),
        Reply.text("a").delayed(5),
        Reply.text("a").gated(anyio.Event()),
        Reply.error().gated(anyio.Event()),
    ],
    ids=["stall", "delay", "gate", "opening"],
)
async def test_cancellation_is_honoured_at_each_await(reply: Reply) -> None:
    clock = FakeClock()
    with ScriptedModel([reply], clock=clock) as model:
        task = asyncio.ensure_future(play(model))
        await clock.settle()
        assert (model.open, model.cancelled) == (1, 0)
        task.cancel()
        await clock.settle()
        assert task.cancelled()
        assert (model.open, model.cancelled, clock.sleepers) == (0, 1, 0)


async def test_opening_is_a_point_of_cancellation() -> None:
    model = ScriptedModel(["a"])
    with anyio.CancelScope() as scope:
        scope.cancel()
        await play(model)
    assert scope.cancelled_caught
    assert (model.open, model.cancelled, len(model.requests)) == (0, 1, 1)


async def test_a_time_out_around_one_event_counts_as_cancelled_once() -> None:
    clock = FakeClock(auto_advance=True)
    model = ScriptedModel([Reply.text("a").stalling(after=0)], clock=clock)
    async with model.stream(request()) as events:
        with anyio.CancelScope() as scope:
            clock.call_at(1, scope.cancel)
            await anext(events)
        assert scope.cancelled_caught
        assert model.open == 1
    assert (model.open, model.cancelled) == (0, 1)


async def test_leaving_early_closes_the_stream() -> None:
    with ScriptedModel(["a b c"]) as model:
        async with model.stream(request()) as events:
            assert await anext(events) == TextDelta("a ")
            assert model.open == 1
        assert (model.open, model.cancelled) == (0, 0)
        with pytest.raises(StopAsyncIteration):
            await anext(events)


# -- Scripts -------------------------------------------------------------------------------------------------------


async def test_replies_are_used_in_order_and_short_forms_are_understood() -> None:
    with ScriptedModel(["one", Reply.text("two"), OSError("boom"), lambda _: "four"]) as model:
        assert isinstance(model, ModelGateway)
        assert text_of(await play(model)) == "one"
        assert model.remaining == 3
        assert text_of(await play(model)) == "two"
        await until(model, OSError)
        assert text_of(await play(model)) == "four"


async def test_a_function_computes_the_reply_from_the_request() -> None:
    def echo(request: ModelRequest) -> Reply | str | BaseException:
        text = request.messages[-1].text  # type: ignore[union-attr]
        return OSError(text) if text == "fail" else Reply.text(f"You said {text}").with_usage(1, 1)

    model = ScriptedModel(default=echo)
    async with model.stream(request(messages=[UserMessage(content="hi")])) as events:
        assert text_of([event async for event in events]) == "You said hi"
    with pytest.raises(OSError, match="fail"):
        await model.stream(request(messages=[UserMessage(content="fail")])).__aenter__()
    model.assert_done()


async def test_each_model_may_have_its_own_script() -> None:
    script = {"model-a": ["a1", "a2"], "model-b": ["b1"], "other:model-b": ["exact"]}
    with ScriptedModel(script) as model:
        model.add("rest")
        assert text_of(await play(model, "test:model-b")) == "b1"
        assert text_of(await play(model, "test:model-a")) == "a1"
        assert text_of(await play(model, "other:model-b")) == "exact"
        assert text_of(await play(model, "test:model-c")) == "rest"
        assert text_of(await play(model, "other:model-a")) == "a2"
        model.add("a3", model="model-a")
        assert text_of(await play(model)) == "a3"


async def test_requests_are_recorded_as_they_were() -> None:
    history: list[Message] = [UserMessage(content="hi")]
    tools = [ToolSchema("search", "Search.", {})]
    asked = ModelRequest(
        selection=ModelSelection("test", "model-a"),
        messages=history,
        tools=tools,
        system="Be kind.",
        conversation="c-1",
    )
    model = ScriptedModel(["hello"])
    async with model.stream(asked):
        history.append(UserMessage(content="later"))
        tools.clear()
    (got,) = model.requests
    assert got.messages == (UserMessage(content="hi"),)
    assert got.tools == (ToolSchema("search", "Search.", {}),)
    assert (got.selection, got.system, got.conversation) == (asked.selection, "Be kind.", "c-1")


# -- Wrong use -----------------------------------------------------------------------------------------------------


async def test_too_many_calls_fail_and_cannot_be_hidden() -> None:
    model = ScriptedModel({"model-a": ["a"]})
    await play(model)
    # A setup error is what the loop never retries; an assertion is what a test reports.
    for name in ("model-a", "model-b"):
        with pytest.raises(ScriptError) as raised:
            await play(model, f"test:{name}")
        assert isinstance(raised.value, LlmSetupError)
        assert isinstance(raised.value, AssertionError)
    assert model.open == 0
    with pytest.raises(ScriptError, match=r"Call 2 .*test:model-a.* ends after 1"):
        model.assert_done()


async def test_too_many_calls_fail_on_leaving_even_if_swallowed() -> None:
    with pytest.raises(ScriptError, match="has no reply"), ScriptedModel() as model, pytest.raises(LlmSetupError):
        await play(model)


async def test_another_failure_is_not_hidden_but_says_what_came_first() -> None:
    async def swallow_and_fail(model: ScriptedModel) -> None:
        with pytest.raises(ScriptError):
            await play(model)
        raise KeyError("later")

    with pytest.raises(KeyError) as raised, ScriptedModel() as model:
        await swallow_and_fail(model)
    (note,) = raised.value.__notes__
    assert "has no reply" in note
    with pytest.raises(ScriptError) as direct, ScriptedModel() as model:
        await play(model)
    assert not hasattr(direct.value, "__notes__")
    with pytest.raises(KeyError) as unrelated, ScriptedModel(["unused"]):
        raise KeyError("alone")
    assert not hasattr(unrelated.value, "__notes__")


async def test_too_few_calls_fail() -> None:
    model = ScriptedModel({"model-a": ["a"], "model-b": ["b", "c"]})
    model.add("d")
    await play(model)
    with pytest.raises(ScriptError, match=r"2 of model-b, 1 of the script \(after 1 calls\)"):
        model.assert_done()
    with pytest.raises(ScriptError, match="never asked for"), ScriptedModel(["a"]):
        pass


async def test_an_open_stream_fails() -> None:
    model = ScriptedModel(["a"])
    async with model.stream(request()):
        with pytest.raises(ScriptError, match="1 streams"):
            model.assert_done()
    model.assert_done()


async def test_what_a_function_of_the_script_raises_is_no_failure_of_the_model() -> None:
    def wrong(request: ModelRequest) -> str:
        assert request.system == "expected"
        return "never"

    model = ScriptedModel([wrong])
    with pytest.raises(ScriptError, match="raised AssertionError") as raised:
        await play(model)
    assert isinstance(raised.value.__cause__, AssertionError)
    with pytest.raises(ScriptError, match="To script a failure, return it"):
        model.assert_done()


async def test_a_default_answers_every_further_call() -> None:
    with ScriptedModel(["first"], default="again") as model:
        assert [text_of(await play(model)) for _ in range(3)] == ["first", "again", "again"]


def test_validate_knows_any_model_unless_told() -> None:
    ScriptedModel().validate(ModelSelection("test", "anything"))
    model = ScriptedModel(models=["model-a", "test:model-b"])
    for name in ("test:model-a", "other:model-a", "test:model-b"):
        model.validate(ModelSelection.parse(name))
    with pytest.raises(LlmSetupError, match="does not know other:model-b"):
        model.validate(ModelSelection.parse("other:model-b"))
    model.assert_done()


async def test_streams_are_plain_async_generators_without_awaits_between_tokens() -> None:
    """2000 deltas never give the loop a turn, so they cost what the generator costs."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    model = ScriptedModel([Reply.text(["x"] * 2000)])
    async with anyio.create_task_group() as tasks, model.stream(request()) as events:
        tasks.start_soon(tick)
        async with aclosing(events):
            count = sum([1 async for _ in events])
        assert (count, ticks) == (2001, 0)
        tasks.cancel_scope.cancel()
