"""A step of a run: an attempt at it, with its bracket on the channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar
from uuid import uuid4

import anyio
import msgspec

from stepwell.errors import FencedError, StepwellError, StreamError
from stepwell.wire import H, Headers

from ._core import RunCore
from ._pipe import PipeResult, Source, pump
from ._writer import OutputWriter

__all__ = ["STEP_REASONS", "RunStep", "StepReason", "Steps"]

M = TypeVar("M")

StepReason: TypeAlias = Literal["complete", "failed", "cancelled"]

STEP_REASONS: Final[dict[str, StepReason]] = {"complete": "complete", "cancelled": "cancelled", "error": "failed"}
"""How a step ends whose `pipe`, or whose run, ended so."""


class Steps(Generic[M]):
    """The steps of a run in this process: their ids, and which one is open. One at a time."""

    def __init__(self, core: RunCore[M]) -> None:
        self._core = core
        self._next = 0
        self._last: tuple[str, str] | None = None  # id and reason of the step that was closed last
        self._last_client_id: str | None = None
        self.active: RunStep[M] | None = None

    def continue_behind(self, index: int | None) -> None:
        """Number new steps behind the highest index that the channel has of this invocation."""
        if index is not None:
            self._next = max(self._next, index + 1)

    def fresh_id(self) -> str:
        """A new id. It is used up, whatever becomes of it."""
        step_id = f"{self._core.invocation_id}-step-{self._next}"
        self._next += 1
        return step_id

    def default_id(self) -> str:
        """The id of the step that was closed last, if it failed: this is its next attempt. Else a new one."""
        if self._last is not None and self._last[1] == "failed":
            return self._last[0]
        return self.fresh_id()

    def client_id(self, given: str | None) -> str:
        """Who takes part in a step: what was said, now or last, here or on the channel, or whoever gave the input."""
        if given is None:
            given = self._last_client_id
        if given is None:
            given = self._core.session.tree.latest_step_client_id(self._core.run_id)
        if given is None:
            given = self._core.known_trigger.publisher or ""
        self._last_client_id = given
        return given

    def closed(self, step: RunStep[M], reason: str) -> None:
        """A step is over. A `pipe` without a step of its own that wrote nothing leaves no trace."""
        if step.begun or not step.implicit:
            self._last = (step.step_id, reason)
        if self.active is step:
            self.active = None


class RunStep(Generic[M]):
    """One attempt at a step. Made by `AgentRun.create_step`.

    As an asynchronous context manager it is started and ended by its block: left by an exception, `failed`; by
    cancellation, `cancelled`, for as long as the channel answers within 5 seconds; else as `end` derives. By hand:
    `start`, then `pipe` and `send` any number of times, then `end`.

    A later attempt of a step of the same id supersedes this one as soon as it starts: readers drop all that this one
    wrote and writes.
    """

    def __init__(
        self,
        core: RunCore[M],
        steps: Steps[M],
        step_id: str,
        client_id: str | None = None,
        *,
        lazy: bool,
        implicit: bool = False,
    ) -> None:
        self.step_id = step_id
        self.implicit = implicit
        self.begun = False  # a start may be on the channel
        self._core = core
        self._steps = steps
        self._given_client_id = client_id
        self._client_id = ""
        self._lazy = lazy
        self._attempt = str(uuid4())  # tells a lost acknowledgement of this start from another attempt
        self._state: Literal["new", "open", "over"] = "new"
        self._serial: str | None = None  # of that start
        self._end_serial: str | None = None
        self._opening = anyio.Lock()
        self._closing = anyio.Lock()
        self._failed = False
        self._cancelled = False
        self._pipers: list[int] = []  # tasks that are in `pipe`
        self._idle = anyio.Event()

    @property
    def start_serial(self) -> str | None:
        """Serial of this attempt's start; None while it is not published."""
        return self._serial

    async def start(self) -> None:
        """Publish the start; a lazy step publishes it with the first output. May be called again.

        Raises:
            MisuseError: The run is not open, or another step or `pipe` is.
            ChannelError: Not published, or not known. Call again: the attempt is there once.
            SessionClosedError, FencedError: The session may not write any more.

        Cancelled: if the start went out, the attempt is closed as `cancelled`.
        """
        if self._state != "new":
            return
        self._core.check_writable("step.start()")
        if self._steps.active is not None:
            raise self._core.misuse("step.start() while a step or `pipe` is active: end it first.")
        self._steps.active = self
        self._client_id = self._steps.client_id(self._given_client_id)
        try:
            if not self._lazy:
                serial = await self._open()
                # Whoever reads the prompt next must not find what an attempt before this one wrote.
                await self._core.session.seen(serial)
            self._state = "open"
        except anyio.get_cancelled_exc_class():
            await self._settle_cancelled()
            raise
        finally:
            if self._state == "new":
                self._steps.active = None

    async def pipe(self, source: Source, *, message_id: str | None = None) -> PipeResult:
        """Write everything a source gives, as one message of the conversation.

        Args:
            source: An asynchronous or plain iterable of the codec's outputs.
            message_id: The `codec-message-id`; None draws a new one. Two that share one write one message.

        Returns:
            How it ended. An error of the source, the codec or the channel is in the result, and told to `on_error` as
            `StreamError`.

        Raises:
            MisuseError: The step is not open.
            SessionClosedError: The session was detached before.
            FencedError: A newer epoch writes: stop.

        Cancelled: open streams are closed as `cancelled`, the source is closed, then the cancellation goes on.
        """
        self._check_active("step.pipe()")
        core = self._core
        message_id = message_id or str(uuid4())
        steers = self._begin_output()
        writer = OutputWriter(core.session.writer)
        encoder = core.session.codec.create_encoder(
            writer, self._opener(message_id, steers), message_id=message_id, roll_up=core.session.roll_up
        )
        task = anyio.get_current_task().id
        self._pipers.append(task)
        try:
            result = await pump(source, encoder, core.cancelled, core.session.writer, core.hooks.on_cancelled)
        except anyio.get_cancelled_exc_class():
            self._cancelled = True
            raise
        finally:
            self._end_output(steers, written=encoder.has_output)
            self._pipers.remove(task)
            if not self._pipers:
                self._idle.set()
                self._idle = anyio.Event()
        self._note(result)
        return result

    async def send(self, output: Any, *, message_id: str | None = None) -> None:
        """Write one output, as a message of its own.

        Args:
            output: Of the codec; nothing that begins a stream.
            message_id: See `pipe`.

        Raises:
            MisuseError: The step is not open, or the codec does not know this output.
            ChannelError: It was not published, or it is not known. The step will be `failed`.
            SessionClosedError, FencedError: See `pipe`.
        """
        self._check_active("step.send()")
        core = self._core
        message_id = message_id or str(uuid4())
        steers = self._begin_output()
        writer = OutputWriter(core.session.writer)
        encoder = core.session.codec.create_encoder(
            writer, self._opener(message_id, steers), message_id=message_id, roll_up=0
        )
        try:
            await encoder.publish_output(output)
            await encoder.close()
        except Exception:
            self._failed = True
            raise
        finally:
            self._end_output(steers, written=encoder.has_output)

    async def end(self, reason: StepReason | None = None) -> None:
        """Publish the end. Nothing if no start was published: before `start`, or lazily without output.

        Args:
            reason: None derives it: `cancelled` if a `pipe` or the run was cancelled, `failed` if a `pipe` or `send`
                failed, else `complete`.

        Raises:
            MisuseError: A `pipe` of this step is still running, or the reason is none.
            ChannelError: Not published, or not known: call again.
            FencedError: A newer epoch writes.

        Of a session that was detached nothing is published and nothing is raised: the step stays as it is on the
        channel. Cancelled: the end is published all the same.
        """
        if reason is not None and reason not in STEP_REASONS.values():
            raise self._core.misuse(f"step.end({reason!r}): the reasons are complete, failed and cancelled.")
        if self._state == "over":
            return
        if self._pipers:
            raise self._core.misuse("step.end() while its `pipe` is running: await it first.")
        await self.settle(reason or self._derived())
        await self.caught_up()

    async def __aenter__(self) -> RunStep[M]:
        """`start`."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See the class. An exception of the block is never replaced by one of the end."""
        if error is None:
            await self.end()
        elif isinstance(error, Exception):
            try:
                await self.settle("failed")
            except StepwellError as failure:
                if not isinstance(failure, FencedError):
                    self._core.report(failure)
        else:
            await self._settle_cancelled()

    # -- for the run

    async def settle(self, reason: StepReason) -> None:
        """Close the bracket, if there is one, and be over. Raises as `end`."""
        async with self._closing:
            if self._state == "over":
                return
            try:
                if self.begun and not self._core.session.writer.detached:
                    await self._close(reason)
            except FencedError:
                self._over(reason)
                raise
            self._over(reason)

    @property
    def piping(self) -> bool:
        """Whether a `pipe` is running."""
        return bool(self._pipers)

    async def caught_up(self) -> None:
        """Wait until the end has come back: whoever reads the prompt next finds this step's outputs in it.

        Not for those who ask for lazy steps: they keep their own history, and are in a hurry.
        """
        if self._end_serial is not None and (self.implicit or not self._lazy):
            await self._core.session.seen(self._end_serial)

    async def stop_pipes(self) -> None:
        """Wait until no `pipe` of this step is running. They end soon: the run was cancelled.

        Raises:
            MisuseError: The caller is the source of one.
        """
        if anyio.get_current_task().id in self._pipers:
            raise self._core.misuse("end() from within the source of a `pipe`: end the run when it has returned.")
        while self._pipers:
            await self._idle.wait()

    def abandon(self) -> None:
        """Be over here, whatever the channel shows."""
        self._over("failed")

    # -- the bracket

    async def _open(self) -> str:
        async with self._opening:
            if self._serial is None:
                self.begun = True
                self._serial = await self._core.publish_step_start(self.step_id, self._client_id, self._attempt)
            return self._serial

    async def _close(self, reason: StepReason) -> None:
        # If the answer to the start was lost, asking again gives its serial: it is not published twice.
        start = self._serial or await self._core.publish_step_start(self.step_id, self._client_id, self._attempt)
        self._end_serial = await self._core.publish_step_end(self.step_id, self._client_id, start, reason)

    async def _settle_cancelled(self) -> None:
        with self._core.session.writer.last_words(), contextlib.suppress(StepwellError):
            await self.settle("cancelled")
        self._over("cancelled")

    def _over(self, reason: StepReason) -> None:
        if self._state != "over":
            self._state = "over"
            self._steps.closed(self, reason)

    def _derived(self) -> StepReason:
        if self._cancelled or self._core.cancelled.is_set():
            return "cancelled"
        return "failed" if self._failed else "complete"

    # -- outputs

    def _check_active(self, what: str) -> None:
        self._core.check_writable(what)
        if self._state != "open":
            when = "before `start()`: start it" if self._state == "new" else "after its end: create another step"
            raise self._core.misuse(f"{what} {when}.")

    def _begin_output(self) -> list[str]:
        self._core.produced = True
        return self._core.steering.take()

    def _end_output(self, steers: list[str], *, written: bool) -> None:
        if not written:
            self._core.steering.put_back(steers)

    def _opener(self, message_id: str, steers: list[str]) -> Callable[[], Any]:
        async def open_output() -> Headers:
            serial = await self._open()
            headers = self._core.output_headers(message_id, self.step_id, self._client_id, serial)
            if steers:
                headers[H.STEER_CODEC_MESSAGE_IDS] = msgspec.json.encode(steers).decode()
            return headers

        return open_output

    def _note(self, result: PipeResult) -> None:
        if isinstance(result.error, FencedError):
            raise result.error
        if result.reason == "cancelled":
            self._cancelled = True
        elif result.error is not None:
            self._failed = True
            failed = StreamError(
                f"An output ended with a {type(result.error).__name__}: see its cause.",
                run_id=self._core.run_id,
                step_id=self.step_id,
            )
            failed.__cause__ = result.error
            self._core.report(failed)
