"""One temporary alternate model: every sentence of the design's paragraph."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from loop_flows import FAST, Hooks, Talk, asked, chat, texts, verdicts
from stepwell import go, retry_with_model, tool
from stepwell.engine import AttemptStarted
from stepwell.errors import InvalidOutcomeError, LlmSetupError, ModelInvocationError, SecondFallbackError
from stepwell.loop import CallPolicy, EmptyPolicy, RaiseCap
from stepwell.messages import AssistantMessage
from stepwell.models import ModelSelection
from stepwell.sessions import MemoryStore
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

ONE = CallPolicy(attempts=1)
SPARE = retry_with_model("scripted:spare")
LOOK = Reply.tool_call("look", {"city": "Rome"})


def spare_first(context: Any) -> Any:
    """Ask for the spare model, and do not know what to do when that fails, too."""
    return SPARE if context.model == "m" else None


def models(h: TurnHarness) -> list[str]:
    return [request.selection.name for request in h.model.requests]


async def test_the_helper_checks_the_form_and_the_catalogue_at_once() -> None:
    with pytest.raises(LlmSetupError, match="names no provider"):
        retry_with_model("spare")
    with pytest.raises(LlmSetupError, match="temperature"):
        retry_with_model(ModelSelection("openai", "gpt-5.1", {"temperature": "hot"}))


async def test_the_runner_checks_with_the_registered_providers_before_calling() -> None:
    hooks = Hooks(on_llm_error=retry_with_model("nobody:spare"))
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel([Reply.error()])) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, LlmSetupError)
    hooks = Hooks(on_llm_error=SPARE)
    model = ScriptedModel([Reply.error()], models=["m"])
    async with TurnHarness(chat(hooks, policy=ONE), model=model) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, LlmSetupError)
    assert models(h) == ["m"]


async def test_the_same_prompt_history_tools_schema_deadlines_and_completed_results() -> None:
    hooks = Hooks(on_llm_error=spare_first)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    script = {"m": [LOOK, Reply.error()], "spare": [Reply.structured({"n": 1})]}
    policy = CallPolicy(attempts=1, timeout=9)
    async with TurnHarness(chat(hooks, policy=policy, schema=schema), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    assert result.message == '{"n":1}'
    _, failed, again = h.model.requests
    for field in ("system", "messages", "tools", "output_schema", "deadlines", "conversation"):
        assert getattr(failed, field) == getattr(again, field)
    assert again.selection.id == "scripted:spare"
    assert "Rome is free" in str(again.messages)


async def test_exactly_one_attempt_whatever_the_policy_says_and_no_nudge() -> None:
    for reply in (Reply.error(), Reply.empty(), LOOK.stopping("truncated")):
        hooks = Hooks(on_llm_error=spare_first)
        script = {"m": [Reply.error()], "spare": [reply]}
        policy = CallPolicy(attempts=1, empty=EmptyPolicy(retries=5))
        async with TurnHarness(chat(hooks, policy=policy), model=ScriptedModel(script)) as h:
            await h.say("hi")
        assert models(h) == ["m", "spare"]
        assert h.clock.slept == []


async def test_should_retry_is_not_asked_about_the_alternate() -> None:
    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.error()] * 3, "spare": [Reply.error()]}
    async with TurnHarness(chat(hooks, policy=FAST), model=ScriptedModel(script)) as h:
        await h.say("hi")
    assert [context.model for context in hooks.log.of("should_retry_llm_error")] == ["m", "m"]
    assert asked(h) == ["should_retry_llm_error"] * 2 + ["on_llm_error"] * 2


async def test_its_failure_asks_again_with_its_own_model_and_one_attempt() -> None:
    hooks = Hooks(on_llm_error=lambda context: SPARE if context.model == "m" else "sorry")
    script = {"m": [Reply.error()] * 3, "spare": [Reply.text("dead").failing(status=500)]}
    async with TurnHarness(chat(hooks, policy=FAST), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    first, second = hooks.log.of("on_llm_error")
    assert (first.selection, first.attempts_made, first.max_attempts) == ("scripted:m", 3, 3)
    assert (second.provider, second.model, second.selection) == ("scripted", "spare", "scripted:spare")
    assert (second.attempts_made, second.max_attempts, second.stopped_because) == (1, 1, "attempts_exhausted")
    assert second.error.status == 500
    assert result.message == h.shown == "sorry"


async def test_its_failure_that_nobody_handles_is_its_own_error() -> None:
    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.error(status=503)], "spare": [Reply.error(status=500)]}
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel(script)) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, ModelInvocationError)
    assert h.turn.error.status == 500


async def test_a_second_alternate_in_one_visit_is_an_error() -> None:
    for script in (
        {"m": [Reply.error()], "spare": [Reply.error()]},
        {"m": [Reply.error()], "spare": [LOOK, Reply.error()]},  # in a later round of the visit
    ):
        hooks = Hooks(on_llm_error=SPARE)
        async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel(script)) as h:
            await h.say("hi")
        assert isinstance(h.turn.error, SecondFallbackError)
        assert h.shown == ""


async def test_it_stays_active_through_tool_follow_ups_until_the_visit_ends() -> None:
    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.error(), "Next turn."], "spare": [LOOK, LOOK, "Rome is free."]}
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel(script)) as h:
        await h.say("hi")
        assert models(h) == ["m", "spare", "spare", "spare"]
        result = await h.say("more")
        assert result.message == "Next turn."
        assert models(h)[-1] == "m"


async def test_another_stage_is_another_visit() -> None:

    class Leaving(Talk):
        @tool
        async def leave(self) -> Any:
            """Leave."""
            return go("Other")

    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.error(), "The other stage."], "spare": [Reply.tool_call("leave")]}
    async with TurnHarness(chat(hooks, policy=ONE, base=Leaving), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    assert result.message == "The other stage."
    assert models(h) == ["m", "spare", "m"]


async def test_it_survives_a_crash_in_the_turn_record() -> None:
    store, clock = MemoryStore(), FakeClock(auto_advance=True)
    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.error(), "After."], "spare": [LOOK, Reply.text("lost").stalling(), "Rome is free."]}
    model = ScriptedModel(script)
    flow = chat(hooks, policy=CallPolicy(attempts=1, first_token_timeout=None, idle_timeout=None, timeout=None))
    async with TurnHarness(flow, model=model, store=store, clock=clock) as h:
        async with anyio.create_task_group() as group:

            async def crash() -> None:
                await model.wait_stalled()
                h.session_id = h.turn.session_id
                h.turn.cancel("shutdown")

            group.start_soon(crash)
            await h.say("hi")
        await h.restart()
        result = await h.say("more")
        assert result.message == "After."
        history = await h.history("Talk")
    assert models(h) == ["m", "spare", "spare", "spare", "m"]
    authors = [m.model for m in history if isinstance(m, AssistantMessage)]
    assert authors == ["scripted:spare", "scripted:spare", "scripted:m"]


async def test_a_crash_does_not_allow_a_second_one() -> None:
    store = MemoryStore()
    hooks = Hooks(on_llm_error=SPARE)
    script = {"m": [Reply.error(), "After."], "spare": [LOOK, Reply.text("lost").stalling(), Reply.error()]}
    model = ScriptedModel(script)
    flow = chat(hooks, policy=CallPolicy(attempts=1, first_token_timeout=None, idle_timeout=None, timeout=None))
    async with TurnHarness(flow, model=model, store=store) as h:
        async with anyio.create_task_group() as group:

            async def crash() -> None:
                await model.wait_stalled()
                h.session_id = h.turn.session_id
                h.turn.cancel("shutdown")

            group.start_soon(crash)
            await h.say("hi")
        await h.restart()
        await h.say("more")
        failures = [entry.data["code"] for entry in await h.log() if entry.text == "turn failed"]
    assert failures == ["second_fallback"]


async def test_in_flows_a_selection_that_carries_attempts_is_refused() -> None:
    hooks = Hooks(on_llm_error=retry_with_model(ModelSelection("scripted", "spare", attempts=2)))
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel([Reply.error()])) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, InvalidOutcomeError)
    assert h.turn.error.ids["hook"] == "on_llm_error"


async def test_nothing_of_it_is_persisted_as_configuration() -> None:
    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.error()], "spare": ["Hello."]}
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel(script)) as h:
        await h.say("hi")
        document = await h.document()
        (reply,) = [m for m in await h.history("Talk") if isinstance(m, AssistantMessage)]
    assert document["workflow"]["model"] == {"provider": "scripted", "name": "m"}
    assert "spare" not in str(document["stages"])
    assert reply.model == "scripted:spare"


async def test_it_is_called_with_its_own_parameters() -> None:
    """Neither a cap that was raised for the first model nor a nudge to it concerns the alternate."""
    selection = ModelSelection("scripted", "m", {"max_tokens": 10})
    spare = ModelSelection("scripted", "spare", {"max_tokens": 50})
    cut = Reply.truncated(calls=[Call("look", raw="{")])
    hooks = Hooks(on_llm_error=retry_with_model(spare))
    script = {"m": [cut, Reply.empty()], "spare": ["Hello."]}
    policy = CallPolicy(attempts=2, retry_delay=0, on_truncated=RaiseCap(limit=20))
    async with TurnHarness(chat(hooks, model=selection, policy=policy), model=ScriptedModel(script)) as h:
        await h.say("hi")
    assert [request.selection.params["max_tokens"] for request in h.model.requests] == [10, 20, 50]
    assert texts(h.model.requests[-1]) == ["hi"]


async def test_it_belongs_to_the_same_round_and_unit() -> None:
    hooks = Hooks(on_llm_error=spare_first)
    script = {"m": [Reply.text("dead").failing(status=500)], "spare": ["Hello."]}
    policy = CallPolicy(attempts=1, max_agent_rounds=1)
    async with TurnHarness(chat(hooks, policy=policy), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    assert (result.units, h.shown) == (1, "Hello.")
    assert [(e.attempt, e.model) for e in h.of(AttemptStarted)] == [(1, "m"), (2, "spare")]
    assert len({e.step for e in h.of(AttemptStarted)}) == 1
    assert verdicts(h) == ["thrown", "accepted"]


async def test_a_block_of_the_alternate_is_a_block() -> None:
    hooks = Hooks(on_llm_error=spare_first, on_llm_blocked="blocked reply")
    script = {"m": [Reply.error()], "spare": [Reply.blocked("safety")]}
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    assert result.message == "blocked reply"
    assert hooks.log.of("on_llm_blocked")[0].model == "spare"
