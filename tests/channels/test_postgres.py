"""Channels in PostgreSQL, with real servers: what only this backend can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from random import Random
from typing import Any, LiteralString

import psycopg
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
from servers import PostgresServer, start_postgres
from stepwell.channels import _postgres_bell, open_channels
from stepwell.channels.postgres import PostgresChannels
from stepwell.errors import (
    AppendGapError,
    ChannelBusyError,
    ChannelError,
    FencedError,
    InvalidInputError,
    NewerSchemaError,
    UnknownMessageError,
)
from stepwell.testing import ChannelConformance
from stepwell.wire import ChannelProvider, Cursor, Delivery, Gap, Subscription, make_extras

pytestmark = pytest.mark.anyio

OPEN = make_extras({"run-id": "r", "stream": "true", "status": "streaming"})
CLOSED = make_extras({"run-id": "r", "stream": "true", "status": "complete"})
PUBLISH_FIRST: LiteralString = (
    "SELECT FROM stepwell_channel_write_1(NULL, NULL, '{c}', '{1}', '{create}', '{NULL}', '{NULL}', '{NULL}', '{NULL}',"
    " '{NULL}', '{first}', '{NULL}', '{NULL}', '{f}', '{t}', '{NULL}', '{f}', '{NULL}', '{NULL}', '{NULL}')"
)
"""What a process does that publishes the message `first` on channel `c`, without the notification afterwards."""

NEVER = 600.0
"""Seconds until a reader looks for itself, where it is not to be what helps."""


@pytest.fixture(scope="module")
def unsafe_server() -> Generator[PostgresServer]:
    """For tests that crash, stop or starve it."""
    with start_postgres(fast=True, max_connections="20") as server:
        yield server


@pytest.fixture
def unsafe_database(unsafe_server: PostgresServer) -> Generator[str]:
    with unsafe_server.database() as url:
        yield url


@pytest.fixture
async def channels(postgres_database: str) -> AsyncGenerator[PostgresChannels]:
    async with PostgresChannels(postgres_database) as channels:
        yield channels


class Watched(PostgresChannels):
    """Tells when its readers have read everything and begin to wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waits: asyncio.Queue[int] = asyncio.Queue()

    async def wait(self, series: str, after: int, head: Callable[[], Awaitable[int]]) -> None:
        self._waits.put_nowait(after)
        await super().wait(series, after, head)

    async def waits_at(self, position: int) -> None:
        while await self._waits.get() != position:
            pass


def ask(url: str, query: LiteralString, *values: Any) -> list[Any]:
    """Ask the database past the channels."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(query, values or None)
        return [row[0] for row in cursor.fetchall()] if cursor.description else []


async def until(true: Callable[[], object]) -> None:
    """Look at the server until it says so."""
    while not await asyncio.to_thread(true):
        pass


def listeners(url: str) -> list[int]:
    """Process ids of the server's ends of the connections that listen."""
    query = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    return ask(url, query)


class TestPostgres(ChannelConformance):
    @pytest.fixture
    async def provider(self, postgres_database: str) -> AsyncGenerator[ChannelProvider]:
        self.url = postgres_database
        async with PostgresChannels(postgres_database, clock=self.clock, poll=NEVER) as provider:
            yield provider

    async def another(self, provider: ChannelProvider, retention: float | None = None) -> ChannelProvider:
        return PostgresChannels(self.url, retention=retention, clock=self.clock, poll=NEVER)


# -- several processes

MIGRATE = """
import asyncio, sys
from stepwell.channels import open_channels
from stepwell.wire import WireMessage

async def main(url):
    async with open_channels(url) as channels:
        print("ready", flush=True)
        sys.stdin.readline()
        await (await channels.open("c")).publish([WireMessage(name="x")])

asyncio.run(main(*sys.argv[1:]))
"""


