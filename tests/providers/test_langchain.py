"""Any chat model of LangChain as a gateway."""

from __future__ import annotations

import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult

from providers.helpers import CITY, WEATHER, ask, attempt, request_for
from stepwell.errors import LlmSetupError, ModelInvocationError, PromptBlockedError
from stepwell.messages import (
    AssistantMessage,
    DirectMessage,
    FilePart,
    TextPart,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
)
from stepwell.models import LangChainGateway, LlmType, ModelSelection, Providers, StopReason, TextDelta

pytestmark = pytest.mark.anyio
SECRET = "the customer said: my card is 4111"


class Scripted(BaseChatModel):
    """Streams the given chunks and remembers what it was asked."""

    chunks: list[AIMessageChunk]
    error: Any = None
    asked: list[Any]
    tools: Any = None
    kwargs: dict[str, Any]
    closed: list[bool]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        raise NotImplementedError

    def _stream(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        raise NotImplementedError
        yield

    async def _astream(
        self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        self.asked[:] = messages
        self.kwargs.update(kwargs, stop=stop)
        try:
            for chunk in self.chunks:
                yield ChatGenerationChunk(message=chunk)
            if self.error is not None:
                raise self.error
        finally:
            self.closed.append(True)

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        self.tools = tools
        return self


def scripted(*chunks: AIMessageChunk | str, **fields: Any) -> Scripted:
    made = [AIMessageChunk(content=chunk) if isinstance(chunk, str) else chunk for chunk in chunks]
    return Scripted(chunks=made, asked=[], kwargs={}, closed=[], **fields)


def end(**meta: Any) -> AIMessageChunk:
    return AIMessageChunk(content="", response_metadata=meta)


async def test_text_of_a_fake_model() -> None:
    gateway = LangChainGateway(GenericFakeChatModel(messages=iter([AIMessage(content="hello there")])))
    seen = await ask(gateway, "fake")
    assert seen.text == "hello there"
    assert seen.finish.stop is StopReason.UNSPECIFIED
    assert seen.usage is None
    assert sum(isinstance(event, TextDelta) for event in seen.events) > 1


async def test_calls_and_usage() -> None:
    pieces = [
        {"index": 0, "id": "call_1", "name": "get_weather", "args": ""},
        {"index": 0, "id": None, "name": None, "args": '{"city":'},
        {"index": 1, "id": "call_2", "name": "get_weather", "args": ""},
        {"index": 0, "id": None, "name": None, "args": '"Paris"}'},
    ]
    chunks = [AIMessageChunk(content="", tool_call_chunks=[{**piece, "type": "tool_call_chunk"}]) for piece in pieces]
    usage: Any = {
        "input_tokens": 5,
        "output_tokens": 3,
        "total_tokens": 8,
        "input_token_details": {"cache_read": 2},
        "output_token_details": {"reasoning": 1},
    }
    last = AIMessageChunk(content="", usage_metadata=usage, response_metadata={"finish_reason": "tool_calls"})
    model = scripted(*chunks, last)
    seen = await ask(LangChainGateway(model), "x", tools=[WEATHER])
    assert seen.calls == [("call_1", "get_weather", '{"city":"Paris"}'), ("call_2", "get_weather", {})]
    assert seen.finish.stop is StopReason.TOOL_CALLS
    assert seen.usage == Usage(input=5, output=3, reasoning=1, cache_read=2)
    assert model.tools[0]["function"] == {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": CITY,
    }


async def test_calls_without_an_index() -> None:
    chunk = AIMessageChunk(
        content="",
        tool_call_chunks=[
            {"index": None, "id": "a", "name": "x", "args": "{}", "type": "tool_call_chunk"},
            {"index": None, "id": None, "name": "y", "args": "{}", "type": "tool_call_chunk"},
        ],
    )
    seen = await ask(LangChainGateway(scripted(chunk, end(stop_reason="tool_use"))), "x")
    assert seen.calls == [("a", "x", "{}"), ("", "y", "{}")]


@pytest.mark.parametrize(
    ("meta", "stop"),
    [
        ({"finish_reason": "stop"}, StopReason.COMPLETE),
        ({"stop_reason": "end_turn"}, StopReason.COMPLETE),
        ({"done_reason": "stop"}, StopReason.COMPLETE),
        ({"finish_reason": "tool_calls"}, StopReason.COMPLETE),
        ({"finish_reason": "length"}, StopReason.TRUNCATED),
        ({"finish_reason": "MAX_TOKENS"}, StopReason.TRUNCATED),
        ({"stop_reason": "model_context_window_exceeded"}, StopReason.TRUNCATED),
        ({"finish_reason": "MALFORMED_FUNCTION_CALL"}, StopReason.MALFORMED_TOOL_CALL),
        ({"finish_reason": "OTHER"}, StopReason.UNSPECIFIED),
        ({}, StopReason.UNSPECIFIED),
    ],
)
async def test_stop_reasons(meta: dict[str, str], stop: StopReason) -> None:
    seen = await ask(LangChainGateway(scripted("hi", end(model_name="m-1", **meta))), "x")
    assert (seen.finish.stop, seen.finish.model) == (stop, "m-1")
    assert seen.finish.raw == next(iter(meta.values()), None)


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"finish_reason": "content_filter"}, "content_filter"),
        ({"finish_reason": "SAFETY"}, "safety"),
        ({"finish_reason": "RECITATION"}, "recitation"),
        ({"finish_reason": "BLOCKLIST"}, "blocklist"),
        ({"stop_reason": "refusal"}, "refusal"),
    ],
)
async def test_blocked_replies(meta: dict[str, str], reason: str) -> None:
    finish = (await ask(LangChainGateway(scripted("hi", end(**meta))), "x")).finish
    assert (finish.stop, finish.details["block_reason"]) == (StopReason.BLOCKED, reason)


