"""Turns as server-sent events, on real sockets: what a turn says on its channel, then its result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from server.kit import Event, application, events_of, listening, until, until_event
from stepwell.server import JwtAuth, _api, _events, create_app
from stepwell.testing import Reply, ScriptedModel
from suspension_flows import DeskFlow, talk

pytestmark = pytest.mark.anyio

TURNS = "/v1/flows/TalkFlow/turns"
STREAM = {"Accept": "text/event-stream"}
MEMORY = {"channels": "memory://"}


class Site:
    """A server and what its clients do."""

    def __init__(self, client: httpx.AsyncClient, model: ScriptedModel, app: Any, server: Any) -> None:
        self.client = client
        self.model = model
        self.app = app
        self.server = server

    async def turn(self, message: str, session: str | None = None, **headers: str) -> Any:
        body = {"message": message} | ({"session_id": session} if session else {})
        return await self.client.post(TURNS, json=body, headers=headers)

    @asynccontextmanager
    async def streamed(
        self, message: str, session: str | None = None, path: str = TURNS, **headers: str
    ) -> AsyncGenerator[AsyncIterator[Event]]:
        body = {"message": message} | ({"session_id": session} if session else {})
        async with self.client.stream("POST", path, json=body, headers={**STREAM, **headers}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield events_of(response)

    async def all(self, message: str, session: str | None = None, **headers: str) -> list[Event]:
        async with self.streamed(message, session, **headers) as events:
            return await until_event(events, lambda event: event["event"] in ("result", "error"))


@asynccontextmanager
async def site(*script: Any, grace: float = 20.0, default: Any = None, **options: Any) -> AsyncGenerator[Site]:
    model = ScriptedModel(script, default=default)
    app = application(model, **{**MEMORY, **options})
    async with (
        listening(app, grace=grace) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        yield Site(client, model, app, server)
    model.assert_done()


@pytest.fixture(params=["memory", "sqlite", "postgres and redis"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    match request.param:
        case "memory":
            return {"store": "memory://", "channels": "memory://"}
        case "sqlite":
            return {"store": f"sqlite:///{tmp_path}/s.db", "channels": f"sqlite:///{tmp_path}/s.db"}
        case _:
            return {
                "store": request.getfixturevalue("postgres_database"),
                "channels": request.getfixturevalue("redis_database"),
            }


def names(events: list[Event]) -> list[str]:
    return [event["data"]["name"] for event in events if event["event"] == "message" and "name" in event["data"]]


def text_of(events: list[Event]) -> str:
    """The text that the deliveries show, put together as a reader of the log would: last step wins."""
    texts: dict[str, str] = {}
    for event in events:
        data = event["data"]
        if event["event"] != "message":
            continue
        if data["action"] == "message.append":
            if data["serial"] in texts:
                texts[data["serial"]] += data.get("data", "")
        elif data.get("name") == "ai-output" and data["extras"]["ai"].get("codec", {}).get("kind") == "text":
            texts[data["serial"]] = data.get("data") or ""
    return "".join(texts.values())


async def test_scenario_a_turn_is_streamed_and_watched_on_real_places(places: dict[str, str]) -> None:
    replies = (Reply.text(["Hel", "lo."]), Reply.text(["And ", "again."]))
    async with site(*replies, **places) as s:
        first = await s.all("hello")
        session = first[0]["data"]["session_id"]
        assert first[0]["event"] == "turn"
        assert names(first)[:3] == ["ai-input", "ai-run-start", "ai-step-start"]
        assert names(first)[-2:] == ["ai-step-end", "ai-run-end"]
        assert text_of(first) == "Hello."
        result = first[-1]["data"]
        assert (result["success"], result["message"], result["session_id"]) == (True, "Hello.", session)
        assert {key: result[key] for key in ("run_id", "invocation_id", "session_id")} == first[0]["data"]

        events = f"/v1/sessions/{session}/events"
        async with (
            s.client.stream("GET", events) as log,
            s.client.stream("GET", events + "?view=1") as view,
        ):
            watched, viewed = events_of(log), events_of(view)
            assert (await anext(watched))["event"] == "ready"
            snapshot = await anext(viewed)
            assert [one["message"]["role"] for one in snapshot["data"]["messages"]] == ["user", "assistant"]
            second = await s.all("more", session)
            seen = await until_event(watched, lambda event: event["data"].get("name") == "ai-run-end")
            done = second[-1]["data"]["run_id"]
            await until_event(
                viewed,
                lambda event: any(
                    run["runId"] == done and run["status"] == "complete" for run in event["data"].get("runs", ())
                ),
            )
        assert text_of(second) == text_of(seen) == "And again."
        # The turn's stream is what the channel has of it, and nothing of the turn before.
        assert {e["data"]["serial"] for e in second if e["event"] == "message"} == {e["data"]["serial"] for e in seen}
        # Continued from any of its events, the log gives the rest.
        place = next(event for event in second if event["event"] == "message")
        async with s.client.stream("GET", events, headers={"Last-Event-ID": place["id"]}) as log:
            rest = await until_event(events_of(log), lambda event: event["data"].get("name") == "ai-run-end")
        assert text_of(rest) == "And again."


async def test_a_lost_stream_cancels_nothing_and_the_same_key_joins_it_from_the_beginning() -> None:
    gate = anyio.Event()
    async with site(Reply.text(["One ", "two."]).gated(gate, after=1)) as s:
        async with s.streamed("hello", **{"Idempotency-Key": "k"}) as events:
            early = await until_event(events, lambda event: "One" in str(event["data"].get("data")))
        async with s.streamed("hello", **{"Idempotency-Key": "k"}) as events:
            seen = [await anext(events)]
            assert seen[0]["data"] == early[0]["data"]
            gate.set()
            seen += await until_event(events, lambda event: event["event"] == "result")
        assert names(seen)[:3] == ["ai-input", "ai-run-start", "ai-step-start"]
        assert text_of(seen) == "One two."
        assert seen[-1]["data"]["message"] == "One two."
        assert len(s.model.requests) == 1
        # Also when it is over: what is stored, once more.
        late = await s.all("hello", **{"Idempotency-Key": "k"})
        assert late[0]["data"] == seen[0]["data"]
        assert late[-1]["data"] == seen[-1]["data"]
        assert names(late)[-1] == "ai-run-end"
        assert text_of(late) == "One two."


async def test_a_turn_that_waits_for_another_streams_its_own_run_alone() -> None:
    gate = anyio.Event()
    async with site("Zero.", Reply.text("One.").gated(gate), "Two.") as s:
        session = (await s.turn("hello")).json()["session_id"]
        first = asyncio.create_task(s.all("first", session))
        await until(lambda: s.model.open)
        second = asyncio.create_task(s.all("second", session))
        await until(lambda: len(s.app.engine._turns) == 2)
        gate.set()
        one, two = await first, await second
    assert (text_of(one), text_of(two)) == ("One.", "Two.")
    assert names(one).count("ai-run-end") == names(two).count("ai-run-end") == 1
    assert names(one).count("ai-input") == names(two).count("ai-input") == 1
    serials = [{e["data"]["serial"] for e in events if e["event"] == "message"} for events in (one, two)]
    assert not serials[0] & serials[1]


async def test_a_rejected_attempt_is_superseded_in_the_stream() -> None:
    gate = anyio.Event()
    async with site(Reply.text(["Wro", "ng."]).gated(gate, after=1).failing(after=1), "Right.") as s:
        async with s.streamed("hello") as stream:
            events = await until_event(stream, lambda event: "Wro" in str(event["data"]))
            gate.set()
            events += await until_event(stream, lambda event: event["event"] == "result")
    assert names(events).count("ai-step-start") == 2
    reasons = [
        event["data"]["extras"]["ai"]["transport"]["step-reason"]
        for event in events
        if event["data"].get("name") == "ai-step-end"
    ]
    assert reasons == ["failed", "complete"]
    assert events[-1]["data"]["message"] == "Right."


async def test_without_channels_a_turn_tells_its_events() -> None:
    async with site(Reply.text(["Hel", "lo."]), channels=None) as s:
        events = await s.all("hello")
        assert {event["event"] for event in events[1:-1]} == {"progress"}
        deltas = [event["data"]["text"] for event in events if event["data"].get("type") == "TextDelta"]
        assert "".join(deltas) == "Hello."
        assert not [event for event in events if event["data"].get("type") == "TurnFinished"]
        assert events[-1]["data"]["message"] == "Hello."
        watched = await s.client.get(f"/v1/sessions/{events[0]['data']['session_id']}/events")
        assert (watched.status_code, watched.json()["code"]) == (404, "no_channels")


@pytest.mark.parametrize("channels", [None, "memory://"])
async def test_what_is_refused_is_a_problem_document(channels: Any) -> None:
    gate = anyio.Event()
    async with site(Reply.text("One.").gated(gate), "Two.", channels=channels) as s:
        running = asyncio.create_task(s.turn("hello", **{"Idempotency-Key": "k"}))
        await until(lambda: s.model.open)
        [session] = (await s.client.get("/v1/sessions")).json()["sessions"]
        for body, path, status, code in (
            ({"message": "x", "session_id": session["id"], "on_busy": "reject"}, TURNS, 409, "session_busy"),
            ({"message": "x", "session_id": "unknown"}, TURNS, 404, "unknown_session"),
            ({"message": " "}, TURNS, 422, "invalid_input"),
            ({"message": "x"}, "/v1/flows/NoFlow/turns", 404, "unknown_flow"),
        ):
            answer = await s.client.post(path, json=body, headers=STREAM)
            assert (answer.status_code, answer.json()["code"]) == (status, code)
            assert answer.headers["content-type"] == "application/problem+json"
            assert ("retry-after" in answer.headers) == (code == "session_busy")
        conflict = await s.client.post(TURNS, json={"message": "other"}, headers={**STREAM, "Idempotency-Key": "k"})
        assert (conflict.status_code, conflict.json()["code"]) == (409, "idempotency_conflict")
        gate.set()
        await running
        assert (await s.turn("more", session["id"])).json()["message"] == "Two."


async def test_what_is_refused_late_is_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api, "HEARTBEAT_SECONDS", 0.0)
    gate = anyio.Event()
    async with site("Zero.", Reply.text("One.").gated(gate)) as s:
        session = (await s.turn("hello")).json()["session_id"]
        running = asyncio.create_task(s.turn("one", session))
        await until(lambda: s.model.open)
        body = {"message": "two", "session_id": session, "on_busy": "queue"}
        async with s.client.stream("POST", TURNS, json=body, headers=STREAM) as response:
            assert response.status_code == 200
            await until(lambda: len(s.app.engine._turns) == 2)
            assert (await s.client.delete(f"/v1/sessions/{session}")).status_code == 204
            gate.set()
            [error] = [event async for event in events_of(response)]
        assert error["event"] == "error"
        assert error["data"]["code"] in ("unknown_session", "turn_cancelled")
        assert error["data"]["status"] in (404, 409)
        await running


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_events, "HEARTBEAT_SECONDS", 0.01)
    gate = anyio.Event()
    async with site(Reply.text("Hello.").gated(gate)) as s:
        body = {"message": "hello"}
        async with s.client.stream("POST", TURNS, json=body, headers=STREAM) as response:
            beats = 0
            async for line in response.aiter_lines():
                beats += line == ": "
                if beats == 3:
                    gate.set()
                if line.startswith("data: ") and '"Hello."' in line and '"usage"' in line:
                    assert json.loads(line[6:])["message"] == "Hello."
        assert beats >= 3


@pytest.mark.parametrize("channels", [None, "memory://"])
async def test_a_reader_that_does_not_read_holds_nothing_up(channels: Any) -> None:
    words = ["x" * 20_000] * 300
    async with site(Reply.text(words), "Next.", channels=channels) as s:
        async with s.streamed("hello", **{"Idempotency-Key": "k"}) as events:
            session = (await anext(events))["data"]["session_id"]
            result = (await s.turn("hello", **{"Idempotency-Key": "k"})).json()
            assert len(result["message"]) == 6_000_000
            assert (await s.turn("more", session)).json()["message"] == "Next."
            rest = await until_event(events, lambda event: event["event"] == "result")
            assert rest[-1]["data"]["message"] == result["message"]
            if channels:
                assert len(text_of(rest)) == 6_000_000


# -- stops


@pytest.mark.parametrize("channels", [None, "memory://"])
async def test_a_stop_lets_a_stream_come_to_its_result(channels: Any) -> None:
    gate = anyio.Event()
    async with site(Reply.text(["One ", "two."]).gated(gate, after=1), channels=channels) as s:
        async with s.streamed("hello") as events:
            await until_event(events, lambda event: "One" in str(event["data"]))
            s.server.should_exit = True
            await until(lambda: not s.app.accepting)
            gate.set()
            [*_, last] = await until_event(events, lambda event: event["event"] in ("result", "error"))
        assert (last["event"], last["data"]["message"]) == ("result", "One two.")


@pytest.mark.parametrize("owned", [True, False])
async def test_a_stream_that_is_open_after_the_grace_says_ask_again(owned: bool) -> None:
    model = ScriptedModel([Reply.text(["One ", "two."]).stalling(after=1)])
    app = application(model, channels="memory://")
    async with served_by(app, owned) as served, listening(served, grace=0.05) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            s = Site(client, model, served, server)
            async with s.streamed("hello") as events:
                await until_event(events, lambda event: "One" in str(event["data"]))
                server.should_exit = True
                [*_, last] = await until_event(events, lambda event: event["event"] in ("result", "error"))
                with pytest.raises(StopAsyncIteration):
                    await anext(events)
        assert (last["event"], last["data"]["status"], last["data"]["retryable"]) == ("error", 503, True)


@asynccontextmanager
async def served_by(app: Any, owned: bool) -> AsyncGenerator[Any]:
    """The application, or one that serves the same engine as somebody else's."""
    if owned:
        yield app
        return
    async with app.engine:
        yield create_app(app.engine)


