"""What channels and the transport cost, through their public API: `python -m bench.channels BENCH URL` prints it.

Each measurement runs in a process of its own, with an empty backend. What is measured is described in
docs/benchmarks.md; `CHANNEL_FIGURES` of `bench.report` says what is read from the results.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from stepwell.channels import open_channels
from stepwell.transport import AgentSession, ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Channel, H, Name, WireMessage, make_extras

__all__ = ["BENCHES"]

TOKEN = "token "
ROLL_UP = 0.02

STREAMED, REPEATS = 20_000, 5
"""Tokens of one stream, and how many streams."""
STREAMED_EACH = 2_000
"""The same without roll-up: each token is an append."""

ANSWERS, ANSWER_TOKENS = 100, 1_000
"""The conversation that is joined."""

APPEND_SECONDS = 1.5
RATE, LATENCY_SECONDS, PEERS = 200, 5.0, 2
"""Messages a second, of all writers together; for how long; processes, each of which writes and reads."""

SESSIONS = 500
TURNS = 500
TURN_TOKENS = 50

Result = dict[str, Any]
Measured = Callable[[str], Awaitable[Result]]


# --- throughput -------------------------------------------------------------------------------------------------------


async def append(url: str) -> Result:
    """Appends a second: one writer, and fifty, each with a stream on a channel of its own, each awaiting its append."""
    result: Result = {}
    async with open_channels(url) as channels:
        for writers in (1, 50):
            opened = [await channels.open(f"append:{writers}:{number}") for number in range(writers)]
            rate, processor = await _appends(opened)
            result[f"appends_{writers}"], result[f"append_{writers}_cpu_us"] = round(rate), round(processor * 1e6, 1)
    return result


async def _appends(channels: list[Channel]) -> tuple[float, float]:
    """How many a second, and seconds of this process's processors for one."""
    extras = make_extras({H.STREAM: "true", H.STATUS: "streaming", H.STREAM_ID: "s", H.RUN_ID: "run"}, {"type": "text"})
    end = 0.0

    async def write(channel: Channel) -> int:
        [serial] = await channel.publish([WireMessage(name=Name.OUTPUT, data="", extras=extras)])
        count = 0
        while time.perf_counter() < end or not count:
            count += 1
            await channel.append(serial, TOKEN, extras, seq=count)
        return count

    end = time.perf_counter() + 0.3  # connections, prepared statements
    await asyncio.gather(*map(write, channels))
    clock = _Clock()
    end = time.perf_counter() + APPEND_SECONDS
    count = sum(await asyncio.gather(*map(write, channels)))
    wall, cpu = clock.read()
    return count / wall, cpu / count


# --- latency ----------------------------------------------------------------------------------------------------------


async def latency(url: str) -> Result:
    """Milliseconds from the call of `publish` to the delivery at another process, both of which write and read."""
    if url.startswith("memory:"):
        async with open_channels(url) as channels:
            channel = await channels.open("latency")
            found = await asyncio.gather(*(_talk(channel, str(number), None) for number in range(PEERS)))
        return _latencies([value for values in found for value in values])
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.channels", "_talk", url, str(number)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(PEERS)
    ]
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))
    return _latencies([value for output, _ in outputs for value in json.loads(output)])


async def _talk_alone(url: str) -> list[float]:
    """One of the processes."""
    async with open_channels(url) as channels:
        return await _talk(await channels.open("latency"), sys.argv[3], sys.stdin.readline)


async def _talk(channel: Channel, me: str, go: Callable[[], str] | None) -> list[float]:
    pause = PEERS / RATE
    count = int(LATENCY_SECONDS / pause)
    found: list[float] = []
    async with channel.subscribe() as subscription:
        if go is not None:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.to_thread(go)

        async def read() -> None:
            while len(found) < count * (PEERS - 1):
                items = await subscription.read()
                now = time.monotonic_ns()  # one clock for all processes of this machine
                found.extend((now - int(item.data)) / 1e6 for item in items if item.name != me)

        reading = asyncio.create_task(read())
        began = time.monotonic() + int(me) * pause / PEERS
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number * pause - time.monotonic()))
            await channel.publish([WireMessage(name=me, data=str(time.monotonic_ns()))])
        async with asyncio.timeout(30):
            await reading
    return found


