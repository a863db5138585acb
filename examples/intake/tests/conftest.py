"""Finds the example's package, wherever pytest is started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The engine runs on asyncio."""
    return "asyncio"
