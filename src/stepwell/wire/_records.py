"""What travels on a channel, what is read from it, and what a channel is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NewType, Protocol, TypeAlias

import msgspec

__all__ = [
    "Action",
    "Capabilities",
    "Channel",
    "ChannelProvider",
    "Cursor",
    "Data",
    "Delivery",
    "Extras",
    "Gap",
    "HistoryPage",
    "Subscription",
    "WireMessage",
]

Data: TypeAlias = str | dict[str, Any] | list[Any] | None
"""Payload of a message: text, an object, a list, or none. A bare number or boolean is refused, because the JavaScript
client refuses it (40013). Only text can be appended to."""

Extras: TypeAlias = Mapping[str, Any]
"""`{"ai": {"transport": {...}, "codec": {...}}, "ephemeral": true}` in this protocol's messages; other applications'
messages may hold any JSON object. A channel looks at two things in it: `ephemeral`, and whether a stream is closed."""

Cursor = NewType("Cursor", str)
"""A boundary in a channel's log, just after one mutation. Opaque text, comparable only for equality; kept by clients
over reconnects (`Last-Event-ID`). It names the channel's log too, so that one of a deleted channel is recognised."""

Action: TypeAlias = Literal["create", "append", "update", "delete"]
"""What was done to the message."""


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message to be published.

    Attributes:
        name: What it is; dispatch is by name only.
        data: See `Data`. Must be the empty text in the create of a stream.
        extras: See `Extras`.
        client_id: Who publishes.
        idempotency_id: Published again under the same id, a message is not stored again and the first serial is
            returned, whatever else it holds.
    """

    name: str
    data: Data = None
    extras: Extras | None = None
    client_id: str | None = None
    idempotency_id: str | None = None


class Delivery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One mutation as a reader gets it, or a full newer version of its message.

    Attributes:
        cursor: The position in the log: `subscribe(after=cursor)` continues behind it. Never a version.
        action: `append` holds the appended text only; `create` and `update` hold the whole message.
        serial: The message's identity; text order is the channel's order.
        version: Identity of this mutation; grows as text. Equal to `serial` for a create.
        name: Of the message. None in an `append`.
        data: See `action`.
        extras: Always the whole extras that hold after this mutation.
        client_id: Who published the message.
        timestamp: When the mutation was stored, milliseconds of Unix time, by the backend's clock.
    """

    cursor: Cursor
    action: Action
    serial: str
    version: str
    name: str | None = None
    data: Data = None
    extras: Extras | None = None
    client_id: str | None = None
    timestamp: int = 0


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the log between the reader's cursor and here is gone; a snapshot follows.

    The snapshot is every message of the channel, each once, latest version, in the order of creation, as `update`
    deliveries. What a reader holds and the snapshot does not name no longer exists.

    Attributes:
        cursor: Where the log goes on behind the snapshot, and what the last delivery of the snapshot has. It is nothing
            to continue from before the snapshot is there: a reader that stops within it continues from the cursor of
            the delivery it last got, be it one from before the gap.
    """

    cursor: Cursor


class HistoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of messages, newest first; each message once, latest version, at the place of its create.

    Attributes:
        items: `action` is `update` where the message was ever changed, else `create`.
        next: `before` of the next page; None on the last.
    """

    items: Sequence[Delivery]
    next: Cursor | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend guarantees; the conformance suite leaves out what it does not.

    Attributes:
        fence: Epochs are enforced, atomically with the write.
        idempotency: By id and by append sequence.
        cursors: A cursor can be continued from in another process and after a restart.
        replay: A cursor can be continued from at all.
        retention: `retention` is honoured, and a removed cursor gives a `Gap`.
        shared: Several processes can use one channel.
    """

    fence: bool = True
    idempotency: bool = True
    cursors: bool = True
    replay: bool = True
    retention: bool = True
    shared: bool = True


class Subscription(Protocol):
    """A reader of the log. It pulls: a slow one costs nobody anything. One task at a time."""

    @property
    def start(self) -> Cursor:
        """The boundary it began at.

        `channel.history(before=subscription.start)` and this subscription together hold everything, without a gap.
        """
        ...

    async def read(self, limit: int = 256) -> Sequence[Delivery | Gap]:
        """Wait until there is something, and return it: at least one item, at most `limit`.

        Cancelling it loses nothing: the next call returns the same.

        Raises:
            ChannelError: The backend failed for good; `ChannelBusyError`s are retried inside.
        """
        ...

    def __aiter__(self) -> Subscription:
        """The items of `read`, one by one."""
        ...

    async def __anext__(self) -> Delivery | Gap:
        """Never ends by itself."""
        ...


class Channel(Protocol):
    """An ordered log of messages that can be appended to and replaced. All methods are safe to call concurrently."""

    @property
    def name(self) -> str:
        """The channel's name."""
        ...

    async def raise_fence(self, epoch: int) -> None:
        """Refuse every write with a lower epoch from now on. Raising to the present fence again is fine.

        Raises:
            FencedError: The fence is higher already.
            ChannelError: The backend failed. `ChannelBusyError` may be tried again.
        """
        ...

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        """Store messages, all or none, in order and adjacent to each other.

        Args:
            messages: At least one, at most 1,000.
            epoch: None is never fenced (clients, hand-written agents).

        Returns:
            Their serials. Those of one call end in `:000`, `:001`, ...; of a repeated idempotency id the first serial.

        Raises:
            FencedError: Nothing was stored.
            InvalidInputError: A message is not JSON, or its data a bare number or boolean. Nothing was stored.
            ChannelError: It is not known whether it was stored: publish again with the same idempotency ids.
        """
        ...

    async def append(self, serial: str, data: str, extras: Extras | None, *, seq: int, epoch: int | None = None) -> str:
        """Append text to a message whose data is text.

        Args:
            serial: Of the message.
            data: The text. May be empty, to change only the extras.
            extras: Replace the old ones as a whole; None keeps them.
            seq: 1 for the first append to this message, and so on.
            epoch: See `publish`.

        Returns:
            The version. For a `seq` that was applied before, nothing is done and the version of the message as it is
            now is returned.

        Raises:
            FencedError: Nothing was stored.
            AppendGapError: Appends before this one are missing; `applied` says how many there are.
            UnknownMessageError: There is no such message.
            InvalidInputError: Its data is not text, or `data` or `extras` are not JSON.
            ChannelError: It is not known whether it was stored: repeat it.
        """
        ...

    async def update(self, serial: str, data: Data, extras: Extras, *, epoch: int | None = None) -> str:
        """Replace a message's data and extras as a whole. Appends afterwards go on with the sequence they were at.

        Returns:
            The version.

        Raises:
            FencedError, UnknownMessageError, InvalidInputError, ChannelError: As `append`.
        """
        ...

    def subscribe(self, *, after: Cursor | None = None) -> AbstractAsyncContextManager[Subscription]:
        """Read the log.

        Args:
            after: Replay what came behind this cursor, then go on live, without a seam. None begins now.

        For every message, each mutation is delivered, or a newer full version in its place. The first mutation of a
        message whose create this subscription did not deliver is a full `update` with the name; log rows up to that
        version are skipped afterwards. A cursor that retention has removed, or of another log than this channel's,
        yields a `Gap` and a snapshot first.

        Raises:
            InvalidInputError: On entering: the cursor is not one.
            ChannelError: On entering: the backend failed.
        """
        ...

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        """Read messages, newest first, without ephemeral ones.

        Args:
            before: Only messages created before this boundary; None is the end of the log.
            limit: Messages in a page, 1 to 1,000.

        Raises:
            InvalidInputError: The cursor or the limit is not one.
            ChannelError: The backend failed.
        """
        ...


class ChannelProvider(Protocol):
    """A backend's channels. Also an asynchronous context manager that closes it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it guarantees."""
        ...

    @property
    def retention(self) -> float | None:
        """Seconds for which the log is kept; None keeps it. History keeps messages either way."""
        ...

    async def open(self, name: str) -> Channel:
        """Give a channel; it comes into being with its first message or fence.

        Args:
            name: 1 to 256 characters, `[A-Za-z0-9_:.-]`, as `stepwell.wire.check_channel_name` says.

        Raises:
            InvalidInputError: The name is not one.
            ChannelError: The backend failed.
        """
        ...

    async def delete(self, name: str) -> None:
        """Remove a channel's messages, log and fence. Its readers get a `Gap`. Nothing happens if there is none."""
        ...

    async def close(self) -> None:
        """Release connections. Subscriptions still open raise `ChannelError`. May be called again."""
        ...

    async def __aenter__(self) -> ChannelProvider:
        """Itself."""
        ...

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        ...
