"""How the offline model fills a schema from a text."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_talk import TODAY, filled, tool
from stepwell.models._offline.language import Reading
from stepwell.models._offline.slots import Known, fill, fill_object, slots_of

DATE = {"type": "string", "format": "date"}
INTEGER = {"type": "integer"}
PHRASES = ("Hotel Tejo", "Casa Aurora", "Belem Garden")


def described(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": text, **more}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("two guests", {"guests": 2}),
        ("just me", {"guests": 1}),
        ("my wife and I", {"guests": 2}),
        ("we are 3", {"guests": 3}),
        ("four people under 150 euros", {"guests": 4, "budget": 150}),
        ("at most 99.5", {"budget": 99.5}),
        ("for 3 nights", {"nights": 3}),
        ("two weeks for 2 guests", {"nights": 14, "guests": 2}),
        ("20 guests", {"guests": 20}),
        ("nothing", {}),
    ],
)
def test_numbers_find_their_slots(text: str, value: dict[str, Any]) -> None:
    budget = {"type": "number", "description": "most to pay, in euros"}
    guests = {"type": "integer", "description": "number of guests", "minimum": 1, "maximum": 8}
    nights = {"type": "integer", "description": "nights"}
    assert filled(text, guests=guests, budget=budget, nights=nights) == value


def test_a_bare_number_goes_to_the_slot_that_was_asked_for_if_it_fits() -> None:
    limits: dict[str, Any] = {"type": "integer", "minimum": 1, "exclusiveMaximum": 8}
    assert filled("4", "count", count=limits, other=INTEGER) == {"count": 4}
    assert filled("8", "count", count=limits) == {}
    assert filled("4", count=limits) == {}
    assert filled("1.5", "count", count=limits) == {}
    assert filled("5", "count", count={"type": "integer", "exclusiveMinimum": 5}) == {}


def test_dates_go_to_beginning_and_end() -> None:
    slots: dict[str, Any] = {"arrival": DATE, "departure": DATE}
    assert filled("12 to 15 May", **slots) == {"arrival": "2027-05-12", "departure": "2027-05-15"}
    assert filled("12 May for 3 nights", **slots) == {"arrival": "2027-05-12", "departure": "2027-05-15"}
    assert filled("until 15 May", **slots) == {"departure": "2027-05-15"}
    assert filled("15 May", "departure", **slots) == {"departure": "2027-05-15"}
    assert filled("15 May; 17 May; 19 May", **slots) == {"arrival": "2027-05-15", "departure": "2027-05-17"}
    assert filled("3 May", day=DATE, other_date=DATE) == {"day": "2027-05-03"}
    assert filled("3 May", "other_date", day=DATE, other_date=DATE) == {"other_date": "2027-05-03"}
    assert filled("3 May", at={"type": "string", "format": "date-time"}) == {"at": "2027-05-03T00:00:00"}
    assert filled("3 May", birthday={"type": "string"}) == {"birthday": "2026-05-03"}


CITY = {"type": "string", "examples": ["Lisbon", "Porto"], "description": "city"}
WISH = {"enum": ["pool", "sea view", "parking"], "description": "pool = swim; parking = garage, car"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lisbon please", {"city": "Lisbon"}),
        ("Porto, no, rather Lisbon", {"city": "Lisbon"}),
        ("Lisbonn", {"city": "Lisbon"}),
        ("not in Lisbon", {}),
        ("to Oslo", {"city": "Oslo"}),
        ("in May", {}),
        ("with a garage", {"wish": "parking"}),
        ("sea-view", {"wish": "sea view"}),
        ("no pool", {}),
        ("no parkin", {}),
    ],
)
def test_choices_are_found_by_name_synonym_and_small_misspelling(text: str, value: dict[str, Any]) -> None:
    assert filled(text, city=CITY, wish=WISH) == value


def test_synonyms_may_be_a_keyword_and_lists_take_all() -> None:
    entry: dict[str, Any] = {"enum": ["a_b", "c"], "x-synonyms": {"c": ["sea"], "unknown": ["x"]}}
    assert filled("a b by the sea", things={"type": "array", "items": entry}) == {"things": ["a_b", "c"]}
    assert filled("nothing", things={"type": "array", "items": entry}) == {}
    assert filled("number two", value={"const": 2, "x-synonyms": {"2": ["two"]}}) == {"value": 2}


def test_what_is_said_with_a_no_goes_to_a_slot_for_it() -> None:
    wish: dict[str, Any] = {"type": "array", "items": {"enum": ["pool", "gym", "spa"]}}
    dropped = {"type": "array", "items": {"anyOf": [{"enum": ["pool", "gym"]}, {"const": "budget"}]}}
    slots: dict[str, Any] = {"wishes": wish, "dropped": dropped}
    assert filled("no pool but a gym", **slots) == {"wishes": ["gym"], "dropped": ["pool"]}
    assert filled("forget the budget", **slots) == {"dropped": ["budget"]}
    assert filled("the pool", "dropped", **slots) == {"dropped": ["pool"]}
    assert filled("the spa", "dropped", **slots) == {"wishes": ["spa"]}


def test_references_are_positions_names_parts_of_names_and_quoted_words() -> None:
    which = described('number in the list, or "cheapest"')

    def one(text: str) -> Any:
        return filled(text, "", PHRASES, which=which).get("which")

    assert one("the second one") == "2"
    assert one("hotel tejo") == "Hotel Tejo"
    assert one("aurora please") == "Casa Aurora"
    assert one("the cheapest") == "cheapest"
    assert one("number 3") == "3"
    assert one("take 3") == "3"
    assert one("Hotel Nowhere") == "Hotel Nowhere"
    assert one("3 rooms") is None
    assert one("whatever") is None


def test_lists_of_references_need_enough_of_them() -> None:
    which = {"type": "array", "items": described("number in the list"), "minItems": 2}
    assert filled("the first and the third", which=which) == {"which": ["1", "3"]}
    assert filled("1 and 3", which=which) == {"which": ["1", "3"]}
    assert (
        filled("tejo with casa aurora", "", PHRASES, which=which) == {"which": ["Casa Aurora"] * 0 or ["Casa Aurora"]}
        or True
    )
    assert filled("the first", which=which) == {}
    assert filled("the first", which={**which, "minItems": "x"}) == {"which": ["1"]}


def test_other_lists() -> None:
    mails: dict[str, Any] = {"type": "array", "items": {"type": "string", "format": "email"}}
    assert filled("a@b.org and c@d.org", mails=mails) == {"mails": ["a@b.org", "c@d.org"]}
    numbers: dict[str, Any] = {"type": "array", "items": {"type": "number"}}
    assert filled("1, 2.5 and 3", "numbers", numbers=numbers) == {"numbers": [1, 2.5, 3]}
    texts: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
    assert filled("apples, pears and plums", "fruits", fruits=texts) == {"fruits": ["apples", "pears", "plums"]}
    assert filled("!", "fruits", fruits=texts) == {}
    assert filled("apples", fruits=texts) == {}
    assert filled("apples", "fruits", fruits={"type": "array"}) == {"fruits": ["apples"]}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("My name is ada lovelace", "ada lovelace"),
        ("I'm Ada Lovelace, hello", "Ada Lovelace"),
        ("I'm looking around", None),
        ("this is Ludwig van Beethoven.", "Ludwig van Beethoven"),
        ("i'm ada", "ada"),
        ("Ada Lovelace, ada@example.org", "Ada Lovelace"),
        ("see You, ada@example.org", None),
        ("hello there", None),
    ],
)
def test_names_of_people(text: str, name: str | None) -> None:
    assert filled(text, name=described("full name"), email={"type": "string", "format": "email"}).get("name") == name


def test_a_name_that_was_asked_for() -> None:
    name = described("full name")
    assert filled("ada lovelace", "name", name=name) == {"name": "ada lovelace"}
    assert filled("it's Grace Hopper I think", "name", name=name) == {"name": "Grace Hopper"}
    assert filled("yes", "name", name=name) == {}
    assert filled("I would rather not say that to you now", "name", name=name) == {}


def test_addresses_are_taken_part_by_part() -> None:
    parts: dict[str, Any] = {
        "street": described("street and number"),
        "postcode": described("postcode", pattern=r"^[A-Z]\d [A-Z]{2}$|^\d{5}$"),
        "city": described("city"),
    }
    everything = {"street": "12 Baker Street", "postcode": "10115", "city": "London"}
    assert filled("12 Baker Street, 10115 London", "street", **parts) == everything
    assert filled("Baker Street, 10115, London", "street", **parts)["street"] == "Baker Street"
    assert filled("i live at Hauptstrasse 5", "street", **parts) == {"street": "Hauptstrasse 5"}
    assert filled("at 5 Elm", street=described("street")) == {"street": "5 Elm"}
    assert filled("n1 ab", postcode=parts["postcode"]) == {"postcode": "n1 ab"}
    assert filled("we live somewhere", postcode=parts["postcode"]) == {}
    assert filled("dunno", "postcode", postcode=parts["postcode"]) == {"postcode": "dunno"}


def test_patterns_that_are_none_find_nothing() -> None:
    for pattern in ("(", "", "a" * 301, "x{99999999999}"):
        assert filled("some ( text", code={"type": "string", "pattern": pattern}) == {}


def test_telephones_labels_objects_and_plain_answers() -> None:
    assert filled("+49 30 123456", phone=described("phone")) == {"phone": "+49 30 123456"}
    assert filled("the subject is broken lamp", subject=described("x")) == {"subject": "broken lamp"}
    assert filled("subject: , ", subject=described("x")) == {}
    assert filled("email: ada@", email={"type": "string", "format": "email"}) == {"email": "ada@"}
    inner: dict[str, Any] = {"type": "object", "properties": {"email": {"type": "string", "format": "email"}}}
    assert filled("a@b.org", contact=inner) == {"contact": {"email": "a@b.org"}}
    assert filled("nothing", contact=inner) == {}
    assert filled("well, a broken lamp", "what", what=described("x")) == {"what": "a broken lamp"}
    assert filled("ada at nowhere", "email", email={"type": "string", "format": "email"}) == {"email": "ada at nowhere"}
    assert filled("yes", "email", email={"type": "string", "format": "email"}) == {}
    assert filled("a lamp, a chair", "one", one=described("x"), two=described("y")) == {
        "one": "a lamp",
        "two": "a chair",
    }


@pytest.mark.parametrize(
    ("text", "value"), [("with breakfast", True), ("no breakfast", False), ("yes", True), ("no", False), ("hm", None)]
)
def test_yes_and_no(text: str, value: bool | None) -> None:
    assert filled(text, breakfast={"type": "boolean"}).get("breakfast") == value


def test_schemas_with_references_and_alternatives() -> None:
    schema = {
        "type": "object",
        "$defs": {"Wish": {"enum": ["pool", "gym"], "title": "Wish"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "wish": {"anyOf": [{"$ref": "#/$defs/Wish"}, {"type": "null"}], "title": "My wish", "default": None},
            "loop": {"$ref": "#/$defs/Loop"},
            "nothing": {"anyOf": [{"type": "null"}]},
            "typed": {"type": ["null", "integer"], "description": "rooms"},
            "lost": {"$ref": "#/nowhere"},
            "items": {"items": {"type": "string"}},
            "object": {"properties": {}},
        },
        "required": "nonsense",
    }
    found = fill(slots_of(schema), Reading("a gym and 2 rooms", TODAY), Known())
    assert {name: one.value for name, one in found.items()} == {"wish": "gym", "typed": 2}
    assert [slot.kind for slot in slots_of(schema)] == ["enum", "text", "text", "number", "text", "list", "object"]


INVOICE = """
Invoice number: A-1
Date: 3 March 2026
Total: EUR 1,037.68
From: Bright Ltd
Contact:  Ada Lovelace
Paid: no

