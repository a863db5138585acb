"""URLs of stores."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepwell.sessions
from stepwell._clock import SystemClock
from stepwell.errors import InvalidInputError, StoreBusyError, StoreError
from stepwell.sessions import Commit, MemoryStore, SqliteStore, open_store
from stepwell.sessions.postgres import PostgresStore
from stepwell.testing import FakeClock
from stepwell.testing._store_base import OWNER, make_head

pytestmark = pytest.mark.anyio


async def test_memory() -> None:
    clock = FakeClock()
    store = open_store("memory://", clock)
    assert isinstance(store, MemoryStore)
    lease = (await store.create(Commit(head=make_head()), owner=OWNER, ttl=5)).lease
    assert lease.expires == clock.time() + 5


async def test_a_store_is_returned_as_it_is() -> None:
    store = MemoryStore()
    assert open_store(store) is store


async def test_sqlite_by_relative_and_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    clock = FakeClock()
    stores: list[Any] = [
        open_store("sqlite:///a.db", clock),
        open_store(f"sqlite:///{tmp_path}/a.db?synchronous=FULL"),
        open_store("sqlite:///with%20space.db?synchronous=normal"),
    ]
    assert [Path(store.path).name for store in stores] == ["a.db", "a.db", "with space.db"]
    assert [store._full for store in stores] == [False, True, False]
    assert stores[0]._owner is stores[1]._owner
    lease = (await stores[0].create(Commit(head=make_head()), owner=OWNER, ttl=5)).lease
    assert lease.expires == clock.time() + 5
    for store in stores:
        await store.close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite:///:memory:", "use memory://"),
        ("sqlite://a.db", "three slashes"),
        ("sqlite:///", "path of the SQLite file is missing"),
        ("sqlite:///a%00.db", "path of the SQLite file is missing"),
        ("sqlite:///a.db?journal=off", "only option"),
        ("sqlite:///a.db?synchronous=off", "normal or full"),
        ("sqlite:///a.db?synchronous=", "normal or full"),
        ("memory://x", "nothing after it"),
        ("postgresql://user:secret@host/db?no-such-option=1", "percent-encoded"),
        ("postgres://user:secret%zz@host/db", "percent-encoded"),
        ("redis://host", "no such store"),
        ("a.db", "no such store"),
        ("", "no such store"),
    ],
)
def test_wrong_urls(url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert why in str(caught.value)
    assert "memory://, sqlite:///relative.db" in str(caught.value) or url.startswith("postgres")
    assert caught.value.pointer == "/store"
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


async def test_postgres_waits_for_the_first_call_and_has_the_databases_clock() -> None:
    store = open_store("postgresql://user@127.0.0.1:1/x", SystemClock())
    assert isinstance(store, PostgresStore)
    assert store._clock is None
    await store.close()
    clock = FakeClock()
    store = open_store("postgres://user@127.0.0.1:1/x", clock)
    assert isinstance(store, PostgresStore)
    assert store._clock is clock
    with pytest.raises(StoreBusyError, match="cannot be reached"):
        await store.load("s")
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.load("s")
    with pytest.raises(InvalidInputError, match="too small"):
        PostgresStore("postgresql://user@127.0.0.1:1/x", pool_size=0)


def test_without_the_extra_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stepwell.sessions.postgres", raising=False)
    monkeypatch.delitem(sys.modules, "stepwell._postgres", raising=False)
    for name in [name for name in sys.modules if name.startswith(("stepwell._postgres.", "psycopg"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidInputError, match=r"psycopg is not installed: pip install 'stepwell\[postgres\]'"):
        open_store("postgresql://user:secret@host/db")


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_store(f"sqlite:///{tmp_path}/no/a.db")


def test_sqlite_is_loaded_when_it_is_asked_for() -> None:
    code = "import sys, stepwell.sessions as s; print(s.__name__ + '.sqlite' in sys.modules, s.SqliteStore.__name__)"
    code += "; print('psycopg' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "SqliteStore", "False"]


def test_the_public_names() -> None:
    assert stepwell.sessions.SqliteStore is SqliteStore
    for name in stepwell.sessions.__all__:
        assert getattr(stepwell.sessions, name) is not None
    assert sorted(stepwell.sessions.__all__) == [
        "Acquired",
        "Commit",
        "DeferredRecord",
        "DueSession",
        "FORMAT",
        "InboxRow",
        "InboxUpdate",
        "JournalRow",
        "Lease",
        "LogEntry",
        "MemoryHead",
        "MemoryStore",
        "Migration",
        "MigrationFunction",
        "ModelUsage",
        "NewMessage",
        "OutRecord",
        "PendingRecord",
        "SCHEMA",
        "SequenceEntry",
        "SessionHead",
        "SessionStatus",
        "SessionStore",
        "SessionSummary",
        "SqliteStore",
        "StageRecord",
        "SteerRecord",
        "StoredMessage",
        "Summary",
        "TurnRecord",
        "VisitRecord",
        "WorkflowRecord",
        "decode_head",
        "encode_head",
        "export_session",
        "import_session",
        "migrate_head",
        "open_store",
    ]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stepwell.sessions.nothing  # noqa: B018
