"""Neutral histories as pydantic-ai's messages: own signatures and item ids restored, those of others left out."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec
from pydantic_ai.messages import (
    AudioUrl,
    BinaryContent,
    DocumentUrl,
    ImageUrl,
    ModelMessage,
    ModelResponse,
    ModelResponsePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserContent,
    UserPromptPart,
    VideoUrl,
)
from pydantic_ai.messages import FilePart as ModelFilePart
from pydantic_ai.messages import ModelRequest as PromptMessage

from stepwell.errors import ModelInvocationError
from stepwell.messages import (
    AssistantMessage,
    DirectMessage,
    FilePart,
    JsonObject,
    Message,
    ToolCall,
    ToolResult,
    UserMessage,
)

from ._finish import plain_json
from ._pairing import Answer, Answers, paired, result_text
from .catalog import Api

__all__ = ["HistoryEncoder", "Identity", "provider_data_of"]

_VERSION = 1
_ID_RULES: Mapping[Api, re.Pattern[str]] = {
    "openai-chat": re.compile(r"[\x21-\x7e]{1,40}"),
    "openai-responses": re.compile(r"[\x21-\x7e]{1,64}"),
    "anthropic": re.compile(r"[a-zA-Z0-9_-]{1,64}"),
    "google": re.compile(r"[\x21-\x7e]{1,64}"),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request is encoded for.

    Attributes:
        api: The interface.
        system: pydantic-ai's name of the provider, which it compares before it sends a signature back.
        canonical: Its name of whoever verifies signatures.
        url: The base URL, as pydantic-ai has it.
        tag: Marks `provider_data`: only what bears it is restored. Interface, provider and base URL in one.
        thoughts: Whether the model takes reasoning back. To one that does not, pydantic-ai would send it as text.
    """

    api: Api
    system: str
    canonical: str
    url: str
    tag: str
    thoughts: bool = True


_Wire: TypeAlias = tuple[str, ...]


