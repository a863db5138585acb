"""How backends that store rows write down data, extras and ids, and keep extras small.

The outputs of one step repeat the same dozen transport headers. So the headers that differ from message to message stay
with the message, and the others are stored once, with the first message that has them; later ones name its position.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, cast

import msgspec

from stepwell._json import json_copy
from stepwell.wire import Data, Extras, H, transport_headers

__all__ = [
    "EPHEMERAL_SECONDS",
    "decode_data",
    "encode_data",
    "join_extras",
    "key_of",
    "plain_copy",
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


def plain_copy(extras: Extras | None) -> Extras | None:
    """A copy of extras that are headers and nothing else; None of all others.

    Whatever is equal to the copy says the same: in a value that is no text, `1` and `true` would be equal.
    """
    ai = extras.get("ai") if extras is not None and len(extras) == 1 else None
    if type(ai) is not dict:
        return None
    tiers = cast("dict[str, Any]", ai)
    for tier in tiers.values():
        if type(tier) is not dict or not all(type(value) is str for value in cast("dict[str, Any]", tier).values()):
            return None
    return {"ai": {name: dict(tier) for name, tier in tiers.items()}}


def encode_data(data: Data) -> tuple[bool, str | None]:
    """Whether it is text, and the text or JSON."""
    if data is None or isinstance(data, str):
        return True, data
    return False, _encode(data).decode()


def decode_data(is_text: object, stored: str | None) -> Data:
    """The other way round."""
    return stored if is_text or stored is None else _decode(stored)


def key_of(idempotency_id: str) -> bytes:
    """What is stored of an idempotency id, twelve bytes of a hash: it is only ever compared."""
    return blake2b(idempotency_id.encode(), digest_size=12).digest()
