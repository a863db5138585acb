"""The part of the store conformance suite about leases, and about finding sessions."""

from __future__ import annotations

from typing import Any

from stepwell.errors import InvalidInputError, LeaseHeldError, SessionConflictError, StaleWriterError
from stepwell.sessions import Acquired, Commit, DueSession, InboxRow, InboxUpdate, JournalRow, SessionStore

from ._store_base import OTHER, OWNER, TTL, StoreSuite, create_session, make_head, make_row, raises

__all__ = ["LeaseTests"]


class LeaseTests(StoreSuite):
    """Who may write, until when, and which sessions need somebody."""

    async def test_a_lease_keeps_others_out_until_it_ends(self, store: SessionStore) -> None:
        lease = await create_session(store)
        with raises(LeaseHeldError) as caught:
            await store.acquire("s", OTHER, ttl=TTL)
        assert (caught.error.owner, caught.error.expires) == (OWNER, lease.expires)
        await self.advance(10)
        renewed = await store.renew(lease, ttl=TTL)
        assert renewed.expires > lease.expires
        assert (renewed.epoch, renewed.incarnation) == (lease.epoch, lease.incarnation)
        await self.advance(10)
        with raises(LeaseHeldError):
            await store.acquire("s", OTHER, ttl=TTL)
        await self.advance(5)
        taken = await store.acquire("s", OTHER, ttl=TTL)
        assert (taken.lease.owner, taken.lease.epoch) == (OTHER, 2)

    async def test_the_stale_writer_after_a_take_over_writes_nothing(self, store: SessionStore) -> None:
        lease = await create_session(store, state="before")
        await self.advance(TTL)
        taken = await store.acquire("s", OTHER, ttl=TTL)
        for call in (
            store.save(lease, Commit(head=make_head(state="stale"), messages=[make_row(0)]), 1),
            store.renew(lease, ttl=TTL),
            store.journal_put(lease, JournalRow("k", "intent")),
        ):
            with raises(StaleWriterError):
                await call
        await store.release(lease)  # harmless
        head, held = await store.load("s")
        assert (head.revision, head.stages["A"].state) == (1, {"value": "before"})
        assert held == taken.lease
        assert await store.load_messages("s", "A") == []
        assert await store.journal_load("s") == []
        assert await store.save(taken.lease, Commit(head=make_head()), 1) == 2

    async def test_a_stale_writer_is_told_so_also_where_the_revision_moved(self, store: SessionStore) -> None:
        lease = await create_session(store)
        taken = await store.acquire("s", OWNER, ttl=TTL)
        await store.save(taken.lease, Commit(head=make_head()), 1)
        with raises(StaleWriterError):
            await store.save(lease, Commit(head=make_head()), 1)
        with raises(SessionConflictError):
            await store.save(taken.lease, Commit(head=make_head()), 1)

    async def test_the_epoch_grows_with_every_acquisition(self, store: SessionStore) -> None:
        await create_session(store)
        epochs = [(await store.acquire("s", OWNER, ttl=TTL)).lease.epoch for _ in range(3)]
        assert epochs == [2, 3, 4]
        acquired = await store.acquire("s", OWNER, ttl=TTL)
        await store.release(acquired.lease)
        assert (await store.acquire("s", OTHER, ttl=TTL)).lease.epoch == 6

    async def test_a_dead_owner_can_be_superseded(self, store: SessionStore) -> None:
        lease = await create_session(store)
        with raises(LeaseHeldError):
            await store.acquire("s", OTHER, ttl=TTL, supersede="host:boot:9:9")
        assert (await store.acquire("s", OTHER, ttl=TTL, supersede=OWNER)).lease.epoch == 2
        with raises(StaleWriterError):
            await store.save(lease, Commit(head=make_head()), 1)

    async def test_a_released_lease_is_gone(self, store: SessionStore) -> None:
        lease = await create_session(store)
        await store.release(lease)
        await store.release(lease)
        assert (await store.load("s"))[1] is None
        for call in (
            store.save(lease, Commit(head=make_head()), 1),
            store.renew(lease, ttl=TTL),
            store.journal_put(lease, JournalRow("k", "intent")),
        ):
            with raises(StaleWriterError):
                await call
        assert (await store.acquire("s", OTHER, ttl=TTL)).lease.epoch == 2

    async def test_a_commit_can_give_the_lease_up(self, store: SessionStore) -> None:
        lease = await create_session(store)
        assert await store.save(lease, Commit(head=make_head(state=1), release=True), 1) == 2
        head, held = await store.load("s")
        assert (head.revision, held) == (2, None)
        with raises(StaleWriterError):
            await store.save(lease, Commit(head=make_head()), 2)
        imported = await store.create(Commit(head=make_head("new"), release=True), owner=OWNER, ttl=TTL)
        assert imported.revision == 1
        assert (await store.load("new"))[1] is None

    async def test_the_head_is_left_out_where_it_is_known(self, store: SessionStore) -> None:
        lease = await create_session(store, state=1)
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
        old = await create_session(store, state="old")
        await store.save(old, Commit(head=make_head(), messages=[make_row(0)], inbox=[InboxRow("k", "input", b"")]), 1)
        await store.journal_put(old, JournalRow("j", "intent"))
        assert await store.delete("s") is True
        assert await store.delete("s") is False
        with raises(StaleWriterError):
            await store.save(old, Commit(head=make_head()), 2)
        new = await create_session(store, state="new")
        assert new.incarnation != old.incarnation
        assert new.epoch == old.epoch
        for call in (
            store.save(old, Commit(head=make_head()), 1),
            store.renew(old, ttl=TTL),
            store.journal_put(old, JournalRow("j", "done")),
        ):
            with raises(StaleWriterError):
                await call
        await store.release(old)
        known = await store.acquire("s", OWNER, ttl=TTL, known_revision=1, known_incarnation=old.incarnation)
        assert known.head is not None
        assert known.head.stages["A"].state == {"value": "new"}
        assert await store.load_messages("s", "A") == []
        assert await store.inbox_list("s") == []
        assert await store.journal_load("s") == []

    async def test_due_finds_open_turns_whose_owner_is_gone(self, store: SessionStore) -> None:
        await create_session(store, "idle")
        first = await create_session(store, "first", turn=True)
        await self.advance(1)
        await create_session(store, "second", turn=True)
        closed = await create_session(store, "closed", turn=True)
        await store.save(closed, Commit(head=make_head("closed")), 1)
        given_up = await create_session(store, "given-up", turn=True)
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
        lease = await create_session(store, turn=True)
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

    async def test_a_suspended_session_is_due_when_it_has_waited_long_enough(self, store: SessionStore) -> None:
        now = (await create_session(store, "clock")).expires - TTL

        def waiting(session: str, seconds: float | None, status: str = "suspended") -> Commit:
            head = make_head(session, turn=True, status=status)
            assert head.turn is not None
            head.turn.expires = None if seconds is None else now + seconds
            return Commit(head=head, release=True)

        for session, seconds in (("late", 30.0), ("soon", 20.0), ("ever", None)):
            lease = await create_session(store, session, turn=True)
            await store.save(lease, waiting(session, seconds), 1)
        await store.create(waiting("imported", 25.0), owner=OWNER, ttl=TTL)
        assert (await store.load("late"))[0].turn == waiting("late", 30.0).head.turn
        assert await store.due() == []
        await self.advance(27)
        assert await store.due() == [DueSession("soon", "", now + 20.0), DueSession("imported", "", now + 25.0)]
        assert [row.session for row in await store.due(limit=1)] == ["soon"]
        # Somebody looks after it, and waits for longer; and an answer ends the waiting.
        lease = (await store.acquire("soon", OTHER, ttl=TTL)).lease
        assert [row.session for row in await store.due()] == ["imported"]
        await store.save(lease, waiting("soon", 40.0), 2)
        lease = (await store.acquire("imported", OTHER, ttl=TTL)).lease
        await store.save(lease, Commit(head=make_head("imported", turn=True)), 1)
        assert await store.due() == []
        await self.advance(10)
        assert [row.session for row in await store.due()] == ["late"]
        # A lease that ran out is reported as that, whenever the suspension ends.
        lease = (await store.acquire("late", OTHER, ttl=TTL)).lease
        await self.advance(TTL + 1)
        assert [(row.session, row.owner) for row in await store.due()] == [
            ("soon", ""),
            ("imported", OTHER),
            ("late", OTHER),
        ]
        await store.release(lease)
        assert [(row.session, row.owner) for row in await store.due()] == [
            ("late", ""),
            ("soon", ""),
            ("imported", OTHER),
        ]
        await store.delete("soon")
        lease = (await store.acquire("late", OTHER, ttl=TTL)).lease
        await store.save(lease, Commit(head=make_head("late", status="suspended"), release=True), 2)  # no turn: over
        assert [row.session for row in await store.due()] == ["imported"]

    async def test_a_session_is_due_when_something_reached_it_that_nobody_has_taken(self, store: SessionStore) -> None:
        lease = await create_session(store)
        await store.inbox_put("s", InboxRow("k", "input", b""))
        assert await store.due() == []  # its owner will see it
        await store.release(lease)
        assert await store.due() == [DueSession("s", "", 0.0)]
        lease = (await store.acquire("s", OTHER, ttl=TTL)).lease
        assert await store.due() == []
        await self.advance(TTL + 1)
        assert [(row.session, row.owner) for row in await store.due()] == [("s", OTHER)]
        lease = (await store.acquire("s", OWNER, ttl=TTL)).lease
        await store.save(lease, Commit(head=make_head(), inbox=[InboxUpdate("k", "done")], release=True), 1)
        assert await store.due() == []
        await store.inbox_put("s", InboxRow("other", "cancel", b""))
        assert [row.session for row in await store.due()] == ["s"]
        assert await store.inbox_withdraw("s", "other")
        assert await store.due() == []
        # What is due for two reasons is listed once.
        await store.inbox_put("s", InboxRow("third", "input", b""))
        lease = (await store.acquire("s", OWNER, ttl=TTL)).lease
        await store.save(lease, Commit(head=make_head(turn=True), release=True), 2)
        assert await store.due() == [DueSession("s", "", 0.0)]

    async def test_list_pages_through_all_sessions(self, store: SessionStore) -> None:
        for n in range(7):
            flow, status = ("Odd" if n % 2 else "Even"), ("completed" if n > 4 else "running")
            await create_session(store, f"s{n}", flow=flow, status=status, state="x")
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
            await create_session(store, f"new-{cursor}", flow="Even")  # the pages that follow do not shift
        assert seen == ["s6", "s4", "s2", "s0"]
        assert [row.id for row in (await store.list(status="completed"))[0]] == ["s6", "s5"]
        assert (await store.list(flow="Odd", status="completed"))[0][0].id == "s5"
        nothing: list[dict[str, Any]] = [{"flow": "None"}, {"status": "lost"}, {"flow": "\ud800"}]
        for options in nothing:
            assert await store.list(**options) == ([], None)
        await store.delete("s6")
        assert [row.id for row in (await store.list(status="completed"))[0]] == ["s5"]
        for wrong in ("x", "-1", "1" * 30, "²"):
            with raises(InvalidInputError):
                await store.list(after=wrong)

    async def test_list_shows_what_was_saved(self, store: SessionStore) -> None:
        lease = await create_session(store)
        head = make_head(flow="Renamed", status="aborted")
        head.saved_at = 9.0
        await store.save(lease, Commit(head=head), 1)
        row = (await store.list(flow="Renamed", status="aborted"))[0][0]
        assert (row.revision, row.saved_at) == (2, 9.0)
        assert await store.list(flow="Flow") == ([], None)
