"""Flows, sessions and health over HTTP."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from server.kit import served
from stepwell.errors import StoreBusyError
from stepwell.server import _api

pytestmark = pytest.mark.anyio


async def test_flows_with_their_stages_and_tools() -> None:
    async with served() as s:
        flows = (await s.client.get("/v1/flows")).json()["flows"]
        talk, work, _, silent = flows
        assert (talk["id"], talk["kind"], talk["aliases"]) == ("TalkFlow", "flow", ["OldTalk", "team/talk"])
        assert (talk["initial"], talk["model"], talk["requires_user_message"]) == ("Talk", "scripted:m", True)
        assert not silent["requires_user_message"]
        stages = [(stage["id"], stage["kind"]) for stage in work["stages"]]
        assert stages == [("Work", "step"), ("Router", "logic"), ("TerminateSessionStep", "end")]
        tools = {tool["name"]: tool for tool in work["stages"][0]["tools"]}
        assert tools.keys() == {"count", "nonsense", "boom", "page", "odd", "leave"}
        assert tools["count"]["description"] == "Count."
        assert tools["count"]["parameters"]["required"] == ["number"]


async def test_sessions_are_listed_filtered_and_paged() -> None:
    async with served(default="Hello.") as s:
        made = [(await s.turn(flow=flow)).json()["session_id"] for flow in ("TalkFlow", "WorkFlow", "TalkFlow")]
        everything = (await s.client.get("/v1/sessions")).json()
        assert [row["id"] for row in everything["sessions"]] == made[::-1]
        assert everything["next"] is None
        assert everything["sessions"][0].keys() >= {"flow", "status", "revision", "created_at", "saved_at", "current"}
        some = (await s.client.get("/v1/sessions?flow=TalkFlow&status=running")).json()
        assert [row["id"] for row in some["sessions"]] == [made[2], made[0]]
        assert (await s.client.get("/v1/sessions?status=completed")).json()["sessions"] == []
        seen: list[str] = []
        page: dict[str, Any] = {"next": None}
        while not seen or page["next"]:
            after = {"after": page["next"]} if page["next"] else {}
            page = (await s.client.get("/v1/sessions", params={"limit": 1, **after})).json()
            seen += [row["id"] for row in page["sessions"]]
        assert seen == made[::-1]


async def test_an_exported_session_can_be_imported_and_a_deleted_one_is_gone() -> None:
    async with served("Hello.", "Again.") as s:
        session = (await s.turn()).json()["session_id"]
        exported = (await s.client.get(f"/v1/sessions/{session}")).json()
        assert exported["format"] == "stepwell.export/1"
        assert (await s.client.delete(f"/v1/sessions/{session}")).status_code == 204
        again = await s.client.delete(f"/v1/sessions/{session}")
        assert (again.status_code, again.json()["code"]) == (404, "unknown_session")
        await s.engine.import_session(exported)
        assert (await s.turn("and?", session_id=session)).json()["message"] == "Again."


async def test_healthy_and_ready() -> None:
    async with served() as s:
        for path in ("/healthz", "/readyz"):
            answer = await s.client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert (await s.client.head("/healthz")).status_code == 200


async def test_not_ready_without_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(**kwargs: Any) -> Any:
        raise StoreBusyError("Locked: /srv/private/s.db.")

    async def stuck(**kwargs: Any) -> Any:
        await anyio.sleep_forever()

    async with served() as s:
        monkeypatch.setattr(s.engine.store, "list", busy)
        answer = await s.client.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "store_busy")
        assert answer.headers["retry-after"] == "1"
        assert "/srv" not in answer.text
        monkeypatch.setattr(_api, "_READY_SECONDS", 0.01)
        monkeypatch.setattr(s.engine.store, "list", stuck)
        answer = await s.client.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "store_busy")
        assert (await s.client.get("/healthz")).status_code == 200


async def test_a_stopping_server_is_not_ready_and_begins_nothing() -> None:
    async with served() as s:
        await s.app.drain(0)
        assert (await s.client.get("/readyz")).json()["code"] == "engine_closed"
        answer = await s.turn()
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_closed")
        assert answer.json()["retryable"]
        assert answer.headers["retry-after"] == "5"
        run = await s.client.post("/ai/run", json={"flowName": "TalkFlow", "message": "x"})
        assert (run.status_code, run.json()["success"]) == (400, False)
