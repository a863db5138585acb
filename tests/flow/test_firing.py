"""When hooks fire: every cell of the table, and what the hooks are given."""

from __future__ import annotations

from typing import Any

import pytest

from flow_kit import Log, Recorded, call, failure, flow_of, harness, lines, stage
from stepwell import LogicStep, Step, TerminateSessionStep, UserMessage, direct, direct_to, finish, go, stay, tool
from stepwell.engine import UnitStarted
from stepwell.testing import Reply

pytestmark = pytest.mark.anyio

HOOKS = ("on_start", "on_enter", "on_crossing", "on_exit", "on_restore")


def fired(log: Log, step: str) -> tuple[str, ...]:
    return tuple(entry[1] for entry in log if entry[0] == step and entry[1] in HOOKS)


def caller(outcome: Any, log: Log) -> type[Any]:
    """A step whose tool returns this outcome."""

    @tool
    async def act(self: Any) -> Any:
        """Act."""
        return outcome

    return stage("A", log, act=act)


async def events_of(outcome: Any, *more: Any) -> Log:
    """What fires in the turn that returns `outcome` from a tool, after a first turn that is not looked at."""
    log: Log = []
    async with harness(flow_of(caller(outcome, log), stage("B", log)), "Hello.", call("act"), *more) as h:
        await h.say("hi")
        log.clear()
        assert (await h.say("go")).success
    return log


async def test_a_new_session_starts_its_first_step() -> None:
    log: Log = []
    async with harness(flow_of(stage("A", log), stage("B", log)), "Hello.") as h:
        await h.say("hi")
    assert log == [
        ("A", "on_start"), ("A", "on_enter"), ("A", "on_crossing", None, None), ("A", "on_visit", "hi"),
    ]  # fmt: skip


@pytest.mark.parametrize("restart", [False, True], ids=["warm", "in-another-process"])
async def test_the_next_turn_of_a_loaded_session_only_restores(restart: bool) -> None:
    log: Log = []
    async with harness(flow_of(stage("A", log), stage("B", log)), "Hello.", "Again.") as h:
        await h.say("hi")
        log.clear()
        if restart:
            await h.restart()
        await h.say("there")
    assert log == [("A", "on_restore"), ("A", "on_visit", "there")]


async def test_on_restore_fires_once_per_turn_however_many_units_there_are() -> None:
    log = await events_of(stay("more"), call("act"), "Done.")
    assert [entry[1] for entry in log].count("on_restore") == 1


@pytest.mark.parametrize("target", ["class", "name", "bare class"])
async def test_go_leaves_one_step_and_arrives_in_the_other(target: str) -> None:
    log: Log = []
    other = stage("B", log)
    outcome = {"class": go(other), "name": go("B"), "bare class": other}[target]
    async with harness(flow_of(caller(outcome, log), other), "Hello.", call("act"), "Here is B.") as h:
        await h.say("hi")
        log.clear()
        result = await h.say("go")
    assert fired(log, "A") == ("on_restore", "on_exit")
    assert fired(log, "B") == ("on_enter", "on_crossing")
    assert (result.message, result.current) == ("Here is B.", "B")


@pytest.mark.parametrize("outcome", [stay("again"), go("A")], ids=["stay", "go-to-itself"])
async def test_staying_fires_nothing(outcome: Any) -> None:
    log = await events_of(outcome, "Still here.")
    assert fired(log, "A") == ("on_restore",)
    assert fired(log, "B") == ()
    assert [entry[1] for entry in log] == ["on_restore", "on_visit"]  # one visit, however many rounds


async def test_direct_to_enters_the_target_without_running_it() -> None:
    log = await events_of(direct_to("B", "Over to B."))
    assert fired(log, "A") == ("on_restore", "on_exit")
    assert fired(log, "B") == ("on_enter",)


async def test_direct_to_itself_moves_nothing() -> None:
    log = await events_of(direct_to("A", "Still A."))
    assert fired(log, "A") == ("on_restore",)


async def test_finish_exits_the_step() -> None:
    log = await events_of(finish("Bye."))
    assert fired(log, "A") == ("on_restore", "on_exit")
    assert fired(log, "B") == ()


async def test_direct_moves_nothing() -> None:
    log = await events_of(direct("From code."))
    assert fired(log, "A") == ("on_restore",)


# -- crossings


async def test_a_crossing_without_a_message_says_start() -> None:
    log: Log = []
    async with harness(flow_of(caller(go("B"), log), stage("B", log)), call("act"), "Here is B.") as h:
        await h.say("hi")
        assert lines(await h.history("B")) == ["code: Start", "model: Here is B."]
    assert ("B", "on_crossing", None, "A") in log
    assert ("B", "on_visit", "Start") in log


