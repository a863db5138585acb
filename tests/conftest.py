"""Fixtures that every test may use.

The servers are started when the first test asks for one, shared by all tests of the run and stopped at its end. A test
that stops or configures one starts its own: `servers.start_redis()`.
"""

from collections.abc import AsyncGenerator, Generator

import pytest

from servers import (
    AblyServer,
    PostgresServer,
    RedisServer,
    TemporalServer,
    start_ably,
    start_postgres,
    start_redis,
    start_temporal,
)
from wire.bridge import Bridge, BridgeProcess


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """asyncio only: the engine copies contexts and starts tasks in ways that only asyncio offers."""
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Generator[PostgresServer]:
    """PostgreSQL in its fast mode: a crash of a client loses nothing, one of the server would."""
    with start_postgres(fast=True) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(postgres_server: PostgresServer) -> str:
    """Of the shared server; what a test leaves there, others see. Most tests want `postgres_database`."""
    return postgres_server.url


@pytest.fixture
def postgres_database(postgres_server: PostgresServer) -> Generator[str]:
    """The URL of an empty database of the test's own."""
    with postgres_server.database() as url:
        yield url


@pytest.fixture(scope="session")
def redis_server() -> Generator[RedisServer]:
    """Redis without the append-only file."""
    with start_redis() as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    """Of the shared server; what a test leaves there, others see. Most tests want `redis_database`."""
    return redis_server.url


@pytest.fixture
def redis_database(redis_server: RedisServer) -> Generator[str]:
    """The URL of an empty numbered database of the test's own. PUBLISH, scripts and clients are the whole server's."""
    with redis_server.database() as url:
        yield url


@pytest.fixture(scope="session")
def temporal_server() -> Generator[TemporalServer]:
    """A real Temporal server."""
    with start_temporal() as server:
        yield server


@pytest.fixture(scope="session")
def temporal_address(temporal_server: TemporalServer) -> str:
    """host:port of the shared server; tests keep apart by their task queues and workflow ids."""
    return temporal_server.address


@pytest.fixture(scope="session")
def ably_endpoint() -> Generator[AblyServer]:
    """An endpoint for the real clients of Ably, in JavaScript and Python; tests keep apart by their channels' names."""
    with start_ably() as server:
        yield server


@pytest.fixture(scope="session")
def bridge_process() -> Generator[BridgeProcess]:
    """Node with the unmodified JavaScript SDK."""
    with BridgeProcess() as process:
        yield process


@pytest.fixture
async def bridge(bridge_process: BridgeProcess) -> AsyncGenerator[Bridge]:
    """JavaScript clients on channels of the test's own: see `wire.bridge`."""
    async with Bridge(bridge_process) as bridge:
        yield bridge
