"""The trip a guest has in mind: what is known, what is wrong with it, which hotels fit."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from typing import Any

import msgspec

from .catalogue import CITIES, HOTELS, Amenity, Hotel
from .pricing import Quote, quote


class Trip(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything the guest said so far; a missing value is `None`."""

    city: str | None = None
    arrival: date | None = None
    departure: date | None = None
    guests: int | None = None
    budget: int | None = None
    amenities: tuple[Amenity, ...] = ()

    def changed(self, dropped: Collection[str] | None = None, **given: Any) -> Trip:
        """This trip with every value that is given; wishes add up, and `dropped` ones are forgotten."""
        given = {name: value for name, value in given.items() if value is not None}
        wishes = dict.fromkeys((*self.amenities, *given.get("amenities", ())))
        given["amenities"] = tuple(wish for wish in wishes if wish not in (dropped or ()))
        if "budget" in (dropped or ()):
            given["budget"] = None
        if self.arrival and self.departure and "arrival" in given and "departure" not in given:
            given["departure"] = given["arrival"] + (self.departure - self.arrival)
        return msgspec.structs.replace(self, **given)

    def problem(self, today: date) -> str | None:
        """What cannot be, for the guest to mend."""
        if self.city and self.city not in CITIES:
            return f"We have no hotel in {self.city}; the cities are {', '.join(CITIES)}. Ask for another city."
        if self.arrival and self.arrival < today:
            return "The day of arrival has passed. Ask for another one."
        if self.arrival and self.departure and not 0 < (self.departure - self.arrival).days <= 30:
            return "A stay lasts from 1 to 30 nights. Ask for other days of arrival and departure."
        return None

    @property
    def missing(self) -> str | None:
        """The next thing to ask for."""
        if not self.city:
            return "Which city would you like to stay in?"
        if not self.arrival:
            return "On which days do you arrive and leave?"
        if not self.departure:
            return "Until which day, or for how many nights?"
        if not self.guests:
            return "How many guests are you, and is there a limit to what a night may cost?"
        return None

    def __str__(self) -> str:
        parts = [self.city or "any city"]
        if self.arrival and self.departure:
            parts.append(f"{self.arrival.day} {self.arrival:%B} to {self.departure.day} {self.departure:%B %Y}")
        elif self.arrival:
            parts.append(f"from {self.arrival.day} {self.arrival:%B %Y}")
        if self.guests:
            parts.append("1 guest" if self.guests == 1 else f"{self.guests} guests")
        if self.budget:
            parts.append(f"at most {self.budget} euros a night")
        if self.amenities:
            parts.append("with " + " and ".join(self.amenities))
        return ", ".join(parts)

    def quote(self, hotel: Hotel) -> Quote:
        """What this trip costs in a hotel."""
        if not (self.arrival and self.departure and self.guests):
            raise ValueError("A price needs dates and guests.")
        return quote(hotel, self.arrival, self.departure, self.guests)

    def hotels(self, limit: int = 5) -> list[Hotel]:
        """The hotels that fit, cheapest first."""
        fits = [h for h in HOTELS if h.city == self.city and set(self.amenities) <= set(h.amenities)]
        fits = [h for h in fits if not self.budget or self.quote(h).per_night <= self.budget]
        return sorted(fits, key=lambda h: self.quote(h).total)[:limit]
