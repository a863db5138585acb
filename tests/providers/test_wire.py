"""Every way a reply can end, on each of four wire formats, plain and streamed, against bodies as they are sent."""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from providers.helpers import API_KEY, CITY, WEATHER, Adapters, ask, request_for
from providers.wire_server import GEMINI_ENDINGS, SECRET_ECHO, WireServer
from stepwell.errors import LlmSetupError, ModelInvocationError, ModelTimeoutError, PromptBlockedError
from stepwell.messages import FilePart, Usage, UserMessage
from stepwell.models import (
    Deadlines,
    OpenAIChat,
    OpenAICompatible,
    StopReason,
    TextDelta,
    ToolCallStart,
    ToolSchema,
    UsageEvent,
)

pytestmark = pytest.mark.anyio
GEMINI_BLOCKS = GEMINI_ENDINGS - {"MALFORMED_FUNCTION_CALL", "OTHER", "NO_IMAGE"}
APIS = ("chat", "responses", "anthropic", "gemini")
BOTH = pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "plain"])

ENDINGS = [
    # interface, scenario, stop, the provider's word, text
    ("chat", "ok", StopReason.COMPLETE, "stop", "hello"),
    ("chat", "length", StopReason.TRUNCATED, "length", "hello"),
    ("chat", "content_filter", StopReason.BLOCKED, "content_filter", ""),
    ("chat", "filter_text", StopReason.BLOCKED, "content_filter", "hello"),
    ("chat", "refusal", StopReason.BLOCKED, "refusal", ""),
    ("chat", "tool", StopReason.TOOL_CALLS, "tool_calls", ""),
    ("chat", "malformed", StopReason.TOOL_CALLS, "tool_calls", ""),
    ("chat", "cut_call", StopReason.TRUNCATED, "length", ""),
    ("responses", "ok", StopReason.COMPLETE, "completed", "hello"),
    ("responses", "length", StopReason.TRUNCATED, "max_output_tokens", "hello"),
    ("responses", "content_filter", StopReason.BLOCKED, "content_filter", ""),
    ("responses", "refusal", StopReason.BLOCKED, "refusal", ""),
    ("responses", "tool", StopReason.TOOL_CALLS, "completed", ""),
    ("responses", "think", StopReason.TOOL_CALLS, "completed", "hello"),
    ("anthropic", "ok", StopReason.COMPLETE, "end_turn", "hello"),
    ("anthropic", "length", StopReason.TRUNCATED, "max_tokens", "hello"),
    ("anthropic", "ctx", StopReason.TRUNCATED, "model_context_window_exceeded", "hello"),
    ("anthropic", "refusal", StopReason.BLOCKED, "refusal", ""),
    ("anthropic", "pause", StopReason.UNSPECIFIED, "pause_turn", "hello"),
    ("anthropic", "tool", StopReason.TOOL_CALLS, "tool_use", ""),
    ("anthropic", "think", StopReason.TOOL_CALLS, "tool_use", "hello"),
    ("gemini", "ok", StopReason.COMPLETE, "STOP", "hello"),
    ("gemini", "length", StopReason.TRUNCATED, "MAX_TOKENS", "hello"),
    ("gemini", "tool", StopReason.TOOL_CALLS, "STOP", ""),
    ("gemini", "think", StopReason.TOOL_CALLS, "STOP", ""),
    ("gemini", "picture", StopReason.COMPLETE, "STOP", ""),
    ("gemini", "MALFORMED_FUNCTION_CALL", StopReason.MALFORMED_TOOL_CALL, "MALFORMED_FUNCTION_CALL", ""),
    ("gemini", "OTHER", StopReason.UNSPECIFIED, "OTHER", ""),
    *(("gemini", word, StopReason.BLOCKED, word, "") for word in sorted(GEMINI_BLOCKS)),
]


