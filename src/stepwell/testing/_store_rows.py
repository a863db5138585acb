"""The part of the store conformance suite about what lies beside the head."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from stepwell.errors import SessionConflictError, StoreError, UnknownSessionError
from stepwell.messages import AssistantMessage, encode_message
from stepwell.sessions import (
    Commit,
    InboxRow,
    InboxUpdate,
    JournalRow,
    LogEntry,
    MemoryHead,
    NewMessage,
    SequenceEntry,
    SessionStore,
)

from ._store_base import OWNER, TTL, StoreSuite, create_session, make_head, make_row, raises

__all__ = ["RowTests"]


class RowTests(StoreSuite):
    """Messages, sequence, log, inbox and journal."""

    async def test_messages_are_read_by_range(self, store: SessionStore) -> None:
        lease = await create_session(store)
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
        lease = await create_session(store)
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
            with raises(StoreError):
                await store.save(lease, Commit(head=head, messages=[make_row(position)]), 5)

    async def test_sequence_and_log_only_grow(self, store: SessionStore) -> None:
        lease, other = await create_session(store), await create_session(store, "other")
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
        lease = await create_session(store)
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

    async def test_the_inbox_keeps_the_first_row_of_a_key(self, store: SessionStore) -> None:
        await create_session(store)
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

    async def test_only_a_row_that_is_new_can_be_withdrawn(self, store: SessionStore) -> None:
        lease = await create_session(store)
        for key in ("a", "b"):
            await store.inbox_put("s", InboxRow(key, "input", b""))
        await store.save(lease, Commit(head=make_head(), inbox=[InboxUpdate("a", "taken")]), 1)
        assert [await store.inbox_withdraw("s", key) for key in ("a", "b", "b", "never")] == [False, True, False, False]
        assert await store.inbox_list("s") == [InboxRow("a", "input", b"", "taken")]
        with raises(UnknownSessionError):
            await store.inbox_withdraw("nowhere", "a")

    async def test_consuming_is_part_of_the_commit(self, store: SessionStore) -> None:
        lease = await create_session(store)
        for key in ("a", "b", "c"):
            await store.inbox_put("s", InboxRow(key, "input", key.encode()))
        with raises(SessionConflictError):
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
        await create_session(store)
        rows = [InboxRow("k", "input", str(n).encode()) for n in range(20)]
        answers = await asyncio.gather(*(store.inbox_put("s", row) for row in rows))
        assert len(set(answers)) == 1
        assert await store.inbox_list("s") == [answers[0]]

    async def test_the_journal_keeps_the_last_state_of_a_key(self, store: SessionStore) -> None:
        lease = await create_session(store)
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