async def test_watchers_are_told_to_connect_again_and_find_everything_elsewhere(tmp_path: Path) -> None:
    places = {"store": f"sqlite:///{tmp_path}/s.db", "channels": f"sqlite:///{tmp_path}/c.db"}
    async with site("One.", **places) as s:
        first = await s.all("hello")
        session = first[0]["data"]["session_id"]
        async with s.client.stream("GET", f"/v1/sessions/{session}/events?history=1") as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if "ready" in text:
                    s.server.should_exit = True
        assert text.endswith(": connect again\n\n")
    cursor = [line for line in text.splitlines() if line.startswith("id: ")][-1][4:]
    async with site("Two.", **places) as s:
        async with s.client.stream(
            "GET", f"/v1/sessions/{session}/events", headers={"Last-Event-ID": cursor}
        ) as response:
            events = events_of(response)
            await s.turn("more", session)
            seen = await until_event(events, lambda event: event["data"].get("name") == "ai-run-end")
        assert text_of(seen) == "Two."


async def test_a_stream_of_events_ends_with_its_token() -> None:
    from server.test_tokens import SECRET, bearer

    auth = JwtAuth(SECRET)
    async with site(jwt=auth) as s:
        import time

        # Accepted for the clocks' sake, and over.
        headers = bearer(capabilities=["read"], exp=time.time() - 5)
        async with asyncio.timeout(10):
            answer = await s.client.get("/v1/sessions/s1/events", headers=headers)
        assert (answer.status_code, answer.text.endswith(": connect again\n\n")) == (200, True)