@BOTH
@pytest.mark.parametrize(("api", "scenario", "stop", "raw", "text"), ENDINGS)
async def test_a_reply_that_ended(
    on_wire: Callable[..., Adapters],
    streaming: bool,
    api: str,
    scenario: str,
    stop: StopReason,
    raw: str,
    text: str,
) -> None:
    seen = await ask(on_wire(streaming=streaming)[api], scenario, tools=[WEATHER])
    assert (seen.finish.stop, seen.finish.raw, seen.text) == (stop, raw, text)
    assert (scenario in ("tool", "think", "malformed", "cut_call")) == bool(seen.calls)
    for _, name, args in seen.calls:
        assert name == "get_weather"
        assert args in ({"city": "Paris"}, '{"city":"Paris"}', '{"city": "Par')
    assert seen.finish.model in ("gpt-x-2026", "claude-x", "gemini-x")


@BOTH
@pytest.mark.parametrize(
    ("api", "scenario", "expected"),
    [
        ("chat", "refusal", {"block_reason": "refusal", "refusal": "I can't help with that."}),
        ("chat", "content_filter", {"block_reason": "content_filter"}),
        ("responses", "refusal", {"block_reason": "refusal", "refusal": "I can't help with that."}),
        ("responses", "content_filter", {"block_reason": "content_filter"}),
        (
            "anthropic",
            "refusal",
            {"block_reason": "refusal", "refusal": "This request was declined.", "category": "cyber"},
        ),
        ("gemini", "SAFETY", {"block_reason": "safety"}),
        ("gemini", "PROHIBITED_CONTENT", {"block_reason": "safety"}),
        ("gemini", "RECITATION", {"block_reason": "recitation"}),
        ("gemini", "BLOCKLIST", {"block_reason": "blocklist"}),
        ("gemini", "SPII", {"block_reason": "content_filter"}),
        ("gemini", "LANGUAGE", {"block_reason": "other"}),
    ],
)
async def test_why_a_reply_was_blocked(
    on_wire: Callable[..., Adapters], streaming: bool, api: str, scenario: str, expected: dict[str, str]
) -> None:
    details = (await ask(on_wire(streaming=streaming)[api], scenario)).finish.details
    assert {key: details.get(key) for key in expected} == expected
    if scenario == "SAFETY":
        assert details["safety_ratings"][0]["category"] == "HARM_CATEGORY_DANGEROUS_CONTENT"


@BOTH
@pytest.mark.parametrize(
    ("api", "scenario", "reason", "raw"),
    [
        ("chat", "e400cf", "content_filter", "content_filter"),
        ("responses", "e400cf", "content_filter", "content_filter"),
        ("responses", "flagged", "safety", "invalid_prompt"),
        ("gemini", "blocked", "safety", "PROHIBITED_CONTENT"),
    ],
)
async def test_scenario_C12_a_refused_prompt_is_no_failure(  # noqa: N802
    on_wire: Callable[..., Adapters], streaming: bool, api: str, scenario: str, reason: str, raw: str
) -> None:
    error = (await ask(on_wire(streaming=streaming)[api], scenario)).error
    assert isinstance(error, PromptBlockedError)
    assert (error.reason, error.raw_reason) == (reason, raw)
    assert not error.retryable
    if scenario in ("e400cf", "blocked"):
        assert error.safety_ratings
    assert SECRET_ECHO not in "".join(traceback.format_exception(error))


@BOTH
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("scenario", "status", "retry_after"), [("e429", 429, 7.0), ("e500", 500, None), ("e529", 529, None)]
)
async def test_http_errors_keep_status_code_and_wait(
    on_wire: Callable[..., Adapters],
    wire: WireServer,
    streaming: bool,
    api: str,
    scenario: str,
    status: int,
    retry_after: float | None,
) -> None:
    before = len(wire.requests)
    error = (await ask(on_wire(streaming=streaming)[api], scenario)).error
    assert type(error) is ModelInvocationError
    assert (error.status, error.retry_after, error.retryable) == (status, retry_after, True)
    assert error.provider_code
    assert error.cause is not None
    assert len(wire.requests) == before + 1, "a gateway makes one call"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("scenario", ["trunc", "disc"])
