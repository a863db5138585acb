"""The agent's side of a channel."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeVar
from uuid import uuid4

import anyio

from stepwell._clock import Clock
from stepwell.errors import ContinuityLostError, MisuseError, StepwellError
from stepwell.wire import CancelRequest, Channel, Delivery, H, Lifecycle, Name, transport_headers

from ._codec import Codec
from ._core import OnCancel, OnError, OnSteer, RunCore, RunHooks, SessionCore
from ._history import HistoryWalk
from ._invocation import Invocation
from ._latch import Latch
from ._pipe import OnCancelled
from ._registry import RunRegistry
from ._run import AgentRun
from ._session import Session
from ._writer import ChannelWriter

__all__ = ["AgentSession"]

M = TypeVar("M")
P = TypeVar("P")

_ECHO_SECONDS = 1.0
"""How long the end of a step waits for its own echo. Long past what a backend needs: a session whose reading is stuck
goes on writing."""


class AgentSession(Session[M, P], Generic[M, P]):
    """A channel, as an agent works on it. Entering connects; leaving detaches: open runs stay open for others.

    Args:
        channel: Which. Not closed by this.
        codec: What outputs and inputs are.
        epoch: For writers that a lease makes exclusive: entering raises the channel's fence to it before anything else,
            every write carries it, and the first `FencedError` stops all runs of this session. None is never fenced.
        client_id: Who writes, as the messages say.
        roll_up: Seconds for which text of a stream is kept, to be appended together; 0 appends each delta by itself.
        history_page: Messages in a page of history, 1 to 1,000.
        reorder_window: See `ConversationTree`.
        clock: For delays and limits.
        on_error: See `on_error`.

    What fails because the channel is busy or unreachable is repeated for 30 seconds, with growing delays, and then
    raised. That is safe: the channel knows what it has stored already.

    A part of the channel's log that was removed before it was read (`ContinuityLostError`, to `on_error`) does not stop
    runs: what replaces it is the whole conversation as it is, with the cancels among it.
    """

    def __init__(
        self,
        channel: Channel,
        codec: Codec[M, P],
        *,
        epoch: int | None = None,
        client_id: str | None = None,
        roll_up: float = 0.02,
        history_page: int = 100,
        reorder_window: float = 120.0,
        clock: Clock | None = None,
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(channel, codec, history_page=history_page, reorder_window=reorder_window, clock=clock)
        self._epoch = epoch
        self._roll_up = roll_up
        self._writer = ChannelWriter(
            channel, epoch=epoch, client_id=client_id, clock=self._clock, on_fenced=lambda: self._stop_runs("fenced")
        )
        self._registry = RunRegistry(self._start_soon)
        self._runs: dict[RunCore[M], AgentRun[M]] = {}
        self._newest = ""
        self._echoes: list[tuple[str, Latch[None]]] = []
        if on_error is not None:
            self.on_error(on_error)

    # -- life

    async def __aenter__(self) -> AgentSession[M, P]:
        """Connect: raise the fence, then read.

        Raises:
            FencedError: A newer epoch writes.
            ChannelError: The fence could not be raised, or the channel not be subscribed to (`SubscriptionError`).
            SessionClosedError, MisuseError: It was left before, or is entered already.
        """
        self._writer.check()
        if self._epoch is not None:
            await self._writer.raise_fence(self._epoch)
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`detach`, and stop reading."""
        await self.detach()
        await super().__aexit__(kind, error, trace)

    async def detach(self) -> None:
        """Let go of everything. Publishes nothing: runs and steps stay as they are, for another process to adopt.

        Every run is cancelled with the reason `detached`, so that what works on it stops; nothing can be written any
        more (`SessionClosedError`). May be called again, and from any task.
        """
        self._writer.stop(self._closed_error())
        self._stop_runs("detached")
        self._closed = True
        self._fail_waiters(self._closed_error())

    async def end(self) -> None:
        """End every run that was opened and not closed here: its step, then the run, as `cancelled`. Then `detach`.

        Raises:
            RunLifecycleError: A run's end could not be published. The others were ended; the session is detached.
            MisuseError: Called from within the source of a `pipe`.
        """
        failures: list[StepwellError] = []
        try:
            for run in list(self._runs.values()):
                try:
                    if self._writer.stopped is None:
                        await run.end_cancelled()
                except StepwellError as error:
                    failures.append(error)
        finally:
            await self.detach()
        if failures:
            raise failures[0]

    def _stop_runs(self, reason: str) -> None:
        for core in list(self._runs):
            core.cancelled.fire(reason)
            self._registry.close_run(core)

    # -- runs

    def create_run(
        self,
        invocation: Invocation,
        *,
        run_id: str | None = None,
        invocation_id: str | None = None,
        on_cancel: OnCancel | None = None,
        on_cancelled: OnCancelled | None = None,
        on_steer: OnSteer | None = None,
        on_error: OnError | None = None,
    ) -> AgentRun[M]:
        """A run that answers an input, or goes on with the run that the input names. Publishes nothing: `start` does.

        Args:
            invocation: The input.
            run_id: Give one if the call may be repeated after a crash: the run is there once. A continuation drops it.
            invocation_id: The same for what this invocation says. Never two invocations under one id.
            on_cancel: Asked about each cancel; returning False refuses it. May be asynchronous. One that raises refuses
                too, and `on_error` gets a `CancelListenerError`.
            on_cancelled: Called by a `pipe` that is cancelled, with a function that writes last outputs.
            on_steer: Called when a steering input has come. May be asynchronous; raising as `on_cancel`.
            on_error: Told what goes wrong with this run beside any call, in place of the session's.

        Raises:
            MisuseError: An id is empty.
            SessionClosedError, FencedError: The session may not write any more.
        """
        hooks = RunHooks(on_cancel=on_cancel, on_cancelled=on_cancelled, on_steer=on_steer, on_error=on_error)
        return self._new_run(invocation.input_event_id, run_id, invocation_id, hooks, adopted=False)

    def adopt_run(
        self,
        *,
        run_id: str,
        invocation_id: str,
        trigger_event_id: str,
        on_cancel: OnCancel | None = None,
        on_cancelled: OnCancelled | None = None,
        on_steer: OnSteer | None = None,
        on_error: OnError | None = None,
    ) -> AgentRun[M]:
        """A run that was opened elsewhere, to go on with it. Publishes nothing; `load` opens it here.

        Args:
            run_id: The run.
            invocation_id: Whose work is gone on with; with another id than the opener's, steps have names of their own.
            trigger_event_id: The input: `Invocation.input_event_id`.
            on_cancel: As in `create_run`.
            on_cancelled: As in `create_run`.
            on_steer: As in `create_run`.
            on_error: As in `create_run`.

        Raises:
            MisuseError: An id is empty.
            SessionClosedError, FencedError: The session may not write any more.
        """
        hooks = RunHooks(on_cancel=on_cancel, on_cancelled=on_cancelled, on_steer=on_steer, on_error=on_error)
        return self._new_run(trigger_event_id, run_id, invocation_id, hooks, adopted=True)

    def _new_run(
        self, event_id: str, run_id: str | None, invocation_id: str | None, hooks: RunHooks, *, adopted: bool
    ) -> AgentRun[M]:
        self._writer.check()
        for name, given in (("run_id", run_id), ("invocation_id", invocation_id)):
            if given is not None and not given:
                raise MisuseError(f"The {name} is empty: leave it out, or give one.")
        session = SessionCore(
            tree=self.tree,
            codec=self.codec,
            writer=self._writer,
            clock=self._clock,
            roll_up=self._roll_up,
            report=self._report,
            seen=self._seen,
        )
        core = RunCore(session, run_id or str(uuid4()), invocation_id or str(uuid4()), hooks)
        run = AgentRun(core, self._registry, event_id, self.wait_for_input, self._walk, adopted=adopted)
        self._runs = {known: one for known, one in self._runs.items() if known.phase != "over"}
        self._runs[core] = run
        return run

    def _walk(self) -> HistoryWalk:
        self._writer.check()
        if self._tasks is None:
            raise MisuseError("The session is not connected: use it within `async with`.")
        return self.history

    # -- what the channel says

    def _on_cancel(self, request: CancelRequest, *, live: bool) -> None:
        self._registry.on_cancel(request)

    def _observe(self, delivery: Delivery, said: Lifecycle | None, *, live: bool) -> None:
        if delivery.serial > self._newest:
            self._newest = delivery.serial
            for serial, latch in self._echoes:
                if serial <= self._newest:
                    latch.resolve(None)
        if delivery.name == Name.INPUT and H.RUN_ID in transport_headers(delivery.extras):
            self._registry.on_steer()

    def _after_gap(self) -> None:
        for _, latch in self._echoes:
            latch.resolve(None)
        self._registry.on_steer()
        self._report(
            ContinuityLostError(
                "Part of the channel's log was removed before it was read: everything was read anew, and runs go on.",
                channel=self.channel.name,
            )
        )

    def _fail_waiters(self, error: StepwellError) -> None:
        super()._fail_waiters(error)
        for _, latch in self._echoes:
            latch.resolve(None)

    async def _seen(self, serial: str) -> None:
        """Wait for an echo; not for long, and not at all where nothing is read any more."""
        if serial <= self._newest or self._closed or self._tasks is None or self._lost is not None:
            return
        waiting = (serial, Latch[None]())
        self._echoes.append(waiting)
        try:
            with anyio.CancelScope() as scope:
                timer = self._clock.call_at(self._clock.monotonic() + _ECHO_SECONDS, scope.cancel)
                try:
                    await waiting[1]
                finally:
                    timer.cancel()
        finally:
            self._echoes.remove(waiting)
