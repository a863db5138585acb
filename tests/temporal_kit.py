"""A workflow that tests run within a framed run; in a module of its own, which is imported anew for each workflow."""

from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from stepwell.temporal import run
    from stepwell.transport import Invocation

SOON = RetryPolicy(initial_interval=timedelta(milliseconds=10), maximum_attempts=2)
LIMIT = timedelta(seconds=30)


@workflow.defn
class Framed:
    """Opens a run and leaves it as `how` says. Its result is the run's id."""

    @workflow.run
    async def run(self, invocation: Invocation, how: str) -> str:
        async with run(invocation, retry_policy=SOON, start_to_close_timeout=LIMIT) as turn:
            match how:
                case "end":
                    await turn.end("error", "No rooms left.")
                    await turn.suspend()
                    await turn.end("cancelled")
                case "suspend":
                    await turn.suspend()
                case "activity ends":
                    await workflow.execute_activity("ends", turn.ref, start_to_close_timeout=LIMIT)
                case "raise":
                    raise ApplicationError("A secret.", non_retryable=True)
                case "wait":
                    await workflow.wait_condition(lambda: False)
                case "continue as new":
                    workflow.continue_as_new(args=[invocation, "leave"])
                case _:
                    pass
            return turn.ref.run_id