async def test_a_crossing_hands_the_message_over() -> None:
    log: Log = []
    outcome = go("B").with_message("Look at this.")
    async with harness(flow_of(caller(outcome, log), stage("B", log)), call("act"), "I see.") as h:
        await h.say("hi")
        history = await h.history("B")
    assert lines(history) == ["code: Look at this.", "model: I see."]
    assert ("B", "on_crossing", "Look at this.", "A") in log
    assert all(message.stage == "B" for message in history)


async def test_on_crossing_may_replace_or_drop_the_message() -> None:
    def on_crossing(self: Any, message: Any, prior_step: str | None = None) -> Any:
        return UserMessage(content=f"{prior_step} says: {message.text}") if message.text == "one" else None

    @tool
    async def act(self: Any, text: str) -> Any:
        return go("B").with_message(text)

    a = stage("A", act=act)
    b = stage("B", on_crossing=on_crossing, on_response=lambda self, result: _to("A"))
    flow = flow_of(a, b)
    async with harness(flow, call("act", text="one"), "B.", call("act", text="two"), "B.", "A.") as h:
        await h.say("hi")
        assert lines(await h.history("B"))[0] == "user: A says: one"
        assert "two" not in " ".join(lines(await h.history("B")))


async def _to(target: str) -> Any:
    return go(target)


async def test_no_start_is_added_where_the_history_ends_on_the_step() -> None:
    log: Log = []
    b = stage("B", log, on_response=lambda self, result: _to("A") if result == "Back." else _none())
    script = [call("act"), "Back.", call("act"), "B again."]
    async with harness(flow_of(caller(go("B"), log), b), *script) as h:
        await h.say("hi")
        assert lines(await h.history("B")) == ["code: Start", "model: Back.", "model: B again."]


async def _none() -> Any:
    return None


async def test_with_a_shared_namespace_the_newcomer_gets_a_start_of_its_own() -> None:
    @tool
    async def act(self: Any) -> Any:
        return go("B")

    a, b = stage("A", act=act), stage("B")
    flow = flow_of(a, b, define_steps=lambda self: [a(self).use_memory("talk"), b(self).use_memory("talk")])
    async with harness(flow, call("act"), "Here is B.", "Yes.") as h:
        await h.say("hi")
        await h.say("more")
        history = await h.history("talk")
        assert lines(history) == [
            "user: hi", "model: [act]", "ok: ok", "code: Start", "model: Here is B.", "user: more", "model: Yes.",
        ]  # fmt: skip
        assert [m.stage for m in history] == ["A", "A", "A", "B", "B", "B", "B"]
        assert not await h.history("A")


async def test_a_session_that_begins_without_a_message_says_start() -> None:
    log: Log = []
    async with harness(flow_of(stage("A", log), requires_user_message=False), "Welcome.") as h:
        result = await h.say(None)
        assert lines(await h.history("A")) == ["code: Start", "model: Welcome."]
    assert result.message == "Welcome."


@pytest.mark.parametrize("given", ["Begin here.", None], ids=["text", "nothing"])
async def test_on_start_may_give_the_first_message_itself(given: str | None) -> None:
    async def on_start(self: Any) -> Any:
        return given

    async with harness(flow_of(stage("A", on_start=on_start)), "Hello.") as h:
        await h.say("hi")
        expected = ["user: hi", *(["code: Begin here."] if given else []), "model: Hello."]
        assert lines(await h.history("A")) == expected


# -- visits


async def test_on_visit_prepares_state_before_the_prompt_once_per_visit() -> None:
    async def on_visit(self: Any, message: UserMessage | None) -> None:
        self.save_state({"visits": self.get_state("visits", default=0) + 1, "asked": message and message.text})

    @tool
    async def look(self: Any) -> str:
        return "seen"

    a = stage("A", on_visit=on_visit, look=look, get_prompt=lambda self: f"visit {self.get_state('visits')}")
    async with harness(flow_of(a), call("look"), "One.", "Two.") as h:
        await h.say("hi")
        await h.say("again")
        prompts = [request.system for request in h.model.requests]  # type: ignore[attr-defined]
        assert prompts == ["visit 1", "visit 1", "visit 2"]
        assert await h.state("A") == {"visits": 2, "asked": "again"}


async def test_a_logic_step_has_visits_too() -> None:
    log: Log = []

    class Sort(LogicStep, Recorded):
        async def run_logic(self) -> Any:
            self.note("run_logic")
            return go("B")

    Sort.log = log
    async with harness(flow_of(Sort, stage("B", log)), "Hello.") as h:
        await h.say("hi")
    assert [entry[1] for entry in log if entry[0] == "Sort"] == [
        "on_start", "on_enter", "on_crossing", "on_visit", "run_logic", "on_exit",
    ]  # fmt: skip


