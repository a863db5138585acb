"""How a reply of pydantic-ai ended, in our words: stop reasons, blocked prompts, usage, and typed errors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    UnexpectedModelBehavior,
    UserError,
)
from pydantic_ai.exceptions import ModelTimeoutError as TransportTimeout
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.usage import RequestUsage

from stepwell.errors import LlmSetupError, ModelInvocationError, ModelTimeoutError, PromptBlockedError, StepwellError
from stepwell.messages import JsonObject, Usage

from ._types import Finish, ModelSelection, StopReason

__all__ = ["finish_of", "plain_json", "translate", "usage_of"]

_log = logging.getLogger("stepwell.models")

_BLOCK_REASONS: Mapping[str, str] = {
    "SAFETY": "safety",
    "IMAGE_SAFETY": "safety",
    "PROHIBITED_CONTENT": "safety",
    "IMAGE_PROHIBITED_CONTENT": "safety",
    "MODEL_ARMOR": "safety",
    "JAILBREAK": "safety",
    "RECITATION": "recitation",
    "BLOCKLIST": "blocklist",
    "SPII": "content_filter",
    "LANGUAGE": "other",
    "refusal": "refusal",
    "content_filter": "content_filter",
}
_MALFORMED = frozenset({"MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL"})
_PROMPT_CODES: Mapping[str, str] = {
    # Azure and services like it
    "content_filter": "content_filter",
    "content_policy_violation": "content_filter",
    "image_content_policy_violation": "content_filter",
    # OpenAI's reasoning models, for a prompt that was flagged
    "invalid_prompt": "safety",
}


def plain_json(value: Any) -> Any:
    """A copy of `value` that is JSON; what has no JSON form becomes text."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))


def usage_of(usage: RequestUsage) -> Usage | None:
    """What was reported; `None` where nothing was. pydantic-ai counts from zero, so zero for all is nothing."""
    if not (usage.input_tokens or usage.output_tokens):
        return None
    details = usage.details
    reasoning = next((details[key] for key in ("reasoning_tokens", "thoughts_tokens") if key in details), None)
    return Usage(
        input=usage.input_tokens or None,
        output=usage.output_tokens or (details.get("output_tokens")),
        reasoning=reasoning,
        # A zero is known only where the provider's own figure is among the details.
        cache_read=usage.cache_read_tokens or details.get("cache_read_input_tokens"),
        cache_write=usage.cache_write_tokens or details.get("cache_creation_input_tokens"),
    )


def finish_of(
    response: ModelResponse, selection: ModelSelection, provider_data: JsonObject | None, *, output_tool: str | None
) -> Finish:
    """How a whole reply ended.

    Args:
        response: The reply.
        selection: The model asked.
        provider_data: What to keep with the message.
        output_tool: Name of the tool whose arguments are the structured output, so that its call is none.

    Raises:
        PromptBlockedError: The prompt was refused in a reply without content.
        ModelInvocationError: The reply did not end, or ended in a failure.
    """
    details: JsonObject = plain_json({k: v for k, v in (response.provider_details or {}).items() if k != "timestamp"})
    raw = details.pop("finish_reason", None)
    raw = raw if isinstance(raw, str) else None
    calls = any(isinstance(part, ToolCallPart) and part.tool_name != output_tool for part in response.parts)
    block = details.get("block_reason")
    if block is not None and raw is None and not response.parts:
        raise PromptBlockedError(
            f"{selection.id} refused the prompt ({block}): change what the prompt holds, or answer it without a model.",
            reason=_BLOCK_REASONS.get(str(block), "other"),
            raw_reason=str(block),
            safety_ratings=details.get("safety_ratings"),
            details=details,
            model=selection.id,
        )
    match response.finish_reason:
        case "content_filter":
            stop = StopReason.BLOCKED
            if raw is None:
                raw = "refusal" if "refusal" in details else "content_filter"
            details["block_reason"] = "refusal" if "refusal" in details else _BLOCK_REASONS.get(raw, "other")
            if (category := details.pop("refusal_category", None)) is not None:
                details["category"] = category
        case "length":
            stop = StopReason.TRUNCATED
        case "error" if raw in _MALFORMED:
            stop = StopReason.MALFORMED_TOOL_CALL
        case "error" if raw == "LANGUAGE":
            stop = StopReason.BLOCKED
            details["block_reason"] = "other"
        case "error":
            raise ModelInvocationError(
                f"{selection.id} ended its reply with an error ({raw}).", provider_code=raw, model=selection.id
            )
        case "stop" | "tool_call":
            stop = StopReason.TOOL_CALLS if calls else StopReason.COMPLETE
        case None if raw is None or response.state == "incomplete":
            # A connection that closed cleanly in the middle looks like this.
            raise ModelInvocationError(f"{selection.id} stopped sending before it finished.", model=selection.id)
        case None:
            # Gemini's OTHER, Anthropic's pause_turn, and words that are newer than pydantic-ai.
            stop = StopReason.TOOL_CALLS if calls and raw not in ("OTHER", "pause_turn") else StopReason.UNSPECIFIED
    return Finish(stop=stop, raw=raw, details=details, provider_data=provider_data, model=response.model_name)


