"""A worker."""

from datetime import timedelta

from temporalio.client import Client
from temporalio.worker import Worker

from stepwell.temporal import Framing
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import ChannelProvider

from .agent import Agent, Model
from .model import slow_model
from .workflow import AnswerWorkflow

TASK_QUEUE = "temporal-agent"


def make_worker(
    client: Client, channels: ChannelProvider, *, model: Model = slow_model, task_queue: str = TASK_QUEUE
) -> Worker:
    """A worker for everything: the workflow, its frame and its answers. Run any number of them on the same channels."""
    framing = Framing(channels, UIMessageCodec(), client_id="agent")
    return Worker(
        client,
        task_queue=task_queue,
        workflows=[AnswerWorkflow],
        activities=[*framing.activities, Agent(channels, model).answer],
        # Temporal keeps a workflow for the worker that knows it, by default for 10 seconds: after a kill it would wait.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=1),
    )
