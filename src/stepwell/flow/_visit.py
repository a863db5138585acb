"""One visit: rounds and tool batches of a step, unit by unit, until it replies or routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import msgspec

from stepwell.errors import InvalidOutcomeError
from stepwell.flow._host import StepHost
from stepwell.flow._returned import as_message, attach, checked, json_text
from stepwell.flow._runtime import UnitRuntime
from stepwell.flow._step import Step
from stepwell.loop import Accepted, Answer, Batch, Ran, Terminal, Waiting, run_round
from stepwell.messages import AssistantMessage, DirectMessage, JsonValue, Message, ToolCall, ToolResult, UserMessage
from stepwell.models import Candidate, StopReason
from stepwell.outcomes import Cleanup, Direct, DirectTo, Finish, Go, Outcome, Stay, Suspend, SuspendRequest

__all__ = ["Again", "Decided", "Decision", "Reply", "Visit", "Wait", "conclude", "logic", "settle"]


@final
class Again(msgspec.Struct, frozen=True):
    """The visit goes on with another unit; `shown` is what this one shows."""

    shown: str = ""


class Wait(msgspec.Struct, frozen=True):
    """Calls wait for an answer each: the run is suspended. What else the unit did stands."""

    requests: Sequence[tuple[ToolCall, SuspendRequest]]


class Reply(msgspec.Struct, frozen=True):
    """The stage answered the person."""

    text: str
    content_type: str | None = None


Decision: TypeAlias = Again | Wait | Reply | Go | DirectTo | Finish


class Decided(msgspec.Struct):
    """What a unit came to.

    Attributes:
        decision: What happens next.
        shown: What the unit shows, whole.
        results: Tool results that are recorded after the transition.
        attachments: Model-visible messages behind them.
        answer: What code answers instead of the model, behind those.
        ns: Where `answer` is recorded, if not with the stage.
        here: The outcome behind a `Reply`: what it attaches belongs to the stage itself.
        reply: Id of the stored message that says what is shown, if there is one.
        accepted: The accepted reply that this comes from, if it is one: its reasoning and calls are shown too.
    """

    decision: Decision
    shown: str = ""
    results: Sequence[ToolResult] = ()
    attachments: Sequence[Message | str] = ()
    answer: DirectMessage | None = None
    ns: str | None = None
    here: Direct | None = None
    reply: str | None = None
    accepted: AssistantMessage | None = None

    @property
    def outcome(self) -> Outcome | None:
        """The outcome whose attachments are to be applied."""
        return self.decision if isinstance(self.decision, Outcome) else self.here


class Visit:
    """Runs the units of one visit of `host.step`.

    Args:
        host: The step.
        cleanups: What handlers asked to be awaited; those of an earlier visit of the turn, whose attachments no model
            has seen yet.

    Attributes:
        batch: Stays readable when a unit fails.
    """

    def __init__(self, host: StepHost, cleanups: list[Cleanup]) -> None:
        self.host = host
        self.step = host.step
        self.runtime = host.runtime
        self.batch: Batch | None = None
        self.cleanups = cleanups
        self._routed: Decided | None = None
        self._unit = ""
        self._calls = 0

    # -- a model's reply

    async def reply(self) -> Decided:
        """One round: a reply with all its attempts, and what the stage makes of it."""
        result = await run_round(self.host)
        if self.cleanups:
            await self.clean_up()
        if type(result) is Terminal:
            return self._terminal(result)
        if result.silent:
            return await self._responded(result.candidate, None)
        message = self._message(result)
        self.runtime.add_message(self.host.ns, self.step.id, message)
        if message.truncated:
            self.host.observer.warn("a reply was cut off at the output limit", {"stage": self.step.id})
        if not message.calls:
            return await self._responded(result.candidate, message)
        shown = message.text if self.host.stream_mode != "off" else ""
        if result.cut:
            refused = "The call was cut off or malformed, and did not run."
            results = [self.host.result(c, {"accepted": False, "error": refused}, "not_run") for c in message.calls]
            return Decided(Again(), shown, results, accepted=message)
        return Decided(Again(), shown, accepted=message)

    def _message(self, accepted: Accepted) -> AssistantMessage:
        """The record of an accepted reply."""
        candidate = accepted.candidate
        return AssistantMessage(
            id=self.runtime.new_id(self.step.id),
            text=candidate.text,
            reasoning=candidate.reasoning,
            calls=self._keyed(candidate.tool_calls) if candidate.tool_calls else (),
            files=candidate.files,
            model=accepted.selection.id,
            truncated=candidate.stop is StopReason.TRUNCATED,
            provider_data=candidate.provider_data,
        )

    def _keyed(self, proposed: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls with ids that differ, and keys that are unique for ever."""
        seen: set[str] = set()
        calls: list[ToolCall] = []
        if self._unit != self.host.step_id:
            self._unit, self._calls = self.host.step_id, 0
        first = self._calls  # a unit that is a whole visit has several replies with calls
        self._calls += len(proposed)
        for index, call in enumerate(proposed, first):
            call_id = call.id
            if not call_id or len(call_id) > 512 or call_id in seen:
                call_id = f"call-{self.host.step_id[-12:]}-{index}"
            seen.add(call_id)
            calls.append(ToolCall(call_id, call.name, call.args, f"{self.host.step_id}::{index}"))
        return tuple(calls)

    async def _responded(self, candidate: Candidate, message: AssistantMessage | None) -> Decided:
        """Ask `on_response` and apply what it says about the text."""
        built = self.host.built
        parsed = candidate.object if built.output is not None else None
        default = candidate.text if parsed is None else json_text(parsed)
        value: Any = None
        if "on_response" in built.hooks:
            result: Any = None if message is None else candidate.text if parsed is None else parsed
            value = checked(self.step, "on_response", await self.step.on_response(result))
            value = None if value == default else value
        kept = message.id if message else None
        match value:
            case None:
                reply = Reply(default, None if parsed is None else "application/json")
                return Decided(reply, default, reply=kept, accepted=message)
            case Go():
                return Decided(value, default, reply=kept, accepted=message)
            case DirectTo(content=None) | Finish(content=None):
                value = msgspec.structs.replace(value, content=default)
                return Decided(value, default, reply=kept, accepted=message)
            case _:
                return self._instead(self._answered(value), kept)

    def _answered(self, value: Any) -> Decided:
        """Text, or an outcome with content, as code's answer."""
        if isinstance(value, str):
            return Decided(Reply(value), value, answer=_direct(value, None))
        text = value.content or ""
        decision = Reply(text, value.content_type) if isinstance(value, Direct) else value
        here = value if isinstance(value, Direct) else None
        return Decided(decision, text, answer=_direct(text, value.content_type), here=here)

    def _instead(self, decided: Decided, kept: str | None) -> Decided:
        """Put code's answer where the model's is stored, in this unit; otherwise it is appended."""
        if decided.answer is not None and kept is not None:
            answer = msgspec.structs.replace(decided.answer, id=kept)
            if self.runtime.replace(self.host.ns, answer):
                decided.answer, decided.reply = None, kept
        return decided

    def _terminal(self, terminal: Terminal) -> Decided:
        """A failure hook decided: its text or outcome, under the same step, so it replaces what was shown."""
        value = checked(self.step, terminal.hook, terminal.value)
        return self._decided(value)

    def _decided(self, value: Any) -> Decided:
        return Decided(value) if isinstance(value, Go) else self._answered(value)

    # -- a batch of tool calls

    async def tools(self, calls: Sequence[ToolCall], answers: Mapping[str, Answer] | None = None) -> Decided:
        """Run the calls of the accepted reply; writes are applied in call order, results follow the transition."""
        self.batch = Batch(self.host, calls, answers or {})
        try:
            done = await self.batch.run()
        finally:
            for ran in (*self.batch.finished.values(), *self.batch.waiting.values()):
                self.cleanups.extend(ran.outcome.cleanup)
        ended: Sequence[Ran | Waiting] = done.ran
        if done.waiting:
            order = {call.id: at for at, call in enumerate(calls)}
            ended = sorted([*done.ran, *done.waiting], key=lambda one: order[one.call.id])
        for one in ended:
            if one.scope is not None:
                self.runtime.apply(one.scope)
            if isinstance(one.outcome, Stay | Suspend):
                conclude(self.runtime, self.step, one.outcome)
        if done.waiting:
            decided = Decided(Wait([(one.call, one.outcome.request) for one in done.waiting]))
        else:
            decided = Decided(Again()) if isinstance(done.outcome, Stay) else self._decided(done.outcome)
        decided.results = [ran.result for ran in done.ran]
        decided.attachments = [message for one in ended for message in one.outcome.messages]
        return decided

    async def clean_up(self) -> None:
        """Await what handlers asked for, all of it; on every path.

        Raises:
            Exception: The first that one of them raised, after the others.
        """
        first: Exception | None = None
        while self.cleanups:
            try:
                await self.cleanups.pop(0)()
            except Exception as error:  # noqa: BLE001 - raised below: one that fails must not keep the others waiting
                first = first or error
        if first is not None:
            raise first

    # -- all of it in one unit

    async def run(self, user_message: str | None) -> JsonValue:
        """The loop of a step that overrides `run`: until it replies or routes."""
        if self._routed is not None:
            if not isinstance(self._routed.decision, Reply):
                return None  # the stage has routed: what else `run` does comes too late
            settle(self.runtime, self.step, self._routed)
            conclude(self.runtime, self.step, self._routed.here)
            self._routed = None
        if user_message and user_message.strip():
            last = self.step.get_memory().last
            if not (isinstance(last, UserMessage) and last.text == user_message):
                self.runtime.add_message(self.host.ns, self.step.id, UserMessage(content=user_message))
        while True:
            calls = self.runtime.open_calls(self.host.ns)
            decided = await (self.tools(calls) if calls else self.reply())
            if isinstance(decided.decision, Wait):
                raise InvalidOutcomeError(
                    f"A tool of {self.step.id} suspends, and {self.step.id} overrides run: the whole visit is one "
                    "unit, which cannot be left in its middle. Prepare state in on_visit instead.",
                    stage=self.step.id,
                    tool=decided.decision.requests[0][0].name,
                )
            if not isinstance(decided.decision, Again):
                self._routed = decided
                return decided.shown if isinstance(decided.decision, Reply) else None
            settle(self.runtime, self.step, decided)
            self.batch = None

    def returned(self, content: JsonValue) -> Decided:
        """What an overridden `run` came to: where it routed, or the content it returned."""
        decided, self._routed = self._routed, None
        if decided is not None and (
            not isinstance(decided.decision, Reply) or content is None or content == decided.shown
        ):
            return decided
        if content is None:
            return Decided(Reply(""))
        answered = self._answered(checked(self.step, "run", Direct(content)))
        answered.here = None
        if decided is None:
            return answered
        answered.results, answered.attachments, answered.here = decided.results, decided.attachments, decided.here
        return self._instead(answered, decided.reply)


