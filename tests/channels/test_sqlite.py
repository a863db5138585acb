"""What only channels in an SQLite file have: processes, kills, other people's files, an owner shared with a store."""

# ruff: noqa: ASYNC240 - small files in a test hold up nobody

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.channels import open_channels
from stepwell.channels.sqlite import SqliteChannels
from stepwell.errors import (
    ChannelBusyError,
    ChannelDataError,
    ChannelError,
    FencedError,
    InvalidInputError,
    NewerSchemaError,
)
from stepwell.sessions import Commit, SqliteStore
from stepwell.testing import FakeClock
from stepwell.testing._channel_base import message, stream, stream_extras, until, whole_history
from stepwell.testing._channel_reader import View
from stepwell.testing._store_base import OWNER, TTL, make_head
from stepwell.wire import Delivery, WireMessage

pytestmark = pytest.mark.anyio

WRITER = """
import asyncio, sys
from stepwell.channels.sqlite import SqliteChannels
from stepwell.testing._channel_base import message, stream, stream_extras

async def main(path, who, count):
    async with SqliteChannels(path, busy_timeout=30) as channels:
        channel = await channels.open("shared")
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range(count):
            [serial] = await channel.publish([stream(idempotency_id=f"{who}.{n}")])
            await channel.append(serial, f"{who}.", stream_extras(), seq=1)
            await channel.append(serial, f"{n}", stream_extras("complete"), seq=2)
            print(n, flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""

LATENCY = """
import asyncio, sys, time
from stepwell.channels.sqlite import SqliteChannels
from stepwell.testing._channel_base import message

async def main(path):
    async with SqliteChannels(path) as channels:
        channel = await channels.open("shared")
        print("ready", flush=True)
        sys.stdin.readline()
        for n in range(100):
            await channel.publish([message({"at": time.time()})])
            await asyncio.sleep(0.005 + 0.0007 * (n % 30))

asyncio.run(main(sys.argv[1]))
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process, which waits for a line before it begins."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "channels.db"


@pytest.fixture
async def channels(path: Path) -> AsyncIterator[SqliteChannels]:
    async with SqliteChannels(path) as channels:
        yield channels


# --- several processes


async def test_two_processes_write_and_readers_see_the_same_order(channels: SqliteChannels, path: Path) -> None:
    count = 60
    channel = await channels.open("shared")
    async with channel.subscribe() as subscription:
        processes = [await asyncio.to_thread(start, WRITER, path, who, count) for who in "ab"]
        for process in processes:
            go(process)
        # One's own commits and the others' notice each other all the time.
        for n in range(count):
            [serial] = await channel.publish([stream()])
            await channel.append(serial, f"c.{n}", stream_extras("complete"), seq=1)
        view = View()
        complete = {f"{who}.{n}" for who in "abc" for n in range(count)}
        await until(view, subscription, lambda view: set(view.texts().values()) == complete)
    for process in processes:
        await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
    history = await whole_history(channel)
    assert view.texts() == {item.serial: item.data for item in history}
    assert list(view.texts()) == [item.serial for item in history]
    for who in "abc":  # what one writer wrote is in its order
        mine = [item.data for item in history if str(item.data).startswith(who)]
        assert mine == [f"{who}.{n}" for n in range(count)]


async def test_what_another_process_writes_is_noticed_soon(channels: SqliteChannels, path: Path) -> None:
    channel = await channels.open("shared")
    async with channel.subscribe() as subscription:
        process = await asyncio.to_thread(start, LATENCY, path)
        go(process)
        delays: list[float] = []
        while len(delays) < 100:
            for item in await subscription.read():
                assert isinstance(item, Delivery)
                assert isinstance(item.data, dict)
                delays.append(time.time() - item.data["at"])
        await asyncio.to_thread(process.communicate)
    # Within 50 ms is what is claimed; the median has no other work of the machine in it.
    assert sorted(delays)[50] < 0.05


