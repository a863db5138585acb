"""UI messages from chunks and inputs: the projection of one run or one input.

What is given out never changes: a part is replaced, not altered, and a message's own object is made anew when it is
asked for after a change. Text is kept in pieces and joined then, so a token costs the same in a long message as in a
short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from stepwell.transport._codec import CodecMessage

__all__ = ["UIMessage", "UIProjection", "fold_chunk", "fold_input"]

UIMessage: TypeAlias = dict[str, Any]
"""`{"id", "role", "parts": [...], "metadata"?}`, as the AI SDK has it."""

Part: TypeAlias = dict[str, Any]
Chunk: TypeAlias = Mapping[str, Any]


class _Message:
    """A message under construction."""

    __slots__ = (
        "id",
        "in_step",
        "known",
        "message_id",
        "metadata",
        "parts",
        "pieces",
        "reasoning",
        "role",
        "text",
        "tools",
    )

    def __init__(self, message_id: str, role: str, parts: Sequence[Part] = ()) -> None:
        self.message_id = message_id
        self.id = message_id
        self.role = role
        self.parts: list[Part] = list(parts)
        self.metadata: Any = None
        self.known: CodecMessage[UIMessage] | None = None
        self.in_step = False
        self.text: dict[str, int] = {}  # open text by chunk id: which part
        self.reasoning: dict[str, int] = {}
        self.tools: dict[str, tuple[int, list[str]]] = {}  # by call id: which part, and its input as text
        self.pieces: dict[int, list[str]] = {}  # text that is not in its part yet

    def add(self, part: Part) -> int:
        self.parts.append(part)
        return len(self.parts) - 1

    def tool(self, call_id: str) -> tuple[int, Part] | None:
        found = self.tools.get(call_id)
        return None if found is None else (found[0], self.parts[found[0]])

    def snapshot(self) -> CodecMessage[UIMessage]:
        if self.known is None:
            for index, pieces in self.pieces.items():
                part = self.parts[index]
                self.parts[index] = {**part, "text": part["text"] + "".join(pieces)}
            self.pieces.clear()
            message: UIMessage = {"id": self.id, "role": self.role, "parts": list(self.parts)}
            if self.metadata is not None:
                message["metadata"] = self.metadata
            self.known = CodecMessage(self.message_id, message)
        return self.known


class UIProjection:
    """The messages of one node of the conversation."""

    __slots__ = ("by_id", "pending")

    def __init__(self) -> None:
        self.by_id: dict[str, _Message] = {}
        self.pending: list[tuple[str, str, Callable[[Part], Part]]] = []

    def messages(self) -> list[CodecMessage[UIMessage]]:
        """All, in order."""
        return [message.snapshot() for message in self.by_id.values()]

    def assistant(self, message_id: str) -> _Message:
        """The message of this id, made if there is none."""
        message = self.by_id.get(message_id)
        if message is None:
            message = self.by_id[message_id] = _Message(message_id, "assistant")
        message.known = None
        return message

    def resolve(self, message_id: str, call_id: str, change: Callable[[Part], Part]) -> None:
        """Change a tool's part; wait for it if it is not there yet."""
        if not self._changed(message_id, call_id, change):
            self.pending.append((message_id, call_id, change))

    def retry(self) -> None:
        """Try again what waits."""
        self.pending = [item for item in self.pending if not self._changed(*item)]

    def _changed(self, message_id: str, call_id: str, change: Callable[[Part], Part]) -> bool:
        message = self.by_id.get(message_id)
        found = message.tool(call_id) if message is not None else None
        if message is None or found is None:
            return False
        message.parts[found[0]] = change(found[1])
        message.known = None
        return True


# --- tools ------------------------------------------------------------------------------------------------------------


def _base(source: Mapping[str, Any], kind: str) -> Part:
    """What a tool's part keeps through all its states."""
    part: Part = {"type": kind, "toolCallId": source["toolCallId"]}
    if kind == "dynamic-tool":
        part["toolName"] = source.get("toolName", "")
    for key in ("title", "providerExecuted"):
        if key in source:
            part[key] = source[key]
    return part


