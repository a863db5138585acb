"""The frame of an answer."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from stepwell.temporal import run
    from stepwell.transport import Invocation

    from .agent import Agent


@workflow.defn
class AnswerWorkflow:
    """Answers one input. Its id is the run's id: start it with one that is new for each input."""

    @workflow.run
    async def run(self, invocation: Invocation) -> str:
        """Open the run, write the answer, end the run. If the answer fails for good, the run ends with an error."""
        async with run(invocation) as turn:
            outcome = await workflow.execute_activity_method(
                Agent.answer,
                turn.ref,
                start_to_close_timeout=timedelta(minutes=10),
                heartbeat_timeout=timedelta(seconds=2),  # after which a worker that is silent is taken for dead
                retry_policy=RetryPolicy(initial_interval=timedelta(seconds=0.2), maximum_attempts=5),
            )
            # Here and not in the activity: an attempt that was taken for dead, and is not, cannot end the run of the
            # next one.
            await turn.end(outcome)
            return outcome
