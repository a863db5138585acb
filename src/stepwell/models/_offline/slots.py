"""Slots: the properties of a JSON schema, and what a text says about them.

Standard keywords decide what kind of thing a slot wants: `type`, `format`, `enum`, `const`, `pattern`, `examples`,
`minimum`, `maximum`, `title`, `description`, `$ref`, `anyOf`, `allOf`. Four habits of people who write schemas are
understood as well:

* synonyms of values, in the description as `pool = swimming pool, swim; gym = fitness` or as the keyword `x-synonyms`;
* words in quotes in a description, which are accepted as values of a text slot (`a name, or "cheapest"`);
* a list of choices whose name or description says "without", "drop", "unwanted" takes the choices said with a "no";
* a description that speaks of a list, a number or a position, whose slot takes "the second one" as `2`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from difflib import SequenceMatcher
from typing import Any, Literal, TypeAlias, cast

from .language import (
    Dates,
    Number,
    Reading,
    Span,
    content_stems,
    find_phrase,
    listed,
    overlaps,
    says_no,
    says_yes,
    stem,
    words,
)

__all__ = ["Fill", "Slot", "fill", "fill_object", "slots_of"]

Kind: TypeAlias = Literal[
    "date",
    "email",
    "phone",
    "number",
    "boolean",
    "enum",
    "list",
    "object",
    "pattern",
    "person",
    "reference",
    "place",
    "address",
    "text",
]

EXPLICIT, TYPED, RAW = 3, 2, 1
"""How sure a value is: said in so many words; of the right kind; just the answer to the question asked."""


def _stems(text: str) -> frozenset[str]:
    return frozenset(stem(word) for word in listed(text))


_PLACE = _stems("city town place destination country location village airport station")
_PERSON = _stems("guest customer person patient traveller contact full first last your applicant guardian")
_MONEY = _stems("price budget cost amount total euro eur dollar fee sum pay vat tax net gross")
_PEOPLE = _stems("guest people person adult traveller visitor seat ticket")
_LENGTH = _stems("night duration length day stay")
_START = _stems("arrive arrival start from begin checkin first issue")
_END = _stems("depart departure end until leave return last checkout due expire")
_PHONE = _stems("phone telephone mobile")
_ADDRESS = _stems("address street")
_NAME = _stems("name")
_DATE = _stems("date birthday dob")
_PAST = _stems("birth birthday born dob")
_LISTED = _stems("list number position row shown result above table")
_MOST = _stems("max maximum most limit under budget upper ceiling")
_LEAST = _stems("min minimum least lower from")
_DROPPED = _stems("without drop dropped remove removed exclude excluded unwanted")
_BOUNDS = _MOST | _LEAST


@dataclass(frozen=True, slots=True)
class Slot:
    """One property of a schema.

    Attributes:
        name: The property's name.
        schema: Its schema, references resolved.
        required: Whether the object needs it.
        description: The schema's description, or its title, or the name in words.
        kind: What is looked for.
        stems: Stems of name and description.
        choices: Values and the phrases that mean them, longest phrase first.
        item: For a list: the slot of one entry.
        literals: Quoted words of the description.
    """

    name: str
    schema: Mapping[str, Any]
    required: bool
    description: str
    kind: Kind
    stems: frozenset[str]
    name_stems: frozenset[str]
    choices: tuple[tuple[str, Any], ...] = ()
    item: Slot | None = None
    literals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """A value for a slot.

    Attributes:
        value: The value, JSON.
        strength: `EXPLICIT`, `TYPED` or `RAW`.
        spans: The places of the text it was read from.
        other: Further readings of the same words, to try when the first is refused.
    """

    value: Any
    strength: int
    spans: tuple[Span, ...] = ()
    other: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Known:
    """What is known apart from the text itself.

    Attributes:
        expected: Name of the slot that was asked for, if any.
        phrases: Names that occur in what was shown: a text slot may mean one of them.
    """

    expected: str = ""
    phrases: tuple[str, ...] = field(default=())


# --- schemas ---------------------------------------------------------------------------------------------------------


def as_object(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one: schemas come from anywhere."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def as_list(value: Any) -> Sequence[Any]:
    """`value` if it is an array, else an empty one."""
    return cast("Sequence[Any]", value) if isinstance(value, (list, tuple)) else ()


def _resolve(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
    """Follow `$ref`, `allOf` and the first alternative of `anyOf` and `oneOf` that is not null."""
    node = as_object(schema)
    if depth > 8:
        return {}
    reference = node.get("$ref")
    if isinstance(reference, str):
        target: Any = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            target = as_object(target).get(part)
        return {**_resolve(target, root, depth + 1), **{k: v for k, v in node.items() if k != "$ref"}}
    for keyword in ("anyOf", "oneOf"):
        options = [_resolve(one, root, depth + 1) for one in as_list(node.get(keyword))]
        values = [_values_of(one) for one in options if one.get("type") != "null"]
        if len(values) > 1 and all(values):  # several enumerations are one
            return {**node, "type": "string", "enum": [value for part in values for value in part]}
    for keyword in ("allOf", "anyOf", "oneOf"):
        for option in as_list(node.get(keyword)):
            if as_object(option).get("type") != "null":
                found = _resolve(option, root, depth + 1)
                return {
                    **found,
                    **{k: v for k, v in node.items() if k != keyword and not (k == "title" and "title" in found)},
                }
    return node


def _values_of(schema: Mapping[str, Any]) -> list[Any]:
    return [*as_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]


def _type_of(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    for one in as_list(kind):
        if one != "null":
            return str(one)
    if isinstance(kind, str):
        return kind
    return "object" if "properties" in schema else "array" if "items" in schema else "string"


def slots_of(schema: Any) -> tuple[Slot, ...]:
    """The slots of an object's schema, required ones in the order of the schema."""
    root = as_object(schema)
    node = _resolve(root, root)
    required = {str(name) for name in as_list(node.get("required"))}
    return tuple(
        _slot(str(name), _resolve(part, root), str(name) in required, root)
        for name, part in as_object(node.get("properties")).items()
    )


