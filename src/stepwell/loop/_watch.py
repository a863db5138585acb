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
        deadlines, last = self._deadlines, self._last
        due: tuple[float, TimeoutKind | None] | None = None
        if deadlines.attempt is not None:
            due = (self._start + deadlines.attempt, "attempt")
        if last is None and deadlines.first_token is not None:
            due = _sooner(due, self._start + deadlines.first_token, "first_token")
        if deadlines.idle is not None:
            since, kind = (self._clock.monotonic(), None) if last is None else (last, "idle")
            due = _sooner(due, since + deadlines.idle, kind)
        return due

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


def _sooner(
    due: tuple[float, TimeoutKind | None] | None, when: float, kind: TimeoutKind | None
) -> tuple[float, TimeoutKind | None]:
    return due if due is not None and due[0] <= when else (when, kind)
