"""The codec of Vercel's UI messages, wire-compatible with the JavaScript SDK's.

Outputs are chunks, as the AI SDK's `UIMessageChunk`: objects with a `type`. What each looks like on the wire says the
table below, and docs/transport/codecs.md in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from stepwell._clock import Clock
from stepwell.errors import MisuseError
from stepwell.transport._codec import CodecMessage, Decoder, Direction, Encoder, EncoderWriter, FoldMeta, OpenOutput
from stepwell.wire import Delivery, H, Headers, Name, WireMessage, codec_headers, make_extras, transport_headers

from ._fields import choice, flag, json_value, text
from ._table import KIND, Event, EventTable, InputEvent, Output, Repair, Stream, TableEncoder
from ._ui_fold import UIMessage, UIProjection, fold_chunk, fold_input, parse_input

__all__ = ["FinishReason", "UIMessage", "UIMessageCodec", "tool_result_fork"]

FinishReason = Literal["stop", "length", "content-filter", "tool-calls", "error", "other"]

_META = json_value("providerMetadata")
_MESSAGE_META = json_value("messageMetadata")
_ID = text("id")
_CALL = text("toolCallId", "")
_TOOL = (_CALL, text("toolName", ""), flag("dynamic"), text("title"), flag("providerExecuted"), _META)


def _as_text(data: Any) -> str:
    return data if isinstance(data, str) else ""


def _pick(data: Any, *keys: str) -> Event:
    return {key: data[key] for key in keys if key in data} if isinstance(data, dict) else {}


def _error_text(data: Any) -> Event:
    found = _pick(data, "errorText")
    return found if isinstance(found.get("errorText"), str) else {"errorText": ""}


def _input_error(data: Any) -> Event:
    return {**_pick(data, "input"), **_error_text(data)}


def _present(event: Mapping[str, Any], *keys: str) -> Event:
    return {key: event[key] for key in keys if key in event}


def _whole_input(event: Event, data: Any) -> Sequence[Event]:
    """A tool's input that was not streamed: two events, as if it had been."""
    given = {} if data is None else {"input": data}
    end = {key: event[key] for key in ("toolCallId", "toolName", "providerMetadata") if key in event}
    return {"type": "tool-input-start", **event}, {"type": "tool-input-available", **end, **given}


def _streamed_input(text: str) -> Event:
    value = parse_input(text)
    return {} if value is None else {"input": value}


_OUTPUTS = (
    Stream(
        kind="text", start="text-start", delta="text-delta", end="text-end", fields=(_ID, _META),
        closing=("providerMetadata",),
    ),
    Stream(
        kind="reasoning", start="reasoning-start", delta="reasoning-delta", end="reasoning-end", fields=(_ID, _META),
        closing=("providerMetadata",),
    ),
    Stream(
        kind="tool-input", start="tool-input-start", delta="tool-input-delta", end="tool-input-available",
        delta_key="inputTextDelta", key="toolCallId", fields=_TOOL,
        closing=("toolCallId", "toolName", "providerMetadata"), whole=lambda event: event.get("input"),
        unwhole=_whole_input, finish=_streamed_input,
    ),
    Output(type="start", fields=(text("messageId"), _MESSAGE_META)),
    Output(type="start-step"),
    Output(type="finish-step"),
    Output(
        type="finish",
        fields=(
            choice("finishReason", ("stop", "length", "content-filter", "tool-calls", "error", "other"), "stop"),
            _MESSAGE_META,
        ),
    ),
    Output(type="message-metadata", fields=(_MESSAGE_META,)),
    Output(
        type="error",
        encode=lambda event: event.get("errorText", ""),
        decode=lambda data: {"errorText": _as_text(data)},
    ),
    Output(
        type="abort",
        encode=lambda event: event.get("reason") or "",
        decode=lambda data: {"reason": data} if isinstance(data, str) and data else {},
    ),
    Output(
        type="file",
        fields=(text("mediaType", ""), _META),
        encode=lambda event: event["url"],
        decode=lambda data: {"url": _as_text(data)},
    ),
    Output(
        type="source-url",
        fields=(text("sourceId", ""), text("title"), _META),
        encode=lambda event: event["url"],
        decode=lambda data: {"url": _as_text(data)},
    ),
    Output(
        type="source-document",
        fields=(text("sourceId", ""), text("mediaType", ""), text("title", ""), text("filename"), _META),
    ),
    Output(
        type="tool-input-error",
        fields=_TOOL,
        encode=lambda event: _present(event, "errorText", "input"),
        decode=_input_error,
    ),
    Output(
        type="tool-output-available",
        fields=(_CALL, flag("dynamic"), flag("providerExecuted"), flag("preliminary")),
        encode=lambda event: _present(event, "output"),
        decode=lambda data: _pick(data, "output"),
    ),
    Output(
        type="tool-output-error",
        fields=(_CALL, flag("dynamic"), flag("providerExecuted")),
        encode=lambda event: _present(event, "errorText"),
        decode=_error_text,
    ),
    Output(type="tool-approval-request", fields=(_CALL, text("approvalId", ""))),
    Output(type="tool-output-denied", fields=(_CALL,)),
    Output(
        type="data-*",
        fields=(_ID, flag("transient")),
        encode=lambda event: event.get("data"),
        decode=lambda data: {} if data is None else {"data": data},
        ephemeral=lambda event: event.get("transient") is True,
    ),
)  # fmt: skip