def _slot(name: str, schema: Mapping[str, Any], required: bool, root: Mapping[str, Any], depth: int = 0) -> Slot:
    described = schema.get("description")
    description = described.strip() if isinstance(described, str) else ""
    title = schema.get("title")
    label = description or (title if isinstance(title, str) and title.strip() else name.replace("_", " "))
    name_stems = frozenset(content_stems(name))
    stems = name_stems | frozenset(content_stems(re.split(r"[;=]|, for example|, such as|, e\.g\.", label)[0]))
    item = None
    if _type_of(schema) == "array" and depth < 3:
        entry = dict(_resolve(schema.get("items"), root))
        if description and "description" not in entry:
            entry["description"] = description
        item = _slot(name, entry, False, root, depth + 1)
    values = _values_of(schema)
    kind = _kind(schema, stems, name_stems, description, values)
    literals = tuple(re.findall(r"\"([^\"]{2,40})\"", description)) if kind in ("text", "reference", "place") else ()
    choices = _choices(values or as_list(schema.get("examples")), schema, description)
    return Slot(name, schema, required, label, kind, stems, name_stems, choices, item, literals)


def _kind(
    schema: Mapping[str, Any], stems: frozenset[str], names: frozenset[str], description: str, values: Sequence[Any]
) -> Kind:
    kind = _type_of(schema)
    if values:
        return "enum"
    if kind in ("integer", "number"):
        return "number"
    if kind == "boolean":
        return "boolean"
    if kind == "array":
        return "list"
    if kind == "object":
        return "object"
    form = schema.get("format")
    if form in ("date", "date-time") or (form is None and names & _DATE):
        return "date"
    if form in ("email", "idn-email") or names & {"email", "mail"}:
        return "email"
    if isinstance(schema.get("pattern"), str):
        return "pattern"
    if names & _PHONE:
        return "phone"
    if (
        "nam" in names
        and (len(names) == 1 or names & _PERSON)
        and (names & _PERSON or stems & _PERSON or len(stems) == 1)
    ):
        return "person"
    if names & _ADDRESS:
        return "address"
    if stems & _LISTED and re.search(r"\b(?:list|number|position|row|shown|result|table)", description, re.IGNORECASE):
        return "reference"
    return "place" if names & _PLACE else "text"


def _choices(values: Iterable[Any], schema: Mapping[str, Any], description: str) -> tuple[tuple[str, Any], ...]:
    values = [value for value in values if isinstance(value, (str, int, float, bool))]
    found: dict[str, Any] = {str(value).replace("_", " "): value for value in values}
    by_text = {text.casefold(): value for text, value in found.items()}
    given = as_object(schema.get("x-synonyms"))
    pairs = [(str(key), [str(one) for one in as_list(value)]) for key, value in given.items()]
    equal = re.finditer(r"([\w' -]{1,40}?)\s*=\s*([^;=.\n]{1,200})", description)
    pairs.extend((match[1].strip(" ,:"), match[2].split(",")) for match in equal)
    for key, synonyms in pairs:
        value = by_text.get(key.replace("_", " ").casefold())
        if value is not None:
            for synonym in synonyms:
                found.setdefault(synonym.strip(), value)
    return tuple(sorted(found.items(), key=lambda pair: -len(pair[0])))


# --- filling ---------------------------------------------------------------------------------------------------------


