"""The registry of providers: which gateway serves the models of which name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

from stepwell.errors import LlmSetupError

from ._adapters import Anthropic, Google, OpenAIChat, OpenAICompatible, OpenAIResponses
from ._types import LlmType, ModelGateway, ModelSelection
from .catalog import ModelCatalog

__all__ = ["NamedGateway", "Providers"]

_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "openai-responses": "OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
}


class NamedGateway(ModelGateway, Protocol):
    """A gateway that knows its provider's name, as the adapters do."""

    @property
    def name(self) -> str:
        """The name to register it under."""
        ...


class Providers:
    """Gateways by provider name.

    A gateway may have more than `ModelGateway` asks for: `llm_type` (an `LlmType`), `require(selection, capabilities)`,
    `preload()` and `aclose()` are used where present.

    Args:
        *gateways: Adapters, registered under their own names, or mappings of name to gateway.

    Raises:
        LlmSetupError: Two gateways under one name, or a name that cannot be one.
    """

    def __init__(self, *gateways: NamedGateway | Mapping[str, ModelGateway]) -> None:
        self._gateways: dict[str, ModelGateway] = {}
        for gateway in gateways:
            if isinstance(gateway, Mapping):
                for name, one in gateway.items():
                    self.register(name, one)
            else:
                self.register(gateway.name, gateway)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Providers:
        """Register what the environment has credentials for.

        | variable | registers |
        | --- | --- |
        | `OPENAI_API_KEY`, with `OPENAI_BASE_URL` if set | `openai` (Chat Completions), `openai-responses` |
        | `OPENAI_BASE_URL` alone | `openai`: an `OpenAICompatible` endpoint without a key |
        | `ANTHROPIC_API_KEY`, with `ANTHROPIC_BASE_URL` if set | `anthropic` |
        | `GEMINI_API_KEY` or `GOOGLE_API_KEY`, with `GOOGLE_GEMINI_BASE_URL` if set | `google` |

        Args:
            environ: Variables; `None` for the process's.

        Raises:
            LlmSetupError: A base URL that is none.
        """
        env = os.environ if environ is None else environ

        def value(*names: str) -> str | None:
            return next((text for name in names if (text := env.get(name, "").strip())), None)

        providers = cls()
        key, url = value("OPENAI_API_KEY"), value("OPENAI_BASE_URL")
        if key:
            providers.register("openai", OpenAIChat(key, base_url=url))
            providers.register("openai-responses", OpenAIResponses(key, base_url=url))
        elif url:
            providers.register("openai", OpenAICompatible("openai", url))
        if key := value("ANTHROPIC_API_KEY"):
            providers.register("anthropic", Anthropic(key, base_url=value("ANTHROPIC_BASE_URL")))
        if key := value("GEMINI_API_KEY", "GOOGLE_API_KEY"):
            providers.register("google", Google(key, base_url=value("GOOGLE_GEMINI_BASE_URL")))
        return providers

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, in order of registration."""
        return tuple(self._gateways)

    def __contains__(self, name: object) -> bool:
        return name in self._gateways

    def __repr__(self) -> str:
        # Of the names only: a gateway of somebody else may show its key.
        return f"Providers({', '.join(self._gateways)})"

    def register(self, name: str, gateway: ModelGateway, *, replace: bool = False) -> None:
        """Add a gateway.

        Args:
            name: The provider's name in selections.
            gateway: Its gateway.
            replace: Whether it may take the place of another. Calls under way keep the gateway they started with.

        Raises:
            LlmSetupError: The name is taken, blank or holds a colon, or `gateway` is none.
        """
        if not name.strip() or ":" in name:
            raise LlmSetupError(f"{name!r} cannot name a provider: use a text without a colon.")
        if not isinstance(gateway, ModelGateway):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise LlmSetupError(f"Provider {name!r} needs a gateway: an object with stream() and validate().")
        if name in self._gateways and not replace:
            raise LlmSetupError(f"Provider {name!r} is registered already: pass replace=True, or use another name.")
        self._gateways[name] = gateway

    def gateway(self, selection: ModelSelection | str) -> ModelGateway:
        """The gateway that serves a model.

        Raises:
            LlmSetupError: No provider of that name is registered.
        """
        return self._named(ModelSelection.parse(selection).provider)

    def _named(self, provider: str) -> ModelGateway:
        gateway = self._gateways.get(provider)
        if gateway is None:
            known = f"registered are {', '.join(self._gateways)}" if self._gateways else "none is registered"
            variable = _VARIABLES.get(provider)
            hint = f"set {variable}" if variable else "register a gateway under that name"
            raise LlmSetupError(f"Provider {provider!r} is unknown, {known}: {hint}.", provider=provider)
        return gateway

    def validate(self, selection: ModelSelection | str, require: Iterable[str] = ()) -> None:
        """Check a model before it is used: provider, name, parameters and capabilities. No I/O.

        Args:
            selection: The model.
            require: Words of `CAPABILITIES` that it must have.

        Raises:
            LlmSetupError: It cannot be used so; the sentence says what to change.
        """
        selection = ModelSelection.parse(selection)
        gateway = self._named(selection.provider)
        gateway.validate(selection)
        required = tuple(require)
        check = cast("Callable[[ModelSelection, Iterable[str]], None] | None", getattr(gateway, "require", None))
        if check is not None:
            check(selection, required)
        elif required:
            ModelCatalog.require(selection, *required)

    def preload(self, *selections: ModelSelection | str) -> None:
        """Import the client libraries of these models now; without arguments, of all registered providers.

        Blocking, for start-up: it takes seconds and makes no connection.

        Raises:
            LlmSetupError: A provider is unknown or its library is not installed.
        """
        gateways = [self.gateway(one) for one in selections] if selections else list(self._gateways.values())
        for gateway in gateways:
            load = cast("Callable[[], None] | None", getattr(gateway, "preload", None))
            if load is not None:
                load()

    def llm_type(self, provider: str) -> LlmType:
        """The wire family of a provider; `UNSUPPORTED` where its gateway does not say.

        Raises:
            LlmSetupError: It is unknown.
        """
        kind: Any = getattr(self._named(provider), "llm_type", None)
        return kind if isinstance(kind, LlmType) else LlmType.UNSUPPORTED

    async def aclose(self) -> None:
        """Close the connections that the gateways hold in the running event loop."""
        for gateway in self._gateways.values():
            close: Any = getattr(gateway, "aclose", None)
            if close is not None:
                await close()
