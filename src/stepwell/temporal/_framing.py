"""Opening and closing a run, as activities."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from temporalio import activity

from stepwell.errors import InputEventNotFoundError, MisuseError
from stepwell.transport import AgentRun, AgentSession, Codec, Invocation
from stepwell.wire import ChannelProvider, ErrorInfo

__all__ = ["Framing", "Reason", "RunRef"]

M = TypeVar("M")
P = TypeVar("P")

Reason: TypeAlias = Literal["complete", "cancelled", "error"]
"""Why a run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRef:
    """An open run, as a workflow hands it to its activities: what `AgentSession.adopt_run` needs.

    Attributes:
        session_name: Name of the channel.
        run_id: The run. Equal to `invocation_id`, but for an input that continues a suspended run.
        invocation_id: Whose work it is.
        trigger_event_id: The input.
    """

    session_name: str
    run_id: str
    invocation_id: str
    trigger_event_id: str


class Framing(Generic[M, P]):
    """The activities that open and close runs. Each has a session of its own and detaches from it. May be retried.

    Register them with a worker: `Worker(..., activities=[*framing.activities, ...])`. In a workflow use `run`, which
    calls them. They raise what the transport raises, and need no heartbeat.

    Args:
        channels: Where the conversations are. Not closed by this.
        codec: What is said in them.
        client_id: Who opens and closes runs, as the messages say.
    """

    def __init__(self, channels: ChannelProvider, codec: Codec[M, P], *, client_id: str | None = None) -> None:
        self._channels = channels
        self._codec = codec
        self._client_id = client_id

    @property
    def activities(self) -> list[Callable[..., Awaitable[Any]]]:
        """All of them, for `temporalio.worker.Worker`."""
        return [self.open_run, self.end_run, self.suspend_run, self.cleanup_run]

    @activity.defn(name="stepwell.open_run")
    async def open_run(self, invocation: Invocation, invocation_id: str) -> RunRef:
        """Start the run that answers an input, or resume the one that it continues.

        The run's id is the invocation's, so that a retry re-enters the run that the attempt before it may have opened:
        it is there once.

        Raises:
            InputEventNotFoundError: The input did not turn up within 30 seconds.
            ChannelError, HistoryFetchError: The channel could not be read or written.
            MisuseError: The id is empty.
        """
        async with await self._session(invocation.session_name) as session:
            run = session.create_run(invocation, run_id=invocation_id, invocation_id=invocation_id)
            await run.start()
            return RunRef(
                session_name=invocation.session_name,
                run_id=run.run_id,
                invocation_id=invocation_id,
                trigger_event_id=invocation.input_event_id,
            )

    @activity.defn(name="stepwell.end_run")
    async def end_run(self, ref: RunRef, reason: Reason, message: str | None = None) -> None:
        """End a run. Nothing if it is over or suspended already.

        Args:
            ref: The run.
            reason: Why.
            message: With `error`: what every client of the channel is told.

        Raises:
            InputEventNotFoundError: There is no such run.
            ChannelError, HistoryFetchError: The channel could not be read or written.
        """
        async with await self._session(ref.session_name) as session:
            run = _adopted(session, ref)
            if await _is_open(run):
                await run.end(reason, None if message is None else ErrorInfo(message=message))

    @activity.defn(name="stepwell.suspend_run")
    async def suspend_run(self, ref: RunRef) -> None:
        """Say that a run waits for an answer. Nothing if it is over or suspended already. Raises as `end_run`."""
        async with await self._session(ref.session_name) as session:
            run = _adopted(session, ref)
            if await _is_open(run):
                await run.suspend()

    @activity.defn(name="stepwell.cleanup_run")
    async def cleanup_run(self, ref: RunRef, reason: Reason) -> None:
        """End a run whose workflow failed, or was cancelled, so that nobody waits for it.

        Nothing if it is over or suspended already, or was never opened.

        Raises:
            ChannelError, HistoryFetchError: The channel could not be read or written.
        """
        async with await self._session(ref.session_name) as session:
            run = _adopted(session, ref)
            try:
                if not await _is_open(run):
                    return
            except InputEventNotFoundError:
                return
            await run.end(reason, ErrorInfo(message=_FAILED) if reason == "error" else None)

    async def _session(self, name: str) -> AgentSession[M, P]:
        return AgentSession(await self._channels.open(name), self._codec, client_id=self._client_id)


_FAILED = "The answer could not be finished."
"""What clients are told. Why it failed is in Temporal, and not for them."""


def _adopted(session: AgentSession[M, Any], ref: RunRef) -> AgentRun[M]:
    return session.adopt_run(run_id=ref.run_id, invocation_id=ref.invocation_id, trigger_event_id=ref.trigger_event_id)


async def _is_open(run: AgentRun[Any]) -> bool:
    """Load it, unless it is over or suspended: by an activity of the workflow, or by an attempt before this one."""
    try:
        await run.load()
    except MisuseError:  # adopted and within its session: it can only be that
        return False
    return True
