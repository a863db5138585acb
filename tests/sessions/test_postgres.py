"""Sessions in PostgreSQL, with real servers: what only this backend can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from hashlib import sha256
from typing import Any, LiteralString, TypeVar

import psycopg
import pytest

from channel_kit import go, ready, start
from engine_flows import BookFlow
from servers import PostgresServer, start_postgres
from stepwell import Engine
from stepwell.channels.postgres import PostgresChannels
from stepwell.errors import (
    InvalidInputError,
    LeaseHeldError,
    NewerSchemaError,
    SessionConflictError,
    StaleWriterError,
    StoreBusyError,
    StoreDataError,
    StoreError,
    UnknownSessionError,
)
from stepwell.sessions import Commit, InboxRow, JournalRow, Lease, MemoryHead, SequenceEntry, open_store
from stepwell.sessions.postgres import PostgresStore
from stepwell.testing import Reply, ScriptedModel
from stepwell.testing._store_base import OTHER, OWNER, TTL, make_head, make_row
from stepwell.wire import WireMessage

pytestmark = pytest.mark.anyio

T = TypeVar("T")


@pytest.fixture(scope="module")
def unsafe_server() -> Iterator[PostgresServer]:
    """For tests that crash, stop or starve it."""
    with start_postgres(fast=True, max_connections="20") as server:
        yield server


@pytest.fixture
def unsafe_database(unsafe_server: PostgresServer) -> Iterator[str]:
    with unsafe_server.database() as url:
        yield url


@pytest.fixture
async def store(postgres_database: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_database)
    yield store
    await store.close()


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, **options)
    try:
        yield store
    finally:
        await store.close()


async def create(store: PostgresStore, session: str = "s", **fields: Any) -> Lease:
    return (await store.create(Commit(head=make_head(session, **fields)), owner=OWNER, ttl=TTL)).lease


def ask(url: str, query: LiteralString, *values: Any) -> list[Any]:
    """Ask the database past the store."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query, values or None)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


async def until(true: Callable[[], object]) -> None:
    """Look at the server until it says so."""
    while not await asyncio.to_thread(true):
        pass


WAITING: LiteralString = (
    "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
)
OURS: LiteralString = (
    "SELECT pid FROM pg_stat_activity WHERE application_name = 'stepwell' AND datname = current_database()"
)


# -- several processes


