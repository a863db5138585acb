"""The client's side: shows a channel's conversation and says things into it."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from stepwell._clock import Clock
from stepwell.errors import (
    ChannelBusyError,
    ChannelError,
    InsufficientCapabilityError,
    MisuseError,
    SendError,
    StepwellError,
)
from stepwell.wire import Channel, Delivery, H, Lifecycle, RunEvent, WireMessage, cancel_message

from ._attempts import in_four_attempts
from ._codec import Codec
from ._handle import ClientRun, Steer, SteerOutcome
from ._nodes import RunNode
from ._session import Session
from ._view import View

__all__ = ["ClientSession"]

M = TypeVar("M")
P = TypeVar("P")


class ClientSession(Session[M, P], Generic[M, P]):
    """A conversation as a client sees it. `async with` connects; leaving cancels nothing.

    Args:
        channel: Which.
        codec: What is said on it.
        client_id: Who this client is: stamped on what it publishes.
        history_page: Messages in a page of history, 1 to 1,000.
        reorder_window: Seconds (channel time) for which a late retry can still take back what a dead attempt said.
        clock: For the waits between attempts.
    """

    def __init__(
        self,
        channel: Channel,
        codec: Codec[M, P],
        *,
        client_id: str | None = None,
        history_page: int = 100,
        reorder_window: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(channel, codec, history_page=history_page, reorder_window=reorder_window, clock=clock)
        self.client_id = client_id
        self._waiting: dict[str, list[ClientRun[M, P]]] = {}  # by the input that is to be answered
        self._steers: dict[str, dict[str, Steer]] = {}  # by run, then by the input's codec-message-id
        self._views: list[View[M, P]] = []
        self.view = self.create_view()

    def create_view(self) -> View[M, P]:
        """Another view, with its own selection and paging. `view` is the first.

        Raises:
            SessionClosedError: The session was left.
        """
        if self.closed:
            raise self._closed_error()
        view = View(self)
        self._views.append(view)
        return view

    @property
    def may_have_older(self) -> bool:
        """Whether there may be history that was not read yet."""
        return not self.closed and (self._history is None or self._history.has_more)

    async def cancel(self, run_id: str) -> None:
        """Ask the agent to stop a run, whoever began it. The run ends only when the agent says so.

        Raises:
            SendError, InsufficientCapabilityError, SessionClosedError, ChannelNotReadyError: As `View.send`.
        """
        await self.publish_cancel(run_id, None)

    # -- for views and handles

    async def send_inputs(
        self, events: Sequence[Any], headers: Mapping[str, str | None], view: View[M, P]
    ) -> ClientRun[M, P]:
        """See `View.send`. `headers` are those of every input."""
        self.require_connected()
        if not events:
            raise MisuseError("No input to send: pass at least one.")
        new = [event for event in events if self.codec.is_new_message(event)]
        if len(new) > 1:
            raise MisuseError(f"{len(new)} new messages in one send: send them one by one.")
        prepared = [self._prepare(event, headers) for event in events]
        last = prepared[-1]
        run = ClientRun(self, last.message_id, last.event_id, headers.get(H.RUN_ID))
        # Before anything is published: the answer may be here before the acknowledgement.
        self._waiting.setdefault(last.message_id, []).append(run)
        undo: Callable[[], None] | None = None
        try:
            for one in prepared:
                if one.shown:
                    self._tree.insert_local(one.event, one.headers)
                    if headers.get(H.FORK_OF) is not None:
                        undo = view.show_edit(one.message_id)
            for one in prepared:
                await self._publish(one.messages, one.event_id)
        except BaseException:
            self._forget(run)
            for one in prepared:
                self._tree.remove_local(one.message_id)
            if undo is not None:
                undo()
            raise
        return run

    async def publish_cancel(self, run_id: str | None, input_codec_message_id: str | None) -> None:
        """Publish an `ai-cancel`."""
        self.require_connected()
        event_id = str(uuid.uuid4())
        message = cancel_message(event_id, run_id=run_id, input_codec_message_id=input_codec_message_id)
        await self._publish([self._own(message, event_id)], event_id)

    def steer(self, run: ClientRun[M, P], event: Any) -> Steer:
        """See `ClientRun.steer`."""
        self.require_connected()
        steer = Steer()
        self._start_soon(functools.partial(self._steer, steer, run, event))
        return steer

    # -- publishing

    def _prepare(self, event: Any, headers: Mapping[str, str | None]) -> _Prepared:
        """Give an input its ids and encode it."""
        event_id = str(uuid.uuid4())
        message_id = self.codec.target_of(event) or str(uuid.uuid4())
        stamped = {key: value for key, value in headers.items() if value is not None}
        stamped[H.CODEC_MESSAGE_ID] = message_id
        stamped[H.EVENT_ID] = event_id
        if self.client_id is not None:
            stamped[H.RUN_CLIENT_ID] = self.client_id
        messages = [
            self._own(message, f"{event_id}:{place}")
            for place, message in enumerate(self.codec.encode_input(event, stamped))
        ]
        return _Prepared(event, event_id, message_id, stamped, messages, self.codec.is_new_message(event))

    def _own(self, message: WireMessage, idempotency_id: str) -> WireMessage:
        return msgspec.structs.replace(message, client_id=self.client_id, idempotency_id=idempotency_id)

    async def _publish(self, messages: Sequence[WireMessage], event_id: str) -> str:
        """Publish, with retries while the channel is busy: the ids in the messages make a repetition harmless.

        Returns:
            The first serial.
        """
        try:
            serials = await in_four_attempts(lambda: self.channel.publish(messages), self._clock, ChannelBusyError)
            return serials[0]
        except InsufficientCapabilityError:
            raise
        except ChannelError as error:
            known = self._tree.input_event(event_id)
            if known is not None:
                return known.serial  # only the acknowledgement was lost: it has come back already
            raise SendError(
                "The input could not be published: look whether it appears before sending it again.",
                channel=self.channel.name,
            ) from error

    async def _steer(self, steer: Steer, run: ClientRun[M, P], event: Any) -> None:
        message_id = ""
        try:
            await run.started
            node = self._tree.run_node(run.run_id)
            if node is not None and _ended(node):
                raise MisuseError(f"Run {run.run_id} has ended ({node.status}): send a new input.", run_id=run.run_id)
            prepared = self._prepare(event, {H.RUN_ID: run.run_id, H.ROLE: "user"})
            message_id = prepared.message_id
            # Registered before it is published: its answer and the run's end may come before the acknowledgement.
            self._steers.setdefault(run.run_id, {})[message_id] = steer
            steer.published.resolve(await self._publish(prepared.messages, prepared.event_id))
        except Exception as error:  # noqa: BLE001 - it goes to whoever awaits; a background task has nobody to raise to
            self._steers.get(run.run_id, {}).pop(message_id, None)
            steer.fail(error)
        except BaseException:
            steer.fail(self._closed_error())  # cancelled: the session is left
            raise

    # -- what comes

    def _observe(self, delivery: Delivery, said: Lifecycle | None, *, live: bool) -> None:
        if isinstance(said, RunEvent):
            self._on_run(said)

    def _on_run(self, event: RunEvent) -> None:
        if event.verb in ("start", "resume"):
            if event.input_codec_message_id is not None:
                for run in self._waiting.pop(event.input_codec_message_id, ()):
                    run.begin(event.run_id)
        else:
            self._resolve_steers(event.run_id)

    def _resolve_steers(self, run_id: str) -> None:
        """At a suspension those that were answered; at the end all."""
        waiting, node = self._steers.get(run_id), self._tree.run_node(run_id)
        if not waiting or node is None or node.status == "active":
            return
        ended = _ended(node)
        for message_id, steer in list(waiting.items()):
            consumed = message_id in node.answered
            if consumed or ended:
                del waiting[message_id]
                steer.outcome.resolve(SteerOutcome(consumed, node.status if ended else None))
        if not waiting:
            del self._steers[run_id]

    def _after_gap(self) -> None:
        """What was said in the gap may be what somebody waits for."""
        for key in list(self._waiting):
            for info in self._tree.runs:
                node = self._tree.run_node(info.run_id)
                for event in node.events if node is not None else ():
                    if event.input_codec_message_id == key:
                        self._on_run(event)
        for run_id in list(self._steers):
            self._resolve_steers(run_id)

    def _fail_waiters(self, error: StepwellError) -> None:
        super()._fail_waiters(error)
        for runs in self._waiting.values():
            for run in runs:
                run.started.fail(error)
        self._waiting.clear()
        for steers in self._steers.values():
            for steer in steers.values():
                steer.fail(error)
        self._steers.clear()

    def _forget(self, run: ClientRun[M, P]) -> None:
        runs = self._waiting.get(run.input_codec_message_id, [])
        if run in runs:
            runs.remove(run)
            if not runs:
                del self._waiting[run.input_codec_message_id]

    async def _leave(self) -> None:
        try:
            await super()._leave()
        finally:
            for view in self._views:
                view.close()


class _Prepared(msgspec.Struct, frozen=True):
    """An input with its ids, ready to be published."""

    event: Any
    event_id: str
    message_id: str
    headers: dict[str, str]
    messages: list[WireMessage]
    shown: bool


def _ended(run: RunNode[Any, Any]) -> bool:
    return run.status not in ("active", "suspended")
