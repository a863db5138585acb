"""The unmodified JavaScript client holds a conversation with the hotel example: it speaks, approves, cancels, looks on.

On the way a candidate is rejected after its tokens, the provider breaks off amid a reply, a booking waits for an
approval, and a reply is cancelled. A client of this package and the JavaScript one show the same after every mutation,
from the beginning, from the midst of each of these, and from the end.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from stepwell import Engine, ToolContext, tool
from stepwell.channels import MemoryChannels
from stepwell.testing import Call, Reply, ScriptedModel
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Channel, H, Name, session_channel, transport_headers
from wire.audience import assert_alike, audience, shown_in_javascript
from wire.bridge import Bridge, RunHandle, View
from wire.feed import feed

pytestmark = pytest.mark.anyio

SESSION = "hotel-in-javascript"
HOTEL = Path(__file__).parents[2] / "examples" / "hotel"

call = Reply.tool_call


@pytest.fixture
def hotel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, whose booking has to be approved."""
    monkeypatch.setattr(sys, "path", [str(HOTEL), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "hotel"]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("hotel")
    book = importlib.import_module("hotel.steps").BookStep
    confirm = book.confirm_booking

    @tool(effect=True, on_unknown="retry", approval=True)
    async def confirm_booking(self: Any, ctx: ToolContext) -> Any:
        """Book the hotel."""
        return await confirm(self, ctx)

    book.confirm_booking = confirm_booking
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "hotel"]:
        sys.modules.pop(name)


class Guest:
    """The JavaScript client, and an agent that is woken for what it says."""

    def __init__(self, bridge: Bridge, engine: Engine, channel: Channel) -> None:
        self.bridge, self.engine, self.channel = bridge, engine, channel

    async def sends(self, text: str) -> RunHandle:
        """Say something; the agent takes it up."""
        run = await self.bridge.send("guest", text)
        assert run.input_event_id is not None
        await self.engine.invoke(SESSION, run.input_event_id, flow="HotelFlow")
        return await self.bridge.started(run)

    async def sees(self, text: str) -> None:
        """Wait until the newest message ends so, as text."""
        await self.bridge.until("guest", lambda view: view.texts and view.texts[-1].endswith(text))

    async def is_answered(self, run: RunHandle, text: str, status: str = "complete") -> View:
        return await self.bridge.until(
            "guest",
            lambda view: status_of(view, run.run_id) == status and view.texts[-1].endswith(text),
        )


def status_of(view: View, run_id: str | None) -> str | None:
    return next((run["status"] for run in view.runs if run["runId"] == run_id), None)


def tool_part(view: View, state: str) -> dict[str, Any] | None:
    parts = [part for entry in view.messages for part in entry["message"]["parts"]]
    return next((part for part in parts if part.get("state") == state), None)


async def test_the_javascript_client_books_a_hotel(hotel: Any, bridge: Bridge) -> None:
    rejected, broken = anyio.Event(), anyio.Event()
    trip = {"city": "Lisbon", "arrival": "2027-05-12", "departure": "2027-05-15", "guests": 2}
    script = [
        Reply.text(["Wel", "come!"]),
        # Cut off within its call: rejected, although it was on every screen.
        Reply.truncated("Let me note that", calls=[Call("plan_trip", raw='{"ci', ended=False)]).gated(
            rejected, after=4
        ),
        call("plan_trip", trip, id="plan"),
        Reply.text("Lisbon it").gated(broken, after=2).failing(status=503),
        "All noted.",
        call("show_hotels", id="show"),
        call("choose_hotel", {"hotel": "1"}, id="choose"),
        "Your name?",
        call("give_contact", {"name": "Ada Lovelace", "email": "ada@example.org"}, id="contact"),
        call("confirm_booking", id="confirm"),
        Reply.text(["You are ", "very "]).gated(anyio.Event(), after=2),
        "Goodbye.",
    ]
    channels = MemoryChannels()
    channel = await channels.open(session_channel(SESSION))
    engine = Engine(
        [hotel.HotelFlow], models={"offline": ScriptedModel(script)}, channels=channels, recovery_interval=None
    )
    async with audience(channel, UIMessageCodec) as watching, engine, feed(bridge, channel):
        await bridge.client("guest", channel.name, client_id="guest")
        guest = Guest(bridge, engine, channel)
        await guest.is_answered(await guest.sends("Hello"), "Welcome!")

        run = await guest.sends("Lisbon, 12 to 15 May, two of us")
        await guest.sees("Let me note that")
        await watching.join()
        rejected.set()
        await guest.sees("Lisbon it")
        await watching.join()
        broken.set()
        view = await guest.is_answered(run, "All noted.")
        assert "Let me note that" not in str(view.messages)
        assert "Lisbon it" not in str(view.messages)

        view = await guest.is_answered(await guest.sends("show me"), "")
        assert "Oriente Suites" in view.texts[-1]
        await guest.is_answered(await guest.sends("the first"), "Your name?")
        run = await guest.sends("Ada Lovelace, ada@example.org, please book it")
        view = await bridge.until("guest", lambda view: status_of(view, run.run_id) == "suspended")
        await watching.join()
        asked = tool_part(view, "approval-requested")
        assert asked is not None
        assert asked["type"] == "tool-confirm_booking"
        assert not importlib.import_module("hotel.desk").BOOKED
        verdict = await bridge.send(
            "guest",
            inputs=[
                {
                    "factory": "createToolApprovalResponse",
                    "args": [view.messages[-1]["codecMessageId"], {"toolCallId": "confirm", "approved": True}],
                }
            ],
            options={"runId": run.run_id},
        )
        assert verdict.input_event_id is not None
        await engine.invoke(SESSION, verdict.input_event_id)
        view = await guest.is_answered(run, "Is there anything else?")
        assert len(importlib.import_module("hotel.desk").BOOKED) == 1

        run = await guest.sends("thank you")
        await guest.sees("You are very ")
        await watching.join()
        await bridge.cancel(run)
        await engine.cancel(SESSION, **await asked_to_cancel(channel))
        await guest.is_answered(run, "You are very ", "cancelled")
        view = await guest.is_answered(await guest.sends("bye"), "Goodbye.")
        await bridge.client("late", channel.name, client_id="late")
        assert (await bridge.load_older("late", 1_000)).messages == view.messages
        end = (await channel.history(limit=1)).items[0].version
        for seat in watching.seats:
            await seat.until(end) if seat.rows or seat is watching.seats[0] else None
        for client in ("guest", "late"):
            await bridge.close(client)
    for place, seat in enumerate(watching.seats):
        shown, newest = await shown_in_javascript(bridge, seat, "ui")
        for row, (mine, theirs) in enumerate(zip(seat.shown, shown, strict=True)):
            assert_alike(mine, theirs, f"seat {place}, after row {row}")
        assert_alike(seat.newest, newest, f"seat {place}, at the end")
        assert seat.newest["messages"] == view.messages


async def asked_to_cancel(channel: Channel) -> dict[str, str | None]:
    """What the client on the channel asks to cancel, as a server tells the engine."""
    page = await channel.history(limit=10)
    headers = next(transport_headers(one.extras) for one in page.items if one.name == Name.CANCEL)
    return {"run_id": headers.get(H.RUN_ID), "input_id": headers.get(H.INPUT_CODEC_MESSAGE_ID)}
