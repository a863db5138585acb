"""The runs that a session holds, and which of them a cancel or a steering input on the channel is for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from stepwell.wire import CancelRequest

from ._cancel import KeptCancels
from ._core import RunCore

__all__ = ["RunRegistry"]


class RunRegistry:
    """See the module.

    A cancel names a run, or the input that a run answers; with both, the run counts. It is taken by every run here
    that it is for; by none, it is kept: the run may be taken up later. Cancels are found in history too, so one that
    came while no process listened reaches the next. Each is offered to a run once, however often it is delivered.

    Args:
        start_soon: Runs what may wait, in the background of the session.
    """

    def __init__(self, start_soon: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
        self._start_soon = start_soon
        self._open: list[RunCore[Any]] = []
        self._kept = KeptCancels()

    @property
    def open(self) -> list[RunCore[Any]]:
        """Runs that were opened and not closed yet, in that order."""
        return list(self._open)

    async def open_run(self, core: RunCore[Any], after: str) -> None:
        """Route to a run from now on, and offer it what came before.

        Args:
            core: The run; its trigger is known.
            after: The serial of what it was begun by. A cancel before that was for something else.
        """
        core.cancels_after = after
        if core not in self._open:
            # Before anything is awaited: a cancel that comes while the kept ones are offered must find it.
            self._open.append(core)
        for request in self._kept.take(core.wants):
            await core.offer_cancel(request)

    def close_run(self, core: RunCore[Any]) -> None:
        """Route to it no more."""
        if core in self._open:
            self._open.remove(core)

    def on_cancel(self, request: CancelRequest) -> None:
        """Somebody wants a run to stop."""
        wanted = [core for core in self._open if core.is_meant(request)]
        for core in wanted:
            if core.wants(request):
                self._start_soon(partial(core.offer_cancel, request))
        if not wanted and (request.run_id is not None or request.input_codec_message_id is not None):
            self._kept.keep(request)

    def on_steer(self) -> None:
        """There may be steering inputs that runs do not know of."""
        for core in self._open:
            core.look_for_steers(self._start_soon)
