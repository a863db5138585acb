"""The models Stepwell knows: context, capabilities and parameters, checked before anything is sent.

A parameter is checked when a selection is made and again before it is used, so that a misspelled key or a
temperature that a reasoning model refuses is found at start-up and not in a customer's turn. Names that are not
listed stay usable, since new models appear every week: they are checked against what their provider's interface
accepts in general.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, cast

from stepwell.errors import LlmSetupError

from ._types import ModelSelection

__all__ = ["CAPABILITIES", "Api", "ModelCatalog", "ModelInfo"]

Api: TypeAlias = Literal["openai-chat", "openai-responses", "anthropic", "google"]
"""An interface of a provider; what decides which parameters exist."""

CAPABILITIES = frozenset(
    {
        "tools",
        "structured_output",
        "reasoning",
        "image_input",
        "pdf_input",
        "audio_input",
        "video_input",
        "image_output",
    }
)
"""What can be required of a model. `structured_output` means natively; without it the adapters use a tool or ask."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the catalogue knows of a model.

    Attributes:
        name: Its name, without the date of a snapshot.
        context: Tokens of its context window.
        capabilities: See `CAPABILITIES`.
        efforts: Efforts that `reasoning` accepts; empty for a model that does not reason.
        sampling: Whether it accepts `temperature` and its kin: `always`, `never`, or only `without_reasoning`.
        apis: The interfaces that offer it, where not every interface of its provider does.
    """

    name: str
    context: int
    capabilities: frozenset[str]
    efforts: tuple[str, ...] = ()
    sampling: Literal["always", "without_reasoning", "never"] = "always"
    apis: frozenset[str] = field(default_factory=frozenset[str])


@dataclass(frozen=True, slots=True)
class _Param:
    accepts: Callable[[Any], bool]
    what: str


def _int(low: int) -> _Param:
    return _Param(lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low, f"a whole number from {low}")


def _number(low: float, high: float) -> _Param:
    def accepts(value: Any) -> bool:
        return (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and math.isfinite(value)
            and low <= value <= high
        )

    return _Param(accepts, f"a number from {low:g} to {high:g}")


def _one_of(*values: str) -> _Param:
    return _Param(lambda v: isinstance(v, str) and v in values, "one of " + ", ".join(map(repr, values)))


def _texts(value: Any) -> bool:
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(item, str) and item for item in cast("tuple[Any, ...]", value))


def _object_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(isinstance(k, str) and accepts(v) for k, v in cast("Mapping[Any, Any]", value).items())

    return check


_BOOL = _Param(lambda v: isinstance(v, bool), "true or false")
_TEXT = _Param(lambda v: isinstance(v, str) and v != "", "a text")
_TEXTS = _Param(_texts, "a list of texts")
_OBJECT = _Param(_object_of(lambda _: True), "an object with text keys")
_HEADERS = _Param(_object_of(lambda v: isinstance(v, str)), "an object of texts")
_REASONING = _Param(
    lambda v: isinstance(v, bool) or v in EFFORTS, "true, false or one of " + ", ".join(map(repr, EFFORTS))
)
_TIER = _one_of("auto", "default", "flex", "priority")

_GENERAL: Mapping[str, _Param] = {
    "max_tokens": _int(1),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "reasoning": _REASONING,
    "tool_choice": _one_of("auto", "required", "none"),
    "service_tier": _TIER,
    "extra_headers": _HEADERS,
}
_OPENAI: Mapping[str, _Param] = {
    **_GENERAL,
    "parallel_tool_calls": _BOOL,
    "verbosity": _one_of("low", "medium", "high"),
    "user": _TEXT,
    "store": _BOOL,
    "cache": _Param(lambda v: isinstance(v, bool) or v in ("30m", "12h"), "true, false, '30m' or '12h'"),
    "extra_body": _OBJECT,
}
_PENALTIES: Mapping[str, _Param] = {
    "seed": _int(0),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
}
_PARAMS: Mapping[Api, Mapping[str, _Param]] = {
    "openai-chat": {
        **_OPENAI,
        **_PENALTIES,
        "stop": _TEXTS,
        "logit_bias": _Param(_object_of(lambda v: isinstance(v, int)), "an object of whole numbers"),
    },
    "openai-responses": {**_OPENAI, "reasoning_summary": _one_of("auto", "concise", "detailed")},
    "anthropic": {
        **_GENERAL,
        "temperature": _number(0, 1),
        "top_k": _int(1),
        "stop": _TEXTS,
        "parallel_tool_calls": _BOOL,
        "cache": _Param(lambda v: isinstance(v, bool) or v in ("5m", "1h"), "true, false, '5m' or '1h'"),
        "extra_body": _OBJECT,
    },
    "google": {**_GENERAL, **_PENALTIES, "top_k": _int(1), "stop": _TEXTS},
}
_SAMPLING = frozenset({"temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "logit_bias"})

_APIS: Mapping[str, Api] = {
    "openai": "openai-chat",
    "openai-responses": "openai-responses",
    "anthropic": "anthropic",
    "google": "google",
}
"""Interface by the provider names that `Providers.from_env` uses."""

_TEXT_ONLY = "tools structured_output"
_EYES = "tools structured_output image_input pdf_input"
_SENSES = "tools structured_output image_input pdf_input audio_input video_input"
_PAINT = "image_input image_output"

_O = ("low", "medium", "high")
_OX = ("none", *_O, "xhigh")
_OM = ("none", *_O, "xhigh", "max")
_K = 1_000

# names, context in thousands of tokens, capabilities, efforts, sampling, interfaces
_Row: TypeAlias = tuple[str, int, str, tuple[str, ...], Literal["always", "without_reasoning", "never"], str]

_OPENAI_ROWS: tuple[_Row, ...] = (
    ("gpt-4o gpt-4o-mini", 128, _EYES, (), "always", ""),
    ("gpt-4.1 gpt-4.1-mini gpt-4.1-nano", 1000, _EYES, (), "always", ""),
    ("o1 o3 o4-mini", 200, _EYES, _O, "never", ""),
    ("o3-mini", 200, _TEXT_ONLY, _O, "never", ""),
    ("o3-pro", 200, _EYES, _O, "never", "openai-responses"),
    ("gpt-5 gpt-5-mini gpt-5-nano", 400, _EYES, ("minimal", *_O), "never", ""),
    ("gpt-5-pro", 400, _EYES, ("high",), "never", "openai-responses"),
    ("gpt-5.1", 400, _EYES, ("none", *_O), "without_reasoning", ""),
    ("gpt-5.2 gpt-5.4-mini gpt-5.4-nano", 400, _EYES, _OX, "without_reasoning", ""),
    ("gpt-5.3-codex", 400, _EYES, _OX, "without_reasoning", "openai-responses"),
    ("gpt-5.4 gpt-5.5", 1050, _EYES, _OX, "without_reasoning", ""),
    ("gpt-5.2-pro", 400, _EYES, ("medium", "high", "xhigh"), "never", "openai-responses"),
    ("gpt-5.4-pro gpt-5.5-pro", 1050, _EYES, ("medium", "high", "xhigh"), "never", "openai-responses"),
    ("gpt-5.6-sol gpt-5.6-terra gpt-5.6-luna", 1050, _EYES, _OM, "without_reasoning", ""),
    ("gpt-6-sol gpt-6-luna gpt-6.1-terra", 1050, _EYES, _OM, "without_reasoning", ""),
    ("gpt-6-astra gpt-6.1-sol", 1050, _EYES, (*_O, "xhigh", "max"), "never", ""),
)
_EFFORT = ("none", "minimal", *_O)  # a budget of tokens that the adapter derives from the effort
_ANTHROPIC_ROWS: tuple[_Row, ...] = (
    ("claude-opus-4-0 claude-sonnet-4-0", 200, "tools image_input pdf_input", _EFFORT, "without_reasoning", ""),
    ("claude-opus-4-1 claude-sonnet-4-5 claude-haiku-4-5", 200, _EYES, _EFFORT, "without_reasoning", ""),
    ("claude-opus-4-5", 200, _EYES, ("none", *_O), "without_reasoning", ""),
    ("claude-opus-4-6 claude-sonnet-4-6", 1000, _EYES, ("none", *_O, "max"), "without_reasoning", ""),
    ("claude-opus-4-7 claude-opus-4-8", 1000, _EYES, _OM, "never", ""),
    ("claude-sonnet-5 claude-opus-5", 1000, _EYES, _OM, "never", ""),
    ("claude-haiku-5-5 claude-sonnet-5-5", 1000, _EYES, _OM, "never", ""),
    ("claude-fable-5 claude-fable-5-1 claude-fable-5-2", 1000, _EYES, (*_O, "xhigh", "max"), "never", ""),
    ("claude-mythos-5-2 claude-opus-5-5", 1000, _EYES, (*_O, "xhigh", "max"), "never", ""),
)
_GOOGLE_ROWS: tuple[_Row, ...] = (
    ("gemini-2.0-flash gemini-2.0-flash-lite", 1000, _SENSES, (), "always", ""),
    ("gemini-2.5-flash gemini-2.5-flash-lite", 1048, _SENSES, ("none", "minimal", *_O), "always", ""),
    ("gemini-2.5-pro", 1048, _SENSES, ("minimal", *_O), "always", ""),
    ("gemini-3-pro-preview", 1000, _SENSES, ("low", "high"), "always", ""),
    ("gemini-3.1-pro-preview", 1000, _SENSES, _O, "always", ""),
    ("gemini-3-flash-preview gemini-3.1-flash-lite", 1000, _SENSES, ("minimal", *_O), "always", ""),
    ("gemini-3.5-flash gemini-3.5-flash-lite gemini-3.6-flash", 1000, _SENSES, ("minimal", *_O), "always", ""),
    ("gemini-3.7-flash gemini-3.8-flash gemini-4-argon gemini-4-carbon", 1000, _SENSES, _O, "always", ""),
    ("gemini-3-pro-image gemini-3.1-flash-image", 65, _PAINT, ("low", "high"), "always", ""),
)


def _expand(rows: Iterable[_Row]) -> Mapping[str, ModelInfo]:
    known: dict[str, ModelInfo] = {}
    for names, context, capabilities, efforts, sampling, apis in rows:
        for name in names.split():
            words = set(capabilities.split())
            if efforts:
                words.add("reasoning")
            known[name] = ModelInfo(
                name=name,
                context=context * _K,
                capabilities=frozenset(words),
                efforts=efforts,
                sampling=sampling,
                apis=frozenset(apis.split()),
            )
    return MappingProxyType(known)


_BY_API: Mapping[Api, Mapping[str, ModelInfo]] = {
    "openai-chat": (_openai := _expand(_OPENAI_ROWS)),
    "openai-responses": _openai,
    "anthropic": _expand(_ANTHROPIC_ROWS),
    "google": _expand(_GOOGLE_ROWS),
}
_SNAPSHOT = re.compile(r"(-\d{4}-\d{2}-\d{2}|-\d{8}|-latest|-preview-\d{2}-\d{2,4}|-\d{3})$")


class ModelCatalog:
    """Known models of OpenAI, Anthropic and Google. All methods are pure: no I/O, nothing imported."""

    providers: ClassVar[Mapping[str, Api]] = MappingProxyType(dict(_APIS))
    """The catalogued provider names, with the interface each one means."""

    @classmethod
    def model(cls, model: str, *, retries: int | None = None, **params: Any) -> ModelSelection:
        """Make a checked selection.

        Args:
            model: `"provider:name"`.
            retries: Further tries of one round after the first, so `attempts` is one more; `None` inherits.
            **params: Parameters of the model: `max_tokens`, `temperature`, `reasoning`, ... Of a provider that is not
                catalogued they are taken as they are; its adapter checks them.

        Raises:
            LlmSetupError: No provider in the name, a negative `retries`, or a parameter the model does not accept.
        """
        if retries is not None and (isinstance(retries, bool) or retries < 0):
            raise LlmSetupError(f"retries of {model} must be 0 or more.", model=model)
        plain = ModelSelection.parse(model)
        selection = ModelSelection(plain.provider, plain.name, params, None if retries is None else retries + 1)
        cls.check(selection)
        return selection

    @classmethod
    def info(cls, selection: ModelSelection | str, *, api: Api | None = None) -> ModelInfo | None:
        """What is known of a model; `None` for a name or provider that is not catalogued.

        Args:
            selection: The model. A dated snapshot (`gpt-4o-2024-08-06`, `claude-haiku-4-5-20251001`) is its model.
            api: The interface, where the provider's name does not say it.
        """
        selection = ModelSelection.parse(selection)
        api = api or _APIS.get(selection.provider)
        if api is None:
            return None
        name = selection.name.removeprefix("models/")
        known = _BY_API[api]
        return known.get(name) or known.get(_SNAPSHOT.sub("", name))

    @classmethod
    def names(cls, provider: str) -> tuple[str, ...]:
        """Names of the catalogued models of a provider, sorted; empty for one that is not catalogued."""
        api = _APIS.get(provider)
        return () if api is None else tuple(sorted(_BY_API[api]))

    @classmethod
    def check(cls, selection: ModelSelection, *, api: Api | None = None, known: bool = True) -> None:
        """Check parameters.

        Args:
            selection: The model and its parameters.
            api: See `info`.
            known: `False` checks only what the interface accepts in general, for a service whose models have their
                names by chance.

        Raises:
            LlmSetupError: Unknown parameter, wrong type or range, one that this model refuses, or a model that this
                interface does not offer.
        """
        api = api or _APIS.get(selection.provider)
        if api is None:
            return
        info = cls.info(selection, api=api) if known else None
        if info is not None and info.apis and api not in info.apis:
            raise LlmSetupError(
                f"{selection.id} is not offered through the {api} interface: "
                f"choose a provider that speaks {', '.join(sorted(info.apis))}.",
                model=selection.id,
            )
        allowed = _PARAMS[api]
        for key, value in selection.params.items():
            param = allowed.get(key)
            if param is None:
                raise LlmSetupError(
                    f"{selection.id} has no parameter {key!r}: use one of {', '.join(sorted(allowed))}.",
                    model=selection.id,
                    parameter=key,
                )
            if not param.accepts(value):
                raise LlmSetupError(
                    f"Parameter {key!r} of {selection.id} must be {param.what}.", model=selection.id, parameter=key
                )
        if info is not None:
            _check_reasoning(selection, info)
            _check_sampling(selection, info)

    @classmethod
    def require(cls, selection: ModelSelection | str, *capabilities: str, api: Api | None = None) -> None:
        """Check that a model can do something. Of models that are not catalogued nothing is known, so they pass.

        Args:
            selection: The model.
            *capabilities: Words of `CAPABILITIES`.
            api: See `info`.

        Raises:
            LlmSetupError: The model lacks one, or the word is not a capability.
        """
        selection = ModelSelection.parse(selection)
        unknown = sorted(set(capabilities) - CAPABILITIES)
        if unknown:
            raise LlmSetupError(
                f"{', '.join(map(repr, unknown))} is not a capability: use {', '.join(sorted(CAPABILITIES))}."
            )
        info = cls.info(selection, api=api)
        if info is None:
            return
        missing = sorted(set(capabilities) - info.capabilities)
        if missing:
            raise LlmSetupError(
                f"{selection.id} cannot do what is required of it ({', '.join(missing)}): choose another model.",
                model=selection.id,
            )


def reasoning_effort(params: Mapping[str, Any]) -> str | bool | None:
    """The `reasoning` parameter with `"none"` as `False`; `None` if it is not set."""
    value = params.get("reasoning")
    return False if value == "none" else value


def _check_reasoning(selection: ModelSelection, info: ModelInfo) -> None:
    value = selection.params.get("reasoning")
    if value is None:
        return
    if not info.efforts and value not in (False, "none"):
        raise LlmSetupError(
            f"{selection.id} does not reason: drop the parameter 'reasoning' or choose a reasoning model.",
            model=selection.id,
            parameter="reasoning",
        )
    effort = "none" if value is False else value
    if info.efforts and effort is not True and effort not in info.efforts:
        raise LlmSetupError(
            f"{selection.id} does not accept reasoning={value!r}: use one of {', '.join(map(repr, info.efforts))}.",
            model=selection.id,
            parameter="reasoning",
        )


def _check_sampling(selection: ModelSelection, info: ModelInfo) -> None:
    given = sorted(_SAMPLING & set(selection.params))
    if not given or info.sampling == "always":
        return
    if info.sampling == "never":
        raise LlmSetupError(
            f"{selection.id} is a reasoning model and accepts no {given[0]!r}: drop the parameter.",
            model=selection.id,
            parameter=given[0],
        )
    effort = reasoning_effort(selection.params)
    # Claude models of this kind do not reason unless they are asked to; OpenAI's have a default of their own, which
    # differs from model to model, so that the author has to say that reasoning is off.
    off = effort is False or (effort is None and info.name.startswith("claude"))
    if not off:
        raise LlmSetupError(
            f'{selection.id} is a reasoning model and accepts {given[0]!r} only with reasoning="none": add that, or '
            "drop the parameter.",
            model=selection.id,
            parameter=given[0],
        )
