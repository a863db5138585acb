"""The model of `channel_model` on every backend that has what it asks for: all but Ably, which has no fence."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from channel_model import ChannelMachine
from stepwell.channels import MemoryChannels
from stepwell.channels.postgres import PostgresChannels
from stepwell.channels.redis import RedisChannels
from stepwell.channels.sqlite import SqliteChannels
from stepwell.wire import ChannelProvider

COMMON = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class MemoryMachine(ChannelMachine):
    outlives = False

    def open(self, retention: float | None) -> ChannelProvider:
        return MemoryChannels(retention=retention, clock=self.clock)


class SqliteMachine(ChannelMachine):
    def open(self, retention: float | None) -> ChannelProvider:
        if not hasattr(self, "directory"):
            self.directory = tempfile.TemporaryDirectory()
        return SqliteChannels(Path(self.directory.name) / "c.db", retention=retention, clock=self.clock)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "directory"):
                self.directory.cleanup()


class SqliteFullMachine(SqliteMachine):
    def open(self, retention: float | None) -> ChannelProvider:
        if not hasattr(self, "directory"):
            self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "c.db"
        return SqliteChannels(path, synchronous="full", retention=retention, clock=self.clock)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(COMMON, max_examples=150)
TestSqlite = SqliteMachine.TestCase
TestSqlite.settings = COMMON
TestSqliteFull = SqliteFullMachine.TestCase
TestSqliteFull.settings = settings(COMMON, max_examples=10)


class ServerMachine(ChannelMachine):
    """On a server that all examples share, each with a channel of its own."""

    def __init__(self, url: str, kind: type[PostgresChannels | RedisChannels]) -> None:
        super().__init__()
        self.url = url
        self.kind = kind

    def open(self, retention: float | None) -> ChannelProvider:
        return self.kind(self.url, retention=retention, clock=self.clock)


@pytest.mark.timeout(300)
def test_postgres(postgres_database: str) -> None:
    run_state_machine_as_test(lambda: ServerMachine(postgres_database, PostgresChannels), settings=COMMON)


@pytest.mark.timeout(300)
def test_redis(redis_database: str) -> None:
    run_state_machine_as_test(lambda: ServerMachine(redis_database, RedisChannels), settings=COMMON)
