"""The activity that answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

from temporalio import activity

from stepwell.temporal import Reason, RunRef, step_id_for
from stepwell.transport import AgentSession
from stepwell.transport.codecs import UIMessage, UIMessageCodec
from stepwell.wire import ChannelProvider

Model: TypeAlias = Callable[[Sequence[UIMessage]], AsyncIterator[dict[str, Any]]]
"""From the conversation to the chunks of a UI message stream."""


class Agent:
    """What its activities need: channels and a model."""

    def __init__(self, channels: ChannelProvider, model: Model) -> None:
        self.channels = channels
        self.model = model

    @activity.defn(name="answer")
    async def answer(self, ref: RunRef) -> Reason:
        """Write the answer, as one step whose id is the same in every attempt.

        Returns:
            `complete`, or `cancelled` if a client cancelled the run.

        Raises:
            Exception: What the model or the channel raised: Temporal tries again.
        """
        beating = asyncio.create_task(beat())
        try:
            channel = await self.channels.open(ref.session_name)
            async with AgentSession(channel, UIMessageCodec(), client_id="agent") as session:
                run = session.adopt_run(
                    run_id=ref.run_id, invocation_id=ref.invocation_id, trigger_event_id=ref.trigger_event_id
                )
                await run.load()
                await run.view.load()
                async with run.create_step(step_id_for(ref.invocation_id)) as step:
                    # Read behind the step's start: what a dead attempt said is not in the conversation any more.
                    result = await step.pipe(self.model(run.view.messages))
                    if result.error is not None:
                        raise result.error
                return result.reason
        finally:
            beating.cancel()


async def beat() -> None:
    """Tell Temporal that this worker lives, also while the model is silent."""
    limit = activity.info().heartbeat_timeout
    while limit is not None:
        activity.heartbeat()
        await asyncio.sleep(limit.total_seconds() / 4)
