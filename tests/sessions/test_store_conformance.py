"""The public conformance suite on every store of this package."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stepwell.sessions import MemoryStore, SessionStore, SqliteStore
from stepwell.testing import SessionStoreConformance, SessionStoreProcessConformance

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


class TestSqliteProcesses(SessionStoreProcessConformance):
    # Check-points and log restarts all the time, so that kills hit them too.
    prelude = (
        "from stepwell.sessions import _sqlite_owner as o\no.CHECKPOINT_BYTES = 50_000\no.RESTART_BYTES = 200_000\n"
    )

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'store.db'}"


class TestSqliteFullProcesses(TestSqliteProcesses):
    kills = 2

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'store.db'}?synchronous=full"
