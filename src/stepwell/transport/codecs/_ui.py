"""The codec of Vercel's UI messages, wire-compatible with the JavaScript SDK's.

Outputs are chunks, as the AI SDK's `UIMessageChunk`: objects with a `type`. What each looks like on the wire says the
table below, and docs/transport/codecs.md in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast
from uuid import uuid4

from stepwell.errors import MisuseError
from stepwell.transport._codec import CodecMessage, Direction, FoldMeta
from stepwell.wire import Headers

from ._fields import choice_field, flag_field, json_field, text_field
from ._table import Event, EventTable, Input, Output, Repair, Stream, UserMessage
from ._table_codec import TableCodec
from ._ui_fold import UIMessage, UIPart, UIProjection, fold_chunk, fold_input, is_tool, parse_input

__all__ = ["UIMessageCodec", "create_tool_result_fork"]

_META = json_field("providerMetadata")
_MESSAGE_META = json_field("messageMetadata")
_ID = text_field("id")
_SOURCE = text_field("sourceId", "")
_MEDIA_TYPE = text_field("mediaType", "")
_CALL = text_field("toolCallId", "")
_DYNAMIC = flag_field("dynamic")
_PROVIDER_EXECUTED = flag_field("providerExecuted")
_TITLE = text_field("title")
_TOOL = (_CALL, text_field("toolName", ""), _DYNAMIC, _TITLE, _PROVIDER_EXECUTED, _META)


def _as_text(data: Any) -> str:
    return data if isinstance(data, str) else ""


def _pick(data: Any, *keys: str) -> Event:
    """Those keys of an object that it has; of anything else none."""
    return {key: data[key] for key in keys if key in data} if isinstance(data, Mapping) else {}


def _error_text(data: Any) -> Event:
    found = _pick(data, "errorText")
    return found if isinstance(found.get("errorText"), str) else {"errorText": ""}


def _input_error(data: Any) -> Event:
    return {**_pick(data, "input"), **_error_text(data)}


def _data(data: Any) -> Event:
    return {} if data is None else {"data": data}


def _whole_input(event: Event, data: Any) -> Sequence[Event]:
    """A tool's input that was not streamed: two events, as if it had been."""
    given = {} if data is None else {"input": data}
    end = _pick(event, "toolCallId", "toolName", "providerMetadata")
    return {"type": "tool-input-start", **event}, {"type": "tool-input-available", **end, **given}


_OUTPUTS = (
    Stream(kind="text", start="text-start", delta="text-delta", end="text-end", fields=(_ID, _META)),
    Stream(
        kind="reasoning", start="reasoning-start", delta="reasoning-delta", end="reasoning-end", fields=(_ID, _META)
    ),
    Stream(
        kind="tool-input",
        start="tool-input-start",
        delta="tool-input-delta",
        end="tool-input-available",
        delta_key="inputTextDelta",
        key="toolCallId",
        fields=_TOOL,
        closing=("toolCallId", "toolName", "providerMetadata"),
        whole=lambda event: event.get("input"),
        unwhole=_whole_input,
        finish=parse_input,
    ),
    Output(type="start", fields=(text_field("messageId"), _MESSAGE_META), named="messageId"),
    Output(type="start-step"),
    Output(type="finish-step"),
    Output(
        type="finish",
        fields=(
            choice_field("finishReason", ("stop", "length", "content-filter", "tool-calls", "error", "other"), "stop"),
            _MESSAGE_META,
        ),
    ),
    Output(type="message-metadata", fields=(_MESSAGE_META,)),
    Output(
        type="error",
        encode=lambda event: event["errorText"],
        decode=lambda data: {"errorText": _as_text(data)},
    ),
    Output(
        type="abort",
        encode=lambda event: event.get("reason") or "",
        decode=lambda data: {"reason": data} if isinstance(data, str) and data else {},
    ),
    Output(
        type="file",
        fields=(_MEDIA_TYPE, _META),
        encode=lambda event: event["url"],
        decode=lambda data: {"url": _as_text(data)},
    ),
    Output(
        type="source-url",
        fields=(_SOURCE, _TITLE, _META),
        encode=lambda event: event["url"],
        decode=lambda data: {"url": _as_text(data)},
    ),
    Output(
        type="source-document",
        fields=(_SOURCE, _MEDIA_TYPE, text_field("title", ""), text_field("filename"), _META),
    ),
    Output(
        type="tool-input-error",
        fields=_TOOL,
        encode=lambda event: _pick(event, "errorText", "input"),
        decode=_input_error,
    ),
    Output(
        type="tool-output-available",
        fields=(_CALL, _DYNAMIC, _PROVIDER_EXECUTED, flag_field("preliminary")),
        encode=lambda event: _pick(event, "output"),
        decode=lambda data: _pick(data, "output"),
    ),
    Output(
        type="tool-output-error",
        fields=(_CALL, _DYNAMIC, _PROVIDER_EXECUTED),
        encode=lambda event: _pick(event, "errorText"),
        decode=_error_text,
    ),
    Output(type="tool-approval-request", fields=(_CALL, text_field("approvalId", ""))),
    Output(type="tool-output-denied", fields=(_CALL,)),
    Output(
        type="data-*",
        fields=(_ID, flag_field("transient")),
        encode=lambda event: event.get("data"),
        decode=_data,
        ephemeral=lambda event: event.get("transient") is True,
    ),
)


