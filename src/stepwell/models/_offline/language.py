"""What the offline model reads in a text: words, dates, numbers, positions, addresses, yes and no.

Plain English, plain rules. Every function takes any text and returns what it found, with the place where it stands;
nothing here raises on odd input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Literal

__all__ = [
    "MAX_TEXT",
    "Dates",
    "Email",
    "Number",
    "Position",
    "Reading",
    "content_stems",
    "find_phrase",
    "listed",
    "overlaps",
    "says_no",
    "says_yes",
    "sentences",
    "stem",
    "words",
]

MAX_TEXT = 20_000
"""More of one text is not read: the rules below are for things people type, and for documents of a few pages."""

Span = tuple[int, int]

_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")


def listed(text: str) -> tuple[str, ...]:
    """The words of a constant."""
    return tuple(text.split())


STOP_WORDS = frozenset(
    listed(
        "a about after all also am an and any are as at be been but by can could did do does for from get "
        "give go had has have he her hers him his how i i'd i'll i'm i've if in into is it it's its just let "
        "like me mine my no not of off on or our out please s she should so some than that the their them "
        "then there these they this those to too up us was we we'd we'll were what what's when where which "
        "who whom whose will with would yes you your you're want need say says tell call use user guest "
        "customer person one"
    )
)


def stem(word: str) -> str:
    """Cut a word to a form that its plural, its -ing and its -ed share. Crude, but the same for both sides."""
    word = word.casefold().replace("\u2019", "'").removesuffix("'s")
    if len(word) > 4 and word.endswith("ies"):
        word = word[:-3] + "y"
    elif len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if len(word) > 5 and word.endswith("ing"):
        word = word[:-3]
    elif len(word) > 4 and word.endswith("ed"):
        word = word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def words(text: str) -> list[str]:
    """The words of a text, folded to lower case."""
    return [match.group().casefold().replace("\u2019", "'") for match in _WORD.finditer(text)]


def content_stems(text: str) -> list[str]:
    """Stems of the words that carry meaning; `snake_case` and `camelCase` are taken apart."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).replace("_", " ").replace("-", " ")
    return [stem(word) for word in words(spaced) if word not in STOP_WORDS]


def sentences(text: str) -> list[str]:
    """The sentences of a text, line by line."""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]


@dataclass(frozen=True, slots=True)
class Token:
    """One word: its stem and where it stands."""

    stem: str
    start: int
    end: int


def find_phrase(tokens: Sequence[Token], phrase: str) -> Iterator[Span]:
    """Every place where the words of `phrase` stand one after the other."""
    wanted = [stem(word) for word in words(phrase.replace("_", " ").replace("-", " "))]
    if not wanted:
        return
    for at in range(len(tokens) - len(wanted) + 1):
        if all(tokens[at + i].stem == want for i, want in enumerate(wanted)):
            yield tokens[at].start, tokens[at + len(wanted) - 1].end


# --- numbers ---------------------------------------------------------------------------------------------------------

