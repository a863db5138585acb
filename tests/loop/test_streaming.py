"""Streaming and acceptance: live, held and off; what supersedes what, and when."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from loop_flows import FAST, Hooks, RawGateway, View, chat, view_of
from stepwell import direct, finish, go
from stepwell.engine import Accepted, ReasoningDelta, Superseded, TextDelta, ToolInputDelta, ToolStarted, TurnFinished
from stepwell.loop import CallPolicy, EmptyPolicy
from stepwell.messages import FilePart
from stepwell.models import FileEvent, Finish, StopReason, ToolCallDelta, ToolCallEnd, ToolCallStart
from stepwell.models import ReasoningDelta as Reasoning
from stepwell.models import TextDelta as Text
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

ONE = CallPolicy(attempts=1)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OUTPUT = (TextDelta, ReasoningDelta, ToolInputDelta, Superseded, Accepted)


def output(h: TurnHarness) -> list[Any]:
    """What a client sees, without the ids of steps."""
    short: list[Any] = []
    for event in h.of(OUTPUT):
        match event:
            case Superseded():
                short.append("superseded")
            case Accepted(text=text):
                short.append(("accepted", text))
            case TextDelta(text=text):
                short.append(text)
            case ReasoningDelta(text=text):
                short.append(("reasoning", text))
            case _:
                short.append(("input", event.name, event.delta))
    return short


async def say(*script: Any, hooks: Hooks | None = None, policy: CallPolicy = FAST, **options: Any) -> TurnHarness:
    async with TurnHarness(chat(hooks, policy=policy, **options), model=ScriptedModel(script)) as h:
        await h.say("hi")
    return h


# -- live


async def test_live_deltas_go_out_as_they_come() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("one two").gated(gate, after=1)])
    async with (
        TurnHarness(chat(), model=model) as h,
        h.engine.stream("Chat", "hi") as turn,
    ):
        async for event in turn:
            if isinstance(event, TextDelta):
                if event.text == "one ":
                    assert turn.text == "one "
                gate.set()
    assert turn.text == "one two"


async def test_a_retry_supersedes_with_its_own_first_delta() -> None:
    h = await say(Reply.text("Hello there").failing(), "Hi you")
    assert output(h) == ["Hello ", "there", "superseded", "Hi ", "you", ("accepted", "Hi you")]


async def test_a_retry_in_progress_never_blanks_what_it_will_replace() -> None:
    """The second attempt is under way, and has said nothing yet: the first one's text stands."""
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("Hello ").failing(), Reply.text("Hi").gated(gate)])
    async with TurnHarness(chat(policy=FAST), model=model) as h, h.engine.stream("Chat", "hi") as turn:
        await h.clock.settle()
        assert len(model.requests) == 2
        assert turn.text == "Hello "
        gate.set()
    assert turn.text == "Hi"


@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
async def test_blank_deltas_do_not_supersede(blank: str) -> None:
    """Many providers begin with an empty delta; a retry that says nothing must not blank the text either."""
    hooks = Hooks(on_llm_error=finish())
    failed = Reply.of(Text(blank), Reasoning(blank)).failing()
    h = await say(Reply.text("Hello ").failing(), failed, Reply.of(Text(blank), Text("Hi")).stopping("complete"))
    assert output(h) == ["Hello ", "superseded", blank, "Hi", ("accepted", f"{blank}Hi")]
    h = await say(Reply.text("Hello ").failing(), failed, failed, hooks=hooks)
    assert output(h) == ["Hello ", "superseded", ("accepted", "")]


async def test_leading_blank_text_is_not_lost_before_a_call() -> None:
    h = await say(Reply.tool_call("look", {"city": "Rome"}, text=["\n"]), "Done.")
    assert output(h)[0] == "\n"
    assert h.of(Accepted)[0].text == "\n"
    assert "superseded" not in output(h)


async def test_reasoning_and_tool_input_are_superseded_like_text() -> None:
    first = Reply.reasoning("Hm. ", "Looking. ").failing()
    second = Reply.tool_call("look", {"city": "Rome"}).stopping("truncated")
    h = await say(first, second, "Done.")
    seen = output(h)
    assert seen[:4] == [("reasoning", "Hm. "), "Looking. ", "superseded", ("input", "look", "")]
    assert seen[-3:] == ["superseded", "Done.", ("accepted", "Done.")]
    assert view_of(h).other == {}


