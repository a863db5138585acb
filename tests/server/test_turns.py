"""Turns over HTTP: what is sent, what comes back, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import anyio
import pytest

from server.kit import served, until
from stepwell.messages import FilePart, TextPart, UserMessage
from stepwell.testing import Reply

pytestmark = pytest.mark.anyio

call = Reply.tool_call


async def test_a_turn_answers_with_its_result_and_the_session_goes_on() -> None:
    async with served("Hello.", "Again.") as s:
        first = await s.turn()
        assert first.status_code == 200
        assert first.headers["content-type"] == "application/json"
        result = first.json()
        assert result["success"]
        assert result["message"] == "Hello."
        assert (result["resumed"], result["current"], result["units"], result["error"]) == (False, "Talk", 1, None)
        second = (await s.turn("and?", session_id=result["session_id"])).json()
        assert (second["message"], second["resumed"]) == ("Again.", True)
        assert second["session_id"] == result["session_id"]


@pytest.mark.parametrize("name", ["OldTalk", "team/talk", "team%2Ftalk"])
async def test_a_flow_answers_to_its_aliases(name: str) -> None:
    async with served("Hello.") as s:
        assert (await s.turn(flow=name)).json()["message"] == "Hello."


async def test_a_message_may_have_parts() -> None:
    data = base64.b64encode(b"%PDF").decode()
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "file", "media_type": "application/pdf", "data": data, "name": "a.pdf"},
        {"type": "file", "media_type": "image/png", "url": "https://example.org/a.png"},
    ]
    async with served("A file.") as s:
        assert (await s.turn({"parts": parts})).json()["success"]
        message = s.model.requests[0].messages[-1]
        assert isinstance(message, UserMessage)
        assert message.content == (
            TextPart("what is this?"),
            FilePart("application/pdf", data=data, name="a.pdf"),
            FilePart("image/png", url="https://example.org/a.png"),
        )


@pytest.mark.parametrize("body", [{}, {"message": None}])
async def test_a_flow_may_start_without_a_message(body: dict[str, Any]) -> None:
    async with served("I begin.") as s:
        answer = await s.client.post("/v1/flows/SilentFlow/turns", json=body)
        assert answer.json()["message"] == "I begin."


async def test_config_is_the_context_of_a_new_session() -> None:
    async with served("Hello.") as s:
        session = (await s.turn(config={"lang": "pt"})).json()["session_id"]
        head = (await s.client.get(f"/v1/sessions/{session}")).json()["head"]
        assert head["workflow"]["context"] == {"config": {"lang": "pt"}}


# -- failures


async def failing(flow: str, break_it: str, *script: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A good turn, one that fails, a good one; the failed one's answer and the session before and after."""
    async with served("One.", *script, "Two.", **options) as s:
        session = (await s.turn(flow=flow)).json()["session_id"]
        before = (await s.client.get(f"/v1/sessions/{session}")).json()
        failed = await s.turn(break_it, flow=flow, session_id=session)
        after = (await s.client.get(f"/v1/sessions/{session}")).json()
        again = await s.turn("go on", flow=flow, session_id=session)
        assert again.json()["message"] == "Two."
    assert failed.status_code == 200
    result = failed.json()
    assert not result["success"]
    assert result["session_id"] == session
    assert "/srv/private" not in failed.text
    for kept in ("stages", "status"):
        assert before["head"].get(kept) == after["head"].get(kept)
    assert before["head"]["workflow"] == after["head"]["workflow"]
    assert after["head"].get("turn") is None
    return result, before, after


async def test_wrong_types_in_tool_arguments_are_told_to_the_model() -> None:
    async with served(call("count", {"number": "many"}), "Sorry.") as s:
        result = (await s.turn(flow="WorkFlow")).json()
        assert result["message"] == "Sorry."
        assert "number" in str(s.model.requests[1].messages[-1])


async def test_a_handler_that_returns_nonsense_is_a_typed_error() -> None:
    result, _, _ = await failing("WorkFlow", "x", call("nonsense"))
    assert result["error"]["code"] in ("invalid_outcome", "non_json_value")
    assert "nonsense" in result["error"]["message"]


async def test_a_handler_that_raises_is_a_typed_error() -> None:
    result, _, after = await failing("WorkFlow", "x", call("boom"))
    assert result["error"]["code"] == "handler"
    assert "log" in result["error"]["message"]
    results = [row for _, row in after["messages"]["Work"] if row["role"] == "tool"]
    assert [row["outcome"] for row in results] == ["error"]


async def test_a_hook_that_raises_is_a_typed_error() -> None:
    result, before, _ = await failing("HookFlow", "break")
    assert result["error"]["code"] == "handler"
    assert before["head"]["stages"]["Hooked"]["state"]["visits"] == 1


async def test_a_model_that_fails_is_a_retryable_error() -> None:
    result, _, _ = await failing("TalkFlow", "x", *[Reply.error(status=503)] * 3, fake=True)
    assert result["error"]["code"] == "model_invocation"
    assert result["error"]["retryable"]


# -- idempotency


