"""Reading streams: whatever form the deliveries come in, and whatever else is on the wire, the text is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_kit import HEADERS, Log, Reader, live, opened, snapshot
from stepwell.transport._codec import FoldMeta
from stepwell.transport._decoder import MAX_CLOSED
from stepwell.transport.codecs import EventTable, Output, TextCodec, UIMessageCodec
from stepwell.wire import Cursor, Delivery

CODEC = UIMessageCodec()


def say(
    action: Any, version: str, data: Any = "", *, status: Any = "streaming", serial: str = "1", **more: Any
) -> Delivery:
    """A delivery of a stream of text."""
    transport = {**HEADERS, "stream": "true", "status": status, "stream-id": "t", **more.get("transport", {})}
    codec = {"kind": "text", "id": "t", **more.get("codec", {})}
    return Delivery(
        cursor=Cursor(version),
        action=action,
        serial=serial,
        version=version,
        name=more.get("name", None if action == "append" else "ai-output"),
        data=data,
        extras=more.get("extras", {"ai": {"transport": transport, "codec": codec}}),
    )


def told(*deliveries: Delivery, codec: Any = CODEC) -> list[list[str]]:
    """What each delivery adds, in short."""
    decoder = codec.create_decoder()
    short = {"text-start": "(", "text-end": ")", "start": "", "start-step": ""}
    said: list[list[str]] = []
    for delivery in deliveries:
        decoded = decoder.decode(delivery)
        assert not decoded.inputs
        marks = [short.get(event["type"], event.get("delta", event["type"])) for event in decoded.outputs]
        said.append([mark for mark in marks if mark])
    return said


CREATE = say("create", "1")

# --- one stream (SPEC 2.4) --------------------------------------------------------------------------------------------


def test_appends_are_told_as_they_come() -> None:
    assert told(CREATE, say("append", "2", "a"), say("append", "3", "b"), say("append", "4", status="complete")) == [
        ["("], ["a"], ["b"], [")"],
    ]  # fmt: skip


def test_text_and_end_may_come_in_one() -> None:
    assert told(CREATE, say("append", "2", "a", status="complete")) == [["("], ["a", ")"]]
    assert told(CREATE, say("append", "2", "a", status="cancelled")) == [["("], ["a"]]


def test_a_full_version_tells_what_it_adds() -> None:
    assert told(
        CREATE,
        say("append", "2", "a"),
        say("update", "4", "abc"),
        say("update", "5", "abc"),
        say("update", "6", "abcd", status="complete"),
    ) == [["("], ["a"], ["bc"], [], ["d", ")"]]


def test_the_first_contact_is_a_whole() -> None:
    assert told(say("update", "5", "abc"), say("append", "6", "d")) == [["(", "abc"], ["d"]]
    assert told(say("update", "5", "")) == [["("]]
    assert told(say("update", "5", "abc", status="complete"), say("append", "6", "d")) == [["(", "abc", ")"], []]
    assert told(say("update", "5", "abc", status="cancelled"), say("append", "6", "d")) == [["(", "abc"], []]


def test_what_was_seen_is_dropped_by_its_version() -> None:
    assert told(CREATE, say("append", "3", "a"), say("append", "3", "a"), say("append", "2", "x"), CREATE) == [
        ["("], ["a"], [], [], [],
    ]  # fmt: skip
    assert told(CREATE, say("append", "1", "a")) == [["("], []], "a version that did not grow"


def test_what_comes_after_the_end_is_dropped() -> None:
    for status in ("complete", "cancelled"):
        late = [say("append", "3", "x"), say("update", "4", "xyz"), say("delete", "5"), CREATE]
        assert told(CREATE, say("append", "2", status=status), *late)[2:] == [[], [], [], []]
    assert told(CREATE, say("delete", "2"), say("append", "3", "x"), say("update", "4", "xyz"))[1:] == [[], [], []]
    assert told(say("delete", "2"), say("update", "4", "xyz")) == [[], ["(", "xyz"]], "deleted before it was known"


def test_a_text_that_was_replaced_is_not_told_but_what_goes_on_from_it_is() -> None:
    """As the reference: live readers keep what they show."""
    assert told(
        CREATE,
        say("append", "2", "wrong"),
        say("update", "3", "right"),
        say("append", "4", " and"),
        say("update", "5", "right and on", status="complete"),
    ) == [["("], ["wrong"], [], [" and"], [" on", ")"]]


def test_text_in_a_create_is_for_those_who_come_late() -> None:
    assert told(say("create", "1", "FIRST "), say("append", "2", "second")) == [["("], ["second"]]
    assert told(say("update", "2", "FIRST second")) == [["(", "FIRST second"]]


def test_an_append_without_its_message_waits_for_the_next_full_version() -> None:
    assert told(say("append", "3", "middle"), say("append", "4", "end"), say("update", "5", "the end")) == [
        [], [], ["(", "the end"],
    ]  # fmt: skip


def test_data_that_is_no_text_adds_none() -> None:
    assert told(CREATE, say("append", "2", None), say("update", "3", {"a": 1}, status="complete")) == [["("], [], [")"]]


def test_headers_that_are_missing_or_wrong_do_no_harm() -> None:
    assert told(CREATE, say("append", "2", "bare", extras=None)) == [["("], ["bare"]]
    assert told(CREATE, say("append", "2", "x", extras={"ai": {"transport": {"status": "streaming"}}})) == [
        ["("],
        ["x"],
    ]
    assert told(say("create", "1", transport={"stream": True}), say("append", "2", "x")) == [[], []]
    assert told(say("create", "1", codec={"kind": "unknown"}), say("append", "2", "x", status="complete")) == [[], []]
    assert told(say("create", "1", codec={"kind": ["text"]}), say("append", "2", "x")) == [[], []]
    assert told(say("create", "1", name="app-event"), say("append", "2", "x")) == [[], []]
    assert told(say("create", "1", name="ai-input"), say("append", "2", "x", status="complete")) == [[], []]


def test_an_end_without_headers_has_those_of_the_start() -> None:
    decoder = CODEC.create_decoder()
    decoder.decode(say("create", "1", codec={"kind": "tool-input", "toolCallId": "c", "toolName": "pay"}))
    decoder.decode(say("append", "2", '{"n":1}', extras=None))
    [end] = decoder.decode(say("append", "3", extras={"ai": {"transport": {"status": "complete"}}})).outputs
    assert end == {"type": "tool-input-available", "toolCallId": "c", "toolName": "pay", "input": {"n": 1}}


def test_streams_of_two_messages_are_kept_apart() -> None:
    other = say("create", "2", serial="2"), say("append", "4", "b", serial="2")
    assert told(CREATE, other[0], say("append", "3", "a"), other[1], say("append", "5", "c")) == [
        ["("], ["("], ["a"], ["b"], ["c"],
    ]  # fmt: skip


def test_memory_is_bounded_by_what_is_open() -> None:
    decoder = CODEC.create_decoder()
    first = [say("create", "1"), say("append", "2", "a" * 100_000, status="complete")]
    for delivery in first:
        decoder.decode(delivery)
    held = vars(decoder)
    assert not held["_open"]
    for number in range(MAX_CLOSED - 1):
        decoder.decode(say("update", "1", "x", status="complete", serial=f"s{number}"))
    assert decoder.decode(say("update", "3", "b")).outputs == (), "still known"
    for number in range(MAX_CLOSED):
        decoder.decode(say("update", "1", "x", status="complete", serial=f"t{number}"))
    assert not held["_open"]
    assert len(held["_closed"]) == MAX_CLOSED
    assert decoder.decode(first[1]).outputs == (), "an append of what is forgotten is nothing"


def test_a_codec_that_fails_on_what_is_on_the_wire_reads_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Strict(TextCodec):
        table = EventTable((Output(type="note", decode=lambda data: {"body": data["body"]}),))

    note = Delivery(
        cursor=Cursor("1"),
        action="create",
        serial="1",
        version="1",
        name="ai-output",
        data="no object",
        extras={"ai": {"transport": HEADERS, "codec": {"kind": "note"}}},
    )
    decoder = Strict().create_decoder()
    assert decoder.decode(note).outputs == ()
    assert "cannot be read" in caplog.text


# --- any conversation, in any form ------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
IDS = st.sampled_from(["x", "y"])
CONTENT = st.one_of(
    st.builds(lambda i: {"type": "text-start", "id": i}, IDS),
    st.builds(lambda i, t: {"type": "text-delta", "id": i, "delta": t}, IDS, TEXTS),
    st.builds(lambda i: {"type": "text-end", "id": i}, IDS),
    st.builds(lambda i, t: {"type": "reasoning-delta", "id": i, "delta": t}, IDS, TEXTS),
    st.builds(lambda i: {"type": "reasoning-start", "id": i}, IDS),
    st.builds(lambda i: {"type": "tool-input-start", "toolCallId": i, "toolName": "pay"}, IDS),
    st.builds(lambda i, t: {"type": "tool-input-delta", "toolCallId": i, "inputTextDelta": t}, IDS, TEXTS),
    st.builds(lambda i: {"type": "tool-input-available", "toolCallId": i, "toolName": "pay", "input": {}}, IDS),
    st.builds(lambda i: {"type": "tool-output-available", "toolCallId": i, "output": [1]}, IDS),
    st.builds(lambda i: {"type": "tool-approval-request", "toolCallId": i, "approvalId": "a"}, IDS),
    st.builds(lambda i: {"type": "data-d", "id": i, "data": {"n": 1}}, IDS),
)
CHUNKS = st.one_of(
    CONTENT,
    st.sampled_from([{"type": one} for one in ("start", "start-step", "finish-step", "finish", "abort")]),
)


async def _encode(chunks: Sequence[dict[str, Any]], roll_up: float) -> list[Delivery]:
    log = Log()
    encoder = CODEC.create_encoder(log, opened, message_id="m-1", roll_up=roll_up)
    opened_streams: set[tuple[str, str]] = set()
    for chunk in chunks:
        family, _, phase = chunk["type"].rpartition("-")
        stream = family, chunk.get("id") or chunk.get("toolCallId", "")
        if phase == "start":
            opened_streams.add(stream)
        elif (phase == "delta" or chunk["type"] == "text-end") and stream not in opened_streams:
            continue
        elif chunk["type"] in ("text-end", "tool-input-available"):
            opened_streams.discard(stream)
        await encoder.publish_output(chunk)
    await encoder.finish()
    await encoder.close()
    return log.rows


class _Once(Reader):
    """With the tree's part: a single message is taken once, and a whole that is known already is nothing new."""

    def __init__(self) -> None:
        super().__init__(CODEC)
        self.seen: dict[str, str] = {}

    def read(self, deliveries: Any) -> Reader:
        for delivery in deliveries:
            if self.seen.get(delivery.serial, "") < delivery.version:
                self.seen[delivery.serial] = delivery.version
                super().read([delivery])
        return self