class HistoryEncoder:
    """Encodes for one endpoint and remembers what it encoded.

    Messages never change, so each object is encoded once and found again by identity, as long as it is among the
    `size` most recent; a long conversation that is kept in memory costs a dictionary look-up per message.

    Args:
        identity: Whom for.
        size: Messages to remember.
    """

    def __init__(self, identity: Identity, *, size: int = 8192) -> None:
        self._identity = identity
        self._fits = _ID_RULES[identity.api].fullmatch
        # The message is part of the entry: it keeps the object alive, so that its id() is not given to another.
        self._known: OrderedDict[tuple[int, _Wire], tuple[Message, Any]] = OrderedDict()
        self._size = size

    def encode(self, messages: Sequence[Message]) -> list[ModelMessage]:
        """Encode a history. Never fails on its order: what no provider would accept is repaired.

        A call without a result gets one that says that it was not run, a result without a call is left out, and where
        a provider wants a user's message at the start or the end, a placeholder stands there.

        Raises:
            ModelInvocationError: A file whose data is not base64 (status 422).
        """
        encoded: list[ModelMessage] = []
        for turn in paired(messages, self._fits):
            if isinstance(turn, UserMessage):
                encoded.append(self._once(turn, (), _user))
            elif isinstance(turn, DirectMessage):
                encoded.append(self._once(turn, (), _direct))
            elif isinstance(turn, Answers):
                encoded.append(PromptMessage(parts=[self._answer(answer) for answer in turn.answers]))
            elif (reply := self._once(turn.message, turn.wires, self._assistant)) is not None:
                encoded.append(reply)
        return self._framed(encoded)

    def _framed(self, encoded: list[ModelMessage]) -> list[ModelMessage]:
        if not encoded:
            return [PromptMessage(parts=[UserPromptPart(content="(start)")])]
        if self._identity.api in ("anthropic", "google"):
            # Both refuse a conversation that the assistant begins, and take one that it ends as a reply to complete.
            if isinstance(encoded[0], ModelResponse):
                encoded.insert(0, PromptMessage(parts=[UserPromptPart(content="(start)")]))
            if isinstance(encoded[-1], ModelResponse):
                encoded.append(PromptMessage(parts=[UserPromptPart(content="(continue)")]))
        return encoded

    def _answer(self, answer: Answer) -> ToolReturnPart[Any]:
        if answer.result is None:
            return ToolReturnPart(tool_name=answer.name, content=result_text(None)[1], tool_call_id=answer.wire)
        return self._once(answer.result, (answer.wire,), _tool_return)

    def _once(self, message: Any, wires: _Wire, encode: Callable[[Any, _Wire], Any]) -> Any:
        key = (id(message), wires)
        entry = self._known.get(key)
        if entry is not None and entry[0] is message:
            self._known.move_to_end(key)
            return entry[1]
        encoded = encode(message, wires)
        if not (isinstance(message, UserMessage) and not isinstance(message.content, str)):
            # Files are left out: they are large, and decoding them is quick.
            self._known[key] = (message, encoded)
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        return encoded

    def _assistant(self, message: AssistantMessage, wires: _Wire) -> ModelResponse | None:
        identity = self._identity
        data = message.provider_data
        own = data is not None and data.get("by") == identity.tag and data.get("v") == _VERSION
        parts = self._restored(message, wires, data) if own and data is not None else self._plain(message, wires)
        if not parts:
            return None
        name = data.get("model") if own and data is not None else None
        return ModelResponse(
            parts=parts,
            model_name=name if isinstance(name, str) else message.model.partition(":")[2] or None,
            # Of a foreign message nothing is claimed: pydantic-ai would send its parts as the provider's own.
            provider_name=identity.system if own else None,
            provider_url=identity.url if own else None,
            canonical_system=identity.canonical if own else None,
        )

    def _plain(self, message: AssistantMessage, wires: _Wire) -> list[ModelResponsePart]:
        parts: list[ModelResponsePart] = []
        if message.text.strip():
            parts.append(TextPart(content=message.text))
        parts.extend(self._note(file) for file in message.files)
        parts.extend(_call(call, wire) for call, wire in zip(message.calls, wires, strict=True))
        return parts

    def _note(self, file: FilePart) -> ModelResponsePart:
        return TextPart(content=f"[file: {file.name or file.media_type}]")

    def _restored(self, message: AssistantMessage, wires: _Wire, data: JsonObject) -> list[ModelResponsePart]:
        """The parts in their own order and division, with ids, signatures and details.

        What was changed since (a rewritten text, dropped reasoning) goes without them, since the provider would use
        its stored copy or find the signature wrong.
        """
        text_same = data.get("text") == _mark(message.text)
        thought = "".join(part.text for part in message.reasoning)
        thought_same = data.get("thought") == _mark(thought)
        calls = list(zip(message.calls, wires, strict=True))
        files = list(message.files)
        text_at = thought_at = 0
        text_sent = False
        parts: list[ModelResponsePart] = []
        for item in cast("list[dict[str, Any]]", data.get("parts") or []):
            extra: dict[str, Any] = {"id": item.get("id"), "provider_details": item.get("d")}
            if any(value is not None for value in extra.values()) or "sig" in item:
                extra["provider_name"] = self._identity.system
            match item.get("k"):
                case "thought":
                    length = int(item.get("n", 0))
                    content = thought[thought_at : thought_at + length]
                    thought_at += length
                    if self._identity.thoughts and (thought_same or not length):
                        parts.append(ThinkingPart(content=content, signature=item.get("sig"), **extra))
                case "text" if text_same:
                    length = int(item.get("n", 0))
                    parts.append(TextPart(content=message.text[text_at : text_at + length], **extra))
                    text_at += length
                case "text" if not text_sent and message.text.strip():
                    text_sent = True
                    parts.append(TextPart(content=message.text))
                case "call" if calls:
                    call, wire = calls.pop(0)
                    parts.append(_call(call, wire, **extra))
                case "file" if files:
                    file = files.pop(0)
                    parts.append(
                        self._note(file) if file.data is None else ModelFilePart(content=_binary(file), **extra)
                    )
                case _:
                    pass
        # What the data does not account for is sent all the same.
        rest = message.text[text_at:] if text_same else "" if text_sent else message.text
        if rest.strip():
            parts.append(TextPart(content=rest))
        parts.extend(self._note(file) for file in files)
        parts.extend(_call(call, wire) for call, wire in calls)
        return parts