def _latencies(found: list[float]) -> Result:
    cuts = statistics.quantiles(found, n=100)
    return {
        "latency_p50_ms": round(cuts[49], 3),
        "latency_p99_ms": round(cuts[98], 3),
        "latency_max_ms": round(max(found), 3),
        "n": len(found),
    }


# --- tokens -----------------------------------------------------------------------------------------------------------


async def token(url: str) -> Result:
    """Microseconds a token, given back to back, until it is stored, and until a client's view shows it."""
    result: Result = {}
    async with open_channels(url) as channels:
        for key, tokens, roll_up in (("", STREAMED, ROLL_UP), ("_each", STREAMED_EACH, 0.0)):
            for what, stream in (("stored", _stored), ("view", _viewed)):
                times: list[tuple[float, float]] = []
                for number in range(REPEATS + 1):  # the first warms up
                    channel = await channels.open(f"token:{what}{key}:{number}")
                    gc.collect()
                    times.append(await stream(channel, tokens, roll_up))
                wall, cpu = (statistics.median(found) for found in zip(*times[1:], strict=True))
                result[f"{what}{key}_us"] = round(wall / tokens * 1e6, 2)
                result[f"{what}{key}_cpu_us"] = round(cpu / tokens * 1e6, 2)
    return result


async def _stored(channel: Channel, tokens: int, roll_up: float) -> tuple[float, float]:
    async with ClientSession(channel, UIMessageCodec()) as client:
        asked = await client.view.send(client.codec.create_user_message("go"))
    async with _step(channel, asked.to_invocation(), roll_up) as step:
        clock = _Clock()
        await step.pipe(_chunks(tokens))
        return clock.read()


async def _viewed(channel: Channel, tokens: int, roll_up: float) -> tuple[float, float]:
    async with ClientSession(channel, UIMessageCodec()) as client:
        asked = await client.view.send(client.codec.create_user_message("go"))
        async with _step(channel, asked.to_invocation(), roll_up) as step:
            changes = client.view.changes()
            shown = asyncio.create_task(_watch(client, changes, tokens * len(TOKEN)))
            await asyncio.sleep(0)
            clock = _Clock()
            await step.pipe(_chunks(tokens))
            await shown
            return clock.read()


async def _watch(client: ClientSession[Any, Any], changes: AsyncIterator[Any], length: int) -> None:
    """Read the view at every change, until the answer is whole."""
    async with asyncio.timeout(120):
        while _shown(client) < length:
            await anext(changes)


def _shown(client: ClientSession[Any, Any]) -> int:
    messages = client.view.messages
    if len(messages) < 2:
        return 0
    return sum(len(part["text"]) for part in messages[-1].message["parts"] if part["type"] == "text")


@asynccontextmanager
async def _step(channel: Channel, invocation: Any, roll_up: float) -> AsyncIterator[Any]:
    async with AgentSession(channel, UIMessageCodec(), roll_up=roll_up) as session:
        run = session.create_run(invocation)
        await run.start()
        async with run.create_step() as step:
            yield step
        await run.end("complete")


def _chunks(tokens: int) -> Iterator[dict[str, Any]]:
    """What a unit says: one text."""
    yield {"type": "start"}
    yield {"type": "start-step"}
    yield {"type": "text-start", "id": "t"}
    for _ in range(tokens):
        yield {"type": "text-delta", "id": "t", "delta": TOKEN}
    yield {"type": "text-end", "id": "t"}
    yield {"type": "finish-step"}
    yield {"type": "finish", "finishReason": "stop"}


