"""Flow: which stages there are, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, overload

from stepwell._json import json_copy, read_path
from stepwell.errors import FlowDefinitionError
from stepwell.flow._memory import Conversation, FlowMemory, Memory, conversation
from stepwell.flow._runtime import Runtime
from stepwell.flow._step import MISSING, Step, TerminateSessionStep, checked_patch, read_state
from stepwell.loop import (
    DEFAULT_POLICY,
    CallPolicy,
    LlmAttemptErrorContext,
    LlmBlockedContext,
    LlmErrorContext,
    StreamMode,
)
from stepwell.messages import JsonValue
from stepwell.models import ModelSelection
from stepwell.stage import BlockedResult, ErrorResult
from stepwell.tools import ToolDefinition, ToolErrors

__all__ = ["FLOW_HOOKS", "BusyPolicy", "Flow", "StepTarget"]

BusyPolicy: TypeAlias = Literal["queue", "reject", "interrupt", "steer"]
"""What an input does while another turn has its session.

`queue`: wait, first come first served, for at most `busy_timeout`. `reject`: fail with `SessionBusyError`. `interrupt`:
cancel what runs and what waits, kind `superseded`, and take its place; what it committed stays, and what was said stays
said. `steer`: be taken up by the running turn before its next model call, and have its result; where it makes no more,
be a turn of its own.
"""

StepTarget: TypeAlias = "type[Step[Any, Any]] | str"
StepT = TypeVar("StepT", bound="Step[Any, Any]")
T = TypeVar("T")

FLOW_HOOKS = frozenset(
    {
        "id", "aliases", "schema_version", "migrations", "stream_mode", "tool_errors", "requires_user_message",
        "parallel_tools", "stream_partial_objects", "on_busy", "busy_timeout", "turn_timeout", "on_suspended",
        "cancellation_grace",
        "max_logic_hops", "config_model", "config_llm_call_policy", "init", "define_steps", "initial_step",
        "define_tools", "on_restore_session", "on_turn_error", "on_llm_blocked", "should_retry_llm_error",
        "on_llm_error",
    }
)  # fmt: skip


class Flow:
    """A conversation in stages with one durable cursor. Subclass it; an object lives for one turn in one process."""

    id: ClassVar[str] = "Flow"
    """Persisted identity; the class name unless given."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Older ids under which stored sessions may know this flow."""

    schema_version: ClassVar[int] = 1
    """Version of what the flow stores; older documents are migrated, newer ones refused."""

    migrations: ClassVar[Sequence[Any]] = ()
    """`Migration`s, one from each older version to the next."""

    stream_mode: StreamMode = "live"
    tool_errors: ToolErrors = "raise"
    requires_user_message: bool = True
    parallel_tools: bool = False
    stream_partial_objects: bool = False
    on_busy: BusyPolicy = "queue"
    """What a turn does while another has the session, see `BusyPolicy`; a call may say otherwise."""

    busy_timeout: float = 60.0
    """Seconds a queued turn waits; a call may say otherwise."""

    turn_timeout: float | None = None
    """Seconds a turn may take; then it is cancelled, kind `deadline`."""

    on_suspended: Literal["error", "abandon"] = "error"
    """What a message does while the session waits for answers and the message is none of them: `SessionSuspendedError`,
    or the run that waits is cancelled and a new turn begins. A call may say otherwise."""

    cancellation_grace: float = 5.0
    """Seconds that cleaning up after a cancel may take."""

    max_logic_hops: int = 100
    """Logic steps in a row before `LogicLoopError`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "id" not in vars(cls):
            cls.id = cls.__name__

    memory: FlowMemory
    """What applies to whole namespaces, such as `enable_summary`."""

    _runtime: Runtime | None = None
    _steps: dict[str, Step[Any, Any]]
    _by_class: dict[type[Step[Any, Any]], Step[Any, Any]]
    _selection: ModelSelection | None = None
    _policy: CallPolicy | None = None

    def __init__(self) -> None:
        self._steps = {}
        self._by_class = {}
        self.memory = FlowMemory()

    # -- hooks

    def config_model(self) -> ModelSelection | str:
        """The model of the flow, `"provider:name"` or a selection. Checked before any session is touched."""
        raise FlowDefinitionError(
            f'{type(self).__name__} names no model: override config_model to return for example "openai:gpt-5.1".',
            flow=self.id,
        )

    def config_llm_call_policy(self) -> CallPolicy:
        """Attempts, delays, deadlines, rounds."""
        return DEFAULT_POLICY

    async def init(self) -> None:
        """Per-turn set-up; sees `get_context("config...")`, neither engine nor session yet."""

    def define_steps(self) -> Sequence[Step[Any, Any]]:
        """The registry: which steps exist, never which comes next."""
        return [TerminateSessionStep(self).use_memory("temp")]

    def initial_step(self) -> type[Step[Any, Any]] | None:
        """Class of the starting step; the first registered one by default. May depend on context."""
        return None

    def define_tools(self) -> Sequence[ToolDefinition]:
        """Tools that several steps share. Read once per class."""
        return ()

    async def on_restore_session(self, document: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A stored session is about to go on, after migrations: return it, reshaped or not.

        `None` starts a fresh session under a new id. Only `stages`, `memories` (by dropping a namespace) and
        `workflow.context` may be changed; the rest is the framework's.
        """
        return document

    async def on_turn_error(self, error: Exception) -> Literal["abort"] | None:
        """The turn failed: `None` rolls back and keeps the session, `"abort"` also marks it aborted."""
        return None

    async def on_llm_blocked(self, context: LlmBlockedContext) -> BlockedResult:
        """The step delegated a refusal. `None`: the turn fails with `LlmResponseBlockedError`."""
        return None

    def should_retry_llm_error(self, context: LlmAttemptErrorContext) -> bool | None:
        """The step delegated. `None`: the policy's `default_retry`."""
        return None

    async def on_llm_error(self, context: LlmErrorContext) -> ErrorResult:
        """The step delegated a terminal failure. `None`: the turn fails with `context.error`."""
        return None

    # -- calls

    @property
    def session_id(self) -> str:
        """Id of the session."""
        return self._bound.session_id

    def get_session(self) -> Mapping[str, Any]:
        """A frozen view of the session document."""
        return self._bound.session()

    def get_current_step(self) -> Step[Any, Any]:
        """The step that owns the cursor."""
        return self.get_step(self._bound.current)

    def get_executing_step(self) -> Step[Any, Any]:
        """The step that runs now."""
        return self.get_step(self._bound.executing)

    @overload
    def get_step(self, target: type[StepT]) -> StepT: ...
    @overload
    def get_step(self, target: str) -> Step[Any, Any]: ...
    def get_step(self, target: StepTarget) -> Step[Any, Any]:
        """A registered step by class, id or alias.

        Raises:
            FlowDefinitionError: There is none.
        """
        found = self._find(target)
        if found is None:
            name = target if isinstance(target, str) else target.__name__
            known = ", ".join(sorted(step.id for step in self._by_class.values()))
            raise FlowDefinitionError(
                f"{name} is not a step of {self.id} (registered: {known}): add it to define_steps.",
                flow=self.id,
                stage=name,
            )
        return found

    @overload
    def get_step_state(
        self, target: StepTarget, path: str | Sequence[str | int] = (), *, type_: type[T], default: T | None = None
    ) -> T: ...
    @overload
    def get_step_state(
        self, target: StepTarget, path: str | Sequence[str | int] = (), *, type_: None = None, default: Any = None
    ) -> Any: ...
    def get_step_state(
        self, target: StepTarget, path: str | Sequence[str | int] = (), *, type_: Any = None, default: Any = None
    ) -> Any:
        """Read another step's state; see `Step.get_state`."""
        step = self.get_step(target)
        return read_state(self._bound.state(step.id), path, type_, default, step.id)

    def save_step_state(self, target: StepTarget, patch: Mapping[str, Any]) -> None:
        """Save another step's state; see `Step.save_state`."""
        step = self.get_step(target)
        self._bound.write_state(step.id, "save", checked_patch(patch, step.id))

    def save_transient_step_state(self, target: StepTarget, patch: Mapping[str, Any]) -> None:
        """Keep values for another step, for this process and turn; see `Step.save_transient_state`."""
        self._bound.transient(self.get_step(target).id).update(patch)

    def get_context(self, path: str | Sequence[str | int] = (), default: Any = None) -> Any:
        """Read a copy of the context: `config...` is what the first turn's caller gave."""
        found = read_path(self._bound.context, path, MISSING)
        return default if found is MISSING else json_copy(found)

    def get_memory(self, ns: str) -> Memory:
        """The messages of a namespace."""
        return Memory(self._bound, ns, self._bound.executing)

    def get_conversation(self, ns: str, max_prior: int = 4) -> Conversation:
        """The person's newest message in a namespace, and up to `max_prior` before it."""
        return conversation(self._bound.messages(ns), max_prior)

    def mark_completed(self) -> None:
        """Complete the session with this turn, without a closing stage."""
        self._bound.mark_completed()

    def warn(self, text: str, data: JsonValue = None) -> None:
        """Write a warning to the session log. Put no customer's text into it."""
        self._bound.log("warning", text, data)

    def log(self, text: str, data: JsonValue = None) -> None:
        """Write to the session log. Put no customer's text into it."""
        self._bound.log("info", text, data)

    def get_model_selection(self) -> ModelSelection:
        """The flow's model."""
        if self._selection is None:
            self._selection = ModelSelection.parse(self.config_model())
        return self._selection

    def get_llm_call_policy(self) -> CallPolicy:
        """The flow's call policy."""
        if self._policy is None:
            self._policy = self.config_llm_call_policy()
        return self._policy

    # -- plumbing

    @property
    def _bound(self) -> Runtime:
        if self._runtime is None:
            raise FlowDefinitionError(
                f"{self.id} is not in a turn: session, state and memory exist only while an engine runs it.",
                flow=self.id,
            )
        return self._runtime

    def _find(self, target: Any) -> Step[Any, Any] | None:
        if isinstance(target, str):
            return self._steps.get(target)
        return self._by_class.get(target)

    def _register(self) -> None:
        """Build the steps of this turn. Names were checked when the class was registered; contexts may differ."""
        steps, by_class = self._steps, self._by_class
        for step in self.define_steps():
            if step._flow is not self:  # pyright: ignore[reportPrivateUsage]
                raise FlowDefinitionError(
                    f"Step {step.id} of {self.id} was made for another flow object: build steps with self.",
                    flow=self.id,
                    stage=step.id,
                )
            kind = type(step)
            if kind in by_class:
                raise FlowDefinitionError(
                    f"{kind.__name__} is registered twice in {self.id}.", flow=self.id, stage=step.id
                )
            by_class[kind] = step
            for name in (step.id, *step.aliases) if step.aliases else (step.id,):
                if name in steps:
                    raise FlowDefinitionError(
                        f"Steps {steps[name].id} and {step.id} of {self.id} both answer to {name!r}: ids and "
                        "aliases are unique.",
                        flow=self.id,
                        stage=step.id,
                    )
                steps[name] = step
        if not by_class:
            raise FlowDefinitionError(f"{self.id} registers no step: return at least one.", flow=self.id)

    def _initial(self) -> Step[Any, Any]:
        chosen = self.initial_step()
        if chosen is None:
            return next(iter(self._by_class.values()))
        found = self._by_class.get(chosen)
        if found is None:
            raise FlowDefinitionError(
                f"initial_step of {self.id} returned {getattr(chosen, '__name__', chosen)}, which is not registered: "
                "add it to define_steps.",
                flow=self.id,
                stage=getattr(chosen, "__name__", str(chosen)),
            )
        return found
