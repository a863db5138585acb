"""Promises P1, P2 and P3, as far as the model loop keeps them."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from loop_flows import Hooks, Talk, chat, replies, tool_ran, verdicts, view_of
from stepwell import retry_with_model
from stepwell.engine import Superseded, TextDelta
from stepwell.loop import CallPolicy
from stepwell.messages import HistoryCheck
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

LOOK = Call("look", {"city": "Rome"})
TWO = CallPolicy(attempts=2, retry_delay=0)

DEAD: dict[str, Reply] = {
    "thrown": Reply.text("dead words").failing(status=503),
    "no finish": Reply.text("dead words").without_finish(),
    "deadline": Reply.text("dead words").stalling(),
    "rejected": Reply.text("dead words"),
    "rejected with a call": Reply.tool_calls(LOOK, text="dead words"),
    "truncated call": Reply.truncated("dead words", calls=[LOOK]),
    "malformed call": Reply.tool_calls(LOOK, text="dead words").stopping("malformed_tool_call"),
    "empty": Reply.reasoning("dead thoughts"),
}
BLOCKED: dict[str, Reply] = {
    "blocked": Reply.blocked(text="dead words", calls=[LOOK]),
    "prompt blocked": Reply.text("dead words").failing(error=Reply.prompt_blocked().end.error),
}


def dead_words(candidate: Any) -> bool:
    return candidate.text.startswith("dead")


@pytest.mark.parametrize("mode", ["live", "held", "off"])
@pytest.mark.parametrize("name", DEAD)
async def test_P1_the_view_ends_with_the_accepted_attempt(name: str, mode: str) -> None:  # noqa: N802
    hooks = Hooks(check_response=dead_words)
    flow = chat(hooks, policy=TWO, step={"stream_mode": mode})
    async with TurnHarness(flow, model=ScriptedModel([DEAD[name], "good words"])) as h:
        result = await h.say("hi")
    view = view_of(h)
    assert result.message == view.visible == "good words"
    assert view.other == {}
    assert set(view.states) <= {"", "dead ", "dead words", "good ", "good words"}
    if mode == "live" and "empty" not in name:
        # What is there stays until its replacement comes: nothing but that supersedes.
        assert [type(event) for event in h.of((TextDelta, Superseded))] == [TextDelta] * 2 + [Superseded] + [
            TextDelta
        ] * 2


@pytest.mark.parametrize("mode", ["live", "held", "off"])
@pytest.mark.parametrize("name", [*DEAD, *BLOCKED])
async def test_P1_the_view_ends_with_the_terminal_reply(name: str, mode: str) -> None:  # noqa: N802
    hooks = Hooks(check_response=dead_words, on_llm_error="terminal reply", on_llm_blocked="terminal reply")
    flow = chat(hooks, policy=CallPolicy(attempts=1), step={"stream_mode": mode})
    async with TurnHarness(flow, model=ScriptedModel([{**DEAD, **BLOCKED}[name]])) as h:
        result = await h.say("hi")
    view = view_of(h)
    assert result.success
    assert result.message == view.visible == "terminal reply"
    assert view.other == {}


@pytest.mark.parametrize("name", [*DEAD, *BLOCKED])
async def test_P1_only_a_failure_that_nobody_handled_removes_text_and_then_the_run_says_error(  # noqa: N802
    name: str,
) -> None:
    flow = chat(Hooks(check_response=dead_words), policy=CallPolicy(attempts=1))
    async with TurnHarness(flow, model=ScriptedModel([{**DEAD, **BLOCKED}[name]])) as h:
        result = await h.say("hi")
    view = view_of(h)
    assert view.visible == ""
    assert view.other == {}
    assert result.error is not None


@pytest.mark.parametrize("name", ["thrown", "rejected", "truncated call"])
async def test_P1_a_retry_in_progress_blanks_nothing(name: str) -> None:  # noqa: N802
    gate = anyio.Event()
    model = ScriptedModel([DEAD[name], Reply.text("good words").gated(gate)])
    flow = chat(Hooks(check_response=dead_words), policy=TWO)
    async with TurnHarness(flow, model=model) as h, h.engine.stream("Chat", "hi") as turn:
        await h.clock.settle()
        assert model.open == 1
        assert turn.text == "dead words"
        gate.set()
    assert turn.text == "good words"


@pytest.mark.parametrize("name", ["thrown", "rejected"])
async def test_P1_over_models_and_rounds(name: str) -> None:  # noqa: N802
    """Two models and two rounds: each unit shows its accepted attempt, once."""
    hooks = Hooks(check_response=dead_words, on_llm_error=retry_with_model("scripted:spare"))
    spare = [Reply.tool_calls(LOOK, text="I will look."), "Rome is free."]
    model = ScriptedModel({"m": [DEAD[name]] * 2, "spare": spare})
    async with TurnHarness(chat(hooks, policy=TWO), model=model) as h:
        await h.say("hi")
    view = view_of(h)
    assert view.visible == "I will look.\n\nRome is free."
    assert view.other == {step: texts for step, texts in view.other.items() if step in view.text}


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", [*DEAD, *BLOCKED])
async def test_P2_what_is_not_accepted_never_counts(name: str, parallel: bool) -> None:  # noqa: N802
    hooks = Hooks(check_response=dead_words, on_llm_error="terminal reply", on_llm_blocked="terminal reply")
    flow = chat(hooks, policy=CallPolicy(attempts=1), flow={"parallel_tools": parallel})
    model = ScriptedModel([{**DEAD, **BLOCKED}[name], "next turn"])
    async with TurnHarness(flow, model=model) as h:
        await h.say("hi")
        assert not tool_ran(h)
        assert flow.stage_class.ran == []
        assert replies(await h.history("Talk")) == []
        await h.say("more")
        history = await h.history("Talk")
    assert replies(history) == ["next turn"]
    HistoryCheck().add_all(history)
    assert "dead" not in str(model.requests[-1].messages)


async def test_P2_a_cancelled_candidate_never_counts() -> None:  # noqa: N802
    model = ScriptedModel([Reply.tool_calls(LOOK, text="dead words").stalling(), "next turn"])
    flow = chat()
    async with TurnHarness(flow, model=model) as h:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await model.wait_stalled()
                h.session_id = h.turn.session_id
                h.turn.cancel()

            group.start_soon(cancel)
            await h.say("hi")
        await h.say("more")
        assert replies(await h.history("Talk")) == ["next turn"]
    assert flow.stage_class.ran == []


class Whole(Talk):
    """The other placement that there is in a turn: a step that runs its whole visit as one unit."""

    async def run(self, user_message: str | None = None) -> Any:
        return await super().run(user_message)


@pytest.mark.parametrize("name", [*DEAD, *BLOCKED])
@pytest.mark.parametrize("handled", [False, True])
async def test_P3_the_same_policy_in_every_placement(name: str, handled: bool) -> None:  # noqa: N802
    seen: list[Any] = []
    for base in (Talk, Whole):
        answers = {"on_llm_error": "terminal reply", "on_llm_blocked": "terminal reply"} if handled else {}
        hooks = Hooks(check_response=dead_words, **answers)
        script = [Reply.tool_calls(LOOK), *[{**DEAD, **BLOCKED}[name]] * (1 if name in BLOCKED else 2)]
        async with TurnHarness(chat(hooks, policy=TWO, base=base), model=ScriptedModel(script)) as h:
            result = await h.say("hi")
        seen.append(
            (verdicts(h), hooks.log.names, result.message, result.error.code if result.error else None, h.shown)
        )
    assert seen[0] == seen[1]


async def test_P3_the_kinds_of_failure_are_told_apart() -> None:  # noqa: N802
    kinds: dict[str, str] = {}
    for name, reply in {**DEAD, **BLOCKED}.items():
        hooks = Hooks(check_response=dead_words, on_llm_error="x", on_llm_blocked="x")
        flow = chat(hooks, policy=CallPolicy(attempts=1))
        async with TurnHarness(flow, model=ScriptedModel([reply])) as h:
            await h.say("hi")
        hook, context = hooks.log[-1]
        reason = context.rejection.reason if hook == "on_llm_error" and context.rejection else None
        kinds[name] = reason or (context.kind if hook == "on_llm_error" else context.phase)
    assert kinds == {
        "thrown": "invocation_error",
        "no finish": "invocation_error",
        "deadline": "invocation_error",
        "rejected": "check_response",
        "rejected with a call": "check_response",
        "truncated call": "truncated_tool_call",
        "malformed call": "malformed_tool_call",
        "empty": "empty_response",
        "blocked": "candidate",
        "prompt blocked": "prompt",
    }
