"""The executable form of the `Channel` protocol: what every backend must do, as tests for anybody's backend.

Subclass in a test module, mark the class for the anyio plugin of pytest, and give it a `provider` fixture::

    @pytest.mark.anyio
    class TestMyChannels(ChannelConformance):
        @pytest.fixture
        async def provider(self):
            async with MyChannels(clock=self.clock) as provider:
                yield provider

        async def another(self, provider, retention):
            return MyChannels(clock=self.clock, retention=retention)

What the provider's `capabilities` do not promise is not asked for. Nothing of a test environment is imported here; to
see values where an assertion fails, have them rewritten in the topmost `conftest.py`::

    pytest.register_assert_rewrite("stepwell.testing")
"""

from __future__ import annotations

import asyncio

from stepwell.errors import ChannelError
from stepwell.wire import ChannelProvider

from ._channel_base import NAME, message
from ._channel_reading import ReadingTests
from ._channel_writing import WritingTests
from ._store_base import raises

__all__ = ["ChannelConformance"]


class ChannelConformance(WritingTests, ReadingTests):
    """Tests of a backend in one process. Needs a fixture `provider`, a `ChannelProvider` without channels per test.

    Where the defaults do not fit, override the hooks `another` (a second provider) and `pass_time` (a provider whose
    clock is not `self.clock`), and `passes_time`, `slow_mutations` and `writers`.
    """

    # --- the end

    async def test_a_closed_provider_refuses(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            reading = asyncio.ensure_future(subscription.read())
            for _ in range(3):
                await asyncio.sleep(0)
            await provider.close()
            with raises(ChannelError):
                async with asyncio.timeout(10):
                    await reading
        await provider.close()
        with raises(ChannelError):
            await channel.publish([message()])
        with raises(ChannelError):
            await channel.history()
        with raises(ChannelError):
            await provider.open("x")
