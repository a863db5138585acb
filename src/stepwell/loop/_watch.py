"""Deadlines of one piece of work, on whatever clock, without a timer per token."""

from __future__ import annotations

from types import TracebackType

from anyio import CancelScope

from stepwell._clock import Clock, Timer
from stepwell.errors import TimeoutKind
from stepwell.models import Deadlines

__all__ = ["Watchdog"]


class Watchdog:
    """A cancel scope that ends itself when a deadline passes.

    `alive()` moves the idle deadline and costs one look at the clock: the timer is not moved with each token, it
    re-arms itself when it fires too early.
    """

    __slots__ = ("_clock", "_deadlines", "_last", "_scope", "_start", "_timer", "expired")

    def __init__(self, clock: Clock, deadlines: Deadlines) -> None:
        self._clock = clock
        self._deadlines = deadlines
        self._scope = CancelScope()
        self._start = clock.monotonic()
        self._last: float | None = None
        self._timer: Timer | None = None
        self.expired: TimeoutKind | None = None

    def alive(self) -> None:
        """Something arrived."""
        self._last = self._clock.monotonic()

    def _due(self) -> tuple[float, TimeoutKind | None] | None:
        """When to look next, and which deadline that is (`None`: only a look, the first token may move it)."""
        limits: list[tuple[float, TimeoutKind | None]] = []
        deadlines = self._deadlines
        if deadlines.attempt is not None:
            limits.append((self._start + deadlines.attempt, "attempt"))
        if self._last is None:
            if deadlines.first_token is not None:
                limits.append((self._start + deadlines.first_token, "first_token"))
            if deadlines.idle is not None:
                limits.append((self._clock.monotonic() + deadlines.idle, None))
        elif deadlines.idle is not None:
            limits.append((self._last + deadlines.idle, "idle"))
        return min(limits, key=_when) if limits else None

    def _check(self) -> None:
        due = self._due()
        if due is None:
            return
        when, kind = due
        if kind is not None and when <= self._clock.monotonic():
            self.expired = kind
            self._scope.cancel()
        else:
            self._timer = self._clock.call_at(when, self._check)

    def __enter__(self) -> Watchdog:
        self._scope.__enter__()
        self._check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Swallow the cancellation that this deadline caused, and no other; then `expired` says which it was."""
        if self._timer is not None:
            self._timer.cancel()
        return bool(self._scope.__exit__(kind, error, traceback))


def _when(limit: tuple[float, TimeoutKind | None]) -> float:
    return limit[0]
