"""The codec of plain text, and codecs of one's own."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from codec_kit import HEADERS, Log, Reader, TinyCodec, deliveries, history, opened, outputs, written
from stepwell.errors import MisuseError
from stepwell.testing import FakeClock
from stepwell.transport._codec import FoldMeta
from stepwell.transport.codecs import (
    EventTable,
    Field,
    Input,
    Output,
    Stream,
    TextCodec,
    TextMessage,
    UserMessage,
    choice_field,
    flag_field,
    json_field,
    text_field,
)
from stepwell.wire import codec_headers, transport_headers
from transport_kit import trace

pytestmark = pytest.mark.anyio

CODEC = TextCodec()

# --- plain text -------------------------------------------------------------------------------------------------------


async def pipe(*pieces: str, end: str = "finish", roll_up: float = 0) -> Log:
    log = Log()
    encoder = CODEC.create_encoder(log, opened, message_id="m-1", roll_up=roll_up)
    for piece in pieces:
        await encoder.publish_output(piece)
    assert encoder.has_output == bool(pieces)
    await getattr(encoder, end)()
    await encoder.close()
    return log


async def test_pieces_of_text_are_one_stream() -> None:
    log = await pipe("He", "llo")
    assert log.said == [("create", ""), ("append", "He"), ("append", "llo"), ("append", "")]
    own = {"stream": "true", "stream-id": "text"}
    assert transport_headers(log.rows[0].extras) == {**HEADERS, **own, "status": "streaming"}
    assert transport_headers(log.rows[-1].extras) == {**HEADERS, **own, "status": "complete"}
    assert codec_headers(log.rows[-1].extras) == {"kind": "text"}
    shown = [{"codecMessageId": "m-1", "message": TextMessage("assistant", "Hello")}]
    assert Reader(CODEC).read(log.rows).messages == shown
    assert Reader(CODEC).read(log.history()).messages == shown


async def test_text_that_is_cancelled_stays_as_far_as_it_came() -> None:
    log = await pipe("Hel", end="cancel_streams", roll_up=0.02)
    assert transport_headers(log.rows[-1].extras)["status"] == "cancelled"
    assert Reader(CODEC).read(log.rows).messages[0]["message"].text == "Hel"


async def test_no_piece_writes_nothing_and_other_things_are_refused() -> None:
    assert (await pipe()).rows == []
    encoder = CODEC.create_encoder(Log(), opened, message_id="m-1")
    with pytest.raises(MisuseError, match="not a dict"):
        await encoder.publish_output({"type": "piece", "text": "x"})


async def test_the_clock_of_the_codec_is_its_encoders() -> None:
    log, clock = Log(), FakeClock(auto_advance=True)
    encoder = TextCodec(clock=clock).create_encoder(log, opened, message_id="m-1", roll_up=3600)
    await encoder.publish_output("x")
    assert log.said == [("create", "")]
    async with anyio.create_task_group() as group:
        group.start_soon(encoder.run)
        while len(log.rows) < 2:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert log.said[1:] == [("append", "x")]


def test_what_a_user_says_is_one_message() -> None:
    event = CODEC.create_user_message("Hi")
    assert CODEC.is_new_message(event)
    assert CODEC.create_user_message(TextMessage("system", "Be kind"))["message"].role == "system"
    [message] = CODEC.encode_input(event, {"codec-message-id": "q", "event-id": "e"})
    assert message.data == "Hi"
    assert transport_headers(message.extras) == {
        "codec-message-id": "q",
        "event-id": "e",
        "role": "user",
        "stream": "false",
        "discrete": "true",
    }
    assert codec_headers(message.extras) == {"kind": "user-message", "partType": "text"}
    log = Log()
    log.add("create", "", message.name, message.data, message.extras)
    assert Reader(CODEC).read(log.rows).messages == [{"codecMessageId": "q", "message": TextMessage("user", "Hi")}]


def test_what_was_given_out_stays_and_is_the_same_object_until_it_changes() -> None:
    projection = CODEC.init()
    texts: list[Any] = []
    for piece in ("a", "b"):
        CODEC.fold(projection, "output", {"type": "piece", "text": piece}, FoldMeta("s", "m"))
        texts.append(CODEC.get_messages(projection)[0].message)
        assert CODEC.get_messages(projection)[0].message is texts[-1]
    CODEC.fold(projection, "input", CODEC.create_regenerate("m", None), FoldMeta("s", "n"))
    assert [one.text for one in texts] == ["a", "ab"]
    assert len(CODEC.get_messages(projection)) == 1


def test_plain_text_has_no_tools() -> None:
    for call in (
        lambda: CODEC.create_tool_result("m", "c", 1),
        lambda: CODEC.create_tool_result_error("m", "c", "x"),
        lambda: CODEC.create_tool_approval_response("m", "c", approved=True),
    ):
        with pytest.raises(MisuseError, match="no tools"):
            call()


# --- one's own --------------------------------------------------------------------------------------------------------


def test_a_codec_of_ones_own_reads_the_trace() -> None:
    recorded = trace("custom-codec")
    assert Reader(TinyCodec()).read(deliveries(recorded["published"])).messages == recorded["clientView"]
    assert Reader(TinyCodec()).read(history("custom-codec")).messages == recorded["clientView"]


async def test_a_codec_of_ones_own_writes_the_trace() -> None:
    golden, codec = outputs("custom-codec"), TinyCodec()
    own = {
        key: value
        for key, value in golden[0][3]["ai"]["transport"].items()
        if key not in ("stream", "status", "stream-id")
    }

    async def as_recorded() -> dict[str, str]:
        return own

    log = Log()
    encoder = codec.create_encoder(log, as_recorded, message_id="m", roll_up=0)
    for event in (
        {"type": "begin", "lang": "en"},
        {"type": "tok", "t": "he"},
        {"type": "tok", "t": "llo"},
        {"type": "stop"},
        {"type": "note", "level": "info", "body": "x"},
    ):
        await encoder.publish_output(event)
    await encoder.close()
    assert written(log) == golden
    said = trace("custom-codec")["published"][0]["messages"][0]
    headers = {key: value for key, value in said["extras"]["ai"]["transport"].items() if key != "discrete"}
    [message] = codec.encode_input(codec.create_user_message({"role": "user", "text": "hey"}), headers)
    assert (message.name, message.data, message.extras) == (said["name"], said["data"], said["extras"])


@pytest.mark.parametrize(
    ("entries", "inputs", "says"),
    [
        ((Output(type="a"), Output(type="a")), (), "'a'"),
        ((Output(type="a"), Stream(kind="a", start="s", delta="d", end="e")), (), "'a'"),
        ((Output(type="s"), Stream(kind="a", start="s", delta="d", end="e")), (), "'s'"),
        ((Stream(kind="a", start="s", delta="s", end="e"),), (), "same type"),
        (
            (Stream(kind="a", start="s", delta="d", end="e"), Stream(kind="b", start="t", delta="d", end="f")),
            (),
            "same type",
        ),
        ((), (Input(kind="i"), Input(kind="i")), "'i'"),
        ((), (Input(kind="regenerate"),), "'regenerate'"),
        ((Output(type="a", fields=(text_field("kind"),)),), (), "taken"),
        ((Stream(kind="a", start="s", delta="d", end="e", fields=(text_field("partType"),)),), (), "taken"),
        ((), (Input(kind="i", fields=(flag_field("kind"),)),), "taken"),
    ],
)
def test_a_table_that_cannot_work_is_refused_where_it_is_written(entries: Any, inputs: Any, says: str) -> None:
    with pytest.raises(MisuseError, match=says) as caught:
        EventTable(entries, inputs)
    assert caught.value.wire_code == 40003


def test_a_message_without_a_part_of_the_table_is_refused() -> None:
    class Deaf(TinyCodec):
        table = EventTable(
            (),
            user=UserMessage(
                parts=(Output(type="image"),),
                explode=lambda message: [{"type": "text"}],
                assemble=lambda part, codec, role: {},
            ),
        )

    with pytest.raises(MisuseError, match="no part"):
        Deaf().encode_input(Deaf().create_user_message({"role": "user", "text": ""}), {})
    with pytest.raises(MisuseError, match="no input"):
        type("Mute", (TinyCodec,), {"table": EventTable(())})().encode_input({"kind": "user-message"}, {})


@pytest.mark.parametrize(
    ("field", "value", "header", "back"),
    [
        (text_field("f"), "x", "x", "x"),
        (text_field("f"), None, None, ...),
        (text_field("f", "d"), None, None, "d"),
        (flag_field("f"), False, "false", False),
        (flag_field("f", True), None, None, True),
        (json_field("f"), {"a": [1, None]}, '{"a":[1,null]}', {"a": [1, None]}),
        (choice_field("f", ("x", "y"), "y"), "x", "x", "x"),
        (choice_field("f", ("x", "y"), "y"), "z", "z", "y"),
        (choice_field("f", ("x", "y"), "y"), None, None, "y"),
    ],
)
def test_values_are_text_in_headers(field: Field, value: Any, header: Any, back: Any) -> None:
    headers: dict[str, str] = {}
    field.write({"f": value}, headers)
    assert headers.get("f") == header
    event: dict[str, Any] = {}
    field.read(headers, event)
    assert event.get("f", ...) == back


def test_a_header_that_cannot_be_read_is_none() -> None:
    for field, given, back in ((json_field("f"), "{", {}), (flag_field("f"), "yes", {"f": False})):
        event: dict[str, Any] = {}
        field.read({"f": given}, event)
        assert event == back


def test_a_prefix_is_for_what_no_other_entry_names() -> None:
    table = EventTable((Output(type="data-*"), Output(type="data-own", ephemeral=lambda event: True)))
    own, other = table.output("data-own"), table.output("data-x")
    assert own is not None
    assert other is not None
    assert (own.type, other.type, table.output("data")) == ("data-own", "data-*", None)
