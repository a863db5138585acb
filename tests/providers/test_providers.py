"""The registry, the endpoint's record, and that no credential of one provider reaches another."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import FrozenInstanceError
from typing import Any

import anyio
import httpx2
import openai
import pytest

from providers.helpers import Adapters, ask, attempt, request_for
from providers.wire_server import WireServer
from stepwell.errors import LlmSetupError, ModelInvocationError
from stepwell.models import (
    Anthropic,
    Endpoint,
    Google,
    LlmType,
    ModelEvent,
    ModelRequest,
    ModelSelection,
    OpenAIChat,
    OpenAICompatible,
    OpenAIResponses,
    Providers,
)

pytestmark = pytest.mark.anyio


class Bare:
    """No more than the protocol asks for."""

    def __init__(self) -> None:
        self.checked: list[ModelSelection] = []

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[ModelEvent]]:
        raise NotImplementedError
        yield

    def validate(self, selection: ModelSelection) -> None:
        self.checked.append(selection)


def test_gateways_by_their_own_names_and_by_given_ones() -> None:
    chat, bare = OpenAIChat("a"), Bare()
    providers = Providers(chat, {"acme": bare}, Anthropic("b", name="claude-eu"))
    assert providers.names == ("openai", "acme", "claude-eu")
    assert providers.gateway("openai:gpt-4o") is chat
    assert providers.gateway(ModelSelection("acme", "x")) is bare
    assert "acme" in providers
    assert "google" not in providers
    assert repr(providers) == "Providers(openai, acme, claude-eu)"


@pytest.mark.parametrize("name", ["", " ", "a:b"])
def test_names_that_cannot_be_one(name: str) -> None:
    with pytest.raises(LlmSetupError, match="cannot name a provider"):
        Providers({name: Bare()})
    with pytest.raises(LlmSetupError, match="cannot name a provider"):
        OpenAICompatible(name, "http://127.0.0.1/v1")


def test_a_taken_name_and_what_is_no_gateway() -> None:
    providers = Providers({"acme": Bare()})
    with pytest.raises(LlmSetupError, match="registered already"):
        providers.register("acme", Bare())
    other = Bare()
    providers.register("acme", other, replace=True)
    assert providers.gateway("acme:x") is other
    nothing: Any = object()
    with pytest.raises(LlmSetupError, match=r"stream\(\) and validate\(\)"):
        providers.register("x", nothing)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("openai:x", "registered are acme: set OPENAI_API_KEY"),
        ("anthropic:x", "set ANTHROPIC_API_KEY"),
        ("google:x", "set GEMINI_API_KEY"),
        ("nobody:x", "register a gateway under that name"),
    ],
)
def test_an_unknown_provider_says_what_would_make_it_known(model: str, says: str) -> None:
    with pytest.raises(LlmSetupError, match=says):
        Providers({"acme": Bare()}).gateway(model)
    with pytest.raises(LlmSetupError, match="none is registered"):
        Providers().gateway(model)


def test_validation_asks_the_gateway_and_the_catalogue() -> None:
    bare = Bare()
    providers = Providers(
        OpenAIChat("a"),
        OpenAICompatible("local", "http://127.0.0.1/v1", capabilities=["tools"]),
        {"acme": bare, "google": bare},
    )
    providers.validate("openai:gpt-4o", ["tools"])
    with pytest.raises(LlmSetupError, match="image_input"):
        providers.validate("openai:o3-mini", ["image_input"])
    with pytest.raises(LlmSetupError, match="temperature"):
        providers.validate(ModelSelection("openai", "gpt-5", {"temperature": 1}))
    providers.validate("local:anything", ["tools"])
    with pytest.raises(LlmSetupError, match="add it to the capabilities of provider 'local'"):
        providers.validate("local:anything", ["tools", "image_input"])
    providers.validate("acme:x", ["video_input"])
    assert bare.checked == [ModelSelection("acme", "x")]
    with pytest.raises(LlmSetupError, match="tools"):
        providers.validate("google:gemini-3-pro-image", ["tools"])


def test_a_service_whose_models_are_named_like_known_ones_is_checked_in_general_only() -> None:
    local = OpenAICompatible("local", "http://127.0.0.1/v1")
    local.validate(ModelSelection("local", "gpt-5", {"temperature": 1}))
    local.require(ModelSelection("local", "gpt-5"), ["video_input"])
    with pytest.raises(LlmSetupError, match="has no parameter"):
        local.validate(ModelSelection("local", "gpt-5", {"min_p": 1}))


def test_an_adapter_under_another_name_is_checked_by_its_interface() -> None:
    providers = Providers({"eu": OpenAIResponses("a"), "us": Anthropic("a")})
    with pytest.raises(LlmSetupError, match="has no parameter 'seed'"):
        providers.validate(ModelSelection("eu", "gpt-4o", {"seed": 1}))
    with pytest.raises(LlmSetupError, match="reasoning model"):
        providers.validate(ModelSelection("us", "claude-opus-5-5", {"temperature": 1}))


def test_wire_families() -> None:
    providers = Providers(OpenAIChat("a"), OpenAIResponses("a"), Anthropic("a"), Google("a"), {"acme": Bare()})
    families = [providers.llm_type(name) for name in providers.names]
    assert families == [LlmType.OPENAI, LlmType.OPENAI, LlmType.ANTHROPIC, LlmType.GEMINI, LlmType.UNSUPPORTED]


def test_from_env() -> None:
    assert Providers.from_env({}).names == ()
    assert Providers.from_env({"OPENAI_API_KEY": " ", "GEMINI_API_KEY": ""}).names == ()
    everything = Providers.from_env({"OPENAI_API_KEY": "o", "ANTHROPIC_API_KEY": "a", "GOOGLE_API_KEY": "g"})
    assert everything.names == ("openai", "openai-responses", "anthropic", "google")
    local = Providers.from_env({"OPENAI_BASE_URL": "http://127.0.0.1:8080/v1"})
    gateway: Any = local.gateway("openai:x")
    assert local.names == ("openai",)
    assert isinstance(gateway, OpenAICompatible)
    assert gateway.endpoint.api_key is None
    urls = {
        "OPENAI_API_KEY": "o",
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "ANTHROPIC_API_KEY": "a",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:2",
        "GEMINI_API_KEY": "g1",
        "GOOGLE_API_KEY": "g2",
        "GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:3",
    }
    proxied = Providers.from_env(urls)
    records: list[Endpoint] = []
    for name in proxied.names:
        gateway = proxied.gateway(f"{name}:x")
        records.append(gateway.endpoint)
    assert [(record.base_url, record.api_key) for record in records] == [
        ("http://127.0.0.1:1/v1", "o"),
        ("http://127.0.0.1:1/v1", "o"),
        ("http://127.0.0.1:2", "a"),
        ("http://127.0.0.1:3", "g1"),
    ]


def test_from_env_reads_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "a")
    assert Providers.from_env().names == ("anthropic",)


@pytest.mark.parametrize("make", [OpenAIChat, OpenAIResponses, Anthropic, Google])
@pytest.mark.parametrize("key", [None, "", " "])
def test_a_provider_needs_its_key(make: Any, key: str | None) -> None:
    with pytest.raises(LlmSetupError, match="needs an api_key"):
        make(key)


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "http://", "127.0.0.1/v1"])
def test_base_urls_that_are_none(url: str) -> None:
    with pytest.raises(LlmSetupError, match="must start with http"):
        OpenAICompatible("x", url)


@pytest.mark.parametrize("url", ["http://me:pw@127.0.0.1/v1", "http://127.0.0.1/v1?key=pw"])
def test_a_base_url_holds_no_credential(url: str) -> None:
    with pytest.raises(LlmSetupError, match="give the key as api_key") as caught:
        OpenAICompatible("x", url)
    assert "pw" not in str(caught.value)


def test_the_record_never_changes_and_never_shows_a_credential() -> None:
    adapter = OpenAICompatible("x", "http://127.0.0.1/v1", " sk-1 ", headers={"x-key": "sk-2"}, extra_body={"a": 1})
    endpoint: Any = adapter.endpoint
    assert endpoint.api_key == "sk-1"
    for shown in (repr(adapter), repr(endpoint), str(adapter)):
        assert "sk-" not in shown
    with pytest.raises(FrozenInstanceError):
        endpoint.base_url = "http://127.0.0.2/v1"
    with pytest.raises(TypeError):
        endpoint.headers["authorization"] = "x"
    with pytest.raises(AttributeError):
        setattr(adapter, "endpoint", endpoint)  # noqa: B010


def test_preloading() -> None:
    providers = Providers(OpenAIChat("a"), Anthropic("a"), {"acme": Bare()})
    providers.preload("openai:gpt-4o", "acme:x")
    providers.preload()
    with pytest.raises(LlmSetupError, match="unknown"):
        providers.preload("nobody:x")


async def test_a_missing_client_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("openai", "anthropic", "google.genai", "pydantic_ai.models")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for adapter, extra in ((OpenAIChat("a"), "openai"), (Anthropic("a"), "anthropic"), (Google("a"), "google")):
        with pytest.raises(LlmSetupError, match=rf"pip install 'stepwell\[{extra}\]'"):
            adapter.preload()
        seen = await ask(adapter, "x")
        assert isinstance(seen.error, LlmSetupError)


CREDENTIALS = {
    "chat": "authorization",
    "responses": "authorization",
    "anthropic": "x-api-key",
    "gemini": "x-goog-api-key",
}


@pytest.mark.parametrize("api", CREDENTIALS)
async def test_nothing_from_the_environment_reaches_the_wire(
    wire: WireServer, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.setenv(name, "stray")
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY"):
        monkeypatch.setenv(name, "stray")
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    makers: dict[str, Callable[[], Any]] = {
        "chat": lambda: OpenAIChat("own", base_url=f"{wire.url}/v1"),
        "responses": lambda: OpenAIResponses("own", base_url=f"{wire.url}/v1"),
        "anthropic": lambda: Anthropic("own", base_url=wire.url),
        "gemini": lambda: Google("own", base_url=wire.url),
    }
    adapter = makers[api]()
    seen = await ask(adapter, "ok")
    await adapter.aclose()
    assert seen.text == "hello"
    headers = wire.requests[-1].headers
    assert headers[CREDENTIALS[api]].endswith("own")
    assert "stray" not in str(headers)


async def test_a_selection_cannot_bring_a_credential(wire: WireServer) -> None:
    adapter = OpenAIChat("own", base_url=f"{wire.url}/v1")
    seen = await ask(adapter, "ok", params={"extra_headers": {"x-api-key": "stray", "x-team": "t"}})
    await adapter.aclose()
    assert seen.text == "hello"
    headers = wire.requests[-1].headers
    assert "stray" not in str(headers)
    assert headers["x-team"] == "t"


async def test_scenario_C09_a_switch_of_models_never_mixes_credentials(  # noqa: N802
    wire: WireServer,
) -> None:
    """The session's model switches, back and forth, while a stalled stream is cancelled and retried."""
    with WireServer() as other:
        places = {"one": (wire, "key-one"), "two": (other, "key-two")}
        providers = Providers(
            *(OpenAICompatible(name, f"{server.url}/v1", key) for name, (server, key) in places.items()),
            Anthropic("key-three", base_url=other.url, name="three"),
        )
        for server in (wire, other):
            server.requests.clear()
        first = providers.gateway("one:x")
        stalled = asyncio.create_task(attempt(first, request_for(first, "stall")))
        assert await asyncio.to_thread(wire.reached.get, timeout=10) == "stall"

        async def turn(name: str) -> None:
            gateway = providers.gateway(f"{name}:ok")
            assert (await attempt(gateway, request_for(gateway, "ok"))).text == "hello"

        async with anyio.create_task_group() as group:
            for number in range(30):
                group.start_soon(turn, ("one", "two", "three")[number % 3])
            # The registry itself is changed too: what runs keeps its record.
            providers.register("one", OpenAICompatible("one", f"{other.url}/v1", "key-two"), replace=True)
        stalled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stalled
        assert await asyncio.to_thread(wire.gone.get, timeout=10) == "stall"
        retried = providers.gateway("one:x")
        assert (await attempt(retried, request_for(retried, "ok"))).text == "hello"
        await providers.aclose()
        for request in wire.requests:
            assert request.headers["authorization"] == "Bearer key-one"
        for request in other.requests:
            if request.api == "messages":
                assert request.headers["x-api-key"] == "key-three"
                assert "authorization" not in request.headers
            else:
                assert request.headers["authorization"] == "Bearer key-two"
        assert {request.api for request in other.requests} == {"chat", "messages"}


async def test_a_request_that_would_go_elsewhere_is_not_sent(
    on_wire: Callable[..., Adapters], wire: WireServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = on_wire()["chat"]
    assert (await ask(adapter, "ok")).text == "hello"
    with WireServer() as other:
        monkeypatch.setattr(
            openai.AsyncOpenAI, "_prepare_url", lambda self, url: httpx2.URL(f"{other.url}/v1/chat/completions")
        )
        seen = await ask(adapter, "ok")
        assert other.requests == []
    assert isinstance(seen.error, (LlmSetupError, ModelInvocationError))


async def test_each_event_loop_has_connections_of_its_own(wire: WireServer) -> None:
    adapter = OpenAIChat("a", base_url=f"{wire.url}/v1")

    async def once() -> str:
        text = (await ask(adapter, "ok")).text
        await adapter.aclose()
        return text

    # This loop's connections stay open meanwhile, and are no use to the other loop.
    assert (await ask(adapter, "ok")).text == "hello"
    assert await asyncio.to_thread(lambda: asyncio.run(once())) == "hello"
    assert (await ask(adapter, "ok")).text == "hello"
    await adapter.aclose()
