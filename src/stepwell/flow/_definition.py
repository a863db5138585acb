"""What is built once per flow class, and every error that can be found without a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stepwell.errors import FlowDefinitionError, LlmSetupError
from stepwell.flow._flow import FLOW_HOOKS, Flow
from stepwell.flow._memory import check_namespace
from stepwell.flow._step import STEP_HOOKS, LogicStep, Step
from stepwell.loop import StreamMode
from stepwell.messages import JsonObject, JsonValue, Message
from stepwell.models import LlmType, ModelSelection, ToolSchema
from stepwell.models.providers import Providers
from stepwell.stage import OutputSchema, build_tools, overridden, refuse_private_overrides
from stepwell.tools import Handler, ToolDefinition, ToolTable

__all__ = ["FlowDefinition", "StepDefinition"]


class StepDefinition:
    """Everything of a step that depends on its class only."""

    __slots__ = ("dynamic_tools", "hooks", "id", "output", "schemas", "static", "table", "tools")

    def __init__(self, step: Step[Any, Any], flow: FlowDefinition) -> None:
        cls = type(step)
        self.id = step.id
        refuse_private_overrides(cls, LogicStep if step.is_logic() else Step, STEP_HOOKS, flow.id)
        self.hooks = overridden(cls, Step)
        if step.is_logic() and not isinstance(step, LogicStep):
            raise FlowDefinitionError(
                f"{step.id} says is_logic but is no LogicStep: derive it from LogicStep.", flow=flow.id, stage=step.id
            )
        check_namespace(step.get_memory_space(), flow=flow.id, stage=step.id)
        self.table: ToolTable = build_tools(step, flow.id)
        self.tools = flow.tools
        spec = step.struct_output_schema()
        self.output = OutputSchema(spec, step.id) if spec is not None else None
        self.dynamic_tools = "use_tools" in self.hooks
        self.static: tuple[ToolSchema, ...] = ()
        self.schemas: dict[str, ToolSchema] = {}

    def finish(self, names: Sequence[str], flow: str) -> None:
        """Resolve exposure, once all tools of the flow are known."""
        for name in (*self.table.exposed, *names):
            self.schemas[name] = self._exposed(name, flow)
        self.static = tuple(self.schemas.values())
        for name, handler in self.table.handlers.items():
            if name not in self.tools:
                raise FlowDefinitionError(
                    f"{self.id}.{handler.name} handles tool {name}, which nobody defines: define it or drop "
                    "defined=False.",
                    flow=flow,
                    stage=self.id,
                    tool=name,
                )
            if handler.asks is not None and "run" in self.hooks:
                raise FlowDefinitionError(
                    f"Tool {name} of {self.id} suspends the run, and {self.id} overrides run: its whole visit is one "
                    "unit, which cannot be left in its middle. Prepare state in on_visit instead.",
                    flow=flow,
                    stage=self.id,
                    tool=name,
                )
            if handler.on_unknown is not None:
                self._check_effect(name, flow)
        for handler in self.table.sets.values():
            for name in handler.names:
                single = self.table.handlers.get(name)
                if single is not None and single.asks is not None:
                    raise FlowDefinitionError(
                        f"{self.id}.{handler.name} handles tool {name} together with others, which would run it "
                        "without asking: a tool with approval or client is handled alone.",
                        flow=flow,
                        stage=self.id,
                        tool=name,
                    )
                if single is not None and single.on_unknown is not None and handler.on_unknown is None:
                    raise FlowDefinitionError(
                        f"{self.id}.{handler.name} handles tool {name} together with others and is no effect, but "
                        f"{name} alone is: add effect=True to @tools.",
                        flow=flow,
                        stage=self.id,
                        tool=name,
                    )
                if handler.on_unknown is not None:
                    self._check_effect(name, flow)
                if name not in self.tools:
                    raise FlowDefinitionError(
                        f"{self.id}.{handler.name} handles tool {name}, which nobody defines.",
                        flow=flow,
                        stage=self.id,
                        tool=name,
                    )
            handler.check_by({name: self.tools[name][0] for name in handler.names})

    def _check_effect(self, name: str, flow: str) -> None:
        if "run" in self.hooks:
            raise FlowDefinitionError(
                f"Tool {name} of {self.id} is an effect, and {self.id} overrides run: its whole visit is one unit, so "
                "after a crash the model is asked again, and nobody could tell which calls have run. Prepare state in "
                "on_visit instead.",
                flow=flow,
                stage=self.id,
                tool=name,
            )

    def _exposed(self, name: str, flow: str) -> ToolSchema:
        if name not in self.tools:
            raise FlowDefinitionError(
                f"{self.id} exposes tool {name}, which nobody defines: add a ToolDefinition or a @tool method.",
                flow=flow,
                stage=self.id,
                tool=name,
            )
        if name not in self.table.handlers and not any(name in h.names for h in self.table.sets.values()):
            raise FlowDefinitionError(
                f"{self.id} exposes tool {name} but has no handler for it: add a method with @tool({name!r}, "
                "defined=False).",
                flow=flow,
                stage=self.id,
                tool=name,
            )
        return self.tools[name][1]

    def exposed(self, step: Step[Any, Any]) -> Sequence[ToolSchema]:
        """Tools of a step now."""
        if not self.dynamic_tools:
            return self.static
        names = dict.fromkeys((*self.table.exposed, *step.use_tools()))
        return [self.schemas.get(name) or self._exposed(name, step.flow.id) for name in names]

    def exposes(self, step: Step[Any, Any], name: str) -> bool:
        """Whether a tool is among them."""
        if not self.dynamic_tools:
            return name in self.schemas
        return name in self.table.exposed or name in step.use_tools()


class FlowDefinition:
    """A registered flow class.

    Args:
        cls: The class.
        providers: To check models with; `None` leaves that out (drawing, listing).

    Raises:
        FlowDefinitionError: Naming flow, step and tool; with `providers` also for a model that cannot be called.
    """

    def __init__(self, cls: type[Flow], providers: Providers | None = None) -> None:
        self.cls = cls
        self.id = cls.id
        try:
            self._build(cls, providers)
        except FlowDefinitionError as error:
            error.ids.setdefault("flow", cls.id)
            raise

    def _build(self, cls: type[Flow], providers: Providers | None) -> None:
        self.names = (cls.id, *cls.aliases)
        refuse_private_overrides(cls, Flow, FLOW_HOOKS, cls.id)
        self.hooks = overridden(cls, Flow)
        if cls.schema_version < 1:
            raise FlowDefinitionError(f"schema_version of {cls.id} must be at least 1.", flow=cls.id)
        probe = cls()
        probe._runtime = _Probe()  # pyright: ignore[reportPrivateUsage]
        probe._register()  # pyright: ignore[reportPrivateUsage]
        self._check_ids(probe)
        self.tools: dict[str, tuple[ToolDefinition, ToolSchema]] = {}
        self._owners: dict[str, tuple[str, Handler | None]] = {}
        shared = ToolTable()
        for definition in probe.define_tools():
            if definition.name in shared.definitions:
                raise self._twice(definition.name, cls.id, cls.id)
            shared.define(definition)
        self._add(shared, cls.id)
        steps = list(probe._by_class.values())  # pyright: ignore[reportPrivateUsage]
        self.steps: dict[type[Step[Any, Any]], StepDefinition] = {}
        for step in steps:
            self.steps[type(step)] = built = StepDefinition(step, self)
            self._add(built.table, step.id)
        for step in steps:
            self.steps[type(step)].finish(step.use_tools(), cls.id)
        self.order = tuple(step.id for step in steps)
        self.initial = probe._initial().id  # pyright: ignore[reportPrivateUsage]
        self.model = probe.get_model_selection()
        if providers is not None:
            self._check_model(self.model, None, providers)
            for step in steps:
                if not step.is_logic() and step.get_model_selection() != self.model:
                    self._check_model(step.get_model_selection(), step.id, providers)

    def stream_mode(self, stage: str) -> StreamMode:
        """How a stage streams, by its class; of one that is not there (any more), the flow's."""
        found = next((cls for cls in self.steps if stage in (cls.id, *cls.aliases)), None)
        return (found.stream_mode if found is not None else None) or self.cls.stream_mode

    def of(self, flow: Flow) -> Sequence[Step[Any, Any]]:
        """The registered steps of one of this class's flow objects.

        Raises:
            FlowDefinitionError: One was not there when the class was registered.
        """
        registered = flow._by_class  # pyright: ignore[reportPrivateUsage]
        for unknown in registered.keys() - self.steps.keys():
            raise FlowDefinitionError(
                f"{self.id} registers {unknown.id} only now: define_steps names every step whatever the context; "
                "initial_step and outcomes say which comes when.",
                flow=self.id,
                stage=unknown.id,
            )
        return tuple(registered.values())

    def _check_model(self, selection: ModelSelection, stage: str | None, providers: Providers) -> None:
        try:
            providers.validate(selection)
        except LlmSetupError as error:
            raise FlowDefinitionError(
                f"The model of {stage or self.id} cannot be called: {error.message}",
                flow=self.id,
                stage=stage,
                model=selection.id,
            ) from error

    def _check_ids(self, probe: Flow) -> None:
        for name in probe._steps:  # pyright: ignore[reportPrivateUsage]
            if not name.strip() or "|" in name or len(name) > 128:
                raise FlowDefinitionError(
                    f"{name!r} of {self.id} is not a step id: use text without |, not blank, at most 128 characters.",
                    flow=self.id,
                    stage=name,
                )
        if any(not name.strip() for name in self.names):
            raise FlowDefinitionError(f"A flow id or alias of {self.cls.__name__} is blank.", flow=self.id)

    def _add(self, table: ToolTable, owner: str) -> None:
        for name, entry in table.definitions.items():
            handler = table.handlers.get(name)
            if name in self._owners:
                first, seen = self._owners[name]
                if handler is not None and seen is not None and handler.function is seen.function:
                    continue  # one method that two steps inherit
                if handler is None and seen is None and entry[0] == self.tools[name][0]:
                    continue  # the same definition, as every closing step declares terminate_session
                raise self._twice(name, first, owner)
            self._owners[name] = (owner, handler)
            self.tools[name] = entry

    def _twice(self, name: str, first: str, second: str) -> FlowDefinitionError:
        return FlowDefinitionError(
            f"Tool {name} is defined by {first} and by {second} of {self.id}: names are unique over a flow and its "
            "steps; rename one, or let one define it and the other handle it with defined=False.",
            flow=self.id,
            stage=second,
            tool=name,
        )


