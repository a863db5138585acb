"""A run as the frame of a workflow's work."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, is_cancelled_exception
from typing_extensions import Unpack

from stepwell.transport import Invocation

from ._framing import Framing, Reason, RunRef

__all__ = ["WorkflowRun", "run"]

T = TypeVar("T")


def run(
    invocation: Invocation, *, invocation_id: str | None = None, **options: Unpack[workflow.ActivityConfig]
) -> WorkflowRun:
    """The run that answers an input, for `async with` in a workflow: opened by it, and closed once when it is left.

    Left normally, the run ends as `complete` if it is still active: an activity may have ended or suspended it, or
    `WorkflowRun.end` or `suspend` was called. Left by an exception it is cleaned up, as `cancelled` if the workflow was
    cancelled and as `error` else, and the exception goes on. Left by `continue_as_new` it stays open: the next run of
    the workflow re-enters it, given the same invocation id.

    A cancellation that comes while the run is opened or closed waits until that is done. A clean-up that fails is
    logged; the run then stays open.

    Args:
        invocation: The input.
        invocation_id: Also the run's id; None takes the workflow's id. Pass one for each turn if the workflow has
            several, or if another workflow may run under the same id later.
        **options: For the activities of `Framing`. Defaults: 2 minutes from start to close, 3 attempts, the workflow's
            task queue.

    Raises:
        temporalio.exceptions.ActivityError: On entering, the run could not be opened (whatever of it is there is
            cleaned up); on leaving normally, it could not be ended.
    """
    return WorkflowRun(invocation, invocation_id or workflow.info().workflow_id, options)


class WorkflowRun:
    """A run that a workflow has open. Made by `run`.

    Attributes:
        ref: What activities need to adopt it.
    """

    def __init__(self, invocation: Invocation, invocation_id: str, options: workflow.ActivityConfig) -> None:
        self._invocation = invocation
        self._options: workflow.ActivityConfig = {
            "start_to_close_timeout": timedelta(minutes=2),
            "retry_policy": RetryPolicy(maximum_attempts=3),
            **options,
        }
        self._closed = False
        # As it will be, unless the input continues a run: then only the opener's answer says which.
        self.ref = RunRef(
            session_name=invocation.session_name,
            run_id=invocation_id,
            invocation_id=invocation_id,
            trigger_event_id=invocation.input_event_id,
        )

    async def end(self, reason: Reason = "complete", message: str | None = None) -> None:
        """End the run, unless it was closed: here, or by an activity.

        Args:
            reason: Why.
            message: With `error`: what every client of the channel is told.

        Raises:
            temporalio.exceptions.ActivityError: It could not be ended.

        Cancelled, the end is waited for first.
        """
        if not self._closed:
            await self._carried_through(
                workflow.start_activity_method(
                    Framing[Any, Any].end_run, args=[self.ref, reason, message], **self._options
                )
            )
            self._closed = True

    async def suspend(self) -> None:
        """Say that the run waits for an answer, which another workflow will give. As `end`."""
        if not self._closed:
            await self._carried_through(
                workflow.start_activity_method(Framing[Any, Any].suspend_run, self.ref, **self._options)
            )
            self._closed = True

    async def __aenter__(self) -> WorkflowRun:
        """Open it. See `run`."""
        opening = workflow.start_activity_method(
            Framing[Any, Any].open_run, args=[self._invocation, self.ref.invocation_id], **self._options
        )
        try:
            self.ref = await self._carried_through(opening)
        except BaseException as error:
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                self.ref = opening.result()  # cancelled meanwhile, and open all the same
            await self._clean_up(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it. See `run`."""
        if error is None:
            await self.end()
        elif not self._closed and not isinstance(error, workflow.ContinueAsNewError):
            await self._clean_up(error)

    async def _clean_up(self, error: BaseException) -> None:
        reason: Reason = "cancelled" if is_cancelled_exception(error) else "error"
        try:
            await self._carried_through(
                workflow.start_activity_method(Framing[Any, Any].cleanup_run, args=[self.ref, reason], **self._options)
            )
        except ActivityError as failure:
            # What made the workflow fail is raised, not that it could not be said.
            workflow.logger.warning("Run %s stays open: its clean-up failed.", self.ref.run_id, exc_info=failure)

    async def _carried_through(self, handle: workflow.ActivityHandle[T]) -> T:
        """Wait until an activity is done, whoever cancels; raise a cancellation afterwards.

        Otherwise a cancelled workflow could be over before the message is on the channel, and the run open for ever.
        """
        cancelled: asyncio.CancelledError | None = None
        while not handle.done():
            try:
                await asyncio.shield(handle)
            except asyncio.CancelledError as error:
                cancelled = error
            except ActivityError:
                break
        if cancelled is not None:
            raise cancelled
        return handle.result()
