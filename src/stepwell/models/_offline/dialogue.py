"""What the offline model does next: call a tool with what was said, say a tool's result, ask, or make small talk.

It reads what any model reads: the system prompt, the history and the tools. Three kinds of lines of a system
prompt are said as they are, because they are written to be said: `Greeting: ...`, in return for a greeting,
`Ask next: ...`, where the model would otherwise make up a question from a tool's missing parameter, and `Say: ...` in a
stage without tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, cast

from stepwell.messages import AssistantMessage, DirectMessage, Message, ToolCall, ToolResult, UserMessage
from stepwell.models._types import ModelRequest, ToolSchema

from .language import (
    MAX_TEXT,
    Reading,
    content_stems,
    find_dates,
    find_phrase,
    listed,
    overlaps,
    says_no,
    says_yes,
    sentences,
    words,
)
from .slots import EXPLICIT, RAW, TYPED, Fill, Known, Slot, fill, fill_object, slots_of

__all__ = ["Call", "Reply", "decide"]

SELF = (
    "I am Stepwell's offline model: a set of rules that runs on this machine, not a language model. I understand plain "
    "requests; anything finer needs a real model."
)

_TRIGGER = 2.0
"""How much of a tool's own words a text must use to call it when it gives no parameter."""

_MAX_CALLS = 4
"""Calls made for one message of the user, at most."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call to make."""

    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer: text, or one call."""

    text: str = ""
    call: Call | None = None


# --- tools -----------------------------------------------------------------------------------------------------------


class Tool:
    """A tool with its slots and the words that belong to it."""

    def __init__(self, schema: ToolSchema) -> None:
        self.name = schema.name
        self.description = " ".join(schema.description.split())
        self.slots = slots_of(schema.parameters)
        self.required: list[Slot] = [slot for slot in self.slots if slot.required]
        self.phrases = re.findall(r"\"([^\"]{2,60})\"", self.description)
        self.name_stems = frozenset(content_stems(self.name))
        self.stems = frozenset(content_stems(re.sub(r"\"[^\"]*\"", " ", self.description))) - self.name_stems

    @property
    def label(self) -> str:
        """What it does, in a few words."""
        plain = re.sub(r"\s*\([^)]*\)", "", self.description).strip()
        first = _you(sentences(plain)[0].rstrip(".")) if plain else self.name.replace("_", " ")
        return first[:1].lower() + first[1:] if first[1:2].islower() else first

    def claimed(self, reading: Reading) -> float:
        """How much the text says one of the phrases quoted in the description."""
        return max((3 + 0.1 * len(p) for p in self.phrases if any(find_phrase(reading.tokens, p))), default=0.0)


_AGREES = frozenset(listed("confirm accept proceed submit agre approv complet"))
_REFUSES = frozenset(listed("cancel reject declin chang stop abort discard back restart"))


@dataclass(frozen=True, slots=True)
class Plan:
    """A tool that may be called, what is known for it and how well it fits."""

    tool: Tool
    fills: Mapping[str, Fill]
    score: float
    lexical: float
    missing: tuple[Slot, ...] = ()

    @property
    def sure(self) -> bool:
        """Whether something was said in so many words."""
        return any(one.strength == EXPLICIT for one in self.fills.values())

    @property
    def args(self) -> dict[str, Any]:
        """The arguments, in the order of the schema."""
        return {slot.name: self.fills[slot.name].value for slot in self.tool.slots if slot.name in self.fills}


# --- the conversation ------------------------------------------------------------------------------------------------


def decide(request: ModelRequest, today: date) -> Reply:
    """Decide what to answer.

    Args:
        request: What any model gets.
        today: The date to use if the system prompt names none ("Today is 2026-05-01").
    """
    talk = Talk(request, _today((request.system or "")[:MAX_TEXT], today))
    if request.output_schema is not None:
        return Reply(json.dumps(fill_object(request.output_schema, talk.document, talk.today), ensure_ascii=False))
    return talk.reply()


def _today(system: str, otherwise: date) -> date:
    for match in re.finditer(
        r"\b(?:today|current date|the date is)\b(?: is|'s date is|:)?\W*([^\n]{6,40})", system, re.I
    ):
        found = find_dates(match[1], otherwise)
        if found and found[0].span[0] < 16:
            return found[0].first
    return otherwise


def _is_start(message: UserMessage) -> bool:
    """Whether a message of code only says that a stage begins."""
    return message.by == "code" and message.text.strip().casefold() in ("", "start")


class Talk:
    """One request, read."""

    def __init__(self, request: ModelRequest, today: date) -> None:
        self.system = (request.system or "")[:MAX_TEXT]
        self.today = today
        self.messages: Sequence[Message] = request.messages
        self.tools = [Tool(schema) for schema in request.tools]
        self.at = max((i for i, m in enumerate(self.messages) if isinstance(m, UserMessage)), default=-1)
        self.since = self.messages[self.at + 1 :]

    @property
    def text(self) -> str:
        """What the user said last; empty if only the stage began."""
        last = self.messages[self.at] if self.at >= 0 else None
        return last.text[:MAX_TEXT] if isinstance(last, UserMessage) and not _is_start(last) else ""

    @property
    def document(self) -> str:
        """What to extract from: the user's messages, or the prompt if there are none."""
        said = [m.text for m in self.messages if isinstance(m, UserMessage) and not _is_start(m) and m.text.strip()]
        return said[-1] if said else self.system

    @cached_property
    def reading(self) -> Reading:
        """The text, read."""
        return Reading(self.text, self.today)

    @cached_property
    def shown(self) -> str:
        """The last thing said to the user before the text."""
        return _shown(self.messages[: max(self.at, 0)])

    @cached_property
    def question(self) -> str:
        """The question the user was asked last, or the last sentence."""
        return _question(self.shown)

    @cached_property
    def phrases(self) -> tuple[str, ...]:
        """Names in what was shown lately and in the system prompt, longest first."""
        texts = [m.text for m in self.messages[-12:] if isinstance(m, (AssistantMessage, DirectMessage))]
        found = {match for text in [self.system, *texts] for match in _NAME.findall(text[:MAX_TEXT])}
        return tuple(sorted(found, key=lambda phrase: (-len(phrase), phrase)))

    # --- what to do

    def reply(self) -> Reply:
        """The next reply."""
        results = [message for message in self.since if isinstance(message, ToolResult)]
        if results and isinstance(self.messages[-1], ToolResult):
            call = self.next_call(results)
            return Reply(call=call) if call else Reply(self.relay(results))
        if self.since or not self.text.strip():
            return Reply(self.opening())
        return self.converse()

    def opening(self) -> str:
        """The first words of a stage: what the tools said on the way here, then the first question."""
        before: list[ToolResult] = []
        for message in reversed(self.messages[: max(self.at, 0)]):
            if not isinstance(message, ToolResult):
                break
            before.insert(0, message)
        if not self.tools and (words_ := _line(self.system, "say")):
            return words_
        if not self.tools and re.search(r"\b(?:goodbye|farewell|is over)\b", self.system, re.IGNORECASE):
            return "Thank you, and goodbye!"
        greeting = "" if any(isinstance(m, (AssistantMessage, DirectMessage)) for m in self.messages) else self.greeting
        return _joined(greeting, *(say(result) for result in before), self.ask_next())

    def converse(self) -> Reply:
        """Answer what the user said."""
        reading = self.reading
        plan = self.best([])
        if plan and not plan.missing:
            return Reply(call=Call(plan.tool.name, plan.args))
        agreed = self.agreed() if not plan else None
        if agreed:
            return Reply(call=agreed)
        small = self.small_talk()
        if small:
            return Reply(small)
        if plan:
            return Reply(self.ask(plan.missing[0]))
        if says_no(reading.text):
            return Reply("All right. What would you like instead?")
        if says_yes(reading.text):
            return Reply(self.ask_next())
        return Reply(self.lost())

    def best(self, called: Sequence[str]) -> Plan | None:
        """The tool that fits the text best; with `missing` slots if it cannot be called yet."""
        used = [
            span
            for name in called
            for plan in self.plans
            if plan.tool.name == name
            for f in plan.fills.values()
            for span in f.spans
        ]
        plans = [plan for plan in self.plans if plan.tool.name not in called]
        if called:
            # Whoever acts on the rest of a message must be sure: words of their own, or a phrase of the tool's.
            plans = [
                plan
                for plan in plans
                if not plan.missing
                and (
                    any(
                        f.strength == EXPLICIT and not any(overlaps(s, used) for s in f.spans)
                        for f in plan.fills.values()
                    )
                    if plan.tool.slots
                    else plan.tool.claimed(self.reading) > 0
                )
            ]
        # What was said is passed on before anything is done with it.
        told = any(plan.fills and not plan.missing and plan.sure for plan in plans)
        return max(
            plans,
            key=lambda plan: plan.score + (0 if plan.missing else 2) - (10 if told and not plan.tool.slots else 0),
            default=None,
        )

    @cached_property
    def plans(self) -> list[Plan]:
        """Every tool that has something to do with the text."""
        return [plan for tool in self.tools if (plan := self.plan(tool))]

    def plan(self, tool: Tool) -> Plan | None:
        """How a tool fits the text, or `None`."""
        reading = self.reading
        lexical = self.lexical(tool, reading)
        no = says_no(reading.text)
        if no and not (tool.name_stems | tool.stems) & _REFUSES and not tool.claimed(reading):
            lexical = 0.0
        fills = dict(fill(tool.slots, reading, Known(self.expected(tool, self.text, self.question), self.phrases)))
        sure = sum(f.strength for f in fills.values() if f.strength >= TYPED)
        raw = any(f.strength == RAW for f in fills.values())
        for slot in tool.required:
            if slot.kind == "reference" and slot.name not in fills and lexical >= 0.5 and self.pointed:
                for match in re.finditer(r"\b(?:it|that one|this one)\b", reading.text, re.IGNORECASE):
                    fills[slot.name] = Fill(self.pointed, TYPED, (match.span(),))
        if fills:
            fills.update(self.earlier(tool, fills))
        else:
            fills.update(self.until(tool))
        missing = tuple(slot for slot in tool.required if slot.name not in fills)
        if not fills and (lexical < _TRIGGER or (tool.slots and not missing)):
            return None
        return Plan(tool, fills, sure + (0.5 if raw else 0) + lexical, lexical, missing)

    def lexical(self, tool: Tool, reading: Reading) -> float:
        """How much of the tool's own words the text uses; words that many tools share count less."""
        score = tool.claimed(reading)
        for one in reading.stems & (tool.name_stems | tool.stems):
            owners = sum(one in other.name_stems or one in other.stems for other in self.tools)
            score += (2.0 if one in tool.name_stems else 0.6) / owners
        return score

    def until(self, tool: Tool) -> dict[str, Fill]:
        """The last day, if the text gives a length and the first day was passed on before."""
        nights = self.reading.nights[0] if self.reading.nights else 0
        if not nights and len(self.reading.tokens) == 1 and {"night", "day"} & set(content_stems(self.question)):
            nights = int(next((number.value for number in self.reading.numbers), 0))
        if not nights:
            return {}
        for message in reversed(self.messages[: max(self.at, 0)]):
            for call in message.calls if isinstance(message, AssistantMessage) else ():
                start = next((_args(call).get(s.name) for s in tool.slots if s.kind == "date"), None)
                if call.name == tool.name and isinstance(start, str):
                    both = Reading(f"{start[:10]} for {nights} nights", self.today)
                    return fill([slot for slot in tool.slots if slot.kind == "date"], both, Known())
        return {}

    def earlier(self, tool: Tool, fills: Mapping[str, Fill]) -> dict[str, Fill]:
        """Required values that were said before: in the last call of this tool, or in earlier messages."""
        found: dict[str, Fill] = {}
        open_: list[Slot] = [slot for slot in tool.required if slot.name not in fills]
        for index in range(self.at - 1, max(-1, self.at - 13), -1):
            message = self.messages[index]
            if not open_ or (isinstance(message, UserMessage) and _is_start(message)):
                break
            if isinstance(message, AssistantMessage):
                for call in message.calls:
                    args: Mapping[str, Any] = _args(call) if call.name == tool.name else {}
                    found.update({slot.name: Fill(args[slot.name], TYPED) for slot in open_ if slot.name in args})
            elif isinstance(message, UserMessage):
                asked = _question(_shown(self.messages[:index]))
                expected = self.expected(tool, message.text, asked)
                said = fill(tool.slots, Reading(message.text, self.today), Known(expected, self.phrases))
                found.update({s.name: Fill(said[s.name].value, TYPED) for s in open_ if s.name in said})
            open_ = [slot for slot in open_ if slot.name not in found]
        return found

    def expected(self, tool: Tool, text: str, question: str) -> str:
        """The slot of this tool that a question asked for, if a text may be the answer."""
        if _is_chat(text) or not question:
            return ""
        asked = frozenset(content_stems(question))

        def score(slot: Slot) -> tuple[int, bool]:
            return 2 * len(asked & slot.name_stems) + len(asked & slot.stems), slot.required

        best = max(tool.slots, key=score, default=None)
        if best and score(best)[0] > 0:
            rivals = (score(slot)[0] for other in self.tools if other is not tool for slot in other.slots)
            return best.name if score(best)[0] >= max(rivals, default=0) else ""
        only = sum(bool(other.required) for other in self.tools) == 1
        return tool.required[0].name if only and tool.required and question.endswith("?") else ""

    def agreed(self) -> Call | None:
        """The tool that a bare yes to the last question means; or a bare no, to "Is it this? Or shall I do that?"."""
        or_else = bool(re.match(r"or\b", self.question, re.I)) and len(self.reading.tokens) <= 3
        if not (says_yes(self.text) or (says_no(self.text) and or_else)) or not _YES_OR_NO.match(self.question):
            return None
        if re.search(r"\w,? or (?:do|shall|should|would|is|are|can)\b", self.question, re.I):
            return None
        asked = Reading(self.question, self.today)
        best: tuple[float, Call | None] = (0.0, None)
        for tool in self.tools:
            fits = self.lexical(tool, asked)
            score = fits + (1.5 if fits and tool.name_stems & _AGREES else 0)
            args = {slot.name: self.pointed for slot in tool.required if slot.kind == "reference" and self.pointed}
            if score > max(best[0], 0.5) and len(args) == len(tool.required):
                best = (score, Call(tool.name, args))
        return best[1]

    @cached_property
    def pointed(self) -> str:
        """The one thing that was shown last, if it was one: what "it" means."""
        shown = Reading(self.shown, self.today)
        listed_ = [one for one in self.phrases if one in self.system and any(find_phrase(shown.tokens, one))]
        return listed_[0] if len(listed_) == 1 else ""

    def next_call(self, results: Sequence[ToolResult]) -> Call | None:
        """One more call for the same message: another reading of a refused value, or what else the message asks."""
        calls = [call for m in self.since if isinstance(m, AssistantMessage) for call in m.calls]
        if not calls or not self.text or len(calls) >= _MAX_CALLS:
            return None
        last = calls[-1]
        plan = next((plan for plan in self.plans if plan.tool.name == last.name), None)
        if plan:
            told = frozenset(content_stems(_plain(results[-1].content)))
            for slot in plan.tool.slots:
                given = plan.fills.get(slot.name)
                tried = [_args(call).get(slot.name) for call in calls if call.name == last.name]
                fresh = next((one for one in given.other if one not in tried), None) if given else None
                if fresh is not None and (told & slot.stems or _refused(results[-1])):
                    return Call(last.name, {**plan.args, slot.name: fresh})
        if any(_refused(result) for result in results):
            return None
        more = self.best([call.name for call in calls])
        return Call(more.tool.name, more.args) if more else None

    # --- what to say

    def relay(self, results: Sequence[ToolResult]) -> str:
        """Say what the tools said, and go on."""
        last = {result.name: result for result in results}  # of several calls of one tool, the last one counts
        said = list(dict.fromkeys(one for result in last.values() if (one := say(result))))
        text = "\n".join(said) if any("\n" in one for one in said) else " ".join(said)
        failed = _refused(results[-1])
        return (
            _joined(text, "" if text.rstrip().endswith("?") else self.again(results[-1]) if failed else self.ask_next())
            or "Done."
        )

    def again(self, result: ToolResult) -> str:
        """Ask once more for the value a tool refused."""
        tool = next((tool for tool in self.tools if tool.name == result.name), None)
        told = _plain(result.content)
        slots: tuple[Slot, ...] = tool.slots if tool else ()
        for slot in slots:
            if len(slots) == 1 or re.search(rf"(?m)^{re.escape(slot.name)}\b", told):
                return self.ask(slot)
        return self.ask_next()

    @cached_property
    def greeting(self) -> str:
        """The prompt's greeting, or a plain one."""
        return _line(self.system, "greeting")

    def ask_next(self) -> str:
        """The prompt's next question, or one for the first parameter that a tool misses."""
        asked = _line(self.system, "ask next")
        if asked:
            return asked
        for tool in self.tools:
            if tool.required:
                return self.ask(tool.required[0])
        return self.capabilities()

    def ask(self, slot: Slot) -> str:
        """A question for one slot."""
        asked = _line(self.system, "ask next")
        if asked and frozenset(content_stems(asked)) & slot.name_stems:
            return asked
        choices = _values(slot)
        hint = f" Possible: {_listing(choices)}." if 0 < len(choices) <= 12 else ""
        return f"Could you tell me {_noun(slot)}?{hint}"

    def capabilities(self) -> str:
        """What can be done here."""
        if not self.tools:
            return "What can I do for you?"
        return "Here I can:\n" + "\n".join(f"- {tool.label}" for tool in self.tools)

    def lost(self) -> str:
        """What to say to something that was not understood."""
        if self.shown.startswith("Sorry, I did not"):
            return _joined("Sorry, I did not understand that either.", self.capabilities())
        for tool in self.tools:
            slot = next(
                (slot for slot in tool.slots if slot.name == self.expected(tool, self.text, self.question)), None
            )
            if slot and (choices := _values(slot)):
                return f"Sorry, I did not get that. For {_noun(slot)} you can choose from {_listing(choices)}."
        return _joined("Sorry, I did not get that.", self.ask_next() if self.tools else SELF)

    def small_talk(self) -> str:
        """An answer to what is no business of any tool, or an empty text."""
        text = self.reading.text
        if re.search(
            r"\b(?:are|r) you (?:a |an )?(?:real|human|robot|bot|ai|person|machine|llm|chatgpt|language)"
            r"|who are you|what are you\b",
            text,
            re.I,
        ):
            return _joined(SELF, self.ask_next())
        if re.match(r"\W*(?:hi|hello|hey|hiya|howdy|greetings|good (?:morning|afternoon|evening|day))\b", text, re.I):
            return _joined(self.greeting or "Hello!", self.ask_next())
        if re.search(r"\bhow are you\b|\bhow'?s it going\b", text, re.I):
            return _joined("I am fine, thank you: rules never sleep.", self.ask_next())
        if re.match(r"\W*(?:bye|goodbye|good bye|see you|that'?s all|that is all|good night)\b", text, re.I):
            return "Goodbye!"
        if re.match(r"\W*(?:thanks|thank you|thx|cheers|great|nice|cool|wonderful|lovely|awesome)\b", text, re.I):
            return _joined("You are welcome.", self.ask_next())
        if re.search(r"\b(?:which|what|list|choose)\b", text, re.I):
            asked = self.choices_asked()
            if asked:
                return asked
        if re.search(
            r"\bhelp\b|what (?:can|could|do) (?:you|i|we)\b|\boptions\b|how does (?:this|it) work", text, re.I
        ):
            return self.capabilities()
        return ""

    def choices_asked(self) -> str:
        """The values of the slot a question is about: "which cities do you have?"."""
        best: tuple[int, Slot | None] = (0, None)
        for slot in (slot for tool in self.tools for slot in tool.slots):
            score = len(self.reading.stems & slot.name_stems)
            if score > best[0] and _values(slot):
                best = (score, slot)
        return f"You can choose from {_listing(_values(best[1]))}." if best[1] else ""


