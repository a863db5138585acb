"""What the engine accepts from outside, checked before anything is started."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from stepwell._json import is_text_clean, json_copy
from stepwell.errors import InputTooLargeError, InvalidInputError, NonJsonValueError
from stepwell.flow import BusyPolicy, FlowDefinition
from stepwell.messages import JsonObject, Part, TextPart, UserMessage

__all__ = [
    "Limits",
    "TurnInput",
    "checked_config",
    "checked_key",
    "checked_message",
    "checked_session_id",
    "recovery_of",
    "too_deep",
]

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine accepts from outside.

    Attributes:
        message_bytes: UTF-8 bytes of a message, files included.
        config_bytes: Bytes of a config as JSON.
        depth: Levels of nesting of a config.
        key_length: Characters of an idempotency key.
    """

    message_bytes: int = 1_048_576
    config_bytes: int = 1_048_576
    depth: int = 100
    key_length: int = 255


class TurnInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asked for, checked."""

    definition: FlowDefinition
    message: UserMessage | None
    session_id: str | None
    config: JsonObject | None
    key: str | None
    on_busy: BusyPolicy
    busy_timeout: float
    answer: str | None = None  # nobody says anything: this request is answered, in the inbox
    on_suspended: Literal["error", "abandon"] = "error"
    recovery: bool = False  # see `recovery_of`
    published: str | None = None  # the message is on the session's channel, under this `codec-message-id`
    create: bool = False  # a session that is not there is begun, under that id

    @property
    def digest(self) -> bytes:
        """Tells whether two inputs under one key are the same."""
        content = msgspec.json.encode([self.definition.id, self.message, self.config], order="sorted")
        return hashlib.sha256(content).hexdigest().encode()


def recovery_of(
    definition: FlowDefinition, session: str, on_suspended: Literal["error", "abandon"] = "error"
) -> TurnInput:
    """Nobody says anything: what was left open in a session is finished, and a run that waits is given up or left."""
    return TurnInput(
        definition=definition,
        message=None,
        session_id=session,
        config=None,
        key=None,
        on_busy="reject",
        busy_timeout=0.0,
        on_suspended=on_suspended,
        recovery=True,
    )


def checked_session_id(session_id: str) -> str:
    """Return it.

    Raises:
        InvalidInputError: It is not a session id.
    """
    if not isinstance(session_id, str) or not _SESSION_ID.match(session_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidInputError(
            "A session id has 1 to 128 letters, digits, _ and -: leave it out to start a new session.",
            "/session_id",
        )
    return session_id


def checked_message(message: Any, definition: FlowDefinition, limits: Limits) -> UserMessage | None:
    """What a person says, as a message; `None` where the flow needs none.

    Raises:
        InvalidInputError: It is not acceptable.
    """
    if isinstance(message, str):
        message = UserMessage(content=message) if message.strip() else None
    elif message is not None and not isinstance(message, UserMessage):
        raise InvalidInputError(
            f"A message is text or a UserMessage, not {type(message).__name__}.", "/message", flow=definition.id
        )
    if message is None:
        if definition.cls.requires_user_message:
            raise InvalidInputError(
                f"Flow {definition.id} needs a message: send text that is not blank.",
                "/message",
                flow=definition.id,
            )
        return None
    content = message.content
    if isinstance(content, str) and content.isascii() and len(content) <= limits.message_bytes and content.strip():
        return UserMessage(content=content)  # as nearly all are
    texts = [content] if isinstance(content, str) else [_data(part) for part in content]
    if not message.text.strip() and (isinstance(content, str) or all(isinstance(part, TextPart) for part in content)):
        raise InvalidInputError("The message holds neither text nor a file.", "/message", flow=definition.id)
    size = 0
    for text in texts:
        if not is_text_clean(text):
            raise InvalidInputError(
                "The message holds a lone surrogate: send valid Unicode.", "/message", flow=definition.id
            )
        size += len(text) if text.isascii() else len(text.encode())
    if size > limits.message_bytes:
        raise InputTooLargeError(
            f"The message has {size} bytes, the limit is {limits.message_bytes}: send less, or a link to it.",
            "/message",
            flow=definition.id,
        )
    return UserMessage(content=content)


def _data(part: Part) -> str:
    return part.text if isinstance(part, TextPart) else part.data or part.url or ""


def checked_config(config: Any, limits: Limits) -> JsonObject | None:
    """A copy of a config.

    Raises:
        InvalidInputError: It is not acceptable.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise InvalidInputError(f"A config is a JSON object, not {type(config).__name__}.", "/config")
    if too_deep(config, limits.depth):
        raise InputTooLargeError(f"The config is nested deeper than {limits.depth} levels.", "/config")
    try:
        copied = json_copy(config)
    except NonJsonValueError as error:
        raise InvalidInputError(error.message, "/config/" + error.path.replace(".", "/")) from error
    if (size := len(msgspec.json.encode(copied))) > limits.config_bytes:
        raise InputTooLargeError(f"The config has {size} bytes, the limit is {limits.config_bytes}.", "/config")
    return cast("JsonObject", copied)


def checked_key(key: Any, limits: Limits) -> str | None:
    """An idempotency key.

    Raises:
        InvalidInputError: It is not acceptable.
    """
    if key is None:
        return None
    if not isinstance(key, str) or not key.strip() or len(key) > limits.key_length or not is_text_clean(key):
        raise InvalidInputError(
            f"An idempotency key is text, not blank, at most {limits.key_length} characters.",
            "/idempotency_key",
        )
    return key


def too_deep(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than `levels`, found without recursion."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        layer = [
            item
            for entry in layer
            if isinstance(entry, (Mapping, list, tuple))
            for item in (cast("Any", entry).values() if isinstance(entry, Mapping) else cast("Any", entry))
        ]
        if not layer:
            return False
    return any(isinstance(entry, (Mapping, list, tuple)) for entry in layer)