def fill(slots: Sequence[Slot], reading: Reading, known: Known) -> dict[str, Fill]:
    """What a text says about the slots of one tool.

    Every word is used once. What is said in so many words comes first; the answer to the question that was asked
    comes last, as it is.
    """
    found: dict[str, Fill] = {}
    used: list[Span] = []

    def take(slot: Slot, result: Fill | None) -> None:
        if result is not None and slot.name not in found:
            found[slot.name] = result
            used.extend(result.spans)

    by_kind: dict[str, list[Slot]] = {}
    for slot in slots:
        by_kind.setdefault(slot.kind, []).append(slot)
    for slot, mail in zip(by_kind.get("email", []), reading.emails, strict=False):
        readings = tuple(dict.fromkeys([*mail.readings, *(r for m in reading.emails[1:] for r in m.readings)]))
        take(slot, Fill(readings[0], EXPLICIT, tuple(m.span for m in reading.emails), readings[1:]))
    for name, result in _fill_dates(by_kind.get("date", []), reading, known).items():
        take(next(slot for slot in slots if slot.name == name), result)
    for slot in by_kind.get("pattern", []):
        take(slot, _by_pattern(slot, reading, used))
    for slot in slots:
        if slot.kind == "list" and slot.item and slot.item.choices and slot.stems & _DROPPED:
            take(slot, _all_choices(slot.item, reading, used, negated=slot.name != known.expected))
    for slot in slots:
        if slot.choices or slot.literals:
            take(slot, _by_choice(slot, reading, used))
        if slot.kind == "list" and slot.item and slot.item.choices and not slot.stems & _DROPPED:
            take(slot, _all_choices(slot.item, reading, used))
    for slot in by_kind.get("phone", []):
        if reading.phone and not overlaps(reading.phone[1], used):
            take(slot, Fill(reading.phone[0], EXPLICIT, (reading.phone[1],)))
    for name, result in _fill_numbers(by_kind.get("number", []), reading, used, known).items():
        take(next(slot for slot in slots if slot.name == name), result)
    for slot in by_kind.get("boolean", []):
        take(slot, _boolean(slot, slots, reading, known))
    for slot in by_kind.get("address", []):
        take(slot, _address(slot, reading, used))
    for slot in slots:
        if slot.kind == "reference":
            take(slot, _reference(reading, used, known))
        elif slot.kind == "list" and slot.item and not slot.item.choices:
            take(slot, _list(slot, slot.item, reading, used, known))
        elif slot.kind == "person":
            take(slot, _person(slot, reading, used, known))
        elif slot.kind == "place":
            take(slot, _place(reading, used))
        elif slot.kind == "object":
            inner = fill(slots_of(slot.schema), reading, known)
            if inner:
                spans = tuple(span for one in inner.values() for span in one.spans)
                take(slot, Fill({k: v.value for k, v in inner.items()}, min(v.strength for v in inner.values()), spans))
        if slot.kind in ("text", "place", "address", "person", "pattern", "email"):
            take(slot, _labelled(slot, reading, used))
    _answers(slots, reading, known, found, used, take)
    return found


def _answers(
    slots: Sequence[Slot], reading: Reading, known: Known, found: dict[str, Fill], used: list[Span], take: Any
) -> None:
    """The text as the plain answer to a question, part by part if it names several things with commas between."""
    open_ = [s for s in slots if s.name not in found and s.kind in ("text", "place", "address", "person", "reference")]
    asked = next((slot for slot in slots if slot.name == known.expected), None)
    if asked is None:
        return
    parts = _parts(reading, used)
    wanted = [slot for slot in open_ if slot.required]
    begun = asked.name in found and asked.kind in ("address", "place", "text", "pattern")
    if parts and len(parts) == len(wanted) and (begun or (len(parts) > 1 and asked in wanted)):
        for slot, (text, span) in zip(wanted, parts, strict=True):
            if slot.kind != "person" or _looks_like_name(text):
                take(slot, Fill(text, RAW, (span,)))
        return
    if asked in open_:
        text, span = _rest(reading, used)
        if asked.kind == "reference" and {"it", "that", "this", "one", "them"} & set(words(text)):
            return  # points at something, and what it points at was looked for already
        if text and not says_yes(text) and (asked.kind != "person" or _looks_like_name(text)):
            take(asked, Fill(text, RAW, (span,)))
    elif asked.kind in ("email", "pattern", "phone") and asked.name not in found:
        text, span = _rest(reading, used)
        if text and len(words(text)) <= 6 and not says_yes(text):
            take(asked, Fill(text, RAW, (span,)))


def _lead(slot: Slot, start: bool) -> bool:
    return bool(slot.name_stems & (_START if start else _END)) or (
        not slot.name_stems & (_END if start else _START) and bool(slot.stems & (_START if start else _END))
    )


