"""The stages. Each decides in code what comes next; the model only talks and passes on what was said."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import Annotated, Literal

import msgspec
from pydantic import Field

from stepwell import Outcome, Step, TerminateSessionStep, ToolContext, direct, direct_to, finish, go, stay, tool

from . import desk, prompts, table
from .catalogue import CITIES, Amenity, Hotel, hotel
from .trip import Trip

City = Annotated[str, Field(description="city to stay in", examples=list(CITIES))]
SYNONYMS = (
    "pool = swimming pool, swim; gym = fitness, workout; spa = sauna, wellness; pets = dog, cat; parking = garage; "
    "air conditioning = ac, aircon; sea view = ocean view; family rooms = children, kids, family; budget = limit"
)
Wishes = Annotated[list[Amenity], Field(description=f"what the hotel must have; {SYNONYMS}")]
Dropped = Annotated[
    list[Amenity | Literal["budget"]], Field(description=f"wishes to drop, that the guest can do without; {SYNONYMS}")
]
Choice = Annotated[str, Field(description='number in the list, name of the hotel, or "cheapest"')]
Choices = Annotated[list[Choice], Field(description="which hotels of the list to compare", min_length=2, max_length=4)]


class DeskStep(Step):
    """What the guest may do in every stage: change the trip, see the list, leave."""

    @property
    def trip(self) -> Trip:
        return self.flow.get_step_state(ExploreStep, "trip", type_=Trip, default=Trip())

    @property
    def today(self) -> date:
        return date.fromisoformat(self.get_context("config.today") or f"{datetime.now(UTC):%Y-%m-%d}")

    @tool
    async def plan_trip(
        self,
        city: City | None = None,
        arrival: Annotated[date | None, Field(description="day of arrival")] = None,
        departure: Annotated[date | None, Field(description="day of departure")] = None,
        guests: Annotated[int | None, Field(description="number of guests", ge=1, le=8)] = None,
        budget: Annotated[int | None, Field(description="most that a night may cost, in euros", gt=0)] = None,
        amenities: Wishes | None = None,
        dropped: Dropped | None = None,
    ) -> Outcome:
        """Note the guest's wishes: city, dates, guests, budget, amenities."""
        given = {"city": city, "arrival": arrival, "departure": departure, "guests": guests, "budget": budget}
        trip = self.trip.changed(dropped, amenities=amenities, **given)
        if problem := trip.problem(self.today):
            return stay(problem)
        self.flow.save_step_state(ExploreStep, {"trip": msgspec.to_builtins(trip)})
        noted = f"Noted: {trip}."
        return stay(noted) if isinstance(self, ExploreStep) else go(ExploreStep).with_tool_feedback(noted)

    @tool
    async def show_hotels(self) -> Outcome:
        """Show the hotels that fit ("show me", "what do you have", "the list", "results", "see the hotels", "back")."""
        trip = self.trip
        if trip.missing:
            return stay(f"That takes a little more. {trip.missing}")
        if not (found := trip.hotels()):
            return stay(f"No hotel fits: {trip}. Ask which of the wishes to drop.")
        shown = [one.id for one in found]
        return direct_to(PresentStep, table.results(trip, found)).with_state({"shown": shown})

    @tool
    async def start_over(self) -> Outcome:
        """Forget the trip and begin again ("start over", "start again", "new search", "forget everything")."""
        self.flow.save_step_state(ExploreStep, {"trip": {}})
        return stay("All forgotten.") if isinstance(self, ExploreStep) else go(ExploreStep)

    @tool
    async def say_goodbye(self) -> Outcome:
        """Say goodbye ("goodbye", "bye", "good bye", "that is all", "that's all", "see you")."""
        name = self.flow.get_step_state(BookStep, "name")
        if not self.flow.get_step_state(BookStep, "reference"):
            return go(TerminateSessionStep)
        return finish(f"Goodbye, {name}. Have a good time in {self.trip.city}!")


