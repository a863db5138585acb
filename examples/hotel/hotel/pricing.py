"""Prices: always the same for the same hotel, dates and guests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta

from .catalogue import Hotel

SEASON = {1: 85, 2: 90, 3: 100, 4: 110, 5: 115, 6: 125, 7: 140, 8: 140, 9: 120, 10: 105, 11: 90, 12: 110}
"""Per cent of the base price, by month."""

WEEKEND = 112
"""Per cent of the day's price, on Friday and Saturday nights."""


@dataclass(frozen=True)
class Quote:
    """What a stay costs, in whole euros."""

    nights: int
    rooms: int
    total: int

    @property
    def per_night(self) -> int:
        """Average of a night, all rooms."""
        return -(-self.total // self.nights)


def quote(hotel: Hotel, arrival: date, departure: date, guests: int) -> Quote:
    """Price a stay: double rooms, a single guest pays four fifths of one."""
    nights = (departure - arrival).days
    rooms = -(-guests // 2)
    total = 0
    for day in (arrival + timedelta(n) for n in range(nights)):
        price = hotel.base * SEASON[day.month]
        total += price * WEEKEND // 100 if day.weekday() in (4, 5) else price
    return Quote(nights, rooms, total * (80 if guests == 1 else 100 * rooms) // 10_000)
