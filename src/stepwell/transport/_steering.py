"""Steering: what clients say into a run while it works, and which of it was answered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._nodes import RunNode

__all__ = ["Steering"]


class Steering:
    """The steering inputs of a run, read from its node, with what this process did about them.

    An input is pending until `drain` sees it, then due until an output is stamped with it. What was stamped by
    another process, or an earlier attempt, is answered.
    """

    def __init__(self) -> None:
        self.trigger: str | None = None  # what this invocation was begun with
        self._drained: dict[str, None] = {}  # in the order of the channel
        self._stamped: set[str] = set()
        self._announced: set[str] = set()

    def unanswered(self, node: RunNode[Any, Any] | None) -> list[str]:
        """`codec-message-id`s of the inputs that no output was stamped with, in the order of the channel."""
        if node is None:
            return []
        answered = self._stamped | {self.trigger}
        return [one for one in dict.fromkeys(_inputs(node)) if one not in answered]

    def drain(self, node: RunNode[Any, Any] | None) -> bool:
        """Take up what is pending. Whether there was any."""
        pending = [one for one in self.unanswered(node) if one not in self._drained]
        self._drained.update(dict.fromkeys(pending))
        return bool(pending)

    def take(self) -> list[str]:
        """The ids that the next output is stamped with."""
        due = [one for one in self._drained if one not in self._stamped]
        self._stamped.update(due)
        return due

    def put_back(self, ids: list[str]) -> None:
        """Nothing was written after all: the next output is stamped with them."""
        self._stamped.difference_update(ids)

    def has_news(self, node: RunNode[Any, Any] | None) -> bool:
        """Whether there is an input that this was not asked about before."""
        news = set(self.unanswered(node)) - self._announced
        self._announced |= news
        return bool(news)


def _inputs(node: RunNode[Any, Any]) -> Iterator[str]:
    # What an invocation was begun with is answered by it, stamped or not.
    triggers = {event.input_codec_message_id for event in node.events if event.verb in ("start", "resume")}
    for entry in node.log:
        steers = entry.attempt is None and any(direction == "input" for direction, _ in entry.events)
        if steers and entry.message_id not in triggers and entry.message_id not in node.answered:
            yield entry.message_id
