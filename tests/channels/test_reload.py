"""After a reload no answered request is open: not for who reads what is stored, after everybody was gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepwell.channels.postgres import PostgresChannels
from stepwell.channels.redis import RedisChannels
from stepwell.channels.sqlite import SqliteChannels
from stepwell.transport import AgentSession, ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import ChannelProvider

pytestmark = pytest.mark.anyio

CODEC = UIMessageCodec()
NAME = "conversations:reload"
ANSWERED = ["approval-responded", "output-denied", "output-available"]


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], ChannelProvider]:
    """Another provider of the same channels, each time."""
    if request.param == "sqlite":
        return partial(SqliteChannels, tmp_path / "c.db")
    if request.param == "postgres":
        return partial(PostgresChannels, request.getfixturevalue("postgres_database"))
    return partial(RedisChannels, request.getfixturevalue("redis_database"))


def requests() -> list[dict[str, Any]]:
    """Two payments to be approved, and a place that the client is asked for."""
    names = {"c1": "pay", "c2": "pay", "c3": "place"}
    calls = [
        {"type": "tool-input-available", "toolCallId": call, "toolName": name, "input": {}}
        for call, name in names.items()
    ]
    approvals = [
        {"type": "tool-approval-request", "toolCallId": call, "approvalId": f"approve-{call}"} for call in ("c1", "c2")
    ]
    return [*calls, *approvals]


def states(session: ClientSession[Any, Any]) -> list[str]:
    parts = [part for one in session.view.messages for part in one.message["parts"]]
    return [part["state"] for part in parts if part["type"].startswith("tool-")]


async def until(session: ClientSession[Any, Any], true: Callable[[], bool]) -> None:
    changes = session.view.changes()
    async with asyncio.timeout(20):
        while not true():
            await anext(changes)


async def test_after_a_reload_no_answered_request_is_open(connect: Callable[[], ChannelProvider]) -> None:
    async with (
        connect() as agents,
        connect() as clients,
        ClientSession(await clients.open(NAME), CODEC) as session,
        ClientSession(await agents.open(NAME), CODEC) as other,
    ):
        asked = await session.view.send(CODEC.create_user_message("Pay Bob and Eve"))
        async with AgentSession(await agents.open(NAME), CODEC) as agent:
            run = agent.create_run(asked.to_invocation())
            await run.start()
            await run.pipe(requests())
            await run.suspend()
        await until(session, lambda: [one.status for one in session.view.runs] == ["suspended"])
        assert states(session) == ["approval-requested", "approval-requested", "input-available"]
        message = session.view.messages[-1].codec_message_id
        for answer in (
            CODEC.create_tool_approval_response(message, "c1", approved=True),
            CODEC.create_tool_approval_response(message, "c2", approved=False, reason="too much"),
            CODEC.create_tool_result(message, "c3", {"city": "Rome"}),
        ):
            await session.view.send(answer, run_id=run.run_id)
        await until(session, lambda: states(session) == ANSWERED)
        await until(other, lambda: states(other) == ANSWERED)
    for page in (1, 2, 100):
        async with connect() as clients, ClientSession(await clients.open(NAME), CODEC, history_page=page) as reloaded:
            await reloaded.view.load_older(10)
            assert states(reloaded) == ANSWERED
            assert [one.status for one in reloaded.view.runs] == ["suspended"]


async def test_what_was_not_answered_is_open_after_a_reload(connect: Callable[[], ChannelProvider]) -> None:
    async with connect() as channels, ClientSession(await channels.open(NAME), CODEC) as session:
        asked = await session.view.send(CODEC.create_user_message("Pay Bob and Eve"))
        async with AgentSession(await channels.open(NAME), CODEC) as agent:
            run = agent.create_run(asked.to_invocation())
            await run.start()
            await run.pipe(requests())
            await run.suspend()
        await until(session, lambda: [one.status for one in session.view.runs] == ["suspended"])
        message = session.view.messages[-1].codec_message_id
        await session.view.send(CODEC.create_tool_approval_response(message, "c2", approved=True), run_id=run.run_id)
    async with connect() as channels, ClientSession(await channels.open(NAME), CODEC, history_page=2) as reloaded:
        await reloaded.view.load_older(10)
        assert states(reloaded) == ["approval-requested", "approval-responded", "input-available"]
