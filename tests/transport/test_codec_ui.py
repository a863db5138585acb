"""The codec of UI messages: the golden traces of the JavaScript SDK read and written, and what is made of them."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest

from codec_kit import HEADERS, Log, Reader, deliveries, history, opened, outputs, written
from stepwell.errors import InvalidInputError, MisuseError
from stepwell.transport import PipeResult
from stepwell.transport._codec import CodecMessage, FoldMeta
from stepwell.transport.codecs import RunOutcome, UIMessage, UIMessageCodec, create_tool_result_fork, run_outcome
from stepwell.wire import codec_headers, transport_headers
from transport_kit import ALL_CHUNKS, trace

pytestmark = pytest.mark.anyio

CODEC = UIMessageCodec()

LINEAR = [
    "basic-run",
    "cancel-midstream",
    "cancel-routing",
    "chat-transport",
    "foreign-messages",
    "late-join",
    "run-error",
    "session-end-vs-detach",
    "steering",
    "step-retry-crash",
    "step-retry-failed",
    "suspend-resume-approval",
]
"""Traces without branches: there a tree adds nothing to what the codec makes of them."""


async def encode(*chunks: dict[str, Any], roll_up: float = 0) -> Log:
    log = Log()
    encoder = CODEC.create_encoder(log, opened, message_id="m-1", roll_up=roll_up)
    for chunk in chunks:
        await encoder.publish_output(chunk)
    await encoder.finish()
    await encoder.close()
    return log


async def read(*chunks: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts that readers show."""
    messages = Reader(CODEC).read((await encode(*chunks)).rows).messages
    return messages[0]["message"]["parts"] if messages else []


def fold(*events: tuple[Any, Any, str]) -> list[dict[str, Any]]:
    projection = CODEC.init()
    for direction, event, message_id in events:
        projection = CODEC.fold(projection, direction, event, FoldMeta("s", message_id))
    return [{"codecMessageId": one.codec_message_id, "message": one.message} for one in CODEC.get_messages(projection)]


# --- the golden traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINEAR)
def test_a_trace_reads_to_the_view_it_records(name: str) -> None:
    recorded = trace(name)
    assert Reader(CODEC).read(deliveries(recorded["published"])).messages == recorded["clientView"]
    assert Reader(CODEC).read(history(name)).messages == recorded["clientView"]


def test_every_kind_of_chunk_reads_to_the_view_of_the_trace() -> None:
    recorded = trace("all-chunks")
    # The view was read before a second run with an unknown chunk, which shows nothing.
    assert Reader(CODEC).read(deliveries(recorded["published"])).messages == recorded["clientView"]
    assert Reader(CODEC).read(history("all-chunks")).messages == recorded["clientView"]


def test_a_repaired_append_reads_as_it_did_there_and_as_it_did_late() -> None:
    recorded = trace("append-recovery")
    assert Reader(CODEC).read(deliveries(recorded["published"])).messages == recorded["clientView"]
    assert Reader(CODEC).read(history("append-recovery")).messages == recorded["lateView"]


def test_a_fork_goes_on_from_the_copies_in_its_seed() -> None:
    recorded = trace("tool-result-fork")
    question, answer = recorded["clientView"][0], recorded["clientView"][1:]
    fork = next(
        message["extras"]["ai"]["transport"]["codec-message-id"]
        for operation in recorded["published"]
        for message in operation.get("messages", ())
        if "supersedes" in message.get("extras", {}).get("ai", {}).get("transport", {})
    )
    shown = Reader(CODEC).read(deliveries(recorded["published"])).messages
    assert shown[0] == question
    # The run that was superseded is still told here: hiding it is the tree's matter.
    assert [one for one in shown if one["codecMessageId"] == fork] == answer[:1]