async def test_the_prompt_is_built_again_after_each_tool_batch() -> None:
    @tool
    async def count(self: Any) -> str:
        self.save_state({"n": self.get_state("n", default=0) + 1})
        return "counted"

    a = stage("A", count=count, get_prompt=lambda self: f"n={self.get_state('n', default=0)}")
    async with harness(flow_of(a), call("count"), call("count"), "Two.") as h:
        await h.say("hi")
        assert [r.system for r in h.model.requests] == ["n=0", "n=1", "n=2"]  # type: ignore[attr-defined]


async def test_the_prompt_is_what_with_prompt_gave_and_otherwise_none() -> None:
    @tool
    async def act(self: Any) -> Any:
        return go("B").with_prompt("Be short.")

    async with harness(flow_of(stage("A", act=act), stage("B")), call("act"), "Yes.", "Still.") as h:
        await h.say("hi")
        await h.say("and?")
        assert [r.system for r in h.model.requests] == [None, "Be short.", "Be short."]  # type: ignore[attr-defined]
        assert (await h.document())["stages"]["B"]["state"]["_prompt"] == "Be short."


# -- order of effects


async def test_effects_come_in_the_documented_order() -> None:
    log: Log = []

    class B(Recorded):
        async def on_enter(self) -> None:
            self.note("on_enter", self.get_state("x"), self.get_state("_prompt"), len(self.get_memory()))

        def on_crossing(self, message: Any, prior_step: str | None = None) -> Any:
            last = self.flow.get_memory("A").last
            self.note("on_crossing", self.get_state("x"), self.get_state("_prompt"), getattr(last, "content", None))
            return super().on_crossing(message, prior_step)

    class A(Recorded):
        @tool
        async def act(self) -> Any:
            """Act."""
            self.save_state({"own": True})
            state = go("B").with_state({"x": 1}).with_prompt("Be B.").with_tool_feedback("moved")
            return state.with_message("Hello B.").with_content_type("text/markdown")

        async def on_exit(self) -> None:
            self.note("on_exit", self.get_state("own"), self.flow.get_current_step().id)

    A.log = B.log = log
    async with harness(flow_of(A, B), call("act"), "# B") as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "model: [act]", "ok: moved"]
        assert lines(await h.history("B")) == ["code: Hello B.", "model: # B"]
    after = [entry for entry in log if entry[1] in ("on_exit", "on_enter", "on_crossing")]
    assert (
        after[-4:]
        == [
            ("A", "on_exit", True, "A"),  # the handler's writes are there, the cursor has not moved
            ("B", "on_enter", None, None, 0),  # it cannot see what the transition attaches
            ("B", "on_crossing", 1, "Be B.", "moved"),  # state, prompt and result come before the message
            ("B", "on_crossing", "Hello B.", "A"),
        ]
        or after[-3:]
    )
    assert result.content_type == "text/markdown"


async def test_on_enter_and_on_exit_know_who_is_executing() -> None:
    seen: list[tuple[str, str, str]] = []

    class Seeing(Step):
        async def on_enter(self) -> None:
            seen.append(("enter", self.flow.get_current_step().id, self.flow.get_executing_step().id))

        async def on_exit(self) -> None:
            seen.append(("exit", self.flow.get_current_step().id, self.flow.get_executing_step().id))

    async def on_response(self: Any, result: str) -> Any:
        return go("B")

    flow = flow_of(stage("A", base=Seeing, on_response=on_response), stage("B", base=Seeing))
    async with harness(flow, "A.", "B.") as h:
        await h.say("hi")
    assert seen == [("enter", "A", "A"), ("exit", "A", "A"), ("enter", "B", "A")]


# -- run


async def test_an_overridden_run_is_one_unit_and_gets_the_users_text() -> None:
    got: list[Any] = []

    @tool
    async def look(self: Any) -> str:
        return "seen"

    async def run(self: Any, user_message: str | None = None) -> Any:
        got.append(user_message)
        return await Step.run(self, user_message)

    async with harness(flow_of(stage("A", run=run, look=look)), call("look"), "Done.") as h:
        result = await h.say("hi")
        assert [(e.kind, e.stage) for e in h.of(UnitStarted)] == [("run", "A")]
        assert lines(await h.history("A")) == ["user: hi", "model: [look]", "ok: seen", "model: Done."]
    assert (result.message, result.units, got) == ("Done.", 1, ["hi"])


