"""Channels on Ably, through the official SDK.

The service keeps the log, so what it does not offer to Python is not here: no fence, no idempotency by id or number,
and no way to continue from a cursor. What can be done without is done: operations go out in the order of the calls, a
number seen before is not sent again by this process, a refused operation says whether repeating it is safe, and a
lost part of the log is a `Gap` with a snapshot, never silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

import ably
from ably.types.message import Message, MessageAction
from ably.util.exceptions import AblyException

from stepwell.errors import (
    ChannelBusyError,
    ChannelDataError,
    ChannelError,
    InsufficientCapabilityError,
    InvalidInputError,
    UnknownMessageError,
)
from stepwell.wire import (
    Action,
    Capabilities,
    Cursor,
    Data,
    Delivery,
    Extras,
    Gap,
    HistoryPage,
    Subscription,
    WireMessage,
    check_change,
    check_channel_name,
    check_messages,
    is_open_stream,
)

from ._refusals import closed, missing, out_of_order

__all__ = ["AblyChannel", "AblyChannels"]

T = TypeVar("T")

CONNECT_SECONDS: Final = 15.0
"""How long connecting and attaching may take."""

CLOSE_SECONDS: Final = 2.0
"""How long saying goodbye may take."""

_REMEMBERED_PAGES: Final = 1_000
_REFUSED: Final = frozenset({42910, 42911, 42912, 42913, 42914, 42915, 42922})
"""Codes of refusals for the rate: the operation was not stored and may be repeated."""

_ACTIONS: Final[Mapping[int, Action]] = {
    MessageAction.MESSAGE_CREATE: "create",
    MessageAction.MESSAGE_UPDATE: "update",
    MessageAction.MESSAGE_DELETE: "delete",
    MessageAction.MESSAGE_APPEND: "append",
}


class AblyChannels:
    """Channels of an Ably app. Acknowledged means stored by the service.

    The namespace needs the rule `mutableMessages`, and whoever appends the capability `message-update-own` (with the
    client id of the create) or `message-update-any`.

    Args:
        key: `APP.KEY:SECRET`; or None where the options hold a token.
        client_id: Who publishes. Messages with another client id are refused by the service, unless the key allows any.
        realtime: Further options of `ably.AblyRealtime`.
        rest: Further options of `ably.AblyRest`, which reads history; those of `realtime` by default.

    Nothing can be continued from a cursor: `subscribe(after=...)` begins with a `Gap` and a snapshot. Readers are
    pushed to by the service, so what a slow one has not read yet is kept in memory.
    """

    capabilities = Capabilities(fence=False, idempotency=False, cursors=False, replay=False, retention=False)
    retention: float | None = None

    def __init__(
        self,
        key: str | None = None,
        *,
        client_id: str | None = None,
        realtime: Mapping[str, Any] | None = None,
        rest: Mapping[str, Any] | None = None,
    ) -> None:
        named = {} if client_id is None else {"client_id": client_id}
        keyed = {} if not key else {"key": key}
        self._realtime_options: dict[str, Any] = {**keyed, **named, "auto_connect": False, **(realtime or {})}
        self._rest_options: dict[str, Any] = {**keyed, **(rest if rest is not None else realtime or {})}
        self._realtime: Any = None
        self._rest: Any = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._pages: OrderedDict[str, tuple[str, Any]] = OrderedDict()
        self._numbers = itertools.count(1)
        self._applied: dict[str, int] = {}
        self.readers: set[_Reader] = set()

    async def open(self, name: str) -> AblyChannel:
        """See `ChannelProvider.open`. The first one connects."""
        check_channel_name(name)
        realtime = await self._connect()
        return AblyChannel(self, name, realtime.channels.get(name), self._rest.channels.get(name))

    async def delete(self, name: str) -> None:
        """Not offered by the service: its retention removes channels.

        Raises:
            ChannelError: Always.
        """
        check_channel_name(name)
        raise ChannelError("Ably removes messages by the retention of the app; a channel cannot be deleted.")

    async def close(self) -> None:
        """See `ChannelProvider.close`."""
        if self._closed:
            return
        self._closed = True
        for reader in list(self.readers):
            reader.fail(closed())
        if self._realtime is not None:
            with contextlib.suppress(TimeoutError, AblyException):
                async with asyncio.timeout(CLOSE_SECONDS):  # the SDK waits for a word that may not come
                    await self._realtime.close()
            await self._rest.close()

    async def __aenter__(self) -> AblyChannels:
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    # -- what its channels share

    def check_open(self) -> None:
        """Raise `ChannelError` if these were closed."""
        if self._closed:
            raise closed()

    async def _connect(self) -> Any:
        self.check_open()
        async with self._opening:
            if self._realtime is None:
                realtime: Any = ably.AblyRealtime(**self._realtime_options)
                self._rest = ably.AblyRest(**self._rest_options)
                connected: asyncio.Future[Any] = asyncio.ensure_future(realtime.connection.once_async("connected"))
                failed: asyncio.Future[Any] = asyncio.ensure_future(realtime.connection.once_async("failed"))
                realtime.connect()
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        await asyncio.wait({connected, failed}, return_when=asyncio.FIRST_COMPLETED)
                    if not connected.done():
                        raise mapped(failed.result().reason)
                except TimeoutError:
                    raise ChannelBusyError("Ably did not answer in time: check the network and try again.") from None
                finally:
                    connected.cancel()
                    failed.cancel()
                    if connected.cancelled() or not connected.done():
                        # The SDK raises a bare exception where it never had a connection to close.
                        with contextlib.suppress(Exception):
                            await realtime.close()
                self._realtime = realtime
            return self._realtime

    def applied(self, serial: str) -> int:
        """How many appends of a message this process has sent."""
        return self._applied.get(serial, 0)

    def keep_applied(self, serial: str, seq: int, *, closed: bool) -> None:
        """Remember it while the stream is open."""
        if closed:
            self._applied.pop(serial, None)
        else:
            self._applied[serial] = seq

    def keep_page(self, name: str, page: Any) -> Cursor:
        """A cursor for a page of history, which the service knows by an address of its own."""
        cursor = f"page-{next(self._numbers)}"
        self._pages[cursor] = name, page
        while len(self._pages) > _REMEMBERED_PAGES:
            self._pages.popitem(last=False)
        return Cursor(cursor)

    def page(self, name: str, cursor: str) -> Any:
        """That page; None for the cursor of a subscription or a delivery, behind which history begins anew.

        Raises:
            InvalidInputError: It is no cursor of this channel, or forgotten.
        """
        if cursor.startswith("now-"):
            return None
        found = self._pages.get(cursor)
        if found is None or found[0] != name:
            raise InvalidInputError(f"{cursor[:80]!r} is no cursor of this channel's history: begin again without one.")
        return found[1]


class AblyChannel:
    """A `Channel` of `AblyChannels`."""

    def __init__(self, provider: AblyChannels, name: str, realtime: Any, rest: Any) -> None:
        self._provider = provider
        self.name = name
        self._channel = realtime
        self._rest = rest

    # -- writing

    async def raise_fence(self, epoch: int) -> None:
        """Nothing: there is no fence here, so a stale writer is not kept out."""
        self._provider.check_open()

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """See `Channel.publish`. Not idempotent: after a `ChannelError` that is not busy it may be stored."""
        check_messages(messages)
        self._provider.check_open()
        given = [
            Message(name=one.name, data=one.data, client_id=one.client_id, extras=_plain(one.extras))
            for one in messages
        ]
        result: Any = await _sent(self._channel.publish(given))
        serials: list[str] = list(result.serials or ())
        if len(serials) != len(messages) or not all(serials):
            raise ChannelDataError(
                "Ably acknowledged a publish without serials: enable mutableMessages for the channel."
            )
        return serials

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """See `Channel.append`. The number counts what this process sent: another one goes on with any."""
        check_change(data, extras)
        self._provider.check_open()
        if not serial:
            raise missing(self.name, serial)
        applied = self._provider.applied(serial)
        if seq < 1:
            raise out_of_order(self.name, serial, seq, applied)
        if 1 <= seq <= applied:
            return serial
        if applied and seq > applied + 1:
            raise out_of_order(self.name, serial, seq, applied)
        change = Message(serial=serial, data=data, extras=_plain(extras))
        # Counted when it is on its way: the service takes them in this order, and later ones do not wait for it.
        self._provider.keep_applied(serial, seq, closed=extras is not None and not is_open_stream(extras))
        try:
            result = await _sent(self._channel.append_message(change), serial)
        except ChannelBusyError:
            self._provider.keep_applied(serial, applied, closed=False)  # it was refused, and may come again
            raise
        return result.version_serial or serial

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """See `Channel.update`."""
        check_change(data, extras)
        self._provider.check_open()
        if not serial:
            raise missing(self.name, serial)
        change = Message(serial=serial, data=data, extras=_plain(extras))
        result = await _sent(self._channel.update_message(change), serial)
        return result.version_serial or serial

    # -- reading

    def subscribe(self, *, after: Cursor | None = None) -> AbstractAsyncContextManager[Subscription]:
        """See `Channel.subscribe`. With a cursor it begins with a `Gap` and a snapshot."""
        return self._subscribe(after)

    @contextlib.asynccontextmanager
    async def _subscribe(self, after: Cursor | None) -> AsyncGenerator[_Reader]:
        self._provider.check_open()
        if after is not None and not after.startswith("now-"):
            raise InvalidInputError(
                f"{after[:80]!r} is no cursor: pass the `cursor` of a delivery, or none to begin now."
            )
        reader = _Reader(self, gap=after is not None)
        self._provider.readers.add(reader)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await _sent(self._channel.subscribe(reader.push))
            self._channel.on(reader.on_state)
            yield reader
        except TimeoutError:
            raise ChannelBusyError("Ably did not attach the channel in time: try again.") from None
        finally:
            self._provider.readers.discard(reader)
            self._channel.off(reader.on_state)
            self._channel.unsubscribe(reader.push)

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        """See `Channel.history`. `before` of a subscription is not looked at: what comes twice has the same version."""
        self._provider.check_open()
        if not 1 <= limit <= 1_000:
            raise InvalidInputError(f"A page of {limit} messages: ask for 1 to 1000.")
        page = None if before is None else self._provider.page(self.name, before)
        if page is None:
            page = await _sent(self._rest.history(limit=limit))
        else:
            page = await _sent(page.next())
        more = self._provider.keep_page(self.name, page) if page.has_next() else None
        return HistoryPage(items=[delivery for one in page.items if (delivery := _delivery(one))], next=more)

    async def all_messages(self) -> list[Delivery]:
        """Every message as it is now, oldest first."""
        items: list[Delivery] = []
        page = await self.history()
        while True:
            items.extend(page.items)
            if page.next is None:
                return items[::-1]
            page = await self.history(before=page.next)


class _Reader:
    """A `Subscription`: what the service pushes, in order."""

    def __init__(self, channel: AblyChannel, *, gap: bool) -> None:
        self._channel = channel
        self._pending: deque[Delivery | Gap] = deque()
        self._news = asyncio.Event()
        self._gap = gap
        self._error: ChannelError | None = None
        if gap:
            self._news.set()

    @property
    def start(self) -> Cursor:
        """See `Subscription.start`."""
        return Cursor("now-0")

    def push(self, message: Message) -> None:
        """A message arrived."""
        delivery = _delivery(message)
        if delivery is not None:
            self._pending.append(delivery)
            self._news.set()

    def on_state(self, change: Any) -> None:
        """The channel's state changed; re-attached without resuming, something may have been missed."""
        state = str(getattr(change.current, "value", change.current))
        if state == "failed":
            self.fail(mapped(change.reason))
        elif state == "attached" and not change.resumed:
            self._gap = True
            self._news.set()

    def fail(self, error: ChannelError) -> None:
        """Nothing comes any more."""
        self._error = error
        self._news.set()

    async def read(self, limit: int = 256) -> Sequence[Delivery | Gap]:
        """See `Subscription.read`."""
        if limit < 1:
            raise InvalidInputError(f"A limit of {limit} deliveries: pass at least 1.")
        while True:
            if self._gap:
                await self._snapshot()
            if self._pending:
                return [self._pending.popleft() for _ in range(min(limit, len(self._pending)))]
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    async def _snapshot(self) -> None:
        """Put a snapshot before what has arrived meanwhile; what is in both has the same versions."""
        messages = await self._channel.all_messages()
        self._gap = False
        whole = [
            Delivery(
                cursor=one.cursor,
                action="update",
                serial=one.serial,
                version=one.version,
                name=one.name,
                data=one.data,
                extras=one.extras,
                client_id=one.client_id,
                timestamp=one.timestamp,
            )
            for one in messages
        ]
        newest = {one.serial: one.version for one in whole}
        kept = [one for one in self._pending if isinstance(one, Delivery) and one.version > newest.get(one.serial, "")]
        self._pending = deque([Gap(cursor=Cursor("now-0")), *whole, *kept])

    def __aiter__(self) -> _Reader:
        """Itself."""
        return self

    async def __anext__(self) -> Delivery | Gap:
        """The next item."""
        return (await self.read(1))[0]


