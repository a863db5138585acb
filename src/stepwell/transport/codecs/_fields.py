"""Values in codec headers: each header is text, and absent where there is no value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stepwell.errors import MisuseError
from stepwell.wire import Headers

__all__ = ["Field", "choice_field", "flag_field", "json_field", "text_field"]

ABSENT: Any = object()
"""What a header reads as that is not there, or cannot be read."""


@dataclass(frozen=True, slots=True)
class Field:
    """One header.

    Attributes:
        name: Of the header and of the event's key.
        encode: Value to text; raises TypeError or ValueError for what it cannot write.
        decode: Text to value.
        default: What an absent header reads as; nothing at all by default.
    """

    name: str
    encode: Callable[[Any], str]
    decode: Callable[[str], Any]
    default: Any = ABSENT

    def write(self, event: Mapping[str, Any], headers: dict[str, str]) -> None:
        """Put the event's value into the headers, if it has one; None is none.

        Raises:
            MisuseError: It is of another type than the field's.
        """
        value = event.get(self.name)
        if value is not None:
            try:
                headers[self.name] = self.encode(value)
            except (TypeError, ValueError) as error:
                raise MisuseError(f"The field {self.name!r} cannot be written: {error}.") from None

    def read(self, headers: Headers, event: dict[str, Any]) -> None:
        """Put the header's value into the event, if there is one."""
        given = headers.get(self.name)
        value = ABSENT if given is None else self.decode(given)
        if value is ABSENT:
            value = self.default
        if value is not ABSENT:
            event[self.name] = value


def text_field(name: str, default: Any = ABSENT) -> Field:
    """Text as it is."""
    return Field(name, _is_text, str, default)


def flag_field(name: str, default: Any = ABSENT) -> Field:
    """`true` or `false`; any other text reads as false."""
    return Field(name, _write_flag, lambda given: given == "true", default)


def json_field(name: str) -> Field:
    """A value as JSON text; text that is not JSON reads as absent."""
    return Field(name, lambda value: msgspec.json.encode(value).decode(), _read_json)


def choice_field(name: str, values: Sequence[str], default: str) -> Field:
    """One of several; anything else reads as the default."""
    return Field(name, _is_text, lambda given: given if given in values else default, default)


def _is_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"it is text, not a {type(value).__name__}")
    return value


def _write_flag(value: Any) -> str:
    if not isinstance(value, bool):
        raise TypeError(f"it is a bool, not a {type(value).__name__}")
    return "true" if value else "false"


def _read_json(given: str) -> Any:
    try:
        return msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):
        return ABSENT
