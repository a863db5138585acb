"""Hooks of the failure policy: precedence, what they are told, what may be returned, and who is not asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from loop_flows import Hooks, Other, asked, chat, replies, verdicts
from stepwell import direct, direct_to, finish, go, retry_with_model, stay
from stepwell.engine import HookCalled
from stepwell.errors import InvalidOutcomeError, LlmEmptyResponseError, LlmResponseRejectedError, ModelInvocationError
from stepwell.loop import CallPolicy, CallPolicyOverride
from stepwell.messages import DirectMessage, UserMessage
from stepwell.models import ModelSelection
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

ONE = CallPolicy(attempts=1)
TWO = CallPolicy(attempts=2, retry_delay=0)
HOOKS = ["on_llm_blocked", "on_llm_error"]
CAUSES = {"on_llm_blocked": Reply.blocked("safety", text="Hm"), "on_llm_error": Reply.text("Hm").failing(status=503)}


async def say(hooks: Hooks, *script: Any, **options: Any) -> TurnHarness:
    async with TurnHarness(chat(hooks, **options), model=ScriptedModel(script)) as h:
        await h.say("hi")
    return h


# -- precedence


@pytest.mark.parametrize("hook", HOOKS)
async def test_the_stage_is_asked_first_and_its_answer_wins(hook: str) -> None:
    hooks = Hooks(**{hook: "stage", f"flow_{hook}": "flow"})
    h = await say(hooks, CAUSES[hook], policy=ONE)
    assert h.shown == "stage"
    assert hooks.log.names == [hook]


@pytest.mark.parametrize("hook", HOOKS)
async def test_the_flow_is_asked_when_the_stage_delegates(hook: str) -> None:
    hooks = Hooks(**{f"flow_{hook}": "flow"})
    h = await say(hooks, CAUSES[hook], policy=ONE)
    assert h.shown == "flow"
    assert hooks.log.names == [hook, f"flow_{hook}"]
    assert hooks.log[0][1] is hooks.log[1][1]
    assert h.of(HookCalled)[-1].handled


@pytest.mark.parametrize("hook", HOOKS)
async def test_nobody_decides(hook: str) -> None:
    hooks = Hooks()
    h = await say(hooks, CAUSES[hook], policy=ONE)
    assert hooks.log.names == [hook, f"flow_{hook}"]
    assert [(e.hook, e.handled) for e in h.of(HookCalled)] == [(hook, False)]
    assert h.shown == ""


@pytest.mark.parametrize(
    ("answers", "names", "attempts"),
    [
        ({"should_retry_llm_error": False, "flow_should_retry_llm_error": True}, ["should_retry_llm_error"], 1),
        ({"should_retry_llm_error": True, "flow_should_retry_llm_error": False}, ["should_retry_llm_error"], 2),
        (
            {"flow_should_retry_llm_error": False},
            ["should_retry_llm_error", "flow_should_retry_llm_error"],
            1,
        ),
        ({}, ["should_retry_llm_error", "flow_should_retry_llm_error"], 2),
    ],
)
async def test_should_retry_llm_error_stage_first_then_flow_then_the_default(
    answers: dict[str, Any], names: list[str], attempts: int
) -> None:
    hooks = Hooks(on_llm_error="sorry", **answers)
    await say(hooks, *[Reply.error(status=503)] * attempts, policy=TWO)
    assert hooks.log.names == [*names, "on_llm_error"]


@pytest.mark.parametrize("hook", [*HOOKS, "should_retry_llm_error"])
async def test_an_exception_in_a_hook_propagates_and_the_next_is_not_asked(hook: str) -> None:
    def broken(context: Any) -> Any:
        raise ZeroDivisionError

    hooks = Hooks(**{hook: broken, "flow_on_llm_error": "x", "flow_on_llm_blocked": "x"})
    cause = CAUSES.get(hook, CAUSES["on_llm_error"])
    h = await say(hooks, cause, policy=TWO if hook == "should_retry_llm_error" else ONE)
    assert isinstance(h.turn.error, ZeroDivisionError)
    assert hooks.log.names == [hook]
    assert h.shown == ""


# -- contexts


def names(context: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(context)} | {"selection"}


COMMON = {"stage_id", "provider", "model", "selection", "cancelled"}


async def test_the_attempt_error_context() -> None:
    hooks = Hooks()
    await say(hooks, *[Reply.error(status=503)] * 3, policy=CallPolicy(retry_delay=0))
    contexts = hooks.log.of("should_retry_llm_error")
    assert names(contexts[0]) == COMMON | {"error", "attempt", "max_attempts"}
    assert [(c.attempt, c.max_attempts) for c in contexts] == [(1, 3), (2, 3)]
    assert all(isinstance(c.error, ModelInvocationError) and c.error.status == 503 for c in contexts)
    common(contexts[0])


def common(context: Any, model: str = "m") -> None:
    assert (context.stage_id, context.provider, context.model) == ("Talk", "scripted", model)
    assert context.selection == f"scripted:{model}"
    assert not context.cancelled.is_set()
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.stage_id = "x"


ERROR_FIELDS = {
    "kind", "error", "attempts_made", "max_attempts", "stopped_because", "last_response", "rejection",
}  # fmt: skip


async def test_the_error_context_of_a_thrown_error() -> None:
    hooks = Hooks()
    error = ModelInvocationError("down", status=500)
    await say(hooks, *[error] * 2, policy=TWO)
    (context,) = hooks.log.of("on_llm_error")
    assert names(context) == COMMON | ERROR_FIELDS
    common(context)
    assert (context.kind, context.error) == ("invocation_error", error)
    assert (context.attempts_made, context.max_attempts, context.stopped_because) == (2, 2, "attempts_exhausted")
    assert (context.last_response, context.rejection) == (None, None)


async def test_the_error_context_when_retry_is_declined() -> None:
    hooks = Hooks(should_retry_llm_error=False)
    await say(hooks, Reply.error(status=500), policy=TWO)
    (context,) = hooks.log.of("on_llm_error")
    assert (context.attempts_made, context.max_attempts, context.stopped_because) == (1, 2, "retry_declined")


async def test_the_error_context_of_an_empty_reply() -> None:
    hooks = Hooks()
    await say(hooks, *[Reply.empty("unspecified", raw="OTHER")] * 2, policy=TWO)
    (context,) = hooks.log.of("on_llm_error")
    common(context)
    assert context.kind == "empty_response"
    assert isinstance(context.error, LlmEmptyResponseError)
    assert context.last_response.raw_reason == "OTHER"
    assert context.rejection is None
    assert (context.attempts_made, context.stopped_because) == (2, "attempts_exhausted")


async def test_the_error_context_of_a_rejected_reply() -> None:
    hooks = Hooks(check_response=True)
    await say(hooks, "one", "two", policy=TWO)
    (context,) = hooks.log.of("on_llm_error")
    assert context.kind == "response_rejected"
    assert isinstance(context.error, LlmResponseRejectedError)
    assert context.last_response.text == "two"
    assert (context.rejection.reason, context.rejection.detail) == ("check_response", None)


async def test_the_blocked_context_of_a_candidate() -> None:
    ratings = [{"category": "HARM", "probability": "HIGH"}]
    reply = Reply.blocked("safety", raw="SAFETY", text="So", safety_ratings=ratings)
    hooks = Hooks()
    await say(hooks, reply)
    (context,) = hooks.log.of("on_llm_blocked")
    assert names(context) == COMMON | {
        "reason", "raw_reason", "phase", "text", "safety_ratings", "provider_details", "partial_text_shown",
    }  # fmt: skip
    common(context)
    assert (context.reason, context.raw_reason, context.phase) == ("safety", "SAFETY", "candidate")
    assert context.safety_ratings == ratings
    assert context.provider_details["block_reason"] == "safety"
    assert context.partial_text_shown


async def test_the_blocked_context_of_a_prompt() -> None:
    hooks = Hooks()
    details = {"refusal": "No.", "more": 1}
    await say(hooks, Reply.prompt_blocked("blocklist", raw="BLOCKLIST", safety_ratings=[1], details=details))
    (context,) = hooks.log.of("on_llm_blocked")
    common(context)
    assert (context.reason, context.raw_reason, context.phase) == ("blocklist", "BLOCKLIST", "prompt")
    assert (context.text, context.safety_ratings, context.provider_details) == ("No.", [1], details)
    assert not context.partial_text_shown


@pytest.mark.parametrize("mode", ["held", "off"])
async def test_partial_text_shown_is_false_where_nothing_left_the_process(mode: str) -> None:
    hooks = Hooks()
    await say(hooks, Reply.blocked("safety", text="So"), step={"stream_mode": mode})
    assert not hooks.log.of("on_llm_blocked")[0].partial_text_shown


@pytest.mark.parametrize(
    ("given", "raw", "details", "reason"),
    [
        ("safety", "x", {}, "safety"),
        (None, "SAFETY", {}, "safety"),
        (None, "content_filter", {}, "content_filter"),
        (None, "RECITATION", {}, "recitation"),
        (None, "BLOCKLIST", {}, "blocklist"),
        (None, "PROHIBITED_CONTENT", {}, "safety"),
        (None, "SPII", {}, "safety"),
        (None, "refusal", {}, "refusal"),
        (None, "stop", {"refusal": "No."}, "refusal"),
        ("IMAGE_SAFETY", None, {}, "safety"),
        ("odd", "odder", {}, "other"),
    ],
)
async def test_reasons_of_a_block_are_normalised(
    given: str | None, raw: str | None, details: dict[str, Any], reason: str
) -> None:
    hooks = Hooks()
    said = {**details, **({"block_reason": given} if given else {})}
    await say(hooks, Reply.text("").stopping("blocked", raw=raw, details=said))
    assert hooks.log.of("on_llm_blocked")[0].reason == reason
    if given is not None and not details:
        await say(hooks, Reply.prompt_blocked(given, raw=raw))
        assert hooks.log.of("on_llm_blocked")[1].reason == reason


async def test_the_candidate_that_check_response_judges() -> None:
    hooks = Hooks()
    reply = (
        Reply.reasoning("Hm.", "Looking.")
        .stopping("tool_calls", raw="tool_use", details={"a": 1}, provider_data={"b": 2})
        .with_usage(3, 4)
    )
    reply = dataclasses.replace(reply, outputs=(*reply.outputs, *Call("look", {"city": "Rome"}, id="c1").events(0)))
    await say(hooks, reply, "Done.")
    candidate = hooks.log.of("check_response")[0]
    assert (candidate.text, candidate.reasoning[0].text) == ("Looking.", "Hm.")
    (call,) = candidate.tool_calls
    assert (call.id, call.name, call.args) == ("c1", "look", {"city": "Rome"})
    assert (candidate.stop, candidate.raw_reason, candidate.details) == ("tool_calls", "tool_use", {"a": 1})
    assert (candidate.usage.input, candidate.usage.output) == (3, 4)
    assert (candidate.provider, candidate.model) == ("scripted", "m")
    assert not candidate.truncated


async def test_complete_with_calls_counts_as_tool_calls() -> None:
    hooks = Hooks()
    await say(hooks, Reply.tool_call("look", {"city": "Rome"}).stopping("complete"), "Done.")
    assert hooks.log.of("check_response")[0].stop == "tool_calls"


# -- terminal results

MESSAGE = UserMessage(content="x", by="code")
TERMINAL = [(hook, CAUSES[hook]) for hook in HOOKS]


@pytest.mark.parametrize(("hook", "cause"), TERMINAL)
async def test_text_is_final_replaces_what_was_shown_and_enters_history_as_codes(hook: str, cause: Reply) -> None:
    hooks = Hooks(**{hook: "Please call us."})
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel([cause])) as h:
        result = await h.say("hi")
        last = (await h.history("Talk"))[-1]
    assert (result.success, result.message, h.shown) == (True, "Please call us.", "Please call us.")
    assert isinstance(last, DirectMessage)
    assert last.text == "Please call us."
    assert result.units == 1


@pytest.mark.parametrize(("hook", "cause"), TERMINAL)
async def test_direct(hook: str, cause: Reply) -> None:
    hooks = Hooks(**{hook: direct({"phone": 1}).with_state({"failed": True})})
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel([cause])) as h:
        result = await h.say("hi")
        assert await h.state("Talk") == {"failed": True}
    assert (result.message, result.content_type, h.shown) == ('{"phone":1}', "application/json", '{"phone":1}')
    assert result.current == "Talk"


@pytest.mark.parametrize(("hook", "cause"), TERMINAL)
@pytest.mark.parametrize("by_class", [True, False])
async def test_go_moves_on_in_this_turn(hook: str, cause: Reply, by_class: bool) -> None:
    hooks = Hooks(**{hook: Other if by_class else go("Other").with_message("Help them.")})
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel([cause, "I can help."])) as h:
        result = await h.say("hi")
        assert replies(await h.history("Talk")) == []
    assert (result.message, result.current) == ("I can help.", "Other")
    assert h.shown == "I can help."


@pytest.mark.parametrize(("hook", "cause"), TERMINAL)
async def test_direct_to_and_finish(hook: str, cause: Reply) -> None:
    for outcome, current, status in (
        (direct_to("Other", "Goodbye."), "Other", "running"),
        (finish("Goodbye."), "Talk", "completed"),
    ):
        async with TurnHarness(chat(Hooks(**{hook: outcome}), policy=ONE), model=ScriptedModel([cause])) as h:
            result = await h.say("hi")
            assert [m.text for m in await h.history("Talk") if isinstance(m, DirectMessage)] == ["Goodbye."]
        assert (result.message, result.current, result.status) == ("Goodbye.", current, status)
        assert h.shown == "Goodbye."


@pytest.mark.parametrize(("hook", "cause"), TERMINAL)
async def test_finish_without_content_removes_the_dead_text(hook: str, cause: Reply) -> None:
    h = await say(Hooks(**{hook: finish()}), cause, policy=ONE)
    assert (h.results[0].status, h.results[0].message, h.shown) == ("completed", "", "")


async def cleanup() -> None:
    raise AssertionError("never awaited")


ILLEGAL = {
    "stay": stay(),
    "tool feedback": direct("x").with_tool_feedback("y"),
    "attachments": go("Other").with_messages(MESSAGE),
    "cleanup": finish("x").with_cleanup(cleanup),
    "a number": 3,
    "an unknown stage": go("Nowhere"),
    "no JSON": direct(object()),
}


@pytest.mark.parametrize(("hook", "cause"), TERMINAL)
@pytest.mark.parametrize("name", ILLEGAL)
async def test_what_is_not_legal_there_is_an_invalid_outcome(name: str, hook: str, cause: Reply) -> None:
    h = await say(Hooks(**{hook: ILLEGAL[name]}), cause, policy=ONE)
    assert isinstance(h.turn.error, InvalidOutcomeError)
    assert h.turn.error.ids["stage"] == "Talk"
    assert h.shown == ""
    assert not h.results[0].success


async def test_a_block_cannot_request_an_alternate() -> None:
    h = await say(Hooks(on_llm_blocked=retry_with_model("scripted:spare")), CAUSES["on_llm_blocked"])
    assert isinstance(h.turn.error, InvalidOutcomeError)
    assert h.turn.error.ids["hook"] == "on_llm_blocked"
    assert "a refusal never asks for an alternate" in h.turn.error.message
    assert asked(h) == ["on_llm_blocked"]


async def test_the_hook_sees_the_stages_state_and_may_change_it() -> None:
    async def on_llm_error(self: Any, context: Any) -> str:
        self.save_state({"kind": context.kind})
        return "sorry"

    flow = chat(policy=ONE, step={"on_llm_error": on_llm_error})
    async with TurnHarness(flow, model=ScriptedModel([CAUSES["on_llm_error"]])) as h:
        await h.say("hi")
        assert await h.state("Talk") == {"kind": "invocation_error"}


# -- attempts: who says how many

SELECTION = ModelSelection("scripted", "m", attempts=5)


@pytest.mark.parametrize(
    ("model", "override", "policy", "attempts"),
    [
        (SELECTION, CallPolicyOverride(attempts=4), CallPolicy(attempts=2, retry_delay=0), 5),
        ("scripted:m", CallPolicyOverride(attempts=4), CallPolicy(attempts=2, retry_delay=0), 4),
        ("scripted:m", None, CallPolicy(attempts=2, retry_delay=0), 2),
        ("scripted:m", None, CallPolicy(retry_delay=0), 3),
    ],
    ids=["selection", "stage policy", "flow policy", "default"],
)
async def test_attempts_selection_then_stage_then_flow_then_three(
    model: Any, override: CallPolicyOverride | None, policy: CallPolicy, attempts: int
) -> None:
    for reply, kind in ((Reply.error(status=503), "thrown"), ("no", "check_response")):
        hooks = Hooks(check_response=True)
        h = await say(hooks, *[reply] * attempts, model=model, override=override, policy=policy)
        assert verdicts(h) == [kind] * attempts
        (context,) = hooks.log.of("on_llm_error")
        assert (context.attempts_made, context.max_attempts) == (attempts, attempts)


async def test_thrown_and_rejected_candidates_share_the_attempts() -> None:
    hooks = Hooks(check_response=True)
    h = await say(hooks, Reply.error(status=503), "no", Reply.error(status=503), policy=CallPolicy(retry_delay=0))
    assert verdicts(h) == ["thrown", "check_response", "thrown"]
    (context,) = hooks.log.of("on_llm_error")
    assert context.kind == "invocation_error"


async def test_each_round_has_its_own_attempts() -> None:
    hooks = Hooks(on_llm_error="sorry")
    script = [Reply.error(), Reply.tool_call("look", {"city": "Rome"}), Reply.error(), "Rome is free."]
    h = await say(hooks, *script, policy=TWO)
    assert h.shown == "Rome is free."
    assert asked(h) == ["should_retry_llm_error"] * 2
