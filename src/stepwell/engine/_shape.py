"""What a turn looks like on its channel: the parts of a unit, and the chunks of a UI message they become.

One run is one message: `start` where it first shows something, a step part per unit, `finish` with its last unit. Stage
and usage travel beside it as transient parts. What is provisional is never closed: a call's input becomes available
when the reply with it is accepted, because clients run their tools on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from stepwell.messages import JsonObject, JsonValue, ToolCall, ToolOutcome, Usage
from stepwell.outcomes import SuspendRequest

__all__ = [
    "Emitted",
    "begin_chunks",
    "call_part",
    "end_chunks",
    "json_text",
    "progress_chunk",
    "reasoning_part",
    "request_part",
    "result_part",
    "text_part",
    "user_parts",
    "whole_chunks",
]

Chunk = dict[str, Any]

_PROSE: Final = frozenset({"text", "reasoning"})


def text_part(text: str) -> JsonObject:
    """Something said."""
    return {"type": "text", "text": text}


def reasoning_part(text: str) -> JsonObject:
    """Something thought."""
    return {"type": "reasoning", "text": text}


def call_part(call: ToolCall) -> JsonObject:
    """A call that was accepted."""
    return {"type": "call", "id": call.id, "name": call.name, "args": call.args}


def request_part(call: str, request: SuspendRequest) -> JsonObject:
    """What a call waits for."""
    return {"type": "request", "call": call, "id": request.id, "kind": request.kind, "payload": request.payload}


def result_part(call: str, outcome: ToolOutcome, content: JsonValue) -> JsonObject:
    """What a call came to."""
    return {"type": "result", "id": call, "outcome": outcome, "content": content}


def user_parts(content: str | Sequence[Any]) -> list[JsonObject]:
    """What a person said, as parts of a UI message."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[JsonObject] = []
    for part in content:
        if part.__struct_config__.tag == "text":
            parts.append({"type": "text", "text": part.text})
        else:
            url = part.url or f"data:{part.media_type};base64,{part.data}"
            parts.append({"type": "file", "mediaType": part.media_type, "url": url})
    return parts


def begin_chunks(message_id: str | None, stage: str) -> list[Chunk]:
    """The beginning of an attempt; with `message_id`, the beginning of the message too."""
    chunks: list[Chunk] = [] if message_id is None else [{"type": "start", "messageId": message_id}]
    chunks.append({"type": "start-step"})
    chunks.append({"type": "data-stepwell-stage", "data": {"stage": stage}, "transient": True})
    return chunks


def end_chunks(usage: Mapping[str, Usage] | None, *, waits: bool = False) -> list[Chunk]:
    """The end of an accepted attempt; with `usage` (by model), the end of the message too.

    Args:
        usage: Of the turn, by model.
        waits: Whether the message ends because calls wait for their answers.
    """
    chunks: list[Chunk] = [{"type": "finish-step"}]
    if usage is not None:
        if usage:
            spent = {
                model: {"input": one.input, "output": one.output, "total": one.total} for model, one in usage.items()
            }
            chunks.append({"type": "data-stepwell-usage", "data": spent, "transient": True})
        chunks.append({"type": "finish", "finishReason": "tool-calls" if waits else "stop"})
    return chunks


def progress_chunk(call: str, name: str, value: JsonValue) -> Chunk:
    """A handler's progress: shown, not kept."""
    data = {"call": call, "tool": name, "value": value}
    return {"type": "data-stepwell-progress", "data": data, "transient": True}


def whole_chunks(parts: Sequence[JsonObject], prefix: str) -> list[Chunk]:
    """Parts at once; `prefix` makes the ids of their streams unique in the message."""
    chunks: list[Chunk] = []
    for index, part in enumerate(parts):
        kind = part["type"]
        if kind in _PROSE:
            name = f"{prefix}{index}"
            chunks.append({"type": f"{kind}-start", "id": name})
            chunks.append({"type": f"{kind}-delta", "id": name, "delta": part["text"]})
            chunks.append({"type": f"{kind}-end", "id": name})
        elif kind == "call":
            chunks.append(_available(part))
        elif kind == "request":
            chunks += _request(part)
        else:
            chunks.append(_result(part))
    return chunks


