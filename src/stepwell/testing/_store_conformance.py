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
import functools
import itertools
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from stepwell.errors import (
    InvalidInputError,
    LeaseHeldError,
    NewerSchemaError,
    NonJsonValueError,
    SessionConflictError,
    SessionExistsError,
    StaleWriterError,
    StoreError,
    UnknownSessionError,
)
from stepwell.messages import AssistantMessage, UserMessage, encode_message
from stepwell.sessions import (
    Acquired,
    Commit,
    DueSession,
    InboxRow,
    InboxUpdate,
    JournalRow,
    Lease,
    LogEntry,
    MemoryHead,
    NewMessage,
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

from ._clock import FakeClock

__all__ = ["OTHER", "OWNER", "TTL", "SessionStoreConformance", "make_head", "make_row"]

E = TypeVar("E", bound=BaseException)

OWNER = "host:boot:1:1"
OTHER = "host:boot:2:2"
TTL = 15.0


class _Caught(list[E]):
    """What `_raises` caught."""

    @property
    def error(self) -> E:
        return self[0]


@contextmanager
def _raises(kind: type[E]) -> Generator[_Caught[E]]:
    caught: _Caught[E] = _Caught()
    try:
        yield caught
    except kind as error:
        caught.append(error)
    if caught and type(caught.error) is kind:  # the very class: a subclass would make callers do something else
        return
    raise AssertionError(f"{kind.__name__} was not raised, but {caught or 'nothing'}")


def make_head(
    session: str = "s", *, flow: str = "Flow", state: Any = None, turn: bool = False, **fields: Any
) -> SessionHead:
    """Make a small head, with `state` in stage A and an open turn if there is to be one."""
    workflow = fields.pop("workflow", None) or WorkflowRecord(flow, current="A")
    head = SessionHead(session, workflow, created_at=1.5, saved_at=2.5, **fields)
    if state is not None:
        head.stages["A"] = StageRecord(state={"value": state})
    if turn:
        head.turn = TurnRecord("run", "invocation", VisitRecord("A"))
    return head


def make_row(position: int, text: str = "", ns: str = "A") -> NewMessage:
    """Make a row with a user's message."""
    return NewMessage(
        ns, position, encode_message(UserMessage(id=f"A|t|{position}", content=text or f"text {position}"))
    )


async def _create(store: SessionStore, session: str = "s", **fields: Any) -> Lease:
    return (await store.create(Commit(head=make_head(session, **fields)), owner=OWNER, ttl=TTL)).lease


class SessionStoreConformance:
    """Tests of one store in one process. Needs a fixture `store`, an empty `SessionStore` per test.

    Attributes:
        large_bytes: Size of the large state; a store with a limit of its own may lower it.
        growth_turns: Turns of the growth test.
    """

    large_bytes: ClassVar[int] = 10_000_000
    growth_turns: ClassVar[int] = 1_000

    @functools.cached_property
    def clock(self) -> FakeClock:
        """The clock of this test, for stores that take one."""
        return FakeClock()

    async def advance(self, seconds: float) -> None:
        """Let time pass for the store. A store with a clock of its own (a database's) overrides it."""
        await self.clock.advance(seconds)

    async def stored_bytes(self, store: SessionStore) -> int | None:
        """How many bytes the store takes, if it can tell; the growth test compares two answers."""
        return None

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
        await _create(store, state=1)
        with _raises(SessionExistsError):
            await _create(store, state=2)
        assert (await store.load("s"))[0].stages["A"].state == {"value": 1}

    async def test_of_fifty_creations_one_wins(self, store: SessionStore) -> None:
        results = await asyncio.gather(*(_create(store, state=n) for n in range(50)), return_exceptions=True)
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
                with _raises(UnknownSessionError):
                    await call
            assert await store.delete(name) is False
        await _create(store)
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
        lease = await _create(store, state=values)
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
        await _create(store, state=deep)
        assert (await store.load("s"))[0].stages["A"].state["value"] == deep

    async def test_what_is_not_json_is_refused(self, store: SessionStore) -> None:
        lease = await _create(store, state="before")
        deep: Any = 0
        for _ in range(5_000):
            deep = [deep]
        for value in ("\ud800", {"\udfff": 1}, float("nan"), float("inf"), b"bytes", {1}, {1: 2}, 10**5_000, deep):
            with _raises(NonJsonValueError):
                await store.save(lease, Commit(head=make_head(state=value), messages=[make_row(0)]), 1)
            with _raises(NonJsonValueError):
                await _create(store, "new", state=value)
            with _raises(NonJsonValueError):
                await store.save(lease, Commit(head=make_head(), log=[LogEntry("info", 0.0, "x", [value])]), 1)
        visit = VisitRecord("A", message={"content": b"bytes"})
        for commit in (
            Commit(head=make_head(stages={"A": StageRecord(model={"n": {1}})})),
            Commit(head=make_head(stages={"\ud800": StageRecord()})),
            Commit(head=make_head(workflow=WorkflowRecord("Flow", context={"n": float("nan")}))),
            Commit(head=make_head(workflow=WorkflowRecord("Flow", model={"n": object()}))),
            Commit(head=SessionHead("s", WorkflowRecord("Flow"), turn=TurnRecord("r", "i", visit))),
            Commit(head=make_head(), log=[LogEntry("info", 0.0, "\ud800")]),
            Commit(head=make_head(), sequence=[SequenceEntry("\ud800", 0.0)]),
            Commit(head=make_head(), messages=[NewMessage("\ud800", 0, b"{}")]),
            Commit(head=make_head(), inbox=[InboxUpdate("\ud800", "done")]),
            Commit(head=make_head(), journal=[JournalRow("\ud800", "done")]),
        ):
            with _raises(NonJsonValueError):
                await store.save(lease, commit, 1)
        with _raises(NonJsonValueError):
            await store.inbox_put("s", InboxRow("\ud800", "input", b""))
        with _raises(NonJsonValueError):
            await store.journal_put(lease, JournalRow("\ud800", "done"))
        head, _ = await store.load("s")
        assert (head.revision, head.stages["A"].state) == (1, {"value": "before"})
        assert await store.load_messages("s", "A") == []
        with _raises(UnknownSessionError):
            await store.load("new")

    async def test_a_large_state_comes_back(self, store: SessionStore) -> None:
        state = ["x" * 1_000] * (self.large_bytes // 1_003)
        lease = await _create(store)
        assert await store.save(lease, Commit(head=make_head(state=state)), 1) == 2
        await store.renew(lease, ttl=TTL)
        assert (await store.load("s"))[0].stages["A"].state["value"] == state

    async def test_a_newer_document_is_refused_and_left_alone(self, store: SessionStore) -> None:
        await _create(store, schema="stepwell.session/2")
        for _ in range(2):
            with _raises(NewerSchemaError):
                await store.load("s")

    # --- saving -----------------------------------------------------------------------------------------------------

    async def test_of_two_saves_one_wins(self, store: SessionStore) -> None:
        await self._race(store, 2)

    async def test_of_fifty_saves_one_wins(self, store: SessionStore) -> None:
        await self._race(store, 50)

    async def _race(self, store: SessionStore, writers: int) -> None:
        lease = await _create(store)

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
        *leases, last = [await _create(store, f"s{n}") for n in range(21)]
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
        lease, other = await _create(store), await _create(store, "other")
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
        lease = await _create(store)
        await store.save(lease, Commit(head=make_head(state="mine")), 1)  # suppose that the answer was lost
        with _raises(SessionConflictError):
            await store.save(lease, Commit(head=make_head(state="mine")), 1)
        head, held = await store.load("s")
        assert held is not None
        assert (head.revision, held.epoch, held.incarnation) == (2, lease.epoch, lease.incarnation)

    async def test_a_cancelled_save_happened_or_did_not(self, store: SessionStore) -> None:
        lease = await _create(store)
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

    # --- the lease --------------------------------------------------------------------------------------------------

    async def test_a_lease_keeps_others_out_until_it_ends(self, store: SessionStore) -> None:
        lease = await _create(store)
        with _raises(LeaseHeldError) as caught:
            await store.acquire("s", OTHER, ttl=TTL)
        assert (caught.error.owner, caught.error.expires) == (OWNER, lease.expires)
        await self.advance(10)
        renewed = await store.renew(lease, ttl=TTL)
        assert renewed.expires > lease.expires
        assert (renewed.epoch, renewed.incarnation) == (lease.epoch, lease.incarnation)
        await self.advance(10)
        with _raises(LeaseHeldError):
            await store.acquire("s", OTHER, ttl=TTL)
        await self.advance(5)
        taken = await store.acquire("s", OTHER, ttl=TTL)
        assert (taken.lease.owner, taken.lease.epoch) == (OTHER, 2)

    async def test_the_stale_writer_after_a_take_over_writes_nothing(self, store: SessionStore) -> None:
        lease = await _create(store, state="before")
        await self.advance(TTL)
        taken = await store.acquire("s", OTHER, ttl=TTL)
        for call in (
            store.save(lease, Commit(head=make_head(state="stale"), messages=[make_row(0)]), 1),
            store.renew(lease, ttl=TTL),
            store.journal_put(lease, JournalRow("k", "intent")),
        ):
            with _raises(StaleWriterError):
                await call
        await store.release(lease)  # harmless
        head, held = await store.load("s")
        assert (head.revision, head.stages["A"].state) == (1, {"value": "before"})
        assert held == taken.lease
        assert await store.load_messages("s", "A") == []
        assert await store.journal_load("s") == []
        assert await store.save(taken.lease, Commit(head=make_head()), 1) == 2

    async def test_a_stale_writer_is_told_so_also_where_the_revision_moved(self, store: SessionStore) -> None:
        lease = await _create(store)
        taken = await store.acquire("s", OWNER, ttl=TTL)
        await store.save(taken.lease, Commit(head=make_head()), 1)
        with _raises(StaleWriterError):
            await store.save(lease, Commit(head=make_head()), 1)
        with _raises(SessionConflictError):
            await store.save(taken.lease, Commit(head=make_head()), 1)

    async def test_the_epoch_grows_with_every_acquisition(self, store: SessionStore) -> None:
        await _create(store)
        epochs = [(await store.acquire("s", OWNER, ttl=TTL)).lease.epoch for _ in range(3)]
        assert epochs == [2, 3, 4]
        acquired = await store.acquire("s", OWNER, ttl=TTL)
        await store.release(acquired.lease)
        assert (await store.acquire("s", OTHER, ttl=TTL)).lease.epoch == 6

    async def test_a_dead_owner_can_be_superseded(self, store: SessionStore) -> None:
        lease = await _create(store)
        with _raises(LeaseHeldError):
            await store.acquire("s", OTHER, ttl=TTL, supersede="host:boot:9:9")
        assert (await store.acquire("s", OTHER, ttl=TTL, supersede=OWNER)).lease.epoch == 2
        with _raises(StaleWriterError):
            await store.save(lease, Commit(head=make_head()), 1)

    async def test_a_released_lease_is_gone(self, store: SessionStore) -> None:
        lease = await _create(store)
        await store.release(lease)
        await store.release(lease)
        assert (await store.load("s"))[1] is None
        for call in (
            store.save(lease, Commit(head=make_head()), 1),
            store.renew(lease, ttl=TTL),
            store.journal_put(lease, JournalRow("k", "intent")),
        ):
            with _raises(StaleWriterError):
                await call
        assert (await store.acquire("s", OTHER, ttl=TTL)).lease.epoch == 2

    async def test_a_commit_can_give_the_lease_up(self, store: SessionStore) -> None:
        lease = await _create(store)
        assert await store.save(lease, Commit(head=make_head(state=1), release=True), 1) == 2
        head, held = await store.load("s")
        assert (head.revision, held) == (2, None)
        with _raises(StaleWriterError):
            await store.save(lease, Commit(head=make_head()), 2)
        imported = await store.create(Commit(head=make_head("new"), release=True), owner=OWNER, ttl=TTL)
        assert imported.revision == 1
        assert (await store.load("new"))[1] is None

    async def test_the_head_is_left_out_where_it_is_known(self, store: SessionStore) -> None:
        lease = await _create(store, state=1)
        same = lease.incarnation

        async def acquire(revision: int | None, incarnation: str | None) -> Acquired:
            return await store.acquire("s", OWNER, ttl=TTL, known_revision=revision, known_incarnation=incarnation)

        assert (await acquire(1, same)).head is None
        for revision, incarnation in ((0, same), (2, same), (1, None), (None, same), (1, "other"), (1, "1.2.3")):
            acquired = await acquire(revision, incarnation)
            assert acquired.revision == 1
            assert acquired.head is not None
            assert (acquired.head.id, acquired.head.revision) == ("s", 1)
            assert acquired.head.stages["A"].state == {"value": 1}

    async def test_a_session_made_again_is_another(self, store: SessionStore) -> None:
        old = await _create(store, state="old")
        await store.save(old, Commit(head=make_head(), messages=[make_row(0)], inbox=[InboxRow("k", "input", b"")]), 1)
        await store.journal_put(old, JournalRow("j", "intent"))
        assert await store.delete("s") is True
        assert await store.delete("s") is False
        with _raises(StaleWriterError):
            await store.save(old, Commit(head=make_head()), 2)
        new = await _create(store, state="new")
        assert new.incarnation != old.incarnation
        assert new.epoch == old.epoch
        for call in (
            store.save(old, Commit(head=make_head()), 1),
            store.renew(old, ttl=TTL),
            store.journal_put(old, JournalRow("j", "done")),
        ):
            with _raises(StaleWriterError):
                await call
        await store.release(old)
        known = await store.acquire("s", OWNER, ttl=TTL, known_revision=1, known_incarnation=old.incarnation)
        assert known.head is not None
        assert known.head.stages["A"].state == {"value": "new"}
        assert await store.load_messages("s", "A") == []
        assert await store.inbox_list("s") == []
        assert await store.journal_load("s") == []

    # --- rows -------------------------------------------------------------------------------------------------------

    async def test_messages_are_read_by_range(self, store: SessionStore) -> None:
        lease = await _create(store)
        revision = 1
        for start in range(0, 10, 2):
            rows = [make_row(start), make_row(start, ns="B"), make_row(start + 1)]
            revision = await store.save(lease, Commit(head=make_head(), messages=rows), revision)

        async def positions(ns: str = "A", **options: Any) -> list[int]:
            return [row.position for row in await store.load_messages("s", ns, **options)]

        assert await positions() == list(range(10))
        assert await positions("B") == [0, 2, 4, 6, 8]
        assert await positions(first=4) == [4, 5, 6, 7, 8, 9]
        assert await positions(first=4, before=6) == [4, 5]
        assert await positions(last=3) == [7, 8, 9]
        assert await positions("B", before=7, last=2) == [4, 6]
        assert await positions(first=8, last=5) == [8, 9]
        assert await positions(first=-5, before=1) == [0]
        nothing: list[dict[str, Any]] = [{"last": 0}, {"first": 10}, {"before": 0}, {"before": -1}]
        nothing.append({"first": 6, "before": 3})
        for options in nothing:
            assert await positions(**options) == []

    async def test_erased_positions_are_not_used_again(self, store: SessionStore) -> None:
        lease = await _create(store)
        head = make_head()
        head.memories = {"A": MemoryHead(0, 4), "B": MemoryHead(0, 2)}
        rows = [make_row(n) for n in range(4)] + [make_row(n, ns="B") for n in range(2)]
        await store.save(lease, Commit(head=head, messages=rows), 1)
        head.memories["A"] = MemoryHead(3, 5)
        await store.save(lease, Commit(head=head, messages=[make_row(4)], first={"A": 3, "nowhere": 7}), 2)
        assert [row.position for row in await store.load_messages("s", "A")] == [3, 4]
        assert [row.position for row in await store.load_messages("s", "B")] == [0, 1]
        head.memories["A"] = MemoryHead(5, 6)
        await store.save(lease, Commit(head=head, first={"A": 5}), 3)
        assert await store.load_messages("s", "A") == []
        await store.save(lease, Commit(head=head, messages=[make_row(5)]), 4)
        assert [(row.position, row.message.id) for row in await store.load_messages("s", "A")] == [(5, "A|t|5")]
        assert (await store.load("s"))[0].memories["A"] == MemoryHead(5, 6)
        for position in (-1, 1 << 22):
            with _raises(StoreError):
                await store.save(lease, Commit(head=head, messages=[make_row(position)]), 5)

    async def test_sequence_and_log_only_grow(self, store: SessionStore) -> None:
        lease, other = await _create(store), await _create(store, "other")
        sequence = [SequenceEntry(f"S{n % 7}", 1_700_000_000.123456 + n, n % 3) for n in range(30)]
        log = [LogEntry("debug" if n % 2 else "error", float(n), f"line {n}", n or None) for n in range(30)]
        for n in range(30):
            commit = Commit(head=make_head(), sequence=sequence[n : n + 1], log=log[n : n + 1])
            await store.save(lease, commit, n + 1)
            await store.save(other, Commit(head=make_head("other"), sequence=[SequenceEntry("X", 0.5)]), n + 1)
        assert await store.load_sequence("s") == sequence
        assert await store.load_log("s") == log
        assert len(await store.load_sequence("other")) == 30
        assert await store.load_log("other") == []

    async def test_a_turn_costs_the_same_bytes_at_any_length(self, store: SessionStore) -> None:
        lease = await _create(store)
        head = make_head()
        head.memories["A"] = MemoryHead()
        sizes: list[int] = []
        step = self.growth_turns // 4
        for turn in range(self.growth_turns):
            if turn % step == 0 and (size := await self.stored_bytes(store)) is not None:
                sizes.append(size)
            at = 2 * turn
            head.memories["A"] = MemoryHead(0, at + 2)
            answer = encode_message(AssistantMessage(id=f"A|t|{at + 1}", text="an answer " * 5, model="p:m"))
            rows = [make_row(at, "a question " * 5), NewMessage("A", at + 1, answer)]
            await store.save(lease, Commit(head=head, messages=rows, sequence=[SequenceEntry("A", 1.5)]), turn + 1)
        assert len(await store.load_messages("s", "A")) == 2 * self.growth_turns
        assert len(await store.load_messages("s", "A", last=10)) == 10
        if (size := await self.stored_bytes(store)) is not None:
            sizes.append(size)
            steps = [(after - before) / step for before, after in itertools.pairwise(sizes)]
            assert max(steps[1:]) <= 1.25 * min(steps[1:]), f"bytes per turn: {steps}"

    # --- inbox and journal ------------------------------------------------------------------------------------------

    async def test_the_inbox_keeps_the_first_row_of_a_key(self, store: SessionStore) -> None:
        await _create(store)
        first = InboxRow("k", "input", b'{"text":"hi"}')
        assert await store.inbox_put("s", first) == first
        assert await store.inbox_put("s", InboxRow("k", "input", b"other")) == first
        assert await store.inbox_get("s", "k") == first
        assert (await store.load("s"))[0].revision == 1  # the head was not touched
        rows = [
            InboxRow("steer", "steer", b""),
            InboxRow("answer", "answer", b"\x00\xff"),
            InboxRow("a", "cancel", b"x"),
        ]
        for row in rows:
            await store.inbox_put("s", row)
        assert list((await store.acquire("s", OWNER, ttl=TTL)).inbox) == [first, *rows]

    async def test_consuming_is_part_of_the_commit(self, store: SessionStore) -> None:
        lease = await _create(store)
        for key in ("a", "b", "c"):
            await store.inbox_put("s", InboxRow(key, "input", key.encode()))
        with _raises(SessionConflictError):
            await store.save(lease, Commit(head=make_head(), inbox=[InboxUpdate("a", "done", b"lost")]), 9)
        changes: Sequence[InboxUpdate | InboxRow] = [
            InboxUpdate("a", "done", b"result"),
            InboxUpdate("b", "taken"),
            InboxUpdate("nobody", "done"),
            InboxRow("d", "input", b"d", "taken"),
            InboxRow("c", "steer", b"ignored, the key exists", "done"),
        ]
        await store.save(lease, Commit(head=make_head(), inbox=changes), 1)
        expected = [
            InboxRow("a", "input", b"a", "done", b"result"),
            InboxRow("b", "input", b"b", "taken"),
            InboxRow("c", "input", b"c"),
            InboxRow("d", "input", b"d", "taken"),
        ]
        assert await store.inbox_list("s") == expected
        assert await store.inbox_list("s", pending=True) == expected[1:]
        assert list((await store.acquire("s", OWNER, ttl=TTL)).inbox) == expected[1:]
        assert await store.inbox_put("s", InboxRow("a", "input", b"again")) == expected[0]

    async def test_of_many_rows_of_one_key_one_is_kept(self, store: SessionStore) -> None:
        await _create(store)
        rows = [InboxRow("k", "input", str(n).encode()) for n in range(20)]
        answers = await asyncio.gather(*(store.inbox_put("s", row) for row in rows))
        assert len(set(answers)) == 1
        assert await store.inbox_list("s") == [answers[0]]

    async def test_the_journal_keeps_the_last_state_of_a_key(self, store: SessionStore) -> None:
        lease = await _create(store)
        for key in ("i-step-1:A:0", "i-step-1:A:1", "i-step-10:A:0", "i_step-1:A:0"):
            await store.journal_put(lease, JournalRow(key, "intent"))
        await store.journal_put(lease, JournalRow("i-step-1:A:0", "done", b'{"r":1}'))
        assert [(row.key, row.state, row.data) for row in await store.journal_load("s", "i-step-1:")] == [
            ("i-step-1:A:0", "done", b'{"r":1}'),
            ("i-step-1:A:1", "intent", b""),
        ]
        assert len(await store.journal_load("s")) == 4
        assert (await store.load("s"))[0].revision == 1
        extra = [JournalRow("i-step-1:A:9", "refused"), JournalRow("i-step-10:A:0", "unknown")]
        await store.save(lease, Commit(head=make_head(), clear_journal="i-step-1:", journal=extra), 1)
        assert [(row.key, row.state) for row in await store.journal_load("s")] == [
            ("i-step-10:A:0", "unknown"),
            ("i_step-1:A:0", "intent"),
            ("i-step-1:A:9", "refused"),
        ]
        await store.save(lease, Commit(head=make_head(), clear_journal=""), 2)
        assert await store.journal_load("s") == []

    # --- finding sessions -------------------------------------------------------------------------------------------

    async def test_due_finds_open_turns_whose_owner_is_gone(self, store: SessionStore) -> None:
        await _create(store, "idle")
        first = await _create(store, "first", turn=True)
        await self.advance(1)
        await _create(store, "second", turn=True)
        closed = await _create(store, "closed", turn=True)
        await store.save(closed, Commit(head=make_head("closed")), 1)
        given_up = await _create(store, "given-up", turn=True)
        await store.release(given_up)
        assert await store.due() == [DueSession("given-up", "", 0.0)]
        await self.advance(TTL)
        due = await store.due()
        assert [(row.session, row.owner) for row in due] == [("given-up", ""), ("first", OWNER), ("second", OWNER)]
        assert due[1].expires == first.expires
        assert [row.session for row in await store.due(limit=2)] == ["given-up", "first"]
        await store.renew(first, ttl=TTL)
        taken = await store.acquire("given-up", OTHER, ttl=TTL)
        assert [row.session for row in await store.due()] == ["second"]
        await store.save(taken.lease, Commit(head=make_head("given-up"), release=True), 1)
        await store.delete("second")
        await self.advance(100)
        assert [row.session for row in await store.due()] == ["first"]

    async def test_a_suspended_session_is_due_only_while_somebody_died_with_it(self, store: SessionStore) -> None:
        lease = await _create(store, turn=True)
        waiting = Commit(head=make_head(turn=True, status="suspended"), release=True)
        await store.save(lease, waiting, 1)
        await self.advance(1_000)
        assert await store.due() == []
        lease = (await store.acquire("s", OTHER, ttl=TTL)).lease
        assert await store.due() == []
        await self.advance(TTL)
        assert [row.session for row in await store.due()] == ["s"]
        await store.release(lease)
        assert await store.due() == []
        lease = (await store.acquire("s", OTHER, ttl=TTL)).lease
        await store.save(lease, Commit(head=make_head(turn=True), release=True), 2)
        assert [row.session for row in await store.due()] == ["s"]

    async def test_list_pages_through_all_sessions(self, store: SessionStore) -> None:
        for n in range(7):
            flow, status = ("Odd" if n % 2 else "Even"), ("completed" if n > 4 else "running")
            await _create(store, f"s{n}", flow=flow, status=status, state="x")
        rows, cursor = await store.list()
        assert cursor is None
        assert [row.id for row in rows] == ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]
        top = rows[0]
        assert (top.flow, top.status, top.revision, top.current) == ("Even", "completed", 1, "A")
        assert (top.created_at, top.saved_at) == (1.5, 2.5)
        seen: list[str] = []
        cursor = None
        while True:
            page, cursor = await store.list(flow="Even", limit=2, after=cursor)
            assert 0 < len(page) <= 2
            seen += [row.id for row in page]
            if cursor is None:
                break
            await _create(store, f"new-{cursor}", flow="Even")  # the pages that follow do not shift
        assert seen == ["s6", "s4", "s2", "s0"]
        assert [row.id for row in (await store.list(status="completed"))[0]] == ["s6", "s5"]
        assert (await store.list(flow="Odd", status="completed"))[0][0].id == "s5"
        nothing: list[dict[str, Any]] = [{"flow": "None"}, {"status": "lost"}, {"flow": "\ud800"}]
        for options in nothing:
            assert await store.list(**options) == ([], None)
        await store.delete("s6")
        assert [row.id for row in (await store.list(status="completed"))[0]] == ["s5"]
        for wrong in ("x", "-1", "1" * 30, "²"):
            with _raises(InvalidInputError):
                await store.list(after=wrong)

    async def test_list_shows_what_was_saved(self, store: SessionStore) -> None:
        lease = await _create(store)
        head = make_head(flow="Renamed", status="aborted")
        head.saved_at = 9.0
        await store.save(lease, Commit(head=head), 1)
        row = (await store.list(flow="Renamed", status="aborted"))[0][0]
        assert (row.revision, row.saved_at) == (2, 9.0)
        assert await store.list(flow="Flow") == ([], None)

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
        with _raises(SessionExistsError):
            await import_session(store, document)
        assert await import_session(store, document, session_id="copy") == "copy"
        copy = await export_session(store, "copy")
        assert copy.pop("head") == {**document.pop("head"), "id": "copy"}
        assert copy == document
        await store.delete("s")
        assert (await store.acquire("copy", OTHER, ttl=TTL)).lease.epoch == 2

    async def test_many_sessions_at_once(self, store: SessionStore) -> None:
        async def work(name: str) -> None:
            lease = await _create(store, name)
            for n in range(5):
                commit = Commit(head=make_head(name, state=n), messages=[make_row(n)], release=n == 4)
                assert await store.save(lease, commit, n + 1) == n + 2
            await store.acquire(name, OTHER, ttl=TTL)

        await asyncio.gather(*(work(f"s{n}") for n in range(40)))
        rows, _ = await store.list(limit=1000)
        assert {row.revision for row in rows} == {6}
        assert len(rows) == 40

    async def test_close_finishes_what_is_under_way(self, store: SessionStore) -> None:
        lease = await _create(store)
        save = asyncio.ensure_future(store.save(lease, Commit(head=make_head()), 1))
        await asyncio.sleep(0)
        await store.close()
        assert await save == 2
        await store.close()