MIGRATE = """
import asyncio, sys
from stepwell.sessions import open_store
from stepwell.errors import SessionExistsError
from stepwell.sessions import Commit
from stepwell.testing._store_base import make_head

async def main(url, name):
    store = open_store(url)
    print("ready", flush=True)
    sys.stdin.readline()
    await store.create(Commit(head=make_head(name)), owner=name, ttl=5)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_make_the_tables_at_once(postgres_database: str, store: PostgresStore) -> None:
    processes = [start(MIGRATE, postgres_database, f"s{n}") for n in range(3)]
    await ready(processes)
    go(processes)
    for process in processes:
        await asyncio.to_thread(process.communicate)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(row.id for row in (await store.list())[0]) == ["s0", "s1", "s2"]


async def test_twenty_stores_make_the_tables_at_once(postgres_database: str) -> None:
    async def work(number: int) -> None:
        async with opened(postgres_database) as store:
            await create(store, f"s{number}")

    await asyncio.gather(*(work(number) for number in range(20)))
    async with opened(postgres_database) as store:
        assert len((await store.list())[0]) == 20


async def test_a_take_over_that_is_not_committed_is_waited_for(postgres_database: str, store: PostgresStore) -> None:
    """The trap, step by step: the epoch moves in another transaction while stale writes are already on their way."""
    lease = await create(store, state="before")
    async with await psycopg.AsyncConnection.connect(postgres_database) as other:
        await other.execute("UPDATE stepwell_session SET epoch = epoch + 1, owner = 'other'")
        writes: list[Awaitable[Any]] = [
            store.save(lease, Commit(head=make_head(state="stale"), messages=[make_row(0)]), 1),
            store.journal_put(lease, JournalRow("k", "intent")),
            store.renew(lease, ttl=TTL),
            store.release(lease),
        ]
        tasks = [asyncio.ensure_future(write) for write in writes]
        await until(lambda: len(ask(postgres_database, WAITING)) == 4)
        assert (await store.load("s"))[0].stages["A"].state == {"value": "before"}  # readers wait for nobody
        await other.commit()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [StaleWriterError] * 3 + [type(None)]
    head, held = await store.load("s")
    assert (head.revision, head.stages["A"].state) == (1, {"value": "before"})
    assert held is not None
    assert (held.epoch, held.owner) == (2, "other")
    assert await store.load_messages("s", "A") == []
    assert await store.journal_load("s") == []


async def test_a_take_over_sees_what_was_written_just_before(postgres_database: str, store: PostgresStore) -> None:
    await create(store, turn=True)
    async with await psycopg.AsyncConnection.connect(postgres_database) as other:
        await other.execute("UPDATE stepwell_session SET revision = 2")
        await other.execute(
            "INSERT INTO stepwell_session_inbox (session, name, kind, state, payload) SELECT key, 'k', 0, 0, 'x'"
            " FROM stepwell_session"
        )
        taking = asyncio.ensure_future(
            store.acquire("s", OTHER, ttl=TTL, supersede=OWNER, known_revision=1, known_incarnation="1.1")
        )
        await until(lambda: ask(postgres_database, WAITING))
        await other.commit()
    taken = await taking
    assert taken.revision == 2
    assert taken.head is not None
    assert list(taken.inbox) == [InboxRow("k", "input", b"x")]


async def test_the_same_epoch_of_another_owner_is_stale(store: PostgresStore) -> None:
    """After a failover that lost an acquisition the number may be given again."""
    lease = await create(store)
    other = Lease("s", lease.incarnation, lease.epoch, OTHER, lease.expires)
    for call in (
        store.save(other, Commit(head=make_head()), 1),
        store.renew(other, ttl=TTL),
        store.journal_put(other, JournalRow("k", "intent")),
    ):
        with pytest.raises(StaleWriterError):
            await call
    await store.release(other)
    assert (await store.load("s"))[1] == lease
    for owner in (Lease("\ud800", "1.1", 1, OWNER, 0.0), Lease("s", "1.1", 1, "\ud800", 0.0)):
        with pytest.raises(StaleWriterError):
            await store.renew(owner, ttl=TTL)
    far = Lease("s", f"{2**70}.1", 1, OWNER, 0.0)
    with pytest.raises(StaleWriterError):
        await store.save(far, Commit(head=make_head()), 1)


async def test_a_session_that_is_deleted_leaves_no_row(postgres_database: str, store: PostgresStore) -> None:
    lease = await create(store)
    await store.save(lease, Commit(head=make_head(), messages=[make_row(0)], sequence=[SequenceEntry("A", 1.0)]), 1)
    await store.journal_put(lease, JournalRow("j", "intent"))
    async with await psycopg.AsyncConnection.connect(postgres_database) as other:
        await other.execute("SELECT stepwell_session_delete_1('s')")
        putting = asyncio.ensure_future(store.inbox_put("s", InboxRow("k", "input", b"")))
        await until(lambda: ask(postgres_database, WAITING))
        await other.commit()
    with pytest.raises(UnknownSessionError):
        await putting
    for table in ("session", "session_line", "session_inbox", "session_journal"):
        query = psycopg.sql.SQL("SELECT 1 FROM {}").format(psycopg.sql.Identifier(f"stepwell_{table}"))
        with psycopg.connect(postgres_database) as connection:
            assert connection.execute(query).fetchall() == []


async def test_leases_run_by_the_databases_clock(
    postgres_database: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)  # what the processes take for the time is nobody's business
    lease = await create(store, turn=True)
    [now] = ask(postgres_database, "SELECT extract(epoch FROM clock_timestamp())::float8")
    assert now + TTL - 30 < lease.expires <= now + TTL
    with pytest.raises(LeaseHeldError):
        await store.acquire("s", OTHER, ttl=TTL)
    assert (await store.renew(lease, ttl=TTL)).expires > lease.expires
    ask(postgres_database, "UPDATE stepwell_session SET expires = extract(epoch FROM clock_timestamp()) - 0.001")
    assert [row.session for row in await store.due()] == ["s"]
    assert (await store.acquire("s", OTHER, ttl=TTL)).lease.epoch == 2


async def test_a_store_uses_no_more_connections_than_it_may(postgres_database: str) -> None:
    async with opened(postgres_database, pool_size=3) as store:
        leases = await asyncio.gather(*(create(store, f"s{n}") for n in range(60)))
        await asyncio.gather(*(store.save(lease, Commit(head=make_head(lease.session)), 1) for lease in leases))
        assert len(ask(postgres_database, OURS)) <= 3
    await until(lambda: not ask(postgres_database, OURS))


# -- connections that are lost


TERMINATE: LiteralString = (
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
    " WHERE application_name = 'stepwell' AND datname = current_database()"
)


async def test_an_idle_connection_that_was_closed_costs_no_call(postgres_database: str, store: PostgresStore) -> None:
    lease = await create(store)
    for revision in range(1, 4):
        assert ask(postgres_database, TERMINATE)
        assert await store.save(lease, Commit(head=make_head()), revision) == revision + 1
        await asyncio.gather(*(store.load("s") for _ in range(5)))


async def test_a_connection_that_is_cut_in_the_middle_of_a_commit(postgres_database: str, store: PostgresStore) -> None:
    lease = await create(store, state="old")
    commit = Commit(head=make_head(state="new"), messages=[make_row(0)], inbox=[InboxRow("k", "input", b"secret")])
    async with await psycopg.AsyncConnection.connect(postgres_database) as other:
        await other.execute("SELECT FROM stepwell_session FOR UPDATE")
        calls = [
            asyncio.ensure_future(store.save(lease, commit, 1)),
            asyncio.ensure_future(store.acquire("s", OWNER, ttl=TTL)),
            asyncio.ensure_future(store.inbox_put("s", InboxRow("i", "input", b"secret"))),
        ]
        await until(lambda: len(ask(postgres_database, WAITING)) == 3)
        assert ask(postgres_database, TERMINATE)
        results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        assert type(result) is StoreBusyError
        assert result.retryable
        assert "try again" in result.message
        assert "secret" not in "".join(traceback.format_exception(result))
    head, held = await store.load("s")
    assert (head.revision, held) == (1, lease)
    assert await store.inbox_list("s") == []
    assert await store.save(lease, commit, 1) == 2  # nothing was done, so it is done now, once
    assert [row.position for row in await store.load_messages("s", "A")] == [0]


class Proxy:
    """Stands between store and server, and may swallow an answer: what was asked is done, and nobody is told."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2].partition("/")[0])
        self._url = url
        self.swallow = False
        self.swallowed = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self._ends: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return self._url.replace(f":{self._port}/", f":{port}/")

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for end in self._ends:
            end.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += (back, writer)
        asking = asyncio.ensure_future(self._pass(reader, back))
        try:
            await self._answer(there, writer)
        finally:
            asking.cancel()
            for end in (back, writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _pass(self, reader: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                back.write(data)
            back.write_eof()

    async def _answer(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await there.read(65536):
                if self.swallow:
                    self.swallow = False
                    self.swallowed += 1
                    return
                writer.write(data)


async def test_an_answer_that_is_lost_can_be_told(postgres_database: str) -> None:
    proxy = Proxy(postgres_database)
    async with proxy as url, opened(url) as store:
        lease = await create(store)
        other = await create(store, "other")
        revision = 1

        async def lost(call: Awaitable[Any]) -> None:
            # Every statement once on the connection that is new each time, so that what is swallowed is not the answer
            # to its preparation.
            nonlocal other, revision
            revision = await store.save(other, Commit(head=make_head("other")), revision)
            await store.journal_put(other, JournalRow("j", "intent"))
            await store.inbox_put("other", InboxRow("k", "input", b""))
            other = (await store.acquire("other", OWNER, ttl=TTL)).lease
            proxy.swallow = True
            with pytest.raises(StoreBusyError, match="lost: try again"):
                await call

        commit = Commit(head=make_head(state="mine"), messages=[make_row(0)])
        await lost(store.save(lease, commit, 1))
        with pytest.raises(SessionConflictError):
            await store.save(lease, commit, 1)
        head, held = await store.load("s")
        assert (head.revision, head.stages["A"].state, held) == (2, {"value": "mine"}, lease)
        # What may simply be repeated. It was done, as who looks past the store sees.
        await lost(store.inbox_put("s", InboxRow("k", "input", b"x")))
        assert ask(postgres_database, "SELECT name FROM stepwell_session_inbox WHERE payload = 'x'") == [b"k"]
        assert await store.inbox_put("s", InboxRow("k", "input", b"x")) == InboxRow("k", "input", b"x")
        await lost(store.journal_put(lease, JournalRow("mine", "intent")))
        assert b"mine" in ask(postgres_database, "SELECT name FROM stepwell_session_journal")
        await store.journal_put(lease, JournalRow("mine", "intent"))
        assert await store.journal_load("s") == [JournalRow("mine", "intent")]
        await lost(store.acquire("s", OWNER, ttl=TTL))
        assert (await store.acquire("s", OWNER, ttl=TTL)).lease.epoch == 3
        assert proxy.swallowed == 4


def answer(request: Any) -> Any:
    """Depends only on the history, as with a real model."""
    last = getattr(request.messages[-1], "content", "")
    if last == "Ada":
        return Reply.tool_call("note", {"text": "first"})
    return Reply.tool_call("save_name", {"name": "Ada"}) if last == "noted first" else "Is Ada right?"


@pytest.mark.parametrize("lost", range(5))
async def test_a_turn_whose_commits_lose_their_answers(postgres_database: str, lost: int) -> None:
    proxy = Proxy(postgres_database)
    saves: int | None = None  # from when on they are counted

    class Losing(PostgresStore):
        async def save(self, lease: Lease, commit: Commit, expected_revision: int) -> int:
            nonlocal saves
            if saves is not None:
                proxy.swallow = saves == lost
                saves += 1
            return await super().save(lease, commit, expected_revision)

    model = ScriptedModel(default=answer)
    async with proxy as url:
        store = Losing(url)
        async with Engine([BookFlow], models={"scripted": model}, store=store) as engine:
            await engine.run("BookFlow", "Ada")  # another session, so that the statements are prepared
            model.requests.clear()
            saves = 0
            result = await engine.run("BookFlow", "Ada")
            assert result.success
            assert result.message == "Is Ada right?"
            assert len(model.requests) == 3
            assert saves >= 4
            head = await engine.get_session(result.session_id)
            head_again, lease = await store.load(result.session_id)
            assert lease is None
            assert head_again.turn is None
            for ns, memory in head["memories"].items():
                rows = await store.load_messages(result.session_id, ns)
                assert [row.position for row in rows] == list(range(memory["next"]))
        assert proxy.swallowed == (lost < saves)
        await store.close()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_a_server_restarted_in_the_middle_of_work(how: signal.Signals) -> None:
    with start_postgres(fsync="off") as server:
        async with opened(server.url) as store:
            begun = asyncio.Event()
            refused: list[str] = []

            async def repeat(call: Callable[[], Awaitable[T]]) -> T:
                while True:
                    try:
                        return await call()
                    except StoreBusyError as error:
                        refused.append(error.message)
                        await asyncio.sleep(0.01)

            async def count(session: str) -> None:
                lease = await create(store, session, state=0)
                for n in range(1, 151):
                    head = make_head(session, state=n, turn=True)
                    head.memories["A"] = MemoryHead(0, n)
                    commit = Commit(head=head, messages=[make_row(n - 1)], sequence=[SequenceEntry("A", float(n))])
                    try:
                        await repeat(lambda commit=commit, n=n: store.save(lease, commit, n))
                    except SessionConflictError:  # it was done, and the answer got lost
                        found, held = await repeat(lambda: store.load(session))
                        assert (found.revision, found.stages["A"].state) == (n + 1, {"value": n})
                        assert held is not None
                        assert held.epoch == lease.epoch
                    if n == 50:
                        begun.set()

            async with asyncio.TaskGroup() as tasks:
                for n in range(4):
                    tasks.create_task(count(f"s{n}"))
                await begun.wait()
                await asyncio.to_thread(server.stop, how)
                tasks.create_task(asyncio.to_thread(server.start))
            for n in range(4):
                assert (await store.load(f"s{n}"))[0].revision == 151
                assert [row.position for row in await store.load_messages(f"s{n}", "A")] == list(range(150))
                assert [entry.at for entry in await store.load_sequence(f"s{n}")] == [float(n) for n in range(1, 151)]
            assert refused


async def test_acquisitions_and_journal_rows_survive_a_crash_of_a_server_that_may_forget_commits() -> None:
    # wal_writer_delay: nothing else would bring them to the disk within the test.
    with start_postgres(fsync="off", synchronous_commit="off", wal_writer_delay="10s") as server:
        async with opened(server.url) as store:
            lease = await create(store)
            await store.journal_put(lease, JournalRow("intent", "intent"))
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            assert await store.journal_load("s") == [JournalRow("intent", "intent")]
            taken = await store.acquire("s", OTHER, ttl=TTL, supersede=OWNER)
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            await asyncio.to_thread(server.start)
            assert (await store.load("s"))[1] == taken.lease
            with pytest.raises(StaleWriterError):
                await store.save(lease, Commit(head=make_head()), 1)


async def test_a_server_that_does_not_answer(unsafe_server: PostgresServer, unsafe_database: str) -> None:
    async with opened(unsafe_database, timeout=0.2) as store:
        lease = await create(store)
        stopped = [unsafe_server.pid, *ask(unsafe_database, OURS)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreBusyError):
                await store.save(lease, Commit(head=make_head()), 1)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(SessionConflictError):  # the server may have done it when it woke up
            await store.save(lease, Commit(head=make_head()), 1)
        assert (await store.load("s"))[0].revision == 2


async def test_a_lock_that_is_held_too_long(postgres_database: str) -> None:
    async with opened(postgres_database, timeout=0.2) as store:
        lease = await create(store)
        with psycopg.connect(postgres_database) as other:
            other.execute("SELECT FROM stepwell_session FOR UPDATE")
            with pytest.raises(StoreBusyError, match="in time"):
                await store.save(lease, Commit(head=make_head()), 1)
        assert await store.save(lease, Commit(head=make_head()), 1) == 2


async def test_a_server_without_connections_left(unsafe_database: str) -> None:
    taken: list[psycopg.Connection] = []
    async with opened(unsafe_database) as store:
        await create(store)
        ask(unsafe_database, TERMINATE)
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                taken.append(psycopg.connect(unsafe_database))
        with pytest.raises(StoreBusyError):
            await store.load("s")
        for connection in taken:
            connection.close()
        await until(
            lambda: len(ask(unsafe_database, "SELECT pid FROM pg_stat_activity WHERE datname LIKE 'test%'")) < 3
        )
        assert (await store.load("s"))[0].revision == 1


async def test_calls_that_are_cancelled_leave_everything_usable(store: PostgresStore) -> None:
    lease = await create(store)
    for waits in range(60):
        calls: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(store.inbox_put("s", InboxRow(f"{waits}", "input", b""))),
            asyncio.ensure_future(store.load("s")),
            asyncio.ensure_future(store.renew(lease, ttl=TTL)),
            asyncio.ensure_future(store.due()),
        ]
        for _ in range(waits % 15):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await store.inbox_put("s", InboxRow(f"{waits}", "input", b""))
    assert [row.key for row in await store.inbox_list("s")] == [str(n) for n in range(60)]


FAILS: LiteralString = """
CREATE SEQUENCE failures;
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF new.data = 'poison' THEN
        RAISE EXCEPTION 'with the words: %', new.data;
    ELSIF new.data = 'conflict' AND nextval('failures') < 4 OR new.data = 'always' THEN
        RAISE serialization_failure;
    END IF;
    RETURN new;
END $$;
CREATE TRIGGER fail BEFORE INSERT ON stepwell_session_journal FOR EACH ROW EXECUTE FUNCTION fail()
"""


async def test_conflicts_are_settled_inside_and_what_cannot_be_done_fails_alone(
    postgres_database: str, store: PostgresStore
) -> None:
    lease = await create(store)
    ask(postgres_database, FAILS)
    good, bad, always, conflict = await asyncio.gather(
        store.journal_put(lease, JournalRow("good", "intent")),
        store.journal_put(lease, JournalRow("bad", "intent", b"poison")),
        store.journal_put(lease, JournalRow("always", "intent", b"always")),
        store.journal_put(lease, JournalRow("conflict", "intent", b"conflict")),
        return_exceptions=True,
    )
    assert (good, conflict) == (None, None)
    assert type(bad) is StoreError
    assert "poison" not in "".join(traceback.format_exception(bad)).partition("Error: ")[2]
    assert type(always) is StoreBusyError
    assert sorted(row.key for row in await store.journal_load("s")) == ["conflict", "good"]


# -- what is stored


async def test_names_that_are_no_text_to_postgres(store: PostgresStore) -> None:
    session, key = "null\0 ü \U0001f600 '%s\\", "k\0\xff" + "long " * 2_000
    lease = (await store.create(Commit(head=make_head(session)), owner="ow\0ner", ttl=TTL)).lease
    commit = Commit(
        head=make_head(session, flow="fl\0w"),
        messages=[make_row(0, ns="ns\0"), make_row(1, ns="ns\0")],
        first={"ns\0": 1, "\ud800": 3},
        sequence=[SequenceEntry("st\0ge", 1.0)],
        inbox=[InboxRow(key, "input", b"\0\xff")],
        journal=[JournalRow(key, "intent", b"\0")],
        clear_journal="\ud800",
    )
    assert await store.save(lease, commit, 1) == 2
    assert [row.position for row in await store.load_messages(session, "ns\0")] == [1]
    assert await store.load_sequence(session) == [SequenceEntry("st\0ge", 1.0)]
    assert await store.inbox_put(session, InboxRow(key, "input", b"other")) == InboxRow(key, "input", b"\0\xff")
    assert await store.inbox_get(session, key[:-1]) is None
    assert await store.journal_load(session, key[:5]) == [JournalRow(key, "intent", b"\0")]
    assert await store.journal_load(session, "\ud800") == []
    assert (await store.list(flow="fl\0w"))[0][0].id == session
    assert (await store.load(session))[1] == lease
    assert (await store.acquire(session, "other", ttl=TTL, supersede="ow\0ner")).lease.epoch == 2
    with pytest.raises(LeaseHeldError):
        await store.acquire(session, "third", ttl=TTL, supersede="\ud800")


async def test_a_database_in_another_encoding(postgres_server: PostgresServer) -> None:
    ask(postgres_server.url, "CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    try:
        async with opened(postgres_server.database_url("latin")) as store:
            await create(store, "\U0001f600", state="\U0001f600")
            assert (await store.load("\U0001f600"))[0].stages["A"].state == {"value": "\U0001f600"}
            assert await store.load_sequence("\U0001f600") == []
    finally:
        ask(postgres_server.url, "DROP DATABASE latin WITH (FORCE)")


async def test_damage_is_told_and_hides_no_other_session(postgres_database: str, store: PostgresStore) -> None:
    lease = await create(store)
    await create(store, "whole")
    await store.save(lease, Commit(head=make_head(), sequence=[SequenceEntry("A", 1.0)]), 1)
    ask(postgres_database, "UPDATE stepwell_session SET head = '{' WHERE id = 's'")
    ask(postgres_database, "UPDATE stepwell_session_line SET data = '{'")
    with pytest.raises(StoreDataError):
        await store.load("s")
    with pytest.raises(StoreDataError):
        await store.load_sequence("s")
    assert [row.id for row in (await store.list())[0]] == ["whole", "s"]


async def test_sessions_and_channels_share_a_database(postgres_database: str, store: PostgresStore) -> None:
    async with PostgresChannels(postgres_database) as channels:
        channel, _ = await asyncio.gather(channels.open("c"), create(store))
        await channel.publish([WireMessage(name="m")])
        assert len((await channel.history()).items) == 1
    assert (await store.load("s"))[0].revision == 1


# -- what is refused


async def test_a_newer_schema_is_left_alone(postgres_database: str, store: PostgresStore) -> None:
    await create(store)
    ask(postgres_database, "UPDATE stepwell_session_schema SET version = 99")
    async with opened(postgres_database) as later:
        for call in (later.load("s"), later.list(), create(later, "new")):
            with pytest.raises(NewerSchemaError, match="session tables in PostgreSQL have version 99"):
                await call
    assert ask(postgres_database, "SELECT version FROM stepwell_session_schema") == [99]


async def test_tables_that_went_away_are_said_so(postgres_database: str, store: PostgresStore) -> None:
    lease = await create(store)
    ask(postgres_database, "DROP TABLE stepwell_session")
    with pytest.raises(StoreError, match="open the session store anew") as caught:
        await store.save(lease, Commit(head=make_head(state="secret")), 1)
    assert not caught.value.retryable


async def test_a_name_that_is_too_long(store: PostgresStore) -> None:
    name = "".join(sha256(bytes([n])).hexdigest() for n in range(250))  # nothing that can be compressed to fit
    with pytest.raises(StoreError, match="shorter names") as caught:
        await create(store, name)
    assert not caught.value.retryable


async def test_a_user_without_rights(postgres_database: str, store: PostgresStore) -> None:
    ask(postgres_database, "DROP ROLE IF EXISTS clerk")
    ask(postgres_database, "CREATE ROLE clerk LOGIN")
    try:
        async with opened(postgres_database.replace("postgres@", "clerk@")) as theirs:
            ask(postgres_database, "REVOKE ALL ON SCHEMA public FROM public")
            ask(postgres_database, "GRANT USAGE ON SCHEMA public TO clerk")
            with pytest.raises(StoreError, match="grant it") as caught:
                await create(theirs)
            assert not caught.value.retryable
            await create(store)
            ask(postgres_database, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO clerk")
            lease = (await theirs.acquire("s", OTHER, ttl=TTL, supersede=OWNER)).lease
            await theirs.journal_put(lease, JournalRow("j", "intent"))
            await theirs.inbox_put("s", InboxRow("k", "input", b""))
            assert await theirs.save(lease, Commit(head=make_head(), messages=[make_row(0)]), 1) == 2
            assert await theirs.delete("s")
    finally:
        ask(postgres_database, "DROP OWNED BY clerk")
        ask(postgres_database, "DROP ROLE clerk")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:S3CRET@host/db?no-such-option=1",
        "postgresql://user:S3 CRET@host/db",
        "postgresql://user:S3CRET%zz@host/db",
    ],
)
def test_a_url_that_is_none_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError, match="URL of the session store") as caught:
        open_store(url)
    assert caught.value.pointer == "/store"
    assert "CRET" not in "".join(traceback.format_exception(caught.value)).partition("Error: ")[2]


@pytest.mark.parametrize(
    ("change", "says", "for_good"),
    [
        (("postgres@", "nobody:S3CRET@"), 'role "nobody" does not exist', True),
        (("/test_", "/no_such_"), "does not exist", True),
        (("postgres", "postgres"), "cannot be reached", False),
    ],
)
async def test_a_server_that_cannot_be_used_says_why(
    postgres_database: str, change: tuple[str, str], says: str, for_good: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = postgres_database.replace(*change)
    if not for_good:  # a port that nobody listens on
        url = "postgresql://postgres:S3CRET@127.0.0.1:1/x"
    async with opened(url) as store:
        for call in (store.load("s"), create(store), store.list()):
            with pytest.raises(StoreError, match=says) as caught:
                await call
            assert caught.value.retryable is not for_good
            assert "S3CRET" not in "".join(traceback.format_exception(caught.value))
    assert "S3CRET" not in caplog.text
