"""The engine: flows, models and a store, and turns that run in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack, cast

import anyio
import msgspec
from anyio import CancelScope

from stepwell._clock import Clock, SystemClock
from stepwell.errors import (
    CallerError,
    EngineClosedError,
    FlowDefinitionError,
    IdempotencyConflictError,
    InvalidInputError,
    MisuseError,
    SessionBusyError,
    StepwellError,
    UnknownFlowError,
    UnknownRequestError,
    UnknownSessionError,
)
from stepwell.flow import BusyPolicy, Flow, FlowDefinition
from stepwell.messages import JsonObject, UserMessage
from stepwell.models import ModelGateway
from stepwell.models.providers import Providers
from stepwell.sessions import (
    InboxRow,
    SessionHead,
    SessionStore,
    SessionSummary,
    export_session,
    import_session,
    open_store,
)
from stepwell.wire import Channel, ChannelProvider

from ._core import Core
from ._events import Listener
from ._handle import Turn
from ._inbox import Cancel, cancel_row
from ._inputs import Limits, TurnInput, checked_config, checked_key, checked_message, checked_session_id, recovery_of
from ._result import TurnResult, wrap
from ._stream import Reader, TurnStream
from ._suspension import AnswerPayload, put_answer, stored_result, unknown_request
from ._turn import TurnTask

if TYPE_CHECKING:
    from ._client_inputs import ClientAnswer

__all__ = ["Engine", "TurnOptions"]

_turn_logger = logging.getLogger("stepwell.turn")


class TurnOptions(TypedDict, total=False):
    """Options of a turn; see `Engine.run`."""

    session_id: str | None
    config: Mapping[str, Any] | None
    idempotency_key: str | None
    on_busy: BusyPolicy | None
    busy_timeout: float | None
    on_suspended: Literal["error", "abandon"] | None
    create_session: bool


class Engine:
    """Runs turns of flows. Use it as a context manager, or `await Engine.create(...)` and `close()`.

    Args:
        flows: Flow classes; every definition error is found here.
        models: Providers; by default those of the environment (`Providers.from_env()`).
        store: A store (which stays open), or its URL: `memory://`, `sqlite:///file.db`.
        channels: Where turns are shown to clients: a provider (which stays open), or its URL: `memory://`,
            `sqlite:///file.db`, `postgresql://`, `redis://`. `None`: nowhere but in this process.
        channel_prefix: See `session_channel`.
        roll_up: Seconds for which streamed text is kept, to go out together.
        recovery_interval: Seconds between two looks for turns that processes which died left open; the first is at the
            start. `None`: only `recover` and `recover_all` look, and a session's next turn.
        lease_ttl: Seconds a session stays leased to this process without a sign of life; renewed at a third.
        warm_sessions: How many sessions stay in memory between turns.
        limits: See `Limits`.
        listeners: Called with every turn event but deltas; see `Listener`.
        telemetry: Whether to make OpenTelemetry spans.
        capture_content: Whether spans and debug logs may hold prompts, messages and tool arguments.
        clock: For tests.

    Raises:
        FlowDefinitionError: A flow is wrong.
        LlmSetupError: A model of a flow cannot be called.
    """

    def __init__(
        self,
        flows: Sequence[type[Flow]],
        *,
        models: Providers | Mapping[str, ModelGateway] | None = None,
        store: SessionStore | str = "memory://",
        channels: ChannelProvider | str | None = None,
        channel_prefix: str = "",
        roll_up: float = 0.02,
        recovery_interval: float | None = 5.0,
        lease_ttl: float = 15.0,
        warm_sessions: int = 1000,
        limits: Limits | None = None,
        listeners: Sequence[Listener] = (),
        telemetry: bool = False,
        capture_content: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self._owns_models = models is None
        if models is None:
            models = Providers.from_env()
        self.providers = models if isinstance(models, Providers) else Providers(dict(models))
        self.definitions: dict[str, FlowDefinition] = {}
        for cls in flows:
            definition = FlowDefinition(cls, self.providers)
            for name in definition.names:
                if name in self.definitions:
                    raise FlowDefinitionError(f"Two flows answer to {name!r}: ids and aliases are unique.", flow=name)
                self.definitions[name] = definition
        self.store: SessionStore = open_store(store, clock=self.clock)
        self._owns_store = isinstance(store, str)
        self.channels = _channels(channels, self.clock)
        self.channel_prefix = channel_prefix
        self._owns_channels = isinstance(channels, str)
        self.limits = limits or Limits()
        self._core = Core(
            self.store,
            self.clock,
            self.providers,
            lease_ttl=lease_ttl,
            warm_sessions=warm_sessions,
            capture_content=capture_content,
            channels=self.channels,
            channel_prefix=channel_prefix,
            roll_up=roll_up,
        )
        self._core.launch = self._launch
        self._listeners: tuple[Listener, ...] = tuple(listeners)
        self._telemetry = telemetry
        self._turns: dict[TurnTask, asyncio.Task[None]] = {}
        self._by_key: dict[tuple[str, str | None, str], TurnTask] = {}
        self._recovery_interval = recovery_interval
        self._helpers: list[asyncio.Task[None]] = []
        self._closed = False

    # -- life

    @classmethod
    async def create(cls, flows: Sequence[type[Flow]], **options: Any) -> Self:
        """An engine that runs until `close()`, which may be called from another task."""
        engine = cls(flows, **options)
        await engine.start()
        return engine

    async def start(self) -> None:
        """Begin. Called by `create` and by entering the context."""
        if self._helpers or self._closed:
            raise EngineClosedError("This engine was started before: make a new one.")
        self._core.in_loop()
        self._helpers = [
            asyncio.create_task(self._keep_leases(), name="stepwell-leases"),
            asyncio.create_task(self._read_inboxes(), name="stepwell-inboxes"),
        ]
        if self._recovery_interval is not None:
            self._helpers.append(asyncio.create_task(self._recovering(), name="stepwell-recovery"))

    async def close(self, grace: float = 0.0) -> None:
        """Stop accepting turns, let open ones finish for `grace` seconds, leave the rest for recovery. Idempotent."""
        if not self._helpers or self._closed:
            return
        self._closed = True
        try:
            with anyio.move_on_after(grace):
                for turn in list(self._turns):
                    await turn.ended.wait()
        finally:  # also when the wait is cancelled: nobody could close this engine any more
            await self._shut()

    async def _shut(self) -> None:
        with CancelScope(shield=True):
            for task in self._helpers[2:]:
                task.cancel()  # the recovery; leases are kept until the turns have ended
            for turn in list(self._turns):
                if not turn.cancel("shutdown"):
                    turn.stop()
            for turn in list(self._turns):
                await turn.ended.wait()
            for task in self._helpers:
                task.cancel()
            await asyncio.wait(self._helpers)
            if self._owns_store:
                await self.store.close()
            if self._owns_channels and self.channels is not None:
                await self.channels.close()
            if self._owns_models:
                await self.providers.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def listen(self, listener: Listener) -> None:
        """Let a listener hear every turn that begins from now on, besides those of the constructor."""
        self._listeners = (*self._listeners, listener)

    # -- turns

    async def run(
        self,
        flow: str,
        message: str | UserMessage | None = None,
        *,
        session_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        on_busy: BusyPolicy | None = None,
        busy_timeout: float | None = None,
        on_suspended: Literal["error", "abandon"] | None = None,
        create_session: bool = False,
    ) -> TurnResult:
        """Run one turn and return its result; a failure of the turn is in the result.

        Args:
            flow: Id or alias of a registered flow.
            message: What the person says.
            session_id: The session; `None` or `""` (a turn that failed before it had one) starts a new one.
            config: Context of a new session, under `config.`; ignored with a warning later.
            idempotency_key: The same key and input give the same turn, also after a lost answer.
            on_busy: What to do while another turn has the session, see `BusyPolicy`; the flow's by default.
            busy_timeout: Seconds to wait for another turn; the flow's by default.
            on_suspended: What to do while the session waits for answers. A single question is answered by the message
                either way. `error`: `SessionSuspendedError`; `abandon`: cancel the run that waits, and begin a new
                turn; the flow's by default.
            create_session: Begin the session under `session_id` if there is none; otherwise that is an error.

        Raises:
            CallerError: Misuse: unknown flow or session, an input that is not acceptable, a closed engine.

        Cancelling the caller cancels the turn, kind `caller`.
        """
        turn, owner = self._start(
            flow,
            message,
            session_id=session_id,
            config=config,
            idempotency_key=idempotency_key,
            on_busy=on_busy,
            busy_timeout=busy_timeout,
            on_suspended=on_suspended,
            create_session=create_session,
        )
        await self._finish(turn, owner)
        if isinstance(turn.error, _MISUSE):
            raise turn.error
        return turn.result

    async def run_or_raise(
        self, flow: str, message: str | UserMessage | None = None, **options: Unpack[TurnOptions]
    ) -> TurnResult:
        """As `run`, but a failed turn raises its typed error.

        Raises:
            StepwellError: What failed the turn; an author's exception is the cause of a `HandlerError`.
        """
        turn, owner = self._start(flow, message, **options)
        await self._finish(turn, owner)
        if turn.error is not None:
            raise wrap(cast("Exception", turn.error))
        return turn.result

    @asynccontextmanager
    async def stream(
        self,
        flow: str,
        message: str | UserMessage | None = None,
        *,
        detached: bool = False,
        **options: Unpack[TurnOptions],
    ) -> AsyncGenerator[Turn]:
        """Run one turn and watch it: `async for event in turn`, then `turn.result`; `turn.text` at any time.

        Args:
            flow: See `run`.
            message: See `run`.
            detached: Let the turn go on when the block is left; otherwise that cancels it, kind `caller`. Its events
                are for the block either way; `done` and `result` are there behind it too.
            **options: See `run`.
        """
        task, owner = self._start(flow, message, **options)
        reader = task.listen()
        turn = Turn(task, reader, owner=owner)
        try:
            yield turn
        finally:
            if owner and not detached and not turn.done.is_set():
                turn.cancel("caller")
                with CancelScope(shield=True):
                    await turn.done.wait()
            task.unlisten(reader)
        if turn.done.is_set() and isinstance(turn.error, _MISUSE):
            raise turn.error

    def _start(
        self,
        flow: str,
        message: str | UserMessage | None,
        *,
        session_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        on_busy: BusyPolicy | None = None,
        busy_timeout: float | None = None,
        on_suspended: Literal["error", "abandon"] | None = None,
        create_session: bool = False,
        published: str | None = None,
    ) -> tuple[TurnTask, bool]:
        """Start a turn, or attach to the one that runs under the same key; and whether it was started."""
        self._check_running()
        definition = self._definition(flow)
        cls = definition.cls
        session_id = session_id or None
        key = checked_key(idempotency_key, self.limits)
        given = TurnInput(
            definition=definition,
            message=checked_message(message, definition, self.limits),
            session_id=checked_session_id(session_id) if session_id is not None else None,
            config=checked_config(config, self.limits),
            key=key,
            on_busy=on_busy or cls.on_busy,
            busy_timeout=cls.busy_timeout if busy_timeout is None else busy_timeout,
            on_suspended=on_suspended or cls.on_suspended,
            create=create_session,
            published=published,
        )
        index = (definition.id, session_id, key) if key is not None else None
        if index is not None and (running := self._by_key.get(index)) is not None:
            if running.digest != given.digest:
                raise IdempotencyConflictError(
                    "This idempotency key is in use with another message or config: use a new key for a new input.",
                    session_id=session_id,
                )
            return running, False
        if given.on_busy == "interrupt" and session_id is not None:
            for other in list(self._turns):
                if other.session_id == session_id:
                    other.supersede()
        return self._launch(given, index), True

    def _check_running(self) -> None:
        if not self._helpers or self._closed:
            raise EngineClosedError("The engine is not running: use it inside `async with Engine(...)`.")

    def _definition(self, flow: str) -> FlowDefinition:
        definition = self.definitions.get(flow)
        if definition is None:
            raise UnknownFlowError(
                f"There is no flow {flow!r} (registered: {', '.join(sorted(self.definitions)) or 'none'}).", flow=flow
            )
        return definition

    def _launch(self, given: TurnInput, index: tuple[str, str | None, str] | None = None) -> TurnTask:
        turn = TurnTask(self._core, given, TurnStream(self._listeners_of_turn()), self._turn_ended)
        turn.key_index = index
        if index is not None:
            self._by_key[index] = turn
        # A plain task: the engine keeps it in `_turns`, cancels it by its own scope and waits for its end in `close`. A
        # task group would add a third of a turn's whole cost for what is there already.
        self._turns[turn] = asyncio.create_task(turn.main())
        return turn

    async def _finish(self, turn: TurnTask, owner: bool) -> None:
        try:
            await turn.done.wait()
        except anyio.get_cancelled_exc_class():
            if owner:
                turn.cancel("caller")
                with CancelScope(shield=True):
                    await turn.done.wait()
            raise

    async def steer(
        self, session_id: str, message: str | UserMessage, *, idempotency_key: str | None = None
    ) -> TurnResult:
        """Say something into the turn that runs on a session, in whatever process; see `BusyPolicy`.

        Returns:
            The result of the turn that took it up. Where none runs, or none takes it up, it is a turn of its own.

        Raises:
            UnknownSessionError: There is no such session.
            CallerError: As `run`.
        """
        head, _ = await self.store.load(checked_session_id(session_id))
        return await self.run(
            head.workflow.id, message, session_id=session_id, idempotency_key=idempotency_key, on_busy="steer"
        )

    async def cancel(
        self,
        session_id: str,
        *,
        reason: str | None = None,
        run_id: str | None = None,
        key: str | None = None,
        input_id: str | None = None,
    ) -> bool:
        """Cancel the running turn of a session, in whatever process, and wait until it is recorded.

        Args:
            session_id: The session.
            reason: Recorded with it.
            run_id: Only this run.
            key: Only the input with this idempotency key, also while it still waits.
            input_id: Only what a client published under this `codec-message-id`, also while it still waits.

        Returns:
            Whether something was cancelled.

        Raises:
            UnknownSessionError: There is no such session.

        Cancelling the caller leaves the request: it will be honoured.
        """
        self._check_running()
        if input_id is not None:
            from ._client_inputs import event_of, key_of

            event = await event_of(await self._channel(checked_session_id(session_id)), input_id)
            if event is None:
                return False
            key = key_of(event)
        for turn in list(self._turns):
            if turn.session_id == session_id and turn.is_meant(run_id, key):
                cancelled = turn.cancel("user", reason)
                await turn.done.wait()
                return cancelled
        head, _ = await self.store.load(checked_session_id(session_id))
        request = Cancel("user", reason, run_id, key)
        if key is None and (head.turn is None or not request.means(head.turn)):
            return False
        row = cancel_row(request)
        await self.store.inbox_put(session_id, row)
        wait = 0.02
        while True:
            if (running := self._core.running.get(session_id)) is not None:
                await running.look()
            # Whoever works on the session answers it. Where nobody does, it is for us to go on with what is open.
            with suppress(SessionBusyError):
                await self.recover(session_id)
            found = await self.store.inbox_get(session_id, row.key)
            if found is None or found.state == "done":
                return found is not None and found.result == b"true"
            await self._pause(wait)
            wait = min(wait * 1.5, 0.5)

    # -- answers

    async def answer(self, session_id: str, request_id: str, value: Any) -> TurnResult:
        """Answer a request that a suspended turn waits for; from any process. With the last one the turn goes on.

        The answer is stored before anything else is done with it: a process that dies now does not lose it.

        Args:
            session_id: The session.
            request_id: `PendingRequest.id`.
            value: JSON; see `PendingRequest.kind`.

        Returns:
            What the turn came to that went on; or `status="suspended"` with what is still waited for. An answer that
            was given before is ignored, and the same is returned.

        Raises:
            UnknownRequestError: Nothing waits for it: it was never asked for, has expired, or its run was given up.
            InvalidInputError: The answer is not acceptable.
            UnknownSessionError: There is no such session.
            UnknownFlowError: Its flow is not registered here.

        Cancelling the caller cancels the turn that went on, kind `caller`; the answer stays.
        """
        self._check_running()
        head, _ = await self.store.load(checked_session_id(session_id))
        return await self._answer(head, request_id, AnswerPayload(value))

    async def answer_input(self, session_id: str, input_event_id: str) -> TurnResult:
        """Take what a client published on the session's channel as an answer: a verdict, or its tool's result.

        Args:
            session_id: The session.
            input_event_id: The input's `event-id`, as in an invocation.

        Returns:
            See `answer`.

        Raises:
            InputEventNotFoundError: There is no such input on the channel.
            InvalidInputError: It is something else, or not acceptable as an answer.
            UnknownRequestError: Its call waits for nothing.
            MisuseError: The engine has no channels.
            ChannelError: The channel cannot be read.
            UnknownSessionError, UnknownFlowError: See `answer`.
        """
        self._check_running()
        from ._client_inputs import ClientMessage, find_input

        head, _ = await self.store.load(checked_session_id(session_id))
        said = await find_input(await self._channel(session_id), self._core.codec(), input_event_id)
        if isinstance(said, ClientMessage):
            raise InvalidInputError("The input answers no call: it is a message, for invoke.", "/inputEventId")
        return await self._answer(head, *await self._answer_of(head, said))

    async def _answer(self, head: SessionHead, request_id: str, answer: AnswerPayload) -> TurnResult:
        row, given = await self._write_answer(head, request_id, answer)
        if (known := stored_result(row)) is not None:
            return known
        turn = self._launch(given)
        await self._finish(turn, owner=True)
        if isinstance(turn.error, _MISUSE):
            raise turn.error
        return turn.result

    async def _write_answer(
        self, head: SessionHead, request_id: str, answer: AnswerPayload
    ) -> tuple[InboxRow, TurnInput]:
        """Write an answer down; returns its row, and the turn that takes it up."""
        definition = self._definition(head.workflow.id)
        row = await put_answer(self.store, head, request_id, answer, self.limits, self.clock.time())
        return row, TurnInput(
            definition=definition,
            message=None,
            session_id=head.id,
            config=None,
            key=None,
            on_busy="queue",
            busy_timeout=definition.cls.busy_timeout,
            answer=request_id,
        )

    async def _answer_of(self, head: SessionHead, given: ClientAnswer) -> tuple[str, AnswerPayload]:
        from ._client_inputs import request_of

        request_id = await request_of(self.store, head, given.call)
        if request_id is None:
            raise unknown_request(head.id, given.call)
        return request_id, AnswerPayload(given.value, shown=True, fork=given.fork)

    # -- what clients publish

    async def invoke(self, session_id: str, input_event_id: str, *, flow: str | None = None) -> Turn:
        """Take up what a client published on the session's channel, once, however often it is invoked.

        A message is a turn, or, where it names a run, said into the one that runs (see `steer`); a verdict or a tool's
        result is an answer (see `answer`). What is on the channel is not said there again.

        Args:
            session_id: The session.
            input_event_id: The input's `event-id`.
            flow: Begin the session with this flow, if there is none yet; if there is, it has to be of that flow.

        Returns:
            The turn. It goes on by itself, whatever becomes of whoever invoked it; it tells no events. Wait for `begun`
            or `done`.

        Raises:
            InputEventNotFoundError: There is no such input on the channel.
            InvalidInputError: It is an edit, a regeneration or something else that a flow does not take up.
            UnknownRequestError: It answers a call that waits for nothing.
            MisuseError: The engine has no channels.
            ChannelError: The channel cannot be read.
            UnknownSessionError: There is no such session, and no flow to begin it with.
            UnknownFlowError: The flow is not registered here.
        """
        self._check_running()
        from ._client_inputs import ClientMessage, find_input, key_of

        said = await find_input(await self._channel(checked_session_id(session_id)), self._core.codec(), input_event_id)
        try:
            head, _ = await self.store.load(session_id)
        except UnknownSessionError:
            if flow is None or not isinstance(said, ClientMessage):
                raise
            definition = self._definition(flow)
        else:
            if not isinstance(said, ClientMessage):
                _, given = await self._write_answer(head, *await self._answer_of(head, said))
                return Turn(self._launch(given), Reader.closed(), owner=True)
            definition = self._definition(flow or head.workflow.id)
        policy = definition.cls.on_busy
        task, owner = self._start(
            definition.id,
            said.message,
            session_id=session_id,
            idempotency_key=key_of(input_event_id),
            on_busy="steer" if said.run is not None else "queue" if policy == "steer" else policy,
            create_session=flow is not None,
            published=said.id,
        )
        return Turn(task, Reader.closed(), owner=owner)

    async def _channel(self, session_id: str) -> Channel:
        if self.channels is None:
            raise MisuseError("This engine has no channels on which clients could say something: use run and answer.")
        return await self.channels.open(self._core.channel_of(session_id))

    # -- recovery

    async def recover(self, session_id: str) -> TurnResult:
        """Finish what a process that died left open in a session; nothing happens where nothing is open.

        Returns:
            What the turn that was open came to.

        Raises:
            UnknownSessionError: There is no such session.
            UnknownFlowError: Its flow is not registered here.
            SessionBusyError: Another process works on it.
        """
        self._check_running()
        head, _ = await self.store.load(checked_session_id(session_id))
        turn = self._launch(recovery_of(self._definition(head.workflow.id), session_id))
        await self._finish(turn, owner=True)
        if isinstance(turn.error, (*_MISUSE, SessionBusyError)):
            raise turn.error
        return turn.result

    async def recover_all(self) -> int:
        """Finish what processes that died left open, as far as their leases have run out; returns how many turns.

        One that cannot be finished is logged, and does not keep the others waiting.
        """
        finished = 0
        async with anyio.create_task_group() as group:

            async def one(session: str) -> None:
                nonlocal finished
                try:
                    await self.recover(session)
                    finished += 1
                except (SessionBusyError, UnknownSessionError):
                    pass  # somebody else was quicker
                except StepwellError as error:
                    self._core.report("a session could not be recovered", error, session)

            for row in await self.store.due(limit=_RECOVERED_AT_ONCE):
                group.start_soon(one, row.session)
        return finished

    async def _recovering(self) -> None:
        while True:
            try:
                await self.recover_all()
            except StepwellError as error:
                self._core.report("sessions could not be looked through for open turns", error, "")
            await self._pause(cast("float", self._recovery_interval))

    # -- sessions

    async def get_session(self, session_id: str) -> JsonObject:
        """The head of a session's document, as JSON.

        Raises:
            UnknownSessionError: There is none.
        """
        head, _ = await self.store.load(checked_session_id(session_id))
        return cast("JsonObject", msgspec.to_builtins(head))

    async def list_sessions(
        self, *, flow: str | None = None, status: str | None = None, after: str | None = None, limit: int = 100
    ) -> tuple[list[SessionSummary], str | None]:
        """Sessions, newest first, and the cursor of the next page."""
        return await self.store.list(flow=flow, status=status, after=after, limit=limit)

    async def delete_session(self, session_id: str) -> bool:
        """Remove a session and all its rows; a running turn of it ends as `lost`. Whether it was there."""
        self._core.warm.take(session_id)
        deleted = await self.store.delete(checked_session_id(session_id))
        if self.channels is not None:
            await self.channels.delete(self._core.channel_of(session_id))
        for turn in list(self._turns):
            if turn.session_id == session_id:
                turn.cancel("lost", "the session was deleted")
        return deleted

    async def export_session(self, session_id: str) -> JsonObject:
        """Everything of a session in one JSON document."""
        return await export_session(self.store, checked_session_id(session_id))

    async def import_session(self, document: Mapping[str, Any], *, session_id: str | None = None) -> str:
        """Take an exported document back, under its own or another id; returns the id."""
        return await import_session(self.store, dict(document), session_id=session_id)

    # -- inside

    def _turn_ended(self, turn: TurnTask) -> None:
        """A turn is over, one way or the other."""
        self._turns.pop(turn, None)
        if turn.key_index is not None:
            self._by_key.pop(turn.key_index, None)
        if turn.error is not None:
            what = "a turn did not finish" if isinstance(turn.error, CallerError) else "a turn failed"
            self._core.report(what, turn.error, turn.session_id)

    def _listeners_of_turn(self) -> tuple[Listener, ...]:
        listeners = self._listeners
        if self._telemetry:
            from ._telemetry import TurnSpans

            listeners = (*listeners, TurnSpans(capture_content=self._core.capture_content))
        if _turn_logger.isEnabledFor(logging.DEBUG):
            from ._telemetry import TurnLog

            listeners = (*listeners, TurnLog(capture_content=self._core.capture_content))
        return listeners

    async def _keep_leases(self) -> None:
        """Renew every lease at a third of its time."""
        while True:
            await self._pause(self._core.lease_ttl / 3)
            for turn in list(self._turns):
                await turn.renew()

    async def _read_inboxes(self) -> None:
        """Look what other processes have said to the sessions that this one works on."""
        while True:
            await self._pause(_INBOX_SECONDS)
            for turn in list(self._core.running.values()):
                try:
                    await turn.look()
                except StepwellError as error:
                    self._core.report("an inbox could not be read", error, turn.session_id)

    async def _pause(self, seconds: float) -> None:
        # A timer, not a sleep: a fake clock that jumps over sleeps must not run on because of this.
        due = asyncio.Event()
        timer = self.clock.call_at(self.clock.monotonic() + seconds, due.set)
        try:
            await due.wait()
        finally:
            timer.cancel()


def _channels(given: ChannelProvider | str | None, clock: Clock) -> ChannelProvider | None:
    if not isinstance(given, str):
        return given
    from stepwell.channels import open_channels

    return open_channels(given, clock=clock)


_INBOX_SECONDS = 1.0
"""How long a process may not know what another one has said to its turn; each unit looks too."""

_RECOVERED_AT_ONCE = 50
"""Sessions that are taken up in one look; the others are with the next."""

_MISUSE = (UnknownSessionError, InvalidInputError, IdempotencyConflictError, UnknownRequestError)
