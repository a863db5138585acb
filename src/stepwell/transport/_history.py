"""Reading a channel backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from stepwell._clock import Clock
from stepwell.errors import ChannelError, HistoryFetchError
from stepwell.wire import Channel, Cursor, Delivery, HistoryPage

from ._attempts import in_four_attempts

__all__ = ["HistoryWalk", "fetch_page"]


async def fetch_page(channel: Channel, before: Cursor, limit: int, clock: Clock) -> HistoryPage:
    """Read a page, in up to four attempts.

    Raises:
        HistoryFetchError: All failed; the last failure is its cause.
    """
    try:
        return await in_four_attempts(lambda: channel.history(before=before, limit=limit), clock, ChannelError)
    except ChannelError as error:
        raise HistoryFetchError(
            "A page of history could not be read in 4 attempts: try again, the place is kept.", channel=channel.name
        ) from error


class HistoryWalk:
    """Goes through what was on the channel before the session, newest page first, each page once.

    Args:
        channel: Which.
        before: Where the session's subscription began.
        page_size: Messages in a page.
        apply: Takes a page in, given oldest first. Must not wait.
        clock: For the time between attempts.
    """

    def __init__(
        self,
        channel: Channel,
        before: Cursor,
        page_size: int,
        apply: Callable[[Sequence[Delivery]], object],
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._next: Cursor | None = before
        self._page_size = page_size
        self._apply = apply
        self._clock = clock
        self._turn = anyio.Lock()

    @property
    def has_more(self) -> bool:
        """Whether there may be older messages. They are read once: false for ever after the last page."""
        return self._next is not None

    def finish(self) -> None:
        """There is nothing older that is not known: a snapshot brought everything. A page under way is dropped."""
        self._next = None

    async def load_until(self, enough: Callable[[], bool]) -> bool:
        """Take pages in until `enough()`, looked at before each page, or until there are no more.

        One caller at a time; others wait for their turn. Cancelled, a page under way is read again by the next.

        Returns:
            `enough()`.

        Raises:
            HistoryFetchError: A page could not be read. What was taken in stays, and the walk can be continued.
        """
        async with self._turn:
            while not enough():
                place = self._next
                if place is None:
                    return False
                page = await fetch_page(self._channel, place, self._page_size, self._clock)
                if self._next is not place:
                    return enough()  # a snapshot came in between; the page is of what it replaced
                self._next = page.next
                self._apply(list(reversed(page.items)))
            return True
