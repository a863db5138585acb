"""See `kill_kit`: nothing is doubled, nothing is lost, and three clients end equal."""

import os
from pathlib import Path

import pytest

from kill_kit import MOMENTS, kills

# Each starts some fifty processes one after another.
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

RUNS = int(os.environ.get("STEPWELL_KILLS", "25"))
"""Of each backend."""


async def all_kills(url: str) -> None:
    places: set[str] = set()
    async for killed in kills(url, RUNS):
        assert killed.faults == []
        places.add(killed.place)
    assert RUNS < MOMENTS or {"open", "started", "step", "piece"} <= places


async def test_sqlite(tmp_path: Path) -> None:
    await all_kills(f"sqlite:///{tmp_path / 'channels.db'}")


async def test_postgres(postgres_database: str) -> None:
    await all_kills(postgres_database)


async def test_redis(redis_database: str) -> None:
    await all_kills(redis_database)
