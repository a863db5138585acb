"""The adapters of the providers: light classes that hold an endpoint and load its client library on first use."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit

import anyio.to_thread

from stepwell.errors import LlmSetupError

from ._types import LlmType, ModelEvent, ModelRequest, ModelSelection
from .catalog import Api, ModelCatalog

if TYPE_CHECKING:
    from ._pydantic_ai import Runtime

__all__ = ["Anthropic", "Endpoint", "Google", "OpenAIChat", "OpenAICompatible", "OpenAIResponses", "OutputMode"]

OutputMode: TypeAlias = Literal["native", "tool", "prompted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an adapter sends its requests, and as whom: one record that never changes (scenario C9).

    Everything a client is built from is read from here and nowhere else, neither from the environment nor from
    attributes that something might assign between two of them.

    Attributes:
        name: The provider's name.
        api: The interface spoken there.
        base_url: Where it is.
        api_key: The credential. Never part of the `repr`.
        compatible: Whether it only resembles its interface's first provider.
        headers: Further headers of every request. Never part of the `repr`: they may be credentials too.
        extra_body: Further fields of every request's body.
        max_tokens_field: The field that carries `max_tokens`, where endpoints differ.
        output: How structured output is asked for, where the catalogue does not know the model.
        requires_finish: Whether a stream without a finish reason is broken.
    """

    name: str
    api: Api
    base_url: str
    api_key: str | None = field(default=None, repr=False)
    compatible: bool = False
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_completion_tokens"
    output: OutputMode | None = None
    requires_finish: bool = True

    def __post_init__(self) -> None:
        if not self.name.strip() or ":" in self.name:
            raise LlmSetupError(f"{self.name!r} cannot name a provider: use a text without a colon.")
        url = urlsplit(self.base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise LlmSetupError(f"The base URL of provider {self.name!r} must start with http:// or https://.")
        if url.username or url.password or url.query:
            # It is shown in reprs and errors, and would take the credential there.
            raise LlmSetupError(
                f"The base URL of provider {self.name!r} holds a credential or a query: give the key as api_key."
            )
        object.__setattr__(self, "headers", MappingProxyType(dict(self.headers)))
        object.__setattr__(self, "extra_body", MappingProxyType(dict(self.extra_body)))


class Adapter:
    """What the adapters have in common: a `ModelGateway` over one endpoint.

    Args:
        endpoint: The endpoint.
        streaming: `False` makes one plain request per attempt and delivers the reply at once, for endpoints that
            cannot stream.
    """

    llm_type: ClassVar[LlmType] = LlmType.UNSUPPORTED
    extra: ClassVar[str] = "providers"
    """The extra of this package that brings the client library."""

    def __init__(self, endpoint: Endpoint, *, streaming: bool = True) -> None:
        self._endpoint = endpoint
        self._streaming = streaming
        self._runtime: Runtime | None = None
        self._loading = threading.Lock()

    @property
    def name(self) -> str:
        """The provider's name, under which `Providers` registers the adapter."""
        return self._endpoint.name

    @property
    def endpoint(self) -> Endpoint:
        """The record of name, base URL and key. It cannot be changed; make another adapter instead."""
        return self._endpoint

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint.name!r}, base_url={self._endpoint.base_url!r})"

    def validate(self, selection: ModelSelection) -> None:
        """Check model and parameters, without I/O and without loading the client library.

        Raises:
            LlmSetupError: See `ModelCatalog.check`.
        """
        ModelCatalog.check(selection, api=self._endpoint.api)

    def require(self, selection: ModelSelection, capabilities: Iterable[str]) -> None:
        """Check that a model has capabilities.

        Raises:
            LlmSetupError: See `ModelCatalog.require`.
        """
        ModelCatalog.require(selection, *capabilities, api=self._endpoint.api)

    def preload(self) -> None:
        """Import the client library now; it takes a second or more, and otherwise the first request waits for it.

        Raises:
            LlmSetupError: It is not installed.
        """
        self._load()

    def stream(self, request: ModelRequest) -> AbstractAsyncContextManager[AsyncIterator[ModelEvent]]:
        """Open one attempt (see `ModelGateway.stream`).

        Nothing is sent before the iterator is first asked for an event. Leaving the context closes the connection,
        also in the middle of a reply and when the task is cancelled; nothing is retried.

        Raises:
            LlmSetupError: Wrong parameters, the client library is missing, or a tool that cannot be sent.
            PromptBlockedError: The provider refused the prompt.
            ModelTimeoutError: No connection within `deadlines.connect` seconds.
            ModelInvocationError: Any other failure, also a stream that ends without a finish. Neither its text nor
                its traceback holds what the provider answered; the client library's exception is its `cause`.
        """
        return self._stream(request)

    @asynccontextmanager
    async def _stream(self, request: ModelRequest) -> AsyncGenerator[AsyncIterator[ModelEvent]]:
        self.validate(request.selection)
        # In a thread: an import of a second in the event loop would stall every other conversation.
        runtime = self._runtime or await anyio.to_thread.run_sync(self._load)
        events = runtime.events(request, streaming=self._streaming)
        try:
            yield events
        finally:
            await events.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running event loop. Requests under way break; later ones connect again."""
        if self._runtime is not None:
            await self._runtime.aclose()

    def _load(self) -> Runtime:
        with self._loading:
            if self._runtime is None:
                try:
                    from ._pydantic_ai import Runtime

                    self._runtime = Runtime(self._endpoint)
                except ImportError as error:
                    raise LlmSetupError(
                        f"Provider {self.name!r} needs a client library that is not installed: "
                        f"run `pip install 'stepwell[{self.extra}]'`.",
                        provider=self.name,
                    ) from error
            return self._runtime


def _needs_key(name: str, key: str | None) -> str:
    if key is None or not key.strip():
        raise LlmSetupError(f"Provider {name!r} needs an api_key.", provider=name)
    return key.strip()


class OpenAIChat(Adapter):
    """OpenAI's Chat Completions interface.

    Args:
        api_key: The key.
        base_url: A transparent proxy of OpenAI, `None` for OpenAI itself; other services are `OpenAICompatible`.
        name: The provider's name in selections.
        headers: Further headers of every request.
        streaming: See `Adapter`.

    Raises:
        LlmSetupError: No key, or a base URL that is none.
    """

    llm_type: ClassVar[LlmType] = LlmType.OPENAI
    extra: ClassVar[str] = "openai"
    _api: ClassVar[Api] = "openai-chat"
    _name: ClassVar[str] = "openai"

    def __init__(
        self,
        api_key: str | None,
        *,
        base_url: str | None = None,
        name: str | None = None,
        headers: Mapping[str, str] | None = None,
        streaming: bool = True,
    ) -> None:
        name = name or self._name
        super().__init__(
            Endpoint(
                name=name,
                api=self._api,
                base_url=base_url or "https://api.openai.com/v1",
                api_key=_needs_key(name, api_key),
                headers=headers or {},
            ),
            streaming=streaming,
        )


class OpenAIResponses(OpenAIChat):
    """OpenAI's Responses interface. Arguments and errors are those of `OpenAIChat`."""

    _api: ClassVar[Api] = "openai-responses"
    _name: ClassVar[str] = "openai-responses"


