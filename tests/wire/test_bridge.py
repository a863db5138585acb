"""The bridge itself, on golden traces and without the product."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any

import pytest

from wire.bridge import Ask, Bridge, BridgeDied, BridgeError, BridgeProcess, Refused
from wire.replay import deliveries, trace

pytestmark = pytest.mark.anyio

REPLAYED = [
    "basic-run",
    "cancel-midstream",
    "cancel-routing",
    "custom-codec",
    "late-join",
    "run-error",
    "step-retry-crash",
    "step-retry-failed",
    "steering",
    "suspend-resume-approval",
    "tool-result-fork",
]


@pytest.mark.parametrize("mode", ["inflight-only", "always"])
@pytest.mark.parametrize("name", REPLAYED)
async def test_a_replayed_trace_shows_the_view_it_records(name: str, mode: Any, bridge: Bridge) -> None:
    golden = trace(name)
    codec = "tiny" if name == "custom-codec" else "ui"
    await bridge.open("live", first_append_as_update=mode)
    await bridge.client("watcher", "live", client_id="watcher", codec=codec)
    seen = (await bridge.deliver("live", *deliveries(golden), views=["watcher"]))["watcher"]
    assert seen[-1].messages == golden["clientView"]
    assert seen[-1].messages == (await bridge.view("watcher")).messages
    for steps in [golden["steps"]] if "steps" in golden else []:
        assert steps in seen[-1].steps.values()

    await bridge.client("late", "live", client_id="late", codec=codec)
    assert (await bridge.view("late")).messages == []
    assert (await bridge.load_older("late")).messages == golden["clientView"]

    await bridge.open("kept")
    await bridge.deliver("kept", *reversed(golden["history_newest_first"]))
    await bridge.client("reader", "kept", client_id="reader", codec=codec)
    assert (await bridge.load_older("reader")).messages == golden["clientView"]


async def test_the_view_after_every_delivery(bridge: Bridge) -> None:
    await bridge.open("c")
    await bridge.client("watcher", "c", client_id="watcher")
    seen = (await bridge.deliver("c", *deliveries(trace("step-retry-crash")), views=["watcher"]))["watcher"]
    shown = [key for key, _ in itertools.groupby(view.texts[-1] for view in seen)]
    assert shown == [
        "user:Tell me a story",
        "assistant:",
        "assistant:DEAD ",
        "assistant:DEAD attempt",
        "user:Tell me a story",
        "assistant:",
        "assistant:Good ",
        "assistant:Good attempt",
    ]


async def test_a_client_joins_amid_a_stream(bridge: Bridge) -> None:
    changes = deliveries(trace("late-join"))
    appends = [number for number, change in enumerate(changes) if change["action"] == "message.append"]
    await bridge.open("c")
    await bridge.deliver("c", *changes[: appends[1]])
    await bridge.client("watcher", "c", client_id="watcher")
    await bridge.deliver("c", *changes[appends[1] :])
    # The first append came as a full update, with the name and all of the text.
    assert (await bridge.load_older("watcher")).texts == ["user:Stream slowly", "assistant:ABCDE"]


async def test_a_scenario_with_what_each_client_got_and_showed(bridge: Bridge) -> None:
    for name in ("basic-run", "step-retry-crash"):
        golden = trace(name)
        played = await bridge.scenario(name, observer=True)
        assert played.failed == []
        assert played.published == golden["published"]
        assert played.result["clientView"] == golden["clientView"]
        assert len(played.history) == len(golden["history_newest_first"])
        for watched in (played.client("observer"), played.client("user-a")):
            assert [item["deliver"]["action"] for item in watched.seen] == [
                change["action"] for change in deliveries(golden)
            ]
            assert watched.seen[-1]["view"]["messages"] == golden["clientView"]
    assert [len(item["page"]) for item in played.client("user-b").seen] == [len(played.history)]
    with pytest.raises(BridgeError, match="there is no scenario nope"):
        await bridge.scenario("nope")


class Log:
    """Serials by hand, and deliveries of what was published."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge
        self.asks: list[Ask] = []
        self._serials = (f"{n:014}-000@s:000" for n in itertools.count(1))

    async def __call__(self, ask: Ask) -> Any:
        self.asks.append(ask)
        serials = []
        for message in ask.messages:
            serial = next(self._serials)
            serials.append(serial)
            change = {
                **message,
                "serial": serial,
                "version": {"serial": serial},
                "action": "message.create",
                "timestamp": 1,
                "clientId": ask.client_id,
            }
            await self.bridge.deliver(ask.channel, change)
        return {"serials": serials}


