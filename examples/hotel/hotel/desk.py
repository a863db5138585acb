"""The hotels' own system: what is booked there stays booked, whatever becomes of the process that asked for it."""

from __future__ import annotations

BOOKED: dict[str, str] = {}
"""References, by the key of the call that asked. A real one is on the other side of a network."""


def book(key: str, reference: str) -> None:
    """Book. Asked twice under one key, it books once: so a call that broke off may be repeated."""
    BOOKED.setdefault(key, reference)
