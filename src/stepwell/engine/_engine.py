"""The engine: flows, models and a store, and turns that run in this process."""

from __future__ import annotations

import asyncio
import logging
import re
import traceback
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, cast

import anyio
import msgspec
from anyio import CancelScope

from stepwell._clock import Clock, SystemClock
from stepwell._json import is_text_clean, json_copy
from stepwell.errors import (
    CallerError,
    EngineClosedError,
    FlowDefinitionError,
    IdempotencyConflictError,
    InputTooLargeError,
    InvalidInputError,
    NonJsonValueError,
    SessionBusyError,
    UnknownFlowError,
    UnknownSessionError,
)
from stepwell.flow import Flow, FlowDefinition
from stepwell.messages import FilePart, JsonObject, TextPart, UserMessage
from stepwell.models import ModelGateway, ModelSelection
from stepwell.models.providers import Providers
from stepwell.sessions import SessionStore, SessionSummary, export_session, import_session, open_store

from ._events import Listener
from ._handle import Turn
from ._owner import owner_id
from ._result import TurnResult, wrap
from ._stream import TurnStream
from ._turn import TurnInput, TurnTask
from ._warm import WarmSessions
from ._working import Working

__all__ = ["Engine", "Limits", "TurnOptions"]

_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
_logger = logging.getLogger("stepwell.engine")
_turn_logger = logging.getLogger("stepwell.turn")