RANDOM = st.randoms(use_true_random=False)


@settings(deadline=None, max_examples=100)
@given(st.lists(CHUNKS, max_size=25), st.sampled_from([0, 0.02]), RANDOM)
def test_every_form_of_delivery_reads_to_the_same(chunks: Any, roll_up: float, choice: random.Random) -> None:
    rows = anyio.run(_encode, chunks, roll_up)
    shown = _Once().read(rows).messages
    assert _Once().read(snapshot(rows, len(rows))).messages == shown
    for joined in {0, choice.randrange(len(rows) + 1)}:
        assert _Once().read(snapshot(rows, joined)).read(live(rows, joined, choice)).messages == shown


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(CONTENT, max_size=8), max_size=4), RANDOM)
def test_history_may_be_read_after_what_islive(steps: Any, choice: random.Random) -> None:
    """A writer that says where steps begin; one that leaves it out looks different to who joins in the middle."""
    said = [[{"type": "start-step"}, *step, {"type": "finish-step"}] for step in steps]
    rows = anyio.run(_encode, [{"type": "start"}, *(chunk for step in said for chunk in step), {"type": "finish"}], 0)
    joined = choice.randrange(len(rows) + 1)
    late = _Once().read(live(rows, joined, choice)).read(snapshot(rows, len(rows)))
    assert late.messages == _Once().read(rows).messages