async def test_a_stream_that_breaks_is_a_failure_and_never_a_reply(
    on_wire: Callable[..., Adapters], api: str, scenario: str
) -> None:
    seen = await ask(on_wire()[api], scenario)
    assert type(seen.error) is ModelInvocationError
    assert seen.error.status is None
    assert seen.error.retryable
    assert "hello".startswith(seen.text)
    assert seen.text


@BOTH
@pytest.mark.parametrize(
    ("api", "scenario"), [("responses", "failed"), ("gemini", "NO_IMAGE"), ("anthropic", "miderr")]
)
async def test_a_reply_that_ended_in_a_failure(
    on_wire: Callable[..., Adapters], streaming: bool, api: str, scenario: str
) -> None:
    if scenario == "miderr" and not streaming:
        assert (await ask(on_wire(streaming=False)[api], scenario)).text == "hello"
        return
    seen = await ask(on_wire(streaming=streaming)[api], scenario)
    assert type(seen.error) is ModelInvocationError
    assert seen.error.provider_code in ("server_error", "NO_IMAGE", "overloaded_error")


async def test_a_body_that_is_no_json_is_a_failure(on_wire: Callable[..., Adapters]) -> None:
    seen = await ask(on_wire()["chat"], "bad_json")
    assert type(seen.error) is ModelInvocationError


@BOTH
async def test_parallel_calls_that_come_in_turns(on_wire: Callable[..., Adapters], streaming: bool) -> None:
    seen = await ask(on_wire(streaming=streaming)["chat"], "parallel", tools=[WEATHER])
    assert seen.calls == [
        ("call_1", "get_weather", '{"city":"Paris"}'),
        ("call_2", "get_weather", '{"city":"Rome"}'),
    ]


@BOTH
async def test_a_call_without_arguments_has_an_empty_object(on_wire: Callable[..., Adapters], streaming: bool) -> None:
    seen = await ask(on_wire(streaming=streaming)["chat"], "noargs", tools=[WEATHER])
    assert seen.calls == [("call_1", "get_weather", {})]


@BOTH
@pytest.mark.parametrize(
    ("api", "usage"),
    [
        ("chat", Usage(input=11, output=3, reasoning=2, cache_read=8)),
        ("responses", Usage(input=11, output=3, reasoning=2, cache_read=8)),
        ("anthropic", Usage(input=23, output=3, cache_read=8, cache_write=4)),
        ("gemini", Usage(input=11, output=5, reasoning=2, cache_read=8)),
    ],
)
async def test_usage(on_wire: Callable[..., Adapters], streaming: bool, api: str, usage: Usage) -> None:
    assert (await ask(on_wire(streaming=streaming)[api], "ok")).usage == usage


@BOTH
async def test_usage_that_was_not_reported_is_unknown(on_wire: Callable[..., Adapters], streaming: bool) -> None:
    seen = await ask(on_wire(streaming=streaming)["chat"], "nousage")
    assert seen.finish.stop is StopReason.COMPLETE
    assert seen.usage is None


@pytest.mark.parametrize(
    ("api", "scenario"),
    [("anthropic", "disc"), ("anthropic", "trunc"), ("gemini", "blocked"), ("responses", "failed")],
)
async def test_usage_of_a_failed_attempt_is_counted(on_wire: Callable[..., Adapters], api: str, scenario: str) -> None:
    seen = await ask(on_wire()[api], scenario)
    assert seen.error is not None
    assert seen.usage is not None
    assert seen.usage.input in (11, 23)


@pytest.mark.parametrize("api", APIS)
async def test_text_streams_in_pieces(on_wire: Callable[..., Adapters], api: str) -> None:
    events = (await ask(on_wire()[api], "ok")).events
    assert [event.text for event in events if isinstance(event, TextDelta)] == ["hel", "lo"]
    plain = (await ask(on_wire(streaming=False)[api], "ok")).events
    assert [event.text for event in plain if isinstance(event, TextDelta)] == ["hello"]


@BOTH
async def test_a_file_that_the_model_made(on_wire: Callable[..., Adapters], streaming: bool) -> None:
    seen = await ask(on_wire(streaming=streaming)["gemini"], "picture")
    assert seen.files == [FilePart(media_type="image/png", data="iVBORw==")]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("scenario", "streaming"), [("hang", True), ("hang", False), ("stall", True)])
