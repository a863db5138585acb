"""The state machine of a flow's turn: `advance` runs exactly one unit.

All that a later unit needs is in the session's head (the turn record) and histories; the objects here only save
building them again. So recovery is this same code after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
from anyio.lowlevel import checkpoint_if_cancelled

from stepwell.errors import LogicLoopError, MigrationError
from stepwell.flow import (
    Again,
    Decided,
    Flow,
    FlowDefinition,
    LogicStep,
    Reply,
    Step,
    StepHost,
    TerminateSessionStep,
    Visit,
    Wait,
    as_message,
    attach,
    logic,
    settle,
)
from stepwell.loop import StreamMode, requests_of
from stepwell.messages import JsonObject, Message, ToolCall, UserMessage
from stepwell.outcomes import DirectTo, Finish, Go, SuspendRequest
from stepwell.sessions import SessionHead, TurnRecord, VisitRecord

from ._events import StageEntered
from ._shape import call_part, reasoning_part, request_part, result_part, text_part
from ._suspension import answers_to
from ._working import Working

__all__ = ["Done", "FlowMachine", "Suspended"]


class Done(msgspec.Struct, frozen=True):
    """The turn is over; what it answers."""

    message: str
    content_type: str


class Suspended(msgspec.Struct, frozen=True):
    """Calls wait for an answer each."""

    requests: Sequence[tuple[ToolCall, SuspendRequest]]


class FlowMachine:
    """One flow object on one session, for one turn.

    Args:
        definition: The flow.
        working: The session.
    """

    def __init__(self, definition: FlowDefinition, working: Working) -> None:
        self.definition = definition
        self.working = working
        self.flow: Flow = definition.cls()
        self.flow._runtime = working  # pyright: ignore[reportPrivateUsage]
        self.visit: Visit | None = None
        self.restored = False
        self.may_ask = True  # whether the next unit may be one that asks the model; else it runs its calls
        self._shown = cast("tuple[StreamMode, str, Decided]", None)

    async def build(self) -> None:
        """Let the flow set itself up and register its steps.

        Raises:
            FlowDefinitionError: The registry is wrong in this context.
            MigrationError: The cursor is on a stage that is gone.
        """
        if "init" in self.definition.hooks:
            await self.flow.init()
        self.flow._register()  # pyright: ignore[reportPrivateUsage]
        steps = self.definition.of(self.flow)
        head = self.working.head
        if head.workflow.current:
            self._adopt(head, steps)
        else:
            self.working.enter(self.flow._initial().id)  # pyright: ignore[reportPrivateUsage]
        self.working.executing = head.workflow.current
        head.workflow.model = self.flow.get_model_selection().to_json()
        for step in steps:
            if step._override is not None:  # pyright: ignore[reportPrivateUsage]
                step._keep_model()  # pyright: ignore[reportPrivateUsage]

    def _adopt(self, head: SessionHead, steps: Sequence[Step[Any, Any]]) -> None:
        """Bring the stage ids of a stored document to today's names, by alias."""
        step = self._known(head.workflow.current)
        if step is None:
            raise MigrationError(
                f"Session {head.id} stands on stage {head.workflow.current}, which {self.flow.id} no longer has: add "
                "the old id to the aliases of the stage that replaced it, or a migration.",
                session_id=head.id,
                flow=self.flow.id,
                stage=head.workflow.current,
            )
        head.workflow.current = step.id
        for known in steps:
            for name in known.aliases:
                if name in head.stages:
                    head.stages.setdefault(known.id, head.stages.pop(name))
                if name in head.memories and known.id not in head.memories and known.get_memory_space() == known.id:
                    # Messages stay where they are stored: the step goes on with its old namespace.
                    known.use_memory(name)
        if head.turn is not None and (visited := self._known(head.turn.visit.stage)) is not None:
            head.turn.visit.stage = visited.id

    def _known(self, name: str) -> Step[Any, Any] | None:
        return self.flow._find(name)  # pyright: ignore[reportPrivateUsage]

    def open(self, turn: TurnRecord, message: UserMessage | None) -> None:
        """Begin a turn: the user's message enters the memory of the cursor's step."""
        step = self.flow.get_step(self.working.current)
        self.working.head.turn = turn
        self.working.visit = turn.visit
        self.working.run_id = turn.run
        if message is not None:
            ns = step.get_memory_space()
            known = self.working.messages(ns)
            if message.id and known and known[-1].id.endswith(message.id):
                turn.input = known[-1].id  # the same input again, after a turn that failed: it is in history already
                return
            if message.id:
                suffix = message.id
                stage, at, _ = self.working.new_id(step.id).split("|")
                message = msgspec.structs.replace(message, id=f"{stage}|{at}|{suffix}")
            turn.input = self.working.add_message(ns, step.id, message).id

    @property
    def before_a_reply(self) -> bool:
        """Whether the next unit asks the model."""
        step = self.flow.get_step(self.working.turn.visit.stage)
        return not step.is_logic() and not self.working.open_calls(step.get_memory_space())

    def hear(self, message: UserMessage) -> UserMessage:
        """What was said meanwhile enters the memory of the step whose reply comes next."""
        step = self.flow.get_step(self.working.turn.visit.stage)
        return cast("UserMessage", self.working.add_message(step.get_memory_space(), step.id, message))

    # -- one unit

    async def advance(self) -> Done | Suspended | None:
        """Run one unit, up to but without its commit. `None`: there is another.

        Raises:
            Exception: The turn fails; everything since the last commit is to be rolled back.
        """
        working = self.working
        turn = working.head.turn
        assert turn is not None
        record = turn.visit
        step = self.flow.get_step(record.stage)
        working.visit = record
        working.executing = step.id
        hooks = self.definition.steps[type(step)].hooks  # one that is not overridden does nothing: it is not awaited
        working.step_id = f"{turn.invocation}-step-{turn.unit}"
        calls = working.open_calls(step.get_memory_space())
        kind = "logic" if step.is_logic() else "tools" if calls else "run" if "run" in hooks else "reply"
        mode = step.stream_mode or self.flow.stream_mode
        working.observer.unit(working.step_id, step.id, kind, mode)
        if self.restored:
            self.restored = False
            if "on_restore" in hooks:
                await step.on_restore()
        if record.crossing:
            await self._arrive(step, record)
        visit = None if kind == "logic" else self._visiting(step, record)
        if not record.started:
            record.started = True
            if "on_visit" in hooks:
                await step.on_visit(self._input(step))
        if visit is None:
            decided = await self._logic(step)
        else:
            turn.hops = 0
            if kind == "tools":
                if working.journal.unread:
                    await working.journal.load(calls)
                decided = await visit.tools(calls, answers_to(turn) if turn.pending else None)
            elif kind == "run":
                decided = await self._run(step, visit)
            else:
                decided = await visit.reply()
        if working.cancelled.is_set():
            await checkpoint_if_cancelled()
        done = await self._apply(step, decided)
        if calls:
            working.journal.settle(calls)
        self._show(mode, decided, done)
        self.may_ask = decided.accepted is None or not decided.accepted.calls
        turn.unit += 1
        if turn.pending:
            turn.pending, turn.deferred = (), ()  # the answers are used, and what waited behind the results is in place
        return done

    def _visiting(self, step: Step[Any, Any], record: VisitRecord) -> Visit:
        """The visit of a step that talks; what an earlier one has to clean up is handed on."""
        visit = self.visit
        if visit is None or visit.step is not step:
            cleanups = visit.cleanups if visit else []
            visit = self.visit = Visit(StepHost(step, self.definition, self.working), cleanups)
        visit.host.step_id = self.working.step_id
        visit.host.visit = record
        visit.batch = None
        return visit

    def _input(self, step: Step[Any, Any]) -> UserMessage | None:
        last = step.get_memory().last
        return last if isinstance(last, UserMessage) else None

    async def _arrive(self, step: Step[Any, Any], record: VisitRecord) -> None:
        """The first unit of a visit that began with a crossing."""
        record.crossing = False
        if record.fresh:
            record.fresh = False
            message = await step.on_start()
        else:
            handed = msgspec.convert(record.message, Message) if record.message else None
            record.message = None
            message = step.on_crossing(cast("Message | None", handed), record.prior)
        if message is not None:
            self.working.add_message(step.get_memory_space(), step.id, as_message(message))
        if self.working.observer.heard:
            self.working.observer.emit(StageEntered(step.id))

    async def _logic(self, step: Step[Any, Any]) -> Decided:
        turn = self.working.turn
        turn.hops += 1
        if turn.hops > self.flow.max_logic_hops:
            raise LogicLoopError(
                f"More than {self.flow.max_logic_hops} logic steps ran in a row, the last was {step.id}: let one of "
                "them lead to a step that talks, or raise max_logic_hops.",
                flow=self.flow.id,
                stage=step.id,
            )
        return logic(step, await cast("LogicStep", step).run_logic())

    async def _run(self, step: Step[Any, Any], visit: Visit) -> Decided:
        """A step that replaced `run`: the whole visit is this unit."""
        step._visit = visit  # pyright: ignore[reportPrivateUsage]
        said = self._input(step)
        return visit.returned(await step.run(said.text if said else None))

    # -- what a unit came to

    async def _apply(self, step: Step[Any, Any], decided: Decided) -> Done | Suspended | None:
        """Apply a decision in the order of the design: transition, prompt, state, content type, results, message."""
        outcome = decided.decision
        if type(outcome) is Again:
            settle(self.working, step, decided)
            return None
        if isinstance(outcome, Wait):
            settle(self.working, step, decided)
            return Suspended(outcome.requests)
        target = self.flow.get_step(outcome.target) if isinstance(outcome, (Go, DirectTo)) else None
        if isinstance(outcome, Finish):
            await step.on_exit()
            self.working.mark_completed()
        elif target is not None and target is not step:
            await step.on_exit()
            self.working.enter(target.id)
            await target.on_enter()
        elif isinstance(outcome, Go) and step.is_logic():
            raise LogicLoopError(
                f"{step.id} routes to itself: a logic step leads to another one.", flow=self.flow.id, stage=step.id
            )
        there = target or step
        attached = decided.outcome
        if attached is not None:
            attach(self.working, there.id, attached)
        settle(self.working, step, decided)
        message = as_message(attached.message) if attached is not None and attached.message is not None else None
        if isinstance(outcome, Go) and there is not step:
            self._arrival(step, there, outcome, message)
        elif message is not None:
            self.working.add_message(there.get_memory_space(), there.id, message)
        match outcome:
            case Go():
                return None
            case Reply():
                return Done(outcome.text, outcome.content_type or self._type(step))
            case DirectTo() | Finish():
                text = outcome.content if isinstance(outcome.content, str) else decided.shown
                return Done(text, outcome.content_type or self._type(step))

    def _type(self, step: Step[Any, Any]) -> str:
        return step._content_type or self.working.turn.visit.content_type or "text/plain"  # pyright: ignore[reportPrivateUsage]

    def _arrival(self, step: Step[Any, Any], target: Step[Any, Any], outcome: Go, message: Message | None) -> None:
        content_type = outcome.content_type
        if content_type is None and isinstance(target, TerminateSessionStep):
            content_type = self._type(step)
        if message is not None and not message.id:
            message = msgspec.structs.replace(message, id=self.working.new_id(target.id))
        self.working.turn.visit = VisitRecord(
            stage=target.id,
            prior=step.id,
            crossing=True,
            message=msgspec.to_builtins(message) if message else None,
            content_type=content_type,
        )

    def _show(self, mode: StreamMode, decided: Decided, done: Done | Suspended | None) -> None:
        """What the unit shows from now on; a stage that is `off` shows only the turn's final message."""
        passing = "" if mode == "off" else decided.shown
        shown = done.message if type(done) is Done else passing
        self.working.observer.settle(shown)
        self._shown = mode, shown, decided

    def parts(self) -> list[JsonObject]:
        """All that the unit shows, in the order of a conversation: what was thought, said, called, and came of it."""
        mode, shown, decided = self._shown
        said = [text_part(shown)] if shown else []
        if mode == "off":
            return said
        results = [result_part(result.call, result.outcome, result.content) for result in decided.results]
        message = decided.accepted
        if message is None:
            waiting = decided.decision.requests if isinstance(decided.decision, Wait) else ()
            # What a tool asks for by itself was shown with the reply.
            return results + said + [request_part(call.id, one) for call, one in waiting if not self._asked(call, one)]
        thought = [reasoning_part(part.text) for part in message.reasoning]
        called = [call_part(call) for call in message.calls]
        if called and self.visit is not None:
            requests = requests_of(self.visit.host, message.calls)
            called += [request_part(call, one) for call, one in requests.items()]
        return [*thought, *said, *called, *results]

    def _asked(self, call: ToolCall, request: SuspendRequest) -> bool:
        found = self.visit.host.handler(call.name) if self.visit is not None else None
        asked = found[0].request(call) if found is not None else None
        return asked is not None and asked.id == request.id

    async def clean_up(self) -> None:
        """Await what tool handlers asked for, on every path."""
        if self.visit is not None and self.visit.cleanups:
            await self.visit.clean_up()
