"""What the tests of the model loop share: flows made of a few hooks, and a reader of the event stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from stepwell import Flow, Step, TerminateSessionStep, tool
from stepwell.engine import (
    Accepted,
    AttemptStarted,
    CandidateClassified,
    HookCalled,
    ReasoningDelta,
    Superseded,
    TextDelta,
    ToolInputDelta,
    ToolStarted,
    TurnEvent,
)
from stepwell.loop import CallPolicy, CallPolicyOverride
from stepwell.messages import AssistantMessage, Message
from stepwell.models import Candidate, ModelRequest
from stepwell.testing import TurnHarness

Context = Any
FAST = CallPolicy(retry_delay=0)


class Talk(Step):
    """One stage with a prompt and one tool."""

    ran: list[str]

    def get_prompt(self) -> str:
        return "Be kind."

    @tool
    async def look(self, city: str = "") -> str:
        """Look a city up."""
        self.ran.append(city)
        return f"{city} is free"


class Other(Step):
    """Where outcomes lead."""

    def get_prompt(self) -> str:
        return "The other stage."


class Log(list[tuple[str, Context]]):
    """Which hook was asked, with what."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self]

    def of(self, name: str) -> list[Context]:
        return [context for known, context in self if known == name]


Answer = Callable[[Context], Any]


def value_of(answer: Any, context: Context) -> Any:
    return answer(context) if callable(answer) and not isinstance(answer, type) else answer


class Hooks:
    """Builds a flow whose hooks are given as answers and write down what they were asked.

    Names of hooks are those of a step; with `flow_` in front, of the flow. An answer is a value, or a function of the
    hook's argument.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.log = Log()

    def namespace(self, prefix: str) -> dict[str, Any]:
        methods: dict[str, Any] = {}
        for name in ("on_llm_blocked", "on_llm_error"):
            methods[name] = self._async(prefix + name)
        for name in ("should_retry_llm_error", *(() if prefix else ("check_response",))):
            methods[name] = self._sync(prefix + name)
        return methods

    def _async(self, name: str) -> Any:
        async def hook(step: Any, context: Context) -> Any:
            self.log.append((name, context))
            return value_of(self.answers.get(name), context)

        return hook

    def _sync(self, name: str) -> Any:
        def hook(step: Any, context: Context) -> Any:
            self.log.append((name, context))
            return value_of(self.answers.get(name, False if name == "check_response" else None), context)

        return hook


def chat(
    hooks: Hooks | None = None,
    *,
    policy: CallPolicy = FAST,
    override: CallPolicyOverride | None = None,
    model: Any = "scripted:m",
    step: Mapping[str, Any] | None = None,
    flow: Mapping[str, Any] | None = None,
    schema: Any = None,
    base: type[Step[Any, Any]] = Talk,
) -> type[Flow]:
    """A flow of one talking stage (and two to go to), with these hooks and attributes.

    `flow.stage_class` is the stage's class, whose `ran` lists its tool calls.
    """
    hooks = hooks or Hooks()
    body: dict[str, Any] = {"id": "Talk", "ran": [], **hooks.namespace("")}
    if override is not None:
        body["config_llm_call_policy"] = lambda self: override
    if schema is not None:
        body["struct_output_schema"] = lambda self: schema
    stage = type("Stage", (base,), {**body, **(step or {})})
    attributes: dict[str, Any] = {
        "id": "Chat",
        "stage_class": stage,
        "config_model": lambda self: model,
        "config_llm_call_policy": lambda self: policy,
        "define_steps": lambda self: [stage(self), Other(self), TerminateSessionStep(self)],
        **hooks.namespace("flow_"),
    }
    return type("Chat", (Flow,), {**attributes, **(flow or {})})


def verdicts(h: TurnHarness) -> list[str]:
    """How each attempt ended."""
    return [event.verdict for event in h.of(CandidateClassified)]


def asked(h: TurnHarness) -> list[str]:
    """Failure hooks, in order, as the event stream has them."""
    return [event.hook for event in h.of(HookCalled)]


def texts(request: ModelRequest) -> list[str]:
    """What a request's messages say."""
    return [getattr(m, "text", None) or str(getattr(m, "content", "")) for m in request.messages]


def replies(history: Sequence[Message]) -> list[str]:
    """Texts of the model's stored replies."""
    return [m.text for m in history if isinstance(m, AssistantMessage)]


def tool_ran(h: TurnHarness) -> bool:
    return bool(h.of(ToolStarted))


def truncated(candidate: Candidate) -> bool:
    return candidate.truncated


class RawGateway:
    """A gateway that does exactly what an async generator function says."""

    def __init__(self, play: Callable[[ModelRequest], AsyncGenerator[Any]]) -> None:
        self.play = play
        self.requests: list[ModelRequest] = []

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncGenerator[Any]:
        self.requests.append(request)
        async with aclosing(self.play(request)) as events:
            yield events

    def validate(self, selection: Any) -> None:
        pass


class View:
    """A client that applies the events of one turn; it remembers every state that a person could have seen."""

    def __init__(self) -> None:
        self.text: dict[str, str] = {}
        self.other: dict[str, list[str]] = {}
        self.accepted: dict[str, str] = {}
        self.states: list[str] = []
        self.attempt = 0

    def apply(self, event: TurnEvent) -> None:
        match event:
            case TextDelta(step=step, text=text):
                self.text[step] = self.text.get(step, "") + text
            case ReasoningDelta(step=step, text=text):
                self.other.setdefault(step, []).append(text)
            case ToolInputDelta(step=step, delta=delta):
                self.other.setdefault(step, []).append(delta)
            case Superseded(step=step):
                self.text.pop(step, None)
                self.other.pop(step, None)
            case Accepted(step=step, text=text):
                self.accepted[step] = text
                assert self.text.get(step, "") == text
            case AttemptStarted():
                self.attempt += 1
            case _:
                return
        self.states.append(self.visible)

    @property
    def visible(self) -> str:
        return "\n\n".join(text for text in self.text.values() if text)


def view_of(h: TurnHarness, events: Sequence[TurnEvent] | None = None) -> View:
    """A client's view after the last turn of a harness (which had only one, unless events are given)."""
    view = View()
    for event in h.events if events is None else events:
        view.apply(event)
    assert view.visible == h.shown
    return view
