"""Catalogue, prices, trips and tables."""

from __future__ import annotations

from datetime import date

import pytest
from hotel import table
from hotel.catalogue import CITIES, HOTELS, hotel
from hotel.pricing import Quote, quote
from hotel.trip import Trip

TODAY = date(2026, 12, 1)
TRIP = Trip(city="Lisbon", arrival=date(2027, 5, 12), departure=date(2027, 5, 15), guests=2)


def test_there_are_sixty_hotels_in_ten_cities() -> None:
    assert len(HOTELS) == len({one.id for one in HOTELS}) == len({one.name for one in HOTELS}) == 60
    assert len(CITIES) == 10
    assert all(1 <= one.stars <= 5 and one.base > 0 and one.amenities for one in HOTELS)


def test_prices_follow_season_weekend_and_guests() -> None:
    aurora = hotel("h01")
    assert quote(aurora, date(2027, 5, 12), date(2027, 5, 15), 2) == Quote(nights=3, rooms=1, total=459)
    assert quote(aurora, date(2027, 5, 12), date(2027, 5, 15), 2).per_night == 153
    weekday, weekend = (quote(aurora, date(2027, 2, d), date(2027, 2, d + 1), 2).total for d in (10, 12))
    assert (weekday, weekend) == (115, 129)
    assert quote(aurora, date(2027, 2, 10), date(2027, 2, 11), 1).total == 92
    assert quote(aurora, date(2027, 2, 10), date(2027, 2, 11), 3) == Quote(1, 2, 230)


def test_a_trip_keeps_what_is_not_said_anew() -> None:
    trip = Trip().changed(city="Lisbon", guests=2, amenities=["pool"]).changed(amenities=["spa", "pool"], city=None)
    assert trip == Trip(city="Lisbon", guests=2, amenities=("pool", "spa"))
    assert trip.changed(["pool", "budget"], budget=5) == Trip(city="Lisbon", guests=2, amenities=("spa",))
    assert TRIP.changed(arrival=date(2027, 6, 1)).departure == date(2027, 6, 4)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"city": "Oslo"}, "no hotel in Oslo"),
        ({"arrival": date(2026, 11, 1), "departure": date(2026, 11, 3)}, "has passed"),
        ({"departure": date(2027, 5, 12)}, "1 to 30 nights"),
        ({"departure": date(2027, 7, 12)}, "1 to 30 nights"),
    ],
)
def test_what_cannot_be(change: dict[str, object], part: str) -> None:
    assert TRIP.problem(TODAY) is None
    assert part in str(TRIP.changed(**change).problem(TODAY))


def test_what_is_missing_is_asked_in_order() -> None:
    trip, asked = Trip(), []
    for step in ({"city": "Lisbon"}, {"arrival": TRIP.arrival}, {"departure": TRIP.departure}, {"guests": 2}):
        asked.append(trip.missing)
        trip = trip.changed(**step)
    assert len(set(asked)) == 4
    assert trip.missing is None
    with pytest.raises(ValueError, match="needs dates"):
        Trip().quote(hotel("h01"))


def test_a_trip_in_words() -> None:
    assert str(Trip()) == "any city"
    assert str(Trip(arrival=date(2027, 5, 1), guests=1)) == "any city, from 1 May 2027, 1 guest"


def test_hotels_that_fit_come_cheapest_first() -> None:
    found = TRIP.changed(budget=180, amenities=["pool"]).hotels()
    assert [one.name for one in found] == ["Oriente Suites", "Casa Aurora", "Belém Garden"]
    assert len(TRIP.hotels(limit=2)) == 2


def test_tables_line_up() -> None:
    lines = table.grid([("a", "bb"), ("ccc", "d")]).splitlines()
    assert lines == ["a    bb", "---  --", "ccc  d"]
    assert "3 nights in 2 rooms" in table.card(TRIP.changed(guests=4), hotel("h01"))