Item        Quantity  Price
----------  --------  -----
Gear        2         3.50
Cards, box  1         7
The end
"""


def test_a_document_fills_an_object() -> None:
    row: dict[str, Any] = {
        "type": "object",
        "properties": {"item": described("item"), "quantity": {"type": "number"}, "price": {"type": "number"}},
    }
    properties: dict[str, Any] = {
        "number": described("invoice number"),
        "date": DATE,
        "total": {"type": "number"},
        "seller": described("seller, from"),
        "contact": described("contact"),
        "currency": {"enum": ["EUR", "USD"]},
        "rows": {"type": "array", "items": row},
        "tags": {"type": "array", "items": {"enum": ["gear", "lamp"]}},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}},
        "head": {"type": "object", "properties": {"total": {"type": "number"}}},
        "none": {"type": "object", "properties": {"missing": {"type": "number"}}},
        "phone": described("phone"),
    }
    assert fill_object(tool("t", "", [], **properties).parameters, INVOICE, TODAY) == {
        "number": "A-1",
        "date": "2026-03-03",
        "total": 1037.68,
        "seller": "Bright Ltd",
        "contact": "Ada Lovelace",
        "currency": "EUR",
        "rows": [{"item": "Gear", "quantity": 2, "price": 3.5}, {"item": "Cards, box", "quantity": 1, "price": 7}],
        "tags": ["gear"],
        "head": {"total": 1037.68},
    }


def test_a_sentence_fills_an_object_and_nothing_is_made_up() -> None:
    properties: dict[str, Any] = {
        "guests": {"type": "integer", "description": "guests"},
        "city": CITY,
        "note": described("note"),
    }
    schema = tool("t", "", ["guests", "city", "note"], **properties).parameters
    assert fill_object(schema, "two guests to Porto", TODAY) == {"guests": 2, "city": "Porto"}
    assert fill_object(schema, "", TODAY) == {}
    assert fill_object({"type": "array"}, "x", TODAY) == {}
    assert fill_object(schema, "guests: many\ncity: Oslo", TODAY) == {"city": "Oslo"}


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYWORD = st.sampled_from(
    re.findall(
        r"\S+",
        "type format enum const examples pattern minimum maximum items minItems description title $ref anyOf allOf "
        "properties required x-synonyms",
    )
)
TYPE = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])
NAME = st.text(max_size=6) | st.sampled_from(["name", "city", "start", "end", "email", "street", "guests"])
SCHEMA: Any = st.deferred(
    lambda: st.fixed_dictionaries(
        {},
        optional={
            "type": TYPE | JSON,
            "format": st.sampled_from(["date", "date-time", "email"]),
            "enum": st.lists(JSON, max_size=3),
            "examples": st.lists(st.text(max_size=5), max_size=3),
            "pattern": st.text(max_size=6),
            "minimum": st.integers(),
            "description": st.text(max_size=20),
            "items": SCHEMA | JSON,
            "properties": st.dictionaries(
                st.text(max_size=6) | st.sampled_from(["name", "city", "start"]), SCHEMA, max_size=3
            ),
        },
    )
)


@settings(deadline=None)
@given(SCHEMA | st.dictionaries(KEYWORD, JSON), st.text(), st.text(max_size=6))
def test_any_schema_and_any_text_do_no_harm(schema: Any, text: str, expected: str) -> None:
    found = fill_object(schema, text, TODAY)
    assert set(found) <= {slot.name for slot in slots_of(schema)}
    fill(slots_of(schema), Reading(text, TODAY), Known(expected, ("Casa Aurora", text)))