@pytest.mark.parametrize("kill", range(4))
async def test_a_killed_writer_leaves_whole_messages_and_repeats_are_known(path: Path, kill: int) -> None:
    process = await asyncio.to_thread(start, WRITER, path, "w", 10_000)
    assert process.stdout is not None
    go(process)
    for _ in range(1 + 37 * kill):
        acknowledged = int(await asyncio.to_thread(process.stdout.readline))
    process.send_signal(signal.SIGKILL)
    rest = (await asyncio.to_thread(process.stdout.read)).split("\n")[:-1]
    await asyncio.to_thread(process.communicate)
    acknowledged = max([acknowledged, *map(int, rest)])
    async with SqliteChannels(path) as channels:
        channel = await channels.open("shared")
        history = await whole_history(channel, limit=1000)
        assert acknowledged + 1 <= len(history) <= acknowledged + 2
        for n, item in enumerate(history[: acknowledged + 1]):
            assert (item.data, item.extras) == (f"w.{n}", stream_extras("complete"))
        # Who repeats everything after the crash changes nothing but what was lost.
        for n in range(max(0, acknowledged - 3), acknowledged + 2):
            [serial] = await channel.publish([stream(idempotency_id=f"w.{n}")])
            await channel.append(serial, "w.", stream_extras(), seq=1)
            await channel.append(serial, f"{n}", stream_extras("complete"), seq=2)
        data = [item.data for item in await whole_history(channel, limit=1000)]
        assert data == [f"w.{n}" for n in range(acknowledged + 2)]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("SELECT count(*) FROM channel_append").fetchone() == (0,)
    connection.close()


# --- the file


async def test_a_file_of_another_program_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ChannelDataError, match="another program"):
        SqliteChannels(path)
    assert path.read_bytes() == before
    path.write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(ChannelDataError):
        SqliteChannels(path)


async def test_a_newer_schema_is_refused(path: Path) -> None:
    await SqliteChannels(path).close()
    connection = sqlite3.connect(path)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    connection.execute(f"PRAGMA user_version={version + (1 << 8)}")
    connection.close()
    with pytest.raises(NewerSchemaError, match="channel tables"):
        SqliteChannels(path)


async def test_a_missing_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="does not exist"):
        SqliteChannels(tmp_path / "no" / "c.db")


async def test_a_locked_file_is_busy_and_readers_wait_for_it(path: Path) -> None:
    async with SqliteChannels(path, busy_timeout=0.05) as channels:
        channel = await channels.open("c")
        async with channel.subscribe() as subscription:
            other = sqlite3.connect(path, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ChannelBusyError) as caught:
                await channel.publish([message("a")])
            assert caught.value.retryable
            other.execute("ROLLBACK")
            other.close()
            await channel.publish([message("b")])
            [item] = await subscription.read()
            assert isinstance(item, Delivery)
            assert item.data == "b"


