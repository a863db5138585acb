"""One owner per process and SQLite file: its connections, group commit, check-points and schema.

Stores and channels that name the same file share one owner, so that what they write in one tick of the event loop is
one transaction, and so that a process never waits for itself longer than a transaction takes.

* Jobs that need no fsync run in the loop: those of one tick share a transaction. Its connection never waits: when
  another process (or the writer thread) holds the file, the jobs move to the thread, which does wait.
* Jobs that need an fsync (`full`) run in the writer thread; what arrives during one fsync shares the next. While the
  thread is at work the loop's jobs wait for it, and then join its next transaction or return to the loop: the two
  never compete for the file, where the one that waits by polling would starve.
* Check-points run on a third connection, in a thread of their own, so that no commit pays for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from stepwell.errors import NewerSchemaError, StepwellError, StoreBusyError, StoreDataError, StoreError

__all__ = ["Job", "Part", "SqliteOwner", "Undo", "acquire_owner", "release_owner"]

T = TypeVar("T")
Job: TypeAlias = Callable[[sqlite3.Cursor], T]
"""Runs inside a transaction. It may run again after a rollback, so it touches nothing but the database. It raises a
`StepwellError` only before its first write; after one it raises `Undo`."""

APPLICATION_ID: Final = 0x53575731
"""`PRAGMA application_id` of our files, so that another program's database is never changed."""

CHECKPOINT_BYTES: Final = 16_000_000
"""Size of the write-ahead log at which it is copied into the file."""

RESTART_BYTES: Final = 64_000_000
"""Size at which writers are made to wait for a moment so that the log can start over: under a load that never pauses
a passive check-point is never complete, and the log would grow without end."""


class Undo(Exception):
    """Raised by a job that found out after its first write; its error is delivered when the writes are undone."""

    def __init__(self, error: StepwellError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True)
class Part:
    """The tables of one user of the file.

    Attributes:
        name: For error messages.
        byte: Which byte of `PRAGMA user_version` (0 to 2) holds its version.
        migrations: SQL scripts; the n-th brings version n to n + 1.
    """

    name: str
    byte: int
    migrations: Sequence[Sequence[str]]


