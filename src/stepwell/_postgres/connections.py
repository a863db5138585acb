"""How a process talks to PostgreSQL: connections, deadlines, and what errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import Any, Final, Literal, TypeVar

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from stepwell.errors import InvalidInputError, StepwellError

from .arrays import ADAPTERS
from .part import Part, migrate

__all__ = ["Connection", "Connections", "repeat_conflicts"]

T = TypeVar("T")

CONFLICTS: Final = 5
"""How often a statement is repeated that the server gave up in favour of another."""

Connection = psycopg.AsyncConnection[TupleRow]

# Every statement goes by an index, so nothing else is to be chosen, whatever the statistics of a young table say. The
# functions rely on read committed. A statement that waits longer than its caller is of no use.
_SETTINGS: Final = (
    "SELECT set_config('default_transaction_isolation', 'read committed', false),"
    " set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', false),"
    " set_config('jit', 'off', false), set_config('statement_timeout', %s, false)"
)


class Connections:
    """Connections, made when they are needed and kept for the next who needs one.

    A pool of its own, because one that reconnects in the background says neither what is wrong nor, for as long as its
    back-off lasts, that it is over.

    Args:
        url: Of the database.
        timeout: Seconds for a statement, and for connecting.
        part: Whose tables are used, and whose errors are raised. What is called `Part.error` below is any of them.

    Raises:
        InvalidInputError: The URL is not one.
    """

    def __init__(self, url: str, timeout: float, part: Part) -> None:
        try:
            given = conninfo_to_dict(url)
        except psycopg.Error:
            # The URL and what is said about it are not repeated: it may hold a password.
            raise InvalidInputError(
                f"The URL of {part.whole} is not one of PostgreSQL: write postgresql://user:password@host:5432/database,"
                " with special characters of user and password percent-encoded.",
                part.pointer,
            ) from None
        defaults = {"connect_timeout": max(2, round(timeout)), "application_name": "stepwell"}
        self._options: dict[str, Any] = {
            **{name: value for name, value in defaults.items() if name not in given},
            "client_encoding": "utf8",
            "autocommit": True,
            "prepare_threshold": 0,
            "context": ADAPTERS,
        }
        self._url = url
        self._timeout = timeout
        self._part = part
        self._idle: list[Connection] = []
        self._migrating = asyncio.Lock()
        self._migrated = False
        self._closed = False

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[Connection]:
        """Use a connection.

        Raises:
            Part.error: There is none, or what was done with it failed.
            NewerSchemaError: The tables are those of a newer Stepwell.
        """
        self.check_open()
        connection = await self._get()
        try:
            with self.deadline(connection):
                yield connection
        finally:
            if self._closed or connection.pgconn.transaction_status != pq.TransactionStatus.IDLE:
                await connection.close()
            else:
                self._idle.append(connection)

    async def connect(self) -> Connection:
        """Make one for the caller alone.

        Raises:
            Part.error: It cannot be made.
        """
        self.check_open()
        try:
            connection = await psycopg.AsyncConnection.connect(self._url, **self._options)
        except (psycopg.Error, OSError) as error:
            raise _no_connection(error, self._part) from None
        try:
            with self.deadline(connection):
                await connection.execute(_SETTINGS, (str(round(self._timeout * 1000)),))
        except BaseException:
            await connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def deadline(self, connection: Connection) -> Generator[None]:
        """Say what fails as the part's error, and hang up when the server says nothing for too long.

        It may be stopped, or the network cut. (A lock that is waited for too long is the server's `statement_timeout`.)

        Raises:
            Part.error: What was done with the connection failed.
        """
        timer = asyncio.get_running_loop().call_later(self._timeout + 1, _hang_up, connection)
        try:
            yield
        except (psycopg.Error, OSError) as error:
            # Not chained: what PostgreSQL says may repeat what was written, and a connection knows its password.
            raise _meaning(error, self._part) from None
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Close all connections; those in use when they are given back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    def check_open(self) -> None:
        """Raise the part's error if these are closed."""
        if self._closed:
            raise self._part.closed()

    async def _get(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if _is_alive(connection):
                return connection
            await connection.close()
        connection = await self.connect()
        try:
            if not self._migrated:
                async with self._migrating:
                    if not self._migrated:
                        with self.deadline(connection):
                            await migrate(connection, self._part)
                        self._migrated = True
        except BaseException:
            await connection.close()
            raise
        return connection


def _is_alive(connection: Connection) -> bool:
    """Notice a connection that the server closed before anything is sent, so that nothing is in doubt.

    One that nothing is asked of has nothing to say but that it ends.
    """
    look = select.poll()
    look.register(connection.fileno(), select.POLLIN)
    return not look.poll(0)


def _hang_up(connection: Connection) -> None:
    if not connection.closed:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)


def _no_connection(error: BaseException, part: Part) -> StepwellError:
    # PostgreSQL's words hold host, user and database, and never the password.
    why = " ".join(str(error).split())
    if any(words in why for words in _FOR_GOOD):
        return part.error(f"PostgreSQL refuses the connection: correct the URL of {part.whole}. {why}")
    return part.busy(f"PostgreSQL cannot be reached: try again. {why}")


def _meaning(error: BaseException, part: Part) -> StepwellError:
    """What a failure means and what to do. PostgreSQL's words are left out: they may repeat what was written."""
    state = getattr(error, "sqlstate", None) or ""
    for prefix, kind, text in _MEANINGS:
        if state.startswith(prefix):
            say = part.busy if kind == "busy" else part.data if kind == "data" else part.error
            return say(text.format(part=part))
    if not state and isinstance(error, (psycopg.OperationalError, OSError)):
        return part.busy("The connection to PostgreSQL was lost: try again.")
    return part.error(f"PostgreSQL refused ({state or type(error).__name__}).")


_FOR_GOOD: Final = (
    "password authentication failed",
    "no password supplied",
    "pg_hba.conf",
    "does not exist",
    "invalid ",
)
"""Only the text tells: libpq gives no code for a connection that failed. In another language the error says as much,
but is called one that may be tried again."""

_TABLES_GONE: Final = (
    "The {part.name} tables are not in the database any more, or the connection's search_path is another: open"
    " {part.whole} anew, which makes them."
)
_NO_RIGHTS: Final = (
    "PostgreSQL does not permit this user what {part.whole} must do: grant it to use and to create in a schema of its"
    " search_path, or the {part.name} tables that are there already."
)
_MEANINGS: Final[Sequence[tuple[str, Literal["busy", "error", "data"], str]]] = (
    ("08", "busy", "The connection to PostgreSQL was lost: try again."),
    ("57014", "busy", "PostgreSQL did not answer in time: try again."),
    ("57P", "busy", "PostgreSQL is stopping or starting: try again in a moment."),
    ("25006", "busy", "This PostgreSQL takes no writes: try again when the failover is over."),
    ("40", "busy", "PostgreSQL gave way to other transactions: try again."),
    ("55P03", "busy", "PostgreSQL did not get a lock: try again."),
    ("53100", "busy", "The disk of PostgreSQL is full: free space there, then try again."),
    ("53", "busy", "PostgreSQL is short of memory or connections: try again."),
    ("54", "error", "This is more than PostgreSQL takes at once: use shorter names, or less data."),
    ("42501", "error", _NO_RIGHTS),
    ("3F000", "error", _NO_RIGHTS),
    ("42P01", "error", _TABLES_GONE),
    ("42883", "error", _TABLES_GONE),
    ("XX", "data", "PostgreSQL found its own data damaged: see its log."),
)
"""By the beginning of the SQLSTATE."""


async def repeat_conflicts(call: Callable[[], Awaitable[T]]) -> T:
    """Run a statement again when the server gave it up for another one: nothing was done."""
    for attempt in range(CONFLICTS):
        try:
            return await call()
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            await asyncio.sleep(random.uniform(0, 0.02) * (attempt + 1))  # noqa: S311 - spreads the callers
    return await call()
