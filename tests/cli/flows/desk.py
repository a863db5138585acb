"""A flow with every way between stages, and models that say what the tests of the command need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepwell import (
    Flow,
    LogicStep,
    Outcome,
    Providers,
    Step,
    TerminateSessionStep,
    ToolContext,
    direct,
    direct_to,
    finish,
    go,
    tool,
)
from stepwell.loop import CallPolicy
from stepwell.testing import Reply, ScriptedModel


def closing(text: str) -> Outcome:
    """A helper of the project: what it leads to counts for every step that calls it."""
    return finish(text)


SECRET = "the customer's secret"


class BaseStep(Step):
    @tool
    async def leave(self) -> Outcome:
        """Say goodbye."""
        if isinstance(self, CloseDesk):
            return finish("never")
        return closing("Goodbye.")


class AskStep(BaseStep):
    def get_prompt(self) -> str:
        return "Ask for the topic."

    @tool
    async def note(self, topic: str) -> Outcome:
        """Note the topic."""
        self.save_state({"topic": topic})
        return go(RouteStep)

    @tool
    async def break_down(self) -> str:
        """Fail."""
        raise RuntimeError(SECRET)


class RouteStep(LogicStep):
    async def run_logic(self) -> Outcome:
        if self.get_context("config.skip"):
            return direct_to("AnswerStep", "Skipped.")
        return go(AnswerStep if self.get_context("config.short", True) else CloseDesk)


class AnswerStep(BaseStep):
    def get_prompt(self) -> str:
        return "Answer."

    @tool
    async def table(self) -> Outcome:
        """Show a table."""
        return direct("Two rooms:\n\n#  Room  Has\n-  ----  --------\n1  Blue  a window\n2  Red   a door\n\nWhich?")

    @tool
    async def search(self, ctx: ToolContext) -> str:
        """Take a while."""
        ctx.progress({"done": 1, "of": 2})
        ctx.progress("\ud800")
        return "found"

    @tool
    async def again(self, target: str) -> Outcome:
        """Go wherever the model says."""
        return go(target)

    async def on_response(self, result: str) -> Any:
        return AskStep if result == "back" else None


class CloseDesk(TerminateSessionStep):
    aliases = ("OldCloseStep",)


class DeskFlow(Flow):
    def config_model(self) -> str:
        return "scripted:model"

    def config_llm_call_policy(self) -> CallPolicy:
        return CallPolicy(attempts=2, retry_delay=0.001)

    def define_steps(self) -> Sequence[Step]:
        steps: list[Step] = [AskStep(self), RouteStep(self), AnswerStep(self), CloseDesk(self).use_memory("temp")]
        return steps


class AbortFlow(DeskFlow):
    async def on_turn_error(self, error: Exception) -> Any:
        return "abort"


class OnceStep(Step):
    async def on_response(self, result: str) -> Outcome:
        return finish({"total": 12, "said": result})


class OnceFlow(Flow):
    requires_user_message = False

    def config_model(self) -> str:
        return "scripted:model"

    def define_steps(self) -> Sequence[Step]:
        return [OnceStep(self)]


def _models(*replies: Any, default: Any = None) -> Providers:
    return Providers({"scripted": ScriptedModel(replies, default=default)})


talks = _models(
    "What is it about?",
    Reply.tool_call("note", {"topic": "rooms"}),
    "Rooms, fine.",
    Reply.tool_call("table"),
    Reply.tool_call("leave"),
)
superseded = _models(Reply.text("This will never be the answer.").failing(after=3, status=529), "This is it.")
slowly = _models(
    # Long enough on the screen for anybody to see it.
    Reply.text("DEAD words of an attempt that fails.").delayed(1.0, after=4).failing(after=5, status=529),
    "What counts is **this**.",
    Reply.text("never finished").stalling(after=1),
    "Still here.",
)
searches = _models(Reply.tool_call("note", {"topic": "x"}), Reply.tool_call("search"), "Found.")
warns = _models(Reply.tool_call("nothing_like_it"), "Fine.")
fails = _models("Fine.", Reply.tool_call("break_down"), "Fine again.")
fails_last = _models("Fine.", Reply.tool_call("break_down"))
refuses = _models(Reply.error(status=503), Reply.error(status=503))
thinks = _models(Reply.reasoning("Let me see.", "# A title\n\n* one\n* two"), '{"a": [1, 2]}', "{ no JSON")
always = _models(default="Yes.")
mapping = {"scripted": ScriptedModel(default="Mapped.")}
nothing = 42


class FormStep(Step):
    def struct_output_schema(self) -> Any:
        return {"type": "object", "required": ["total"]}


class FormFlow(OnceFlow):
    def config_llm_call_policy(self) -> CallPolicy:
        return CallPolicy(attempts=1)

    def define_steps(self) -> Sequence[Step]:
        return [FormStep(self)]
