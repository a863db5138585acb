"""One turn, from the input to the released lease.

    acquire -> fence -> open (a commit) -> units (a commit each, then settled) -> close (the run's end) -> release

Without a channel there is no fence and nothing to settle, and the last unit's commit gives the lease up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import anyio
import msgspec
from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

from stepwell._clock import stamp
from stepwell._json import json_copy
from stepwell.errors import (
    CancelKind,
    FencedError,
    IdempotencyConflictError,
    InvalidInputError,
    LeaseHeldError,
    RaceError,
    SessionBusyError,
    SessionConflictError,
    SessionExistsError,
    StaleWriterError,
    StepwellError,
    TurnCancelledError,
)
from stepwell.flow import SummaryRule
from stepwell.loop import NOT_RUN, Batch, nobody_knows
from stepwell.messages import JsonObject, ToolCall, ToolResult, UserMessage
from stepwell.outcomes import Suspend
from stepwell.sessions import (
    Acquired,
    InboxRow,
    InboxUpdate,
    OutRecord,
    SessionHead,
    StageRecord,
    SteerRecord,
    TurnRecord,
    VisitRecord,
    WorkflowRecord,
    migrate_head,
)

from ._compaction import compact, due_for_compaction
from ._core import Core
from ._events import Committed, TurnFinished, TurnStarted, TurnSuspended
from ._ids import new_id, session_id_from
from ._inbox import Door, cancel_of, input_of, is_same, waiting_before
from ._inputs import TurnInput, recovery_of
from ._journal import Journal
from ._machine import Done, FlowMachine, Suspended
from ._result import TurnResult, failure_of, wrap
from ._shape import result_part
from ._stream import Reader, TurnStream
from ._suspension import (
    answer_by_message,
    check_requests,
    go_on,
    pending_of,
    suspend_turn,
    suspended_error,
    take_answers,
    unknown_request,
    waiting,
)
from ._working import Working, leave_calls

if TYPE_CHECKING:
    from stepwell.transport import ChannelWriter

    from ._publication import Publication

__all__ = ["TurnTask"]


class TurnTask:
    """A turn under way, or done: what the engine keeps. Callers hold a `Turn`."""

    def __init__(self, core: Core, given: TurnInput, stream: TurnStream, ended: Callable[[TurnTask], None]) -> None:
        self.run_id = new_id()
        self.invocation_id = new_id()
        self.session_id = given.session_id or ""
        self.result: TurnResult = cast("TurnResult", None)
        self.error: BaseException | None = None
        self.done = asyncio.Event()
        self.ended = asyncio.Event()
        self._runs = False  # rather than waits to; or is over
        self._begun: asyncio.Event | None = None  # made for whoever asks first: most turns nobody asks
        self.key_index: tuple[str, str | None, str] | None = None
        self._core = core
        self._ended = ended
        self._given = given
        self._stream = stream
        self._scope = core.scope()
        self._cancel: tuple[CancelKind, str | None] | None = None
        self.working = cast("Working", None)  # the session; from `_attached` on
        self._attached = False
        self._machine: FlowMachine | None = None
        self._hold = core.hold()
        self._lines: list[str] = []
        self._previous: str | None = None
        self._resumed = False
        self._units = 0
        self._committing = False
        self._writer: ChannelWriter | None = None
        self._publication: Publication | None = None
        self._closed: TurnResult | None = None  # what the turn came to, from its closing commit on
        self._waiting: Door | None = None  # where the session is busy
        self._superseded = False  # to be cancelled as soon as it has begun: an interrupt came while it waited
        self._cancels: list[str] = []  # rows of the requests that this turn is cancelled for
        self._steers: list[InboxRow] = []  # said while it runs, and not taken yet

    # -- for callers

    @property
    def begun(self) -> asyncio.Event:
        """Set when it runs, rather than waits to, or is over."""
        if self._begun is None:
            self._begun = asyncio.Event()
            if self._runs:
                self._begun.set()
        return self._begun

    def _tell_begun(self) -> None:
        self._runs = True
        if self._begun is not None:
            self._begun.set()

    def listen(self) -> Reader:
        """A reader of the events from now on."""
        return self._stream.listen()

    def unlisten(self, reader: Reader) -> None:
        """That reader wants no more events."""
        self._stream.leave(reader)
        reader.close()

    @property
    def digest(self) -> bytes:
        """Of the input."""
        return self._given.digest

    def is_meant(self, run_id: str | None, key: str | None) -> bool:
        """Whether a request to cancel that names these is about this turn."""
        if run_id is None and key is None:
            return True
        return self.run_id == run_id or (key is not None and self._given.key == key)

    @property
    def text(self) -> str:
        """What a person should see of this turn now."""
        return self._stream.visible

    def cancel(self, kind: CancelKind = "user", reason: str | None = None) -> bool:
        """Ask the turn to stop. `False`: it is done, or being cancelled already."""
        if self._cancel is not None or self.done.is_set():
            return False
        self._cancel = (kind, reason)
        if self._attached:
            self.working.cancelled.set()
        if not self._committing:
            self._scope.cancel()
        return True

    def supersede(self) -> None:
        """Another input takes this turn's place. What was said stays said: one that waits begins, and ends at once."""
        self._superseded = True
        if self._attached and self.working.head.turn is not None:
            self.cancel("superseded")

    # -- the task

    async def main(self) -> None:
        """Run the turn. Raises nothing: the outcome is in `result` and `error`."""
        leave_calls()
        timeout = self._given.definition.cls.turn_timeout
        timer = None
        if timeout is not None:
            clock = self._core.clock
            timer = clock.call_at(clock.monotonic() + timeout, lambda: self.cancel("deadline"))
        try:
            with self._scope:
                self._announce(await self._guarded())
            if not self.done.is_set():
                self._announce(await self._cancelled())
        except anyio.get_cancelled_exc_class():
            # The engine itself goes down: leave the session for whoever comes next.
            self._cancel = self._cancel or ("shutdown", None)
            if not self.done.is_set():
                self._announce(await self._cancelled())
            raise
        except BaseException as error:
            # An exit, or a test that fails inside a hook: it goes on its way, but nobody may wait for ever.
            self.error = error
            self._announce(self._result_of(wrap(error)))
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if self._publication is not None:
                await self._publication.leave()
            self._leave()
            if self._hold.held:
                await self._hold.give_up()
            for session in self._lines:
                self._core.lines.leave(session)
            self._ended(self)
            self.ended.set()

    def stop(self) -> None:
        """End what is left after the answer: the engine goes down."""
        self._scope.cancel()

    async def _guarded(self) -> TurnResult:
        try:
            if (seen := await self._begin()) is not None:
                return seen
            return await self._units_until_done()
        except Exception as raised:  # noqa: BLE001 - whatever fails a turn becomes its result
            error = self._taken_over(raised) if isinstance(raised, FencedError) else raised
            self.error = error
            if self._machine is not None and self.working.head.turn is not None and self._hold.held:
                try:
                    return await self._failed(error)
                except Exception as broken:  # noqa: BLE001 - the turn stays open in the store, for recovery
                    self._core.report("a failed turn could not be closed", broken, self.session_id)
            await self._hold.give_up()
            return self._result_of(error)

    def _taken_over(self, error: FencedError) -> StaleWriterError:
        """What the channel says of a newer epoch, in terms of the session."""
        taken = StaleWriterError(
            "Another process has taken the session over and goes on with it: ask again, with the same idempotency key "
            "if there was one.",
            session_id=self.session_id,
            run_id=self.run_id,
        )
        taken.__cause__ = error
        return taken

    async def _queue(self, session: str) -> None:
        """Take this turn's place in the line of a session, if it has none."""
        if session not in self._lines:
            await self._core.lines.enter(self._given, session)
            self._lines.append(session)

    async def _units_until_done(self) -> TurnResult:
        machine = cast("FlowMachine", self._machine)
        while True:
            if self._units and machine.may_ask:
                await self.look()
            if self._steers and machine.before_a_reply:
                await self._take_steers()
            self._hold.check()  # behind every wait: nothing may come between it and the unit
            done = await machine.advance()
            if done is not None:
                await machine.clean_up()
                if isinstance(done, Suspended):
                    return await self._suspend(done)
                return await self._close(done)
            turn = self.working.turn
            if self._publication is not None:
                self._shows(turn, await self._publication.accept(machine.parts(), None))
            await self._commit()
            self._units += 1
            if self._publication is not None:
                await self._publication.settle()

    # -- the inbox

    async def look(self) -> None:
        """Read the inbox: what asks this turn to stop, and what was said meanwhile."""
        if self._attached and self._hold.held and not self.done.is_set():
            self._take_rows(await self._core.store.inbox_list(self.session_id, pending=True))

    def _take_rows(self, rows: Sequence[InboxRow]) -> None:
        turn = self.working.head.turn
        for row in rows:
            if row.state != "new" or turn is None:
                continue
            if row.kind == "cancel" and row.key not in self._cancels:
                request = cancel_of(row)
                if request.means(turn):
                    self._cancels.append(row.key)
                    self.cancel(request.kind, request.reason)
                else:
                    self._dismiss_cancel(row, rows)
            elif row.kind == "steer" and all(row.key != known.key for known in self._steers):
                self._steers.append(row)

    async def _take_steers(self) -> None:
        """What was said while the turn ran enters the history, and the next reply answers it."""
        working, turn, rows = self.working, self.working.turn, self._steers
        self._steers = []
        for row in rows:
            said = input_of(row, self._given.definition, self.session_id)
            heard = cast("FlowMachine", self._machine).hear(cast("UserMessage", said.message))
            turn.steers = [*turn.steers, SteerRecord(row.key, heard.id, turn.unit, said.published)]
            working.consume(InboxUpdate(row.key, "taken"))
        turn.message, turn.shown, turn.outs = f"{turn.invocation}-{turn.unit}", False, ()
        await self._commit(unit=False)
        await self._say_steers()

    async def _say_steers(self) -> None:
        turn = self.working.turn
        if self._publication is not None:
            for steer in turn.steers:
                if steer.unit != turn.unit or steer.published:
                    continue
                if (said := self.working.said(steer.message)) is not None:
                    await self._publication.hear(said)

    # -- beginning

    async def _begin(self) -> TurnResult | None:
        """Acquire or create the session and open the turn; or the stored result of the same input."""
        given = self._given
        target = given.session_id
        if target is None or given.create:
            if target is None and given.key:
                target = session_id_from(given.definition.id, given.key)
            known = target is not None and await self._core.exists(target)
            if not known and await self._create(target or new_id()):
                return None
        visited: set[str] = set()
        recovered: set[str] = set()
        while True:
            assert target is not None
            if given.on_busy == "steer" and await self._steer(target):
                given = self._given = self._door.given
            await self._queue(target)
            if given.key and (seen := await self._stored(target)) is not None:
                return seen
            entered: Acquired | InboxRow
            try:
                entered = await self._hold.acquire(target, self._core.warm.peek(target), None)
            except LeaseHeldError:
                entered = await self._door.enter(target, self._core.warm.peek(target))
                given = self._given = self._door.given
            if isinstance(entered, InboxRow):
                return self._result_in(entered, target)
            await self._fence(target)
            head = await self._adopt(entered)
            if given.recovery:
                return await self._finish_open(entered.inbox)
            # What was said before, and lost its answer, must not answer what it has led to.
            known = given.answer or (given.key if head.status == "suspended" else None)
            if known and (seen := await self._stored(target)) is not None:
                return seen
            if head.status == "suspended":
                if (result := await self._wake(entered.inbox)) is not None:
                    return result
                await self._let_pass(head, (), recovered)
                continue
            first = waiting_before(entered.inbox, given.key)
            if head.turn is not None or first:
                await self._let_pass(head, first, recovered)
                continue
            if given.answer:
                await self._refuse_answer(given.answer)
            if given.key and (seen := await self._stored(target)) is not None:
                await self._hold.give_up()
                return seen
            self._dismiss_cancels(entered.inbox)
            if head.status in ("completed", "aborted"):
                follow = await self._follow(head, visited)
                if follow is None:
                    return None
                target = follow
                continue
            if not await self._restore():
                return None
            self._open_record(fresh=False)
            await self._commit(unit=False)
            await self._started()
            return None

    @property
    def _door(self) -> Door:
        if self._waiting is None:
            self._waiting = Door(self._core.store, self._hold, self._given)
        return self._waiting

    async def _steer(self, session: str) -> bool:
        """Say it to the turn that runs in this process, if one does; wait until that one is over."""
        running = self._core.running.get(session)
        if running is None or self._given.message is None:
            return False
        await self._door.wait(session)
        await running.look()
        await running.done.wait()
        return True

    async def _let_pass(self, head: SessionHead, rows: Sequence[InboxRow], recovered: set[str]) -> None:
        """A turn that was left open is finished before this one begins, and so is every input that came before.

        They are turns of their own, which this one waits for without the lease.
        """
        session, turn = head.id, head.turn
        self._leave()
        await self._hold.give_up()
        self._lines.remove(session)
        self._core.lines.leave(session)
        definition = self._given.definition
        if turn is not None:
            inputs = [recovery_of(definition, session, self._given.on_suspended)]
        else:
            inputs = [input_of(row, definition, session) for row in rows]
        tasks = [self._core.launch(given) for given in inputs]
        for task in tasks if self._given.on_busy == "interrupt" else ():
            task.supersede()
        for task in tasks:
            await task.done.wait()
            if turn is not None and task.error is not None and not isinstance(task.error, SessionBusyError):
                if turn.run in recovered:
                    raise task.error  # it cannot be finished here, and nothing can begin before it is
                recovered.add(turn.run)

    def _dismiss_cancels(self, rows: Sequence[InboxRow]) -> None:
        """What was to be cancelled is over, or has not begun: the requests are answered with the next commit."""
        for row in rows:
            if row.kind == "cancel" and row.state == "new":
                self._dismiss_cancel(row, rows)

    def _dismiss_cancel(self, row: InboxRow, rows: Sequence[InboxRow]) -> None:
        request, working = cancel_of(row), self.working
        waits = request.key is not None and any(one.key == request.key and one.state == "new" for one in rows)
        if waits:
            error = TurnCancelledError(
                f"The turn was cancelled ({request.kind}) before it began.", request.kind, request.reason
            )
            result = self._result_of(error)
            working.consume(InboxUpdate(cast("str", request.key), "done", msgspec.json.encode(result)))
        working.consume(InboxUpdate(row.key, "done", b"true" if waits else b"false"))

    async def _fence(self, session: str) -> None:
        """Keep whoever held the lease before from the channel, before anything else is done."""
        self._writer = await self._core.writer(session, self._hold.epoch, self._fenced)
        if self._writer is not None:
            await self._writer.raise_fence(self._hold.epoch)

    def _fenced(self) -> None:
        self.cancel("lost", "a newer holder of the lease writes on the channel")

    def _publish(self, *, taken_over: bool) -> Publication | None:
        """The run of the open turn, on the channel."""
        if self._writer is None:
            return None
        turn = self.working.turn
        publication = self._core.publication(self._writer, self._hold, turn, taken_over=taken_over)
        publication.stands(turn.visit.stage, self._given.definition.stream_mode(turn.visit.stage))
        self._publication = publication
        self.working.observer.add(publication)
        return publication

    async def _started(self) -> None:
        """The opening commit is done."""
        if (publication := self._publish(taken_over=False)) is not None:
            await publication.open(self.working.said(self.working.turn.input))
        self._tell_started()
        if self._superseded:
            self.cancel("superseded")

    async def _create(self, session: str) -> bool:
        """A new session, with the turn's opening commit. `False`: somebody else created it first."""
        await self._queue(session)
        given, core = self._given, self._core
        cls = given.definition.cls
        now = core.clock.time()
        head = SessionHead(
            id=session,
            workflow=WorkflowRecord(
                id=given.definition.id,
                schema_version=cls.schema_version,
                context={"config": given.config} if given.config is not None else {},
            ),
            created_at=stamp(now),
            previous=self._previous,
        )
        working = self._take(Working(head, self._core))
        machine = self._machine = FlowMachine(given.definition, working)
        await machine.build()
        self._open_record(fresh=True)
        try:
            await self._hold.create(working)
        except SessionExistsError:
            self._leave()
            return False
        await self._fence(session)
        await self._started()
        return True

    def _take(self, working: Working) -> Working:
        """This turn works on the session from now on."""
        if self._attached:
            self._leave()
        working.begin(self._stream)
        working.journal = Journal(working, self._hold, self._core.report)
        self.working, self._attached = working, True
        self.session_id = working.head.id
        self._core.running[self.session_id] = self
        return working

    def _leave(self) -> None:
        """This turn does not work on a session."""
        if self._attached and self._core.running.get(self.session_id) is self:
            del self._core.running[self.session_id]
        self._attached, self._machine = False, None

    async def _adopt(self, acquired: Acquired) -> SessionHead:
        """Take over what is stored: from the warm cache if that is current, else loaded and migrated."""
        core = self._core
        self._resumed = True
        session = acquired.lease.session
        warm = core.warm.take(session)
        if acquired.head is None and warm is not None:
            head = self._take(warm.working).head
            self._check_flow(head)
            return head
        head = acquired.head
        if head is None:
            head, _ = await core.store.load(session)
        head.revision = acquired.revision
        self._check_flow(head)
        cls = self._given.definition.cls
        if head.workflow.schema_version != cls.schema_version or head.workflow.id != cls.id:
            head = migrate_head(
                head, flow=cls.id, version=cls.schema_version, migrations=cls.migrations, aliases=cls.aliases
            )
        working = self._take(Working(head, self._core))
        working.journal.unread = head.turn is not None
        await working.load()
        return head

    def _check_flow(self, head: SessionHead) -> None:
        if head.workflow.id not in self._given.definition.names:
            raise InvalidInputError(
                f"Session {head.id} belongs to flow {head.workflow.id}, not to {self._given.definition.id}: send it to "
                "its own flow, or leave the session id out to start a new one.",
                "/session_id",
                session_id=head.id,
                flow=self._given.definition.id,
            )

    async def _follow(self, head: SessionHead, visited: set[str]) -> str | None:
        """An ended session does not resume: go to its successor, or create it. `None`: created and opened."""
        visited.add(head.id)
        successor = head.successor
        if successor is not None and successor not in visited and await self._core.exists(successor):
            await self._hold.give_up()
            await self._core.point(self._writer, head.id, successor)
            self._previous = head.id
            return successor
        # The old session stays leased until its successor is there, so that two processes cannot give it two.
        old, old_hold, old_writer = self.working, self._hold, self._writer
        self._hold = self._core.hold()
        self._previous = head.id
        self._resumed = False
        try:
            head.successor = new_id()
            await self._create(head.successor)
            await old_hold.commit(old, release=True)
            await self._core.point(old_writer, head.id, head.successor)
        except RaceError as error:
            self._core.report("a session could not name its successor", error, head.id)
        finally:
            await old_hold.give_up()
        return None

    async def _finish_open(self, rows: Sequence[InboxRow]) -> TurnResult:
        """Go on with what was left open, and see to it that what waits is run.

        A session in which there is nothing to do is left as it is.
        """
        for row in waiting_before(rows, None):
            self._core.launch(input_of(row, self._given.definition, self.session_id))
        working = self.working
        if working.head.status == "suspended":
            result = await self._wake(rows)
            return result if result is not None else await self._abandon(rows)
        if working.head.turn is not None:
            return await self._recover(rows)
        self._dismiss_cancels(rows)
        for row in rows:
            if row.kind == "answer":  # to a turn that ended otherwise
                working.consume(InboxUpdate(row.key, "done"))
        if working.has_updates:
            await self._commit(unit=False, release=True)
        else:
            await self._hold.give_up()
        return self._result(
            None, success=True, session_id=self.session_id, current=working.current, status=working.head.status
        )

    async def _recover(self, rows: Sequence[InboxRow], *, answered: bool = False, key: str | None = None) -> TurnResult:
        """A turn was left open, by a process that died or to wait for answers: it goes on where it was committed.

        Args:
            rows: The inbox.
            answered: Whether it waited, and goes on now.
            key: See `go_on`.
        """
        working, turn = self.working, self.working.turn
        machine = self._machine = FlowMachine(self._given.definition, working)
        working.visit = turn.visit
        working.run_id = self.run_id = turn.run
        if not answered:
            self.invocation_id = turn.invocation
        publication = self._publish(taken_over=turn.phase == "open")
        if turn.phase == "closing":
            self._tell_started(recovered=True)
            self._dismiss_cancels(rows)
            return await self._end(TurnResult.from_json(cast("JsonObject", turn.result)))
        if answered:
            await self._go_on(key)
        elif turn.phase == "suspended":
            return await self._rest(self._waits(turn))
        else:
            working.log("warning", "an open turn of a process that ended is finished first", {"run": turn.run})
            if publication is not None:
                if turn.unit == 0:  # else the run was opened before the first unit was committed
                    await (publication.resume() if turn.pending else publication.open(working.said(turn.input)))
                await publication.settle()
                await self._say_steers()
            self._tell_started(recovered=True)
            self._take_rows(rows)
            if self._superseded:
                self.cancel("superseded")
            if self._cancel is not None:
                await checkpoint_if_cancelled()
            await machine.build()
        machine.restored = True
        return await self._units_until_done()

    # -- suspension

    async def _suspend(self, done: Suspended) -> TurnResult:
        """The last unit ended with calls that wait: commit it, say so, and let the session rest."""
        working, machine = self.working, cast("FlowMachine", self._machine)
        turn = working.turn
        self._units += 1
        await check_requests(self._core.store, working, done.requests)
        if self._publication is not None:
            usage = {model: one.usage for model, one in turn.usage.items()}
            self._shows(turn, await self._publication.accept(machine.parts(), usage, waits=True))
        suspend_turn(working, done.requests)
        result = self._closed = self._waits(turn)
        if self._publication is not None:
            await self._commit()
        return await self._rest(result)

    async def _rest(self, result: TurnResult) -> TurnResult:
        """Say that the run waits where there is a channel, and let the lease go; the turn record stays."""
        working, turn = self.working, self.working.turn
        if self._publication is not None:
            await self._publication.suspend()
        self._settle_inputs(turn, result)
        turn.key, turn.answers, turn.outs = None, (), ()
        working.head.status = "suspended"
        self._closed = result
        await self._commit(release=True, unit=self._publication is None)
        if self._stream.heard:
            self._stream.emit(TurnSuspended(result.pending))
        return result

    def _waits(self, turn: TurnRecord) -> TurnResult:
        working = self.working
        self.run_id, self.invocation_id = turn.run, turn.invocation
        return self._result(
            turn,
            success=True,
            session_id=self.session_id,
            current=working.current,
            status="suspended",
            pending=pending_of(turn),
        )

    async def _wake(self, rows: Sequence[InboxRow]) -> TurnResult | None:
        """The session waits for answers: take what there is, and go on with the run if that is all.

        Returns:
            The result, where this turn is for the run that waits; `None`: that run is to end before this turn begins,
            or, where nobody says anything, to be given up.

        Raises:
            SessionSuspendedError: It waits on, and what was said is no answer.
            UnknownRequestError: It waits on, and not for this answer.
        """
        given, working, turn = self._given, self.working, self.working.turn
        if given.recovery and any(row.kind == "cancel" and row.state == "new" for row in rows):
            self._take_rows(rows)
            if self._cancel is not None:
                await checkpoint_if_cancelled()
        left = len(waiting(turn))
        updates = take_answers(turn, rows, self._core.clock.time())
        for update in updates:
            working.consume(update)
        mine, key = given.recovery or given.answer in turn.answers, None
        published = self._published
        if given.message is not None and answer_by_message(
            turn, given.message, published or working.new_id(turn.visit.stage), shown=published is not None
        ):
            mine, key = True, given.key
            if key is not None:
                self._take_input(key)
        still = waiting(turn)
        if not still:
            return await self._recover(rows, answered=True, key=key) if mine else None
        if given.on_suspended == "abandon" and (given.recovery or not mine):
            return None
        if working.has_updates or len(still) < left:
            await self._commit(release=True, unit=False)
        else:
            await self._hold.give_up()
        if mine:
            return self._waits(turn)
        raise unknown_request(self.session_id, given.answer) if given.answer else suspended_error(turn, self.session_id)

    async def _go_on(self, key: str | None) -> None:
        """All answers are there: open the invocation that goes on with the turn."""
        await cast("FlowMachine", self._machine).build()
        go_on(self.working.turn, self.invocation_id, key)
        self.working.run_id = self.run_id = self.working.turn.run
        self.working.head.status = "running"
        await self._commit(unit=False)
        if self._publication is not None:
            await self._publication.resume()
        self._tell_started()

    async def _abandon(self, rows: Sequence[InboxRow]) -> TurnResult:
        """The run that waits ends without its answers: its calls get results that say so."""
        working, turn = self.working, self.working.turn
        error = TurnCancelledError("A new message came instead of the answers.", "superseded", run_id=turn.run)
        await self._stand()
        result = await self._roll_back(error, False, "superseded")
        assert result is not None
        for row in rows:
            if row.kind == "answer":
                working.consume(InboxUpdate(row.key, "done"))
        self._dismiss_cancels(rows)
        return await self._end(result)

    async def _stand(self) -> None:
        """Be the run that waits, to end it."""
        working, turn = self.working, self.working.turn
        self._machine = FlowMachine(self._given.definition, working)
        self.run_id, self.invocation_id = turn.run, turn.invocation
        self._publish(taken_over=False)

    async def _refuse_answer(self, request_id: str) -> None:
        """Nothing waits for an answer that was written down while a turn was at work."""
        await self._core.store.inbox_withdraw(self.session_id, request_id)
        await self._hold.give_up()
        raise unknown_request(self.session_id, request_id)

    async def _restore(self) -> bool:
        """Build the flow on the stored session. `False`: it wanted a fresh one, which is open now."""
        given, working = self._given, self.working
        machine = self._machine = FlowMachine(given.definition, working)
        head = working.head
        if "on_restore_session" in given.definition.hooks:
            document = json_copy(msgspec.to_builtins(head))
            restored = await machine.flow.on_restore_session(document)
            if restored is None:
                head.status = "aborted"
                working.log("info", "on_restore_session started a fresh session")
                await self._follow(head, set())
                return False
            _reshape(working, restored)
        await machine.build()
        machine.restored = True
        if given.config is not None and given.config != head.workflow.context.get("config"):
            working.log("warning", "a config on a later turn is ignored; the first turn's stays")
        return True

    def _open_record(self, *, fresh: bool) -> None:
        given, working = self._given, self.working
        message = given.message
        turn = TurnRecord(
            run=self.run_id,
            invocation=self.invocation_id,
            visit=VisitRecord(stage=working.current, fresh=fresh, crossing=fresh),
            key=given.key,
            parent=working.head.tip,
            published=self._published,
        )
        if given.key is not None:
            self._take_input(given.key)
            if message is not None:
                message = msgspec.structs.replace(message, id=hashlib.sha256(given.key.encode()).hexdigest()[:8])
        cast("FlowMachine", self._machine).open(turn, message)

    @property
    def _published(self) -> str | None:
        """Under which id the message is on this session's channel; what ended before has another channel."""
        return self._given.published if self.session_id == self._given.session_id else None

    def _take_input(self, key: str) -> None:
        """The input's row belongs to the turn from its opening commit on."""
        self.working.consume(InboxRow(key, "input", self._given.digest, "taken"))
        self.working.consume(InboxUpdate(key, "taken"))

    def _tell_started(self, *, recovered: bool = False) -> None:
        self._tell_begun()
        if self._stream.heard:
            flow = self._given.definition.id
            self._stream.emit(TurnStarted(self.session_id, self.run_id, self.invocation_id, flow, recovered))

    async def _stored(self, session: str) -> TurnResult | None:
        """The result of the same input, if it was given before and is done."""
        given = self._given
        row = await self._core.store.inbox_get(session, cast("str", given.answer or given.key))
        if row is None:
            return None
        if given.answer is None and not is_same(row, given):
            raise IdempotencyConflictError(
                "This idempotency key was used with another message or config: use a new key for a new input.",
                session_id=session,
            )
        return self._result_in(row, session) if row.state == "done" and row.result is not None else None

    def _result_in(self, row: InboxRow, session: str) -> TurnResult:
        """What another turn, or this one in another process, has left for this input."""
        self.session_id = session
        return TurnResult.from_json(msgspec.json.decode(cast("bytes", row.result)))

    # -- commits

    async def renew(self) -> None:
        """Extend the lease; the turn ends as `lost` if it is not ours any more."""
        if (why := await self._hold.renew()) is not None:
            self.cancel("lost", why)

    async def _commit(self, *, release: bool = False, unit: bool = True) -> None:
        """Everything since the last commit into the store; listeners are told if a unit is.

        A cancel that comes meanwhile is held back: it is honoured at the next await, with the unit stored.
        """
        working = self.working
        self._committing = True
        try:
            revision = await self._hold.commit(working, release=release)
        finally:
            self._committing = False
            if self._cancel is not None:
                self._scope.cancel()
        if unit and self._stream.heard:
            self._stream.emit(Committed(working.step_id, revision))

    # -- ends

    async def _close(self, done: Done) -> TurnResult:
        """The last unit is done: commit it, end the run, release the session."""
        working = self.working
        turn = working.turn
        self._units += 1
        result = self._result(
            turn,
            success=True,
            completed=working.completed,
            message=done.message,
            content_type=done.content_type,
            session_id=self.session_id,
            current=working.current,
            status=working.head.status,
        )
        if self._publication is not None:
            usage = {model: one.usage for model, one in turn.usage.items()}
            self._shows(turn, await self._publication.accept(cast("FlowMachine", self._machine).parts(), usage))
            await self._close_record(turn, result)
        return await self._end(result)

    async def _close_record(self, turn: TurnRecord, result: TurnResult) -> None:
        """From here on the turn's result stands, whoever says so on the channel."""
        turn.phase = "closing"
        turn.result = result.to_json()
        self._closed = result
        self.working.head.tip = turn.tip
        await self._commit(unit=result.success)

    async def _end(self, result: TurnResult) -> TurnResult:
        """End the run where there is a channel, and clear the turn record.

        The lease goes with it, unless there is something left to do.
        """
        working, turn = self.working, self.working.turn
        if self._publication is not None:
            await self._publication.end(run_reason(result), result.error.message if result.error else "")
        self._settle_inputs(turn, result)
        working.head.turn = None
        ended = result.status != "running"
        rules = cast("FlowMachine", self._machine).flow.memory.rules.values() if result.success and not ended else ()
        due = [rule for rule in rules if due_for_compaction(working, rule)]
        await self._commit(release=not due, unit=self._publication is None and result.success)
        stored = True
        if due:
            self._announce(result)
            stored = await self._compact(due)
        if stored and not ended and result.success:
            self._core.warm.put(self.session_id, working, self._hold.incarnation)
        return result

    async def _compact(self, due: Sequence[SummaryRule]) -> bool:
        """Under the lease, after the answer is out: nobody waits for it, and nothing of it fails the turn.

        Returns:
            Whether it is stored; what is in memory is the session only then.
        """
        try:
            await compact(self.working, due, lambda: self._core.lines.waiting(self.session_id))
            await self._hold.commit(self.working, release=True)
        except StepwellError as error:
            self._core.report("compaction was not stored", error, self.session_id)
            await self._hold.give_up()
            return False
        return True

    def _announce(self, result: TurnResult) -> None:
        """The turn is over for whoever waits for it."""
        if self.done.is_set():
            return
        self.result = result
        if self._stream.heard:
            self._stream.emit(TurnFinished(result))
        self._stream.close()
        self._tell_begun()
        self.done.set()

    def _settle_inputs(self, turn: TurnRecord, result: TurnResult) -> None:
        """The rows of what this turn answers get its result; an input whose turn failed for now may run again."""
        if turn.key is None and not (self._cancels or turn.answers or turn.steers):
            return
        working = self.working
        for key in self._cancels:
            working.consume(InboxUpdate(key, "done", b"true" if result.error else b"false"))
        keys = [*turn.answers, *(steer.key for steer in turn.steers)]
        if turn.key is not None:
            keys.append(turn.key)
        data = msgspec.json.encode(result)
        again = result.error is not None and result.error.retryable
        for key in keys:
            working.consume(InboxUpdate(key, "taken" if again and key == turn.key else "done", data))

    async def _failed(self, error: Exception) -> TurnResult:
        """Roll back to the last committed unit, give every open call a result, say why, release."""
        self.error = error
        working = self.working
        if isinstance(error, (StaleWriterError, SessionConflictError)):
            # Fenced out: whoever has the session now goes on from the last commit; nothing may be written here.
            self._hold.drop()
            return self._result_of(error)
        machine = cast("FlowMachine", self._machine)
        self._stream.blank()
        abort = False
        with CancelScope(shield=True) as scope:
            try:
                await machine.clean_up()
                abort = await machine.flow.on_turn_error(error) == "abort"
            except Exception as broken:  # noqa: BLE001 - the first error is the one that counts
                working.log("error", "clean-up or on_turn_error raised", {"error": type(broken).__name__})
            result = await self._roll_back(error, abort, None)
            # Without a channel what is left is one commit; else it may take its time, and recovery could do it too.
            scope.shield = self._publication is None
            return await self._end_failed(result, error)
        return self._result_of(error)

    async def _end_failed(self, result: TurnResult | None, error: Exception) -> TurnResult:
        if result is not None:
            return await self._end(result)
        await self._hold.give_up()
        return self._closed or self._result_of(error)

    async def _roll_back(self, error: Exception, abort: bool, kind: CancelKind | None) -> TurnResult | None:
        """Go back to what is committed, and close the turn from there.

        Returns:
            What the turn came to, to be ended; `None` where nothing is open.
        """
        working, machine, publication = self.working, cast("FlowMachine", self._machine), self._publication
        batch = machine.visit.batch if machine.visit else None
        reason = "cancelled" if kind else "failed"
        out = await publication.give_up(reason) if publication is not None else None
        await working.forget()
        turn = working.head.turn
        if turn is None:
            return None
        if publication is not None:
            publication.turn = turn
        if turn.phase == "closing":
            # It was committed, and only the answer was lost: that is what the turn came to.
            self.error = None
            return TurnResult.from_json(cast("JsonObject", turn.result))
        if turn.phase == "suspended":
            if self._closed is not None:
                # The same of a turn that was suspended; what is left to be said is said by whoever recovers it.
                self.error = None
                return None
            if kind is None and isinstance(error, StepwellError) and error.retryable:
                return None  # it could not go on for now: its answers are there, and whoever looks next goes on
            working.head.status = "running"
        if out is not None and any(out.step == one.step for one in turn.outs):
            out = None  # the same for its unit
        stage = turn.visit.stage
        results: list[ToolResult] = []
        for ns, history in working.histories.items():
            calls = history.open
            await working.journal.load(calls)
            for call in calls:
                results.append(self._result_of_call(call, batch, turn))
                working.add_message(ns, stage, results[-1])
            working.journal.settle(calls)
        failure = failure_of(error)
        working.log(
            "info" if kind else "error",
            f"turn cancelled ({kind})" if kind else "turn failed",
            {"code": failure.code, "run": self.run_id, "stage": stage},
        )
        if abort:
            working.head.status = "aborted"
        result = self._result_of(error, turn)
        if publication is not None:
            if results:
                parts = [result_part(one.call, one.outcome, one.content) for one in results]
                out = publication.unfinished(parts, reason)
            self._shows(turn, *turn.outs, out)
            await self._close_record(turn, result)
        return result

    def _shows(self, turn: TurnRecord, *outs: OutRecord | None) -> None:
        """Say in the record what is to be shown with the next commit."""
        turn.outs = [out for out in outs if out is not None]
        turn.shown = turn.shown or any(out.parts or out.start is not None for out in turn.outs)

    def _result_of_call(self, call: ToolCall, batch: Batch | None, turn: TurnRecord) -> ToolResult:
        """What a call came to when its turn ended; the staged writes of one that finished are applied."""
        ran = batch.finished.get(call.id) if batch else None
        if ran is not None:
            if ran.scope is not None:
                self.working.apply(ran.scope)
            return ran.result
        recorded = self.working.journal.recorded(call)
        state = recorded.state if recorded else None
        if recorded is not None and state == "done" and not isinstance(recorded.outcome, Suspend):
            if recorded.scope is not None:
                self.working.apply(recorded.scope)
            return ToolResult(call=call.id, name=call.name, content=recorded.content)
        if state in ("intent", "unknown"):
            return self._unknown(call)
        if (batch and call.id in batch.waiting) or any(one.call == call.id for one in turn.pending):
            text = "The turn ended before the answer came that this call waited for."
            return ToolResult(call=call.id, name=call.name, content={"error": text}, outcome="not_run")
        if batch is not None and call.id in batch.started:
            return self._unknown(call)
        return ToolResult(call=call.id, name=call.name, content=NOT_RUN, outcome="not_run")

    def _unknown(self, call: ToolCall) -> ToolResult:
        content = nobody_knows("The turn ended while this call was running")
        return ToolResult(call=call.id, name=call.name, content=content, outcome="unknown")

    def _result_of(self, error: Exception, turn: TurnRecord | None = None) -> TurnResult:
        known = self.working if self._attached and self.working.head.revision else None
        return self._result(
            turn,
            success=False,
            session_id=self.session_id if known or self._given.session_id else "",
            current=known.current if known else "",
            status=known.head.status if known else "running",
            error=failure_of(error),
            pending=pending_of(known.turn) if known and known.head.status == "suspended" else (),
        )

    def _result(self, turn: TurnRecord | None, **said: Any) -> TurnResult:
        """What every result says, however the turn ended."""
        return TurnResult(
            previous_session_id=self._previous,
            resumed=self._resumed,
            run_id=self.run_id,
            invocation_id=self.invocation_id,
            usage=turn.usage if turn else {},
            units=self._units,
            **said,
        )

    async def _cancelled(self) -> TurnResult:
        """The turn was cancelled: record it, unless somebody else is to go on with it."""
        kind, reason = self._cancel or ("shutdown", None)
        error = TurnCancelledError(
            f"The turn was cancelled ({kind}).", kind, reason, session_id=self.session_id or None, run_id=self.run_id
        )
        self.error = error
        grace = self._given.definition.cls.cancellation_grace
        with anyio.move_on_after(grace, shield=True):
            try:
                machine = self._machine
                if machine is not None:
                    await machine.clean_up()
                open_turn = self._attached and self.working.head.turn is not None
                if open_turn and self.working.turn.phase == "closing":
                    # What the turn came to is stored; what is left is said by whoever recovers it.
                    self.error = None
                    await self._hold.give_up()
                    return TurnResult.from_json(cast("JsonObject", self.working.turn.result))
                if open_turn and self.working.turn.phase == "suspended" and not self._cancels:
                    await self._hold.give_up()  # it waits on; where it had just begun to, whoever recovers it says so
                    if self._closed is None:
                        return self._result_of(error)
                    self.error = None
                    return self._closed
                if kind not in ("shutdown", "lost"):
                    if open_turn and self.working.turn.phase == "suspended":
                        await self._stand()
                    if open_turn and self._hold.held:
                        return await self._end_failed(await self._roll_back(error, False, kind), error)
                    if self._waiting is not None:
                        await self._waiting.leave(kind, reason)
                await self._hold.give_up()
            except Exception as broken:  # noqa: BLE001 - reported; the turn is over either way
                self._core.report("a cancelled turn could not be closed", broken, self.session_id)
        return self._result_of(error)


def run_reason(result: TurnResult) -> Literal["complete", "cancelled", "error"]:
    """How a run ends that came to this."""
    if result.error is None:
        return "complete"
    return "cancelled" if result.error.code == TurnCancelledError.code else "error"


def _reshape(working: Working, document: Any) -> None:
    """Take from `on_restore_session` what it may change."""
    head = working.head
    head.stages = msgspec.convert(json_copy(document.get("stages", {})), dict[str, StageRecord])
    head.workflow.context = json_copy(document.get("workflow", {}).get("context", {}))
    for ns in list(head.memories):
        if ns not in document.get("memories", {}):
            working.cut(ns, 0)
