"""What the loop is given: a stage to run, where to read and write, and whom to tell."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from stepwell._clock import Clock
from stepwell._signal import CancelSignal
from stepwell.messages import JsonObject, JsonValue, Message, ToolCall, ToolOutcome, ToolResult, Usage
from stepwell.models import Candidate, ModelGateway, ModelSelection, ToolSchema
from stepwell.outcomes import Outcome, Stay, SuspendRequest
from stepwell.tools import Handler, ToolDefinition, ToolErrors

from ._contexts import LlmAttemptErrorContext, LlmBlockedContext, LlmErrorContext
from ._policy import CallPolicy
from ._watch import Alarm

__all__ = [
    "CallScope",
    "EffectJournal",
    "EffectState",
    "LoopHost",
    "LoopObserver",
    "Recorded",
    "StreamMode",
    "Verdict",
    "VisitState",
]

StreamMode: TypeAlias = Literal["live", "held", "off"]
Verdict: TypeAlias = Literal[
    "accepted", "thrown", "blocked", "empty", "truncated_tool_call", "malformed_tool_call", "schema", "check_response",
    "cancelled",
]  # fmt: skip


EffectState: TypeAlias = Literal["intent", "done", "refused", "unknown"]
"""`intent`: it is about to run, or does. `done`: it ended, with this result. `refused`: nothing happened. `unknown`: it
broke off, and nobody knows what happened."""


class LoopObserver(Protocol):
    """Is told what happens, in order. Never raises, never waits: it is called between two tokens."""

    def attempt_started(self, number: int, selection: ModelSelection) -> None:
        """An attempt begins. It shows nothing yet: the first delta supersedes what an earlier one showed."""
        ...

    def text(self, text: str) -> None:
        """More text of the current attempt."""
        ...

    def reasoning(self, text: str) -> None:
        """More reasoning of the current attempt."""
        ...

    def tool_input(self, index: int, call: str, name: str, delta: str) -> None:
        """More of a proposed call's arguments; provisional until accepted."""
        ...

    def attempt_ended(self, verdict: Verdict, usage: Usage | None, stop: str | None, detail: str | None) -> None:
        """The current attempt was classified. `usage` is `None` when the provider did not report it."""
        ...

    def hook_called(self, hook: str, handled: bool) -> None:
        """A failure hook was asked, and whether it decided."""
        ...

    def tool_started(self, call: ToolCall) -> None:
        """A handler begins."""
        ...

    def tool_progress(self, call: ToolCall, value: JsonValue) -> None:
        """A handler reports progress."""
        ...

    def tool_finished(self, call: ToolCall, result: ToolResult) -> None:
        """A call has its result."""
        ...

    def warn(self, text: str, data: JsonValue = None) -> None:
        """Something the operator should see, without any content of the conversation."""
        ...

    @property
    def shown(self) -> bool:
        """Whether anything of the current unit's attempts is shown to somebody now."""
        ...


class VisitState(Protocol):
    """What the loop keeps of a visit between units, in a form that can be stored."""

    rounds: int
    alternate: JsonObject | None
    alternate_used: bool


class CallScope(Protocol):
    """The staged writes of one call."""

    def active(self) -> AbstractContextManager[object]:
        """While entered, the writes of this task and of threads it starts are staged here."""
        ...

    def close(self) -> None:
        """The call is over: later writes (of a thread that goes on) are refused."""
        ...


class Recorded(msgspec.Struct, frozen=True):
    """What is on disk of a call with an effect.

    Attributes:
        state: How far it came.
        attempt: How often it was started.
        content: What the model is told, of one that is `done`.
        outcome: What the handler returned, without its cleanup.
        scope: Its staged writes.
    """

    state: EffectState
    attempt: int = 1
    content: JsonValue = None
    outcome: Outcome = Stay()
    scope: CallScope | None = None


class EffectJournal(Protocol):
    """What is on disk of effects: written on its own, before the batch's commit and whether or not that comes."""

    def recorded(self, call: ToolCall, after: CallScope | None = None) -> Recorded | None:
        """What is known of a call. Its writes read what `after` staged."""
        ...

    async def intend(self, calls: Sequence[ToolCall], attempt: int) -> None:
        """Say that an effect is about to run, for one call or a set of calls.

        Raises:
            RaceError: Somebody else has the session, or the lease ran out: the effect must not begin.
            StoreError: It could not be written: the same.
        """
        ...

    async def ended(self, calls: Sequence[ToolCall], recorded: Recorded) -> None:
        """Say how it ended. Finished also when cancelled, and raises nothing: what is not on disk counts as unknown."""
        ...


