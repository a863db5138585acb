"""The queues of this process: turns of one session run one after the other, first come first served."""

from __future__ import annotations

import asyncio

from anyio import CancelScope

from stepwell._clock import Clock
from stepwell.errors import SessionBusyError

from ._inputs import TurnInput

__all__ = ["Lines"]


class Lines:
    """One queue per session that somebody works on or waits for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    async def enter(self, given: TurnInput, session: str) -> None:
        """Wait until it is this turn's turn on a session: one after the other, first come first served.

        Raises:
            SessionBusyError: The busy policy, or its time, does not allow to wait.
        """
        line = self._lines.get(session)
        if line is None:
            line = self._lines[session] = _Line()
        line.users += 1
        try:
            await line.enter(given, session, self._clock)
        except BaseException:
            self._left(session, line)
            raise

    def leave(self, session: str) -> None:
        """Let the next turn of the session begin."""
        line = self._lines[session]
        line.lock.release()
        self._left(session, line)

    def _left(self, session: str, line: _Line) -> None:
        line.users -= 1
        if not line.users:
            del self._lines[session]

    def waiting(self, session: str) -> bool:
        """Whether another input waits for the session in this process."""
        line = self._lines.get(session)
        return line is not None and line.users > 1


class _Line:
    """The queue of one session in this process."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0

    async def enter(self, given: TurnInput, session: str, clock: Clock) -> None:
        if not self.lock.locked() and self.users == 1:
            await self.lock.acquire()  # at once: nobody holds it, nobody waits for it
            return
        if given.on_busy == "reject":
            raise SessionBusyError(
                f"Session {session} is busy with another turn: try again when it is over.", session_id=session
            )
        with CancelScope() as scope:
            timer = clock.call_at(clock.monotonic() + given.busy_timeout, scope.cancel)
            try:
                await self.lock.acquire()
            finally:
                timer.cancel()
            return
        raise SessionBusyError(
            f"Session {session} was busy for {given.busy_timeout:g} s: try again, or raise busy_timeout.",
            session_id=session,
        )
