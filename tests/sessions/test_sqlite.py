"""What only the SQLite store has: files, shared owners, group commit, waiting, check-points, durability."""

# ruff: noqa: ASYNC240 - small files in a test hold up nobody

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepwell import _sqlite
from stepwell._sqlite import Part, Undo, acquire_owner, release_owner
from stepwell.errors import NewerSchemaError, StaleWriterError, StoreBusyError, StoreDataError, StoreError
from stepwell.sessions import (
    Commit,
    DueSession,
    JournalRow,
    Lease,
    LogEntry,
    SequenceEntry,
    SqliteStore,
    StageRecord,
    encode_head,
    sqlite,
)
from stepwell.sessions.sqlite import PART
from stepwell.testing._store_base import OTHER, OWNER, TTL, make_head, make_row

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, busy_timeout=5.0)
    yield store
    await store.close()


async def create(store: SqliteStore, session: str = "s") -> Lease:
    return (await store.create(Commit(head=make_head(session)), owner=OWNER, ttl=TTL)).lease


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Another process that is in the middle of a transaction."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.close()


@contextmanager
def statements(connection: sqlite3.Connection) -> Iterator[list[str]]:
    seen: list[str] = []
    connection.set_trace_callback(seen.append)
    try:
        yield seen
    finally:
        connection.set_trace_callback(None)


