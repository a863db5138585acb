"""Random schedules of calls on a channel: after every one of them it must be as a small model says.

Derive from `ChannelMachine`, say how a provider is opened, and run it; see `tests/channels/test_model.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from stepwell.errors import AppendGapError, FencedError, InvalidInputError, StepwellError
from stepwell.testing import FakeClock
from stepwell.testing._channel_reader import View
from stepwell.wire import (
    Channel,
    ChannelProvider,
    Cursor,
    Delivery,
    Gap,
    Subscription,
    WireMessage,
    is_ephemeral,
    make_extras,
)

EPHEMERAL = 60.0
RETENTION = 100.0

EPOCHS = st.sampled_from([None, None, None, 1, 2, 3])
KEYS = st.none() | st.sampled_from(["k1", "k2", "k3", "k4"])
TEXTS = st.text("aé𝄞\0", max_size=3)
DATA = st.none() | TEXTS | st.just({"a": [1, None, "é"]}) | st.just([])
HEADERS = st.sampled_from([{"run-id": "r"}, {"run-id": "r", "step-id": "s"}, {}])

_names = itertools.count()


@st.composite
def stream_extras(draw: st.DrawFn) -> dict[str, Any]:
    status = draw(st.sampled_from(["streaming", "streaming", "streaming", "complete", "cancelled"]))
    headers = {**draw(HEADERS), "stream": "true", "status": status, "stream-id": draw(st.sampled_from(["1", "2"]))}
    return make_extras(headers, draw(HEADERS))


@st.composite
def other_extras(draw: st.DrawFn) -> dict[str, Any] | None:
    return draw(st.sampled_from([None, {}, {"other": {"deep": [1]}}, make_extras({"run-id": "r"})]))


@st.composite
def new_messages(draw: st.DrawFn) -> WireMessage:
    key, client = draw(KEYS), draw(st.sampled_from([None, "someone"]))
    kind = draw(st.sampled_from(["stream", "stream", "stream", "whole", "ephemeral"]))
    if kind == "stream":
        data, extras = draw(TEXTS), draw(stream_extras())
    else:
        data, extras = draw(DATA), draw(other_extras())
    if kind == "ephemeral":
        extras = {**(extras or {}), "ephemeral": True}
    name = draw(st.sampled_from(["ai-output", "x"]))
    return WireMessage(name=name, data=data, extras=extras, client_id=client, idempotency_id=key)


@dataclass
class Version:
    """A message after one mutation; `delta` is what that appended."""

    data: Any
    extras: Any
    time: int
    delta: str | None = None


@dataclass
class Message:
    """What the model knows of one message."""

    given: WireMessage
    versions: dict[str, Version]
    applied: int = 0

    @property
    def newest(self) -> str:
        return max(self.versions)

    @property
    def now(self) -> Version:
        return self.versions[self.newest]

    @property
    def is_ephemeral(self) -> bool:
        return is_ephemeral(self.given.extras)


@dataclass
class Reader:
    """A subscription, what was read from it, and what must have been read when all of it is."""

    context: AbstractAsyncContextManager[Subscription]
    subscription: Subscription
    view: View
    must: set[str]
    gaps: int  # that there must be at most, because logs were deleted
    created: int | None  # messages that there were at its start, where that is known
    end_at: float | None  # when it had last read everything


@dataclass
class Seen:
    """A cursor, and what was known of the channel when it was had."""

    cursor: Cursor
    view: View
    must: set[str]
    incarnation: int
    end_at: float | None = None  # when it was the end of the log


@dataclass
class Model:
    """A channel."""

    messages: dict[str, Message] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    fence: int = 0


class ChannelMachine(RuleBasedStateMachine):
    """The model, and the calls that are made on it and on a channel.

    Attributes:
        outlives: What is stored is there when the provider is opened anew.
    """

    outlives: ClassVar[bool] = True

    def open(self, retention: float | None) -> ChannelProvider:
        """A provider on the clock `self.clock`; called again, another one on the same channels."""
        raise NotImplementedError

    @initialize(retention=st.sampled_from([None, None, RETENTION]))
    def begin(self, retention: float | None) -> None:
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.retention = retention
        self.name = f"model-{next(_names)}"
        self.model = Model()
        self.incarnation = 0
        self.readers: list[Reader] = []
        self.seen: list[Seen] = []
        self.again: Callable[[], None] | None = None
        self.providers: list[ChannelProvider] = []
        self.channels: list[Channel] = []
        self.connect()
        self.open_reader(self.channels[0], None)

    def connect(self) -> None:
        async def connect() -> None:
            self.providers = [self.open(self.retention)]
            if self.outlives:  # two of one process, as an engine and a server may have
                self.providers.append(self.open(self.retention))
            self.channels = [await provider.open(self.name) for provider in self.providers]

        self.run(connect())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            try:
                self.settle()
                self.resume_from_every_cursor()
            finally:
                self.run(self.disconnect())
                self.runner.close()

    def resume_from_every_cursor(self) -> None:
        """None of the last ones loses anything, whatever the reader had got that it was given to."""
        self.run(self.leave_all())
        for seen in self.seen[-8:]:
            self.open_reader(self.channels[0], seen)
        self.settle()

    async def leave_all(self) -> None:
        for reader in self.readers:
            await reader.context.__aexit__(None, None, None)
        self.readers.clear()

    async def disconnect(self) -> None:
        await self.leave_all()
        for provider in self.providers:
            await provider.close()

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(20):
                return await call

        return self.runner.run(limited())

    def call(self, call: Coroutine[Any, Any, Any], expected: type[StepwellError] | None = None) -> Any:
        if expected is None:
            return self.run(call)
        with pytest.raises(expected) as caught:
            self.run(call)
        assert caught.type is expected
        return caught.value

    def now(self) -> int:
        return int(self.clock.time() * 1000)

    # --- writing

    def fenced(self, epoch: int | None) -> type[StepwellError] | None:
        return FencedError if epoch is not None and epoch < self.model.fence else None

    def changed(self, serial: str, version: str, state: Version) -> None:
        message = self.model.messages[serial]
        assert version > message.newest
        message.versions[version] = state
        self.mutated(serial)

    def mutated(self, serial: str) -> None:
        for reader in self.readers:
            reader.must.add(serial)
        for seen in self.seen:
            if seen.incarnation == self.incarnation:
                seen.must.add(serial)

    @rule(messages=st.lists(new_messages(), min_size=1, max_size=4), epoch=EPOCHS, via=st.integers(0, 1))
    def publish(self, messages: list[WireMessage], epoch: int | None, via: int) -> None:
        channel = self.channels[via % len(self.channels)]
        expected = self.fenced(epoch)
        serials = self.call(channel.publish(messages, epoch=epoch), expected)
        if expected is None:
            self.published(messages, serials)
            # The acknowledgement may be lost: with ids for all, the same call is the same messages.
            if all(message.idempotency_id for message in messages):
                self.again = lambda: self.repeat_publish(messages, serials)

    def published(self, messages: list[WireMessage], serials: list[str]) -> None:
        assert len(serials) == len(messages)
        new: list[str] = []
        for message, serial in zip(messages, serials, strict=True):
            key = message.idempotency_id
            known = None if key is None else self.model.keys.get(key)
            # An id lives as long as its message, and where that is due its end is not exact.
            if known is not None and (serial == known or not self.is_due(self.model.messages[known])):
                assert serial == known
                continue
            if key is not None:
                self.model.keys[key] = serial
            assert not self.model.messages or serial > max(self.model.messages)
            first = Version(message.data, message.extras, self.now())
            self.model.messages[serial] = Message(message, {serial: first})
            self.mutated(serial)
            new.append(serial)
        assert [serial[-4:] for serial in new] == [f":{i:03d}" for i in range(len(new))]

    def repeat_publish(self, messages: list[WireMessage], serials: list[str]) -> None:
        assert self.run(self.channels[-1].publish(messages)) == serials

    @rule(texts=st.lists(TEXTS, min_size=2, max_size=5))
    def publish_at_once(self, texts: list[str]) -> None:
        messages = [WireMessage(name=f"at-once-{i}", data=text) for i, text in enumerate(texts)]

        async def publish() -> list[list[str]]:
            calls = (self.channels[i % len(self.channels)].publish([one]) for i, one in enumerate(messages))
            return list(await asyncio.gather(*calls))

        found = [serial for [serial] in self.run(publish())]
        for serial, message in sorted(zip(found, messages, strict=True), key=lambda pair: pair[0]):
            self.published([message], [serial])

    def pick(self, index: int) -> str:
        # Mostly the newest: that is where things happen.
        serials = list(self.model.messages)
        return serials[-1 - (index % len(serials))]

    @precondition(lambda self: self.model.messages)
    @rule(
        which=st.integers(0, 7),
        text=TEXTS,
        extras=st.none() | stream_extras() | stream_extras(),
        epoch=EPOCHS,
        via=st.integers(0, 1),
    )
    def append(self, which: int, text: str, extras: dict[str, Any] | None, epoch: int | None, via: int) -> None:
        self.append_one(which, text, extras, epoch, via)

    def append_one(self, which: int, text: str, extras: dict[str, Any] | None, epoch: int | None, via: int) -> None:
        serial, channel = self.pick(which), self.channels[via % len(self.channels)]
        message = self.model.messages[serial]
        seq, before = message.applied + 1, message.now
        expected = self.fenced(epoch) or (None if isinstance(before.data, str) else InvalidInputError)
        if message.is_ephemeral and self.is_due(message):
            return  # whether it is gone already is not said
        version = self.call(channel.append(serial, text, extras, seq=seq, epoch=epoch), expected)
        if expected is not None:
            return
        message.applied = seq
        kept = before.extras if extras is None else extras
        self.changed(serial, version, Version(before.data + text, kept, self.now(), text))

        def repeat() -> None:
            if not self.is_due(message):
                newest = self.run(self.channels[-1].append(serial, text, extras, seq=seq))
                assert newest == message.newest

        self.again = repeat

    @precondition(lambda self: self.model.messages)
    @rule(picks=st.lists(st.integers(0, 2), min_size=2, max_size=6))
    def append_in_turn(self, picks: list[int]) -> None:
        """Streams that are open at the same time."""
        for n, which in enumerate(picks):
            if isinstance(self.model.messages[self.pick(which)].now.data, str):
                self.append_one(which, str(n), make_extras({"stream": "true", "status": "streaming"}), None, 0)

    @precondition(lambda self: self.model.messages)
    @rule(which=st.integers(0, 7), ahead=st.integers(2, 4) | st.integers(-1000, -999))
    def append_out_of_order(self, which: int, ahead: int) -> None:
        serial = self.pick(which)
        message = self.model.messages[serial]
        if not self.is_due(message):
            call = self.channels[0].append(serial, "lost", None, seq=message.applied + ahead)
            assert self.call(call, AppendGapError).applied == message.applied

    @precondition(lambda self: self.model.messages)
    @rule(which=st.integers(0, 7), data=DATA, extras=stream_extras() | other_extras(), epoch=EPOCHS)
    def update(self, which: int, data: Any, extras: dict[str, Any] | None, epoch: int | None) -> None:
        serial, extras = self.pick(which), extras or {}
        message = self.model.messages[serial]
        if self.is_due(message):
            return
        expected = self.fenced(epoch)
        version = self.call(self.channels[0].update(serial, data, extras, epoch=epoch), expected)
        if expected is None:
            self.changed(serial, version, Version(data, extras, self.now()))
            self.again = None

    @precondition(lambda self: self.again is not None)
    @rule()
    def repeat_what_was_acknowledged(self) -> None:
        assert self.again is not None
        self.again()

    @rule(epoch=st.integers(0, 3))
    def raise_fence(self, epoch: int) -> None:
        self.call(self.channels[0].raise_fence(epoch), self.fenced(epoch))
        self.model.fence = max(self.model.fence, epoch)

    @rule(bad=st.sampled_from([5, float("nan"), "\ud800", {"a": {1}}]))
    def publish_what_is_no_message(self, bad: Any) -> None:
        self.call(
            self.channels[0].publish([WireMessage(name="good"), WireMessage(name="x", data=bad)]), InvalidInputError
        )

    # --- time, and worse

    def is_due(self, message: Message) -> bool:
        return message.is_ephemeral and self.now() - message.now.time >= EPHEMERAL * 1000

    @rule(seconds=st.sampled_from([0.5, 7.0, 30.0, 61.0, 150.0]))
    def pass_time(self, seconds: float) -> None:
        self.run(self.clock.advance(seconds))
        if any(self.is_due(self.model.messages[serial]) for serial in self.model.keys.values()):
            self.again = None  # it may be new by now

    @rule()
    def delete(self) -> None:
        self.run(self.providers[0].delete(self.name))
        self.model = Model()
        self.incarnation += 1
        self.again = None
        for reader in self.readers:
            reader.must = set()
            reader.created = None
            reader.gaps += 1

    @precondition(lambda self: self.outlives)
    @rule()
    def open_anew(self) -> None:
        self.run(self.disconnect())
        self.connect()

    # --- reading

    @precondition(lambda self: len(self.readers) < 4)
    @rule(which=st.none() | st.integers(0, 30), via=st.integers(0, 1))
    def subscribe(self, which: int | None, via: int) -> None:
        seen = None if which is None or not self.seen else self.seen[-1 - which % len(self.seen)]
        self.open_reader(self.channels[via % len(self.channels)], seen)

    def open_reader(self, channel: Channel, seen: Seen | None) -> None:
        context = channel.subscribe(after=None if seen is None else seen.cursor)
        subscription = self.run(context.__aenter__())
        if seen is None:
            reader = Reader(context, subscription, View(), set(), 0, len(self.model.messages), self.clock.time())
        else:
            same = seen.incarnation == self.incarnation
            must = set(seen.must) if same else set[str]()
            gaps = seen.view.gaps + (0 if same else 1)
            reader = Reader(context, subscription, seen.view.copy(), must, gaps, None, seen.end_at)
        self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 3), limit=st.sampled_from([1, 2, 3, 100]))
    def read(self, which: int, limit: int) -> None:
        """What is there is read, or not: how far a reader is must not matter."""
        reader = self.readers[which % len(self.readers)]

        async def read() -> list[Any]:
            reading = asyncio.ensure_future(reader.subscription.read(limit))
            for _ in range(5):
                await asyncio.sleep(0)
            reading.cancel()
            [result] = await asyncio.gather(reading, return_exceptions=True)
            return list(result) if not isinstance(result, BaseException) else []

        self.take(reader, self.run(read()))

    def take(self, reader: Reader, items: list[Any]) -> None:
        for item in items:
            if isinstance(item, Delivery):
                self.check(item)
            reader.view.take([item])
            if isinstance(item, Gap):
                reader.created = None
                if self.retention is None or (
                    reader.end_at is not None and self.clock.time() - reader.end_at < self.retention
                ):
                    assert reader.view.gaps <= reader.gaps, "a gap where nothing is gone"
                reader.gaps = max(reader.gaps, reader.view.gaps)
            elif item.serial in self.model.messages:
                # Not of a log that is deleted: its end is behind.
                self.seen.append(Seen(item.cursor, reader.view.copy(), set(reader.must), self.incarnation))

    def check(self, item: Delivery) -> None:
        """It is what some mutation made of its message."""
        message = self.model.messages.get(item.serial)
        if message is None:
            return  # of a deleted log
        version = message.versions[item.version]
        assert item.timestamp == version.time
        assert item.extras == version.extras
        assert item.client_id == message.given.client_id
        if item.action == "append":
            assert (item.name, item.data) == (None, version.delta)
        else:
            assert (item.name, item.data) == (message.given.name, version.data)
        assert item.action != "create" or item.version == item.serial

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 3))
    def leave(self, which: int) -> None:
        reader = self.readers.pop(which % len(self.readers))
        self.run(reader.context.__aexit__(None, None, None))

    @rule()
    def settle(self) -> None:
        """Every reader, when it has read everything, has what the model has."""
        end = WireMessage(name="end", data="end")
        [serial] = self.run(self.channels[0].publish([end]))
        self.published([end], [serial])
        for reader in self.readers:
            self.run(self.read_up_to(reader, serial))
            self.compare(reader)

    async def read_up_to(self, reader: Reader, serial: str) -> None:
        while serial not in reader.view.messages():
            self.take(reader, list(await reader.subscription.read()))
        reader.end_at = self.seen[-1].end_at = self.clock.time()

    def compare(self, reader: Reader) -> None:
        known = reader.view.messages()
        lasting = {serial: message for serial, message in self.model.messages.items() if not message.is_ephemeral}
        must = lasting.keys() if reader.view.gaps else reader.must & lasting.keys()
        assert must <= known.keys()
        for serial, item in known.items():
            message = self.model.messages[serial]
            if not message.is_ephemeral:
                assert (item.version, item.data) == (message.newest, message.now.data)
                assert item.extras == message.now.extras
                assert item.name == message.given.name

    @rule(limit=st.sampled_from([1, 2, 3, 100]))
    def history(self, limit: int) -> None:
        self.check_history(None, limit, list(self.model.messages))

    @precondition(lambda self: any(reader.created is not None for reader in self.readers))
    @rule(limit=st.sampled_from([1, 2, 3, 100]))
    def history_before(self, limit: int) -> None:
        for reader in self.readers:
            if reader.created is not None:
                serials = list(self.model.messages)[: reader.created]
                self.check_history(reader.subscription.start, limit, serials)

    def check_history(self, before: Cursor | None, limit: int, serials: list[str]) -> None:
        async def pages(before: Cursor | None) -> list[Delivery]:
            items: list[Delivery] = []
            while True:
                page = await self.channels[0].history(before=before, limit=limit)
                assert len(page.items) <= limit
                items += page.items
                if page.next is None:
                    return items
                assert len(page.items) == limit
                before = page.next

        found = self.run(pages(before))
        lasting = [serial for serial in serials if not self.model.messages[serial].is_ephemeral]
        assert [item.serial for item in found] == lasting[::-1]
        for item in found:
            self.check(item)
            message = self.model.messages[item.serial]
            assert item.version == message.newest
            assert item.action == ("update" if len(message.versions) > 1 else "create")
