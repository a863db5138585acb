"""The part of the channel conformance suite that is about reading."""

from __future__ import annotations

import asyncio
from typing import Any

from stepwell.errors import InvalidInputError, UnknownMessageError
from stepwell.wire import ChannelProvider, Cursor, Delivery, Gap, WireMessage, make_extras

from ._channel_base import NAME, ChannelSuite, drain, message, stream, stream_extras, until, whole_history
from ._channel_reader import View
from ._store_base import raises

__all__ = ["ReadingTests"]


class ReadingTests(ChannelSuite):
    """See `ChannelConformance`."""

    # --- delivery

    async def test_every_mutation_arrives_in_order(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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

    async def test_an_append_without_extras_keeps_them(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            [serial] = await channel.publish([stream()])
            await drain(subscription, 1)
            await channel.append(serial, "a", None, seq=1)
            await channel.append(serial, "b", stream_extras(more="yes"), seq=2)
            items = [item for item in await drain(subscription, 2) if isinstance(item, Delivery)]
        assert items[0].extras in (stream_extras(), stream_extras(more="yes"))
        assert items[-1].extras == stream_extras(more="yes")
        assert (await whole_history(channel))[0].extras == stream_extras(more="yes")

    async def test_an_append_without_extras_keeps_those_of_the_append_before(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        changed = stream_extras(step="two")
        async with channel.subscribe() as subscription:
            [serial] = await channel.publish([stream()])
            await channel.append(serial, "a", changed, seq=1)
            await channel.append(serial, "b", None, seq=2)
            view = View()
            await until(view, subscription, lambda view: view.texts() == {serial: "ab"})
            assert view.taken[-1].extras == changed
        [item] = await whole_history(channel)
        assert (item.data, item.extras) == ("ab", changed)
        await channel.append(serial, "c", stream_extras("complete", step="two"), seq=3)
        await channel.append(serial, "d", None, seq=4)
        [item] = await whole_history(channel)
        assert (item.data, item.extras) == ("abcd", stream_extras("complete", step="two"))

    async def test_what_another_provider_writes_arrives(self, provider: ChannelProvider) -> None:
        self.needs(provider.capabilities.shared)
        other = await self.another(provider, None)
        if other is None:
            return
        async with other:
            channel, same = await provider.open(NAME), await other.open(NAME)
            async with channel.subscribe() as one, same.subscribe() as two:
                for n, writer in enumerate([same, channel, same, same, channel]):
                    reading = [asyncio.ensure_future(reader.read()) for reader in (one, two)]
                    for _ in range(5):  # both wait
                        await asyncio.sleep(0)
                    await writer.publish([message(f"{n}")])
                    async with asyncio.timeout(30):
                        for items in await asyncio.gather(*reading):
                            assert [item.data for item in items if isinstance(item, Delivery)] == [f"{n}"]

    async def test_first_contact_is_a_full_update(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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
        self, provider: ChannelProvider
    ) -> None:
        channel = await provider.open(NAME)
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

    async def test_any_cursor_resumes_without_loss(self, provider: ChannelProvider) -> None:
        self.needs(provider.capabilities.replay)
        channel = await provider.open(NAME)
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

    async def test_replay_goes_over_into_live_without_a_seam(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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

    async def test_a_slow_reader_keeps_nobody_waiting(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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

    async def test_many_messages_that_changed_later_are_replayed_once(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            start = subscription.start
        serials: list[str] = []
        for i in range(4):
            serials += await channel.publish([message(f"{i}.{j}") for j in range(100)])
        for serial in serials:
            await channel.update(serial, "new", message().extras or {})
        [last] = await channel.publish([message("last")])
        async with channel.subscribe(after=start) as subscription:
            view = View()  # which checks that no version comes twice
            await until(view, subscription, lambda view: last in view.texts())
        assert list(view.texts().values()) == ["new"] * 400 + ["last"]

    async def test_a_limit_is_kept(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            await channel.publish([message(f"{i}") for i in range(10)])
            read = [await subscription.read(limit) for limit in (3, 1, 6)]
            assert [len(items) for items in read] == [3, 1, 6]
            assert [item.data for items in read for item in items if isinstance(item, Delivery)] == [
                f"{i}" for i in range(10)
            ]
            with raises(InvalidInputError):
                await subscription.read(0)

    async def test_it_is_an_iterator_too(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            await channel.publish([message("a"), message("b")])
            seen: list[Any] = []
            async for item in subscription:
                seen.append(item.data if isinstance(item, Delivery) else item)
                if len(seen) == 2:
                    break
        assert seen == ["a", "b"]

    async def test_a_cancelled_read_loses_nothing(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            view = View()
            for hops in range(8):
                reading = asyncio.ensure_future(subscription.read())
                for _ in range(hops):
                    await asyncio.sleep(0)
                [serial] = await channel.publish([message(f"{hops}")])
                for _ in range(hops % 3):
                    await asyncio.sleep(0)
                reading.cancel()
                [result] = await asyncio.gather(reading, return_exceptions=True)
                if not isinstance(result, BaseException):  # it was done before it could be cancelled
                    view.take(result)
                await until(view, subscription, lambda view, serial=serial: serial in view.texts())
        assert [item.data for item in view.taken] == [f"{hops}" for hops in range(8)]

    async def test_readers_are_independent(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as one, channel.subscribe() as two:
            await channel.publish([message("a"), message("b")])
            assert [item.data for item in await drain(one, 2) if isinstance(item, Delivery)] == ["a", "b"]
            assert [item.data for item in await drain(two, 2) if isinstance(item, Delivery)] == ["a", "b"]

    # --- history

    async def test_history_is_newest_first_each_once_at_its_create(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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

    async def test_history_comes_in_pages(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        await channel.publish([message(f"{i}") for i in range(25)])
        for limit in (1, 7, 25, 26, 100):
            items = await whole_history(channel, limit=limit)
            assert [item.data for item in items] == [f"{i}" for i in range(25)]
        page = await channel.history(limit=25)
        assert page.next is None
        with raises(InvalidInputError):
            await channel.history(limit=0)
        with raises(InvalidInputError):
            await channel.history(limit=1_001)

    async def test_history_and_a_subscription_together_hold_everything_once(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)

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

    async def test_an_empty_channel_has_no_history(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        page = await channel.history()
        assert (list(page.items), page.next) == ([], None)

    # --- gaps

    async def test_a_deleted_channel_gives_its_readers_a_gap(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.retention)
        async with channel.subscribe() as subscription:
            view = View()
            [old] = await channel.publish([message("old", idempotency_id="k")])
            view.take(await drain(subscription, 1))
            await provider.delete(NAME)
            with raises(UnknownMessageError):
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
            self.needs(False)
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

    async def test_a_reader_may_stop_anywhere_in_a_snapshot(self, provider: ChannelProvider) -> None:
        self.needs(provider.capabilities.retention)
        old = (await (await provider.open("suite:old")).publish([message("x")]))[0]
        channel = await provider.open(NAME)
        await provider.delete(NAME)
        async with channel.subscribe() as subscription:
            start = subscription.start
        await provider.delete(NAME)
        serials = await channel.publish([stream(), message("b"), stream(), message("d")])
        await channel.append(serials[2], "c", stream_extras(), seq=1)
        await channel.append(serials[0], "a", stream_extras("complete"), seq=1)
        assert old not in serials
        async with channel.subscribe(after=start) as subscription:
            assert isinstance((await subscription.read(1))[0], Gap)
            view, stops = View(), list[tuple[Cursor, View]]()
            while len(stops) < len(serials):
                view.take(await subscription.read(1))
                stops.append((view.taken[-1].cursor, view.copy()))
        [last] = await channel.publish([message("e")])
        for cursor, known in stops:
            async with channel.subscribe(after=cursor) as subscription:
                await until(known, subscription, lambda view: last in view.texts())
            assert list(known.texts().values()) == ["a", "b", "c", "d", "e"]
        assert len(stops[-1][1].taken) == len(serials) + 1, "the whole snapshot was there already"

    async def test_what_is_ephemeral_is_live_only(self, provider: ChannelProvider) -> None:
        self.needs(provider.capabilities.replay)
        channel = await provider.open(NAME)
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

    async def test_what_was_ephemeral_is_gone_although_nobody_publishes(self, provider: ChannelProvider) -> None:
        if not self.passes_time:
            return
        channel = await provider.open(NAME)
        extras = {**stream_extras(), "ephemeral": True}
        async with channel.subscribe() as subscription:
            start = subscription.start
            pings = [WireMessage(name="ping", data="", extras=extras) for _ in range(6)]
            _, _, appended, *replaced, kept, note, lasting = await channel.publish([*pings, message("n"), stream()])
            await channel.append(appended, "gone", extras, seq=1)
            for serial in replaced:
                await channel.update(serial, "gone", extras)
            view = View()
            await until(view, subscription, lambda view: list(view.texts().values()).count("gone") == 3)
            cursors = [start, *(item.cursor for item in view.taken)]
        await self.pass_time(30.0)
        await channel.update(kept, "kept", extras)
        await channel.update(note, "note", make_extras({"run-id": "r"}))
        await self.pass_time(31.0)
        await channel.append(lasting, "new", stream_extras(), seq=1)
        there = {kept: "kept", note: "note", lasting: "new"}
        for cursor in cursors:
            for limit in (1, 2, 256):
                async with channel.subscribe(after=cursor) as subscription:
                    view = View()
                    while not there.items() <= view.texts().items():
                        view.take(await subscription.read(limit))
                    assert view.texts() == there
                    assert not view.gaps

    async def test_nothing_is_left_of_what_was_ephemeral(self, provider: ChannelProvider) -> None:
        if not self.passes_time:
            return
        channel = await provider.open(NAME)
        extras = {**stream_extras(), "ephemeral": True}
        async with channel.subscribe() as subscription:
            start = subscription.start
            [gone] = await channel.publish([WireMessage(name="x", data="", extras=extras, idempotency_id="k")])
            await channel.update(gone, "one", extras)
            await channel.update(gone, "two", extras)
            await channel.append(gone, " three", extras, seq=1)
            view = View()
            await until(view, subscription, lambda view: view.texts() == {gone: "two three"})
        async with channel.subscribe(after=start) as subscription:
            view = View()
            await until(view, subscription, lambda view: view.texts() == {gone: "two three"})
        await self.pass_time(61.0)
        await channel.publish([message("later")])
        await self.pass_time(6.0)
        [last] = await channel.publish([message("last")])
        async with channel.subscribe(after=start) as subscription:
            view = View()
            await until(view, subscription, lambda view: last in view.texts())
            assert list(view.texts().values()) == ["later", "last"]
        if provider.capabilities.idempotency:  # an id lives as long as its message
            [again] = await channel.publish([message("again", idempotency_id="k")])
            assert again > last
