"""What the backends say of calls they refuse: the same sentences, whoever says them."""

from __future__ import annotations

from stepwell.errors import AppendGapError, ChannelError, FencedError, InvalidInputError, UnknownMessageError

__all__ = ["check_epoch", "closed", "fenced", "missing", "not_text", "out_of_order"]


def check_epoch(epoch: int) -> int:
    """Return `epoch`.

    Raises:
        InvalidInputError: Some backend could not store it.
    """
    if not 0 <= epoch < 2**53:
        raise InvalidInputError(f"The epoch {epoch} is no fence: epochs count from 0 and stay below 2**53.")
    return epoch


def fenced(channel: str, epoch: int, fence: int) -> FencedError:
    """The writer is stale."""
    return FencedError(
        f"Channel {channel} was taken over: epoch {epoch} is older than {fence}. Stop writing, another writer goes on.",
        epoch,
        fence,
        channel=channel,
    )


def missing(channel: str, serial: str) -> UnknownMessageError:
    """There is no such message."""
    return UnknownMessageError(
        f"Channel {channel} has no message {serial[:80]!r}: use a serial that its publish returned.",
        serial=serial[:80],
        channel=channel,
    )


def not_text(channel: str, serial: str) -> InvalidInputError:
    """Only text can be appended to."""
    return InvalidInputError(
        "The data of this message is not text, so nothing can be appended: use update.", serial=serial, channel=channel
    )


def out_of_order(channel: str, serial: str, seq: int, applied: int) -> AppendGapError:
    """Appends are missing, or the sequence does not begin at 1."""
    return AppendGapError(
        f"Append {seq} to a message with {applied} appends: repeat those between first.",
        applied,
        serial=serial,
        channel=channel,
    )


def closed() -> ChannelError:
    """The provider was closed."""
    return ChannelError("These channels are closed: open new ones.")
