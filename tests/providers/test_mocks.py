"""The same adapters against two servers that somebody else wrote: llmock and aimock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llmock.scenarios import Fail, Reply, StreamFault, ToolCall
from llmock.testing import LLMockServer

from providers.helpers import WEATHER, Adapters, ask, request_for
from stepwell.errors import ModelInvocationError
from stepwell.messages import UserMessage
from stepwell.models import StopReason, TextDelta

pytestmark = pytest.mark.anyio
APIS = ("chat", "responses", "anthropic", "gemini")
NAMES = {"chat": "gpt-4o", "responses": "gpt-4o", "anthropic": "claude-haiku-4-5", "gemini": "gemini-2.5-flash"}
every_api = pytest.mark.parametrize("api", APIS)


def says(text: str) -> list[UserMessage]:
    return [UserMessage(content=text, id="s|t|u")]


# --- llmock -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mocked(llmock_server: LLMockServer, adapters: Callable[..., Adapters]) -> Callable[..., Any]:
    """An adapter for llmock, after scripting what it does next."""
    made = adapters(*(llmock_server.base_url(name) for name in ("openai", "anthropic", "gemini")))

    def script(api: str, *behaviours: Any) -> Any:
        llmock_server.state.scenarios.clear()
        llmock_server.state.scenarios.add(*behaviours)
        return made[api]

    return script


@every_api
async def test_llmock_streams_text(mocked: Callable[..., Any], api: str) -> None:
    seen = await ask(mocked(api, Reply(text="one two three four")), NAMES[api])
    assert seen.text == "one two three four"
    assert seen.finish.stop is StopReason.COMPLETE
    assert sum(isinstance(event, TextDelta) for event in seen.events) > 1
    assert seen.usage is not None


@every_api
async def test_llmock_streams_a_call(mocked: Callable[..., Any], api: str) -> None:
    reply = Reply(tool_calls=(ToolCall("get_weather", {"city": "Paris"}),))
    seen = await ask(mocked(api, reply), NAMES[api], tools=[WEATHER])
    assert seen.finish.stop is StopReason.TOOL_CALLS
    [(call, name, args)] = seen.calls
    assert call
    assert name == "get_weather"
    assert args == {"city": "Paris"} or args.replace(" ", "") == '{"city":"Paris"}'


@every_api
async def test_llmock_truncates(mocked: Callable[..., Any], api: str) -> None:
    seen = await ask(mocked(api, Reply(text="partial", finish_reason="length")), NAMES[api])
    assert seen.finish.stop is StopReason.TRUNCATED


@every_api
@pytest.mark.parametrize(("status", "after"), [(429, 3.0), (500, None), (529, None)])
async def test_llmock_fails(mocked: Callable[..., Any], api: str, status: int, after: float | None) -> None:
    error = (await ask(mocked(api, Fail(status, retry_after=after)), NAMES[api])).error
    assert isinstance(error, ModelInvocationError)
    assert error.status == status
    if after is not None:
        assert error.retry_after == after


@every_api
@pytest.mark.parametrize("kind", ["disconnect", "truncate", "malformed"])
async def test_llmock_breaks_the_stream(mocked: Callable[..., Any], api: str, kind: Any) -> None:
    # After more chunks than the formats' prologues have, and before the end.
    text = " ".join(f"word{number}" for number in range(40))
    seen = await ask(mocked(api, Reply(text=text), StreamFault(kind, after_chunks=8)), NAMES[api])
    assert isinstance(seen.error, ModelInvocationError), seen.events[-1]
    assert seen.error.status is None
    assert text.startswith(seen.text)


@every_api
async def test_llmock_stalls_and_the_client_gives_up(mocked: Callable[..., Any], api: str) -> None:
    text = " ".join(f"word{number}" for number in range(40))
    gateway = mocked(api, Reply(text=text), StreamFault("stall", after_chunks=12, stall_seconds=0.5))
    got = ""

    async def consume() -> None:
        nonlocal got
        async with gateway.stream(request_for(gateway, NAMES[api])) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    got += event.text
                    first.set()

    first = asyncio.Event()
    task = asyncio.create_task(consume())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert got != text
    assert text.startswith(got)


# --- aimock -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def second(aimock: str, adapters: Callable[..., Adapters]) -> Adapters:
    """Adapters for aimock."""
    return adapters(f"{aimock}/v1", aimock, aimock)


@every_api
async def test_aimock_streams_text(second: Adapters, api: str) -> None:
    seen = await ask(second[api], NAMES[api], says("hello"))
    assert seen.text == "hello there friend"
    assert seen.finish.stop is StopReason.COMPLETE
    assert sum(isinstance(event, TextDelta) for event in seen.events) > 1


# aimock ends Gemini's calls with a word that Gemini does not have, and the client library remarks on it.
@pytest.mark.filterwarnings("ignore:.*FUNCTION_CALL.*:UserWarning")
@every_api
async def test_aimock_streams_a_call(second: Adapters, api: str) -> None:
    seen = await ask(second[api], NAMES[api], says("weather"), tools=[WEATHER])
    assert seen.finish.stop is StopReason.TOOL_CALLS
    [(_, name, args)] = seen.calls
    assert name == "get_weather"
    assert args == {"city": "Paris"} or args.replace(" ", "") == '{"city":"Paris"}'


@every_api
@pytest.mark.parametrize(("word", "status", "after"), [("limit", 429, 9.0), ("boom", 500, None)])
async def test_aimock_fails(second: Adapters, api: str, word: str, status: int, after: float | None) -> None:
    error = (await ask(second[api], NAMES[api], says(word))).error
    assert isinstance(error, ModelInvocationError)
    assert (error.status, error.retry_after) == (status, after)


@every_api
async def test_aimock_cuts_the_stream(second: Adapters, api: str) -> None:
    seen = await ask(second[api], NAMES[api], says("cut"))
    assert isinstance(seen.error, ModelInvocationError)
    assert seen.error.status is None


@every_api
async def test_aimock_is_slow_and_the_client_gives_up(second: Adapters, api: str) -> None:
    gateway = second[api]
    async with gateway.stream(request_for(gateway, NAMES[api], says("slow"))) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                break
    # The connection is free again at once, without waiting for the rest.
    assert (await ask(gateway, NAMES[api], says("hello"))).text == "hello there friend"
