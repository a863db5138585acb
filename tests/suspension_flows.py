"""A flow whose tools wait for people and clients, and a model that depends only on the history, as real ones do."""

from __future__ import annotations

from typing import Any, ClassVar

from stepwell import Flow, Outcome, Step, SuspendRequest, TerminateSessionStep, go, stay, suspend, tool
from stepwell.messages import JsonValue, ToolResult, UserMessage
from stepwell.models import ModelRequest
from stepwell.testing import Call, Reply


class DeskStep(Step):
    """Notes which bodies ran in `ran`, over all processes of a test."""

    ran: ClassVar[list[str]] = []

    def get_prompt(self) -> str:
        return "Help at the desk."

    @tool(approval=True)
    async def refund(self, amount: int) -> str:
        """Give money back."""
        self.ran.append(f"refund {amount}")
        return f"refunded {amount}"

    @tool(client=True)
    async def locate(self, precise: bool = False) -> None:
        """Ask the device where it is."""
        self.ran.append("locate")

    @tool
    async def ask(self, text: str, seconds: float | None = None, name: str | None = None) -> Outcome:
        """Ask the person."""
        self.ran.append(f"ask {text}")
        self.save_state({f"asked_{text}": True})
        if name is not None:
            return suspend(SuspendRequest("question", {"text": text}, seconds, name))
        return suspend(SuspendRequest("question", {"text": text}, seconds))

    @tool
    async def look(self, what: str) -> str:
        """Look something up."""
        self.ran.append(f"look {what}")
        return f"saw {what}"

    @tool
    async def leave(self) -> Outcome:
        """Go on."""
        return suspend(SuspendRequest("approval", {"leave": True})).with_message("You asked to leave.")

    async def on_answer(self, request: SuspendRequest, value: JsonValue) -> Any:
        self.ran.append(f"answer {request.kind}")
        if request.payload == {"leave": True}:
            return go(OtherStep) if value is True else stay("Stay here.")
        return {"answered": value} if request.kind == "question" else value


class OtherStep(Step):
    def get_prompt(self) -> str:
        return "Elsewhere."


class DeskFlow(Flow):
    def config_model(self) -> str:
        return "scripted:m"

    def define_steps(self) -> list[Step[Any, Any]]:
        return [DeskStep(self), OtherStep(self), TerminateSessionStep(self)]


def talk(request: ModelRequest) -> Any:
    """`word arg, word arg` of the person's newest message as calls of one reply; then the results, as text."""
    results: list[ToolResult] = []
    for message in reversed(request.messages):
        if isinstance(message, ToolResult):
            results.insert(0, message)
        elif isinstance(message, UserMessage) and message.by == "user":
            if results or request.system != "Help at the desk.":
                break
            return Reply.tool_calls(*calls_of(message.text)) if calls_of(message.text) else "What can I do?"
    said = {str(result.call).rpartition("-")[2]: result for result in results}
    return "; ".join(f"{said[at].name}={said[at].content}" for at in sorted(said)) or "Bye."


def calls_of(text: str) -> list[Call]:
    calls: list[Call] = []
    for at, part in enumerate(text.split(", ")):
        word, _, rest = part.partition(" ")
        args: dict[str, Any] = {}
        if word == "refund":
            args = {"amount": int(rest) if rest.isdigit() else rest}
        elif word == "ask":
            what, _, more = rest.partition(" ")
            seconds, _, name = more.partition(" ")
            args = {"text": what} | ({"seconds": float(seconds)} if seconds else {}) | ({"name": name} if name else {})
        elif word == "look":
            args = {"what": rest}
        elif word not in ("locate", "leave"):
            return []
        calls.append(Call(word, args, id=f"c-{at}"))
    return calls
