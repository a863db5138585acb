"""Headers in `extras`, and the checks at a channel's edge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from stepwell._json import json_copy
from stepwell.errors import InvalidInputError, NonJsonValueError

from ._names import H
from ._records import Data, Extras, WireMessage
from ._serials import MAX_BATCH

__all__ = [
    "Headers",
    "check_append",
    "check_change",
    "check_channel_name",
    "check_messages",
    "codec_headers",
    "is_ephemeral",
    "is_open_stream",
    "make_extras",
    "session_channel",
    "transport_headers",
]

Headers = Mapping[str, str]
"""Headers: text to text."""

_NO_HEADERS: Final[Headers] = {}
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CHANNEL_NAME: Final = re.compile(r"[A-Za-z0-9_:.\-]{1,256}")


def make_extras(transport: Headers, codec: Headers | None = None, *, ephemeral: bool = False) -> dict[str, Any]:
    """Put headers in their place. An empty codec part is left out.

    Raises:
        InvalidInputError: A value is not text: readers would drop the message without a word.
    """
    for headers in (transport, codec or _NO_HEADERS):
        for key, value in headers.items():
            if type(value) is not str:
                raise InvalidInputError(
                    f"The header {key!r} is a {type(value).__name__}: headers are text, write it as JSON text."
                )
    ai: dict[str, Any] = {"transport": dict(transport)}
    if codec:
        ai["codec"] = dict(codec)
    return {"ai": ai, "ephemeral": True} if ephemeral else {"ai": ai}


def transport_headers(extras: Extras | None) -> Headers:
    """The transport headers; empty where there are none. Values that are not text are as they came: compare them."""
    return _tier(extras, "transport")


def codec_headers(extras: Extras | None) -> Headers:
    """The codec headers; empty where there are none."""
    return _tier(extras, "codec")


def _tier(extras: Extras | None, tier: str) -> Headers:
    ai = extras.get("ai") if extras else None
    if isinstance(ai, dict):
        headers = cast("dict[str, Any]", ai).get(tier)
        if isinstance(headers, dict):
            return cast("Headers", headers)
    return _NO_HEADERS


def is_ephemeral(extras: Extras | None) -> bool:
    """Whether the message is delivered live only: kept for 60 seconds, in no history and no snapshot."""
    return extras is not None and extras.get("ephemeral") is True


def is_open_stream(extras: Extras | None) -> bool:
    """Whether more appends are expected: a channel folds the text of a message into one row when this ends."""
    return transport_headers(extras).get(H.STATUS) == "streaming"


def check_channel_name(name: str) -> str:
    """Return `name`.

    Raises:
        InvalidInputError: It is not 1 to 256 characters of `[A-Za-z0-9_:.-]`.
    """
    if _CHANNEL_NAME.fullmatch(name) is None:
        raise InvalidInputError(
            f"{name[:80]!r} is no channel name: use 1 to 256 letters, digits and the characters _ : . and -."
        )
    return name


def session_channel(session_id: str, prefix: str = "") -> str:
    """The channel of a session: its id, behind `prefix` and a colon if there is a prefix.

    Session ids hold no colon, so what is behind the last colon of a channel's name is the session's id.

    Raises:
        InvalidInputError: The id is not 1 to 128 characters of `[A-Za-z0-9_-]`, or the prefix none of a channel name.
    """
    if _SESSION_ID.fullmatch(session_id) is None:
        raise InvalidInputError(
            f"{session_id[:80]!r} is no session id: use 1 to 128 letters, digits, underscores and hyphens.",
            "/session_id",
        )
    return check_channel_name(f"{prefix}:{session_id}" if prefix else session_id)


def check_messages(messages: Sequence[WireMessage]) -> None:
    """Check what is to be published; every backend calls this first.

    Raises:
        InvalidInputError: There are none or too many, or one holds what is not allowed.
    """
    if not 1 <= len(messages) <= MAX_BATCH:
        raise InvalidInputError(f"{len(messages)} messages in one publish: pass 1 to {MAX_BATCH}.")
    for message in messages:
        if not message.name:
            raise InvalidInputError("A message needs a name.")
        check_change(message.data, message.extras)
        for text in (message.name, message.client_id, message.idempotency_id):
            if text is not None:
                _check_json(text)
                if "\0" in text:
                    raise InvalidInputError("A name or id of a message holds a NUL character.")


def check_change(data: Data, extras: Extras | None) -> None:
    """Check data and extras.

    Raises:
        InvalidInputError: The data is a bare number or boolean, or something is not JSON.
    """
    if not isinstance(data, (str, dict, list, type(None))):  # pyright: ignore[reportUnnecessaryIsInstance] - callers err
        raise InvalidInputError(
            f'The data of a message is a {type(data).__name__}: wrap it in an object, as in {{"value": ...}}.'
        )
    _check_json(data)
    if extras is not None:
        if not isinstance(extras, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - the same
            raise InvalidInputError(f"Extras are a JSON object, not a {type(extras).__name__}.")
        if not _is_plain(extras):
            _check_json(extras)


def check_append(data: str, extras: Extras | None) -> None:
    """Check what is to be appended.

    Raises:
        InvalidInputError: The data is not text, or something is not JSON.
    """
    if not isinstance(data, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers err
        raise InvalidInputError(f"Only text can be appended, not a {type(data).__name__}: use update.")
    check_change(data, extras)


def _is_plain(extras: Extras) -> bool:
    """Whether extras are nothing but headers in ASCII. Nearly all are, and every token has them."""
    ai = extras.get("ai")
    if len(extras) != 1 or type(ai) is not dict:
        return False
    tiers = cast("dict[str, dict[str, str]]", ai)
    try:
        return "".join(tiers).isascii() and all(
            type(tier) is dict and "".join(tier).isascii() and "".join(tier.values()).isascii()
            for tier in tiers.values()
        )
    except TypeError:  # something is not text
        return False


def _check_json(value: Any) -> None:
    if type(value) is str and value.isascii():
        return
    try:
        json_copy(value)
    except NonJsonValueError as error:
        raise InvalidInputError(f"A message holds a value that is not JSON: {error.message}") from None
