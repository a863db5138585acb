"""The event log of a node: what was decoded for it, by message, in the order of the channel.

The order of arrival is not the order of the channel: history arrives newest page first, and two publishers' messages
may be delivered the other way round within the reorder window. So a node keeps the decoded events and folds them anew
whenever appending to what it has folded would not give what the channel's order gives.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, TypeAlias

from ._codec import Direction

__all__ = ["Attempt", "EventLog", "LogEntry", "Recorded"]

Attempt: TypeAlias = tuple[str, str]
"""A step's id and the serial of the start of one of its attempts."""


class Recorded(Enum):
    """What became of a delivery's events."""

    KNOWN = "known"
    """They are in the log already, or are an edit of a message that is no stream: nothing is to be folded."""
    LAST = "last"
    """They are the newest of the log: folding them onto what there is is right."""
    EARLIER = "earlier"
    """There are newer ones: everything is to be folded anew."""


class LogEntry:
    """The events of one message.

    Attributes:
        serial: The message.
        message_id: Its `codec-message-id`.
        events: In the order of their mutations.
        version: The newest mutation among them.
        attempt: Whose output it is; None for inputs and for outputs outside of steps.
    """

    __slots__ = ("attempt", "events", "message_id", "serial", "version")

    def __init__(self, serial: str, message_id: str, attempt: Attempt | None) -> None:
        self.serial = serial
        self.message_id = message_id
        self.attempt = attempt
        self.events: list[tuple[Direction, Any]] = []
        self.version = ""


class EventLog:
    """See the module."""

    __slots__ = ("_entries", "_order", "swept")

    def __init__(self) -> None:
        self._entries: dict[str, LogEntry] = {}
        self._order: list[str] = []
        self.swept = False

    def record(
        self,
        serial: str,
        version: str,
        message_id: str,
        events: Sequence[tuple[Direction, Any]],
        attempt: Attempt | None,
        *,
        streamed: bool,
    ) -> Recorded:
        """Take one delivery's events in. `events` is not empty."""
        entry = self._entries.get(serial)
        if entry is None:
            entry = self._entries[serial] = LogEntry(serial, message_id, attempt)
            if not self._order or serial > self._order[-1]:
                self._order.append(serial)
            else:
                insort(self._order, serial)
        elif not streamed or version <= entry.version:
            return Recorded.KNOWN
        entry.version = version
        if self.swept:
            return Recorded.LAST  # outside the reorder window: it cannot be put where it belongs any more
        entry.events.extend(events)
        return Recorded.LAST if serial == self._order[-1] else Recorded.EARLIER

    def absorb(self, other: EventLog) -> None:
        """Take the entries of another node's log in, where one turns out to be the other."""
        for serial, entry in other._entries.items():
            if serial not in self._entries:
                self._entries[serial] = entry
                insort(self._order, serial)

    def sweep(self) -> None:
        """Forget the events. What the log has seen is remembered, so that it is not folded twice."""
        self.swept = True
        for entry in self._entries.values():
            entry.events = []

    def __iter__(self) -> Iterator[LogEntry]:
        """The entries, in the order of the channel."""
        return (self._entries[serial] for serial in self._order)