class TestFiles:
    async def test_what_was_committed_is_there_when_the_file_is_opened_again(self, path: Path) -> None:
        first = SqliteStore(path)
        await create(first)
        await first.close()
        assert not path.with_name("store.db-wal").exists()
        second = SqliteStore(path)
        assert (await second.load("s"))[0].revision == 1
        assert second.path == str(path)
        await second.close()

    def test_a_missing_directory(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="does not exist: create") as caught:
            SqliteStore(tmp_path / "no" / "store.db")
        assert not caught.value.retryable

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="SQLite could not do it"):
            SqliteStore(tmp_path)

    def test_a_file_that_is_no_database(self, path: Path) -> None:
        path.write_bytes(b"This is a letter to my aunt. " * 100)
        before = path.read_bytes()
        with pytest.raises(StoreDataError, match="not an SQLite database"):
            SqliteStore(path)
        assert path.read_bytes() == before

    def test_another_programs_database_is_left_alone(self, path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE customers(name)")
        connection.commit()
        connection.close()
        before = path.read_bytes()
        with pytest.raises(StoreDataError, match="another program"):
            SqliteStore(path)
        assert path.read_bytes() == before

    async def test_an_empty_file_is_taken(self, path: Path) -> None:
        path.touch()
        store = SqliteStore(path)
        await create(store)
        await store.close()

    async def test_a_newer_schema_is_refused_and_left_alone(self, path: Path) -> None:
        store = SqliteStore(path)
        await create(store)
        await store.close()
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA user_version=7")
        connection.close()
        before = path.read_bytes()
        with pytest.raises(NewerSchemaError, match="version 7, this Stepwell knows up to 2"):
            SqliteStore(path)
        assert path.read_bytes() == before

    async def test_a_damaged_file(self, path: Path, store: SqliteStore) -> None:
        lease = await create(store)
        for n in range(1, 60):
            await store.save(lease, Commit(head=make_head(), messages=[make_row(n, "x" * 3000)]), n)
        await store.close()
        data = bytearray(path.read_bytes())
        data[4096 * 3 :] = os.urandom(len(data) - 4096 * 3)
        path.write_bytes(data)
        broken = SqliteStore(path)
        for call in (broken.load_messages("s", "A"), broken.list(), create(broken, "new")):
            with pytest.raises(StoreDataError, match="damaged"):
                await call
        await broken.close()

    def test_no_log_no_store(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Cursor:
            def execute(self, sql: str) -> Any:
                answers = {"PRAGMA application_id": (0,), "PRAGMA journal_mode=WAL": ("delete",)}
                self.row = answers.get(sql)
                return self

            def fetchone(self) -> Any:
                return self.row

        with pytest.raises(StoreError, match="cannot have a write-ahead log"):
            _sqlite._claim(Cursor(), str(path), 1.0)  # type: ignore[arg-type]

    async def test_rows_that_cannot_be_read(self, path: Path, store: SqliteStore) -> None:
        lease = await create(store)
        entry = LogEntry("info", 1.0, "x")
        await store.save(lease, Commit(head=make_head(), sequence=[SequenceEntry("A", 1.0)], log=[entry]), 1)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("UPDATE line SET data = ?", (b"[99,1.0]",))
        with pytest.raises(StoreDataError, match="sequence"):
            await store.load_sequence("s")
        connection.execute("UPDATE line SET data = ?", (b"\xff",))
        with pytest.raises(StoreDataError, match="log"):
            await store.load_log("s")
        connection.execute("UPDATE head SET names = '{}'")
        with pytest.raises(StoreDataError, match="names"):
            await store.load_sequence("s")
        with pytest.raises(StoreDataError, match="names"):
            await store.save(lease, Commit(head=make_head(), messages=[make_row(0, ns="new")]), 2)
        connection.execute("UPDATE head SET data = ?", (b"{",))
        with pytest.raises(StoreDataError) as caught:
            await store.load("s")
        assert caught.value.ids["session_id"] == "s"
        (row,), _ = await store.list()
        assert (row.id, row.status, row.revision) == ("s", "unreadable", 2)
        connection.close()


class TestOwners:
    async def test_stores_of_one_file_share_an_owner(self, path: Path, store: SqliteStore) -> None:
        link = path.with_name("link.db")
        link.symlink_to(path)
        second = SqliteStore(link)
        third = SqliteStore(os.path.relpath(path))
        assert store._owner is second._owner is third._owner
        lease = await create(store)
        assert (await second.load("s"))[1] == lease
        await store.close()
        await second.close()
        assert (await third.load("s"))[1] == lease
        await third.close()
        assert not any(value is third._owner for value in _sqlite._owners.values())

    async def test_a_closed_store_says_so(self, store: SqliteStore) -> None:
        lease = await create(store)
        await store.close()
        for call in (store.load("s"), store.save(lease, Commit(head=make_head()), 1), store.list(), store.due()):
            with pytest.raises(StoreError, match="is closed"):
                await call

    async def test_a_replaced_file_gets_a_new_owner(self, path: Path, store: SqliteStore) -> None:
        await create(store)
        path.unlink()
        for name in ("store.db-wal", "store.db-shm"):
            path.with_name(name).unlink()
        second = SqliteStore(path)
        assert second._owner is not store._owner
        assert (await second.list())[0] == []
        await second.close()

    async def test_a_forked_process_gets_its_own(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = SqliteStore(path)
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        child = SqliteStore(path)
        assert child._owner is not store._owner
        await child.close()
        await store.close()

    async def test_parts_of_a_file_have_their_own_versions(self, path: Path, store: SqliteStore) -> None:
        one = Part("channel", 1, [["CREATE TABLE channel(a)"]])
        two = Part("channel", 1, [*one.migrations, ["ALTER TABLE channel ADD b", "INSERT INTO channel VALUES(1, 2)"]])
        broken = Part("channel", 1, [*two.migrations, ["DELETE FROM channel", "NONSENSE"]])
        owner = acquire_owner(path, one)
        assert owner is store._owner
        assert acquire_owner(path, two) is owner
        with pytest.raises(StoreError, match="syntax error"):
            acquire_owner(path, broken)
        with pytest.raises(NewerSchemaError, match="channel"):
            acquire_owner(path, one)

        def look(cursor: sqlite3.Cursor) -> Any:
            rows = cursor.execute("SELECT a, b FROM channel").fetchall()
            return rows, cursor.execute("PRAGMA user_version").fetchone()[0]

        assert await owner.read(look) == ([(1, 2)], 0x0202)
        await create(store)
        await release_owner(owner)
        await release_owner(owner)
        assert (await store.load("s"))[0].revision == 1

    async def test_a_file_of_the_first_version_is_brought_up_to_date(self, path: Path) -> None:
        owner = acquire_owner(path, Part("session", 0, PART.migrations[:1]))

        def fill(cursor: sqlite3.Cursor) -> None:
            head = encode_head(make_head("old", turn=True, status="suspended"))
            cursor.execute("INSERT INTO head VALUES(1, 3, 2, 'Flow', '[]', ?)", (head,))
            cursor.execute("INSERT INTO session VALUES('old', 1, 7, 2, 2, 'dead', 1.0)")

        await owner.write(fill)
        await release_owner(owner)
        store = SqliteStore(path)
        assert await store.due() == [DueSession("old", "dead", 1.0)]
        taken = await store.acquire("old", "me", ttl=10)
        assert (taken.revision, taken.lease.epoch, taken.lease.incarnation) == (3, 3, "1.7")
        head = make_head("old", turn=True, status="suspended")
        assert head.turn is not None
        head.turn.expires = 5.0
        assert await store.save(taken.lease, Commit(head=head, release=True), 3) == 4
        assert await store.due() == [DueSession("old", "", 5.0)]
        await store.close()

    async def test_a_file_that_cannot_be_migrated_is_closed_again(self, path: Path) -> None:
        with pytest.raises(StoreError, match="syntax error"):
            acquire_owner(path, Part("session", 0, [["NONSENSE"]]))
        store = SqliteStore(path)
        await create(store)
        await store.close()

    async def test_two_event_loops_share_a_file(self, path: Path, store: SqliteStore) -> None:
        async def work(name: str) -> None:
            mine = SqliteStore(path)
            lease = await create(mine, name)
            for n in range(1, 100):
                await mine.save(lease, Commit(head=make_head(name), messages=[make_row(n)]), n)
                await mine.load(name)
            await mine.close()

        threads = [threading.Thread(target=asyncio.run, args=(work(f"t{n}"),)) for n in range(2)]
        for thread in threads:
            thread.start()
        await work("main")
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert {row.revision for row in (await store.list())[0]} == {100}
        assert len((await store.list())[0]) == 3

    async def test_a_job_of_another_loop_after_the_end_is_answered(self, store: SqliteStore) -> None:
        owner = store._owner
        await store.close()
        with pytest.raises(StoreError, match="is closed"):
            await owner.write(lambda cursor: None)
        entry = _sqlite._Entry(lambda cursor: None, asyncio.get_running_loop(), False)
        owner._flush([entry])
        with pytest.raises(StoreError, match="is closed"):
            await entry.future
        with pytest.raises(StoreError, match="is closed"):
            await owner.read(lambda cursor: None)
        with pytest.raises(StoreError, match="is closed"):
            await owner.read_aside(lambda cursor: None)

    async def test_an_answer_for_a_loop_that_is_gone_is_dropped(self, path: Path, store: SqliteStore) -> None:
        def forget() -> None:
            async def start() -> None:
                store._owner.write(lambda cursor: gate.wait(5), full=True)

            asyncio.run(start())

        gate = threading.Event()
        await asyncio.to_thread(forget)
        gate.set()
        await create(store)


class TestGroupCommit:
    async def test_the_jobs_of_one_tick_are_one_transaction(self, path: Path, store: SqliteStore) -> None:
        second = SqliteStore(path)
        leases = [await create(store, f"s{n}") for n in range(10)]
        with statements(store._owner._main.raw) as seen:
            await asyncio.gather(
                *(
                    (second if n % 2 else store).save(lease, Commit(head=make_head(lease.session)), 1)
                    for n, lease in enumerate(leases)
                )
            )
        assert [sql for sql in seen if not sql.startswith("UPDATE")] == ["BEGIN IMMEDIATE", "COMMIT"]
        assert len(seen) == 12
        await second.close()

    async def test_a_save_is_one_statement_and_one_more_for_each_row(self, store: SqliteStore) -> None:
        lease = await create(store)
        await store.save(lease, Commit(head=make_head(), messages=[make_row(0)]), 1)
        with statements(store._owner._main.raw) as seen:
            await store.save(lease, Commit(head=make_head(), messages=[make_row(1), make_row(2)]), 2)
        assert [sql.split()[0] for sql in seen] == ["BEGIN", "UPDATE", "INSERT", "INSERT", "COMMIT"]

    async def test_a_cancelled_job_that_has_not_begun_is_dropped(self, store: SqliteStore) -> None:
        ran: list[int] = []
        future = store._owner.write(lambda cursor: ran.append(1))
        future.cancel()
        await asyncio.sleep(0)
        await create(store)
        aside = store._owner.write(lambda cursor: gate.wait(5), full=True)
        gate = threading.Event()
        waiting = store._owner.write(lambda cursor: ran.append(2), full=True)
        waiting.cancel()
        gate.set()
        await aside
        await create(store, "other")
        assert ran == []

    async def test_a_job_cancelled_while_it_runs_stays_done(self, store: SqliteStore) -> None:
        started, gate = threading.Event(), threading.Event()

        def job(cursor: sqlite3.Cursor) -> None:
            cursor.execute("CREATE TABLE extra(a)")
            started.set()
            gate.wait(5)

        future = store._owner.write(job, full=True)
        await asyncio.to_thread(started.wait, 5)
        future.cancel()
        gate.set()
        await store._owner.write(lambda cursor: None, full=True)
        assert await store._owner.read(lambda cursor: cursor.execute("SELECT * FROM extra").fetchall()) == []

    @pytest.mark.parametrize("full", [False, True])
    async def test_a_bug_in_one_job_is_its_own(self, store: SqliteStore, full: bool) -> None:
        def insert(value: int) -> Callable[[sqlite3.Cursor], int]:
            def job(cursor: sqlite3.Cursor) -> int:
                cursor.execute("INSERT INTO line VALUES(?, '')", (value,))
                return value

            return job

        def bug(cursor: sqlite3.Cursor) -> int:
            insert(3)(cursor)
            return 1 // 0

        def undo(cursor: sqlite3.Cursor) -> int:
            insert(4)(cursor)
            raise Undo(StoreError("no"))

        jobs = [insert(1), bug, undo, insert(2), insert(1)]
        results = await asyncio.gather(*(store._owner.write(job, full=full) for job in jobs), return_exceptions=True)
        assert results[0] == 1
        assert isinstance(results[1], ZeroDivisionError)
        assert str(results[2]) == "no"
        assert results[3] == 2
        assert isinstance(results[4], StoreError)
        assert "UNIQUE" in str(results[4])
        rows = await store._owner.read(lambda cursor: cursor.execute("SELECT id FROM line").fetchall())
        assert rows == [(1,), (2,)]

    async def test_large_commits_go_aside(self, store: SqliteStore) -> None:
        lease = await create(store)
        head = make_head(state="x" * 300_000)
        with statements(store._owner._main.raw) as seen:
            await store.save(lease, Commit(head=head), 1)
            await store.create(Commit(head=make_head("large", state="x" * 300_000)), owner=OWNER, ttl=TTL)
        assert seen == []


class TestFullDisk:
    @pytest.mark.parametrize("full", [False, True])
    async def test_nothing_is_lost_and_it_goes_on_when_there_is_room(
        self, path: Path, store: SqliteStore, full: bool
    ) -> None:
        lease = await create(store)
        await store.journal_put(lease, JournalRow("k", "intent"))
        owner = store._owner
        assert owner._writer is not None
        for connection in (owner._main, owner._writer):
            connection.raw.execute("PRAGMA max_page_count=1")  # which means: no more than there are
        mine = SqliteStore(path, synchronous="full" if full else "normal")
        big = Commit(head=make_head(state="x" * 100_000), messages=[make_row(0)])
        results = await asyncio.gather(
            mine.save(lease, big, 1), mine.renew(lease, ttl=TTL), mine.save(lease, big, 1), return_exceptions=True
        )
        for result in (results[0], results[2]):
            assert type(result) is StoreError
            assert "full" in str(result)
        assert isinstance(results[1], Lease)
        head, held = await mine.load("s")
        assert (head.revision, head.stages, held) == (1, {}, results[1])
        assert await mine.load_messages("s", "A") == []
        for connection in (owner._main, owner._writer):
            connection.raw.execute("PRAGMA max_page_count=1000000")
        assert await mine.save(lease, big, 1) == 2
        await mine.close()


class TestWaiting:
    async def test_a_locked_file_is_waited_for_without_holding_the_loop(self, path: Path, store: SqliteStore) -> None:
        lease = await create(store)
        with locked(path) as other:
            saves = [asyncio.ensure_future(store.save(lease, Commit(head=make_head(state=1)), 1))]
            await asyncio.sleep(0.03)
            saves.append(asyncio.ensure_future(store.save(lease, Commit(head=make_head(state=2)), 1)))
            await asyncio.sleep(0.01)
            assert (await store.load("s"))[0].revision == 1  # readers do not wait, and see what is committed
            assert not any(save.done() for save in saves)
            other.execute("ROLLBACK")
            results = await asyncio.gather(*saves, return_exceptions=True)
        assert results[0] == 2
        assert (await store.load("s"))[0].stages["A"].state == {"value": 1}
        # and then the loop commits by itself again
        with statements(store._owner._main.raw) as seen:
            await store.save(lease, Commit(head=make_head()), 2)
        assert seen

    @pytest.mark.parametrize("synchronous", ["normal", "full"])
    async def test_a_file_locked_for_too_long_is_a_busy_store(self, path: Path, synchronous: Any) -> None:
        store = SqliteStore(path, synchronous=synchronous, busy_timeout=0.05)
        lease = await create(store)
        with locked(path):
            results = await asyncio.gather(
                store.save(lease, Commit(head=make_head()), 1),
                store.journal_put(lease, JournalRow("k", "intent")),
                create(store, "new"),
                return_exceptions=True,
            )
            assert all(type(result) is StoreBusyError and result.retryable for result in results)
        assert await store.save(lease, Commit(head=make_head()), 1) == 2
        assert await store.journal_load("s") == []
        await create(store, "new")
        await store.close()

    async def test_the_loop_and_the_writer_do_not_compete(self, store: SqliteStore) -> None:
        lease = await create(store)
        gate, order = threading.Event(), []
        effect = store._owner.write(lambda cursor: (gate.wait(5), order.append("effect")), full=True)
        await asyncio.sleep(0.01)
        save = asyncio.ensure_future(store.save(lease, Commit(head=make_head()), 1))
        save.add_done_callback(lambda done: order.append("save"))
        with statements(store._owner._main.raw) as seen:
            for _ in range(20):
                await asyncio.sleep(0)
            assert seen == []  # it does not even ask for the lock that the thread has
            gate.set()
            await effect
            assert await save == 2
            assert seen  # and runs in the loop once the thread is done
        assert order == ["effect", "save"]
        # With another effect waiting it joins its transaction.
        gate.clear()
        first = store._owner.write(lambda cursor: gate.wait(5), full=True)
        await asyncio.sleep(0.01)
        with statements(store._owner._main.raw) as seen:
            save = asyncio.ensure_future(store.save(lease, Commit(head=make_head()), 2))
            second = asyncio.ensure_future(store.journal_put(lease, JournalRow("k", "intent")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(first, second)
            assert await save == 3
            assert seen == []

    async def test_effects_get_through_under_load(self, store: SqliteStore) -> None:
        lease = await create(store)
        leases = [await create(store, f"s{n}") for n in range(20)]
        stop = False

        async def load(mine: Lease) -> None:
            revision = 1
            while not stop:
                revision = await store.save(mine, Commit(head=make_head(mine.session)), revision)

        tasks = [asyncio.ensure_future(load(mine)) for mine in leases]
        started = asyncio.get_running_loop().time()
        for n in range(20):
            await store.journal_put(lease, JournalRow(str(n), "intent"))
        assert asyncio.get_running_loop().time() - started < 2.0
        stop = True
        await asyncio.gather(*tasks)

    async def test_close_finishes_what_waits_for_the_writer(self, path: Path, store: SqliteStore) -> None:
        lease = await create(store)
        gate = threading.Event()
        effect = store._owner.write(lambda cursor: gate.wait(5), full=True)
        await asyncio.sleep(0.01)
        save = asyncio.ensure_future(store.save(lease, Commit(head=make_head()), 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        # The thread ends while the loop is busy with something else: what it gave back would not be run in time.
        asyncio.get_running_loop().call_later(0.02, time.sleep, 0.2)
        timer = threading.Timer(0.1, gate.set)
        timer.start()
        await store.close()
        timer.join()
        assert await save == 2
        assert await effect

    async def test_the_writer_cannot_open_the_file(self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        lease = await create(store)

        def fail(*args: Any) -> Any:
            raise sqlite3.OperationalError("unable to open database file")

        with monkeypatch.context() as patch:
            patch.setattr(_sqlite, "_Connection", fail)
            with pytest.raises(StoreError, match="unable to open"):
                await store.journal_put(lease, JournalRow("k", "intent"))
            patch.setattr(_sqlite, "_Connection", lambda *args: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await store.journal_put(lease, JournalRow("k", "intent"))
        await store.journal_put(lease, JournalRow("k", "intent"))

    async def test_opening_waits_for_a_locked_file(self, path: Path) -> None:
        first = SqliteStore(path)
        await first.close()
        with locked(path) as other:
            threading.Timer(0.05, other.execute, ("ROLLBACK",)).start()
            store = SqliteStore(path)
            await store.close()
        with locked(path), pytest.raises(StoreBusyError):
            _sqlite.acquire_owner(path, Part("x", 2, [["CREATE TABLE x(a)"]]), busy_timeout=0.02)

    def test_turning_the_log_on_waits_for_another_that_does_it(self, path: Path) -> None:
        class Cursor:
            calls = 0

            def execute(self, sql: str) -> Any:
                if sql == "PRAGMA journal_mode=WAL":
                    self.calls += 1
                    if self.calls < limit:
                        error = sqlite3.OperationalError("database is locked")
                        error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                        raise error
                self.row = {"PRAGMA application_id": (0,), "PRAGMA journal_mode=WAL": ("wal",)}.get(sql)
                return self

            def fetchone(self) -> Any:
                return self.row

        limit = 3
        cursor = Cursor()
        _sqlite._claim(cursor, str(path), 1.0)  # type: ignore[arg-type]
        assert cursor.calls == 3
        limit = 1_000_000
        with pytest.raises(sqlite3.OperationalError):
            _sqlite._claim(Cursor(), str(path), 0.01)  # type: ignore[arg-type]

    async def test_a_reader_that_must_wait_goes_aside(self, store: SqliteStore) -> None:
        lease = await create(store)
        with store._owner._main_lock:  # another loop is at work on the loop's connection
            assert (await store.load("s"))[1] == lease
            assert await store.save(lease, Commit(head=make_head()), 1) == 2
        calls: list[int] = []

        def once_busy(cursor: sqlite3.Cursor) -> int:
            calls.append(1)
            if len(calls) == 1:
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error
            return 5

        assert await store._owner.read(once_busy) == 5


class TestDurability:
    async def test_effects_are_on_the_disk_in_either_mode(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[tuple[str, int]] = []

        def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(cursor: sqlite3.Cursor, *args: Any) -> Any:
                seen.append((name, cursor.connection.execute("PRAGMA synchronous").fetchone()[0]))
                return original(cursor, *args)

            return call

        monkeypatch.setattr(sqlite, "_append", spy("save", sqlite._append))
        monkeypatch.setattr(sqlite, "_journal_insert", spy("effect", sqlite._journal_insert))
        lease = await create(store)
        await store.journal_put(lease, JournalRow("k", "intent"))
        await store.save(lease, Commit(head=make_head()), 1)
        head = make_head(state="x" * 300_000)
        await store.save(lease, Commit(head=head), 2)  # in the same thread as the effects, but without the fsync
        await store.journal_put(lease, JournalRow("k", "done"))
        assert seen == [("save", 1), ("effect", 2), ("save", 1), ("save", 1), ("effect", 2)]
        seen.clear()
        full = SqliteStore(path, synchronous="full")
        await full.save(lease, Commit(head=make_head()), 3)
        await full.journal_put(lease, JournalRow("k", "done"))
        assert seen == [("save", 2), ("effect", 2)]
        await full.close()

    async def test_the_log_is_copied_aside_and_starts_over(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_sqlite, "CHECKPOINT_BYTES", 100_000)
        monkeypatch.setattr(_sqlite, "RESTART_BYTES", 400_000)
        lease = await create(store)
        head = make_head(state="x" * 10_000)
        sizes: list[int] = []
        for n in range(1, 1000):
            await store.save(lease, Commit(head=head, messages=[make_row(n)]), n)
            sizes.append(path.with_name("store.db-wal").stat().st_size)
            while store._owner._checkpointing:  # noqa: ASYNC110 - it is a thread
                await asyncio.sleep(0.001)
        assert max(sizes) < 1_200_000  # of 16 MB that were written
        assert path.stat().st_size > 100_000
        assert len(await store.load_messages("s", "A")) == 999

    async def test_the_log_starts_over_also_where_a_reader_kept_it_long(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_sqlite, "CHECKPOINT_BYTES", 10**9)
        lease = await create(store)
        head = make_head(state="x" * 10_000)
        wal = path.with_name("store.db-wal")
        for n in range(1, 100):
            await store.save(lease, Commit(head=head), n)
        store._owner._checkpoint()
        before = wal.stat().st_size
        assert before > 300_000
        monkeypatch.setattr(_sqlite, "RESTART_BYTES", 100_000)
        store._owner._checkpoint()
        assert wal.stat().st_size == 0
        await store.save(lease, Commit(head=head), 100)

    async def test_a_check_point_that_fails_is_tried_again(
        self, path: Path, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_sqlite, "CHECKPOINT_BYTES", 0)
        lease = await create(store)
        connect, failures = sqlite3.connect, [0]

        def fail(*args: Any, **options: Any) -> Any:
            failures[0] += 1
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(sqlite3, "connect", fail)
        for n in range(1, 100):
            await store.save(lease, Commit(head=make_head()), n)
            await asyncio.sleep(0)
        store._owner._checkpoint()
        assert failures[0] >= 2
        monkeypatch.setattr(sqlite3, "connect", connect)
        store._owner._checkpoint()
        assert store._owner._checkpointing is False
        monkeypatch.setattr(store._owner, "_wal", str(path) + "-nowhere")
        for n in range(100, 200):
            await store.save(lease, Commit(head=make_head()), n)


class TestNames:
    async def test_writers_that_take_turns_agree_on_numbers(self, path: Path, tmp_path: Path) -> None:
        a, b = SqliteStore(path), SqliteStore(path)  # with a memory of their own, as two processes have
        await create(a)
        revision = 1
        for turn, (store, names) in enumerate([(a, "xy"), (b, "xz"), (a, "zw"), (b, "w"), (a, "y")]):
            lease = (await store.acquire("s", OWNER, ttl=TTL)).lease
            commit = Commit(
                head=make_head(),
                messages=[make_row(turn, f"{name} {turn}", ns=name) for name in names],
                sequence=[SequenceEntry(name, float(turn)) for name in reversed(names)],
            )
            revision = await store.save(lease, commit, revision)
        for store in (a, b):
            texts = {ns: [row.message.text for row in await store.load_messages("s", ns)] for ns in "xyzw"}  # type: ignore[union-attr]
            assert texts == {"x": ["x 0", "x 1"], "y": ["y 0", "y 4"], "z": ["z 1", "z 2"], "w": ["w 2", "w 3"]}
            assert "".join(entry.stage for entry in await store.load_sequence("s")) == "yxzxwzwy"
        # Erasing a namespace that this store has not heard of.
        c = SqliteStore(path)
        lease = (await c.acquire("s", OWNER, ttl=TTL)).lease
        await c.save(lease, Commit(head=make_head(), first={"y": 4, "none": 9}), revision)
        assert [row.position for row in await a.load_messages("s", "y")] == [4]
        for store in (a, b, c):
            await store.close()

    async def test_names_of_many_sessions_are_forgotten_and_read_again(
        self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sqlite, "CACHED_NAMES", 2)
        leases = [await create(store, f"s{n}") for n in range(5)]
        for n in range(1, 3):
            for lease in leases:
                await store.save(lease, Commit(head=make_head(lease.session), messages=[make_row(n)]), n)
        assert len(store._names) == 2
        assert len(await store.load_messages("s0", "A")) == 2

    async def test_too_many_names(self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite, "MAX_NAMES", 3)
        rows = [make_row(0, ns=name) for name in "abcd"]
        with pytest.raises(StoreError, match="at most 3"):
            await store.create(Commit(head=make_head(), messages=rows), owner=OWNER, ttl=TTL)
        lease = (await store.create(Commit(head=make_head(), messages=rows[:2]), owner=OWNER, ttl=TTL)).lease
        with pytest.raises(StoreError, match="at most 3"):
            await store.save(lease, Commit(head=make_head(), messages=rows[2:]), 1)
        assert await store.save(lease, Commit(head=make_head(), messages=rows[2:3]), 1) == 2

    async def test_too_many_sessions(self, store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sqlite, "SESSION_BITS", 1)
        await create(store)
        with pytest.raises(StoreError, match="cannot hold more sessions"):
            await create(store, "second")
        assert len((await store.list())[0]) == 1


async def test_a_lease_of_another_kind_of_store_is_stale(store: SqliteStore) -> None:
    lease = await create(store)
    for incarnation in ("", "deadbeef", "1", "1.x", "-1.-1"):
        with pytest.raises(StaleWriterError):
            await store.save(Lease("s", incarnation, 1, OWNER, 0.0), Commit(head=make_head()), 1)
    with pytest.raises(StaleWriterError):
        await store.renew(Lease("\ud800", lease.incarnation, 1, OWNER, 0.0), ttl=TTL)


async def test_neighbours_in_the_file_are_not_touched(store: SqliteStore) -> None:
    leases = [await create(store, name) for name in ("a", "b", "c")]
    commit = Commit(
        head=make_head(),
        messages=[make_row(0), make_row((1 << 22) - 1), make_row(0, ns="Z")],
        sequence=[SequenceEntry("A", 1.0)],
        log=[LogEntry("info", 1.0, "x")],
    )
    for lease in leases:
        commit.head = make_head(lease.session)
        await store.save(lease, commit, 1)
    await store.delete("b")
    for name in ("a", "c"):
        assert [row.position for row in await store.load_messages(name, "A")] == [0, (1 << 22) - 1]
        assert len(await store.load_messages(name, "Z")) == 1
        assert len(await store.load_sequence(name)) == 1
        assert len(await store.load_log(name)) == 1
    left = await store._owner.read(lambda cursor: cursor.execute("SELECT count(*) FROM line").fetchone())
    assert left == (10,)


async def test_a_stored_session_is_small(path: Path) -> None:
    """The bar of the benchmark: 12 messages in 3 turns, 18 commits, below 3 KB with everything."""
    store = SqliteStore(path)
    sessions = 100
    for number in range(sessions):
        name = f"01936f0e-aaaa-7bbb-8ccc-{number:012}"
        head = make_head(name, turn=True)
        lease, revision = None, 0
        for turn, stage in enumerate("ABC"):
            head.workflow.current = stage
            head.stages[stage] = StageRecord()
            rows = [make_row(n, "Please look up the order status for me. " * 2, ns=stage) for n in range(4)]
            for n in range(6):
                commit = Commit(head=head, messages=rows[n : n + 1], release=n == 5)
                if n == 0:
                    commit.sequence = [SequenceEntry(stage, 1_764_547_918.123 + turn)]
                if lease is None:
                    lease, revision = (await store.create(commit, owner=OWNER, ttl=TTL)).lease, 1
                    continue
                if n == 0:
                    lease = (await store.acquire(name, OTHER, ttl=TTL)).lease
                revision = await store.save(lease, commit, revision)
    await store.close()
    assert path.stat().st_size / sessions < 3_000
