"""What every channel guarantees, as tests: the public conformance suite for backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar

import pytest

from stepwell.errors import AppendGapError, ChannelError, FencedError, InvalidInputError, UnknownMessageError
from stepwell.wire import (
    MAX_BATCH,
    Channel,
    ChannelProvider,
    Cursor,
    Delivery,
    Gap,
    Subscription,
    WireMessage,
    make_extras,
)

from ._channel_reader import View
from ._clock import FakeClock

__all__ = ["ChannelConformance", "message", "stream", "stream_extras"]

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


class ChannelConformance:
    """Derive from it and give a fixture `provider`, a `ChannelProvider` without channels.

    What the provider's `capabilities` do not promise is not asked for. A provider whose time is a server's overrides
    `pass_time`.

    Attributes:
        clock: Given to the provider by its fixture.
        passes_time: Whether `pass_time` can do it.
        slow_mutations: How many a reader is left behind by.
        writers: Concurrent writers, and how much each writes.
    """

    clock: FakeClock | None
    passes_time: ClassVar[bool] = True
    slow_mutations: ClassVar[int] = 2_000
    writers: ClassVar[tuple[int, int]] = (8, 25)

    @pytest.fixture(autouse=True)
    def _make_clock(self) -> None:
        self.clock = FakeClock()

    @pytest.fixture
    async def provider(self) -> AsyncIterator[ChannelProvider]:
        """The backend under test."""
        raise NotImplementedError
        yield  # noqa: PT022 - those who derive close theirs

    @pytest.fixture
    async def channel(self, provider: ChannelProvider) -> Channel:
        """A channel of it."""
        return await provider.open(NAME)

    async def another(self, provider: ChannelProvider, retention: float) -> ChannelProvider | None:
        """A provider like the given one, on other channels, that keeps its log for `retention` seconds.

        None where that cannot be had.
        """
        return None

    # --- serials and order

    async def test_serials_and_versions_grow_as_text(self, channel: Channel) -> None:
        names: list[str] = []
        for _ in range(12):
            [serial] = await channel.publish([stream()])
            names.append(serial)
            names.append(await channel.append(serial, "a", stream_extras(), seq=1))
            names.append(await channel.update(serial, "b", stream_extras()))
        assert names == sorted(names)
        assert len(set(names)) == len(names)

    async def test_a_batch_is_stored_together_and_numbered(self, channel: Channel) -> None:
        serials = await channel.publish([message(str(i)) for i in range(12)])
        assert [serial[-4:] for serial in serials] == [f":{i:03d}" for i in range(12)]
        assert serials == sorted(serials)
        assert len({serial[:-4] for serial in serials}) == 1
        [later] = await channel.publish([message("later")])
        assert later > serials[-1]
        assert later.endswith(":000")

    async def test_batches_of_many_writers_are_not_mixed(self, channel: Channel) -> None:
        async def write(who: int) -> None:
            for _ in range(5):
                await channel.publish([message(f"{who}") for _ in range(4)])

        await asyncio.gather(*(write(who) for who in range(6)))
        data = [item.data for item in await whole_history(channel)]
        assert len(data) == 120
        assert all(len(set(data[i : i + 4])) == 1 for i in range(0, 120, 4))

    async def test_many_writers_lose_nothing_to_a_reader(self, channel: Channel) -> None:
        writers, each = self.writers

        async def write(who: int) -> None:
            [serial] = await channel.publish([stream()])
            for i in range(each):
                await channel.append(serial, f"{who}.{i} ", stream_extras(), seq=i + 1)

        async with channel.subscribe() as subscription:
            view = View()
            async with asyncio.timeout(60):
                await asyncio.gather(
                    *(write(who) for who in range(writers)),
                    until(view, subscription, lambda view: view.length() >= view_length(writers, each)),
                )
        assert view.texts() == {item.serial: item.data for item in await whole_history(channel)}
        cursors = view.cursors
        assert len(set(cursors)) == len(cursors)

    # --- repeated operations

    async def test_an_id_seen_before_stores_nothing(self, channel: Channel, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.idempotency)
        first = await channel.publish([message("one", idempotency_id="a"), message("two", idempotency_id="b")])
        again = await channel.publish([message("one", idempotency_id="a"), message("two", idempotency_id="b")])
        other = await channel.publish([message("another payload", name="x", idempotency_id="a")])
        assert first == again
        assert other == first[:1]
        assert [item.data for item in await whole_history(channel)] == ["one", "two"]

    async def test_a_batch_that_was_stored_in_part_is_completed(
        self, channel: Channel, provider: ChannelProvider
    ) -> None:
        self._needs(provider.capabilities.idempotency)
        [first] = await channel.publish([message("one", idempotency_id="a")])
        serials = await channel.publish([message("one", idempotency_id="a"), message("two", idempotency_id="b")])
        assert serials[0] == first
        assert serials[1] > first
        twice = await channel.publish([message("x", idempotency_id="c"), message("x", idempotency_id="c")])
        assert twice[0] == twice[1]
        assert [item.data for item in await whole_history(channel)] == ["one", "two", "x"]

    async def test_an_id_is_the_channels_own(self, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.idempotency)
        one, two = await provider.open("suite:a"), await provider.open("suite:b")
        await one.publish([message("one", idempotency_id="k")])
        await two.publish([message("two", idempotency_id="k")])
        assert [item.data for item in await whole_history(two)] == ["two"]

    async def test_ids_outlive_the_provider(self, channel: Channel, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.idempotency)
        first = await channel.publish([message("one", idempotency_id="a")])
        await channel.publish([message(str(i)) for i in range(300)])
        assert await (await provider.open(NAME)).publish([message("one", idempotency_id="a")]) == first

    async def test_a_repeated_append_is_acknowledged_and_not_applied(
        self, channel: Channel, provider: ChannelProvider
    ) -> None:
        self._needs(provider.capabilities.idempotency)
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "a", stream_extras(), seq=1)
        newest = await channel.append(serial, "b", stream_extras(), seq=2)
        assert await channel.append(serial, "a", stream_extras(), seq=1) == newest
        assert await channel.append(serial, "b", stream_extras(), seq=2) == newest
        closed = await channel.append(serial, "c", stream_extras("complete"), seq=3)
        assert await channel.append(serial, "c", stream_extras("complete"), seq=3) == closed
        assert (await whole_history(channel))[0].data == "abc"

    async def test_a_missing_append_is_refused(self, channel: Channel, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.idempotency)
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "a", stream_extras(), seq=1)
        for wrong in (3, 7, 0, -1):
            with pytest.raises(AppendGapError) as caught:
                await channel.append(serial, "x", stream_extras(), seq=wrong)
            assert caught.value.applied == 1
        await channel.append(serial, "b", stream_extras(), seq=2)
        assert (await whole_history(channel))[0].data == "ab"

    async def test_appends_go_on_after_an_update(self, channel: Channel) -> None:
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "wrong", stream_extras(), seq=1)
        await channel.update(serial, "right", stream_extras())
        await channel.append(serial, "!", stream_extras(), seq=2)
        assert (await whole_history(channel))[0].data == "right!"
        await channel.update(serial, "at last", stream_extras("complete"))
        await channel.append(serial, "?", None, seq=3)
        [item] = await whole_history(channel)
        assert item.data == "at last?"
        assert item.extras == stream_extras("complete")

    # --- the fence

    async def test_a_stale_epoch_gets_nothing_in(self, channel: Channel, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.fence)
        [serial] = await channel.publish([stream()], epoch=1)
        await channel.append(serial, "a", stream_extras(), seq=1, epoch=1)
        await channel.raise_fence(3)
        before = await whole_history(channel)
        for epoch in (1, 2):
            with pytest.raises(FencedError) as caught:
                await channel.publish([message("late", idempotency_id="late")], epoch=epoch)
            assert (caught.value.epoch, caught.value.fence) == (epoch, 3)
            with pytest.raises(FencedError):
                await channel.append(serial, "late", stream_extras(), seq=2, epoch=epoch)
            with pytest.raises(FencedError):
                await channel.update(serial, "late", stream_extras(), epoch=epoch)
            with pytest.raises(FencedError):
                await channel.raise_fence(epoch)
        assert await whole_history(channel) == before
        # What was refused left nothing behind: the same operations are new to the next writer.
        await channel.publish([message("now", idempotency_id="late")], epoch=3)
        await channel.append(serial, "b", stream_extras(), seq=2, epoch=4)
        await channel.raise_fence(3)
        assert [item.data for item in await whole_history(channel)] == ["ab", "now"]

    async def test_no_epoch_is_never_fenced(self, channel: Channel, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.fence)
        await channel.raise_fence(9)
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "a", stream_extras(), seq=1)
        await channel.update(serial, "b", stream_extras())
        assert (await whole_history(channel))[0].data == "b"

    async def test_a_fence_is_one_channels(self, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.fence)
        one, two = await provider.open("suite:a"), await provider.open("suite:b")
        await one.raise_fence(5)
        await two.publish([message("x")], epoch=1)

    async def test_a_fence_raised_among_writes_cuts_them_once(
        self, channel: Channel, provider: ChannelProvider
    ) -> None:
        self._needs(provider.capabilities.fence)
        [serial] = await channel.publish([stream()], epoch=1)

        async def write() -> int:
            for i in range(200):
                try:
                    await channel.append(serial, "x", stream_extras(), seq=i + 1, epoch=1)
                except FencedError:
                    return i
            return 200

        async def fence() -> str:
            for _ in range(5):
                await asyncio.sleep(0)
            await channel.raise_fence(2)
            [serial] = await channel.publish([message("after")], epoch=2)
            return serial

        written, _ = await asyncio.gather(write(), fence())
        [first, second] = await whole_history(channel)
        assert first.data == "x" * written
        assert first.version < second.serial or written == 0

    # --- delivery

    async def test_every_mutation_arrives_in_order(self, channel: Channel) -> None:
        async with channel.subscribe() as subscription:
            [serial] = await channel.publish([stream(client_id="ana")])
            [created] = await drain(subscription, 1)
            assert isinstance(created, Delivery)
            assert (created.action, created.serial, created.version) == ("create", serial, serial)
            assert (created.name, created.data, created.client_id) == ("ai-output", "", "ana")
            version = await channel.append(serial, "Hel", stream_extras(), seq=1)
            [appended] = await drain(subscription, 1)
            assert isinstance(appended, Delivery)
            assert (appended.serial, appended.version, appended.data) == (serial, version, "Hel")
            assert (appended.action, appended.name) in (("append", None), ("update", "ai-output"))
            version = await channel.update(serial, {"now": ["an", "object", None, 1.5, True]}, make_extras({"a": "b"}))
            [updated] = await drain(subscription, 1)
            assert isinstance(updated, Delivery)
            assert (updated.action, updated.name, updated.version) == ("update", "ai-output", version)
            assert updated.data == {"now": ["an", "object", None, 1.5, True]}
            assert updated.extras == make_extras({"a": "b"})
            assert created.timestamp <= appended.timestamp <= updated.timestamp

    async def test_an_append_without_extras_keeps_them(self, channel: Channel) -> None:
        async with channel.subscribe() as subscription:
            [serial] = await channel.publish([stream()])
            await drain(subscription, 1)
            await channel.append(serial, "a", None, seq=1)
            await channel.append(serial, "b", stream_extras(more="yes"), seq=2)
            items = [item for item in await drain(subscription, 2) if isinstance(item, Delivery)]
        assert items[0].extras in (stream_extras(), stream_extras(more="yes"))
        assert items[-1].extras == stream_extras(more="yes")
        assert (await whole_history(channel))[0].extras == stream_extras(more="yes")

    async def test_first_contact_is_a_full_update(self, channel: Channel) -> None:
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "one ", stream_extras(), seq=1)
        async with channel.subscribe() as subscription:
            await channel.append(serial, "two ", stream_extras(), seq=2)
            [first] = await drain(subscription, 1)
            assert isinstance(first, Delivery)
            assert (first.action, first.name, first.data) == ("update", "ai-output", "one two ")
            assert first.extras == stream_extras()
            await channel.append(serial, "three", stream_extras(), seq=3)
            [second] = await drain(subscription, 1)
            assert isinstance(second, Delivery)
            assert second.data in ("three", "one two three")
            assert second.action == ("append" if second.data == "three" else "update")

    async def test_a_first_contact_that_is_newer_than_its_place_loses_nothing_to_a_cursor(
        self, channel: Channel
    ) -> None:
        [one] = await channel.publish([stream()])
        [two] = await channel.publish([stream()])
        async with channel.subscribe() as subscription:
            await channel.append(one, "1a ", stream_extras(), seq=1)
            await channel.append(two, "2a ", stream_extras(), seq=1)
            await channel.append(one, "1b ", stream_extras(), seq=2)
            await channel.append(two, "2b ", stream_extras("complete"), seq=2)
            # The first delivery holds "1a 1b " already, though its place is before all of the second message.
            first = (await subscription.read(1))[0]
            assert isinstance(first, Delivery)
            view = View()
            view.take([first])
            view = view.copy()
        async with channel.subscribe(after=first.cursor) as subscription:
            await until(view, subscription, lambda view: view.texts() == {one: "1a 1b ", two: "2a 2b "})
            await channel.append(one, "1c", stream_extras(), seq=3)
            await until(view, subscription, lambda view: view.texts()[one] == "1a 1b 1c")

    async def test_any_cursor_resumes_without_loss(self, channel: Channel) -> None:
        expected = View()
        cursors: list[tuple[Cursor, View]] = []
        async with channel.subscribe() as subscription:
            cursors.append((subscription.start, expected.copy()))
            serials = await channel.publish([stream(), stream(), message("whole")])
            for i in range(6):
                await channel.append(serials[i % 2], f"{i} ", stream_extras(), seq=i // 2 + 1)
                expected.take(await subscription.read(3))
                cursors.append((expected.cursors[-1], expected.copy()))
            await channel.append(serials[0], "end", stream_extras("complete"), seq=4)
            await channel.update(serials[2], "other", message().extras or {})
            final = {item.serial: item.data for item in await whole_history(channel)}
            await until(expected, subscription, lambda view: view.texts() == final)
            cursors.append((expected.cursors[-1], expected.copy()))
        [last] = await channel.publish([message("last")])
        final[last] = "last"
        for cursor, view in cursors:
            async with channel.subscribe(after=cursor) as subscription:
                await until(view, subscription, lambda view: view.texts() == final)
                assert not view.gaps

    async def test_replay_goes_over_into_live_without_a_seam(self, channel: Channel) -> None:
        async with channel.subscribe() as subscription:
            start = subscription.start
        for i in range(30):
            await channel.publish([message(f"{i}")])
        view = View()

        async def write() -> None:
            for i in range(30, 90):
                await channel.publish([message(f"{i}")])

        async with channel.subscribe(after=start) as subscription:
            writing = asyncio.ensure_future(write())
            await until(view, subscription, lambda view: view.length() >= len("".join(map(str, range(90)))))
            await writing
        assert list(view.texts().values()) == [f"{i}" for i in range(90)]
        assert [item.data for item in view.taken] == [f"{i}" for i in range(90)]

    async def test_a_slow_reader_keeps_nobody_waiting(self, channel: Channel) -> None:
        count = self.slow_mutations
        async with channel.subscribe() as slow:
            [serial] = await channel.publish([stream()])
            view = View()
            view.take(await slow.read())
            for i in range(count // 20):
                await asyncio.gather(
                    *(channel.publish([message(f"{i}.{j}")]) for j in range(19)),
                    channel.append(serial, "x", stream_extras(), seq=i + 1),
                )
            await until(view, slow, lambda view: len(view.texts()) == 1 + 19 * (count // 20))
            await until(view, slow, lambda view: len(view.texts()[serial]) == count // 20)
        assert view.texts() == {item.serial: item.data for item in await whole_history(channel, limit=1000)}

    async def test_a_limit_is_kept(self, channel: Channel) -> None:
        async with channel.subscribe() as subscription:
            await channel.publish([message(f"{i}") for i in range(10)])
            read = [await subscription.read(limit) for limit in (3, 1, 6)]
            assert [len(items) for items in read] == [3, 1, 6]
            assert [item.data for items in read for item in items if isinstance(item, Delivery)] == [
                f"{i}" for i in range(10)
            ]
            with pytest.raises(InvalidInputError):
                await subscription.read(0)

    async def test_it_is_an_iterator_too(self, channel: Channel) -> None:
        async with channel.subscribe() as subscription:
            await channel.publish([message("a"), message("b")])
            seen: list[Any] = []
            async for item in subscription:
                seen.append(item.data if isinstance(item, Delivery) else item)
                if len(seen) == 2:
                    break
        assert seen == ["a", "b"]

    async def test_a_cancelled_read_loses_nothing(self, channel: Channel) -> None:
        async with channel.subscribe() as subscription:
            reading = asyncio.ensure_future(subscription.read())
            for _ in range(3):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await channel.publish([message("kept")])
            reading = asyncio.ensure_future(subscription.read())
            await asyncio.sleep(0)
            reading.cancel()
            [result] = await asyncio.gather(reading, return_exceptions=True)
            items = result if isinstance(result, list) else await subscription.read()  # pyright: ignore[reportUnknownVariableType]
        assert [item.data for item in items] == ["kept"]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    async def test_readers_are_independent(self, channel: Channel) -> None:
        async with channel.subscribe() as one, channel.subscribe() as two:
            await channel.publish([message("a"), message("b")])
            assert [item.data for item in await drain(one, 2) if isinstance(item, Delivery)] == ["a", "b"]
            assert [item.data for item in await drain(two, 2) if isinstance(item, Delivery)] == ["a", "b"]

    # --- history

    async def test_history_is_newest_first_each_once_at_its_create(self, channel: Channel) -> None:
        serials = await channel.publish([stream(), message("b"), stream()])
        await channel.append(serials[0], "text", stream_extras("complete"), seq=1)
        await channel.update(serials[1], "B", message().extras or {})
        page = await channel.history()
        assert page.next is None
        assert [item.serial for item in page.items] == serials[::-1]
        assert [(item.action, item.data) for item in page.items] == [
            ("create", ""),
            ("update", "B"),
            ("update", "text"),
        ]
        assert all(item.name == "ai-output" for item in page.items)

    async def test_history_comes_in_pages(self, channel: Channel) -> None:
        await channel.publish([message(f"{i}") for i in range(25)])
        for limit in (1, 7, 25, 26, 100):
            items = await whole_history(channel, limit=limit)
            assert [item.data for item in items] == [f"{i}" for i in range(25)]
        page = await channel.history(limit=25)
        assert page.next is None
        with pytest.raises(InvalidInputError):
            await channel.history(limit=0)
        with pytest.raises(InvalidInputError):
            await channel.history(limit=1_001)

    async def test_history_and_a_subscription_together_hold_everything_once(self, channel: Channel) -> None:
        async def write() -> None:
            for i in range(40):
                await channel.publish([message(f"{i}")])

        writing = asyncio.ensure_future(write())
        for _ in range(11):
            await asyncio.sleep(0)
        async with channel.subscribe() as subscription:
            await writing
            old = await whole_history(channel, before=subscription.start, limit=7)
            live = await drain(subscription, 40 - len(old))
        assert [item.data for item in [*old, *live] if isinstance(item, Delivery)] == [f"{i}" for i in range(40)]

    async def test_an_empty_channel_has_no_history(self, channel: Channel) -> None:
        page = await channel.history()
        assert (list(page.items), page.next) == ([], None)

    # --- gaps

    async def test_a_deleted_channel_gives_its_readers_a_gap(self, channel: Channel, provider: ChannelProvider) -> None:
        self._needs(provider.capabilities.retention)
        async with channel.subscribe() as subscription:
            view = View()
            [old] = await channel.publish([message("old", idempotency_id="k")])
            view.take(await drain(subscription, 1))
            await provider.delete(NAME)
            with pytest.raises(UnknownMessageError):
                await channel.append(old, "x", None, seq=1)
            [new] = await channel.publish([message("new", idempotency_id="k")])
            assert new != old
            await until(view, subscription, lambda view: bool(view.gaps) and new in view.texts())
            assert view.texts() == {new: "new"}
        cursor = next(item.cursor for item in view.taken)
        async with channel.subscribe(after=cursor) as subscription:
            late = View()
            await until(late, subscription, lambda view: view.texts() == {new: "new"})
            assert late.gaps == 1
        assert [item.data for item in await whole_history(channel)] == ["new"]
        await provider.delete("suite:never-was")

    async def test_scenario_C41_a_removed_cursor_gives_a_gap_and_a_snapshot(self, provider: ChannelProvider) -> None:  # noqa: N802
        other = await self.another(provider, retention=30.0)
        if other is None:
            self._needs(False)
            return
        async with other:
            channel = await other.open("suite:gap")
            async with channel.subscribe() as subscription:
                serials = await channel.publish([stream(), message("b")])
                await channel.append(serials[0], "text", stream_extras(), seq=1)
                first = (await subscription.read(1))[0]
            await self.pass_time(31.0)
            await channel.publish([message("new")])
            await self.pass_time(6.0)
            await channel.publish([message("newer")])
            async with channel.subscribe(after=first.cursor) as subscription:
                view = View()
                await until(view, subscription, lambda view: len(view.texts()) == 4)
                assert view.gaps == 1
                assert list(view.texts().values()) == ["text", "b", "new", "newer"]
                assert all(item.action == "update" for item in view.taken[:3])
                await channel.append(serials[0], " goes on", stream_extras(), seq=2)
                await until(view, subscription, lambda view: view.texts()[serials[0]] == "text goes on")
                resumed = view.taken[-1].cursor
                view = view.copy()
            async with channel.subscribe(after=resumed) as subscription:
                await channel.append(serials[0], "!", stream_extras(), seq=3)
                await until(view, subscription, lambda view: view.texts()[serials[0]] == "text goes on!")
                assert view.gaps == 1
            assert len(await whole_history(channel)) == 4

    async def test_what_is_ephemeral_is_live_only(self, channel: Channel, provider: ChannelProvider) -> None:
        ephemeral = make_extras({"run-id": "r", "stream": "false"}, {"kind": "data-ping"}, ephemeral=True)
        async with channel.subscribe() as subscription:
            start = subscription.start
            await channel.publish([message("a"), WireMessage(name="ai-output", data={"n": 1}, extras=ephemeral)])
            live = [item for item in await drain(subscription, 2) if isinstance(item, Delivery)]
            assert [item.data for item in live] == ["a", {"n": 1}]
            assert live[1].extras == ephemeral
        assert [item.data for item in await whole_history(channel)] == ["a"]
        async with channel.subscribe(after=start) as subscription:
            replayed = await drain(subscription, 2)
            assert [item.data for item in replayed if isinstance(item, Delivery)] == ["a", {"n": 1}]
        if not self.passes_time:
            return
        await self.pass_time(61.0)
        await channel.publish([message("b")])
        await self.pass_time(6.0)
        await channel.publish([message("c")])
        for cursor in (start, live[0].cursor, live[1].cursor):
            async with channel.subscribe(after=cursor) as subscription:
                view = View()
                await until(view, subscription, lambda view: "c" in view.texts().values())
                assert not view.gaps
                assert [item.data for item in view.taken if item.data != "a"] == ["b", "c"]

    # --- what is not acceptable

    async def test_bad_messages_are_refused_and_change_nothing(self, channel: Channel) -> None:
        [serial] = await channel.publish([stream()])
        before = await whole_history(channel)
        deep: Any = []
        for _ in range(2_000):
            deep = [deep]
        bad: Sequence[Any] = (
            float("nan"),
            5,
            True,
            {"n": float("inf")},
            "\ud800",
            {"k": "\udfff"},
            {1: 2},
            {"s": {1}},
            deep,
        )
        for data in bad:
            with pytest.raises(InvalidInputError):
                await channel.publish([message("good"), message(data)])
            with pytest.raises(InvalidInputError):
                await channel.update(serial, data, {})
        for extras in ({"x": object()}, {"x": float("nan")}, ["no", "object"]):
            with pytest.raises(InvalidInputError):
                await channel.publish([WireMessage(name="x", extras=extras)])  # pyright: ignore[reportArgumentType]
            with pytest.raises(InvalidInputError):
                await channel.append(serial, "x", extras, seq=1)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidInputError):
            await channel.append(serial, "\ud800", None, seq=1)
        for none in ([], [message()] * (MAX_BATCH + 1), [WireMessage(name="")]):
            with pytest.raises(InvalidInputError):
                await channel.publish(none)
        assert await whole_history(channel) == before

    async def test_only_text_can_be_appended_to(self, channel: Channel) -> None:
        serials = await channel.publish([message({"a": 1}), message(None)])
        for serial in serials:
            with pytest.raises(InvalidInputError):
                await channel.append(serial, "x", None, seq=1)

    async def test_unknown_messages(self, channel: Channel, provider: ChannelProvider) -> None:
        other = await provider.open("suite:other")
        await channel.publish([message("a")])
        [foreign] = await other.publish([message("b")])
        for serial in (foreign, "nonsense", "", "00000000000099-000@aaaaaaaaaa:000"):
            with pytest.raises(UnknownMessageError):
                await channel.append(serial, "x", None, seq=1)
            with pytest.raises(UnknownMessageError):
                await channel.update(serial, "x", {})

    async def test_a_wrong_cursor_is_refused(self, channel: Channel) -> None:
        for wrong in ("nonsense", "", "-1@aaaaaaaaaa"):
            with pytest.raises(InvalidInputError):
                async with channel.subscribe(after=Cursor(wrong)):
                    pass
            with pytest.raises(InvalidInputError):
                await channel.history(before=Cursor(wrong))

    async def test_names_are_checked(self, provider: ChannelProvider) -> None:
        for wrong in ("", "a b", "é", "x" * 257, "a/b"):
            with pytest.raises(InvalidInputError):
                await provider.open(wrong)
        for right in ("a", "conversations:42", "x" * 256, "A-b_c.d"):
            assert (await provider.open(right)).name == right

    async def test_text_survives(self, channel: Channel) -> None:
        texts = ["", 'é€𝄞\u2028\x00\x1f"\\/', "x" * 300_000, "\ufeff\r\n\t"]
        serials = await channel.publish([message(text) for text in texts])
        [serial] = await channel.publish([stream()])
        for i, text in enumerate(texts):
            await channel.append(serial, text, stream_extras(note=text[:40]), seq=i + 1)
        items = {item.serial: item for item in await whole_history(channel)}
        assert [items[serial].data for serial in serials] == texts
        assert items[serial].data == "".join(texts)

    # --- the end

    async def test_a_closed_provider_refuses(self, channel: Channel, provider: ChannelProvider) -> None:
        async with channel.subscribe() as subscription:
            reading = asyncio.ensure_future(subscription.read())
            for _ in range(3):
                await asyncio.sleep(0)
            await provider.close()
            with pytest.raises(ChannelError):
                async with asyncio.timeout(10):
                    await reading
        await provider.close()
        with pytest.raises(ChannelError):
            await channel.publish([message()])
        with pytest.raises(ChannelError):
            await channel.history()
        with pytest.raises(ChannelError):
            await provider.open("x")

    # --- for those who derive

    async def pass_time(self, seconds: float) -> None:
        """Let time pass for the provider."""
        assert self.clock is not None
        await self.clock.advance(seconds)

    def _needs(self, promised: bool) -> None:
        """What a backend does not promise is not asked for."""
        if not promised:
            pytest.xfail("not among the backend's capabilities")


def view_length(writers: int, each: int) -> int:
    """How much text the writers of one test write."""
    return sum(len(f"{who}.{i} ") for who in range(writers) for i in range(each))
