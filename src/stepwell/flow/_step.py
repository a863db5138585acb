"""Step: one stage of a flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, cast, overload

import msgspec
from typing_extensions import TypeVar

from stepwell._json import json_copy, read_path
from stepwell.errors import FlowDefinitionError, InvalidOutcomeError
from stepwell.flow._memory import Memory, check_namespace
from stepwell.loop import NO_OVERRIDE, CallPolicy
from stepwell.messages import JsonObject, JsonValue, Message, UserMessage, gen_message_id
from stepwell.models import LlmType, ModelSelection
from stepwell.outcomes import Direct, DirectTo, Finish, Go, SuspendRequest
from stepwell.stage import Stage
from stepwell.tools import ToolDefinition

if TYPE_CHECKING:
    from stepwell.flow._flow import Flow
    from stepwell.flow._runtime import Runtime
    from stepwell.flow._visit import Visit

__all__ = ["STEP_HOOKS", "LogicResult", "LogicStep", "ResponseResult", "Step", "TerminateSessionStep"]

OutputT = TypeVar("OutputT", default=str)
StateT = TypeVar("StateT", default=JsonObject)
T = TypeVar("T")

ResponseResult: TypeAlias = Go | Direct | DirectTo | Finish | type["Step[Any, Any]"] | str | None
"""What `on_response` may return; `None` keeps the output."""

LogicResult: TypeAlias = Go | DirectTo | Finish | type["Step[Any, Any]"]
"""What `run_logic` may return."""

START = "Start"
"""The synthetic user message that opens a stage nobody has spoken to."""

STEP_HOOKS = frozenset(
    {
        "id", "aliases", "stream_mode", "parallel_tools", "stream_partial_objects", "tool_errors",
        "config_llm_call_policy", "get_prompt", "define_tools", "use_tools", "struct_output_schema", "on_start",
        "on_restore", "on_enter", "on_exit", "on_crossing", "check_response", "on_response", "on_llm_blocked",
        "should_retry_llm_error", "on_llm_error", "on_visit", "on_answer", "run", "is_logic", "is_end", "run_logic",
    }
)  # fmt: skip


class Step(Stage, Generic[OutputT, StateT]):
    """One stage of a flow: prompt, tools, private state, and the decision what comes next.

    `Step[Output, State]` are types for checkers only: `Output` is what `on_response` gets, `State` what the state is.
    An instance lives for one turn.

    Args:
        flow: The flow it belongs to.
    """

    _flow: Flow
    _ns: str | None = None
    _override: ModelSelection | None = None
    _content_type: str | None = None
    _policy: CallPolicy | None = None
    _visit: Visit | None = None

    def __init__(self, flow: Flow) -> None:
        self._flow = flow

    @property
    def flow(self) -> Flow:
        """The flow object of this turn."""
        return self._flow

    def get_name(self) -> str:
        """The step's id."""
        return self.id

    def get_memory_space(self) -> str:
        """The namespace of this step's messages; its id unless `use_memory` chose another."""
        return self._ns or self.id

    def use_memory(self, ns: str) -> Self:
        """Share the messages of namespace `ns`. At registration, in `define_steps`.

        Raises:
            FlowDefinitionError: It is not a memory namespace.
        """
        self._ns = check_namespace(ns, flow=self._flow.id, stage=self.id)
        return self

    def use_model(self, selection: ModelSelection | str) -> Self:
        """Use another model in this step; parameters are merged over the flow's where the model is the same.

        At registration, or later from a hook: then it counts from the next round on. The choice is stored with the
        session, unless it comes to the flow's own model, and stays until another is made.
        """
        self._override = ModelSelection.parse(selection)
        if self._flow._by_class.get(type(self)) is self:  # pyright: ignore[reportPrivateUsage]
            self._keep_model()
        return self

    def _keep_model(self) -> None:
        """Store the override that was chosen, if it is one."""
        if self._override is not None:
            is_flows = self.get_model_selection() == self._flow.get_model_selection()
            self._runtime.store_model(self.id, None if is_flows else self._override.to_json())

    # -- hooks

    def get_prompt(self) -> str | None:
        """The system prompt, before every round; by default what a transition's `with_prompt` gave."""
        return cast("str | None", self._runtime.state(self.id).get("_prompt"))

    async def on_start(self) -> Message | str | None:
        """A new session begins in this step. Returns a message for its memory."""
        await self.on_enter()
        return self.on_crossing(None)

    async def on_restore(self) -> None:
        """The flow's objects were built from a stored document."""

    async def on_enter(self) -> None:
        """The step becomes active by a transition from another step."""

    async def on_exit(self) -> None:
        """The step becomes inactive by a transition to another step, or `finish`."""

    def on_crossing(self, message: Message | str | None, prior_step: str | None = None) -> Message | str | None:
        """A message is handed over on a crossing into this step; return what enters its memory, `None` for nothing.

        By default passes it on; with none, and a history that does not end on this step, a synthetic "Start".
        """
        if message is not None:
            return message
        last = self.get_memory().last
        if last is None or last.stage not in (self.id, *self.aliases):
            return UserMessage(content=START, by="code")
        return None

    async def on_visit(self, message: UserMessage | None) -> None:
        """Prepare state: once per visit, inside its first unit, before the prompt."""

    async def on_response(self, result: OutputT) -> ResponseResult:
        """A reply without tool calls was accepted. By default objects become JSON text and text stays as it is."""
        return None

    async def on_answer(self, request: SuspendRequest, value: JsonValue) -> Any:
        """A call of this stage that was suspended is answered: return what its handler would return.

        By default the answer is the call's result. Not asked for an approval that the tool itself requires
        (`@tool(approval=True)`), nor where the request expired.
        """
        return value

    async def run(self, user_message: str | None = None) -> JsonValue:
        """Run the shared loop until the stage replies or routes; a non-empty text is appended as a user message.

        Overriding it on a cursor's step makes the whole visit one unit; prefer `on_visit`.

        Returns:
            The reply, or `None` where the stage routed.
        """
        if self._visit is None:
            raise FlowDefinitionError(f"{self.id}.run() only works while the step runs.", stage=self.id)
        return await self._visit.run(user_message)

    def is_logic(self) -> bool:
        """Whether code, not a model, decides; only `LogicStep` may say so."""
        return False

    def is_end(self) -> bool:
        """Whether the session is over."""
        return self._runtime.completed

    # -- state

    @property
    def _runtime(self) -> Runtime:
        return self._flow._runtime or self._flow._bound  # pyright: ignore[reportPrivateUsage]

    @overload
    def get_state(self, path: str | Sequence[str | int] = (), *, type_: type[T], default: T | None = None) -> T: ...
    @overload
    def get_state(self, path: str | Sequence[str | int] = (), *, type_: None = None, default: Any = None) -> Any: ...
    def get_state(
        self, path: str | Sequence[str | int] = (), *, type_: type[Any] | None = None, default: Any = None
    ) -> Any:
        """Read a copy of this step's state by dotted text or a list of keys; `()` is the whole.

        Args:
            path: Where.
            type_: Convert the value to this type (dataclass, struct, TypedDict, `int`, ...).
            default: What to return when there is nothing.

        Raises:
            InvalidOutcomeError: The value is not of that type.
        """
        return read_state(self._runtime.state(self.id), path, type_, default, self.id)

    def save_state(self, patch: Mapping[str, Any] | StateT) -> None:
        """Replace each top-level key given. Keys that start with `_` are the framework's.

        Raises:
            NonJsonValueError: A value is not JSON; nothing is saved.
        """
        self._runtime.write_state(self.id, "save", checked_patch(patch, self.id))

    def merge_state(self, patch: Mapping[str, Any]) -> None:
        """Merge deeply: objects key by key, everything else is replaced."""
        self._runtime.write_state(self.id, "merge", checked_patch(patch, self.id))

    def remove_state(self, key: str) -> None:
        """Remove a top-level key; harmless if it is not there. Keys that start with `_` are the framework's."""
        check_key(key, self.id)
        self._runtime.write_state(self.id, "remove", key)

    def save_transient_state(self, patch: Mapping[str, Any]) -> None:
        """Keep values of any kind for this process and this turn; never stored, gone after a recovery."""
        self._runtime.transient(self.id).update(patch)

    def get_transient_state(self, path: str | Sequence[str | int] = (), default: Any = None) -> Any:
        """Read what `save_transient_state` kept."""
        return read_path(self._runtime.transient(self.id), path, default)

    # -- memory

    def get_memory(self) -> Memory:
        """The step's messages."""
        return Memory(self._runtime, self.get_memory_space(), self.id)

    def erase_memory(self) -> None:
        """Drop the step's messages; state stays."""
        self._runtime.erase(self.get_memory_space())

    def gen_message_id(self) -> str:
        """Make a message id of this step."""
        return gen_message_id(self.id, self._runtime.now())

    # -- model and output

    def get_model_selection(self) -> ModelSelection:
        """The configured model of this step."""
        override, base = self._override or stored_override(self), self._flow.get_model_selection()
        return base if override is None else merge_selection(override, base)

    def get_model(self) -> str:
        """The configured model as `provider:name`."""
        return self.get_model_selection().id

    def get_llm_call_policy(self) -> CallPolicy:
        """The resolved call policy of this step."""
        if self._policy is None:
            policy, override = self._flow.get_llm_call_policy(), self.config_llm_call_policy()
            self._policy = policy if override is NO_OVERRIDE else policy.merge(override)
        return self._policy

    def get_llm_type(self) -> LlmType:
        """The wire family of this step's provider."""
        return self._runtime.llm_type(self.get_model_selection().provider)

    @property
    def content_type(self) -> str:
        """MIME type of this step's replies; better set by an outcome."""
        return self._content_type or "text/plain"

    @content_type.setter
    def content_type(self, value: str) -> None:
        self._content_type = value

    def get_context(self, path: str | Sequence[str | int] = (), default: Any = None) -> Any:
        """Read the session's context; see `Flow.get_context`."""
        return self._flow.get_context(path, default)


