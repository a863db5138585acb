"""Neutral, versioned records of conversation messages and token usage: what is stored and what a model is shown.

A message never depends on a provider: each request is encoded anew for the provider it goes to. What only one
provider understands (signatures of reasoning, item ids) is kept in `provider_data` and shown to no other.

Records are frozen `msgspec` structs; decode them with `decode_message`, encode with `encode_message`. Field names are
part of the stored format: a change needs a new `RECORD_VERSION` and an upcast in `decode_message`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec
from uuid_utils import uuid4

from .errors import HistoryError, NewerSchemaError, StoreDataError

__all__ = [
    "RECORD_VERSION",
    "AssistantMessage",
    "DirectMessage",
    "FilePart",
    "HistoryCheck",
    "JsonObject",
    "JsonValue",
    "Message",
    "Part",
    "ReasoningPart",
    "TextPart",
    "ToolCall",
    "ToolResult",
    "Usage",
    "UserMessage",
    "decode_message",
    "encode_message",
    "gen_message_id",
]

JsonValue: TypeAlias = Any
"""Anything JSON can hold. (`Any`: a recursive alias makes every caller cast.)"""

JsonObject: TypeAlias = dict[str, Any]

RECORD_VERSION = 1
"""Version of the records below. Absent in stored records of version 1."""

ToolOutcome: TypeAlias = Literal["ok", "error", "not_run", "unknown"]


def gen_message_id(stage: str, now: float) -> str:
    """Make a message id: stage id, UTC time and a random suffix, joined by `|`.

    Args:
        stage: Id of the stage the message belongs to; crossing detection reads it.
        now: Unix time in seconds.
    """
    seconds = int(now)
    return f"{stage}|{_second(seconds)}.{f'{1000 + int((now - seconds) * 1000)}'[1:]}Z|{uuid4().hex[:8]}"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    """A second as text; formatting it costs more than the rest of an id, and many ids share one."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """Text."""

    text: str


class FilePart(msgspec.Struct, frozen=True, tag="file", omit_defaults=True):
    """A file: either `data` (base64 text) or `url`."""

    media_type: str
    data: str | None = None
    url: str | None = None
    name: str | None = None


Part: TypeAlias = TextPart | FilePart


class ReasoningPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a model's visible reasoning."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool call of an accepted reply.

    Attributes:
        id: The provider's call id (opaque, at most 512 characters; models may repeat it between replies).
        name: The tool's name.
        args: The arguments, a JSON object; the raw text if the model sent something else.
        key: Idempotency key, minted when the reply was accepted; unique for ever.
    """

    id: str
    name: str
    args: Any = msgspec.field(default_factory=dict[str, Any])
    key: str = ""


