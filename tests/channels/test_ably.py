"""Ably channels, with the official SDK against an endpoint of our own that speaks its protocol."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from ably.util.exceptions import AblyException

from servers import start_ably
from stepwell.channels import ably
from stepwell.channels.ably import AblyChannels
from stepwell.errors import ChannelBusyError, ChannelError, InsufficientCapabilityError
from stepwell.testing import ChannelConformance
from stepwell.transport import AgentSession, ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import ChannelProvider, Cursor, Delivery, Gap, WireMessage

pytestmark = pytest.mark.anyio


def channels(endpoint: Any, **options: Any) -> AblyChannels:
    rest = endpoint.rest_options(options.get("client_id", "*"))
    return AblyChannels(realtime=endpoint.realtime_options(), rest=rest, **options)


class TestAbly(ChannelConformance):
    slow_mutations = 200
    passes_time = False

    # The service decides: it takes text behind anything, and nothing above its limit of 64 KiB.
    test_only_text_can_be_appended_to = None
    test_text_survives = None

    @pytest.fixture
    async def provider(self) -> AsyncIterator[ChannelProvider]:
        with start_ably() as endpoint:  # of the test's own: channels cannot be deleted
            async with channels(endpoint) as provider:
                yield provider


async def test_a_message_above_the_limit_is_refused_by_name(ably_endpoint: Any) -> None:
    async with channels(ably_endpoint) as provider:
        channel = await provider.open("limits")
        with pytest.raises(ChannelError, match="40009"):
            await channel.publish([WireMessage(name="x", data="x" * 100_000)])


async def test_a_run_published_by_python_is_shown_by_the_javascript_client(ably_endpoint: Any, bridge: Any) -> None:
    name = "conversations:ably"
    await bridge.open(name)
    await bridge.client("live", name, client_id="ben", endpoint=ably_endpoint.port)
    async with channels(ably_endpoint, client_id="ana") as provider:
        channel = await provider.open(name)
        codec = UIMessageCodec()
        async with ClientSession(channel, codec, client_id="ana") as client, AgentSession(channel, codec) as agent:
            asked = await client.view.send(codec.create_user_message("How are you?"))
            run = agent.create_run(asked.to_invocation())
            await run.start()
            for attempt, text in (("failed", "Terrib"), ("complete", "Very well.")):
                step = run.create_step("draft")
                await step.start()
                await step.pipe(reply(text))
                await step.end(attempt)
            await run.end("complete")
            await asked.started
            shown = await bridge.until("live", lambda view: [one["status"] for one in view.runs] == ["complete"])
            assert shown.texts == ["user:How are you?", "assistant:Very well."]
            late = ClientSession(channel, codec)
            async with late:
                await late.view.load_older(10)
                assert [one.message for one in late.view.messages] == [one.message for one in client.view.messages]
        async with channel.subscribe(after=Cursor("now-0")) as subscription:
            items = await subscription.read()
            assert isinstance(items[0], Gap)
            names = [item.name for item in items[1:] if isinstance(item, Delivery)]
            assert (names[0], names[-1]) == ("ai-input", "ai-run-end")


def reply(text: str) -> list[dict[str, Any]]:
    return [
        {"type": "text-start", "id": "t"},
        {"type": "text-delta", "id": "t", "delta": text},
        {"type": "text-end", "id": "t"},
    ]


@pytest.mark.parametrize(
    ("code", "status", "kind", "says"),
    [
        (42911, 429, ChannelBusyError, "nothing was stored"),
        (40160, 401, InsufficientCapabilityError, "capabilities"),
        (93002, 400, ChannelError, "mutableMessages"),
        (50000, 500, ChannelError, "not known whether"),
    ],
)
def test_what_the_service_says(code: int, status: int, kind: type[ChannelError], says: str) -> None:
    error = ably.mapped(AblyException("what was published", status, code))
    assert type(error) is kind
    assert says in str(error)
    assert "what was published" not in str(error)
