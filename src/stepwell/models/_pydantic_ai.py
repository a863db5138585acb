"""The streaming half of the adapters, on the model classes of pydantic-ai (never its agent).

Importing this module takes a second or more: only `_adapters` does, when a model is first used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast
from weakref import WeakKeyDictionary

import anyio
import httpx2
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import FilePart as ModelFilePart
from pydantic_ai.messages import (
    InstructionPart,
    ModelResponse,
    ModelResponsePart,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from stepwell.errors import LlmSetupError
from stepwell.messages import FilePart, UserMessage

from ._adapters import Endpoint, OutputMode
from ._finish import finish_of, translate, usage_of
from ._history import HistoryEncoder, Identity, provider_data_of
from ._pairing import unfenced
from ._types import (
    FileEvent,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageEvent,
)
from .catalog import ModelCatalog, reasoning_effort

__all__ = ["Runtime"]

_OUTPUT_TOOL = "final_result"
_SETTINGS = {"stop": "stop_sequences", "reasoning": "thinking"}
_OPENAI_SETTINGS = {
    "verbosity": "openai_text_verbosity",
    "user": "openai_user",
    "store": "openai_store",
    "reasoning_summary": "openai_reasoning_summary",
}
_CREDENTIALS = ("authorization", "x-api-key", "x-goog-api-key", "api-key", "openai-organization", "openai-project")


@dataclass(slots=True)
class _Exchange:
    """What one attempt has on the wire: its time to connect, and the responses to close after it."""

    connect: float | None = None
    responses: list[httpx2.Response] = field(default_factory=list[httpx2.Response])

    async def aclose(self) -> None:
        # Shielded, since a cancelled attempt is closed too, and with a limit, since closing must not hang either.
        with anyio.move_on_after(2, shield=True):
            for response in self.responses:
                await response.aclose()


_exchange: ContextVar[_Exchange | None] = ContextVar("stepwell_exchange", default=None)


class Runtime:
    """Clients, models and encoded history of one endpoint.

    Connections belong to the event loop that opened them, so each loop has its own client.

    Args:
        endpoint: Everything that a client is built from.

    Raises:
        ImportError: The client library of the interface is not installed.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._build = _builder(endpoint)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = WeakKeyDictionary()
        self._encoders: dict[bool, HistoryEncoder] = {}

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.http.aclose()

    async def events(self, request: ModelRequest, *, streaming: bool) -> AsyncGenerator[ModelEvent]:
        """The events of one attempt. Closing the generator closes the connection."""
        exchange = _Exchange(request.deadlines.connect)
        _exchange.set(exchange)
        try:
            model = self._model(request.selection.name)
            call = self._call(model, request)
            if streaming:
                async for event in self._streamed(call):
                    yield event
            else:
                async for event in self._whole(call):
                    yield event
        except Exception as error:  # noqa: BLE001
            # Everything: what pydantic-ai and three client libraries may raise is no list that stays complete.
            files = _has_files(request) and not exchange.responses
            raise translate(error, request.selection, files=files, scrub=self._scrub) from None
        finally:
            # By our own hand: google-genai leaves the connection of an abandoned stream to the garbage collector.
            await exchange.aclose()

    async def _streamed(self, call: _Call) -> AsyncGenerator[ModelEvent]:
        out = _Outgoing(call)
        async with model_request_stream(
            call.model, call.messages, model_settings=call.settings, model_request_parameters=call.parameters
        ) as stream:
            usage = None
            try:
                async for event in stream:
                    for ours in out.event(event):
                        yield ours
                    if usage is None and (usage := usage_of(stream.usage)) is not None:
                        # As early as it is known: an attempt that fails or is cancelled has cost these tokens too.
                        yield UsageEvent(usage)
            except Exception:
                if (last := usage_of(stream.usage)) is not None and last != usage:
                    yield UsageEvent(last)
                raise
            for ours in self._end(call, out, stream.get()):
                yield ours

    async def _whole(self, call: _Call) -> AsyncGenerator[ModelEvent]:
        out = _Outgoing(call)
        response = await model_request(
            call.model, call.messages, model_settings=call.settings, model_request_parameters=call.parameters
        )
        for index, part in enumerate(response.parts):
            for ours in out.start(index, part):
                yield ours
        for ours in self._end(call, out, response):
            yield ours

    def _end(self, call: _Call, out: _Outgoing, response: ModelResponse) -> Iterator[ModelEvent]:
        yield from out.end(response)
        # Before the finish, which may turn out to be a failure: the tokens were spent all the same.
        if (usage := usage_of(response.usage)) is not None:
            yield UsageEvent(usage)
        data = provider_data_of(response, self._identity(call.model).tag, output_tool=call.output_tool)
        yield finish_of(response, call.request.selection, data, output_tool=call.output_tool)

    def _scrub(self, text: str) -> str:
        secrets = [self._endpoint.api_key, *self._endpoint.headers.values()]
        for secret in secrets:
            if secret:
                text = text.replace(secret, "***")
        return text

    def _model(self, name: str) -> Model[Any]:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = self._clients[loop] = _Client(_http_client(self._endpoint))
        model = client.models.get(name)
        if model is None:
            model = client.models[name] = self._build(name, client.http)
        return model

    def _identity(self, model: Model[Any]) -> Identity:
        endpoint = self._endpoint
        provider = model.provider
        url = str(provider.base_url) if provider is not None else endpoint.base_url
        sealed = bool(model.profile.get("openai_supports_encrypted_reasoning_content", False))
        place = sha256(endpoint.base_url.encode()).hexdigest()[:8]
        return Identity(
            api=endpoint.api,
            system=model.system,
            canonical=model.canonical_system,
            url=url,
            tag=f"{endpoint.api}/{endpoint.name}/{place}",
            thoughts=sealed or endpoint.api != "openai-responses",
        )

    def _call(self, model: Model[Any], request: ModelRequest) -> _Call:
        identity = self._identity(model)
        encoder = self._encoders.get(identity.thoughts)
        if encoder is None:
            encoder = self._encoders[identity.thoughts] = HistoryEncoder(identity)
        settings = self._settings(request)
        parameters, output_tool, fenced = self._parameters(model, request, settings)
        return _Call(
            model=model,
            request=request,
            messages=encoder.encode(request.messages),
            settings=cast("ModelSettings", settings),
            parameters=parameters,
            output_tool=output_tool,
            fenced=fenced,
        )

    def _settings(self, request: ModelRequest) -> dict[str, Any]:
        endpoint = self._endpoint
        settings: dict[str, Any] = {"max_retries": 0, "framing_announcement": "never"}
        names = {**_SETTINGS, **_OPENAI_SETTINGS}
        for key, value in request.selection.params.items():
            settings[names.get(key, key)] = value
        if "thinking" in settings:
            settings["thinking"] = reasoning_effort(request.selection.params)
        body = {**endpoint.extra_body, **settings.pop("extra_body", {})}
        if body:
            settings["extra_body"] = body
        if request.conversation and endpoint.api.startswith("openai") and not endpoint.compatible:
            # Requests of one conversation find the same cache. A digest: the field is short.
            settings["openai_prompt_cache_key"] = sha256(request.conversation.encode()).hexdigest()[:32]
        return settings

    def _parameters(
        self, model: Model[Any], request: ModelRequest, settings: dict[str, Any]
    ) -> tuple[ModelRequestParameters, str | None, bool]:
        tools = [
            ToolDefinition(name=tool.name, description=tool.description, parameters_json_schema=tool.parameters)
            for tool in request.tools
        ]
        parameters = ModelRequestParameters(
            function_tools=tools,
            instruction_parts=[InstructionPart(content=request.system)] if request.system else None,
        )
        schema = request.output_schema
        if schema is None:
            return parameters, None, False
        mode = self._output_mode(model, request, settings)
        parameters.output_mode = mode
        if mode == "tool":
            taken = {tool.name for tool in tools}
            name = _OUTPUT_TOOL
            while name in taken:
                name += "_"
            parameters.output_tools = [
                ToolDefinition(
                    name=name,
                    description="The final answer. Call this when the answer is known.",
                    parameters_json_schema=schema,
                    kind="output",
                )
            ]
            parameters.allow_text_output = False
            return parameters, name, False
        parameters.output_object = OutputObjectDefinition(json_schema=schema, name=_OUTPUT_TOOL)
        return parameters, None, mode == "prompted"

    def _output_mode(self, model: Model[Any], request: ModelRequest, settings: dict[str, Any]) -> OutputMode:
        profile = model.profile
        info = ModelCatalog.info(request.selection, api=self._endpoint.api)
        mode = self._endpoint.output
        if mode is None:
            known = info is not None and "structured_output" in info.capabilities
            native = known or (info is None and bool(profile.get("supports_json_schema_output", False)))
            mode = "native" if native else "tool"
        if mode == "native" and not profile.get("supports_json_schema_output", False):
            mode = "tool"
        if (
            mode == "native"
            and request.tools
            and self._endpoint.api == "google"
            and not profile.get("google_supports_tool_combination", False)
        ):
            mode = "tool"
        # An output tool is a forced call, which reasoning forbids at Anthropic, and its arguments are an object.
        forced = not settings.get("thinking") and profile.get("supports_tools", True)
        if mode == "tool" and not (forced and (request.output_schema or {}).get("type") == "object"):
            mode = "prompted"
        return mode


