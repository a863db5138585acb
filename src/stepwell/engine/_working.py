"""A session while somebody works on it: head, histories, and what the next commit will carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from stepwell._clock import stamp
from stepwell._json import deep_merge, json_copy
from stepwell._signal import CancelSignal
from stepwell.errors import HandlerError
from stepwell.loop import CallScope, VisitState
from stepwell.messages import (
    AssistantMessage,
    HistoryCheck,
    JsonObject,
    JsonValue,
    Message,
    ToolCall,
    ToolResult,
    Usage,
    UserMessage,
    encode_message,
    gen_message_id,
)
from stepwell.models import LlmType, ModelGateway, ModelSelection
from stepwell.sessions import (
    Commit,
    InboxRow,
    InboxUpdate,
    JournalRow,
    LogEntry,
    MemoryHead,
    ModelUsage,
    NewMessage,
    SequenceEntry,
    SessionHead,
    StageRecord,
    TurnRecord,
)

from ._stream import TurnStream

if TYPE_CHECKING:
    from ._core import Core
    from ._journal import Journal

__all__ = ["History", "Scope", "Working", "leave_calls"]

StateOp = Literal["save", "merge", "remove"]

_NEVER = CancelSignal()
"""Outside of a turn nothing is cancelled."""

_scope: ContextVar[Scope | None] = ContextVar("stepwell_call_scope", default=None)


def leave_calls() -> None:
    """What this task does is no part of a tool call, also where a handler started it."""
    _scope.set(None)


class Scope:
    """The staged writes of one tool call; implements `CallScope`.

    Reads go through the scopes before it to the state before the batch. Writes are kept as operations, so that they
    can be applied in call order whatever order the calls ended in.
    """

    __slots__ = ("_token", "closed", "erased", "messages", "ops", "overlay", "parent", "working")

    def __init__(self, working: Working, parent: Scope | None) -> None:
        self.working = working
        self.parent = parent
        self.ops: list[tuple[Any, ...]] = []
        self.overlay: dict[str, JsonObject] = {}
        self.messages: dict[str, list[Message]] = {}
        self.erased: set[str] = set()
        self.closed = False

    def active(self) -> Scope:
        """See `CallScope`."""
        return self

    def __enter__(self) -> None:
        self._token = _scope.set(self)

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._token)

    def close(self) -> None:
        """See `CallScope`."""
        self.closed = True

    def record(self, *op: Any) -> None:
        """Stage one write."""
        if self.closed:
            raise HandlerError(
                "A tool handler that has ended, or was cancelled, tried to write: its writes no longer count."
            )
        self.ops.append(op)

    def state(self, stage: str) -> JsonObject | None:
        """What this call, or those it reads from, staged of a stage's state."""
        scope: Scope | None = self
        while scope is not None:
            if (found := scope.overlay.get(stage)) is not None:
                return found
            scope = scope.parent
        return None

    def view(self, ns: str, before: list[Message]) -> list[Message]:
        """The messages of a namespace as this call sees them, on top of those from before the batch."""
        if ns in self.erased:
            before = []
        elif self.parent is not None:
            before = self.parent.view(ns, before)
        mine = self.messages.get(ns)
        return [*before, *mine] if mine else before


class History:
    """The messages of one namespace, as far as this process has them: all that the model is shown.

    A message that comes while calls wait for their results waits behind them (`deferred`): so whatever a hook writes in
    the middle of a batch, providers accept the history.
    """

    __slots__ = ("check", "deferred", "messages")

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages: list[Message] = []
        self.check = HistoryCheck()
        self.deferred: list[Message] = []
        for message in messages:
            self.check.add(message)
            self.messages.append(message)

    @property
    def open(self) -> list[ToolCall]:
        """The newest reply's calls that have no result."""
        for message in reversed(self.messages):
            if isinstance(message, AssistantMessage):
                return [call for call in message.calls if call.id in self.check.open]
        return []


def apply_op(state: JsonObject, op: StateOp, value: Any) -> JsonObject:
    """A stage's state after one write; the given one is not changed."""
    changed = dict(state)
    if op == "save":
        changed.update(value)
    elif op == "remove":
        changed.pop(value, None)
    else:
        for key in value:
            if key in changed:
                changed[key] = json_copy(changed[key])
        deep_merge(changed, value)
    return changed


