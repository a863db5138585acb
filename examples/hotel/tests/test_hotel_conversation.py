"""The reservation in fourteen turns: with a scripted model, and by free typing on the offline model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hotel import HotelFlow

from stepwell import Engine, TurnResult
from stepwell.messages import DirectMessage, ToolResult
from stepwell.models.offline import OfflineModel
from stepwell.testing import Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

CONVERSATION = Path(__file__).parents[1].joinpath("conversation.txt").read_text(encoding="utf-8").splitlines()
CONFIG = {"today": "2026-12-01"}

call = Reply.tool_call

SCRIPT: list[Any] = [
    "Welcome! Which city would you like to stay in?",
    call("plan_trip", {"city": "Lisbon"}),
    "Lisbon it is. When?",
    call("plan_trip", {"arrival": "2027-05-12", "departure": "2027-05-15"}),
    "How many are you, and what may it cost?",
    call("plan_trip", {"guests": 2, "budget": 180}),
    "Anything the hotel must have?",
    call("plan_trip", {"amenities": ["pool", "breakfast"]}),
    "Shall I show what fits?",
    call("show_hotels"),
    call("compare_hotels", {"hotels": ["1", "3"]}),
    call("show_details", {"hotel": "Casa Aurora"}),
    call("plan_trip", {"arrival": "2027-05-19", "departure": "2027-05-23"}),
    "The dates are changed. Shall I show the hotels again?",
    call("show_hotels"),
    call("choose_hotel", {"hotel": "2"}),
    "Your name and e-mail address, please?",
    call("give_contact", {"name": "Ada Lovelace", "email": "ada at example dot org"}),
    call("give_contact", {"name": "Ada Lovelace", "email": "ada@example.org"}),
    "Shall I book Casa Aurora for 624 euros?",
    call("confirm_booking"),
    call("say_goodbye"),
]

STAGES = [
    *["ExploreStep"] * 5,
    "PresentStep",
    *["CompareStep"] * 2,
    "ExploreStep",
    "PresentStep",
    *["BookStep"] * 4,
]
"""Where the cursor is after each turn."""


async def typed(lines: Sequence[str], **config: Any) -> list[TurnResult]:
    """Type lines into a new session on the offline model."""
    results: list[TurnResult] = []
    async with Engine([HotelFlow], models={"offline": OfflineModel()}) as engine:
        for line in lines:
            session = results[-1].session_id if results else None
            given = {**CONFIG, **config} if session is None else None
            results.append(await engine.run_or_raise("HotelFlow", line, session_id=session, config=given))
    return results


def check_the_fourteen_turns(results: Sequence[TurnResult]) -> None:
    assert len(results) == len(CONVERSATION) == 14
    assert [result.current for result in results] == STAGES
    assert [result.completed for result in results] == [False] * 13 + [True]
    table, comparison, details = (str(results[turn].message) for turn in (5, 6, 7))
    assert "1  Oriente Suites" in table
    assert "2  Casa Aurora" in table
    assert "Belém Garden" in comparison
    assert details.startswith("Casa Aurora ****\nAlfama, Lisbon")
    assert "19 May to 23 May 2027" in str(results[9].message)
    assert "Booked under SW-H01-0519" in str(results[12].message)
    assert results[13].message == "Goodbye, Ada Lovelace. Have a good time in Lisbon!"


async def test_fourteen_turns_with_a_scripted_model() -> None:
    async with TurnHarness(HotelFlow, model=ScriptedModel(SCRIPT)) as h:
        for line in CONVERSATION:
            await h.say(line, config=CONFIG if h.session_id is None else None)
        check_the_fourteen_turns(h.results)
        booking = await h.state("BookStep")
        assert booking == {
            "hotel": "h01",
            "name": "Ada Lovelace",
            "email": "ada@example.org",
            "reference": "SW-H01-0519",
        }
        assert (await h.state("ExploreStep"))["trip"]["arrival"] == "2027-05-19"
        contacts = [m for m in await h.history("booking") if isinstance(m, ToolResult) and m.name == "give_contact"]
        assert "is not an e-mail address" in contacts[0].content
        assert contacts[1].content == "Noted: Ada Lovelace, ada@example.org."
        tables = [m for m in await h.history("search") if isinstance(m, DirectMessage)]
        assert len(tables) == 4


async def test_fourteen_turns_by_free_typing_on_the_offline_model() -> None:
    results = await typed(CONVERSATION)
    check_the_fourteen_turns(results)
    assert "Which city would you like to stay in?" in str(results[0].message)
    assert results[11].message == "Noted: Ada Lovelace, ada@example.org. Shall I book Casa Aurora for 624 € now?"


async def test_everything_in_one_message() -> None:
    results = await typed(
        ["Two people in Barcelona from 3 to 7 June, under 250 euros, with a gym", "ok", "book the cheapest"]
    )
    assert "Noted: Barcelona, 3 June to 7 June 2027, 2 guests, at most 250 euros a night, with gym." in str(
        results[0].message
    )
    assert [result.current for result in results] == ["ExploreStep", "PresentStep", "BookStep"]


async def test_questions_small_talk_and_wrong_input() -> None:
    lines = [
        "which cities do you have?",
        "to Oslo please",
        "Porto",
        "yesterday I was ill",
        "1 to 60 July",
        "2 July to 5 August",
    ]
    replies = [str(result.message) for result in await typed(lines)]
    assert "Lisbon, Porto" in replies[0]
    assert replies[1].startswith("We have no hotel in Oslo")
    assert replies[2] == "Noted: Porto. On which days do you arrive and leave?"
    assert replies[3].startswith("Sorry, I did not get that.")
    assert replies[4].endswith("Until which day, or for how many nights?")
    assert replies[5].startswith("A stay lasts from 1 to 30 nights.")


TRIP = "two guests in Lisbon from 12 to 15 May"


async def test_what_is_not_in_the_list_is_not_chosen() -> None:
    lines = [TRIP, "show me", "tell me more about the 9th", "compare the 1st and the 8th", "I take number 7"]
    replies = [str(result.message) for result in await typed(lines)]
    assert all("is not in the list" in reply for reply in replies[2:])


async def test_the_cheapest_and_it() -> None:
    results = await typed([TRIP, "show me", "tell me more about the cheapest", "yes"])
    assert str(results[2].message).startswith("Pensão Rosa **")
    assert results[3].current == "BookStep"


async def test_a_guest_may_change_their_mind_at_the_last_moment() -> None:
    lines = [
        TRIP,
        "show me",
        "I take the first",
        "Ada",
        "ada@example.org",
        "Ada Lovelace",
        "no",
        "show me the list again",
    ]
    results = await typed(lines)
    replies = [str(result.message) for result in results]
    assert replies[4].startswith("A booking needs first and last name.")
    assert replies[5].endswith("now?")
    assert replies[6] == "All right. What would you like instead?"
    assert results[7].current == "PresentStep"


async def test_nothing_is_booked_without_name_and_address() -> None:
    script = [
        call("plan_trip", {"city": "Lisbon", "arrival": "2027-05-12", "departure": "2027-05-15", "guests": 2}),
        call("show_hotels"),
        call("choose_hotel", {"hotel": "1"}),
        call("confirm_booking"),
        "I need your name first.",
    ]
    async with TurnHarness(HotelFlow, model=ScriptedModel(script)) as h:
        await h.say("Lisbon, the first hotel, at once", config=CONFIG)
        await h.say("take the first")
        assert (await h.state("BookStep"))["reference"] is None
        refused = [m for m in await h.history("booking") if isinstance(m, ToolResult)]
        assert refused[-1].content == "Name and e-mail address are missing. Ask for both."


async def test_impossible_wishes_are_explained() -> None:
    lines = ["one guest in Porto from 1 to 3 May under 20 euros with a spa", "show me", "the spa", "no limit", "yes"]
    replies = [str(result.message) for result in await typed(lines)]
    assert replies[1].startswith("No hotel fits: Porto")
    assert replies[1].endswith("Could you tell me which of the wishes to drop?")
    assert "spa" not in replies[2]
    assert "20 euros" not in replies[3]
    assert "Ribeira Rooms" in replies[4]


async def test_a_trip_can_be_forgotten() -> None:
    replies = [str(result.message) for result in await typed([TRIP, "start over", "show hotels"])]
    assert replies[1].startswith("All forgotten.")
    assert replies[2].startswith("That takes a little more. Which city")


async def test_start_over_and_goodbye_from_the_list() -> None:
    results = await typed([TRIP, "show me", "start over", "bye"])
    assert [result.current for result in results][2:] == ["ExploreStep", "TerminateSessionStep"]
    assert results[-1].completed


async def test_the_real_day_is_used_without_configuration() -> None:
    async with Engine([HotelFlow], models={"offline": OfflineModel()}) as engine:
        result = await engine.run_or_raise("HotelFlow", "tomorrow for 2 nights in Rome")
    assert str(result.message).startswith("Noted: Rome, ")