class _Probe:
    """The runtime of a flow that is only looked at: an empty session."""

    session_id = ""
    current = ""
    executing = ""
    completed = False

    def __init__(self) -> None:
        self.context: JsonObject = {}

    def now(self) -> float:
        return 0.0

    def session(self) -> Mapping[str, Any]:
        return {}

    def state(self, stage: str) -> JsonObject:
        return {}

    def write_state(self, stage: str, op: Literal["save", "merge", "remove"], value: Any) -> None:
        raise self._no()

    def messages(self, ns: str) -> Sequence[Message]:
        return ()

    def add_message(self, ns: str, stage: str, message: Message) -> Message:
        raise self._no()

    def erase(self, ns: str) -> None:
        raise self._no()

    def transient(self, stage: str) -> JsonObject:
        return {}

    def stored_model(self, stage: str) -> JsonObject | None:
        return None

    def store_model(self, stage: str, model: JsonObject | None) -> None:
        raise self._no()

    def mark_completed(self) -> None:
        raise self._no()

    def log(self, level: str, text: str, data: JsonValue) -> None:
        raise self._no()

    def llm_type(self, provider: str) -> LlmType:
        return LlmType.UNSUPPORTED

    def _no(self) -> FlowDefinitionError:
        return FlowDefinitionError(
            "Definitions (define_steps, define_tools, use_tools, ...) only read: change state and memory in hooks."
        )
