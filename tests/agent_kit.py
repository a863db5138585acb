"""A stage for tests of agents: channels that record what is handed to them, and comparison with the golden traces."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel

from stepwell.channels import MemoryChannels
from stepwell.errors import ChannelBusyError, ChannelError
from stepwell.testing import FakeClock
from stepwell.transport import AgentSession, ClientSession, Invocation
from stepwell.transport.codecs import UIMessage, UIMessageCodec
from stepwell.wire import Channel, Cursor, Data, Delivery, Extras, Gap, WireMessage

T = TypeVar("T")
Operation = dict[str, Any]
CODEC = UIMessageCodec()

IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
SERIALS = re.compile(r"\d{14,}-\d{3}@[a-z0-9]{10}:\d{3}")


class Audience(Protocol):
    """Who watches a stage."""

    async def watch(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make a write, and return when everybody has seen it."""
        ...


class Recorder:
    """A channel as one participant uses it. Everything acknowledged goes into the record, and is watched."""

    def __init__(self, channel: Channel, by: str, record: list[Operation], audience: Audience | None = None) -> None:
        self._channel = channel
        self._by = by
        self._record = record
        self._audience = audience
        self.subscribe = channel.subscribe
        self.history = channel.history
        self.raise_fence = channel.raise_fence

    @property
    def name(self) -> str:
        return self._channel.name

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        serials = await self._write(lambda: self._channel.publish(messages, epoch=epoch))
        said = [{"name": one.name, "data": one.data, "extras": one.extras} for one in messages]
        self._record.append({"op": "publish", "by": self._by, "messages": said, "serials": serials})
        return serials

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        version = await self._write(lambda: self._channel.append(serial, data, extras, seq=seq, epoch=epoch))
        message = {"serial": serial, "data": data, "extras": extras}
        self._record.append({"op": "append", "by": self._by, "message": message})
        return version

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        version = await self._write(lambda: self._channel.update(serial, data, extras, epoch=epoch))
        message = {"serial": serial, "data": data, "extras": extras}
        self._record.append({"op": "update", "by": self._by, "message": message})
        return version

    async def _write(self, write: Callable[[], Awaitable[T]]) -> T:
        return await (write() if self._audience is None else self._audience.watch(write))


class Stage:
    """One conversation on a memory channel, and who takes part in it. `codec`: another than the one for UI messages."""

    def __init__(self, codec: Callable[..., Any] = UIMessageCodec) -> None:
        self.codec = codec
        self.clock = FakeClock()
        self.channels = MemoryChannels(clock=self.clock)
        self.record: list[Operation] = []
        self.audience: Audience | None = None

    async def channel(self, by: str = "") -> Recorder:
        return Recorder(await self.channels.open("conversations:golden"), by, self.record, self.audience)

    async def client(self, by: str = "user-a", **options: Any) -> ClientSession[UIMessage, Any]:
        return ClientSession(await self.channel(by), self.codec(), client_id=by, clock=self.clock, **options)

    async def agent(self, by: str = "agent-1", **options: Any) -> AgentSession[UIMessage, Any]:
        return agent_on(await self.channel(by), self.clock, by, codec=self.codec, **options)

    async def history(self) -> list[Delivery]:
        page = await (await self.channel()).history(limit=1000)
        assert page.next is None
        return list(reversed(page.items))

    async def names(self) -> list[str | None]:
        return [delivery.name for delivery in await self.history()]


def agent_on(
    channel: Any,
    clock: FakeClock,
    by: str = "agent-1",
    *,
    roll_up: float = 0,
    codec: Callable[..., Any] = UIMessageCodec,
    **options: Any,
) -> AgentSession[UIMessage, Any]:
    return AgentSession(channel, codec(clock=clock), client_id=by, roll_up=roll_up, clock=clock, **options)


