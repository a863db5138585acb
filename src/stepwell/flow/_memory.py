"""Memory: the conversation's messages by namespace, as steps see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepwell.errors import FlowDefinitionError
from stepwell.flow._runtime import Runtime
from stepwell.messages import Message, UserMessage
from stepwell.models import ModelSelection

__all__ = ["Conversation", "FlowMemory", "Memory", "SummaryRule", "check_namespace"]

_NAMESPACE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,127}\Z")
_REFUSED = frozenset({"__proto__", "constructor", "prototype"})


def check_namespace(ns: str, **ids: str) -> str:
    """Return `ns`.

    Args:
        ns: The name.
        **ids: Whose it is, for the error.

    Raises:
        FlowDefinitionError: It is not a memory namespace.
    """
    if not _is_namespace(ns):
        whose = f" (step {ids['stage']} of {ids['flow']})" if "stage" in ids else ""
        raise FlowDefinitionError(
            f"{ns!r} is not a memory namespace{whose}: use a letter, then letters, digits, _ and -, at most 128 in "
            "all; use_memory names another.",
            **ids,
        )
    return ns


@lru_cache(maxsize=256)
def _is_namespace(ns: str) -> bool:
    """Steps are built anew in every turn, and so name their namespaces."""
    return _NAMESPACE.match(ns) is not None and ns not in _REFUSED


class Memory:
    """A view of one namespace. Iterates over messages, oldest first; the system message is never among them."""

    __slots__ = ("_ns", "_runtime", "_stage")

    def __init__(self, runtime: Runtime, ns: str, stage: str) -> None:
        self._runtime = runtime
        self._ns = ns
        self._stage = stage

    def append(self, message: Message | str) -> Message:
        """Append a message (text is a user message by code) and return it with its id.

        Raises:
            HistoryError: No provider would accept it there.
        """
        if isinstance(message, str):
            message = UserMessage(content=message, by="code")
        return self._runtime.add_message(self._ns, self._stage, message)

    @property
    def last(self) -> Message | None:
        """The newest message."""
        messages = self._runtime.messages(self._ns)
        return messages[-1] if messages else None

    def erase(self) -> None:
        """Drop all messages; state stays."""
        self._runtime.erase(self._ns)

    def __iter__(self) -> Iterator[Message]:
        return iter(tuple(self._runtime.messages(self._ns)))

    def __len__(self) -> int:
        return len(self._runtime.messages(self._ns))


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the person asked: the newest message, and those before it, oldest first."""

    request: str | None
    prior_requests: tuple[str, ...]


def conversation(messages: Sequence[Message], max_prior: int) -> Conversation:
    """Read the person's messages out of a history."""
    asked = [m.text for m in messages if isinstance(m, UserMessage) and m.by == "user"]
    prior = tuple(asked[:-1][-max_prior:]) if max_prior > 0 else ()
    return Conversation(asked[-1] if asked else None, prior)


@dataclass(frozen=True, slots=True)
class SummaryRule:
    """How one namespace is compacted; see `FlowMemory.enable_summary`."""

    ns: str
    model: ModelSelection
    min_messages: int
    recent_messages: int


class FlowMemory:
    """`flow.memory`: what applies to whole namespaces."""

    __slots__ = ("rules",)

    def __init__(self) -> None:
        self.rules: dict[str, SummaryRule] = {}

    def enable_summary(
        self, ns: str, *, model: ModelSelection | str, min_messages: int = 16, recent_messages: int = 8
    ) -> None:
        """Compact a namespace at the end of a turn once it has `min_messages`, keeping the `recent_messages` newest.

        Call it in `init`. The cut is between complete exchanges; the summary must be shorter than what it replaces;
        a failure never fails the turn.

        Raises:
            ValueError: `recent_messages` is not below `min_messages`, or below 1.
        """
        if not 1 <= recent_messages < min_messages:
            raise ValueError("enable_summary needs 1 <= recent_messages < min_messages.")
        self.rules[check_namespace(ns)] = SummaryRule(ns, ModelSelection.parse(model), min_messages, recent_messages)
