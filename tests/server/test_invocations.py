"""What clients publish on the channel of a flow's session, over HTTP: messages, answers, steering and cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from server.kit import application, listening, until
from server.test_streams import Site, places  # noqa: F401 - a fixture
from stepwell.messages import FilePart, TextPart, UserMessage
from stepwell.testing import Reply, ScriptedModel
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Name
from suspension_flows import DeskFlow, talk

pytestmark = pytest.mark.anyio

SESSION = "s1"


class Person:
    """A person's client: says things on the channel, and lets the server answer."""

    def __init__(self, site: Site, session: ClientSession[Any, Any]) -> None:
        self.site = site
        self.session = session

    async def invoke(self, run: Any, **more: Any) -> httpx.Response:
        body = {**run.to_invocation().to_json(), **more}
        return await self.site.client.post(f"/v1/sessions/{SESSION}/invocations", json=body)

    async def say(self, said: Any, **more: Any) -> tuple[Any, httpx.Response]:
        run = await self.session.view.send(self.session.codec.create_user_message(said))
        return run, await self.invoke(run, **more)

    async def cancel(self, **headers: str) -> httpx.Response:
        extras = {"ai": {"transport": {"event-id": "c", **headers}}}
        body = {"messages": [{"name": "ai-cancel", "extras": extras}]}
        return await self.site.client.post(f"/v1/sessions/{SESSION}/inputs", json=body)

    async def settled(self, runs: int) -> list[str]:
        """The texts of the view, once so many runs are over."""
        async with asyncio.timeout(20):
            while len([run for run in self.session.view.runs if run.status not in ("active", "pending")]) < runs:
                await asyncio.sleep(0.005)
        return self.texts

    @property
    def texts(self) -> list[str]:
        return [
            "".join(part.get("text", "") for part in one.message["parts"] if part["type"] == "text")
            for one in self.session.view.messages
        ]


@asynccontextmanager
async def person(site: Site) -> AsyncGenerator[Person]:
    channel = await site.app.conversations.open(SESSION)
    async with ClientSession(channel, UIMessageCodec(), client_id="ana") as session:
        await session.view.load_older(100)
        yield Person(site, session)