async def test_forty_writers_in_two_processes_and_a_reader_by_cursor_that_loses_no_row(
    postgres_database: str, channels: PostgresChannels
) -> None:
    processes = [start(WRITERS, postgres_database, str(n), "20") for n in range(2)]
    await ready(processes)
    channel = await channels.open("shared")
    async with channel.subscribe() as subscription:
        cursor = subscription.start
    go(processes)

    async def end() -> None:
        for process in processes:
            await asyncio.to_thread(process.communicate)
        await channel.publish([message("end")])

    ending = asyncio.create_task(end())
    found = await read_by_cursor(channel, cursor, lambda found: bool(found) and found[-1].name == "end")
    await ending
    found.pop()
    assert [process.returncode for process in processes] == [0, 0]
    assert_nothing_is_lost(found, 40)


async def test_readers_at_random_cursors_miss_no_row_of_concurrent_writers(
    postgres_database: str, channels: PostgresChannels
) -> None:
    processes = [start(WRITERS, postgres_database, str(n), "10") for n in range(2)]
    await ready(processes)
    channel = await channels.open("shared")
    found: list[Delivery] = []
    read: list[tuple[int, list[Any]]] = []  # behind which row, and what came

    def is_over() -> bool:
        return bool(found) and found[-1].name == "end"

    async def read_all(subscription: Subscription) -> None:
        while not is_over():
            for item in await subscription.read():
                assert isinstance(item, Delivery)
                found.append(item)

    async def read_somewhere(random: Random) -> None:
        while not is_over():
            if not found:
                await asyncio.sleep(0)
                continue
            # Mostly where rows are being written.
            place = len(found) - 1 - random.randrange(min(len(found), random.choice([1, 20, 2_000])))
            items: list[Any] = []
            async with channel.subscribe(after=found[place].cursor) as subscription:
                for _ in range(random.randrange(1, 4)):
                    items += await subscription.read(random.choice([1, 5, 256]))
                    if items[-1].name == "end":
                        break
            read.append((place, items))

    async with channel.subscribe() as subscription:
        go(processes)
        reading = [asyncio.create_task(read_all(subscription))]
        reading += [asyncio.create_task(read_somewhere(Random(seed))) for seed in range(6)]
        for process in processes:
            await asyncio.to_thread(process.communicate)
        await channel.publish([message("end")])
        await asyncio.gather(*reading)
    assert [process.returncode for process in processes] == [0, 0]
    assert read
    serials = [item.serial for item in found]
    for place, items in read:
        assert [item.serial for item in items] == serials[place + 1 : place + 1 + len(items)]
    assert [item.name for item in found] == await names_in_history(channel)
    found.pop()
    assert_nothing_is_lost(found, 20)


async def test_a_position_that_is_not_committed_is_waited_for(
    postgres_database: str, channels: PostgresChannels
) -> None:
    """The trap, step by step: a second writer must not get past a first one that has its position and no commit yet."""
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        await channel.publish([message("zero")])
        assert await read_names(subscription, 1) == ["zero"]
        async with await psycopg.AsyncConnection.connect(postgres_database) as first:
            await first.execute(PUBLISH_FIRST)
            publishing = asyncio.create_task(channel.publish([message("second")]))
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            await until(lambda: ask(postgres_database, waiting))
            assert (await channel.history()).items[0].name == "zero"
            await first.commit()
        await publishing
        assert await read_names(subscription, 2) == ["first", "second"]


async def test_what_a_killed_writer_was_told_is_stored(postgres_database: str, channels: PostgresChannels) -> None:
    told = await told_until_killed(postgres_database)
    channel = await channels.open("killed")
    # The server may still be at work on the last one.
    await channel.raise_fence(1)
    stored = await names_in_history(channel)
    assert stored[:told] == [str(n) for n in range(told)]
    assert len(stored) - told in (0, 1)
    # Whoever goes on in its place repeats what it does not know of.
    await channel.publish([message(str(n), idempotency_id=str(n)) for n in range(told + 2)])
    assert await names_in_history(channel) == [str(n) for n in range(told + 2)]


