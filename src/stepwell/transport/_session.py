"""What the sessions of agents and clients share: a channel read into a conversation tree, live and backwards."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import anyio
import anyio.abc

from stepwell._clock import Clock, SystemClock
from stepwell.errors import (
    ChannelError,
    ChannelNotReadyError,
    MisuseError,
    SessionClosedError,
    StepwellError,
    StreamError,
    SubscriptionError,
)
from stepwell.wire import CancelRequest, Channel, Cursor, Delivery, Gap, Lifecycle, RunEvent, Subscription

from ._codec import Codec
from ._history import HistoryWalk, fetch_page
from ._latch import Latch
from ._tree import ConversationTree

__all__ = ["Session"]

_log = logging.getLogger("stepwell.transport")

M = TypeVar("M")
P = TypeVar("P")


class Session(Generic[M, P]):
    """See the module. `async with` connects; leaving stops reading. Use it in one task, its methods in any.

    Args:
        channel: Which.
        codec: What is said on it.
        history_page: Messages in a page of history, 1 to 1,000.
        reorder_window: See `ConversationTree`.
        clock: For the waits between attempts.
    """

    def __init__(
        self,
        channel: Channel,
        codec: Codec[M, P],
        *,
        history_page: int = 100,
        reorder_window: float = 120.0,
        clock: Clock | None = None,
    ) -> None:
        if not 1 <= history_page <= 1_000:
            raise MisuseError(f"A history page of {history_page} messages: pass 1 to 1,000.")
        self.channel = channel
        self.codec = codec
        self._tree = ConversationTree(codec, reorder_window=reorder_window)
        self._reorder_window = reorder_window
        self._history_page = history_page
        self._clock = clock or SystemClock()
        self._history: HistoryWalk | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._closed = False
        self._lost: SubscriptionError | None = None
        self._error_listeners: list[Callable[[StepwellError], object]] = []
        self._input_waiters: dict[str, list[Latch[Delivery]]] = {}
        self._staged: ConversationTree[M, P] | None = None
        self._snapshot_end: str | None = None

    # -- life

    async def __aenter__(self):
        """Connect: from here on everything said on the channel is read.

        Raises:
            SubscriptionError: The channel could not be subscribed to. The session may be entered again.
            SessionClosedError: It was left before.
            MisuseError: It is entered already.
        """
        if self._closed:
            raise self._closed_error()
        if self._tasks is not None:
            raise MisuseError("The session is connected already.")
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        try:
            await tasks.start(self._read)
        except BaseException:
            await _leave(tasks)
            raise
        self._tasks = tasks
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop reading. Nothing is published; runs stay as they are."""
        await self._leave()

    async def _leave(self) -> None:
        tasks, self._tasks = self._tasks, None
        self._closed = True
        self._fail_waiters(self._closed_error())
        if self._history is not None:
            self._history.finish()
        if tasks is not None:
            # The group never gets the body's exception: it would come out wrapped in a group of one.
            await _leave(tasks)

    @property
    def tree(self) -> ConversationTree[M, P]:
        """The conversation as far as it is known here. The same object for the whole session."""
        return self._tree

    @property
    def closed(self) -> bool:
        """Whether the session was left."""
        return self._closed

    def on_error(self, listener: Callable[[StepwellError], object]) -> Callable[[], None]:
        """Call `listener` with what goes wrong beside any call.

        `SubscriptionError`: a message could not be handled, and reading goes on; or the channel failed, and it does
        not. `StreamError`: a run ended with an error; `ids` hold `run_id` and the agent's `error_code`; told live only,
        to every session of the channel. A listener that raises is logged.

        Returns:
            Call it to stop.
        """
        self._error_listeners.append(listener)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._error_listeners.remove(listener)

        return stop

    # -- what both sides use

    @property
    def history(self) -> HistoryWalk:
        """The way back. See `HistoryWalk`.

        Raises:
            SessionClosedError, ChannelNotReadyError: The session is not connected.
        """
        self.require_connected()
        assert self._history is not None
        return self._history

    def require_connected(self) -> None:
        """Raise unless the session is connected.

        Raises:
            SessionClosedError: It was left.
            ChannelNotReadyError: It was not entered, or reading the channel failed.
        """
        if self._closed:
            raise self._closed_error()
        if self._tasks is None:
            raise ChannelNotReadyError("The session is not connected: use it within `async with`.")
        if self._lost is not None:
            raise ChannelNotReadyError("The session lost its channel: make a new one.") from self._lost

    async def wait_for_input(self, event_id: str) -> Delivery:
        """The input of that `event-id`: the first of its parts.

        What is known is looked through first, then history, then what comes. Waits without limit: bound it by a
        cancel scope.

        Raises:
            HistoryFetchError: See `HistoryWalk.load_until`.
            SessionClosedError, ChannelNotReadyError: The session is not connected.
            SubscriptionError: Reading failed while waiting.
        """
        self.require_connected()
        waiter: Latch[Delivery] = Latch()
        # Registered before history is read: the input may come live meanwhile.
        self._input_waiters.setdefault(event_id, []).append(waiter)
        try:
            if not await self.history.load_until(lambda: self._tree.input_event(event_id) is not None):
                return await waiter
        finally:
            waiters = self._input_waiters[event_id]
            waiters.remove(waiter)
            if not waiters:
                del self._input_waiters[event_id]
        found = self._tree.input_event(event_id)
        assert found is not None
        return found

    def _start_soon(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something in the background until it ends or the session is left. It must not raise."""
        assert self._tasks is not None
        self._tasks.start_soon(run)

    def _report(self, error: StepwellError) -> None:
        for listener in tuple(self._error_listeners):
            try:
                listener(error)
            except Exception:  # noqa: BLE001 - the error that is reported must not end the reading of the channel
                _log.exception("An `on_error` listener raised.")

    def _closed_error(self) -> SessionClosedError:
        return SessionClosedError("The session was closed: make a new one.", channel=self.channel.name)

    # -- for the two sides to say more about

    def _observe(self, delivery: Delivery, said: Lifecycle | None, *, live: bool) -> None:
        """After the tree has taken a delivery in."""

    def _on_cancel(self, request: CancelRequest, *, live: bool) -> None:
        """Somebody wants a run to stop."""

    def _after_gap(self) -> None:
        """After a snapshot has replaced the tree's content."""

    def _fail_waiters(self, error: StepwellError) -> None:
        """Reading is over: nobody who waits for something on the channel will get it."""
        for waiters in self._input_waiters.values():
            for waiter in waiters:
                waiter.fail(error)

    # -- reading

    async def _read(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """The reader's task. The subscription lives and dies within it."""
        connected = False
        try:
            async with self.channel.subscribe() as subscription:
                self._history = HistoryWalk(
                    self.channel, subscription.start, self._history_page, self._take_page, self._clock
                )
                connected = True
                task_status.started()
                await self._follow(subscription)
        except ChannelError as error:
            lost = SubscriptionError("The channel could not be read: make a new session.", channel=self.channel.name)
            lost.__cause__ = error
            if not connected:
                raise lost from error
            self._lost = lost
            self._fail_waiters(lost)
            self._report(lost)

    async def _follow(self, subscription: Subscription) -> None:
        while True:
            for item in await subscription.read():
                if isinstance(item, Gap):
                    await self._begin_snapshot(item.cursor)
                elif self._staged is not None:
                    self._stage(self._staged, item)
                else:
                    self._take(item, live=True)

    def _take(self, delivery: Delivery, *, live: bool) -> None:
        try:
            said = self._tree.apply(delivery)
            if isinstance(said, CancelRequest):
                self._on_cancel(said, live=live)
            elif live and isinstance(said, RunEvent) and said.error is not None:
                error = said.error
                self._report(StreamError(error.message, run_id=said.run_id, error_code=error.code))
            self._observe(delivery, said, live=live)
            if self._input_waiters:
                self._wake_input_waiters()
        except Exception as error:  # noqa: BLE001 - whatever a codec or a listener does, reading goes on
            self._report_unhandled(error, delivery)

    def _take_page(self, deliveries: Sequence[Delivery]) -> None:
        with self._tree.history():
            for delivery in deliveries:
                self._take(delivery, live=False)

    def _report_unhandled(self, error: Exception, delivery: Delivery) -> None:
        unhandled = SubscriptionError(
            f"A message could not be handled ({type(error).__name__}): the rest of the channel is read on.",
            channel=self.channel.name,
            serial=delivery.serial,
        )
        unhandled.__cause__ = error
        self._report(unhandled)

    def _wake_input_waiters(self) -> None:
        for event_id, waiters in self._input_waiters.items():
            found = self._tree.input_event(event_id)
            if found is not None:
                for waiter in waiters:
                    waiter.resolve(found)

    # -- a gap

    async def _begin_snapshot(self, end: Cursor) -> None:
        """Part of the log is gone and everything follows: build a tree anew, and show the old one until it is whole.

        Nothing marks the end of a snapshot, and nobody may speak for long behind it. Its last message is the newest in
        history before its place in the log.
        """
        self._staged = ConversationTree(self.codec, reorder_window=self._reorder_window)
        newest = await fetch_page(self.channel, end, 1, self._clock)
        self._snapshot_end = newest.items[0].serial if newest.items else ""
        if not newest.items:
            self._swap()

    def _stage(self, staged: ConversationTree[M, P], delivery: Delivery) -> None:
        said: Lifecycle | None = None
        try:
            said = staged.apply(delivery)
        except Exception as error:  # noqa: BLE001 - as in `_take`
            self._report_unhandled(error, delivery)
        if self._snapshot_end is not None and delivery.serial >= self._snapshot_end:
            self._swap()
        if isinstance(said, CancelRequest):
            self._on_cancel(said, live=True)  # it may have come within the gap

    def _swap(self) -> None:
        staged = self._staged
        assert staged is not None
        assert self._history is not None
        self._staged = None
        self._history.finish()
        self._tree.replace(staged)
        self._wake_input_waiters()
        self._after_gap()


async def _leave(tasks: anyio.abc.TaskGroup) -> None:
    tasks.cancel_scope.cancel()
    await tasks.__aexit__(None, None, None)
