"""What the parts of the channel conformance suite share."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, ClassVar

from stepwell.wire import Channel, ChannelProvider, Cursor, Delivery, Gap, Subscription, WireMessage, make_extras

from ._channel_reader import View
from ._clock import FakeClock

__all__ = ["NAME", "ChannelSuite", "drain", "message", "stream", "stream_extras", "until", "whole_history"]

NAME = "suite:one"


def message(data: Any = "", name: str = "ai-output", **fields: Any) -> WireMessage:
    """Make a message that is no stream."""
    fields.setdefault("extras", make_extras({"run-id": "r", "stream": "false"}, {"kind": "note"}))
    return WireMessage(name=name, data=data, **fields)


def stream_extras(status: str = "streaming", **more: str) -> dict[str, Any]:
    """Make the extras of a stream."""
    return make_extras({"run-id": "r", "stream": "true", "status": status, "stream-id": "t", **more}, {"kind": "text"})


def stream(**fields: Any) -> WireMessage:
    """Make the create of a stream."""
    return WireMessage(name="ai-output", data="", extras=stream_extras(), **fields)


async def drain(subscription: Subscription, count: int) -> list[Delivery | Gap]:
    """Read until `count` items are there."""
    items: list[Delivery | Gap] = []
    while len(items) < count:
        items.extend(await subscription.read())
    return items


async def until(view: View, subscription: Subscription, done: Callable[[View], bool]) -> None:
    """Read into a view until it is as it should be."""
    while not done(view):
        view.take(await subscription.read())


async def whole_history(channel: Channel, before: Cursor | None = None, limit: int = 100) -> list[Delivery]:
    """All messages, oldest first."""
    items: list[Delivery] = []
    while True:
        page = await channel.history(before=before, limit=limit)
        items.extend(page.items)
        if page.next is None:
            return items[::-1]
        before = page.next


class ChannelSuite:
    """What the tests of a channel may ask of its author; see `ChannelConformance`.

    Attributes:
        passes_time: Whether `pass_time` can do it.
        slow_mutations: How many a reader is left behind by.
        writers: Concurrent writers, and how much each writes.
    """

    passes_time: ClassVar[bool] = True
    slow_mutations: ClassVar[int] = 2_000
    writers: ClassVar[tuple[int, int]] = (8, 25)

    @functools.cached_property
    def clock(self) -> FakeClock:
        """The clock of this test, for providers that take one."""
        return FakeClock()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass for the provider. One with a clock of its own (a server's) overrides it."""
        await self.clock.advance(seconds)

    async def another(self, provider: ChannelProvider, retention: float | None) -> ChannelProvider | None:
        """Another provider, on the same channels if they are shared, that keeps its log for `retention` seconds.

        None where that cannot be had.
        """
        return None

    def needs(self, promised: bool) -> None:
        """What a backend does not promise is not asked for."""
        if not promised:
            raise unittest.SkipTest("not among the backend's capabilities")
