"""What a reader knows of a channel, from its deliveries alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from stepwell.wire import Cursor, Delivery, Gap

__all__ = ["View"]


class View:
    """Messages as a reader has them. It checks what every reader may rely on.

    Attributes:
        taken: Every delivery, in order.
        gaps: How many there were.
    """

    def __init__(self) -> None:
        self._messages: dict[str, Delivery] = {}
        self._given: dict[str, str] = {}  # by this subscription
        self.taken: list[Delivery] = []
        self.gaps = 0

    @property
    def cursors(self) -> list[Cursor]:
        """Of every delivery."""
        return [item.cursor for item in self.taken]

    def copy(self) -> View:
        """Another, which knows the same and goes on with another subscription."""
        view = View()
        view._messages = dict(self._messages)
        view.taken = list(self.taken)
        view.gaps = self.gaps
        return view

    def messages(self) -> dict[str, Delivery]:
        """Each message whole, by serial, in the order of the serials."""
        return dict(sorted(self._messages.items()))

    def texts(self) -> dict[str, Any]:
        """Data by serial, in the order of the serials."""
        return {serial: message.data for serial, message in self.messages().items()}

    def length(self) -> int:
        """Of all text together."""
        return sum(len(message.data) for message in self._messages.values() if isinstance(message.data, str))

    def take(self, items: Sequence[Delivery | Gap]) -> None:
        """Take deliveries in.

        Raises:
            AssertionError: One is not what a reader may rely on.
        """
        for item in items:
            if isinstance(item, Gap):
                self.gaps += 1
                self._messages.clear()
                self._given.clear()
            else:
                self._take(item)

    def _take(self, item: Delivery) -> None:
        self.taken.append(item)
        known = self._messages.get(item.serial)
        assert item.action != "append" or item.serial in self._given, "a raw append to a message that was never met"
        assert item.action == "append" or item.name, "a message without its name"
        assert item.version > self._given.get(item.serial, ""), "a version that this subscription has given before"
        self._given[item.serial] = item.version
        if known is not None and item.version <= known.version:
            return  # a newer version was there already: what a cursor taken early gives once more
        if item.action == "append":
            assert known is not None
            assert isinstance(known.data, str)
            assert isinstance(item.data, str)
            item = msgspec.structs.replace(item, name=known.name, data=known.data + item.data)
        self._messages[item.serial] = item
