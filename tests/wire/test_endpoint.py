"""The endpoint for the real clients of Ably: a run said by the Python client is read by the JavaScript one."""

from __future__ import annotations

from typing import Any

import ably
import pytest
from ably.types.message import Message

from servers import AblyServer
from wire.bridge import Bridge

pytestmark = pytest.mark.anyio

CHANNEL = "conversations:endpoint"


def extras(transport: dict[str, str], codec: dict[str, str] | None = None) -> dict[str, Any]:
    return {"ai": {"transport": transport} if codec is None else {"transport": transport, "codec": codec}}


async def test_python_says_a_run_and_javascript_reads_it(ably_endpoint: AblyServer, bridge: Bridge) -> None:
    await bridge.client("reader", CHANNEL, client_id="reader", endpoint=ably_endpoint.port)
    realtime = ably.AblyRealtime(client_id="agent", **ably_endpoint.realtime_options())
    try:
        await realtime.connection.once_async("connected")
        channel = realtime.channels.get(CHANNEL)
        await channel.attach()
        run = {"run-id": "R", "run-client-id": ""}
        await channel.publish(Message(name="ai-run-start", extras=extras(run)))
        part = {**run, "role": "assistant", "codec-message-id": "A", "stream": "true", "stream-id": "t"}
        kind = {"kind": "text", "id": "t"}
        opened = await channel.publish(
            Message(name="ai-output", data="", extras=extras({**part, "status": "streaming"}, kind))
        )
        for text, status in (("Hello ", "streaming"), ("there", "streaming"), ("", "complete")):
            change = Message(serial=opened.serials[0], data=text, extras=extras({**part, "status": status}, kind))
            assert (await channel.append_message(change)).version_serial > opened.serials[0]
        await bridge.until("reader", lambda view: view.texts == ["assistant:Hello there"])
        ably_endpoint.drop_sockets()
        await channel.publish(Message(name="ai-run-end", extras=extras({**run, "run-reason": "complete"})))
        view = await bridge.until("reader", lambda view: view.runs[0]["status"] == "complete")
        assert view.errors == []
    finally:
        await realtime.close()

    async with ably.AblyRest(**ably_endpoint.rest_options()) as rest:
        page = await rest.channels.get(CHANNEL).history(limit=10)
        assert [message.name for message in page.items] == ["ai-run-end", "ai-output", "ai-run-start"]
        assert page.items[1].data == "Hello there"