async def test_every_kind_of_chunk_is_written_as_in_the_trace() -> None:
    golden = outputs("all-chunks")
    first = golden[0][3]["ai"]["transport"]
    own = {key: value for key, value in first.items() if key not in ("stream", "status", "stream-id")}

    async def as_recorded() -> dict[str, str]:
        return own

    log = Log()
    encoder = CODEC.create_encoder(log, as_recorded, message_id=own["codec-message-id"], roll_up=0)
    for chunk in ALL_CHUNKS:
        await encoder.publish_output(chunk)
    await encoder.close()
    assert written(log) == golden
    assert list(log.ids) == [f"{own['codec-message-id']}:{n}" for n in range(len(log.ids))]


@pytest.mark.parametrize("name", ["basic-run", "late-join", "suspend-resume-approval", "tool-result-fork"])
async def test_what_a_reader_decodes_is_written_as_it_was(name: str) -> None:
    """Decoding a trace gives the chunks that it was written from, so writing these gives the trace."""
    golden = outputs(name)
    pipes: dict[str, list[Any]] = {}
    decoder = CODEC.create_decoder()
    for row in deliveries(trace(name)["published"]):
        message_id = transport_headers(row.extras).get("codec-message-id", "")
        for chunk in decoder.decode(row).outputs:
            pipes.setdefault(message_id, []).append(chunk)
    log = Log()
    for message_id, chunks in pipes.items():
        headers = next(row[3] for row in golden if row[3]["ai"]["transport"]["codec-message-id"] == message_id)
        own = {k: v for k, v in headers["ai"]["transport"].items() if k not in ("stream", "status", "stream-id")}

        async def as_recorded(own: dict[str, str] = own) -> dict[str, str]:
            return own

        encoder = CODEC.create_encoder(log, as_recorded, message_id=message_id, roll_up=0)
        for chunk in chunks:
            await encoder.publish_output(chunk)
        await encoder.close()
    assert written(log) == golden


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_a_message_is_sent_part_by_part() -> None:
    golden = trace("all-chunks")["published"][0]["messages"]
    headers = {key: value for key, value in golden[0]["extras"]["ai"]["transport"].items() if key != "discrete"}
    given: UIMessage = {
        "id": "u-1",
        "role": "user",
        "parts": [
            {"type": "text", "text": "Look at this"},
            {"type": "file", "mediaType": "image/png", "url": "https://x.test/a.png"},
            {"type": "data-geo", "id": "g1", "data": {"lat": 1}},
            {"type": "step-start"},
        ],
    }
    messages = CODEC.encode_input(CODEC.create_user_message(given), headers)
    said = [{"name": one.name, "data": one.data, "extras": one.extras} for one in messages]
    assert said == [{"name": one["name"], "data": one["data"], "extras": one["extras"]} for one in golden]


def test_text_is_a_message_and_a_message_without_usable_parts_is_empty_text() -> None:
    event = CODEC.create_user_message("Hi")
    assert event["message"] == {
        "id": event["message"]["id"],
        "role": "user",
        "parts": [{"type": "text", "text": "Hi"}],
    }
    assert event["message"]["id"]
    empty = CODEC.create_user_message({"id": "u", "role": "user", "parts": [{"type": "step-start"}]})
    [message] = CODEC.encode_input(empty, {})
    assert message.data == ""
    assert codec_headers(message.extras)["partType"] == "text"
    with pytest.raises(MisuseError, match="id, role and parts"):
        CODEC.create_user_message({"role": "user", "parts": []})  # type: ignore[typeddict-item]


def test_answers_to_tools_are_written_as_in_the_trace() -> None:
    approval = next(
        operation["messages"][0]
        for operation in trace("suspend-resume-approval")["published"]
        if operation["by"] == "user-a" and "approved" in json.dumps(operation)
    )
    headers = approval["extras"]["ai"]["transport"]
    event = CODEC.create_tool_approval_response(headers["codec-message-id"], "c1", approved=True)
    assert CODEC.target_of(event) == headers["codec-message-id"]
    assert not CODEC.is_new_message(event)
    given = approval["extras"]["ai"]["codec"]
    event["toolCallId"] = given["toolCallId"]
    if "reason" in given:
        event["reason"] = given["reason"]
    [message] = CODEC.encode_input(event, headers)
    assert (message.name, message.data, message.extras) == (approval["name"], approval["data"], approval["extras"])