class Working:
    """Implements `UnitRuntime` over a session's head.

    Everything that changes between two commits is here and nowhere else: `commit()` collects it, `forget()` drops it.
    Usage and log lines survive a roll-back: they happened.
    """

    def __init__(self, head: SessionHead, core: Core) -> None:
        self.head = head
        self.clock = core.clock
        self.alarm = core.alarm
        self.providers = core.providers
        self.store = core.store
        self.gateways = core.gateways
        self.histories: dict[str, History] = {}
        self.observer = TurnStream()
        self.visit: VisitState = cast("VisitState", None)
        self.journal = cast("Journal", None)
        self.run_id = ""
        self.step_id = ""
        self.cancelled = _NEVER
        self.executing = head.workflow.current
        self._transient: dict[str, JsonObject] = {}
        self._new: list[NewMessage] = []
        self._first: dict[str, int] = {}
        self._sequence: list[SequenceEntry] = []
        self._log: list[LogEntry] = []
        self._inbox: list[InboxUpdate | InboxRow] = []
        self._spent: list[tuple[str, Usage | None]] = []
        self._journal_cleared: str | None = None
        self._journal_kept: Sequence[JournalRow] = ()

    def begin(self, observer: TurnStream) -> None:
        """A turn starts on this session."""
        self.observer = observer
        self.cancelled = CancelSignal()
        self._transient = {}
        observer.warnings = lambda text, data: self.log("warning", text, data)

    @property
    def turn(self) -> TurnRecord:
        """The open turn."""
        turn = self.head.turn
        assert turn is not None
        return turn

    # -- Runtime: reading

    @property
    def session_id(self) -> str:
        """See `Runtime`."""
        return self.head.id

    @property
    def context(self) -> JsonObject:
        """See `Runtime`."""
        return self.head.workflow.context

    @property
    def current(self) -> str:
        """See `Runtime`."""
        return self.head.workflow.current

    @property
    def completed(self) -> bool:
        """See `Runtime`."""
        return self.head.status == "completed"

    def now(self) -> float:
        """See `Runtime`."""
        return self.clock.time()

    def session(self) -> Mapping[str, Any]:
        """See `Runtime`."""
        return _frozen(msgspec.to_builtins(self.head))

    def state(self, stage: str) -> JsonObject:
        """See `Runtime`."""
        if (scope := _scope.get()) is not None and (staged := scope.state(stage)) is not None:
            return staged
        record = self.head.stages.get(stage)
        return record.state if record else {}

    def messages(self, ns: str) -> Sequence[Message]:
        """See `Runtime`."""
        history = self.histories.get(ns)
        if history is None:
            known: list[Message] = []
        else:
            known = [*history.messages, *history.deferred] if history.deferred else history.messages
        scope = _scope.get()
        return known if scope is None else scope.view(ns, known)

    def transient(self, stage: str) -> JsonObject:
        """See `Runtime`."""
        return self._transient.setdefault(stage, {})

    def stored_model(self, stage: str) -> JsonObject | None:
        """See `Runtime`."""
        record = self.head.stages.get(stage)
        return record.model if record else None

    def llm_type(self, provider: str) -> LlmType:
        """See `Runtime`."""
        return self.providers.llm_type(provider)

    # -- Runtime: writing

    def write_state(self, stage: str, op: StateOp, value: Any) -> None:
        """See `Runtime`."""
        changed = apply_op(self.state(stage), op, value)
        changed["_saved_at"] = stamp(self.clock.time())
        if (scope := _scope.get()) is not None:
            scope.record("state", stage, op, value)
            scope.overlay[stage] = changed
        else:
            self.head.stages.setdefault(stage, StageRecord()).state = changed

    def add_message(self, ns: str, stage: str, message: Message) -> Message:
        """See `Runtime`."""
        if not message.id:
            message = msgspec.structs.replace(message, id=self.new_id(stage))
        if (scope := _scope.get()) is not None:
            # What could not be applied later must fail here, where its author sees it.
            HistoryCheck().add(message)
            encode_message(message)
            scope.record("message", ns, stage, message)
            scope.messages.setdefault(ns, []).append(message)
            return message
        history = self.histories.get(ns)
        if history is None:
            history = self.histories[ns] = History()
        if history.check.open and not isinstance(message, ToolResult):
            HistoryCheck().add(message)  # it must be acceptable by itself, now, where its author can be told
            history.deferred.append(message)
            return message
        self._append(ns, history, message)
        if history.deferred and not history.check.open:
            waiting, history.deferred = history.deferred, []
            for late in waiting:
                self._append(ns, history, late)
        return message

    def _append(self, ns: str, history: History, message: Message) -> None:
        history.check.add(message)
        data = encode_message(message)
        memories = self.head.memories
        memory = memories[ns] if ns in memories else memories.setdefault(ns, MemoryHead())
        position = memory.next
        self._new.append(NewMessage(ns, position, data))
        memory.next = position + 1
        history.messages.append(message)

    def replace(self, ns: str, message: Message) -> bool:
        """See `UnitRuntime`."""
        history, memory = self.histories.get(ns), self.head.memories.get(ns)
        if history is None or memory is None:
            return False
        for index in range(len(history.messages) - 1, -1, -1):
            if history.messages[index].id == message.id:
                position = memory.next - len(history.messages) + index
                break
        else:
            return False
        for row, new in enumerate(self._new):
            if new.ns == ns and new.position == position:
                self._new[row] = NewMessage(ns, position, encode_message(message))
                history.messages[index] = message
                return True
        return False

    def erase(self, ns: str) -> None:
        """See `Runtime`."""
        if (scope := _scope.get()) is not None:
            scope.record("erase", ns)
            scope.erased.add(ns)
            scope.messages[ns] = []
            return
        if (history := self.histories.get(ns)) is not None:
            history.deferred.clear()
        self.cut(ns, 0)

    def cut(self, ns: str, keep: int) -> None:
        """Drop all messages of a namespace but the `keep` newest; an exchange with open calls always stays whole."""
        history = self.histories.get(ns)
        memory = self.head.memories.get(ns)
        if history is None or memory is None:
            return
        if history.check.open:
            # Providers want a user message first: keep from the one that this exchange answers.
            newest = range(len(history.messages) - 1, -1, -1)
            start = next((i for i in newest if isinstance(history.messages[i], UserMessage)), 0)
            keep = max(keep, len(history.messages) - start)
        drop = len(history.messages) - keep
        if drop <= 0:
            return
        del history.messages[:drop]
        memory.first += drop
        if keep == 0:
            memory.summary = None
        self._first[ns] = memory.first
        self._new = [row for row in self._new if row.ns != ns or row.position >= memory.first]

    def store_model(self, stage: str, model: JsonObject | None) -> None:
        """See `Runtime`."""
        record = self.head.stages.get(stage)
        if record is None and model is not None:
            record = self.head.stages[stage] = StageRecord()
        if record is not None:
            record.model = model

    def mark_completed(self) -> None:
        """See `Runtime`."""
        if (scope := _scope.get()) is not None:
            scope.record("completed")
        else:
            self.head.status = "completed"

    def log(self, level: Literal["debug", "info", "warning", "error"], text: str, data: JsonValue = None) -> None:
        """See `Runtime`."""
        self._log.append(LogEntry(level, stamp(self.clock.time()), text, json_copy(data)))

    # -- UnitRuntime

    def new_id(self, stage: str) -> str:
        """See `UnitRuntime`."""
        return gen_message_id(stage, self.clock.time())

    def gateway(self, selection: ModelSelection) -> ModelGateway:
        """See `LoopHost`. Checked once per selection and engine."""
        found = self.gateways.get(selection)
        if found is None:
            self.providers.validate(selection)
            found = self.gateways[selection] = self.providers.gateway(selection)
        return found

    def with_summary(self, ns: str, prompt: str | None) -> str | None:
        """See `UnitRuntime`."""
        memory = self.head.memories.get(ns)
        if memory is None or memory.summary is None:
            return prompt
        summary = f"Summary of the conversation so far:\n{memory.summary.text}"
        return f"{prompt}\n\n{summary}" if prompt else summary

    def spent(self) -> int:
        """See `LoopHost`."""
        return self.turn.tokens

    def add_usage(self, selection: ModelSelection, usage: Usage | None) -> None:
        """See `LoopHost`."""
        model = selection.id
        self._spent.append((model, usage))
        self._count(model, usage)

    def _count(self, model: str, usage: Usage | None) -> None:
        turn = self.head.turn
        if turn is not None and usage is not None:
            turn.tokens += usage.total or 0
        for table in (self.head.usage, turn.usage) if turn is not None else (self.head.usage,):
            entry = table.get(model)
            if entry is None:
                entry = table[model] = ModelUsage()
            entry.attempts += 1
            if usage is None:
                entry.unknown += 1
            else:
                entry.usage = entry.usage + usage

    def open_call(self, call: ToolCall, after: CallScope | None) -> CallScope:
        """See `LoopHost`."""
        return Scope(self, cast("Scope | None", after))

    def open_calls(self, ns: str) -> Sequence[ToolCall]:
        """See `UnitRuntime`."""
        history = self.histories.get(ns)
        return history.open if history is not None and history.check.open else ()

    def staged(self, writes: Sequence[tuple[Any, ...]], after: CallScope | None) -> Scope:
        """The scope of a call that ended in another process, with what it wrote."""
        scope = Scope(self, cast("Scope | None", after))
        with scope.active():
            self._write(writes)
        scope.close()
        return scope

    def apply(self, scope: CallScope) -> None:
        """See `UnitRuntime`."""
        self._write(cast("Scope", scope).ops)

    def _write(self, writes: Sequence[tuple[Any, ...]]) -> None:
        for op in writes:
            match op:
                case ("state", stage, kind, value):
                    self.write_state(stage, kind, value)
                case ("message", ns, stage, message):
                    self.add_message(ns, stage, message)
                case ("erase", ns):
                    self.erase(ns)
                case _:
                    self.mark_completed()

    # -- commits

    def enter(self, stage: str) -> None:
        """The cursor moves; the sequence says so."""
        self.head.workflow.current = stage
        self._sequence.append(SequenceEntry(stage, stamp(self.clock.time())))

    @property
    def has_updates(self) -> bool:
        """Whether inbox rows are to be changed."""
        return bool(self._inbox)

    def consume(self, update: InboxUpdate | InboxRow) -> None:
        """Change an inbox row with the next commit."""
        self._inbox.append(update)

    def clear_journal(self, prefix: str, kept: Sequence[JournalRow]) -> None:
        """Drop the journal rows whose keys begin so, all but these, with the next commit."""
        self._journal_cleared, self._journal_kept = prefix, kept

    def commit(self, *, release: bool = False) -> Commit:
        """All that happened since the last one."""
        self.head.saved_at = stamp(self.clock.time())
        return Commit(
            head=self.head,
            messages=self._new,
            first=self._first,
            sequence=self._sequence,
            log=self._log,
            inbox=self._inbox,
            clear_journal=self._journal_cleared,
            journal=self._journal_kept,
            release=release,
        )

    def committed(self, revision: int) -> None:
        """The commit is in the store."""
        self.head.revision = revision
        if self._new:
            self._new = []
        if self._first:
            self._first = {}
        if self._sequence:
            self._sequence = []
        if self._log:
            self._log = []
        if self._inbox:
            self._inbox = []
        if self._spent:
            self._spent = []
        if self._journal_cleared is not None:
            self._journal_cleared, self._journal_kept = None, ()

    async def forget(self) -> None:
        """Roll back to the last commit; usage and log lines of what failed stay."""
        spent, log = self._spent, self._log
        self.committed(self.head.revision)
        head, _ = await self.store.load(self.head.id)
        self.head = head
        self.histories = {}
        await self.load()
        self._log = log
        self._spent = spent
        for model, usage in spent:
            self._count(model, usage)
        if head.turn is not None:
            self.visit = head.turn.visit

    def said(self, message_id: str | None) -> UserMessage | None:
        """What a person said, by the message's id."""
        for history in self.histories.values() if message_id is not None else ():
            for message in reversed(history.messages):
                if message.id == message_id and isinstance(message, UserMessage):
                    return message
        return None

    async def load(self) -> None:
        """Read the histories that this process does not have yet."""
        for ns, memory in self.head.memories.items():
            if ns not in self.histories:
                rows = await self.store.load_messages(self.head.id, ns, first=memory.first)
                history = self.histories[ns] = History([row.message for row in rows])
                if self.head.turn is not None:
                    history.deferred += [late.message for late in self.head.turn.deferred if late.ns == ns]


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType({k: _frozen(v) for k, v in cast("dict[str, Any]", value).items()})
    if isinstance(value, list):
        return tuple(_frozen(item) for item in cast("list[Any]", value))
    return value