async def test_a_refusal() -> None:
    chunk = AIMessageChunk(
        content="", additional_kwargs={"refusal": "No."}, response_metadata={"finish_reason": "stop"}
    )
    finish = (await ask(LangChainGateway(scripted(chunk)), "x")).finish
    assert finish.stop is StopReason.BLOCKED
    assert finish.details == {"block_reason": "refusal", "refusal": "No."}


async def test_a_refused_prompt() -> None:
    chunk = end(prompt_feedback={"block_reason": "SAFETY"})
    error = (await ask(LangChainGateway(scripted(chunk)), "x")).error
    assert isinstance(error, PromptBlockedError)
    assert (error.reason, error.raw_reason) == ("safety", "SAFETY")


async def test_blocks_of_text_and_reasoning() -> None:
    content: Any = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "reasoning", "reasoning": " so"},
        {"type": "reasoning"},
        {"type": "text", "text": "hel"},
        "lo",
        "",
        {"type": "image"},
    ]
    seen = await ask(LangChainGateway(scripted(AIMessageChunk(content=content), end(finish_reason="stop"))), "x")
    assert (seen.reasoning, seen.text) == ("hm so", "hello")


async def test_structured_output_is_asked_for_and_unwrapped() -> None:
    model = scripted("Sure:\n```json\n", '{"city": "Paris"}', "\n```", end(finish_reason="stop"))
    seen = await ask(LangChainGateway(model), "x", output_schema=CITY, system="Be brief.")
    assert seen.text == '{"city": "Paris"}'
    assert model.asked[0].content.startswith("Be brief.")
    assert '"city"' in model.asked[0].content
    await ask(LangChainGateway(model), "x", output_schema=CITY)
    assert model.asked[0].content.startswith("Answer with one JSON value")


