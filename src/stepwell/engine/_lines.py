"""The queues of this process: turns of one session run one after the other, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque

from anyio import CancelScope

from stepwell._clock import Clock
from stepwell.errors import SessionBusyError

from ._inputs import TurnInput

__all__ = ["Lines"]


class Lines:
    """One queue per session that somebody works on: who waits, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def enter(self, given: TurnInput, session: str) -> None:
        """Wait until it is this turn's turn on a session: one after the other, first come first served.

        Raises:
            SessionBusyError: The busy policy, or its time, does not allow to wait.
        """
        line = self._lines.get(session)
        if line is None:
            self._lines[session] = deque()
            return
        if given.on_busy == "reject":
            raise SessionBusyError(
                f"Session {session} is busy with another turn: try again when it is over.", session_id=session
            )
        place = asyncio.get_running_loop().create_future()
        line.append(place)
        with CancelScope() as scope:
            timer = self._clock.call_at(self._clock.monotonic() + given.busy_timeout, scope.cancel)
            try:
                await place
            except BaseException:
                if not place.cancelled():  # cancelled in the moment in which it was its turn
                    self.leave(session)
                elif place in line:  # not passed over yet
                    line.remove(place)
                raise
            finally:
                timer.cancel()
            return
        raise SessionBusyError(
            f"Session {session} was busy for {given.busy_timeout:g} s: try again, or raise busy_timeout.",
            session_id=session,
        )

    def leave(self, session: str) -> None:
        """Let the next turn of the session begin."""
        line = self._lines[session]
        while line:
            place = line.popleft()
            if not place.done():
                place.set_result(None)
                return
        del self._lines[session]

    def waiting(self, session: str) -> bool:
        """Whether another input waits for the session in this process."""
        return bool(self._lines.get(session))
