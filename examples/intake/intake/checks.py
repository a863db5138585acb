"""Validators: each returns what is wrong, in words for the model to pass on, or `None`."""

from __future__ import annotations

from datetime import date

ADULT = 18


def age_on(day: date, birth: date) -> int:
    """Full years."""
    return day.year - birth.year - ((day.month, day.day) < (birth.month, birth.day))


def name_problem(name: str) -> str | None:
    """A person has at least two names, made of letters."""
    parts = name.split()
    if len(parts) < 2:
        return "That is one name only. Ask for first and last name."
    if not all(part.strip(".'-").replace("-", "").replace("'", "").isalpha() for part in parts):
        return "A name is made of letters. Ask for the full name again."
    return None


def birth_problem(birth: date, today: date) -> str | None:
    """People are born in the past, and not too long ago."""
    if birth > today:
        return f"{birth:%Y-%m-%d} is in the future. Ask for the date of birth again."
    if age_on(today, birth) > 120:
        return f"Born in {birth.year}, you would be {age_on(today, birth)} years old. Ask for the date of birth again."
    return None


def street_problem(street: str) -> str | None:
    """A street has a house number."""
    if not any(char.isdigit() for char in street):
        return "The house number is missing. Ask for street and house number, postcode and city."
    return None
