"""The catalogue of models: what is wrong is found before anything is sent, and what is new stays usable."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.google import GoogleProvider
from pydantic_ai.providers.openai import OpenAIProvider

import stepwell.models
from stepwell.errors import LlmSetupError
from stepwell.models import ModelCatalog, ModelSelection
from stepwell.models.catalog import CAPABILITIES

PROFILES: dict[str, Any] = {
    "openai": OpenAIProvider(api_key="x"),
    "openai-responses": OpenAIProvider(api_key="x"),
    "anthropic": AnthropicProvider(api_key="x"),
    "google": GoogleProvider(api_key="x"),
}
ALL = [(provider, name) for provider in ModelCatalog.providers for name in ModelCatalog.names(provider)]


def test_a_selection_with_retries_and_parameters() -> None:
    selection = ModelCatalog.model("openai:gpt-5.1", retries=2, max_tokens=500, reasoning="low")
    assert selection == ModelSelection("openai", "gpt-5.1", {"max_tokens": 500, "reasoning": "low"}, attempts=3)
    assert ModelCatalog.model("openai:gpt-5.1").attempts is None
    assert ModelCatalog.model("openai:gpt-5.1", retries=0).attempts == 1


@pytest.mark.parametrize("retries", [-1, True])
def test_wrong_retries(retries: int) -> None:
    with pytest.raises(LlmSetupError, match="retries"):
        ModelCatalog.model("openai:gpt-5.1", retries=retries)


GOOD: list[tuple[str, dict[str, Any]]] = [
    ("openai:gpt-4o", {"temperature": 2, "top_p": 0.5, "seed": 1, "stop": ["x"], "logit_bias": {"50256": -100}}),
    ("openai:gpt-4o", {"reasoning": False}),
    ("openai:gpt-5.1", {"temperature": 0.2, "reasoning": "none"}),
    ("openai:gpt-5.1", {"temperature": 0.2, "reasoning": False}),
    ("openai:gpt-5.1", {"reasoning": True, "verbosity": "low", "extra_body": {"x": [1]}, "extra_headers": {"a": "b"}}),
    ("openai-responses:gpt-5-pro", {"reasoning": "high", "reasoning_summary": "auto", "cache": True}),
    ("anthropic:claude-haiku-4-5", {"temperature": 1, "top_k": 3, "cache": "1h", "parallel_tool_calls": False}),
    ("anthropic:claude-haiku-4-5", {"reasoning": "high"}),
    ("google:gemini-2.5-flash", {"temperature": 1.5, "presence_penalty": -1, "reasoning": "none"}),
    ("openai:gpt-from-next-week", {"temperature": 1, "reasoning": "max"}),
    ("acme:anything", {"whatever": object()}),
]


@pytest.mark.parametrize(("model", "params"), GOOD)
def test_what_is_accepted(model: str, params: dict[str, Any]) -> None:
    assert dict(ModelCatalog.model(model, **params).params) == params


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("openai:gpt-4o", {"tempratur": 1}, "has no parameter 'tempratur': use one of .*temperature"),
    ("openai:gpt-4o", {"temperature": "1"}, "'temperature' of openai:gpt-4o must be a number from 0 to 2"),
    ("openai:gpt-4o", {"temperature": True}, "must be a number"),
    ("openai:gpt-4o", {"temperature": float("nan")}, "must be a number"),
    ("openai:gpt-4o", {"temperature": 2.1}, "must be a number"),
    ("openai:gpt-4o", {"max_tokens": 0}, "a whole number from 1"),
    ("openai:gpt-4o", {"max_tokens": True}, "a whole number from 1"),
    ("openai:gpt-4o", {"max_tokens": 1.5}, "a whole number from 1"),
    ("openai:gpt-4o", {"stop": "x"}, "a list of texts"),
    ("openai:gpt-4o", {"stop": []}, "a list of texts"),
    ("openai:gpt-4o", {"stop": [""]}, "a list of texts"),
    ("openai:gpt-4o", {"user": ""}, "a text"),
    ("openai:gpt-4o", {"store": 1}, "true or false"),
    ("openai:gpt-4o", {"extra_body": []}, "an object"),
    ("openai:gpt-4o", {"extra_headers": {"a": 1}}, "an object of texts"),
    ("openai:gpt-4o", {"logit_bias": {"a": "b"}}, "an object of whole numbers"),
    ("openai:gpt-4o", {"tool_choice": "any"}, "one of 'auto', 'required', 'none'"),
    ("openai:gpt-4o", {"cache": "5m"}, "'30m' or '12h'"),
    ("anthropic:claude-haiku-4-5", {"cache": "30m"}, "'5m' or '1h'"),
    ("openai:gpt-4o", {"reasoning": "lots"}, "true, false or one of"),
    ("openai:gpt-4o", {"reasoning": "low"}, "does not reason"),
    ("openai:gpt-5", {"reasoning": "none"}, "does not accept reasoning='none': use one of 'minimal'"),
    ("openai:gpt-5", {"reasoning": False}, "does not accept reasoning=False"),
    ("openai:gpt-5", {"temperature": 1}, "is a reasoning model and accepts no 'temperature'"),
    ("openai:gpt-5.1", {"temperature": 1}, 'only with reasoning="none"'),
    ("openai:gpt-5.1", {"temperature": 1, "reasoning": "low"}, 'only with reasoning="none"'),
    ("anthropic:claude-haiku-4-5", {"temperature": 0.5, "reasoning": True}, 'only with reasoning="none"'),
    ("anthropic:claude-opus-5-5", {"top_p": 0.5}, "accepts no 'top_p'"),
    ("anthropic:claude-haiku-4-5", {"temperature": 1.5}, "from 0 to 1"),
    ("anthropic:claude-haiku-4-5", {"seed": 1}, "has no parameter 'seed'"),
    ("google:gemini-2.5-flash", {"extra_body": {}}, "has no parameter 'extra_body'"),
    ("openai-responses:gpt-4o", {"seed": 1}, "has no parameter 'seed'"),
    ("openai:gpt-5-pro", {}, "not offered through the openai-chat interface"),
    ("openai:gpt-from-next-week", {"tempratur": 1}, "has no parameter"),
    ("openai:gpt-4o", {"api_key": "sk-1"}, "hold a secret"),
    ("gpt-4o", {}, "names no provider"),
]


@pytest.mark.parametrize(("model", "params", "says"), WRONG)
def test_what_is_refused(model: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(LlmSetupError, match=says) as caught:
        ModelCatalog.model(model, **params)
    assert "sk-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("openai:gpt-4o-2024-08-06", "gpt-4o"),
        ("anthropic:claude-haiku-4-5-20251001", "claude-haiku-4-5"),
        ("anthropic:claude-haiku-4-5-latest", "claude-haiku-4-5"),
        ("google:models/gemini-2.5-flash-preview-09-2025", "gemini-2.5-flash"),
        ("google:gemini-2.0-flash-001", "gemini-2.0-flash"),
    ],
)
def test_a_snapshot_is_its_model(model: str, name: str) -> None:
    info = ModelCatalog.info(model)
    assert info is not None
    assert info.name == name


def test_what_is_not_catalogued() -> None:
    assert ModelCatalog.info("openai:gpt-from-next-week") is None
    assert ModelCatalog.info("acme:x") is None
    assert ModelCatalog.names("acme") == ()
    known = ModelCatalog.info("my-openai:gpt-4o", api="openai-chat")
    assert known is not None
    assert known.context == 128_000


def test_required_capabilities() -> None:
    ModelCatalog.require("openai:gpt-4o", "tools", "image_input")
    ModelCatalog.require("openai:o3-mini", "reasoning")
    ModelCatalog.require("openai:gpt-from-next-week", "tools")
    ModelCatalog.require("acme:x", "video_input")
    with pytest.raises(LlmSetupError, match=r"\(image_input, pdf_input\): choose another model"):
        ModelCatalog.require("openai:o3-mini", "tools", "image_input", "pdf_input")
    with pytest.raises(LlmSetupError, match="'eyes' is not a capability"):
        ModelCatalog.require("acme:x", "eyes")


@pytest.mark.parametrize(("provider", "name"), ALL)
def test_the_catalogue_agrees_with_the_client_library(provider: str, name: str) -> None:
    info = ModelCatalog.info(f"{provider}:{name}")
    assert info is not None
    assert info.capabilities <= CAPABILITIES
    profile = PROFILES[provider].model_profile(name) or {}
    if "image_output" not in info.capabilities:
        assert bool(info.efforts) == bool(profile.get("supports_thinking", False))
        native = "structured_output" in info.capabilities
        assert native == bool(profile.get("supports_json_schema_output", False))
    if provider == "anthropic":
        assert (info.sampling == "never") == bool(profile.get("anthropic_disallows_sampling_settings", False))
    if provider.startswith("openai"):
        always = bool(profile.get("thinking_always_enabled", False))
        assert always == (bool(info.efforts) and "none" not in info.efforts)
        assert (info.sampling == "never") == always


keys = st.sampled_from(["temperature", "max_tokens", "reasoning", "stop", "logit_bias", "zzz"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.dictionaries(keys, json_values))
def test_checking_never_fails_in_another_way(params: dict[str, Any]) -> None:
    with suppress(LlmSetupError):
        ModelCatalog.model("openai:gpt-5.1", **params)


def test_the_public_names() -> None:
    for name in ("OpenAIChat", "OpenAIResponses", "Anthropic", "Google", "OpenAICompatible", "LangChainGateway"):
        assert name in stepwell.models.__all__
    for name in ("Providers", "ModelCatalog", "ModelInfo", "Endpoint"):
        assert name in stepwell.models.__all__
    for name in stepwell.models.__all__:
        assert hasattr(stepwell.models, name)


def test_importing_loads_no_client_library() -> None:
    code = (
        "import sys, stepwell.models; from stepwell.models import *; ModelCatalog.model('openai:gpt-5.1')\n"
        "p = Providers.from_env({'OPENAI_API_KEY': 'x', 'ANTHROPIC_API_KEY': 'x', 'GEMINI_API_KEY': 'x'})\n"
        "p.validate('anthropic:claude-haiku-4-5', ['tools'])\n"
        "bad = {'pydantic_ai', 'pydantic', 'httpx', 'httpx2', 'openai', 'anthropic', 'google.genai'}\n"
        "bad.add('langchain_core')\n"
        "sys.exit(repr(sorted(bad & set(sys.modules))) if bad & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