class TurnOptions(TypedDict, total=False):
    """Options of a turn; see `Engine.run`."""

    session_id: str | None
    config: Mapping[str, Any] | None
    idempotency_key: str | None
    on_busy: Literal["queue", "reject"] | None
    busy_timeout: float | None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine accepts from outside.

    Attributes:
        message_bytes: UTF-8 bytes of a message, files included.
        config_bytes: Bytes of a config as JSON.
        depth: Levels of nesting of a config.
        key_length: Characters of an idempotency key.
    """

    message_bytes: int = 1_048_576
    config_bytes: int = 1_048_576
    depth: int = 100
    key_length: int = 255


class Engine:
    """Runs turns of flows. Use it as a context manager, or `await Engine.create(...)` and `close()`.

    Args:
        flows: Flow classes; every definition error is found here.
        models: Providers; by default those of the environment (`Providers.from_env()`).
        store: A store (which stays open), or its URL: `memory://`, `sqlite:///file.db`.
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
        self.owner = owner_id()
        self.lease_ttl = lease_ttl
        self.limits = limits or Limits()
        self.warm = WarmSessions(warm_sessions, self.clock)
        self.gateways: dict[ModelSelection, ModelGateway] = {}
        self._listeners: tuple[Listener, ...] = tuple(listeners)
        self._telemetry = telemetry
        self._capture_content = capture_content
        self._lines: dict[str, _Line] = {}
        self._turns: dict[TurnTask, asyncio.Task[None]] = {}
        self._by_key: dict[tuple[str, str | None, str], TurnTask] = {}
        self._renewer: asyncio.Task[None] | None = None
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
        if self._renewer is not None or self._closed:
            raise EngineClosedError("This engine was started before: make a new one.")
        self._renewer = asyncio.create_task(self._renew_leases(), name="stepwell-leases")

    async def close(self, grace: float = 0.0) -> None:
        """Stop accepting turns, let open ones finish for `grace` seconds, leave the rest for recovery. Idempotent."""
        renewer = self._renewer
        if renewer is None or self._closed:
            return
        self._closed = True
        with anyio.move_on_after(grace):
            for turn in list(self._turns):
                await turn.ended.wait()
        with CancelScope(shield=True):
            for turn in list(self._turns):
                if not turn.cancel("shutdown"):
                    turn.stop()
            for turn in list(self._turns):
                await turn.ended.wait()
            renewer.cancel()
            await asyncio.wait([renewer])
            if self._owns_store:
                await self.store.close()
            if self._owns_models:
                await self.providers.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- turns

    async def run(
        self,
        flow: str,
        message: str | UserMessage | None = None,
        *,
        session_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
        on_busy: Literal["queue", "reject"] | None = None,
        busy_timeout: float | None = None,
    ) -> TurnResult:
        """Run one turn and return its result; a failure of the turn is in the result.

        Args:
            flow: Id or alias of a registered flow.
            message: What the person says.
            session_id: The session; `None` or `""` (a turn that failed before it had one) starts a new one.
            config: Context of a new session, under `config.`; ignored with a warning later.
            idempotency_key: The same key and input give the same turn, also after a lost answer.
            on_busy: `queue` (wait for the running turn) or `reject`; the flow's by default.
            busy_timeout: Seconds to wait in the queue; the flow's by default.

        Raises:
            CallerError: Misuse: unknown flow or session, an input that is not acceptable, a closed engine.

        Cancelling the caller cancels the turn, kind `caller`.
        """
        options: TurnOptions = {"session_id": session_id, "config": config, "idempotency_key": idempotency_key}
        options |= {"on_busy": on_busy, "busy_timeout": busy_timeout}
        turn, owner = self._start(flow, message, options)
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
        turn, owner = self._start(flow, message, options)
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
            detached: Let the turn go on when the block is left; otherwise that cancels it, kind `caller`.
            **options: See `run`.
        """
        task, owner = self._start(flow, message, options)
        turn = Turn(task, task.listen(), owner=owner)
        try:
            yield turn
        finally:
            if owner and not detached and not turn.done.is_set():
                turn.cancel("caller")
                with CancelScope(shield=True):
                    await turn.done.wait()
        if turn.done.is_set() and isinstance(turn.error, _MISUSE):
            raise turn.error

    def _start(self, flow: str, message: str | UserMessage | None, options: TurnOptions) -> tuple[TurnTask, bool]:
        """Start a turn, or attach to the one that runs under the same key; and whether it was started."""
        if self._renewer is None or self._closed:
            raise EngineClosedError("The engine is not running: use it inside `async with Engine(...)`.")
        definition = self.definitions.get(flow)
        if definition is None:
            raise UnknownFlowError(
                f"There is no flow {flow!r} (registered: {', '.join(sorted(self.definitions)) or 'none'}).", flow=flow
            )
        if unknown := options.keys() - TurnOptions.__annotations__.keys():
            raise TypeError(f"unknown options of a turn: {', '.join(sorted(unknown))}")
        cls = definition.cls
        session_id, key = options.get("session_id") or None, self._key(options.get("idempotency_key"))
        busy_timeout = options.get("busy_timeout")
        given = TurnInput(
            definition=definition,
            message=self._message(message, definition),
            session_id=self.check_session_id(session_id) if session_id is not None else None,
            config=self._config(options.get("config")),
            key=key,
            on_busy=options.get("on_busy") or cls.on_busy,
            busy_timeout=cls.busy_timeout if busy_timeout is None else busy_timeout,
        )
        index = (definition.id, session_id, key) if key is not None else None
        if index is not None and (running := self._by_key.get(index)) is not None:
            if running.digest != given.digest:
                raise IdempotencyConflictError(
                    "This idempotency key is in use with another message or config: use a new key for a new input.",
                    session_id=session_id,
                )
            return running, False
        turn = TurnTask(self, given, TurnStream(self._listeners_of_turn()))
        turn.key_index = index
        if index is not None:
            self._by_key[index] = turn
        # A plain task: the engine keeps it in `_turns`, cancels it by its own scope and waits for its end in `close`. A
        # task group would add a third of a turn's whole cost for what is there already.
        self._turns[turn] = asyncio.create_task(turn.main())
        return turn, True

    async def _finish(self, turn: TurnTask, owner: bool) -> None:
        try:
            await turn.done.wait()
        except anyio.get_cancelled_exc_class():
            if owner:
                turn.cancel("caller")
                with CancelScope(shield=True):
                    await turn.done.wait()
            raise

    async def cancel(self, session_id: str, *, reason: str | None = None, run_id: str | None = None) -> bool:
        """Cancel the running turn of a session in this process, and wait until it is recorded.

        Returns:
            Whether there was one; `False` too where `run_id` names another run.

        Raises:
            UnknownSessionError: There is no such session.
        """
        for turn in list(self._turns):
            if turn.session_id == session_id and (run_id is None or turn.run_id == run_id):
                cancelled = turn.cancel("user", reason)
                await turn.done.wait()
                return cancelled
        await self.store.load(session_id)
        return False

    # -- sessions

    async def get_session(self, session_id: str) -> JsonObject:
        """The head of a session's document, as JSON.

        Raises:
            UnknownSessionError: There is none.
        """
        head, _ = await self.store.load(self.check_session_id(session_id))
        return cast("JsonObject", msgspec.to_builtins(head))

    async def list_sessions(
        self, *, flow: str | None = None, status: str | None = None, after: str | None = None, limit: int = 100
    ) -> tuple[list[SessionSummary], str | None]:
        """Sessions, newest first, and the cursor of the next page."""
        return await self.store.list(flow=flow, status=status, after=after, limit=limit)

    async def delete_session(self, session_id: str) -> bool:
        """Remove a session and all its rows; a running turn of it ends as `lost`. Whether it was there."""
        self.warm.take(session_id)
        deleted = await self.store.delete(self.check_session_id(session_id))
        for turn in list(self._turns):
            if turn.session_id == session_id:
                turn.cancel("lost", "the session was deleted")
        return deleted

    async def export_session(self, session_id: str) -> JsonObject:
        """Everything of a session in one JSON document."""
        return await export_session(self.store, self.check_session_id(session_id))

    async def import_session(self, document: Mapping[str, Any], *, session_id: str | None = None) -> str:
        """Take an exported document back, under its own or another id; returns the id."""
        return await import_session(self.store, dict(document), session_id=session_id)

    async def exists(self, session_id: str) -> bool:
        """Whether a session is stored."""
        try:
            await self.store.load(session_id)
        except UnknownSessionError:
            return False
        return True

    # -- what comes from outside

    def check_session_id(self, session_id: str) -> str:
        """Return it.

        Raises:
            InvalidInputError: It is not a session id.
        """
        if not isinstance(session_id, str) or not _SESSION_ID.match(session_id):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInputError(
                "A session id has 1 to 128 letters, digits, _ and -: leave it out to start a new session.",
                "/session_id",
            )
        return session_id

    def _message(self, message: Any, definition: FlowDefinition) -> UserMessage | None:
        if isinstance(message, str):
            message = UserMessage(content=message) if message.strip() else None
        elif message is not None and not isinstance(message, UserMessage):
            raise InvalidInputError(
                f"A message is text or a UserMessage, not {type(message).__name__}.", "/message", flow=definition.id
            )
        if message is None:
            if definition.cls.requires_user_message:
                raise InvalidInputError(
                    f"Flow {definition.id} needs a message: send text that is not blank.",
                    "/message",
                    flow=definition.id,
                )
            return None
        parts = [TextPart(message.content)] if isinstance(message.content, str) else list(message.content)
        if not message.text.strip() and not any(isinstance(part, FilePart) for part in parts):
            raise InvalidInputError("The message holds neither text nor a file.", "/message", flow=definition.id)
        size = 0
        for part in parts:
            text = part.text if isinstance(part, TextPart) else (part.data or part.url or "")
            if not is_text_clean(text):
                raise InvalidInputError(
                    "The message holds a lone surrogate: send valid Unicode.", "/message", flow=definition.id
                )
            size += len(text.encode())
        if size > self.limits.message_bytes:
            raise InputTooLargeError(
                f"The message has {size} bytes, the limit is {self.limits.message_bytes}: send less, or a link to it.",
                "/message",
                flow=definition.id,
            )
        return msgspec.structs.replace(message, id="", by="user")

    def _config(self, config: Any) -> JsonObject | None:
        if config is None:
            return None
        if not isinstance(config, Mapping):
            raise InvalidInputError(f"A config is a JSON object, not {type(config).__name__}.", "/config")
        if _too_deep(config, self.limits.depth):
            raise InputTooLargeError(f"The config is nested deeper than {self.limits.depth} levels.", "/config")
        try:
            copied = json_copy(config)
        except NonJsonValueError as error:
            raise InvalidInputError(error.message, "/config/" + error.path.replace(".", "/")) from error
        if (size := len(msgspec.json.encode(copied))) > self.limits.config_bytes:
            raise InputTooLargeError(
                f"The config has {size} bytes, the limit is {self.limits.config_bytes}.", "/config"
            )
        return cast("JsonObject", copied)

    def _key(self, key: Any) -> str | None:
        if key is None:
            return None
        if not isinstance(key, str) or not key.strip() or len(key) > self.limits.key_length or not is_text_clean(key):
            raise InvalidInputError(
                f"An idempotency key is text, not blank, at most {self.limits.key_length} characters.",
                "/idempotency_key",
            )
        return key

    # -- for turns

    async def enter_line(self, given: TurnInput, session: str) -> None:
        """Wait until it is this turn's turn on a session: one after the other, first come first served.

        Raises:
            SessionBusyError: The busy policy, or its time, does not allow to wait.
        """
        line = self._lines.get(session)
        if line is None:
            line = self._lines[session] = _Line()
        line.users += 1
        try:
            await line.enter(given, session, self.clock)
        except BaseException:
            self._left(session, line)
            raise

    def leave_line(self, session: str) -> None:
        """Let the next turn of the session begin."""
        line = self._lines[session]
        line.lock.release()
        self._left(session, line)

    def _left(self, session: str, line: _Line) -> None:
        line.users -= 1
        if not line.users:
            del self._lines[session]

    def waiting(self, session: str) -> bool:
        """Whether another input waits for the session in this process."""
        line = self._lines.get(session)
        return line is not None and line.users > 1

    def keep_warm(self, session: str, working: Working, incarnation: str) -> None:
        """A turn is over; its session stays in memory."""
        self.warm.put(session, working, incarnation)

    def turn_done(self, turn: TurnTask) -> None:
        """A turn is over, one way or the other."""
        self._turns.pop(turn, None)
        if turn.key_index is not None:
            self._by_key.pop(turn.key_index, None)
        if turn.error is not None:
            what = "a turn did not finish" if isinstance(turn.error, CallerError) else "a turn failed"
            self.report(what, turn.error, turn.session_id)

    def report(self, what: str, error: BaseException, session: str) -> None:
        """Log a failure: ids, code, and where code that is not ours raised.

        What an exception says may hold a customer's text: it is logged only with `capture_content`.
        """
        level = logging.INFO if isinstance(error, CallerError) else logging.WARNING
        code = getattr(error, "code", type(error).__name__)
        cause = error.__cause__ if hasattr(error, "code") else error
        if cause is None or hasattr(cause, "code"):
            _logger.log(level, "%s: %s (session %s)", what, code, session or "-")
        elif self._capture_content:
            _logger.log(level, "%s: %s (session %s)", what, code, session or "-", exc_info=cause)
        else:
            where = "".join(traceback.format_tb(cause.__traceback__))
            _logger.log(level, "%s: %s (session %s)\n%s%s", what, code, session or "-", where, type(cause).__name__)

    def _listeners_of_turn(self) -> tuple[Listener, ...]:
        listeners = self._listeners
        if self._telemetry:
            from ._telemetry import TurnSpans

            listeners = (*listeners, TurnSpans(capture_content=self._capture_content))
        if _turn_logger.isEnabledFor(logging.DEBUG):
            from ._telemetry import TurnLog

            listeners = (*listeners, TurnLog(capture_content=self._capture_content))
        return listeners

    async def _renew_leases(self) -> None:
        """Renew every lease at a third of its time."""
        while True:
            # A timer, not a sleep: a fake clock that jumps over sleeps must not run on because of this.
            due = asyncio.Event()
            timer = self.clock.call_at(self.clock.monotonic() + self.lease_ttl / 3, due.set)
            try:
                await due.wait()
            finally:
                timer.cancel()
            for turn in list(self._turns):
                await turn.renew()


_MISUSE = (UnknownSessionError, InvalidInputError, IdempotencyConflictError)


class _Line:
    """The queue of one session in this process."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0

    async def enter(self, given: TurnInput, session: str, clock: Clock) -> None:
        if not self.lock.locked() and self.users == 1:
            await self.lock.acquire()  # at once: nobody holds it, nobody waits for it
            return
        if given.on_busy == "reject":
            raise SessionBusyError(
                f"Session {session} is busy with another turn: try again when it is over.", session_id=session
            )
        with CancelScope() as scope:
            timer = clock.call_at(clock.monotonic() + given.busy_timeout, scope.cancel)
            try:
                await self.lock.acquire()
            finally:
                timer.cancel()
            return
        raise SessionBusyError(
            f"Session {session} was busy for {given.busy_timeout:g} s: try again, or raise busy_timeout.",
            session_id=session,
        )


def _too_deep(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than `levels`, found without recursion."""
    layer: list[Any] = [value]
    for _ in range(levels + 1):
        layer = [
            item
            for entry in layer
            if isinstance(entry, (Mapping, list, tuple))
            for item in (cast("Any", entry).values() if isinstance(entry, Mapping) else cast("Any", entry))
        ]
        if not layer:
            return False
    return any(isinstance(entry, (Mapping, list, tuple)) for entry in layer)
