"""Channels over HTTP: agents that are invoked, inputs, and both kinds of event streams, on a real server."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from server.kit import Event, events_of, listening, served, until_event
from stepwell.channels import MemoryChannels
from stepwell.channels.memory import MemoryChannel
from stepwell.errors import ChannelBusyError
from stepwell.server import create_app
from stepwell.transport import AgentRun, ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Cursor, Subscription

pytestmark = pytest.mark.anyio

SESSION = "s1"


@asynccontextmanager
async def watching(client: httpx.AsyncClient, query: str = "", **headers: str) -> AsyncGenerator[AsyncIterator[Event]]:
    async with client.stream("GET", f"/v1/sessions/{SESSION}/events{query}", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield events_of(response)


class Conversation:
    """What a view stream says, put together as its reader would."""

    def __init__(self) -> None:
        self.messages: dict[str, Any] = {}
        self.order: list[str] = []
        self.runs: dict[str, Any] = {}

    def take(self, event: Event) -> "Conversation":
        data = event["data"]
        if event["event"] == "snapshot":
            self.__init__()
        for one in data.get("messages", ()):
            self.messages[one["codecMessageId"]] = one["message"]
        self.order = data.get(
            "order", [one["codecMessageId"] for one in data["messages"]] if not self.order else self.order
        )
        self.runs |= {run["runId"]: run for run in data.get("runs", ())}
        return self

    @property
    def texts(self) -> list[str]:
        return ["".join(part.get("text", "") for part in self.messages[key]["parts"]) for key in self.order]


def chunks(*pieces: str) -> list[dict[str, Any]]:
    deltas = [{"type": "text-delta", "id": "t", "delta": piece} for piece in pieces]
    return [{"type": "text-start", "id": "t"}, *deltas, {"type": "text-end", "id": "t"}]


class Site:
    """A server with one agent, and what the tests do at it."""

    def __init__(self, client: httpx.AsyncClient, channels: MemoryChannels) -> None:
        self.client = client
        self.channels = channels
        self.gate = asyncio.Event()
        self.calls: list[str] = []

    async def agent(self, run: AgentRun[Any]) -> None:
        said = run.messages[-1]["parts"][0]["text"]
        self.calls.append(said)
        if said == "break":
            raise RuntimeError("secret text")
        if said == "wait":

            async def endless() -> AsyncIterator[Any]:
                for chunk in chunks("one ")[:2]:
                    yield chunk
                await self.gate.wait()

            await run.pipe(endless())
        elif said == "suspend":
            await run.suspend()
        else:
            await run.pipe(chunks("You said ", said))

    @asynccontextmanager
    async def client_session(self) -> AsyncGenerator[ClientSession[Any, Any]]:
        channel = await self.channels.open(SESSION)
        async with ClientSession(channel, UIMessageCodec(), client_id="ana") as session:
            yield session

    async def say(self, session: ClientSession[Any, Any], text: str) -> tuple[Any, httpx.Response]:
        run = await session.view.send(session.codec.create_user_message(text))
        response = await self.client.post(f"/v1/sessions/{SESSION}/invocations", json=run.to_invocation().to_json())
        return run, response


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    channels = MemoryChannels()
    async with httpx.AsyncClient(timeout=20) as client:
        site = Site(client, channels)
        app = create_app(agents=site.agent, channels=channels)
        async with listening(app) as server:
            client.base_url = httpx.URL(server.url)
            yield site


async def test_an_input_is_answered_and_watched(site: Site) -> None:
    async with site.client_session() as session, watching(site.client, "?view=1") as events:
        conversation = Conversation()
        conversation.take((await until_event(events, lambda event: event["event"] == "snapshot"))[-1])
        assert conversation.texts == []
        run, response = await site.say(session, "hi")
        assert response.status_code == 200
        await until_event(
            events,
            lambda event: conversation.take(event).runs.get(response.json()["runId"], {}).get("status") == "complete",
        )
        assert conversation.texts == ["hi", "You said hi"]
        [status] = [one["status"] for one in conversation.runs.values()]
        assert status == "complete"
        await run.started
        assert run.run_id == response.json()["runId"]
    async with watching(site.client, "?view=1") as events:
        late = Conversation().take(await anext(events))
        assert late.texts == ["hi", "You said hi"]
        assert late.order == conversation.order


async def test_the_same_invocation_again_is_the_same_run(site: Site) -> None:
    async with site.client_session() as session:
        run, first = await site.say(session, "wait")
        again = await site.client.post(f"/v1/sessions/{SESSION}/invocations", json=run.to_invocation().to_json())
        assert again.json() == first.json()
        await run.cancel()
        async with watching(site.client, "?history=1") as events:
            await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
        after = await site.client.post(f"/v1/sessions/{SESSION}/invocations", json=run.to_invocation().to_json())
        assert after.json() == first.json()
        assert site.calls == ["wait"]


async def test_the_log_is_streamed_and_continued_from_any_event(site: Site) -> None:
    async with watching(site.client) as events:
        [ready] = await until_event(events, lambda event: event["event"] == "ready")
        async with site.client_session() as session:
            await site.say(session, "hi")
        seen = await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
    names = [event["data"].get("name") for event in seen if event["data"].get("name")]
    assert names[:3] == ["ai-input", "ai-run-start", "ai-step-start"]
    assert names[-2:] == ["ai-step-end", "ai-run-end"]
    assert seen[0]["data"]["clientId"] == "ana"
    for place, event in enumerate([ready, *seen]):
        async with watching(site.client, **{"Last-Event-ID": event["id"]}) as events:
            assert (await anext(events))["event"] == "ready"
            if place < len(seen):
                rest = await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
                assert rest[-1]["id"] == seen[-1]["id"]
    async with watching(site.client, f"?after={ready['id']}") as events:
        again = await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
    async with watching(site.client, "?history=1") as events:
        whole = await until_event(events, lambda event: event["event"] == "ready")
    serials = sorted({event["data"]["serial"] for event in seen})
    assert sorted({event["data"]["serial"] for event in again if event["event"] == "message"}) == serials
    assert [event["data"]["serial"] for event in whole[:-1]] == serials


async def test_a_deleted_channel_is_a_gap(site: Site) -> None:
    async with watching(site.client) as events:
        await anext(events)
        async with site.client_session() as session:
            await site.say(session, "hi")
        await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
        await site.channels.delete(SESSION)
        [*_, gap] = await until_event(events, lambda event: event["event"] == "gap")
        assert (gap["data"], gap.get("id")) == ({}, None)


async def test_a_client_publishes_inputs_and_cancels(site: Site) -> None:
    codec = UIMessageCodec()
    headers = {"event-id": "e-1", "codec-message-id": "m-1", "run-client-id": "ben"}
    [message] = codec.encode_input(codec.create_user_message("wait"), headers)
    body = {"name": message.name, "data": message.data, "extras": message.extras, "clientId": "ben", "id": "k"}
    said = await site.client.post(f"/v1/sessions/{SESSION}/inputs", json={"messages": [body]})
    again = await site.client.post(f"/v1/sessions/{SESSION}/inputs", json={"messages": [body]})
    assert said.json() == again.json()
    invocation = {"inputEventId": "e-1", "sessionName": SESSION, "trigger": "anything of the application's"}
    started = await site.client.post(f"/v1/sessions/{SESSION}/invocations", json=invocation)
    run_id = started.json()["runId"]
    async with watching(site.client, "?history=1") as events:
        cancel = {"ai": {"transport": {"event-id": "e-2", "run-id": run_id}}}
        done = await site.client.post(
            f"/v1/sessions/{SESSION}/inputs", json={"messages": [{"name": "ai-cancel", "extras": cancel}]}
        )
        assert len(done.json()["serials"]) == 1
        [*_, end] = await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
    assert end["data"]["extras"]["ai"]["transport"]["run-reason"] == "cancelled"


async def test_an_agent_that_raises_ends_its_run_with_an_error(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async with site.client_session() as session, watching(site.client) as events:
        _, response = await site.say(session, "break")
        assert response.status_code == 200
        [*_, end] = await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
    transport = end["data"]["extras"]["ai"]["transport"]
    assert (transport["run-reason"], transport.get("error-code")) == ("error", "104008")
    assert "secret text" not in json.dumps(transport) + caplog.text
    assert "RuntimeError" in caplog.text


async def test_a_suspended_run_stays_suspended(site: Site) -> None:
    async with site.client_session() as session, watching(site.client, "?view=1") as events:
        conversation = Conversation()
        await site.say(session, "suspend")
        await until_event(
            events,
            lambda event: [run["status"] for run in conversation.take(event).runs.values()] == ["suspended"],
        )


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("invocations", {"inputEventId": "e", "sessionName": "other"}, 422, "invalid_input"),
        ("invocations", {"inputEventId": "", "sessionName": SESSION}, 422, "invalid_input"),
        ("invocations", {"sessionName": SESSION}, 422, "invalid_input"),
        ("invocations", {"inputEventId": "e", "sessionName": SESSION, "agent": "none"}, 422, "invalid_input"),
        ("inputs", {"messages": []}, 422, "invalid_input"),
        ("inputs", {"messages": [{"name": "ai-run-end"}]}, 422, "invalid_input"),
        ("inputs", {"messages": [{"name": "ai-input", "data": 5}]}, 422, "invalid_input"),
        ("inputs", {"messages": [{"name": "ai-input", "unknown": 5}]}, 422, "invalid_input"),
    ],
)
async def test_bad_requests_say_what_is_wrong(site: Site, path: str, body: Any, status: int, code: str) -> None:
    response = await site.client.post(f"/v1/sessions/{SESSION}/{path}", json=body)
    assert (response.status_code, response.json()["code"]) == (status, code)
    async with watching(site.client, "?history=1") as events:
        assert (await anext(events))["event"] == "ready"


async def test_a_wrong_cursor_is_a_problem_document(site: Site) -> None:
    response = await site.client.get(f"/v1/sessions/{SESSION}/events?after=nonsense")
    assert (response.status_code, response.json()["code"]) == (422, "invalid_input")
    response = await site.client.get(f"/v1/sessions/{SESSION}/events?view=2")
    assert response.status_code == 422
    response = await site.client.head(f"/v1/sessions/{SESSION}/events")
    assert (response.status_code, response.content) == (200, b"")


async def test_agents_are_chosen_by_name() -> None:
    seen: list[str] = []

    async def one(run: AgentRun[Any]) -> None:
        seen.append("one")

    async def two(run: AgentRun[Any]) -> None:
        seen.append("two")

    channels = MemoryChannels()
    app = create_app(agents={"one": one, "two": two}, channels=channels, channel_prefix="chats")
    async with listening(app) as server, httpx.AsyncClient(base_url=server.url) as client:
        async with ClientSession(await channels.open(f"chats:{SESSION}"), UIMessageCodec()) as session:
            run = await session.view.send(session.codec.create_user_message("hi"))
            body = run.to_invocation().to_json()
            unclear = await client.post(f"/v1/sessions/{SESSION}/invocations", json=body)
            assert unclear.status_code == 422
            assert "one, two" in unclear.json()["detail"]
            done = await client.post(f"/v1/sessions/{SESSION}/invocations", json={**body, "agent": "two"})
            assert done.status_code == 200
    assert seen == ["two"]


async def test_a_server_without_channels_says_so() -> None:

    async with served() as site:
        response = await site.client.get(f"/v1/sessions/{SESSION}/events")
        assert (response.status_code, response.json()["code"]) == (404, "no_channels")


async def test_a_server_that_stops_lets_its_watchers_go_and_leaves_runs_open() -> None:
    channels = MemoryChannels()
    started = asyncio.Event()

    async def agent(run: AgentRun[Any]) -> None:
        started.set()
        await asyncio.Event().wait()

    app = create_app(agents=agent, channels=channels)
    async with httpx.AsyncClient() as client:
        async with listening(app, grace=0.0) as server:
            client.base_url = httpx.URL(server.url)
            async with ClientSession(await channels.open(SESSION), UIMessageCodec()) as session:
                run = await session.view.send(session.codec.create_user_message("hi"))
                await client.post(f"/v1/sessions/{SESSION}/invocations", json=run.to_invocation().to_json())
                await started.wait()
            stream = client.stream("GET", f"/v1/sessions/{SESSION}/events?view=1")
            response = await stream.__aenter__()
            events = events_of(response)
            assert (await anext(events))["event"] == "snapshot"
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        await stream.__aexit__(None, None, None)
    async with ClientSession(await channels.open(SESSION), UIMessageCodec()) as session:
        await session.view.load_older()
        assert [one.status for one in session.view.runs] == ["active"]


class WaitingChannels(MemoryChannels):
    """Channels that let nobody read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()

    async def open(self, name: str) -> MemoryChannel:
        channel = await super().open(name)

        @asynccontextmanager
        async def subscribe(*, after: Cursor | None = None) -> AsyncGenerator[Subscription]:
            self.asked.set()
            await asyncio.Event().wait()
            raise AssertionError
            yield

        channel.subscribe = subscribe
        return channel


