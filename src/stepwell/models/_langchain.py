"""A gateway over any chat model of LangChain."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

from stepwell.errors import LlmSetupError, ModelInvocationError, PromptBlockedError, StepwellError
from stepwell.messages import DirectMessage, FilePart, Usage, UserMessage

from ._pairing import Answers, paired, result_text, unfenced
from ._types import (
    Finish,
    LlmType,
    ModelEvent,
    ModelRequest,
    ModelSelection,
    ReasoningDelta,
    StopReason,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    UsageEvent,
)

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessageChunk, BaseMessage

__all__ = ["LangChainGateway"]

_FITS = re.compile(r"[a-zA-Z0-9_-]{1,40}").fullmatch
_STOPS: Mapping[str, StopReason] = {
    **dict.fromkeys(("stop", "end_turn", "stop_sequence", "completed", "eos", "done"), StopReason.COMPLETE),
    **dict.fromkeys(
        ("length", "max_tokens", "max_output_tokens", "model_context_window_exceeded"), StopReason.TRUNCATED
    ),
    **dict.fromkeys(("tool_calls", "tool_use", "function_call"), StopReason.TOOL_CALLS),
    **dict.fromkeys(("malformed_function_call", "unexpected_tool_call"), StopReason.MALFORMED_TOOL_CALL),
}
_BLOCKS: Mapping[str, str] = {
    "content_filter": "content_filter",
    "content_filtered": "content_filter",
    "guardrail_intervened": "content_filter",
    "refusal": "refusal",
    "safety": "safety",
    "image_safety": "safety",
    "prohibited_content": "safety",
    "recitation": "recitation",
    "blocklist": "blocklist",
    "spii": "content_filter",
    "language": "other",
}


class LangChainGateway:
    """Serves one chat model of LangChain under a provider name.

    What LangChain does not normalise stays as it is: a stream that breaks off silently cannot be told from one that
    ended, and a reply without a reason has the stop reason `unspecified`. A reply with a schema is asked for in the
    system prompt.

    Args:
        chat_model: The model, made with `max_retries=0` where it has that setting.
        name: The provider's name in selections.
        models: Names of models that may be selected; `None` for any, since the chat model alone decides who answers.
    """

    llm_type: ClassVar[LlmType] = LlmType.UNSUPPORTED

    def __init__(
        self, chat_model: BaseChatModel, *, name: str = "langchain", models: Iterable[str] | None = None
    ) -> None:
        self._model = chat_model
        self._name = name
        self._models = None if models is None else frozenset(models)

    @property
    def name(self) -> str:
        """The provider's name."""
        return self._name

    def __repr__(self) -> str:
        # Without the chat model, whose own repr may show a key.
        return f"LangChainGateway({type(self._model).__name__}, name={self._name!r})"

    def validate(self, selection: ModelSelection) -> None:
        """Check the name. Parameters go to the chat model as they are.

        Raises:
            LlmSetupError: A name that is not among `models`, or a chat model that retries on its own.
        """
        if self._models is not None and selection.name not in self._models:
            raise LlmSetupError(
                f"{selection.id} is not served by this gateway: use one of {', '.join(sorted(self._models))}.",
                model=selection.id,
            )
        if getattr(self._model, "max_retries", 0) != 0:
            raise LlmSetupError(
                f"The chat model of provider {self._name!r} retries on its own, which would count one attempt several "
                "times: make it with max_retries=0.",
                provider=self._name,
            )

    def preload(self) -> None:
        """Import LangChain's core now.

        Raises:
            LlmSetupError: It is not installed.
        """
        try:
            importlib.import_module("langchain_core.messages")
        except ImportError as error:
            raise LlmSetupError(
                f"Provider {self._name!r} needs LangChain's core: run `pip install 'stepwell[langchain]'`.",
                provider=self._name,
            ) from error

    def stream(self, request: ModelRequest) -> AbstractAsyncContextManager[AsyncIterator[ModelEvent]]:
        """Open one attempt (see `ModelGateway.stream`).

        Raises:
            LlmSetupError: See `validate`; also a chat model that cannot bind tools.
            PromptBlockedError: The provider refused the prompt, where LangChain passes that on.
            ModelInvocationError: Anything that the chat model raises.
        """
        return self._stream(request)

    @asynccontextmanager
    async def _stream(self, request: ModelRequest) -> AsyncGenerator[AsyncIterator[ModelEvent]]:
        self.validate(request.selection)
        self.preload()
        async with aclosing(self._events(request)) as events:
            yield events

    async def _events(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        try:
            bound = self._bound(request)
            whole: AIMessageChunk | None = None
            calls = _Calls()
            fenced: list[str] | None = [] if request.output_schema is not None else None
            chunks = cast(
                "AsyncGenerator[AIMessageChunk]", bound.astream(_messages(request), **dict(request.selection.params))
            )
            async with aclosing(chunks):
                async for chunk in chunks:
                    whole = chunk if whole is None else whole + chunk
                    for event in _deltas(chunk, calls):
                        if fenced is not None and isinstance(event, TextDelta):
                            fenced.append(event.text)
                        else:
                            yield event
            if whole is None:
                raise ModelInvocationError(f"{request.selection.id} sent nothing.", model=request.selection.id)
            if fenced:
                yield TextDelta(unfenced("".join(fenced)))
            for event in calls.ends():
                yield event
            if (usage := _usage(whole)) is not None:
                yield UsageEvent(usage)
            yield _finish(whole, request.selection, bool(calls))
        except StepwellError:
            raise
        except Exception as error:  # noqa: BLE001
            # Every integration has exceptions of its own.
            raise _failure(error, request.selection) from None

    def _bound(self, request: ModelRequest) -> Any:
        if not request.tools:
            return self._model
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in request.tools
        ]
        try:
            return cast("Any", self._model).bind_tools(tools)
        except NotImplementedError:
            raise LlmSetupError(
                f"The chat model of provider {self._name!r} cannot bind tools: use another for stages that have tools.",
                provider=self._name,
            ) from None