async def test_cancelling_closes_the_connection(
    on_wire: Callable[..., Adapters], wire: WireServer, api: str, scenario: str, streaming: bool
) -> None:
    gateway = on_wire(streaming=streaming)[api]
    task = asyncio.create_task(ask(gateway, scenario))
    assert await asyncio.to_thread(wire.reached.get, timeout=10) == scenario
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(wire.gone.get, timeout=10) == scenario


@pytest.mark.parametrize("api", APIS)
async def test_leaving_the_context_early_closes_the_connection(
    on_wire: Callable[..., Adapters], wire: WireServer, api: str
) -> None:
    gateway = on_wire()[api]
    async with gateway.stream(request_for(gateway, "stall")) as events:
        async for event in events:
            if isinstance(event, (TextDelta, UsageEvent)):
                break
    assert await asyncio.to_thread(wire.reached.get, timeout=10) == "stall"
    assert await asyncio.to_thread(wire.gone.get, timeout=10) == "stall"


async def test_an_error_of_the_caller_passes_through_unchanged(on_wire: Callable[..., Adapters]) -> None:
    gateway = on_wire()["chat"]

    async def consume() -> None:
        async with gateway.stream(request_for(gateway, "ok")) as events:
            async for _ in events:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


async def test_no_connection_within_its_time_is_a_connect_timeout() -> None:
    # A listener whose queue is full answers no further handshake.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        host, port = listener.getsockname()
        fill = [socket.socket() for _ in range(3)]
        for one in fill:
            one.setblocking(False)
            one.connect_ex((host, port))
        gateway = OpenAIChat(API_KEY, base_url=f"http://{host}:{port}/v1")
        seen = await ask(gateway, "ok", deadlines=Deadlines(connect=0.05))
        await gateway.aclose()
        for one in fill:
            one.close()
    assert isinstance(seen.error, ModelTimeoutError)
    assert seen.error.kind == "connect"


async def test_nobody_there_is_an_ordinary_failure() -> None:
    gateway = OpenAIChat(API_KEY, base_url="http://127.0.0.1:9/v1")
    seen = await ask(gateway, "ok")
    await gateway.aclose()
    assert type(seen.error) is ModelInvocationError


@BOTH
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("scenario", ["e429", "e500", "e401", "e400cf"])
async def test_errors_and_logs_hold_neither_the_answer_nor_the_key(
    on_wire: Callable[..., Adapters],
    caplog: pytest.LogCaptureFixture,
    streaming: bool,
    api: str,
    scenario: str,
) -> None:
    gateway = on_wire(streaming=streaming)[api]
    with caplog.at_level(logging.DEBUG):
        error = (await ask(gateway, scenario)).error
    assert error is not None
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(getattr(error, "ids", ""))
    assert SECRET_ECHO not in shown
    assert API_KEY not in shown + repr(gateway) + repr(gateway.endpoint)
    records = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert SECRET_ECHO not in "".join(record.getMessage() for record in records)
    assert API_KEY not in caplog.text


# --- structured output ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("api", APIS)
async def test_native_structured_output(
    on_wire: Callable[..., Adapters], wire: WireServer, streaming: bool, api: str
) -> None:
    # Which models have it natively is the profile's word for names that the catalogue does not know.
    gateway = on_wire(streaming=streaming)[api]
    seen = await ask(gateway, "json", output_schema=CITY)
    assert seen.text == '{"city":"Paris"}'
    assert seen.finish.stop is StopReason.COMPLETE
    body = wire.requests[-1].body
    if api == "chat":
        assert body["response_format"]["type"] == "json_schema"
    elif api == "responses":
        assert body["text"]["format"]["type"] == "json_schema"
    elif api == "gemini":
        assert body["generationConfig"]["responseMimeType"] == "application/json"


def compatible(wire: WireServer, **fields: Any) -> OpenAICompatible:
    return OpenAICompatible("local", f"{wire.url}/v1", **fields)