async def test_the_history() -> None:
    history = [
        DirectMessage(id="s|t|d", text="Welcome"),
        UserMessage(id="s|t|u", content="hi"),
        AssistantMessage(
            id="s|t|a",
            text="wait",
            calls=(ToolCall("a", "w", {"x": 1}), ToolCall("b" * 60, "w", "{bad"), ToolCall("c", "w")),
            model="x:y",
        ),
        ToolResult(id="s|t|r", call="a", name="w", content={"ok": 1}),
        ToolResult(id="s|t|r", call="b" * 60, name="w", content="no", outcome="error"),
        UserMessage(
            id="s|t|v",
            content=(
                TextPart("look"),
                FilePart("image/png", data="AAAA"),
                FilePart("application/pdf", url="https://files.invalid/a.pdf"),
            ),
        ),
    ]
    model = scripted("ok", end(finish_reason="stop"))
    await ask(LangChainGateway(model), "x", history, system="Be brief.", params={"temperature": 0.5, "stop": ["x"]})
    assert model.kwargs == {"temperature": 0.5, "stop": ["x"]}
    kinds = [type(message) for message in model.asked]
    assert kinds == [SystemMessage, AIMessage, HumanMessage, AIMessage, *[ToolMessage] * 3, HumanMessage]
    calls = model.asked[3].tool_calls
    assert [call["args"] for call in calls] == [{"x": 1}, {"INVALID_JSON": "{bad"}, {}]
    results = model.asked[4:7]
    assert [one.tool_call_id for one in results] == [call["id"] for call in calls]
    assert len(calls[1]["id"]) <= 40
    assert [one.status for one in results] == ["success", "error", "success"]
    assert results[2].content == "This call was not run: the turn ended before it."
    assert model.asked[7].content == [
        {"type": "text", "text": "look"},
        {"type": "image", "mime_type": "image/png", "base64": "AAAA"},
        {"type": "file", "mime_type": "application/pdf", "url": "https://files.invalid/a.pdf"},
    ]


class Answered(Exception):
    def __init__(self, status: Any, headers: dict[str, str] | None) -> None:
        super().__init__(SECRET)
        self.status_code = status
        if headers is not None:
            self.response = type("Response", (), {"headers": headers})()


@pytest.mark.parametrize(
    ("error", "status", "after"),
    [
        (Answered(429, {"retry-after": "7"}), 429, 7.0),
        (Answered(500, {"retry-after": "soon"}), 500, None),
        (Answered("odd", None), None, None),
        (ValueError(SECRET), None, None),
    ],
)
async def test_failures(error: Exception, status: int | None, after: float | None) -> None:
    seen = await ask(LangChainGateway(scripted("hel", error=error)), "x")
    assert seen.text == "hel"
    assert type(seen.error) is ModelInvocationError
    assert (seen.error.status, seen.error.retry_after) == (status, after)
    assert seen.error.cause is error
    assert SECRET not in "".join(traceback.format_exception(seen.error))


async def test_a_stream_of_nothing_is_a_failure() -> None:
    seen = await ask(LangChainGateway(scripted()), "x")
    assert isinstance(seen.error, ModelInvocationError)


async def test_leaving_early_closes_the_stream() -> None:
    model = scripted("hel", "lo", end(finish_reason="stop"))
    gateway = LangChainGateway(model)
    async with gateway.stream(request_for(gateway, "x")) as events:
        async for _ in events:
            break
    assert model.closed == [True]


async def test_what_is_checked() -> None:
    gateway = LangChainGateway(scripted("x"), name="lc", models=["a", "b"])
    assert gateway.name == "lc"
    assert gateway.llm_type is LlmType.UNSUPPORTED
    assert repr(gateway) == "LangChainGateway(Scripted, name='lc')"
    providers = Providers(gateway)
    providers.validate("lc:a")
    with pytest.raises(LlmSetupError, match="use one of a, b"):
        providers.validate("lc:c")
    retrying: Any = type("Retrying", (), {"max_retries": 2})()
    with pytest.raises(LlmSetupError, match="max_retries=0"):
        LangChainGateway(retrying).validate(ModelSelection("langchain", "x"))
    assert isinstance((await attempt(gateway, request_for(gateway, "c"))).error, LlmSetupError)


async def test_a_model_that_cannot_bind_tools() -> None:
    gateway = LangChainGateway(GenericFakeChatModel(messages=iter([AIMessage(content="x")])))
    seen = await ask(gateway, "x", tools=[WEATHER])
    assert isinstance(seen.error, LlmSetupError)
    assert "cannot bind tools" in str(seen.error)


async def test_langchain_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = LangChainGateway(scripted("x"))
    gateway.preload()
    monkeypatch.setitem(sys.modules, "langchain_core.messages", None)
    with pytest.raises(LlmSetupError, match=r"pip install 'stepwell\[langchain\]'"):
        gateway.preload()
