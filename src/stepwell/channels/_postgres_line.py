"""How this process talks to PostgreSQL: connections, lines of writes, and what errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from itertools import islice
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from stepwell.errors import ChannelBusyError, ChannelDataError, ChannelError, InvalidInputError, StepwellError

from ._postgres_arrays import ADAPTERS
from ._postgres_schema import migrate
from ._refusals import closed

__all__ = ["Connection", "Connections", "Line", "repeat_conflicts", "to_channel_error"]

MAX_ROWS: Final = 1_000
"""Rows in one write."""

MAX_BYTES: Final = 4_000_000
"""And about how much they may hold together."""

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

    Raises:
        InvalidInputError: The URL is not one.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            given = conninfo_to_dict(url)
        except psycopg.Error:
            # The URL and what is said about it are not repeated: it may hold a password.
            raise InvalidInputError(
                "The URL of the channels is not one of PostgreSQL: write postgresql://user:password@host:5432/database,"
                " with special characters of user and password percent-encoded.",
                "/channels",
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
        self._idle: list[Connection] = []
        self._migrating = asyncio.Lock()
        self._migrated = False
        self._closed = False

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[Connection]:
        """Use a connection.

        Raises:
            ChannelError: There is none, or what was done with it failed.
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
            ChannelError: It cannot be made.
        """
        self.check_open()
        try:
            connection = await psycopg.AsyncConnection.connect(self._url, **self._options)
        except (psycopg.Error, OSError) as error:
            raise _no_connection(error) from None
        try:
            with self.deadline(connection):
                await connection.execute(_SETTINGS, (str(round(self._timeout * 1000)),))
        except BaseException:
            await connection.close()
            raise
        return connection

    @contextlib.contextmanager
    def deadline(self, connection: Connection) -> Generator[None]:
        """Say what fails as a channel's error, and hang up when the server says nothing for too long.

        It may be stopped, or the network cut. (A lock that is waited for too long is the server's `statement_timeout`.)

        Raises:
            ChannelError: What was done with the connection failed.
        """
        timer = asyncio.get_running_loop().call_later(self._timeout + 1, _hang_up, connection)
        try:
            yield
        except (psycopg.Error, OSError) as error:
            # Not chained: what PostgreSQL says may repeat what was written, and a connection knows its password.
            raise to_channel_error(error) from None
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Close all connections; those in use when they are given back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    def check_open(self) -> None:
        """Raise `ChannelError` if these are closed."""
        if self._closed:
            raise closed()

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
                            await migrate(connection)
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


class _Call:
    """Rows of one call to one channel, and who waits for what came of them."""

    __slots__ = ("channel", "future", "rows", "size")

    def __init__(self, channel: str, rows: Sequence[Any], size: int) -> None:
        self.channel = channel
        self.rows = rows
        self.size = size
        self.future: asyncio.Future[list[TupleRow]] = asyncio.get_running_loop().create_future()


Write = Callable[[list[str], list[int], list[Any]], Awaitable[list[TupleRow]]]
"""Writes rows: the channels in order, how many rows each has, the rows. Returns a result for each row."""


class Line:
    """Writes in the order of their calls. What is called while one is under way goes together into the next.

    Args:
        write: See `Write`.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting: deque[_Call] = deque()
        self._task: asyncio.Task[None] | None = None

    async def call(self, channel: str, rows: Sequence[Any], size: int) -> list[TupleRow]:
        """Write rows of about `size` bytes to a channel and return a result for each.

        Raises:
            ChannelError: It failed; `ChannelBusyError` where it is not known whether it was done.
        """
        call = _Call(channel, rows, size)
        self._waiting.append(call)
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await call.future

    async def finish(self) -> None:
        """Let what was called come to its end."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _drain(self) -> None:
        try:
            while self._waiting:
                calls = self._next()
                try:
                    await self._serve(calls)
                except Exception as error:  # noqa: BLE001 - a bug is its callers' to see, and not the others' end
                    _fail(calls, error)
                except BaseException:
                    for call in calls:
                        call.future.cancel()
                    raise
        finally:
            self._task = None

    def _next(self) -> list[_Call]:
        calls: list[_Call] = []
        rows = size = 0
        while self._waiting:
            call = self._waiting[0]
            if calls and (rows + len(call.rows) > MAX_ROWS or size + call.size > MAX_BYTES):
                break
            self._waiting.popleft()
            if not call.future.done():  # else it was cancelled before it was sent
                calls.append(call)
                rows += len(call.rows)
                size += call.size
        calls.sort(key=lambda call: call.channel)
        return calls

    async def _serve(self, calls: list[_Call]) -> None:
        try:
            await self._send(calls)
        except ChannelBusyError as error:
            _fail(calls, error)
        except StepwellError as error:
            # Nothing was done. If only one of them is to blame, it is the only one to fail.
            if len(calls) == 1:
                _fail(calls, error)
            else:
                for call in calls:
                    await self._serve([call])

    async def _send(self, calls: list[_Call]) -> None:
        if not calls:
            return
        channels: list[str] = []
        sizes: list[int] = []
        for call in calls:
            if channels and channels[-1] == call.channel:
                sizes[-1] += len(call.rows)
            else:
                channels.append(call.channel)
                sizes.append(len(call.rows))
        results = iter(await self._write(channels, sizes, [row for call in calls for row in call.rows]))
        for call in calls:
            own = list(islice(results, len(call.rows)))
            if not call.future.done():
                call.future.set_result(own)


def _fail(calls: list[_Call], error: Exception) -> None:
    for call in calls:
        if not call.future.done():  # each has its own: a traceback is added to it where it is raised
            call.future.set_exception(type(error)(*error.args))


async def repeat_conflicts(call: Callable[[], Awaitable[list[TupleRow]]]) -> list[TupleRow]:
    """Run a statement again when the server gave it up for another one: nothing was done."""
    for attempt in range(CONFLICTS):
        try:
            return await call()
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            await asyncio.sleep(random.uniform(0, 0.02) * (attempt + 1))  # noqa: S311 - spreads the callers
    return await call()


def _no_connection(error: BaseException) -> ChannelError:
    # PostgreSQL's words hold host, user and database, and never the password.
    why = " ".join(str(error).split())
    if any(words in why for words in _FOR_GOOD):
        return ChannelError(f"PostgreSQL refuses the connection: correct the URL of the channels. {why}")
    return ChannelBusyError(f"PostgreSQL cannot be reached: try again. {why}")


def to_channel_error(error: BaseException) -> ChannelError:
    """What a failure means and what to do. PostgreSQL's words are left out: they may repeat what was written."""
    state = getattr(error, "sqlstate", None) or ""
    for prefix, kind, text in _MEANINGS:
        if state.startswith(prefix):
            return kind(text)
    if not state and isinstance(error, (psycopg.OperationalError, OSError)):
        return ChannelBusyError("The connection to PostgreSQL was lost: try again.")
    return ChannelError(f"PostgreSQL refused ({state or type(error).__name__}).")


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
    "The channel tables are not in the database any more, or the connection's search_path is another: open these"
    " channels anew, which makes them."
)
_NO_RIGHTS: Final = (
    "PostgreSQL does not permit this user what channels need: grant it to use and to create in a schema of its"
    " search_path, or the tables of channels that are there already."
)
_MEANINGS: Final[Sequence[tuple[str, type[ChannelError], str]]] = (
    ("08", ChannelBusyError, "The connection to PostgreSQL was lost: try again."),
    ("57014", ChannelBusyError, "PostgreSQL did not answer in time: try again."),
    ("57P", ChannelBusyError, "PostgreSQL is stopping or starting: try again in a moment."),
    ("25006", ChannelBusyError, "This PostgreSQL takes no writes: try again when the failover is over."),
    ("40", ChannelBusyError, "PostgreSQL gave way to other transactions: try again."),
    ("55P03", ChannelBusyError, "PostgreSQL did not get a lock: try again."),
    ("53100", ChannelBusyError, "The disk of PostgreSQL is full: free space there, then try again."),
    ("53", ChannelBusyError, "PostgreSQL is short of memory or connections: try again."),
    ("42501", ChannelError, _NO_RIGHTS),
    ("3F000", ChannelError, _NO_RIGHTS),
    ("42P01", ChannelError, _TABLES_GONE),
    ("42883", ChannelError, _TABLES_GONE),
    ("XX", ChannelDataError, "PostgreSQL found its own data damaged: see its log."),
)
"""By the beginning of the SQLSTATE."""