async def test_what_only_reasoned_or_called_is_removed_by_an_outcome_without_text() -> None:
    """P1 for the lanes that are not text: a dead candidate's reasoning and tool input never stay."""
    for dead in (Reply.reasoning("Hm.").failing(), Reply.tool_call("look", {}).stopping("truncated")):
        h = await say(dead, "I can help.", hooks=Hooks(on_llm_error=go("Other")), policy=ONE)
        view = view_of(h)
        assert view.other == {}
        assert view.visible == "I can help."


async def test_a_terminal_text_that_equals_the_dead_text_is_shown_once() -> None:
    h = await say(Reply.text("Sorry.").failing(), hooks=Hooks(on_llm_error="Sorry."), policy=ONE)
    assert view_of(h).visible == "Sorry."


async def test_tool_input_is_provisional_until_accepted() -> None:
    h = await say(Reply.tool_call("look", {"city": "Rome"}), "Done.")
    kinds = [type(event) for event in h.events]
    assert kinds.index(ToolInputDelta) < kinds.index(Accepted) < kinds.index(ToolStarted)
    (started,) = h.of(ToolStarted)
    assert started.args == {"city": "Rome"}
    assert "".join(event.delta for event in h.of(ToolInputDelta)) == '{"city":"Rome"}'


# -- held


async def test_held_nothing_leaves_until_accepted_then_it_goes_out_as_parts() -> None:
    reply = Reply.reasoning("Hm.", "one two")
    h = await say(Reply.text("WRONG").failing(), reply, step={"stream_mode": "held"})
    assert output(h) == [("reasoning", "Hm."), "one ", "two", ("accepted", "one two")]


async def test_held_tool_input_never_leaves_the_call_does() -> None:
    h = await say(Reply.tool_call("look", {"city": "Rome"}, text="Looking."), "Done.", flow={"stream_mode": "held"})
    assert h.of(ToolInputDelta) == []
    assert [event.args for event in h.of(ToolStarted)] == [{"city": "Rome"}]
    assert h.shown == "Looking.\n\nDone."


async def test_held_shows_nothing_while_it_streams() -> None:
    model = ScriptedModel([Reply.text("one two").stalling(after=1)])
    flow = chat(step={"stream_mode": "held"})
    async with TurnHarness(flow, model=model) as h, h.engine.stream("Chat", "hi") as turn:
        await model.wait_stalled()
        assert turn.text == ""
        turn.cancel()
        async for event in turn:
            assert not isinstance(event, OUTPUT)
    assert turn.text == ""


# -- off


async def test_off_only_the_final_message_of_the_turn_goes_out() -> None:
    script = [Reply.text("dead").failing(), Reply.tool_call("look", {"city": "Rome"}, text="Looking."), "Done now."]
    h = await say(*script, step={"stream_mode": "off"})
    assert output(h) == [("accepted", ""), ("accepted", ""), "Done now.", ("accepted", "Done now.")]
    assert h.shown == "Done now."


async def test_off_also_hides_what_a_terminal_result_moves_away_from() -> None:
    h = await say(Reply.text("dead").failing(), "Help.", hooks=Hooks(on_llm_error=go("Other")), policy=ONE,
                  step={"stream_mode": "off"})  # fmt: skip
    assert h.shown == "Help."


@pytest.mark.parametrize("mode", ["live", "held", "off"])
async def test_accepted_silence_shows_nothing(mode: str) -> None:
    policy = CallPolicy(empty=EmptyPolicy(accept=True))
    h = await say(Reply.empty(blank=" \n"), policy=policy, step={"stream_mode": mode})
    assert output(h) == [("accepted", "")]


# -- structured output


@pytest.mark.parametrize("mode", ["live", "held"])
async def test_structured_output_streams_nothing(mode: str) -> None:
    reply = Reply.structured({"n": 1})
    h = await say(Reply.structured({}), reply, schema=SCHEMA, flow={"stream_mode": mode})
    assert output(h) == ['{"n":1}', ("accepted", '{"n":1}')]


@pytest.mark.parametrize("where", ["step", "flow"])
async def test_unless_stream_partial_objects(where: str) -> None:
    reply = Reply.text(['{"n"', ":1}"])
    h = await say(reply, schema=SCHEMA, **{where: {"stream_partial_objects": True}})
    assert output(h) == ['{"n"', ":1}", ("accepted", '{"n":1}')]


async def test_partial_objects_of_a_held_stage_do_not_stream() -> None:
    h = await say(
        Reply.text(['{"n"', ":1}"]), schema=SCHEMA, step={"stream_partial_objects": True, "stream_mode": "held"}
    )
    assert output(h) == ['{"n":1}', ("accepted", '{"n":1}')]


