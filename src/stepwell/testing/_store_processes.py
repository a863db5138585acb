"""The part of the store conformance suite that starts processes, and kills them."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from typing import ClassVar

from stepwell.errors import RaceError, StoreBusyError
from stepwell.sessions import Commit, InboxRow, JournalRow, SequenceEntry, SessionStore, StageRecord, open_store

from ._store_base import OTHER, OWNER, TTL, make_head, make_row

__all__ = ["SessionStoreProcessConformance", "count_up", "write_until_killed"]

_WRITER = """
import asyncio, sys
from stepwell.testing._store_processes import write_until_killed
asyncio.run(write_until_killed(sys.argv[1], sys.argv[2]))
"""

_COUNTER = """
import asyncio, sys
from stepwell.testing._store_processes import count_up
asyncio.run(count_up(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def write_until_killed(url: str, session: str) -> None:
    """In a process of its own: commit as fast as possible and say what was acknowledged, until killed."""
    store = open_store(url)
    revision, filler = 1, "x" * 3_000
    head = make_head(session, turn=True)
    lease = (await store.create(Commit(head=head, messages=[make_row(0)]), owner=OWNER, ttl=600.0)).lease
    while True:
        head.stages["A"] = StageRecord(state={"n": revision, "filler": filler, "again": revision})
        commit = Commit(
            head=head,
            messages=[make_row(revision), make_row(revision, ns="B")],
            sequence=[SequenceEntry("A", float(revision))],
            inbox=[InboxRow(f"k{revision}", "input", b"{}")],
        )
        revision = await store.save(lease, commit, revision)
        if revision % 10 == 0:
            await store.journal_put(lease, JournalRow(f"j{revision:09}", "intent"))
        print(revision, flush=True)  # noqa: T201 - the parent reads it


async def count_up(url: str, owner: str, times: int) -> None:
    """In a process of its own: add to a counter that other processes add to as well, under the lease each time."""
    store = open_store(url)
    done = 0
    while done < times:
        try:
            acquired = await store.acquire("s", owner, ttl=600.0)
            assert acquired.head is not None
            head, at = acquired.head, acquired.revision
            head.stages["A"].state["value"] += 1
            await store.inbox_put("s", InboxRow(f"{owner}-{done}", "input", b""))
            await store.save(acquired.lease, Commit(head=head, messages=[make_row(at)], release=True), at)
            done += 1
        except (RaceError, StoreBusyError):
            await asyncio.sleep(0.001)
    await store.close()


class SessionStoreProcessConformance:
    """Tests of a store that several processes can open. Needs a fixture `store_url`, fresh for every test.

    Attributes:
        prelude: Python source that the other processes run first.
        kills: How often a writer is killed.
    """

    prelude: ClassVar[str] = ""
    kills: ClassVar[int] = 6

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        code = self.prelude + program
        return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)  # noqa: S603

    async def test_a_killed_writer_leaves_the_old_or_the_new_document(self, store_url: str) -> None:
        rng = random.Random()  # noqa: S311 - other points in every run is what is wanted
        for kill in range(self.kills):
            session = f"s{kill}"
            process = self._start(_WRITER, store_url, session)
            assert process.stdout is not None
            acknowledged = 0
            for _ in range(rng.randrange(1, 400)):
                acknowledged = int(await asyncio.to_thread(process.stdout.readline))
            await asyncio.sleep(rng.random() * 0.01)
            process.send_signal(signal.SIGKILL)
            rest = (await asyncio.to_thread(process.communicate))[0].split("\n")
            acknowledged = max([acknowledged, *(int(line) for line in rest[:-1])])
            store = open_store(store_url)
            try:
                await self._check(store, session, acknowledged)
            finally:
                await store.close()

    async def _check(self, store: SessionStore, session: str, acknowledged: int) -> None:
        assert (await store.load(session))[1] is not None
        # A server may still be at work on what the dead one sent last: that is over, or refused, with the take-over.
        taken = await store.acquire(session, OTHER, ttl=TTL, supersede=OWNER)
        head, revision = taken.head, taken.revision
        assert head is not None
        assert acknowledged <= revision <= acknowledged + 1
        state = head.stages["A"].state
        assert (state["n"], state["again"]) == (revision - 1, revision - 1)
        assert [row.position for row in await store.load_messages(session, "A")] == list(range(revision))
        assert [row.position for row in await store.load_messages(session, "B")] == list(range(1, revision))
        assert [entry.at for entry in await store.load_sequence(session)] == [float(n) for n in range(1, revision)]
        assert [row.key for row in await store.inbox_list(session)] == [f"k{n}" for n in range(1, revision)]
        expected = [f"j{n:09}" for n in range(10, acknowledged + 1, 10)]
        journal = [row.key for row in await store.journal_load(session)]
        assert journal[: len(expected)] == expected
        # The next owner goes on where the dead one stopped.
        assert await store.save(taken.lease, Commit(head=head, messages=[make_row(revision)]), revision) == revision + 1

    async def test_processes_share_a_session_by_lease(self, store_url: str) -> None:
        store = open_store(store_url)
        try:
            await store.create(Commit(head=make_head(state=0), release=True), owner=OWNER, ttl=TTL)
            processes = [self._start(_COUNTER, store_url, f"p{n}", "40") for n in range(2)]
            while any(process.poll() is None for process in processes):
                await store.load("s")  # a reader is never in the way, and never sees a half
                await asyncio.sleep(0.01)
            for process in processes:
                process.communicate()
            assert [process.returncode for process in processes] == [0, 0]
            head, lease = await store.load("s")
            assert (head.revision, head.stages["A"].state, lease) == (81, {"value": 80}, None)
            assert [row.position for row in await store.load_messages("s", "A")] == list(range(1, 81))
            assert (await store.acquire("s", OWNER, ttl=TTL)).lease.epoch >= 82
            assert len(await store.inbox_list("s")) >= 80
        finally:
            await store.close()
