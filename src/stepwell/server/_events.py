"""Server-sent events: the log of a channel as it is, or the view of a conversation.

A reader that is slow takes longer between two reads of the log, or gets several changes of the view as one: it keeps
nobody waiting, and nothing is kept for it but its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple, Protocol

import anyio
import msgspec
from anyio import CancelScope
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stepwell.errors import SessionClosedError, StepwellError
from stepwell.transport import ClientSession, ViewPatches
from stepwell.wire import Channel, Cursor, Delivery, Gap, Subscription

__all__ = ["Chunk", "EncodedDeliveries", "EventStream", "Events", "LogEvents", "Streams", "ViewEvents", "event"]

HEARTBEAT_SECONDS: Final = 15.0
"""After which a silent connection is written to, so that proxies keep it open and a lost client is noticed."""

_HISTORY: Final = 256
_ENDING_SECONDS: Final = 2.0
"""How long what was ended may take to leave."""

_RECONNECT: Final = b": connect again\n\n"
"""To clients that go on from their cursor, or from a new snapshot."""

_encode: Final = msgspec.json.Encoder().encode


class Chunk(NamedTuple):
    """Events as they are written, and how many."""

    data: bytes
    events: int


class Events(Protocol):
    """Where the events of one connection come from."""

    @property
    def farewell(self) -> bytes:
        """What is written last, where the server ends the stream."""
        ...

    async def next(self) -> Chunk | None:
        """Wait for more; `None`: that was all. Cancelling it loses nothing."""
        ...


class Streams:
    """What is under way and ends when the server stops."""

    def __init__(self) -> None:
        self._scopes: set[CancelScope] = set()
        self._fewer = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._scopes)

    def add(self, scope: CancelScope) -> None:
        """One more."""
        self._scopes.add(scope)

    def discard(self, scope: CancelScope) -> None:
        """It is over."""
        self._scopes.discard(scope)
        self._fewer.set()

    def end(self) -> None:
        """End all."""
        for scope in list(self._scopes):
            scope.cancel()

    async def empty(self, seconds: float) -> None:
        """Wait until none is left; after `seconds` they are ended."""
        for patience in (seconds, _ENDING_SECONDS):
            with anyio.move_on_after(patience):
                while self._scopes:
                    self._fewer.clear()
                    await self._fewer.wait()
            self.end()


def event(name: str, data: Any, cursor: str | None = None) -> bytes:
    """One event. JSON holds no line breaks, so its data is one line."""
    head = f"event: {name}\n" if cursor is None else f"id: {cursor}\nevent: {name}\n"
    return b"%sdata: %s\n\n" % (head.encode(), _encode(data))


def delivery_json(delivery: Delivery) -> dict[str, Any]:
    """A delivery with the names that the JavaScript client has for its fields."""
    said: dict[str, Any] = {
        "action": f"message.{delivery.action}",
        "serial": delivery.serial,
        "version": {"serial": delivery.version, "timestamp": delivery.timestamp},
        "timestamp": delivery.timestamp,
    }
    optional = {
        "name": delivery.name,
        "data": delivery.data,
        "extras": delivery.extras,
        "clientId": delivery.client_id,
    }
    return said | {key: value for key, value in optional.items() if value is not None}


class EncodedDeliveries:
    """Events of deliveries, encoded once for all connections that are about as far."""

    def __init__(self, size: int = 4_096) -> None:
        self._size = size
        self._known: dict[tuple[str, str, str], bytes] = {}

    def of(self, item: Delivery | Gap) -> bytes:
        """The event of an item."""
        if isinstance(item, Gap):
            # Without an id: until the snapshot is whole, a client that is cut off has to get the gap again.
            return event("gap", {})
        key = (item.cursor, item.version, item.action)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self._size:
                self._known.clear()
            known = self._known[key] = event("message", delivery_json(item), item.cursor)
        return known


class LogEvents:
    """The deliveries of a channel: `message` events with the log's cursor as id, `gap` where part of it is gone.

    It begins with a `ready` event whose id is the cursor it begins at: a client that loses the connection before the
    first message continues from there too.
    """

    farewell = _RECONNECT

    def __init__(
        self, channel: Channel, subscription: Subscription, encoded: EncodedDeliveries, *, history: bool
    ) -> None:
        self._channel = channel
        self._subscription = subscription
        self._encoded = encoded
        self._begun = False
        self._history = history

    async def next(self) -> Chunk | None:
        """See `Events`."""
        if not self._begun:
            start = self._subscription.start
            parts = [self._encoded.of(item) for item in await self._all(start)] if self._history else []
            self._begun = True
            return Chunk(b"".join([*parts, event("ready", {}, start)]), len(parts) + 1)
        items = await self._subscription.read()
        return Chunk(b"".join([self._encoded.of(item) for item in items]), len(items))

    async def _all(self, before: Cursor) -> Sequence[Delivery]:
        """All messages up to here, oldest first."""
        pages: list[Sequence[Delivery]] = []
        cursor: Cursor | None = before
        while cursor is not None:
            page = await self._channel.history(before=cursor, limit=_HISTORY)
            pages.append(page.items)
            cursor = page.next
        return [item for page in reversed(pages) for item in reversed(page)]


class ViewEvents:
    """The view of a conversation: a `snapshot` of it all, then `patch` events.

    A patch holds the messages that changed, the order of all if that changed, and the runs that changed; what it does
    not name is as before. There are no ids: a client that lost the connection begins with a snapshot again.
    """

    farewell = _RECONNECT

    def __init__(self, session: ClientSession[Any, Any]) -> None:
        self._patches = ViewPatches(session.view)
        self._begun = False

    async def next(self) -> Chunk | None:
        """See `Events`."""
        if not self._begun:
            self._begun = True
            return Chunk(event("snapshot", self._patches.snapshot()), 1)
        try:
            return Chunk(event("patch", await self._patches.next()), 1)
        except StopAsyncIteration:
            raise SessionClosedError("The conversation is not watched any more: connect again.") from None


class EventStream(Response):
    """The response: writes events until they end, the client goes or the server stops.

    Args:
        events: What to write.
        opened: What they come from; closed at the end.
        streams: Where a server that stops finds it.
        streamed: Told how many events were written.
        expires: When the caller may not read on any more, Unix time; `None`: never.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: Events,
        opened: AsyncExitStack,
        streams: Streams,
        *,
        streamed: Callable[[int], object],
        expires: float | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._opened = opened
        self._streams = streams
        self._streamed = streamed
        self._expires = expires

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        async with self._opened:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            last = b""
            if scope["method"] != "HEAD" and not await self._stream(receive, send):
                last = self._events.farewell
            with CancelScope(shield=True), anyio.move_on_after(1.0):
                await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _stream(self, receive: Receive, send: Send) -> bool:
        """Whether it ended by itself, or because the client went."""
        ended = False

        async def until_gone() -> None:
            nonlocal ended
            while (await receive())["type"] != "http.disconnect":
                pass
            ended = True
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            if self._expires is not None:
                group.cancel_scope.deadline = anyio.current_time() + max(0.0, self._expires - time.time())
            self._streams.add(group.cancel_scope)
            try:
                group.start_soon(until_gone)
                await self._write(send)
                ended = True
                group.cancel_scope.cancel()
            finally:
                self._streams.discard(group.cancel_scope)
        return ended

    async def _write(self, send: Send) -> None:
        while True:
            chunk: Chunk | None = Chunk(b": \n\n", 0)
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                try:
                    chunk = await self._events.next()
                except StepwellError as error:
                    chunk = None
                    failed = event("error", {"code": error.code, "retryable": error.retryable})
                    await send({"type": "http.response.body", "body": failed, "more_body": True})
            if chunk is None:
                return
            await send({"type": "http.response.body", "body": chunk.data, "more_body": True})
            self._streamed(chunk.events)
