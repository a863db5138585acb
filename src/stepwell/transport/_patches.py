"""A view as JSON: a snapshot, and then what changed."""

from __future__ import annotations

from typing import Any

from ._nodes import RunInfo
from ._view import View

__all__ = ["ViewPatches", "run_json"]


class ViewPatches:
    """What a view shows, for a reader that is told only what changed. One for each reader.

    Args:
        view: The view. Changes are found when they are asked for, so a slow reader gets several as one.
    """

    def __init__(self, view: View[Any, Any]) -> None:
        self._view = view
        self._changes = view.changes()
        self._sent: dict[str, Any] = {}
        self._runs: dict[str, RunInfo] = {}

    def snapshot(self) -> dict[str, Any]:
        """Everything: `messages` (in order, each with `codecMessageId` and `message`), `runs`, `hasOlder`."""
        self._sent, self._runs = {}, {}
        patch = self._patch()
        return {
            "messages": patch.get("messages", []),
            "runs": patch.get("runs", []),
            "hasOlder": self._view.has_older,
        }

    async def next(self) -> dict[str, Any]:
        """Wait for a change: `messages` that changed, `order` of all ids if that changed, `runs` that changed.

        What is not named is as before; a message that is not in the order any more is gone. Cancelling loses nothing.

        Raises:
            StopAsyncIteration: The view was closed.
        """
        while True:
            await self._changes.__anext__()
            if patch := self._patch():
                return patch

    def _patch(self) -> dict[str, Any]:
        """What changed since the last one. A message that did not change is the same object."""
        patch: dict[str, Any] = {}
        messages = self._view.messages
        changed = [one for one in messages if self._sent.get(one.codec_message_id) is not one.message]
        if changed:
            patch["messages"] = [{"codecMessageId": one.codec_message_id, "message": one.message} for one in changed]
        order = [one.codec_message_id for one in messages]
        if order != list(self._sent):
            patch["order"] = order
        self._sent = {one.codec_message_id: one.message for one in messages}
        runs = {run.run_id: run for run in self._view.runs}
        if moved := [run for run_id, run in runs.items() if self._runs.get(run_id) != run]:
            patch["runs"] = [run_json(run) for run in moved]
        self._runs = runs
        return patch


def run_json(run: RunInfo) -> dict[str, Any]:
    """A run with the names that the JavaScript client has for its fields."""
    said: dict[str, Any] = {
        "runId": run.run_id,
        "clientId": run.client_id,
        "invocationId": run.invocation_id,
        "status": run.status,
        "steps": [
            {
                "stepId": step.step_id,
                "status": step.status,
                "attemptCount": step.attempt_count,
                "stepClientId": step.step_client_id,
            }
            for step in run.steps
        ],
    }
    if run.error is not None:
        said["error"] = {"code": run.error.code, "message": run.error.message}
    return said
