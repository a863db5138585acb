"""Channels in Redis, with real servers: what only this backend can do wrong."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any

import pytest

from channel_kit import (
    WRITERS,
    assert_nothing_is_lost,
    go,
    message,
    names_in_history,
    read_by_cursor,
    read_names,
    ready,
    start,
    told_until_killed,
)
from redis_kit import do
from servers import RedisServer, start_redis
from stepwell.channels import _redis_line
from stepwell.channels.redis import RedisChannels
from stepwell.errors import AppendGapError, ChannelBusyError, ChannelError, FencedError, InvalidInputError
from stepwell.testing import ChannelConformance, FakeClock
from stepwell.wire import ChannelProvider, Delivery, Gap, make_extras

pytestmark = pytest.mark.anyio

OPEN = make_extras({"run-id": "r", "stream": "true", "status": "streaming"})
CLOSED = make_extras({"run-id": "r", "stream": "true", "status": "complete"})


@pytest.fixture(scope="module")
def shared_server() -> Generator[RedisServer]:
    # Not that of all tests: here scripts are flushed and clients killed.
    with start_redis() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """Empty, with nobody connected."""
    do(shared_server, "FLUSHALL")
    return shared_server


@pytest.fixture
def own_server() -> Generator[RedisServer]:
    with start_redis(appendonly=True, appendfsync="always") as server:
        yield server


@pytest.fixture
async def channels(server: RedisServer) -> AsyncGenerator[RedisChannels]:
    async with RedisChannels(server.url) as channels:
        yield channels


async def until(true: Callable[[], object]) -> None:
    """Let the event loop run until a look at the server says so."""
    while not true():  # noqa: ASYNC110 - the server has no event to wait for
        await asyncio.sleep(0)


def blocking_until(true: Callable[[], object]) -> None:
    """The same in a thread, so that the event loop runs while the server thinks."""
    while not true():
        pass


def listeners(server: RedisServer) -> set[bytes]:
    """The connections that wait for what is published."""
    return {line.split()[0] for line in do(server, "CLIENT", "LIST", "TYPE", "pubsub").splitlines()}


class TestRedis(ChannelConformance):
    @pytest.fixture
    async def provider(self, redis_database: str) -> AsyncGenerator[ChannelProvider]:
        self.url = redis_database
        async with RedisChannels(self.url, clock=self.clock) as provider:
            yield provider

    async def another(self, provider: ChannelProvider, retention: float) -> ChannelProvider:
        return RedisChannels(self.url, retention=retention, clock=self.clock)


# -- several processes


async def test_twenty_writers_in_two_processes_and_a_reader_by_cursor_that_loses_no_row(
    server: RedisServer, channels: RedisChannels
) -> None:
    processes = [start(WRITERS, server.url, str(n), "10") for n in range(2)]
    await ready(processes)
    channel = await channels.open("shared")
    async with channel.subscribe() as subscription:
        cursor = subscription.start
    go(processes)
    found = await read_by_cursor(channel, cursor, lambda found: len(found) >= 2 * 10 * 75)
    assert [process.wait() for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    assert_nothing_is_lost(found, 20)


async def test_what_a_killed_writer_was_told_is_stored(server: RedisServer, channels: RedisChannels) -> None:
    told = await told_until_killed(server.url)
    stored = await names_in_history(await channels.open("killed"))
    assert stored[:told] == [str(n) for n in range(told)]
    assert len(stored) - told in (0, 1)


async def test_two_providers_in_one_process(server: RedisServer, channels: RedisChannels) -> None:
    async with RedisChannels(server.url) as others:
        theirs, ours = await others.open("c"), await channels.open("c")
        async with theirs.subscribe() as there, ours.subscribe() as here:
            await theirs.publish([message("a")])
            await ours.publish([message("b")])
            assert await read_names(there, 2) == await read_names(here, 2) == ["a", "b"]


# -- a server that goes away


async def test_a_server_killed_and_started_again_between_reads_and_writes(own_server: RedisServer) -> None:
    async with RedisChannels(own_server.url) as channels:
        channel = await channels.open("c")
        [serial] = await channel.publish([message("answer", "", extras=OPEN)])
        begun = asyncio.Event()

        async def write() -> None:
            for seq in range(1, 301):
                extras = OPEN if seq < 300 else CLOSED
                while True:
                    try:
                        await channel.append(serial, f"{seq} ", extras, seq=seq)
                        break
                    except ChannelBusyError:
                        continue
                if seq == 100:
                    begun.set()

        text = ""
        async with channel.subscribe() as subscription, asyncio.TaskGroup() as tasks:
            tasks.create_task(write())
            await begun.wait()
            await asyncio.to_thread(own_server.stop, signal.SIGKILL)
            tasks.create_task(asyncio.to_thread(own_server.start))
            while True:
                [item] = await subscription.read(1)
                assert isinstance(item, Delivery)  # nothing is lost, so there is no gap
                assert isinstance(item.data, str)
                text = text + item.data if item.action == "append" else item.data
                if item.extras == CLOSED:
                    break
        assert text == "".join(f"{seq} " for seq in range(1, 301))


async def test_a_reader_that_waits_survives_a_restart(own_server: RedisServer) -> None:
    async with RedisChannels(own_server.url) as channels, RedisChannels(own_server.url) as others:
        channel = await channels.open("c")
        async with channel.subscribe() as subscription:
            await channel.publish([message("before")])
            assert await read_names(subscription, 1) == ["before"]
            reading = asyncio.create_task(read_names(subscription, 1))
            await asyncio.to_thread(own_server.stop, signal.SIGKILL)
            await asyncio.to_thread(own_server.start)
            await (await others.open("c")).publish([message("after")])
            assert await reading == ["after"]


async def test_a_flushed_server_is_a_gap(server: RedisServer, channels: RedisChannels) -> None:
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        await channel.publish([message("before")])
        assert await read_names(subscription, 1) == ["before"]
        reading = asyncio.create_task(read_names(subscription, 2))
        do(server, "FLUSHALL")
        await channel.publish([message("after")])
        assert await reading == [None, "after"]
        await channel.publish([message("later")])
        assert await read_names(subscription, 1) == ["later"]


async def test_a_flushed_server_that_nobody_writes_to_is_noticed(
    server: RedisServer, channels: RedisChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_redis_line, "TICK_SECONDS", 0.1)
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        await channel.publish([message("before")])
        assert await read_names(subscription, 1) == ["before"]
        reading = asyncio.create_task(subscription.read())
        do(server, "FLUSHALL")
        assert isinstance((await reading)[0], Gap)


async def test_channels_that_nobody_reads_any_more_are_not_listened_to(
    server: RedisServer, channels: RedisChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_redis_line, "TICK_SECONDS", 0.1)
    kept, left = await channels.open("kept"), await channels.open("left")
    async with kept.subscribe() as subscription, left.subscribe() as leaving:
        reading = asyncio.create_task(read_names(subscription, 1))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(leaving.read())
            await until(lambda: len(do(server, "PUBSUB", "CHANNELS")) == 2)
            [before] = listeners(server)
            task.cancel()
        await asyncio.to_thread(blocking_until, lambda: len(do(server, "PUBSUB", "CHANNELS")) == 1)
        assert listeners(server) == {before}  # by its own decision, not for a lost connection
        again = asyncio.create_task(read_names(leaving, 1))
        await kept.publish([message("a")])
        await left.publish([message("b")])
        assert (await reading, await again) == (["a"], ["b"])


async def test_a_mutation_between_a_look_and_the_first_listening_is_not_missed(server: RedisServer) -> None:
    for hops in range(60):  # that moment is somewhere in between
        async with RedisChannels(server.url) as channels, RedisChannels(server.url) as others:
            channel = await channels.open(f"c{hops}")
            other = await others.open(f"c{hops}")
            async with channel.subscribe() as subscription:
                await other.history()
                reading = asyncio.create_task(read_names(subscription, 1))
                for _ in range(hops):
                    await asyncio.sleep(0)
                await other.publish([message("a")])
                async with asyncio.timeout(_redis_line.TICK_SECONDS / 2):  # when it would look by itself
                    assert await reading == ["a"]


async def test_databases_of_one_server_do_not_keep_each_other_awake(
    server: RedisServer, channels: RedisChannels
) -> None:
    async with RedisChannels(server.url.replace("/0", "/1")) as others:
        channel, other = await channels.open("c"), await others.open("c")
        async with channel.subscribe() as subscription, other.subscribe() as there:
            await channel.publish([message("a")])
            assert await read_names(subscription, 1) == ["a"]
            reading = asyncio.create_task(subscription.read())
            await until(lambda: do(server, "PUBSUB", "NUMSUB", "stepwell:{c}:bell")[1] == 1)
            await other.publish([message("theirs")])
            assert await read_names(there, 1) == ["theirs"]
            do(server, "CONFIG", "RESETSTAT")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.shield(reading)
            assert int(do(server, "INFO", "stats")["total_commands_processed"]) < 20
            await channel.publish([message("b")])
            assert [item.name for item in await reading if isinstance(item, Delivery)] == ["b"]


async def test_a_lost_bell_rings_again(server: RedisServer, channels: RedisChannels) -> None:
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        for n in range(3):
            reading = asyncio.create_task(read_names(subscription, 1))
            await until(lambda: do(server, "PUBSUB", "NUMSUB", "stepwell:{c}:bell")[1] == 1)
            do(server, "CLIENT", "KILL", "TYPE", "pubsub")
            await channel.publish([message(str(n))])
            assert await reading == [str(n)]


async def test_a_bell_that_does_not_answer_is_replaced(
    server: RedisServer, channels: RedisChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_redis_line, "TICK_SECONDS", 0.05)
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        reading = asyncio.create_task(read_names(subscription, 1))
        await until(lambda: listeners(server))
        [before] = listeners(server)
        do(server, "CLIENT", "PAUSE", "300", "ALL")
        # The server answers this, too, only when the pause is over.
        await asyncio.to_thread(blocking_until, lambda: listeners(server) - {before})
        await channel.publish([message("a")])
        assert await reading == ["a"]


async def test_connections_that_the_server_closed_are_replaced_before_anything_is_sent(
    server: RedisServer, channels: RedisChannels
) -> None:
    channel = await channels.open("c")
    await channel.publish([message("a")])
    await channel.history()
    do(server, "CLIENT", "KILL", "TYPE", "normal")
    await asyncio.sleep(0.05)  # until this process's event loop has heard of it
    await channel.publish([message("b")])
    assert await names_in_history(channel) == ["a", "b"]


async def test_nobody_there(server: RedisServer) -> None:
    async with RedisChannels("redis://somebody:hunter2@127.0.0.1:1/0", timeout=1) as channels:
        channel = await channels.open("c")
        for call in (
            lambda: channel.publish([message()]),
            lambda: channel.history(),
            lambda: channel.raise_fence(1),
            lambda: channel.subscribe().__aenter__(),
        ):
            with pytest.raises(ChannelBusyError, match="try again") as caught:
                await call()
            assert caught.value.retryable
            assert "hunter2" not in repr(caught.value)


async def test_no_answer_in_time(server: RedisServer) -> None:
    async with RedisChannels(server.url, timeout=0.05) as channels:
        channel = await channels.open("c")
        await channel.publish([message("a")])
        do(server, "CLIENT", "PAUSE", "300", "ALL")
        with pytest.raises(ChannelBusyError, match="in time"):
            await channel.publish([message("b", idempotency_id="b")])
        while True:
            try:
                await channel.publish([message("b", idempotency_id="b")])
                break
            except ChannelBusyError:
                continue
        assert await names_in_history(channel) == ["a", "b"]


# -- scripts


async def test_flushed_scripts_are_loaded_again_and_keep_the_order_of_calls(
    server: RedisServer, channels: RedisChannels
) -> None:
    channel = await channels.open("c")
    [serial] = await channel.publish([message("answer", "", extras=OPEN)])
    await channel.append(serial, "0", OPEN, seq=1)
    for rounds in range(5):
        do(server, "SCRIPT", "FLUSH")
        first = 2 + rounds * 10
        await asyncio.gather(*(channel.append(serial, ".", OPEN, seq=seq) for seq in range(first, first + 10)))
    assert (await channel.history()).items[0].data == "0" + "." * 50


async def test_appends_called_at_once_arrive_in_order(channels: RedisChannels) -> None:
    channel = await channels.open("c")
    [serial] = await channel.publish([message("answer", "", extras=OPEN)])
    calls = [channel.append(serial, f"{seq} ", None, seq=seq) for seq in range(1, 1001)]
    versions = await asyncio.gather(*calls)
    assert versions == sorted(versions)
    assert (await channel.history()).items[0].data == "".join(f"{seq} " for seq in range(1, 1001))


async def test_extras_that_an_append_changed_are_kept_by_those_that_say_nothing(channels: RedisChannels) -> None:
    changed = make_extras({"run-id": "r", "stream": "true", "status": "streaming", "step-id": "s"})
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        [serial] = await channel.publish([message("answer", "", extras=OPEN)])
        given = [None, changed, None, OPEN, None, changed, CLOSED]
        for seq, extras in enumerate(given, 1):
            await channel.append(serial, str(seq), extras, seq=seq)
            # Read one by one, or the closed message would stand for all of them.
            got = [item for item in await subscription.read() if isinstance(item, Delivery)]
            assert got[-1].extras == (OPEN, changed, changed, OPEN, OPEN, changed, CLOSED)[seq - 1]
    [item] = (await channel.history()).items
    assert (item.data, item.extras) == ("1234567", CLOSED)


async def test_a_replaced_open_message_goes_on(channels: RedisChannels) -> None:
    channel = await channels.open("c")
    async with channel.subscribe() as early:
        [serial] = await channel.publish([message("answer", "", extras=OPEN)])
        await channel.append(serial, "lost", OPEN, seq=1)
        await channel.update(serial, "new", OPEN)
        await channel.append(serial, " text", OPEN, seq=2)
        items = [item for item in await early.read() if isinstance(item, Delivery)]
        assert items[-1].data in (" text", "new text")
        assert (await channel.history()).items[0].data == "new text"
        await channel.update(serial, {"no": ["text", {}, [], None, 2**70, "\0é😀"]}, CLOSED)
        [item] = (await channel.history()).items
        assert item.data == {"no": ["text", {}, [], None, 2**70, "\0é😀"]}
        with pytest.raises(InvalidInputError):
            await channel.append(serial, "x", None, seq=3)
        await channel.update(serial, "again", OPEN)
        await channel.append(serial, "!", CLOSED, seq=3)
        await channel.append(serial, "?", None, seq=4)
        assert (await channel.history()).items[0].data == "again!?"
        with pytest.raises(AppendGapError) as caught:
            await channel.append(serial, "x", None, seq=10**30)
        assert caught.value.applied == 4


async def test_fences_are_exact_up_to_the_highest(channels: RedisChannels) -> None:
    channel = await channels.open("c")
    await channel.raise_fence(2**53 - 1)
    with pytest.raises(FencedError) as caught:
        await channel.publish([message()], epoch=2**53 - 2)
    assert (caught.value.epoch, caught.value.fence) == (2**53 - 2, 2**53 - 1)
    with pytest.raises(FencedError):
        await channel.raise_fence(9)
    await channel.publish([message("a")], epoch=2**53 - 1)
    assert await names_in_history(channel) == ["a"]


# -- what is kept


def keys(server: RedisServer) -> set[str]:
    return {key.decode() for key in do(server, "KEYS", "*")}


async def test_a_closed_message_leaves_no_keys_of_its_own_and_a_deleted_channel_none(
    server: RedisServer, channels: RedisChannels
) -> None:
    channel = await channels.open("c")
    serials = [(await channel.publish([message("answer", "", extras=OPEN)]))[0] for _ in range(2)]
    for serial in serials:
        for seq in range(1, 4):
            await channel.append(serial, "x", OPEN, seq=seq)
    await channel.append(serials[0], "", CLOSED, seq=4)
    own = {key for key in keys(server) if ":text:" in key or ":rows:" in key}
    assert own == {"stepwell:{c}:text:2", "stepwell:{c}:rows:2"}
    await channel.publish([message(extras={"ephemeral": True}, idempotency_id="i")])
    assert len({key.partition("}")[0] for key in keys(server)}) == 1  # one slot
    await channels.delete("c")
    assert keys(server) == set()


async def test_ephemeral_messages_go_with_everything_that_was_kept_of_them(server: RedisServer) -> None:
    clock = FakeClock()
    async with RedisChannels(server.url, clock=clock) as channels:
        channel = await channels.open("c")
        await channel.publish([message("kept", extras=make_extras({"run-id": "r"}))])
        start = (await channel.history()).items[0].cursor
        fleeting = make_extras({"run-id": "other", "status": "streaming"}, ephemeral=True)
        [serial] = await channel.publish([message("fleeting", "", extras=fleeting, idempotency_id="f")])
        await channel.append(serial, "x", None, seq=1)
        async with channel.subscribe(after=start) as subscription:
            assert await read_names(subscription, 2) == ["fleeting", None]
        assert {"stepwell:{c}:eph", "stepwell:{c}:text:2", "stepwell:{c}:rows:2"} < keys(server)
        await clock.advance(61)
        await channel.publish([message("after")])
        assert {key.rpartition("}")[2] for key in keys(server)} == {"", ":log", ":ext"}
        assert do(server, "HLEN", "stepwell:{c}:ext") == 1
        async with channel.subscribe(after=start) as subscription:
            assert await read_names(subscription, 1) == ["after"]


async def test_retention_raises_the_floor_and_keeps_messages(server: RedisServer) -> None:
    clock = FakeClock()
    async with RedisChannels(server.url, retention=30, clock=clock) as channels:
        channel = await channels.open("c")
        [left_open, closed] = await channel.publish([message(n, "", extras=OPEN) for n in ("open", "closed")])
        cursor = (await channel.history()).items[0].cursor
        for seq in range(1, 4):
            await channel.append(left_open, str(seq), OPEN, seq=seq)
        await channel.append(closed, "text", CLOSED, seq=1)
        await clock.advance(20)
        await channel.publish([message("young")])
        middle = (await channel.history()).items[0].cursor
        await clock.advance(20)
        await channel.publish([message("new")])
        async with channel.subscribe(after=cursor) as subscription:
            items = await subscription.read()
            assert isinstance(items[0], Gap)
            items = await subscription.read()
            shown = [(item.name, item.data) for item in items if isinstance(item, Delivery)]
            assert shown == [("open", "123"), ("closed", "text"), ("young", None), ("new", None)]
        async with channel.subscribe(after=middle) as subscription:
            assert await read_names(subscription, 1) == ["new"]
        assert do(server, "XLEN", "stepwell:{c}:rows:1") == 0
        assert do(server, "ZCARD", "stepwell:{c}:whole") == 0
        await channel.append(left_open, "4", OPEN, seq=4)
        async with channel.subscribe(after=middle) as subscription:
            items = [item for item in await subscription.read() if isinstance(item, Delivery)]
            assert [(item.name, item.data) for item in items] == [("new", None), ("open", "1234")]


async def test_many_messages_that_were_never_closed_are_paged(channels: RedisChannels) -> None:
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        start = subscription.start
    serials = await channel.publish([message(str(n), "", extras=OPEN) for n in range(20)])
    for seq in range(1, 6):
        for serial in serials:
            await channel.append(serial, str(seq), OPEN, seq=seq)
    found: list[Delivery] = []
    async with channel.subscribe(after=start) as subscription:
        while len(found) < 120:
            page = await subscription.read(7)
            assert len(page) <= 7
            found += [item for item in page if isinstance(item, Delivery)]
    assert [item.action for item in found] == ["create"] * 20 + ["append"] * 100
    assert [item.serial for item in found] == serials * 6
    assert [item.version for item in found] == sorted(item.version for item in found)


# -- cancellation


async def test_cancelled_publishes_leave_the_others_their_own_replies(channels: RedisChannels) -> None:
    channel = await channels.open("c")
    for hops in range(12):
        tasks = [asyncio.create_task(channel.publish([message(f"{hops}.{n}")])) for n in range(20)]
        for _ in range(hops):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        page = await channel.history(limit=20)
        name_of = {item.serial: item.name for item in page.items}
        for n in range(1, 20, 2):
            reply = done[n]
            assert isinstance(reply, list)
            assert name_of[reply[0]] == f"{hops}.{n}"


async def test_a_cancelled_read_loses_nothing(channels: RedisChannels) -> None:
    channel = await channels.open("c")
    found: list[str | None] = []
    async with channel.subscribe() as subscription:
        for n in range(40):
            reading = asyncio.create_task(read_names(subscription, 1))
            for _ in range(n % 10):
                await asyncio.sleep(0)
            await channel.publish([message(str(n))])
            reading.cancel()
            results: Sequence[Any] = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(results[0], list):
                found += results[0]
        await channel.publish([message("end")])
        while "end" not in found:
            found += await read_names(subscription, 1)
    assert found == [*map(str, range(40)), "end"]


async def test_closing(server: RedisServer) -> None:
    channels = RedisChannels(server.url)
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        reading = asyncio.create_task(subscription.read())
        await until(lambda: do(server, "PUBSUB", "CHANNELS"))
        writing = asyncio.create_task(channel.publish([message()]))
        await asyncio.sleep(0)
        await channels.close()
        assert len(await writing) == 1  # what was called before comes to its end
        with pytest.raises(ChannelError, match="closed"):
            await reading
        with pytest.raises(ChannelError, match="closed"):
            await subscription.read()
    await channels.close()
    with pytest.raises(ChannelError, match="closed"):
        await channel.publish([message()])
    with pytest.raises(ChannelError, match="closed"):
        await channels.open("c")
