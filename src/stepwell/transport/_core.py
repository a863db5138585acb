"""What a run and its steps share: who they are, what they write, and whether they may."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import anyio.lowlevel

from stepwell._clock import Clock
from stepwell.errors import CancelListenerError, ChannelError, MisuseError, RunLifecycleError, StepwellError
from stepwell.wire import (
    CancelRequest,
    ErrorInfo,
    H,
    RunHeaders,
    WireMessage,
    run_end,
    run_resume,
    run_start,
    run_suspend,
    step_end,
    step_start,
)

from ._cancel import CancelEvent
from ._codec import Codec
from ._nodes import RunNode
from ._pipe import OnCancelled
from ._steering import Steering
from ._tree import ConversationTree
from ._trigger import NO_TRIGGER, Trigger
from ._writer import ChannelWriter

__all__ = ["TERMINAL", "OnCancel", "OnError", "OnSteer", "RunCore", "RunHooks", "RunReason", "SessionCore"]

_log = logging.getLogger("stepwell.transport")

M = TypeVar("M")

RunReason: TypeAlias = Literal["complete", "cancelled", "error"]

TERMINAL: Final = ("complete", "cancelled", "error")

OnCancel: TypeAlias = Callable[[CancelRequest], Awaitable[bool] | bool]
"""Asked about each cancel of a run. False refuses it."""

OnSteer: TypeAlias = Callable[[], Awaitable[None] | None]
"""Told that there is a steering input."""

OnError: TypeAlias = Callable[[StepwellError], object]
"""Told what went wrong beside any call. Must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """What an application wants to be told about a run."""

    on_cancel: OnCancel | None = None
    on_cancelled: OnCancelled | None = None
    on_steer: OnSteer | None = None
    on_error: OnError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCore(Generic[M]):
    """What runs need of their session.

    Attributes:
        seen: Waits, but not for long, until the message of that serial has come back.
    """

    tree: ConversationTree[M, Any]
    codec: Codec[M, Any]
    writer: ChannelWriter
    clock: Clock
    roll_up: float
    report: OnError
    seen: Callable[[str], Awaitable[None]]