class LockedChannels(MemoryChannels):
    async def open(self, name: str) -> MemoryChannel:
        raise ChannelBusyError("The channel is locked.")


INVOCATION = {"inputEventId": "e-1", "sessionName": SESSION}


async def nobody(run: AgentRun[Any]) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    ("method", "path", "body"), [("POST", "invocations", INVOCATION), ("GET", "events?view=1", None)]
)
async def test_what_waits_while_the_server_stops_is_told_to_ask_again(method: str, path: str, body: Any) -> None:
    channels = WaitingChannels()
    async with served(agents=nobody, channels=channels) as site:
        call = asyncio.create_task(site.client.request(method, f"/v1/sessions/{SESSION}/{path}", json=body))
        await channels.asked.wait()
    response = await call
    assert (response.status_code, response.json()["code"]) == (503, "engine_closed")
    assert response.json()["retryable"]
    assert response.headers["retry-after"] == "5"


@pytest.mark.parametrize(("method", "path", "body"), [("POST", "invocations", INVOCATION), ("GET", "events", None)])
async def test_a_stopping_server_begins_no_run_and_no_stream(method: str, path: str, body: Any) -> None:
    async with served(agents=nobody, channels=MemoryChannels()) as site:
        await site.app.drain(0)
        response = await site.client.request(method, f"/v1/sessions/{SESSION}/{path}", json=body)
        assert (response.status_code, response.json()["code"]) == (503, "engine_closed")


async def test_an_invocation_whose_channel_could_not_be_opened_may_be_posted_again() -> None:
    async with served(agents=nobody, channels=LockedChannels()) as site:
        for _ in range(2):
            async with asyncio.timeout(10):
                response = await site.client.post(f"/v1/sessions/{SESSION}/invocations", json=INVOCATION)
            assert (response.status_code, response.json()["code"]) == (503, "channel_busy")