_SMALL = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_UNITS = {word: value for value, word in enumerate(_SMALL)}
_TENS = {w: 10 * n for n, w in enumerate(listed("twenty thirty forty fifty sixty seventy eighty ninety"), 2)}
_NUMBER_WORD = "|".join(
    [
        r"(?:a|one|two|three|four|five|six|seven|eight|nine)\s+(?:hundred|thousand)(?:\s+(?:and\s+)?(?:"
        + "|".join([*_TENS, *_UNITS])
        + r"))?",
        rf"(?:{'|'.join(_TENS)})(?:[-\s](?:one|two|three|four|five|six|seven|eight|nine))?",
        *sorted(_UNITS, key=len, reverse=True),
        r"a\s+couple(?:\s+of)?",
        r"a\s+pair\s+of",
        r"half\s+a\s+dozen",
        r"a\s+dozen",
    ]
)
_NUMBER = re.compile(
    rf"(?P<pre>[€$£]\s*|\b(?:eur|usd|gbp)\s+)?(?:(?P<digits>(?<![\w.,])-?\d(?:[\d.,]*\d)?|(?<=[€$£])\d(?:[\d.,]*\d)?)"
    rf"|\b(?P<word>{_NUMBER_WORD})\b)"
    r"(?P<post>\s*(?:€|[$]|£|(?:euros?|eur|dollars?|usd|pounds?|gbp|bucks)\b))?",
    re.IGNORECASE | re.ASCII,
)
_NOT_A_COUNT = re.compile(
    r"(?:\b(?:the|this|that|which|what|any|another|other|last|cheapest|best|next|each|every)|\w+(?:st|nd|rd|th)|first"
    r"|second|third)\s+$",
    re.IGNORECASE,
)
_AT_MOST = re.compile(
    r"(?:under|below|at\s+most|up\s+to|max(?:imum)?(?:\s+of)?|no\s+more\s+than|not\s+more\s+than|less\s+than|within"
    r"|cheaper\s+than|until|limit(?:\s+of)?|budget(?:\s+\w+)?(?:\s+of)?)\s+(?:about\s+|around\s+)?$",
    re.IGNORECASE,
)
_AT_LEAST = re.compile(
    r"(?:over|above|at\s+least|min(?:imum)?(?:\s+of)?|more\s+than|not\s+less\s+than|no\s+less\s+than)\s+$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text.

    Attributes:
        value: The number.
        span: Where it stands.
        near: Stems of the words around it, the two after it first.
        after: Stem of the word right after it.
        money: Whether a currency stands with it.
        bound: `max` for "under 150", `min` for "at least 2".
        before: The text right before it.
    """

    value: float
    span: Span
    near: tuple[str, ...]
    after: str
    money: bool
    bound: Literal["max", "min", ""]
    before: str


def _digits(text: str) -> float | None:
    """Read `1,200`, `1.200,50`, `149.90` and `12`."""
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    elif re.fullmatch(r"-?\d{1,3}(?:\.\d{3})+(?:,\d+)?|-?\d+,\d{1,2}", text):
        text = text.replace(".", "").replace(",", ".")
    try:
        return float(text)
    except ValueError:
        return None


def _number_word(text: str) -> float:
    parts = words(text.replace("-", " "))
    if "couple" in parts or "pair" in parts:
        return 2
    if "dozen" in parts:
        return 6 if "half" in parts else 12
    total = 0
    for part in parts:
        if part == "hundred":
            total = max(total, 1) * 100
        elif part == "thousand":
            total = max(total, 1) * 1000
        else:
            total += _UNITS.get(part, 0) + _TENS.get(part, 0)
    return total


def _numbers(text: str) -> Iterator[Number]:
    for match in _NUMBER.finditer(text):
        before = text[max(0, match.start() - 40) : match.start()]
        if match["digits"]:
            value = _digits(match["digits"])
            if value is None or abs(value) > 1e15 or re.match(r"(?:st|nd|rd|th)\b", text[match.end() :]):
                continue
        else:
            if match["word"].casefold() == "one" and _NOT_A_COUNT.search(before):
                continue
            value = _number_word(match["word"])
        following = [stem(word) for word in words(text[match.end() : match.end() + 40].split(".")[0])]
        leading = [stem(word) for word in words(before)]
        yield Number(
            value,
            match.span(),
            (*following[:2], *reversed(leading[-3:])),
            following[0] if following else "",
            bool(match["pre"] or match["post"]),
            "max" if _AT_MOST.search(before) else "min" if _AT_LEAST.search(before) else "",
            before,
        )


# --- positions in a list ---------------------------------------------------------------------------------------------

_ORDINALS = {
    word: n for n, word in enumerate(listed("first second third fourth fifth sixth seventh eighth ninth tenth"), 1)
}
_POSITION = re.compile(
    rf"\b(?P<word>{'|'.join(_ORDINALS)})\b|(?:#\s?|\b(?:number|no\.?|nr\.?|option|item|row)\s+)(?P<number>\d{{1,4}})\b"
    r"|\b(?P<nth>\d{1,3})(?:st|nd|rd|th)\b",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a list, from 1: "the second one"."""

    value: int
    span: Span


def _positions(text: str) -> Iterator[Position]:
    for match in _POSITION.finditer(text):
        word = match["word"]
        yield Position(_ORDINALS[word.lower()] if word else int(match["number"] or match["nth"]), match.span())


# --- dates -----------------------------------------------------------------------------------------------------------

_MONTHS = {
    name: index
    for index, names in enumerate(
        (
            "january jan",
            "february feb",
            "march mar",
            "april apr",
            "may",
            "june jun",
            "july jul",
            "august aug",
            "september sept sep",
            "october oct",
            "november nov",
            "december dec",
        ),
        1,
    )
    for name in names.split()
}
_WEEKDAYS = listed("monday tuesday wednesday thursday friday saturday sunday")
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_MONTH = rf"({'|'.join(sorted(_MONTHS, key=len, reverse=True))})\b\.?"
_YEAR = r"(?:,?\s+((?:1[5-9]|20|21)\d\d)\b)?"
_TO = r"\s*(?:to|until|till|through|thru|-|\u2013|\u2014)\s*(?:the\s+)?"
_TO_OR_AND = r"\s*(?:to|until|till|through|thru|and|-|\u2013|\u2014)\s*(?:the\s+)?"
_COUNT = r"(\d{1,3}|a|an|one|two|three|four|five|six|seven|eight|nine|ten)"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.])(?:{text})(?!\w)", re.IGNORECASE | re.ASCII)