@settings(deadline=None, max_examples=60)
@given(st.lists(CHUNKS, max_size=25))
def test_the_roll_up_changes_nothing_that_is_shown(chunks: Any) -> None:
    one, other = anyio.run(_encode, chunks, 0), anyio.run(_encode, chunks, 0.02)
    assert Reader(CODEC).read(one).messages == Reader(CODEC).read(other).messages
    assert len(other) <= len(one)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KINDS = st.sampled_from(
    [
        *CODEC.table.streams,
        *CODEC.table.inputs,
        "user-message",
        "data-x",
        "error",
        "start",
        "finish",
        "tool-input-error",
    ]
)
HEADER = st.sampled_from(["run-id", "codec-message-id", "stream", "status", "stream-id", "role"])
FIELD = st.sampled_from(["id", "toolCallId", "toolName", "partType", "providerMetadata", "messageId", "finishReason"])
EXTRAS = st.one_of(
    JSON,
    st.builds(
        lambda transport, codec, kind: {"ai": {"transport": transport, "codec": {**codec, "kind": kind}}},
        st.dictionaries(
            HEADER, st.sampled_from(["true", "false", "streaming", "complete", "text", ""]) | JSON, max_size=6
        ),
        st.dictionaries(FIELD, st.sampled_from(["text", "file", "data-x", "{", "null"]) | JSON, max_size=5),
        KINDS | JSON,
    ),
)
SEED = st.builds(lambda messages: {"forkSeed": {"messages": messages}, "output": 1, "message": messages}, JSON)
ANYTHING = st.builds(
    lambda action, serial, version, name, data, extras: Delivery(
        cursor=Cursor("1"),
        action=action,
        serial=serial,
        version=version,
        name=name,
        data=data,
        extras=extras if isinstance(extras, dict) else None,
    ),
    st.sampled_from(["create", "append", "update", "delete"]),
    st.sampled_from(["1", "2"]),
    st.sampled_from(["1", "2", "3"]),
    st.sampled_from(["ai-input", "ai-output", "other", None]),
    JSON | SEED,
    EXTRAS,
)


@settings(deadline=None, max_examples=200)
@given(st.lists(ANYTHING, max_size=8), st.sampled_from([UIMessageCodec(), TextCodec()]))
def test_whatever_is_on_the_wire_is_read_or_is_not(deliveries: list[Delivery], codec: Any) -> None:
    reader = Reader(codec)
    decode = reader.decoder.decode
    for delivery in deliveries:
        decode(delivery)
    assert reader.codec.get_messages(codec.init()) == []


@settings(deadline=None, max_examples=200)
@given(st.lists(ANYTHING, max_size=8))
def test_what_was_read_can_be_shown(deliveries: list[Delivery]) -> None:
    projection = CODEC.init()
    decoder = CODEC.create_decoder()
    for delivery in deliveries:
        decoded = decoder.decode(delivery)
        for event in decoded.inputs:
            projection = CODEC.fold(projection, "input", event, FoldMeta(delivery.serial, "m"))
        for event in decoded.outputs:
            projection = CODEC.fold(projection, "output", event, FoldMeta(delivery.serial, "m"))
        for message in CODEC.get_messages(projection):
            assert set(message.message) <= {"id", "role", "parts", "metadata"}