class OpenAICompatible(Adapter):
    """Any service or local server with an interface like Chat Completions.

    Parameters of its models are checked like OpenAI's in general; what only the service knows goes into
    `extra_body`.

    Args:
        name: The provider's name in selections.
        base_url: Where it is, usually ending in `/v1`.
        api_key: The key, where the service wants one.
        headers: Further headers of every request.
        extra_body: Further fields of every request's body; a selection's `extra_body` goes over them.
        max_tokens_field: The field that carries `max_tokens`; most services know only this one, and some local
            servers ignore the other silently.
        structured_output: How a reply with a schema is asked for: `native` (`response_format`), `tool` or `prompted`.
        capabilities: What its models can do, for start-up checks; `None` if that is not known.
        requires_finish: `False` for a service whose streams end without a finish reason. A reply that was cut off then
            looks complete.
        streaming: See `Adapter`.

    Raises:
        LlmSetupError: A name or base URL that is none.
    """

    llm_type: ClassVar[LlmType] = LlmType.OPENAI
    extra: ClassVar[str] = "openai"

    def __init__(
        self,
        name: str,
        base_url: str,
        api_key: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        structured_output: OutputMode = "native",
        capabilities: Iterable[str] | None = None,
        requires_finish: bool = True,
        streaming: bool = True,
    ) -> None:
        super().__init__(
            Endpoint(
                name=name,
                api="openai-chat",
                base_url=base_url,
                api_key=api_key.strip() if api_key and api_key.strip() else None,
                compatible=True,
                headers=headers or {},
                extra_body=extra_body or {},
                max_tokens_field=max_tokens_field,
                output=structured_output,
                requires_finish=requires_finish,
            ),
            streaming=streaming,
        )
        self._capabilities = None if capabilities is None else frozenset(capabilities)

    def validate(self, selection: ModelSelection) -> None:
        """Check parameters as far as they can be known.

        Raises:
            LlmSetupError: An unknown parameter or a wrong type.
        """
        # What OpenAI's models of the same name refuse says nothing about this service.
        ModelCatalog.check(selection, api="openai-chat", known=False)

    def require(self, selection: ModelSelection, capabilities: Iterable[str]) -> None:
        """Check against `capabilities`, if they were given.

        Raises:
            LlmSetupError: One is missing.
        """
        missing = set(capabilities) - self._capabilities if self._capabilities is not None else set[str]()
        if missing:
            raise LlmSetupError(
                f"{selection.id} cannot do what is required of it ({', '.join(sorted(missing))}): "
                f"choose another model, or add it to the capabilities of provider {self.name!r}.",
                model=selection.id,
            )


