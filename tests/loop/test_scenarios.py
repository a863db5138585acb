"""Scenarios that concern the model loop, in process (others are with the providers, the stores and the transport)."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from loop_flows import FAST, Hooks, RawGateway, asked, chat, replies, texts, tool_ran, verdicts, view_of
from stepwell import Flow, go, retry_with_model
from stepwell.engine import AttemptStarted, ReasoningDelta, Superseded, TextDelta, ToolInputDelta, ToolStarted, Warned
from stepwell.errors import LlmResponseBlockedError, LlmResponseRejectedError
from stepwell.loop import AskShorter, CallPolicy, EmptyPolicy, RaiseCap
from stepwell.messages import AssistantMessage
from stepwell.models import ModelSelection
from stepwell.models.providers import Providers
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ONE = CallPolicy(attempts=1)


async def test_scenario_C01_a_retry_supersedes_partial_text() -> None:  # noqa: N802
    """For the client that is connected; clients that join are the transport's."""
    model = ScriptedModel([Reply.text(["Hel", "lo"]).failing(), "Hi"])
    async with TurnHarness(chat(policy=FAST), model=model) as h:
        result = await h.say("hi")
    view = view_of(h)
    assert result.message == h.shown == view.visible == "Hi"
    assert view.states == ["", "Hel", "Hello", "Hello", "", "Hi", "Hi"]
    assert [event.text for event in h.of(TextDelta)] == ["Hel", "lo", "Hi"]


async def test_scenario_C02_reasoning_resets_too() -> None:  # noqa: N802
    first = Reply.reasoning(["Let me ", "think"]).failing()
    second = Reply.reasoning(["Again."], ["Hi"])
    async with TurnHarness(chat(policy=FAST), model=ScriptedModel([first, second])) as h:
        await h.say("hi")
        (message,) = [m for m in await h.history("Talk") if isinstance(m, AssistantMessage)]
    view = view_of(h)
    assert view.visible == "Hi"
    assert list(view.other.values()) == [["Again."]]
    assert [part.text for part in message.reasoning] == ["Again."]