def translate(
    error: Exception, selection: ModelSelection, *, files: bool, scrub: Callable[[str], str]
) -> StepwellError:
    """Our error for one of pydantic-ai or of a client library.

    Its text and its traceback say nothing of what the provider answered, since answers quote prompts and keys; what
    it answered is logged at DEBUG. The original is the `cause` of a `ModelInvocationError`, without being chained.

    Args:
        error: The original.
        selection: The model asked.
        files: Whether a request with files failed before anything came back: pydantic-ai refused to encode one then.
        scrub: Removes the credentials from a text.
    """
    if isinstance(error, StepwellError):
        return error
    _log.debug("%s failed: %s", selection.id, scrub(f"{type(error).__name__}: {error}"))
    if isinstance(error, ModelAPIError):
        return _api_error(error, selection)
    if isinstance(error, UserError) and not files:
        return LlmSetupError(
            f"{selection.id} cannot be called like this: {scrub(error.message)}",
            model=selection.id,
        )
    if files and not isinstance(error, UnexpectedModelBehavior):
        # Not a failure of the setup: a customer sent a file that this model does not take, and the stage may react.
        return _unchained(
            ModelInvocationError(
                f"{selection.id} does not take one of the files in the conversation.",
                status=422,
                provider_code="unsupported_file",
                model=selection.id,
            ),
            error,
        )
    what = "answered with something else than its protocol" if isinstance(error, UnexpectedModelBehavior) else "failed"
    return _unchained(
        ModelInvocationError(f"{selection.id} {what} ({type(error).__name__}).", model=selection.id), error
    )


def _api_error(error: ModelAPIError, selection: ModelSelection) -> StepwellError:
    status = error.status_code if isinstance(error, ModelHTTPError) else None
    code = error.provider_error_code or error.provider_error_type
    if code is not None and code in _PROMPT_CODES and status in (None, 400):
        return PromptBlockedError(
            f"{selection.id} refused the prompt ({code}): change what the prompt holds, or answer it without a model.",
            reason=_PROMPT_CODES[code],
            raw_reason=code,
            safety_ratings=_azure_ratings(error.body),
            model=selection.id,
        )
    if isinstance(error, TransportTimeout):
        kind = "connect" if error.phase in ("connect", "pool") else "idle"
        failure: ModelInvocationError = ModelTimeoutError(
            f"{selection.id} was out of reach within its time ({error.phase or 'unknown phase'}).",
            kind,
            model=selection.id,
        )
        return _unchained(failure, error)
    if isinstance(error, ModelConnectionError):
        text = f"The connection to {selection.id} broke ({error.phase or 'unknown phase'})."
    elif status is not None:
        text = f"{selection.id} answered with HTTP {status}" + (f" ({code})." if code else ".")
    elif code is not None:
        text = f"{selection.id} failed ({code})."
    else:
        # What pydantic-ai raises for a chat stream that ends without a finish reason.
        text = f"{selection.id} stopped sending before it finished."
    retry_after = error.retry_after
    failure = ModelInvocationError(
        text,
        status=status,
        provider_code=code,
        retry_after=retry_after if retry_after is not None and math.isfinite(retry_after) else None,
        model=selection.id,
    )
    return _unchained(failure, error)


def _azure_ratings(body: object) -> Any:
    if not isinstance(body, dict):
        return None
    inner = cast("dict[str, Any]", body).get("innererror")
    return plain_json(cast("dict[str, Any]", inner).get("content_filter_result")) if isinstance(inner, dict) else None


def _unchained(failure: ModelInvocationError, cause: Exception) -> ModelInvocationError:
    # As `cause`, so that code can look at it, but not as `__cause__`: a logged traceback would print the answer.
    failure.cause = cause
    return failure
