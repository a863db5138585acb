"""One visit: rounds and tool batches of a step, unit by unit, until it replies or routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import msgspec

from stepwell._json import json_copy
from stepwell.errors import InvalidOutcomeError, NonJsonValueError
from stepwell.flow._host import StepHost
from stepwell.loop import Accepted, Batch, Terminal, run_round
from stepwell.messages import AssistantMessage, DirectMessage, JsonValue, Message, ToolCall, ToolResult, UserMessage
from stepwell.models import Candidate
from stepwell.outcomes import Cleanup, Direct, DirectTo, Finish, Go, Outcome, Stay

__all__ = ["Again", "Decision", "Reply", "Visit"]


@dataclass(frozen=True, slots=True)
class Again:
    """The visit goes on with another unit; `shown` is what this one shows."""

    shown: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The stage answered the person."""

    text: str
    content_type: str | None = None


Decision: TypeAlias = Again | Reply | Go | DirectTo | Finish


@dataclass(slots=True)
class Decided:
    """What a unit came to.

    Attributes:
        decision: What happens next.
        shown: What the unit shows, whole.
        results: Tool results that are recorded after the transition.
        attachments: Model-visible messages behind them.
    """

    decision: Decision
    shown: str = ""
    results: Sequence[ToolResult] = ()
    attachments: Sequence[Message | str] = ()