def test_a_fork_is_written_as_in_the_trace() -> None:
    golden = next(
        message
        for operation in trace("tool-result-fork")["published"]
        for message in operation.get("messages", ())
        if "supersedes" in message.get("extras", {}).get("ai", {}).get("transport", {})
    )
    seed = golden["data"]["forkSeed"]["messages"][0]
    call = golden["extras"]["ai"]["codec"]["toolCallId"]
    messages = [CodecMessage("old", seed["message"])]
    fork = create_tool_result_fork(messages, call, output=golden["data"]["output"], fork_id=seed["codecMessageId"])
    [message] = CODEC.encode_input(fork, golden["extras"]["ai"]["transport"])
    assert (message.name, message.data, message.extras) == (golden["name"], golden["data"], golden["extras"])


def test_a_fork_takes_every_message_of_the_run_along() -> None:
    call: UIMessage = {
        "id": "a",
        "role": "assistant",
        "parts": [{"type": "tool-x", "toolCallId": "c", "state": "input-available", "input": {}}],
    }
    other: UIMessage = {"id": "b", "role": "assistant", "parts": [{"type": "text", "text": "then"}]}
    fork = create_tool_result_fork([CodecMessage("A", call), CodecMessage("B", other)], "c", error="no")
    seeds = fork["forkSeed"]["messages"]
    assert fork["kind"] == "tool-result-error"
    assert fork["codecMessageId"] == seeds[0]["codecMessageId"] not in ("A", "B")
    [failed, kept] = fold(("input", fork, fork["codecMessageId"]))
    assert failed["message"]["parts"] == [
        {"type": "tool-x", "toolCallId": "c", "state": "output-error", "input": {}, "errorText": "no"}
    ]
    assert kept["message"] == other
    assert call["parts"][0]["state"] == "input-available", "the copy changed, not the message"
    with pytest.raises(MisuseError, match="no-call"):
        create_tool_result_fork([CodecMessage("A", call)], "no-call")


def test_unusable_parts_of_a_seed_are_left_out_and_unusable_messages_too() -> None:
    fork = {"codecMessageId": "F", "kind": "tool-result", "toolCallId": "c", "output": 1}
    seed = [
        {
            "codecMessageId": "F",
            "message": {"id": "a", "role": "assistant", "parts": [7, {"no": "type"}, {"type": "text", "text": "x"}]},
        },
        {"codecMessageId": 3, "message": {"parts": []}},
        {"codecMessageId": "G", "message": {"parts": "none"}},
        "nothing",
    ]  # fmt: skip
    [message] = CODEC.encode_input(
        {**fork, "forkSeed": {"messages": seed}}, {"codec-message-id": "F", "role": "assistant"}
    )
    log = Log()
    log.add("create", "", message.name, message.data, message.extras)
    assert Reader(CODEC).read(log.rows).messages == [
        {"codecMessageId": "F", "message": {"id": "a", "role": "assistant", "parts": [{"type": "text", "text": "x"}]}}
    ]


def test_a_seed_replaces_nothing_that_is_there() -> None:
    given: UIMessage = {"id": "a", "role": "assistant", "parts": [{"type": "text", "text": "seed"}]}
    seeds = {"messages": [{"codecMessageId": one, "message": given} for one in ("U", "F")]}
    fork = {"kind": "tool-result", "codecMessageId": "F", "toolCallId": "c", "output": 1, "forkSeed": seeds}
    said = [("input", CODEC.create_user_message("mine"), "U"), ("input", fork, "F"), ("input", fork, "F")]
    texts = [one["message"]["parts"][0]["text"] for one in fold(*said)]
    assert texts == ["mine", "seed"]


