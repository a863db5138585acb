"""What `/metrics` counts, and what it never names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.kit import FLOWS, application, events_of, listening, served, until, until_event
from stepwell import Engine
from stepwell.server import create_app
from stepwell.testing import Reply, ScriptedModel
from suspension_flows import DeskFlow, talk

pytestmark = pytest.mark.anyio


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """`name{label="value",...}` of all samples of ours."""
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name.startswith("stepwell_") and not sample.name.endswith(("_created", "_bucket", "_sum"))
    }


async def test_turns_attempts_tokens_and_commits_are_counted() -> None:
    script = (
        Reply.text("Hello.").with_usage(input=7, output=3),
        Reply.text("").failing(),
        Reply.text("Again.").with_usage(input=11, output=2),
        Reply.tool_call("count", {"number": 1}).with_usage(input=1, output=1),
        Reply.text("It failed.").with_usage(input=1, output=1),
    )
    async with served(*script) as s:
        session = (await s.turn()).json()["session_id"]
        assert (await s.turn("more", session_id=session)).json()["success"]
        assert (await s.turn("work", "WorkFlow")).json()["success"]
        failed = await s.turn("break", "HookFlow")
        assert not failed.json()["success"]
        assert (await s.turn(flow="NoFlow")).status_code == 404
        found = await counted(s.client)
    assert found["stepwell_turns_total|TalkFlow|complete"] == 2
    assert found["stepwell_turns_total|WorkFlow|complete"] == 1
    assert found["stepwell_turns_total|HookFlow|failed"] == 1
    assert found["stepwell_turn_seconds_count|TalkFlow"] == 2
    assert found["stepwell_turns_open|TalkFlow"] == 0
    assert found["stepwell_attempts_total|accepted"] == 4
    assert found["stepwell_attempts_total|thrown"] == 1
    assert found["stepwell_tokens_total|input|scripted:m"] == 20
    assert found["stepwell_tokens_total|output|scripted:m"] == 7
    assert found["stepwell_commits_total"] >= 4
    assert found["stepwell_http_requests_total|POST|/v1/flows/{id}/turns|200"] == 4
    assert found["stepwell_http_requests_total|POST|/v1/flows/{id}/turns|404"] == 1


async def test_what_runs_is_open_and_a_cancel_is_an_outcome() -> None:
    model = ScriptedModel([Reply.text("never").stalling()])
    async with listening(application(model)) as server, httpx.AsyncClient(base_url=server.url) as client:
        running = asyncio.create_task(client.post("/v1/flows/TalkFlow/turns", json={"message": "hello"}))
        await model.wait_stalled()
        assert (await counted(client))["stepwell_turns_open|TalkFlow"] == 1
        [session] = (await client.get("/v1/sessions")).json()["sessions"]
        await client.post(f"/v1/sessions/{session['id']}/cancel")
        await running
        found = await counted(client)
    assert found["stepwell_turns_open|TalkFlow"] == 0
    assert found["stepwell_turns_total|TalkFlow|cancelled"] == 1


async def test_suspensions_are_counted_and_tokens_once() -> None:
    def model(request: Any) -> Any:
        reply = talk(request)
        return (Reply.text(reply) if isinstance(reply, str) else reply).with_usage(input=5, output=1)

    async with served(flows=[DeskFlow], default=model) as s:
        asked = (await s.turn("ask name", "DeskFlow")).json()
        found = await counted(s.client)
        assert found["stepwell_suspensions_total|DeskFlow"] == 1
        assert found["stepwell_turns_total|DeskFlow|suspended"] == 1
        [pending] = asked["pending"]
        body = {"request_id": pending["id"], "value": "Ada"}
        assert (await s.client.post(f"/v1/sessions/{asked['session_id']}/answers", json=body)).json()["success"]
        found = await counted(s.client)
    assert found["stepwell_turns_total|DeskFlow|complete"] == 1
    # The result says the tokens of the whole turn; each is counted where it was spent.
    assert found["stepwell_tokens_total|input|scripted:m"] == 5 * len(s.model.requests)


async def test_a_turn_that_is_gone_on_with_is_a_recovery(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    model = ScriptedModel([Reply.text("never").stalling(), "Here."])
    async with listening(application(model, store=store), grace=0.0) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            running = asyncio.create_task(client.post("/v1/flows/TalkFlow/turns", json={"message": "hello"}))
            await model.wait_stalled()
            server.should_exit = True
            session = (await running).json()["session_id"]
    async with Engine(FLOWS, models={"scripted": model}, store=store, recovery_interval=None) as engine:
        app = create_app(engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert (await engine.recover(session)).message == "Here."
            found = await counted(client)
    assert found["stepwell_recoveries_total|TalkFlow"] == 1
    assert found["stepwell_turns_total|TalkFlow|complete"] == 1


async def test_what_is_streamed_is_counted() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("Hello.").gated(gate)])
    app = application(model, channels="memory://")
    async with listening(app) as server, httpx.AsyncClient(base_url=server.url) as client:
        body, headers = {"message": "hello"}, {"Accept": "text/event-stream"}
        async with client.stream("POST", "/v1/flows/TalkFlow/turns", json=body, headers=headers) as response:
            events = events_of(response)
            gate.set()
            seen = await until_event(events, lambda event: event["event"] == "result")
        await until(lambda: not app.turns)
        found = await counted(client)
    assert found["stepwell_events_streamed_total"] == len(seen)


async def test_labels_name_no_session_and_nothing_that_was_said() -> None:
    async with served(Reply.text("My secret reply."), api_keys=["secretive:k"]) as s:
        key = {"X-API-Key": "k"}
        session = (await s.turn("my secret message", headers=key)).json()["session_id"]
        for method, path in (
            ("GET", f"/v1/sessions/{session}?flow=secret"),
            ("GET", f"/secret/{session}"),
            ("SECRET", "/v1/flows"),
            ("GET", "/v1/sessions/secret"),
        ):
            await s.client.request(method, path, headers=key)
        text = (await s.client.get("/metrics", headers=key)).text
        assert (await s.client.get("/metrics")).status_code == 401
    assert session not in text
    assert "secret" not in text
    assert 'method="other",route="' in text
    assert 'route="/v1/sessions/{id}",status="404"' in text
    assert 'route="-",status="404"' in text


async def test_two_applications_count_apart() -> None:
    async with served("One.") as one, served() as two:
        await one.turn()
        assert "stepwell_turns_total|TalkFlow|complete" in await counted(one.client)
        assert "stepwell_turns_total|TalkFlow|complete" not in await counted(two.client)