# --- sentences -------------------------------------------------------------------------------------------------------


def _is_chat(text: str) -> bool:
    """Whether a text is a question or a courtesy rather than an answer."""
    return text.rstrip().endswith("?") or bool(
        re.match(
            r"\W*(?:what|which|who|why|where|when|how|can|could|do|does|did|is|are|will|would|show|list|tell me|help"
            r"|hi|hello"
            r"|hey|thanks|thank|bye|goodbye|good (?:morning|afternoon|evening|day)|never ?mind)\b(?!')",
            text,
            re.IGNORECASE,
        )
    )


_NAME = re.compile(
    r"(?<![\w'-])[^\W\d_a-z][\w'-]*"
    r"(?: (?:de|da|do|la|le|des|am|an|der|del|of|the|[^\W\d_a-z][\w'-]*))* [^\W\d_a-z][\w'-]*"
)
_YES_OR_NO = re.compile(
    r"(?:or|and|so|then)?,?\s*(?!could you (?:tell|give))"
    r"(?:shall|should|do|does|did|is|are|would|will|may|can|could|ready|want)\b",
    re.IGNORECASE,
)


def _shown(messages: Sequence[Message]) -> str:
    for message in reversed(messages):
        if isinstance(message, (AssistantMessage, DirectMessage)) and message.text.strip():
            return message.text[-MAX_TEXT:]
    return ""