def _fork_seed(data: Any) -> Event:
    """The usable messages of a fork's seed."""
    seed = _pick(data, "forkSeed").get("forkSeed")
    messages: Any = cast("dict[str, Any]", seed).get("messages") if isinstance(seed, dict) else None
    if not isinstance(messages, list):
        return {}
    usable = [entry for entry in cast("list[Any]", messages) if _is_seed(entry)]
    return {"forkSeed": {"messages": usable}}


def _is_seed(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("codecMessageId"), str):  # pyright: ignore[reportUnknownMemberType]
        return False
    message: Any = cast("dict[str, Any]", entry).get("message")
    parts: Any = cast("dict[str, Any]", message).get("parts") if isinstance(message, dict) else None
    return isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("type"), str)
        for part in cast("list[Any]", parts)
    )


def _result_error(data: Any) -> Event:
    message = _pick(data, "message").get("message")
    return {"message": message if isinstance(message, str) else "", **_fork_seed(data)}


_INPUTS = (
    InputEvent(
        kind="tool-result",
        fields=(_CALL,),
        encode=lambda event: _present(event, "output", "forkSeed"),
        decode=lambda data: {**_pick(data, "output"), **_fork_seed(data)},
    ),
    InputEvent(
        kind="tool-result-error",
        fields=(_CALL,),
        encode=lambda event: _present(event, "message", "forkSeed"),
        decode=_result_error,
    ),
    InputEvent(kind="tool-approval-response", fields=(_CALL, flag("approved", False), text("reason"))),
    InputEvent(kind="regenerate", wire_only=True),
)


class _Repair(Repair):
    """A run's `start` and `start-step`, where its writer left them out."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}

    def before(self, run_id: str, kind: str, headers: Headers, *, stream: bool) -> Sequence[Event]:
        seen = self._seen.setdefault(run_id, set())
        if stream:
            missing: list[Event] = []
            if "start" not in seen:
                name = headers.get("messageId")
                missing.append({"type": "start"} if name is None else {"type": "start", "messageId": name})
            if "start-step" not in seen:
                # Told apart, because history may bring the real one later: `fold` drops this one then.
                missing.append({"type": "start-step", "repaired": True})
            seen.update(("start", "start-step"))
            return missing
        if kind in ("start", "start-step"):
            seen.add(kind)
        elif kind == "finish-step":
            seen.discard("start-step")
        elif kind in ("finish", "error", "abort"):
            seen.clear()
        return ()


def _decode_user(delivery: Delivery) -> Event | None:
    """One part of a user's message; the parts of one message are folded together."""
    headers, transport = codec_headers(delivery.extras), transport_headers(delivery.extras)
    kind, data = headers.get("partType", ""), delivery.data
    if headers.get(KIND) != "user-message":
        return None
    part: Event = {"type": kind}
    if kind == "text":
        part["text"] = _as_text(data)
    elif kind == "file":
        part["mediaType"], part["url"] = headers.get("mediaType", ""), _as_text(data)
    elif kind.startswith("data-"):
        if "id" in headers:
            part["id"] = headers["id"]
        if data is not None:
            part["data"] = data
    else:
        return None
    message = {"id": headers.get("messageId", ""), "role": transport.get(H.ROLE, "user"), "parts": [part]}
    return {"kind": "user-message", "message": message}


