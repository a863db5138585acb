"""What the offline model reads in a text."""

from __future__ import annotations

import re
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.models._offline.language import (
    Reading,
    content_stems,
    find_dates,
    find_nights,
    says_no,
    says_yes,
    sentences,
    stem,
)

TODAY = date(2026, 11, 30)  # a Monday


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("12 to 15 May", "2027-05-12", "2027-05-15"),
        ("from 12th of May until the 15th", "2027-05-12", "2027-05-15"),
        ("May 12 - 15, 2028", "2028-05-12", "2028-05-15"),
        ("12 \u2013 15 May 2027", "2027-05-12", "2027-05-15"),
        ("between 3 and 5 June", "2027-06-03", "2027-06-05"),
        ("2027-05-12 to 2027-05-15", "2027-05-12", "2027-05-15"),
        ("28 December to 3 January", "2026-12-28", "2027-01-03"),
        ("Dec 28 - Jan 3", "2026-12-28", "2027-01-03"),
        ("from the 12th to the 15th", "2026-12-12", "2026-12-15"),
        ("from the 30th to the 2nd", "2026-11-30", "2026-12-02"),
        ("12 May to the 15th", "2027-05-12", "2027-05-15"),
        ("28 May until 2", "2027-05-28", "2027-06-02"),
        ("this weekend", "2026-12-05", "2026-12-06"),
        ("next weekend", "2026-12-12", "2026-12-13"),
        ("12/05/2027", "2027-05-12", None),
        ("05/31/2027", "2027-05-31", None),
        ("3.4.27", "2027-04-03", None),
        ("1 to 90 July", "2027-07-01", None),
        ("July 9 to 3", "2027-07-09", None),
        ("tomorrow", "2026-12-01", None),
        ("tonight", "2026-11-30", None),
        ("the day after tomorrow", "2026-12-02", None),
        ("next friday", "2026-12-04", None),
        ("on Monday", "2026-12-07", None),
        ("in two weeks", "2026-12-14", None),
        ("in 3 days", "2026-12-03", None),
        ("in a month", "2026-12-30", None),
        ("next week", "2026-12-07", None),
        ("this week", "2026-11-30", None),
        ("next month", "2026-12-01", None),
        ("this month", "2026-11-30", None),
        ("30 Nov", "2026-11-30", None),
        ("the 1st of March", "2027-03-01", None),
    ],
)
def test_dates_are_read_in_many_forms(text: str, first: str, last: str | None) -> None:
    (found,) = find_dates(text, TODAY)
    assert (found.first.isoformat(), found.last and found.last.isoformat()) == (first, last)


@pytest.mark.parametrize("text", ["30 February", "February 30 to 31", "31 to 32 April", "2027-13-01", "May", "room 12"])
def test_days_that_do_not_exist_are_no_dates(text: str) -> None:
    assert find_dates(text, TODAY) == []


def test_a_date_of_birth_without_a_year_lies_behind() -> None:
    assert [d.first.isoformat() for d in find_dates("3 May; 3 December", TODAY, past=True)] == [
        "2026-05-03",
        "2025-12-03",
    ]
    assert find_dates("7.8.99", TODAY, past=True)[0].first == date(1999, 8, 7)


def test_months_are_shifted_to_days_that_exist() -> None:
    assert find_dates("in 3 months", date(2026, 11, 30))[0].first == date(2027, 2, 28)


def test_words_before_a_date_say_that_something_ends() -> None:
    assert find_dates("I leave on 5 May", TODAY)[0].ends
    assert not find_dates("I arrive on 5 May", TODAY)[0].ends


def test_a_date_too_far_away_is_none() -> None:
    assert find_dates("1 January", date.max) == []
    assert find_dates("tomorrow", date.max)[0].first == date.max
    assert find_dates("29 February", date(2027, 3, 1)) == []


@pytest.mark.parametrize(
    ("text", "nights"),
    [
        ("for 3 nights", 3),
        ("two weeks", 14),
        ("a week", 7),
        ("a weekend", 2),
        ("a fortnight", 14),
        ("for a night", 1),
        ("150 euros a night", None),
        ("in two weeks", None),
    ],
)
def test_lengths_of_stay(text: str, nights: int | None) -> None:
    found = find_nights(text)
    assert (found and found[0]) == nights


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("two guests, under 150 euros", [2, 150]),
        ("1,200.50 or 1.200,50 or 12,5", [1200.5, 1200.5, 12.5]),
        ("twenty-five people", [25]),
        ("two hundred and fifty dollars", [250]),
        ("a thousand", [1000]),
        ("a couple of rooms, a dozen eggs, half a dozen chairs", [2, 12, 6]),
        ("the second one, this one", []),
        ("1.2.3.4", []),
        ("in 2nd place", []),
        ("9999999999999999999", []),
        ("ada7@example.org on 12 May", []),
    ],
)
def test_numbers(text: str, values: list[float]) -> None:
    assert [number.value for number in Reading(text, TODAY).numbers] == values


def test_numbers_know_what_stands_around_them() -> None:
    two, budget = Reading("two guests, at most \u20ac180", TODAY).numbers
    assert (two.after, two.money, two.bound) == ("guest", False, "")
    assert (budget.money, budget.bound) == (True, "max")
    assert Reading("at least 3", TODAY).numbers[0].bound == "min"


def test_positions_and_addresses() -> None:
    reading = Reading("the second one, #3, the 4th or number 5; ada at example dot org, bob@example.org.", TODAY)
    assert [position.value for position in reading.positions] == [2, 3, 4, 5]
    assert [mail.readings for mail in reading.emails] == [
        ("bob@example.org",),
        ("ada at example dot org", "ada@example.org"),
    ]
    assert Reading("call +49 30 123456", TODAY).phone == ("+49 30 123456", (5, 18))
    assert Reading("call me", TODAY).phone is None


def test_yes_no_words_and_sentences() -> None:
    assert says_yes("Sure, go on")
    assert says_yes("that\u2019s right")
    assert not says_yes("yesterday")
    assert says_no("don\u2019t")
    assert not says_no("nothing else")
    assert stem("Cities") == stem("city")
    assert stem("comparing") == stem("compare")
    assert content_stems("showHotels and_details") == ["show", "hotel", "detail"]
    assert sentences("One. Two?\nThree") == ["One.", "Two?", "Three"]


@settings(deadline=None)
@given(st.text(), st.dates())
def test_any_text_can_be_read_on_any_day(text: str, today: date) -> None:
    reading = Reading(text, today)
    for found in (reading.ahead, reading.behind, reading.numbers, reading.positions, reading.emails, reading.tokens):
        assert isinstance(found, list)
    assert reading.nights is None or reading.nights[0] >= 0


PIECES = re.findall(
    r"\S+",
    "12 31 0 99 1st 30th of May February next this weekend friday in a two weeks month tomorrow until to and - , . "
    "2027 29 \u20ac a@b dot at the second one hundred thousand day after",
)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES)).map(" ".join),
    st.one_of(st.dates(), st.just(date.max), st.just(date.min), st.just(date(2028, 2, 29))),
)
def test_any_pile_of_date_words_can_be_read_on_any_day(text: str, today: date) -> None:
    for item in find_dates(text, today):
        assert item.last is None or item.last >= item.first
    assert isinstance(Reading(text, today).numbers, list)
