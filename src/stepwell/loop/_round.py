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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

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
    UsageLimitError,
)
from stepwell.messages import UserMessage
from stepwell.models import Candidate, Deadlines, ModelRequest, ModelSelection, StopReason
from stepwell.outcomes import RetryWithModel

from ._attempt import Attempt
from ._contexts import LlmAttemptErrorContext, LlmBlockedContext, LlmErrorContext, Rejection, StoppedBecause
from ._host import LoopHost, Verdict
from ._policy import AskShorter, EmptyPolicy, RaiseCap

__all__ = ["MAX_CALLS", "Accepted", "Terminal", "run_round"]

MAX_CALLS = 128
"""Calls of one reply; more are rejected as malformed."""

_FINAL_STATUS = frozenset({400, 401, 403, 404, 413, 422})
_NUDGEABLE = frozenset({StopReason.COMPLETE, StopReason.UNSPECIFIED, StopReason.MALFORMED_TOOL_CALL})


@dataclass(frozen=True, slots=True)
class Accepted:
    """A candidate that counts. `silent`: nothing in it, and the policy accepts that. `cut`: its calls must not run."""

    candidate: Candidate
    selection: ModelSelection
    silent: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Terminal:
    """A failure hook decided: `value` is text or an outcome, `hook` its name."""

    value: Any
    hook: str


class _Failed(Exception):
    """An attempt that did not yield an accepted candidate; carries what the decision needs."""

    def __init__(
        self,
        kind: Literal["invocation_error", "empty_response", "response_rejected"],
        error: Exception,
        candidate: Candidate | None = None,
        rejection: Rejection | None = None,
    ) -> None:
        self.kind: Literal["invocation_error", "empty_response", "response_rejected"] = kind
        self.error = error
        self.candidate = candidate
        self.rejection = rejection


async def run_round(host: LoopHost) -> Accepted | Terminal:
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
    return await _Round(host).run()