def _new_tool(chunk: Chunk) -> Part:
    return _base(chunk, "dynamic-tool" if chunk.get("dynamic") else f"tool-{chunk.get('toolName', '')}")


def _state(part: Part, state: str, **more: Any) -> Part:
    """The part in another state, with its input and what the state adds."""
    changed = {**_base(part, part["type"]), "state": state}
    if "input" in part:
        changed["input"] = part["input"]
    return {**changed, **more}


def _available(output: Mapping[str, Any]) -> Callable[[Part], Part]:
    more = {key: output[key] for key in ("output", "preliminary") if key in output}
    return lambda part: _state(part, "output-available", **more)


def _failed(text: str) -> Callable[[Part], Part]:
    return lambda part: _state(part, "output-error", errorText=text)


def _requested(approval_id: str) -> Callable[[Part], Part]:
    return lambda part: _state(part, "approval-requested", approval={"id": approval_id})


def _denied(part: Part) -> Part:
    return _state(part, "output-denied", approval={"id": "", "approved": False})


def _answered(event: Mapping[str, Any]) -> Callable[[Part], Part]:
    if not event.get("approved"):
        return _denied
    reason = {"reason": event["reason"]} if "reason" in event else {}

    def change(part: Part) -> Part:
        asked: Mapping[str, Any] = part.get("approval") or {}
        return _state(part, "approval-responded", approval={"id": asked.get("id", ""), "approved": True, **reason})

    return change


def parse_input(text: str) -> Any:
    """A tool's input from its text: the JSON value, the text if it is none, None if it is empty."""
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


# --- outputs ----------------------------------------------------------------------------------------------------------


