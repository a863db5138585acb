"""The id of an activity's step."""

from __future__ import annotations

from temporalio import activity

from stepwell.errors import NotInActivityError

__all__ = ["step_id_for"]


def step_id_for(invocation_id: str) -> str:
    """The id of the step that the current activity writes: `<invocation id>-<activity id>`.

    Temporal keeps the activity's id over its retries, so each attempt supersedes the one before it, in whatever process
    it runs; two activities of one workflow have different ones. One step per activity: a second needs a suffix.

    Raises:
        NotInActivityError: Called outside an activity, such as in the workflow.
    """
    if not activity.in_activity():
        raise NotInActivityError(
            "step_id_for() outside an activity: call it in the activity that writes the step.",
            invocation_id=invocation_id,
        )
    return f"{invocation_id}-{activity.info().activity_id}"