class _Round:
    """The state of one round. Nothing in here outlives it."""

    def __init__(self, host: LoopHost) -> None:
        self.host = host
        self.policy = host.policy
        self.number = 0  # attempts of the unit, over models and nudges; what observers count
        self.nudge: str | None = None
        self.nudges = 0
        self.cap_raised: int | None = None
        self.cut_policy_used = False
        self.system: str | None = None

    async def run(self) -> Accepted | Terminal:
        host = self.host
        self._begin_round()
        self.system = host.prompt()
        while True:
            alternate = host.visit.alternate
            selection = ModelSelection.from_json(alternate) if alternate else host.selection
            result = await self._attempts(selection, is_alternate=alternate is not None)
            if result is not None:
                return result

    def _begin_round(self) -> None:
        host = self.host
        if host.visit.rounds >= self.policy.max_agent_rounds:
            raise AgentRoundLimitError(
                f"Stage {host.stage_id} used all {self.policy.max_agent_rounds} rounds of one visit without ending: "
                "check what its tools answer, or raise max_agent_rounds.",
                stage=host.stage_id,
            )
        host.visit.rounds += 1

    async def _attempts(self, selection: ModelSelection, *, is_alternate: bool) -> Accepted | Terminal | None:
        """Try one model until its budget is spent. `None`: go on with the alternate that was just activated."""
        limit = 1 if is_alternate else (selection.attempts or self.policy.attempts)
        made = 0
        while True:
            made += 1
            try:
                return await self._attempt(selection)
            except _Failed as failure:
                await checkpoint_if_cancelled()
                because = await self._again(failure, selection, made, limit, is_alternate)
                if because is None:
                    continue
                if because == "nudged":
                    made = 0
                    continue
                return await self._give_up(failure, selection, made, limit, because)
            except PromptBlockedError as error:
                return await self._blocked(
                    LlmBlockedContext(
                        **self._about(selection),
                        reason=error.reason,
                        phase="prompt",
                        raw_reason=error.raw_reason,
                        text=str(error.details.get("refusal") or ""),
                        safety_ratings=error.safety_ratings,
                        provider_details=error.details,
                        partial_text_shown=self.host.observer.shown,
                    ),
                    error,
                )

    # -- one attempt

    async def _attempt(self, selection: ModelSelection) -> Accepted | Terminal:
        host = self.host
        self._check_budget()
        gateway = host.gateway(selection)
        request = self._request(selection)
        schema = request.output_schema
        live = host.stream_mode == "live" and (schema is None or host.stream_partial_objects)
        self.number += 1
        host.observer.attempt_started(self.number, selection)
        attempt = Attempt()
        verdict: Verdict = "cancelled"
        detail: str | None = None
        try:
            await attempt.run(host, gateway, request, live, host.stream_mode == "held" and schema is None)
            candidate = attempt.candidate(request)
            verdict, accepted = self._classify(candidate, selection, schema is not None)
            if isinstance(accepted, Accepted):
                await checkpoint_if_cancelled()
                attempt.release(host.observer)
                return accepted
            if accepted is not None:
                detail = accepted.rejection.reason if accepted.rejection else accepted.kind
                raise accepted
        except (_Failed, LlmSetupError):
            raise
        except PromptBlockedError:
            verdict = "blocked"
            raise
        except _Hook as error:
            raise error.cause from error.cause.__cause__
        except Exception as error:
            verdict, detail = "thrown", type(error).__name__
            raise _Failed("invocation_error", error) from error
        finally:
            host.add_usage(selection, attempt.usage)
            stop = attempt.finish.raw or attempt.finish.stop.value if attempt.finish else None
            host.observer.attempt_ended(verdict, attempt.usage, stop, detail)
        return await self._blocked(self._candidate_blocked(candidate), None)

    def _check_budget(self) -> None:
        limit = self.policy.max_total_tokens
        if limit is not None and (spent := self.host.spent()) >= limit:
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
            self.nudge = None
        return ModelRequest(
            selection=selection,
            system=self.system,
            messages=messages,
            tools=host.exposed(),
            output_schema=host.output_schema(),
            deadlines=Deadlines(
                connect=policy.connect_timeout,
                first_token=policy.first_token_timeout,
                idle=policy.idle_timeout,
                attempt=policy.timeout,
            ),
            conversation=host.conversation,
        )

    # -- classification, rows 5 to 10

    def _classify(
        self, candidate: Candidate, selection: ModelSelection, structured: bool
    ) -> tuple[Verdict, Accepted | _Failed | None]:
        """The verdict, with what is accepted or why not; `None` for a block."""
        if candidate.stop is StopReason.BLOCKED:
            return "blocked", None
        if not (candidate.text.strip() or candidate.tool_calls or candidate.files):
            return self._empty(candidate, selection)
        cut = bool(candidate.tool_calls) and candidate.stop is StopReason.TRUNCATED
        malformed = candidate.stop is StopReason.MALFORMED_TOOL_CALL or len(candidate.tool_calls) > MAX_CALLS
        if (cut or malformed) and "truncated" in self.policy.auto_reject:
            return self._reject(candidate, "truncated_tool_call" if cut else "malformed_tool_call", selection)
        if structured and not candidate.tool_calls:
            try:
                candidate = msgspec.structs.replace(candidate, object=self.host.parse_output(candidate.text))
            except ValueError as error:
                if "schema" in self.policy.auto_reject:
                    return self._reject(candidate, "schema", selection, str(error))
        try:
            wants_another = self.host.check_response(candidate)
        except Exception as error:
            raise _Hook(error) from error
        if wants_another:
            return self._reject(candidate, "check_response", selection)
        return "accepted", Accepted(candidate, selection, cut=cut or malformed)

    def _empty(self, candidate: Candidate, selection: ModelSelection) -> tuple[Verdict, Accepted | _Failed]:
        if self.policy.empty is not None and self.policy.empty.accept and candidate.stop is not StopReason.TRUNCATED:
            return "accepted", Accepted(candidate, selection, silent=True)
        cap = self._cap(selection) if candidate.truncated else ""
        error = LlmEmptyResponseError(
            f"{selection.id} answered with nothing ({candidate.stop.value}){cap}.",
            stage=self.host.stage_id,
            model=selection.id,
        )
        return "empty", _Failed("empty_response", error, candidate)

    def _reject(
        self,
        candidate: Candidate,
        reason: Literal["truncated_tool_call", "malformed_tool_call", "schema", "check_response"],
        selection: ModelSelection,
        detail: str | None = None,
    ) -> tuple[Verdict, _Failed]:
        cap = self._cap(selection) if reason == "truncated_tool_call" else ""
        error = LlmResponseRejectedError(
            f"A reply of {selection.id} was rejected: {_WHY[reason]}{cap}.",
            reason,
            detail,
            stage=self.host.stage_id,
            model=selection.id,
        )
        return reason, _Failed(
            "response_rejected", error, candidate, Rejection(reason=reason, detail=detail or cap or None)
        )

    def _cap(self, selection: ModelSelection) -> str:
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
            policy = self.policy.empty
            candidate = cast("Candidate", failure.candidate)
            if policy is None or candidate.stop not in _NUDGEABLE:
                return "retry_declined" if made < limit else "attempts_exhausted"
            if policy.retries is not None:
                return self._nudge(policy)
            self.nudge = policy.nudge
        if made >= limit:
            return "attempts_exhausted"
        if failure.kind == "invocation_error" and not self._retries(failure.error, selection, made, limit):
            return "retry_declined"
        if failure.rejection is not None:
            self._after_rejection(failure.rejection, selection)
        await self._delay(failure.error)
        return None

    def _nudge(self, policy: EmptyPolicy) -> Literal["nudged", "attempts_exhausted"]:
        if self.nudges >= cast("int", policy.retries):
            return "attempts_exhausted"
        self.nudges += 1
        self.nudge = policy.nudge
        self._begin_round()
        return "nudged"

    def _retries(self, error: Exception, selection: ModelSelection, made: int, limit: int) -> bool:
        context = LlmAttemptErrorContext(**self._about(selection), error=error, attempt=made, max_attempts=limit)
        decided = self.host.should_retry_llm_error(context)
        self.host.observer.hook_called("should_retry_llm_error", decided is not None)
        if decided is not None:
            return decided
        if self.policy.default_retry == "always":
            return True
        return getattr(error, "status", None) not in _FINAL_STATUS

    def _after_rejection(self, rejection: Rejection, selection: ModelSelection) -> None:
        if rejection.reason == "schema":
            self.nudge = f"Your last reply did not match the required schema. Answer again with only the JSON.\n{rejection.detail}"
        if rejection.reason != "truncated_tool_call" or self.cut_policy_used:
            return
        match self.policy.on_truncated:
            case RaiseCap(factor=factor, limit=limit):
                current = _max_tokens(selection.params)
                self.cap_raised = min(limit, int(current * factor)) if current else limit
                self.cut_policy_used = True
            case AskShorter(nudge=nudge):
                self.nudge = nudge
                self.cut_policy_used = True
            case None:
                pass

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
        context = LlmErrorContext(
            **self._about(selection),
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
            raise failure.error
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
        host.gateway(selection)
        host.visit.alternate = selection.to_json()
        host.visit.alternate_used = True
        self.nudge = None

    # -- blocks

    def _candidate_blocked(self, candidate: Candidate) -> LlmBlockedContext:
        details = candidate.details
        return LlmBlockedContext(
            **self._about(ModelSelection(candidate.provider, candidate.model)),
            reason=str(details.get("block_reason") or _block_reason(candidate.raw_reason, details)),
            phase="candidate",
            raw_reason=candidate.raw_reason,
            text=str(details.get("refusal") or ""),
            safety_ratings=details.get("safety_ratings"),
            provider_details=details,
            partial_text_shown=self.host.observer.shown,
        )

    async def _blocked(self, context: LlmBlockedContext, cause: Exception | None) -> Terminal:
        await checkpoint_if_cancelled()
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
            ) from cause
        if isinstance(decided, RetryWithModel):
            raise InvalidOutcomeError(
                f"on_llm_blocked of stage {context.stage_id} returned retry_with_model: a refusal never asks for an "
                "alternate model; return text or another outcome.",
                stage=context.stage_id,
                hook="on_llm_blocked",
            )
        return Terminal(decided, "on_llm_blocked")

    def _about(self, selection: ModelSelection) -> dict[str, Any]:
        return {
            "stage_id": self.host.stage_id,
            "provider": selection.provider,
            "model": selection.name,
            "cancelled": self.host.cancelled,
        }


class _Hook(Exception):
    """Carries an exception of `check_response` past the handling of invocation errors."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


_WHY = {
    "truncated_tool_call": "it was cut off inside a tool call",
    "malformed_tool_call": "its tool call is malformed",
    "schema": "it does not match the output schema",
    "check_response": "check_response asked for another",
}


def _max_tokens(params: Mapping[str, Any]) -> int | None:
    value = params.get("max_tokens")
    return value if isinstance(value, int) else None


def _block_reason(raw: str | None, details: Mapping[str, Any]) -> str:
    if details.get("refusal"):
        return "refusal"
    word = (raw or "").lower()
    for reason in ("refusal", "recitation", "blocklist", "content_filter", "safety"):
        if reason in word:
            return reason
    return "safety" if "prohibited" in word or "spii" in word else "other"
