"""One round: attempts until a candidate is accepted, a hook decides, or the failure propagates.

The classification (design: the model loop), first match wins:

 1. cancelled                      propagates; no hook, no fallback output
 2. `LlmSetupError`                propagates; no retry
 3. prompt blocked                 `on_llm_blocked(phase="prompt")`
 4. any other exception            `should_retry_llm_error`, then `on_llm_error("invocation_error")`
 5. stop reason `blocked`          `on_llm_blocked(phase="candidate")`
 6. nothing in it                  the empty policy
 7. truncated or malformed calls   rejected
 8. object does not validate       rejected
 9. `check_response` is true       rejected
10. otherwise                      accepted
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, Literal, cast, final

import msgspec
from anyio.lowlevel import checkpoint_if_cancelled

from stepwell.errors import (
    AgentRoundLimitError,
    InvalidOutcomeError,
    LlmEmptyResponseError,
    LlmResponseBlockedError,
    LlmResponseRejectedError,
    LlmSetupError,
    ModelInvocationError,
    PromptBlockedError,
    SecondFallbackError,
    StepwellError,
    UsageLimitError,
)
from stepwell.messages import UserMessage
from stepwell.models import Candidate, ModelGateway, ModelRequest, ModelSelection, StopReason
from stepwell.outcomes import RetryWithModel

from ._attempt import Attempt
from ._contexts import (
    ErrorKind,
    LlmAttemptErrorContext,
    LlmBlockedContext,
    LlmErrorContext,
    Rejection,
    RejectReason,
    StoppedBecause,
)
from ._host import LoopHost, Verdict
from ._policy import AskShorter, CallPolicy, EmptyPolicy

__all__ = ["MAX_CALLS", "Accepted", "Terminal", "run_round"]

MAX_CALLS = 128
"""Calls of one reply; more are rejected as malformed."""

_FINAL_STATUS = frozenset({400, 401, 403, 404, 413, 422})
_SILENT = frozenset({StopReason.COMPLETE, StopReason.UNSPECIFIED})
_NUDGEABLE = _SILENT | {StopReason.MALFORMED_TOOL_CALL}


@final
class Accepted(msgspec.Struct, frozen=True):
    """A candidate that counts. `silent`: nothing in it, and the policy accepts that. `cut`: its calls must not run."""

    candidate: Candidate
    selection: ModelSelection
    silent: bool = False
    cut: bool = False


@final
class Terminal(msgspec.Struct, frozen=True):
    """A failure hook decided: `value` is text or an outcome, `hook` its name."""

    value: Any
    hook: str


class _Failed(msgspec.Struct, frozen=True):
    """An attempt that did not yield an accepted candidate; holds what the decision needs."""

    kind: ErrorKind
    error: Exception
    candidate: Candidate | None = None
    rejection: Rejection | None = None


class _Blocked(msgspec.Struct, frozen=True):
    """The provider refused."""

    context: LlmBlockedContext
    cause: Exception | None = None


def run_round(host: LoopHost) -> Coroutine[Any, Any, Accepted | Terminal]:
    """Run one round of `host`.

    Returns:
        What was accepted, or what a failure hook decided.

    Raises:
        LlmSetupError: See row 2.
        LlmResponseBlockedError: Blocked, and nobody handled it.
        AgentRoundLimitError: The visit has used its rounds.
        UsageLimitError: The turn has used its tokens.
        SecondFallbackError: A second alternate model.
        Exception: The context's error if nobody handled it, with `attempts_made` as a note; whatever a hook or the
            prompt raises.
    """
    return _Round(host, host.policy).run()


class _Round(msgspec.Struct):
    """The state of one round. Nothing in here outlives it."""

    host: LoopHost
    policy: CallPolicy
    number: int = 0  # attempts of the unit, over models and nudges; what observers count
    nudge: str | None = None
    nudges: int = 0
    cap_raised: int | None = None
    cut_policy_used: bool = False
    system: str | None = None

    async def run(self) -> Accepted | Terminal:
        host = self.host
        self._begin_round()
        self.system = host.prompt()
        while True:  # the stage's model, then perhaps the alternate
            alternate = host.visit.alternate
            selection = ModelSelection.from_json(alternate) if alternate else host.selection
            limit = 1 if alternate else (selection.attempts or self.policy.attempts)
            made = 0
            while True:
                made += 1
                result = await self._attempt(selection)
                if type(result) is Accepted:
                    return result
                await checkpoint_if_cancelled()
                if isinstance(result, _Blocked):
                    return await self._blocked(result)
                because = await self._again(result, selection, made, limit, alternate is not None)
                if because == "nudged":
                    made = 0
                elif because is not None:
                    break
            terminal = await self._give_up(result, selection, made, limit, because)
            if terminal is not None:
                return terminal

    def _begin_round(self) -> None:
        host = self.host
        if host.visit.rounds >= self.policy.max_agent_rounds:
            raise AgentRoundLimitError(
                f"Stage {host.stage_id} used all {self.policy.max_agent_rounds} rounds of one visit without ending: "
                "check what its tools answer, or raise max_agent_rounds.",
                stage=host.stage_id,
            )
        host.visit.rounds += 1

    # -- one attempt

    async def _attempt(self, selection: ModelSelection) -> Accepted | _Failed | _Blocked:
        host = self.host
        if self.policy.max_total_tokens is not None:
            self._check_budget(self.policy.max_total_tokens)
        gateway = host.gateway(selection)
        request = self._request(selection)
        streams = request.output_schema is None or (host.stream_mode == "live" and host.stream_partial_objects)
        attempt = Attempt(host.stream_mode if streams else "off")
        self.number += 1
        host.observer.attempt_started(self.number, selection)
        verdict: Verdict = "cancelled"
        detail: str | None = None
        try:
            result = await self._result(attempt, gateway, request, selection)
            if type(result) is Accepted:
                verdict = "accepted"
            else:
                verdict, detail = _verdict(result)
            return result
        except Exception as error:
            verdict, detail = "thrown", type(error).__name__
            raise
        finally:
            usage, finish = attempt.usage, attempt.finish
            host.add_usage(selection, usage)
            host.observer.attempt_ended(verdict, usage, finish.raw or finish.stop.value if finish else None, detail)

    async def _result(
        self, attempt: Attempt, gateway: ModelGateway, request: ModelRequest, selection: ModelSelection
    ) -> Accepted | _Failed | _Blocked:
        """Rows 1 to 10. What is raised here propagates: cancellation, set-up, what the stage's own code raises."""
        host = self.host
        try:
            await attempt.run(host, gateway, request)
        except LlmSetupError:
            raise
        except PromptBlockedError as error:
            return _Blocked(self._prompt_blocked(error, selection), error)
        except Exception as error:  # noqa: BLE001 - row 4: any other exception of the invocation
            if attempt.finish is None:  # else the reply is whole, and only closing the connection failed
                return _Failed("invocation_error", error)
        result = self._classify(attempt.candidate(request), selection, request.output_schema is not None)
        if type(result) is Accepted:
            if host.cancelled.is_set():
                await checkpoint_if_cancelled()
            if not result.silent:
                attempt.release(host.observer)
        return result

    def _check_budget(self, limit: int) -> None:
        if (spent := self.host.spent()) >= limit:
            raise UsageLimitError(
                f"The turn used {spent} of {limit} tokens (max_total_tokens): no further model call is made.",
                stage=self.host.stage_id,
            )

    def _request(self, selection: ModelSelection) -> ModelRequest:
        host, policy = self.host, self.policy
        if self.cap_raised is not None:
            selection = replace(selection, params={**selection.params, "max_tokens": self.cap_raised})
        messages = list(host.history())
        if self.nudge:
            messages.append(UserMessage(content=self.nudge, by="code"))
        return ModelRequest(
            selection=selection,
            system=self.system,
            messages=messages,
            tools=host.exposed(),
            output_schema=host.output_schema(),
            deadlines=policy.deadlines,
            conversation=host.conversation,
        )

    # -- classification, rows 5 to 10

    def _classify(
        self, candidate: Candidate, selection: ModelSelection, structured: bool
    ) -> Accepted | _Failed | _Blocked:
        if candidate.stop is StopReason.BLOCKED:
            return _Blocked(self._candidate_blocked(candidate))
        if not (candidate.text.strip() or candidate.tool_calls or candidate.files):
            return self._empty(candidate, selection)
        cut = candidate.truncated and bool(candidate.tool_calls)
        malformed = candidate.stop is StopReason.MALFORMED_TOOL_CALL or len(candidate.tool_calls) > MAX_CALLS
        if (cut or malformed) and "truncated" in self.policy.auto_reject:
            return self._reject(candidate, "truncated_tool_call" if cut else "malformed_tool_call", selection)
        if structured and not candidate.tool_calls:
            try:
                candidate = msgspec.structs.replace(candidate, object=self.host.parse_output(candidate.text))
            except ValueError as error:
                if "schema" in self.policy.auto_reject:
                    return self._reject(candidate, "schema", selection, str(error))
        if self.host.check_response(candidate):
            return self._reject(candidate, "check_response", selection)
        return Accepted(candidate, selection, cut=cut or malformed)

    def _empty(self, candidate: Candidate, selection: ModelSelection) -> Accepted | _Failed:
        policy = self.policy.empty
        if policy is not None and policy.accept and candidate.stop in _SILENT:
            return Accepted(msgspec.structs.replace(candidate, text=""), selection, silent=True)
        error = LlmEmptyResponseError(
            f"{selection.id} answered with nothing ({candidate.stop.value}){self._cap(candidate, selection)}.",
            stage=self.host.stage_id,
            model=selection.id,
        )
        return _Failed("empty_response", error, candidate)

    def _reject(
        self, candidate: Candidate, reason: RejectReason, selection: ModelSelection, detail: str | None = None
    ) -> _Failed:
        cap = self._cap(candidate, selection)
        error = LlmResponseRejectedError(
            f"A reply of {selection.id} was rejected: {_WHY[reason]}{cap}.",
            reason,
            detail,
            stage=self.host.stage_id,
            model=selection.id,
        )
        rejection = Rejection(reason=reason, detail=detail or cap.removeprefix("; ") or None)
        return _Failed("response_rejected", error, candidate, rejection)

    def _cap(self, candidate: Candidate, selection: ModelSelection) -> str:
        """The output cap in words, where it was hit."""
        if not candidate.truncated:
            return ""
        cap = self.cap_raised or _max_tokens(selection.params)
        return f"; the output cap is {f'{cap} tokens (max_tokens)' if cap else 'the model default; set max_tokens'}"

    # -- what comes after a failure

    async def _again(
        self, failure: _Failed, selection: ModelSelection, made: int, limit: int, is_alternate: bool
    ) -> StoppedBecause | Literal["nudged"] | None:
        """Prepare another attempt and return `None` (or `nudged`: a new round's worth), or say why there is none."""
        if is_alternate:
            return "attempts_exhausted"
        if failure.kind == "empty_response":
            empty = self.policy.empty
            if empty is None or cast("Candidate", failure.candidate).stop not in _NUDGEABLE:
                return "retry_declined" if made < limit else "attempts_exhausted"
            if empty.retries is not None:
                return self._nudge(empty, empty.retries)
            self.nudge = empty.nudge
        if made >= limit:
            return "attempts_exhausted"
        if failure.kind == "invocation_error":
            # A nudge stays: nobody has answered it yet.
            if not self._retries(failure.error, selection, made, limit):
                return "retry_declined"
        elif failure.kind == "response_rejected":
            self.nudge = self._correction(failure, selection)
        await self._delay(failure.error)
        return None

    def _nudge(self, policy: EmptyPolicy, retries: int) -> Literal["nudged", "attempts_exhausted"]:
        if self.nudges >= retries:
            return "attempts_exhausted"
        self.nudges += 1
        self.nudge = policy.nudge
        self._begin_round()
        return "nudged"

    def _retries(self, error: Exception, selection: ModelSelection, made: int, limit: int) -> bool:
        context = LlmAttemptErrorContext(
            **self._about(selection.provider, selection.name), error=error, attempt=made, max_attempts=limit
        )
        decided = self.host.should_retry_llm_error(context)
        self.host.observer.hook_called("should_retry_llm_error", decided is not None)
        if decided is not None:
            return decided
        if self.policy.default_retry == "always":
            return True
        return getattr(error, "status", None) not in _FINAL_STATUS

    def _correction(self, failure: _Failed, selection: ModelSelection) -> str | None:
        """What the next attempt is told about the rejected one; also raises the cap if that is the policy."""
        lines: list[str] = []
        rejection = cast("Rejection", failure.rejection)
        if rejection.reason == "schema":
            lines += [_WRONG_SCHEMA, rejection.detail or ""]
        policy = self.policy.on_truncated
        if policy is not None and cast("Candidate", failure.candidate).truncated and not self.cut_policy_used:
            self.cut_policy_used = True
            if isinstance(policy, AskShorter):
                lines.append(policy.nudge)
            else:
                current = _max_tokens(selection.params) or 0
                raised = int(min(policy.limit, current * policy.factor)) if current else policy.limit
                self.cap_raised = max(current, raised)
        return "\n".join(lines) or None

    async def _delay(self, error: Exception) -> None:
        wait = self.policy.retry_delay
        asked = error.retry_after if isinstance(error, ModelInvocationError) else None
        if asked is not None:
            wait = min(max(asked, 0.0), self.policy.max_retry_after)
        await self.host.clock.sleep(wait)

    async def _give_up(
        self, failure: _Failed, selection: ModelSelection, made: int, limit: int, because: StoppedBecause
    ) -> Terminal | None:
        host = self.host
        await checkpoint_if_cancelled()
        context = LlmErrorContext(
            **self._about(selection.provider, selection.name),
            kind=failure.kind,
            error=failure.error,
            attempts_made=made,
            max_attempts=limit,
            stopped_because=because,
            last_response=failure.candidate,
            rejection=failure.rejection,
        )
        decided = await host.on_llm_error(context)
        await checkpoint_if_cancelled()
        host.observer.hook_called("on_llm_error", decided is not None)
        if decided is None:
            failure.error.add_note(f"{made} of {limit} attempts were made ({because}).")
            if isinstance(failure.error, StepwellError):
                raise failure.error
            # Not a hook's or handler's exception, and it must not look like one.
            raise ModelInvocationError(
                f"The gateway of {selection.id} raised {type(failure.error).__name__}, which is no model error: see "
                "where in the log.",
                stage=host.stage_id,
                model=selection.id,
            ) from failure.error
        if isinstance(decided, RetryWithModel):
            self._activate(decided.selection)
            return None
        return Terminal(decided, "on_llm_error")

    def _activate(self, selection: ModelSelection) -> None:
        host = self.host
        if host.visit.alternate_used:
            raise SecondFallbackError(
                f"Stage {host.stage_id} asked for a second alternate model in one visit: let on_llm_error return text "
                "or an outcome when context.max_attempts is 1.",
                stage=host.stage_id,
            )
        if selection.attempts is not None and not host.allow_alternate_attempts:
            raise InvalidOutcomeError(
                f"retry_with_model of stage {host.stage_id} carries attempts={selection.attempts}: an alternate gets "
                "exactly one attempt per call; leave attempts out.",
                stage=host.stage_id,
                hook="on_llm_error",
            )
        host.visit.alternate = selection.to_json()
        host.visit.alternate_used = True
        self.nudge = None
        self.cap_raised = None

    # -- blocks

    def _prompt_blocked(self, error: PromptBlockedError, selection: ModelSelection) -> LlmBlockedContext:
        return LlmBlockedContext(
            **self._about(selection.provider, selection.name),
            reason=_block_reason(error.reason, error.raw_reason, error.details),
            phase="prompt",
            raw_reason=error.raw_reason,
            text=str(error.details.get("refusal") or ""),
            safety_ratings=error.safety_ratings,
            provider_details=error.details,
            partial_text_shown=self.host.observer.shown,
        )

    def _candidate_blocked(self, candidate: Candidate) -> LlmBlockedContext:
        details = candidate.details
        return LlmBlockedContext(
            **self._about(candidate.provider, candidate.model),
            reason=_block_reason(details.get("block_reason"), candidate.raw_reason, details),
            phase="candidate",
            raw_reason=candidate.raw_reason,
            text=str(details.get("refusal") or ""),
            safety_ratings=details.get("safety_ratings"),
            provider_details=details,
            partial_text_shown=self.host.observer.shown,
        )

    async def _blocked(self, blocked: _Blocked) -> Terminal:
        context = blocked.context
        decided = await self.host.on_llm_blocked(context)
        await checkpoint_if_cancelled()
        self.host.observer.hook_called("on_llm_blocked", decided is not None)
        if decided is None:
            raise LlmResponseBlockedError(
                f"{context.selection} blocked the {context.phase} of stage {context.stage_id} ({context.reason}): "
                "handle it in on_llm_blocked of the stage or the flow.",
                context,
                stage=context.stage_id,
                model=context.selection,
            ) from blocked.cause
        if isinstance(decided, RetryWithModel):
            raise InvalidOutcomeError(
                f"on_llm_blocked of stage {context.stage_id} returned retry_with_model: a refusal never asks for an "
                "alternate model; return text or another outcome.",
                stage=context.stage_id,
                hook="on_llm_blocked",
            )
        return Terminal(decided, "on_llm_blocked")

    def _about(self, provider: str, model: str) -> dict[str, Any]:
        return {
            "stage_id": self.host.stage_id,
            "provider": provider,
            "model": model,
            "cancelled": self.host.cancelled,
        }