async def test_what_a_client_publishes_is_asked_and_its_serials_dictated(bridge: Bridge) -> None:
    log = Log(bridge)
    await bridge.open("c", log)
    await bridge.client("user", "c", client_id="user-a")
    run = await bridge.send("user", "Hello")
    assert [(ask.event, ask.channel, ask.client_id) for ask in log.asks] == [("publish", "c", "user-a")]
    assert [message["data"] for message in log.asks[0].messages] == ["Hello"]
    assert (await bridge.view("user")).texts == ["user:Hello"]
    assert run.invocation["inputEventId"] == run.input_event_id

    waiting = asyncio.create_task(bridge.until("user", lambda view: view.runs and view.runs[0]["status"] == "active"))
    transport = {
        "run-id": "R",
        "run-client-id": "user-a",
        "parent": run.input_codec_message_id,
        "input-codec-message-id": run.input_codec_message_id,
    }
    serial = "00000000000002-000@s:000"
    start = {
        "name": "ai-run-start",
        "extras": {"ai": {"transport": transport}},
        "serial": serial,
        "version": {"serial": serial},
        "action": "message.create",
        "timestamp": 2,
    }
    await bridge.deliver("c", start)
    await waiting
    assert (await bridge.started(run)).run_id == "R"
    await bridge.cancel(run)
    await bridge.cancel("R", client="user")
    assert [ask.messages[0]["name"] for ask in log.asks[1:]] == ["ai-cancel", "ai-cancel"]
    await bridge.lose_continuity("user")
    assert [error["code"] for error in (await bridge.view("user")).errors] == [104006]
    await bridge.close("user")


async def test_a_refused_publish_is_the_clients_error(bridge: Bridge) -> None:
    async def refuse(ask: Ask) -> Any:
        raise Refused("not today", 42910, 429)

    await bridge.open("c", refuse)
    await bridge.open("only-read")
    for channel in ("c", "only-read"):
        await bridge.client(channel, channel, client_id="u")
        with pytest.raises(BridgeError, match=r"40160|missing publish capability|not today"):
            await bridge.send(channel, "Hello")


async def test_a_failed_answer_fails_the_test(bridge_process: BridgeProcess) -> None:
    async def fail(ask: Ask) -> Any:
        raise KeyError("a bug of the test")

    with pytest.raises(ExceptionGroup) as raised:  # noqa: PT012 - leaving the block raises it
        async with Bridge(bridge_process) as bridge:
            await bridge.open("c", fail)
            await bridge.client("u", "c", client_id="u")
            with pytest.raises(BridgeError, match="a bug of the test"):
                await bridge.send("u", "Hello")
    assert isinstance(raised.value.exceptions[0], KeyError)


async def test_bridges_share_a_process_and_nothing_else(bridge: Bridge, bridge_process: BridgeProcess) -> None:
    async with Bridge(bridge_process) as other:
        for one in (bridge, other):
            await one.open("c")
            await one.client("u", "c", client_id="u")
        await bridge.deliver("c", *deliveries(trace("basic-run")))
        assert len((await bridge.view("u")).messages) == 2
        assert (await other.view("u")).messages == []


async def test_errors_carry_the_stack_and_a_dead_node_is_reported() -> None:
    async with Bridge() as bridge:
        with pytest.raises(BridgeError, match=r"(?s)there is no client x.*bridge\.mjs"):
            await bridge.view("x")
        await bridge.open("c")
        await bridge.client("u", "c", client_id="u")
        never = asyncio.create_task(bridge.until("u", lambda view: view.messages))
        await bridge.view("u")
        os.kill(bridge.pid, signal.SIGKILL)
        with pytest.raises(BridgeDied, match="-9"):
            await never
        with pytest.raises(BridgeDied):
            await bridge.view("u")