class LoopHost(Protocol):
    """One stage in one placement, as the loop sees it.

    Hooks are already combined: the stage's answer wins, the workflow is asked when it delegates.
    """

    @property
    def stage_id(self) -> str:
        """Id of the stage."""
        ...

    @property
    def policy(self) -> CallPolicy:
        """Resolved for the stage."""
        ...

    @property
    def selection(self) -> ModelSelection:
        """The stage's model."""
        ...

    @property
    def stream_mode(self) -> StreamMode:
        """What leaves the process, and when."""
        ...

    @property
    def stream_partial_objects(self) -> bool:
        """Whether a structured reply streams too."""
        ...

    @property
    def parallel_tools(self) -> bool:
        """Whether the calls of a reply run side by side."""
        ...

    @property
    def tool_errors(self) -> ToolErrors:
        """What a handler's exception does, unless the tool says otherwise."""
        ...

    @property
    def allow_alternate_attempts(self) -> bool:
        """Whether an alternate's selection may carry `attempts`."""
        ...

    @property
    def visit(self) -> VisitState:
        """The current visit."""
        ...

    @property
    def clock(self) -> Clock:
        """Time."""
        ...

    @property
    def alarm(self) -> Alarm:
        """What watches over the deadlines of model calls."""
        ...

    @property
    def observer(self) -> LoopObserver:
        """Whom to tell."""
        ...

    @property
    def run_id(self) -> str:
        """The run."""
        ...

    @property
    def conversation(self) -> str:
        """See `ModelRequest.conversation`."""
        ...

    @property
    def cancelled(self) -> CancelSignal:
        """Set once the turn is cancelled."""
        ...

    @property
    def journal(self) -> EffectJournal:
        """What is on disk of effects."""
        ...

    def prompt(self) -> str | None:
        """Build the system prompt; once per round."""
        ...

    def history(self) -> Sequence[Message]:
        """The messages the model is shown, checked."""
        ...

    def exposed(self) -> Sequence[ToolSchema]:
        """Tools the model may call now."""
        ...

    def output_schema(self) -> JsonObject | None:
        """JSON schema of the reply, or `None` for text."""
        ...

    def parse_output(self, text: str) -> JsonValue:
        """Parse and validate a structured reply.

        Raises:
            ValueError: It does not match; `str()` has the lines for the model.
        """
        ...

    def gateway(self, selection: ModelSelection) -> ModelGateway:
        """The gateway of a selection.

        Raises:
            LlmSetupError: Its provider is not registered, or refuses the selection.
        """
        ...

    def spent(self) -> int:
        """Tokens this turn has used so far."""
        ...

    def add_usage(self, selection: ModelSelection, usage: Usage | None) -> None:
        """Count an attempt; `None`: not reported."""
        ...

    def check_response(self, candidate: Candidate) -> bool:
        """Whether another candidate is wanted."""
        ...

    def should_retry_llm_error(self, context: LlmAttemptErrorContext) -> bool | None:
        """The hook of that name."""
        ...

    def on_llm_blocked(self, context: LlmBlockedContext) -> Awaitable[Any]:
        """The hook of that name."""
        ...

    def on_llm_error(self, context: LlmErrorContext) -> Awaitable[Any]:
        """The hook of that name."""
        ...

    def on_answer(self, request: SuspendRequest, value: JsonValue) -> Awaitable[Any]:
        """The hook of that name; what it returns counts as what a tool handler returns."""
        ...

    def handler(self, name: str) -> tuple[Handler, ToolDefinition | None] | None:
        """Who handles an exposed tool; `None` if it is not exposed or has no handler."""
        ...

    def exposes(self, name: str) -> bool:
        """Whether a tool is among `exposed()`."""
        ...

    def batch_handler(self, calls: Sequence[ToolCall]) -> Handler | None:
        """Who handles exactly the set of tools that these calls are for."""
        ...

    def bound(self, handler: Handler) -> Any:
        """The handler's method on this stage."""
        ...

    def open_call(self, call: ToolCall, after: CallScope | None) -> CallScope:
        """Stage a call's writes; it reads what `after` staged, or the state before the batch."""
        ...

    def outcome(self, value: Any, tool: str) -> Outcome:
        """What a tool handler returned, checked whole; what is no outcome is a `Stay` with it as feedback.

        Raises:
            InvalidOutcomeError: It is not legal, or not JSON.
        """
        ...

    def result(self, call: ToolCall, content: JsonValue, outcome: ToolOutcome) -> ToolResult:
        """Make a result record."""
        ...
