"""P12. Stable names: what is stored is found by id or alias, never by a class name or an import path."""

from __future__ import annotations

from typing import Any

import pytest

from flow_kit import call, failure, flow_of, lines, stage
from stepwell import Flow, Step, go, tool
from stepwell.errors import FlowDefinitionError, UnknownFlowError
from stepwell.sessions import MemoryStore
from stepwell.testing import FakeClock, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio


class Deployments:
    """One store, and one version of the code after another."""

    def __init__(self) -> None:
        self.clock = FakeClock(auto_advance=True)
        self.store = MemoryStore(self.clock)
        self.session: str | None = None

    def of(self, flow: type[Flow], *script: Any) -> TurnHarness:
        h = TurnHarness(flow, model=ScriptedModel(list(script)), store=self.store, clock=self.clock)
        h.session_id = self.session
        return h


async def on_visit(self: Any, message: Any) -> None:
    self.save_state({"visits": self.get_state("visits", default=0) + 1})


async def test_ids_are_chosen_names_and_not_those_of_classes() -> None:
    deployed = Deployments()

    class FirstName(Step):
        id = "intake"

    class FirstFlow(Flow):
        id = "claims"

        def config_model(self) -> str:
            return "scripted:m"

        def define_steps(self) -> list[Any]:
            return [FirstName(self)]

    async with deployed.of(FirstFlow, "1") as h:
        result = await h.say("hi")
        deployed.session = result.session_id
        document = await h.document()
        assert (document["workflow"]["id"], document["workflow"]["current"]) == ("claims", "intake")
        assert "FirstName" not in repr(document)
        assert "FirstFlow" not in repr(document)
        assert lines(await h.history("intake")) == ["user: hi", "model: 1"]

    other = flow_of(stage("Elsewhere", id="intake"), name="OtherFlow", id="claims")
    async with deployed.of(other, "2") as h:
        second = await h.say("again")
        assert (second.resumed, second.message) == (True, "2")
        assert lines(await h.history("intake")) == ["user: hi", "model: 1", "user: again", "model: 2"]


def test_a_subclass_has_its_own_id_unless_it_says_so() -> None:
    base = stage("Base", id="stable")
    assert stage("Derived", base=base).id == "Derived"
    assert stage("Derived", base=base, id="stable").id == "stable"
    assert flow_of(base).id == "TestFlow"


@pytest.mark.parametrize("with_state", [True, False], ids=["with-state", "without-state"])
async def test_a_renamed_step_and_a_renamed_flow_go_on(with_state: bool) -> None:
    deployed = Deployments()
    members: dict[str, Any] = {"on_visit": on_visit} if with_state else {}
    async with deployed.of(flow_of(stage("Old", **members), stage("B")), "1") as h:
        deployed.session = (await h.say("hi")).session_id
    renamed = flow_of(
        stage("New", aliases=("Older", "Old"), **members), stage("B"), name="NewFlow", aliases=("TestFlow",)
    )
    async with deployed.of(renamed, "2", "3") as h:
        result = await h.say("again")
        assert (result.resumed, result.current) == (True, "New")
        request = h.model.requests[0]  # type: ignore[attr-defined]
        assert [getattr(m, "text", "") for m in request.messages] == ["hi", "1", "again"]
        if with_state:
            assert await h.state("New") == {"visits": 2}
        document = await h.document()
        assert document["workflow"]["id"] == "NewFlow"
        assert "Old" not in document.get("stages", {})
        assert (await h.say("more")).resumed
    assert h.engine.definitions["TestFlow"] is h.engine.definitions["NewFlow"]


async def test_a_renamed_step_that_comes_back_knows_its_own_messages() -> None:
    async def on_response(self: Any, result: str) -> Any:
        return go("B")

    @tool
    async def back(self: Any) -> Any:
        return go("Old")

    deployed = Deployments()
    async with deployed.of(flow_of(stage("Old", on_response=on_response), stage("B")), "1", "2") as h:
        deployed.session = (await h.say("hi")).session_id
    flow = flow_of(stage("New", aliases=("Old",)), stage("B", back=back))
    async with deployed.of(flow, call("back"), "3") as h:
        assert (await h.say("again")).current == "New"
        assert lines(await h.history("Old")) == ["user: hi", "model: 1", "model: 3"]  # no Start: it ended on this step


async def test_a_cursor_on_a_step_that_is_gone_is_a_migration_error() -> None:
    deployed = Deployments()
    async with deployed.of(flow_of(stage("Old")), "1") as h:
        deployed.session = (await h.say("hi")).session_id
    async with deployed.of(flow_of(stage("New"))) as h:
        code, ids = failure(await h.say("again"))
        assert (code, ids["stage"], ids["flow"]) == ("migration", "Old", "TestFlow")
    async with deployed.of(flow_of(stage("Old")), "2") as h:  # nothing was lost
        assert (await h.say("again")).message == "2"


async def test_a_flow_answers_to_its_aliases_and_to_nothing_else() -> None:
    flow = flow_of(stage("A"), aliases=("Before",))
    async with TurnHarness(flow, model=ScriptedModel(["1"])) as h:
        assert (await h.engine.run("Before", "hi")).success
        with pytest.raises(UnknownFlowError):
            await h.engine.run("Never", "hi")
    with pytest.raises(FlowDefinitionError, match="Two flows answer to 'Before'"):
        TurnHarness(flow, also=(flow_of(stage("A"), name="Before"),), model=ScriptedModel())


async def test_a_turn_left_open_under_the_old_names_is_finished_under_the_new() -> None:
    deployed = Deployments()

    @tool
    async def look(self: Any) -> str:
        return "seen"

    from stepwell.testing import Reply

    async with deployed.of(flow_of(stage("Old", look=look)), call("look"), Reply.text("x").stalling(after=0)) as h:
        import anyio

        async with anyio.create_task_group() as group:
            group.start_soon(h.say, "hi")
            await h.model.wait_stalled()  # type: ignore[attr-defined]
            await h.engine.close()
        (row,), _ = await deployed.store.list()
        deployed.session = row.id
    async with deployed.of(flow_of(stage("New", look=look, aliases=("Old",))), "Found.", "2") as h:
        assert (await h.say("again")).message == "2"
        assert lines(await h.history("Old")) == [
            "user: hi", "model: [look]", "ok: seen", "model: Found.", "user: again", "model: 2",
        ]  # fmt: skip