_WRONG_SCHEMA = "Your last reply did not match the required schema. Answer again with only the JSON."

_WHY = {
    "truncated_tool_call": "it was cut off inside a tool call",
    "malformed_tool_call": "its tool call is malformed",
    "schema": "it does not match the output schema",
    "check_response": "check_response asked for another",
}


def _verdict(result: _Failed | _Blocked) -> tuple[Verdict, str | None]:
    """How an attempt failed, for observers; the detail names an error or reason, and holds no content."""
    if isinstance(result, _Blocked):
        return "blocked", result.context.reason
    if result.rejection is not None:
        return result.rejection.reason, None
    return ("empty", None) if result.kind == "empty_response" else ("thrown", type(result.error).__name__)


def _max_tokens(params: Mapping[str, Any]) -> int | None:
    value = params.get("max_tokens")
    return value if isinstance(value, int) else None


_REASONS = ("refusal", "recitation", "blocklist", "content_filter", "safety")


def _block_reason(given: Any, raw: str | None, details: Mapping[str, Any]) -> str:
    """The normalised reason: what the gateway says, or a guess from the provider's words."""
    if given in _REASONS:
        return str(given)
    if details.get("refusal"):
        return "refusal"
    words = f"{given or ''} {raw or ''}".lower()
    for reason in _REASONS:
        if reason in words:
            return reason
    return "safety" if "prohibited" in words or "spii" in words else "other"