def settle(runtime: UnitRuntime, step: Step[Any, Any], decided: Decided) -> None:
    """Record results, then attachments, then code's answer; after the transition's hooks."""
    ns = step.get_memory_space()
    for result in decided.results:
        runtime.add_message(ns, step.id, result)
    for attachment in decided.attachments:
        runtime.add_message(ns, step.id, as_message(attachment))
    if decided.answer is not None:
        runtime.add_message(decided.ns or ns, step.id, decided.answer)


def conclude(runtime: UnitRuntime, step: Step[Any, Any], outcome: Outcome | None) -> None:
    """Apply what an outcome without a destination attaches: it belongs to the stage itself."""
    if outcome is not None:
        attach(runtime, step.id, outcome)
        if outcome.message is not None:
            runtime.add_message(step.get_memory_space(), step.id, as_message(outcome.message))


def logic(step: Step[Any, Any], value: Any) -> Decided:
    """What `run_logic` returned. A logic step has no conversation: what it says goes to the destination's."""
    value = checked(step, "run_logic", value)
    if isinstance(value, Go):
        return Decided(value)
    spoken = step.flow.get_step(value.target) if isinstance(value, DirectTo) else step
    text = value.content or ""
    return Decided(value, text, answer=_direct(text, value.content_type), ns=spoken.get_memory_space())


def _direct(text: str, content_type: str | None) -> DirectMessage | None:
    """The record of code's answer; an empty one is none."""
    return DirectMessage(text=text, content_type=content_type or "text/plain") if text.strip() else None
