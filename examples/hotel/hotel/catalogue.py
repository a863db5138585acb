"""The data: sixty hotels in ten cities, and what a guest may wish for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

Amenity = Literal[
    "breakfast", "pool", "parking", "gym", "spa", "pets", "bar", "air conditioning", "sea view", "family rooms"
]


class Hotel(msgspec.Struct, frozen=True):
    """One hotel; `base` is the price of a double room for one night in low season, in euros."""

    id: str
    name: str
    city: str
    district: str
    stars: int
    base: int
    amenities: tuple[Amenity, ...]


HOTELS = msgspec.json.decode(Path(__file__).with_name("catalogue.json").read_bytes(), type=tuple[Hotel, ...])
CITIES = tuple(dict.fromkeys(hotel.city for hotel in HOTELS))


@cache
def hotel(hotel_id: str) -> Hotel:
    """The hotel with this id."""
    return next(one for one in HOTELS if one.id == hotel_id)
