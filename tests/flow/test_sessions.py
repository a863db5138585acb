"""Logic steps, ends and successors, models of steps, restoring and migrating, and failed turns."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flow_kit import Log, call, failure, flow_of, harness, lines, stage
from stepwell import Flow, LogicStep, ModelSelection, TerminateSessionStep, direct, finish, go, tool
from stepwell.models import LlmType
from stepwell.sessions import Migration
from stepwell.testing import Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio


def logic(name: str, value: Any, **members: Any) -> type[Any]:
    async def run_logic(self: Any) -> Any:
        return value

    return stage(name, base=LogicStep, run_logic=run_logic, **members)


# -- logic steps


async def test_logic_steps_chain_without_a_model() -> None:
    a, b = logic("A", go("B").with_state({"n": 1})), logic("B", go("C").with_message("From B."))
    async with harness(flow_of(a, b, stage("C")), "Hello.") as h:
        result = await h.say("hi")
        assert lines(await h.history("C")) == ["code: From B.", "model: Hello."]
        assert await h.state("B") == {"n": 1}
        assert [entry.stage for entry in await h.sequence()] == ["A", "B", "C"]
    assert (result.message, result.current, result.units) == ("Hello.", "C", 3)


async def test_the_longest_chain_that_is_allowed() -> None:
    steps = [logic(f"L{n}", go(f"L{n + 1}")) for n in range(3)]
    flow = flow_of(*steps, stage("L3"), max_logic_hops=3)
    async with harness(flow, "Ok.") as h:
        assert (await h.say("hi")).success
    async with harness(flow_of(*steps, stage("L3"), max_logic_hops=2)) as h:
        code, ids = failure(await h.say("hi"))
    assert (code, ids) == ("logic_loop", {"flow": "TestFlow", "stage": "L2"})


async def test_a_hop_count_begins_anew_where_a_step_talked() -> None:
    talk = stage("Talk", on_response=_to_l)
    async with harness(
        flow_of(logic("L", go("M")), logic("M", go("Talk")), talk, max_logic_hops=2), "1", "2", "3"
    ) as h:
        h.flow.rounds = 0  # type: ignore[attr-defined]
        assert (await h.say("hi")).success


async def _to_l(self: Any, result: str) -> Any:
    return go("L") if result != "3" else None


async def test_a_circle_of_logic_steps_ends() -> None:
    async with harness(flow_of(logic("A", go("B")), logic("B", go("A")))) as h:
        code, ids = failure(await h.say("hi"))
        assert (code, ids["flow"]) == ("logic_loop", "TestFlow")
        assert (await h.document()).get("status", "running") == "running"


async def test_a_logic_step_must_not_return_itself() -> None:
    log: Log = []
    a = stage("A", log, base=_recorded_logic(), run_logic=_itself)
    async with harness(flow_of(a)) as h:
        code, ids = failure(await h.say("hi"))
    assert (code, ids["stage"]) == ("logic_loop", "A")
    assert ("A", "on_exit") not in log


def _recorded_logic() -> type[Any]:
    from flow_kit import Recorded

    return type("Base", (LogicStep, Recorded), {})


async def _itself(self: Any) -> Any:
    return go("A")


async def test_a_logic_step_that_does_not_say_what_comes_next_fails_its_turn() -> None:
    async with harness(flow_of(stage("L", base=LogicStep))) as h:
        assert failure(await h.say("hi"))[0] == "handler"


@pytest.mark.parametrize(
    ("value", "message", "kind"),
    [
        (finish({"a": 1}), '{"a":1}', "application/json"),
        (finish(), "", "text/plain"),
        (finish("B."), "B.", "text/plain"),
    ],
    ids=["object", "nothing", "text"],
)
async def test_a_logic_step_may_finish(value: Any, message: str, kind: str) -> None:
    async with harness(flow_of(logic("A", value))) as h:
        result = await h.say("hi")
    assert (result.message, result.content_type, result.completed, h.shown) == (message, kind, True, message)


# -- ends


async def test_an_ended_session_is_followed_by_a_new_one() -> None:
    @tool
    async def end(self: Any) -> Any:
        return finish("Bye.")

    log: Log = []
    async with harness(flow_of(stage("A", log, end=end)), call("end"), "Hello again.", "Yes.") as h:
        first = await h.say("stop")
        log.clear()
        second = await h.say("hi")
        assert (second.resumed, second.previous_session_id) == (False, first.session_id)
        assert second.session_id != first.session_id
        assert (second.status, second.completed) == ("running", False)
        assert log[0][1] == "on_start"
        third = await h.say("more", session_id=first.session_id)
        assert third.session_id == second.session_id
        assert third.previous_session_id == first.session_id
        assert (await h.engine.get_session(first.session_id))["status"] == "completed"
        assert (await h.engine.get_session(second.session_id))["previous"] == first.session_id


async def test_the_closing_step_completes_and_says_goodbye() -> None:
    async with harness(flow_of(stage("A", on_response=_close), TerminateSessionStep), "A.", "Goodbye.") as h:
        result = await h.say("hi")
        assert h.model.requests[1].system.startswith("The conversation is over.")  # type: ignore[attr-defined]
    assert (result.completed, result.message, result.current) == (True, "Goodbye.", "TerminateSessionStep")


async def _close(self: Any, result: str) -> Any:
    return TerminateSessionStep


@pytest.mark.parametrize("abort", [True, False])
async def test_on_turn_error_may_abort_the_session(abort: bool) -> None:
    errors: list[Exception] = []

    async def on_turn_error(self: Flow, error: Exception) -> Any:
        errors.append(error)
        return "abort" if abort else None

    async with harness(flow_of(stage("A"), on_turn_error=on_turn_error), Reply.error(status=400), "Well.") as h:
        result = await h.say("hi")
        assert (result.success, result.status) == (False, "aborted" if abort else "running")
        assert len(errors) == 1
        after = await h.say("again")
        assert after.resumed is not abort
        assert (after.previous_session_id == result.session_id) is abort
        assert lines(await h.history("A")) == [*([] if abort else ["user: hi"]), "user: again", "model: Well."]


async def test_an_on_turn_error_that_fails_does_not_hide_the_first_error() -> None:
    async def on_turn_error(self: Flow, error: Exception) -> Any:
        raise RuntimeError("and this")

    async with harness(flow_of(stage("A"), on_turn_error=on_turn_error), Reply.error(status=400)) as h:
        assert failure(await h.say("hi"))[0] == "model_invocation"
        assert (await h.document()).get("status", "running") == "running"


# -- models of steps


def overriding(selection: Any, flows: Any = "scripted:m") -> type[Flow]:
    a = stage("A")
    return flow_of(config_model=lambda self: flows, define_steps=lambda self: [a(self).use_model(selection)])


BASE = ModelSelection("scripted", "m", {"a": 1, "b": 2})
MERGES = [
    (BASE, ModelSelection("scripted", "m", {"b": 3}), {"a": 1, "b": 3}),
    (BASE, ModelSelection("scripted", "other", {"b": 3}), {"b": 3}),
    (BASE, ModelSelection("openai", "m"), {}),
    (BASE, "scripted:m", {"a": 1, "b": 2}),
]


@pytest.mark.parametrize(("base", "override", "params"), MERGES)
async def test_parameters_are_merged_only_for_the_same_model(base: Any, override: Any, params: Any) -> None:
    async with harness(overriding(override, base), "Ok.") as h:
        assert (await h.say("hi")).success
        used = h.model.requests[0].selection  # type: ignore[attr-defined]
        assert dict(used.params) == params
        document = await h.document()
        assert document["workflow"]["model"] == {"provider": "scripted", "name": "m", "params": {"a": 1, "b": 2}}
        stored = document.get("stages", {}).get("A", {}).get("model")
        # An override that comes to the flow's own model is none.
        assert stored == (None if used == base else ModelSelection.parse(override).to_json())


async def test_attempts_of_an_override_win() -> None:
    flow = overriding(ModelSelection("scripted", "m", attempts=1))
    async with harness(flow, Reply.error(status=503)) as h:
        assert not (await h.say("hi")).success


async def test_a_hook_may_choose_the_model_and_the_choice_stays() -> None:
    async def on_visit(self: Any, message: Any) -> None:
        if message.text == "smart":
            self.use_model("scripted:smart")
        if message.text == "plain":
            self.use_model("scripted:m")

    @tool
    async def up(self: Any) -> str:
        self.use_model("scripted:up")
        return self.get_model()

    model = ScriptedModel(["1", "2", "3", call("up"), "4", "5"])
    async with TurnHarness(flow_of(stage("A", on_visit=on_visit, up=up)), model=model) as h:
        for said in ("hi", "smart", "more", "up"):
            assert (await h.say(said)).success
            await h.restart()
        assert (await h.document())["stages"]["A"]["model"] == {"provider": "scripted", "name": "up"}
        assert (await h.say("plain")).success
        assert (await h.document())["stages"]["A"].get("model") is None
    assert [r.selection.name for r in model.requests] == ["m", "smart", "smart", "smart", "up", "m"]


async def test_a_choice_made_in_a_turn_that_fails_is_forgotten() -> None:
    async def on_visit(self: Any, message: Any) -> None:
        if message.text == "smart":
            self.use_model("scripted:smart")

    async with harness(flow_of(stage("A", on_visit=on_visit)), Reply.error(status=400), "Ok.") as h:
        assert not (await h.say("smart")).success
        assert (await h.say("hi")).success
        assert h.model.requests[-1].selection.name == "m"  # type: ignore[attr-defined]


async def test_what_a_step_says_of_its_model() -> None:
    seen: list[Any] = []

    async def on_visit(self: Any, message: Any) -> None:
        seen.append((self.get_model(), self.get_model_selection().name, self.get_llm_type()))

    async with harness(flow_of(stage("A", on_visit=on_visit)), "Ok.") as h:
        assert (await h.say("hi")).success
    assert seen == [("scripted:m", "m", LlmType.UNSUPPORTED)]


async def test_the_stored_model_of_the_flow_follows_the_code() -> None:
    flow = flow_of(stage("A"))
    async with harness(flow, "1", "2") as h:
        await h.say("hi")
        flow.config_model = lambda self: "scripted:newer"  # type: ignore[method-assign]
        await h.restart()
        await h.say("again")
        assert (await h.document())["workflow"]["model"]["name"] == "newer"
        assert h.model.requests[-1].selection.name == "newer"  # type: ignore[attr-defined]


# -- restoring


async def test_on_restore_session_sees_and_may_reshape_the_document() -> None:
    seen: list[Any] = []

    async def on_restore_session(self: Flow, document: Any) -> Any:
        seen.append((document["stages"]["A"]["state"]["n"], document["workflow"]["context"]))
        document["stages"]["A"]["state"]["n"] = 2
        document["workflow"]["context"] = {"config": {"plan": "new"}}
        del document["memories"]["A"]
        return document

    async def on_visit(self: Any, message: Any) -> None:
        seen.append((self.get_state("n"), self.get_context("config.plan")))
        self.save_state({"n": 1})

    flow = flow_of(stage("A", on_visit=on_visit), on_restore_session=on_restore_session)
    async with harness(flow, "1", "2") as h:
        await h.say("hi", config={"plan": "old"})
        await h.say("again")
        assert lines(await h.history("A")) == ["user: again", "model: 2"]
    assert seen == [(None, "old"), (1, {"config": {"plan": "old"}}), (2, "new")]


async def test_on_restore_session_may_want_a_fresh_one() -> None:
    async def on_restore_session(self: Flow, document: Any) -> Any:
        return None

    log: Log = []
    async with harness(flow_of(stage("A", log), on_restore_session=on_restore_session), "1", "2") as h:
        first = await h.say("hi")
        log.clear()
        second = await h.say("again")
        assert (second.resumed, second.previous_session_id) == (False, first.session_id)
        assert (await h.engine.get_session(first.session_id))["status"] == "aborted"
        assert lines(await h.history("A")) == ["user: again", "model: 2"]
    assert [entry[1] for entry in log][:1] == ["on_start"]


@pytest.mark.parametrize("garbage", ["text", {"stages": 7}, {"stages": {"A": {"state": {"x": {1}}}}}], ids=str)
async def test_what_is_no_document_fails_the_turn_and_leaves_the_session(garbage: Any) -> None:
    async def on_restore_session(self: Flow, document: Any) -> Any:
        return garbage if flow.broken else document  # type: ignore[attr-defined]

    flow = flow_of(stage("A"), on_restore_session=on_restore_session, broken=False)
    async with harness(flow, "1", "2") as h:
        await h.say("hi")
        flow.broken = True  # type: ignore[attr-defined]
        assert not (await h.say("again")).success
        flow.broken = False  # type: ignore[attr-defined]
        assert (await h.say("again")).message == "2"


async def test_migrations_run_on_load_before_on_restore_session() -> None:
    seen: list[Any] = []

    def rename(head: dict[str, Any]) -> dict[str, Any]:
        state = head["stages"]["A"]["state"]
        state["town"] = state.pop("city")
        return head

    async def on_restore_session(self: Flow, document: Any) -> Any:
        seen.append((document["workflow"]["schema_version"], document["stages"]["A"]["state"]["town"]))
        return document

    async def on_visit(self: Any, message: Any) -> None:
        if message.text == "hi":
            self.save_state({"city": "Rome"})

    a = stage("A", on_visit=on_visit)
    async with harness(flow_of(a), "1", "2") as h:
        await h.say("hi")
        newer = flow_of(a, schema_version=2, migrations=[Migration(1, rename)], on_restore_session=on_restore_session)
        second = TurnHarness(newer, model=h.model, store=h.store, clock=h.clock)
        async with second.engine:
            second.session_id = h.session_id
            assert (await second.say("again")).success
            assert await second.state("A") == {"town": "Rome"}
        await h.restart()
        assert failure(await h.say("old code"))[0] == "newer_schema"
    assert seen == [(2, "Rome")]


# -- direct answers of several stages


async def test_a_turn_over_several_stages_shows_all_and_answers_with_the_last() -> None:
    @tool
    async def act(self: Any) -> Any:
        return direct("From B.")

    async with harness(flow_of(stage("A", on_response=_to_b), stage("B", act=act)), "From A.", call("act")) as h:
        result = await h.say("hi")
    assert (result.message, result.current, h.shown) == ("From B.", "B", "From A.\n\nFrom B.")


async def _to_b(self: Any, result: str) -> Any:
    return go("B")


class Stop(BaseException):
    """Not an `Exception`, as an exit or a failing test are."""


async def test_what_is_no_exception_ends_the_turn_and_goes_on_its_way() -> None:
    async def on_visit(self: Any, message: Any) -> None:
        if message.text == "stop":
            raise Stop

    async with harness(flow_of(stage("A", on_visit=on_visit)), "Ok.") as h:
        task = asyncio.ensure_future(h.say("stop"))
        result = await task
        assert failure(result)[0] == "handler"
        assert isinstance(h.turn.error, Stop)  # type: ignore[union-attr]
        assert (await h.say("hi", session_id=None)).success