_RANGE_DM = _pattern(rf"{_DAY}{_TO_OR_AND}{_DAY}\s+(?:of\s+)?{_MONTH}{_YEAR}")
_RANGE_MD = _pattern(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_TO_OR_AND}{_DAY}{_YEAR}")
_RANGE_D = _pattern(rf"(\d{{1,2}})(?:st|nd|rd|th){_TO}(\d{{1,2}})(?:st|nd|rd|th)")
_ISO = _pattern(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_DMY = _pattern(r"(\d{1,2})([./-])(\d{1,2})\2(\d{4}|\d\d)")
_DM = _pattern(rf"{_DAY}\s*(?:of\s+)?{_MONTH}{_YEAR}")
_MD = _pattern(rf"{_MONTH}\s+(?:the\s+)?{_DAY}{_YEAR}")
_RELATIVE = _pattern(
    r"(?P<word>day\s+after\s+tomorrow|tomorrow|today|tonight)"
    rf"|(?:(?P<which>next|this|coming|on)\s+)?(?P<day>{'|'.join(_WEEKDAYS)})"
    rf"|in\s+{_COUNT}\s+(?P<unit>day|week|month)s?"
    r"|(?P<when>next|this)\s+(?P<span>weekend|week|month)"
)
_TO_DAY = re.compile(rf"{_TO}{_DAY}(?![\w.:/-])", re.IGNORECASE)
_BETWEEN = re.compile(rf"\s*,?{_TO_OR_AND}", re.IGNORECASE)
_ENDS = re.compile(
    r"(?:until|till|leav\w*|depart\w*|check(?:ing)?[\s-]*out|return\w*|back|end\w*)\W+(?:\w+\W+){0,2}$", re.IGNORECASE
)
_NO_LENGTH = re.compile(r"(?<!for )(?:\ban?\s+(?:night|day))$|\bin\s+\w+\s+\w+$", re.IGNORECASE)
_NIGHTS = _pattern(rf"{_COUNT}\s+(nights?|days?|weeks?|weekend|fortnight)")


@dataclass(frozen=True, slots=True)
class Dates:
    """A date or a range of dates.

    Attributes:
        first: The date, or the first of the range.
        last: The last of the range, or `None`.
        span: Where it stands.
        ends: Whether the words before it say that something ends there ("until 15 May").
    """

    first: date
    last: date | None
    span: Span
    ends: bool = False


def _count(text: str) -> int:
    return int(text) if text.isdigit() else _UNITS.get(text.lower(), 1)


def _day(year: str | int | None, month: int, day: str | int, today: date, past: bool = False) -> date | None:
    """A date, in the nearest fitting year if none is given; `None` if there is no such day in that year."""
    try:
        if year:
            return date(int(year), month, int(day))
        found = date(today.year, month, int(day))
        if past:
            return found if found <= today else date(today.year - 1, month, int(day))
        return found if found >= today else date(today.year + 1, month, int(day))
    except ValueError:
        return None


def _plus(day: date, days: int) -> date:
    """`day` plus `days`, at the end of the calendar its last day."""
    return date.fromordinal(min(day.toordinal() + days, date.max.toordinal()))


def _shift_month(day: date, months: int) -> date:
    index = day.month - 1 + months
    year, month = day.year + index // 12, index % 12 + 1
    for last in (day.day, 30, 29, 28):
        found = _day(year, month, last, day) if last <= day.day else None
        if found:
            return found
    return day


def _two_digits(year: str, today: date, past: bool) -> int:
    if len(year) == 4:
        return int(year)
    full = 2000 + int(year)
    return full - 100 if past and full > today.year else full


def _relative(match: re.Match[str], today: date) -> tuple[date, date | None]:
    if match["word"]:
        word = match["word"].lower()
        return _plus(today, 2 if word.startswith("day") else 1 if word == "tomorrow" else 0), None
    if match["day"]:
        ahead = (_WEEKDAYS.index(match["day"].lower()) - today.weekday()) % 7 or 7
        return _plus(today, ahead), None
    if match["unit"]:
        count = _count(match[4])
        unit = match["unit"].lower()
        if unit == "month":
            return _shift_month(today, count), None
        return _plus(today, count * (7 if unit == "week" else 1)), None
    later = match["when"].lower() == "next"
    span = match["span"].lower()
    if span == "month":
        return _shift_month(today, int(later)).replace(day=1) if later else today, None
    monday = _plus(today, 7 - today.weekday())
    if span == "week":
        return (monday if later else today), None
    saturday = _plus(today, (5 - today.weekday()) % 7 + (7 if later and today.weekday() < 5 else 0))
    return saturday, _plus(saturday, 1)


def find_dates(text: str, today: date, *, past: bool = False) -> list[Dates]:
    """Dates and ranges, in the order of the text.

    Args:
        text: What was said.
        today: What "tomorrow" is relative to, and where the year comes from.
        past: Whether a date without a year lies behind (a date of birth) or ahead (a journey).
    """
    found: list[Dates] = []
    free = text

    def add(span: Span, first: date | None, last: date | None = None) -> None:
        nonlocal free
        if first is None:
            return
        ends = bool(_ENDS.search(text[max(0, span[0] - 40) : span[0]]))
        found.append(Dates(first, last, span, ends))
        free = free[: span[0]] + " " * (span[1] - span[0]) + free[span[1] :]

    def both(first: date | None, last: date | None) -> tuple[date | None, date | None]:
        if first and last and last < first:
            last = _day(first.year + 1, last.month, last.day, today)
        return first, last

    for match in _RANGE_DM.finditer(free):
        month, year = _MONTHS[match[3].lower()], match[4]
        first = _day(year, month, match[1], today, past)
        if first:
            last = _day(first.year, month, match[2], today)
            add(match.span(), *(both(first, last) if last and last >= first else (first, None)))
    for match in _RANGE_MD.finditer(free):
        month, year = _MONTHS[match[1].lower()], match[4]
        first = _day(year, month, match[2], today, past)
        if first:
            last = _day(first.year, month, match[3], today)
            add(match.span(), *(both(first, last) if last and last >= first else (first, None)))
    for match in _ISO.finditer(free):
        add(match.span(), _day(match[1], int(match[2]), match[3], today))
    for match in _DMY.finditer(free):
        year = _two_digits(match[4], today, past)
        add(match.span(), _day(year, int(match[3]), match[1], today) or _day(year, int(match[1]), match[3], today))
    for match in _DM.finditer(free):
        add(match.span(), _day(match[3], _MONTHS[match[2].lower()], match[1], today, past))
    for match in _MD.finditer(free):
        add(match.span(), _day(match[3], _MONTHS[match[1].lower()], match[2], today, past))
    for match in _RELATIVE.finditer(free):
        add(match.span(), *_relative(match, today))
    for match in _RANGE_D.finditer(free):
        first = _next_day(int(match[1]), today)
        add(match.span(), *both(first, _next_day(int(match[2]), first or today)))
    return _joined(sorted(found, key=lambda item: item.span), text, today)


def _next_day(day: int, after: date) -> date | None:
    for months in range(3):
        month = _shift_month(after.replace(day=1), months)
        found = _day(month.year, month.month, day, after)
        if found and found >= after:
            return found
    return None


def _joined(found: list[Dates], text: str, today: date) -> list[Dates]:
    """Put "12 May" "to" "2 June", and "12 May" "to the 15th", together to ranges."""
    result: list[Dates] = []
    for item in found:
        if result and result[-1].last is None and item.last is None:
            previous = result[-1]
            between = text[previous.span[1] : item.span[0]]
            if _BETWEEN.fullmatch(between):
                last = item.first
                if last < previous.first:
                    last = _day(previous.first.year + 1, last.month, last.day, today) or last
                if last >= previous.first:
                    result[-1] = Dates(previous.first, last, (previous.span[0], item.span[1]))
                    continue
        result.append(item)
    for index, item in enumerate(result):
        rest = _TO_DAY.match(text, item.span[1]) if item.last is None else None
        last = _next_day(int(rest[1]), item.first) if rest else None
        if rest and last:
            result[index] = Dates(item.first, last, (item.span[0], rest.end()))
    return result


def find_nights(text: str) -> tuple[int, Span] | None:
    """How long, in days: "for 3 nights", "a week"; not the price "a night" and not "in two weeks"."""
    match = next((m for m in _NIGHTS.finditer(text) if not _NO_LENGTH.search(text[: m.end()])), None)
    if match is None:
        return None
    unit = match[2].lower()
    factor = 7 if unit.startswith("week") and unit != "weekend" else 14 if unit == "fortnight" else 1
    return (2 if unit == "weekend" else _count(match[1]) * factor), match.span()


# --- addresses, yes and no -------------------------------------------------------------------------------------------

_EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,8}", re.ASCII)
_SPELLED_EMAIL = re.compile(
    r"\b[\w.+-]{1,64}(?:\s+dot\s+[\w+-]{1,64}){0,4}\s+(?:at|\(at\)|\[at\])\s+[\w-]{1,63}"
    r"(?:\s*(?:\.|\bdot\b|\(dot\)|\[dot\])\s*[\w-]{1,63}){1,8}",
    re.IGNORECASE | re.ASCII,
)
_PHONE = re.compile(r"(?<!\w)\+?\d(?:[ ()/-]{0,2}\d){6,14}(?!\w)", re.ASCII)