# -- answers and steering


DESK = "/v1/flows/DeskFlow/turns"


async def test_a_suspended_turn_streams_to_its_request_and_is_answered(places: dict[str, str]) -> None:
    async with site(flows=[DeskFlow], default=talk, **places) as s:
        async with s.streamed("refund 5, ask name", path=DESK) as events:
            seen = await until_event(events, lambda event: event["event"] == "result")
        assert names(seen)[-1] == "ai-run-suspend"
        result = seen[-1]["data"]
        assert result["status"] == "suspended"
        session = result["session_id"]
        pending = {one["kind"]: one["id"] for one in result["pending"]}

        async def answer(request: str, value: Any) -> httpx.Response:
            body = {"request_id": request, "value": value}
            return await s.client.post(f"/v1/sessions/{session}/answers", json=body)

        wrong = await answer(pending["approval"], "maybe")
        assert (wrong.status_code, wrong.json()["errors"][0]["pointer"]) == (422, "/value")
        unknown = await answer("never-asked", True)
        assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_request")
        half = (await answer(pending["question"], "Ada")).json()
        assert (half["status"], [one["kind"] for one in half["pending"]]) == ("suspended", ["approval"])
        whole = (await answer(pending["approval"], True)).json()
        assert (whole["status"], whole["success"]) == ("running", True)
        assert whole["run_id"] == result["run_id"]
        assert (await answer(pending["approval"], True)).json() == whole
        late = await answer("never-asked", True)
        assert (late.status_code, late.json()["code"]) == (404, "unknown_request")
        missing = await s.client.post(f"/v1/sessions/{session}/answers", json={"request_id": "x"})
        assert (missing.status_code, missing.json()["errors"][0]["pointer"]) == (422, "/value")
        nobody = await s.client.post("/v1/sessions/nobody/answers", json={"request_id": "x", "value": 1})
        assert nobody.status_code == 404