def _plain(extras: Extras | None) -> dict[str, Any] | None:
    return None if extras is None else dict(extras)


def _delivery(message: Any) -> Delivery | None:
    action = _ACTIONS.get(message.action if message.action is not None else MessageAction.MESSAGE_CREATE)
    if action is None or not message.serial:
        return None
    version = message.version.serial if message.version is not None and message.version.serial else message.serial
    extras: Any = message.extras
    return Delivery(
        cursor=Cursor(f"now-{version}"),
        action=action,
        serial=message.serial,
        version=version,
        name=None if action == "append" else message.name,
        data=message.data,
        extras=extras,
        client_id=message.client_id,
        timestamp=int(message.timestamp or 0),
    )


async def _sent(operation: Awaitable[T], serial: str | None = None) -> T:
    """Wait for the service's answer."""
    try:
        return await operation
    except AblyException as error:
        raise mapped(error, serial) from error
    except (OSError, ValueError) as error:
        raise ChannelError(
            f"Ably could not be asked ({type(error).__name__}): it is not known what was done."
        ) from error


def mapped(error: Any, serial: str | None = None) -> ChannelError:
    """What the service says, in our words; its own may hold what was published."""
    code, status = getattr(error, "code", None), getattr(error, "status_code", None)
    if serial is not None and (code == 40400 or status == 404):
        raise UnknownMessageError("The channel has no message of this serial.", serial=serial[:80]) from error
    if code in _REFUSED or status == 429:
        return ChannelBusyError(f"Ably refused it for the rate ({code}); nothing was stored, try again.")
    if status in (401, 403):
        return InsufficientCapabilityError(f"Ably refuses this key or client ({code}): check its capabilities.")
    if code == 93002:
        return ChannelError("The channel's namespace has no rule mutableMessages (93002): enable it in the app.")
    if code == 40009:
        return ChannelError("The message is too large for Ably (40009): send less, or raise the app's limit.")
    return ChannelError(f"Ably answered with an error ({code}): it is not known whether it was stored.")
