"""A run, as the agent that works on it holds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar, get_args

import anyio

from stepwell.errors import ChannelError, InputEventNotFoundError, OperationCancelledError, StepwellError
from stepwell.wire import DEFAULT_ERROR_CODE, Delivery, ErrorInfo

from ._cancel import CancelEvent
from ._core import RunCore, RunReason
from ._history import HistoryWalk
from ._nodes import InputNode
from ._pipe import PipeResult, Source
from ._prompt import PromptView
from ._registry import RunRegistry
from ._step import STEP_REASONS, RunStep, Steps
from ._trigger import NO_TRIGGER, is_first_part, read_trigger

__all__ = ["AgentRun"]

M = TypeVar("M")
T = TypeVar("T")

Waiter = Callable[[str], Awaitable[Delivery]]


class AgentRun(Generic[M]):
    """One answer to one input, in this process. Made by `AgentSession.create_run` and `adopt_run`; use it in one task.

    Opened by `start` or `load`; then `pipe` and `create_step` any number of times, one at a time; closed by `end` or
    `suspend`. What is published is safe to be published again: after a `RunLifecycleError` call the same method on the
    same object again, and the message is on the channel once.
    """

    def __init__(
        self,
        core: RunCore[M],
        registry: RunRegistry,
        event_id: str,
        wait_for_input: Waiter,
        history: Callable[[], HistoryWalk],
        *,
        adopted: bool,
    ) -> None:
        self._core = core
        self._registry = registry
        self._event_id = event_id
        self._wait_for_input = wait_for_input
        self._history = history
        self._adopted = adopted
        self._steps: Steps[M] = Steps(core)
        self._opening = anyio.Lock()
        self._closing = anyio.Lock()
        self._view: PromptView[M] = PromptView(
            core.session.tree,
            history,
            lambda: core.trigger,
            lambda: core.run_id,
            lambda: core.steering.unanswered(core.node),
        )

    # -- what it is

    @property
    def run_id(self) -> str:
        """Its id. Of a continuation it is known from `start` on: the one given before is dropped."""
        return self._core.run_id

    @property
    def invocation_id(self) -> str:
        """The input or answer that is worked on."""
        return self._core.invocation_id

    @property
    def status(self) -> str:
        """`active`, `suspended`, `complete`, `cancelled`, `error`, or another reason that somebody gave."""
        return self._core.status

    @property
    def cancelled(self) -> CancelEvent:
        """Set when the run is to stop: `is_set()`, `await wait()`. Every `pipe` stops then; ending is up to you."""
        return self._core.cancelled

    @property
    def cancel_reason(self) -> str | None:
        """See `CancelEvent.reason`."""
        return self._core.cancelled.reason

    @property
    def messages(self) -> list[M]:
        """This turn: the input that it answers, then what was written, as far as it has come back."""
        core = self._core
        node = core.node
        anchor = node.parent if node is not None and node.parent is not None else core.known_trigger.anchor
        asked = core.session.tree.node_of(anchor) if anchor is not None else None
        nodes = [one for one in (asked if isinstance(asked, InputNode) else None, node) if one is not None]
        return [message.message for one in nodes for message in one.messages]

    @property
    def view(self) -> PromptView[M]:
        """The conversation up to here, for the prompt. See `PromptView`."""
        return self._view

    def has_input(self) -> bool:
        """Whether there is something to answer: the trigger, until output was begun; then steering inputs.

        False once the run is cancelled. What it saw is stamped on the next output, as answered by it.
        """
        core = self._core
        if core.cancelled.is_set():
            return False
        return core.steering.drain(core.node) or not core.produced

    def cancel(self, reason: str = "caller") -> None:
        """Stop this run's `pipe`s from here, as a cancel on the channel would. Publishes nothing, ends nothing."""
        self._core.cancelled.fire(reason)

    # -- opening

    async def start(self, *, timeout: float = 30.0) -> None:
        """Find the trigger, on the channel or in its history, and say that the run starts or goes on.

        A trigger that names a run continues it: the run is resumed under its id. A cancel that came before is honoured
        here: the run starts, and is cancelled. Called again it does nothing.

        Args:
            timeout: Seconds for the trigger to turn up.

        Raises:
            InputEventNotFoundError: It did not.
            HistoryFetchError: History could not be read. Call again.
            RunLifecycleError: Not published, or not known. Call again: it is there once.
            OperationCancelledError: `cancel` was called before.
            MisuseError: The session is not entered, or the run was adopted.
            SessionClosedError, FencedError: The session may not write any more.

        Cancelled while the message is on its way, the run is open: end it.
        """
        if self._adopted:
            raise self._core.misuse("start() on an adopted run: await `load()`.")
        self._history()
        async with self._opening:
            if self._core.phase != "new":
                return
            core = self._core
            if core.trigger is None:
                self._check_cancelled("started")
                trigger = NO_TRIGGER
                if self._event_id:
                    delivery = await self._within(timeout, self._locate)
                    trigger = read_trigger(core.session.tree, delivery)
                core.run_id = trigger.run_id or core.run_id
                core.locate(trigger)
                node = core.node
                core.owner = trigger.owner or (node.client_id if node is not None else "")
                await self._registry.open_run(core, trigger.serial)
            try:
                await core.publish_open()
            except anyio.get_cancelled_exc_class():
                if core.begun:
                    core.phase = "open"  # the writer has carried it through
                raise
            core.phase = "open"
        self._registry.on_steer()

    async def load(self, *, timeout: float = 30.0) -> None:
        """Go on with an open run that another process began. Publishes nothing.

        History is read until the run and its trigger are found. A cancel that nobody has ended the run for is honoured
        here. Steps are numbered behind those that this invocation has on the channel. Called again it does nothing.

        Args:
            timeout: Seconds for the run and its trigger to turn up. If history has no such run, it fails at once.

        Raises:
            InputEventNotFoundError: Run or trigger are not on the channel.
            MisuseError: The run is suspended (continue it by `create_run` with the answer) or ended; the session is not
                entered; the run was not adopted.
            HistoryFetchError: History could not be read. Call again.
            OperationCancelledError: `cancel` was called before.
            SessionClosedError, FencedError: The session may not write any more.
        """
        if not self._adopted:
            raise self._core.misuse("load() on a run that was not adopted: await `start()`.")
        self._history()
        async with self._opening:
            if self._core.phase != "new":
                return
            core, tree = self._core, self._core.session.tree
            self._check_cancelled("loaded")
            delivery = await self._within(timeout, self._locate_run)
            node = core.node
            if node is None:
                raise self._not_found("run")
            if node.status != "active":
                advice = "continue it by `create_run`" if node.status == "suspended" else "it can only be read"
                raise core.misuse(f"load() on a run that is {node.status}: {advice}.")
            trigger = read_trigger(tree, delivery) if delivery is not None else NO_TRIGGER
            core.locate(trigger)
            core.owner = node.client_id
            self._steps.continue_behind(tree.highest_step_index(core.run_id, core.invocation_id))
            core.phase = "open"
            opened = [event.serial for event in node.events if event.verb in ("start", "resume")]
            await self._registry.open_run(core, max(opened, default=trigger.serial))
        self._registry.on_steer()

    async def _locate(self) -> Delivery:
        delivery = await self._wait_for_input(self._event_id)
        await self._history().load_until(lambda: is_first_part(self._trigger_serial()))
        return self._core.session.tree.input_event(self._event_id) or delivery

    async def _locate_run(self) -> Delivery | None:
        tree = self._core.session.tree

        def found() -> bool:
            node = self._core.node
            if node is None:
                return False
            return is_first_part(self._trigger_serial()) if self._event_id else node.started

        await self._history().load_until(found)
        if self._core.node is None or not self._event_id:
            return None
        return tree.input_event(self._event_id) or await self._wait_for_input(self._event_id)

    def _trigger_serial(self) -> str | None:
        delivery = self._core.session.tree.input_event(self._event_id)
        return delivery.serial if delivery is not None else None

    async def _within(self, timeout: float, find: Callable[[], Awaitable[T]]) -> T:
        """Look for something until it is there, the time is over, or the run is to stop."""
        core = self._core
        clock = core.session.clock
        with anyio.CancelScope() as scope:
            timer = clock.call_at(clock.monotonic() + timeout, scope.cancel)
            unlisten = core.cancelled.listen(scope.cancel)
            try:
                return await find()
            finally:
                timer.cancel()
                unlisten()
        core.session.writer.check()
        self._check_cancelled("found")
        raise self._not_found("input")

    def _check_cancelled(self, done: str) -> None:
        self._core.session.writer.check()
        if self._core.cancelled.is_set():
            raise OperationCancelledError(
                f"The run was cancelled before it was {done}: nothing was published.", run_id=self.run_id
            )

    def _not_found(self, what: str) -> InputEventNotFoundError:
        return InputEventNotFoundError(
            f"The {what} is not on the channel: check the ids, and that the input was published before the agent was "
            "called.",
            run_id=self.run_id,
            event_id=self._event_id or None,
        )

    # -- output

    async def pipe(self, source: Source, *, message_id: str | None = None) -> PipeResult:
        """Write everything a source gives, in a step of its own that begins with its first output.

        Without output there is no step. The step ends as the `pipe` did; if that cannot be published, `on_error` is
        told. Arguments, result, errors and cancellation as `RunStep.pipe`; `MisuseError` too while another step or
        `pipe` of this run is active.
        """
        self._core.check_writable("pipe()")
        if self._steps.active is not None:
            raise self._core.misuse("pipe() while a step or another `pipe` is active: end it first.")
        step = RunStep(self._core, self._steps, self._steps.fresh_id(), lazy=True, implicit=True)
        async with step:
            result = await step.pipe(source, message_id=message_id)
            try:
                await step.settle(STEP_REASONS[result.reason])
                await step.caught_up()
            except ChannelError as error:
                step.abandon()
                self._core.report(error)
        return result

    def create_step(
        self, step_id: str | None = None, *, step_client_id: str | None = None, lazy: bool = False
    ) -> RunStep[M]:
        """An attempt at a step. Publishes nothing; its id is fixed here.

        Args:
            step_id: Give one that is the same in every attempt, in whatever process. None: the id of the last step if
                that ended `failed`, else `<invocation id>-step-<n>`.
            step_client_id: Who takes part in it. None: as in the step before, else whoever gave the input.
            lazy: The start is published with the first output; without output there is no step.

        Raises:
            MisuseError: The id is empty.
        """
        if step_id is not None and not step_id:
            raise self._core.misuse("create_step('') with an empty id: leave it out, or give one.")
        return RunStep(self._core, self._steps, step_id or self._steps.default_id(), step_client_id, lazy=lazy)

    # -- closing

    async def suspend(self) -> None:
        """Say that the run waits for an answer, and let go of it. Nothing if it is over already.

        Raises:
            MisuseError: It was not opened, or a step or `pipe` is active.
            RunLifecycleError: Not published, or not known. Call again: it is there once.
            SessionClosedError, FencedError: The session may not write any more.
        """
        async with self._closing:
            if self._is_over("suspend()"):
                return
            if self._steps.active is not None:
                raise self._core.misuse("suspend() while a step or `pipe` is active: end it first.")
            await self._core.publish_suspend()
            self._over("suspended")

    async def end(self, reason: RunReason, error: ErrorInfo | Exception | None = None) -> None:
        """Say that the run is over. Nothing if it is over already, here or on the channel.

        A step that is open is closed first; a `pipe` that runs in another task is stopped.

        Args:
            reason: `complete`, `cancelled` or `error`.
            error: With `error`: what every client of the channel is told. Of an exception that is none of Stepwell's
                they are told nothing but that there was one: its text is not made for them.

        Raises:
            MisuseError: It was not opened, or the reason is none.
            RunLifecycleError: Not published, or not known. Call again: it is there once.
            SessionClosedError, FencedError: The session may not write any more.

        Cancelled while the message is on its way, it is published all the same.
        """
        if reason not in get_args(RunReason):
            raise self._core.misuse(f"end({reason!r}): the reasons are complete, cancelled and error.")
        async with self._closing:
            if self._is_over("end()"):
                return
            await self._close_step(reason)
            await self._core.publish_end(reason, _error_info(error))
            self._over(reason)

    async def end_cancelled(self) -> None:
        """For `AgentSession.end`: end it as cancelled, if it was opened and is not over."""
        self._core.cancelled.fire("ended")
        if self._core.phase == "new":
            if not self._core.begun:
                return  # nothing of it is on the channel
            self._core.phase = "open"  # its start may be there: the answer was lost
        await self.end("cancelled")

    async def _close_step(self, reason: RunReason) -> None:
        step = self._steps.active
        if step is None:
            return
        if step.piping:
            self._core.cancelled.fire("ended")
            await step.stop_pipes()
        try:
            await step.settle(STEP_REASONS[reason])
        except ChannelError as error:
            step.abandon()  # the end of the run is what counts for readers
            self._core.report(error)

    def _is_over(self, what: str) -> bool:
        core = self._core
        core.check_open(what)
        if core.phase == "open" and core.ended_elsewhere:
            self._over(core.status)
        return core.phase == "over"

    def _over(self, outcome: str) -> None:
        self._core.phase = "over"
        self._core.outcome = outcome
        self._registry.close_run(self._core)


def _error_info(error: ErrorInfo | Exception | None) -> ErrorInfo | None:
    if error is None or isinstance(error, ErrorInfo):
        return error
    if isinstance(error, StepwellError):
        return ErrorInfo(getattr(error, "wire_code", DEFAULT_ERROR_CODE), error.message)
    return ErrorInfo()