class _Base(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str = ""
    v: int = RECORD_VERSION

    @property
    def stage(self) -> str:
        """Id of the stage the message belongs to."""
        return self.id.split("|", 1)[0]

    @property
    def at(self) -> str:
        """When it was made, ISO 8601, UTC, milliseconds."""
        parts = self.id.split("|")
        return parts[1] if len(parts) == 3 else ""


class UserMessage(_Base, frozen=True, tag="user", tag_field="role"):
    """What a person, or code on their behalf, says to the model.

    Attributes:
        content: Text, or parts where there are files.
        by: `user`, or `code` for synthetic messages and attachments.
    """

    content: str | tuple[Part, ...] = ""
    by: Literal["user", "code"] = "user"

    @property
    def text(self) -> str:
        """The text of all text parts."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content if isinstance(part, TextPart))


class AssistantMessage(_Base, frozen=True, tag="assistant", tag_field="role"):
    """An accepted reply of a model.

    Attributes:
        text: The text, possibly empty when there are calls.
        reasoning: Visible reasoning.
        calls: Tool calls, in the reply's order.
        files: Files the model made.
        model: The author, as `provider:name`.
        truncated: Whether the reply hit the output cap.
        provider_data: Opaque JSON of the author's provider (signatures, item ids), shown to that provider only.
    """

    text: str = ""
    reasoning: tuple[ReasoningPart, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    files: tuple[FilePart, ...] = ()
    model: str = ""
    truncated: bool = False
    provider_data: JsonObject | None = None


class DirectMessage(_Base, frozen=True, tag="direct", tag_field="role"):
    """A reply written by code; models see it as an assistant's message.

    Attributes:
        text: The text, never empty.
        content_type: MIME type of the text.
    """

    text: str = ""
    content_type: str = "text/plain"


class ToolResult(_Base, frozen=True, tag="tool", tag_field="role"):
    """The result of one call.

    Attributes:
        call: Id of the call it answers.
        name: The tool's name.
        content: Text or JSON.
        outcome: `ok`, `error`, `not_run` (nothing happened: the turn ended before, it was not allowed, or its handler
            said so), or `unknown` (nobody knows whether it happened).
    """

    call: str = ""
    name: str = ""
    content: JsonValue = None
    outcome: ToolOutcome = "ok"


Message: TypeAlias = UserMessage | AssistantMessage | DirectMessage | ToolResult

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Encode one record as JSON (UTF-8)."""
    return _encoder.encode(message)


def decode_message(data: bytes | str) -> Message:
    """Decode one stored record.

    Raises:
        NewerSchemaError: The record was written by a newer version.
        StoreDataError: It is not a message record.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        if (version := _version_of(data)) > RECORD_VERSION:
            raise _newer(version) from error
        raise StoreDataError(f"A stored message is not a message record of version {RECORD_VERSION}.") from error
    if message.v > RECORD_VERSION:
        raise _newer(message.v)
    return message


def _version_of(data: bytes | str) -> int:
    try:
        record = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
    version = record.get("v") if isinstance(record, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return version if isinstance(version, int) else 0


def _newer(version: int) -> NewerSchemaError:
    return NewerSchemaError(
        f"A stored message has record version {version}, this Stepwell reads up to {RECORD_VERSION}: update Stepwell."
    )


class HistoryCheck:
    """The rule that every call has its result and every result its call (promise P8), checked message by message.

    Between a reply with calls and its last result nothing else may stand. One instance follows one history; feeding
    it only what is new keeps the check's cost proportional to what is new.
    """

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: dict[str, str] = {}
        """Calls without a result: call id to tool name, in order."""

    def add(self, message: Message) -> None:
        """Check one more message.

        Raises:
            HistoryError: No provider would accept it here; the check is unchanged.
        """
        if isinstance(message, ToolResult):
            if message.call not in self.open:
                raise HistoryError(
                    f"A result for call {message.call!r} of tool {message.name!r} has no open call before it: "
                    "every result follows the reply that made its call, once.",
                    tool=message.name,
                )
            del self.open[message.call]
            return
        if self.open:
            waiting = ", ".join(sorted(set(self.open.values())))
            raise HistoryError(
                f"A message of role {_role(message)!r} cannot stand before the results of the open calls ({waiting}): "
                "add their results first."
            )
        if isinstance(message, AssistantMessage):
            if calls := message.calls:
                opened = {call.id: call.name for call in calls}
                if len(opened) != len(calls) or "" in opened:
                    raise HistoryError("The calls of one reply need ids that are not empty and differ from each other.")
                self.open = opened
            elif not (message.text.strip() or message.files):
                raise HistoryError("A reply without text, calls and files cannot enter a history.")
        elif not message.text.strip() and not (isinstance(message, UserMessage) and _has_file(message)):
            raise HistoryError(f"An empty message of role {_role(message)!r} cannot enter a history.")

    def add_all(self, messages: Iterable[Message]) -> None:
        """Check several."""
        for message in messages:
            self.add(message)


def _has_file(message: UserMessage) -> bool:
    return not isinstance(message.content, str) and any(isinstance(part, FilePart) for part in message.content)


def _role(message: Message) -> str:
    return str(message.__struct_config__.tag)


def exchanges(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the positions in `messages` before which a history may be cut without separating calls from results."""
    check = HistoryCheck()
    for index, message in enumerate(messages):
        if not check.open and not isinstance(message, ToolResult):
            yield index
        check.add(message)


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens, as far as the provider reported them; `None` is unknown, never zero.

    Attributes:
        input: Tokens of the prompt, all of them.
        output: Tokens of the reply, reasoning included.
        reasoning: Those of `output` that were reasoning.
        cache_read: Those of `input` read from the provider's cache.
        cache_write: Those of `input` written to it.
    """

    input: int | None = None
    output: int | None = None
    reasoning: int | None = None
    cache_read: int | None = None
    cache_write: int | None = None

    @property
    def total(self) -> int | None:
        """`input` plus `output`, if both are known."""
        return None if self.input is None or self.output is None else self.input + self.output

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            _add(self.input, other.input),
            _add(self.output, other.output),
            _add(self.reasoning, other.reasoning),
            _add(self.cache_read, other.cache_read),
            _add(self.cache_write, other.cache_write),
        )


def _add(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else a + b
