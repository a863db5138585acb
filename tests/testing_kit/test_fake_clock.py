"""`FakeClock`: time moves only as the test says, in order of deadlines, and never ahead of work that can still run."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import math
import socket
import threading
import weakref
from typing import Any

import anyio
import pytest

from stepwell._clock import Clock
from stepwell.testing import FakeClock

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["by_hand", "auto"])
def auto(request: pytest.FixtureRequest) -> bool:
    return request.param


async def sleeper(clock: FakeClock, seconds: float, log: list[tuple[str, float]], name: str) -> None:
    await clock.sleep(seconds)
    log.append((name, clock.monotonic()))


def test_begins_at_a_fixed_time() -> None:
    clock: Clock = FakeClock()
    assert (clock.time(), clock.monotonic()) == (FakeClock.START, 0.0)
    assert FakeClock(5.0).time() == 5.0
    assert not FakeClock().auto_advance


async def test_advance_fires_in_order_of_deadlines_then_of_registration() -> None:
    clock, log = FakeClock(), list[tuple[str, float]]()
    clock.call_at(3, lambda: log.append(("timer 3", clock.monotonic())))
    clock.call_at(1, lambda: log.append(("timer 1", clock.monotonic())))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper, clock, 2, log, "sleeper 2")
        tasks.start_soon(sleeper, clock, 1, log, "sleeper 1")
        tasks.start_soon(sleeper, clock, 9, log, "sleeper 9")
        await clock.advance(3)
        assert log == [("timer 1", 1), ("sleeper 1", 1), ("sleeper 2", 2), ("timer 3", 3)]
        assert (clock.sleepers, clock.timers, clock.monotonic(), clock.time()) == (1, 0, 3, FakeClock.START + 3)
        await clock.advance(6)
    assert log[-1] == ("sleeper 9", 9)
    assert clock.slept == [2, 1, 9]


async def test_advance_stops_at_deadlines_that_arise_on_the_way() -> None:
    clock, log = FakeClock(), list[float]()

    async def ticks() -> None:
        while True:
            await clock.sleep(1)
            await anyio.lowlevel.checkpoint()
            log.append(clock.monotonic())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ticks)
        await clock.advance(4.5)
        assert log == [1, 2, 3, 4]
        assert clock.monotonic() == 4.5
        tasks.cancel_scope.cancel()
    assert clock.sleepers == 0


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan])
async def test_advance_goes_forward_only(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot advance"):
        await FakeClock().advance(seconds)


async def test_settle_runs_what_is_ready_and_moves_nothing() -> None:
    clock, done = FakeClock(auto_advance=True), anyio.Event()

    async def chain() -> None:
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chain)
        await clock.settle()
        assert done.is_set()
    assert clock.monotonic() == 0


async def test_settle_sees_what_the_last_ready_callback_sent() -> None:
    clock, got, loop = FakeClock(), list[bytes](), asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop.add_reader(ours, lambda: got.append(ours.recv(1)))
        loop.call_soon(theirs.send, b"x")
        await clock.settle()
        loop.remove_reader(ours)
    assert got == [b"x"]


async def test_settling_is_bounded(auto: bool) -> None:
    clock = FakeClock(auto_advance=auto)

    async def poll() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(poll)
        await clock.advance(1)
        if auto:
            await clock.sleep(1)
        tasks.cancel_scope.cancel()
    assert clock.monotonic() == 1 + auto


async def test_a_cancelled_timer_never_fires(auto: bool) -> None:
    clock, log = FakeClock(auto_advance=auto), list[str]()
    timer = clock.call_at(1, lambda: log.append("never"))
    kept = clock.call_at(1, lambda: log.append("fired"))
    timer.cancel()
    timer.cancel()
    assert clock.timers == 1
    await clock.advance(2)
    kept.cancel()
    assert (log, clock.timers) == (["fired"], 0)


async def test_a_timer_that_is_due_fires_soon_and_can_be_cancelled() -> None:
    clock, log = FakeClock(), list[str]()
    clock.call_at(0, lambda: log.append("due"))
    clock.call_at(-1, lambda: log.append("never")).cancel()
    assert log == []
    await clock.settle()
    assert log == ["due"]


async def test_a_renewed_timer_costs_no_memory() -> None:
    clock, log, dead = FakeClock(), list[float](), list[weakref.ref[Any]]()
    clock.call_at(5, lambda: log.append(clock.monotonic()))
    for _ in range(1000):
        callback = functools.partial(log.append, -1.0)
        dead.append(weakref.ref(callback))
        clock.call_at(60, callback).cancel()
    del callback
    assert sum(ref() is not None for ref in dead) < 100
    await clock.advance(100)
    assert log == [5]


async def test_what_a_timer_raises_goes_to_the_loop_and_stops_nothing() -> None:
    clock, raised, log = FakeClock(auto_advance=True), list[object](), list[str]()
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    error = RuntimeError("from a timer")

    def fail() -> None:
        raise error

    try:
        clock.call_at(1, fail)
        clock.call_at(2, lambda: log.append("next"))
        await clock.sleep(3)
    finally:
        loop.set_exception_handler(before)
    assert (raised, log) == ([error], ["next"])


@pytest.mark.parametrize("seconds", [0, -1])
async def test_a_sleep_of_nothing_is_only_a_point_of_cancellation(seconds: float, auto: bool) -> None:
    clock = FakeClock(auto_advance=auto)
    await clock.sleep(seconds)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await clock.sleep(seconds)
    assert scope.cancelled_caught
    assert (clock.monotonic(), clock.slept) == (0, [seconds, seconds])


async def test_a_cancelled_sleep_is_forgotten(auto: bool) -> None:
    clock = FakeClock(auto_advance=auto)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await clock.sleep(5)
    assert scope.cancelled_caught
    task = asyncio.ensure_future(clock.sleep(5))
    await asyncio.sleep(0)
    assert clock.sleepers == 1
    task.cancel()
    await clock.settle()
    assert task.cancelled()
    assert (clock.sleepers, clock.monotonic()) == (0, 0)


async def test_a_cancel_at_the_very_end_of_a_sleep_goes_by_order() -> None:
    clock = FakeClock()
    task = asyncio.ensure_future(clock.sleep(1))
    await clock.settle()
    clock.call_at(1, task.cancel)
    await clock.advance(1)
    assert not task.cancelled(), "the sleeper was first"
    task = asyncio.ensure_future(clock.sleep(1))
    clock.call_at(2, task.cancel)
    await clock.advance(1)
    assert task.cancelled(), "the timer was first"
    assert (clock.sleepers, clock.timers) == (0, 0)


async def test_a_cancel_between_the_end_of_a_sleep_and_the_sleeper_wins() -> None:
    clock = FakeClock(auto_advance=True)
    task = asyncio.ensure_future(clock.sleep(1))
    await asyncio.sleep(0)
    for _ in itertools.count():
        # The clock moves although this task is ready: settling is bounded.
        if not clock.sleepers:
            break
        await asyncio.sleep(0)
    task.cancel()
    await clock.settle()
    assert (task.cancelled(), clock.monotonic()) == (True, 1)


async def test_auto_sleeps_cost_no_time_and_wake_in_order() -> None:
    clock, log = FakeClock(auto_advance=True), list[tuple[str, float]]()
    async with anyio.create_task_group() as tasks:
        for seconds in (3600, 0.5, 60):
            tasks.start_soon(sleeper, clock, seconds, log, str(seconds))
    assert log == [("0.5", 0.5), ("60", 60), ("3600", 3600)]
    assert clock.slept == [3600, 0.5, 60]


async def test_auto_sleep_fires_the_timers_it_passes_and_no_later_ones() -> None:
    clock, log = FakeClock(auto_advance=True), list[float]()
    for when in (120, 2, 1):
        clock.call_at(when, lambda: log.append(clock.monotonic()))
    await clock.sleep(2)
    assert (log, clock.timers, clock.monotonic()) == ([1, 2], 1, 2)


async def test_a_deadline_does_not_fire_while_real_work_goes_on() -> None:
    clock, log, go = FakeClock(auto_advance=True), list[str](), threading.Event()
    deadline = clock.call_at(120, lambda: log.append("deadline"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, go.wait)
        await clock.sleep(60)
        await clock.settle()
        assert (log, clock.monotonic()) == ([], 60)
        go.set()
    deadline.cancel()
    assert log == []


async def test_auto_time_waits_for_work_that_is_ready() -> None:
    clock, log = FakeClock(auto_advance=True), list[float]()

    async def busy() -> None:
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        log.append(clock.monotonic())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(busy)
        await clock.sleep(1)
    assert log == [0]


async def test_auto_sleep_for_ever_lets_timers_fire_one_by_one() -> None:
    clock, log = FakeClock(auto_advance=True), list[float]()

    def tick() -> None:
        log.append(clock.monotonic())
        clock.call_at(clock.monotonic() + 10, tick if len(log) < 3 else scope.cancel)

    with anyio.CancelScope() as scope:
        clock.call_at(1, tick)
        await clock.sleep(math.inf)
    assert scope.cancelled_caught
    assert (log, clock.monotonic(), clock.slept) == ([1, 11, 21], 31, [])


async def test_auto_sleep_for_ever_notices_a_timer_set_later() -> None:
    clock = FakeClock(auto_advance=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, math.inf)
        for _ in range(10):
            await clock.settle()
        assert clock.monotonic() == 0
        clock.call_at(7, tasks.cancel_scope.cancel)
    assert clock.monotonic() == 7


async def test_auto_clock_can_be_advanced_too() -> None:
    clock, log = FakeClock(auto_advance=True), list[tuple[str, float]]()
    clock.call_at(20, lambda: log.append(("timer", clock.monotonic())))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper, clock, 5, log, "sleeper")
        await clock.advance(30)
    assert (log, clock.monotonic()) == ([("sleeper", 5), ("timer", 20)], 30)


@pytest.mark.parametrize("auto_advance", [False, True])
def test_one_clock_may_see_several_event_loops(auto_advance: bool) -> None:
    clock = FakeClock(auto_advance=auto_advance)

    # The first loop ends in the middle of everything: with a timer, a sleeper and a clock that was about to move.
    loop = asyncio.new_event_loop()
    task = loop.create_task(clock.sleep(0.5))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.call_soon(clock.call_at, 1, lambda: None)
    loop.run_until_complete(asyncio.sleep(0))
    assert (clock.sleepers, clock.timers) == (1, 1)
    loop.close()

    async def sleep() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clock.sleep, 2)
            if not auto_advance:
                await clock.advance(2)

    anyio.run(sleep)
    assert (clock.monotonic(), clock.timers, clock.sleepers) == (2, 0, 0)


async def test_contexts_are_those_of_who_set_the_timer() -> None:
    clock, who = FakeClock(auto_advance=True), contextvars.ContextVar("who", default="nobody")
    seen: list[str] = []
    who.set("first")
    clock.call_at(1, lambda: seen.append(who.get()))
    who.set("second")
    await clock.sleep(1)
    assert seen == ["first"]
