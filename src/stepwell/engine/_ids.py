"""Ids: UUIDv7 text, so that they sort by time; and the ones that are derived."""

from __future__ import annotations

import hashlib

from uuid_utils import uuid7

__all__ = ["new_id", "session_id_from"]


def new_id() -> str:
    """A new UUIDv7 as text."""
    return str(uuid7())


def session_id_from(flow: str, key: str) -> str:
    """The id of the session that an input without one creates under an idempotency key: the same input, the same id."""
    digest = hashlib.sha256(f"{flow}\x00{key}".encode()).hexdigest()
    return f"k-{digest[:32]}"
