"""One batch of tool calls: every call of an accepted reply is run and gets its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import anyio
import anyio.to_thread
import msgspec
from anyio import CancelScope

from stepwell.errors import ConflictingOutcomesError, HandlerError, InvalidOutcomeError, StepwellError, ToolTimeoutError
from stepwell.messages import JsonObject, JsonValue, ToolCall, ToolResult
from stepwell.outcomes import Outcome, Stay, Suspend, SuspendRequest
from stepwell.tools import ArgumentsError, Handler, ToolContext, ToolDefinition, ToolErrors

from ._host import CallScope, LoopHost

__all__ = ["Answer", "Batch", "BatchResult", "Ran", "Waiting", "requests_of", "verdict_of"]

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
        answer = self.answers.get(call.id)
        if answer is not None and not _goes_on(answer, call, found):
            return await self._answered(call, answer, found, after)
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
        context = self._context(call, timeout)
        try:
            arguments = handler.arguments(call, context)
        except ArgumentsError as error:
            return self._refuse(call, str(error))
        except Exception as error:  # noqa: BLE001 - a validator of the author's raised
            return self._failed(call, error, on_error)
        if answer is None and (request := handler.request(call)) is not None:
            return self._wait(Waiting(call, Suspend(request)))
        scope = host.open_call(call, after)
        self._start(call)
        value: Any = None
        try:
            value = await self._invoke(handler, arguments, scope, context, timeout, call.name)
            outcome, content = self._outcome(value, call.name)
        except Exception as error:  # noqa: BLE001 - recorded with the call; `run` raises it where that is asked for
            return self._failed(call, error, on_error, value)
        finally:
            scope.close()
        return self._ended(call, outcome, content, scope)

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
        except Exception as error:  # noqa: BLE001 - as in `_one`
            return self._failed(call, error, on_error, value)
        finally:
            scope.close()
        return self._ended(call, outcome, content, scope)

    async def _together(self, handler: Handler) -> None:
        """One handler for all calls: one outcome, one result each."""
        host = self.host
        first = self.calls[0]
        context = self._context(first, handler.timeout)
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
        scope = host.open_call(first, None)
        for call in self.calls:
            self._start(call)
        arguments = handler.batch_arguments(context)
        value: Any = None
        try:
            value = await self._invoke(handler, arguments, scope, context, handler.timeout, first.name, calls)
            outcome, content = self._outcome(value, first.name)
            if isinstance(outcome, Suspend):
                raise InvalidOutcomeError(
                    f"The @tools handler of {first.name} in stage {host.stage_id} returned suspend: a request belongs "
                    "to one call, so let a @tool handler of one of them ask.",
                    stage=host.stage_id,
                    tool=first.name,
                )
        except Exception as error:  # noqa: BLE001 - as in `_one`
            for index, call in enumerate(self.calls):
                self._failed(call, error, handler.on_error or host.tool_errors, None if index else value)
            return
        finally:
            scope.close()
        for index, call in enumerate(self.calls):
            result = host.result(call, content, "ok")
            # One outcome for all: the first call carries it, or what it attaches would count once per call.
            self._done(Ran(call, result, outcome, scope) if index == 0 else Ran(call, result, Stay()))

    def _context(self, call: ToolCall, timeout: float | None) -> ToolContext:
        host = self.host
        return ToolContext(
            call_id=call.id,
            idempotency_key=call.key,
            run_id=host.run_id,
            deadline=None if timeout is None else host.clock.monotonic() + timeout,
            progress=partial(host.observer.tool_progress, call),
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
                if timeout is None or context.deadline is None:
                    return await self._body(handler, body)
                # A scope, which a handler may shield itself from and cannot swallow: it is anybody's code.
                with CancelScope() as limit:
                    timer = self.host.clock.call_at(context.deadline, limit.cancel)
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

    def _failed(self, call: ToolCall, error: Exception, on_error: ToolErrors, value: Any = None) -> Ran:
        """A call that failed. Of what it returned, if it did, only the cleanup counts."""
        if isinstance(error, InvalidOutcomeError):
            on_error = "raise"
        text = f"The tool failed: {type(error).__name__}"
        if on_error == "report" and str(error):
            text += f": {error}"
        result = self.host.result(call, {"error": text}, "error")
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

    def _ended(self, call: ToolCall, outcome: Outcome, content: JsonValue, scope: CallScope) -> Ran | Waiting:
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
