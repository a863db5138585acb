"""Rounds, tokens, usage; the fields of the policy, their defaults and what they refuse."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import anyio
import pytest

from loop_flows import FAST, Hooks, RawGateway, chat, verdicts
from stepwell import retry_with_model
from stepwell.engine import CandidateClassified
from stepwell.errors import AgentRoundLimitError, UsageLimitError
from stepwell.loop import UNSET, AskShorter, CallPolicy, CallPolicyOverride, EmptyPolicy, RaiseCap
from stepwell.messages import ToolResult, Usage
from stepwell.models import Finish, StopReason, TextDelta, UsageEvent
from stepwell.testing import Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

LOOK = Reply.tool_call("look", {"city": "Rome"})


# -- rounds


async def test_more_rounds_than_allowed_in_one_visit() -> None:
    hooks = Hooks(on_llm_error="sorry", on_llm_blocked="sorry")
    async with TurnHarness(chat(hooks, policy=CallPolicy(max_agent_rounds=3)), model=ScriptedModel([LOOK] * 3)) as h:
        result = await h.say("hi")
        history = await h.history("Talk")
    assert isinstance(h.turn.error, AgentRoundLimitError)
    assert not result.success
    assert set(hooks.log.names) == {"check_response"}
    assert len([m for m in history if isinstance(m, ToolResult)]) == 3


async def test_as_many_rounds_as_allowed() -> None:
    model = ScriptedModel([*[LOOK] * 24, "done"])
    async with TurnHarness(chat(), model=model) as h:
        result = await h.say("hi")
    assert result.message == "done"


async def test_the_default_is_25_rounds() -> None:
    async with TurnHarness(chat(), model=ScriptedModel([LOOK] * 25)) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, AgentRoundLimitError)


async def test_rounds_are_counted_per_visit() -> None:
    policy = CallPolicy(max_agent_rounds=2)
    async with TurnHarness(chat(policy=policy), model=ScriptedModel([LOOK, "one", LOOK, "two"])) as h:
        assert (await h.say("hi")).success
        assert (await h.say("hi")).success


async def test_attempts_are_no_rounds() -> None:
    policy = CallPolicy(max_agent_rounds=1, retry_delay=0)
    async with TurnHarness(chat(policy=policy), model=ScriptedModel([Reply.error(), Reply.empty(), "one"])) as h:
        assert (await h.say("hi")).success


# -- usage


async def test_usage_is_counted_per_attempt_whatever_came_of_it() -> None:
    hooks = Hooks(check_response=lambda c: c.text == "no")
    script = [
        Reply.text("dead").with_usage(1, 1).failing(status=503),
        Reply.empty().with_usage(10, 0),
        Reply.text("no").with_usage(100, 1),
        LOOK.stopping("truncated").with_usage(1000, 1),
        Reply.text("yes").with_usage(10_000, 1),
    ]
    policy = CallPolicy(attempts=5, retry_delay=0)
    async with TurnHarness(chat(hooks, policy=policy), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
        document = await h.document()
    used = result.usage["scripted:m"]
    assert used.usage == Usage(input=11_111, output=4)
    assert (used.attempts, used.unknown) == (5, 0)
    assert document["usage"]["scripted:m"]["attempts"] == 5
    assert [event.usage.input for event in h.of(CandidateClassified)] == [1, 10, 100, 1000, 10_000]


async def test_usage_of_blocked_replies_counts_and_of_turns_that_fail() -> None:
    async with TurnHarness(chat(), model=ScriptedModel([Reply.blocked("safety").with_usage(7, 1)])) as h:
        result = await h.say("hi")
        document = await h.document()
    assert not result.success
    assert result.usage["scripted:m"].usage == Usage(input=7, output=1)
    assert document["usage"]["scripted:m"]["usage"] == {"input": 7, "output": 1}


async def test_what_a_provider_did_not_report_is_unknown_not_zero() -> None:
    script = [Reply.error(), Reply.text("yes").with_usage(5)]
    async with TurnHarness(chat(policy=FAST), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    used = result.usage["scripted:m"]
    assert (used.attempts, used.unknown) == (2, 1)
    assert used.usage == Usage(input=5)
    assert used.usage.output is None
    assert [event.usage for event in h.of(CandidateClassified)] == [None, Usage(input=5)]


async def test_usage_of_a_cancelled_attempt_counts() -> None:
    stalled = anyio.Event()

    async def play(request: Any) -> Any:
        yield TextDelta("Hello")
        yield UsageEvent(Usage(9, 1))
        stalled.set()
        await anyio.sleep_forever()

    async with TurnHarness(chat(), model=RawGateway(play)) as h, anyio.create_task_group() as group:

        async def cancel() -> None:
            await stalled.wait()
            h.turn.cancel()

        group.start_soon(cancel)
        result = await h.say("hi")
        document = await h.document()
    assert result.usage["scripted:m"].usage == Usage(9, 1)
    assert document["usage"]["scripted:m"]["attempts"] == 1
    assert verdicts(h) == ["cancelled"]


async def test_the_last_usage_of_an_attempt_counts() -> None:

    async def play(request: Any) -> Any:
        yield UsageEvent(Usage(9, 1))
        yield TextDelta("Hello")
        yield UsageEvent(Usage(9, 3))
        yield Finish(stop=StopReason.COMPLETE)

    async with TurnHarness(chat(), model=RawGateway(play)) as h:
        result = await h.say("hi")
    assert result.usage["scripted:m"].usage == Usage(9, 3)


async def test_usage_is_counted_by_model() -> None:
    hooks = Hooks(on_llm_error=retry_with_model("scripted:spare"))
    script = {"m": [Reply.text("x").with_usage(1, 1).failing()], "spare": [Reply.text("y").with_usage(2, 2)]}
    async with TurnHarness(chat(hooks, policy=CallPolicy(attempts=1)), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
    assert {name: used.usage.total for name, used in result.usage.items()} == {"scripted:m": 2, "scripted:spare": 4}


async def test_the_token_budget_stops_before_the_next_call_and_asks_nobody() -> None:
    hooks = Hooks(on_llm_error="sorry")
    policy = CallPolicy(retry_delay=0, max_total_tokens=10)
    async with TurnHarness(chat(hooks, policy=policy), model=ScriptedModel([LOOK.with_usage(6, 4)])) as h:
        result = await h.say("hi")
    assert isinstance(h.turn.error, UsageLimitError)
    assert result.error is not None
    assert "10 of 10 tokens" in result.error.message
    assert hooks.log.names == ["check_response"]


async def test_the_token_budget_counts_failed_attempts_and_is_per_turn() -> None:
    policy = CallPolicy(retry_delay=0, max_total_tokens=10)
    script = [Reply.text("x").with_usage(6, 3).failing(), Reply.text("one").with_usage(100, 1), "two"]
    async with TurnHarness(chat(policy=policy), model=ScriptedModel(script)) as h:
        assert (await h.say("hi")).message == "one"
        assert (await h.say("hi")).message == "two"


# -- the policy

DEFAULTS: dict[str, Any] = {
    "attempts": 3,
    "retry_delay": 0.5,
    "max_retry_after": 30,
    "default_retry": "transient",
    "timeout": 120,
    "connect_timeout": 10,
    "first_token_timeout": 60,
    "idle_timeout": 60,
    "empty": EmptyPolicy(retries=None),
    "auto_reject": frozenset({"truncated", "schema"}),
    "on_truncated": None,
    "max_agent_rounds": 25,
    "max_total_tokens": None,
}


def test_the_defaults() -> None:
    policy = CallPolicy()
    assert {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)} == DEFAULTS


def test_it_is_frozen_and_keyword_only() -> None:
    for made in (CallPolicy(), CallPolicyOverride(), EmptyPolicy(), RaiseCap(limit=1), AskShorter()):
        name = dataclasses.fields(made)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 1)
    with pytest.raises(TypeError):
        CallPolicy(3)  # type: ignore[misc]


WRONG: list[dict[str, Any]] = [
    *({"attempts": bad} for bad in (0, -1, 1.5, True, None, "3")),
    *({"max_agent_rounds": bad} for bad in (0, 2.5, None)),
    *({"retry_delay": bad} for bad in (-0.1, None, math.nan, math.inf)),
    *({"max_retry_after": bad} for bad in (-1, None)),
    *(
        {field: bad}
        for field in ("timeout", "connect_timeout", "first_token_timeout", "idle_timeout")
        for bad in (0, -1, math.nan, math.inf, "9")
    ),
    *({"max_total_tokens": bad} for bad in (0, -1, 1.5)),
    {"default_retry": "sometimes"},
    {"auto_reject": frozenset({"empty"})},
    {"auto_reject": "schema"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_invalid_values_are_refused_at_definition(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ValueError, match=name):
        CallPolicy(**fields)
    with pytest.raises(ValueError, match=name):
        CallPolicyOverride(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EmptyPolicy(retries=-1),
        lambda: EmptyPolicy(retries=1.5),
        lambda: EmptyPolicy(nudge=" "),
        lambda: AskShorter(""),
        lambda: RaiseCap(limit=0),
        lambda: RaiseCap(factor=1, limit=10),
        lambda: RaiseCap(factor=math.nan, limit=10),
    ],
)
def test_invalid_parts_are_refused_at_definition(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        make()


def test_zero_is_a_delay_and_none_is_no_limit() -> None:
    policy = CallPolicy(
        retry_delay=0,
        max_retry_after=0,
        timeout=None,
        connect_timeout=None,
        first_token_timeout=None,
        idle_timeout=None,
    )
    assert policy.timeout is None
    assert policy.retry_delay == 0


def test_an_omitted_field_inherits_and_none_removes() -> None:
    policy = CallPolicy(timeout=5, max_total_tokens=10, idle_timeout=7, empty=EmptyPolicy(nudge="Say."))
    assert policy.merge(CallPolicyOverride()) is policy
    merged = policy.merge(CallPolicyOverride(timeout=None, attempts=1, empty=None))
    assert (merged.timeout, merged.attempts, merged.empty) == (None, 1, None)
    assert (merged.max_total_tokens, merged.idle_timeout) == (10, 7)
    assert (policy.timeout, policy.attempts) == (5, 3)


def test_every_field_can_be_overridden_and_is_unset_at_first() -> None:
    override = CallPolicyOverride()
    assert {f.name for f in dataclasses.fields(override)} == set(DEFAULTS)
    for name in DEFAULTS:
        assert getattr(override, name) is UNSET
    assert repr(UNSET) == "UNSET"
    assert not UNSET


async def test_a_stage_overrides_fields_of_the_flows_policy() -> None:
    seen: list[CallPolicy] = []

    def get_prompt(self: Any) -> str:
        seen.append(self.get_llm_call_policy())
        return "x"

    flow = chat(
        policy=CallPolicy(attempts=2, timeout=9, idle_timeout=3),
        override=CallPolicyOverride(timeout=None),
        step={"get_prompt": get_prompt},
    )
    async with TurnHarness(flow, model=ScriptedModel(["yes"])) as h:
        await h.say("hi")
        stored = str(await h.document())
    assert seen == [CallPolicy(attempts=2, timeout=None, idle_timeout=3)]
    assert h.model.requests[0].deadlines.attempt is None
    assert "timeout" not in stored