async def test_the_same_post_during_a_turn_attaches_to_it() -> None:
    gate = anyio.Event()
    async with served(Reply.text("Once.").gated(gate)) as s:
        key = {"Idempotency-Key": "k1"}
        first = asyncio.create_task(s.turn(headers=key))
        second = asyncio.create_task(s.turn(headers=key))
        await until(lambda: s.model.open)
        gate.set()
        answers = [(await first).json(), (await second).json()]
        assert answers[0] == answers[1]
        assert answers[0]["message"] == "Once."


async def test_the_same_post_after_a_turn_gets_its_stored_result() -> None:
    async with served("Once.") as s:
        key = {"Idempotency-Key": "k1"}
        first, second = [(await s.turn(headers=key)).json() for _ in range(2)]
        assert first == second
        rows = (await s.client.get(f"/v1/sessions/{first['session_id']}")).json()["inbox"]
        assert [row["key"] for row in rows] == ["-:k1"]


async def test_a_key_with_another_message_is_a_conflict() -> None:
    async with served("Once.") as s:
        key = {"Idempotency-Key": "k1"}
        session = (await s.turn(headers=key)).json()["session_id"]
        other = await s.turn("something else", headers=key)
        assert other.status_code == 409
        assert other.json()["code"] == "idempotency_conflict"
        assert other.json()["session_id"] == session
        assert "new key" in other.json()["detail"]


async def test_callers_with_different_names_never_share_a_key() -> None:
    async with served("For one.", "For two.", api_keys=["one:k-1", "two:k-2"]) as s:
        answers = [
            (await s.turn(headers={"Idempotency-Key": "same", "X-API-Key": key})).json()
            for key in ("k-1", "k-2", "k-1")
        ]
        assert [answer["message"] for answer in answers] == ["For one.", "For two.", "For one."]
        assert answers[0]["session_id"] != answers[1]["session_id"]


@pytest.mark.parametrize("key", [" ", "k" * 201])
async def test_a_key_that_is_none_is_refused(key: str) -> None:
    async with served() as s:
        answer = await s.turn(headers={"Idempotency-Key": key})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["header"] == "Idempotency-Key"


# -- busy, cancel


async def test_a_busy_session_is_a_conflict_that_says_when_to_come_back() -> None:
    gate = anyio.Event()
    async with served("One.", Reply.text("Two.").gated(gate), "Three.") as s:
        session = (await s.turn()).json()["session_id"]
        running = asyncio.create_task(s.turn(session_id=session))
        await until(lambda: s.model.open)
        refused = await s.turn("me too", session_id=session, on_busy="reject")
        queued = asyncio.create_task(s.turn("me too", session_id=session))
        assert refused.status_code == 409
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["code"] == "session_busy"
        assert refused.json()["session_id"] == session
        assert refused.json()["retryable"]
        gate.set()
        assert (await running).json()["message"] == "Two."
        assert (await queued).json()["message"] == "Three."


async def test_cancel_ends_the_turn_and_says_so_to_both() -> None:
    async with served("One.", Reply.text("never seen").stalling(), "Three.") as s:
        session = (await s.turn()).json()["session_id"]
        idle = await s.client.post(f"/v1/sessions/{session}/cancel")
        assert (idle.status_code, idle.json()) == (200, {"cancelled": False})
        running = asyncio.create_task(s.turn(session_id=session))
        await s.model.wait_stalled()
        other = await s.client.post(f"/v1/sessions/{session}/cancel", json={"run_id": "other"})
        assert other.json() == {"cancelled": False}
        done = await s.client.post(f"/v1/sessions/{session}/cancel", json={"reason": "changed my mind"})
        assert done.json() == {"cancelled": True}
        answer = await running
        assert answer.status_code == 200
        assert answer.json()["error"]["code"] == "turn_cancelled"
        assert answer.json()["error"]["ids"]["kind"] == "user"
        assert (await s.turn("go on", session_id=session)).json()["message"] == "Three."


async def test_a_turn_of_a_session_that_is_deleted_meanwhile_is_a_conflict() -> None:
    async with served("One.", Reply.text("never seen").stalling()) as s:
        session = (await s.turn()).json()["session_id"]
        running = asyncio.create_task(s.turn(session_id=session))
        await s.model.wait_stalled()
        assert (await s.client.delete(f"/v1/sessions/{session}")).status_code == 204
        answer = await running
        assert answer.status_code == 409
        assert answer.json()["code"] == "turn_cancelled"
        assert "deleted" in answer.json()["detail"]


async def test_a_cancelled_request_leaves_its_turn_alone() -> None:
    # Some servers cancel the handler of a connection that was lost; uvicorn does not (see test_live).
    gate = anyio.Event()
    async with served("One.", Reply.text("Two.").gated(gate)) as s:
        session = (await s.turn()).json()["session_id"]
        running = asyncio.create_task(s.turn("go", session_id=session, headers={"Idempotency-Key": "k"}))
        await until(lambda: s.model.open)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gate.set()
        again = await s.turn("go", session_id=session, headers={"Idempotency-Key": "k"})
        assert again.json()["message"] == "Two."
        assert not s.model.cancelled
