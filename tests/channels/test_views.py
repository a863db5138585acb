"""Random conversations over real channels: every client's view is the model's, whoever writes, dies and joins.

The conversations and the model are those of `transport_model`. What is said there in memory is carried onto a channel
as agents and clients do it: with repeats of what was acknowledged (the acknowledgement was lost), with replacements of
whole messages, and by agents that die, are succeeded under a higher epoch, and go on writing all the same.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup, TaskStatus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers import start_ably
from stepwell.channels import MemoryChannels
from stepwell.channels.ably import AblyChannels
from stepwell.channels.postgres import PostgresChannels
from stepwell.channels.redis import RedisChannels
from stepwell.channels.sqlite import SqliteChannels
from stepwell.errors import FencedError
from stepwell.transport import ClientSession
from stepwell.transport.codecs import TextCodec
from stepwell.wire import Channel, ChannelProvider, Cursor, Delivery, Gap, HistoryPage, Subscription, WireMessage
from transport.test_model import infos, shown
from transport_kit import LogChannel
from transport_model import BEGINNING, OFTEN, Model, Talk

JOIN, LEAVE, CRASH, RESTART = 15, 16, 17, 18

schedules = st.lists(
    st.tuples(st.sampled_from([*OFTEN, JOIN, JOIN, LEAVE, CRASH, CRASH, RESTART]), st.integers(0, 2**31)),
    min_size=15,
    max_size=45,
).map(lambda rest: [*((kind, 0) for kind in BEGINNING), *rest])

_names = itertools.count()


class Followed:
    """A channel for a client, that tells how far the client is: whoever reads again has done what it had read."""

    def __init__(self, provider: ChannelProvider, channel: Channel, upto: str) -> None:
        self.provider = provider
        self.name = channel.name
        self._channel = channel
        self._upto = self._read = upto
        self._more = anyio.Event()

    @contextlib.asynccontextmanager
    async def subscribe(self, *, after: Cursor | None = None) -> AsyncGenerator[FollowedSubscription]:
        async with self._channel.subscribe(after=after) as subscription:
            yield FollowedSubscription(self, subscription)

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        return await self._channel.history(before=before, limit=limit)

    def asked(self) -> None:
        self._upto = self._read
        self._more.set()
        self._more = anyio.Event()

    def took(self, items: list[Delivery | Gap]) -> None:
        self._read = max(self._read, *(one.version for one in items if isinstance(one, Delivery)))

    async def follows(self, version: str) -> None:
        with anyio.fail_after(20):
            while self._upto < version:
                await self._more.wait()


class FollowedSubscription:
    def __init__(self, channel: Followed, subscription: Subscription) -> None:
        self._channel = channel
        self._subscription = subscription
        self.start = subscription.start

    async def read(self, limit: int = 256) -> list[Delivery | Gap]:
        self._channel.asked()
        items = list(await self._subscription.read(limit))
        self._channel.took(items)
        return items


class Client:
    """Somebody who has joined. In a task of its own, so that it can leave before those who joined later."""

    def __init__(self, channel: Followed, random: Random, *, paged: bool) -> None:
        self.channel = channel
        channel_of: Any = channel
        self.session = ClientSession(channel_of, TextCodec(), history_page=random.choice([1, 2, 5, 100]))
        self.paged = paged
        self.pins: dict[Any, str] = {}
        self.before: list[str] = []
        self._leave = anyio.Event()
        self._left = anyio.Event()

    async def run(self, task_status: TaskStatus[None]) -> None:
        async with self.session as session:
            if self.paged:
                await session.view.load_older(10_000)
            task_status.started()
            await self._leave.wait()
        self._left.set()

    async def leave(self) -> None:
        self._leave.set()
        await self._left.wait()

    def look(self, model: Model) -> None:
        model.pin(self.pins, self.before)
        self.before = [key for key, _ in model.visible(self.pins)]


class Site:
    """A channel, the agents that write on it one after the other, and the clients that read it.

    Args:
        connect: A provider; where channels are shared, called again it is another one, as in another process.
        group: Where clients run.
    """

    def __init__(self, connect: Callable[[], ChannelProvider], group: TaskGroup) -> None:
        self.connect = connect
        self.group = group
        self.name = f"conversations:{next(_names)}"
        self.log = LogChannel()
        self.talk = Talk(self.log)
        self.clients: list[Client] = []
        self.epoch = 1
        self.version = ""
        self.serials: dict[str, str] = {}
        self.appends: dict[str, int] = {}
        self.writer = connect()
        self.reader = self._another(self.writer)
        self.can = self.writer.capabilities

    def _another(self, provider: ChannelProvider) -> ChannelProvider:
        return self.connect() if provider.capabilities.shared else provider

    async def close(self) -> None:
        while self.clients:
            await self.clients.pop().leave()
        await self.reader.close()
        await self.writer.close()

    async def join(self, random: Random, *, paged: bool) -> None:
        provider = random.choice([self.reader, self.writer])
        client = Client(Followed(provider, await provider.open(self.name), self.version), random, paged=paged)
        await self.group.start(client.run)
        client.look(Model(self.log.log))
        self.clients.append(client)

    async def restart(self, random: Random) -> None:
        """Everybody is gone, and comes back to what is stored."""
        if self.can.shared:
            await self.close()
            self.writer, self.reader = self.connect(), self.connect()
        await self.join(random, paged=True)

    async def crash(self) -> None:
        """An agent is taken for dead, another has its place, and the first one knows nothing of it."""
        if not self.can.fence:
            return
        dead, self.writer = self.writer, self._another(self.writer)
        self.epoch += 1
        await (await self.writer.open(self.name)).raise_fence(self.epoch)
        channel, epoch = await dead.open(self.name), self.epoch - 1
        for row in [one for one in self.log.log if one.name == "ai-output"][-2:]:
            serial, extras = self.serials[row.serial], self._extras(row)
            again = WireMessage(name="ai-output", data="stale", extras=extras)
            with pytest.raises(FencedError):
                await channel.publish([again], epoch=epoch)
            with pytest.raises(FencedError):
                await channel.append(serial, "stale", extras, seq=self.appends[serial] + 1, epoch=epoch)
            with pytest.raises(FencedError):
                await channel.update(serial, "stale", extras, epoch=epoch)
        if dead is not self.writer:
            for client in [one for one in self.clients if one.channel.provider is dead]:
                self.clients.remove(client)
                await client.leave()
            await dead.close()

    def _extras(self, row: Delivery) -> Any:
        """Its extras, with the serials of the channel."""
        assert row.extras is not None
        head = row.extras["ai"]["transport"]
        named = {key: self.serials[value] for key, value in head.items() if value in self.serials}
        return {**row.extras, "ai": {**row.extras["ai"], "transport": {**head, **named}}}

    async def act(self, kind: int, random: Random) -> None:
        length = len(self.log.log)
        self.talk.act(kind, random)
        for upto in range(length + 1, len(self.log.log) + 1):
            await self._carry(self.log.log[upto - 1], random)
            model = Model(self.log.log[:upto])
            for client in self.clients:
                client.look(model)

    async def _carry(self, row: Delivery, random: Random) -> None:
        channel, extras = await self.writer.open(self.name), self._extras(row)
        epoch = self.epoch if row.name != "ai-input" and self.can.fence else None
        lost = random.random() < 0.3 and self.can.idempotency
        again = await random.choice([self.writer, self.reader]).open(self.name)
        if row.action == "create":
            data: Any = row.data
            message = WireMessage(name=row.name or "", data=data, extras=extras, idempotency_id=row.serial)
            [serial] = await channel.publish([message], epoch=epoch)
            self.serials[row.serial], self.appends[serial], self.version = serial, 0, serial
            if lost:
                assert await again.publish([message], epoch=epoch) == [serial]
            return
        serial, text = self.serials[row.serial], row.data
        assert isinstance(text, str)
        if random.random() < 0.2:
            self.version = await channel.update(
                serial, self.log.whole(row.serial, len(self.log.log)).data, extras, epoch=epoch
            )
            return
        self.appends[serial] += 1
        self.version = await channel.append(serial, text, extras, seq=self.appends[serial], epoch=epoch)
        if lost:
            assert await again.append(serial, text, extras, seq=self.appends[serial], epoch=epoch) == self.version

    async def check(self) -> None:
        model = Model(self.log.log)
        for client in self.clients:
            await client.channel.follows(self.version)
            if client.paged:
                assert shown(client.session.view) == model.shown(client.pins)
                assert infos(client.session.tree) == model.infos()

    async def check_all(self) -> None:
        """Also those who have read no history so far."""
        model = Model(self.log.log)
        for client in self.clients:
            await client.session.view.load_older(10_000)
            assert infos(client.session.tree) == model.infos()
            if not self.talk.forked:
                assert shown(client.session.view) == model.shown({})


async def play(connect: Callable[[], ChannelProvider], schedule: list[tuple[int, int]]) -> None:
    async with anyio.create_task_group() as group:
        site = Site(connect, group)
        try:
            await site.join(Random(0), paged=True)
            for kind, seed in schedule:
                random = Random(seed)
                if kind < JOIN:
                    await site.act(kind, random)
                elif kind == JOIN and len(site.clients) < 5:
                    await site.join(random, paged=random.random() < 0.6)
                elif kind == LEAVE and site.clients:
                    await site.clients.pop(random.randrange(len(site.clients))).leave()
                elif kind == CRASH:
                    await site.crash()
                elif kind == RESTART:
                    await site.restart(random)
                await site.check()
            await site.check_all()
        finally:
            await site.close()


def conversations(examples: int, connect: Callable[[], ChannelProvider]) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(schedules)
    def run(schedule: list[tuple[int, int]]) -> None:
        anyio.run(play, connect, schedule)

    run()


def test_in_memory() -> None:
    conversations(40, MemoryChannels)


def test_in_a_file() -> None:
    with tempfile.TemporaryDirectory() as directory:
        conversations(40, partial(SqliteChannels, Path(directory) / "c.db"))


def test_on_postgres(postgres_database: str) -> None:
    conversations(40, partial(PostgresChannels, postgres_database))


def test_on_redis(redis_database: str) -> None:
    conversations(40, partial(RedisChannels, redis_database))


def test_on_ably() -> None:
    """Without a fence, and without repeats."""
    with start_ably() as endpoint:
        options = endpoint.rest_options("*")
        conversations(5, lambda: AblyChannels(realtime=endpoint.realtime_options(), rest=options))
