"""The older contract: /ai/run, /ai/flows, /ai/end."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from server.kit import served, until
from stepwell.errors import StoreError
from stepwell.testing import Reply

pytestmark = pytest.mark.anyio

call = Reply.tool_call


async def test_names_of_flows() -> None:
    async with served() as s:
        answer = await s.client.get("/ai/flows")
        assert answer.json() == ["TalkFlow", "WorkFlow", "HookFlow", "SilentFlow"]


@pytest.mark.parametrize("header", ["CHAT_SESSION_ID", "CHAT-SESSION-ID", "chat_session_id"])
async def test_a_conversation_by_header(header: str) -> None:
    async with served("Hello.", "Again.") as s:
        first = await s.client.post("/ai/run", json={"flowName": "TalkFlow", "message": "hi", "config": {"a": 1}})
        session = first.headers["CHAT_SESSION_ID"]
        assert first.headers["CHAT-SESSION-ID"] == session
        assert first.headers["content-type"] == "application/json"
        assert first.json() == {
            "success": True,
            "completed": False,
            "message": "Hello.",
            "session": session,
            "contentType": "text/plain",
        }
        second = await s.client.post(
            "/ai/run", json={"flowName": "TalkFlow", "message": "and?"}, headers={header: session}
        )
        assert (second.json()["message"], second.json()["session"]) == ("Again.", session)


async def test_a_reply_of_another_type_is_the_body() -> None:
    async with served(call("page")) as s:
        answer = await s.client.post("/ai/run", json={"flowName": "WorkFlow", "message": "page"})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.text == "<p>Olé</p>"
        assert answer.headers["CHAT_SESSION_ID"]
        # A page that a model wrote runs nothing and frames nothing.
        assert "sandbox" in answer.headers["content-security-policy"]


async def test_a_type_that_is_none_stays_in_the_envelope() -> None:
    async with served(call("odd")) as s:
        answer = await s.client.post("/ai/run", json={"flowName": "WorkFlow", "message": "odd"})
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["contentType"] == "no type\r\nx: y"


async def test_the_end_of_a_session_is_completed() -> None:
    async with served(call("leave")) as s:
        answer = (await s.client.post("/ai/run", json={"flowName": "WorkFlow", "message": "bye"})).json()
        assert (answer["success"], answer["completed"], answer["message"]) == (True, True, "Bye.")


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b"{", {}, "not JSON"),
        (b"[]", {}, "JSON object"),
        (b"{}", {}, "/flowName"),
        (b'{"flowName": "NoFlow", "message": "x"}', {}, "NoFlow"),
        (b'{"flowName": "TalkFlow"}', {}, "needs a message"),
        (b'{"flowName": "TalkFlow", "message": 7}', {}, "/message"),
        (b'{"flowName": "TalkFlow", "message": "x"}', {"CHAT_SESSION_ID": "unknown"}, "unknown"),
        (b'{"flowName": "TalkFlow", "message": "x"}', {"CHAT_SESSION_ID": "a b"}, "session id"),
        (b'{"flowName": "TalkFlow", "message": "x"}', {"CHAT_SESSION_ID": "a", "CHAT-SESSION-ID": "b"}, "different"),
        (b'{"flowName": "TalkFlow", "message": "x"}', {"Idempotency-Key": " "}, "idempotency key"),
    ],
)
async def test_what_cannot_run_is_a_400_in_the_envelope(body: bytes, headers: dict[str, str], says: str) -> None:
    async with served() as s:
        answer = await s.client.post("/ai/run", content=body, headers={"Content-Type": "application/json", **headers})
        assert answer.status_code == 400
        envelope = answer.json()
        assert envelope.keys() == {"success", "completed", "message", "session", "contentType"}
        assert (envelope["success"], envelope["completed"], envelope["contentType"]) == (False, False, "text/plain")
        assert says in envelope["message"]


async def test_a_turn_that_fails_is_a_400_with_its_session() -> None:
    async with served(call("nonsense")) as s:
        answer = await s.client.post("/ai/run", json={"flowName": "WorkFlow", "message": "x"})
        assert answer.status_code == 400
        assert not answer.json()["success"]
        assert answer.json()["session"] == answer.headers["CHAT_SESSION_ID"]
        assert "nonsense" in answer.json()["message"]


async def test_a_busy_session_says_when_to_come_back() -> None:
    gate = anyio.Event()
    async with served("One.", Reply.text("Two.").gated(gate)) as s:
        s.engine.definitions["TalkFlow"].cls.on_busy = "reject"
        session = (await s.turn()).json()["session_id"]
        body = {"flowName": "TalkFlow", "message": "x"}
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: s.turn(session_id=session))
                await until(lambda: s.model.open)
                answer = await s.client.post("/ai/run", json=body, headers={"CHAT_SESSION_ID": session})
                gate.set()
        finally:
            del s.engine.definitions["TalkFlow"].cls.on_busy
        assert (answer.status_code, answer.headers["retry-after"]) == (400, "1")
        assert answer.json()["session"] == session


async def test_what_is_no_answer_of_a_flow_stays_a_problem() -> None:
    async with served() as s:
        wrong_type = await s.client.post("/ai/run", content=b"flowName=TalkFlow")
        assert (wrong_type.status_code, wrong_type.json()["code"]) == (415, "unsupported_media_type")
        large = await s.client.post("/ai/run", json={"flowName": "TalkFlow", "message": "x" * 5_000_000})
        assert (large.status_code, large.json()["code"]) == (413, "input_too_large")


async def test_a_store_that_fails_is_a_500_that_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*args: Any, **kwargs: Any) -> Any:
        raise StoreError("Cannot write /srv/private/s.db.")

    async with served() as s:
        monkeypatch.setattr(s.engine.store, "create", broken)
        for answer in (
            await s.client.post("/ai/run", json={"flowName": "TalkFlow", "message": "x"}),
            await s.turn(),
        ):
            assert (answer.status_code, answer.json()["code"]) == (500, "store")
            assert "/srv" not in answer.text
    assert "Cannot write /srv/private/s.db." in caplog.text


async def test_the_end() -> None:
    async with served("Hello.") as s:
        session = (await s.turn()).json()["session_id"]
        for _ in range(2):  # unknown is success
            ended = await s.client.post("/ai/end", headers={"CHAT-SESSION-ID": session})
            assert (ended.status_code, ended.json()) == (200, {"success": True, "session": session})
        assert (await s.client.get(f"/v1/sessions/{session}")).status_code == 404
        missing = await s.client.post("/ai/end")
        assert (missing.status_code, missing.json()) == (200, {"success": True, "session": None})
        wrong = await s.client.post("/ai/end", headers={"CHAT_SESSION_ID": "a b"})
        assert wrong.json() == {"success": True, "session": "a b"}
        two = await s.client.post("/ai/end", headers={"CHAT_SESSION_ID": "a", "CHAT-SESSION-ID": "b"})
        assert two.status_code == 400