@BOTH
@pytest.mark.parametrize("tools", [(), (ToolSchema("final_result", "A tool of that name", CITY),)])
async def test_structured_output_by_a_tool(wire: WireServer, streaming: bool, tools: tuple[ToolSchema, ...]) -> None:
    gateway = compatible(wire, structured_output="tool", streaming=streaming)
    seen = await ask(gateway, "answer_tool", output_schema=CITY, tools=tools)
    await gateway.aclose()
    assert seen.text == '{"city":"Paris"}'
    assert seen.calls == []
    assert seen.finish.stop is StopReason.COMPLETE
    names = [tool["function"]["name"] for tool in wire.requests[-1].body["tools"]]
    assert len(set(names)) == len(names) == len(tools) + 1


@BOTH
async def test_structured_output_by_asking(wire: WireServer, streaming: bool) -> None:
    gateway = compatible(wire, structured_output="prompted", streaming=streaming)
    seen = await ask(gateway, "fenced", output_schema=CITY, system="Be brief.")
    await gateway.aclose()
    assert seen.text == '{"city":"Paris"}'
    system = [message for message in wire.requests[-1].body["messages"] if message["role"] == "system"]
    assert "city" in str(system)
    assert "Be brief." in str(system)


@BOTH
@pytest.mark.parametrize(("scenario", "text"), [("fenced", '{"city":"Paris"}'), ("tool", "")])
async def test_a_model_that_does_not_call_the_output_tool(
    wire: WireServer, streaming: bool, scenario: str, text: str
) -> None:
    gateway = compatible(wire, structured_output="tool", streaming=streaming)
    seen = await ask(gateway, scenario, output_schema=CITY, tools=[WEATHER])
    await gateway.aclose()
    assert seen.text == text
    assert seen.finish.stop is (StopReason.COMPLETE if text else StopReason.TOOL_CALLS)


async def test_a_schema_that_is_no_object_is_asked_for(wire: WireServer) -> None:
    gateway = compatible(wire, structured_output="tool")
    seen = await ask(gateway, "fenced", output_schema={"type": "array", "items": CITY})
    await gateway.aclose()
    assert seen.finish.stop is StopReason.COMPLETE
    assert "tools" not in wire.requests[-1].body


async def test_old_gemini_models_with_tools_get_an_output_tool(
    on_wire: Callable[..., Adapters], wire: WireServer
) -> None:
    await ask(on_wire()["gemini"], "gemini-2.5-flash", output_schema=CITY, tools=[WEATHER])
    assert "responseMimeType" not in wire.requests[-1].body.get("generationConfig", {})
    declared = wire.requests[-1].body["tools"]
    assert "final_result" in str(declared)


# --- what goes out ----------------------------------------------------------------------------------------------------


async def test_parameters_reach_the_wire(on_wire: Callable[..., Adapters], wire: WireServer) -> None:
    adapters = on_wire()
    params = {"max_tokens": 7, "temperature": 0.5, "stop": ["x"], "seed": 3, "extra_body": {"top_k": 4}}
    await ask(adapters["chat"], "ok", params=params, conversation="c1", system="Be brief.")
    body = wire.requests[-1].body
    assert (body["max_completion_tokens"], body["temperature"], body["stop"], body["seed"]) == (7, 0.5, ["x"], 3)
    assert body["top_k"] == 4
    assert body["prompt_cache_key"] != "c1"
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    await ask(adapters["anthropic"], "ok", params={"max_tokens": 7, "top_k": 5}, system="Be brief.")
    body = wire.requests[-1].body
    assert (body["max_tokens"], body["top_k"]) == (7, 5)
    assert "Be brief." in str(body["system"])
    await ask(adapters["gemini"], "ok", params={"max_tokens": 7, "seed": 5}, system="Be brief.")
    body = wire.requests[-1].body
    assert (body["generationConfig"]["maxOutputTokens"], body["generationConfig"]["seed"]) == (7, 5)
    assert "Be brief." in str(body["systemInstruction"])


