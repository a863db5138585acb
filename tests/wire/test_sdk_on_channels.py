"""The unmodified JavaScript SDK, agent and client, on every channel of the product, in each scenario of the traces."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import groupby
from pathlib import Path

import pytest

from stepwell.channels import open_channels
from stepwell.wire import Channel
from wire.bridge import Bridge
from wire.feed import feed
from wire.replay import TRACES

pytestmark = pytest.mark.anyio

SCENARIOS = sorted(path.stem.removeprefix("golden-") for path in TRACES.glob("golden-*.json"))

CHUNKS = ["start", "start-step", "text-start", "text-delta", "text-end", "finish-step", "finish"]


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
async def channel(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Channel]:
    match request.param:
        case "memory":
            url = "memory://"
        case "sqlite":
            url = f"sqlite:///{tmp_path / 'channels.db'}"
        case backend:
            url = request.getfixturevalue(f"{backend}_database")
    async with open_channels(url) as provider:
        yield await provider.open("conversations:sdk")


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_scenario_holds(name: str, channel: Channel, bridge: Bridge) -> None:
    async with feed(bridge, channel):
        played = await bridge.scenario(name, channel=channel.name)
    assert played.checks
    for check in played.failed:
        # A channel may deliver a newer full version in place of appends: fewer and longer chunks.
        assert check["label"] == "useChat stream replays the chunks", check
        assert [kind for kind, _ in groupby(chunk["type"] for chunk in check["detail"])] == CHUNKS


async def test_clients_join_read_and_write(channel: Channel, bridge: Bridge) -> None:
    async with feed(bridge, channel):
        await bridge.client("user", channel.name, client_id="user-a")
        await bridge.client("other", channel.name, client_id="user-b")
        await bridge.send("user", "Hello")
        await bridge.until("other", lambda view: view.texts == ["user:Hello"])
        await bridge.client("late", channel.name, client_id="user-c")
        assert (await bridge.load_older("late")).texts == ["user:Hello"]
        for client in ("user", "other", "late"):
            await bridge.close(client)
