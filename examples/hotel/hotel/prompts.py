"""What the model is told, stage by stage. Everything that must be right is put in by code."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from .catalogue import CITIES, Hotel
from .trip import Trip

DESK = """\
You are the reservation desk of Stepwell Travel. Be brief and friendly. Hotels, prices and availability come from the
tools alone: never make one up. Today is {today}.
Trip so far: {trip}."""


def explore(trip: Trip, today: date) -> str:
    """Find out what the guest wants."""
    last = "Shall I show the hotels that fit?"
    if not trip.amenities:
        last = (
            "Is there anything the hotel must have, such as breakfast or a pool? Or shall I show the hotels that fit?"
        )
    return f"""{DESK.format(today=today, trip=trip)}
Pass on what the guest says about the trip with plan_trip, several things at once if they come at once. When the guest
wants to see hotels, call show_hotels.
Greeting: Hello, and welcome to Stepwell Travel! I book hotels in {", ".join(CITIES[:-1])} and {CITIES[-1]}.
Ask next: {trip.missing or last}"""


def present(trip: Trip, today: date, shown: Sequence[Hotel]) -> str:
    """Talk about the hotels in the list."""
    listed = "\n".join(f"{number}. {one.name}" for number, one in enumerate(shown, 1))
    return f"""{DESK.format(today=today, trip=trip)}
The guest sees this list:
{listed}
Compare hotels, give details, or take the guest's choice, each with its tool. New wishes go to plan_trip.
Ask next: Shall I compare two of them, tell you more about one, or do you want to take one?"""


def book(trip: Trip, today: date, hotel: Hotel, total: int, contact: str | None, reference: str | None) -> str:
    """Take name and address, then the guest's yes."""
    ask = "Under which name shall I book, and to which e-mail address may the confirmation go?"
    if reference:
        ask = "Is there anything else I can do for you?"
    elif contact:
        ask = f"Shall I book {hotel.name} for {total} € now?"
    return f"""{DESK.format(today=today, trip=trip)}
The guest chose {hotel.name} for {total} €. Contact: {contact or "not known yet"}. Booking: {reference or "not yet"}.
Only confirm_booking books, and only after the guest said yes.
Greeting: A good choice!
Ask next: {ask}"""
