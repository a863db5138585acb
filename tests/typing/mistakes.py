"""What must not type-check: every line here carries the error it has to give, so one that passes is found as well."""

from __future__ import annotations

from typing import Any, TypedDict

from stepwell import (
    CallPolicy,
    CallPolicyOverride,
    Flow,
    LlmErrorContext,
    LogicStep,
    Step,
    ToolDefinition,
    direct,
    finish,
    go,
    retry_with_model,
    stay,
    tool,
)
from stepwell.flow import LogicResult, ResponseResult
from stepwell.loop import LlmBlockedContext
from stepwell.stage import BlockedResult, ErrorResult


class State(TypedDict):
    city: str


class Other(Step):
    pass


class Responds(Step[int, State]):
    """Outcomes where they are not legal, and wrong types of output and state."""

    async def on_response(self, result: int) -> ResponseResult:
        if result == 1:
            return stay("only tools stay")  # type: ignore[return-value]
        if result == 2:
            return retry_with_model("openai:gpt-5.1")  # type: ignore[return-value]
        if result == 3:
            return {"an": "object"}  # type: ignore[return-value]
        return Other(self.flow)  # type: ignore[return-value]

    async def on_llm_blocked(self, context: LlmBlockedContext) -> BlockedResult:
        if context.phase == "prompt":
            return retry_with_model("openai:gpt-5.1")  # type: ignore[return-value]
        return stay()  # type: ignore[return-value]

    async def on_llm_error(self, context: LlmErrorContext) -> ErrorResult:
        return stay()  # type: ignore[return-value]

    async def on_visit(self, message: Any) -> None:
        self.save_state(["no", "mapping"])  # type: ignore[arg-type]
        nights: str = self.get_state("nights", type_=int)  # type: ignore[assignment]
        self.use_model(7)  # type: ignore[arg-type]
        self.get_memory().append(7)  # type: ignore[arg-type]
        self.remove_state(nights, "more")  # type: ignore[call-arg]


class WrongOutput(Step[int]):
    async def on_response(self, result: str) -> ResponseResult:  # type: ignore[override]
        return result


class WrongHooks(Step):
    stream_mode = "loud"  # type: ignore[assignment]
    tool_errors = "ignore"  # type: ignore[assignment]

    def get_prompt(self) -> int:  # type: ignore[override]
        return 7

    def check_response(self, candidate: str) -> bool:  # type: ignore[override]
        return False

    def on_enter(self) -> None:  # type: ignore[override]
        """Not async."""


class WrongLogic(LogicStep):
    async def run_logic(self) -> LogicResult:
        if self.get_state("a"):
            return direct("a logic step has no conversation")  # type: ignore[return-value]
        if self.get_state("b"):
            return "Other"  # type: ignore[return-value]
        return None  # type: ignore[return-value]


class Tools(Step):
    @tool
    async def count(self, n: int) -> str:
        return str(n)

    @tool(timeout="soon")  # type: ignore[call-overload, untyped-decorator]
    async def late(self) -> None: ...

    async def calls(self) -> None:
        await self.count("many")  # type: ignore[arg-type]
        await self.count()  # type: ignore[call-arg]
        number: int = await self.count(1)  # type: ignore[assignment]
        print(number)


class WrongFlow(Flow):
    on_busy = "wait"  # type: ignore[assignment]

    def config_model(self) -> int:  # type: ignore[override]
        return 7

    def initial_step(self) -> str:  # type: ignore[override]
        return "Tools"


def outcomes() -> None:
    """Outcomes take what they are made of."""
    go(7)  # type: ignore[arg-type]
    go("Other").with_state(["a"])  # type: ignore[arg-type]
    finish("x").with_prompt(7)  # type: ignore[arg-type]
    direct("x").with_message(7)  # type: ignore[arg-type]
    print(stay().target)  # type: ignore[attr-defined]
    retry_with_model(7)  # type: ignore[arg-type]
    CallPolicy(attempts="many")  # type: ignore[arg-type]
    CallPolicyOverride(attempts=None)  # type: ignore[arg-type]
    ToolDefinition("x", on_error="ignore")  # type: ignore[arg-type]
