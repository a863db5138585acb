"""What makes another attempt, what it is told, and how long it waits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from loop_flows import Hooks, asked, chat, replies, texts, tool_ran, verdicts
from stepwell.errors import AgentRoundLimitError, LlmResponseRejectedError
from stepwell.loop import AskShorter, CallPolicy, EmptyPolicy, RaiseCap
from stepwell.models import ModelSelection, StopReason
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

CUT = Reply.truncated(calls=[Call("look", raw='{"city": "Ro', ended=False)])
CAPPED = ModelSelection("scripted", "m", {"max_tokens": 100})
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


async def say(policy: CallPolicy, *script: Any, hooks: Hooks | None = None, **options: Any) -> TurnHarness:
    async with TurnHarness(chat(hooks, policy=policy, **options), model=ScriptedModel(script)) as h:
        await h.say("hi")
        h.stored = await h.history("Talk")
    return h


def last_texts(h: TurnHarness) -> list[str]:
    return [texts(request)[-1] for request in h.model.requests]


def caps(h: TurnHarness) -> list[int | None]:
    return [request.selection.params.get("max_tokens") for request in h.model.requests]


# -- whether


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
async def test_a_status_that_cannot_succeed_is_not_retried(status: int) -> None:
    hooks = Hooks()
    h = await say(CallPolicy(), Reply.error(status=status), hooks=hooks)
    assert verdicts(h) == ["thrown"]
    assert hooks.log.of("on_llm_error")[0].stopped_because == "retry_declined"


@pytest.mark.parametrize("status", [None, 408, 409, 429, 500, 502, 503, 529])
async def test_every_other_failure_is_retried(status: int | None) -> None:
    h = await say(CallPolicy(), Reply.error(status=status), "fine")
    assert h.shown == "fine"


async def test_default_retry_always_retries_whatever_the_status() -> None:
    h = await say(CallPolicy(default_retry="always"), Reply.error(status=400), "fine")
    assert h.shown == "fine"


async def test_a_hook_may_retry_what_the_default_would_not() -> None:
    h = await say(CallPolicy(), Reply.error(status=400), "fine", hooks=Hooks(should_retry_llm_error=True))
    assert h.shown == "fine"


async def test_should_retry_is_asked_only_while_an_attempt_remains_and_never_extends() -> None:
    hooks = Hooks(should_retry_llm_error=True)
    h = await say(CallPolicy(attempts=2), *[Reply.error(status=503)] * 2, hooks=hooks)
    assert verdicts(h) == ["thrown"] * 2
    assert len(hooks.log.of("should_retry_llm_error")) == 1
    hooks = Hooks(should_retry_llm_error=True)
    await say(CallPolicy(attempts=1), Reply.error(status=503), hooks=hooks)
    assert hooks.log.of("should_retry_llm_error") == []


async def test_should_retry_is_asked_about_thrown_errors_only() -> None:
    hooks = Hooks(check_response=lambda c: c.text == "no", should_retry_llm_error=False)
    h = await say(CallPolicy(), "no", Reply.empty(), "yes", hooks=hooks)
    assert h.shown == "yes"
    assert asked(h) == []


# -- how long


def slept(h: TurnHarness) -> list[float]:
    return h.clock.slept


async def test_half_a_second_between_attempts_whatever_failed() -> None:
    hooks = Hooks(check_response=lambda c: c.text == "no")
    h = await say(CallPolicy(attempts=4), Reply.error(), "no", Reply.empty(), "yes", hooks=hooks)
    assert slept(h) == [0.5, 0.5, 0.5]


async def test_the_policys_delay() -> None:
    assert slept(await say(CallPolicy(retry_delay=2), Reply.error(), "yes")) == [2]


async def test_no_delay_before_on_llm_error() -> None:
    h = await say(CallPolicy(attempts=1), Reply.error(), hooks=Hooks(on_llm_error="sorry"))
    assert slept(h) == []


@pytest.mark.parametrize(("asked_for", "waits"), [(7, 7), (0, 0), (30, 30), (300, 30), (-1, 0)])
async def test_retry_after_is_honoured_up_to_max_retry_after(asked_for: float, waits: float) -> None:
    assert slept(await say(CallPolicy(), Reply.error(status=429, retry_after=asked_for), "yes")) == [waits]


async def test_max_retry_after_of_the_policy() -> None:
    reply = Reply.error(status=429, retry_after=300)
    assert slept(await say(CallPolicy(max_retry_after=60), reply, "yes")) == [60]


# -- empty replies


async def test_an_empty_reply_uses_one_of_the_attempts_with_the_nudge() -> None:
    policy = CallPolicy(retry_delay=0, empty=EmptyPolicy(nudge="Say something."))
    hooks = Hooks(on_llm_error="sorry")
    h = await say(policy, *[Reply.empty()] * 3, hooks=hooks)
    assert last_texts(h) == ["hi", "Say something.", "Say something."]
    (context,) = hooks.log.of("on_llm_error")
    assert (context.attempts_made, context.max_attempts) == (3, 3)


async def test_the_nudge_is_the_only_message_added_and_never_piles_up() -> None:
    h = await say(CallPolicy(retry_delay=0, attempts=5), *[Reply.empty()] * 4, "yes")
    assert [len(request.messages) for request in h.model.requests] == [1, 2, 2, 2, 2]
    assert replies(h.stored) == ["yes"]
    assert len(h.stored) == 2


async def test_a_failure_does_not_use_up_the_nudge_that_nobody_answered() -> None:
    h = await say(CallPolicy(retry_delay=0), Reply.empty(), Reply.error(), "yes")
    assert last_texts(h) == ["hi", EmptyPolicy().nudge, EmptyPolicy().nudge]


async def test_a_nudge_is_gone_after_another_reply() -> None:
    hooks = Hooks(check_response=lambda c: c.text == "no")
    h = await say(CallPolicy(retry_delay=0), Reply.empty(), "no", "yes", hooks=hooks)
    assert last_texts(h) == ["hi", EmptyPolicy().nudge, "hi"]


async def test_an_own_budget_of_nudges_each_a_fresh_round_without_delay() -> None:
    policy = CallPolicy(attempts=2, empty=EmptyPolicy(retries=2))
    hooks = Hooks(on_llm_error="sorry")
    script = [Reply.error(), Reply.empty(), Reply.error(), Reply.empty(), Reply.error(), Reply.empty()]
    h = await say(policy, *script, hooks=hooks)
    assert verdicts(h) == ["thrown", "empty"] * 3
    assert slept(h) == [0.5, 0.5, 0.5]
    (context,) = hooks.log.of("on_llm_error")
    assert (context.kind, context.attempts_made, context.stopped_because) == ("empty_response", 2, "attempts_exhausted")
    nudge = EmptyPolicy().nudge
    assert last_texts(h) == ["hi", "hi", nudge, nudge, nudge, nudge]


async def test_nudged_rounds_are_the_same_unit_and_prompt() -> None:
    prompts: list[str] = []

    def get_prompt(self: Any) -> str:
        prompts.append("x")
        return f"prompt {len(prompts)}"

    policy = CallPolicy(empty=EmptyPolicy(retries=2))
    h = await say(policy, Reply.empty(), Reply.empty(), "yes", step={"get_prompt": get_prompt})
    assert {request.system for request in h.model.requests} == {"prompt 1"}
    assert h.results[0].units == 1
    assert slept(h) == []


async def test_nudged_rounds_count_as_rounds() -> None:
    policy = CallPolicy(max_agent_rounds=2, empty=EmptyPolicy(retries=5))
    hooks = Hooks(on_llm_error="sorry")
    h = await say(policy, Reply.empty(), Reply.empty(), hooks=hooks)
    assert isinstance(h.turn.error, AgentRoundLimitError)
    assert hooks.log.names == []


async def test_no_retries_of_its_own_means_straight_to_on_llm_error() -> None:
    h = await say(CallPolicy(empty=EmptyPolicy(retries=0)), Reply.empty(), hooks=Hooks(on_llm_error="sorry"))
    assert h.shown == "sorry"


@pytest.mark.parametrize(("attempts", "because"), [(3, "retry_declined"), (1, "attempts_exhausted")])
async def test_without_an_empty_policy_there_is_no_nudge(attempts: int, because: str) -> None:
    hooks = Hooks(on_llm_error="sorry")
    h = await say(CallPolicy(attempts=attempts, empty=None), Reply.empty(), hooks=hooks)
    assert h.shown == "sorry"
    assert hooks.log.of("on_llm_error")[0].stopped_because == because
    assert slept(h) == []


NUDGED = {StopReason.COMPLETE, StopReason.UNSPECIFIED, StopReason.MALFORMED_TOOL_CALL}


@pytest.mark.parametrize("stop", sorted(set(StopReason) - {StopReason.BLOCKED}))
@pytest.mark.parametrize("retries", [None, 2])
async def test_nudges_go_to_three_kinds_of_empty_replies_only(stop: StopReason, retries: int | None) -> None:
    hooks = Hooks(on_llm_error="sorry")
    script = [Reply.empty(stop), "yes"] if stop in NUDGED else [Reply.empty(stop)]
    h = await say(CallPolicy(retry_delay=0, empty=EmptyPolicy(retries=retries)), *script, hooks=hooks)
    assert h.shown == ("yes" if stop in NUDGED else "sorry")
    if stop is StopReason.TRUNCATED:
        (context,) = hooks.log.of("on_llm_error")
        assert context.kind == "empty_response"
        assert "the output cap is the model default" in context.error.message


@pytest.mark.parametrize("stop", ["complete", "unspecified"])
async def test_accept_takes_silence_as_none(stop: str) -> None:
    heard: list[Any] = []

    async def on_response(self: Any, result: Any) -> None:
        heard.append(result)

    hooks = Hooks()
    policy = CallPolicy(empty=EmptyPolicy(accept=True))
    h = await say(policy, Reply.empty(stop), hooks=hooks, step={"on_response": on_response})
    assert heard == [None]
    assert (h.results[0].success, h.results[0].message) == (True, "")
    assert len(h.stored) == 1
    assert hooks.log.names == []


@pytest.mark.parametrize("stop", ["truncated", "malformed_tool_call"])
async def test_accept_does_not_take_a_failed_reply_for_silence(stop: str) -> None:
    hooks = Hooks(on_llm_error="sorry")
    policy = CallPolicy(attempts=1, empty=EmptyPolicy(accept=True))
    h = await say(policy, Reply.empty(stop), hooks=hooks)
    assert h.shown == "sorry"


# -- schemas


async def test_the_retry_carries_the_validation_error_once_not_piled_up() -> None:
    script = [Reply.structured({"n": "x"}), Reply.structured({}), Reply.structured({"n": 1})]
    h = await say(CallPolicy(retry_delay=0), *script, schema=SCHEMA)
    first, second, third = (request.messages for request in h.model.requests)
    assert len(first) == 1
    assert len(second) == len(third) == 2
    assert "$.n" in second[-1].text
    assert "required" in third[-1].text
    assert "$.n:" not in third[-1].text
    assert second[-1].by == "code"
    assert len(h.stored) == 2


async def test_a_failure_between_does_not_lose_the_validation_error() -> None:
    script = [Reply.structured({"n": "x"}), Reply.error(), Reply.structured({"n": 1})]
    h = await say(CallPolicy(retry_delay=0), *script, schema=SCHEMA)
    assert ["$.n" in text for text in last_texts(h)] == [False, True, True]


# -- truncation


async def test_raise_cap_once_and_the_error_names_the_cap() -> None:
    hooks = Hooks()
    policy = CallPolicy(retry_delay=0, attempts=3, on_truncated=RaiseCap(limit=1000))
    h = await say(policy, CUT, CUT, CUT, hooks=hooks, model=CAPPED)
    assert caps(h) == [100, 200, 200]
    error = h.turn.error
    assert isinstance(error, LlmResponseRejectedError)
    assert "200 tokens (max_tokens)" in error.message
    assert "200 tokens" in hooks.log.of("on_llm_error")[0].rejection.detail
    assert not tool_ran(h)


@pytest.mark.parametrize(
    ("selection", "policy", "raised"),
    [
        (CAPPED, RaiseCap(factor=20, limit=1000), 1000),
        (CAPPED, RaiseCap(factor=1.5, limit=1000), 150),
        (ModelSelection("scripted", "m"), RaiseCap(limit=1000), 1000),
        (CAPPED, RaiseCap(limit=50), 100),
    ],
    ids=["at most the limit", "by the factor", "no cap before", "never lower"],
)
async def test_how_far_the_cap_is_raised(selection: ModelSelection, policy: RaiseCap, raised: int) -> None:
    h = await say(CallPolicy(retry_delay=0, on_truncated=policy), CUT, "fine", model=selection)
    assert caps(h)[1] == raised


async def test_the_next_round_starts_with_the_configured_cap() -> None:
    policy = CallPolicy(retry_delay=0, on_truncated=RaiseCap(limit=1000))
    h = await say(policy, CUT, Reply.tool_call("look", {"city": "Rome"}), "done", model=CAPPED)
    assert caps(h) == [100, 200, 100]


async def test_ask_shorter_once() -> None:
    policy = CallPolicy(retry_delay=0, on_truncated=AskShorter("Be brief."))
    h = await say(policy, CUT, CUT, CUT)
    assert last_texts(h) == ["hi", "Be brief.", "hi"]
    assert "max_tokens" in h.turn.error.message


async def test_without_a_policy_a_truncated_call_is_retried_as_it_was() -> None:
    h = await say(CallPolicy(retry_delay=0), CUT, "fine", model=CAPPED)
    assert (caps(h), last_texts(h)) == ([100, 100], ["hi", "hi"])


async def test_on_truncated_concerns_rejected_replies_that_were_cut_off_only() -> None:
    hooks = Hooks(check_response=lambda c: c.text == "no")
    policy = CallPolicy(retry_delay=0, on_truncated=RaiseCap(limit=1000))
    h = await say(policy, "no", "yes", hooks=hooks, model=CAPPED)
    assert caps(h) == [100, 100]


@pytest.mark.parametrize("on_truncated", [RaiseCap(limit=1000), AskShorter("Be brief.")])
async def test_an_object_that_was_cut_off_gets_the_policy_and_the_validation_error(on_truncated: Any) -> None:
    policy = CallPolicy(retry_delay=0, on_truncated=on_truncated)
    cut = Reply.truncated(['{"n": '])
    h = await say(policy, cut, Reply.structured({"n": 1}), schema=SCHEMA, model=CAPPED)
    assert "The reply is not JSON." in last_texts(h)[1]
    if isinstance(on_truncated, AskShorter):
        assert last_texts(h)[1].endswith("Be brief.")
    else:
        assert caps(h) == [100, 200]


async def test_text_that_check_response_rejects_because_it_was_cut_off_gets_the_policy() -> None:
    hooks = Hooks(check_response=lambda c: c.truncated)
    policy = CallPolicy(retry_delay=0, on_truncated=RaiseCap(limit=1000))
    h = await say(policy, Reply.truncated("Once upon"), "The end.", hooks=hooks, model=CAPPED)
    assert (caps(h), h.shown) == ([100, 200], "The end.")


# -- the same again


async def test_prompt_and_history_are_the_same_in_every_attempt() -> None:
    prompts: list[str] = []

    def get_prompt(self: Any) -> str:
        prompts.append("x")
        return f"prompt {len(prompts)}"

    script = [Reply.error(), Reply.tool_call("look", {"city": "Rome"}), Reply.error(), "Free."]
    h = await say(CallPolicy(retry_delay=0), *script, step={"get_prompt": get_prompt})
    requests = h.model.requests
    assert [request.system for request in requests] == ["prompt 1", "prompt 1", "prompt 2", "prompt 2"]
    assert requests[0] == requests[1]
    assert requests[2] == requests[3]


async def test_deadlines_of_the_policy_are_in_the_request() -> None:
    policy = CallPolicy(timeout=9, connect_timeout=1, first_token_timeout=2, idle_timeout=None)
    h = await say(policy, "fine")
    (request,) = h.model.requests
    assert dataclasses.astuple(
        dataclasses.make_dataclass("D", ["a", "c", "f", "i"])(
            request.deadlines.attempt,
            request.deadlines.connect,
            request.deadlines.first_token,
            request.deadlines.idle,
        )
    ) == (9, 1, 2, None)
    assert request.conversation == h.session_id
    assert isinstance(h.clock, FakeClock)
