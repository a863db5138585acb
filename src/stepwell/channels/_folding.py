"""How backends that store rows keep extras small, and what they say of writes they refuse.

The outputs of one step repeat the same dozen transport headers. So the headers that differ from message to message stay
with the message, and the others are stored once, with the first message that has them; later ones name its position.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from stepwell._json import json_copy
from stepwell.errors import AppendGapError, FencedError, InvalidInputError, UnknownMessageError
from stepwell.wire import Data, Extras, H, transport_headers

__all__ = [
    "EPHEMERAL_SECONDS",
    "check_epoch",
    "decode_data",
    "encode_data",
    "fenced",
    "join_extras",
    "missing",
    "not_text",
    "out_of_order",
    "split_extras",
]

EPHEMERAL_SECONDS: Final = 60.0
"""How long ephemeral messages stay in the log."""

_OWN: Final = (H.STREAM, H.STATUS, H.STREAM_ID, H.DISCRETE)
"""Transport headers that differ between the outputs of one step."""

# The hook is for what passes for JSON and msgspec does not know: enumerations that are text, mappings.
_encode = msgspec.json.Encoder(enc_hook=json_copy).encode
_decode = msgspec.json.Decoder().decode


def split_extras(extras: Extras | None) -> tuple[str | None, str | None]:
    """The headers that others may share, and the rest; both as JSON."""
    if extras is None:
        return None, None
    transport = transport_headers(extras)
    if not transport:
        return None, _encode(extras).decode()
    shared = dict(transport)
    own = {key: shared.pop(key) for key in _OWN if key in shared}
    rest = {**extras, "ai": {**extras["ai"], "transport": own}}
    return _encode(shared).decode(), _encode(rest).decode()


def join_extras(shared: str | None, rest: str | None) -> Extras | None:
    """The other way round."""
    if rest is None:
        return None
    extras: dict[str, Any] = _decode(rest)
    if shared is not None:
        ai = extras["ai"]
        ai["transport"] = {**_decode(shared), **ai["transport"]}
    return extras


def encode_data(data: Data) -> tuple[bool, str | None]:
    """Whether it is text, and the text or JSON."""
    if data is None or isinstance(data, str):
        return True, data
    return False, _encode(data).decode()


def decode_data(is_text: object, stored: str | None) -> Data:
    """The other way round."""
    return stored if is_text or stored is None else _decode(stored)


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