async def test_a_structured_stages_tool_input_does_not_stream_either() -> None:
    h = await say(Reply.tool_call("look", {"city": "Rome"}), Reply.structured({"n": 1}), schema=SCHEMA)
    assert h.of(ToolInputDelta) == []


# -- rewritten, failed


async def test_a_rewritten_response_replaces_the_models() -> None:
    async def on_response(self: Any, result: str) -> Any:
        return direct(result.upper())

    h = await say("Hello", step={"on_response": on_response})
    assert output(h) == ["Hello", "superseded", "HELLO", ("accepted", "HELLO")]


async def test_an_unhandled_failure_removes_dead_text_and_the_run_says_error() -> None:
    h = await say(*[Reply.text("Your booking is").failing()] * 3)
    assert output(h)[-1] == "superseded"
    assert h.shown == ""
    (finished,) = h.of(TurnFinished)
    assert not finished.result.success
    assert finished.result.error.code == "model_invocation"


async def test_an_unhandled_failure_keeps_the_output_that_was_accepted_before() -> None:
    script = [Reply.tool_call("look", {"city": "Rome"}, text="Let me look."), Reply.text("Rome is").failing()]
    h = await say(*script, policy=ONE)
    assert h.shown == "Let me look."
    assert not h.results[0].success


async def test_the_raw_stream_still_holds_every_attempt() -> None:
    h = await say(Reply.text("Hel").failing(), Reply.text("Hell").failing(), "Hello")
    assert [event.text for event in h.of(TextDelta)] == ["Hel", "Hell", "Hello"]


async def test_every_kind_of_event_of_a_gateway_arrives() -> None:
    image = FilePart("image/png", data="AA==")

    async def play(request: Any) -> Any:
        if len(request.messages) == 1:
            yield ToolCallDelta(1, '{"city":')  # before its start: kept, and nameless until then
            yield ToolCallStart(0, "a", "look")
            yield ToolCallEnd(0, {"city": "Rome"})
            yield ToolCallEnd(2, "{}")
            yield ToolCallStart(3, "b", "look")
            yield ToolCallStart(4, "b", "look")
            yield ToolCallDelta(4, "[1]")
            yield Finish(stop=StopReason.TOOL_CALLS)
        else:
            yield FileEvent(image)
            yield Finish(stop=StopReason.COMPLETE)

    async with TurnHarness(chat(), model=RawGateway(play)) as h:
        result = await h.say("hi")
        history = await h.history("Talk")
    assert result.success
    calls = history[1].calls
    assert [call.args for call in calls] == [{"city": "Rome"}, {}, "[1]"]
    assert len({call.id for call in calls}) == len({call.key for call in calls}) == 3
    assert [m.outcome for m in history[2:5]] == ["ok", "ok", "error"]
    assert history[-1].files == (image,)


async def test_unreadable_arguments_go_back_to_the_model() -> None:
    deep = "[" * 100_000
    raws = ['{"city": "Ro', deep, "null"]
    script = [Reply.tool_calls(*(Call("look", raw=raw, id=f"c{i}") for i, raw in enumerate(raws))), "Done."]
    h = await say(*script)
    assert h.shown == "Done."
    assert not h.of(ToolStarted)


async def test_surrogates_are_joined_or_replaced_for_they_can_neither_be_stored_nor_sent() -> None:
    """Some providers cut a surrogate pair in two deltas."""
    said = ["Hi \ud83d", "\ude00!", " \ude00 ", "\ud83d", "x", "\ud83d"]
    call = [ToolCallStart(0, "c", "look"), ToolCallDelta(0, '{"city": "\ud83c'), ToolCallDelta(0, '\udf00\ud83c"}')]
    reply = Reply.of(Reasoning("\ud83d"), Reasoning("\ude00"), *map(Text, said), *call).stopping("tool_calls")
    async with TurnHarness(chat(), model=ScriptedModel([reply, "Done."])) as h:
        result = await h.say("hi")
        message = (await h.history("Talk"))[1]
    assert result.success
    assert message.text == "Hi \U0001f600! \ufffd \ufffdx"
    assert message.reasoning[0].text == "\U0001f600"
    assert message.calls[0].args == {"city": "\U0001f300\ufffd"}
    assert h.shown == f"{message.text}\n\nDone."
    assert "".join(event.text for event in h.of(TextDelta)) == f"{message.text}Done."


def test_the_view_of_these_tests_notices_a_mixture() -> None:
    """The reader itself: without the supersession, dead and new text would mix."""
    view = View()
    for event in (TextDelta("s", "Hel"), TextDelta("s", "Hi")):
        view.apply(event)
    assert view.states == ["Hel", "HelHi"]
