"""Outcomes: what each may do from where, and what is refused."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from flow_kit import call, failure, flow_of, harness, lines, stage
from stepwell import (
    DirectMessage,
    Flow,
    LogicStep,
    ModelSelection,
    Step,
    TerminateSessionStep,
    ToolResult,
    UserMessage,
    direct,
    direct_to,
    finish,
    go,
    retry_with_model,
    stay,
    tool,
)
from stepwell.errors import LlmSetupError
from stepwell.loop import CallPolicy, EmptyPolicy
from stepwell.outcomes import Outcome
from stepwell.testing import Call, Reply

pytestmark = pytest.mark.anyio

PLACES = (
    "tool",
    "on_response",
    "on_llm_blocked",
    "on_llm_error",
    "run_logic",
    "flow.on_llm_blocked",
    "flow.on_llm_error",
)
NOT_LOGIC = tuple(place for place in PLACES if place != "run_logic")


def placed(place: str, value: Any) -> tuple[type[Flow], list[Any]]:
    """A flow whose step A returns `value` from this hook, and the script that makes it do so."""

    async def returned(self: Any, *_: Any) -> Any:
        return value

    @tool
    async def act(self: Any) -> Any:
        return value

    members: dict[str, Any] = {}
    flow: dict[str, Any] = {"config_llm_call_policy": lambda self: CallPolicy(attempts=1)}
    base: type[Step[Any, Any]] = Step
    script: list[Any] = []
    match place:
        case "tool":
            members["act"] = act
            script = [call("act")]
        case "run_logic":
            base, members["run_logic"] = LogicStep, returned
        case "on_response":
            members[place] = returned
            script = ["The model's words."]
        case _:
            owner, _, hook = place.rpartition(".")
            (flow if owner else members)[hook] = returned
            script = [Reply.refusal("No.") if hook == "on_llm_blocked" else Reply.error(status=400)]
    a = stage("A", base=base, **members)
    return flow_of(a, stage("B"), **flow), script


# -- legal everywhere


@pytest.mark.parametrize("place", PLACES)
async def test_go_moves_the_cursor_and_goes_on(place: str) -> None:
    flow, script = placed(place, go("B").with_state({"x": 1}))
    async with harness(flow, *script, "Here is B.") as h:
        result = await h.say("hi")
        assert await h.state("B") == {"x": 1}
    assert (result.message, result.current, result.completed) == ("Here is B.", "B", False)


@pytest.mark.parametrize("place", PLACES)
async def test_direct_to_answers_now_and_moves_for_the_next_turn(place: str) -> None:
    flow, script = placed(place, direct_to("B", "Until then.").with_state({"x": 1}).with_message("A hint."))
    async with harness(flow, *script, "Here is B.") as h:
        result = await h.say("hi")
        assert (result.message, result.current, h.shown) == ("Until then.", "B", "Until then.")
        assert await h.state("B") == {"x": 1}
        assert len(h.model.requests) == len(script)  # type: ignore[attr-defined]
        spoken = await h.history("B" if place == "run_logic" else "A")
        assert "direct: Until then." in lines(spoken)
        assert (await h.say("next")).message == "Here is B."
        expected = ["code: A hint.", "user: next", "model: Here is B."]
        assert lines(await h.history("B")) == (["direct: Until then."] if place == "run_logic" else []) + expected


@pytest.mark.parametrize("place", PLACES)
async def test_finish_completes_the_session_with_its_answer(place: str) -> None:
    flow, script = placed(place, finish("Bye.").with_state({"x": 1}))
    async with harness(flow, *script) as h:
        result = await h.say("hi")
        assert (result.message, result.current, result.completed, result.status) == ("Bye.", "A", True, "completed")
        assert await h.state("A") == {"x": 1}
        assert lines(await h.history("A"))[-1] == "direct: Bye."
    assert h.shown == "Bye."


@pytest.mark.parametrize("place", PLACES)
async def test_finish_without_content_keeps_what_was_accepted(place: str) -> None:
    flow, script = placed(place, finish())
    async with harness(flow, *script) as h:
        result = await h.say("hi")
    assert (result.message, result.completed) == ("The model's words." if place == "on_response" else "", True)


@pytest.mark.parametrize("place", NOT_LOGIC)
async def test_direct_answers_from_code(place: str) -> None:
    flow, script = placed(place, direct({"a": [1]}).with_state({"x": 1}).with_prompt("P").with_message("Noted."))
    async with harness(flow, *script) as h:
        result = await h.say("hi")
        assert (result.message, result.content_type, result.current) == ('{"a":[1]}', "application/json", "A")
        assert await h.state("A") == {"x": 1}
        assert (await h.document())["stages"]["A"]["state"]["_prompt"] == "P"
        history = await h.history("A")
        assert lines(history)[-2:] == ['direct: {"a":[1]}', "code: Noted."]
        answer = history[-2]
        assert isinstance(answer, DirectMessage)
        assert answer.content_type == "application/json"
    assert h.shown == '{"a":[1]}'


@pytest.mark.parametrize("place", [p for p in PLACES if "llm" in p])
async def test_text_of_a_failure_hook_is_the_final_answer(place: str) -> None:
    flow, script = placed(place, "We are sorry.")
    async with harness(flow, *script) as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "direct: We are sorry."]
    assert (result.success, result.message, h.shown) == (True, "We are sorry.", "We are sorry.")


async def test_a_bare_class_means_go_from_every_place() -> None:
    for place in PLACES:
        b = stage("B")
        flow, script = placed(place, b)
        a = flow().define_steps()[0].__class__
        async with harness(flow_of(a, b, **{k: v for k, v in vars(flow).items() if "llm" in k}), *script, "B.") as h:
            assert (await h.say("hi")).message == "B."


async def test_a_string_is_never_a_route() -> None:
    flow, script = placed("tool", "B")
    async with harness(flow, *script, "Still A.") as h:
        result = await h.say("hi")
        assert lines(await h.history("A"))[2] == "ok: B"
    assert result.current == "A"
    flow, script = placed("on_response", "B")
    async with harness(flow, *script) as h:
        result = await h.say("hi")
    assert (result.message, result.current) == ("B", "A")


# -- on_response


class Point(pydantic.BaseModel):
    x: int
    y: int = 0


async def test_without_on_response_text_stays_and_objects_become_json_text() -> None:
    async with harness(flow_of(stage("A")), "As it is.") as h:
        result = await h.say("hi")
    assert (result.message, result.content_type) == ("As it is.", "text/plain")
    async with harness(flow_of(stage("A", struct_output_schema=lambda self: Point)), Reply.structured({"x": 1})) as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", 'model: {"x":1}']
    assert (result.message, result.content_type, h.shown) == ('{"x":1,"y":0}', "application/json", '{"x":1,"y":0}')


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (Point, Point(x=1)),
        ({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, {"x": 1}),
        (None, '{"x":1}'),
    ],
    ids=["model", "json-schema", "text"],
)
async def test_on_response_gets_the_parsed_object(schema: Any, expected: Any) -> None:
    got: list[Any] = []

    async def on_response(self: Any, result: Any) -> Any:
        got.append(result)
        return direct(result)

    a = stage("A", struct_output_schema=lambda self: schema, on_response=on_response)
    async with harness(flow_of(a), Reply.structured({"x": 1})) as h:
        result = await h.say("hi")
    assert got == [expected]
    assert result.message == ('{"x":1,"y":0}' if schema is Point else '{"x":1}')
    assert result.content_type == ("text/plain" if schema is None else "application/json")


@pytest.mark.parametrize("schema", [Point, {"type": "object", "required": ["x"]}], ids=["model", "json-schema"])
async def test_what_does_not_match_is_asked_for_again_line_by_line(schema: Any) -> None:
    replies = ["no json", Reply.structured({"y": 1}), '```json\n{"x": 2}\n```']
    async with harness(flow_of(stage("A", struct_output_schema=lambda self: schema)), *replies) as h:
        assert (await h.say("hi")).success
        nudges = [r.messages[-1].text for r in h.model.requests[1:]]  # type: ignore[attr-defined]
    assert "not JSON" in nudges[0]
    assert "x" in nudges[1].splitlines()[-1]


@pytest.mark.parametrize("value", [None, "The model's words."], ids=["none", "the-same-text"])
async def test_on_response_may_keep_the_output(value: Any) -> None:
    flow, script = placed("on_response", value)
    async with harness(flow, *script) as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "model: The model's words."]
    assert result.message == "The model's words."


@pytest.mark.parametrize("value", ["Mine.", direct("Mine."), direct_to("B", "Mine."), finish("Mine.")], ids=repr)
async def test_other_text_replaces_the_models_in_history_and_on_screen(value: Any) -> None:
    flow, script = placed("on_response", value)
    async with harness(flow, *script) as h:
        result = await h.say("hi")
        history = await h.history("A")
        assert lines(history) == ["user: hi", "direct: Mine."]
        assert len({m.id for m in history}) == 2
    assert (result.message, h.shown) == ("Mine.", "Mine.")


async def test_go_keeps_the_accepted_text() -> None:
    flow, script = placed("on_response", go("B"))
    async with harness(flow, *script, "B.") as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "model: The model's words."]
    assert (result.message, h.shown) == ("B.", "The model's words.\n\nB.")


async def test_direct_to_without_content_keeps_it_too() -> None:
    flow, script = placed("on_response", direct_to("B", None))
    async with harness(flow, *script) as h:
        result = await h.say("hi")
    assert (result.message, result.current) == ("The model's words.", "B")


async def test_what_on_response_wrote_itself_is_not_replaced() -> None:
    async def on_response(self: Any, result: str) -> Any:
        self.get_memory().append("A note.")
        return "Mine."

    async with harness(flow_of(stage("A", on_response=on_response)), "Yours.") as h:
        await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "direct: Mine.", "code: A note."]


async def test_where_on_response_erased_the_memory_its_text_is_appended() -> None:
    async def on_response(self: Any, result: str) -> Any:
        self.erase_memory()
        return "Mine."

    async with harness(flow_of(stage("A", on_response=on_response)), "Yours.") as h:
        await h.say("hi")
        assert lines(await h.history("A")) == ["direct: Mine."]


async def test_a_silent_reply_reaches_on_response_as_none() -> None:
    got: list[Any] = []

    async def on_response(self: Any, result: Any) -> Any:
        got.append(result)
        return "Nothing was said."

    flow = flow_of(
        stage("A", on_response=on_response),
        config_llm_call_policy=lambda self: CallPolicy(empty=EmptyPolicy(accept=True)),
    )
    async with harness(flow, Reply.empty()) as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "direct: Nothing was said."]
    assert (got, result.message) == ([None], "Nothing was said.")


# -- content types


async def test_content_types() -> None:
    async def on_visit(self: Any, message: Any) -> None:
        self.content_type = "text/csv"
        assert self.content_type == "text/csv"

    @tool
    async def act(self: Any, kind: str) -> Any:
        """Act."""
        return {
            "own": direct("a,b"),
            "given": direct("<b>").with_content_type("text/html"),
            "object": direct([1]),
            "typed-object": finish({"a": 1}).with_content_type("application/ld+json"),
        }[kind]

    flow = flow_of(stage("A", on_visit=on_visit, act=act))
    types = {
        "own": "text/csv",
        "given": "text/html",
        "object": "application/json",
        "typed-object": "application/ld+json",
    }
    async with harness(flow, *(call("act", kind=kind) for kind in types)) as h:
        for kind, content_type in types.items():
            assert (await h.say(kind)).content_type == content_type


async def test_the_closing_stage_inherits_the_content_type() -> None:
    @tool
    async def act(self: Any) -> Any:
        return TerminateSessionStep

    async def on_visit(self: Any, message: Any) -> None:
        self.content_type = "text/markdown"

    flow = flow_of(stage("A", act=act, on_visit=on_visit), TerminateSessionStep, stage("B"))
    async with harness(flow, call("act"), "*Bye.*") as h:
        result = await h.say("hi")
    assert (result.content_type, result.completed) == ("text/markdown", True)


# -- what is refused

ILLEGAL = [
    *((place, value, kind) for place in NOT_LOGIC if place != "tool" for value, kind in [
        (stay(), "Stay"), (go("Nowhere"), "Go"), (direct_to("Nowhere", "x"), "DirectTo"), (direct({1}), "Direct"),
        (go("B").with_state({"x": object()}), "Go"), (go("B").with_state({"_x": 1}), "Go"),
        (go("B").with_tool_feedback("x"), "Go"), (direct("x").with_messages("y"), "Direct"),
        (finish().with_cleanup(lambda: None), "Finish"), ({"a": 1}, "dict"), (7, "int"),
        (go("B").with_message(""), "Go"), (go("B").with_message(ToolResult(call="x")), "Go"),
        (go("B").with_message(7), "Go"), (go("B").with_prompt(7), "Go"), (direct("x").with_content_type(7), "Direct"),
        ("\ud800", "str"), (direct("\ud800"), "Direct"),
    ]),
    *(("run_logic", value, kind) for value, kind in [
        (None, "NoneType"), ("B", "str"), (stay(), "Stay"), (direct("x"), "Direct"), (go("Nowhere"), "Go"),
        (finish({1}), "Finish"), (go("B").with_messages("x"), "Go"), (7, "int"),
    ]),
    *(("tool", value, kind) for value, kind in [
        (go("Nowhere"), "Go"), (direct_to("Nowhere", "x"), "DirectTo"), (direct({1}), "Direct"),
        (go("B").with_state({"x": {1}}), "Go"), (stay().with_state({"_x": 1}), "Stay"),
        (stay().with_messages(""), "Stay"), (stay({1}), "Stay"), ({1}, "set"),
    ]),
    ("on_response", retry_with_model("scripted:other"), "RetryWithModel"),
    ("tool", retry_with_model("scripted:other"), "RetryWithModel"),
    ("run_logic", retry_with_model("scripted:other"), "RetryWithModel"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value", "kind"), ILLEGAL, ids=lambda v: v if isinstance(v, str) else type(v).__name__
)
async def test_illegal_values_name_hook_stage_and_kind_and_change_nothing(place: str, value: Any, kind: str) -> None:
    flow, script = placed(place, value)
    async with harness(flow, *script) as h:
        result = await h.say("hi")
        code, ids = failure(result)
        assert code == "invalid_outcome"
        assert ids["stage"] == "A"
        hook = place.rpartition(".")[2]
        assert ids.get("hook", "tool") == hook
        if hook == "tool":
            assert ids["tool"] == "act"
        assert ids.get("value", kind) == kind
        document = await h.document()
        assert (document["workflow"]["current"], document.get("status", "running")) == ("A", "running")
        assert not document.get("stages", {})
        assert not await h.history("B")
        assert not [line for line in lines(await h.history("A")) if line.startswith("direct")]


@pytest.mark.parametrize("value", [object(), go("B"), {1}, "\ud800"], ids=["object", "outcome", "set", "surrogate"])
async def test_run_may_only_return_json(value: Any) -> None:
    async def run(self: Any, user_message: str | None = None) -> Any:
        return value

    async with harness(flow_of(stage("A", run=run), stage("B"))) as h:
        code, ids = failure(await h.say("hi"))
    assert (code, ids["hook"], ids["stage"]) == ("invalid_outcome", "run", "A")


async def test_an_illegal_outcome_drops_the_writes_of_its_call_and_keeps_those_of_others() -> None:
    @tool
    async def good(self: Any) -> str:
        self.save_state({"good": 1})
        return "fine"

    @tool
    async def bad(self: Any) -> Any:
        self.save_state({"bad": 1})
        return go("Nowhere")

    cleaned: list[str] = []

    @tool
    async def held(self: Any) -> Any:
        async def clean() -> None:
            cleaned.append("held")

        return stay().with_cleanup(clean)

    a = stage("A", good=good, bad=bad, held=held)
    script = [Reply.tool_calls(Call("good"), Call("held"), Call("bad"))]
    async with harness(flow_of(a), *script) as h:
        assert failure(await h.say("hi"))[0] == "invalid_outcome"
        assert await h.state("A") == {"good": 1}
        assert lines(await h.history("A"))[2:] == [
            "ok: fine", "ok: input validated", "error: {'error': 'The tool failed: InvalidOutcomeError'}",
        ]  # fmt: skip
    assert cleaned == ["held"]


# -- the values themselves


def test_outcomes_are_immutable_and_each_change_is_a_new_one() -> None:
    async def clean() -> None: ...

    base: Outcome = go("B")
    changed = (
        base.with_state({"a": 1}).with_state({"b": 2}).with_prompt("p").with_message("m").with_content_type("t/t")
        .with_tool_feedback("f").with_messages("1").with_messages("2", UserMessage(content="3")).with_cleanup(clean)
    )  # fmt: skip
    assert base == go("B")
    assert (changed.state, changed.prompt, changed.message) == ({"a": 1, "b": 2}, "p", "m")
    assert (changed.content_type, changed.feedback, changed.cleanup) == ("t/t", "f", (clean,))
    assert changed.messages == ("1", "2", UserMessage(content="3"))
    with pytest.raises(AttributeError):
        base.target = "C"  # type: ignore[attr-defined]


def test_retry_with_model_asks_the_catalogue() -> None:
    with pytest.raises(LlmSetupError):
        retry_with_model("no-provider")
    with pytest.raises(LlmSetupError, match="no_such_parameter"):
        retry_with_model(ModelSelection("openai", "gpt-5.1", {"no_such_parameter": 1}))
