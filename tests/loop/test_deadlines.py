"""Deadlines of a model call, on a clock that only the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from loop_flows import Hooks, RawGateway, chat, verdicts
from stepwell.errors import ModelTimeoutError, TurnCancelledError
from stepwell.loop import CallPolicy, Watchdog
from stepwell.models import Deadlines, Finish, ReasoningDelta, StopReason, TextDelta, ToolCallStart
from stepwell.testing import FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

ONE = CallPolicy(attempts=1)
DONE = Finish(stop=StopReason.COMPLETE)


async def fail_of(reply: Any, policy: CallPolicy) -> tuple[TurnHarness, ModelTimeoutError]:
    async with TurnHarness(chat(policy=policy), model=ScriptedModel([reply])) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, ModelTimeoutError)
    return h, h.turn.error


@pytest.mark.parametrize(
    ("reply", "policy", "kind", "after"),
    [
        (Reply.text("x").stalling(after=0), ONE, "first_token", 60),
        (Reply.text("x y").stalling(after=1), ONE, "idle", 60),
        (Reply.text("x " * 20).paced(10), ONE, "attempt", 120),
        (Reply.text("x").stalling(after=0), CallPolicy(attempts=1, first_token_timeout=3), "first_token", 3),
        (Reply.text("x y").stalling(after=1), CallPolicy(attempts=1, idle_timeout=4), "idle", 4),
        (Reply.text("x y").stalling(after=1), CallPolicy(attempts=1, timeout=5), "attempt", 5),
        (Reply.text("x").stalling(after=0), CallPolicy(attempts=1, first_token_timeout=None), "attempt", 120),
        (Reply.text("x y").stalling(after=1), CallPolicy(attempts=1, idle_timeout=None), "attempt", 120),
        (Reply.text("x y").delayed(50, after=0).stalling(after=1), ONE, "idle", 110),
    ],
)
async def test_which_deadline_passes_when(reply: Reply, policy: CallPolicy, kind: str, after: float) -> None:
    h, error = await fail_of(reply, policy)
    assert error.kind == kind
    assert h.clock.monotonic() == after
    assert f"{kind} deadline" in error.message
    assert error.ids["model"] == "scripted:m"
    assert verdicts(h) == ["thrown"]


async def test_events_of_any_kind_keep_an_attempt_alive() -> None:
    clock = FakeClock(auto_advance=True)

    async def play(request: Any) -> Any:
        for event in (ReasoningDelta("Hm."), TextDelta(""), ToolCallStart(0, "c", ""), TextDelta("Hello"), DONE):
            await clock.sleep(9)
            yield event

    policy = CallPolicy(attempts=1, first_token_timeout=10, idle_timeout=10)
    async with TurnHarness(chat(policy=policy), model=RawGateway(play), clock=clock) as h:
        assert (await h.say("hi")).message == "Hello"
    assert clock.monotonic() == 45


async def test_a_slow_stream_within_its_deadlines_is_fine() -> None:
    model = ScriptedModel([Reply.text("a b c d").paced(30).delayed(29)])
    async with TurnHarness(chat(policy=ONE), model=model) as h:
        assert (await h.say("hi")).success
    assert h.clock.monotonic() == 119


async def test_none_is_no_limit() -> None:
    policy = CallPolicy(attempts=1, timeout=None, first_token_timeout=None, idle_timeout=None)
    model = ScriptedModel([Reply.text("a b").delayed(10_000).paced(10_000)])
    async with TurnHarness(chat(policy=policy), model=model) as h:
        assert (await h.say("hi")).success


async def test_each_attempt_has_its_own_deadline() -> None:
    policy = CallPolicy(timeout=100, first_token_timeout=None, idle_timeout=None)
    model = ScriptedModel([Reply.text("x").stalling(after=0)] * 2 + [Reply.text("yes").delayed(90)])
    async with TurnHarness(chat(policy=policy), model=model) as h:
        assert (await h.say("hi")).message == "yes"
    assert h.clock.monotonic() == 100 + 0.5 + 100 + 0.5 + 90
    assert model.cancelled == 2
    assert model.open == 0


async def test_a_deadline_is_an_ordinary_failure_for_the_hooks() -> None:
    hooks = Hooks(on_llm_error="sorry", should_retry_llm_error=False)
    async with TurnHarness(
        chat(hooks, policy=CallPolicy()), model=ScriptedModel([Reply.text("x").stalling(after=0)])
    ) as h:
        assert (await h.say("hi")).message == "sorry"
    assert hooks.log.of("should_retry_llm_error")[0].error.kind == "first_token"


async def test_a_deadline_while_the_connection_is_closed_does_not_lose_a_whole_reply() -> None:
    clock = FakeClock(auto_advance=True)

    async def play(request: Any) -> Any:
        yield TextDelta("Hello")
        yield DONE
        await clock.sleep(1000)

    async with TurnHarness(chat(policy=ONE), model=RawGateway(play), clock=clock) as h:
        assert (await h.say("hi")).message == "Hello"
    assert clock.monotonic() == 60
    assert verdicts(h) == ["accepted"]


async def test_a_deadline_swallows_no_other_cancellation() -> None:
    """The turn is cancelled in the very moment in which the attempt's deadline passes."""
    hooks = Hooks(on_llm_error="sorry")
    clock = FakeClock(auto_advance=True)

    async def play(request: Any) -> Any:
        try:
            await clock.sleep(1000)
        finally:
            h.turn.cancel()
        yield DONE

    async with TurnHarness(chat(hooks, policy=CallPolicy()), model=RawGateway(play), clock=clock) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, TurnCancelledError)
    assert clock.monotonic() == 60
    assert hooks.log.names == []
    assert verdicts(h) == ["cancelled"]


async def test_a_watchdog_leaves_no_timer_and_is_not_moved_by_every_event() -> None:
    clock = FakeClock()
    with Watchdog(clock, Deadlines(first_token=5, idle=5, attempt=60)) as watchdog:
        await clock.advance(4)
        for _ in range(1000):
            watchdog.alive()
        assert clock.timers == 1
        await clock.advance(4)
        watchdog.alive()
    assert clock.timers == 0
    assert watchdog.expired is None
    with Watchdog(clock, Deadlines(connect=1)):
        assert clock.timers == 0