async def test_reasoning_reaches_the_wire(on_wire: Callable[..., Adapters], wire: WireServer) -> None:
    gateway = on_wire()["responses"]
    # The server knows no such scenario, so it answers as usual.
    await ask(gateway, "gpt-5.1", params={"reasoning": "low", "verbosity": "low"})
    assert wire.requests[-1].body["reasoning"]["effort"] == "low"
    await ask(gateway, "gpt-5.1", params={"reasoning": "none", "temperature": 0.2})
    body = wire.requests[-1].body
    assert (body["reasoning"]["effort"], body["temperature"]) == ("none", 0.2)


async def test_a_compatible_endpoint_gets_its_own_fields(wire: WireServer) -> None:
    gateway = compatible(wire, extra_body={"a": 1, "b": 1}, headers={"x-team": "t"})
    seen = await ask(gateway, "ok", params={"max_tokens": 5, "extra_body": {"b": 2}})
    await gateway.aclose()
    assert seen.text == "hello"
    request = wire.requests[-1]
    assert (request.body["max_tokens"], request.body["a"], request.body["b"]) == (5, 1, 2)
    assert "max_completion_tokens" not in request.body
    assert "prompt_cache_key" not in request.body
    assert "authorization" not in request.headers
    assert request.headers["x-team"] == "t"


async def test_an_endpoint_without_finish_reasons_can_be_told_so(wire: WireServer) -> None:
    strict, lenient = compatible(wire), compatible(wire, requires_finish=False)
    assert isinstance((await ask(strict, "nofinish")).error, ModelInvocationError)
    assert (await ask(lenient, "nofinish")).text == "hello"
    await strict.aclose()
    await lenient.aclose()


@pytest.mark.parametrize("api", APIS)
async def test_a_file_that_the_model_does_not_take_is_for_the_stage_to_handle(
    on_wire: Callable[..., Adapters], api: str
) -> None:
    part = FilePart(media_type="application/x-unheard-of", data="AAAA")
    seen = await ask(on_wire()[api], "ok", [UserMessage(content=(part,), id="s|t|u")])
    if api == "gemini" and seen.error is None:
        return  # Gemini takes any type and answers for itself.
    assert isinstance(seen.error, ModelInvocationError)
    assert (seen.error.status, seen.error.provider_code) == (422, "unsupported_file")


@BOTH
async def test_a_failure_of_a_request_with_files_is_still_a_failure(
    on_wire: Callable[..., Adapters], streaming: bool
) -> None:
    part = FilePart(media_type="image/png", data="iVBORw==")
    for scenario in ("bad_body", "e500"):
        seen = await ask(on_wire(streaming=streaming)["chat"], scenario, [UserMessage(content=(part,), id="s|t|u")])
        assert isinstance(seen.error, ModelInvocationError)
        assert seen.error.status != 422


async def test_data_that_is_no_base64_is_for_the_stage_to_handle(on_wire: Callable[..., Adapters]) -> None:
    part = FilePart(media_type="image/png", data="§")
    seen = await ask(on_wire()["chat"], "ok", [UserMessage(content=(part,), id="s|t|u")])
    assert isinstance(seen.error, ModelInvocationError)
    assert seen.error.status == 422


async def test_what_pydantic_ai_refuses_is_a_setup_error(on_wire: Callable[..., Adapters]) -> None:
    gateway = on_wire()["chat"]
    seen = await ask(gateway, "ok", params={"tool_choice": "required"})
    assert isinstance(seen.error, LlmSetupError)


async def test_wrong_parameters_are_found_before_anything_is_sent(
    on_wire: Callable[..., Adapters], wire: WireServer
) -> None:
    before = len(wire.requests)
    seen = await ask(on_wire()["chat"], "ok", params={"tempratur": 1})
    assert isinstance(seen.error, LlmSetupError)
    assert len(wire.requests) == before


async def test_start_events_name_the_call_at_once(on_wire: Callable[..., Adapters]) -> None:
    seen = await ask(on_wire()["anthropic"], "tool", tools=[WEATHER])
    first = next(event for event in seen.events if isinstance(event, ToolCallStart))
    assert (first.index, first.id, first.name) == (0, "toolu_1", "get_weather")
