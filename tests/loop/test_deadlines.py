"""Deadlines of a model call, on a clock that only the test moves."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import CancelScope

from loop_flows import Hooks, RawGateway, chat, verdicts
from stepwell.errors import ModelTimeoutError, TurnCancelledError
from stepwell.loop import Alarm, CallPolicy, Watchdog
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


async def test_all_watchdogs_share_one_timer_which_no_event_moves() -> None:
    clock = FakeClock(auto_advance=True)
    alarm = Alarm(clock)
    with Watchdog(alarm, Deadlines(connect=1)):
        assert clock.timers == 0
    with Watchdog(alarm, Deadlines(first_token=5, idle=5, attempt=60)) as first:
        await clock.advance(4)
        first.last = clock.monotonic()
        with Watchdog(alarm, Deadlines(attempt=30)) as second:
            assert clock.timers == 1
            await clock.advance(4)
            first.last = clock.monotonic()
            with Watchdog(alarm, Deadlines(attempt=0.5)) as third:  # sooner than what the timer is set for
                assert clock.timers == 1
                await clock.sleep(1)
    assert (first.expired, second.expired, third.expired) == (None, None, "attempt")
    await clock.advance(100)  # rings for nobody, and is not set again
    assert clock.timers == 0


async def test_each_watchdog_cuts_its_own_task_at_its_own_time() -> None:
    clock = FakeClock(auto_advance=True)
    alarm = Alarm(clock)
    ended: list[tuple[int, float, str | None]] = []

    async def work(seconds: int) -> None:
        with Watchdog(alarm, Deadlines(attempt=seconds)) as watchdog:
            await clock.sleep(math.inf)
        ended.append((seconds, clock.monotonic(), watchdog.expired))
        await anyio.lowlevel.checkpoint()  # nothing of the cancellation is left over

    await asyncio.gather(*(work(seconds) for seconds in (9, 3, 6)))
    assert ended == [(3, 3, "attempt"), (6, 6, "attempt"), (9, 9, "attempt")]


@pytest.mark.parametrize("first", ["event", "deadline"])
async def test_a_task_that_is_about_to_run_gets_the_cancellation_inside_of_the_block(first: str) -> None:
    """What it waits for comes in the same pass of the loop in which its time is over: nothing is cancelled after it."""
    clock = FakeClock()
    there = asyncio.get_running_loop().create_future()
    watchdog = Watchdog(Alarm(clock), Deadlines(attempt=3))
    seen: list[str] = []

    async def work() -> None:
        with watchdog:
            try:
                await there
            except asyncio.CancelledError:
                seen.append("cut")
                raise
        await asyncio.sleep(0)
        seen.append("lives")

    def both() -> None:
        if first == "deadline":
            watchdog.look(3)
        if not there.done():
            there.set_result(None)
        if first == "event":
            watchdog.look(3)

    task = asyncio.create_task(work())
    await clock.settle()
    clock.call_at(2, both)
    await clock.advance(2)
    await task
    assert seen == ["cut", "lives"]
    assert task.cancelling() == 0


async def test_a_gateway_that_swallows_the_cancellation_is_cut_again() -> None:
    clock = FakeClock(auto_advance=True)
    alarm = Alarm(clock)
    with Watchdog(alarm, Deadlines(attempt=10)) as watchdog:
        with suppress(asyncio.CancelledError):
            await clock.sleep(math.inf)
        await clock.sleep(math.inf)
    assert (watchdog.expired, clock.monotonic()) == ("attempt", 15)
    await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_watchdog_within_and_around_other_peoples_scopes_and_timeouts() -> None:
    clock = FakeClock(auto_advance=True)
    alarm = Alarm(clock)
    deadlines = Deadlines(attempt=5)
    with Watchdog(alarm, deadlines) as watchdog, CancelScope() as inner:
        await clock.sleep(math.inf)
    assert (watchdog.expired, inner.cancelled_caught) == ("attempt", False)

    with Watchdog(alarm, deadlines) as watchdog:
        async with asyncio.timeout(3600):
            await clock.sleep(math.inf)
    assert watchdog.expired == "attempt"

    with CancelScope() as outer, Watchdog(alarm, deadlines) as watchdog:
        outer.cancel()
        await clock.sleep(math.inf)
    assert (watchdog.expired, outer.cancelled_caught) == (None, True)

    with Watchdog(alarm, deadlines) as watchdog:
        async with anyio.create_task_group() as group:
            group.start_soon(clock.sleep, math.inf)
            await clock.sleep(math.inf)
    assert watchdog.expired == "attempt"
    await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("first", ["scope", "deadline"])
async def test_a_scope_that_is_cancelled_in_the_same_moment_is_not_robbed(first: str) -> None:
    """The scope is around the watchdog, as a turn's is; a gateway's cancelled candidate must not count as a timeout."""
    clock = FakeClock()
    watchdog = Watchdog(Alarm(clock), Deadlines(attempt=5))
    scope = CancelScope()
    after = False

    async def work() -> None:
        nonlocal after
        with scope:
            with watchdog:
                await clock.sleep(math.inf)
            await anyio.lowlevel.checkpoint_if_cancelled()
            after = True

    def both() -> None:
        if first == "scope":
            scope.cancel()
        watchdog.look(5)
        scope.cancel()

    task = asyncio.create_task(work())
    await clock.settle()
    clock.call_at(4, both)
    await clock.advance(4)
    await task
    assert (scope.cancelled_caught, after, task.cancelling()) == (True, False, 0)


@pytest.mark.parametrize("first", ["caller", "deadline"])
async def test_a_task_cancelled_from_outside_in_the_same_moment_stays_cancelled(first: str) -> None:
    clock = FakeClock()
    watchdog = Watchdog(Alarm(clock), Deadlines(attempt=5))

    async def work() -> None:
        with watchdog:
            await clock.sleep(math.inf)
        raise AssertionError("the cancellation was swallowed")

    def both() -> None:
        if first == "caller":
            task.cancel()
        watchdog.look(5)
        if first == "deadline":
            task.cancel()

    task = asyncio.create_task(work())
    await clock.settle()
    clock.call_at(4, both)
    await clock.advance(4)
    with pytest.raises(asyncio.CancelledError):
        await task