@asynccontextmanager
async def site(*script: Any, grace: float = 20.0, default: Any = None, **options: Any) -> AsyncGenerator[Site]:
    from server.kit import TalkFlow

    model = ScriptedModel(script, default=default)
    app = application(model, **{"channels": "memory://", "flows": [TalkFlow], **options})
    async with (
        listening(app, grace=grace) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        yield Site(client, model, app, server)
    model.assert_done()


async def inputs(site: Site) -> list[str]:
    channel = await site.app.conversations.open(SESSION)
    page = await channel.history(limit=200)
    return [item.data for item in reversed(page.items) if item.name == Name.INPUT]


async def test_scenario_a_published_message_wakes_a_turn_and_is_shown_once(places: dict[str, str]) -> None:  # noqa: F811
    async with site("One.", "Two.", "Three.", **places) as s, person(s) as ana:
        run, first = await ana.say("first")
        assert first.status_code == 200, first.text
        assert await ana.settled(1) == ["first", "One."]
        await run.started
        assert run.run_id == first.json()["runId"]
        # From elsewhere, without the channel.
        assert (await s.turn("second", SESSION)).json()["message"] == "Two."
        assert await ana.settled(2) == ["first", "One.", "second", "Two."]
        _, third = await ana.say("third")
        assert third.status_code == 200
        assert await ana.settled(3) == ["first", "One.", "second", "Two.", "third", "Three."]
        assert await inputs(s) == ["first", "second", "third"]
        again = await ana.invoke(run)
        assert again.json() == first.json()
        async with person(s) as late:
            assert late.texts == ana.texts
            assert [run.status for run in late.session.view.runs] == ["complete"] * 3
        document = (await s.client.get(f"/v1/sessions/{SESSION}")).json()
        said = [row["content"] for _, row in document["messages"]["Talk"] if row["role"] == "user"]
        assert said == ["first", "second", "third"]


async def test_an_invocation_that_is_posted_many_times_at_once_is_one_turn() -> None:
    gate = anyio.Event()
    async with site(Reply.text("One.").gated(gate)) as s, person(s) as ana:
        run = await ana.session.view.send(ana.session.codec.create_user_message("first"))
        answers = await asyncio.gather(*(ana.invoke(run) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        gate.set()
        assert await ana.settled(1) == ["first", "One."]


async def test_two_people_at_once_are_both_answered() -> None:
    async with site("One.", "Two.") as s, person(s) as ana, person(s) as ben:
        answers = await asyncio.gather(ana.say("from ana"), ben.say("from ben"))
        assert [response.status_code for _, response in answers] == [200, 200]
        shown = await ana.settled(2)
        assert sorted(shown) == ["One.", "Two.", "from ana", "from ben"]
        assert len(await inputs(s)) == 2
        async with person(s) as late:
            assert late.texts == shown


async def test_files_and_texts_of_a_message_reach_the_flow() -> None:
    async with site("Seen.") as s, person(s) as ana:
        parts = [
            {"type": "text", "text": "look"},
            {"type": "file", "mediaType": "image/png", "url": "data:image/png;base64,QUJD"},
            {"type": "file", "mediaType": "application/pdf", "url": "https://example.org/x.pdf"},
            {"type": "data-mine", "data": {"x": 1}},
        ]
        _, answer = await ana.say({"id": "m1", "role": "user", "parts": parts})
        assert answer.status_code == 200
        await ana.settled(1)
        assert s.model.requests[0].messages[-1].content == (
            TextPart("look"),
            FilePart("image/png", "QUJD", None),
            FilePart("application/pdf", None, "https://example.org/x.pdf"),
        )
        assert len(await inputs(s)) == 4


async def test_edits_and_regenerations_are_refused() -> None:
    async with site("One.") as s, person(s) as ana:
        await ana.say("first")
        await ana.settled(1)
        view = ana.session.view
        asked, replied = view.messages
        for run in (
            await view.regenerate(replied.codec_message_id),
            await view.edit(asked.codec_message_id, ana.session.codec.create_user_message("other")),
        ):
            refused = await ana.invoke(run)
            assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (422, "/inputEventId")
            assert "edits and regenerations" in refused.json()["detail"]
        assert len(s.model.requests) == 1


async def test_what_is_not_there_or_elsewhere_says_so() -> None:
    async with site() as s, person(s) as ana:
        url = f"/v1/sessions/{SESSION}/invocations"
        missing = await s.client.post(url, json={"inputEventId": "nothing", "sessionName": SESSION})
        assert (missing.status_code, missing.json()["code"]) == (504, "input_event_not_found")
        elsewhere = await s.client.post(url, json={"inputEventId": "nothing", "sessionName": "s2"})
        assert elsewhere.json()["errors"][0]["pointer"] == "/sessionName"
        _, unknown = await ana.say("x", agent="Nobody")
        assert (unknown.status_code, unknown.json()["errors"][0]["pointer"]) == (422, "/agent")
        _, blank = await ana.say(" ")
        assert blank.status_code == 422


async def test_a_new_session_asks_for_its_flow_where_there_are_several() -> None:
    from server.kit import FLOWS

    async with site("One.", "Two.", flows=FLOWS) as s, person(s) as ana:
        run, unclear = await ana.say("first")
        assert (unclear.status_code, unclear.json()["errors"][0]["pointer"]) == (422, "/agent")
        assert "TalkFlow" in unclear.json()["detail"]
        assert (await ana.invoke(run, agent="TalkFlow")).status_code == 200
        assert await ana.settled(1) == ["first", "One."]
        _, second = await ana.say("second")  # it is known now
        assert second.status_code == 200
        assert await ana.settled(2) == ["first", "One.", "second", "Two."]
        _, other = await ana.say("third", agent="WorkFlow")
        assert other.status_code == 422


async def test_agents_and_flows_side_by_side() -> None:
    async def agent(run: Any) -> None:
        chunks = [{"type": "text-start", "id": "t"}, {"type": "text-delta", "id": "t", "delta": "By hand."}]
        await run.pipe([*chunks, {"type": "text-end", "id": "t"}])

    async with site("By the flow.", agents={"hand": agent}) as s, person(s) as ana:
        assert (await ana.say("first"))[1].status_code == 200  # a session of no flow is the agent's
        assert await ana.settled(1) == ["first", "By hand."]
        assert (await s.client.get(f"/v1/sessions/{SESSION}")).status_code == 404
        _, flow = await ana.say("second", agent="TalkFlow")
        assert flow.status_code == 200
        assert await ana.settled(2) == ["first", "By hand.", "second", "By the flow."]


async def test_a_verdict_and_a_question_are_answered_on_the_channel(places: dict[str, str]) -> None:  # noqa: F811
    async with site(flows=[DeskFlow], default=talk, **places) as s, person(s) as ana:
        codec = ana.session.codec
        await ana.say("refund 5")
        async with asyncio.timeout(20):
            while not any(run.status == "suspended" for run in ana.session.view.runs):
                await asyncio.sleep(0.005)
        [message] = [one for one in ana.session.view.messages if one.message["role"] == "assistant"]
        [part] = [part for part in message.message["parts"] if part["type"].startswith("tool-")]
        approve = codec.create_tool_approval_response(message.codec_message_id, part["toolCallId"], approved=True)
        run = await ana.session.view.send(approve)
        answered = await ana.invoke(run)
        assert answered.status_code == 200, answered.text
        await ana.settled(1)
        again = await ana.invoke(run)
        assert again.json() == answered.json()
        assert (await ana.say("ask name"))[1].status_code == 200
        async with asyncio.timeout(20):
            while not any(run.status == "suspended" for run in ana.session.view.runs):
                await asyncio.sleep(0.005)
        before = len(await inputs(s))
        _, said = await ana.say("Ada")
        assert said.status_code == 200
        await ana.settled(2)
        assert len(await inputs(s)) == before + 1
        assert ana.texts.count("Ada") == 1
        async with person(s) as late:
            assert late.texts == ana.texts


@pytest.mark.parametrize("by", ["run-id", "input-codec-message-id"])
async def test_a_cancel_on_the_channel_cancels_the_turn(by: str) -> None:
    async with site(Reply.text(["One ", "two."]).stalling(after=1), "Next.") as s, person(s) as ana:
        _, answer = await ana.say("first")
        await s.model.wait_stalled()
        [asked] = [one for one in ana.session.view.messages if one.message["role"] == "user"]
        ids = {"run-id": answer.json()["runId"], "input-codec-message-id": asked.codec_message_id}
        nothing = await ana.cancel(**{by: "another"})
        assert nothing.status_code == 200
        assert s.model.open == 1
        done = await ana.cancel(**{by: ids[by]})
        assert done.status_code == 200
        await ana.settled(1)
        assert [one.status for one in ana.session.view.runs] == ["cancelled"]
        assert (await ana.say("second"))[1].status_code == 200
        assert (await ana.settled(2))[-1] == "Next."


async def test_a_cancel_of_an_input_that_waits_for_its_turn() -> None:
    gate = anyio.Event()
    async with site(Reply.text("One.").gated(gate)) as s, person(s) as ana:
        await ana.say("first")
        second = await ana.session.view.send(ana.session.codec.create_user_message("second"))
        waiting = asyncio.create_task(ana.invoke(second))
        await until(lambda: len(s.app.engine._turns) == 2)
        [*_, asked] = [one for one in ana.session.view.messages if one.message["role"] == "user"]
        assert (await ana.cancel(**{"input-codec-message-id": asked.codec_message_id})).status_code == 200
        assert (await waiting).status_code == 200
        gate.set()
        await until(lambda: not s.app.engine._turns)
        assert len(s.model.requests) == 1


async def test_steering_that_is_published_is_taken_up_and_shown_once() -> None:
    from server.kit import WorkFlow

    gate = anyio.Event()
    calls = Reply.tool_call("count", {"number": 1}).gated(gate)
    async with site(calls, "Counted, and heard.", flows=[WorkFlow]) as s, person(s) as ana:
        run, _ = await ana.say("count")
        await until(lambda: s.model.open)
        await run.started
        run.steer(ana.session.codec.create_user_message("faster"))
        await until(lambda: len(ana.texts) >= 2)
        channel = await s.app.conversations.open(SESSION)
        newest = (await channel.history(limit=1)).items[0]
        event = newest.extras["ai"]["transport"]["event-id"]
        body = {"inputEventId": event, "sessionName": SESSION}
        invoking = asyncio.create_task(s.client.post(f"/v1/sessions/{SESSION}/invocations", json=body))
        await until(lambda: len(s.app.engine._turns) == 2)
        gate.set()
        assert (await invoking).json()["runId"] == run.run_id
        await ana.settled(1)
        assert await inputs(s) == ["count", "faster"]
        assert ana.texts.count("faster") == 1
        said = [one.text for one in s.model.requests[1].messages if isinstance(one, UserMessage)]
        assert said == ["count", "faster"]


async def test_a_published_message_whose_server_stopped_is_answered_by_the_next_and_shown_once(tmp_path: Path) -> None:
    where = {"store": f"sqlite:///{tmp_path}/s.db", "channels": f"sqlite:///{tmp_path}/s.db"}
    async with site(Reply.text("never").stalling(), grace=0.0, **where) as s, person(s) as ana:
        await ana.say("first")
        await s.model.wait_stalled()
    async with site("One.", **where) as s, person(s) as ana:
        assert await ana.settled(1) == ["first", "One."]
        assert await inputs(s) == ["first"]


async def test_what_continues_an_ended_session_says_the_message_on_its_own_channel() -> None:
    from server.kit import WorkFlow

    async with site(Reply.tool_call("leave"), "Anew.", flows=[WorkFlow]) as s, person(s) as ana:
        await ana.say("leave")
        await ana.settled(1)
        _, second = await ana.say("more")
        assert second.status_code == 200
        await until(lambda: not s.app.engine._turns)
        sessions = (await s.client.get("/v1/sessions")).json()["sessions"]
        [new] = [one["id"] for one in sessions if one["id"] != SESSION]
        page = await (await s.app.conversations.open(new)).history(limit=50)
        assert [item.data for item in page.items if item.name == Name.INPUT] == ["more"]
