"""The one reader of every backend: which rows of a log become which deliveries.

A backend gives a `Log`: its rows by position, a message as it is now, and a way to wait. All rules of delivery are
here. Two facts keep the bookkeeping small:

* Rows come in the order of their positions, so a message was created under this subscription's eyes exactly if its
  position is behind `start`. Only for older ones there is something to remember.
* A row may hold a newer version than its position says: a closed stream has only its final text. Rows up to that
  version are skipped, and the cursor stays the row's position. A reader that continues there sees the newer version
  once more, which loses nothing.

A log can be deleted, and another can come into being under its name, between any two calls. Nothing of the one must be
given out as the other's. `rows` is asked for a log by its name; after the other calls the name is looked at again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from stepwell.errors import ChannelBusyError, InvalidInputError
from stepwell.wire import (
    Action,
    Cursor,
    Data,
    Delivery,
    Extras,
    Gap,
    HistoryPage,
    Subscription,
    cursor_at,
    cursor_position,
    is_open_stream,
    serial_at,
    version_at,
)

__all__ = ["Bounds", "Log", "LogChannel", "LogReader", "Page", "Row"]

MAX_HISTORY = 1_000
"""Messages in a page of history."""

SNAPSHOT_PAGE = 256
"""Messages that are read at once for a snapshot."""

READ_LIMIT = 1_000
"""Rows that are read at once, however many are asked for: what a reader holds is bounded."""

BUSY_SECONDS = 0.1
"""Pause of a reader whose backend is busy."""


class Row(msgspec.Struct, frozen=True):
    """A row of the log, or a message as it is now.

    Attributes:
        position: In the log. Of a message as it is now: where it was created.
        message: Position of the message's create.
        index: Place in its publish call.
        version: Position of the mutation that this shows; later than `position` where a newer version is given.
        name: None in an append, which holds only what was appended.
        data: See `Delivery`.
        extras: See `Delivery`.
        client_id: See `Delivery`.
        timestamp: See `Delivery`.
    """

    position: int
    message: int
    index: int
    version: int
    name: str | None
    data: Data
    extras: Extras | None
    client_id: str | None
    timestamp: int

    @property
    def action(self) -> Action:
        """What the row says was done to the message."""
        return "append" if self.name is None else "create" if self.version == self.message else "update"


class Bounds(msgspec.Struct, frozen=True):
    """Where a log begins and ends.

    Attributes:
        series: Its name.
        head: Position of the newest row; 0 in an empty log.
        floor: A cursor below this position cannot be continued from.
    """

    series: str
    head: int
    floor: int


class Page(msgspec.Struct, frozen=True):
    """A part of a log.

    Attributes:
        rows: In the order of their positions.
        end: There are no rows but these up to this position.
    """

    rows: Sequence[Row]
    end: int

    @classmethod
    def cut(cls, rows: Sequence[Row], limit: int, end: int) -> Page:
        """The first `limit` of some rows, of which there are no others up to `end`."""
        return cls(rows, end) if len(rows) < limit else cls(rows[:limit], rows[limit - 1].position)


class Log(Protocol):
    """What a backend gives. Raises `ChannelError` where it cannot; after a `ChannelBusyError` the reader asks again."""

    async def bounds(self) -> Bounds:
        """Where the log begins and ends now; it comes into being if there is none, so that it has a name."""
        ...

    async def find(self) -> Bounds | None:
        """The same, or None if there is none."""
        ...

    async def rows(self, series: str, after: int, limit: int) -> Page | None:
        """Rows behind a position, in order, at most `limit`; None if the log has another name or a higher floor.

        A message whose older rows are gone appears once or twice, with its newest version: at the place of its create
        if that is behind `after`, and of its newest mutation.
        """
        ...

    async def message(self, position: int) -> Row | None:
        """A message as it is now; None if it is gone: it was ephemeral, or the log was deleted."""
        ...

    async def messages(self, after: int, limit: int) -> Sequence[Row]:
        """Messages as they are now, created behind a position, in order, without ephemeral ones."""
        ...

    async def messages_before(self, before: int, limit: int) -> Sequence[Row]:
        """Messages as they are now, created at or before a position, newest first, without ephemeral ones."""
        ...

    async def wait(self, series: str, after: int) -> None:
        """Return when the log goes on behind a position, or is not that log any more. May return too early."""
        ...


class LogChannel(Log, Protocol):
    """The reading half of a `Channel`, for a class that is the `Log` of its readers."""

    def subscribe(self, *, after: Cursor | None = None) -> AbstractAsyncContextManager[Subscription]:
        """See `Channel.subscribe`."""
        return _open_reader(self, after)

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        """See `Channel.history`."""
        return await _read_history(self, before, limit)


def to_delivery(row: Row, series: str, action: Action | None = None) -> Delivery:
    """The delivery of a row. In a snapshot it is an `update`, whatever was done."""
    serial = serial_at(row.message, series, row.index)
    return Delivery(
        cursor=cursor_at(row.position, series),
        action=action or row.action,
        serial=serial,
        version=serial if row.version == row.message else version_at(row.version, series),
        name=row.name,
        data=row.data,
        extras=row.extras,
        client_id=row.client_id,
        timestamp=row.timestamp,
    )


class LogReader:
    """A `Subscription` on a `Log`. Made by `LogChannel.subscribe`."""

    __slots__ = ("_forget_at", "_log", "_met", "_newest", "_pending", "_position", "_series", "_snapshot", "_start")

    def __init__(self, log: Log, bounds: Bounds, position: int, *, gap: bool) -> None:
        self._log = log
        self._series = bounds.series
        self._start = self._position = position
        self._met: set[int] = set()  # open streams from before the start that this reader has got in full
        self._newest: dict[int, int] = {}  # versions that were given ahead of their place in the log
        self._forget_at = 64
        self._snapshot: int | None = None  # where the snapshot under way has come to
        self._pending: deque[Delivery | Gap] = deque()
        if gap:
            self._begin_snapshot(bounds)

    @property
    def start(self) -> Cursor:
        """See `Subscription.start`."""
        return cursor_at(self._start, self._series)

    async def read(self, limit: int = 256) -> Sequence[Delivery | Gap]:
        """See `Subscription.read`."""
        if limit < 1:
            raise InvalidInputError(f"A limit of {limit} deliveries: pass at least 1.")
        pending = self._pending
        while not pending:
            try:
                await self._fill(min(limit, READ_LIMIT))
            except ChannelBusyError:
                await asyncio.sleep(BUSY_SECONDS)
        if len(pending) <= limit:
            items = list(pending)
            pending.clear()
            return items
        return [pending.popleft() for _ in range(limit)]

    def __aiter__(self) -> LogReader:
        """Itself."""
        return self

    async def __anext__(self) -> Delivery | Gap:
        """The next item."""
        if not self._pending:
            self._pending.extend(await self.read())
        return self._pending.popleft()

    async def _fill(self, limit: int) -> None:
        """Read on, or wait. What it has found is kept in `_pending` before anything else is awaited."""
        if self._snapshot is not None:
            await self._read_snapshot(self._snapshot)
            return
        page = await self._log.rows(self._series, self._position, limit)
        if page is None:
            self._begin_snapshot(await self._log.bounds())
            return
        if page.end == self._position:
            await self._log.wait(self._series, self._position)
            return
        for row in page.rows:
            delivery = await self._deliver(row)
            # One step, without a point of cancellation: what is in `_pending` is what the position says.
            self._position = row.position
            if delivery is not None:
                self._pending.append(delivery)
        self._position = page.end

    async def _deliver(self, row: Row) -> Delivery | None:
        """What a row becomes; None where this reader has that version already, or its message is gone."""
        message = row.message
        if row.version <= self._newest.get(message, 0):
            return None
        if row.action == "append" and message <= self._start and message not in self._met:
            full = await self._log.message(message)
            if full is None or not await self._is_same():
                return None
            row = msgspec.structs.replace(full, position=row.position)
        if row.version > row.position:
            self._remember(row)
        if message <= self._start:
            if is_open_stream(row.extras):
                self._met.add(message)
            else:
                self._met.discard(message)
        return to_delivery(row, self._series)

    def _remember(self, row: Row) -> None:
        """Skip the rows up to this version. What the log has come past is forgotten, each in its turn twice at most."""
        newest = self._newest
        if len(newest) >= self._forget_at:
            for known in [known for known, version in newest.items() if version <= row.position]:
                del newest[known]
            self._forget_at = max(64, 2 * len(newest))
        newest[row.message] = row.version

    async def _is_same(self) -> bool:
        """Whether what was just read was of this log: names are not given twice, so it was if it still is."""
        bounds = await self._log.find()
        return bounds is not None and bounds.series == self._series

    # -- a gap

    def _begin_snapshot(self, bounds: Bounds) -> None:
        self._series = bounds.series
        self._met.clear()
        self._newest.clear()
        # Everything up to here is in the snapshot, whole: as if the reader began here and had met every message.
        self._start = self._position = bounds.head
        self._snapshot = 0
        self._pending.append(Gap(cursor=cursor_at(bounds.head, bounds.series)))

    async def _read_snapshot(self, after: int) -> None:
        found = await self._log.messages(after, SNAPSHOT_PAGE + 1)
        if not await self._is_same():
            self._begin_snapshot(await self._log.bounds())
            return
        rows = [row for row in found if row.message <= self._start]
        more = len(rows) > SNAPSHOT_PAGE
        for row in rows[:SNAPSHOT_PAGE]:
            if row.version > self._start:
                self._newest[row.message] = row.version
            if is_open_stream(row.extras):
                self._met.add(row.message)
            # The last has the end's cursor: who has got it need not get the snapshot again.
            position = self._start if row is rows[-1] else row.message
            self._pending.append(to_delivery(msgspec.structs.replace(row, position=position), self._series, "update"))
        self._snapshot = rows[SNAPSHOT_PAGE - 1].message if more else None


@contextlib.asynccontextmanager
async def _open_reader(log: Log, after: Cursor | None) -> AsyncGenerator[LogReader]:
    """Begin reading; see `Channel.subscribe`."""
    wanted = None if after is None else cursor_position(after)
    bounds = await log.bounds()
    if wanted is None:
        yield LogReader(log, bounds, bounds.head, gap=False)
        return
    position, series = wanted
    # A position ahead of the log: the backend lost what it had acknowledged, so nothing can be said about before.
    lost = series != bounds.series or position < bounds.floor or position > bounds.head
    yield LogReader(log, bounds, position, gap=lost)


async def _read_history(log: Log, before: Cursor | None, limit: int) -> HistoryPage:
    """See `Channel.history`."""
    if not 1 <= limit <= MAX_HISTORY:
        raise InvalidInputError(f"A page of {limit} messages: ask for 1 to {MAX_HISTORY}.")
    wanted = None if before is None else cursor_position(before)
    bounds = await log.find()
    if bounds is None or (wanted is not None and wanted[1] != bounds.series):
        return HistoryPage(items=())  # nothing yet, or of a log that was deleted: it has no messages any more
    position = bounds.head if wanted is None else wanted[0]
    rows = await log.messages_before(position, limit + 1)
    after = await log.find()
    if after is None or after.series != bounds.series:
        return await _read_history(log, before, limit)  # deleted meanwhile: of which log the rows are is not known
    items = [to_delivery(row, bounds.series) for row in rows[:limit]]
    more = cursor_at(rows[limit].message, bounds.series) if len(rows) > limit else None
    return HistoryPage(items=items, next=more)
