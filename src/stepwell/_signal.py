"""A flag that says "cancelled" to hooks, handlers and the threads they run in."""

from __future__ import annotations

import threading

__all__ = ["CancelSignal"]

_making = threading.Lock()


class CancelSignal:
    """Set once, never reset. Any thread may look at it or wait for it.

    Made for every turn and every tool call, and nearly never waited for: so the `threading.Event` behind it, which
    costs more than the rest of a call, is made by the first who waits.
    """

    _set = False
    _event: threading.Event | None = None

    def is_set(self) -> bool:
        """Whether it was cancelled."""
        return self._set

    def set(self) -> None:
        """Cancel. Wakes all who wait."""
        # The flag first: a thread that makes the event after this line sees it before it waits.
        self._set = True
        if self._event is not None:
            self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread (never the event loop's) until it is set, or for `timeout` seconds. Whether it is set."""
        if self._event is None:
            with _making:  # two threads that wait first at the same moment must wait for the same event
                if self._event is None:
                    self._event = threading.Event()
        return self._set or self._event.wait(timeout) or self._set
