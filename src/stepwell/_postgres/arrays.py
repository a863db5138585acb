"""Columns of a write as PostgreSQL's binary arrays.

psycopg's own lists take the type of what is in them (small numbers are another type than large ones, and a column of
nulls has none), so that nearly every write would be another statement to prepare.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import psycopg
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper

__all__ = ["ADAPTERS", "Blobs", "Booleans", "Numbers", "Texts"]

_HEAD: Final = Struct(">iiIii").pack  # dimensions, whether there are nulls, type, length, first index
_LENGTH: Final = Struct(">i").pack
_NUMBER: Final = Struct(">iq").pack
_NULL: Final = _LENGTH(-1)
_FALSE, _TRUE = _LENGTH(1) + b"\0", _LENGTH(1) + b"\1"


class Numbers(list[Any]):
    """A `bigint[]`."""


class Texts(list[Any]):
    """A `text[]`, of what is ASCII."""


class Blobs(list[Any]):
    """A `bytea[]`."""


class Booleans(list[Any]):
    """A `boolean[]`, without nulls."""


class _NumbersDumper(Dumper):
    format = Format.BINARY
    oid = 1016

    def dump(self, obj: Sequence[int | None]) -> Buffer | None:
        return _HEAD(1, 1, 20, len(obj), 1) + b"".join(
            [_NULL if number is None else _NUMBER(8, number) for number in obj]
        )


class _BlobsDumper(Dumper):
    format = Format.BINARY
    oid = 1001

    def dump(self, obj: Sequence[bytes | None]) -> Buffer | None:
        return _HEAD(1, 1, 17, len(obj), 1) + _join(obj)


class _TextsDumper(Dumper):
    format = Format.BINARY
    oid = 1009

    def dump(self, obj: Sequence[str | None]) -> Buffer | None:
        return _HEAD(1, 1, 25, len(obj), 1) + _join([None if text is None else text.encode() for text in obj])


def _join(items: Sequence[bytes | None]) -> bytes:
    parts: list[bytes] = []
    for item in items:
        if item is None:
            parts.append(_NULL)
        else:
            parts.append(_LENGTH(len(item)))
            parts.append(item)
    return b"".join(parts)


class _BooleansDumper(Dumper):
    format = Format.BINARY
    oid = 1000

    def dump(self, obj: Sequence[bool]) -> Buffer | None:
        return _HEAD(1, 0, 16, len(obj), 1) + b"".join([_TRUE if value else _FALSE for value in obj])


def _adapters() -> AdaptersMap:
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(Numbers, _NumbersDumper)
    adapters.register_dumper(Texts, _TextsDumper)
    adapters.register_dumper(Blobs, _BlobsDumper)
    adapters.register_dumper(Booleans, _BooleansDumper)
    return adapters


class _Context:
    """What `psycopg.connect` takes."""

    adapters = _adapters()
    connection = None


ADAPTERS: Final[AdaptContext] = _Context()
"""Of a connection that is to know these, and for which every number is a `bigint`."""