def _fill_dates(slots: Sequence[Slot], reading: Reading, known: Known) -> dict[str, Fill]:
    found: dict[str, Fill] = {}
    if not slots:
        return found
    past = any(slot.stems & _PAST for slot in slots)
    mentions: list[Dates] = list(reading.behind if past else reading.ahead)
    start = next((slot for slot in slots if _lead(slot, True)), None)
    end = next((slot for slot in slots if slot is not start and _lead(slot, False)), None)
    rest = [slot for slot in slots if slot is not start and slot is not end]
    if known.expected:
        rest.sort(key=lambda slot: slot.name != known.expected)

    def value(slot: Slot, day: date) -> str:
        return f"{day.isoformat()}T00:00:00" if slot.schema.get("format") == "date-time" else day.isoformat()

    for mention in mentions:
        if mention.last and start and end:
            found.setdefault(start.name, Fill(value(start, mention.first), EXPLICIT, (mention.span,)))
            found.setdefault(end.name, Fill(value(end, mention.last), EXPLICIT, (mention.span,)))
            continue
        order = [end, start, *rest] if mention.ends or (end and known.expected == end.name) else [start, *rest, end]
        slot = next((slot for slot in order if slot and slot.name not in found), None)
        if slot:
            found[slot.name] = Fill(value(slot, mention.first), EXPLICIT, (mention.span,))
    if start and end and start.name in found and end.name not in found and reading.nights:
        first = date.fromisoformat(str(found[start.name].value)[:10])
        nights, span = reading.nights
        last = date.fromordinal(min(first.toordinal() + nights, date.max.toordinal()))
        found[end.name] = Fill(value(end, last), EXPLICIT, (span,))
    return found


