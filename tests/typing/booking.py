"""A typed flow as its author would write it: all of it type-checks, strictly. Checked by mypy, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict, assert_type

from pydantic import BaseModel, Field

from stepwell import (
    CallPolicy,
    CallPolicyOverride,
    Candidate,
    Flow,
    LlmErrorContext,
    LogicStep,
    ModelSelection,
    Outcome,
    Step,
    TerminateSessionStep,
    ToolCall,
    ToolContext,
    ToolDefinition,
    UserMessage,
    direct,
    direct_to,
    finish,
    go,
    retry_with_model,
    stay,
    tool,
    tools,
)
from stepwell.flow import LogicResult, ResponseResult
from stepwell.loop import LlmBlockedContext
from stepwell.messages import Message
from stepwell.outcomes import Direct, Go, Stay
from stepwell.stage import BlockedResult, ErrorResult


class Invoice(BaseModel):
    number: str
    total: float


class TripState(TypedDict):
    city: str
    nights: int


class AskStep(Step[str, TripState]):
    """Text out, typed state."""

    stream_mode = "held"
    tool_errors = "report"
    aliases = ("OldAsk",)

    def get_prompt(self) -> str:
        return f"Ask for the city of {self.get_context('config.customer')}."

    def config_llm_call_policy(self) -> CallPolicyOverride:
        return CallPolicyOverride(timeout=None, attempts=2)

    @tool
    async def city(self, name: Annotated[str, Field(min_length=1)], ctx: ToolContext) -> Outcome:
        """Note the city."""
        if not name.strip():
            return stay("Which city?")
        self.save_state({"city": name, "nights": 1})
        assert_type(self.get_state("trip", type_=TripState), TripState)
        return go(SortStep).with_state({"city": name}).with_message("Sort this.")

    @tool("nights", timeout=20, on_error="report")
    def count(self, nights: int) -> str:
        """Note the nights."""
        return f"{nights} nights"

    @tools("city", "nights")
    async def both(self, calls: Sequence[ToolCall]) -> Go:
        return go("SortStep")

    async def on_response(self, result: str) -> ResponseResult:
        assert_type(result, str)
        if result == "bye":
            return finish("Bye.")
        return SortStep if "go" in result else None

    def check_response(self, candidate: Candidate) -> bool:
        return candidate.truncated

    async def on_llm_blocked(self, context: LlmBlockedContext) -> BlockedResult:
        return "Let us talk about the trip."

    async def on_llm_error(self, context: LlmErrorContext) -> ErrorResult:
        if context.max_attempts > 1:
            return retry_with_model("openai:gpt-5.1")
        return direct_to(AskStep, "Please try again.")

    async def on_visit(self, message: UserMessage | None) -> None:
        self.merge_state({"asked": message.text if message else ""})

    def on_crossing(self, message: Message | str | None, prior_step: str | None = None) -> Message | str | None:
        return message or "Begin."


class SortStep(LogicStep):
    async def run_logic(self) -> LogicResult:
        nights = self.flow.get_step_state(AskStep, "nights", type_=int, default=0)
        return InvoiceStep if nights else direct_to(AskStep, "How many nights?")


class InvoiceStep(Step[Invoice]):
    """A typed object out."""

    def struct_output_schema(self) -> type[Invoice]:
        return Invoice

    async def on_response(self, result: Invoice) -> ResponseResult:
        assert_type(result, Invoice)
        return direct({"total": result.total}).with_content_type("application/json")

    def define_tools(self) -> Sequence[ToolDefinition]:
        return [ToolDefinition("end", "End it.", Invoice)]

    def use_tools(self) -> Sequence[str]:
        return ("end",)

    @tool("end", defined=False)
    async def end(self, number: str, total: float) -> Stay | type[TerminateSessionStep]:
        return TerminateSessionStep if total else stay()


class BookingFlow(Flow):
    id = "booking"
    stream_mode = "live"
    on_busy = "reject"

    async def init(self) -> None:
        self.memory.enable_summary("talk", model="openai:gpt-5.1-mini")

    def config_model(self) -> ModelSelection | str:
        return "openai:gpt-5.1"

    def config_llm_call_policy(self) -> CallPolicy:
        return CallPolicy(timeout=60, attempts=2)

    def define_steps(self) -> Sequence[Step[Any, Any]]:
        return [
            AskStep(self).use_memory("talk"),
            SortStep(self),
            InvoiceStep(self).use_model("openai:gpt-5.1-mini"),
            *super().define_steps(),
        ]

    def initial_step(self) -> type[Step[Any, Any]]:
        return AskStep

    async def on_restore_session(self, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
        return None if document["status"] == "completed" else document

    async def on_turn_error(self, error: Exception) -> Literal["abort"] | None:
        return "abort" if isinstance(error, RuntimeError) else None


async def signatures(step: AskStep, ctx: ToolContext) -> None:
    """Decorated methods keep their signatures, chained outcomes their types."""
    assert_type(await step.city("Rome", ctx), Outcome)
    assert_type(step.count(2), str)
    assert_type(await step.both([]), Go)
    assert_type(step.use_memory("talk"), AskStep)
    assert_type(direct("x").with_state({}).with_prompt("p"), Direct)
    assert_type(step.get_state("nights", type_=int, default=1), int)
