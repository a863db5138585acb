"""What listens to a turn's events: OpenTelemetry spans and the debug log. Neither ever sees a delta."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from stepwell.messages import Usage

from ._events import (
    AttemptStarted,
    CandidateClassified,
    HookCalled,
    StageEntered,
    ToolFinished,
    ToolStarted,
    TurnEvent,
    TurnFinished,
    TurnStarted,
    Warned,
)
from ._result import TurnResult

__all__ = ["TurnLog", "TurnSpans"]


class TurnSpans:
    """Spans of one turn, after OpenTelemetry's semantic conventions for generative AI.

    A turn is an `invoke_agent` span, each attempt a `chat` span below it, each handler an `execute_tool` span.

    Args:
        capture_content: Whether tool arguments and results may be put on spans.
        tracer: Of the global provider by default.
    """

    def __init__(self, *, capture_content: bool = False, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("stepwell")
        self._content = capture_content
        self._parent = trace.get_current_span()
        self._turn: Span | None = None
        self._attempt: Span | None = None
        self._tools: dict[str, Span] = {}

    def __call__(self, event: TurnEvent) -> None:
        """See `Listener`."""
        match event:
            case TurnStarted():
                self._turn = self._start(f"invoke_agent {event.flow}", SpanKind.INTERNAL, self._parent)
                self._set(
                    self._turn,
                    {
                        "gen_ai.operation.name": "invoke_agent",
                        "gen_ai.agent.name": event.flow,
                        "gen_ai.conversation.id": event.session,
                        "stepwell.run.id": event.run,
                        "stepwell.invocation.id": event.invocation,
                    },
                )
            case AttemptStarted():
                self._attempt = self._start(f"chat {event.model}", SpanKind.CLIENT, self._turn)
                self._set(
                    self._attempt,
                    {
                        "gen_ai.operation.name": "chat",
                        "gen_ai.provider.name": event.provider,
                        "gen_ai.request.model": event.model,
                        "stepwell.step.id": event.step,
                        "stepwell.attempt": event.attempt,
                    },
                )
            case CandidateClassified():
                self._classified(event)
            case ToolStarted():
                span = self._tools[event.call] = self._start(
                    f"execute_tool {event.name}", SpanKind.INTERNAL, self._turn
                )
                self._set(
                    span,
                    {
                        "gen_ai.operation.name": "execute_tool",
                        "gen_ai.tool.name": event.name,
                        "gen_ai.tool.call.id": event.call,
                        "gen_ai.tool.call.arguments": self._captured(event.args),
                    },
                )
            case ToolFinished():
                self._tool_finished(event)
            case StageEntered():
                self._event("stepwell.stage.entered", {"stepwell.stage": event.stage})
            case HookCalled():
                self._event("stepwell.hook", {"stepwell.hook": event.hook, "stepwell.handled": event.handled})
            case Warned():
                self._event("stepwell.warning", {"message": event.text})
            case TurnFinished():
                self._finished(event.result)
            case _:
                pass

    def _start(self, name: str, kind: SpanKind, parent: Span | None) -> Span:
        context = set_span_in_context(parent) if parent is not None else None
        return self._tracer.start_span(name, context=context, kind=kind)

    def _set(self, span: Span, attributes: dict[str, Any]) -> None:
        for key, value in attributes.items():
            if value is not None:
                span.set_attribute(key, value)

    def _event(self, name: str, attributes: dict[str, Any]) -> None:
        if self._turn is not None:
            self._turn.add_event(name, attributes)

    def _captured(self, value: Any) -> str | None:
        return msgspec.json.encode(value).decode() if self._content else None

    def _classified(self, event: CandidateClassified) -> None:
        span, self._attempt = self._attempt, None
        if span is None:
            return
        usage = event.usage or Usage()
        self._set(
            span,
            {
                "stepwell.verdict": event.verdict,
                "gen_ai.response.finish_reasons": [event.stop] if event.stop else None,
                "gen_ai.usage.input_tokens": usage.input,
                "gen_ai.usage.output_tokens": usage.output,
                "error.type": event.detail if event.verdict == "thrown" else None,
            },
        )
        if event.verdict != "accepted":
            span.set_status(Status(StatusCode.ERROR, event.verdict))
        span.end()

    def _tool_finished(self, event: ToolFinished) -> None:
        span = self._tools.pop(event.call, None)
        if span is None:
            return
        self._set(span, {"gen_ai.tool.call.result": self._captured(event.content)})
        if event.outcome != "ok":
            span.set_status(Status(StatusCode.ERROR, event.outcome))
        span.end()

    def _finished(self, result: TurnResult) -> None:
        for span in (*self._tools.values(), self._attempt):
            if span is not None:
                span.set_status(Status(StatusCode.ERROR, "cancelled"))
                span.end()
        self._tools.clear()
        if self._turn is None:
            return
        self._set(self._turn, {"stepwell.status": result.status, "stepwell.units": result.units})
        if result.error is not None:
            self._turn.set_attribute("error.type", result.error.code)
            self._turn.set_status(Status(StatusCode.ERROR, result.error.message))
        self._turn.end()
        self._turn = None


_logger = logging.getLogger("stepwell.turn")


class TurnLog:
    """Every event as one line at DEBUG.

    Args:
        capture_content: Whether lines may hold tool arguments, results and replies.
    """

    def __init__(self, *, capture_content: bool = False) -> None:
        self._content = capture_content

    def __call__(self, event: TurnEvent) -> None:
        """See `Listener`."""
        data: dict[str, Any] = msgspec.to_builtins(event)
        if not self._content:
            for key in ("args", "content", "value", "text", "result"):
                if key == "text" and isinstance(event, Warned):
                    continue
                data.pop(key, None)
        kind = data.pop("type")
        _logger.debug("%s %s", kind, " ".join(f"{key}={value}" for key, value in data.items()))
