"""What the tests of flows share: flows made of a few steps, and steps that note which hook fired with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from stepwell import Flow, Step, UserMessage
from stepwell.engine import TurnResult
from stepwell.messages import AssistantMessage, DirectMessage, HistoryCheck, Message, ToolResult
from stepwell.testing import Reply, ScriptedModel, TurnHarness

Log = list[tuple[Any, ...]]


class Recorded(Step):
    """Notes its life-cycle hooks in `log`."""

    log: ClassVar[Log]

    def note(self, hook: str, *what: Any) -> None:
        self.log.append((self.id, hook, *what))

    def get_prompt(self) -> str | None:
        return super().get_prompt() or f"You are {self.id}."

    async def on_start(self) -> Any:
        self.note("on_start")
        return await super().on_start()

    async def on_restore(self) -> None:
        self.note("on_restore")

    async def on_enter(self) -> None:
        self.note("on_enter")

    async def on_exit(self) -> None:
        self.note("on_exit")

    def on_crossing(self, message: Any, prior_step: str | None = None) -> Any:
        self.note("on_crossing", said(message), prior_step)
        return super().on_crossing(message, prior_step)

    async def on_visit(self, message: UserMessage | None) -> None:
        self.note("on_visit", said(message))


def said(message: Any) -> Any:
    """A message as its text; text and `None` as they are."""
    return message if message is None or isinstance(message, str) else message.text


def stage(name: str, log: Log | None = None, base: type[Step[Any, Any]] | None = None, **members: Any) -> type[Any]:
    """A step class called `name`; with `log` a `Recorded` one."""
    if log is not None:
        members["log"] = log
    return type(name, (base or (Step if log is None else Recorded),), members)


def flow_of(*steps: type[Step[Any, Any]], name: str = "TestFlow", **members: Any) -> type[Flow]:
    """A flow class that registers these steps and talks to the scripted model."""

    def define_steps(self: Flow) -> list[Step[Any, Any]]:
        return [step(self) for step in steps]

    return type(name, (Flow,), {"config_model": lambda self: "scripted:m", "define_steps": define_steps, **members})


def harness(flow: type[Flow], *script: Any, **options: Any) -> TurnHarness:
    """A harness whose model says `script`."""
    return TurnHarness(flow, model=ScriptedModel(list(script)), **options)


def call(name: str, **args: Any) -> Reply:
    """A reply that calls one tool."""
    return Reply.tool_call(name, args)


def failure(result: TurnResult) -> tuple[str, dict[str, Any]]:
    """Code and ids of what failed a turn."""
    assert result.error is not None
    return result.error.code, dict(result.error.ids)


def lines(messages: Sequence[Message]) -> list[str]:
    """A history, one line a message, checked."""
    HistoryCheck().add_all(messages)
    return [line(m) for m in messages]


def line(message: Message) -> str:
    match message:
        case UserMessage(by="code"):
            return f"code: {message.text}"
        case UserMessage():
            return f"user: {message.text}"
        case AssistantMessage():
            calls = ",".join(c.name for c in message.calls)
            return f"model: {message.text}" + (f"[{calls}]" if calls else "")
        case DirectMessage():
            return f"direct: {message.text}"
        case ToolResult():
            return f"{message.outcome}: {message.content}"
