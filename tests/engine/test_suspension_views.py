"""What clients see of a turn that waits, and how what they say on the channel answers it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from publication_kit import shown
from stepwell import Engine, TurnResult
from stepwell.channels import MemoryChannels
from stepwell.errors import InputEventNotFoundError, InvalidInputError, MisuseError, UnknownRequestError
from stepwell.sessions import MemoryStore
from stepwell.testing import FakeClock, ScriptedModel
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec, create_tool_result_fork
from stepwell.wire import session_channel
from suspension_flows import DeskFlow, DeskStep, talk

pytestmark = pytest.mark.anyio


class Desk:
    """An engine with channels, and clients that watch a session."""

    def __init__(self) -> None:
        self.clock = FakeClock(auto_advance=True)
        self.store = MemoryStore(self.clock)
        self.channels = MemoryChannels(clock=self.clock)
        self.engine = self.another()
        self.session = ""

    def another(self) -> Engine:
        model = ScriptedModel(default=talk)
        model.clock = self.clock
        return Engine(
            [DeskFlow], models={"scripted": model}, store=self.store, clock=self.clock, channels=self.channels,
            recovery_interval=None,
        )  # fmt: skip

    async def say(self, text: str, **options: Any) -> TurnResult:
        result = await self.engine.run("DeskFlow", text, session_id=self.session or None, **options)
        self.session = result.session_id
        return result

    async def answer(self, request: str, value: Any) -> TurnResult:
        return await self.engine.answer(self.session, request, value)

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[ClientSession[Any, Any]]:
        channel = await self.channels.open(session_channel(self.session))
        async with ClientSession(channel, UIMessageCodec(), client_id="ana", clock=self.clock) as client:
            while client.view.has_older:
                await client.view.load_older()
            yield client

    async def shown(self) -> list[list[Any]]:
        """The messages of a client that comes now."""
        async with self.client() as client:
            return shown(client)

    async def names(self) -> list[str]:
        """Of all on the channel but outputs, in order."""
        channel = await self.channels.open(session_channel(self.session))
        page = await channel.history(limit=1000)
        return [str(one.name) for one in reversed(page.items) if one.name != "ai-output"]


@pytest.fixture
async def desk() -> AsyncGenerator[Desk]:
    DeskStep.ran = []
    desk = Desk()
    async with desk.engine:
        yield desk


def status(client: ClientSession[Any, Any], result: TurnResult) -> str | None:
    run = client.view.run(result.run_id)
    return run.status if run else None


async def test_an_approval_is_asked_for_within_the_replys_own_step(desk: Desk) -> None:
    waits = await desk.say("refund 5")
    request = waits.pending[0].id
    async with desk.client() as client:
        asked = ("refund", "approval-requested", {"approval": {"id": request}})
        assert shown(client) == [["user", "refund 5"], ["assistant", "|", asked]]
        assert status(client, waits) == "suspended"
        done = await desk.answer(request, {"approved": True, "reason": "kind"})
        await desk.clock.settle()
        after = [
            ["user", "refund 5"],
            ["assistant", "|", ("refund", "output-available", {"output": "refunded 5"})],
            ["assistant", "|", "|", "refund=refunded 5"],
        ]
        assert shown(client) == await desk.shown() == after
        assert status(client, done) == "complete"
        assert [step.status for step in client.view.run(done.run_id).steps] == ["complete"] * 4  # type: ignore[union-attr]
    assert await desk.names() == [
        "ai-input", "ai-run-start", "ai-step-start", "ai-step-end", "ai-step-start", "ai-step-end", "ai-run-suspend",
        "ai-input", "ai-run-resume", "ai-step-start", "ai-step-end", "ai-step-start", "ai-step-end", "ai-run-end",
    ]  # fmt: skip
    await desk.say("look b")
    assert (await desk.shown())[3:] == [
        ["user", "look b"],
        ["assistant", "|", ("look", "output-available", {"output": "saw b"}), "|", "|", "look=saw b"],
    ]


async def test_the_message_that_waits_ends_as_such_for_clients_that_read_chunks(desk: Desk) -> None:
    await desk.say("refund 5")
    channel = await desk.channels.open(session_channel(desk.session))
    page = await channel.history(limit=1000)
    kinds = [(one.extras or {})["ai"]["codec"] for one in reversed(page.items) if one.name == "ai-output"]
    said = [(one["kind"], one.get("finishReason")) for one in kinds if not one["kind"].startswith("data-")]
    assert said[-2:] == [("finish-step", None), ("finish", "tool-calls")]
    assert ("tool-approval-request", None) in said


async def test_a_denial_is_seen_as_one(desk: Desk) -> None:
    waits = await desk.say("refund 5, look a")
    await desk.answer(waits.pending[0].id, False)
    denied = ("refund", "output-denied", {"approval": {"id": "", "approved": False}})
    assert (await desk.shown())[1:] == [
        ["assistant", "|", denied, ("look", "output-available", {"output": "saw a"}), "|"],
        ["assistant", "|", "|", "refund={'approved': False}; look=saw a"],
    ]


async def test_a_clients_tool_has_its_input_and_then_the_clients_output(desk: Desk) -> None:
    waits = await desk.say("locate")
    assert (await desk.shown())[1] == ["assistant", "|", ("locate", "input-available", {})]
    await desk.answer(waits.pending[0].id, {"at": 1})
    assert (await desk.shown())[1] == ["assistant", "|", ("locate", "output-available", {"output": {"at": 1}})]


async def test_a_question_is_shown_and_answered_by_a_message(desk: Desk) -> None:
    waits = await desk.say("ask red")
    request = waits.pending[0].id
    asks = ("data-stepwell-request", request, {"call": "c-0", "kind": "question", "payload": {"text": "red"}})
    assert (await desk.shown())[1] == ["assistant", "|", ("ask", "input-available", {}), "|", asks]
    await desk.say("dark")
    answered = ("ask", "output-available", {"output": {"answered": "dark"}})
    assert (await desk.shown())[1:] == [
        ["assistant", "|", answered, "|", asks],
        ["user", "dark"],
        ["assistant", "|", "|", "ask={'answered': 'dark'}"],
    ]


async def test_what_is_abandoned_is_closed_as_cancelled(desk: Desk) -> None:
    waits = await desk.say("refund 5")
    done = await desk.say("look b", on_suspended="abandon")
    async with desk.client() as client:
        assert (status(client, waits), status(client, done)) == ("cancelled", "complete")
        text = "The turn ended before the answer came that this call waited for."
        assert shown(client)[1][2] == ("refund", "output-error", {"errorText": text})
        assert [message[0] for message in shown(client)] == ["user", "assistant", "user", "assistant"]


async def test_nobody_is_asked_about_arguments_that_are_wrong(desk: Desk) -> None:
    done = await desk.say("refund all")
    assert (done.status, DeskStep.ran) == ("running", [])
    call = (await desk.shown())[1][2]
    assert call[:2] == ("refund", "output-error")
    assert "approval" not in call[2]


async def test_a_client_answers_on_the_channel(desk: Desk) -> None:
    waits = await desk.say("refund 5, locate")
    async with desk.client() as client:
        codec = UIMessageCodec()
        message = client.view.messages[-1].codec_message_id
        sent = await client.view.send(
            codec.create_tool_approval_response(message, "c-0", approved=True), run_id=waits.run_id
        )
        part = await desk.engine.answer_input(desk.session, sent.input_event_id)
        assert [one.tool for one in part.pending] == ["locate"]
        again = await desk.engine.answer_input(desk.session, sent.input_event_id)
        assert again == part
        sent = await client.view.send(codec.create_tool_result(message, "c-1", {"at": 1}), run_id=waits.run_id)
        done = await desk.engine.answer_input(desk.session, sent.input_event_id)
        await desk.clock.settle()
        assert (done.run_id, done.message) == (waits.run_id, "refund=refunded 5; locate={'at': 1}")
        assert await desk.engine.answer_input(desk.session, sent.input_event_id) == done
        assert shown(client)[1][2:4] == [
            ("refund", "output-available", {"output": "refunded 5"}),
            ("locate", "output-available", {"output": {"at": 1}}),
        ]
        assert shown(client) == await desk.shown()
        await sent.started
        assert sent.run_id == waits.run_id
    assert (await desk.names()).count("ai-input") == 3


async def test_a_client_goes_on_in_a_run_of_its_own(desk: Desk) -> None:
    """What `useChat` does with a tool's output: a copy of the conversation, and a run that follows it."""
    waits = await desk.say("locate")
    async with desk.client() as client:
        entries = [entry for entry in client.view.messages if entry.message["role"] == "assistant"]
        fork = create_tool_result_fork(entries, "c-0", output={"at": 1})
        parent = client.view.messages[0].codec_message_id
        sent = await client.view.send(fork, role="assistant", parent=parent, supersedes=waits.run_id)
        done = await desk.engine.answer_input(desk.session, sent.input_event_id)
        await desk.clock.settle()
        assert done.run_id != waits.run_id
        assert (
            shown(client)
            == await desk.shown()
            == [
                ["user", "locate"],
                ["assistant", "|", ("locate", "output-available", {"output": {"at": 1}})],
                ["assistant", "|", "|", "locate={'at': 1}"],
            ]
        )
        assert status(client, done) == "complete"
    await desk.say("look b")
    assert [message[:2] for message in await desk.shown()][3:] == [["user", "look b"], ["assistant", "|"]]


async def test_inputs_that_answer_nothing_are_refused(desk: Desk) -> None:
    waits = await desk.say("refund 5")
    async with desk.client() as client:
        with pytest.raises(InputEventNotFoundError):
            await desk.engine.answer_input(desk.session, "nothing")
        said = await client.view.send(UIMessageCodec().create_user_message("hello"))
        with pytest.raises(InvalidInputError, match="answers no call"):
            await desk.engine.answer_input(desk.session, said.input_event_id)
        stray = UIMessageCodec().create_tool_result("m", "c-9", 1)
        sent = await client.view.send(stray, run_id=waits.run_id)
        with pytest.raises(UnknownRequestError):
            await desk.engine.answer_input(desk.session, sent.input_event_id)
    async with Engine(
        [DeskFlow], models={"scripted": ScriptedModel(default=talk)}, store=desk.store, clock=desk.clock
    ) as silent:
        with pytest.raises(MisuseError):
            await silent.answer_input(desk.session, "any")