async def test_a_message_that_answers_a_question_streams_its_own_invocation() -> None:
    async with site(flows=[DeskFlow], default=talk) as s:
        async with s.streamed("ask name", path=DESK) as events:
            first = await until_event(events, lambda event: event["event"] == "result")
        session = first[0]["data"]["session_id"]
        async with s.streamed("Ada", session, path=DESK) as events:
            second = await until_event(events, lambda event: event["event"] == "result")
    assert second[0]["data"]["run_id"] == first[0]["data"]["run_id"]
    assert second[0]["data"]["invocation_id"] != first[0]["data"]["invocation_id"]
    assert names(second)[:2] == ["ai-input", "ai-run-resume"]
    assert names(second)[-1] == "ai-run-end"
    serials = [{e["data"]["serial"] for e in events if e["event"] == "message"} for events in (first, second)]
    assert not serials[0] & serials[1]


async def test_steering_is_taken_up_by_the_turn_that_runs() -> None:
    gate = anyio.Event()
    calls = Reply.tool_call("count", {"number": 1}).gated(gate)
    async with site(calls, "Counted, and heard.", "Later.") as s:
        work = "/v1/flows/WorkFlow/turns"
        async with s.streamed("count", path=work) as events:
            session = (await anext(events))["data"]["session_id"]
            await until(lambda: s.model.open)
            steer = f"/v1/sessions/{session}/steer"
            steering = asyncio.create_task(
                s.client.post(steer, json={"message": "faster"}, headers={"Idempotency-Key": "k"})
            )
            await until(lambda: len(s.app.engine._turns) == 2)
            gate.set()
            seen = await until_event(events, lambda event: event["event"] == "result")
        steered = (await steering).json()
        assert steered["message"] == seen[-1]["data"]["message"] == "Counted, and heard."
        assert names(seen).count("ai-input") == 2  # what was said meanwhile is of this run
        again = await s.client.post(steer, json={"message": "faster"}, headers={"Idempotency-Key": "k"})
        assert again.json() == steered
        alone = await s.client.post(steer, json={"message": "and now?"})
        assert alone.json()["message"] == "Later."
        bad = await s.client.post(steer, json={"message": 1})
        assert (bad.status_code, bad.json()["errors"][0]["pointer"]) == (422, "/message")
        nobody = await s.client.post("/v1/sessions/nobody/steer", json={"message": "x"})
        assert nobody.status_code == 404


