"""From a URL to a store."""

from __future__ import annotations

from typing import Final, Literal
from urllib.parse import parse_qsl, unquote

from stepwell._clock import Clock, SystemClock
from stepwell.errors import InvalidInputError

from .memory import MemoryStore
from .store import SessionStore

__all__ = ["open_store"]

SCHEMES: Final = (
    "memory://, sqlite:///relative.db, sqlite:////absolute/path.db?synchronous=full, postgresql://user@host/database"
)


def open_store(url: str | SessionStore, clock: Clock | None = None) -> SessionStore:
    """Open a session store by URL; a store is returned as it is.

    * `memory://`: in this process, gone with it.
    * `sqlite:///relative.db`, `sqlite:////absolute/path.db`: a file. `?synchronous=full` makes every commit survive a
      power loss; the default, `normal`, makes it survive the process (effects survive both, always).
    * `postgresql://...`: see `stepwell.sessions.postgres.PostgresStore`; extra `stepwell[postgres]`.

    Args:
        url: See above. The path may be percent-encoded.
        clock: Decides when leases run out. Without one, and with the machine's own, it is the machine's, or the
            server's where the store is on one.

    Raises:
        InvalidInputError: There is no such store, or the URL is wrong; says what there is. Or an extra is missing.
        StoreError: The file cannot be opened; `StoreDataError` when it is not a database of Stepwell's.
        NewerSchemaError: The file was written by a newer Stepwell.
    """
    if not isinstance(url, str):
        return url
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "memory":
        if rest:
            raise _wrong("memory:// takes nothing after it")
        return MemoryStore(clock)
    if separator and scheme == "sqlite":
        path, synchronous = _sqlite(rest)
        from .sqlite import SqliteStore  # sqlite3 is loaded by those who use it

        return SqliteStore(path, synchronous=synchronous, clock=clock)
    if separator and scheme in ("postgresql", "postgres"):
        try:
            from .postgres import PostgresStore
        except ModuleNotFoundError as error:
            raise _wrong(f"{error.name} is not installed: pip install 'stepwell[postgres]'") from error
        # Processes on many machines: only the database's clock is the same for all.
        return PostgresStore(url, clock=None if isinstance(clock, SystemClock) else clock)
    raise _wrong("there is no such store")


def _sqlite(rest: str) -> tuple[str, Literal["normal", "full"]]:
    location, _, query = rest.partition("?")
    if not location.startswith("/"):
        raise _wrong("an SQLite URL has three slashes before a relative path and four before an absolute one")
    path = unquote(location[1:])
    if path == ":memory:":
        raise _wrong("SQLite in memory cannot be shared between connections: use memory://")
    if not path or "\0" in path:
        raise _wrong("the path of the SQLite file is missing")
    options = dict(parse_qsl(query, keep_blank_values=True))
    synchronous = options.pop("synchronous", "normal").lower()
    if options:
        raise _wrong(f"the only option of an SQLite URL is synchronous, not {', '.join(sorted(options))}")
    if synchronous == "normal":
        return path, "normal"
    if synchronous == "full":
        return path, "full"
    raise _wrong("synchronous is normal or full")


def _wrong(why: str) -> InvalidInputError:
    # The URL itself is not repeated: it may hold a password.
    return InvalidInputError(f"The URL of the session store is not usable: {why}. Stores are: {SCHEMES}.", "/store")