def _request(part: Mapping[str, Any]) -> list[Chunk]:
    """What a call waits for. A client's tool needs no more than its input, which is available by now."""
    if part["kind"] == "approval":
        return [{"type": "tool-approval-request", "toolCallId": part["call"], "approvalId": part["id"]}]
    if part["kind"] == "client_tool":
        return []
    data = {name: part[name] for name in ("call", "kind", "payload")}
    return [{"type": "data-stepwell-request", "id": part["id"], "data": data}]


def _available(part: Mapping[str, Any]) -> Chunk:
    call = {"toolCallId": part["id"], "toolName": part["name"]}
    return {"type": "tool-input-available", **call, "input": part["args"]}


def _result(part: Mapping[str, Any]) -> Chunk:
    content = part["content"]
    if part["outcome"] == "ok":
        return {"type": "tool-output-available", "toolCallId": part["id"], "output": content}
    said = cast("JsonObject", content) if isinstance(content, dict) else {}
    if part["outcome"] == "not_run" and said.get("approved") is False:
        return {"type": "tool-output-denied", "toolCallId": part["id"]}
    error = said.get("error") or ("expired" if said.get("expired") else part["outcome"])
    return {"type": "tool-output-error", "toolCallId": part["id"], "errorText": str(error)}


def json_text(value: JsonValue) -> str:
    """As streamed input: what is appended is text."""
    return msgspec.json.encode(value).decode()


class Emitted:
    """What a live attempt has shown so far, and the chunks of what it shows next."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._parts: list[dict[str, Any]] = []
        self._silent: set[str] = set()  # calls whose input was not streamed
        self._open: str | None = None  # id of the text or reasoning that is being said

    def say(self, kind: str, text: str) -> list[Chunk]:
        """More text or reasoning."""
        chunks: list[Chunk] = []
        if self._open is None or self._parts[-1]["type"] != kind:
            chunks = self._closed()
            self._open = f"{self._prefix}{len(self._parts)}"
            self._parts.append({"type": kind, "text": []})
            chunks.append({"type": f"{kind}-start", "id": self._open})
        self._parts[-1]["text"].append(text)
        chunks.append({"type": f"{kind}-delta", "id": self._open, "delta": text})
        return chunks

    def propose(self, call: str, name: str, delta: str) -> list[Chunk]:
        """More of a call's input. Nothing while the provider has not said which call it is."""
        if not call or not name:
            return []
        chunks: list[Chunk] = []
        if not any(part["type"] == "call" and part["id"] == call for part in self._parts):
            chunks = self._closed()
            self._parts.append({"type": "call", "id": call, "name": name})
            self._silent.add(call)
            chunks.append({"type": "tool-input-start", "toolCallId": call, "toolName": name})
        if delta:
            self._silent.discard(call)
            chunks.append({"type": "tool-input-delta", "toolCallId": call, "inputTextDelta": delta})
        return chunks

    def result(self, part: JsonObject) -> list[Chunk]:
        """What a call came to."""
        chunks = self._closed()
        self._parts.append(part)
        chunks.append(_result(part))
        return chunks

    def accept(self, parts: Sequence[JsonObject]) -> list[Chunk] | None:
        """The chunks that close what was shown, if that is what was accepted; `None` if it is not."""
        if _essence(self._parts) != _essence(parts):
            return None
        chunks = self._closed()
        for part in parts:
            if part["type"] == "call":
                if part["id"] in self._silent:
                    args = json_text(part["args"])
                    chunks.append({"type": "tool-input-delta", "toolCallId": part["id"], "inputTextDelta": args})
                chunks.append(_available(part))
            elif part["type"] == "request":
                chunks += _request(part)
        return chunks

    def _closed(self) -> list[Chunk]:
        if self._open is None:
            return []
        kind, name, self._open = self._parts[-1]["type"], self._open, None
        return [{"type": f"{kind}-end", "id": name}]


def _essence(parts: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What must be equal: all that is said, which calls, and the results in whatever order they came."""
    said: dict[str, list[str]] = {"text": [], "reasoning": []}
    calls: list[tuple[str, str]] = []
    results: dict[str, tuple[Any, Any]] = {}
    for part in parts:
        kind = part["type"]
        if kind in _PROSE:
            said[kind] += part["text"]  # a string or a list of them: joined below
        elif kind == "call":
            calls.append((part["id"], part["name"]))
        elif kind == "request":
            continue  # it is only said when it is accepted
        else:
            results[part["id"]] = (part["outcome"], part["content"])
    return "".join(said["text"]), "".join(said["reasoning"]), calls, results