async def test_a_lost_connection_leaves_an_answer_and_a_steering_alone() -> None:
    gate = anyio.Event()

    def model(request: Any) -> Any:
        reply = talk(request)
        return reply.gated(gate) if isinstance(reply, Reply) and len(request.messages) > 2 else reply

    async with site(flows=[DeskFlow], default=model) as s:
        asked = (await s.client.post(DESK, json={"message": "ask name"})).json()
        [pending] = asked["pending"]
        body = {"request_id": pending["id"], "value": "Ada"}
        path = f"/v1/sessions/{asked['session_id']}/answers"
        lost = asyncio.create_task(s.client.post(path, json=body))
        await until(lambda: s.app.engine._turns)
        lost.cancel()
        await asyncio.wait([lost])
        gate.set()
        assert (await s.client.post(path, json=body)).json()["success"]


@pytest.mark.parametrize("places", ["sqlite", "postgres and redis"], indirect=True)
async def test_scenario_a_turn_of_one_server_is_watched_cancelled_and_answered_at_another(
    places: dict[str, str],
) -> None:
    stalls = Reply.text(["One ", "two."]).stalling(after=1)
    async with (
        site(stalls, default=talk, flows=[DeskFlow], **places) as one,
        site(default=talk, flows=[DeskFlow], **places) as two,
    ):
        two.app.engine._core.owner = "another process"
        async with one.streamed("hello", path=DESK) as events:
            seen = await until_event(events, lambda event: "One" in str(event["data"].get("data")))
            session, run = seen[0]["data"]["session_id"], seen[0]["data"]["run_id"]
            async with two.client.stream("GET", f"/v1/sessions/{session}/events?view=1") as response:
                snapshot = (await anext(events_of(response)))["data"]
            assert "One " in json.dumps(snapshot["messages"])
            cancel = f"/v1/sessions/{session}/cancel"
            assert (await two.client.post(cancel, json={"run_id": "another"})).json() == {"cancelled": False}
            assert (await two.client.post(cancel, json={"run_id": run, "reason": "x"})).json() == {"cancelled": True}
            [*_, last] = await until_event(events, lambda event: event["event"] in ("result", "error"))
        assert last["data"]["error"]["code"] == "turn_cancelled"
        assert last["data"]["error"]["ids"]["kind"] == "user"
        asked = (await one.client.post(DESK, json={"message": "ask name", "session_id": session})).json()
        [pending] = asked["pending"]
        body = {"request_id": pending["id"], "value": "Ada"}
        answers = await asyncio.gather(
            *(s.client.post(f"/v1/sessions/{session}/answers", json=body) for s in (one, two))
        )
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len({answer.text for answer in answers}) == 1
        assert answers[0].json()["success"]