class _Calls:
    """The calls of a reply, whose chunks LangChain tells apart by its own indexes."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._args: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._args)

    def add(self, index: Any, call: str, name: str | None, args: str) -> Iterable[ModelEvent]:
        key = index if index is not None else call or len(self._args)
        if key not in self._numbers:
            self._numbers[key] = len(self._args)
            self._args.append("")
            yield ToolCallStart(self._numbers[key], call, name or "")
        if args:
            number = self._numbers[key]
            self._args[number] += args
            yield ToolCallDelta(number, args)

    def ends(self) -> Iterable[ModelEvent]:
        for number, args in enumerate(self._args):
            yield ToolCallEnd(number, None if args else {})


def _deltas(chunk: AIMessageChunk, calls: _Calls) -> Iterable[ModelEvent]:
    content = cast("str | list[Any]", chunk.content)
    for block in [content] if isinstance(content, str) else content:
        if isinstance(block, str):
            if block:
                yield TextDelta(block)
            continue
        fields = cast("Mapping[str, Any]", block)
        if fields.get("type") in ("text", "text_delta") and fields.get("text"):
            yield TextDelta(str(fields["text"]))
        elif fields.get("type") in ("thinking", "reasoning"):
            thought = fields.get("thinking") or fields.get("reasoning")
            if isinstance(thought, str):
                yield ReasoningDelta(thought)
    for call in chunk.tool_call_chunks:
        yield from calls.add(call.get("index"), call.get("id") or "", call.get("name"), call.get("args") or "")


def _usage(message: AIMessageChunk) -> Usage | None:
    usage = message.usage_metadata
    if usage is None:
        return None
    into = usage.get("input_token_details") or {}
    out = usage.get("output_token_details") or {}
    return Usage(
        input=usage["input_tokens"],
        output=usage["output_tokens"],
        reasoning=out.get("reasoning"),
        cache_read=into.get("cache_read"),
        cache_write=into.get("cache_creation"),
    )


def _finish(message: AIMessageChunk, selection: ModelSelection, calls: bool) -> Finish:
    meta = cast("dict[str, Any]", message.response_metadata)
    feedback = meta.get("prompt_feedback")
    block = cast("dict[str, Any]", feedback).get("block_reason") if isinstance(feedback, dict) else None
    if block and not message.content and not calls:
        raise PromptBlockedError(
            f"{selection.id} refused the prompt ({block}): change what the prompt holds, or answer it without a model.",
            reason=_BLOCKS.get(str(block).lower(), "other"),
            raw_reason=str(block),
            model=selection.id,
        )
    raw = next((str(meta[key]) for key in ("finish_reason", "stop_reason", "done_reason") if meta.get(key)), None)
    word = (raw or "").lower()
    details: dict[str, Any] = {}
    model = meta.get("model_name") or meta.get("model")
    refusal = cast("dict[str, Any]", message.additional_kwargs).get("refusal")
    if refusal or word in _BLOCKS:
        details["block_reason"] = "refusal" if refusal else _BLOCKS[word]
        if refusal:
            details["refusal"] = str(refusal)
        stop = StopReason.BLOCKED
    else:
        stop = _STOPS.get(word, StopReason.UNSPECIFIED)
        if stop in (StopReason.COMPLETE, StopReason.TOOL_CALLS):
            stop = StopReason.TOOL_CALLS if calls else StopReason.COMPLETE
    return Finish(stop=stop, raw=raw, details=details, model=str(model) if model else None)


def _failure(error: Exception, selection: ModelSelection) -> ModelInvocationError:
    status = getattr(error, "status_code", None)
    headers = getattr(getattr(error, "response", None), "headers", None)
    seconds = cast("Mapping[str, str]", headers).get("retry-after") if headers is not None else None
    answered = isinstance(status, int)
    failure = ModelInvocationError(
        f"{selection.id} answered with HTTP {status}."
        if answered
        else f"{selection.id} failed ({type(error).__name__}).",
        status=status if answered else None,
        retry_after=float(seconds) if seconds is not None and re.fullmatch(r"\d+(\.\d+)?", seconds) else None,
        model=selection.id,
    )
    # As `cause`, for code, but not chained: a logged traceback would print what the provider answered.
    failure.cause = error
    return failure


def _messages(request: ModelRequest) -> list[BaseMessage]:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage

    system = request.system or ""
    if request.output_schema is not None:
        schema = json.dumps(request.output_schema)
        asked = f"Answer with one JSON value that matches this JSON schema, and nothing else:\n{schema}"
        system = f"{system}\n\n{asked}" if system else asked
    messages: list[BaseMessage] = [SystemMessage(content=system)] if system else []
    for turn in paired(request.messages, _FITS):
        if isinstance(turn, UserMessage):
            messages.append(HumanMessage(content=cast("Any", _content(turn))))
        elif isinstance(turn, DirectMessage):
            messages.append(AIMessage(content=turn.text))
        elif isinstance(turn, Answers):
            for answer in turn.answers:
                failed, text = result_text(answer.result)
                status = "error" if failed else "success"
                messages.append(ToolMessage(content=text, tool_call_id=answer.wire, name=answer.name, status=status))
        else:
            calls = [
                {"type": "tool_call", "name": call.name, "id": wire, "args": _object(call.args)}
                for call, wire in zip(turn.message.calls, turn.wires, strict=True)
            ]
            messages.append(AIMessage(content=turn.message.text, tool_calls=cast("Any", calls)))
    return messages


def _object(args: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", args) if isinstance(args, dict) else {"INVALID_JSON": str(args)}


def _content(message: UserMessage) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    blocks: list[dict[str, Any]] = []
    for part in message.content:
        if not isinstance(part, FilePart):
            blocks.append({"type": "text", "text": part.text})
            continue
        kind = part.media_type.partition("/")[0]
        block: dict[str, Any] = {
            "type": kind if kind in ("image", "audio", "video") else "file",
            "mime_type": part.media_type,
        }
        block.update({"base64": part.data} if part.data is not None else {"url": part.url})
        blocks.append(block)
    return blocks