def _question(text: str) -> str:
    said = sentences(text)
    return next((one for one in reversed(said) if one.endswith("?")), said[-1] if said else "")


def _args(call: ToolCall) -> Mapping[str, Any]:
    args: object = call.args
    return cast("Mapping[str, Any]", args) if isinstance(args, Mapping) else {}


def _joined(*parts: str) -> str:
    kept = [part.strip() for part in parts if part.strip()]
    return ("\n\n" if any("\n" in part for part in kept) else " ").join(kept)


def _line(system: str, label: str) -> str:
    """The last line of the prompt that begins with this label."""
    found = re.findall(rf"(?mi)^[^\w\n]{{0,8}}{label}:[ \t]*(\S[^\n]*)$", system)
    return str(found[-1]).strip().strip('"') if found else ""


def _values(slot: Slot) -> list[str]:
    source = slot.item if slot.kind == "list" and slot.item else slot
    return list(dict.fromkeys(str(value).replace("_", " ") for value in _in_order(source)))


def _in_order(slot: Slot) -> Iterator[Any]:
    known = [value for _, value in slot.choices]
    if "const" in slot.schema:
        yield from known[:1]
    for keyword in ("enum", "examples"):
        listed_ = slot.schema.get(keyword)
        if isinstance(listed_, list):
            yield from (value for value in cast("list[Any]", listed_) if value in known)


