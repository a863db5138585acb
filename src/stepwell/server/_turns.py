"""One turn as server-sent events: what it says on its channel, or its events where there is none, then its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Final, Protocol

import anyio

from stepwell.engine import Turn, TurnFinished, TurnResult
from stepwell.errors import CallerError
from stepwell.wire import Channel, Cursor, Delivery, Gap, H, Name, transport_headers

from ._events import Chunk, EncodedDeliveries, event
from ._problems import Problem, refusal_of, stopping

__all__ = ["TurnEvents", "ids_of", "turn_events"]

_PAGE: Final = 64
_PAGES: Final = 8
"""How far back the beginning of a turn that is joined late is looked for."""

_LAST_SECONDS: Final = 5.0
"""How long the end of a run may take from its channel to here, once the turn is done."""

_BOUNDARIES: Final = frozenset({Name.RUN_START, Name.RUN_RESUME})
_ENDS: Final = frozenset({Name.RUN_END, Name.RUN_SUSPEND})


class _Steps(Protocol):
    """What comes between the first event and the result."""

    async def more(self) -> Chunk | None:
        """Wait for more; `None`: that was all. Cancelling it loses nothing."""
        ...


class TurnEvents:
    """A turn's events: `turn` names it, then come what it does, and `result`, or `error` with a problem document.

    Args:
        turn: The turn.
        steps: What it does; asked for once the turn has begun.
    """

    def __init__(self, turn: Turn, steps: Callable[[], Awaitable[_Steps]]) -> None:
        self._turn = turn
        self._make = steps
        self._steps: _Steps | None = None
        self._ended = False

    farewell = event("error", stopping().to_json())

    async def begin(self) -> None:
        """Wait until the turn has begun, or is over. Cancelling it loses nothing."""
        await self._turn.begun.wait()

    async def next(self) -> Chunk | None:
        """See `Events`."""
        if self._ended:
            return None
        turn = self._turn
        if self._steps is None:
            await self.begin()
            if not turn.done.is_set() or _refused(turn.result) is None:
                self._steps = await self._make()
                run, invocation = ids_of(turn)
                named = {"session_id": turn.session_id, "run_id": run, "invocation_id": invocation}
                return Chunk(event("turn", named), 1)
        elif (chunk := await self._steps.more()) is not None:
            return chunk
        await turn.done.wait()
        self._ended = True
        refused = _refused(turn.result)
        return Chunk(event("result", turn.result) if refused is None else event("error", refused.to_json()), 1)


def ids_of(turn: Turn) -> tuple[str, str]:
    """Run and invocation: of a turn that is over those of its result, which may be another one's."""
    if turn.done.is_set():
        return turn.result.run_id, turn.result.invocation_id
    return turn.run_id, turn.invocation_id


def _refused(result: TurnResult) -> Problem | None:
    return refusal_of(result.error) if result.error is not None else None


