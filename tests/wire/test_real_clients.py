"""Our client and the unmodified JavaScript client, side by side: the same after every mutation, from every moment on.

In all 19 scenarios, played by our agent on a channel of the product, and by the JavaScript agent there. Somebody joins
before the first mutation and behind each; what our client is given in such a place, the JavaScript client is given too.
Nobody is exempt: what our agent does otherwise than the JavaScript one (docs/decisions/0009, and `EXPECTED` in
`test_agent_scenarios.py`) both clients have to read alike as well.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_kit import IDS, Operation, Recorder
from agent_scenarios import SCENARIOS, stage_of
from stepwell.channels import MemoryChannels
from transport_kit import TRACES, trace
from wire.audience import Audience, Seat, assert_alike, audience, shown_in_javascript
from wire.bridge import Bridge
from wire.feed import feed

pytestmark = pytest.mark.anyio

LOST_THERE = "append-recovery"
"""What the JavaScript agent lost is in the text that it then replaces, and only who joins later sees that. Ours loses
nothing: everybody sees what later joiners see there."""


SEEN_UP_TO = {"all-chunks": 36}
"""Where the trace's view was read before the scenario was over: operations until then."""


def mutations(record: list[Operation]) -> int:
    return sum(len(one["messages"]) if one["op"] == "publish" else 1 for one in record)


async def assert_all_alike(bridge: Bridge, watching: Audience, name: str, record: list[Operation]) -> list[Any]:
    """What each seat shows in the end, when both clients were compared in it."""
    assert len(watching.seats[0].rows) == mutations(record), "one by one, none left out"
    assert len(watching.seats) == 1 + len(record), "one from the beginning on, one behind each write"
    codec = "tiny" if name == "custom-codec" else "ui"
    ends: list[Any] = []
    for joined, seat in enumerate(watching.seats):
        shown, newest = await shown_in_javascript(bridge, seat, codec)
        for place, (mine, theirs) in enumerate(zip(seat.shown, shown, strict=True)):
            assert_alike(mine, theirs, f"joined behind write {joined}, after row {place}")
        assert_alike(seat.newest, newest, f"joined behind write {joined}, at the end")
        ends.append({key: seat.newest[key] for key in ("messages", "runs")})
    return ends


def assert_as_in_the_trace(seat: Seat, record: list[Operation], name: str, view: str = "clientView") -> None:
    """Up to ids: what the trace says of who was there from the beginning on."""
    recorded, shown = trace(name), seat.shown[mutations(record[: SEEN_UP_TO.get(name)])]
    if view in recorded:
        assert without_ids(shown["messages"]) == without_ids(recorded[view])
    if "steps" in recorded:
        assert without_ids(shown["runs"][-1]["steps"]) == without_ids(recorded["steps"])


def without_ids(said: Any) -> Any:
    names: dict[str, str] = {}
    text = json.dumps(said, sort_keys=True)
    return json.loads(IDS.sub(lambda found: names.setdefault(found[0], f"id-{len(names)}"), text))


@pytest.mark.parametrize("name", TRACES)
async def test_what_our_agent_says_is_read_alike(name: str, bridge: Bridge) -> None:
    stage = stage_of(name)
    channel = await stage.channels.open("conversations:golden")
    async with audience(channel, stage.codec) as watching:
        stage.audience = watching
        await SCENARIOS[name](stage)
    first, *later = await assert_all_alike(bridge, watching, name, stage.record)
    assert all(end == first for end in later)
    view = "lateView" if name == LOST_THERE else "clientView"
    assert_as_in_the_trace(watching.seats[0], stage.record, name, view)


@pytest.mark.parametrize("name", TRACES)
async def test_what_the_javascript_agent_says_is_read_alike(name: str, bridge: Bridge) -> None:
    channel = await MemoryChannels().open("conversations:golden")
    record: list[Operation] = []
    async with (
        audience(channel, stage_of(name).codec) as watching,
        feed(bridge, Recorder(channel, "", record, watching)),
    ):
        played = await bridge.scenario(name, channel=channel.name)
    assert "scenario threw" not in [check["label"] for check in played.failed]
    first, *later = await assert_all_alike(bridge, watching, name, record)
    assert name == LOST_THERE or all(end == first for end in later)
    assert_as_in_the_trace(watching.seats[0], record, name)
