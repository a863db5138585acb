"""One batch of tool calls: every call of an accepted reply is run and gets its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope
from anyio.lowlevel import checkpoint_if_cancelled

from stepwell.errors import (
    ConflictingOutcomesError,
    HandlerError,
    InvalidOutcomeError,
    NotDone,
    RaceError,
    StepwellError,
    StoreError,
    ToolTimeoutError,
)
from stepwell.messages import JsonObject, JsonValue, ToolCall, ToolResult
from stepwell.outcomes import Outcome, Stay, Suspend, SuspendRequest
from stepwell.tools import ArgumentsError, Handler, ToolContext, ToolDefinition, ToolErrors, request_id

from ._host import CallScope, LoopHost, Recorded

__all__ = [
    "NOT_RUN",
    "Answer",
    "Batch",
    "BatchResult",
    "Ran",
    "Waiting",
    "nobody_knows",
    "requests_of",
    "verdict_of",
]

NOT_RUN: JsonValue = {"error": "The turn ended before this call was run."}

_DID_IT_HAPPEN = "This call was interrupted, and nobody knows whether it had its effect. What came of it?"

_Found: TypeAlias = tuple[Handler, ToolDefinition | None] | None


class Ran(msgspec.Struct):
    """A call that has its result.

    Attributes:
        call: The call.
        result: Its result.
        outcome: What the handler returned.
        scope: Its staged writes, `None` where there are none to apply.
        error: What it raised, if that fails the turn.
    """

    call: ToolCall
    result: ToolResult
    outcome: Outcome
    scope: CallScope | None = None
    error: Exception | None = None


class Waiting(msgspec.Struct):
    """A call that has no result yet: it waits for an answer.

    Attributes:
        call: The call.
        outcome: What its handler returned, or what its tool asks for before the handler runs.
        scope: Its staged writes, `None` where the handler did not run.
        error: Never.
    """

    call: ToolCall
    outcome: Suspend
    scope: CallScope | None = None
    error: None = None


class Answer(msgspec.Struct, frozen=True):
    """What came of a request that a call waited for. `expired`: nobody answered in time."""

    request: SuspendRequest
    value: JsonValue = None
    expired: bool = False


class BatchResult(msgspec.Struct, frozen=True):
    """All calls, in the reply's order, and the outcome that is applied (`Stay` if none says otherwise)."""

    ran: Sequence[Ran]
    outcome: Outcome
    waiting: Sequence[Waiting] = ()


def requests_of(host: LoopHost, calls: Sequence[ToolCall]) -> Mapping[str, SuspendRequest]:
    """What calls of an accepted reply are going to wait for before they run, by call, where their tools say so."""
    if host.batch_handler(calls) is not None:
        return {}
    found: dict[str, SuspendRequest] = {}
    for call in calls:
        who = host.handler(call.name)
        request = who[0].request(call) if who is not None else None
        if who is not None and request is not None and who[0].accepts(call):
            found[call.id] = request
    return found


