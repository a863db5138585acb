"""Sessions as one JSON document."""

import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import InvalidInputError, NewerSchemaError, SessionExistsError, StoreBusyError, StoreDataError
from stepwell.messages import AssistantMessage, DirectMessage, FilePart, JsonObject, TextPart, ToolResult, UserMessage
from stepwell.sessions import (
    FORMAT,
    Commit,
    InboxRow,
    JournalRow,
    MemoryStore,
    SessionHead,
    SessionStore,
    Summary,
    export_session,
    import_session,
    open_store,
)
from stepwell.testing._store_base import OWNER, TTL, make_head

pytestmark = pytest.mark.anyio

FIXTURE = Path(__file__).parent.parent / "fixtures" / "session-1.json"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SessionStore]:
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'store.db'}"}
    store = open_store(urls.get(request.param) or request.getfixturevalue("postgres_database"))
    yield store
    await store.close()


@pytest.fixture
def document() -> JsonObject:
    return json.loads(FIXTURE.read_text())


async def test_the_document_of_schema_1_loads_for_ever(store: SessionStore, document: JsonObject) -> None:
    """Written by the first release. It is never written anew; a later schema gets a file of its own."""
    assert await import_session(store, document) == "release-1"
    head, lease = await store.load("release-1")
    assert lease is None
    assert (head.revision, head.status, head.previous, head.successor) == (1, "suspended", "release-0", "release-2")
    assert (head.workflow.kind, head.workflow.schema_version, head.workflow.context) == ("graph", 3, {"tenant": "t1"})
    assert head.stages["Address"].state == {"list": [1, 2.5, "x", None, False]}
    assert head.memories["intake"].summary == Summary("They said hello.", "Intake|2026-03-01T09:30:00.125Z|00000000")
    assert head.usage["openai:gpt-5"].usage.cache_read == 300
    assert head.usage["anthropic:claude"].usage.output is None
    assert head.turn is not None
    assert head.turn.visit.alternate == {"provider": "google", "name": "gemini"}
    intake = [row.message for row in await store.load_messages("release-1", "intake")]
    assert [type(message) for message in intake] == [
        UserMessage,
        AssistantMessage,
        ToolResult,
        ToolResult,
        AssistantMessage,
        DirectMessage,
        DirectMessage,
    ]
    assert isinstance(intake[1], AssistantMessage)
    assert intake[1].calls[0].args["since"] == "2026-01-01T00:00:00Z"
    assert intake[1].calls[1].args == "not json {"
    assert intake[1].provider_data == {"item_ids": ["rs_1"], "signature": "c2ln"}
    letter = (await store.load_messages("release-1", "address"))[0].message
    assert isinstance(letter, UserMessage)
    assert isinstance(letter.content[0], TextPart)
    assert letter.content[1] == FilePart("application/pdf", data="JVBERi0=", name="letter.pdf")
    assert [row.position for row in await store.load_messages("release-1", "intake")] == list(range(3, 10))
    assert [entry.level for entry in await store.load_sequence("release-1")] == [0, 1, 0]
    assert [entry.level for entry in await store.load_log("release-1")] == ["debug", "info", "warning", "error"]
    assert [row.state for row in await store.journal_load("release-1")] == ["intent", "unknown", "done", "refused"]
    assert await store.inbox_get("release-1", "post-0") == InboxRow(
        "post-0", "input", b"{}", "done", b'{"success":true}'
    )
    again = await export_session(store, "release-1")
    document["head"]["revision"] = 1
    assert json.loads(json.dumps(again)) == document


async def test_between_stores_and_back(store: SessionStore, document: JsonObject) -> None:
    await import_session(store, document)
    other = MemoryStore()
    await import_session(other, await export_session(store, "release-1"), session_id="moved")
    await import_session(store, await export_session(other, "moved"), session_id="back")
    first, second = await export_session(store, "release-1"), await export_session(store, "back")
    assert first["head"].pop("id") == "release-1"
    assert second["head"].pop("id") == "back"
    assert first == second


def put(document: JsonObject, path: str, value: Any) -> JsonObject:
    at: Any = document
    *parents, last = path.strip("/").split("/")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    if isinstance(at, list):
        at[int(last)] = value
    elif value is ...:
        del at[last]
    else:
        at[last] = value
    return document


DEEP: Any = []
for _ in range(5_000):
    DEEP = [DEEP]