_YES = re.compile(
    r"^\W*(?:yes|yep|yeah|yup|sure|ok|okay|correct|right|exactly|absolutely|of course|certainly|please do|go ahead"
    r"|do it|confirm(?:ed)?|i confirm|sounds good|that'?s (?:right|correct|fine|good)|perfect|agreed|looks good"
    r"|all good|fine)\b",
    re.IGNORECASE,
)
_NO = re.compile(
    r"^\W*(?:no|nope|nah|not (?:really|yet|now)|don'?t|do not|never ?mind|cancel|stop|wrong|incorrect)\b",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"(?:\b(?:no|not|without|don't (?:need|want)(?: a| any)?|never|except"
    r"|drop|remove|forget(?: about)?|skip|leave out)\s+(?:(?:a|any|the|in|to|at)\s+)?)$",
    re.IGNORECASE,
)


def says_yes(text: str) -> bool:
    """Whether the text begins with a yes."""
    return bool(_YES.match(text.replace("\u2019", "'")))


def says_no(text: str) -> bool:
    """Whether the text begins with a no."""
    return bool(_NO.match(text.replace("\u2019", "'")))


@dataclass(frozen=True, slots=True)
class Email:
    """Something meant as an e-mail address: as it was typed, then as it may have been meant."""

    readings: tuple[str, ...]
    span: Span