class Batch(msgspec.Struct):
    """Runs the calls of one reply.

    `started`, `finished` and `waiting` grow as calls begin and end and stay readable when the batch fails or is
    cancelled: what finished is recorded either way.

    With `answers` (by call) it goes on with calls that were suspended.
    """

    host: LoopHost
    calls: Sequence[ToolCall]
    answers: Mapping[str, Answer] = {}
    finished: dict[str, Ran] = {}
    waiting: dict[str, Waiting] = {}
    started: set[str] = set()

    async def run(self) -> BatchResult:
        """Run every call.

        Raises:
            ConflictingOutcomesError: Two calls want different things.
            InvalidOutcomeError: A handler returned what is not legal.
            Exception: What a handler raised, after its siblings ended (in order: those that had begun).
        """
        host = self.host
        # Those that are left of a batch are no set of tools that belong together.
        handler = None if self.answers else host.batch_handler(self.calls)
        if handler is not None:
            await self._together(handler)
        else:
            # What is exposed is the state before the batch, whatever a handler of it changes.
            found = [(call, host.handler(call.name)) for call in self.calls]
            if host.parallel_tools and len(found) > 1:
                async with anyio.create_task_group() as group:
                    for call, who in found:
                        group.start_soon(self._one, call, who, None)
            else:
                after: CallScope | None = None
                for call, who in found:
                    one = await self._one(call, who, after)
                    if one.error is not None:
                        break
                    after = one.scope or after
        ran = [self.finished[call.id] for call in self.calls if call.id in self.finished]
        for entry in ran:
            if entry.error is not None:
                raise entry.error
        if not self.waiting:
            return BatchResult(ran, self._choose(ran))
        waiting = [self.waiting[call.id] for call in self.calls if call.id in self.waiting]
        chosen = self._choose([*ran, *waiting])
        return BatchResult(ran, Stay() if isinstance(chosen, Suspend) else chosen, waiting)

    def _choose(self, ended: Sequence[Ran | Waiting]) -> Outcome:
        """The first outcome that is not `stay`; a second, different one is a conflict. Any number may suspend."""
        chosen: Ran | Waiting | None = None
        for entry in ended:
            if type(entry.outcome) is Stay:
                continue
            if chosen is None:
                chosen = entry
            elif isinstance(entry.outcome, Suspend) and isinstance(chosen.outcome, Suspend):
                continue
            elif entry.outcome.route != chosen.outcome.route:
                raise ConflictingOutcomesError(
                    f"Tools {chosen.call.name} and {entry.call.name} of one reply of stage {self.host.stage_id} "
                    "returned different outcomes: let one @tools handler decide for both.",
                    stage=self.host.stage_id,
                    tool=entry.call.name,
                )
        return chosen.outcome if chosen else Stay()

    # -- one call

    async def _one(self, call: ToolCall, found: _Found, after: CallScope | None) -> Ran | Waiting:
        host = self.host
        answer = self.answers.get(call.id) if self.answers else None
        if answer is not None and not _goes_on(answer, call, found):
            return await self._answered(call, answer, found, after)
        before = host.journal.recorded(call, after)
        if before is not None and (ran := self._known(call, before, found[0] if found else None)) is not None:
            return ran
        if found is None:
            if host.exposes(call.name):
                # A set of tools that one handler serves: the model called only some of them, or others besides.
                why = f"{call.name} only runs together with the tools it belongs to, in one reply and without others."
                return self._refuse(call, why)
            host.observer.warn("a tool that is not exposed was called", {"tool": call.name, "stage": host.stage_id})
            return self._refuse(call, f"There is no tool {call.name} here.")
        handler, definition = found
        on_error = handler.on_error or (definition.on_error if definition else None) or host.tool_errors
        timeout = handler.timeout or (definition.timeout if definition else None)
        context = self._context(call, before)
        try:
            arguments = handler.arguments(call, context)
        except ArgumentsError as error:
            return self._refuse(call, str(error))
        except Exception as error:  # noqa: BLE001 - a validator of the author's raised
            return self._failed(call, error, on_error)
        if handler.asks is not None and answer is None and (request := handler.request(call)) is not None:
            return self._wait(Waiting(call, Suspend(request)))
        return await self._perform((call,), handler, arguments, context, timeout, on_error, after)

    async def _answered(self, call: ToolCall, answer: Answer, found: _Found, after: CallScope | None) -> Ran | Waiting:
        """A call that waited: its answer gives the result, and the handler does not run (again)."""
        host = self.host
        request = answer.request
        if _asked_first(answer, call, found) and (answer.expired or request.kind == "approval"):
            content = {"expired": True} if answer.expired else _denial(answer.value)
            return self._done(Ran(call, host.result(call, content, "not_run"), Stay()))
        if answer.expired:
            return self._done(Ran(call, host.result(call, {"expired": True}, "ok"), Stay()))
        handler, definition = found or (None, None)
        on_error = (handler and handler.on_error) or (definition and definition.on_error) or host.tool_errors
        scope = host.open_call(call, after)
        self._start(call)
        value: Any = None
        try:
            with scope.active():
                value = await host.on_answer(request, answer.value)
            outcome, content = self._outcome(value, call.name)
        except Exception as error:  # noqa: BLE001 - as in `_perform`
            return self._failed(call, error, on_error, value, effect=bool(handler and handler.on_unknown))
        finally:
            scope.close()
        return self._ended(call, outcome, content, scope)

    async def _perform(
        self,
        calls: Sequence[ToolCall],
        handler: Handler,
        arguments: Mapping[str, Any],
        context: ToolContext,
        timeout: float | None,
        on_error: ToolErrors,
        after: CallScope | None,
        given: Sequence[ToolCall] | None = None,
    ) -> Ran | Waiting:
        """Run a body for one call, or for all of a set (`given`: with their arguments checked), whose first it is then.

        An effect is on disk before it begins, and its end before anything else happens.
        """
        host, call, attempt = self.host, calls[0], context.attempt
        effect = handler.on_unknown is not None
        if host.cancelled.is_set():
            await checkpoint_if_cancelled()  # the call before may have shielded itself
        if effect:
            try:
                await self._intend(calls, attempt)
            except (RaceError, StoreError) as error:
                before = host.journal.recorded(call)
                begun = before is not None and before.state != "refused"  # in another process, and may have happened
                result = self._unknown(call) if begun else host.result(call, NOT_RUN, "not_run")
                return self._done(Ran(call, result, Stay(), None, error))
        scope = host.open_call(call, after)
        for one in calls:
            self._start(one)
        value: Any = None
        try:
            value = await self._invoke(handler, arguments, scope, context, timeout, call.name, given)
            outcome, content = self._outcome(value, call.name)
            if given is not None and isinstance(outcome, Suspend):
                raise InvalidOutcomeError(
                    f"The @tools handler of {call.name} in stage {host.stage_id} returned suspend: a request belongs "
                    "to one call, so let a @tool handler of one of them ask.",
                    stage=host.stage_id,
                    tool=call.name,
                )
        except BaseException as error:  # recorded with the call; `run` raises it where that is asked for
            if effect:
                state = "refused" if isinstance(error, NotDone) else "unknown"
                await host.journal.ended(calls, Recorded(state, attempt))
            if not isinstance(error, Exception):
                raise
            return self._failed(call, error, on_error, value, effect=effect)
        finally:
            scope.close()
        # Known from here on, also to whoever closes the turn if it is cancelled meanwhile.
        ended = self._ended(call, outcome, content, scope)
        if effect:
            await host.journal.ended(calls, Recorded("done", attempt, content, outcome, scope))
        return ended

    async def _intend(self, calls: Sequence[ToolCall], attempt: int) -> None:
        """Say that an effect is about to run; then nothing but its body may come."""
        journal = self.host.journal
        before = journal.recorded(calls[0])
        await journal.intend(calls, attempt)
        if self.host.cancelled.is_set():
            try:
                await checkpoint_if_cancelled()
            except BaseException:
                await journal.ended(calls, before or Recorded("refused"))
                raise

    def _known(self, call: ToolCall, before: Recorded, handler: Handler | None) -> Ran | Waiting | None:
        """What came of an effect that was begun before, perhaps by a process that died; `None`: it runs (again)."""
        if before.state == "done":
            return self._ended(call, before.outcome, before.content, before.scope)
        policy = (handler.on_unknown if handler else None) or "fail"
        if before.state == "refused" or policy == "retry":
            return None
        if policy == "ask":
            payload = {"tool": call.name, "args": call.args, "question": _DID_IT_HAPPEN}
            return self._wait(Waiting(call, Suspend(SuspendRequest("question", payload, id=request_id(call, "?")))))
        return self._done(Ran(call, self._unknown(call), Stay()))

    def _unknown(self, call: ToolCall) -> ToolResult:
        return self.host.result(call, nobody_knows("This call was interrupted"), "unknown")

    async def _together(self, handler: Handler) -> None:
        """One handler for all calls: one outcome, one result each."""
        await self._first(handler)
        first = self.finished[self.calls[0].id].result
        for call in self.calls:
            if call.id not in self.finished:
                # One outcome for all: the first call carries it, or what it attaches would count once per call.
                self._done(Ran(call, self.host.result(call, first.content, first.outcome), Stay()))

    async def _first(self, handler: Handler) -> None:
        """What the first call of a set came to, and with it all others."""
        host = self.host
        first = self.calls[0]
        before = host.journal.recorded(first)
        if before is not None and self._known(first, before, handler) is not None:
            return
        context = self._context(first, before)
        calls: list[ToolCall] = []
        for call in self.calls:
            single = host.handler(call.name)
            try:
                if single is None:
                    calls.append(handler.batch_call(call))
                else:
                    calls.append(_with_args(call, single[0].arguments(call, context)))
            except ArgumentsError as error:
                self._refuse(call, str(error))
        if len(calls) < len(self.calls):
            # The handler expects all of them: the valid ones are not run, so that the model can ask for all again.
            for call in calls:
                self._refuse(call, "Not run: another call of the same reply has wrong arguments.")
            return
        arguments = handler.batch_arguments(context)
        on_error = handler.on_error or host.tool_errors
        await self._perform(self.calls, handler, arguments, context, handler.timeout, on_error, None, calls)

    def _context(self, call: ToolCall, before: Recorded | None) -> ToolContext:
        return ToolContext(
            call_id=call.id,
            idempotency_key=call.key,
            run_id=self.host.run_id,
            attempt=1 if before is None else before.attempt + 1,
            progress=partial(self.host.observer.tool_progress, call),
        )

    async def _invoke(
        self,
        handler: Handler,
        arguments: Mapping[str, Any],
        scope: CallScope,
        context: ToolContext,
        timeout: float | None,
        name: str,
        calls: Sequence[ToolCall] | None = None,
    ) -> Any:
        """Run the body, in the loop or in a thread, under its deadline."""
        body: Callable[..., Any] = partial(self.host.bound(handler), *(() if calls is None else (calls,)), **arguments)
        try:
            with scope.active():
                if timeout is None:
                    return await self._body(handler, body)
                # Its time begins here, and not while an effect's intent is on its way to the disk.
                deadline = self.host.clock.monotonic() + timeout
                msgspec.structs.force_setattr(context, "deadline", deadline)
                # A scope, which a handler may shield itself from and cannot swallow: it is anybody's code.
                with CancelScope() as limit:
                    timer = self.host.clock.call_at(deadline, limit.cancel)
                    try:
                        return await self._body(handler, body)
                    finally:
                        timer.cancel()
            # The scope swallowed the cancellation it caused, and no other.
            raise ToolTimeoutError(
                f"Tool {name} of stage {self.host.stage_id} did not finish within {timeout:g} s.",
                stage=self.host.stage_id,
                tool=name,
            )
        except BaseException:
            context.cancelled.set()
            raise

    def _body(self, handler: Handler, body: Callable[..., Any]) -> Awaitable[Any]:
        # A thread cannot be stopped: it is left alone with its `cancelled` event; its scope refuses late writes.
        return body() if handler.is_async else anyio.to_thread.run_sync(body, abandon_on_cancel=True)

    # -- results

    def _outcome(self, value: Any, name: str) -> tuple[Outcome, JsonValue]:
        """What the returned value means, and the call's result for the model."""
        outcome = self.host.outcome(value, name)
        return outcome, "ok" if outcome.feedback is None else outcome.feedback

    def _failed(
        self, call: ToolCall, error: Exception, on_error: ToolErrors, value: Any = None, *, effect: bool = False
    ) -> Ran:
        """A call that failed. Of what it returned, if it did, only the cleanup counts."""
        if isinstance(error, NotDone):
            content = {"error": f"Nothing was done: {error}"}
            return self._done(Ran(call, self.host.result(call, content, "not_run"), Stay()))
        if isinstance(error, InvalidOutcomeError):
            on_error = "raise"
        text = f"The tool failed: {type(error).__name__}"
        if on_error == "report" and str(error):
            text += f": {error}"
        content = nobody_knows(text) if effect else {"error": text}
        result = self.host.result(call, content, "unknown" if effect else "error")
        raised: Exception | None = None
        if on_error == "raise":
            raised = error if isinstance(error, StepwellError) else self._wrapped(call, error)
        outcome = Stay(cleanup=value.cleanup) if isinstance(value, Outcome) else Stay()
        return self._done(Ran(call, result, outcome, None, raised))

    def _wrapped(self, call: ToolCall, error: Exception) -> HandlerError:
        wrapped = HandlerError(
            f"The handler of tool {call.name} in stage {self.host.stage_id} raised {type(error).__name__}: see its "
            'traceback in the log; on_error="report" would tell the model instead.',
            stage=self.host.stage_id,
            tool=call.name,
        )
        wrapped.__cause__ = error
        return wrapped

    def _refuse(self, call: ToolCall, why: str) -> Ran:
        """The body never starts; the model is told why."""
        return self._done(Ran(call, self.host.result(call, {"accepted": False, "error": why}, "error"), Stay()))

    def _start(self, call: ToolCall) -> None:
        self.started.add(call.id)
        self.host.observer.tool_started(call)

    def _ended(self, call: ToolCall, outcome: Outcome, content: JsonValue, scope: CallScope | None) -> Ran | Waiting:
        if isinstance(outcome, Suspend):
            return self._wait(Waiting(call, outcome, scope))
        return self._done(Ran(call, self.host.result(call, content, "ok"), outcome, scope))

    def _wait(self, waiting: Waiting) -> Waiting:
        self.waiting[waiting.call.id] = waiting
        return waiting

    def _done(self, ran: Ran) -> Ran:
        self.finished[ran.call.id] = ran
        self.host.observer.tool_finished(ran.call, ran.result)
        return ran


