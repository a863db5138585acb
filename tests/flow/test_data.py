"""State, memory, context and transient values: four kinds of data with four lifetimes."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import TypedDict

from flow_kit import call, flow_of, harness, lines, stage
from stepwell import AssistantMessage, DirectMessage, Flow, Step, ToolCall, ToolContext, ToolResult, UserMessage, tool
from stepwell.errors import FlowDefinitionError, HistoryError, InvalidOutcomeError, NonJsonValueError, StepwellError
from stepwell.testing import Call, FakeClock, Reply

pytestmark = pytest.mark.anyio


async def within(body: Any, *, turns: int = 1, flow: dict[str, Any] | None = None, **members: Any) -> Any:
    """Run `body(step)` in `on_visit` of every turn; the harness afterwards."""

    async def on_visit(self: Any, message: Any) -> None:
        result = body(self)
        if hasattr(result, "__await__"):
            await result

    h = harness(flow_of(stage("A", on_visit=on_visit, **members), stage("B"), **(flow or {})), *["Ok."] * turns)
    async with h:
        for turn in range(turns):
            result = await h.say(f"hi {turn}")
            if not result.success:
                raise h.turn.error  # type: ignore[union-attr]
    return h


# -- state


async def test_save_replaces_top_level_keys_and_merge_goes_deep() -> None:
    def body(step: Step) -> None:
        step.save_state({"a": {"x": 1, "y": [1]}, "b": 1})
        step.save_state({"a": {"z": 2}})
        assert step.get_state("a") == {"z": 2}
        step.merge_state({"a": {"z": {"deep": 1}, "w": 3}, "c": {"n": 1}})
        step.merge_state({"a": {"z": {"er": 2}}, "b": [2]})
        assert step.get_state(["a", "z"]) == {"deep": 1, "er": 2}
        step.remove_state("c")
        step.remove_state("never there")

    h = await within(body)
    assert await h.state("A") == {"a": {"z": {"deep": 1, "er": 2}, "w": 3}, "b": [2]}


async def test_reading_by_path() -> None:
    def body(step: Step) -> None:
        step.save_state({"criteria": {"city": "Rome", "dates": ["a", "b"], "n": None, "a.b": 1}})
        assert step.get_state("criteria.city") == "Rome"
        assert step.get_state("criteria.dates.1") == "b"
        assert step.get_state(["criteria", "dates", 0]) == "a"
        assert step.get_state(["criteria", "a.b"]) == 1
        assert step.get_state("criteria.n", default="x") is None
        assert step.get_state("criteria.missing.more", default="x") == "x"
        assert step.get_state("criteria.dates.9") is None
        assert step.get_state("criteria.city.0") is None
        assert step.get_state()["criteria"]["city"] == "Rome"

    await within(body)


async def test_reads_and_writes_are_copies() -> None:
    def body(step: Step) -> None:
        given: dict[str, Any] = {"list": [1]}
        step.save_state({"a": given})
        given["list"].append(2)
        got = step.get_state("a")
        got["list"].append(3)
        step.get_state()["a"]["list"].append(4)
        step.flow.get_step_state("A", "a")["list"].append(5)
        assert step.get_state("a") == {"list": [1]}

    await within(body)


@dataclass
class Trip:
    city: str
    nights: int = 1


class TripDict(TypedDict):
    city: str


async def test_reading_as_a_type() -> None:
    def body(step: Step) -> None:
        step.save_state({"trip": {"city": "Rome"}, "n": 3})
        assert step.get_state("trip", type_=Trip) == Trip("Rome")
        assert step.get_state("trip", type_=TripDict) == {"city": "Rome"}
        assert step.get_state("n", type_=int) + 1 == 4
        assert step.get_state("missing", type_=Trip, default=Trip("Oslo")).city == "Oslo"
        assert step.flow.get_step_state(type(step), "trip", type_=Trip).nights == 1
        with pytest.raises(InvalidOutcomeError, match=r"'n' of A is not a str"):
            step.get_state("n", type_=str)

    await within(body)


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": [1, object()]}}, "a.b[1]"), ({"a": float("nan")}, "a"), ({"a": {1: 2}}, "a.1"),
        ({"a": b"x"}, "a"), ({"a": "\ud800"}, "a"), ({"a": {"\ud800": 1}}, "a.\ud800"), ({"a": float("inf")}, "a"),
    ],
    ids=["object", "nan", "key", "bytes", "surrogate", "surrogate-key", "infinite"],
)  # fmt: skip
async def test_what_is_not_json_is_refused_with_its_path(value: Any, path: str) -> None:
    def body(step: Step) -> None:
        step.save_state({"kept": 1})
        for write in (step.save_state, step.merge_state):
            with pytest.raises(NonJsonValueError) as caught:
                write({"x": 1, **value})
            assert caught.value.path == path
        assert step.get_state("x") is None

    assert await (await within(body)).state("A") == {"kept": 1}


async def test_too_deep_values_are_refused_and_subclasses_become_plain() -> None:
    def body(step: Step) -> None:
        deep: Any = 1
        for _ in range(600):
            deep = [deep]
        with pytest.raises(NonJsonValueError, match="nested deeper than 500"):
            step.save_state({"a": deep})
        step.save_state({"c": Colour.RED, "t": (1, 2.5, True, None), "n": enum.IntEnum("N", "ONE").ONE})  # type: ignore[attr-defined]

    assert await (await within(body)).state("A") == {"c": "red", "t": [1, 2.5, True, None], "n": 1}


async def test_the_frameworks_keys_are_refused() -> None:
    def body(step: Step) -> None:
        for write in (step.save_state, step.merge_state):
            with pytest.raises(InvalidOutcomeError, match="_prompt"):
                write({"_prompt": "x"})
        with pytest.raises(InvalidOutcomeError, match="_saved_at"):
            step.remove_state("_saved_at")
        with pytest.raises(InvalidOutcomeError, match="mapping"):
            step.save_state(["a"])  # type: ignore[arg-type]
        with pytest.raises(InvalidOutcomeError):
            step.flow.save_step_state("B", {"_x": 1})

    await within(body)


async def test_every_save_stamps_the_state() -> None:
    stamps: list[float] = []

    def body(step: Step) -> None:
        step.save_state({"a": 1})
        stamps.append(step.get_state("_saved_at"))

    h = await within(body, turns=2)
    assert stamps == sorted(stamps)
    assert (await h.document())["stages"]["A"]["state"]["_saved_at"] == stamps[-1]


async def test_other_steps_by_class_id_and_alias() -> None:
    seen: list[Any] = []

    class B(Step):
        aliases = ("OldB",)

    async def on_visit(self: Any, message: Any) -> None:
        self.flow.save_step_state(B, {"x": 1})
        self.flow.save_step_state("OldB", {"y": 2})
        seen.append((self.flow.get_step_state("B", "x"), self.flow.get_step_state("B", "z", default=0)))
        assert self.flow.get_step("OldB") is self.flow.get_step(B)
        with pytest.raises(FlowDefinitionError, match="Nobody is not a step of TestFlow"):
            self.flow.get_step("Nobody")
        with pytest.raises(FlowDefinitionError, match="Step is not a step"):
            self.flow.get_step(Step)

    async with harness(flow_of(stage("A", on_visit=on_visit), B), "Ok.") as h:
        assert (await h.say("hi")).success
        assert await h.state("B") == {"x": 1, "y": 2}
    assert seen == [(1, 0)]


# -- memory


async def test_memory_is_a_view_that_mints_ids() -> None:
    def body(step: Step) -> None:
        memory = step.get_memory()
        assert (len(memory), memory.last.text) == (1, "hi 0")  # type: ignore[union-attr]
        one = memory.append("by code")
        two = memory.append(UserMessage(content="by a person"))
        memory.append(AssistantMessage(text="as a model", model="x:y"))
        memory.append(DirectMessage(text="direct"))
        memory.append(AssistantMessage(calls=(ToolCall("c", "t"),)))
        memory.append(ToolResult(call="c", name="t", content="r"))
        assert [m.stage for m in memory] == ["A"] * 7
        assert len({m.id for m in memory}) == 7
        assert (one.by, two.by) == ("code", "user")  # type: ignore[union-attr]
        assert memory.last.content == "r"  # type: ignore[union-attr]
        for bad in ("", ToolResult(call="zzz"), DirectMessage(text=" "), AssistantMessage()):
            with pytest.raises(HistoryError):
                memory.append(bad)

    h = await within(body)
    assert len(await h.history("A")) == 8


async def test_ids_have_three_parts_author_time_and_model() -> None:
    clock = FakeClock(auto_advance=True)

    async def on_visit(self: Any, message: Any) -> None:
        assert re.fullmatch(r"A\|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\|[0-9a-f]{8}", self.gen_message_id())

    async with harness(flow_of(stage("A", on_visit=on_visit)), "Ok.", clock=clock) as h:
        assert (await h.say("hi")).success
        for message in await h.history("A"):
            author, at, suffix = message.id.split("|")
            assert (author, message.stage, message.at) == ("A", "A", at)
            assert len(suffix) == 8
        assert (await h.history("A"))[1].model == "scripted:m"  # type: ignore[union-attr]


async def test_erasing_memory_keeps_state_and_the_call_that_is_open() -> None:
    @tool
    async def forget(self: Any) -> str:
        self.save_state({"kept": 1})
        self.get_memory().append("to be dropped")
        self.erase_memory()
        assert len(self.get_memory()) == 0
        self.get_memory().append("a note")
        assert lines([self.get_memory().last]) == ["code: a note"]
        return "forgotten"

    async with harness(flow_of(stage("A", forget=forget)), "One.", call("forget"), "Two.") as h:
        await h.say("first")
        await h.say("second")
        assert lines(await h.history("A")) == [
            "user: second", "model: [forget]", "ok: forgotten", "code: a note", "model: Two.",
        ]  # fmt: skip
        assert await h.state("A") == {"kept": 1}
    assert (await _erased()) == ["model: Ok."]


async def _erased() -> list[str]:
    h = await within(lambda step: step.get_memory().erase())
    return lines(await h.history("A"))


async def test_steps_that_select_the_same_namespace_share_it() -> None:
    class A(Step):
        async def on_response(self, result: str) -> Any:
            return B

    class B(Step):
        async def on_visit(self, message: Any) -> None:
            assert [m.stage for m in self.flow.get_memory("talk")] == ["A", "A", "B"]
            self.flow.get_memory("talk").append("noted")
            self.flow.get_memory("side").append("elsewhere")

    flow = flow_of(A, B, define_steps=lambda self: [A(self).use_memory("talk"), B(self).use_memory("talk")])
    async with harness(flow, "A.", "B.") as h:
        assert (await h.say("hi")).success
        assert lines(await h.history("talk")) == ["user: hi", "model: A.", "code: Start", "code: noted", "model: B."]
        assert [m.stage for m in await h.history("side")] == ["B"]


async def test_get_conversation_reads_what_the_person_asked() -> None:
    seen: list[Any] = []

    def body(step: Step) -> None:
        step.get_memory().append("by code")
        talk = step.flow.get_conversation("A")
        seen.append((talk.request, talk.prior_requests))
        seen.append(step.flow.get_conversation("A", max_prior=1).prior_requests)
        seen.append(step.flow.get_conversation("A", max_prior=0).prior_requests)
        assert step.flow.get_conversation("nothing here").request is None

    await within(body, turns=7)
    assert seen[-3:] == [("hi 6", ("hi 2", "hi 3", "hi 4", "hi 5")), ("hi 5",), ()]


# -- context


async def test_context_comes_from_the_first_turns_config_and_stays() -> None:
    seen: list[Any] = []

    async def init(self: Flow) -> None:
        seen.append(("init", self.get_context("config.plan")))

    def body(step: Step) -> None:
        whole = step.get_context()
        seen.append(
            (
                {**whole, "config": dict(whole["config"])},
                step.get_context("config.plan"),
                step.flow.get_context(["config", "x"], default=0),
            )
        )
        whole["config"]["plan"] = "changed"

    async def on_visit(self: Any, message: Any) -> None:
        body(self)

    flow = flow_of(stage("A", on_visit=on_visit), init=init)
    async with harness(flow, "1", "2", "3") as h:
        await h.say("a", config={"plan": "gold"})
        await h.say("b", config={"plan": "iron"})
        await h.say("c", config={"plan": "gold"})
        assert [entry.text for entry in await h.log()] == [
            "a config on a later turn is ignored; the first turn's stays"
        ]
        assert (await h.log())[0].level == "warning"
    assert seen == [("init", "gold"), ({"config": {"plan": "gold"}}, "gold", 0)] * 3


async def test_the_default_of_a_read_is_given_back_as_it_is() -> None:
    marker = object()

    def body(step: Step) -> None:
        assert step.get_context("nothing", default=marker) is marker
        assert step.get_state("nothing", default=marker) is marker
        assert step.get_transient_state("nothing", default=marker) is marker

    await within(body)


# -- transient


async def test_transient_values_last_for_the_turn_and_are_never_stored() -> None:
    seen: list[Any] = []
    marker = object()

    @tool
    async def look(self: Any) -> str:
        return "seen"

    async def on_visit(self: Any, message: Any) -> None:
        seen.append(("before", self.get_transient_state("m.x")))
        self.save_transient_state({"m": {"x": marker}})
        self.flow.save_transient_step_state("B", {"b": 1})
        self.flow.save_transient_step_state("A", {"more": 1})

    def get_prompt(self: Any) -> str:
        seen.append(("prompt", self.get_transient_state("m.x") is marker, self.get_transient_state()["more"]))
        return ""

    a = stage("A", on_visit=on_visit, get_prompt=get_prompt, look=look)
    async with harness(flow_of(a, stage("B")), call("look"), "1", "2") as h:
        await h.say("a")
        await h.say("b")
        assert not (await h.document()).get("stages")
    assert seen == [("before", None), ("prompt", True, 1), ("prompt", True, 1), ("before", None), ("prompt", True, 1)]


# -- staged writes of tool handlers


@pytest.mark.parametrize("threads", [False, True], ids=["coroutines", "threads"])
@pytest.mark.parametrize("parallel", [False, True], ids=["in-order", "concurrent"])
async def test_what_calls_of_one_batch_see_of_each_other(parallel: bool, threads: bool) -> None:
    seen: list[Any] = []

    def body(self: Any, n: int) -> str:
        before = self.get_state("n", default=0)
        heard = len(self.get_memory())
        self.save_state({"n": before + n, f"own{n}": True})
        self.flow.save_step_state("B", {f"from{n}": n})
        self.get_memory().append(f"note {n}")
        seen.append((n, before, self.get_state("n") - before, heard, len(self.get_memory()) - heard))
        return f"did {n}"

    if threads:

        @tool
        def add(self: Any, n: int) -> str:
            """Add."""
            return body(self, n)

    else:

        @tool
        async def add(self: Any, n: int) -> str:
            """Add."""
            return body(self, n)

    a = stage("A", add=add, parallel_tools=parallel)
    script = [Reply.tool_calls(Call("add", {"n": 1}), Call("add", {"n": 2}), Call("add", {"n": 4})), "Done."]
    async with harness(flow_of(a, stage("B")), *script) as h:
        assert (await h.say("hi")).success
        assert lines(await h.history("A"))[2:8] == [
            "ok: did 1", "ok: did 2", "ok: did 4", "code: note 1", "code: note 2", "code: note 4",
        ]  # fmt: skip
        assert await h.state("B") == {"from1": 1, "from2": 2, "from4": 4}
        # Applied in call order: concurrently each read the state before the batch, so the last write stands.
        assert await h.state("A") == {"n": 4 if parallel else 7, "own1": True, "own2": True, "own4": True}
    befores = {n: before for n, before, *_ in seen}
    assert befores == ({1: 0, 2: 0, 4: 0} if parallel else {1: 0, 2: 1, 4: 3})
    assert all(own == n and wrote == 1 for n, _, own, _, wrote in seen)
    assert {heard for *_, heard, _ in seen} == ({2} if parallel else {2, 3, 4})


@pytest.mark.parametrize("on_error", ["raise", "report"])
async def test_writes_of_a_call_that_raised_are_dropped(on_error: Any) -> None:
    @tool
    async def good(self: Any) -> str:
        self.save_state({"good": 1})
        self.get_memory().append("kept")
        return "fine"

    @tool(on_error=on_error)
    async def bad(self: Any) -> str:
        self.save_state({"bad": 1})
        self.get_memory().append("dropped")
        self.flow.mark_completed()
        raise RuntimeError("no")

    script = [Reply.tool_calls(Call("good"), Call("bad")), *(["Done."] if on_error == "report" else [])]
    async with harness(flow_of(stage("A", good=good, bad=bad)), *script) as h:
        result = await h.say("hi")
        assert result.success == (on_error == "report")
        assert await h.state("A") == {"good": 1}
        history = lines(await h.history("A"))
        assert history[2] == "ok: fine"
        assert "code: kept" in history
        assert "code: dropped" not in history
        assert result.status == "running"


async def test_a_handler_that_appends_what_no_provider_accepts_fails_there() -> None:
    raised: list[StepwellError] = []

    @tool
    async def act(self: Any) -> str:
        for bad in ("", ToolResult(call="call_1", name="act"), AssistantMessage()):
            try:
                self.get_memory().append(bad)
            except HistoryError as error:
                raised.append(error)
        with pytest.raises(UnicodeEncodeError):
            self.get_memory().append("\ud800")
        return "tried"

    async with harness(flow_of(stage("A", act=act)), call("act"), "Ok.", "Still well.") as h:
        assert (await h.say("hi")).success
        assert lines(await h.history("A")) == ["user: hi", "model: [act]", "ok: tried", "model: Ok."]
        assert (await h.say("again")).success
    assert len(raised) == 3


async def test_writes_after_the_call_has_ended_are_refused() -> None:
    kept: list[Any] = []

    @tool
    async def act(self: Any, ctx: ToolContext) -> str:
        import contextvars

        kept.append((contextvars.copy_context(), self))
        return "ok"

    async def on_response(self: Any, result: str) -> Any:
        context, step = kept[0]
        with pytest.raises(StepwellError, match="no longer count"):
            context.run(step.save_state, {"late": 1})
        return None

    async with harness(flow_of(stage("A", act=act, on_response=on_response)), call("act"), "Ok.") as h:
        assert (await h.say("hi")).success
        assert await h.state("A") == {}


async def test_completion_marked_by_a_handler_counts_with_its_batch() -> None:
    @tool
    async def act(self: Any) -> str:
        self.flow.mark_completed()
        return "ok"

    async with harness(flow_of(stage("A", act=act)), call("act"), "Bye.") as h:
        assert (await h.say("hi")).completed


# -- the session


async def test_get_session_is_frozen() -> None:
    def body(step: Step) -> None:
        step.save_state({"list": [{"a": 1}]})
        view = step.flow.get_session()
        assert view["workflow"]["id"] == "TestFlow"
        assert view["id"] == step.flow.session_id
        assert view["stages"]["A"]["state"]["list"] == ({"a": 1},)
        with pytest.raises(TypeError):
            view["status"] = "completed"  # type: ignore[index]
        with pytest.raises(TypeError):
            view["stages"]["A"]["state"]["list"][0]["a"] = 2

    await within(body)


async def test_the_session_log() -> None:
    def body(step: Step) -> None:
        step.flow.log("looked", {"n": 1})
        step.flow.warn("odd")

    h = await within(body)
    assert [(e.level, e.text, e.data) for e in await h.log()] == [
        ("info", "looked", {"n": 1}),
        ("warning", "odd", None),
    ]


def test_a_flow_outside_of_a_turn_says_so() -> None:
    flow = flow_of(stage("A"))()
    for read in (lambda: flow.session_id, flow.get_session, lambda: flow.get_context("x"), flow.get_current_step):
        with pytest.raises(FlowDefinitionError, match="not in a turn"):
            read()


async def test_names_and_spaces() -> None:
    def body(step: Step) -> None:
        assert (step.get_name(), step.get_memory_space(), step.content_type) == ("A", "A", "text/plain")
        assert step.flow.get_executing_step() is step.flow.get_current_step() is step

    await within(body)
