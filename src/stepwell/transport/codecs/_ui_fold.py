"""UI messages from chunks and inputs: the projection of one run or one input.

What is given out never changes: a part is replaced, not altered, and a message's own object is made anew when it is
asked for after a change. Text is kept in pieces and joined then, so a token costs the same in a long message as in a
short one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

import msgspec

from stepwell.transport._codec import CodecMessage

__all__ = ["UIMessage", "UIPart", "UIProjection", "fold_chunk", "fold_input", "parse_input"]

UIPart: TypeAlias = dict[str, Any]
"""A part of a message, as the AI SDK has it: an object with a `type` and what belongs to it. The types are `text`,
`reasoning`, `step-start`, `tool-<name>`, `dynamic-tool`, `file`, `source-url`, `source-document` and `data-<name>`."""


class UIMessage(TypedDict):
    """A message, as the AI SDK has it.

    Attributes:
        id: The application's id; of an assistant's message what its `start` says, else its `codec-message-id`.
        role: `user`, `assistant` or `system`.
        parts: What it consists of, in order.
        metadata: Whatever the writer adds.
    """

    id: str
    role: str
    parts: list[UIPart]
    metadata: NotRequired[Any]


Chunk: TypeAlias = Mapping[str, Any]
Change: TypeAlias = Callable[[UIPart], UIPart]


class _Tool:
    """Where a tool's part is, and its input as text while that streams."""

    __slots__ = ("input", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        self.input: list[str] = []


class _Message:
    """A message under construction."""

    __slots__ = ("id", "known", "message_id", "metadata", "open", "parts", "pieces", "role", "tools")

    def __init__(self, message_id: str, role: str, parts: Sequence[UIPart] = ()) -> None:
        self.message_id = message_id
        self.id = message_id
        self.role = role
        self.parts = list(parts)
        self.metadata: Any = None
        self.open: dict[tuple[str, str], int] = {}  # text and reasoning that streams: which part
        self.pieces: dict[int, list[str]] = {}  # text that is not in its part yet
        self.tools: dict[str, _Tool] = {}  # by call id
        self.known: CodecMessage[UIMessage] | None = None  # given out, and still true

    def add(self, part: UIPart) -> int:
        self.parts.append(part)
        return len(self.parts) - 1

    def add_tool(self, call_id: str, part: UIPart) -> None:
        self.tools[call_id] = _Tool(self.add(part))

    def change_tool(self, call_id: str, change: Change) -> bool:
        """Whether there is such a tool."""
        tool = self.tools.get(call_id)
        if tool is None:
            return False
        self.parts[tool.place] = change(self.parts[tool.place])
        self.known = None
        return True

    def snapshot(self) -> CodecMessage[UIMessage]:
        if self.known is None:
            for place, pieces in self.pieces.items():
                part = self.parts[place]
                self.parts[place] = {**part, "text": part["text"] + "".join(pieces)}
            self.pieces.clear()
            message: UIMessage = {"id": self.id, "role": self.role, "parts": list(self.parts)}
            if self.metadata is not None:
                message["metadata"] = self.metadata
            self.known = CodecMessage(self.message_id, message)
        return self.known


class UIProjection:
    """The messages of one node of the conversation."""

    __slots__ = ("by_id", "in_step", "pending")

    def __init__(self) -> None:
        self.by_id: dict[str, _Message] = {}
        self.in_step = False  # between a `start-step` and what ends it, in whichever message
        self.pending: list[tuple[str, str, Change]] = []  # what clients said about tools that are not there yet

    def messages(self) -> list[CodecMessage[UIMessage]]:
        """All, in order."""
        return [message.snapshot() for message in self.by_id.values()]

    def assistant(self, message_id: str) -> _Message:
        """The message of this id, made if there is none. It is about to change."""
        message = self.by_id.get(message_id)
        if message is None:
            message = self.by_id[message_id] = _Message(message_id, "assistant")
        message.known = None
        return message

    def resolve(self, message_id: str, call_id: str, change: Change) -> None:
        """Change a tool's part; wait for it if it is not there yet."""
        if not self._resolved(message_id, call_id, change):
            self.pending.append((message_id, call_id, change))

    def retry(self) -> None:
        """Try again what waits."""
        self.pending = [item for item in self.pending if not self._resolved(*item)]

    def _resolved(self, message_id: str, call_id: str, change: Change) -> bool:
        message = self.by_id.get(message_id)
        return message is not None and message.change_tool(call_id, change)


# --- a tool's part through its states ---------------------------------------------------------------------------------


def _identity(source: Mapping[str, Any], kind: str) -> UIPart:
    """What a tool's part keeps through all its states."""
    part: UIPart = {"type": kind, "toolCallId": source["toolCallId"]}
    if kind == "dynamic-tool":
        part["toolName"] = source.get("toolName", "")
    for key in ("title", "providerExecuted"):
        if key in source:
            part[key] = source[key]
    return part


def _new_tool(chunk: Chunk, state: str, **more: Any) -> UIPart:
    kind = "dynamic-tool" if chunk.get("dynamic") else f"tool-{chunk.get('toolName', '')}"
    return {**_identity(chunk, kind), "state": state, **more}


def _with_input(part: UIPart, state: str, given: Mapping[str, Any], **more: Any) -> UIPart:
    """The part in another state, with the input that `given` has, if any."""
    return {**_identity(part, part["type"]), "state": state, **_pick(given, "input"), **more}


def _pick(source: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: source[key] for key in keys if key in source}


def _available(source: Mapping[str, Any]) -> Change:
    more = _pick(source, "output", "preliminary")
    return lambda part: _with_input(part, "output-available", part, **more)


def _failed(text: str) -> Change:
    return lambda part: _with_input(part, "output-error", part, errorText=text)


def _requested(chunk: Chunk) -> Change:
    return lambda part: _with_input(part, "approval-requested", part, approval={"id": chunk.get("approvalId", "")})


def _denied(part: UIPart) -> UIPart:
    return _with_input(part, "output-denied", part, approval={"id": "", "approved": False})


def _answered(event: Mapping[str, Any]) -> Change:
    """An approval; a rejection is a denial, whose reason is not shown."""
    if not event.get("approved"):
        return _denied

    def change(part: UIPart) -> UIPart:
        asked: Mapping[str, Any] = part.get("approval") or {}
        approval = {"id": asked.get("id", ""), "approved": True, **_pick(event, "reason")}
        return _with_input(part, "approval-responded", part, approval=approval)

    return change


def parse_input(text: str) -> dict[str, Any]:
    """A tool's `input` from all its text: the JSON value; the text if it is none; nothing if it is empty."""
    if not text:
        return {}
    try:
        return {"input": msgspec.json.decode(text)}
    except (msgspec.DecodeError, RecursionError):
        return {"input": text}


_CLOSERS = {"{": "}", "[": "]", '"': '"'}


def _input_so_far(texts: list[str]) -> dict[str, Any]:
    """A tool's input while it streams: shown where its text is JSON already."""
    closer = _CLOSERS.get(texts[0].lstrip()[:1])
    last = texts[-1].rstrip()
    if closer is not None and last and not last.endswith(closer):
        return {}  # not whole for sure: parsing all of it with every delta would be quadratic
    try:
        return {"input": msgspec.json.decode("".join(texts))}
    except (msgspec.DecodeError, RecursionError):
        return {}


# --- outputs ----------------------------------------------------------------------------------------------------------


def _text_start(kind: str, projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    message.open[kind, chunk["id"]] = message.add({"type": kind, "text": ""})


def _text_delta(kind: str, projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    place = message.open.get((kind, chunk["id"]))
    if place is None:
        return
    pieces = message.pieces.get(place)
    if pieces is None:
        message.pieces[place] = [chunk["delta"]]
    else:
        pieces.append(chunk["delta"])


def _text_end(kind: str, projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    projection.assistant(message_id).open.pop((kind, chunk["id"]), None)


def _input_start(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    projection.assistant(message_id).add_tool(chunk["toolCallId"], _new_tool(chunk, "input-streaming"))


def _input_delta(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    tool = message.tools.get(chunk["toolCallId"])
    if tool is not None:
        tool.input.append(chunk["inputTextDelta"])
        message.parts[tool.place] = _with_input(message.parts[tool.place], "input-streaming", _input_so_far(tool.input))


def _input_available(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    message.change_tool(chunk["toolCallId"], lambda part: _with_input(part, "input-available", chunk))


def _input_error(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message, call_id, text = projection.assistant(message_id), chunk["toolCallId"], chunk.get("errorText", "")
    if not message.change_tool(call_id, lambda part: _with_input(part, "output-error", chunk, errorText=text)):
        message.add_tool(call_id, _new_tool(chunk, "output-error", **_pick(chunk, "input"), errorText=text))


def _tool_output(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    """A result is looked for in the whole run: it comes in a message of its own. The first message with the call."""
    failed = chunk["type"] == "tool-output-error"
    change = _failed(chunk.get("errorText", "")) if failed else _available(chunk)
    for message in projection.by_id.values():
        if message.change_tool(chunk["toolCallId"], change):
            return


def _tool_approval(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    """A request or a denial: only in its own message."""
    change = _denied if chunk["type"] == "tool-output-denied" else _requested(chunk)
    projection.assistant(message_id).change_tool(chunk["toolCallId"], change)


def _content(keys: Sequence[str], projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    projection.assistant(message_id).add(_pick(chunk, *keys))


def _data(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    if chunk.get("transient"):
        return
    message = projection.assistant(message_id)
    part = _pick(chunk, "type", "id", "data")
    if "id" in part:
        for place, known in enumerate(message.parts):
            if known["type"] == part["type"] and known.get("id") == part["id"]:
                message.parts[place] = part
                return
    message.add(part)


def _start(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    message = projection.assistant(message_id)
    message.id = chunk.get("messageId", message.id)
    message.metadata = chunk.get("messageMetadata", message.metadata)


def _start_step(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    # The decoder of somebody who joined in the middle adds a `start-step` that history then has in front of it.
    if not (projection.in_step and "repaired" in chunk):
        projection.assistant(message_id).add({"type": "step-start"})
        projection.in_step = True


def _finish_step(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    projection.in_step = False
    message = projection.by_id.get(message_id)
    if message is not None:
        message.open.clear()


def _over(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    """`finish`, `error` and `abort`: nothing of them is shown but the metadata of `finish`."""
    projection.in_step = False
    _metadata(projection, chunk, message_id)


def _metadata(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    if message_id in projection.by_id and "messageMetadata" in chunk:
        projection.assistant(message_id).metadata = chunk["messageMetadata"]


_FOLDS: Mapping[str, Callable[[UIProjection, Chunk, str], None]] = {
    "text-start": partial(_text_start, "text"),
    "text-delta": partial(_text_delta, "text"),
    "text-end": partial(_text_end, "text"),
    "reasoning-start": partial(_text_start, "reasoning"),
    "reasoning-delta": partial(_text_delta, "reasoning"),
    "reasoning-end": partial(_text_end, "reasoning"),
    "tool-input-start": _input_start,
    "tool-input-delta": _input_delta,
    "tool-input-available": _input_available,
    "tool-input-error": _input_error,
    "tool-output-available": _tool_output,
    "tool-output-error": _tool_output,
    "tool-output-denied": _tool_approval,
    "tool-approval-request": _tool_approval,
    "file": partial(_content, ("type", "mediaType", "url")),
    "source-url": partial(_content, ("type", "sourceId", "url", "title")),
    "source-document": partial(_content, ("type", "sourceId", "mediaType", "title", "filename")),
    "start": _start,
    "start-step": _start_step,
    "finish-step": _finish_step,
    "finish": _over,
    "error": _over,
    "abort": _over,
    "message-metadata": _metadata,
}


def fold_chunk(projection: UIProjection, chunk: Chunk, message_id: str) -> None:
    """Take an output in. One without a message, and one that is not known, has nowhere to go."""
    if not message_id:
        return
    kind: str = chunk["type"]
    fold = _FOLDS.get(kind)
    if fold is not None:
        fold(projection, chunk, message_id)
    elif kind.startswith("data-"):
        _data(projection, chunk, message_id)
    if projection.pending:
        projection.retry()


# --- inputs -----------------------------------------------------------------------------------------------------------


def fold_input(projection: UIProjection, event: Mapping[str, Any], message_id: str) -> None:
    """Take an input in; `regenerate` says nothing about content."""
    kind = event["kind"]
    if kind == "user-message":
        _user(projection, event["message"], message_id or event["message"]["id"])
    elif kind in ("tool-result", "tool-result-error", "tool-approval-response"):
        target = event["codecMessageId"]
        _seed(projection, target, event.get("forkSeed"))
        projection.resolve(target, event["toolCallId"], _said(kind, event))
    if projection.pending:
        projection.retry()


def _said(kind: str, event: Mapping[str, Any]) -> Change:
    if kind == "tool-result":
        return _available(_pick(event, "output"))
    return _answered(event) if kind == "tool-approval-response" else _failed(event.get("message", ""))


def _user(projection: UIProjection, given: UIMessage, message_id: str) -> None:
    message = projection.by_id.get(message_id)
    if message is None:
        message = projection.by_id[message_id] = _Message(message_id, given["role"])
        message.id = given["id"]
        message.metadata = given.get("metadata")
    message.parts.extend(given["parts"])
    message.known = None


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
            if is_tool(part):
                message.tools[part["toolCallId"]] = _Tool(place)


def is_tool(part: UIPart) -> bool:
    """Whether a part is a tool's."""
    named = part["type"] == "dynamic-tool" or part["type"].startswith("tool-")
    return named and "toolCallId" in part and "state" in part
