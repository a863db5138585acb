"""The right to write one session, held by this process: acquired, renewed, used for every commit, given up."""

from __future__ import annotations

from collections.abc import Callable

from anyio import CancelScope

from stepwell._clock import Clock
from stepwell.errors import SessionConflictError, StaleWriterError, StoreError
from stepwell.sessions import Acquired, Commit, JournalRow, Lease, SessionStore, encode_head

from ._warm import Warm
from ._working import Working

__all__ = ["Hold"]


class Hold:
    """One lease at a time, and the deadline up to which it counts by this process's own clock.

    Args:
        store: Where the session lives.
        clock: For the deadline and for waiting.
        owner: This process.
        ttl: Seconds the lease lasts.
        report: Told of a lease that could not be given up.
    """

    __slots__ = ("_lease", "_owner", "_report", "_store", "_ttl", "_until", "clock", "incarnation", "session")

    def __init__(
        self, store: SessionStore, clock: Clock, owner: str, ttl: float, report: Callable[[str, Exception, str], None]
    ) -> None:
        self._store = store
        self.clock = clock
        self._owner = owner
        self._ttl = ttl
        self._report = report
        self._lease: Lease | None = None
        self.session = ""
        self._until = 0.0
        self.incarnation = ""

    @property
    def held(self) -> bool:
        """Whether there is a lease, as far as this process knows."""
        return self._lease is not None

    @property
    def until(self) -> float:
        """When the lease that is held runs out, on this process's clock, unless it is renewed."""
        return self._until

    @property
    def epoch(self) -> int:
        """Of the lease that is held."""
        assert self._lease is not None
        return self._lease.epoch

    def check(self) -> Lease:
        """The lease. Every writer stops by its own clock, before the store or the channel would have to tell it.

        Raises:
            StaleWriterError: It ran out.
        """
        lease = self._lease
        if lease is None or self.clock.monotonic() >= self._until:
            raise StaleWriterError("The lease ran out before it could be renewed.", session_id=self.session)
        return lease

    def _took(self, acquired: Acquired, asked: float) -> Acquired:
        self._lease = acquired.lease
        self.session = acquired.lease.session
        self._until = asked + self._ttl
        self.incarnation = acquired.lease.incarnation
        return acquired

    async def create(self, working: Working) -> None:
        """Create the session with its first commit.

        Raises:
            SessionExistsError: Somebody else was first.
        """
        asked = self.clock.monotonic()
        acquired = await self._store.create(working.commit(), owner=self._owner, ttl=self._ttl)
        self._took(acquired, asked)
        working.committed(acquired.revision)

    async def acquire(self, session: str, warm: Warm | None, supersede: str | None) -> Acquired:
        """Take the lease.

        Args:
            session: Which.
            warm: What this process has of it.
            supersede: See `SessionStore.acquire`.

        Raises:
            LeaseHeldError: Another process has it.
            UnknownSessionError: There is no such session.
        """
        asked = self.clock.monotonic()
        acquired = await self._store.acquire(
            session,
            self._owner,
            ttl=self._ttl,
            known_revision=warm.revision if warm else None,
            known_incarnation=warm.incarnation if warm else None,
            supersede=supersede,
        )
        return self._took(acquired, asked)

    async def renew(self) -> str | None:
        """Extend the lease. Returns why it is lost, if it is."""
        lease = self._lease
        if lease is None:
            return None
        asked = self.clock.monotonic()
        try:
            renewed = await self._store.renew(lease, ttl=self._ttl)
        except StaleWriterError:
            return "the lease was taken over" if self._lease is lease else None
        except StoreError:
            expired = self._lease is lease and self.clock.monotonic() >= self._until
            return "the lease ran out while the store was unreachable" if expired else None
        if self._lease is lease:
            self._lease, self._until = renewed, asked + self._ttl
        return None

    async def commit(self, working: Working, *, release: bool = False) -> int:
        """Everything since the last commit into the store, guarded by revision and epoch; returns the new revision.

        A store that is away for a moment is tried again while the lease lasts, and a lost answer is recognised.

        Raises:
            StaleWriterError: The lease is not ours any more; nothing was written.
            SessionConflictError: The revision moved; nothing was written.
            StoreError: The store cannot do it.
        """
        lease = self.check()
        commit, expected = working.commit(release=release), working.head.revision
        lost = False
        while True:
            try:
                revision = await self._store.save(lease, commit, expected)
                break
            except (SessionConflictError, StaleWriterError):
                revision = expected + 1
                if lost and await self._is_stored(commit, revision):
                    break
                raise
            except StoreError as error:
                if not error.retryable or self.clock.monotonic() >= self._until:
                    raise
                lost = True
                await self.clock.sleep(0.05)
        working.committed(revision)
        if release:
            self._lease = None
        return revision

    async def record(self, row: JournalRow) -> None:
        """Write a journal row. Without an answer it is written again, which changes nothing, while the lease lasts.

        Raises:
            StaleWriterError: The lease is not ours any more, or ran out meanwhile.
            StoreError: The store cannot do it.
        """
        while True:
            lease = self.check()
            try:
                await self._store.journal_put(lease, row)
                break
            except StoreError as error:
                if not error.retryable:
                    raise
                await self.clock.sleep(0.05)
        self.check()

    async def _is_stored(self, commit: Commit, revision: int) -> bool:
        """Whether only the answer was lost: what is stored at the next revision is what we sent."""
        head, _ = await self._store.load(commit.head.id)
        stored, head.revision = head.revision, commit.head.revision
        return stored == revision and encode_head(head) == encode_head(commit.head)

    def drop(self) -> None:
        """Forget the lease without a word to the store: somebody else has it."""
        self._lease = None

    async def give_up(self) -> None:
        """Let the lease go without a commit; a turn record that is stored stays for whoever comes next."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            with CancelScope(shield=True):
                await self._store.release(lease)
        except StoreError as error:
            self._report("a lease could not be released and will run out", error, lease.session)