class Visit:
    """Runs the units of one visit of `host.step`. `batch` stays readable when a unit fails."""

    def __init__(self, host: StepHost) -> None:
        self.host = host
        self.step = host.step
        self.runtime = host.runtime
        self.batch: Batch | None = None
        self.cleanups: list[Cleanup] = []
        self._unit = ""
        self._calls = 0

    # -- a model's reply

    async def reply(self) -> Decided:
        """One round: a reply with all its attempts, and what the stage makes of it."""
        result = await run_round(self.host)
        await self.clean_up()
        if isinstance(result, Terminal):
            return self._terminal(result)
        if result.silent:
            return await self._responded(result.candidate, None)
        message = self._message(result)
        self.runtime.add_message(self.host.ns, self.step.id, message)
        if result.candidate.stop.value == "truncated":
            self.host.observer.warn("a reply was cut off at the output limit", {"stage": self.step.id})
        if not message.calls:
            return await self._responded(result.candidate, message)
        shown = message.text if self.host.stream_mode != "off" else ""
        if result.cut:
            refused = "The call was cut off or malformed, and did not run."
            results = [self.host.result(c, {"accepted": False, "error": refused}, "not_run") for c in message.calls]
            return Decided(Again(), shown, results)
        return Decided(Again(), shown)

    def _message(self, accepted: Accepted) -> AssistantMessage:
        """The record of an accepted reply: calls get ids that differ, and keys that are unique for ever."""
        candidate = accepted.candidate
        seen: set[str] = set()
        calls: list[ToolCall] = []
        if self._unit != self.host.step_id:
            self._unit, self._calls = self.host.step_id, 0
        first = self._calls  # a unit that is a whole visit has several replies with calls
        self._calls += len(candidate.tool_calls)
        for index, call in enumerate(candidate.tool_calls, first):
            call_id = call.id
            if not call_id or len(call_id) > 512 or call_id in seen:
                call_id = f"call-{self.host.step_id[-12:]}-{index}"
            seen.add(call_id)
            calls.append(ToolCall(call_id, call.name, call.args, f"{self.host.step_id}::{index}"))
        return AssistantMessage(
            id=self.runtime.new_id(self.step.id),
            text=candidate.text,
            reasoning=candidate.reasoning,
            calls=tuple(calls),
            files=candidate.files,
            model=accepted.selection.id,
            truncated=candidate.truncated,
            provider_data=candidate.provider_data,
        )

    async def _responded(self, candidate: Candidate, message: AssistantMessage | None) -> Decided:
        """Ask `on_response` and apply what it says about the text."""
        built = self.host.built
        structured = built.output is not None
        result: Any = candidate.object if structured and candidate.object is not None else candidate.text
        if message is None:
            result = None
        default = _json_text(candidate.object) if structured and candidate.object is not None else candidate.text
        value = await self.step.on_response(result) if "on_response" in built.hooks else None
        value = self._outcome(value, "on_response")
        if value is None or value == default:
            content_type = "application/json" if structured and candidate.object is not None else None
            return Decided(Reply(default, content_type), default)
        if isinstance(value, str):
            return self._replaced(message, value, None)
        match value:
            case Direct():
                text = self._text(value.content, "on_response")
                self._apply_here(value)
                return self._replaced(message, text, value.content_type or _type_of(value.content))
            case Go():
                return Decided(value, default)
            case DirectTo():
                text = self._text(value.content, "on_response")
                replaced = self._replaced(message, text, None)
                return Decided(replace(value, content=text), replaced.shown)
            case Finish(content=None):
                return Decided(replace(value, content=default), default)
            case Finish():
                text = self._text(value.content, "on_response")
                replaced = self._replaced(message, text, None)
                return Decided(_typed(replace(value, content=text), value.content), replaced.shown)
            case _:
                raise self._illegal("on_response", value)

    def _replaced(self, message: AssistantMessage | None, text: str, content_type: str | None) -> Decided:
        """Code's text instead of the model's, on every screen and in history."""
        if text.strip():
            direct = DirectMessage(text=text, content_type=content_type or "text/plain")
            if message is None:
                self.runtime.add_message(self.host.ns, self.step.id, direct)
            else:
                self.runtime.replace_last(self.host.ns, replace_id(direct, message.id))
        return Decided(Reply(text, content_type), text)

    def _terminal(self, terminal: Terminal) -> Decided:
        """A failure hook decided: its text or outcome, under the same step, so it replaces what was shown."""
        value = self._outcome(terminal.value, terminal.hook)
        match value:
            case str():
                return self._answer(value, None)
            case Direct():
                self._apply_here(value)
                return self._answer(
                    self._text(value.content, terminal.hook), value.content_type or _type_of(value.content)
                )
            case Go():
                return Decided(value)
            case DirectTo() | Finish():
                if value.content is None:
                    return Decided(value)
                text = self._text(value.content, terminal.hook)
                self._answer(text, None)
                return Decided(_typed(replace(value, content=text), value.content), text)
            case _:
                raise self._illegal(terminal.hook, value)

    def _answer(self, text: str, content_type: str | None) -> Decided:
        if text.strip():
            message = DirectMessage(text=text, content_type=content_type or "text/plain")
            self.runtime.add_message(self.host.ns, self.step.id, message)
        return Decided(Reply(text, content_type), text)

    # -- a batch of tool calls

    async def tools(self, calls: Sequence[ToolCall]) -> Decided:
        """Run the calls of the accepted reply; writes are applied in call order, results follow the transition."""
        self.batch = Batch(self.host, calls)
        done = await self.batch.run()
        for ran in done.ran:
            if ran.scope is not None:
                self.runtime.apply(ran.scope)
            if type(ran.outcome) is Stay:
                self._apply_here(ran.outcome)
        attachments = [message for ran in done.ran for message in ran.outcome.messages]
        self.cleanups.extend(fn for ran in done.ran for fn in ran.outcome.cleanup)
        outcome = done.outcome
        decided = Decided(Again(), "", [ran.result for ran in done.ran], attachments)
        match outcome:
            case Direct():
                text = self._text(outcome.content, "a tool handler")
                decided.decision = Reply(text, outcome.content_type or _type_of(outcome.content))
                decided.shown = text
                self._apply_here(outcome)
            case Go():
                decided.decision = outcome
            case DirectTo() | Finish():
                text = None if outcome.content is None else self._text(outcome.content, "a tool handler")
                decided.decision = _typed(replace(outcome, content=text), outcome.content)
                decided.shown = text or ""
            case _:
                pass
        return decided

    def settle_results(self, decided: Decided) -> None:
        """Record results, then attachments, then code's answer; after the transition's hooks."""
        for result in decided.results:
            self.runtime.add_message(self.host.ns, self.step.id, result)
        for attachment in decided.attachments:
            self.runtime.add_message(self.host.ns, self.step.id, as_message(attachment))
        if self.batch is not None and decided.shown.strip():
            content_type = getattr(decided.decision, "content_type", None) or "text/plain"
            message = DirectMessage(text=decided.shown, content_type=content_type)
            self.runtime.add_message(self.host.ns, self.step.id, message)

    def answer(self, text: str) -> None:
        """Code's answer instead of the model's, if there was one in this unit."""
        last = self.step.get_memory().last
        if isinstance(last, AssistantMessage) and not last.calls and self.routed is not None:
            self._replaced(last, text, None)
        elif text.strip():
            self.runtime.add_message(self.host.ns, self.step.id, DirectMessage(text=text))

    async def clean_up(self) -> None:
        """Await what handlers asked for; on every path."""
        while self.cleanups:
            await self.cleanups.pop(0)()

    # -- all of it in one unit

    async def run(self, user_message: str | None) -> JsonValue:
        """The whole visit at once, for a step that overrides `run`."""
        if user_message and user_message.strip():
            last = self.step.get_memory().last
            if not (isinstance(last, UserMessage) and last.text == user_message):
                self.runtime.add_message(self.host.ns, self.step.id, UserMessage(content=user_message))
        while True:
            calls = self.runtime.open_calls(self.host.ns)
            decided = await (self.tools(calls) if calls else self.reply())
            if not isinstance(decided.decision, Again):
                self.routed = decided
                return decided.shown if isinstance(decided.decision, Reply) else None
            self.settle_results(decided)
            self.batch = None

    routed: Decided | None = None

    # -- small things

    def _apply_here(self, outcome: Outcome) -> None:
        """What an outcome without a destination attaches belongs to this stage."""
        attach(self.runtime, self.step.id, outcome)
        if outcome.message is not None:
            self.runtime.add_message(self.host.ns, self.step.id, as_message(outcome.message))

    def _outcome(self, value: Any, hook: str) -> Any:
        """What a hook returned, with a stage class as `Go`, and without what belongs to tool handlers only."""
        if self.host.is_outcome_target(value):
            return Go(value)
        if isinstance(value, Outcome) and (value.feedback is not None or value.messages or value.cleanup):
            raise InvalidOutcomeError(
                f"{hook} of {self.step.id} returned a {type(value).__name__} with tool feedback, attachments or a "
                "cleanup: only tool handlers may.",
                stage=self.step.id,
                hook=hook,
            )
        return value

    def _text(self, content: JsonValue, hook: str) -> str:
        if isinstance(content, str):
            return content
        try:
            return _json_text(json_copy(content))
        except NonJsonValueError as error:
            raise InvalidOutcomeError(
                f"The content that {hook} of {self.step.id} returned is not JSON ({error.path or 'the whole'}).",
                stage=self.step.id,
                hook=hook,
            ) from error

    def _illegal(self, hook: str, value: Any) -> InvalidOutcomeError:
        return InvalidOutcomeError(
            f"{hook} of {self.step.id} returned a {type(value).__name__}, which is not legal there: see the table of "
            "outcomes.",
            stage=self.step.id,
            hook=hook,
        )


def attach(runtime: Any, stage: str, outcome: Outcome) -> None:
    """Write an outcome's prompt and state into a stage."""
    from stepwell.flow._step import checked_patch

    if outcome.prompt is not None:
        runtime.write_state(stage, "save", {"_prompt": outcome.prompt})
    if outcome.state is not None:
        runtime.write_state(stage, "save", checked_patch(outcome.state, stage))


def as_message(value: Message | str) -> Message:
    """Text becomes a user message by code."""
    return UserMessage(content=value, by="code") if isinstance(value, str) else value


def replace_id(message: DirectMessage, message_id: str) -> DirectMessage:
    """The message under another id."""
    return msgspec.structs.replace(message, id=message_id)


def _json_text(value: Any) -> str:
    if hasattr(value, "model_dump_json"):
        return cast("str", value.model_dump_json())
    return msgspec.json.encode(value).decode()


def _type_of(content: JsonValue) -> str | None:
    return None if isinstance(content, str) else "application/json"


def _typed(outcome: Any, content: JsonValue) -> Any:
    """Objects are JSON unless the outcome says otherwise."""
    if outcome.content_type is None and content is not None and not isinstance(content, str):
        return replace(outcome, content_type="application/json")
    return outcome