@pytest.mark.parametrize(
    ("content", "message", "content_type"),
    [("Text.", "Text.", "text/plain"), ({"a": 1}, '{"a":1}', "application/json"), (None, "", "text/plain")],
    ids=["text", "object", "nothing"],
)
async def test_run_may_answer_without_a_model(content: Any, message: str, content_type: str) -> None:
    async def run(self: Any, user_message: str | None = None) -> Any:
        return content

    async with harness(flow_of(stage("A", run=run))) as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", *([f"direct: {message}"] if message else [])]
    assert (result.message, result.content_type) == (message, content_type)
    assert h.shown == message


async def test_run_may_say_something_else_than_the_model() -> None:
    async def run(self: Any, user_message: str | None = None) -> Any:
        return f"<{await Step.run(self, user_message)}>"

    async with harness(flow_of(stage("A", run=run)), "Hello.") as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "direct: <Hello.>"]
    assert (result.message, h.shown) == ("<Hello.>", "<Hello.>")


async def test_run_may_reword_what_a_tool_answered_and_it_is_said_once() -> None:
    @tool
    async def act(self: Any) -> Any:
        return direct("seven").with_state({"n": 7}).with_message("Noted.")

    async def run(self: Any, user_message: str | None = None) -> Any:
        return f"It is {await Step.run(self, user_message)}."

    async with harness(flow_of(stage("A", run=run, act=act)), call("act")) as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == [
            "user: hi", "model: [act]", "ok: ok", "direct: It is seven.", "code: Noted.",
        ]  # fmt: skip
        assert await h.state("A") == {"n": 7}
    assert result.message == "It is seven."


async def test_run_may_use_the_loop_twice() -> None:
    async def run(self: Any, user_message: str | None = None) -> Any:
        first = await Step.run(self, user_message)
        return f"{first} {await Step.run(self, 'And now shorter.')}"

    ran: list[int] = []

    @tool
    async def act(self: Any) -> Any:
        ran.append(1)
        return direct("Long answer.")

    async with harness(flow_of(stage("A", run=run, act=act)), call("act"), "Short.") as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == [
            "user: hi", "model: [act]", "ok: ok", "direct: Long answer.", "user: And now shorter.",
            "direct: Long answer. Short.",
        ]  # fmt: skip
    assert result.message == "Long answer. Short."
    assert ran == [1]


async def test_run_is_none_where_the_stage_routed_and_what_it_returns_then_is_too_late() -> None:
    got: list[Any] = []

    @tool
    async def act(self: Any) -> Any:
        return go("B")

    async def run(self: Any, user_message: str | None = None) -> Any:
        got.append(await Step.run(self, user_message))
        got.append(await Step.run(self, "more"))
        return "too late"

    async with harness(flow_of(stage("A", run=run, act=act), stage("B")), call("act"), "B.") as h:
        result = await h.say("hi")
        assert lines(await h.history("A")) == ["user: hi", "model: [act]", "ok: ok"]
    assert (result.message, result.current, got) == ("B.", "B", [None, None])


async def test_run_outside_of_its_unit_is_refused() -> None:
    async def on_visit(self: Any, message: Any) -> None:
        await self.run("now")

    async with harness(flow_of(stage("A", on_visit=on_visit))) as h:
        result = await h.say("hi")
    assert failure(result)[0] == "flow_definition"


async def test_is_end_follows_the_session() -> None:
    seen: list[bool] = []

    async def on_response(self: Any, result: str) -> Any:
        seen.append(self.is_end())
        self.flow.mark_completed()
        seen.append(self.is_end())
        return None

    async with harness(flow_of(stage("A", on_response=on_response)), "Bye.") as h:
        result = await h.say("hi")
    assert seen == [False, True]
    assert (result.completed, result.status) == (True, "completed")
    assert TerminateSessionStep(h.flow()).is_end()


async def test_hooks_of_a_failed_unit_leave_nothing_behind() -> None:
    async def on_enter(self: Any) -> None:
        self.save_state({"entered": True})
        raise RuntimeError("no")

    @tool
    async def act(self: Any) -> Any:
        return go("B").with_state({"x": 1})

    async with harness(flow_of(stage("A", act=act), stage("B", on_enter=on_enter)), call("act"), Reply.text("A.")) as h:
        result = await h.say("hi")
        assert failure(result)[0] == "handler"
        document = await h.document()
        assert document["workflow"]["current"] == "A"
        assert "B" not in document.get("stages", {})
        assert [entry.stage for entry in await h.sequence()] == ["A"]
        assert lines(await h.history("A")) == ["user: hi", "model: [act]", "ok: ok"]
        assert (await h.say("again")).message == "A."
