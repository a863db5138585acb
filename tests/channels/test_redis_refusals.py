"""What channels in Redis say when the server refuses, and that they say nothing they should not."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from redis_kit import do, server_that_says
from servers import RedisServer, start_redis
from stepwell.channels import open_channels
from stepwell.channels.redis import RedisChannel, RedisChannels
from stepwell.errors import ChannelBusyError, ChannelDataError, ChannelError, InvalidInputError
from stepwell.wire import WireMessage, make_extras

pytestmark = pytest.mark.anyio

OPEN = make_extras({"run-id": "r", "stream": "true", "status": "streaming"})
CLOSED = make_extras({"run-id": "r", "stream": "true", "status": "complete"})


@pytest.fixture
def own_server() -> Generator[RedisServer]:
    with start_redis() as server:
        yield server


def message(name: str, data: Any = None, **fields: Any) -> WireMessage:
    return WireMessage(name=name, data=data, **fields)


async def names_in_history(channel: RedisChannel) -> list[str | None]:
    return [item.name for item in reversed((await channel.history()).items)]


async def test_a_replica_takes_no_writes(own_server: RedisServer) -> None:
    def connections() -> set[bytes]:
        clients = do(own_server, "CLIENT", "LIST").splitlines()
        return {line.split()[0] for line in clients if b"name=ours " in line}

    async with RedisChannels(own_server.url + "?client_name=ours") as channels:
        channel = await channels.open("c")
        await channel.publish([message("a")])
        [before] = connections()
        do(own_server, "REPLICAOF", "127.0.0.1", "1")
        for _ in range(2):
            with pytest.raises(ChannelBusyError, match="primary"):
                await channel.publish([message("b")])
        assert before not in connections()  # its name may lead to another server by now
        assert await names_in_history(channel) == ["a"]
        do(own_server, "REPLICAOF", "NO", "ONE")
        await channel.publish([message("b")])
        assert await names_in_history(channel) == ["a", "b"]


async def test_a_server_out_of_memory_stores_nothing(own_server: RedisServer) -> None:
    async with RedisChannels(own_server.url) as channels:
        channel = await channels.open("c")
        [serial] = await channel.publish([message("a", "text", extras=OPEN)])
        await channel.append(serial, "!", OPEN, seq=1)
        do(own_server, "CONFIG", "SET", "maxmemory", "1")
        for call in (
            lambda: channel.publish([message("b")]),
            lambda: channel.append(serial, "x", CLOSED, seq=2),
            lambda: channel.update(serial, "x", CLOSED),
            lambda: channel.raise_fence(7),
        ):
            with pytest.raises(ChannelError, match="maxmemory") as caught:
                await call()
            assert not isinstance(caught.value, ChannelBusyError)
        do(own_server, "CONFIG", "SET", "maxmemory", "0")
        assert [item.data for item in (await channel.history()).items] == ["text!"]
        await channel.append(serial, "?", CLOSED, seq=2, epoch=1)
        assert [item.data for item in (await channel.history()).items] == ["text!?"]


async def test_a_wrong_password_is_not_repeated(own_server: RedisServer) -> None:
    do(own_server, "CONFIG", "SET", "requirepass", "swordfish")
    url = own_server.url.replace("redis://", "redis://:hunter2@")
    async with RedisChannels(url) as channels:
        with pytest.raises(ChannelError, match="password") as caught:
            await (await channels.open("c")).publish([message("secret name")])
        assert not isinstance(caught.value, ChannelBusyError)
        assert "hunter2" not in f"{caught.value!r}{caught.value.__cause__!r}"


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        ("LOADING Redis is loading the dataset in memory", ChannelBusyError, "loading"),
        ("CLUSTERDOWN The cluster is down", ChannelBusyError, "for now"),
        ("NOREPLICAS Not enough good replicas to write.", ChannelBusyError, "NOREPLICAS"),
        ("BUSY Redis is busy running a script.", ChannelBusyError, "BUSY"),
        ("MISCONF Errors writing to the AOF file", ChannelBusyError, "disk"),
        ("MOVED 3999 127.0.0.1:6381", ChannelError, "cluster"),
        ("NOPERM this user has no permissions to run the 'evalsha' command", ChannelError, "permit"),
        ("WRONGTYPE Operation against a key", ChannelDataError, "noeviction"),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'the text'", ChannelError, "Redis 7"),
    ],
)
async def test_what_errors_mean(answer: str, kind: type[ChannelError], says: str) -> None:
    async with server_that_says(answer) as url, RedisChannels(url) as channels:
        with pytest.raises(ChannelError, match=says) as caught:
            await (await channels.open("c")).publish([message("the name", "the text")])
        assert type(caught.value) is kind
        assert "the text" not in repr(caught.value)


async def test_damaged_keys(own_server: RedisServer) -> None:
    async with RedisChannels(own_server.url) as channels:
        channel = await channels.open("c")
        await channel.publish([message("a", extras=make_extras({"run-id": "r"}))])
        do(own_server, "DEL", "stepwell:{c}:ext")
        with pytest.raises(ChannelDataError):
            await channel.history()
        do(own_server, "DEL", "stepwell:{c}")
        with pytest.raises(ChannelDataError, match="noeviction"):
            await channel.publish([message("b")])


@pytest.mark.parametrize("url", ["redis://:hunter2@host:port/0", "redis://:hunter2@host/?no_such_option=1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_channels(url)
    assert "hunter2" not in f"{caught.value!r}{caught.value.__cause__!r}"


@pytest.mark.parametrize("prefix", ["", "a{b", "a b", "é"])
def test_a_prefix_that_is_none(prefix: str) -> None:
    with pytest.raises(InvalidInputError):
        RedisChannels("redis://localhost", prefix=prefix)