class _Clock:
    """Seconds of the wall and of this process's processors."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


# --- late join --------------------------------------------------------------------------------------------------------


async def join(url: str) -> Result:
    """Milliseconds from nothing to a view of the whole conversation, and to its newest ten messages."""
    result: Result = {}
    async with open_channels(url) as channels:
        channel = await channels.open("join")
        await _converse(channel, ANSWERS, ANSWER_TOKENS)
        for key, page, limit in (("join", 100, sys.maxsize), ("join_1000", 1_000, sys.maxsize), ("first", 100, 10)):
            times: list[tuple[float, float]] = []
            for _ in range(16):
                gc.collect()
                clock = _Clock()
                async with ClientSession(channel, UIMessageCodec(), history_page=page) as client:
                    await client.view.load_older(limit)
                    times.append(clock.read())
                    messages = client.view.messages
                    assert len(messages) == min(limit, 2 * ANSWERS), len(messages)
                    text = messages[-1].message["parts"][-1]["text"]
                    assert len(text) == ANSWER_TOKENS * len(TOKEN)
            wall, cpu = (statistics.median(found) for found in zip(*times[1:], strict=True))
            result[f"{key}_ms"], result[f"{key}_cpu_ms"] = round(wall * 1e3, 2), round(cpu * 1e3, 2)
        count = 0
        page = await channel.history(limit=1000)
        while True:
            count += len(page.items)
            if page.next is None:
                break
            page = await channel.history(before=page.next, limit=1000)
        result["messages"] = count
    return result


async def _converse(channel: Channel, turns: int, tokens: int) -> None:
    """Question and answer, so many times."""
    async with (
        ClientSession(channel, UIMessageCodec()) as client,
        AgentSession(channel, UIMessageCodec(), roll_up=ROLL_UP) as session,
    ):
        changes = client.view.changes()
        for number in range(turns):
            asked = await client.view.send(client.codec.create_user_message(f"Question {number}"))
            run = session.create_run(asked.to_invocation())
            await run.start()
            async with run.create_step() as step:
                await step.pipe(_chunks(tokens))
            await run.end("complete")
            while [run.status for run in client.view.runs[-1:]] != ["complete"]:
                await anext(changes)


# --- memory and disk --------------------------------------------------------------------------------------------------


async def idle(url: str) -> Result:
    """KB of this process for each session that is connected and does nothing, on channels with one turn each."""
    result: Result = {}
    async with open_channels(url) as channels:
        names = [await channels.open(f"idle:{number}") for number in range(SESSIONS)]
        for channel in names:
            await _converse(channel, 1, TURN_TOKENS)
        # What every first session brings: imports, connections, prepared statements.
        for kind in ("client", "agent"):
            async with AsyncExitStack() as stack:
                await _connect(stack, kind, names[:10])
        async with AsyncExitStack() as stack:
            for kind in ("client", "agent"):  # both stay: what one kind frees is not to be taken by the other
                before = _resident()
                await _connect(stack, kind, names)
                await asyncio.sleep(0.5)
                result[f"{kind}_kb"] = round((_resident() - before) / SESSIONS, 2)
    return result


async def _connect(stack: AsyncExitStack, kind: str, channels: list[Channel]) -> None:
    for channel in channels:
        if kind == "agent":
            await stack.enter_async_context(AgentSession(channel, UIMessageCodec()))
        else:
            client = await stack.enter_async_context(ClientSession(channel, UIMessageCodec()))
            await client.view.load_older(10)


def _resident() -> float:
    """KB of this process in memory, after a collection."""
    gc.collect()
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


async def turn_bytes(url: str) -> Result:
    """Bytes of a one-unit turn in the channel's log: the file, its log folded, over its turns."""
    path = Path(url.removeprefix("sqlite:///"))
    result: Result = {}
    async with open_channels(url) as channels:
        first = _size(path)
        for number in range(TURNS):
            await _converse(await channels.open(f"turn:{number}"), 1, TURN_TOKENS)
        alone = _size(path)
        await _converse(await channels.open("turns"), TURNS, TURN_TOKENS)
        result["turn_alone_bytes"] = round((alone - first) / TURNS)
        result["turn_bytes"] = round((_size(path) - alone) / TURNS)
        result["text_bytes"] = TURN_TOKENS * len(TOKEN)
    return result


def _size(path: Path) -> int:
    with closing(sqlite3.connect(path, timeout=5)) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
        [pages], [size] = (connection.execute(f"pragma {name}").fetchone() for name in ("page_count", "page_size"))
        return pages * size


BENCHES: dict[str, Measured] = {
    "append": append,
    "latency": latency,
    "token": token,
    "join": join,
    "idle": idle,
    "turn_bytes": turn_bytes,
}


def main() -> None:
    """Measure one thing."""
    bench, url = sys.argv[1:3]
    measured: Callable[[str], Awaitable[Any]] = _talk_alone if bench == "_talk" else BENCHES[bench]
    sys.stdout.write(json.dumps(asyncio.run(measured(url))) + "\n")  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