class ExploreStep(DeskStep):
    """Find out where, when, for how many and for how much."""

    def get_prompt(self) -> str:
        return prompts.explore(self.trip, self.today)


class ListStep(DeskStep):
    """A list of hotels is on the screen, and the guest may point at it."""

    @property
    def shown(self) -> list[Hotel]:
        return [hotel(one) for one in self.flow.get_step_state(PresentStep, "shown", default=[])]

    def find(self, choice: str) -> Hotel | None:
        """The hotel of the list that the guest means."""
        said = choice.strip().casefold()
        if said.isdigit():
            return self.shown[int(said) - 1] if 0 < int(said) <= len(self.shown) else None
        if said == "cheapest":
            return min(self.shown, key=lambda one: self.trip.quote(one).total)
        return next((one for one in self.shown if said in one.name.casefold()), None)

    def unknown(self, choice: str) -> Outcome:
        return stay(f"{choice!r} is not in the list. Ask which hotel of the list is meant.")

    def get_prompt(self) -> str:
        return prompts.present(self.trip, self.today, self.shown)

    @tool
    async def show_details(self, hotel: Choice) -> Outcome:
        """Tell more about one hotel ("tell me more", "details of", "what about")."""
        one = self.find(hotel)
        return direct(f"{table.card(self.trip, one)}\n\nDo you want to take it?") if one else self.unknown(hotel)

    @tool
    async def compare_hotels(self, hotels: Choices) -> Outcome:
        """Compare hotels side by side ("compare", "difference between", "versus")."""
        found = [(choice, self.find(choice)) for choice in hotels]
        for choice, one in found:
            if one is None:
                return self.unknown(choice)
        return direct_to(CompareStep, table.comparison(self.trip, [one for _, one in found if one]))

    @tool
    async def choose_hotel(self, hotel: Choice) -> Outcome:
        """Take the guest's choice ("I take", "I'll take", "I choose", "I want", "book", "reserve", "go for")."""
        one = self.find(hotel)
        return go(BookStep).with_state({"hotel": one.id, "reference": None}) if one else self.unknown(hotel)


class PresentStep(ListStep):
    """The results are on the screen."""


class CompareStep(ListStep):
    """Two or more hotels are on the screen side by side."""


class BookStep(DeskStep):
    """Take the contact, then the guest's yes; code books."""

    def get_prompt(self) -> str:
        chosen = hotel(self.get_state("hotel"))
        contact = self.get_state("email") and f"{self.get_state('name')}, {self.get_state('email')}"
        total = self.trip.quote(chosen).total
        return prompts.book(self.trip, self.today, chosen, total, contact, self.get_state("reference"))

    @tool
    async def give_contact(
        self,
        name: Annotated[str, Field(description="the guest's full name")],
        email: Annotated[str, Field(description="the guest's e-mail address")],
    ) -> Outcome:
        """Note the guest's name and e-mail address."""
        if not re.fullmatch(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)+", email):
            return stay(f"{email!r} is not an e-mail address: it looks like name@example.org. Ask for it again.")
        if len(name.split()) < 2:
            return stay("A booking needs first and last name. Ask for the guest's full name.")
        self.save_state({"name": name, "email": email})
        return stay(f"Noted: {name}, {email}.")

    @tool(effect=True, on_unknown="retry")
    async def confirm_booking(self, ctx: ToolContext) -> Outcome:
        """Book the hotel ("book it", "confirm", "yes please")."""
        if not self.get_state("email"):
            return stay("Name and e-mail address are missing. Ask for both.")
        chosen = hotel(self.get_state("hotel"))
        reference = f"SW-{chosen.id.upper()}-{self.trip.arrival:%m%d}"
        desk.book(ctx.idempotency_key, reference)
        self.save_state({"reference": reference})
        sent = f"Booked under {reference}. The confirmation goes to {self.get_state('email')}."
        return direct(f"{table.card(self.trip, chosen)}\n\n{sent} Is there anything else?")