def provider_data_of(response: ModelResponse, tag: str, *, output_tool: str | None) -> JsonObject | None:
    """What to keep of a reply for `HistoryEncoder` to restore it for the same endpoint; `None` if nothing is."""
    items: list[JsonObject] = []
    texts: list[str] = []
    thoughts: list[str] = []
    special = False
    for part in response.parts:
        item: JsonObject
        if isinstance(part, ThinkingPart):
            item = {"k": "thought", "n": len(part.content)}
            thoughts.append(part.content)
            if part.signature:
                item["sig"] = part.signature
        elif isinstance(part, TextPart):
            item = {"k": "text", "n": len(part.content)}
            texts.append(part.content)
        elif isinstance(part, ToolCallPart) and part.tool_name != output_tool:
            item = {"k": "call"}
        elif isinstance(part, ModelFilePart):
            item = {"k": "file"}
        else:
            continue
        if part.id is not None:
            item["id"] = part.id
        if part.provider_details:
            item["d"] = plain_json(part.provider_details)
        # A picture counts as special: its author may have it back, to others it is only named.
        special = special or item["k"] == "file" or bool(item.keys() & {"sig", "id", "d"})
        items.append(item)
    if not special:
        return None
    data: JsonObject = {"v": _VERSION, "by": tag, "parts": items}
    if response.model_name:
        data["model"] = response.model_name
    data["text"] = _mark("".join(texts))
    data["thought"] = _mark("".join(thoughts))
    return data


def _mark(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _call(call: ToolCall, wire: str, **extra: Any) -> ToolCallPart[Any]:
    args = call.args
    if not isinstance(args, (str, dict)):
        args = msgspec.json.encode(args).decode()
    return ToolCallPart(
        tool_name=call.name, args=cast("str | dict[str, Any]", args), tool_call_id=wire, **_present(extra)
    )


def _present(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in extra.items() if value is not None}


def _tool_return(message: ToolResult, wires: _Wire) -> ToolReturnPart[Any]:
    failed, text = result_text(message)
    outcome = "failed" if failed else "success"
    return ToolReturnPart(tool_name=message.name, content=text, tool_call_id=wires[0], outcome=outcome)


def _direct(message: DirectMessage, _: _Wire) -> ModelResponse:
    return ModelResponse(parts=[TextPart(content=message.text)])


def _user(message: UserMessage, _: _Wire) -> PromptMessage:
    if isinstance(message.content, str):
        return PromptMessage(parts=[UserPromptPart(content=message.content)])
    content: list[UserContent] = []
    for part in message.content:
        if isinstance(part, FilePart):
            content.append(_link(part) if part.data is None else _binary(part))
        elif part.text.strip():
            content.append(part.text)
    return PromptMessage(parts=[UserPromptPart(content=content)])


def _binary(file: FilePart) -> BinaryContent:
    try:
        data = base64.b64decode(file.data or "", validate=True)
    except (binascii.Error, ValueError):
        raise ModelInvocationError(
            "A file of the conversation holds data that is not base64.", status=422, provider_code="unsupported_file"
        ) from None
    return BinaryContent(data=data, media_type=file.media_type)


def _link(file: FilePart) -> ImageUrl | AudioUrl | VideoUrl | DocumentUrl:
    kinds = {"image": ImageUrl, "audio": AudioUrl, "video": VideoUrl}
    kind = kinds.get(file.media_type.partition("/")[0], DocumentUrl)
    return kind(url=file.url or "", media_type=file.media_type)
