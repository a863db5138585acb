"""A step as the model loop sees it: hooks combined, stage first, then flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyio.lowlevel import checkpoint_if_cancelled

from stepwell.flow._definition import FlowDefinition, StepDefinition
from stepwell.flow._returned import handled
from stepwell.flow._runtime import UnitRuntime
from stepwell.flow._step import Step
from stepwell.loop import LlmAttemptErrorContext, LlmBlockedContext, LlmErrorContext, StreamMode
from stepwell.messages import JsonObject, JsonValue, Message, ToolCall, ToolOutcome, ToolResult
from stepwell.models import Candidate, ModelSelection, ToolSchema
from stepwell.outcomes import Outcome, SuspendRequest
from stepwell.tools import Handler, ToolDefinition, ToolErrors

__all__ = ["StepHost"]


class StepHost:
    """Implements `LoopHost` for one step in one unit."""

    allow_alternate_attempts = False

    def __init__(self, step: Step[Any, Any], definition: FlowDefinition, runtime: UnitRuntime) -> None:
        flow = step.flow
        self.step = step
        self.runtime = runtime
        self.built: StepDefinition = definition.steps[type(step)]
        self.ns = step.get_memory_space()
        self.stage_id = step.id
        self.policy = step.get_llm_call_policy()
        self.stream_mode: StreamMode = step.stream_mode or flow.stream_mode
        partial, parallel = step.stream_partial_objects, step.parallel_tools
        self.stream_partial_objects = flow.stream_partial_objects if partial is None else partial
        self.parallel_tools = flow.parallel_tools if parallel is None else parallel
        self.tool_errors: ToolErrors = step.tool_errors or flow.tool_errors
        self.visit = runtime.visit
        self.clock = runtime.clock
        self.alarm = runtime.alarm
        self.observer = runtime.observer
        self.run_id = runtime.run_id
        self.step_id = runtime.step_id
        self.conversation = runtime.session_id
        self.cancelled = runtime.cancelled
        self.journal = runtime.journal
        self.gateway = runtime.gateway
        self.spent = runtime.spent
        self.add_usage = runtime.add_usage
        self.open_call = runtime.open_call

    @property
    def selection(self) -> ModelSelection:
        """The step's model now: a hook may have chosen another."""
        return self.step.get_model_selection()

    def prompt(self) -> str | None:
        """The system prompt, with the summary of what was compacted."""
        return self.runtime.with_summary(self.ns, self.step.get_prompt())

    def history(self) -> Sequence[Message]:
        """See `LoopHost`."""
        return self.runtime.messages(self.ns)

    def exposed(self) -> Sequence[ToolSchema]:
        """See `LoopHost`."""
        return self.built.exposed(self.step)

    def output_schema(self) -> JsonObject | None:
        """See `LoopHost`."""
        return self.built.output.schema if self.built.output else None

    def parse_output(self, text: str) -> JsonValue:
        """See `LoopHost`."""
        return self.built.output.parse(text) if self.built.output else text

    def check_response(self, candidate: Candidate) -> bool:
        """See `LoopHost`."""
        return "check_response" in self.built.hooks and self.step.check_response(candidate)

    def should_retry_llm_error(self, context: LlmAttemptErrorContext) -> bool | None:
        """See `LoopHost`."""
        decided = self.step.should_retry_llm_error(context)
        if decided is not None or self.cancelled.is_set():
            return decided
        return self.step.flow.should_retry_llm_error(context)

    async def on_llm_blocked(self, context: LlmBlockedContext) -> Any:
        """See `LoopHost`."""
        decided = await self.step.on_llm_blocked(context)
        if decided is not None:
            return decided
        await checkpoint_if_cancelled()
        return await self.step.flow.on_llm_blocked(context)

    async def on_llm_error(self, context: LlmErrorContext) -> Any:
        """See `LoopHost`."""
        decided = await self.step.on_llm_error(context)
        if decided is not None:
            return decided
        await checkpoint_if_cancelled()
        return await self.step.flow.on_llm_error(context)

    async def on_answer(self, request: SuspendRequest, value: JsonValue) -> Any:
        """See `LoopHost`."""
        return await self.step.on_answer(request, value)

    def handler(self, name: str) -> tuple[Handler, ToolDefinition | None] | None:
        """See `LoopHost`."""
        handler = self.built.table.handlers.get(name)
        if handler is None or not self.exposes(name):
            return None
        return handler, self.built.tools[name][0]

    def exposes(self, name: str) -> bool:
        """See `LoopHost`."""
        return self.built.exposes(self.step, name)

    def batch_handler(self, calls: Sequence[ToolCall]) -> Handler | None:
        """See `LoopHost`."""
        handler = self.built.table.find(call.name for call in calls)
        if handler is None or not all(self.exposes(name) for name in handler.names):
            return None
        return handler

    def bound(self, handler: Handler) -> Any:
        """See `LoopHost`."""
        return getattr(self.step, handler.name)

    def outcome(self, value: Any, tool: str) -> Outcome:
        """See `LoopHost`."""
        return handled(self.step, value, tool)

    def result(self, call: ToolCall, content: JsonValue, outcome: ToolOutcome) -> ToolResult:
        """See `LoopHost`."""
        return ToolResult(
            id=self.runtime.new_id(self.stage_id), call=call.id, name=call.name, content=content, outcome=outcome
        )
