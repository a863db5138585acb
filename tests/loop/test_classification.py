"""Design: the model loop, the table of classification: each row, with what it never does; the first match wins."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from loop_flows import Hooks, RawGateway, Talk, asked, chat, replies, texts, tool_ran, truncated, verdicts
from stepwell import tool
from stepwell.engine import Warned
from stepwell.errors import (
    LlmEmptyResponseError,
    LlmResponseBlockedError,
    LlmResponseRejectedError,
    LlmSetupError,
    ModelInvocationError,
    TurnCancelledError,
)
from stepwell.loop import CallPolicy, EmptyPolicy
from stepwell.messages import AssistantMessage, DirectMessage, ToolResult
from stepwell.models import Finish, StopReason, TextDelta
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def everything(**answers: Any) -> Hooks:
    """Hooks that would all decide, so that one that is asked shows."""
    return Hooks(**{"on_llm_blocked": "blocked reply", "on_llm_error": "error reply", **answers})


async def test_row_1_cancelled_propagates_and_asks_no_hook() -> None:
    hooks = everything()
    model = ScriptedModel([Reply.text("Hello there").stalling(after=1)])
    async with TurnHarness(chat(hooks), model=model) as h, anyio.create_task_group() as group:

        async def cancel() -> None:
            await model.wait_stalled()
            h.turn.cancel("user", "enough")

        group.start_soon(cancel)
        result = await h.say("hi")
    assert isinstance(h.turn.error, TurnCancelledError)
    assert result.message == ""
    assert hooks.log.names == []
    assert verdicts(h) == ["cancelled"]
    assert len(model.requests) == 1
    assert replies(await h.history("Talk")) == []


async def test_row_2_setup_errors_propagate_without_retry_or_recovery() -> None:
    hooks = everything()
    model = ScriptedModel([LlmSetupError("no key")])
    async with TurnHarness(chat(hooks), model=model) as h:
        result = await h.say("hi")
    assert result.error is not None
    assert result.error.code == "llm_setup"
    assert hooks.log.names == []
    assert verdicts(h) == ["thrown"]
    assert len(model.requests) == 1


@pytest.mark.parametrize("mid_stream", [False, True])
async def test_row_3_prompt_blocked_asks_on_llm_blocked_and_never_retries(mid_stream: bool) -> None:
    hooks = everything()
    blocked = Reply.prompt_blocked("safety", raw="PROHIBITED")
    if mid_stream:
        blocked = Reply.text("so far").failing(error=blocked.end.error)
    async with TurnHarness(chat(hooks), model=ScriptedModel([blocked])) as h:
        result = await h.say("hi")
    assert result.message == h.shown == "blocked reply"
    assert hooks.log.names == ["on_llm_blocked"]
    (context,) = hooks.log.of("on_llm_blocked")
    assert (context.phase, context.reason, context.raw_reason) == ("prompt", "safety", "PROHIBITED")
    assert context.partial_text_shown is mid_stream
    assert verdicts(h) == ["blocked"]


FAILURES = {
    "http error": Reply.error(status=503),
    "any exception": Reply.error(KeyError("odd")),
    "broken stream": Reply.text("half a sen").failing(status=None),
    "no finish": Reply.text("half a sen").without_finish(),
    "first token deadline": Reply.text("late").stalling(after=0),
    "idle deadline": Reply.text("one two").stalling(after=1),
    "not an event": Reply.of(object()),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_row_4_other_failures_are_retried_then_asked_about(name: str) -> None:
    hooks = everything()
    async with TurnHarness(chat(hooks), model=ScriptedModel([FAILURES[name]] * 3)) as h:
        result = await h.say("hi")
    assert result.message == h.shown == "error reply"
    assert hooks.log.names == [
        *["should_retry_llm_error", "flow_should_retry_llm_error"] * 2,
        "on_llm_error",
    ]
    (context,) = hooks.log.of("on_llm_error")
    assert context.kind == "invocation_error"
    assert context.rejection is None
    assert verdicts(h) == ["thrown"] * 3


async def test_row_4_no_finish_is_a_model_invocation_error() -> None:
    async with TurnHarness(chat(), model=ScriptedModel([Reply.text("half").without_finish()] * 3)) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, ModelInvocationError)
    assert "ended without a finish" in h.turn.error.message


async def test_row_4_a_failure_after_the_finish_is_none_the_reply_is_whole() -> None:
    async def play(request: Any) -> AsyncGenerator[Any]:
        yield TextDelta("whole")
        yield Finish(stop=StopReason.COMPLETE)
        raise ConnectionResetError

    async with TurnHarness(chat(), model=RawGateway(play)) as h:
        result = await h.say("hi")
    assert result.message == "whole"
    assert verdicts(h) == ["accepted"]


BLOCKED = {
    "nothing": Reply.blocked("safety"),
    "with text": Reply.blocked("content_filter", text="A polite sentence."),
    "with calls": Reply.blocked("other", calls=[Call("look", {"city": "Rome"})]),
    "refusal": Reply.refusal("I will not.", "harm", partial="I wi"),
}


@pytest.mark.parametrize("name", BLOCKED)
async def test_row_5_blocked_candidates_go_to_on_llm_blocked_only(name: str) -> None:
    hooks = everything(check_response=True)
    flow = chat(hooks, policy=CallPolicy(retry_delay=0, empty=EmptyPolicy(accept=True)))
    async with TurnHarness(flow, model=ScriptedModel([BLOCKED[name]])) as h:
        result = await h.say("hi")
    assert result.message == h.shown == "blocked reply"
    assert hooks.log.names == ["on_llm_blocked"]
    assert hooks.log.of("on_llm_blocked")[0].phase == "candidate"
    assert not tool_ran(h)
    assert verdicts(h) == ["blocked"]


async def test_row_5_also_with_an_output_schema() -> None:
    hooks = everything()
    model = ScriptedModel([Reply.structured({"n": 1}).stopping("blocked", raw="SAFETY")])
    async with TurnHarness(chat(hooks, schema=SCHEMA), model=model) as h:
        result = await h.say("hi")
    assert result.message == "blocked reply"
    assert hooks.log.names == ["on_llm_blocked"]


EMPTY = {
    "nothing": Reply.empty(),
    "blank": Reply.empty(blank=" \n\t"),
    "reasoning only": Reply.reasoning("Hm."),
    "unspecified": Reply.empty("unspecified"),
    "malformed": Reply.empty("malformed_tool_call"),
    "a call without a name": Reply.tool_calls(Call("", {})).stopping("complete"),
}


@pytest.mark.parametrize("name", EMPTY)
async def test_row_6_nothing_in_it_is_the_empty_policys_and_check_response_never_sees_it(name: str) -> None:
    hooks = everything(check_response=True)
    async with TurnHarness(chat(hooks), model=ScriptedModel([EMPTY[name]] * 3)) as h:
        result = await h.say("hi")
    assert result.message == "error reply"
    assert hooks.log.names == ["on_llm_error"]
    (context,) = hooks.log.of("on_llm_error")
    assert context.kind == "empty_response"
    assert isinstance(context.error, LlmEmptyResponseError)
    assert verdicts(h) == ["empty"] * 3


async def test_row_6_with_a_schema_blank_text_is_empty_and_no_schema_failure() -> None:
    async with TurnHarness(
        chat(schema=SCHEMA), model=ScriptedModel([Reply.empty(blank=" "), Reply.structured({"n": 1})])
    ) as h:
        result = await h.say("hi")
    assert result.message == '{"n":1}'
    assert verdicts(h) == ["empty", "accepted"]


CUT = {
    "broken json": Reply.truncated(calls=[Call("look", raw='{"city": "Ro', ended=False)]),
    "whole json": Reply.truncated(calls=[Call("look", {"city": "Rome"})]),
    "one whole, one cut": Reply.truncated(
        "Looking.", calls=[Call("look", {"city": "Rome"}), Call("look", raw="{", ended=False)]
    ),
}


@pytest.mark.parametrize("name", CUT)
async def test_row_7_truncated_calls_are_rejected_and_never_run(name: str) -> None:
    hooks = everything(check_response=False)
    async with TurnHarness(chat(hooks), model=ScriptedModel([CUT[name]] * 3)) as h:
        result = await h.say("hi")
    assert result.message == h.shown == "error reply"
    assert hooks.log.names == ["on_llm_error"]
    (context,) = hooks.log.of("on_llm_error")
    assert context.kind == "response_rejected"
    assert context.rejection.reason == "truncated_tool_call"
    assert isinstance(context.error, LlmResponseRejectedError)
    assert not tool_ran(h)
    assert verdicts(h) == ["truncated_tool_call"] * 3


MALFORMED = {
    "with a call": Reply.tool_call("look", {"city": "Rome"}).stopping("malformed_tool_call"),
    "with text": Reply.text("Calling").stopping("malformed_tool_call"),
    "too many calls": Reply.tool_calls(*[Call("look", {"city": "Rome"}, pieces=1)] * 129),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_row_7_malformed_calls_are_rejected_and_never_run(name: str) -> None:
    hooks = everything()
    async with TurnHarness(chat(hooks), model=ScriptedModel([MALFORMED[name]] * 3)) as h:
        await h.say("hi")
    assert hooks.log.names == ["on_llm_error"]
    (context,) = hooks.log.of("on_llm_error")
    assert context.rejection.reason == "malformed_tool_call"
    assert not tool_ran(h)


@pytest.mark.parametrize("text", ["no json", '{"n": "one"}', "{}", "[" * 100_000, '{"n": "\ud800"}'])
async def test_row_8_a_wrong_object_is_rejected(text: str) -> None:
    hooks = everything(check_response=True)
    async with TurnHarness(chat(hooks, schema=SCHEMA), model=ScriptedModel([Reply.text([text])] * 3)) as h:
        await h.say("hi")
    assert hooks.log.names == ["on_llm_error"]
    (context,) = hooks.log.of("on_llm_error")
    assert context.rejection.reason == "schema"
    assert context.rejection.detail
    assert verdicts(h) == ["schema"] * 3


async def test_row_8_does_not_concern_replies_with_calls() -> None:
    model = ScriptedModel([Reply.tool_call("look", {"city": "Rome"}, text="no json"), Reply.structured({"n": 1})])
    async with TurnHarness(chat(schema=SCHEMA), model=model) as h:
        result = await h.say("hi")
    assert result.message == '{"n":1}'
    assert verdicts(h) == ["accepted", "accepted"]


async def test_row_8_an_exception_of_a_validator_that_is_no_value_error_propagates() -> None:
    import pydantic

    class Strange(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def look(cls, value: int) -> int:
            raise KeyError("n")

    hooks = everything()
    async with TurnHarness(chat(hooks, schema=Strange), model=ScriptedModel([Reply.structured({"n": 1})])) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, KeyError)
    assert hooks.log.names == []


async def test_row_9_check_response_rejects() -> None:
    hooks = Hooks(check_response=lambda candidate: candidate.text == "WRONG", on_llm_error="error reply")
    async with TurnHarness(chat(hooks), model=ScriptedModel(["WRONG", "right"])) as h:
        result = await h.say("hi")
    assert result.message == h.shown == "right"
    assert verdicts(h) == ["check_response", "accepted"]
    assert asked(h) == []


async def test_row_9_exhausted_goes_to_on_llm_error() -> None:
    hooks = everything(check_response=True)
    async with TurnHarness(chat(hooks), model=ScriptedModel(["WRONG"] * 3)) as h:
        await h.say("hi")
    (context,) = hooks.log.of("on_llm_error")
    assert context.kind == "response_rejected"
    assert context.rejection.reason == "check_response"
    assert context.last_response.text == "WRONG"
    assert "should_retry_llm_error" not in hooks.log.names


async def test_row_10_accepted() -> None:
    hooks = everything()
    async with TurnHarness(chat(hooks), model=ScriptedModel(["Hello"])) as h:
        result = await h.say("hi")
    assert (result.message, result.success) == ("Hello", True)
    assert hooks.log.names == ["check_response"]
    assert verdicts(h) == ["accepted"]
    assert replies(await h.history("Talk")) == ["Hello"]


async def test_row_10_truncated_text_is_accepted_with_a_warning_and_an_event() -> None:
    hooks = Hooks()
    async with TurnHarness(chat(hooks), model=ScriptedModel([Reply.truncated("Once upon a")])) as h:
        result = await h.say("hi")
        assert result.message == "Once upon a"
        (message,) = [m for m in await h.history("Talk") if isinstance(m, AssistantMessage)]
        assert message.truncated
        assert [e.text for e in await h.log() if e.level == "warning"] == ["a reply was cut off at the output limit"]
        assert [e.text for e in h.of(Warned)] == ["a reply was cut off at the output limit"]
    (candidate,) = hooks.log.of("check_response")
    assert candidate.truncated


async def test_the_first_match_wins() -> None:
    """One reply that every later row would take, too: rows 5 to 9, each with the ones above made impossible."""
    calls = [Call("look", {"city": "Rome"})]
    hooks = everything(check_response=True)
    cases: list[tuple[Reply, str]] = [
        (Reply.truncated("x", calls=calls).stopping("blocked"), "blocked"),
        (Reply.empty("malformed_tool_call"), "empty"),
        (Reply.truncated("x", calls=calls), "truncated_tool_call"),
        (Reply.truncated("x"), "schema"),
        (Reply.structured({"n": 1}), "check_response"),
    ]
    for reply, verdict in cases:
        flow = chat(hooks, schema=SCHEMA, policy=CallPolicy(attempts=1))
        async with TurnHarness(flow, model=ScriptedModel([reply])) as h:
            await h.say("hi")
        assert verdicts(h) == [verdict]


# -- auto_reject


async def test_auto_reject_off_lets_check_response_judge_truncated_calls() -> None:
    hooks = Hooks(check_response=truncated)
    flow = chat(hooks, policy=CallPolicy(retry_delay=0, auto_reject=frozenset()))
    cut = Reply.truncated(calls=[Call("look", {"city": "Rome"})])
    async with TurnHarness(flow, model=ScriptedModel([cut, "fine"])) as h:
        result = await h.say("hi")
    assert result.message == "fine"
    assert verdicts(h) == ["check_response", "accepted"]
    assert not tool_ran(h)


@pytest.mark.parametrize("stop", ["truncated", "malformed_tool_call"])
async def test_an_accepted_cut_call_still_never_runs_and_the_model_is_told(stop: str) -> None:
    flow = chat(policy=CallPolicy(retry_delay=0, auto_reject=frozenset({"schema"})))
    cut = Reply.tool_call("look", {"city": "Rome"}, text="Looking.").stopping(stop)
    model = ScriptedModel([cut, "I could not."])
    async with TurnHarness(flow, model=model) as h:
        result = await h.say("hi")
        history = await h.history("Talk")
    assert result.message == "I could not."
    assert not tool_ran(h)
    (told,) = [m for m in history if isinstance(m, ToolResult)]
    assert told.outcome == "not_run"
    assert "did not run" in told.content["error"]
    assert verdicts(h) == ["accepted", "accepted"]


async def test_auto_reject_off_lets_check_response_judge_wrong_objects() -> None:
    hooks = Hooks(check_response=lambda candidate: candidate.object is None and "{" in candidate.text)
    flow = chat(hooks, schema=SCHEMA, policy=CallPolicy(retry_delay=0, auto_reject=frozenset({"truncated"})))
    async with TurnHarness(flow, model=ScriptedModel([Reply.text("{"), Reply.text("so be it")])) as h:
        result = await h.say("hi")
    assert result.message == "so be it"
    assert verdicts(h) == ["check_response", "accepted"]


# -- outside of all this


async def test_exceptions_of_check_response_propagate_without_retry_or_recovery() -> None:
    def broken(candidate: Any) -> bool:
        raise ZeroDivisionError

    hooks = everything(check_response=broken)
    async with TurnHarness(chat(hooks), model=ScriptedModel(["Hello"])) as h:
        result = await h.say("hi")
    assert isinstance(h.turn.error, ZeroDivisionError)
    assert result.error is not None
    assert result.error.code == "handler"
    assert hooks.log.names == ["check_response"]
    assert verdicts(h) == ["thrown"]
    assert h.shown == ""


async def test_exceptions_of_the_prompt_propagate() -> None:
    def broken(self: Any) -> str:
        raise ZeroDivisionError

    hooks = everything()
    async with TurnHarness(chat(hooks, step={"get_prompt": broken}), model=ScriptedModel([])) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, ZeroDivisionError)
    assert hooks.log.names == []


async def test_exceptions_of_on_response_and_of_tool_handlers_propagate() -> None:
    async def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    hooks = everything()
    async with TurnHarness(chat(hooks, step={"on_response": broken}), model=ScriptedModel(["Hello"])) as h:
        await h.say("hi")
        assert isinstance(h.turn.error, ZeroDivisionError)
        assert h.shown == ""
        assert replies(await h.history("Talk")) == []

    class Failing(Talk):
        @tool
        async def look(self, city: str = "") -> str:
            """Look."""
            raise ZeroDivisionError

    async with TurnHarness(chat(hooks, base=Failing), model=ScriptedModel([Reply.tool_call("look", {})])) as h:
        result = await h.say("hi")
    assert isinstance(h.turn.error.__cause__, ZeroDivisionError)
    assert result.error is not None
    assert result.error.code == "handler"
    assert set(hooks.log.names) == {"check_response"}


async def test_unhandled_failures_end_in_their_error_with_the_attempts_attached() -> None:
    for reply, error in (
        (Reply.error(status=503), ModelInvocationError),
        (Reply.empty(), LlmEmptyResponseError),
        (Reply.tool_call("look").stopping("truncated"), LlmResponseRejectedError),
    ):
        hooks = Hooks()
        async with TurnHarness(chat(hooks), model=ScriptedModel([reply] * 3)) as h:
            result = await h.say("hi")
        assert isinstance(h.turn.error, error)
        assert h.turn.error.__notes__ == ["3 of 3 attempts were made (attempts_exhausted)."]
        assert not result.success
        assert hooks.log.names[-2:] == ["on_llm_error", "flow_on_llm_error"]


async def test_an_unhandled_block_is_an_llm_response_blocked_error_with_the_context() -> None:
    async with TurnHarness(chat(), model=ScriptedModel([Reply.refusal("I will not.", partial="I wi")])) as h:
        result = await h.say("hi")
    error = h.turn.error
    assert isinstance(error, LlmResponseBlockedError)
    assert (error.context.reason, error.context.text) == ("refusal", "I will not.")
    assert result.error is not None
    assert not result.error.retryable
    assert h.shown == ""


async def test_a_prompt_block_that_nobody_handles_keeps_its_cause() -> None:
    async with TurnHarness(chat(), model=ScriptedModel([Reply.prompt_blocked()])) as h:
        await h.say("hi")
    assert isinstance(h.turn.error, LlmResponseBlockedError)
    assert type(h.turn.error.__cause__).__name__ == "PromptBlockedError"


async def test_nothing_rejected_empty_or_nudged_stays_in_history() -> None:
    hooks = Hooks(check_response=lambda candidate: candidate.text == "WRONG")
    script = ["WRONG", Reply.empty(), Reply.truncated(calls=[Call("look", raw="{")]), "right"]
    model = ScriptedModel(script)
    async with TurnHarness(chat(hooks, policy=CallPolicy(attempts=4, retry_delay=0)), model=model) as h:
        await h.say("hi")
        history = await h.history("Talk")
    assert replies(history) == ["right"]
    assert not any(isinstance(m, (DirectMessage, ToolResult)) for m in history)
    assert all(len(request.messages) <= len(model.requests[0].messages) + 1 for request in model.requests)
    assert [texts(request)[-1] for request in model.requests] == [
        "hi",
        "hi",
        EmptyPolicy().nudge,
        "hi",
    ]
