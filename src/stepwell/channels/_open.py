"""From a URL to channels."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from stepwell.errors import InvalidInputError
from stepwell.wire import ChannelProvider

from .memory import MemoryChannels

__all__ = ["open_channels"]

SCHEMES: Final = (
    "memory://, sqlite:///relative.db, sqlite:////absolute/path.db?synchronous=full, postgresql://user@host/database, "
    "redis://host:6379/0, ably:KEY"
)


def open_channels(url: str | ChannelProvider, **options: Any) -> ChannelProvider:
    """Open channels by URL; a provider is returned as it is.

    * `memory://`: in this process, gone with it.
    * `sqlite:///relative.db`, `sqlite:////absolute/path.db`: a file; see `SqliteChannels`. `?synchronous=full`.
    * `postgresql://...`: see `PostgresChannels`; extra `stepwell[postgres]`.
    * `redis://...`, `rediss://...`: see `RedisChannels`; extra `stepwell[redis]`.
    * `ably:KEY`: see `AblyChannels`; extra `stepwell[ably]`.

    Args:
        url: See above.
        **options: Of the class, such as `retention` or `clock`.

    Raises:
        InvalidInputError: There are no such channels, or the URL is wrong; says what there is. Or an extra is missing.
        ChannelError: The file cannot be opened.
    """
    if not isinstance(url, str):
        return url
    scheme, _, rest = url.partition(":")
    try:
        if scheme == "memory" and rest == "//":
            return MemoryChannels(**options)
        if scheme == "sqlite":
            from .sqlite import SqliteChannels  # sqlite3 is loaded by those who use it

            path, more = _sqlite(rest)
            return SqliteChannels(path, **more, **options)
        if scheme in ("postgresql", "postgres"):
            from .postgres import PostgresChannels

            return PostgresChannels(url, **options)
        if scheme in ("redis", "rediss"):
            from .redis import RedisChannels

            return RedisChannels(url, **options)
        if scheme == "ably":
            from .ably import AblyChannels

            return AblyChannels(rest, **options)
    except ModuleNotFoundError as error:
        extra = {"postgres": "postgres", "postgresql": "postgres", "rediss": "redis"}.get(scheme, scheme)
        raise _wrong(f"{error.name} is not installed: pip install 'stepwell[{extra}]'") from error
    raise _wrong("there are no such channels")


def _sqlite(rest: str) -> tuple[str, dict[str, Any]]:
    location, _, query = rest.removeprefix("//").partition("?")
    path = unquote(location[1:])
    if not rest.startswith("///") or not path or "\0" in path or path == ":memory:":
        raise _wrong("an SQLite URL has three slashes before a relative path and four before an absolute one")
    options = dict(parse_qsl(query, keep_blank_values=True))
    synchronous = options.pop("synchronous", "normal").lower()
    if options or synchronous not in ("normal", "full"):
        raise _wrong("the only option of an SQLite URL is synchronous: normal or full")
    return path, {"synchronous": synchronous}


def _wrong(why: str) -> InvalidInputError:
    # The URL itself is not repeated: it may hold a password.
    return InvalidInputError(f"The URL of the channels is not usable: {why}. Channels are: {SCHEMES}.", "/channels")