def _fork_seed(data: Any) -> Event:
    """The usable messages of a fork's seed, and their usable parts."""
    seed = _pick(data, "forkSeed").get("forkSeed")
    messages: Any = _pick(seed, "messages").get("messages")
    if not isinstance(messages, list):
        return {}
    return {"forkSeed": {"messages": [found for entry in cast("list[Any]", messages) if (found := _seed(entry))]}}


def _seed(entry: Any) -> Event | None:
    given = _pick(entry, "codecMessageId", "message")
    message: Any = given.get("message")
    parts: Any = _pick(message, "parts").get("parts")
    if not isinstance(given.get("codecMessageId"), str) or not isinstance(parts, list):
        return None
    usable = [part for part in cast("list[Any]", parts) if isinstance(_pick(part, "type").get("type"), str)]
    return {"codecMessageId": given["codecMessageId"], "message": {**message, "parts": usable}}


def _result_error(data: Any) -> Event:
    message = _pick(data, "message").get("message")
    return {"message": message if isinstance(message, str) else "", **_fork_seed(data)}


_INPUTS = (
    Input(
        kind="tool-result",
        fields=(_CALL,),
        encode=lambda event: _pick(event, "output", "forkSeed"),
        decode=lambda data: {**_pick(data, "output"), **_fork_seed(data)},
    ),
    Input(
        kind="tool-result-error",
        fields=(_CALL,),
        encode=lambda event: _pick(event, "message", "forkSeed"),
        decode=_result_error,
    ),
    Input(kind="tool-approval-response", fields=(_CALL, flag_field("approved", False), text_field("reason"))),
)


def _explode(message: UIMessage) -> Sequence[UIPart]:
    sent = [part for part in message["parts"] if part["type"] in ("text", "file") or part["type"].startswith("data-")]
    return sent or [{"type": "text", "text": ""}]


def _assemble(part: UIPart, codec: Headers, role: str) -> UIMessage:
    return {"id": codec.get("messageId", ""), "role": role, "parts": [part]}


_USER = UserMessage(
    parts=(
        Output(type="text", encode=lambda part: part["text"], decode=lambda data: {"text": _as_text(data)}),
        Output(
            type="file",
            fields=(_MEDIA_TYPE,),
            encode=lambda part: part["url"],
            decode=lambda data: {"url": _as_text(data)},
        ),
        Output(type="data-*", fields=(_ID,), encode=lambda part: part.get("data"), decode=_data),
    ),
    explode=_explode,
    assemble=_assemble,
    headers=lambda message: {"messageId": message["id"]},
)