def _fits(slot: Slot, value: float) -> bool:
    """Whether a number is within the slot's bounds."""
    for keyword, sign in (("minimum", 1), ("maximum", -1), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = slot.schema.get(keyword)
        if isinstance(bound, (int, float)) and not isinstance(bound, bool):
            gap = sign * (value - bound)
            if gap < 0 or (gap == 0 and keyword.startswith("excl")):
                return False
    return _type_of(slot.schema) != "integer" or value == int(value)


_COMPANY_OF = re.compile(r"\b(?:we are|we're|party of|group of|room for|table for)\s+$", re.IGNORECASE)


def _number_score(slot: Slot, number: Number, known: Known, alone: bool) -> int:
    stems = slot.stems - _BOUNDS
    score = 0
    if number.after in slot.name_stems - _BOUNDS or (number.after in _PEOPLE and slot.stems & _PEOPLE):
        score += 6
    elif number.after in stems:
        score += 5
    elif set(number.near) & stems:
        score += 3
    if number.money:
        score += 5 if slot.stems & _MONEY else -6
    elif slot.stems & _MONEY and number.after in _PEOPLE | _LENGTH:
        score -= 12
    if slot.stems & _PEOPLE and not slot.stems & _MONEY and _COMPANY_OF.search(number.before):
        score += 6 if number.after not in _LENGTH else 0
    if number.bound:
        fitting = _MOST if number.bound == "max" else _LEAST
        score += 3 if slot.stems & fitting else 0
    if slot.name == known.expected and alone:
        score += 3
    if number.after and number.after not in stems and number.after in _PEOPLE | _LENGTH and not slot.stems & _PEOPLE:
        score -= 4
    return score if score >= 5 or _fits(slot, number.value) else 0


def _fill_numbers(slots: Sequence[Slot], reading: Reading, used: list[Span], known: Known) -> dict[str, Fill]:
    found: dict[str, Fill] = {}
    numbers = [number for number in reading.numbers if not overlaps(number.span, used)]
    alone = len(numbers) == 1
    pairs = sorted(
        (
            (_number_score(slot, number, known, alone or len(reading.tokens) <= 3), i, j)
            for i, slot in enumerate(slots)
            for j, number in enumerate(numbers)
        ),
        key=lambda item: (-item[0], item[1], item[2]),
    )
    taken: set[int] = set()
    for score, i, j in pairs:
        slot, number = slots[i], numbers[j]
        if score > 0 and slot.name not in found and j not in taken:
            taken.add(j)
            integer = _type_of(slot.schema) == "integer" or number.value == int(number.value)
            value = int(number.value) if integer else number.value
            found[slot.name] = Fill(value, EXPLICIT if score >= 5 else TYPED, (number.span,))
    for slot in slots:
        if slot.name in found:
            continue
        if (
            slot.stems & _LENGTH
            and not slot.stems & _MONEY
            and reading.nights
            and not overlaps(reading.nights[1], used)
        ):
            found[slot.name] = Fill(reading.nights[0], EXPLICIT, (reading.nights[1],))
        elif slot.stems & _PEOPLE and not slot.stems & _MONEY and (people := _people(reading)):
            found[slot.name] = Fill(people[0], EXPLICIT, (people[1],))
    return found


_COMPANY = re.compile(
    r"\b(?:(?P<one>just me|only me|alone|on my own|by myself|myself|solo)"
    r"|(?P<two>(?:the )?two of us|my (?:wife|husband|partner|girlfriend|boyfriend|friend|son|daughter|mother|father"
    r"|sister|brother) and (?:i|me|myself)|me and my \w+|as a couple|(?:we are|we're) a couple))\b",
    re.IGNORECASE,
)


def _people(reading: Reading) -> tuple[int, Span] | None:
    match = _COMPANY.search(reading.text)
    return (1 if match["one"] else 2, match.span()) if match else None


def _by_pattern(slot: Slot, reading: Reading, used: list[Span]) -> Fill | None:
    pattern = re.sub(r"(?:^|(?<=[|(]))\^|(?<!\\)\$(?=[|)]|$)", "", str(slot.schema.get("pattern")))
    if not pattern or len(pattern) > 300:
        return None
    try:
        matches = list(re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", reading.text[:2000]))
        matches = matches or list(re.finditer(rf"(?<!\w)(?:{pattern})(?!\w)", reading.text[:2000], re.IGNORECASE))
    except (re.error, RecursionError, OverflowError):
        return None
    for match in matches:
        if match.group().strip() and not overlaps(match.span(), used):
            return Fill(match.group(), EXPLICIT, (match.span(),))
    return None


def _matches(slot: Slot, reading: Reading, used: Iterable[Span], *, negated: bool = False) -> list[tuple[Span, Any]]:
    """Places of the text that name one of the choices, longest phrases first, then small misspellings.

    Those with a "no" in front are left out; or, with `negated`, the others.
    """
    taken = list(used)
    found: list[tuple[Span, Any]] = []
    for phrase, value in slot.choices:
        for span in find_phrase(reading.tokens, phrase):
            if not overlaps(span, taken):
                taken.append(span)
                if reading.negated(span) == negated:
                    found.append((span, value))
    if found or negated:
        return found
    for token in reading.tokens:
        if len(token.stem) < 5 or overlaps((token.start, token.end), taken):
            continue
        typed = reading.text[token.start : token.end].casefold()
        for phrase, value in slot.choices:
            folded = phrase.casefold()
            if " " in folded or len(folded) < 5 or folded[:1] != typed[:1]:
                continue
            if SequenceMatcher(None, folded, typed).ratio() >= 0.84 and not reading.negated((token.start, token.end)):
                found.append(((token.start, token.end), value))
                break
    return found


_CHANGED_MIND = re.compile(r"\b(?:no|rather|instead|sorry|actually)\b", re.IGNORECASE)


def _by_choice(slot: Slot, reading: Reading, used: list[Span]) -> Fill | None:
    matches = sorted(_matches(slot, reading, used), key=lambda pair: pair[0])
    if matches:
        # "Porto, no, Lisbon": who changes their mind means the last one.
        span, value = matches[-1 if _CHANGED_MIND.search(reading.text) else 0]
        return Fill(value, EXPLICIT, (span,))
    for literal in slot.literals:
        for span in find_phrase(reading.tokens, literal):
            if not overlaps(span, used):
                return Fill(literal, EXPLICIT, (span,))
    return None


def _all_choices(item: Slot, reading: Reading, used: list[Span], *, negated: bool = False) -> Fill | None:
    matches = sorted(_matches(item, reading, used, negated=negated), key=lambda pair: pair[0])
    values = list(dict.fromkeys(value for _, value in matches))
    return Fill(values, EXPLICIT, tuple(span for span, _ in matches)) if values else None


def _boolean(slot: Slot, slots: Sequence[Slot], reading: Reading, known: Known) -> Fill | None:
    for name in (slot.name.replace("_", " "), *slot.name_stems):
        for span in find_phrase(reading.tokens, name):
            return Fill(not reading.negated(span), EXPLICIT, (span,))
    if slot.name == known.expected or len(slots) == 1:
        if says_yes(reading.text):
            return Fill(True, TYPED, ((0, len(reading.text)),))
        if says_no(reading.text):
            return Fill(False, TYPED, ((0, len(reading.text)),))
    return None


def _references(reading: Reading, used: list[Span], known: Known) -> list[tuple[Span, Any]]:
    """Positions and names of things that were shown."""
    found: list[tuple[Span, Any]] = [
        (position.span, str(position.value)) for position in reading.positions if not overlaps(position.span, used)
    ]
    for phrase in known.phrases:
        taken = [*used, *(span for span, _ in found)]
        found.extend((span, phrase) for span in find_phrase(reading.tokens, phrase) if not overlaps(span, taken))
    if not found:
        found.extend(_unknown_names(reading, used, known) or _parts_of_names(reading, used, known))
    if not found:
        found.extend(
            (number.span, str(int(number.value)))
            for number in reading.numbers
            if not number.money
            and number.value == int(number.value)
            and 0 < number.value < 1000
            and not overlaps(number.span, used)
            and (not number.after or number.after in ("and", "with", "or", "please"))
        )
    return sorted(found)


def _parts_of_names(reading: Reading, used: list[Span], known: Known) -> list[tuple[Span, Any]]:
    """One word of a shown name is enough if only one shown name has it: "aurora" for "Casa Aurora"."""
    owners: dict[str, set[str]] = {}
    for phrase in known.phrases:
        for one in content_stems(phrase):
            owners.setdefault(one, set()).add(phrase)
    found: dict[str, tuple[Span, Any]] = {}
    for token in reading.tokens:
        owner = owners.get(token.stem, set())
        if len(owner) == 1 and len(token.stem) > 3 and not overlaps((token.start, token.end), used):
            (name,) = owner
            found.setdefault(name, ((token.start, token.end), name))
    return list(found.values())


def _unknown_names(reading: Reading, used: list[Span], known: Known) -> list[tuple[Span, Any]]:
    """Names that were not shown but share a word with one that was: "Hotel Nowhere"."""
    shared = {one for phrase in known.phrases for one in content_stems(phrase)}
    names = re.finditer(r"(?<![\w'-])[A-Z][\w'-]*(?: [A-Z][\w'-]*)+", _masked(reading, used))
    return [(name.span(), name.group()) for name in names if shared & set(content_stems(name.group()))]


def _reference(reading: Reading, used: list[Span], known: Known) -> Fill | None:
    found = _references(reading, used, known)
    return Fill(found[0][1], EXPLICIT, (found[0][0],)) if found else None


def _list(slot: Slot, item: Slot, reading: Reading, used: list[Span], known: Known) -> Fill | None:
    if item.kind == "reference":
        found = _references(reading, used, known)
        values = list(dict.fromkeys(value for _, value in found))
        least = slot.schema.get("minItems", 1)
        enough = values and len(values) >= (least if isinstance(least, int) else 1)
        return Fill(values, EXPLICIT, tuple(span for span, _ in found)) if enough else None
    if item.kind == "email" and reading.emails:
        return Fill([mail.readings[-1] for mail in reading.emails], EXPLICIT, tuple(m.span for m in reading.emails))
    if item.kind == "number" and reading.numbers and slot.name == known.expected:
        values = [int(n.value) if n.value == int(n.value) else n.value for n in reading.numbers]
        return Fill(values, TYPED, tuple(number.span for number in reading.numbers))
    if item.kind in ("text", "person", "place") and slot.name == known.expected:
        parts = [part for text, _ in _parts(reading, used) for part in re.split(r"\s+and\s+", text) if part.strip()]
        return Fill([part.strip() for part in parts], RAW, (_rest(reading, used)[1],)) if parts else None
    return None


_PARTICLES = frozenset(listed("van von de der la di da bin"))
_NAME_WORD = r"[^\W\d_][\w'.-]{0,30}"
_NAME_CUE = re.compile(
    rf"\b(?:my (?:full )?name is|my name's|name is|name:|i am|i'm|this is|call me|it's|on behalf of|for)\s+"
    rf"((?:(?:Mr|Mrs|Ms|Dr|Prof)\.?\s+)?{_NAME_WORD}(?:\s+{_NAME_WORD}){{0,4}})",
    re.IGNORECASE,
)
_NO_NAME = frozenset(
    listed(
        "i a an the in on at of to and or but with without looking not just very so here there interested fine good "
        "great ok okay sorry happy trying going thinking from my your mail e-mail email is it that this ready done "
        "back new old afraid sure yes no please thanks thank hi hello hey two three four it's i'm we what which "
        "how why when where who can could do does booking searching travelling traveling planning"
    )
)


def _name_in(text: str, *, lower: bool) -> str:
    """The words of `text` that can be a name, up to the first that cannot."""
    kept: list[str] = []
    for part in text.split():
        bare = part.strip(".,;:!?")
        if bare.casefold() in _NO_NAME or not re.fullmatch(_NAME_WORD, bare):
            break
        if not lower and not bare[:1].isupper() and bare.casefold() not in _PARTICLES:
            break
        kept.append(part.strip(",;:!?"))
        if part[-1:] in ",;:!?":
            break
    return " ".join(kept).rstrip(".")


def _looks_like_name(text: str) -> bool:
    return 0 < len(text.split()) <= 5 and _name_in(text.rstrip("."), lower=True) == text.rstrip(".")


def _masked(reading: Reading, used: Iterable[Span]) -> str:
    text = reading.text
    for start, end in used:
        text = text[:start] + "\0" * (end - start) + text[end:]
    return text


def _person(slot: Slot, reading: Reading, used: list[Span], known: Known) -> Fill | None:
    text = _masked(reading, used)
    for match in _NAME_CUE.finditer(text):
        clear = "name" in match.group().casefold()[:14]
        name = _name_in(match[1], lower=clear or text == text.lower())
        if name:
            at = match.start(1)
            return Fill(name, EXPLICIT if clear or name[:1].isupper() else TYPED, ((at, at + len(name)),))
    if reading.emails or slot.name == known.expected:
        for match in re.finditer(
            r"(?<![\w'-])[A-Z][\w'-]{1,30}(?:\s+(?:van|von|de|der|la|di|da|[A-Z][\w'.-]*)){1,4}", text
        ):
            name = _name_in(match.group(), lower=False)
            if " " in name:
                return Fill(name, TYPED, ((match.start(), match.start() + len(name)),))
    return None


_PLACE_CUE = re.compile(
    r"\b(?:in|to|at|near|around|visit|from|about)\s+(?:the\s+)?"
    r"([A-Z][\w'-]*(?:[ -](?:de|la|am|an|der|do|[A-Z][\w'-]*))*)"
)


_NO_PLACE = frozenset(
    listed(
        "January February March April May June July August September October November December "
        "I Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
    )
)


def _place(reading: Reading, used: list[Span]) -> Fill | None:
    for match in _PLACE_CUE.finditer(_masked(reading, used)):
        if match[1].split()[0] not in _NO_PLACE and not reading.negated(match.span(1)):
            return Fill(match[1], TYPED, (match.span(1),))
    return None


_STREET = re.compile(
    rf"(?<![\w'.-])(?:\d{{1,5}}[a-z]?,?\s+(?:{_NAME_WORD}\s?){{1,4}}|(?:{_NAME_WORD}\s){{1,4}}\d{{1,5}}[a-z]?\b)",
    re.IGNORECASE,
)
_NO_STREET = re.compile(r"\0|\b(?:i|we|live|lives|am|at|in|on|my|address|is|it's)\b", re.IGNORECASE)


def _address(slot: Slot, reading: Reading, used: list[Span]) -> Fill | None:
    if slot.name_stems & {"street"}:
        text = _NO_STREET.sub(lambda match: "," * len(match.group()), _masked(reading, used))
        match = _STREET.search(text)
        if match and re.search(r"[^\W\d_]{2}", match.group()):
            return Fill(match.group().strip(" ,"), TYPED, (match.span(),))
    return None


def _labelled(slot: Slot, reading: Reading, used: list[Span]) -> Fill | None:
    """Said with its label: "the subject is ...", "subject: ..."."""
    names = {re.escape(slot.name.replace("_", " ")), re.escape(slot.name)}
    names |= {re.escape(one) for one in re.findall(r"[\w-]{4,}", slot.name)}
    pattern = rf"\b(?:{'|'.join(sorted(names, key=len, reverse=True))})\s*(?:\bis\b|:|=)\s*([^\n,;]{{1,200}})"
    match = re.search(pattern, _masked(reading, used), re.IGNORECASE)
    value = match[1].strip(" .\0\"'") if match else ""
    if slot.kind in ("email", "pattern") and value:
        value = value.split("\0")[0].strip()
    return Fill(value.replace("\0", " ").strip(), EXPLICIT, (match.span(1),)) if match and value.strip("\0 ") else None


_FILLER = re.compile(
    r"^(?:(?:please|well|ok|okay|hi|hello|oh|sorry|so|um|uh|actually|it is|it's|that is|that's|i think|i'd say"
    r"|i would say|make it|let's say|my \w+ is|i live (?:at|in|on)|we live (?:at|in|on)|i'm from|i want to go to"
    r"|i'd like|i would like)"
    r"(?:\s*,\s*|\s+|$))+",
    re.IGNORECASE,
)


def _parts(reading: Reading, used: Iterable[Span]) -> list[tuple[str, Span]]:
    """The parts between commas of what is not used yet."""
    text = _masked(reading, used)
    offset = match.end() if (match := _FILLER.match(text)) else 0
    parts: list[tuple[str, Span]] = []
    for match in re.finditer(r"[^,;\n\0]+", text[offset:]):
        part = match.group().strip(" .!?")
        if words(part) and part.casefold() not in ("and", "or", "with"):
            parts.append((part, (offset + match.start(), offset + match.end())))
    return parts


def _rest(reading: Reading, used: Iterable[Span]) -> tuple[str, Span]:
    """What is not used yet, without the polite words in front."""
    text = _masked(reading, used).replace("\0", " ")
    match = _FILLER.match(text)
    start = match.end() if match else 0
    value = " ".join(text[start:].split()).strip(' .,;!?"')
    return (value if words(value) else ""), (start, len(reading.text))


# --- whole objects ---------------------------------------------------------------------------------------------------


def fill_object(schema: Any, text: str, today: date) -> dict[str, Any]:
    """Fill a JSON schema of an object from a document: lines with labels first, then tables, then free text.

    What the document does not say is left out: nothing is made up.
    """
    reading = Reading(text, today)
    found: dict[str, Any] = {}
    lines = reading.text.splitlines()
    slots = slots_of(schema)
    for slot in slots:
        value = _from_table(slot, lines, today) if slot.kind == "list" else _from_label(slot, slots, lines, today)
        if value is not None:
            found[slot.name] = value
        elif slot.kind == "object" and (inner := fill_object(slot.schema, reading.text, today)):
            found[slot.name] = inner
    rest = [slot for slot in slots if slot.name not in found and slot.kind not in ("object", "list")]
    for name, result in fill(rest, reading, Known()).items():
        if result.strength == EXPLICIT or len(lines) <= 1:
            found.setdefault(name, result.value)
    for slot in slots:
        if slot.kind == "list" and slot.name not in found and (one := fill([slot], reading, Known())):
            found[slot.name] = one[slot.name].value
    return found


_LABEL = re.compile(r"^\s*[*|-]?\s*([^:=\n]{2,40}?)\s*(?:[:=]|\s{2,}|\t)\s*(\S.*)$")


def _from_label(slot: Slot, slots: Sequence[Slot], lines: Sequence[str], today: date) -> Any:
    """The value of the line whose label fits this slot best, and no other slot better."""
    best: tuple[float, Any] = (0.0, None)
    for line in lines:
        match = _LABEL.match(line)
        label = frozenset(content_stems(match[1])) if match else frozenset[str]()
        if not match:
            continue
        score = _label_score(slot, label)
        if not label and match[1].strip().casefold() in words(slot.description):
            score = 0.5  # a label such as "From"
        if score > best[0] and score >= max(_label_score(other, label) for other in slots):
            value = _typed(slot, match[2].strip(), today)
            if value is not None:
                best = (score, value)
    return best[1]


def _label_score(slot: Slot, label: frozenset[str]) -> float:
    names = len(label & slot.name_stems)
    others = len(label & (slot.stems - slot.name_stems))
    return (2 * names + others) / len(label | slot.name_stems) if names or others else 0.0


def _typed(slot: Slot, text: str, today: date) -> Any:
    """`text` as a value of the slot's kind, or `None`."""
    if slot.kind in ("text", "person", "place", "address", "reference"):
        return text if not slot.choices else next(iter(v for _, v in _matches(slot, Reading(text, today), [])), text)
    if slot.kind == "number":
        numbers = Reading(text, today).numbers
        if not numbers:
            return None
        value = next((number.value for number in numbers if number.money), numbers[0].value)
        return int(value) if value == int(value) else value
    result = fill([slot], Reading(text, today), Known(expected=slot.name))
    return result[slot.name].value if slot.name in result else None


def _cells(line: str) -> list[str]:
    splitter = r"\s*\|\s*" if "|" in line else r"\t+|\s{2,}"
    return [cell.strip() for cell in re.split(splitter, line.strip().strip("|").strip())]


def _from_table(slot: Slot, lines: Sequence[str], today: date) -> list[dict[str, Any]] | None:
    """Rows under a header whose cells name the properties of the list's objects."""
    columns = slots_of(slot.item.schema) if slot.item and slot.item.kind == "object" else ()
    if not columns:
        return None
    for index, line in enumerate(lines):
        heads = [_column(columns, cell) for cell in _cells(line)]
        known = [head for head in heads if head]
        if len(known) < 2 or len({head.name for head in known}) != len(known):
            continue
        rows: list[dict[str, Any]] = []
        for row in lines[index + 1 :]:
            cells = _cells(row)
            if re.fullmatch(r"[\s|:+=-]+", row):
                continue
            if len(cells) != len(heads):
                break
            values = {h.name: _typed(h, cell, today) for h, cell in zip(heads, cells, strict=True) if h and cell}
            rows.append({name: value for name, value in values.items() if value is not None})
        if rows:
            return rows
    return None


def _column(columns: Sequence[Slot], cell: str) -> Slot | None:
    label = frozenset(content_stems(cell))
    best = max(columns, key=lambda slot: _label_score(slot, label) if label else 0)
    return best if label and _label_score(best, label) > 0 else None