def _emails(text: str) -> Iterator[Email]:
    taken: list[Span] = []
    for match in _EMAIL.finditer(text):
        taken.append(match.span())
        yield Email((match.group().rstrip("."),), match.span())
    for match in _SPELLED_EMAIL.finditer(text):
        if not overlaps(match.span(), taken):
            meant = re.sub(r"\s+(?:at|\(at\)|\[at\])\s+", "@", match.group(), count=1, flags=re.IGNORECASE)
            meant = re.sub(r"\s*(?:\bdot\b|\(dot\)|\[dot\])\s*", ".", meant, flags=re.IGNORECASE)
            yield Email((match.group(), re.sub(r"\s+", "", meant)), match.span())


def overlaps(span: Span, others: Iterable[Span]) -> bool:
    """Whether `span` shares a character with one of `others`."""
    return any(span[0] < end and start < span[1] for start, end in others)


class Reading:
    """One text, read once; everything found is cached."""

    def __init__(self, text: str, today: date) -> None:
        self.text = text[:MAX_TEXT].replace("\u2019", "'")
        self.today = today

    @cached_property
    def tokens(self) -> list[Token]:
        """Its words."""
        return [Token(stem(match.group()), *match.span()) for match in _WORD.finditer(self.text)]

    @cached_property
    def stems(self) -> frozenset[str]:
        """Stems of its words that carry meaning."""
        return frozenset(content_stems(self.text))

    @cached_property
    def ahead(self) -> list[Dates]:
        """Dates, those without a year in the future."""
        return find_dates(self.text, self.today)

    @cached_property
    def behind(self) -> list[Dates]:
        """Dates, those without a year in the past."""
        return find_dates(self.text, self.today, past=True)

    @cached_property
    def nights(self) -> tuple[int, Span] | None:
        """How long."""
        return find_nights(self.text)

    @cached_property
    def numbers(self) -> list[Number]:
        """Numbers that are no part of a date, an e-mail address or a position."""
        taken = [item.span for item in self.ahead] + [item.span for item in self.emails]
        taken += [item.span for item in self.positions]
        return [item for item in _numbers(self.text) if not overlaps(item.span, taken)]

    @cached_property
    def positions(self) -> list[Position]:
        """Positions in a list."""
        taken = [item.span for item in self.ahead]
        return [item for item in _positions(self.text) if not overlaps(item.span, taken)]

    @cached_property
    def emails(self) -> list[Email]:
        """E-mail addresses."""
        return list(_emails(self.text))

    @cached_property
    def phone(self) -> tuple[str, Span] | None:
        """A telephone number."""
        match = _PHONE.search(self.text)
        return (match.group(), match.span()) if match else None

    def negated(self, span: Span) -> bool:
        """Whether "no" or "without" stands right before `span`."""
        return bool(_NEGATED.search(self.text[max(0, span[0] - 30) : span[0]]))
