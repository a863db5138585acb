"""Finds the example's package, wherever pytest is started."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from servers import start_temporal

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Temporal runs on asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def temporal() -> Generator[str]:
    """A real Temporal server, as host:port."""
    with start_temporal() as server:
        yield server.address