class RunCore(Generic[M]):
    """See the module.

    Attributes:
        phase: `new`, `open` (it may write), `over` (ended or suspended here).
        trigger: None until it was located.
        outcome: Reason of its end, or `suspended`, where it was written here.
        cancels_after: Serial of the last message on the channel whose cancels are not this run's.
        begun: Whether its start, or that it goes on, may be on the channel.
        produced: Whether output was begun since it was opened.
    """

    def __init__(self, session: SessionCore[M], run_id: str, invocation_id: str, hooks: RunHooks) -> None:
        self.session = session
        self.run_id = run_id
        self.invocation_id = invocation_id
        self.hooks = hooks
        self.owner = ""
        self.trigger: Trigger | None = None
        self.phase: Literal["new", "open", "over"] = "new"
        self.cancelled = CancelEvent()
        self.steering = Steering()
        self.begun = False
        self.produced = False
        self.outcome: str | None = None  # what it was ended or suspended with here
        self.cancels_after = ""
        self._offered: set[str] = set()

    def locate(self, trigger: Trigger) -> None:
        """The trigger was found."""
        self.trigger = trigger
        self.steering.trigger = trigger.codec_message_id

    @property
    def known_trigger(self) -> Trigger:
        """The trigger, where the run was opened."""
        return self.trigger or NO_TRIGGER

    @property
    def node(self) -> RunNode[M, Any] | None:
        """The run in the tree."""
        return self.session.tree.run_node(self.run_id)

    @property
    def status(self) -> str:
        """As the channel shows it, or as it will: `active` until something else was said."""
        if self.outcome is not None:
            return self.outcome
        node = self.node
        return node.status if node is not None else "active"

    @property
    def ended_elsewhere(self) -> bool:
        """Whether the channel shows an end of this run that was not written here."""
        return self.outcome is None and self.status in TERMINAL

    def check_writable(self, what: str) -> None:
        """Raise unless output may be written.

        Raises:
            MisuseError: The run is not open, or not any more.
            SessionClosedError, FencedError: The session may not write any more.
        """
        self.check_open(what)
        if self.phase == "over" or self.ended_elsewhere:
            raise self.misuse(f"{what} after the run was ended or suspended: begin a new run.")

    def check_open(self, what: str) -> None:
        """Raise unless the run was opened here. Raises as `check_writable`."""
        self.session.writer.check()
        if self.phase == "new":
            raise self.misuse(f"{what} before the run was opened: await `start()` or `load()` first.")

    def misuse(self, message: str) -> MisuseError:
        """The error for a call at the wrong time."""
        return MisuseError(f"Cannot call {message}", run_id=self.run_id, invocation_id=self.invocation_id)

    # -- lifecycle messages, under the ids that make a repetition of them harmless

    async def publish_open(self) -> None:
        """Say that the run starts, or that it goes on."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        self.begun = True
        trigger = self.known_trigger
        if trigger.run_id is not None:
            await self._publish_run(run_resume(self.headers(), idempotency_id=f"{self.invocation_id}:resume"), "resume")
            return
        message = run_start(
            self.headers(),
            parent=trigger.parent,
            fork_of=trigger.fork_of,
            regenerate=trigger.regenerates,
            idempotency_id=f"{self.run_id}:open",
        )
        await self._publish_run(message, "start")

    async def publish_suspend(self) -> None:
        """Say that the run waits."""
        await self._publish_run(run_suspend(self.headers(), idempotency_id=f"{self.invocation_id}:suspend"), "suspend")

    async def publish_end(self, reason: RunReason, error: ErrorInfo | None) -> None:
        """Say that the run is over."""
        await self._publish_run(run_end(self.headers(), reason, error, idempotency_id=f"{self.run_id}:end"), "end")

    async def publish_step_start(self, step_id: str, client_id: str, attempt: str) -> str:
        """Begin an attempt, or find out that it was begun. Returns its serial."""
        message = step_start(self.headers(), step_id, client_id, idempotency_id=f"{step_id}:{attempt}:start")
        return (await self.session.writer.publish([message]))[0]

    async def publish_step_end(self, step_id: str, client_id: str, start_serial: str, reason: str) -> str:
        """End an attempt. Returns the serial of the message."""
        key = f"{step_id}:{start_serial}:end"
        message = step_end(self.headers(), step_id, start_serial, reason, client_id, idempotency_id=key)
        return (await self.session.writer.publish([message]))[0]

    async def _publish_run(self, message: WireMessage, verb: str) -> None:
        try:
            await self.session.writer.publish([message])
        except ChannelError as error:
            raise RunLifecycleError(
                f"The {verb} of the run could not be published: call again, it will be there once.", run_id=self.run_id
            ) from error

    def headers(self) -> RunHeaders:
        """Of every message of this invocation."""
        trigger = self.known_trigger
        return RunHeaders(
            run_id=self.run_id,
            invocation_id=self.invocation_id,
            run_client_id=self.owner,
            input_client_id=trigger.publisher,
            input_codec_message_id=trigger.codec_message_id,
        )

    def output_headers(self, message_id: str, step_id: str, client_id: str, start_serial: str) -> dict[str, str]:
        """Of every output of one `pipe` or `send`."""
        trigger = self.known_trigger
        headers = {
            H.ROLE: "assistant",
            H.CODEC_MESSAGE_ID: message_id,
            H.RUN_ID: self.run_id,
            H.RUN_CLIENT_ID: self.owner,
            H.PARENT: trigger.anchor,
            H.FORK_OF: trigger.fork_of,
            H.MSG_REGENERATE: trigger.regenerates,
            H.INVOCATION_ID: self.invocation_id,
            H.INPUT_CLIENT_ID: trigger.publisher,
            H.INPUT_CODEC_MESSAGE_ID: trigger.codec_message_id,
            H.STEP_ID: step_id,
            H.STEP_CLIENT_ID: client_id,
            H.STEP_START_SERIAL: start_serial,
        }
        return {key: value for key, value in headers.items() if value is not None}

    # -- cancels and steering

    def is_meant(self, request: CancelRequest) -> bool:
        """Whether a cancel names this run, or the input that it answers."""
        if request.run_id is not None:
            return request.run_id == self.run_id
        named = request.input_codec_message_id
        return named is not None and named == self.known_trigger.codec_message_id

    def wants(self, request: CancelRequest) -> bool:
        """Whether a cancel is for this run and was not offered yet."""
        serial = request.message.serial
        return self.is_meant(request) and serial > self.cancels_after and serial not in self._offered

    async def offer_cancel(self, request: CancelRequest) -> None:
        """Ask the application whether the run is to stop, and stop it."""
        if not self.wants(request):
            return
        self._offered.add(request.message.serial)
        on_cancel = self.hooks.on_cancel
        try:
            allowed = on_cancel is None or await _result(on_cancel(request))
        except Exception as error:  # noqa: BLE001 - the application's
            self._report_callback("on_cancel", error)
            return
        if allowed is not False:
            self.cancelled.fire("request")

    def look_for_steers(self, start_soon: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
        """Tell the application if there are steering inputs that it was not told of."""
        if self.steering.has_news(self.node) and self.hooks.on_steer is not None:
            start_soon(self._tell_steer)

    async def _tell_steer(self) -> None:
        try:
            if self.hooks.on_steer is not None:
                await _result(self.hooks.on_steer())
        except Exception as error:  # noqa: BLE001 - the application's
            self._report_callback("on_steer", error)

    # -- what is told to the application

    def report(self, error: StepwellError) -> None:
        """Tell of an error: the run's own listener, else the session's."""
        if self.hooks.on_error is None:
            self.session.report(error)
            return
        try:
            self.hooks.on_error(error)
        except Exception:  # noqa: BLE001 - what is reported must not break what it is reported from
            _log.exception("An `on_error` callback raised.")

    def _report_callback(self, name: str, error: Exception) -> None:
        failed = CancelListenerError(f"`{name}` raised a {type(error).__name__}: nothing was done.", run_id=self.run_id)
        failed.__cause__ = error
        self.report(failed)


async def _result(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given
