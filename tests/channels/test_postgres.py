"""Channels in PostgreSQL, with real servers: what only this backend can do wrong."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from stepwell.channels.postgres import PostgresChannels
from stepwell.testing import ChannelConformance
from stepwell.wire import ChannelProvider

pytestmark = pytest.mark.anyio


class TestPostgres(ChannelConformance):
    @pytest.fixture
    async def provider(self, postgres_database: str) -> AsyncGenerator[ChannelProvider]:
        self.url = postgres_database
        async with PostgresChannels(postgres_database, clock=self.clock) as provider:
            yield provider

    async def another(self, provider: ChannelProvider, retention: float) -> ChannelProvider:
        return PostgresChannels(self.url, retention=retention, clock=self.clock)