async def test_two_processes_make_the_tables_at_once(postgres_database: str) -> None:
    processes = [start(MIGRATE, postgres_database) for _ in range(3)]
    await ready(processes)
    go(processes)
    assert [await asyncio.to_thread(process.wait) for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    async with PostgresChannels(postgres_database) as channels:
        assert await names_in_history(await channels.open("c")) == ["x"] * 3


async def test_twenty_providers_make_the_tables_at_once(postgres_database: str) -> None:
    async def write() -> None:
        async with PostgresChannels(postgres_database) as channels:
            await (await channels.open("c")).publish([message()])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(write())
    async with PostgresChannels(postgres_database) as channels:
        assert len(await names_in_history(await channels.open("c"))) == 20


async def test_another_process_wakes_a_reader(postgres_database: str, channels: PostgresChannels) -> None:
    async with Watched(postgres_database, poll=NEVER) as others:
        theirs, ours = await others.open("c"), await channels.open("c")
        async with theirs.subscribe() as subscription:
            for n in range(20):  # from the second on it only waits: no question of its own can help
                reading = asyncio.create_task(read_names(subscription, 1))
                await others.waits_at(n)
                await ours.publish([message(str(n))])
                assert await reading == [str(n)]


async def test_readers_of_one_provider_need_no_notification(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Watched(postgres_database, poll=NEVER) as channels:
        channel = await channels.open("c")
        async with channel.subscribe() as one, channel.subscribe() as two:
            for n in range(20):
                reading = [asyncio.create_task(read_names(subscription, 1)) for subscription in (one, two)]
                await channels.waits_at(n)
                await channels.waits_at(n)
                if listeners(postgres_database):
                    monkeypatch.setattr(_postgres_bell, "BELL", "elsewhere")
                await channel.publish([message(str(n))])
                assert await asyncio.gather(*reading) == [[str(n)], [str(n)]]


async def test_writers_of_many_channels_in_two_providers_do_not_lock_each_other_out(
    postgres_database: str, channels: PostgresChannels
) -> None:
    async with PostgresChannels(postgres_database) as others:
        names = [f"c{n}" for n in range(30)]
        deadlocks: LiteralString = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        before = ask(postgres_database, deadlocks)

        async def write(provider: PostgresChannels, name: str) -> None:
            channel = await provider.open(name)
            for n in range(10):
                await channel.publish([message(str(n))])

        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(write(channels, name))
            for name in reversed(names):
                tasks.create_task(write(others, name))
        for name in names:
            stored = await names_in_history(await channels.open(name))
            assert sorted(stored, key=str) == [str(n) for n in range(10) for _ in range(2)]
    assert ask(postgres_database, deadlocks) == before


# -- writes that share a statement


async def test_what_one_call_is_refused_for_touches_no_other(channels: PostgresChannels) -> None:
    channel, other = await channels.open("a"), await channels.open("b")
    [serial] = await channel.publish([message("open", "", extras=OPEN)])
    [fixed] = await channel.publish([message("fixed", {"n": 1})])
    await channel.raise_fence(5)
    results = await asyncio.gather(
        channel.publish([message("late")], epoch=4),
        channel.append(serial, "1", OPEN, seq=1, epoch=5),
        channel.append(serial, "3", OPEN, seq=3),
        channel.append(fixed, "x", None, seq=1),
        channel.append("00000000000099-000@aaaaaaaaaa:000", "x", None, seq=1),
        channel.raise_fence(3),
        channel.raise_fence(7),
        channel.publish([message("stale by now")], epoch=6),
        channel.append(serial, "2", OPEN, seq=2, epoch=7),
        other.publish([message("elsewhere"), message("elsewhere too")], epoch=1),
        return_exceptions=True,
    )
    kinds = [type(result) for result in results]
    assert kinds == [
        *(FencedError, str, AppendGapError, InvalidInputError, UnknownMessageError),
        *(FencedError, type(None), FencedError, str, list),
    ]
    assert [item.data for item in (await channel.history()).items] == [{"n": 1}, "12"]
    assert await names_in_history(other) == ["elsewhere", "elsewhere too"]
    # Positions that were taken and not used are given back: versions go on where they were.
    assert isinstance(results[1], str)
    assert isinstance(results[8], str)
    [newest] = await channel.publish([message("newest", idempotency_id="n")])
    assert [int(version[:14]) for version in (results[1], results[8], newest)] == [3, 4, 5]
    assert await channel.publish([message("newest", idempotency_id="n")]) == [newest]
    with pytest.raises(FencedError):
        await channel.publish([message(), message()], epoch=1)
    [next_one] = await channel.publish([message("next")])
    assert int(next_one[:14]) == 6


FAILS: LiteralString = """
CREATE SEQUENCE failures;
CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF new.name = 'poison' THEN
        RAISE EXCEPTION 'with the words: %', new.data;
    ELSIF new.name = 'conflict' AND nextval('failures') < 4 OR new.name = 'always' THEN
        RAISE serialization_failure;
    END IF;
    RETURN new;
END $$;
CREATE TRIGGER fail BEFORE INSERT ON stepwell_channel_message FOR EACH ROW EXECUTE FUNCTION fail()
"""


async def test_one_call_that_the_server_cannot_do_fails_alone(
    postgres_database: str, channels: PostgresChannels
) -> None:
    channel = await channels.open("c")
    await channel.publish([message("first")])
    ask(postgres_database, FAILS)
    good, bad, better = await asyncio.gather(
        channel.publish([message("good")]),
        channel.publish([message("fine"), message("poison", "secret")]),
        channel.publish([message("better")]),
        return_exceptions=True,
    )
    assert isinstance(good, list)
    assert isinstance(better, list)
    assert isinstance(bad, ChannelError)
    assert not bad.retryable
    assert "secret" not in "".join(traceback.format_exception(bad))
    assert await names_in_history(channel) == ["first", "good", "better"]


async def test_conflicts_are_settled_inside(postgres_database: str, channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    await channel.publish([message("first")])
    ask(postgres_database, FAILS)
    await channel.publish([message("conflict")])
    with pytest.raises(ChannelBusyError):
        await channel.publish([message("always")])
    assert await names_in_history(channel) == ["first", "conflict"]


async def test_what_was_called_before_the_end_is_done_and_told(postgres_database: str) -> None:
    async with (
        Watched(postgres_database, poll=NEVER) as others,
        (await others.open("c")).subscribe() as subscription,
    ):
        for n in range(5):
            reading = asyncio.create_task(read_names(subscription, 1))
            await others.waits_at(n)
            channels = PostgresChannels(postgres_database)
            writing = asyncio.create_task((await channels.open("c")).publish([message(str(n))]))
            await asyncio.sleep(0)
            await channels.close()
            assert len(await writing) == 1
            assert await reading == [str(n)]


async def test_many_and_large_calls_at_once(channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    calls = [channel.publish([message(f"{n}.{m}") for m in range(400)]) for n in range(6)]
    calls += [channel.publish([message(f"large {n}", "x" * 1_500_000)]) for n in range(6)]
    serials = [serial for serials in await asyncio.gather(*calls) for serial in serials]
    assert serials == sorted(set(serials))
    assert await names_in_history(channel) == [
        *(f"{n}.{m}" for n in range(6) for m in range(400)),
        *(f"large {n}" for n in range(6)),
    ]


async def test_appends_that_are_not_waited_for_keep_their_order(channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    [serial] = await channel.publish([message("m", "", extras=OPEN)])
    appends = [channel.append(serial, f"{seq} ", OPEN if seq < 500 else CLOSED, seq=seq) for seq in range(1, 501)]
    versions = await asyncio.gather(*appends)
    assert versions == sorted(set(versions))
    assert (await channel.history()).items[0].data == "".join(f"{seq} " for seq in range(1, 501))


async def test_extras_of_the_last_append_that_had_some_hold(channels: PostgresChannels) -> None:
    changed = make_extras({"run-id": "another", "stream": "true", "status": "streaming"}, {"k": "v"})
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        [serial] = await channel.publish([message("m", "", extras=OPEN)])
        for seq, extras in enumerate([OPEN, changed, None, OPEN, changed, None], start=1):
            await channel.append(serial, str(seq), extras, seq=seq)
        items = await subscription.read()
        assert [item.extras for item in items if isinstance(item, Delivery)] == [
            *(OPEN, OPEN, changed, changed),
            *(OPEN, changed, changed),
        ]
    assert (await channel.history()).items[0].extras == changed
    await channel.append(serial, "7", {}, seq=7)
    [item] = (await channel.history()).items
    assert (item.data, item.extras) == ("1234567", {})


async def test_the_appends_of_a_closed_stream_are_freed(postgres_database: str, channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    serials = await channel.publish([message("a", "", extras=OPEN), message("b", "", extras=OPEN)])
    for serial in serials:
        await channel.append(serial, "x", OPEN, seq=1)
    await channel.append(serials[0], "y", CLOSED, seq=2)
    await channel.update(serials[1], "z", OPEN)
    assert ask(postgres_database, "SELECT 1 FROM stepwell_channel_append") == []
    assert ask(postgres_database, "SELECT count(*) FROM stepwell_channel_headers") == [1]


async def test_a_call_that_is_cancelled_leaves_everything_usable(channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    await channel.publish([message("first")])
    for turns in range(60):
        calls: list[asyncio.Task[Any]] = [
            asyncio.create_task(channel.publish([message(f"{turns}", idempotency_id=f"{turns}")])),
            asyncio.create_task(channel.history()),
            asyncio.create_task(channels.delete("none")),
        ]
        for _ in range(turns % 15):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    await channel.publish([message(f"{turns}", idempotency_id=f"{turns}") for turns in range(60)])
    stored = await names_in_history(channel)
    assert sorted(stored, key=str) == sorted(["first", *(str(n) for n in range(60))])


async def test_a_snapshot_comes_in_pages(channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    for n in range(3):
        await channel.publish([message(f"{n}.{m}", "x" * 100) for m in range(250)])
    other = Cursor("1@aaaaaaaaaa")
    async with channel.subscribe(after=other) as subscription:
        assert isinstance((await subscription.read(1))[0], Gap)
        names = await read_names(subscription, 750)
    assert names == [f"{n}.{m}" for n in range(3) for m in range(250)]


# -- what goes


async def test_ephemeral_messages_go_by_the_servers_clock(postgres_database: str, channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        start_ = subscription.start
    await channel.publish([message("blink", "", extras={"ephemeral": True}), message("stays")])
    async with channel.subscribe(after=start_) as subscription:
        assert await read_names(subscription, 2) == ["blink", "stays"]
    ask(postgres_database, "UPDATE stepwell_channel_message SET changed = changed - 60000")
    # Nobody has swept yet, and it is not shown any more.
    async with channel.subscribe(after=start_) as subscription:
        assert await read_names(subscription, 1) == ["stays"]
    ask(postgres_database, "UPDATE stepwell_channel SET swept = swept - 5000")
    await channel.publish([message("later")])
    assert ask(postgres_database, "SELECT count(*) FROM stepwell_channel_message") == [2]


async def test_what_a_dead_process_left_of_a_deleted_channel_is_removed_by_the_next(
    postgres_database: str, channels: PostgresChannels
) -> None:
    channel = await channels.open("c")
    [serial] = await channel.publish([message("m", "", extras=OPEN)])
    await channel.append(serial, "x", OPEN, seq=1)
    ask(postgres_database, "SELECT stepwell_channel_delete_1('c')")
    assert await names_in_history(channel) == []
    await channels.delete("whatever")
    for table in ("message", "append", "headers", "deleted"):
        query = psycopg.sql.SQL("SELECT 1 FROM {}").format(psycopg.sql.Identifier(f"stepwell_channel_{table}"))
        with psycopg.connect(postgres_database) as connection:
            assert connection.execute(query).fetchall() == []


# -- a server that goes away


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_a_server_restarted_in_the_middle_of_reads_and_writes(how: signal.Signals) -> None:
    with start_postgres(fsync="off") as server:
        async with PostgresChannels(server.url) as channels:
            channel = await channels.open("c")
            [serial] = await channel.publish([message("answer", "", extras=OPEN)])
            begun = asyncio.Event()
            refused: list[str] = []

            async def repeat(call: Callable[[], Any]) -> None:
                while True:
                    try:
                        await call()
                        return
                    except ChannelBusyError as error:
                        refused.append(error.message)
                        await asyncio.sleep(0.01)

            async def append() -> None:
                for seq in range(1, 301):
                    extras = OPEN if seq < 300 else CLOSED
                    await repeat(lambda seq=seq, extras=extras: channel.append(serial, f"{seq} ", extras, seq=seq))
                    if seq == 100:
                        begun.set()

            async def publish() -> None:
                for n in range(100):
                    await repeat(lambda n=n: channel.publish([message(str(n), idempotency_id=str(n))]))

            text = ""
            names: list[str | None] = []
            async with channel.subscribe() as subscription, asyncio.TaskGroup() as tasks:
                tasks.create_task(append())
                tasks.create_task(publish())
                await begun.wait()
                await asyncio.to_thread(server.stop, how)
                tasks.create_task(asyncio.to_thread(server.start))
                while len(names) < 100 or not text.endswith("300 "):
                    [item] = await subscription.read(1)
                    assert isinstance(item, Delivery)  # nothing is lost, so there is no gap
                    if item.serial == serial:
                        assert isinstance(item.data, str)
                        text = text + item.data if item.action == "append" else item.data
                    else:
                        names.append(item.name)
            assert text == "".join(f"{seq} " for seq in range(1, 301))
            assert names == [str(n) for n in range(100)]
            assert await names_in_history(channel) == ["answer", *names]
            assert refused
            assert not any("answer" in said or "run-id" in said for said in refused)


async def test_an_idle_connection_that_was_closed_costs_no_call(
    postgres_database: str, channels: PostgresChannels
) -> None:
    channel = await channels.open("c")
    terminate = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    for n in range(3):
        await asyncio.gather(*(channel.publish([message(str(n))]) for _ in range(3)), channel.history())
        await until(lambda: not ask(postgres_database, terminate))
    assert len(await names_in_history(channel)) == 9


async def test_a_lost_listener_is_replaced(
    postgres_database: str, channels: PostgresChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_postgres_bell, "RETRY_SECONDS", (0.3, 0.3))
    writer = await channels.open("c")
    async with Watched(postgres_database, poll=NEVER) as others:
        channel = await others.open("c")
        async with channel.subscribe() as subscription:
            for n in range(0, 6, 2):
                reading = asyncio.create_task(read_names(subscription, 2))
                await others.waits_at(n)
                await until(lambda: listeners(postgres_database))
                [pid] = listeners(postgres_database)
                ask(postgres_database, "SELECT pg_terminate_backend(%s)", pid)
                await writer.publish([message(str(n))])
                # It has looked, and nobody listens yet: what comes now is seen when somebody does.
                await others.waits_at(n + 1)
                await writer.publish([message(str(n + 1))])
                assert await reading == [str(n), str(n + 1)]


async def test_a_notification_that_is_lost_is_made_up_for(postgres_database: str) -> None:
    async with PostgresChannels(postgres_database, poll=0.05) as channels:
        channel = await channels.open("c")
        async with channel.subscribe() as subscription:
            reading = asyncio.create_task(read_names(subscription, 1))
            await until(lambda: listeners(postgres_database))
            # As from a process that dies between its commit and the notification.
            ask(postgres_database, PUBLISH_FIRST)
            assert await reading == ["first"]
            # And a deletion that nobody tells of.
            waiting = asyncio.create_task(subscription.read())
            ask(postgres_database, "DELETE FROM stepwell_channel")
            assert isinstance((await waiting)[0], Gap)


async def test_what_others_notify_disturbs_nobody(postgres_database: str) -> None:
    asked = 0

    class Counting(PostgresChannels):
        async def read(self, query: LiteralString, values: Any) -> list[Any]:
            nonlocal asked
            asked += 1
            return await super().read(query, values)

    async with Counting(postgres_database, poll=NEVER) as channels, PostgresChannels(postgres_database) as others:
        channel = await channels.open("c")
        async with channel.subscribe() as subscription:
            series = subscription.start.partition("@")[2]
            reading = asyncio.create_task(read_names(subscription, 1))
            await until(lambda: listeners(postgres_database))
            for text in ("", "nonsense", ":", ":x", ":--1", f":{'9' * 5000}", ":-2", ":999", ":-1", ":0"):
                ask(postgres_database, "SELECT pg_notify('stepwell_channel', %s)", f"{series}{text}")
            for _ in range(200):  # time for a reader that believed it to ask and ask
                await (await others.open("c")).history()
            assert asked < 50
            await (await others.open("c")).publish([message("a")])
            assert await reading == ["a"]


async def test_a_server_that_does_not_answer(unsafe_server: PostgresServer, unsafe_database: str) -> None:
    async with PostgresChannels(unsafe_database, timeout=0.2) as channels:
        channel = await channels.open("c")
        await channel.publish([message("a")])
        ours: LiteralString = (
            "SELECT pid FROM pg_stat_activity"
            " WHERE application_name = 'stepwell' AND datname = current_database() AND state = 'idle'"
        )
        await until(lambda: ask(unsafe_database, ours + " AND query LIKE '%pg_notify%'"))
        stopped = [unsafe_server.pid, *ask(unsafe_database, ours)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(ChannelBusyError):
                await channel.publish([message("b", idempotency_id="b")])
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        await channel.publish([message("b", idempotency_id="b")])
        assert await names_in_history(channel) == ["a", "b"]


async def test_a_lock_that_is_held_too_long(postgres_database: str) -> None:
    async with PostgresChannels(postgres_database, timeout=0.2) as channels:
        channel = await channels.open("c")
        await channel.publish([message("a")])
        with psycopg.connect(postgres_database) as other:
            other.execute("SELECT FROM stepwell_channel FOR UPDATE")
            with pytest.raises(ChannelBusyError, match="in time"):
                await channel.publish([message("b")])
            assert await names_in_history(channel) == ["a"]
        await channel.publish([message("b")])


async def test_a_server_without_connections_left(unsafe_database: str) -> None:
    taken: list[psycopg.Connection] = []
    async with PostgresChannels(unsafe_database) as channels:
        channel = await channels.open("c")
        with contextlib.suppress(psycopg.OperationalError):
            while True:
                taken.append(psycopg.connect(unsafe_database))
        with pytest.raises(ChannelBusyError):
            await channel.publish([message()])
        for connection in taken:
            connection.close()
        await until(
            lambda: len(ask(unsafe_database, "SELECT pid FROM pg_stat_activity WHERE datname LIKE 'test%'")) < 3
        )
        await channel.publish([message()])


# -- what is refused


async def test_a_newer_schema_is_left_alone(postgres_database: str, channels: PostgresChannels) -> None:
    await (await channels.open("c")).publish([message()])
    ask(postgres_database, "UPDATE stepwell_channel_schema SET version = 99")
    async with PostgresChannels(postgres_database) as later:
        channel = await later.open("c")
        with pytest.raises(NewerSchemaError, match="99"):
            await channel.publish([message()])
        with pytest.raises(NewerSchemaError):
            await channel.history()
    assert ask(postgres_database, "SELECT version FROM stepwell_channel_schema") == [99]


async def test_tables_that_went_away_are_said_so(postgres_database: str, channels: PostgresChannels) -> None:
    channel = await channels.open("c")
    await channel.publish([message()])
    ask(postgres_database, "DROP TABLE stepwell_channel_message, stepwell_channel_append")
    with pytest.raises(ChannelError, match="tables") as caught:
        await channel.publish([message("secret", "secret")])
    assert not caught.value.retryable


async def test_a_user_without_rights(postgres_database: str, channels: PostgresChannels) -> None:
    ask(postgres_database, "DROP ROLE IF EXISTS guest")
    ask(postgres_database, "CREATE ROLE guest LOGIN")
    try:
        async with PostgresChannels(postgres_database.replace("postgres@", "guest@")) as theirs:
            ask(postgres_database, "REVOKE ALL ON SCHEMA public FROM public")
            for grant in ("REVOKE ALL ON SCHEMA public FROM guest", "GRANT USAGE ON SCHEMA public TO guest"):
                ask(postgres_database, grant)
                with pytest.raises(ChannelError, match="grant it") as caught:
                    await (await theirs.open("c")).publish([message()])
                assert not caught.value.retryable
            channel = await channels.open("c")
            await channel.publish([message("a")])
            ask(postgres_database, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO guest")
            await (await theirs.open("c")).publish([message("b")])
            assert await names_in_history(channel) == ["a", "b"]
            await theirs.delete("c")
    finally:
        ask(postgres_database, "DROP OWNED BY guest")
        ask(postgres_database, "DROP ROLE guest")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:S3CRET@host/db?no-such-option=1",
        "postgresql://user:S3 CRET@host/db",
        "postgresql://user:S3CRET%zz@host/db",
    ],
)
def test_a_url_that_is_none_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_channels(url)
    said = "".join(traceback.format_exception(caught.value))
    assert "S3CRET" not in said.partition("Error: ")[2]
    assert "CRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says", "for_good"),
    [
        (("postgres@", "nobody:S3CRET@"), 'role "nobody" does not exist', True),
        (("/test_", "/no_such_"), "does not exist", True),
        (("postgres@127.0.0.1:", "postgres:S3CRET@127.0.0.1:no-port"), "invalid", True),
        (("postgres", "postgres"), "cannot be reached", False),
    ],
)
async def test_a_server_that_cannot_be_used_says_why(
    postgres_database: str,
    change: tuple[str, str],
    says: str,
    for_good: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    url = postgres_database.replace(*change)
    if not for_good:  # a port that nobody listens on
        url = "postgresql://postgres:S3CRET@127.0.0.1:1/x"
    async with PostgresChannels(url) as channels:
        channel = await channels.open("c")
        calls: list[Callable[[], Any]] = [
            lambda: channel.publish([message()]),
            channel.history,
            lambda: channel.subscribe().__aenter__(),
        ]
        for call in calls:
            with pytest.raises(ChannelError, match=says) as caught:
                await call()
            assert isinstance(caught.value, ChannelBusyError) is not for_good
            assert caught.value.retryable is not for_good
            assert "S3CRET" not in "".join(traceback.format_exception(caught.value))
    assert "S3CRET" not in caplog.text


async def test_what_does_not_fit_is_refused(postgres_database: str, channels: PostgresChannels) -> None:
    with pytest.raises(InvalidInputError):
        PostgresChannels(postgres_database, pool_size=2)
    channel = await channels.open("c")
    await channel.raise_fence(1)
    with pytest.raises(FencedError):
        await channel.publish([message()], epoch=-(2**70))
    [serial] = await channel.publish([message("m", "")], epoch=2**70)
    with pytest.raises(AppendGapError):
        await channel.append(serial, "x", None, seq=2**70)
    far = Cursor(f"{10**18 - 1}@{serial.partition('@')[2][:10]}")
    assert len((await channel.history(before=far)).items) == 1