HOSTILE: list[tuple[str, Any, str]] = [
    ("/format", "other", "/format"),
    ("/format", 1, "/format"),
    ("/format", "stepwell.export/one", "/format"),
    ("/head", ..., ""),
    ("/head", [], "/head"),
    ("/extra", 1, ""),
    ("/head/id", "a/b", "/head/id"),
    ("/head/id", "", "/head/id"),
    ("/head/id", "x" * 129, "/head/id"),
    ("/head/id", 1, "/head/id"),
    ("/head/schema", "other/1", "/head/schema"),
    ("/head/status", "lost", "/head/status"),
    ("/head/workflow", ..., "/head"),
    ("/head/workflow/id", 5, "/head/workflow/id"),
    ("/head/stages/Intake/state", "x", "/head/stages/*/state"),
    ("/head/stages/Intake/state/x", {1: 2}, "/head/stages/Intake/state/x/1"),
    ("/head/stages/Intake/state/x", float("nan"), "/head/stages/Intake/state/x"),
    ("/head/stages/Intake/state/x", "\ud800", "/head/stages/Intake/state/x"),
    ("/head/stages/Intake/state/x", {1, 2}, "/head/stages/Intake/state/x"),
    ("/head/stages/Intake/state/x", DEEP, ""),
    ("/head/memories/intake/first", "0", "/head/memories/*/first"),
    ("/head/memories/intake/first", -1, "/head/memories/intake"),
    ("/head/memories/intake/next", 1 << 40, "/head/memories/intake"),
    ("/head/memories/intake/first", 11, "/head/memories/intake"),
    ("/head/memories/intake/next", 11, "/messages/intake"),
    ("/head/memories/intake", ..., "/messages/intake"),
    ("/messages", [], "/messages"),
    ("/messages/x~y", [], "/messages/x~0y"),
    ("/messages/intake", ..., "/messages/intake"),
    ("/messages/intake/0/0", 4, "/messages/intake"),
    ("/messages/intake/0", [3], "/messages/*/0"),
    ("/messages/intake/0/1", "x", "/messages/*/0/1"),
    ("/messages/intake/0/1/role", "boss", "/messages/intake/0/1"),
    ("/messages/intake/0/1/content", "", "/messages/intake/0/1"),
    ("/messages/intake/1/1/calls", [], "/messages/intake/2/1"),
    ("/sequence/0/at", "now", "/sequence/0/at"),
    ("/log/0/level", "fatal", "/log/0/level"),
    ("/journal/0/state", "new", "/journal/0/state"),
    ("/journal/0/key", "a", "/journal/2/key"),
    ("/inbox/1/key", "post-1", "/inbox/1/key"),
    ("/inbox/0/kind", "mail", "/inbox/0/kind"),
    ("/inbox/0/payload", {"a": 1}, "/inbox/0/payload"),
    ("/inbox/0/more", 1, "/inbox/0"),
]


@pytest.mark.parametrize(("path", "value", "pointer"), HOSTILE)
async def test_hostile_documents_leave_nothing(
    store: SessionStore, document: JsonObject, path: str, value: Any, pointer: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await import_session(store, put(document, path, value))
    if value is not DEEP:
        assert caught.value.pointer == pointer
    assert await store.list() == ([], None)


@pytest.mark.parametrize("value", [None, [], "x", 5, {}, {"format": None}, {"format": FORMAT}])
async def test_what_is_no_document_at_all(store: SessionStore, value: Any) -> None:
    with pytest.raises(InvalidInputError):
        await import_session(store, value)
    assert await store.list() == ([], None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/format", "stepwell.export/2"),
        ("/head/schema", "stepwell.session/2"),
        ("/messages/intake/0/1/v", 2),
    ],
)
async def test_newer_documents_are_refused(store: SessionStore, document: JsonObject, path: str, value: Any) -> None:
    with pytest.raises(NewerSchemaError):
        await import_session(store, put(document, path, value))
    assert await store.list() == ([], None)


async def test_open_calls_need_an_open_turn(store: SessionStore, document: JsonObject) -> None:
    del document["head"]["turn"]
    with pytest.raises(InvalidInputError, match="no turn is open") as caught:
        await import_session(store, document)
    assert caught.value.pointer == "/messages/address"


async def test_ids(store: SessionStore, document: JsonObject) -> None:
    before = copy.deepcopy(document)
    for wrong in ("", "a b", "a:b", "ü", "x" * 129):
        with pytest.raises(InvalidInputError) as caught:
            await import_session(store, document, session_id=wrong)
        assert caught.value.pointer == "/session_id"
    document["head"]["id"] = "not a good id"
    assert await import_session(store, document, session_id="good_1-A") == "good_1-A"
    with pytest.raises(SessionExistsError):
        await import_session(store, document, session_id="good_1-A")
    assert document == put(before, "/head/id", "not a good id")  # a caller's document is not changed


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("/head/stages/Intake/state/number", "/head"),
        ("/messages/intake/1/1/provider_data", "/messages/intake/1/1"),
        ("/log/1/data", "/head"),
    ],
)
async def test_numbers_without_end(store: SessionStore, document: JsonObject, path: str, pointer: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        await import_session(store, put(document, path, {"n": 10**5_000}))
    assert caught.value.pointer == pointer
    assert await store.list() == ([], None)


class _Busy(MemoryStore):
    """A session that is saved between any two reads, `times` times."""

    times = 0

    async def load_sequence(self, session: str) -> Any:
        if self.times:
            self.times -= 1
            acquired = await self.acquire(session, OWNER, ttl=TTL)
            assert acquired.head is not None
            await self.save(acquired.lease, Commit(head=acquired.head), acquired.revision)
        return await super().load_sequence(session)


async def test_an_export_is_never_torn() -> None:
    store = _Busy()
    await store.create(Commit(head=make_head()), owner=OWNER, ttl=TTL)
    store.times = 3
    assert (await export_session(store, "s"))["head"]["revision"] == 4
    store.times = 1_000
    with pytest.raises(StoreBusyError, match="try again"):
        await export_session(store, "s")


async def test_payloads_that_are_not_text(store: SessionStore) -> None:
    lease = (await store.create(Commit(head=make_head()), owner=OWNER, ttl=TTL)).lease
    await store.journal_put(lease, JournalRow("k", "done", b"\xff"))
    with pytest.raises(StoreDataError, match="not UTF-8"):
        await export_session(store, "s")


async def test_a_head_alone(store: SessionStore) -> None:
    document = {"format": FORMAT, "head": {"id": "s", "workflow": {"id": "Flow"}}, "messages": {}}
    await import_session(store, document)
    head, _ = await store.load("s")
    assert isinstance(head, SessionHead)
    assert head.workflow.id == "Flow"