class _Entry:
    """A job and who waits for it."""

    __slots__ = ("error", "full", "future", "job", "loop", "value")

    def __init__(self, job: Job[Any], loop: asyncio.AbstractEventLoop, full: bool) -> None:
        self.job = job
        self.loop = loop
        self.full = full
        self.future: asyncio.Future[Any] = loop.create_future()
        self.value: Any = None
        self.error: BaseException | None = None

    def deliver(self) -> None:
        if self.future.done():  # whoever waited was cancelled; what was done stays done
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class _Connection:
    """A connection in autocommit mode with one cursor, so that statements are prepared once."""

    def __init__(self, path: str, busy_timeout: float) -> None:
        self._path = path
        self.raw = sqlite3.connect(
            path, timeout=busy_timeout, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        self.cursor = self.raw.cursor()
        self._full = False
        # The loop's and the writer's commits never check-point on the way; see `SqliteOwner._checkpoint`.
        self.cursor.execute("PRAGMA wal_autocheckpoint=0")
        self.cursor.execute("PRAGMA synchronous=NORMAL")

    def synchronise(self, full: bool) -> None:
        """Choose whether the next commits reach the disk before they return."""
        if full != self._full:
            self.cursor.execute("PRAGMA synchronous=FULL" if full else "PRAGMA synchronous=NORMAL")
            self.cursor.execute("PRAGMA fullfsync=ON" if full else "PRAGMA fullfsync=OFF")  # macOS only
            self._full = full

    def run(self, entries: Sequence[_Entry]) -> None:
        """Run all jobs in one transaction. A job that loses a comparison does not fail the others.

        Raises:
            sqlite3.Error: Nothing was done.
            Undo: The same; a job found out too late, so each has to run by itself.
        """
        cursor = self.cursor
        cursor.execute("BEGIN IMMEDIATE")
        try:
            for entry in entries:
                try:
                    entry.value = entry.job(cursor)
                    entry.error = None
                except StepwellError as error:
                    entry.error = error
            cursor.execute("COMMIT")
        except BaseException:
            self.rollback()
            raise

    def run_alone(self, entry: _Entry) -> None:
        """Run one job in its own transaction and keep its error, whatever it is."""
        try:
            self.run([entry])
        except Undo as undo:
            entry.error = undo.error
        except sqlite3.Error as error:
            entry.error = store_error(error, self._path)
        except Exception as error:  # noqa: BLE001 - a bug in one job is its own caller's, not the writer's
            entry.error = error

    def read(self, job: Job[T]) -> T:
        """Run a job that only reads, on one snapshot."""
        self.cursor.execute("BEGIN")
        try:
            return job(self.cursor)
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Undo what the transaction has done, if there is one."""
        # SQLite has rolled back already after some errors, a full disk for one.
        if self.raw.in_transaction:
            self.cursor.execute("ROLLBACK")

    def close(self) -> None:
        self.raw.close()


class SqliteOwner:
    """The connections of this process to one file. Made by `acquire_owner`.

    Args:
        path: The file.
        busy_timeout: Seconds to wait, in a thread, for other processes before `StoreBusyError`.
    """

    def __init__(self, path: str, busy_timeout: float) -> None:
        self.path = path
        self.busy_timeout = busy_timeout
        self.users = 0
        self._closed = False
        self._wal = path + "-wal"
        self._main = _open(path, busy_timeout)
        self._main_lock = threading.Lock()  # several event loops, each in its thread, may share the file
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, list[_Entry]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._pending: list[_Entry] = []
        self._parked: list[_Entry] = []
        self._draining = False
        self._closing = False
        self._writer: _Connection | None = None
        self._writer_thread = ThreadPoolExecutor(1, "stepwell-sqlite-writer")
        self._reader: _Connection | None = None
        self._reader_thread = ThreadPoolExecutor(1, "stepwell-sqlite-reader")
        self._checkpoint_thread = ThreadPoolExecutor(1, "stepwell-sqlite-checkpoint")
        self._checkpointing = False
        self._commits = 0
        self.identity = _identity(path)
        self.shared: dict[object, Any] = {}
        """What users of the file keep together, each kind under a key of its own."""

    # --- schema -----------------------------------------------------------------------------------------------------

    def migrate(self, part: Part) -> None:
        """Bring a part's tables to the current version, in one transaction.

        Raises:
            NewerSchemaError: The file was written by a newer Stepwell; nothing is changed.
            StoreBusyError: Another process held the file for too long.
        """
        with self._main_lock, _mapped(self.path):
            cursor = self._main.cursor
            cursor.execute(f"PRAGMA busy_timeout={int(self.busy_timeout * 1000)}")
            try:
                cursor.execute("BEGIN IMMEDIATE")
                try:
                    self._upgrade(cursor, part)
                    cursor.execute("COMMIT")
                except BaseException:
                    self._main.rollback()
                    raise
            finally:
                cursor.execute("PRAGMA busy_timeout=0")

    def _upgrade(self, cursor: sqlite3.Cursor, part: Part) -> None:
        word: int = cursor.execute("PRAGMA user_version").fetchone()[0]
        version = (word >> (8 * part.byte)) & 0xFF
        newest = len(part.migrations)
        if version > newest:
            raise NewerSchemaError(
                f"The {part.name} tables of {self.path} have version {version}, this Stepwell knows up to {newest}: "
                "update Stepwell."
            )
        if version == newest:
            return
        for script in part.migrations[version:]:
            for statement in script:
                cursor.execute(statement)
        word = word & ~(0xFF << (8 * part.byte)) | newest << (8 * part.byte)
        cursor.execute(f"PRAGMA user_version={word}")
        cursor.execute(f"PRAGMA application_id={APPLICATION_ID}")

    # --- jobs -------------------------------------------------------------------------------------------------------

    def write(self, job: Job[T], *, full: bool = False, aside: bool = False) -> asyncio.Future[T]:
        """Run a job in a transaction that other jobs may share; the future is done when it is committed.

        Cancelling the future before the transaction began drops the job; afterwards it has no effect on it.

        Args:
            job: See `Job`.
            full: Do not answer before it is on the disk.
            aside: It may take long: run it in the thread.
        """
        loop = asyncio.get_running_loop()
        entry = _Entry(job, loop, full)
        if self._closed:
            entry.future.set_exception(_closed(self.path))
        elif full or aside:
            self._hand_over([entry])
        else:
            queue = self._queues.get(loop)
            if queue is None:
                queue = self._queues[loop] = []
            if not queue:
                loop.call_soon(self._flush, queue)
            queue.append(entry)
        return entry.future

    async def read(self, job: Job[T]) -> T:
        """Run a short job that only reads, on what is committed, at once and in the loop."""
        found = self.peek(job)
        return found[0] if found is not None else await self.read_aside(job)

    def peek(self, job: Job[T]) -> tuple[T] | None:
        """The same, or None while somebody has the connection or the file: where nobody can wait."""
        if self._closed:
            raise _closed(self.path)
        if not self._main_lock.acquire(blocking=False):
            return None
        try:
            return (self._main.read(job),)
        except sqlite3.Error as error:
            # Readers wait for nobody in WAL mode, except while a log is recovered or started over.
            if _busy(error):
                return None
            raise store_error(error, self.path) from error
        finally:
            self._main_lock.release()

    async def read_aside(self, job: Job[T]) -> T:
        """Run a job that only reads and may take long, in a thread."""
        if self._closed:
            raise _closed(self.path)
        return await asyncio.get_running_loop().run_in_executor(self._reader_thread, self._read_aside, job)

    def _read_aside(self, job: Job[T]) -> T:
        with _mapped(self.path):
            if self._reader is None:
                self._reader = _Connection(self.path, self.busy_timeout)
            return self._reader.read(job)

    def commits(self) -> tuple[int, int] | None:
        """Something that changes whenever anybody has committed; None while it cannot be told, see `peek`."""
        found = self.peek(lambda cursor: int(cursor.execute("PRAGMA data_version").fetchone()[0]))
        # The first is blind to this connection's own commits, the second to those of other processes.
        return None if found is None else (found[0], self._commits)

    def _flush(self, queue: list[_Entry]) -> None:
        """Run what one tick of the loop has queued."""
        entries = [entry for entry in queue if not entry.future.done()]
        queue.clear()
        if not entries:
            return
        with self._lock:
            if self._draining:
                self._parked += entries
                return
        if not self._main_lock.acquire(blocking=False):
            self._hand_over(entries)
            return
        try:
            self._main.run(entries)
        except Exception:  # noqa: BLE001 - the thread runs each by itself and delivers what it then raises
            # Busy, or one of them failed: nothing was done, and the thread has the time to sort it out.
            self._hand_over(entries)
            return
        finally:
            self._main_lock.release()
        for entry in entries:
            entry.deliver()
        self._count()

    def _hand_over(self, entries: Iterable[_Entry]) -> None:
        with self._lock:
            if not self._closed:
                self._pending.extend(entries)
                if not self._draining:
                    self._draining = True
                    self._writer_thread.submit(self._drain)
                return
        for entry in entries:  # queued by another event loop while the last store was closed
            entry.error = _closed(self.path)
            entry.deliver()

    def _drain(self) -> None:
        """In the writer thread: run what is pending, as one transaction each time round."""
        while True:
            with self._lock:
                back: list[_Entry] = []
                if self._pending or self._closing:
                    entries = self._pending + self._parked
                else:
                    entries, back = [], self._parked
                self._pending, self._parked = [], []
                entries = [entry for entry in entries if not entry.future.cancelled()]
                if not entries:
                    self._draining = False
            if not entries:
                _by_loop(self._flush, back)
                return
            self._run_waiting(entries)
            _by_loop(_deliver, entries)
            self._count()

    def _run_waiting(self, entries: list[_Entry]) -> None:
        try:
            if self._writer is None:
                self._writer = _Connection(self.path, self.busy_timeout)
            self._writer.synchronise(any(entry.full for entry in entries))
            self._writer.run(entries)
        except Exception as error:  # noqa: BLE001 - delivered below, to each its own
            if self._writer is None or (isinstance(error, sqlite3.Error) and _busy(error)):
                for entry in entries:
                    entry.error = store_error(error, self.path) if isinstance(error, sqlite3.Error) else error
                return
            for entry in entries:
                self._writer.run_alone(entry)

    # --- check-points -----------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._commits += 1
        if self._commits & 31 or self._checkpointing:
            return
        try:
            size = os.stat(self._wal).st_size  # noqa: PTH116 - a tenth of the time of Path.stat
        except OSError:
            return
        with self._lock:
            if size > CHECKPOINT_BYTES and not self._closed:
                self._checkpointing = True
                self._checkpoint_thread.submit(self._checkpoint)

    def _checkpoint(self) -> None:
        try:
            connection = sqlite3.connect(self.path, timeout=self.busy_timeout, isolation_level=None)
            try:
                connection.execute("PRAGMA synchronous=NORMAL")
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
                if os.stat(self._wal).st_size > RESTART_BYTES:  # noqa: PTH116
                    # Most pages are copied by now, so the writers wait only for the rest.
                    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()
        except (sqlite3.Error, OSError):
            pass  # a later commit asks again; until then the log is only longer
        finally:
            self._checkpointing = False

    # --- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish every job, then close. Waits, so it is called in a thread.

        The last connection of all processes copies the log into the file and removes it.
        """
        with self._lock:
            self._closed = True
        self._writer_thread.shutdown()
        self._reader_thread.shutdown()
        self._checkpoint_thread.shutdown()
        with self._main_lock:
            for connection in (self._writer, self._reader, self._main):
                if connection is not None:
                    connection.close()

    async def finish(self) -> None:
        """Let this loop run what it has queued, then close in a thread."""
        self._closing = True
        await asyncio.sleep(0)  # a tick, also for what the writer thread has just given back to the loop
        await asyncio.get_running_loop().run_in_executor(None, self.close)


def _by_loop(callback: Callable[[list[_Entry]], None], entries: list[_Entry]) -> None:
    for loop in {entry.loop for entry in entries}:
        mine = [entry for entry in entries if entry.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(callback, mine)


def _deliver(entries: list[_Entry]) -> None:
    for entry in entries:
        entry.deliver()


# --- the registry -----------------------------------------------------------------------------------------------------

_owners: dict[tuple[int, str], SqliteOwner] = {}
_owners_lock = threading.Lock()
"""The one piece of global state: a second owner of the same file in one process would make it wait for itself. The key
holds the process id, because a connection must not be used after a fork."""


def acquire_owner(path: str | os.PathLike[str], part: Part, busy_timeout: float = 5.0) -> SqliteOwner:
    """Give the owner of a file, opening it when this is the first user; `release_owner` gives it back.

    Raises:
        StoreError: The file cannot be opened or made; `StoreDataError` when it is another program's.
        NewerSchemaError: It was written by a newer Stepwell.
    """
    real = os.path.realpath(path)
    key = (os.getpid(), real)
    with _owners_lock:
        owner = _owners.get(key)
        if owner is None or owner.identity != _identity(real):  # the file was replaced: the old owner keeps the old one
            owner = SqliteOwner(real, busy_timeout)
            try:
                owner.migrate(part)
            except BaseException:
                owner.close()
                raise
            _owners[key] = owner
        else:
            owner.migrate(part)
        owner.users += 1
        return owner


async def release_owner(owner: SqliteOwner) -> None:
    """Give an owner back; the last user closes it. What is under way is finished first."""
    with _owners_lock:
        owner.users -= 1
        if owner.users:
            return
        for key in [key for key, value in _owners.items() if value is owner]:
            del _owners[key]
    # Not cancellable half way: the connections would stay open with nobody left to close them.
    await asyncio.shield(asyncio.ensure_future(owner.finish()))


# --- opening and errors -----------------------------------------------------------------------------------------------


def _open(path: str, busy_timeout: float) -> _Connection:
    parent = Path(path).parent
    if not parent.is_dir():
        raise StoreError(f"The directory of {path} does not exist: create {parent} first.")
    with _mapped(path):
        connection = _Connection(path, busy_timeout)
        try:
            _claim(connection.cursor, path, busy_timeout)
            connection.cursor.execute("PRAGMA busy_timeout=0")
        except BaseException:
            connection.close()
            raise
        return connection


def _claim(cursor: sqlite3.Cursor, path: str, busy_timeout: float) -> None:
    """Check whose database it is, before anything in it is changed, and turn the write-ahead log on."""
    application: int = cursor.execute("PRAGMA application_id").fetchone()[0]
    empty = cursor.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone() is None
    if application != APPLICATION_ID and not empty:
        raise StoreDataError(f"{path} is the database of another program: name a file of Stepwell's own.")
    deadline = time.monotonic() + busy_timeout
    while True:
        try:
            mode: str = cursor.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            break
        except sqlite3.Error as error:
            # Turning the log on does not wait for another process that is doing the same.
            if not _busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
    if mode != "wal":
        raise StoreError(f"{path} cannot have a write-ahead log ({mode}): put it on a local file system.")


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - `path` is text, the registry's key
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _busy(error: sqlite3.Error) -> bool:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def store_error(error: sqlite3.Error, path: str) -> StoreError:
    """Say in our words what SQLite said."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        result = StoreBusyError(f"{path} is locked by another process; nothing was done, try again.")
    elif code == sqlite3.SQLITE_NOTADB:
        result = StoreDataError(f"{path} is not an SQLite database.")
    elif code == sqlite3.SQLITE_CORRUPT:
        result = StoreDataError(f"{path} is damaged ({error}): restore it from a copy.")
    else:
        result = StoreError(f"SQLite could not do it with {path}: {error}.")
    result.__cause__ = error
    return result


def _closed(path: str) -> StoreError:
    return StoreError(f"The store {path} is closed.")


@contextlib.contextmanager
def _mapped(path: str) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, path) from error
