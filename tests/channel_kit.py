"""What the tests of channels on servers share: messages told apart by name, and writers in processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from stepwell.testing._channel_base import whole_history
from stepwell.wire import Channel, Cursor, Delivery, Gap, Subscription, WireMessage

WRITERS = """
import asyncio, sys
from stepwell.channels import open_channels
from stepwell.wire import WireMessage

async def main(url, process, writers):
    async with open_channels(url) as channels:
        channel = await channels.open("shared")
        print("ready", flush=True)
        sys.stdin.readline()
        async def write(writer):
            for n in range(50):
                await channel.publish([WireMessage(name=f"{process}.{writer}.{n}")] * (1 + n % 2))
        await asyncio.gather(*map(write, range(int(writers))))

asyncio.run(main(*sys.argv[1:]))
"""
"""So many writers on channel `shared`: 50 publish calls each, of one and two messages in turn."""

WRITE_UNTIL_KILLED = """
import asyncio, sys
from stepwell.channels import open_channels
from stepwell.wire import WireMessage

async def main(url):
    async with open_channels(url) as channels:
        channel = await channels.open("killed")
        n = 0
        while True:
            [serial] = await channel.publish([WireMessage(name=str(n), idempotency_id=str(n))])
            print(serial, flush=True)
            n += 1

asyncio.run(main(*sys.argv[1:]))
"""


def message(name: str = "m", data: Any = None, **fields: Any) -> WireMessage:
    return WireMessage(name=name, data=data, **fields)


async def read_names(subscription: Subscription, count: int) -> list[str | None]:
    """Of the next deliveries; None stands for a gap."""
    found: list[str | None] = []
    while len(found) < count:
        found += [None if isinstance(item, Gap) else item.name for item in await subscription.read()]
    return found


async def names_in_history(channel: Channel) -> list[str | None]:
    return [item.name for item in await whole_history(channel, limit=1000)]


# -- processes


def start(script: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def ready(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"


def go(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()


async def told_until_killed(url: str) -> int:
    """Kill a writer with -9; how many of its messages it was told are stored."""
    process = start(WRITE_UNTIL_KILLED, url)
    assert process.stdout is not None
    lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(50)]
    process.kill()
    lines += await asyncio.to_thread(process.stdout.readlines)
    process.communicate()
    return sum(line.endswith(":000\n") for line in lines)


async def read_by_cursor(channel: Channel, cursor: Cursor, enough: Callable[[list[Delivery]], bool]) -> list[Delivery]:
    """Read on, leaving and entering again all the time, as a client that loses its connection does."""
    found: list[Delivery] = []
    while not enough(found):
        async with channel.subscribe(after=cursor) as subscription:
            for item in await subscription.read(64):
                assert isinstance(item, Delivery)
                found.append(item)
                cursor = item.cursor
    return found


def assert_nothing_is_lost(found: Sequence[Delivery], writers: int) -> None:
    """All of `WRITERS`, each once, in the order of the serials and of each writer."""
    serials = [item.serial for item in found]
    assert serials == sorted(set(serials))
    by_writer: dict[str, list[int]] = {}
    for item in found:
        process_id, writer, n = (item.name or "").split(".")
        by_writer.setdefault(f"{process_id}.{writer}", []).append(int(n))
    assert list(by_writer.values()) == [[n for n in range(50) for _ in range(1 + n % 2)]] * writers