@dataclass(slots=True)
class _Client:
    http: httpx2.AsyncClient
    models: dict[str, Model[Any]] = field(default_factory=dict[str, Model[Any]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    model: Model[Any]
    request: ModelRequest
    messages: list[Any]
    settings: ModelSettings
    parameters: ModelRequestParameters
    output_tool: str | None
    fenced: bool


class _Outgoing:
    """Turns parts and deltas into our events: the part of a reply that is the structured output becomes text."""

    def __init__(self, call: _Call) -> None:
        self._output_tool = call.output_tool
        self._output_part: int | None = None
        # Text that is not the output, or not yet known to be, waits for the end.
        self._held: list[str] | None = [] if call.fenced or call.output_tool is not None else None
        self._calls: dict[int, int] = {}
        self._args: list[list[str]] = []

    def event(self, event: ModelResponseStreamEvent) -> Iterator[ModelEvent]:
        if isinstance(event, PartStartEvent):
            yield from self.start(event.index, event.part)
        elif isinstance(event, PartDeltaEvent):
            delta = event.delta
            if isinstance(delta, TextPartDelta):
                yield from self._text(delta.content_delta)
            elif isinstance(delta, ThinkingPartDelta):
                if delta.content_delta:
                    yield ReasoningDelta(delta.content_delta)
            elif isinstance(delta, ToolCallPartDelta):
                yield from self._arguments(event.index, delta.args_delta)

    def start(self, index: int, part: ModelResponsePart) -> Iterator[ModelEvent]:
        if isinstance(part, TextPart):
            yield from self._text(part.content)
        elif isinstance(part, ThinkingPart):
            if part.content:
                yield ReasoningDelta(part.content)
        elif isinstance(part, ModelFilePart):
            content = part.content
            yield FileEvent(FilePart(media_type=content.media_type, data=content.base64))
        elif isinstance(part, ToolCallPart):
            if part.tool_name == self._output_tool:
                # A model may call it twice; one answer is the answer.
                if self._output_part is None:
                    self._output_part = index
            elif index not in self._calls:
                self._calls[index] = len(self._args)
                self._args.append([])
                yield ToolCallStart(self._calls[index], part.tool_call_id, part.tool_name)
            yield from self._arguments(index, cast("str | dict[str, Any] | None", part.args))

    def end(self, response: ModelResponse) -> Iterator[ModelEvent]:
        calls = [part for part in response.parts if isinstance(part, ToolCallPart)]
        if self._held and self._output_part is None:
            # Also where a model answered in text instead of calling the output tool.
            text = "".join(self._held)
            yield TextDelta(text if calls else unfenced(text))
        # Only now: parallel calls may go on after a later one has begun.
        for number, part in enumerate(part for part in calls if part.tool_name != self._output_tool):
            args = cast("str | dict[str, Any] | None", part.args)
            if isinstance(args, str) and args and args == "".join(self._args[number]):
                yield ToolCallEnd(number)
            else:
                # A call without arguments sends none at all, or an empty text.
                yield ToolCallEnd(number, args or {})

    def _text(self, text: str) -> Iterator[ModelEvent]:
        if self._held is not None:
            self._held.append(text)
        elif text:
            yield TextDelta(text)

    def _arguments(self, index: int, args: str | dict[str, Any] | None) -> Iterator[ModelEvent]:
        if index == self._output_part:
            if args:
                yield TextDelta(args if isinstance(args, str) else json.dumps(args))
        elif isinstance(args, str) and args and index in self._calls:
            number = self._calls[index]
            self._args[number].append(args)
            yield ToolCallDelta(number, args)


def _has_files(request: ModelRequest) -> bool:
    return any(
        isinstance(message, UserMessage) and not isinstance(message.content, str) for message in request.messages
    )


def _http_client(endpoint: Endpoint) -> httpx2.AsyncClient:
    base = httpx2.URL(endpoint.base_url)
    key = endpoint.api_key
    own = {
        "openai-chat": ("authorization", f"Bearer {key}"),
        "openai-responses": ("authorization", f"Bearer {key}"),
        "anthropic": ("x-api-key", key or ""),
        "google": ("x-goog-api-key", key or ""),
    }[endpoint.api]
    headers = {**(dict([own]) if key else {}), **{name.lower(): value for name, value in endpoint.headers.items()}}

    async def to_the_letter(request: httpx2.Request) -> None:
        """Send what the endpoint's record says, whatever the libraries read from the environment (scenario C9)."""
        url = request.url
        if (url.scheme, url.host, url.port) != (base.scheme, base.host, base.port):
            raise LlmSetupError(
                f"Provider {endpoint.name!r} was about to send a request elsewhere than to its base URL."
            )
        for name in _CREDENTIALS:
            request.headers.pop(name, None)
        request.headers.update(headers)
        # The deadlines of silence are the loop's, which sees the tokens; here they would only cut off a slow model.
        exchange = _exchange.get()
        connect = None if exchange is None else exchange.connect
        request.extensions["timeout"] = {"connect": connect, "read": None, "write": None, "pool": None}

    async def remember(response: httpx2.Response) -> None:
        if (exchange := _exchange.get()) is not None:
            exchange.responses.append(response)

    return httpx2.AsyncClient(
        event_hooks={"request": [to_the_letter], "response": [remember]},
        # Set again for each request, above; pydantic-ai derives a time-out for the whole call from this one.
        timeout=httpx2.Timeout(3600.0),
        # A thousand conversations stream at once; none may wait for a connection of another.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0),
    )


_Build = Callable[[str, httpx2.AsyncClient], Model[Any]]


def _builder(endpoint: Endpoint) -> _Build:
    match endpoint.api:
        case "anthropic":
            return _anthropic(endpoint)
        case "google":
            return _google(endpoint)
        case "openai-chat" | "openai-responses":
            return _openai(endpoint)


def _openai(endpoint: Endpoint) -> _Build:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    profile = OpenAIModelProfile(
        openai_chat_streaming_requires_finish_reason=endpoint.requires_finish,
        openai_chat_supports_max_completion_tokens=endpoint.max_tokens_field == "max_completion_tokens",
    )
    if endpoint.output is not None:
        profile["supports_json_schema_output"] = endpoint.output == "native"

    def build(name: str, http: httpx2.AsyncClient) -> Model[Any]:
        client = AsyncOpenAI(
            # The library wants a key; the request goes out without one if the record has none.
            api_key=endpoint.api_key or "none",
            base_url=endpoint.base_url,
            max_retries=0,
            http_client=http,
        )
        if endpoint.compatible:
            provider = OpenAICompatibleProvider(endpoint.name, openai_client=client)
            return OpenAIChatModel(name, provider=provider, profile=profile)
        model = OpenAIResponsesModel if endpoint.api == "openai-responses" else OpenAIChatModel
        return model(name, provider=OpenAIProvider(openai_client=client), profile=profile)

    return build


def _anthropic(endpoint: Endpoint) -> _Build:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    def build(name: str, http: httpx2.AsyncClient) -> Model[Any]:
        client = AsyncAnthropic(api_key=endpoint.api_key, base_url=endpoint.base_url, max_retries=0, http_client=http)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))

    return build


def _google(endpoint: Endpoint) -> _Build:
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    def build(name: str, http: httpx2.AsyncClient) -> Model[Any]:
        provider = GoogleProvider(api_key=endpoint.api_key, base_url=endpoint.base_url, http_client=http)
        return GoogleModel(name, provider=provider)

    return build