class Faulty:
    """A channel whose operations can fail. `plan` is asked for each, by its number: None lets it through."""

    def __init__(self, channel: Channel, plan: Callable[[int, str], str | None]) -> None:
        self._channel = channel
        self._plan = plan
        self.count = 0
        self.calls: list[str] = []
        self.subscribe = channel.subscribe

    @property
    def name(self) -> str:
        return self._channel.name

    async def _do(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        number, self.count = self.count, self.count + 1
        self.calls.append(what)
        fault = self._plan(number, what)
        await anyio.lowlevel.checkpoint()
        if fault == "refused":
            raise ChannelBusyError("The request got lost.")
        if fault == "broken":
            raise ChannelError("The backend is broken.")
        result = await call()
        await anyio.lowlevel.checkpoint()
        if fault == "lost":
            raise ChannelBusyError("The answer got lost.")
        return result

    async def raise_fence(self, epoch: int) -> None:
        await self._do("fence", lambda: self._channel.raise_fence(epoch))

    async def history(self, **options: Any) -> Any:
        return await self._do("history", lambda: self._channel.history(**options))

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        what = f"publish {messages[0].name}"
        return await self._do(what, lambda: self._channel.publish(messages, epoch=epoch))

    async def append(self, *args: Any, **options: Any) -> str:
        return await self._do("append", lambda: self._channel.append(*args, **options))

    async def update(self, *args: Any, **options: Any) -> str:
        return await self._do("update", lambda: self._channel.update(*args, **options))


def nothing(number: int, what: str) -> None:
    return None


class Torn:
    """A channel whose reader can lose its place in the log: the channel then gives it a gap and a snapshot."""

    def __init__(self, channel: Recorder, stage: Stage) -> None:
        self._channel = channel
        self._stage = stage
        self._reading = anyio.CancelScope()
        self._lost: Cursor | None = None
        self.name = channel.name
        self.publish = channel.publish
        self.append = channel.append
        self.update = channel.update
        self.history = channel.history
        self.raise_fence = channel.raise_fence

    async def tear(self) -> None:
        elsewhere = await self._stage.channels.open("conversations:elsewhere")
        async with elsewhere.subscribe() as other:
            self._lost = other.start  # of a log that is not this one
        self._reading.cancel()

    @contextlib.asynccontextmanager
    async def subscribe(self) -> AsyncGenerator[Torn]:
        async with contextlib.AsyncExitStack() as self._stack:
            self._inner = await self._stack.enter_async_context(self._channel.subscribe())
            self.start = self._inner.start
            yield self

    async def read(self) -> Sequence[Delivery | Gap]:
        with anyio.CancelScope() as self._reading:
            return await self._inner.read()
        assert self._lost is not None
        self._inner = await self._stack.enter_async_context(self._channel.subscribe(after=self._lost))
        return await self._inner.read()


async def ask(channels: MemoryChannels, clock: FakeClock) -> Invocation:
    channel = await channels.open("conversations:faults")
    headers = {"codec-message-id": "q-1", "event-id": "e-1", "role": "user", "run-client-id": "ana"}
    await channel.publish(CODEC.encode_input(user("Count"), headers))
    return Invocation(input_event_id="e-1", session_name=channel.name)


# -- what is said


def user(text: str) -> Any:
    return CODEC.create_user_message({"id": f"u-{text[:6]}", "role": "user", "parts": [{"type": "text", "text": text}]})


def reply(pieces: Iterable[str], *, stream_id: str = "t1", message_id: str = "msg-1") -> list[dict[str, Any]]:
    return [
        {"type": "start", "messageId": message_id},
        {"type": "start-step"},
        {"type": "text-start", "id": stream_id},
        *({"type": "text-delta", "id": stream_id, "delta": piece} for piece in pieces),
        {"type": "text-end", "id": stream_id},
        {"type": "finish-step"},
        {"type": "finish", "finishReason": "stop"},
    ]


async def slowly(outputs: list[Any]) -> AsyncIterator[Any]:
    for output in outputs:
        await anyio.lowlevel.checkpoint()
        yield output


async def failing(outputs: Iterable[Any]) -> AsyncIterator[Any]:
    for output in outputs:
        yield output
    raise RuntimeError("model exploded")


async def stuck(outputs: Iterable[Any]) -> AsyncIterator[Any]:
    for output in outputs:
        yield output
    await anyio.sleep_forever()


async def held(outputs: Iterable[Any], gate: anyio.Event, then: Iterable[Any] = ()) -> AsyncIterator[Any]:
    for output in outputs:
        yield output
    await gate.wait()
    for output in then:
        yield output


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until something holds."""
    for _ in range(5000):
        if condition():
            return
        await anyio.lowlevel.checkpoint()
    raise AssertionError("it never came to that")


def texts(messages: Iterable[Any]) -> list[str]:
    """`role:text` of messages, or of messages with their ids."""
    plain = [getattr(message, "message", message) for message in messages]
    return [
        f"{message['role']}:{'|'.join(part['text'] for part in message['parts'] if part['type'] == 'text')}"
        for message in plain
    ]


# -- comparison with the traces


def renamed(record: Iterable[Operation]) -> list[Operation]:
    """A record with ids and serials named by the order in which they appear, and nothing that says when."""
    names: dict[str, str] = {}

    def rename(kind: str, pattern: re.Pattern[str], text: str) -> str:
        return pattern.sub(lambda found: names.setdefault(found[0], f"{kind}-{len(names)}"), text)

    plain = [_plain(operation) for operation in record]
    return [
        json.loads(rename("id", IDS, rename("serial", SERIALS, json.dumps(operation, sort_keys=True))))
        for operation in plain
    ]


def _plain(operation: Operation) -> Operation:
    messages = operation["messages"] if operation["op"] == "publish" else [operation["message"]]
    kept = {"op": operation["op"], "by": operation["by"]}
    said = [
        {
            key: value
            for key, value in message.items()
            if key in ("name", "data", "extras", "serial") and value is not None
        }
        for message in messages
    ]
    # Behind the messages in the text, so that a serial is named where it is given away first.
    return {**kept, "messages": said, "serials": operation.get("serials", [])}


def assert_as_recorded(record: list[Operation], recorded: Iterable[Operation]) -> None:
    """What was handed to the channels is what the JavaScript SDK handed to it, up to ids, serials and times."""
    expected = renamed(one for one in recorded if one["op"] != "presence")
    got = renamed(record)
    for index, (one, other) in enumerate(zip(got, expected, strict=False)):
        assert one == other, f"operation {index}"
    assert len(got) == len(expected)
