"""What to do with a run after its `pipe`: the AI SDK's finish reason decides."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stepwell.transport._pipe import PipeResult

__all__ = ["FinishReason", "RunOutcome", "run_outcome"]

FinishReason: TypeAlias = Literal["stop", "length", "content-filter", "tool-calls", "error", "other"]
"""Why a model stopped, as a `finish` chunk says it."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What to do with the run.

    Attributes:
        reason: `suspend`: `run.suspend()`, because a client has to run a tool or to approve one. Else `run.end(reason,
            error)`.
        error: With reason `error`.
    """

    reason: Literal["complete", "suspend", "cancelled", "error"]
    error: Exception | None = None


async def run_outcome(result: PipeResult, finish_reason: FinishReason | Awaitable[FinishReason]) -> RunOutcome:
    """How a run goes on whose outputs were piped with that result.

    Args:
        result: Of `pipe`. If it is not `complete`, it decides.
        finish_reason: The model's, or what will give it. `tool-calls` suspends the run, everything else completes it.
            If waiting for it raises, that is the run's error; a future or task that was cancelled makes it `cancelled`.

    Cancelled: raises, like any other wait; `finish_reason` itself is cancelled only if it is a coroutine or a task.
    """
    if result.reason != "complete":
        if inspect.iscoroutine(finish_reason):
            finish_reason.close()  # nobody needs it any more, and Python would warn of it
        return RunOutcome(result.reason, result.error)
    try:
        finish = await finish_reason if isinstance(finish_reason, Awaitable) else finish_reason
    except asyncio.CancelledError:
        if isinstance(finish_reason, asyncio.Future) and finish_reason.cancelled() and not _cancelling():
            return RunOutcome("cancelled")
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's library raises
        return RunOutcome("error", error)
    return RunOutcome("suspend" if finish == "tool-calls" else "complete")


def _cancelling() -> bool:
    """Whether it is this task that is being cancelled, not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
