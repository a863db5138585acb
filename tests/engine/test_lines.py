"""The queue of one session: who leaves it early takes nobody's turn away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stepwell.engine._lines import Lines
from stepwell.errors import SessionBusyError
from stepwell.testing import FakeClock

pytestmark = pytest.mark.anyio


def given(timeout: float = 60) -> Any:
    return cast("Any", SimpleNamespace(on_busy="queue", busy_timeout=timeout))


async def test_one_that_is_cancelled_in_the_moment_of_its_turn_hands_it_on() -> None:
    clock = FakeClock()
    lines = Lines(clock)
    await lines.enter(given(), "s")
    second = asyncio.create_task(lines.enter(given(), "s"))
    third = asyncio.create_task(lines.enter(given(), "s"))
    await clock.settle()
    lines.leave("s")
    second.cancel()  # it has been given its turn, and has not run since
    await clock.settle()
    assert second.cancelled()
    assert third.done()
    assert not lines.waiting("s")
    lines.leave("s")
    await lines.enter(given(), "s")  # at once: the line is gone
    assert clock.timers == 0


async def test_one_that_gave_up_is_passed_over() -> None:
    clock = FakeClock()
    lines = Lines(clock)
    await lines.enter(given(), "s")
    hasty = asyncio.create_task(lines.enter(given(1), "s"))
    patient = asyncio.create_task(lines.enter(given(), "s"))
    await clock.settle()
    assert lines.waiting("s")
    await clock.advance(1)
    with pytest.raises(SessionBusyError):
        await hasty
    lines.leave("s")
    await patient
    assert not lines.waiting("s")


async def test_one_that_is_cancelled_just_before_its_turn_is_passed_over() -> None:
    clock = FakeClock()
    lines = Lines(clock)
    await lines.enter(given(), "s")
    second = asyncio.create_task(lines.enter(given(), "s"))
    await clock.settle()
    second.cancel()
    lines.leave("s")  # before it has seen its cancellation
    with pytest.raises(asyncio.CancelledError):
        await second
    await lines.enter(given(), "s")
    assert not lines.waiting("s")
