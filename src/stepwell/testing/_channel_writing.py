"""The part of the channel conformance suite that is about writing."""

from __future__ import annotations

import asyncio
import enum
from typing import Any

from stepwell.errors import AppendGapError, FencedError, InvalidInputError, UnknownMessageError
from stepwell.wire import MAX_BATCH, ChannelProvider, Cursor, WireMessage

from ._channel_base import NAME, ChannelSuite, message, stream, stream_extras, until, whole_history
from ._channel_reader import View
from ._store_base import raises

__all__ = ["WritingTests"]


class Kind(enum.StrEnum):
    """Text that is more than text."""

    STREAMING = "streaming"


class WritingTests(ChannelSuite):
    """See `ChannelConformance`."""

    # --- serials and order

    async def test_serials_and_versions_grow_as_text(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        names: list[str] = []
        for _ in range(12):
            [serial] = await channel.publish([stream()])
            names.append(serial)
            names.append(await channel.append(serial, "a", stream_extras(), seq=1))
            names.append(await channel.update(serial, "b", stream_extras()))
        assert names == sorted(names)
        assert len(set(names)) == len(names)

    async def test_a_batch_is_stored_together_and_numbered(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        serials = await channel.publish([message(str(i)) for i in range(12)])
        assert [serial[-4:] for serial in serials] == [f":{i:03d}" for i in range(12)]
        assert serials == sorted(serials)
        assert len({serial[:-4] for serial in serials}) == 1
        [later] = await channel.publish([message("later")])
        assert later > serials[-1]
        assert later.endswith(":000")

    async def test_batches_of_many_writers_are_not_mixed(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)

        async def write(who: int) -> None:
            for _ in range(5):
                await channel.publish([message(f"{who}") for _ in range(4)])

        await asyncio.gather(*(write(who) for who in range(6)))
        data = [item.data for item in await whole_history(channel)]
        assert len(data) == 120
        assert all(len(set(data[i : i + 4])) == 1 for i in range(0, 120, 4))

    async def test_many_writers_lose_nothing_to_a_reader(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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

    async def test_an_id_seen_before_stores_nothing(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.idempotency)
        first = await channel.publish([message("one", idempotency_id="a"), message("two", idempotency_id="b")])
        again = await channel.publish([message("one", idempotency_id="a"), message("two", idempotency_id="b")])
        other = await channel.publish([message("another payload", name="x", idempotency_id="a")])
        assert first == again
        assert other == first[:1]
        assert [item.data for item in await whole_history(channel)] == ["one", "two"]

    async def test_a_batch_that_was_stored_in_part_is_completed(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.idempotency)
        [first] = await channel.publish([message("one", idempotency_id="a")])
        serials = await channel.publish([message("one", idempotency_id="a"), message("two", idempotency_id="b")])
        assert serials[0] == first
        assert serials[1] > first
        twice = await channel.publish([message("x", idempotency_id="c"), message("x", idempotency_id="c")])
        assert twice[0] == twice[1]
        assert [item.data for item in await whole_history(channel)] == ["one", "two", "x"]

    async def test_an_id_is_the_channels_own(self, provider: ChannelProvider) -> None:
        self.needs(provider.capabilities.idempotency)
        one, two = await provider.open("suite:a"), await provider.open("suite:b")
        await one.publish([message("one", idempotency_id="k")])
        await two.publish([message("two", idempotency_id="k")])
        assert [item.data for item in await whole_history(two)] == ["two"]

    async def test_ids_outlive_the_provider(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.idempotency)
        first = await channel.publish([message("one", idempotency_id="a")])
        await channel.publish([message(str(i)) for i in range(300)])
        assert await (await provider.open(NAME)).publish([message("one", idempotency_id="a")]) == first

    async def test_a_repeated_append_is_acknowledged_and_not_applied(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.idempotency)
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "a", stream_extras(), seq=1)
        newest = await channel.append(serial, "b", stream_extras(), seq=2)
        assert await channel.append(serial, "a", stream_extras(), seq=1) == newest
        assert await channel.append(serial, "b", stream_extras(), seq=2) == newest
        closed = await channel.append(serial, "c", stream_extras("complete"), seq=3)
        assert await channel.append(serial, "c", stream_extras("complete"), seq=3) == closed
        assert (await whole_history(channel))[0].data == "abc"

    async def test_a_missing_append_is_refused(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.idempotency)
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "a", stream_extras(), seq=1)
        for wrong in (3, 7, 0, -1):
            with raises(AppendGapError) as caught:
                await channel.append(serial, "x", stream_extras(), seq=wrong)
            assert caught.error.applied == 1
        await channel.append(serial, "b", stream_extras(), seq=2)
        assert (await whole_history(channel))[0].data == "ab"

    async def test_appends_go_on_after_an_update(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
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

    async def test_a_stale_epoch_gets_nothing_in(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.fence)
        [serial] = await channel.publish([stream()], epoch=1)
        await channel.append(serial, "a", stream_extras(), seq=1, epoch=1)
        await channel.raise_fence(3)
        before = await whole_history(channel)
        for epoch in (1, 2):
            with raises(FencedError) as caught:
                await channel.publish([message("late", idempotency_id="late")], epoch=epoch)
            assert (caught.error.epoch, caught.error.fence) == (epoch, 3)
            with raises(FencedError):
                await channel.append(serial, "late", stream_extras(), seq=2, epoch=epoch)
            with raises(FencedError):
                await channel.update(serial, "late", stream_extras(), epoch=epoch)
            with raises(FencedError):
                await channel.raise_fence(epoch)
        assert await whole_history(channel) == before
        # What was refused left nothing behind: the same operations are new to the next writer.
        await channel.publish([message("now", idempotency_id="late")], epoch=3)
        await channel.append(serial, "b", stream_extras(), seq=2, epoch=4)
        await channel.raise_fence(3)
        assert [item.data for item in await whole_history(channel)] == ["ab", "now"]

    async def test_no_epoch_is_never_fenced(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.fence)
        await channel.raise_fence(9)
        [serial] = await channel.publish([stream()])
        await channel.append(serial, "a", stream_extras(), seq=1)
        await channel.update(serial, "b", stream_extras())
        assert (await whole_history(channel))[0].data == "b"

    async def test_a_fence_is_one_channels(self, provider: ChannelProvider) -> None:
        self.needs(provider.capabilities.fence)
        one, two = await provider.open("suite:a"), await provider.open("suite:b")
        await one.raise_fence(5)
        await two.publish([message("x")], epoch=1)

    async def test_a_fence_raised_among_writes_cuts_them_once(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        self.needs(provider.capabilities.fence)
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

    # --- what is not acceptable

    async def test_bad_messages_are_refused_and_change_nothing(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        [serial] = await channel.publish([stream()])
        before = await whole_history(channel)
        deep: Any = []
        for _ in range(2_000):
            deep = [deep]
        bad: list[Any] = [
            float("nan"),
            5,
            True,
            {"n": float("inf")},
            "\ud800",
            {"k": "\udfff"},
            {1: 2},
            {"s": {1}},
            deep,
        ]
        for data in bad:
            with raises(InvalidInputError):
                await channel.publish([message("good"), message(data)])
            with raises(InvalidInputError):
                await channel.update(serial, data, {})
        wrong: list[Any] = [{"x": object()}, {"x": float("nan")}, ["no", "object"]]
        for extras in wrong:
            with raises(InvalidInputError):
                await channel.publish([WireMessage(name="x", extras=extras)])
            with raises(InvalidInputError):
                await channel.append(serial, "x", extras, seq=1)
        with raises(InvalidInputError):
            await channel.append(serial, "\ud800", None, seq=1)
        for none in ([], [message()] * (MAX_BATCH + 1), [WireMessage(name="")]):
            with raises(InvalidInputError):
                await channel.publish(none)
        assert await whole_history(channel) == before

    async def test_what_was_published_is_not_the_callers_any_more(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        data, extras = {"a": [1]}, stream_extras()
        [serial] = await channel.publish([WireMessage(name="x", data=data, extras=extras)])
        data["a"].append(2)
        extras["ai"]["transport"]["run-id"] = "changed"
        [item] = await whole_history(channel)
        assert (item.data, item.extras) == ({"a": [1]}, stream_extras())
        await channel.update(serial, data, extras)
        data["a"].append(3)
        [item] = await whole_history(channel)
        assert item.data == {"a": [1, 2]}

    async def test_text_of_an_enumeration_is_text(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        extras = {"ai": {"transport": {"status": Kind.STREAMING}}, "other": [Kind.STREAMING]}
        await channel.publish([message({"kind": Kind.STREAMING}), WireMessage(name="x", data="", extras=extras)])
        items = await whole_history(channel)
        assert items[0].data == {"kind": "streaming"}
        assert items[1].extras == {"ai": {"transport": {"status": "streaming"}}, "other": ["streaming"]}

    async def test_a_cancelled_publish_is_stored_whole_or_not_at_all(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        async with channel.subscribe() as subscription:
            view = View()
            for hops in range(6):
                # A reader that waits hears of it, whoever else does not.
                reading = asyncio.ensure_future(subscription.read())
                await asyncio.sleep(0)
                publishing = asyncio.ensure_future(channel.publish([message(f"{hops}.0"), message(f"{hops}.1")]))
                for _ in range(hops):
                    await asyncio.sleep(0)
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)
                again = [message(f"{hops}.{i}", idempotency_id=f"{hops}.{i}") for i in range(2)]
                last = (await channel.publish(again))[-1]
                view.take(await reading)
                await until(view, subscription, lambda view, last=last: last in view.texts())
        stored = [item.data for item in await whole_history(channel)]
        assert list(view.texts().values()) == stored
        for hops in range(6):
            assert stored.count(f"{hops}.0") == stored.count(f"{hops}.1") in (1, 2)

    async def test_only_text_can_be_appended_to(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        serials = await channel.publish([message({"a": 1}), message(None)])
        for serial in serials:
            with raises(InvalidInputError):
                await channel.append(serial, "x", None, seq=1)
        [serial] = await channel.publish([stream()])
        no_text: list[Any] = [{"a": 1}, ["a"], None, b"a"]
        for data in no_text:
            with raises(InvalidInputError):
                await channel.append(serial, data, None, seq=1)

    async def test_unknown_messages(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        other = await provider.open("suite:other")
        await channel.publish([message("a")])
        [foreign] = await other.publish([message("b")])
        own = (await channel.publish([message("c")]))[0]
        wrong = [foreign, "nonsense", "", "00000000000099-000@aaaaaaaaaa:000", own.replace(":000", ":001")]
        wrong += [own.replace("0000", "9" * 9, 1), "9" * 30 + own[14:], own.replace("0", "\u0660")]
        for serial in wrong:
            with raises(UnknownMessageError):
                await channel.append(serial, "x", None, seq=1)
            with raises(UnknownMessageError):
                await channel.update(serial, "x", {})

    async def test_a_wrong_cursor_is_refused(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        for wrong in ("nonsense", "", "-1@aaaaaaaaaa", "9" * 19 + "@aaaaaaaaaa", "\u0661@aaaaaaaaaa"):
            with raises(InvalidInputError):
                async with channel.subscribe(after=Cursor(wrong)):
                    pass
            with raises(InvalidInputError):
                await channel.history(before=Cursor(wrong))

    async def test_names_are_checked(self, provider: ChannelProvider) -> None:
        for wrong in ("", "a b", "é", "x" * 257, "a/b"):
            with raises(InvalidInputError):
                await provider.open(wrong)
        for right in ("a", "conversations:42", "x" * 256, "A-b_c.d"):
            assert (await provider.open(right)).name == right

    async def test_text_survives(self, provider: ChannelProvider) -> None:
        channel = await provider.open(NAME)
        texts = ["", 'é€𝄞\u2028\x00\x1f"\\/', "x" * 300_000, "\ufeff\r\n\t"]
        serials = await channel.publish([message(text) for text in texts])
        [serial] = await channel.publish([stream()])
        for i, text in enumerate(texts):
            await channel.append(serial, text, stream_extras(note=text[:40]), seq=i + 1)
        items = {item.serial: item for item in await whole_history(channel)}
        assert [items[serial].data for serial in serials] == texts
        assert items[serial].data == "".join(texts)


def view_length(writers: int, each: int) -> int:
    """How much text the writers of one test write."""
    return sum(len(f"{who}.{i} ") for who in range(writers) for i in range(each))