def stored_override(step: Step[Any, Any]) -> ModelSelection | None:
    """The override that an older run of the flow stored for this step."""
    stored = step._runtime.stored_model(step.id)  # pyright: ignore[reportPrivateUsage]
    return ModelSelection.from_json(stored) if stored else None


def merge_selection(override: ModelSelection, base: ModelSelection) -> ModelSelection:
    """Same model: the override's parameters over the base's; another model: the override alone."""
    if override.id != base.id:
        return override
    return ModelSelection(
        base.provider, base.name, {**base.params, **override.params}, override.attempts or base.attempts
    )


def checked_patch(patch: Any, stage: str) -> JsonObject:
    """Copy a state patch.

    Raises:
        NonJsonValueError: A value is not JSON.
        InvalidOutcomeError: It is no mapping, or a key is the framework's.
    """
    if not isinstance(patch, Mapping):
        raise InvalidOutcomeError(
            f"State of {stage} is saved from a mapping, not from {type(patch).__name__}.", stage=stage
        )
    for key in cast("Mapping[Any, Any]", patch):
        check_key(str(key), stage)
    return cast("JsonObject", json_copy(patch))


def check_key(key: str, stage: str) -> None:
    """Refuse a state key that is the framework's.

    Raises:
        InvalidOutcomeError: It starts with an underscore.
    """
    if key.startswith("_"):
        raise InvalidOutcomeError(
            f"State key {key!r} of {stage} starts with an underscore: those are the framework's.", stage=stage
        )


