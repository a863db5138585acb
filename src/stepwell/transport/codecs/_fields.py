"""Values in codec headers: each header is text, and absent where there is no value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stepwell.wire import Headers

__all__ = ["Field", "choice", "flag", "json_value", "text"]

ABSENT: Any = object()


@dataclass(frozen=True, slots=True)
class Field:
    """One header.

    Attributes:
        name: Of the header and of the event's key.
        encode: Value to text.
        decode: Text to value.
        default: What an absent header reads as; nothing at all by default.
    """

    name: str
    encode: Callable[[Any], str]
    decode: Callable[[str], Any]
    default: Any = ABSENT

    def write(self, event: Mapping[str, Any], headers: dict[str, str]) -> None:
        """Put the event's value into the headers, if it has one."""
        value = event.get(self.name)
        if value is not None:
            headers[self.name] = self.encode(value)

    def read(self, headers: Headers, event: dict[str, Any]) -> None:
        """Put the header's value into the event, if there is one."""
        given = headers.get(self.name)
        value = self.default if given is None else self.decode(given)
        if value is ABSENT:
            value = self.default
        if value is not ABSENT:
            event[self.name] = value


def text(name: str, default: Any = ABSENT) -> Field:
    """Text as it is."""
    return Field(name, str, str, default)


def flag(name: str, default: Any = ABSENT) -> Field:
    """`true` or `false`."""
    return Field(name, lambda value: "true" if value else "false", lambda given: given == "true", default)


def json_value(name: str) -> Field:
    """A value as JSON text; text that is not JSON reads as absent."""
    return Field(name, lambda value: msgspec.json.encode(value).decode(), _json)


def choice(name: str, values: Sequence[str], default: str) -> Field:
    """One of several; anything else reads as the default."""
    return Field(name, str, lambda given: given if given in values else default, default)


def _json(given: str) -> Any:
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError:
        return ABSENT