def nobody_knows(why: str) -> JsonObject:
    """What the model is told of a call that may have had its effect, or not: never that it may try again."""
    return {"error": f"{why.removesuffix('.')}. Whether it had an effect is unknown. Do not repeat it."}


def _with_args(call: ToolCall, values: Mapping[str, Any]) -> ToolCall:
    """The call with validated arguments."""
    return ToolCall(call.id, call.name, {k: v for k, v in values.items() if not isinstance(v, ToolContext)}, call.key)


def _asked_first(answer: Answer, call: ToolCall, found: _Found) -> bool:
    """Whether the tool itself asked, before its handler ran; else the handler did."""
    asked = found[0].request(call) if found is not None else None
    return asked is not None and asked.id == answer.request.id


def _goes_on(answer: Answer, call: ToolCall, found: _Found) -> bool:
    """Whether a call waited for an approval, and has it: now its handler runs."""
    given = not answer.expired and answer.request.kind == "approval" and (verdict_of(answer.value) or (False,))[0]
    return given and _asked_first(answer, call, found)


def verdict_of(value: JsonValue) -> tuple[bool, str | None] | None:
    """Whether an answer approves, and why (not); `None`: it is no answer to an approval."""
    if not isinstance(value, dict):
        return (value, None) if isinstance(value, bool) else None
    given = cast("JsonObject", value)
    approved, reason = given.get("approved"), given.get("reason")
    return (approved, reason) if isinstance(approved, bool) and isinstance(reason, str | None) else None


def _denial(value: JsonValue) -> JsonValue:
    """What the model is told of a call that was not approved."""
    _, reason = verdict_of(value) or (False, None)
    return {"approved": False, "reason": reason} if reason else {"approved": False}