def _listing(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}" if values else ""


def _noun(slot: Slot) -> str:
    """The slot as it stands in a question: "your full name"."""
    first = re.split(r"[.;:(=\n]|, for example|, such as|, e\.g\.", slot.description)[0].strip()
    first = re.sub(r"^(?:the )?(?:customer|user|guest|person|applicant|patient|client)'s ", "your ", first, flags=re.I)
    if not words(first):
        first = slot.name.replace("_", " ")
    if re.match(r"(?:your|the|a|an|how|which|what|when|where|who|whether)\b", first, re.I):
        return first[:1].lower() + first[1:]
    lower = first[:1].lower() + first[1:] if first[1:2].islower() else first
    return f"the {lower}" if " of " in lower else f"your {lower}"


def _refused(result: ToolResult) -> bool:
    content = cast("object", result.content)
    return result.outcome != "ok" or (
        isinstance(content, Mapping) and cast("Mapping[str, Any]", content).get("accepted") is False
    )


def _plain(content: Any) -> str:
    """A tool result as text: the sentence in it, or its entries line by line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        entries = cast("Mapping[str, Any]", content)
        for key in ("feedback", "message", "error", "reason", "text"):
            if isinstance(entries.get(key), str):
                return str(entries[key])
        return "\n".join(f"{_key(key)}: {_inline(value)}" for key, value in entries.items())
    if isinstance(content, (list, tuple)):
        return "\n".join(f"- {_inline(item)}" for item in cast("Iterable[Any]", content))
    return str(content)


def _key(key: object) -> str:
    text = str(key).replace("_", " ")
    return text[:1].upper() + text[1:]


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_key(k).lower()}: {_inline(v)}" for k, v in cast("Mapping[Any, Any]", value).items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_inline(item) for item in cast("Iterable[Any]", value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


_WHO = r"(?:the )?(?:customer|user|guest|person|applicant|caller|client|visitor)"
_ASK = re.compile(
    rf"^(?:please )?(?:ask|request)(?: {_WHO}| them| him| her)?(?: again| once more)? "
    r"(for|to|if|whether|what|which|when|where|who|how)\b\s*",
    re.I,
)
_TELL = re.compile(rf"^(?:please )?(?:tell|inform|let)(?: {_WHO}| them)(?: know)?(?: that)?[,:]?\s+", re.I)
_SAY = re.compile(r"^(?:please )?(?:say|reply|answer|explain|mention)(?: that|:)\s*", re.I)


def say(result: ToolResult) -> str:
    """A tool result as the model's own words; instructions to the model become what they ask it to say."""
    text = _plain(result.content).strip()
    if text.casefold() in ("", "input validated", "ok", "true", "done", "accepted"):
        return ""
    if _refused(result) and not isinstance(result.content, str):
        named = re.sub(r"(?m)^(\w+): (?:Value error, )?", lambda m: f"{m[1].replace('_', ' ')}: ", text)
        return f"That did not work: {_one_line(named)}"
    if "\n" in text:
        return text
    return " ".join(_spoken(sentence) for sentence in sentences(text))


def _one_line(text: str) -> str:
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if line.endswith((".", "!", "?")) else line + "."


def _spoken(sentence: str) -> str:
    told = _TELL.sub("", sentence, count=1)
    told = _SAY.sub("", told, count=1)
    match = _ASK.match(told)
    if not match:
        return _you(told[:1].upper() + told[1:]) if told != sentence else sentence
    rest, word = _you(told[match.end() :].rstrip(" .?!")), match[1].lower()
    if word == "for":
        return f"Could you give me {rest}?"
    if word == "to":
        return f"Could you {rest}?"
    if word in ("if", "whether"):
        return f"Could you tell me whether {rest}?"
    return f"Could you tell me {word} {rest}?"


def _you(text: str) -> str:
    text = re.sub(rf"\b{_WHO}'s\b|\btheir\b", "your", text, flags=re.I)
    text = re.sub(r"\bthey\b", "you", text, flags=re.I)
    return re.sub(rf"\b{_WHO} (?=want|would|can|could|should|have\b)", "you ", text, flags=re.I)
