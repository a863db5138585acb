"""Fixtures that every test may use."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio only: the engine copies contexts and starts tasks in ways that only asyncio offers."""
    return "asyncio"
