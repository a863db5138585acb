"""The engine on every store: the same conversation, and processes that want the same session at the same time."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_flows import BookFlow, TalkFlow
from stepwell import Engine
from stepwell.messages import JsonObject
from stepwell.sessions import open_store
from stepwell.testing import FakeClock, Reply, ScriptedModel

pytestmark = pytest.mark.anyio

STORES = ["memory", "sqlite", "postgres"]


def url_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "postgres":
        return request.getfixturevalue("postgres_database")
    return "memory://" if kind == "memory" else f"sqlite:///{tmp_path / 's.db'}"


def answer(request: Any) -> Any:
    """Depends only on the history, as with a real model."""
    last = getattr(request.messages[-1], "content", "")
    if last == "Ada":
        return Reply.tool_call("note", {"text": "first"})
    if last == "noted first":
        return Reply.tool_call("save_name", {"name": "Ada"})
    return Reply.tool_call("done", {}) if last == "yes" else "Is Ada right?"


async def converse(url: str) -> JsonObject:
    """A conversation to its end, with an input that is sent twice; and what is stored of it."""
    clock = FakeClock()
    async with Engine([BookFlow], models={"scripted": ScriptedModel(default=answer)}, store=url, clock=clock) as engine:
        first = await engine.run("BookFlow", "Ada", idempotency_key="k-1")
        again = await engine.run("BookFlow", "Ada", idempotency_key="k-1")
        assert (again.session_id, again.message) == (first.session_id, "Is Ada right?")
        last = await engine.run("BookFlow", "yes", session_id=first.session_id)
        assert last.status == "completed"
        page, cursor = await engine.list_sessions(status="completed")
        assert ([one.id for one in page], cursor) == ([first.session_id], None)
        document = await engine.export_session(first.session_id)
        assert await engine.delete_session(first.session_id)
        return document


def told(document: JsonObject) -> JsonObject:
    """What of a document depends on neither the store nor on ids that are drawn."""
    head = document["head"]
    return {
        "stages": head["stages"],
        "status": head["status"],
        "memories": head["memories"],
        "revision": head["revision"],
        "messages": {
            ns: [(at, message["role"], message.get("content")) for at, message in rows]
            for ns, rows in document["messages"].items()
        },
        "sequence": document["sequence"],
        "log": document["log"],
        "inbox": [(row["kind"], row["state"]) for row in document["inbox"]],
    }


@pytest.mark.parametrize("kind", STORES[1:])
async def test_the_same_conversation_is_stored_the_same_everywhere(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert told(await converse(url_of(kind, request, tmp_path))) == told(await converse("memory://"))


WORKER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from engine_flows import TalkFlow
from stepwell import Engine
from stepwell.testing import ScriptedModel

async def main(_, url, name):
    model = ScriptedModel(default=lambda request: f"to {request.messages[-1].content}")
    async with Engine([TalkFlow], models={"scripted": model}, store=url) as engine:
        for n in range(12):
            result = await engine.run("TalkFlow", f"{name}{n}", session_id="shared")
            assert result.success, result
            assert result.message == f"to {name}{n}", result

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kind", STORES[1:])
async def test_processes_that_want_one_session_take_turns(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = url_of(kind, request, tmp_path)
    model = ScriptedModel(default=lambda request: f"to {request.messages[-1].content}")
    async with Engine([TalkFlow], models={"scripted": model}, store=url) as engine:
        created = await engine.run("TalkFlow", "hello")
        document = await engine.export_session(created.session_id)
        await engine.import_session(document, session_id="shared")
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parents[1]), url]
    processes = [await asyncio.create_subprocess_exec(*command, name) for name in "abc"]
    assert await asyncio.gather(*(process.wait() for process in processes)) == [0, 0, 0]
    store = open_store(url)
    try:
        head, lease = await store.load("shared")
        assert (head.turn, lease) == (None, None)
        said = [row.message.text for row in await store.load_messages("shared", "TalkStep")]
        pairs = list(zip(said[::2], said[1::2], strict=True))
        assert all(reply == f"to {question}" for question, reply in pairs)
        assert sorted(question for question, _ in pairs) == sorted(
            ["hello", *(f"{p}{n}" for p in "abc" for n in range(12))]
        )
    finally:
        await store.close()