async def test_a_deleted_channel_leaves_nothing(channels: SqliteChannels, path: Path) -> None:
    channel = await channels.open("c")
    [serial] = await channel.publish([stream(idempotency_id="k")])
    await channel.append(serial, "x", stream_extras(), seq=1)
    await channels.delete("c")
    connection = sqlite3.connect(path)
    for table in ("channel", "channel_message", "channel_append", "channel_headers"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    connection.close()


async def test_ephemeral_messages_go_from_the_file(path: Path) -> None:
    clock = FakeClock()
    async with SqliteChannels(path, clock=clock) as channels:
        channel = await channels.open("c")
        extras = {**stream_extras(), "ephemeral": True}
        [serial] = await channel.publish([WireMessage(name="x", data="", extras=extras)])
        await channel.append(serial, "more", extras, seq=1)
        await clock.advance(61.0)
        await channel.publish([message("a")])
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name, data FROM channel_message").fetchall() == [("ai-output", "a")]
    connection.close()


async def test_headers_are_stored_once(channels: SqliteChannels, path: Path) -> None:
    channel = await channels.open("c")
    for n in range(5):
        [serial] = await channel.publish([stream()])
        await channel.append(serial, f"{n}", stream_extras("complete"), seq=1)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM channel_headers").fetchone() == (1,)
    connection.close()


async def test_headers_of_the_same_hash_are_told_apart(
    channels: SqliteChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.channels._sqlite_rows.blake2b", lambda *_, **__: Same())
    channel = await channels.open("c")
    for step in ("a", "b", "a"):
        await channel.publish([message(extras=stream_extras(step=step))])
    assert [item.extras for item in await whole_history(channel)] == [stream_extras(step=step) for step in "aba"]


class Same:
    def digest(self) -> bytes:
        return b"same"


# --- one owner


async def test_a_store_and_channels_of_one_file_share_one_transaction(path: Path) -> None:
    store, channels = SqliteStore(path), SqliteChannels(path)
    owner = channels.owner()
    assert store._owner is owner
    seen: list[str] = []
    owner._main.raw.set_trace_callback(seen.append)
    channel = await channels.open("c")
    await asyncio.gather(
        store.create(Commit(head=make_head("s")), owner=OWNER, ttl=TTL),
        channel.publish([message("a")]),
        (await channels.open("d")).publish([message("b")]),
    )
    owner._main.raw.set_trace_callback(None)
    assert [statement for statement in seen if statement.startswith(("BEGIN", "COMMIT"))] == [
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]
    await store.close()
    assert (await channel.history()).items[0].data == "a"
    await channels.close()
    assert not path.with_name("channels.db-wal").exists()


async def test_a_refused_write_does_not_undo_those_beside_it(channels: SqliteChannels) -> None:
    channel = await channels.open("c")
    await channel.raise_fence(5)
    results: list[Any] = await asyncio.gather(
        channel.publish([message("a")], epoch=5),
        channel.publish([message("stale")], epoch=4),
        channel.publish([message("b")]),
        return_exceptions=True,
    )
    assert isinstance(results[1], FencedError)
    assert [item.data for item in await whole_history(channel)] == ["a", "b"]


async def test_an_epoch_that_cannot_be_stored_is_refused(channels: SqliteChannels) -> None:
    channel = await channels.open("c")
    for epoch in (-1, 2**53, 2**70):
        with pytest.raises(InvalidInputError):
            await channel.raise_fence(epoch)


async def test_long_replays_are_read_beside_the_loop(channels: SqliteChannels) -> None:
    channel = await channels.open("c")
    async with channel.subscribe() as subscription:
        start = subscription.start
    for n in range(3):
        await channel.publish([message(f"{n}.{i}") for i in range(400)])
    async with channel.subscribe(after=start) as subscription:
        view = View()
        await until(view, subscription, lambda view: len(view.texts()) == 1200)
    assert [item.data for item in view.taken] == [f"{n}.{i}" for n in range(3) for i in range(400)]
    assert len(await whole_history(channel, limit=1000)) == 1200


# --- by URL


async def test_by_url(tmp_path: Path) -> None:
    async with open_channels(f"sqlite:///{tmp_path}/a.db?synchronous=full", retention=5.0) as channels:
        assert isinstance(channels, SqliteChannels)
        assert channels.retention == 5.0
        await (await channels.open("c")).publish([message("a")])
    assert open_channels(channels) is channels
    for wrong in ("sqlite:", "sqlite://x.db", "sqlite:///:memory:", "sqlite:///a.db?x=1", "file:///x", "memory:", ""):
        with pytest.raises(InvalidInputError, match="Channels are"):
            open_channels(wrong)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stepwell.channels.redis", None)
    monkeypatch.setitem(sys.modules, "stepwell.channels.postgres", None)
    monkeypatch.setitem(sys.modules, "stepwell.channels.ably", None)
    for url, extra in (
        ("redis://h", "redis"),
        ("rediss://h", "redis"),
        ("postgresql://h/d", "postgres"),
        ("postgres://h/d", "postgres"),
        ("ably:key", "ably"),
    ):
        with pytest.raises(InvalidInputError, match=rf"pip install 'stepwell\[{extra}\]'"):
            open_channels(url)


async def test_the_extras_of_an_append_are_those_that_were_given_with_it(tmp_path: Path) -> None:
    def streaming(**more: Any) -> dict[str, Any]:
        return {"ai": {"transport": {"status": "streaming", "run-id": "r"}, "codec": {"type": "text"}}, **more}

    changed = streaming()
    given = [streaming(), changed, changed, None, streaming(x=1), streaming(x=True), streaming()]
    async with open_channels(f"sqlite:///{tmp_path / 'channels.db'}") as channels:
        channel = await channels.open("c")
        async with channel.subscribe() as subscription:
            [serial] = await channel.publish([WireMessage(name="m", data="", extras=streaming())])
            expected: list[Any] = []
            for seq, extras in enumerate(given, 1):
                if seq == 3:
                    changed["ai"]["transport"]["run-id"] = "other"
                await channel.append(serial, "t", extras, seq=seq)
                expected.append(expected[-1] if extras is None else json.dumps(extras, sort_keys=True))
            found: list[str] = []
            while len(found) < len(given) + 1:
                found += [json.dumps(item.extras, sort_keys=True) for item in await subscription.read()]
    assert found[1:] == expected
