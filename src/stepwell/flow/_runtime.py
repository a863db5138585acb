"""What a flow and its steps need from whoever runs them. The engine implements it; nothing else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from stepwell._clock import Clock
from stepwell._signal import CancelSignal
from stepwell.loop import Alarm, CallScope, EffectJournal, LoopObserver, VisitState
from stepwell.messages import JsonObject, JsonValue, Message, ToolCall, Usage
from stepwell.models import LlmType, ModelGateway, ModelSelection

__all__ = ["Runtime", "StateOp", "UnitRuntime"]

StateOp = Literal["save", "merge", "remove"]


class Runtime(Protocol):
    """One turn of one session, as its flow sees it.

    Reads give what the calling tool handler, if there is one, has staged itself; writes are staged for it.
    """

    @property
    def session_id(self) -> str:
        """Id of the session."""
        ...

    @property
    def context(self) -> JsonObject:
        """The session's context. Not to be changed by the caller."""
        ...

    def now(self) -> float:
        """Unix time in seconds."""
        ...

    def session(self) -> Mapping[str, Any]:
        """A frozen view of the session document."""
        ...

    def state(self, stage: str) -> JsonObject:
        """A stage's state. Not to be changed by the caller."""
        ...

    def write_state(self, stage: str, op: StateOp, value: Any) -> None:
        """Change a stage's state: `save` and `merge` take a patch, `remove` a key."""
        ...

    def messages(self, ns: str) -> Sequence[Message]:
        """The messages of a namespace."""
        ...

    def add_message(self, ns: str, stage: str, message: Message) -> Message:
        """Append a message; mints its id. Behind the results of open calls, if there are any."""
        ...

    def erase(self, ns: str) -> None:
        """Drop the messages of a namespace."""
        ...

    def transient(self, stage: str) -> JsonObject:
        """What this process keeps for this turn only; may be changed."""
        ...

    def stored_model(self, stage: str) -> JsonObject | None:
        """The model override stored with a stage."""
        ...

    def store_model(self, stage: str, model: JsonObject | None) -> None:
        """Store a stage's model override, or that there is none."""
        ...

    def mark_completed(self) -> None:
        """The session is completed with this turn."""
        ...

    def log(self, level: Literal["debug", "info", "warning", "error"], text: str, data: JsonValue) -> None:
        """Write to the session log."""
        ...

    def llm_type(self, provider: str) -> LlmType:
        """Wire family of a registered provider."""
        ...

    @property
    def current(self) -> str:
        """Id of the cursor's stage."""
        ...

    @property
    def executing(self) -> str:
        """Id of the stage that runs now."""
        ...

    @property
    def completed(self) -> bool:
        """Whether the session is completed."""
        ...


class UnitRuntime(Runtime, Protocol):
    """The part that only the runner of a step needs, not the step."""

    @property
    def clock(self) -> Clock:
        """Time."""
        ...

    @property
    def alarm(self) -> Alarm:
        """See `LoopHost.alarm`."""
        ...

    @property
    def observer(self) -> LoopObserver:
        """Whom to tell."""
        ...

    @property
    def visit(self) -> VisitState:
        """The current visit."""
        ...

    @property
    def run_id(self) -> str:
        """The run."""
        ...

    @property
    def step_id(self) -> str:
        """The unit."""
        ...

    @property
    def cancelled(self) -> CancelSignal:
        """Set once the turn is cancelled."""
        ...

    @property
    def journal(self) -> EffectJournal:
        """See `LoopHost.journal`."""
        ...

    def with_summary(self, ns: str, prompt: str | None) -> str | None:
        """The prompt, with the summary of a compacted namespace behind it."""
        ...

    def gateway(self, selection: ModelSelection) -> ModelGateway:
        """See `LoopHost.gateway`."""
        ...

    def spent(self) -> int:
        """See `LoopHost.spent`."""
        ...

    def add_usage(self, selection: ModelSelection, usage: Usage | None) -> None:
        """See `LoopHost.add_usage`."""
        ...

    def open_call(self, call: ToolCall, after: CallScope | None) -> CallScope:
        """See `LoopHost.open_call`."""
        ...

    def apply(self, scope: CallScope) -> None:
        """Make a finished call's staged writes the session's."""
        ...

    def open_calls(self, ns: str) -> Sequence[ToolCall]:
        """The calls of the newest reply that have no result yet."""
        ...

    def replace(self, ns: str, message: Message) -> bool:
        """Replace the message with this id, if it is not committed yet. `False`: it is not there."""
        ...

    def new_id(self, stage: str) -> str:
        """Mint a message id."""
        ...
