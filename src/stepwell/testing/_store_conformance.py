"""The executable form of the `SessionStore` protocol: what every session store must do, as tests for anybody's store.

Subclass in a test module, mark the class for the anyio plugin of pytest, and give it a `store` fixture::

    @pytest.mark.anyio
    class TestMyStore(SessionStoreConformance):
        @pytest.fixture
        async def store(self):
            store = MyStore(clock=self.clock)
            yield store
            await store.close()

A store that other processes can open by URL passes `SessionStoreProcessConformance` too. Nothing of a test environment
is imported here; to see values where an assertion fails, have them rewritten in the topmost `conftest.py`::

    pytest.register_assert_rewrite("stepwell.testing")
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from stepwell.errors import (
    NewerSchemaError,
    NonJsonValueError,
    SessionConflictError,
    SessionExistsError,
    StoreError,
    UnknownSessionError,
)
from stepwell.sessions import (
    Commit,
    InboxRow,
    InboxUpdate,
    JournalRow,
    Lease,
    LogEntry,
    MemoryHead,
    NewMessage,
    OutRecord,
    SequenceEntry,
    SessionHead,
    SessionStore,
    StageRecord,
    TurnRecord,
    VisitRecord,
    WorkflowRecord,
    export_session,
    import_session,
)

from ._store_base import OTHER, OWNER, TTL, create_session, make_head, make_row, raises
from ._store_leases import LeaseTests
from ._store_rows import RowTests

__all__ = ["SessionStoreConformance"]


class SessionStoreConformance(LeaseTests, RowTests):
    """Tests of one store in one process. Needs a fixture `store`, an empty `SessionStore` per test.

    Where the defaults do not fit, override the hooks `advance` (a store whose clock is not `self.clock`) and
    `stored_bytes` (a store that can tell its size), and the sizes `large_bytes` and `growth_turns`.
    """

    # --- the document -----------------------------------------------------------------------------------------------

    async def test_a_created_session_is_there_whole(self, store: SessionStore) -> None:
        head = make_head(state={"a": [1, 2.5, None, True, "ü"]}, turn=True)
        head.memories["A"] = MemoryHead(0, 2)
        commit = Commit(
            head=head,
            messages=[make_row(0), make_row(1)],
            sequence=[SequenceEntry("A", 1.25), SequenceEntry("B", 2.5, 1)],
            log=[LogEntry("info", 1.0, "began", {"n": [1]})],
            inbox=[InboxRow("k", "input", b'{"t":1}', "taken"), InboxRow("d", "cancel", b"", "done", b"x")],
            journal=[JournalRow("j", "done", b"{}")],
        )
        acquired = await store.create(commit, owner=OWNER, ttl=TTL)
        assert acquired.revision == 1
        assert acquired.lease.epoch == 1
        assert acquired.lease.owner == OWNER
        assert [row.key for row in acquired.inbox] == ["k"]
        loaded, lease = await store.load("s")
        head.revision = 1
        assert loaded == head
        assert lease == acquired.lease
        assert [(row.position, row.message.id) for row in await store.load_messages("s", "A")] == [
            (0, "A|t|0"),
            (1, "A|t|1"),
        ]
        assert await store.load_sequence("s") == list(commit.sequence)
        assert await store.load_log("s") == list(commit.log)
        assert await store.inbox_list("s") == list(commit.inbox)
        assert await store.inbox_list("s", pending=True) == [commit.inbox[0]]
        assert await store.journal_load("s") == list(commit.journal)

    async def test_an_id_is_taken_once(self, store: SessionStore) -> None:
        await create_session(store, state=1)
        with raises(SessionExistsError):
            await create_session(store, state=2)
        assert (await store.load("s"))[0].stages["A"].state == {"value": 1}

    async def test_of_fifty_creations_one_wins(self, store: SessionStore) -> None:
        results = await asyncio.gather(*(create_session(store, state=n) for n in range(50)), return_exceptions=True)
        assert sum(isinstance(result, Lease) for result in results) == 1
        assert all(isinstance(result, Lease | SessionExistsError) for result in results)

    async def test_what_is_not_there_is_unknown(self, store: SessionStore) -> None:
        for name in ("nobody", "", "bad\udc00id"):
            for call in (
                store.acquire(name, OWNER, ttl=TTL),
                store.load(name),
                store.load_messages(name, "A"),
                store.load_sequence(name),
                store.load_log(name),
                store.inbox_put(name, InboxRow("k", "input", b"")),
                store.inbox_get(name, "k"),
                store.inbox_list(name),
                store.journal_load(name),
            ):
                with raises(UnknownSessionError):
                    await call
            assert await store.delete(name) is False
        await create_session(store)
        assert await store.load_messages("s", "elsewhere") == []
        for key in ("elsewhere", "", "\ud800"):
            assert await store.inbox_get("s", key) is None
            assert await store.journal_load("s", key) == []

    async def test_the_store_shares_no_objects_with_callers(self, store: SessionStore) -> None:
        head = make_head(state=[1])
        data = {"n": [1]}
        await store.create(Commit(head=head, log=[LogEntry("info", 1.0, "x", data)]), owner=OWNER, ttl=TTL)
        head.stages["A"].state["value"].append(2)
        data["n"].append(2)
        first, _ = await store.load("s")
        first.stages["A"].state["value"].append(3)
        (await store.load_log("s"))[0].data["n"].append(3)
        acquired = await store.acquire("s", OWNER, ttl=TTL)
        assert acquired.head is not None
        acquired.head.stages["A"].state["value"].append(4)
        assert (await store.load("s"))[0].stages["A"].state == {"value": [1]}
        assert (await store.load_log("s"))[0].data == {"n": [1]}

    async def test_values_come_back_as_they_were(self, store: SessionStore) -> None:
        values: list[Any] = [
            "2026-01-01T00:00:00Z",  # text that looks like a date stays text
            "2026-01-01",
            "12:30:00.123456",
            "P1D",
            "01936f0e-aaaa-7bbb-8ccc-0123456789ab",
            "aGVsbG8=",
            "1e5",
            "\x00\x01\x7f\u2028\ufeff\U0001f600",
            "",
            {"": {"key with . and [0] and /~": 1}},
            [0, -0.0, 1.5, 1e300, 5e-324, 2**53 + 1, -(2**63), 2**64, True, False, None],
            [[], {}, [[]], [{}]],
        ]
        lease = await create_session(store, state=values)
        text = LogEntry("warning", 0.1, "2026-01-01T00:00:00Z", values)
        await store.save(lease, Commit(head=make_head(state=values), log=[text]), 1)
        loaded = (await store.load("s"))[0].stages["A"].state["value"]
        assert loaded == values
        assert json.dumps(loaded) == json.dumps(values)  # also tells 1 from True, and 0.0 from -0.0
        assert (await store.load_log("s")) == [text]

    async def test_deep_json_comes_back(self, store: SessionStore) -> None:
        deep: Any = "bottom"
        for level in range(300):
            deep = [deep] if level % 2 else {"k": deep}
        await create_session(store, state=deep)
        assert (await store.load("s"))[0].stages["A"].state["value"] == deep

    async def test_what_is_not_json_is_refused(self, store: SessionStore) -> None:
        lease = await create_session(store, state="before")
        deep: Any = 0
        for _ in range(5_000):
            deep = [deep]
        for value in ("\ud800", {"\udfff": 1}, float("nan"), float("inf"), b"bytes", {1}, {1: 2}, 10**5_000, deep):
            with raises(NonJsonValueError):
                await store.save(lease, Commit(head=make_head(state=value), messages=[make_row(0)]), 1)
            with raises(NonJsonValueError):
                await create_session(store, "new", state=value)
            with raises(NonJsonValueError):
                await store.save(lease, Commit(head=make_head(), log=[LogEntry("info", 0.0, "x", [value])]), 1)
        visit = VisitRecord("A", message={"content": b"bytes"})
        result = TurnRecord("r", "i", VisitRecord("A"), result={"n": float("nan")})
        shown = TurnRecord("r", "i", VisitRecord("A"), outs=[OutRecord("r-step-0", "A", parts=[{"n": {1}}])])
        for commit in (
            Commit(head=make_head(stages={"A": StageRecord(model={"n": {1}})})),
            Commit(head=make_head(stages={"\ud800": StageRecord()})),
            Commit(head=make_head(workflow=WorkflowRecord("Flow", context={"n": float("nan")}))),
            Commit(head=make_head(workflow=WorkflowRecord("Flow", model={"n": object()}))),
            Commit(head=SessionHead("s", WorkflowRecord("Flow"), turn=TurnRecord("r", "i", visit))),
            Commit(head=SessionHead("s", WorkflowRecord("Flow"), turn=result)),
            Commit(head=SessionHead("s", WorkflowRecord("Flow"), turn=shown)),
            Commit(head=make_head(), log=[LogEntry("info", 0.0, "\ud800")]),
            Commit(head=make_head(), sequence=[SequenceEntry("\ud800", 0.0)]),
            Commit(head=make_head(), messages=[NewMessage("\ud800", 0, b"{}")]),
            Commit(head=make_head(), inbox=[InboxUpdate("\ud800", "done")]),
            Commit(head=make_head(), journal=[JournalRow("\ud800", "done")]),
        ):
            with raises(NonJsonValueError):
                await store.save(lease, commit, 1)
        with raises(NonJsonValueError):
            await store.inbox_put("s", InboxRow("\ud800", "input", b""))
        with raises(NonJsonValueError):
            await store.journal_put(lease, JournalRow("\ud800", "done"))
        head, _ = await store.load("s")
        assert (head.revision, head.stages["A"].state) == (1, {"value": "before"})
        assert await store.load_messages("s", "A") == []
        with raises(UnknownSessionError):
            await store.load("new")

    async def test_a_large_state_comes_back(self, store: SessionStore) -> None:
        state = ["x" * 1_000] * (self.large_bytes // 1_003)
        lease = await create_session(store)
        assert await store.save(lease, Commit(head=make_head(state=state)), 1) == 2
        await store.renew(lease, ttl=TTL)
        assert (await store.load("s"))[0].stages["A"].state["value"] == state

    async def test_a_newer_document_is_refused_and_left_alone(self, store: SessionStore) -> None:
        await create_session(store, schema="stepwell.session/2")
        for _ in range(2):
            with raises(NewerSchemaError):
                await store.load("s")

    # --- saving -----------------------------------------------------------------------------------------------------

    async def test_of_two_saves_one_wins(self, store: SessionStore) -> None:
        await self._race(store, 2)

    async def test_of_fifty_saves_one_wins(self, store: SessionStore) -> None:
        await self._race(store, 50)

    async def _race(self, store: SessionStore, writers: int) -> None:
        lease = await create_session(store)

        async def save(number: int) -> int:
            return await store.save(lease, Commit(head=make_head(state=number), messages=[make_row(number)]), 1)

        results = await asyncio.gather(*(save(number) for number in range(writers)), return_exceptions=True)
        winners = [number for number, result in enumerate(results) if result == 2]
        assert len(winners) == 1
        assert sum(isinstance(result, SessionConflictError) for result in results) == writers - 1
        head, _ = await store.load("s")
        assert (head.revision, head.stages["A"].state) == (2, {"value": winners[0]})
        assert [row.position for row in await store.load_messages("s", "A")] == winners

    async def test_losers_do_not_fail_their_neighbours(self, store: SessionStore) -> None:
        *leases, last = [await create_session(store, f"s{n}") for n in range(21)]
        results = await asyncio.gather(
            *(
                store.save(lease, Commit(head=make_head(lease.session, state=n), messages=[make_row(0)]), 1 + n % 2)
                for n, lease in enumerate(leases)
            ),
            store.save(last, Commit(head=make_head("s20"), messages=[NewMessage("A", 1 << 40, b"")]), 1),
            return_exceptions=True,
        )
        assert results[0:20:2] == [2] * 10
        assert all(isinstance(result, SessionConflictError) for result in results[1:20:2])
        assert isinstance(results[20], StoreError)

    async def test_a_taken_position_undoes_the_whole_commit_and_no_other(self, store: SessionStore) -> None:
        lease, other = await create_session(store), await create_session(store, "other")
        await store.save(lease, Commit(head=make_head(state="old"), messages=[make_row(0, "first")]), 1)
        bad = Commit(
            head=make_head(state="new", turn=True),
            messages=[make_row(1), make_row(0, "second")],
            sequence=[SequenceEntry("A", 1.0)],
            inbox=[InboxRow("k", "input", b"")],
            release=True,
        )
        results = await asyncio.gather(
            store.save(lease, bad, 2),
            store.save(other, Commit(head=make_head("other"), messages=[make_row(0)]), 1),
            return_exceptions=True,
        )
        assert type(results[0]) is StoreError
        assert results[1] == 2
        head, held = await store.load("s")
        assert (head.revision, head.turn, head.stages["A"].state) == (2, None, {"value": "old"})
        assert held == lease
        assert [row.position for row in await store.load_messages("s", "A")] == [0]
        assert await store.load_sequence("s") == []
        assert await store.inbox_list("s") == []
        # and the store's own book-keeping was not confused by it
        again = Commit(
            head=make_head(), messages=[make_row(1), make_row(0, ns="B")], sequence=[SequenceEntry("C", 1.0)]
        )
        assert await store.save(lease, again, 2) == 3
        assert [row.position for row in await store.load_messages("s", "B")] == [0]
        assert [entry.stage for entry in await store.load_sequence("s")] == ["C"]

    async def test_a_lost_answer_can_be_told(self, store: SessionStore) -> None:
        lease = await create_session(store)
        await store.save(lease, Commit(head=make_head(state="mine")), 1)  # suppose that the answer was lost
        with raises(SessionConflictError):
            await store.save(lease, Commit(head=make_head(state="mine")), 1)
        head, held = await store.load("s")
        assert held is not None
        assert (head.revision, held.epoch, held.incarnation) == (2, lease.epoch, lease.incarnation)

    async def test_a_cancelled_save_happened_or_did_not(self, store: SessionStore) -> None:
        lease = await create_session(store)
        revision = 1
        for waits in (0, 0, 1, 1, 2, 3, 5, 8):
            commit = Commit(head=make_head(state=revision), messages=[make_row(revision)])
            task = asyncio.ensure_future(store.save(lease, commit, revision))
            for _ in range(waits):
                await asyncio.sleep(0)
            task.cancel()
            # Whatever became of it, the next one, which the store runs after it, makes sure that it is done.
            await asyncio.gather(task, store.save(lease, commit, revision), return_exceptions=True)
            head, _ = await store.load("s")
            assert head.revision == revision + 1
            assert head.stages["A"].state == {"value": revision}
            revision = head.revision
        positions = [row.position for row in await store.load_messages("s", "A")]
        assert positions == list(range(1, revision))

    # --- the rest ---------------------------------------------------------------------------------------------------

    async def test_a_session_can_be_moved(self, store: SessionStore) -> None:
        head = make_head(state={"a": 1}, turn=True)
        head.memories["A"] = MemoryHead(2, 4)
        commit = Commit(
            head=head,
            messages=[make_row(2), make_row(3)],
            sequence=[SequenceEntry("A", 1.25)],
            log=[LogEntry("error", 1.0, "x", [1])],
            inbox=[InboxRow("k", "input", b"{}", "done", b"{}")],
            journal=[JournalRow("j", "intent", b"{}")],
        )
        await store.create(commit, owner=OWNER, ttl=TTL)
        document = json.loads(json.dumps(await export_session(store, "s")))
        with raises(SessionExistsError):
            await import_session(store, document)
        assert await import_session(store, document, session_id="copy") == "copy"
        copy = await export_session(store, "copy")
        assert copy.pop("head") == {**document.pop("head"), "id": "copy"}
        assert copy == document
        await store.delete("s")
        assert (await store.acquire("copy", OTHER, ttl=TTL)).lease.epoch == 2

    async def test_many_sessions_at_once(self, store: SessionStore) -> None:
        async def work(name: str) -> None:
            lease = await create_session(store, name)
            for n in range(5):
                commit = Commit(head=make_head(name, state=n), messages=[make_row(n)], release=n == 4)
                assert await store.save(lease, commit, n + 1) == n + 2
            await store.acquire(name, OTHER, ttl=TTL)

        await asyncio.gather(*(work(f"s{n}") for n in range(40)))
        rows, _ = await store.list(limit=1000)
        assert {row.revision for row in rows} == {6}
        assert len(rows) == 40

    async def test_close_finishes_what_is_under_way(self, store: SessionStore) -> None:
        lease = await create_session(store)
        save = asyncio.ensure_future(store.save(lease, Commit(head=make_head()), 1))
        await asyncio.sleep(0)
        await store.close()
        assert await save == 2
        await store.close()
