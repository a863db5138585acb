"""Writing streams: the roll-up, the order, backpressure, and appends that fail or whose answer is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from codec_kit import HEADERS, Log, Reader, opened
from stepwell.errors import ChannelError, EncoderRecoveryError, MisuseError, SessionClosedError
from stepwell.testing import FakeClock
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import transport_headers

pytestmark = pytest.mark.anyio

MAX_KEPT = 65_536


class Stage:
    def __init__(self, log: Log, encoder: Any, clock: FakeClock) -> None:
        self.log = log
        self.encoder = encoder
        self.clock = clock

    async def start(self, stream: str = "t") -> None:
        await self.encoder.publish_output({"type": "text-start", "id": stream})

    async def say(self, *texts: str, stream: str = "t") -> None:
        for text in texts:
            await self.encoder.publish_output({"type": "text-delta", "id": stream, "delta": text})

    async def end(self, stream: str = "t") -> None:
        await self.encoder.publish_output({"type": "text-end", "id": stream})

    async def note(self) -> None:
        await self.encoder.publish_output({"type": "data-n", "data": {}})

    @property
    def appended(self) -> list[Any]:
        return [row.data for row in self.log.rows if row.action == "append"]

    @property
    def statuses(self) -> list[str | None]:
        """Of every stream, in the end."""
        return [
            transport_headers(row.extras).get("status")
            for row in self.log.history()
            if transport_headers(row.extras)["stream"] == "true"
        ]

    def shown(self) -> str:
        """What somebody shows who was there; somebody who comes late shows the same."""
        live = Reader(UIMessageCodec()).read(self.log.rows).messages
        assert Reader(UIMessageCodec()).read(self.log.history()).messages == live
        return "|".join(part.get("text", "") for part in live[0]["message"]["parts"] if part["type"] == "text")


@asynccontextmanager
async def stage(*, roll_up: float = 0.02, fault: Any = None) -> AsyncIterator[Stage]:
    """An encoder with its task."""
    clock = FakeClock()
    log = Log(fault) if fault else Log()
    encoder = UIMessageCodec(clock=clock).create_encoder(log, opened, message_id="m-1", roll_up=roll_up)
    async with anyio.create_task_group() as group:
        group.start_soon(encoder.run)
        yield Stage(log, encoder, clock)
        group.cancel_scope.cancel()


def nth(what: str, *places: int, fault: str = "refused") -> Any:
    """A fault at the n-th operations of a kind, from 0."""
    seen = {"count": -1}

    def plan(operation: str, number: int) -> str | None:
        if operation != what:
            return None
        seen["count"] += 1
        return fault if seen["count"] in places else None

    return plan


# --- the roll-up ------------------------------------------------------------------------------------------------------


async def test_text_within_the_window_is_one_append() -> None:
    async with stage() as on:
        await on.start()
        await on.say("a", "b")
        await on.clock.advance(0.019)
        await on.say("c")
        assert on.appended == []
        await on.clock.advance(0.001)
        assert on.appended == ["abc"], "the tail goes out although the source is silent"
        await on.clock.advance(1)
        assert on.appended == ["abc"]


async def test_a_window_begins_with_the_first_text_that_is_kept() -> None:
    async with stage() as on:
        await on.start()
        await on.say("a")
        await on.clock.advance(0.015)
        await on.note()  # takes "a" along
        await on.say("b")
        await on.clock.advance(0.015)
        assert on.appended == ["a"], "the first window is over, the second is not"
        await on.clock.advance(0.006)
        assert on.appended == ["a", "b"]


async def test_the_close_of_a_stream_ends_the_window_of_all() -> None:
    async with stage() as on:
        await on.start()
        await on.start("u")
        await on.say("a")
        await on.clock.advance(0.015)
        await on.end()
        await on.say("b", stream="u")
        await on.clock.advance(0.015)
        assert on.appended == ["a"]
        await on.clock.advance(0.006)
        assert on.appended == ["a", "b"]


async def test_without_a_window_each_text_is_an_append() -> None:
    async with stage(roll_up=0) as on:
        await on.start()
        await on.say("a", "b")
        assert on.appended == ["a", "b"]
        await on.end()
        assert on.appended == ["a", "b", ""]


async def test_kept_text_goes_out_before_anything_else() -> None:
    async with stage() as on:
        await on.start()
        await on.say("a", "b")
        await on.note()
        await on.say("c")
        await on.start("u")
        await on.say("d", stream="u")
        await on.say("e")
        await on.end()
        await on.say("f", stream="u")
        await on.encoder.finish()
        await on.encoder.close()
        assert [(row.action, row.data) for row in on.log.rows] == [
            ("create", ""),
            ("append", "ab"),
            ("create", {}),
            ("append", "c"),
            ("create", ""),
            ("append", "d"),
            ("append", "e"),  # with the close
            ("append", "f"),
        ]
        assert on.statuses == ["complete", "cancelled"]
        assert on.shown() == "abce|df"


async def test_every_append_repeats_every_header_of_the_create() -> None:
    async with stage(roll_up=0) as on:
        await on.encoder.publish_output({"type": "text-start", "id": "t", "providerMetadata": {"a": 1}})
        await on.say("x")
        await on.encoder.publish_output({"type": "text-end", "id": "t", "providerMetadata": {"b": 2}})
        create, append, close = on.log.rows
        assert create.extras == append.extras
        assert transport_headers(create.extras) == {
            **HEADERS,
            "stream": "true",
            "status": "streaming",
            "stream-id": "t",
        }
        assert transport_headers(close.extras) == {**transport_headers(create.extras), "status": "complete"}
        assert close.extras is not None
        assert close.extras["ai"]["codec"] == {"kind": "text", "id": "t", "providerMetadata": '{"b":2}'}


async def test_a_source_that_is_faster_than_the_channel_waits() -> None:
    async with stage() as on:
        await on.start()
        on.log.gate = anyio.Event()
        said: list[int] = []

        async def speak() -> None:
            for number in range(200):
                await on.say("x" * 1024)
                said.append(number)

        async with anyio.create_task_group() as group:
            group.start_soon(speak)
            await anyio.wait_all_tasks_blocked()
            assert len(said) == MAX_KEPT // 1024 - 1
            on.log.gate.set()
            await anyio.wait_all_tasks_blocked()
            assert len(said) == 200
        count = len(on.appended)
        await on.say("y")
        assert len(on.appended) == count, "and what it waited for is over"
        await on.end()
        assert on.shown() == "x" * 1024 * 200 + "y"


@pytest.mark.parametrize("late", [False, True])
async def test_text_that_comes_while_an_append_is_slow_is_the_next_append(late: bool) -> None:
    async with stage() as on:
        await on.start()
        on.log.gate = anyio.Event()
        await on.say("a")
        await on.clock.advance(0.02)
        await on.say("b", "c")
        if late:  # its window ends while the append is under way
            await on.clock.advance(0.02)
        assert on.appended == []
        on.log.gate.set()
        await anyio.wait_all_tasks_blocked()
        assert on.appended == (["a", "bc"] if late else ["a"])
        await on.clock.advance(0.02)
        assert on.appended == ["a", "bc"]


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refused", "lost"])
async def test_a_failed_append_is_repeated_in_the_next_window_as_it_was(fault: str) -> None:
    async with stage(fault=nth("append", 0, fault=fault)) as on:
        await on.start()
        await on.say("one ")
        await on.clock.advance(0.02)
        await on.say("two ")  # joins no append that may have been stored
        await on.clock.advance(0.02)
        assert "".join(on.appended) == "one two "
        await on.say("three")
        await on.end()
        assert on.shown() == "one two three"
        assert "update" not in on.log.calls


@pytest.mark.parametrize("roll_up", [0, 0.02])
@pytest.mark.parametrize("fault", ["refused", "lost"])
async def test_a_close_behind_text_that_failed_does_not_lose_it(fault: str, roll_up: float) -> None:
    async with stage(roll_up=roll_up, fault=nth("append", 0, fault=fault)) as on:
        await on.start()
        await on.say("one ")
        if roll_up:
            await on.clock.advance(0.02)
        await on.say("two")
        await on.end()
        assert on.shown() == "one two"
        assert on.statuses == ["complete"]


@pytest.mark.parametrize("fault", ["refused", "lost"])
async def test_what_fails_twice_is_replaced_as_a_whole(fault: str) -> None:
    async with stage(fault=nth("append", 1, 2, fault=fault)) as on:
        await on.start()
        await on.say("one ")
        await on.clock.advance(0.02)
        await on.say("two ")
        await on.clock.advance(0.04)
        assert on.log.rows[-1].action == "update"
        assert on.log.rows[-1].data == "one two "
        assert on.statuses == ["streaming"]
        assert on.shown() == "one two ", "who was there heals too"
        await on.say("three")
        await on.end()
        assert on.shown() == "one two three"
        assert on.statuses == ["complete"]


@pytest.mark.parametrize("fault", ["refused", "lost"])
async def test_something_else_does_not_overtake_text_that_fails(fault: str) -> None:
    async with stage(fault=nth("append", 0, fault=fault)) as on:
        await on.start()
        await on.say("one ")
        await on.note()
        whole, note = on.log.rows[-2:]
        assert (whole.action, whole.data, note.data) == ("update", "one ", {})
        await on.say("two")
        await on.end()
        assert on.shown() == "one two"


@pytest.mark.parametrize("fault", ["refused", "lost"])
@pytest.mark.parametrize("roll_up", [0, 0.02])
async def test_a_close_that_fails_is_made_by_an_update(fault: str, roll_up: float) -> None:
    count = 1 if roll_up else 2
    async with stage(roll_up=roll_up, fault=nth("append", count - 1, fault=fault)) as on:
        await on.start()
        await on.say("one")
        await on.end()
        assert on.log.rows[-1].data == "one"
        assert on.statuses == ["complete"]
        assert on.shown() == "one"


@pytest.mark.parametrize("roll_up", [0, 0.02])
@pytest.mark.parametrize("fault", ["refused", "lost"])
async def test_no_single_fault_of_an_append_or_update_loses_or_doubles_text(fault: str, roll_up: float) -> None:
    for place in range(12):
        async with stage(roll_up=roll_up, fault=nth("append", place, place + 2, fault=fault)) as on:
            await on.start()
            for text in ("a", "b", "c"):
                await on.say(text)
                await on.clock.advance(0.02)
            await on.start("u")
            await on.say("d", "e", stream="u")
            await on.say("f")
            await on.end("u")
            await on.end()
            await on.encoder.close()
            assert on.shown() == "abcf|de", place
            assert on.statuses == ["complete", "complete"]


async def test_text_that_cannot_be_restored_is_an_error_and_its_stream_is_given_up() -> None:
    async with stage(fault=lambda what, number: "refused" if what != "publish" else None) as on:
        await on.start()
        await on.say("one")
        with pytest.raises(EncoderRecoveryError) as caught:
            await on.note()
        assert caught.value.wire_code == 104000
        assert caught.value.ids == {"serial": on.log.rows[0].serial}
        with pytest.raises(MisuseError):
            await on.say("two")
        calls = len(on.log.calls)
        await on.encoder.close()
        assert len(on.log.calls) == calls, "nothing is tried again"


async def test_an_error_in_the_window_is_raised_by_run() -> None:
    log, clock = Log(lambda what, number: "refused" if what != "publish" else None), FakeClock()
    encoder = UIMessageCodec(clock=clock).create_encoder(log, opened, message_id="m", roll_up=0.02)
    await encoder.publish_output({"type": "text-start", "id": "t"})
    await encoder.publish_output({"type": "text-delta", "id": "t", "delta": "x"})
    raised: list[BaseException] = []

    async def run() -> None:
        try:
            await encoder.run()
        except EncoderRecoveryError as error:
            raised.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await clock.advance(0.02)
        assert raised == [], "once more first"
        await clock.advance(0.02)
    assert len(raised) == 1


async def test_a_create_that_fails_opens_no_stream() -> None:
    async with stage(fault=nth("publish", 0)) as on:
        with pytest.raises(ChannelError):
            await on.start()
        with pytest.raises(MisuseError):
            await on.say("x")


@pytest.mark.parametrize("closing", [False, True])
async def test_an_append_that_is_cut_off_is_repeated_under_its_number(closing: bool) -> None:
    """As the writer of a session has it: what was begun is carried to its end, whoever was cancelled."""

    class Shielded(Log):
        async def append(self, *args: Any, **options: Any) -> str:
            with anyio.CancelScope(shield=True):
                return await super().append(*args, **options)

    log, clock = Shielded(), FakeClock()
    encoder = UIMessageCodec(clock=clock).create_encoder(log, opened, message_id="m", roll_up=0.02)
    on = Stage(log, encoder, clock)
    await on.start()
    await on.say("a")
    log.gate = anyio.Event()
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(on.end if closing else on.note)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            log.gate.set()
    if not closing:
        await on.say("b")
    await encoder.cancel_streams()
    assert on.shown() == ("a" if closing else "ab")
    assert on.statuses == ["complete" if closing else "cancelled"]


# --- the end ----------------------------------------------------------------------------------------------------------


async def test_cancelling_closes_every_open_stream_behind_its_text() -> None:
    async with stage() as on:
        for stream in ("t", "u", "v"):
            await on.start(stream)
            await on.say(stream, stream=stream)
        await on.end("u")
        await on.encoder.cancel_streams()
        assert on.statuses == ["cancelled", "complete", "cancelled"]
        assert on.shown() == "t|u|v"
        await on.encoder.cancel_streams()
        assert len(on.log.rows) == 9


async def test_closing_leaves_open_streams_as_they_are_and_refuses_more() -> None:
    async with stage() as on:
        await on.start()
        await on.say("tail")
        await on.encoder.close()
        assert on.appended == ["tail"]
        assert on.statuses == ["streaming"]
        await on.encoder.close()
        for refused in (on.start, on.say, on.end, on.note, on.encoder.cancel_streams):
            with pytest.raises(SessionClosedError) as caught:
                await (refused("x") if refused == on.say else refused())
            assert caught.value.wire_code == 104004
        assert len(on.log.rows) == 2


async def test_a_stream_may_be_begun_again() -> None:
    async with stage() as on:
        await on.start()
        await on.say("first")
        await on.start()
        await on.say("second")
        await on.end()
        await on.encoder.finish()
        assert on.statuses == ["streaming", "complete"]
        assert on.shown() == "first|second"
        await on.start()
        assert len(on.statuses) == 3


async def test_output_that_was_published_is_told_also_where_its_answer_was_lost() -> None:
    log = Log(nth("publish", 0, fault="lost"))
    encoder = UIMessageCodec().create_encoder(log, opened, message_id="m", roll_up=0)
    with pytest.raises(ChannelError):
        await encoder.publish_output({"type": "start"})
    assert encoder.has_output