def test_regenerate_has_no_content() -> None:
    event = CODEC.create_regenerate("m-1", "p-1")
    assert CODEC.target_of(event) is None
    [message] = CODEC.encode_input(event, {"codec-message-id": "g", "role": "user"})
    assert (message.data, codec_headers(message.extras)) == ("", {"kind": "regenerate"})
    log = Log()
    log.add("create", "", message.name, message.data, message.extras)
    assert Reader(CODEC).read(log.rows).messages == []
    assert fold(("input", event, "g")) == []


def test_an_unknown_input_is_refused() -> None:
    with pytest.raises(MisuseError, match="'shout'"):
        CODEC.encode_input({"kind": "shout"}, {})


# --- the projection ---------------------------------------------------------------------------------------------------

TOOL = {"type": "tool-input-available", "toolCallId": "c", "toolName": "pay", "input": {"n": 1}}
PART = {"type": "tool-pay", "toolCallId": "c", "state": "input-available", "input": {"n": 1}}


async def test_what_a_writer_left_out_is_added_once_for_each_run_and_step() -> None:
    parts = await read(
        {"type": "text-start", "id": "t"},
        {"type": "text-delta", "id": "t", "delta": "a"},
        {"type": "text-end", "id": "t"},
        TOOL,
        {"type": "finish-step"},
        {"type": "text-start", "id": "t"},
        {"type": "error", "errorText": "x"},
        {"type": "text-start", "id": "u"},
    )
    assert [part["type"] for part in parts] == [
        "step-start", "text", "tool-pay", "step-start", "text", "step-start", "text",
    ]  # fmt: skip


async def test_a_start_step_of_the_decoder_gives_way_to_the_real_one() -> None:
    """As somebody sees it who joined behind the real one and then reads history."""
    rows = (await encode({"type": "start"}, {"type": "start-step"}, {"type": "text-start", "id": "t"})).rows
    late = Reader(CODEC).read(rows[2:]).read(rows[:2])
    assert late.messages[0]["message"]["parts"] == [{"type": "step-start"}, {"type": "text", "text": ""}]


