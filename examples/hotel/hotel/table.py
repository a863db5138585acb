"""What the guest sees: plain text tables, drawn by code."""

from __future__ import annotations

from collections.abc import Sequence

from .catalogue import Hotel
from .trip import Trip


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, a rule under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def results(trip: Trip, hotels: Sequence[Hotel]) -> str:
    """The hotels that fit."""
    rows = [("#", "Hotel", "District", "Stars", "A night", "In all", "Has")]
    for number, one in enumerate(hotels, 1):
        price = trip.quote(one)
        has = ", ".join(one.amenities)
        rows.append(
            (str(number), one.name, one.district, "*" * one.stars, f"{price.per_night} €", f"{price.total} €", has)
        )
    return (
        f"{trip}:\n\n{grid(rows)}\n\nShall I compare two of them, tell you more about one, or do you want to take one?"
    )


def comparison(trip: Trip, hotels: Sequence[Hotel]) -> str:
    """Hotels side by side."""
    wishes = dict.fromkeys(wish for one in hotels for wish in one.amenities)
    rows = [
        ("", *(one.name for one in hotels)),
        ("District", *(one.district for one in hotels)),
        ("Stars", *("*" * one.stars for one in hotels)),
        ("A night", *(f"{trip.quote(one).per_night} €" for one in hotels)),
        ("In all", *(f"{trip.quote(one).total} €" for one in hotels)),
        *((wish.capitalize(), *("yes" if wish in one.amenities else "-" for one in hotels)) for wish in wishes),
    ]
    return f"{grid(rows)}\n\nDo you want to take one of them, or know more about one?"


def card(trip: Trip, one: Hotel) -> str:
    """One hotel in full."""
    price = trip.quote(one)
    rooms = "one room" if price.rooms == 1 else f"{price.rooms} rooms"
    return (
        f"{one.name} {'*' * one.stars}\n"
        f"{one.district}, {one.city}\n"
        f"It has {', '.join(one.amenities)}.\n"
        f"{price.nights} nights in {rooms}: {price.total} €, that is {price.per_night} € a night."
    )