_TABLE = EventTable(_OUTPUTS, _INPUTS, decode_user=_decode_user, repair=_Repair)


class UIMessageCodec:
    """UI messages: text, reasoning, tools, files, sources, data parts, approvals.

    Messages are `UIMessage` objects, outputs chunks, inputs what the `create_*` methods make.

    Args:
        clock: For the roll-up window.
    """

    tag = "vercel-ai-sdk-ui-message"

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = clock

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
        """See `Codec.get_messages`."""
        return projection.messages()

    def create_decoder(self) -> Decoder:
        """See `Codec.create_decoder`."""
        return _TABLE.create_decoder()

    def create_encoder(
        self, writer: EncoderWriter, open_output: OpenOutput, *, message_id: str, roll_up: float = 0.02
    ) -> Encoder:
        """See `Codec.create_encoder`."""
        return TableEncoder(_TABLE, writer, open_output, message_id=message_id, roll_up=roll_up, clock=self._clock)

    def encode_input(self, event: Any, headers: Headers) -> list[WireMessage]:
        """See `Codec.encode_input`. Of a user's message only text, file and data parts are sent."""
        if event.get("kind") != "user-message":
            return _TABLE.encode_input(event, headers)
        message = event["message"]
        sent = [
            part for part in message["parts"] if part["type"] in ("text", "file") or part["type"].startswith("data-")
        ]
        return [_encode_part(message, part, headers) for part in sent or [{"type": "text", "text": ""}]]

    def is_new_message(self, event: Any) -> bool:
        """See `Codec.is_new_message`."""
        return event.get("kind") == "user-message"

    def target_of(self, event: Any) -> str | None:
        """See `Codec.target_of`."""
        return event.get("codecMessageId")

    def create_user_message(self, message: UIMessage | str) -> Event:
        """The input for something that a user says: a message, or its text (the id is then empty).

        Raises:
            MisuseError: It is neither.
        """
        if isinstance(message, str):
            message = {"id": "", "role": "user", "parts": [{"type": "text", "text": message}]}
        if not isinstance(message.get("parts"), list) or "id" not in message:
            raise MisuseError("A UI message is an object with id, role and parts.")
        return {"kind": "user-message", "message": {"role": "user", **message}}

    def create_regenerate(self, target: str, parent: str | None) -> Event:
        """See `Codec.create_regenerate`."""
        return {"kind": "regenerate", "target": target, "parent": parent}

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


def _encode_part(message: UIMessage, part: Mapping[str, Any], headers: Headers) -> WireMessage:
    kind = part["type"]
    codec = {KIND: "user-message", "messageId": message["id"], "partType": kind}
    if kind == "text":
        data = part["text"]
    elif kind == "file":
        codec["mediaType"], data = part["mediaType"], part["url"]
    else:
        data = part.get("data")
        if "id" in part:
            codec["id"] = part["id"]
    transport = {**headers, H.ROLE: message["role"], H.STREAM: "false", H.DISCRETE: "true"}
    return WireMessage(name=Name.INPUT, data=data, extras=make_extras(transport, codec))


def tool_result_fork(
    messages: Sequence[CodecMessage[UIMessage]],
    tool_call_id: str,
    *,
    fork_id: str,
    output: Any = None,
    error: str | None = None,
) -> Event:
    """The input with a tool's result that goes on from a suspended run in a new one (docs/wire.md 4.6).

    To be sent with `role="assistant"`, `parent` of the suspended run's input, and `supersedes` of that run.

    Args:
        messages: Those of the suspended run.
        tool_call_id: The call that is answered.
        fork_id: The fork's `codec-message-id`, a fresh UUID; stands for the message with the call.
        output: The result.
        error: Instead of a result.

    Raises:
        MisuseError: No message holds that call.
    """
    for entry in messages:
        if any(part.get("toolCallId") == tool_call_id for part in entry.message["parts"]):
            break
    else:
        raise MisuseError(f"No message of the run holds the tool call {tool_call_id[:80]!r}.")
    seed = {"messages": [{"codecMessageId": fork_id, "message": entry.message}]}
    event: Event = {"codecMessageId": fork_id, "toolCallId": tool_call_id, "forkSeed": seed}
    if error is not None:
        return {"kind": "tool-result-error", **event, "message": error}
    return {"kind": "tool-result", **event, "output": output}
