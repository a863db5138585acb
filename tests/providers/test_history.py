"""Histories on their way to a provider: always acceptable, own data restored, that of others left out (promise P8)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, ThinkingPart, ToolCallPart, ToolReturnPart

from providers.helpers import WEATHER, Adapters, Seen, ask
from providers.wire_server import WireServer
from stepwell.messages import (
    AssistantMessage,
    DirectMessage,
    FilePart,
    Message,
    ReasoningPart,
    ToolCall,
    ToolResult,
    UserMessage,
    decode_message,
    encode_message,
)
from stepwell.messages import TextPart as Text
from stepwell.models._history import HistoryEncoder, Identity

pytestmark = pytest.mark.anyio
APIS = ("openai-chat", "openai-responses", "anthropic", "google")


def encoder(api: Any = "openai-chat", tag: str = "t", **fields: Any) -> HistoryEncoder:
    return HistoryEncoder(Identity(api=api, system="s", canonical="s", url="u", tag=tag), **fields)


def user(text: str = "hi") -> UserMessage:
    return UserMessage(content=text, id="s|t|u")


def called(*calls: ToolCall, text: str = "", **fields: Any) -> AssistantMessage:
    return AssistantMessage(id="s|t|a", text=text, calls=calls, **fields)


def result(call: str, content: Any = "sunny", **fields: Any) -> ToolResult:
    return ToolResult(id="s|t|r", call=call, name="get_weather", content=content, **fields)


def call(call_id: str, args: Any = None) -> ToolCall:
    return ToolCall(id=call_id, name="get_weather", args={"city": "Paris"} if args is None else args)


# --- whatever comes in, what goes out is acceptable -------------------------------------------------------------------

ids = st.sampled_from(["call_1", "call_2", "c" * 100, "ü ?", "", "pyd_ai_1"])
messages = st.lists(
    st.one_of(
        st.just(user()),
        st.just(DirectMessage(id="s|t|d", text="Hello")),
        st.lists(ids, max_size=3).map(lambda some: called(*map(call, some), text="" if some else "ok")),
        ids.map(result),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(messages, st.sampled_from(APIS))
def test_every_call_has_its_result_and_every_result_its_call(history: list[Message], api: str) -> None:
    encoded = encoder(api).encode(history)
    open_calls: list[str] = []
    all_ids: list[str] = []
    for message in encoded:
        returned = [part.tool_call_id for part in message.parts if isinstance(part, ToolReturnPart)]
        assert sorted(returned) == sorted(open_calls)
        open_calls = [part.tool_call_id for part in message.parts if isinstance(part, ToolCallPart)]
        all_ids += open_calls
        assert message.parts
    assert open_calls == []
    assert len(set(all_ids)) == len(all_ids)
    assert all(one and len(one) <= 64 for one in all_ids)
    if api in ("anthropic", "google"):
        assert isinstance(encoded[0], ModelRequest)
        assert isinstance(encoded[-1], ModelRequest)
    made = sum(len(message.calls) for message in history if isinstance(message, AssistantMessage))
    assert len(all_ids) == made


@settings(deadline=None)
@given(messages, st.integers(0, 12), st.sampled_from(APIS))
def test_a_remembered_history_is_encoded_like_a_new_one(history: list[Message], cut: int, api: str) -> None:
    one = encoder(api, size=4)
    one.encode(history[:cut])
    again = [decode_message(encode_message(message)) for message in history]
    assert _plain(one.encode(history)) == _plain(encoder(api).encode(again))


def _plain(encoded: list[Any]) -> list[Any]:
    return [
        [
            (
                part.part_kind,
                getattr(part, "content", None),
                getattr(part, "tool_call_id", None),
                getattr(part, "args", 0),
            )
            for part in message.parts
        ]
        for message in encoded
    ]


def test_each_message_object_is_encoded_once() -> None:
    history = [user(), called(call("call_1")), result("call_1"), AssistantMessage(id="s|t|b", text="It is sunny.")]
    one = encoder()
    first, second = one.encode(history), one.encode([*history, user("thanks")])
    assert second[0] is first[0]
    assert second[1] is first[1]
    assert second[2].parts[0] is first[2].parts[0]
    assert second[3] is first[3]


def test_the_memory_of_encoded_messages_is_bounded() -> None:
    one = encoder(size=2)
    history = [user(str(number)) for number in range(5)]
    one.encode(history)
    assert len(one._known) == 2


def test_another_object_at_the_same_address_is_not_taken_for_the_first() -> None:
    one = encoder()
    for number in range(50):
        assert one.encode([user(str(number))])[0].parts[0].content == str(number)


def test_ids_a_provider_takes_go_out_as_they_are_and_others_always_as_the_same() -> None:
    long = "toolu_" + "x" * 60
    history = [user(), called(call("call_1"), call(long)), result("call_1"), result(long)]
    for api, kept in (("openai-chat", False), ("openai-responses", False), ("anthropic", False), ("google", False)):
        sent = [part.tool_call_id for part in encoder(api).encode(history)[1].parts]
        assert sent[0] == "call_1"
        assert (sent[1] == long) is kept
        assert sent == [part.tool_call_id for part in encoder(api).encode(history)[1].parts]
    fits = "toolu_" + "x" * 50
    assert encoder("anthropic").encode([called(call(fits)), result(fits)])[1].parts[0].tool_call_id == fits


def test_an_id_that_came_before_goes_out_as_another() -> None:
    history = [user(), called(call("call_1")), result("call_1"), called(call("call_1")), result("call_1")]
    encoded = encoder().encode(history)
    first, second = encoded[1].parts[0].tool_call_id, encoded[3].parts[0].tool_call_id
    assert first == "call_1"
    assert second != first
    assert encoded[4].parts[0].tool_call_id == second


@pytest.mark.parametrize(
    ("outcome", "content", "sent", "failed"),
    [
        ("ok", "sunny", "sunny", False),
        ("ok", {"t": 1}, '{"t":1}', False),
        ("ok", None, "", False),
        ("error", "no such city", "no such city", True),
        ("error", None, "This call failed.", True),
        ("not_run", None, "This call was not run: the turn ended before it.", False),
        ("unknown", None, "Whether this call took effect is unknown.", False),
    ],
)
def test_outcomes(outcome: Any, content: Any, sent: str, failed: bool) -> None:
    part = encoder().encode([called(call("c")), result("c", content, outcome=outcome)])[1].parts[0]
    assert part.content.startswith(sent)
    assert (part.outcome == "failed") is failed


def test_an_empty_history_still_asks_something() -> None:
    assert encoder().encode([])[0].parts[0].content == "(start)"


def test_a_reply_with_nothing_to_send_is_left_out() -> None:
    assert len(encoder().encode([user(), AssistantMessage(id="s|t|a")])) == 1


def test_code_speaks_as_user_and_direct_text_as_assistant() -> None:
    encoded = encoder().encode([UserMessage(content="x", by="code", id="s|t|u"), DirectMessage(text="y", id="s|t|d")])
    assert encoded[0].parts[0].part_kind == "user-prompt"
    assert isinstance(encoded[1], ModelResponse)
    assert encoded[1].parts == [TextPart(content="y")]


def test_arguments_that_are_no_object_go_out_as_text() -> None:
    parts = encoder().encode([called(call("c", '{"city'), call("d", [1]))])[0].parts
    assert [part.args for part in parts] == ['{"city', "[1]"]


def test_files_of_users() -> None:
    data = base64.b64encode(b"x").decode()
    content = (
        Text("look"),
        Text(" "),
        FilePart("image/png", data=data),
        FilePart("image/png", url="https://files.invalid/a.png"),
        FilePart("audio/wav", url="https://files.invalid/a.wav"),
        FilePart("video/mp4", url="https://files.invalid/a.mp4"),
        FilePart("application/pdf", url="https://files.invalid/a"),
    )
    sent = encoder().encode([UserMessage(content=content, id="s|t|u")])[0].parts[0].content
    assert [getattr(item, "kind", item) for item in sent] == [
        "look",
        "binary",
        "image-url",
        "audio-url",
        "video-url",
        "document-url",
    ]
    assert sent[1].data == b"x"
    assert sent[5].media_type == "application/pdf"


def test_files_of_another_model_are_named() -> None:
    message = AssistantMessage(id="s|t|a", files=(FilePart("image/png", data="AAAA", name="cat.png"),))
    assert encoder().encode([message])[0].parts == [TextPart(content="[file: cat.png]")]


# --- what a provider gave it gets back, and nobody else ---------------------------------------------------------------


def own(**fields: Any) -> AssistantMessage:
    data = {
        "v": 1,
        "by": "t",
        "model": "m",
        "text": 907060870,
        "thought": 3758026421,
        "parts": [
            {"k": "thought", "n": 2, "id": "rs", "sig": "sealed"},
            {"k": "text", "n": 3, "id": "a"},
            {"k": "call", "id": "fc", "d": {"x": 1}},
            {"k": "text", "n": 2, "id": "b"},
            {"k": "thought", "n": 0, "sig": "redacted"},
            {"k": "hologram"},
        ],
    }
    base: dict[str, Any] = {"text": "hello", "reasoning": (ReasoningPart("hm"),), "provider_data": data}
    return called(call("call_1"), **{**base, **fields})


def shape(message: Any) -> list[Any]:
    return [
        (part.part_kind, getattr(part, "content", None), part.id, getattr(part, "signature", None))
        for part in message.parts
    ]


def test_own_parts_come_back_in_their_order_with_ids_and_signatures() -> None:
    encoded = encoder().encode([user(), own()])[1]
    assert shape(encoded) == [
        ("thinking", "hm", "rs", "sealed"),
        ("text", "hel", "a", None),
        ("tool-call", None, "fc", None),
        ("text", "lo", "b", None),
        ("thinking", "", None, "redacted"),
    ]
    assert (encoded.model_name, encoded.provider_name, encoded.provider_url) == ("m", "s", "u")
    assert encoded.parts[2].provider_details == {"x": 1}


def test_a_foreign_reply_is_only_what_everybody_understands() -> None:
    encoded = encoder(tag="somebody-else").encode([user(), own(model="openai:gpt-x")])[1]
    assert shape(encoded) == [("text", "hello", None, None), ("tool-call", None, None, None)]
    assert (encoded.model_name, encoded.provider_name) == ("gpt-x", None)


def test_a_rewritten_text_goes_without_ids_and_dropped_reasoning_stays_away() -> None:
    encoded = encoder().encode([user(), own(text="HELLO", reasoning=())])[1]
    assert shape(encoded) == [
        ("text", "HELLO", None, None),
        ("tool-call", None, "fc", None),
        ("thinking", "", None, "redacted"),
    ]


def test_calls_and_texts_that_the_data_does_not_know_are_sent_all_the_same() -> None:
    data = {"v": 1, "by": "t", "parts": [{"k": "thought", "n": 0, "sig": "x"}]}
    message = called(call("call_1"), text="new", provider_data=data)
    kinds = [part.part_kind for part in encoder().encode([message])[0].parts]
    assert kinds == ["thinking", "text", "tool-call"]


def test_files_and_texts_that_the_data_does_not_account_for_are_sent_all_the_same() -> None:
    data = {"v": 1, "by": "t", "parts": [{"k": "file"}], "text": 2363233923}
    files = (FilePart("image/png", url="https://files.invalid/a.png"), FilePart("image/gif", data="AAAA"))
    message = called(text="x", provider_data=data, files=files)
    sent = [part.content for part in encoder().encode([message])[0].parts]
    assert sent == ["[file: image/png]", "x", "[file: image/gif]"]


def test_data_of_another_version_is_left_out() -> None:
    data = {**(own().provider_data or {}), "v": 2}
    assert shape(encoder().encode([own(provider_data=data)])[0])[0] == ("text", "hello", None, None)


async def store_and_ask(adapter: Any, seen: Seen, name: str) -> Any:
    """Ask again with the reply in the history, as it comes back from a store."""
    message = decode_message(encode_message(seen.message(f"{adapter.name}:{name}")))
    assert isinstance(message, AssistantMessage)
    results = [result(one.id) for one in message.calls]
    again = await ask(adapter, name, [user(), message, *results], tools=[WEATHER])
    assert again.error is None
    return again


@pytest.mark.parametrize("streaming", [True, False])
async def test_openai_gets_its_sealed_reasoning_and_item_ids_back(
    on_wire: Callable[..., Adapters], wire: WireServer, streaming: bool
) -> None:
    adapter = on_wire(streaming=streaming)["responses"]
    seen = await ask(adapter, "gpt-5.1-think", tools=[WEATHER])
    assert seen.reasoning == "hm"
    await store_and_ask(adapter, seen, "gpt-5.1-think")
    items = wire.requests[-1].body["input"]
    assert [item.get("type", item.get("role")) for item in items] == [
        "user",
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert (items[1]["id"], items[1]["encrypted_content"]) == ("rs_1", "sealed")
    assert (items[2]["id"], items[3]["id"], items[3]["call_id"]) == ("msg_1", "fc_1", "call_1")


async def test_a_model_that_does_not_reason_gets_no_reasoning(
    on_wire: Callable[..., Adapters], wire: WireServer
) -> None:
    adapter = on_wire()["responses"]
    seen = await ask(adapter, "gpt-5.1-think", tools=[WEATHER])
    await store_and_ask(adapter, seen, "gpt-4o")
    body = str(wire.requests[-1].body)
    assert "sealed" not in body
    assert "hm" not in body


@pytest.mark.parametrize("streaming", [True, False])
async def test_anthropic_gets_its_signature_back(
    on_wire: Callable[..., Adapters], wire: WireServer, streaming: bool
) -> None:
    adapter = on_wire(streaming=streaming)["anthropic"]
    seen = await ask(adapter, "think", tools=[WEATHER])
    await store_and_ask(adapter, seen, "think")
    blocks = wire.requests[-1].body["messages"][1]["content"]
    assert blocks[0] == {"type": "thinking", "thinking": "hm", "signature": "sealed"}
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("streaming", [True, False])
async def test_gemini_gets_its_thought_signature_back(
    on_wire: Callable[..., Adapters], wire: WireServer, streaming: bool
) -> None:
    adapter = on_wire(streaming=streaming)["gemini"]
    seen = await ask(adapter, "think", tools=[WEATHER])
    await store_and_ask(adapter, seen, "think")
    parts = wire.requests[-1].body["contents"][1]["parts"]
    assert [part.get("thoughtSignature") for part in parts if "functionCall" in part] == ["c2VhbGVk"]


async def test_gemini_gets_its_picture_back_and_others_its_name(
    on_wire: Callable[..., Adapters], wire: WireServer
) -> None:
    adapters = on_wire()
    seen = await ask(adapters["gemini"], "picture")
    message = seen.message("google:picture")
    await ask(adapters["chat"], "ok", [user(), message, user()])
    assert wire.requests[-1].body["messages"][1]["content"] == "[file: image/png]"
    await ask(adapters["gemini"], "ok", [user(), message, user()])
    parts = wire.requests[-1].body["contents"][1]["parts"]
    assert parts[0]["inlineData"]["data"] == "iVBORw=="


async def test_a_conversation_that_visits_every_provider_comes_home_unchanged(
    on_wire: Callable[..., Adapters], wire: WireServer
) -> None:
    adapters = on_wire()
    history: list[Message] = [user()]
    for api in ("responses", "anthropic", "gemini", "chat"):
        seen = await ask(adapters[api], "tool" if api == "chat" else "think", history, tools=[WEATHER])
        message = seen.message(f"{adapters[api].name}:think")
        history += [message, *(result(one.id) for one in message.calls), user("and now?")]
    await ask(adapters["responses"], "gpt-5.1-ok", history)
    items = wire.requests[-1].body["input"]
    assert [item["encrypted_content"] for item in items if item.get("type") == "reasoning"] == ["sealed"]
    assert items[1]["id"] == "rs_1"
    calls = [item for item in items if item.get("type") == "function_call"]
    assert calls[0]["call_id"] == "call_1"
    assert calls[1]["call_id"] == "toolu_1"
    # The last one came from a provider that had used the first one's id again.
    assert len({one["call_id"] for one in calls}) == len(calls) == 4
    await ask(adapters["anthropic"], "ok", history)
    thinking = [
        block
        for message in wire.requests[-1].body["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "thinking"
    ]
    assert thinking == [{"type": "thinking", "thinking": "hm", "signature": "sealed"}]


async def test_the_same_interface_elsewhere_gets_no_signatures(wire: WireServer) -> None:
    from stepwell.models import OpenAIResponses

    one = OpenAIResponses("a", base_url=f"{wire.url}/v1")
    two = OpenAIResponses("b", base_url=f"{wire.url}/v1", name="other-account")
    seen = await ask(one, "think", tools=[WEATHER])
    await store_and_ask(two, seen, "think")
    assert "sealed" not in str(wire.requests[-1].body)
    await one.aclose()
    await two.aclose()


def test_a_thinking_part_without_content_or_signature_is_harmless() -> None:
    data = {"v": 1, "by": "t", "parts": [{"k": "thought", "n": 0}], "text": 0}
    message = called(call("c"), provider_data=data)
    assert isinstance(encoder().encode([message])[0].parts[0], ThinkingPart)