class Anthropic(Adapter):
    """Anthropic's Messages interface.

    Args:
        api_key: The key.
        base_url: A proxy of Anthropic, without `/v1`; `None` for Anthropic itself.
        name: The provider's name in selections.
        headers: Further headers of every request.
        streaming: See `Adapter`.

    Raises:
        LlmSetupError: No key, or a base URL that is none.
    """

    llm_type: ClassVar[LlmType] = LlmType.ANTHROPIC
    extra: ClassVar[str] = "anthropic"

    def __init__(
        self,
        api_key: str | None,
        *,
        base_url: str | None = None,
        name: str = "anthropic",
        headers: Mapping[str, str] | None = None,
        streaming: bool = True,
    ) -> None:
        super().__init__(
            Endpoint(
                name=name,
                api="anthropic",
                base_url=base_url or "https://api.anthropic.com",
                api_key=_needs_key(name, api_key),
                headers=headers or {},
            ),
            streaming=streaming,
        )


class Google(Adapter):
    """Google's Gemini interface.

    Args:
        api_key: The key.
        base_url: A proxy of Google; `None` for Google itself.
        name: The provider's name in selections.
        headers: Further headers of every request.
        streaming: See `Adapter`.

    Raises:
        LlmSetupError: No key, or a base URL that is none.
    """

    llm_type: ClassVar[LlmType] = LlmType.GEMINI
    extra: ClassVar[str] = "google"

    def __init__(
        self,
        api_key: str | None,
        *,
        base_url: str | None = None,
        name: str = "google",
        headers: Mapping[str, str] | None = None,
        streaming: bool = True,
    ) -> None:
        super().__init__(
            Endpoint(
                name=name,
                api="google",
                base_url=base_url or "https://generativelanguage.googleapis.com",
                api_key=_needs_key(name, api_key),
                headers=headers or {},
            ),
            streaming=streaming,
        )
