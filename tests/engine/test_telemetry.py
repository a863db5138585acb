"""OpenTelemetry spans: made from the event stream, behind one boolean, without content by default."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from engine_flows import BookFlow, TalkFlow
from stepwell.engine._telemetry import TurnSpans
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def named(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_turn_is_a_tree_of_spans(spans: InMemorySpanExporter) -> None:
    script = [
        Reply.error(status=529),
        Reply.tool_call("note", {"text": "elephant"}).with_usage(9, 4),
        "Your elephant.",
    ]
    async with TurnHarness(BookFlow, model=ScriptedModel(script), telemetry=True) as h:
        await h.say("my elephant")
    tree = named(spans)
    assert set(tree) == {"invoke_agent BookFlow", "chat m", "execute_tool note"}
    turn = tree["invoke_agent BookFlow"]
    assert turn.attributes["gen_ai.conversation.id"] == h.session_id
    assert all(s.parent.span_id == turn.context.span_id for s in spans.get_finished_spans() if s is not turn)
    chats = [s for s in spans.get_finished_spans() if s.name == "chat m"]
    assert [s.attributes["stepwell.verdict"] for s in chats] == ["thrown", "accepted", "accepted"]
    assert chats[0].status.status_code is StatusCode.ERROR
    assert chats[1].attributes["gen_ai.usage.input_tokens"] == 9
    text = "".join(s.to_json() for s in spans.get_finished_spans())
    assert "elephant" not in text


async def test_content_is_captured_only_when_asked(spans: InMemorySpanExporter) -> None:
    script = [Reply.tool_call("note", {"text": "elephant"}), "Done."]
    async with TurnHarness(BookFlow, model=ScriptedModel(script), telemetry=True, capture_content=True) as h:
        await h.say("go")
    tool = named(spans)["execute_tool note"]
    assert tool.attributes["gen_ai.tool.call.arguments"] == '{"text":"elephant"}'
    assert tool.attributes["gen_ai.tool.call.result"] == '"noted elephant"'


async def test_failures_show_on_their_spans(spans: InMemorySpanExporter) -> None:
    async with TurnHarness(BookFlow, model=ScriptedModel([Reply.tool_calls(Call("fail"))]), telemetry=True) as h:
        await h.say("go")
    tree = named(spans)
    assert tree["execute_tool fail"].status.status_code is StatusCode.ERROR
    assert tree["invoke_agent BookFlow"].attributes["error.type"] == "handler"


async def test_hooks_and_warnings_are_events_of_the_turn(spans: InMemorySpanExporter) -> None:
    script = [Reply.error(status=500), Reply.tool_call("missing"), "Done."]
    async with TurnHarness(BookFlow, model=ScriptedModel(script), telemetry=True) as h:
        await h.say("go")
    names = [event.name for event in named(spans)["invoke_agent BookFlow"].events]
    assert "stepwell.hook" in names
    assert "stepwell.warning" in names
    assert "stepwell.stage.entered" in names


async def test_a_cancelled_turn_ends_its_spans(spans: InMemorySpanExporter) -> None:
    clock = FakeClock()
    model = ScriptedModel([Reply.text("x").stalling(after=1)], clock=clock)
    harness = TurnHarness(TalkFlow, model=model, clock=clock, telemetry=True)
    async with harness as h, h.engine.stream("TalkFlow", "a") as turn:
        await model.wait_stalled()
        turn.cancel()
    tree = named(spans)
    assert tree["chat m"].attributes["stepwell.verdict"] == "cancelled"
    assert tree["invoke_agent TalkFlow"].attributes["error.type"] == "turn_cancelled"


async def test_off_means_no_span(spans: InMemorySpanExporter) -> None:
    async with TurnHarness(TalkFlow, model=ScriptedModel(["x"])) as h:
        await h.say("a")
    assert spans.get_finished_spans() == ()


def test_events_that_come_alone_do_no_harm() -> None:
    from stepwell.engine import CandidateClassified, StageEntered, ToolFinished, TurnFinished, TurnResult

    listener = TurnSpans()
    for event in (
        CandidateClassified("s", 1, "accepted"),
        ToolFinished("s", "c", "t", "ok"),
        StageEntered("A"),
        TurnFinished(
            TurnResult(success=True, session_id="", run_id="", invocation_id="", current="", status="running")
        ),
    ):
        listener(event)