def _text(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    kind, _, phase = chunk["type"].partition("-")
    places = message.text if kind == "text" else message.reasoning
    if phase == "start":
        places[chunk["id"]] = message.add({"type": kind, "text": ""})
    elif phase == "delta":
        place = places.get(chunk["id"])
        if place is not None:
            message.pieces.setdefault(place, []).append(chunk["delta"])
    else:
        places.pop(chunk["id"], None)


def _tool_input(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    call_id, kind = chunk["toolCallId"], chunk["type"]
    if kind == "tool-input-start":
        message.tools[call_id] = message.add({**_new_tool(chunk), "state": "input-streaming"}), []
        return
    given = {"input": chunk["input"]} if chunk.get("input") is not None else {}
    found = message.tools.get(call_id)
    if kind == "tool-input-error":
        failed = {"state": "output-error", **given, "errorText": chunk.get("errorText", "")}
        if found is None:
            message.tools[call_id] = message.add({**_new_tool(chunk), **failed}), []
        else:
            part = message.parts[found[0]]
            message.parts[found[0]] = {**_base(part, part["type"]), **failed}
    elif found is not None:
        place, texts = found
        part = message.parts[place]
        changed = {**_base(part, part["type"]), "state": "input-available", **given}
        if kind == "tool-input-delta":
            texts.append(chunk["inputTextDelta"])
            changed = {**changed, "state": "input-streaming", **_so_far(texts)}
        message.parts[place] = changed


def _so_far(texts: list[str]) -> Part:
    """The input as far as it has come, where that is JSON already."""
    if not texts[-1].rstrip().endswith(("}", "]", '"', "e", "l", *"0123456789")):
        return {}  # cannot be whole: parsing all of it each time would be quadratic
    try:
        return {"input": msgspec.json.decode("".join(texts))}
    except (msgspec.DecodeError, RecursionError):
        return {}


def _tool_output(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    """Results are found in the whole run; requests and denials only in their own message."""
    kind, call_id = chunk["type"], chunk["toolCallId"]
    if kind in ("tool-output-available", "tool-output-error"):
        change = _available(chunk) if kind == "tool-output-available" else _failed(chunk.get("errorText", ""))
        owner = next((message for message in projection.by_id.values() if call_id in message.tools), None)
    else:
        owner = projection.assistant(message_id)
        change = _denied if kind == "tool-output-denied" else _requested(chunk.get("approvalId", ""))
    found = owner.tool(call_id) if owner is not None else None
    if owner is not None and found is not None:
        owner.parts[found[0]] = change(found[1])
        owner.known = None


_CONTENT = {
    "file": ("mediaType", "url"),
    "source-url": ("sourceId", "url", "title"),
    "source-document": ("sourceId", "mediaType", "title", "filename"),
}


def _data(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    if chunk.get("transient"):
        return
    message = projection.assistant(message_id)
    part = {key: chunk[key] for key in ("type", "id", "data") if chunk.get(key) is not None}
    if "id" in part:
        for place, known in enumerate(message.parts):
            if known["type"] == part["type"] and known.get("id") == part["id"]:
                message.parts[place] = part
                return
    message.add(part)


def _lifecycle(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    kind = chunk["type"]
    if kind == "start":
        message = projection.assistant(message_id)
        message.id = chunk.get("messageId", message.id)
        message.metadata = chunk.get("messageMetadata", message.metadata)
    elif kind == "start-step":
        message = projection.assistant(message_id)
        if not (message.in_step and "repaired" in chunk):
            message.add({"type": "step-start"})
            message.in_step = True
    elif message_id in projection.by_id:
        message = projection.assistant(message_id)
        message.in_step = message.in_step and kind == "message-metadata"
        if kind == "finish-step":
            message.text.clear()
            message.reasoning.clear()
        else:
            message.metadata = chunk.get("messageMetadata", message.metadata)


def fold_chunk(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    """Take an output in. `error` and `abort` change nothing, and neither does what is not known."""
    kind: str = chunk["type"]
    if kind.startswith(("text-", "reasoning-")):
        _text(projection, chunk, message_id)
    elif kind.startswith("tool-input-"):
        _tool_input(projection, chunk, message_id)
    elif kind.startswith("tool-"):
        _tool_output(projection, chunk, message_id)
    elif kind.startswith("data-"):
        _data(projection, chunk, message_id)
    elif kind in _CONTENT:
        keys = ("type", *_CONTENT[kind])
        projection.assistant(message_id).add({key: chunk[key] for key in keys if key in chunk})
    elif kind in ("start", "start-step", "finish-step", "finish", "message-metadata"):
        _lifecycle(projection, chunk, message_id)
    if projection.pending:
        projection.retry()


# --- inputs -----------------------------------------------------------------------------------------------------------


def fold_input(projection: UIProjection, event: Mapping[str, Any], message_id: str) -> None:
    """Take an input in; `regenerate` says nothing about content."""
    kind = event["kind"]
    if kind == "user-message":
        _user(projection, event["message"], message_id)
    elif kind in ("tool-result", "tool-result-error", "tool-approval-response"):
        target, call_id = event["codecMessageId"], event["toolCallId"]
        _seed(projection, target, event.get("forkSeed"))
        if kind == "tool-result":
            change = _available({key: event[key] for key in ("output",) if key in event})
        else:
            change = _answered(event) if kind == "tool-approval-response" else _failed(event.get("message", ""))
        projection.resolve(target, call_id, change)
    if projection.pending:
        projection.retry()


def _user(projection: UIProjection, given: UIMessage, message_id: str) -> None:
    known = projection.by_id.get(message_id)
    if known is None:
        known = projection.by_id[message_id] = _Message(message_id, given["role"])
        known.id = given["id"]
        known.metadata = given.get("metadata")
    known.parts.extend(given["parts"])
    known.known = None


def _seed(projection: UIProjection, target: str, seed: Any) -> None:
    """A fork of a run begins with a copy of the messages that it goes on from."""
    if not isinstance(seed, dict) or target in projection.by_id:
        return
    for entry in cast("dict[str, Any]", seed).get("messages", ()):
        message_id, given = entry["codecMessageId"], entry["message"]
        if message_id in projection.by_id:
            continue
        message = _Message(message_id, given.get("role", "assistant"), given["parts"])
        message.id = given.get("id", message_id)
        message.metadata = given.get("metadata")
        projection.by_id[message_id] = message
        for place, part in enumerate(message.parts):
            if part["type"] == "dynamic-tool" or part["type"].startswith("tool-"):
                message.tools[part["toolCallId"]] = place, []