async def test_text_without_an_open_part_is_not_shown() -> None:
    deltas = [("output", {"type": "text-delta", "id": "t", "delta": text}, "m") for text in ("a", "b", "c")]
    start, end = ("output", {"type": "text-start", "id": "t"}, "m"), ("output", {"type": "text-end", "id": "t"}, "m")
    step = ("output", {"type": "finish-step"}, "m")
    [message] = fold(deltas[0], start, deltas[1], end, deltas[2])
    assert message["message"]["parts"] == [{"type": "text", "text": "b"}]
    [message] = fold(start, deltas[0], step, deltas[1])
    assert message["message"]["parts"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize(
    ("texts", "shown", "final"),
    [
        (['{"a":', " 1}"], [{}, {"input": {"a": 1}}], {"input": {"a": 1}}),
        (['{"a": 1}', " "], [{"input": {"a": 1}}, {"input": {"a": 1}}], {"input": {"a": 1}}),
        (["[1,", "2]"], [{}, {"input": [1, 2]}], {"input": [1, 2]}),
        (['"x', '"'], [{}, {"input": "x"}], {"input": "x"}),
        (["1", "2"], [{"input": 1}, {"input": 12}], {"input": 12}),
        (["nu", "ll"], [{}, {"input": None}], {"input": None}),
        (['{"a": "}', '"}'], [{}, {"input": {"a": "}"}}], {"input": {"a": "}"}}),
        (["not ", "json"], [{}, {}], {"input": "not json"}),
        ([], [], {}),
    ],
)
async def test_a_tools_input_is_shown_as_soon_as_it_is_json(texts: Any, shown: Any, final: Any) -> None:
    call = {"toolCallId": "c", "toolName": "pay"}
    chunks = [{"type": "tool-input-delta", "toolCallId": "c", "inputTextDelta": text} for text in texts]
    for count, given in enumerate(shown, 1):
        parts = await read({"type": "tool-input-start", **call}, *chunks[:count])
        assert parts[-1] == {"type": "tool-pay", "toolCallId": "c", "state": "input-streaming", **given}
    end = {"type": "tool-input-available", **call, "input": "is not sent"}
    parts = await read({"type": "tool-input-start", **call}, *chunks, end)
    assert parts[-1] == {"type": "tool-pay", "toolCallId": "c", "state": "input-available", **final}


async def test_a_streamed_input_that_fails_keeps_its_place() -> None:
    failed = {"type": "tool-input-error", "toolCallId": "c", "toolName": "pay", "input": None, "errorText": "bad"}
    parts = await read(
        {"type": "tool-input-start", "toolCallId": "c", "toolName": "pay"}, TOOL | {"toolCallId": "d"}, failed
    )
    assert parts[1] == {
        "type": "tool-pay",
        "toolCallId": "c",
        "state": "output-error",
        "input": None,
        "errorText": "bad",
    }
    assert parts[2]["toolCallId"] == "d"


@pytest.mark.parametrize(
    ("chunk", "run_wide"),
    [
        ({"type": "tool-output-available", "output": 1}, True),
        ({"type": "tool-output-error", "errorText": "x"}, True),
        ({"type": "tool-output-denied"}, False),
        ({"type": "tool-approval-request", "approvalId": "a"}, False),
    ],
)
def test_results_are_found_in_the_whole_run_and_requests_in_their_message(chunk: Any, run_wide: bool) -> None:
    given = [
        ("output", {"type": "tool-input-start", "toolCallId": "c", "toolName": "pay"}, "A"),
        ("output", TOOL, "A"),
        ("output", {**chunk, "toolCallId": "c"}, "B"),
    ]
    found = fold(*given)[0]["message"]["parts"][0]
    assert (found["state"] != "input-available") is run_wide
    assert (
        fold(*given[:2], ("output", {**chunk, "toolCallId": "c"}, "A"))[0]["message"]["parts"][0] != found or run_wide
    )
    assert fold(*given[:2], ("output", {**chunk, "toolCallId": "?"}, "A"))[0]["message"]["parts"] == [PART]


def test_what_clients_say_of_a_tool_waits_for_it() -> None:
    start = ("output", {"type": "tool-input-start", "toolCallId": "c", "toolName": "pay"}, "A")
    available, request = (
        ("output", TOOL, "A"),
        ("output", {"type": "tool-approval-request", "toolCallId": "c", "approvalId": "p"}, "A"),
    )
    result = ("input", CODEC.create_tool_result("A", "c", {"ok": None}), "A")
    error = ("input", CODEC.create_tool_result_error("A", "c", "broke"), "A")
    yes = ("input", CODEC.create_tool_approval_response("A", "c", approved=True, reason="fine"), "A")
    no = ("input", CODEC.create_tool_approval_response("A", "c", approved=False, reason="never"), "A")

    def part(*events: Any) -> Any:
        return fold(*events)[0]["message"]["parts"][0]

    assert part(start, available, result) == {**PART, "state": "output-available", "output": {"ok": None}}
    assert part(result, start)["state"] == "output-available"
    assert part(start, available, error) == {**PART, "state": "output-error", "errorText": "broke"}
    responded = {**PART, "state": "approval-responded"}
    assert part(start, available, request, yes) == {
        **responded, "approval": {"id": "p", "approved": True, "reason": "fine"},
    }  # fmt: skip
    assert part(start, available, request, no) == {
        **PART, "state": "output-denied", "approval": {"id": "", "approved": False},
    }  # fmt: skip
    assert fold(result, ("output", {"type": "start"}, "B"))[0]["codecMessageId"] == "B"


async def test_data_parts_are_replaced_by_type_and_id_and_transient_ones_never_shown() -> None:
    log = await encode(
        {"type": "data-a", "id": "1", "data": {"n": 1}},
        {"type": "data-b", "id": "1", "data": {"n": 2}},
        {"type": "data-a", "id": "1", "data": {"n": 3}},
        {"type": "data-a", "data": {"n": 4}},
        {"type": "data-a", "data": [], "transient": True},
    )
    assert [row.extras["ephemeral"] for row in log.rows if row.extras and "ephemeral" in row.extras] == [True]
    assert Reader(CODEC).read(log.rows).messages[0]["message"]["parts"] == [
        {"type": "data-a", "id": "1", "data": {"n": 3}},
        {"type": "data-b", "id": "1", "data": {"n": 2}},
        {"type": "data-a", "data": {"n": 4}},
    ]


async def test_an_id_and_metadata_of_the_writer() -> None:
    chunks = [
        {"type": "start", "messageId": "mine", "messageMetadata": {"a": 1}},
        {"type": "abort", "reason": "enough"},
        {"type": "finish", "finishReason": "who knows", "messageMetadata": {"b": 2}},
    ]
    log = await encode(*chunks)
    [message] = Reader(CODEC).read(log.rows).messages
    assert message == {
        "codecMessageId": "m-1",
        "message": {"id": "mine", "role": "assistant", "parts": [], "metadata": {"b": 2}},
    }
    told = [event for row in log.rows for event in CODEC.create_decoder().decode(row).outputs]
    assert told[1:] == [
        {"type": "abort", "reason": "enough"},
        {"type": "finish", "finishReason": "stop", "messageMetadata": {"b": 2}},
    ]


def test_metadata_of_a_message_that_is_not_there_makes_none() -> None:
    for kind in ("finish", "message-metadata", "finish-step", "error", "abort"):
        assert fold(("output", {"type": kind, "messageMetadata": {"a": 1}}, "m")) == []
    assert fold(("output", {"type": "start"}, "")) == [], "an output without a message has no place"


def test_what_was_given_out_never_changes() -> None:
    projection = CODEC.init()
    copies: list[tuple[Any, Any]] = []
    said: list[tuple[Any, Any]] = [("input", CODEC.create_user_message("Hi"))]
    said += [("output", chunk) for chunk in ALL_CHUNKS]
    said += [("input", CODEC.create_tool_result("m", "c1", 3)), ("input", CODEC.create_user_message("more"))]
    for direction, event in said:
        projection = CODEC.fold(projection, direction, event, FoldMeta("s", "m"))
        given = CODEC.get_messages(projection)
        assert [(id(one), id(one.message)) for one in CODEC.get_messages(projection)] == [
            (id(one), id(one.message)) for one in given
        ]
        copies.append((given, copy.deepcopy(given)))
    assert all(given == before for given, before in copies)


def test_a_token_leaves_other_messages_and_parts_as_they_are() -> None:
    projection = CODEC.init()

    def take(chunk: Any, message_id: str) -> None:
        CODEC.fold(projection, "output", chunk, FoldMeta("s", message_id))

    for message_id in ("A", "B"):
        take({"type": "text-start", "id": "t"}, message_id)
        take({"type": "data-x", "data": {}}, message_id)
    first, second = CODEC.get_messages(projection)
    take({"type": "text-delta", "id": "t", "delta": "x"}, "B")
    same, changed = CODEC.get_messages(projection)
    assert same is first
    assert changed is not second
    assert changed.message["parts"][1] is second.message["parts"][1]


# --- bad outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "error", "says"),
    [
        ({"type": "no-such-chunk"}, MisuseError, "no-such-chunk"),
        ({}, MisuseError, "with a type"),
        ({"type": 5}, MisuseError, "with a type"),
        ("text", MisuseError, "with a type"),
        ({"type": "text-start"}, MisuseError, "'id'"),
        ({"type": "text-delta", "id": "t"}, MisuseError, "NoneType"),
        ({"type": "text-delta", "id": "t", "delta": 5}, MisuseError, "int"),
        ({"type": "text-delta", "id": "?", "delta": "x"}, MisuseError, "'text ?'"),
        ({"type": "text-delta", "id": "t", "delta": "\ud83d"}, InvalidInputError, "surrogate"),
        ({"type": "text-end", "id": "?"}, MisuseError, "'text ?'"),
        ({"type": "data-n", "data": 5}, InvalidInputError, "int"),
        ({"type": "data-n", "data": True}, InvalidInputError, "bool"),
        ({"type": "tool-input-available", "toolCallId": "c", "toolName": "x", "input": 5}, InvalidInputError, "int"),
        ({"type": "file", "mediaType": "x"}, MisuseError, "'url'"),
        ({"type": "error"}, MisuseError, "'errorText'"),
        ({"type": "tool-output-denied", "toolCallId": 5}, MisuseError, "toolCallId"),
        ({"type": "tool-output-available", "toolCallId": "c", "preliminary": "yes"}, MisuseError, "preliminary"),
        ({"type": "finish", "messageMetadata": {"a": object()}}, MisuseError, "messageMetadata"),
    ],
)
async def test_a_bad_output_is_refused_with_a_reason_and_opens_nothing(chunk: Any, error: Any, says: str) -> None:
    log = Log()
    encoder = CODEC.create_encoder(log, opened, message_id="m-1", roll_up=0)
    if isinstance(chunk, dict) and chunk.get("id") == "t":
        await encoder.publish_output({"type": "text-start", "id": "t"})
    before = list(log.rows)
    with pytest.raises(error) as caught:
        await encoder.publish_output(chunk)
    assert says in caught.value.message
    assert log.rows == before
    await encoder.publish_output({"type": "text-start", "id": "t"})
    assert len(log.rows) == len(before) + 1, "and the encoder goes on"


