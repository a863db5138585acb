"""The public conformance suite on every store of this package."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from stepwell.errors import StoreBusyError, StoreError, UnknownSessionError
from stepwell.sessions import Commit, MemoryStore, SessionStore, SqliteStore, open_store
from stepwell.sessions.postgres import PostgresStore
from stepwell.testing import SessionStoreConformance, SessionStoreProcessConformance
from stepwell.testing._store_base import make_head, raises
from stepwell.testing._store_processes import count_up, write_until_killed

pytestmark = pytest.mark.anyio


class TestMemory(SessionStoreConformance):
    @pytest.fixture
    async def store(self) -> AsyncIterator[SessionStore]:
        store = MemoryStore(self.clock)
        yield store
        await store.close()


class TestSqliteNormal(SessionStoreConformance):
    synchronous = "normal"

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[SessionStore]:
        store = SqliteStore(tmp_path / "store.db", synchronous=self.synchronous, clock=self.clock)
        yield store
        await store.close()

    async def stored_bytes(self, store: SessionStore) -> int | None:
        assert isinstance(store, SqliteStore)
        owner = store._owner

        def pages(cursor) -> int:
            return cursor.execute("PRAGMA page_count").fetchone()[0] * 4096

        return await owner.read(pages)


class TestSqliteFull(TestSqliteNormal):
    synchronous = "full"


class TestPostgres(SessionStoreConformance):
    @pytest.fixture
    async def store(self, postgres_database: str) -> AsyncIterator[SessionStore]:
        self.url = postgres_database
        store = PostgresStore(postgres_database, clock=self.clock)
        yield store
        await store.close()

    async def stored_bytes(self, store: SessionStore) -> int | None:
        """Of all rows: files grow by pages, and are vacuumed when the server likes."""
        tables = ("stepwell_session", "stepwell_session_line", "stepwell_session_inbox", "stepwell_session_journal")
        with psycopg.connect(self.url) as connection:
            return sum(
                connection.execute(
                    psycopg.sql.SQL("SELECT coalesce(sum(pg_column_size(t.*)), 0) FROM {} t").format(
                        psycopg.sql.Identifier(table)
                    )
                ).fetchone()[0]
                for table in tables
            )


class TestPostgresOneConnection(TestPostgres):
    """Nothing waits for a second connection while it has one."""

    growth_turns = 40

    @pytest.fixture
    async def store(self, postgres_database: str) -> AsyncIterator[SessionStore]:
        self.url = postgres_database
        store = PostgresStore(postgres_database, clock=self.clock, pool_size=1)
        yield store
        await store.close()


class TestPostgresProcesses(SessionStoreProcessConformance):
    @pytest.fixture
    def store_url(self, postgres_database: str) -> str:
        return postgres_database


class TestSqliteProcesses(SessionStoreProcessConformance):
    # Check-points and log restarts all the time, so that kills hit them too.
    prelude = "from stepwell import _sqlite as o\no.CHECKPOINT_BYTES = 50_000\no.RESTART_BYTES = 200_000\n"

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'store.db'}"


class TestSqliteFullProcesses(TestSqliteProcesses):
    kills = 2

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'store.db'}?synchronous=full"


async def test_the_writers_of_the_process_tests_do_their_part(tmp_path: Path) -> None:
    """They run where nobody measures, and one of them is killed."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    store = open_store(url)
    writer = asyncio.ensure_future(write_until_killed(url, "w"))
    async with asyncio.timeout(10):
        while await _revision(store, "w") <= 20:  # noqa: ASYNC110 - as another process would have to
            await asyncio.sleep(0.001)
    writer.cancel()
    await asyncio.wait([writer])
    assert len(await store.journal_load("w")) >= 2
    await store.create(Commit(head=make_head(state=0), release=True), owner="o", ttl=1.0)
    await asyncio.gather(count_up(url, "a", 10), count_up(url, "b", 10))
    assert (await store.load("s"))[0].stages["A"].state == {"value": 20}
    await store.close()
    await acquire_owner_again(url)


async def _revision(store: SessionStore, session: str) -> int:
    try:
        return (await store.load(session))[0].revision
    except UnknownSessionError:
        return 0


async def acquire_owner_again(url: str) -> None:
    """Close what the cancelled writer left open."""
    store = open_store(url)
    assert isinstance(store, SqliteStore)
    store._owner.users = 1
    await store.close()


def test_what_the_suite_expects_must_happen() -> None:
    with pytest.raises(AssertionError, match="StoreError was not raised, but nothing"), raises(StoreError):
        pass
    with pytest.raises(AssertionError, match=r"StoreError was not raised, but .*StoreBusyError"), raises(StoreError):
        raise StoreBusyError("locked")
    with pytest.raises(ValueError, match="x"), raises(StoreError):
        raise ValueError("x")