def read_state(state: JsonObject, path: str | Sequence[str | int], type_: Any, default: Any, stage: str) -> Any:
    """Read a copy of state by path."""
    found = read_path(state, path, MISSING)
    if found is MISSING:
        return default
    if type_ is None:
        return json_copy(found)
    try:
        return msgspec.convert(found, type_)
    except msgspec.ValidationError as error:
        raise InvalidOutcomeError(
            f"State {path!r} of {stage} is not a {getattr(type_, '__name__', type_)}: {error}.", stage=stage
        ) from error


MISSING = object()
"""Nothing is there; `None` may be a value."""


class LogicStep(Step[OutputT, StateT]):
    """A step without a model: `run_logic` says in code what comes next."""

    async def run_logic(self) -> LogicResult:
        """Decide: an outcome or a step class."""
        raise NotImplementedError(f"{type(self).__name__} does not say what comes next: override run_logic.")

    def is_logic(self) -> bool:
        """Always true."""
        return True


CLOSING = "The conversation is over. Thank the person in one short sentence and say goodbye."


class TerminateSessionStep(Step[OutputT, StateT]):
    """The closing stage: entering it completes the session; its model says goodbye."""

    async def on_enter(self) -> None:
        """Mark the session completed."""
        self._runtime.mark_completed()

    def get_prompt(self) -> str | None:
        """What `with_prompt` gave, or a built-in closing instruction."""
        return super().get_prompt() or CLOSING

    def define_tools(self) -> Sequence[ToolDefinition]:
        """`terminate_session`, for steps that expose and handle it themselves."""
        return (
            ToolDefinition("terminate_session", "End the conversation, when the person wants to stop or all is done."),
        )

    def is_end(self) -> bool:
        """Always true."""
        return True
