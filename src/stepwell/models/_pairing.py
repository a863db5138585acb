"""What every adapter does to text: histories in an order that providers accept (promise P8), JSON out of its fence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import msgspec

from stepwell.messages import AssistantMessage, DirectMessage, Message, ToolResult, UserMessage

__all__ = ["Answer", "Answers", "Reply", "paired", "result_text", "unfenced"]

_FENCE = re.compile(r"```[a-zA-Z]*\s*\n(.*?)```", re.DOTALL)

_NOT_RUN = "This call was not run: the turn ended before it."
_UNKNOWN = "Whether this call took effect is unknown. Do not assume that it did, or that it did not."
_FAILED = "This call failed."


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply with the ids its calls have for this provider, in order."""

    message: AssistantMessage
    wires: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One call's result; `None` where there is none."""

    wire: str
    name: str
    result: ToolResult | None


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of one reply's calls, all of them."""

    answers: tuple[Answer, ...]


Turn: TypeAlias = UserMessage | DirectMessage | Reply | Answers


def paired(messages: Sequence[Message], fits: Callable[[str], object]) -> Iterator[Turn]:
    """Repair a history on its way out.

    A call without a result gets an answer without one, a result without a call is left out. An id that the provider
    does not take, or has seen before, goes out as another; which one is a function of the id and of how often it came
    before, so that nothing needs to be stored, and the provider that gave the id gets it back.

    Args:
        messages: The history.
        fits: Whether the provider takes an id (truthy).
    """
    seen: dict[str, int] = {}
    waiting: dict[str, list[Answer]] = {}
    answers: list[Answer] = []
    for message in messages:
        if isinstance(message, ToolResult):
            if open_calls := waiting.get(message.call):
                call = open_calls.pop(0)
                answers.append(Answer(call.wire, call.name, message))
            continue
        yield from _settled(waiting, answers)
        if isinstance(message, AssistantMessage):
            wires = tuple(_wire(call.id, fits, seen) for call in message.calls)
            for call, wire in zip(message.calls, wires, strict=True):
                waiting.setdefault(call.id, []).append(Answer(wire, call.name, None))
            yield Reply(message, wires)
        else:
            yield message
    yield from _settled(waiting, answers)


def _settled(waiting: dict[str, list[Answer]], answers: list[Answer]) -> Iterator[Answers]:
    for open_calls in waiting.values():
        answers.extend(open_calls)
    waiting.clear()
    if answers:
        yield Answers(tuple(answers))
        answers.clear()


def _wire(call: str, fits: Callable[[str], object], seen: dict[str, int]) -> str:
    wire = call if fits(call) else "call_" + sha256(call.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    count = seen.get(wire, 0)
    seen[wire] = count + 1
    return "call_" + sha256(f"{count}:{wire}".encode()).hexdigest()[:32] if count else wire


def result_text(result: ToolResult | None) -> tuple[bool, str]:
    """Whether a result is a failure that may be tried again, and what the model reads.

    A call whose outcome is unknown is no failure: models repeat what failed.
    """
    if result is None:
        return False, _NOT_RUN
    content = result.content
    if content is None or content == "":
        content = {"ok": "", "error": _FAILED, "not_run": _NOT_RUN, "unknown": _UNKNOWN}[result.outcome]
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return result.outcome == "error", text


def unfenced(text: str) -> str:
    """The JSON of a reply that was only asked for JSON: models like to put it into a fence, with a word before it."""
    text = text.strip()
    if not text.startswith(("{", "[")) and (fence := _FENCE.search(text)) is not None:
        return fence[1].strip()
    return text
