"""Serials, versions and cursors: three texts made of a log position and the log's name.

A position is a whole number that grows by one with every mutation of a channel, starting at 1. A message's serial and a
mutation's version hold it padded, so that text order is the order of the log; `:000` to `:999` is the place in one
publish call. A message is found again by the position in its serial, so no backend needs an index over serials. The
log's name (`series`) is drawn when a channel comes into being: a cursor or a serial of a deleted channel of the same
name is told apart.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

from stepwell.errors import InvalidInputError, UnknownMessageError

from ._records import Cursor

__all__ = [
    "MAX_BATCH",
    "cursor_at",
    "cursor_position",
    "new_series",
    "serial_at",
    "serial_position",
    "version_at",
]

MAX_BATCH: Final = 1_000
"""Messages in one publish call: three digits."""

_SERIES_ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"
# At most 18 digits: what is read from a text fits into 64 bits, whoever made it.
_SERIAL: Final = re.compile(r"([0-9]{14,18})-000@([a-z0-9]{10}):([0-9]{3})")
_CURSOR: Final = re.compile(r"([0-9]{1,18})@([a-z0-9]{10})")


def new_series() -> str:
    """Name for a new log: ten letters and digits."""
    return "".join(secrets.choice(_SERIES_ALPHABET) for _ in range(10))


def serial_at(position: int, series: str, index: int = 0) -> str:
    """Serial of the message created at a position, as the `index`-th (from 0) of its publish call."""
    return f"{position - index:014d}-000@{series}:{index:03d}"


def version_at(position: int, series: str) -> str:
    """Version of a change (not a create: its version is the serial) at a position."""
    return f"{position:014d}-000@{series}:000"


def serial_position(serial: str, series: str) -> int:
    """Position at which a message was created.

    Raises:
        UnknownMessageError: It is not a serial of this log.
    """
    found = _SERIAL.fullmatch(serial)
    if found is None or found[2] != series:
        raise UnknownMessageError(
            f"This channel has no message {serial[:80]!r}: use a serial that its publish returned.", serial=serial[:80]
        )
    return int(found[1]) + int(found[3])


def cursor_at(position: int, series: str) -> Cursor:
    """The boundary just after a position; 0 is before everything."""
    return Cursor(f"{position}@{series}")


def cursor_position(cursor: str) -> tuple[int, str]:
    """Position and series of a cursor.

    Raises:
        InvalidInputError: It is not a cursor.
    """
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InvalidInputError(
            f"{cursor[:80]!r} is no cursor: pass the `cursor` of a delivery, or none to begin now.", cursor=cursor[:80]
        )
    return int(found[1]), found[2]