async def test_headers_are_those_of_the_one_that_was_opened_and_asked_for_once() -> None:
    asked = 0

    async def once() -> dict[str, str]:
        nonlocal asked
        asked += 1
        return dict(HEADERS)

    log = Log()
    encoder = CODEC.create_encoder(log, once, message_id="m-1", roll_up=0)
    assert (asked, encoder.has_output) == (0, False)
    await encoder.publish_output({"type": "start"})
    await encoder.publish_output({"type": "start-step"})
    assert (asked, encoder.has_output) == (1, True)
    assert codec_headers(log.rows[0].extras) == {"kind": "start", "messageId": "m-1"}


# --- after the pipe ---------------------------------------------------------------------------------------------------


async def test_the_finish_reason_says_how_a_run_goes_on() -> None:
    complete = PipeResult("complete")
    assert await run_outcome(complete, "stop") == RunOutcome("complete")
    assert await run_outcome(complete, "tool-calls") == RunOutcome("suspend")
    assert await run_outcome(PipeResult("cancelled"), "tool-calls") == RunOutcome("cancelled")
    error = ValueError("model")
    assert await run_outcome(PipeResult("error", error), "stop") == RunOutcome("error", error)


async def test_a_finish_reason_may_be_waited_for() -> None:
    loop = asyncio.get_running_loop()

    async def later(reason: Any) -> Any:
        return reason

    async def never() -> Any:
        raise ValueError("no reason")

    assert await run_outcome(PipeResult("complete"), later("tool-calls")) == RunOutcome("suspend")
    outcome = await run_outcome(PipeResult("complete"), never())
    assert (outcome.reason, str(outcome.error)) == ("error", "no reason")
    assert await run_outcome(PipeResult("cancelled"), never()) == RunOutcome("cancelled")
    given_up: asyncio.Future[Any] = loop.create_future()
    given_up.cancel()
    assert await run_outcome(PipeResult("complete"), given_up) == RunOutcome("cancelled")


async def test_cancelling_the_wait_for_a_finish_reason_is_no_outcome() -> None:
    waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(run_outcome(PipeResult("complete"), waiting))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
