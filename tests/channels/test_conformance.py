"""The public conformance suite on the channels that need no server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stepwell.channels import MemoryChannels
from stepwell.channels.sqlite import SqliteChannels
from stepwell.testing import ChannelConformance
from stepwell.wire import ChannelProvider

pytestmark = pytest.mark.anyio


class TestMemory(ChannelConformance):
    slow_mutations = 10_000

    @pytest.fixture
    async def provider(self) -> AsyncIterator[ChannelProvider]:
        async with MemoryChannels(clock=self.clock) as provider:
            yield provider

    async def another(self, provider: ChannelProvider, retention: float | None) -> ChannelProvider:
        return MemoryChannels(retention=retention, clock=self.clock)


class TestSqliteNormal(ChannelConformance):
    slow_mutations = 10_000
    synchronous = "normal"

    @pytest.fixture
    async def provider(self, tmp_path: Path) -> AsyncIterator[ChannelProvider]:
        self.path = tmp_path / "channels.db"
        async with SqliteChannels(self.path, synchronous=self.synchronous, clock=self.clock) as provider:
            yield provider

    async def another(self, provider: ChannelProvider, retention: float | None) -> ChannelProvider:
        return SqliteChannels(self.path, synchronous=self.synchronous, retention=retention, clock=self.clock)


class TestSqliteFull(TestSqliteNormal):
    synchronous = "full"
    slow_mutations = 400