class _Repair(Repair):
    """A run's `start` and `start-step`, where its writer left them out."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}

    def before(self, run_id: str, kind: str, headers: Headers, *, stream: bool) -> Sequence[Event]:
        if stream:
            return self._missing(self._seen.setdefault(run_id, set()), headers.get("messageId"))
        if kind in ("start", "start-step"):
            self._seen.setdefault(run_id, set()).add(kind)
        elif kind == "finish-step":
            self._seen.get(run_id, set()).discard("start-step")
        elif kind in ("finish", "error", "abort"):
            self._seen.pop(run_id, None)
        return ()

    @staticmethod
    def _missing(seen: set[str], message_id: str | None) -> Sequence[Event]:
        missing: list[Event] = []
        if "start" not in seen:
            missing.append({"type": "start"} if message_id is None else {"type": "start", "messageId": message_id})
        if "start-step" not in seen:
            # Told apart, because history may bring the real one later: `fold` drops this one then.
            missing.append({"type": "start-step", "repaired": True})
        seen.update(("start", "start-step"))
        return missing


class UIMessageCodec(TableCodec[UIMessage, UIProjection]):
    """UI messages: text, reasoning, tools, files, sources, data parts, approvals.

    Messages are `UIMessage` objects, outputs chunks, inputs what the `create_*` methods make. Of a user's message only
    text, file and data parts are sent.
    """

    tag = "vercel-ai-sdk-ui-message"
    table: ClassVar = EventTable(_OUTPUTS, _INPUTS, user=_USER, repair=_Repair)

    def init(self) -> UIProjection:
        """See `Codec.init`."""
        return UIProjection()

    def fold(self, projection: UIProjection, direction: Direction, event: Any, meta: FoldMeta) -> UIProjection:
        """See `Codec.fold`."""
        if direction == "output":
            fold_chunk(projection, event, meta.message_id)
        else:
            fold_input(projection, event, meta.message_id)
        return projection

    def get_messages(self, projection: UIProjection) -> Sequence[CodecMessage[UIMessage]]:
        """See `Codec.get_messages`. Parts and messages that did not change are the same objects as before."""
        return projection.messages()

    def create_user_message(self, message: UIMessage | str) -> Event:
        """The input for something that a user says: a message, or its text (with a fresh id).

        Raises:
            MisuseError: It is neither.
        """
        if isinstance(message, str):
            message = {"id": str(uuid4()), "role": "user", "parts": [{"type": "text", "text": message}]}
        if not isinstance(message.get("parts"), list) or "id" not in message:  # pyright: ignore[reportUnnecessaryIsInstance] - callers err
            raise MisuseError("A UI message is an object with id, role and parts.")
        return {"kind": "user-message", "message": {"role": "user", **message}}

    def create_tool_result(self, target: str, tool_call_id: str, output: Any) -> Event:
        """See `Codec.create_tool_result`."""
        return {"kind": "tool-result", "codecMessageId": target, "toolCallId": tool_call_id, "output": output}

    def create_tool_result_error(self, target: str, tool_call_id: str, message: str) -> Event:
        """See `Codec.create_tool_result_error`."""
        return {"kind": "tool-result-error", "codecMessageId": target, "toolCallId": tool_call_id, "message": message}

    def create_tool_approval_response(
        self, target: str, tool_call_id: str, *, approved: bool, reason: str | None = None
    ) -> Event:
        """See `Codec.create_tool_approval_response`."""
        event: Event = {"kind": "tool-approval-response", "codecMessageId": target, "toolCallId": tool_call_id}
        return {**event, "approved": approved} | ({} if reason is None else {"reason": reason})


def create_tool_result_fork(
    messages: Sequence[CodecMessage[UIMessage]],
    tool_call_id: str,
    *,
    output: Any = None,
    error: str | None = None,
    fork_id: str | None = None,
) -> Event:
    """The input with a client tool's result that goes on from a suspended run in a new one (docs/wire.md 4.6).

    It carries copies of the run's messages, so that the new run can begin where the old one stopped. Send it with
    `view.send(fork, role="assistant", parent=<the input that the run answers>, supersedes=<the run's id>)`.

    Args:
        messages: Those of the suspended run.
        tool_call_id: The call that is answered.
        output: The result.
        error: Instead of a result.
        fork_id: `codec-message-id` of the message with the call in the new run; None makes one.

    Raises:
        MisuseError: No message holds that call.
    """
    ids = [str(uuid4()) for _ in messages]
    for place, entry in enumerate(messages):
        if any(is_tool(part) and part["toolCallId"] == tool_call_id for part in entry.message["parts"]):
            target = ids[place] = fork_id or ids[place]
            break
    else:
        raise MisuseError(f"No message of the run holds the tool call {tool_call_id[:80]!r}.")
    seeds = [{"codecMessageId": own, "message": entry.message} for own, entry in zip(ids, messages, strict=True)]
    event: Event = {"codecMessageId": target, "toolCallId": tool_call_id, "forkSeed": {"messages": seeds}}
    if error is not None:
        return {"kind": "tool-result-error", **event, "message": error}
    return {"kind": "tool-result", **event, "output": output}
