"""Scenarios C1, C2 and C5 on the wire: three clients, one that was there, one that joins between, one that comes after.

The attempts are made by the agent's side of this package, on a memory channel. What the engine publishes in these
scenarios is tested with the engine.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from stepwell.channels import MemoryChannels
from stepwell.transport import AgentRun, AgentSession, ClientSession
from stepwell.transport.codecs import UIMessageCodec
from transport_kit import settled, shown

pytestmark = pytest.mark.anyio

CODEC = UIMessageCodec()


async def stream(*chunks: dict[str, Any], fails: bool = False) -> AsyncIterator[dict[str, Any]]:
    for chunk in chunks:
        yield chunk
    if fails:
        raise ConnectionError("the model is gone")


def opened(kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": "start"}, {"type": "start-step"}, {"type": f"{kind}-start", "id": "t1"}]


def deltas(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": f"{kind}-delta", "id": "t1", "delta": text} for text in texts]


def closed(kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": f"{kind}-end", "id": "t1"}, {"type": "finish-step"}]


async def three_clients(
    attempts: list[Callable[[AgentRun[Any]], Awaitable[None]]],
) -> tuple[list[Any], list[str], list[Any]]:
    """Play attempts with a client joining before each. What each client shows, its runs' statuses, and the raw log."""
    channel = await MemoryChannels().open("c")
    views: list[ClientSession[Any, Any]] = []
    async with AsyncExitStack() as stack:

        async def join() -> ClientSession[Any, Any]:
            session = await stack.enter_async_context(ClientSession(channel, CODEC))
            await session.view.load_older(100)
            views.append(session)
            return session

        first = await join()
        agent = await stack.enter_async_context(AgentSession(channel, CODEC))
        sent = await first.view.send(CODEC.create_user_message("Hello"))
        run = agent.create_run(sent.to_invocation())
        await run.start()
        for attempt in attempts:
            await attempt(run)
            await settled()
            await join()
        await run.end("complete")
        await settled()
        await join()
        every = [[one.message for one in session.view.messages] for session in views]
        assert all(shown(session.view) == shown(first.view) for session in views)
        raw = [one.data for one in (await channel.history(limit=1_000)).items]
        return every, [session.view.runs[-1].status for session in views], raw


def attempt(*chunks: dict[str, Any], fails: bool = False, step_id: str = "reply") -> Callable[[AgentRun[Any]], Any]:
    async def make(run: AgentRun[Any]) -> None:
        async with run.create_step(step_id=step_id) as step:
            await step.pipe(stream(*chunks, fails=fails))

    return make


def equal_parts(every: list[Any]) -> list[dict[str, Any]]:
    """The parts of the answer, which all clients show alike."""
    assert all(messages == every[0] for messages in every)
    assert [one["role"] for one in every[0]] == ["user", "assistant"]
    return every[0][1]["parts"]


async def test_scenario_c01_a_retry_supersedes_partial_text_on_every_client() -> None:
    every, statuses, raw = await three_clients(
        [
            attempt(*opened(), *deltas("Hel", "lo"), fails=True),
            attempt(*opened(), *deltas("Hi"), *closed()),
        ]
    )
    assert equal_parts(every) == [{"type": "step-start"}, {"type": "text", "text": "Hi"}]
    assert statuses == ["complete"] * 4
    assert {"Hello", "Hi"} <= {one for one in raw if isinstance(one, str)}


async def test_scenario_c02_reasoning_of_a_dead_attempt_leaks_nowhere() -> None:
    every, _, raw = await three_clients(
        [
            attempt(*opened("reasoning"), *deltas("I think ", "not", kind="reasoning"), fails=True),
            attempt(
                *opened("reasoning"),
                *deltas("I know", kind="reasoning"),
                {"type": "reasoning-end", "id": "t1"},
                {"type": "text-start", "id": "t2"},
                {"type": "text-delta", "id": "t2", "delta": "Hi"},
                {"type": "text-end", "id": "t2"},
                {"type": "finish-step"},
            ),
        ]
    )
    assert equal_parts(every) == [
        {"type": "step-start"},
        {"type": "reasoning", "text": "I know"},
        {"type": "text", "text": "Hi"},
    ]
    assert "I think not" in raw


async def test_scenario_c05_the_terminal_reply_is_shown_not_a_blank_and_not_half_a_sentence() -> None:
    every, _, raw = await three_clients(
        [
            attempt(*opened(), *deltas("Your booking is"), fails=True),
            attempt(*opened(), fails=True),
            attempt(*opened(), *deltas("Sorry, this did not work."), *closed()),
        ]
    )
    assert equal_parts(every) == [{"type": "step-start"}, {"type": "text", "text": "Sorry, this did not work."}]
    assert "Your booking is" in raw