@pytest.mark.parametrize("terminal", ["text", "unhandled"])
async def test_scenario_C05_a_retry_that_starts_and_then_fails_for_good(terminal: str) -> None:  # noqa: N802
    hooks = Hooks(on_llm_error="Please call us." if terminal == "text" else None)
    script = [Reply.text("Your booking is").failing(), Reply.text("Your book").failing(after=1)]
    async with TurnHarness(chat(hooks, policy=CallPolicy(attempts=2, retry_delay=0)), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
        stored = await h.history("Talk")
    assert view_of(h).visible == h.shown == ("Please call us." if terminal == "text" else "")
    assert result.success is (terminal == "text")
    assert not any("Your" in text for text in replies(stored))


async def test_scenario_C05_a_retry_that_dies_before_it_says_anything() -> None:  # noqa: N802
    """Nothing of the second attempt was shown, so the first one's half sentence is still there to be replaced."""
    hooks = Hooks(on_llm_error="Please call us.")
    script = [Reply.text("Your booking is").failing(), Reply.error()]
    async with TurnHarness(chat(hooks, policy=CallPolicy(attempts=2, retry_delay=0)), model=ScriptedModel(script)) as h:
        await h.say("hi")
    view = view_of(h)
    assert view.visible == "Please call us."
    assert view.states[-3:] == ["", "Please call us.", "Please call us."]


async def test_scenario_C07_fallback_mid_stream() -> None:  # noqa: N802
    hooks = Hooks(on_llm_error=retry_with_model("anthropic:spare"))
    script = {"m": [Reply.text("one two").failing(), "Next turn."], "spare": ["The alternate answers."]}
    async with TurnHarness(chat(hooks, policy=ONE), model=ScriptedModel(script)) as h:
        result = await h.say("hi")
        assert result.message == view_of(h).visible == "The alternate answers."
        assert [(e.provider, e.model) for e in h.of(AttemptStarted)] == [("scripted", "m"), ("anthropic", "spare")]
        assert set(result.usage) == {"scripted:m", "anthropic:spare"}
        result = await h.say("more")
        authors = [m.model for m in await h.history("Talk") if isinstance(m, AssistantMessage)]
    assert result.message == "Next turn."
    assert authors == ["anthropic:spare", "scripted:m"]
    assert h.model.requests[-1].selection.id == "scripted:m"


class Keyed(RawGateway):
    """A gateway with its own address and key, as an adapter has them; it notes what it would connect with."""

    def __init__(self, name: str, script: ScriptedModel, seen: list[tuple[str, str, str]]) -> None:
        self.name = name
        self.script = script
        self.seen = seen

    def stream(self, request: Any) -> Any:
        self.seen.append((request.selection.id, f"https://{self.name}.example", f"key of {self.name}"))
        return self.script.stream(request)


async def test_scenario_C09_the_model_is_switched_while_a_stalled_stream_is_retried() -> None:  # noqa: N802
    """Name, address and key always come from one selection: the round ends as it began, later the other one is used."""
    seen: list[tuple[str, str, str]] = []

    def should_retry_llm_error(self: Any, context: Any) -> bool:
        self.use_model("second:b")
        return True

    script = ScriptedModel({"a": [Reply.text("half").stalling(), "from a"], "b": ["from b"]})
    flow = chat(model="first:a", step={"should_retry_llm_error": should_retry_llm_error})
    models = Providers({name: Keyed(name, script, seen) for name in ("first", "second")})
    async with TurnHarness(flow, model=script, models=models) as h:
        assert (await h.say("hi")).message == "from a"
        assert (await h.say("hi")).message == "from b"
    first = ("first:a", "https://first.example", "key of first")
    assert seen == [first, first, ("second:b", "https://second.example", "key of second")]


async def test_scenario_C09_the_next_visit_has_the_other_model_whole() -> None:  # noqa: N802
    seen: list[tuple[str, str, str]] = []

    def config_model(self: Flow) -> str:
        return str(self.get_context("config.model", "first:a"))

    script = ScriptedModel({"a": ["from a"], "b": ["from b"]})
    models = Providers({name: Keyed(name, script, seen) for name in ("first", "second")})
    async with TurnHarness(chat(flow={"config_model": config_model}), model=script, models=models) as h:
        await h.say("hi")
        assert (await h.say("hi", session_id=None, config={"model": "second:b"})).message == "from b"
    assert seen == [
        ("first:a", "https://first.example", "key of first"),
        ("second:b", "https://second.example", "key of second"),
    ]


async def test_scenario_C10_refusal_with_a_schema() -> None:  # noqa: N802
    hooks = Hooks(on_llm_blocked="I may not answer that.")
    model = ScriptedModel([Reply.refusal("I cannot help.", "harm", partial='{"n"')])
    async with TurnHarness(chat(hooks, schema=SCHEMA), model=model) as h:
        result = await h.say("hi")
    (context,) = hooks.log.of("on_llm_blocked")
    assert (context.reason, context.text) == ("refusal", "I cannot help.")
    assert context.provider_details["category"] == "harm"
    assert result.message == h.shown == "I may not answer that."
    assert len(model.requests) == 1
    assert hooks.log.names == ["on_llm_blocked"]


async def test_scenario_C10_another_model_call_only_if_the_hook_asks() -> None:  # noqa: N802
    hooks = Hooks(on_llm_blocked=go("Other"))
    model = ScriptedModel([Reply.refusal("I cannot help."), "I can help."])
    async with TurnHarness(chat(hooks, schema=SCHEMA), model=model) as h:
        result = await h.say("hi")
    assert result.message == view_of(h).visible == "I can help."
    assert model.requests[1].system == "The other stage."


@pytest.mark.parametrize("mode", ["live", "held", "off"])
async def test_scenario_C11_content_filter_with_text(mode: str) -> None:  # noqa: N802
    hooks = Hooks(on_llm_blocked="Let us talk about rooms.")
    blocked = Reply.text("I would rather not.").stopping("blocked", raw="content_filter")
    async with TurnHarness(chat(hooks, step={"stream_mode": mode}), model=ScriptedModel([blocked])) as h:
        result = await h.say("hi")
        assert replies(await h.history("Talk")) == []
    assert result.message == view_of(h).visible == "Let us talk about rooms."
    assert hooks.log.of("on_llm_blocked")[0].reason == "content_filter"
    assert hooks.log.names == ["on_llm_blocked"]


@pytest.mark.parametrize("handled", [False, True])
async def test_scenario_C12_content_filter_on_the_prompt(handled: bool) -> None:  # noqa: N802
    hooks = Hooks(on_llm_blocked="Let us talk about rooms." if handled else None)
    model = ScriptedModel([Reply.prompt_blocked("safety", raw="PROHIBITED_CONTENT")])
    async with TurnHarness(chat(hooks, policy=CallPolicy()), model=model) as h:
        result = await h.say("hi")
    assert len(model.requests) == 1
    assert h.clock.slept == []
    assert result.success is handled
    if not handled:
        assert isinstance(h.turn.error, LlmResponseBlockedError)
        assert h.turn.error.context.phase == "prompt"


CUT = Reply.truncated(calls=[Call("look", raw='{"city": 1', ended=False)])
WHOLE = Reply.truncated(calls=[Call("look", {"city": "Rome"})])


@pytest.mark.parametrize(
    ("on_truncated", "caps", "nudges"),
    [
        (None, [100] * 3, ["hi"] * 3),
        (RaiseCap(limit=1000), [100, 200, 200], ["hi"] * 3),
        (AskShorter("Less."), [100] * 3, ["hi", "Less.", "hi"]),
    ],
)
async def test_scenario_C13_truncated_tool_call_with_broken_json(  # noqa: N802
    on_truncated: Any, caps: list[int], nudges: list[str]
) -> None:
    policy = CallPolicy(retry_delay=0, on_truncated=on_truncated)
    flow = chat(policy=policy, model=ModelSelection("scripted", "m", {"max_tokens": 100}))
    async with TurnHarness(flow, model=ScriptedModel([CUT] * 3)) as h:
        await h.say("hi")
    assert [request.selection.params["max_tokens"] for request in h.model.requests] == caps
    assert [texts(request)[-1] for request in h.model.requests] == nudges
    assert isinstance(h.turn.error, LlmResponseRejectedError)
    assert f"{caps[-1]} tokens (max_tokens)" in h.turn.error.message
    assert not tool_ran(h)


async def test_scenario_C14_truncated_tool_call_that_parses_is_still_not_run() -> None:  # noqa: N802
    async with TurnHarness(chat(policy=FAST), model=ScriptedModel([WHOLE] * 3)) as h:
        await h.say("hi")
        assert replies(await h.history("Talk")) == []
    assert verdicts(h) == ["truncated_tool_call"] * 3
    assert not tool_ran(h)


async def test_scenario_C15_truncated_final_text() -> None:  # noqa: N802
    hooks = Hooks()
    async with TurnHarness(chat(hooks), model=ScriptedModel([Reply.truncated("Once upon a")])) as h:
        result = await h.say("hi")
        (message,) = [m for m in await h.history("Talk") if isinstance(m, AssistantMessage)]
        warnings = [entry for entry in await h.log() if entry.level == "warning"]
    assert result.message == "Once upon a"
    assert hooks.log.of("check_response")[0].truncated
    assert message.truncated
    assert len(warnings) == len(h.of(Warned)) == 1


@pytest.mark.parametrize(
    ("reply", "nudged"),
    [
        (Reply.empty(), True),
        (Reply.empty("malformed_tool_call"), True),
        (Reply.empty("unspecified"), True),
        (Reply.empty("truncated"), False),
        (Reply.empty("blocked"), False),
    ],
)
@pytest.mark.parametrize("policy", [CallPolicy(retry_delay=0), CallPolicy(empty=EmptyPolicy(retries=2))])
async def test_scenario_C18_empty_replies(reply: Reply, nudged: bool, policy: CallPolicy) -> None:  # noqa: N802
    hooks = Hooks(on_llm_error="sorry", on_llm_blocked="sorry")
    model = ScriptedModel(default=reply)
    async with TurnHarness(chat(hooks, policy=policy), model=model) as h:
        result = await h.say("hi")
    assert result.message == "sorry"
    assert len(model.requests) == (3 if nudged else 1)
    nudges = [text for request in model.requests for text in texts(request) if text == EmptyPolicy().nudge]
    assert len(nudges) == (2 if nudged else 0)
    for request in model.requests:
        assert all(text.strip() for text in texts(request))
        assert not any(isinstance(m, AssistantMessage) for m in request.messages)


@pytest.mark.parametrize("mode", ["live", "held"])
async def test_scenario_C20_validation_after_tokens(mode: str) -> None:  # noqa: N802
    hooks = Hooks(check_response=lambda candidate: candidate.text.startswith("WRONG"))
    model = ScriptedModel(["WRONG answer", "right answer"])
    async with TurnHarness(chat(hooks, policy=FAST, step={"stream_mode": mode}), model=model) as h:
        result = await h.say("hi")
        assert replies(await h.history("Talk")) == ["right answer"]
    view = view_of(h)
    assert result.message == view.visible == "right answer"
    assert not any("WRONG" in state and "right" in state for state in view.states)
    if mode == "held":
        assert not any("WRONG" in event.text for event in h.of(TextDelta))
        assert h.of(Superseded) == []


async def test_scenario_C21_guardrail_on_output() -> None:  # noqa: N802
    hooks = Hooks(check_response=True, on_llm_error="I cannot say that.")
    reply = Reply.reasoning("secret thoughts", "secret text")
    model = ScriptedModel([reply, Reply.tool_call("look", {"city": "secret"}, text="secret")] * 2)
    policy = CallPolicy(attempts=4, retry_delay=0)
    async with TurnHarness(chat(hooks, policy=policy, step={"stream_mode": "held"}), model=model) as h:
        await h.say("hi")
    output = h.of((TextDelta, ReasoningDelta, ToolInputDelta))
    assert "".join(event.text for event in output) == "I cannot say that."
    assert "secret" not in str(h.events)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("mode", ["live", "held", "off"])
async def test_scenario_C22_guardrail_against_tools(mode: str, parallel: bool) -> None:  # noqa: N802
    hooks = Hooks(check_response=lambda candidate: "forbidden" in candidate.text)
    reply = Reply.tool_calls(Call("look", {"city": "a"}), Call("look", {"city": "b"}), text="forbidden words")
    flow = chat(hooks, policy=FAST, step={"stream_mode": mode}, flow={"parallel_tools": parallel})
    async with TurnHarness(flow, model=ScriptedModel([reply, "Fine words."])) as h:
        result = await h.say("hi")
    assert result.message == view_of(h).visible == "Fine words."
    assert h.of(ToolStarted) == []
    assert flow.stage_class.ran == []
    assert asked(h) == []


async def test_scenario_C20_a_client_that_looks_at_any_moment_sees_one_attempt() -> None:  # noqa: N802
    """`turn.text` between any two deltas is the beginning of one attempt's text."""
    gates = [anyio.Event() for _ in range(2)]
    hooks = Hooks(check_response=lambda candidate: candidate.text.startswith("WRONG"))
    script = [Reply.text("WRONG answer").gated(gates[0], after=1), Reply.text("right answer").gated(gates[1], after=1)]
    states: list[str] = []
    async with (
        TurnHarness(chat(hooks, policy=FAST), model=ScriptedModel(script)) as h,
        h.engine.stream("Chat", "hi") as turn,
    ):
        for gate in gates:
            await h.clock.settle()
            states.append(turn.text)
            gate.set()
        async for _ in turn:
            pass
    assert [*states, turn.text] == ["WRONG ", "right ", "right answer"]