class TurnLogEvents:
    """What a turn says on its channel, from its beginning on, however late it is joined. Nothing of other turns.

    Args:
        turn: A turn that has begun.
        channel: Of its session.
        encoded: As `/events` has them.
    """

    def __init__(self, turn: Turn, channel: Channel, encoded: EncodedDeliveries) -> None:
        self._turn = turn
        self._channel = channel
        self._encoded = encoded
        self._run, self._invocation = ids_of(turn)
        self._serials: set[str] = set()
        self._opened = AsyncExitStack()
        self._over: asyncio.Task[Any] | None = None
        self._reading: asyncio.Task[Sequence[Delivery | Gap]] | None = None
        self._first: list[Delivery] = []
        self._ended = False

    async def open(self) -> TurnLogEvents:
        """Begin to read.

        Raises:
            ChannelError: The channel cannot be read.
        """
        self._subscription = await self._opened.enter_async_context(self._channel.subscribe())
        done = self._turn.done.is_set()
        self._over = asyncio.create_task(_when_done(self._turn))
        self._first = [item for item in await self._so_far(self._subscription.start) if self._take(item)]
        self._ended = self._ended or done
        return self

    async def close(self) -> None:
        """Read no more."""
        for task in (self._over, self._reading):
            if task is not None:
                task.cancel()
                await asyncio.wait((task,))
        await self._opened.aclose()

    async def more(self) -> Chunk | None:
        """See `_Steps`."""
        if self._first:
            items: Iterable[Delivery | Gap] = self._first
            self._first = []
            return self._chunk(items)
        while not self._ended:
            found = [item for item in await self._read() if isinstance(item, Gap) or self._is_mine(item)]
            if found:
                return self._chunk(found)
        return None

    def _chunk(self, items: Iterable[Delivery | Gap]) -> Chunk:
        data = [self._encoded.of(item) for item in items]
        return Chunk(b"".join(data), len(data))

    async def _read(self) -> Sequence[Delivery | Gap]:
        """What the log has, until the run's end was there; or, where it has none, the turn is over for a while."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._subscription.read())
        assert self._over is not None
        await asyncio.wait((self._reading, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not self._reading.done():
            self._ended = True
            return ()
        reading, self._reading = self._reading, None
        return reading.result()

    def _is_mine(self, item: Delivery) -> bool:
        return item.serial in self._serials or (
            transport_headers(item.extras).get(H.RUN_ID) == self._run and self._take(item)
        )

    def _take(self, item: Delivery) -> bool:
        """It is of this turn, and so is all that is appended to it."""
        self._serials.add(item.serial)
        if item.name in _ENDS and transport_headers(item.extras).get(H.INVOCATION_ID) == self._invocation:
            self._ended = True
        return True

    async def _so_far(self, before: Cursor) -> list[Delivery]:
        """What the turn has said up to here, and what it answers, oldest first."""
        found: list[Delivery] = []
        begun, trigger = False, ""
        cursor: Cursor | None = before
        for _ in range(_PAGES):
            page = await self._channel.history(before=cursor, limit=_PAGE)
            for item in page.items:
                headers = transport_headers(item.extras)
                mine = headers.get(H.RUN_ID) == self._run
                if begun and not (
                    # What the turn answers was published with its beginning, or by a client just before.
                    item.name == Name.INPUT and (mine or headers.get(H.CODEC_MESSAGE_ID) == trigger)
                ):
                    return found[::-1]
                if begun or mine:
                    found.append(item)
                if mine and item.name in _BOUNDARIES and headers.get(H.INVOCATION_ID) == self._invocation:
                    begun, trigger = True, headers.get(H.INPUT_CODEC_MESSAGE_ID, "")
            cursor = page.next
            if cursor is None:
                break
        return found[::-1]


async def _when_done(turn: Turn) -> None:
    """Return when nothing more can come: what a turn says last is on its channel before it is done."""
    await turn.done.wait()
    if _refused(turn.result) is None:
        await anyio.sleep(_LAST_SECONDS)


class _OwnEvents:
    """The events of a turn without a channel: `progress`, with their `type`."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    async def more(self) -> Chunk | None:
        """See `_Steps`."""
        try:
            one = await anext(self._turn)
        except StopAsyncIteration:
            return None
        if isinstance(one, TurnFinished):
            return None
        return Chunk(event("progress", one), 1)


async def turn_events(
    opened: AsyncExitStack,
    started: AbstractAsyncContextManager[Turn],
    open_channel: Callable[[str], Awaitable[Channel]] | None,
    encoded: EncodedDeliveries,
) -> tuple[Turn, TurnEvents]:
    """A turn, and its events.

    Args:
        opened: Closed when no more events are wanted.
        started: The turn, detached.
        open_channel: Of a session; `None`: turns have no channel.
        encoded: See `EncodedDeliveries`.
    """
    following = await opened.enter_async_context(AsyncExitStack())
    following.push(_is_told)
    turn = await following.enter_async_context(started)

    async def steps() -> _Steps:
        if open_channel is None:
            return _OwnEvents(turn)
        await following.aclose()  # from here on the channel tells everything, and a slow reader costs nothing
        log = TurnLogEvents(turn, await open_channel(turn.session_id), encoded)
        opened.push_async_callback(log.close)
        return await log.open()

    return turn, TurnEvents(turn, steps)


def _is_told(kind: object, error: BaseException | None, traceback: object) -> bool:
    """What leaving a turn raises was the problem, or the last event."""
    return isinstance(error, CallerError)
