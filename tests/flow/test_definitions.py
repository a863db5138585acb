"""Everything that is wrong with a flow is found without a session, and named."""

from __future__ import annotations

from typing import Any

import pytest

from flow_kit import failure, flow_of, harness, stage
from stepwell import (
    CallPolicy,
    CallPolicyOverride,
    Engine,
    Flow,
    LogicStep,
    ModelSelection,
    Providers,
    Step,
    TerminateSessionStep,
    ToolDefinition,
    tool,
    tools,
)
from stepwell.errors import FlowDefinitionError, LlmSetupError
from stepwell.flow import FlowDefinition
from stepwell.models import LlmType
from stepwell.testing import ScriptedModel

pytestmark = pytest.mark.anyio


def handler(*names: str, **options: Any) -> Any:
    @tool(*names, **options)
    async def t(self: Any) -> None:
        """Do."""

    return t


def together(*names: str) -> Any:
    @tools(*names)
    async def t(self: Any, calls: Any) -> None:
        """Do."""

    return t


def with_steps(define: Any, **members: Any) -> type[Flow]:
    return flow_of(define_steps=define, **members)


A, B = stage("A"), stage("B")
DEFINED = ToolDefinition("shared")

WRONG: dict[str, tuple[Any, str, dict[str, str]]] = {
    "two steps of one id": (
        lambda: flow_of(A, stage("A")), "Steps A and A of TestFlow both answer to 'A'", {"stage": "A"}),
    "the same step twice": (lambda: flow_of(A, A), "A is registered twice in TestFlow", {"stage": "A"}),
    "blank id": (lambda: flow_of(stage("A", id=" ")), "' ' of TestFlow is not a step id", {"stage": " "}),
    "id with a bar": (lambda: flow_of(stage("A", id="a|b")), "not a step id", {"stage": "a|b"}),
    "long id": (lambda: flow_of(stage("A", id="a" * 129)), "not a step id", {}),
    "blank alias": (lambda: flow_of(stage("A", aliases=("",))), "not a step id", {"stage": ""}),
    "alias clash": (
        lambda: flow_of(A, stage("B", aliases=("A",))), "Steps A and B of TestFlow both answer to 'A'", {"stage": "B"}),
    "blank flow id": (lambda: flow_of(A, id=""), "id or alias of TestFlow is blank", {}),
    "blank flow alias": (lambda: flow_of(A, aliases=(" ",)), "id or alias of TestFlow is blank", {}),
    "no steps": (lambda: flow_of(), "TestFlow registers no step", {}),
    "initial step": (
        lambda: flow_of(A, initial_step=lambda self: B), "initial_step of TestFlow returned B", {}),
    "a step of another flow object": (
        lambda: with_steps(lambda self: [A(type(self)())]), "made for another flow object", {"stage": "A"}),
    "schema version": (lambda: flow_of(A, schema_version=0), "schema_version of TestFlow must be at least 1", {}),
    "no model": (lambda: type("TestFlow", (Flow,), {"define_steps": lambda self: [A(self)]}), "names no model", {}),
    "tool twice in the flow": (
        lambda: flow_of(A, define_tools=lambda self: [DEFINED, DEFINED]),
        "Tool shared is defined by TestFlow and by TestFlow", {"tool": "shared"}),
    "tool twice in a step": (
        lambda: flow_of(stage("A", define_tools=lambda self: [DEFINED, DEFINED])),
        "Tool shared is defined twice in A", {"tool": "shared", "stage": "A"}),
    "tool of flow and step": (
        lambda: flow_of(stage("A", t=handler("shared")), define_tools=lambda self: [DEFINED]),
        "Tool shared is defined by TestFlow and by A", {"tool": "shared", "stage": "A"}),
    "tool of two steps": (
        lambda: flow_of(stage("A", t=handler("x")), stage("B", t=handler("x"))),
        "Tool x is defined by A and by B", {"tool": "x", "stage": "B"}),
    "exposed without definition": (
        lambda: flow_of(stage("A", use_tools=lambda self: ["x"])),
        "A exposes tool x, which nobody defines", {"tool": "x", "stage": "A"}),
    "exposed without handler": (
        lambda: flow_of(stage("A", use_tools=lambda self: ["shared"]), define_tools=lambda self: [DEFINED]),
        "A exposes tool shared but has no handler", {"tool": "shared", "stage": "A"}),
    "handled without definition": (
        lambda: flow_of(stage("A", t=handler("x", defined=False))),
        "A.t handles tool x, which nobody defines", {"tool": "x", "stage": "A"}),
    "set without definition": (
        lambda: flow_of(stage("A", u=handler("x"), t=together("x", "y"))),
        "A.t handles tool y, which nobody defines", {"tool": "y", "stage": "A"}),
    "two handlers on one class": (
        lambda: flow_of(stage("A", t=handler("x"), u=handler("x"))),
        "A has two handlers for x: t and u", {"tool": "x", "stage": "A"}),
    "two set handlers on one class": (
        lambda: flow_of(stage("A", a=handler("a"), b=handler("b"), t=together("a", "b"), u=together("b", "a", "a"))),
        "A has two handlers for a, b: t and u", {"stage": "A"}),
    "is_logic elsewhere": (
        lambda: flow_of(stage("A", is_logic=lambda self: True)), "is no LogicStep", {"stage": "A"}),
    "namespace": (
        lambda: with_steps(lambda self: [A(self).use_memory("a b")]),
        "'a b' is not a memory namespace", {"stage": "A"}),
    "id that is no namespace": (
        lambda: flow_of(stage("A", id="1st")), r"'1st' is not a memory namespace \(step 1st of TestFlow\)",
        {"stage": "1st"}),
    "a definition that writes": (
        lambda: flow_of(stage("A", use_tools=lambda self: self.save_state({"x": 1}) or [])), "only read", {}),
    "a definition that appends": (
        lambda: flow_of(stage("A", use_tools=lambda self: self.get_memory().append("x") or [])), "only read", {}),
    "a definition that erases": (
        lambda: flow_of(stage("A", use_tools=lambda self: self.erase_memory() or [])), "only read", {}),
    "a definition that completes": (
        lambda: flow_of(stage("A", use_tools=lambda self: self.flow.mark_completed() or [])), "only read", {}),
    "a definition that logs": (
        lambda: flow_of(stage("A", use_tools=lambda self: self.flow.log("x") or [])), "only read", {}),
    "a definition that chooses a model": (
        lambda: flow_of(stage("A", use_tools=lambda self: self.use_model("scripted:x") or [])), "only read", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_flow_is_named(case: str) -> None:
    make, words, ids = WRONG[case]
    with pytest.raises(FlowDefinitionError, match=words) as caught:
        FlowDefinition(make())
    assert {k: caught.value.ids.get(k) for k in ids} == ids
    assert caught.value.ids["flow"] == make().id


PLUMBING = [
    (Step, name)
    for name in ("_runtime", "_visit", "_policy", "_flow", "_keep_model", "get_state", "save_state", "get_memory",
                 "use_model", "get_name", "flow", "gen_message_id", "get_model_selection", "content_type")
] + [
    (Flow, name)
    for name in ("_runtime", "_register", "_by_class", "get_session", "get_step", "memory", "session_id", "warn")
] + [(LogicStep, "_runtime"), (TerminateSessionStep, "save_state")]  # fmt: skip


@pytest.mark.parametrize(("base", "name"), PLUMBING, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_plumbing_cannot_be_overridden(base: Any, name: str) -> None:
    if base is Flow:
        flow = flow_of(A, **{name: lambda self: None})
    else:
        flow = flow_of(stage("Mine", base=base, **{name: lambda self: None}))
    with pytest.raises(FlowDefinitionError, match=f"redefines {name}, which belongs to the runtime") as caught:
        FlowDefinition(flow)
    assert caught.value.ids["flow"] == "TestFlow"
    assert caught.value.ids["stage"] == ("TestFlow" if base is Flow else "Mine")


def test_own_helpers_and_dunder_methods_are_free() -> None:
    mine = stage("A", _helper=lambda self: 1, helper=lambda self: 2, __repr__=lambda self: "A")
    FlowDefinition(flow_of(mine, _mine=1, helper=lambda self: 1))


def test_an_override_between_class_and_base_is_found_too() -> None:
    between = stage("Between", get_state=lambda self: None)
    with pytest.raises(FlowDefinitionError, match="redefines get_state"):
        FlowDefinition(flow_of(stage("A", base=between)))


@pytest.mark.parametrize("ns", ["", "1a", "a.b", "a" * 129, "constructor", "prototype", "__proto__", "a\n", "é"])
def test_namespaces_that_other_languages_cannot_read(ns: str) -> None:
    flow = flow_of(A)()
    with pytest.raises(FlowDefinitionError, match="not a memory namespace") as caught:
        A(flow).use_memory(ns)
    assert caught.value.ids == {"flow": "TestFlow", "stage": "A"}
    with pytest.raises(FlowDefinitionError, match="not a memory namespace"):
        flow.memory.enable_summary(ns, model="scripted:m")


@pytest.mark.parametrize("ns", ["a", "A-1_b", "a" * 128])
def test_namespaces(ns: str) -> None:
    assert A(flow_of(A)()).use_memory(ns).get_memory_space() == ns


@pytest.mark.parametrize(("low", "high"), [(0, 4), (4, 4), (5, 4)])
def test_summary_rules_that_cannot_work(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="1 <= recent_messages < min_messages"):
        flow_of(A)().memory.enable_summary("talk", model="scripted:m", min_messages=high, recent_messages=low)


# -- models


def test_an_unknown_provider_is_found_with_the_flow_and_the_step() -> None:
    providers = Providers({"scripted": ScriptedModel()})
    with pytest.raises(FlowDefinitionError, match="model of TestFlow cannot be called: Provider 'gone'") as caught:
        FlowDefinition(flow_of(A, config_model=lambda self: "gone:m"), providers)
    assert caught.value.ids == {"flow": "TestFlow", "model": "gone:m"}
    assert isinstance(caught.value.__cause__, LlmSetupError)
    flow = with_steps(lambda self: [A(self), B(self).use_model("gone:m")])
    with pytest.raises(FlowDefinitionError, match="model of B cannot be called") as caught:
        Engine([flow], models=providers)
    assert caught.value.ids["stage"] == "B"


def test_a_parameter_that_the_model_does_not_take_is_found() -> None:
    class Strict(ScriptedModel):
        def validate(self, selection: ModelSelection) -> None:
            if "colour" in selection.params:
                raise LlmSetupError("no parameter 'colour'")

    selection = ModelSelection("scripted", "m", {"colour": "red"})
    with pytest.raises(FlowDefinitionError, match="no parameter 'colour'"):
        FlowDefinition(flow_of(A, config_model=lambda self: selection), Providers({"scripted": Strict()}))
    # A logic step never calls its model.
    logic = stage("L", base=LogicStep)
    flow = with_steps(lambda self: [A(self), logic(self).use_model("gone:m")])
    FlowDefinition(flow, Providers({"scripted": Strict()}))


def test_a_secret_in_a_selection_is_refused() -> None:
    with pytest.raises(LlmSetupError, match="secret"):
        A(flow_of(A)()).use_model(ModelSelection("scripted", "m", {"api_key": "x"}))


# -- what a definition knows


def test_a_definition_says_what_there_is() -> None:
    flow = flow_of(A, stage("B", t=handler("x")), initial_step=lambda self: A, aliases=("Old",))
    definition = FlowDefinition(flow)
    assert (definition.id, definition.names, definition.order) == ("TestFlow", ("TestFlow", "Old"), ("A", "B"))
    assert (definition.initial, definition.model.id) == ("A", "scripted:m")
    assert list(definition.tools) == ["x"]


def test_a_flow_that_registers_nothing_itself_has_the_closing_step() -> None:
    flow = type("Bare", (Flow,), {"config_model": lambda self: "scripted:m"})
    definition = FlowDefinition(flow)
    assert definition.order == ("TerminateSessionStep",)
    (step,) = flow().define_steps()
    assert step.get_memory_space() == "temp"


def test_what_definitions_read_is_an_empty_session() -> None:
    seen: list[Any] = []

    def use_tools(self: Any) -> list[str]:
        flow = self.flow
        seen.append((
            flow.session_id, dict(flow.get_session()), self.get_state(), list(self.get_memory()), self.is_end(),
            self.get_transient_state(), flow.get_context("config.x"), self.get_llm_type(), self.gen_message_id()[:10],
        ))  # fmt: skip
        return []

    FlowDefinition(flow_of(stage("A", use_tools=use_tools)))
    assert seen == [("", {}, {}, [], False, {}, None, LlmType.UNSUPPORTED, "A|1970-01-")]


async def test_a_step_that_is_registered_in_some_contexts_only_is_refused() -> None:
    def define_steps(self: Flow) -> list[Any]:
        return [A(self), *([B(self)] if self.get_context("config.more") else [])]

    async with harness(with_steps(define_steps), "Ok.") as h:
        assert (await h.say("hi")).success
        result = await h.say("hi", session_id=None, config={"more": True})
    assert failure(result) == ("flow_definition", {"flow": "TestFlow", "stage": "B"})


async def test_the_initial_step_may_depend_on_the_context() -> None:
    def initial_step(self: Flow) -> Any:
        return B if self.get_context("config.b") else None

    async with harness(flow_of(A, B, initial_step=initial_step), "1", "2") as h:
        assert (await h.say("hi")).current == "A"
        assert (await h.say("hi", session_id=None, config={"b": True})).current == "B"


def test_policies_are_merged_field_by_field() -> None:
    policy = CallPolicy(attempts=5, timeout=7)
    a = stage("A", config_llm_call_policy=lambda self: CallPolicyOverride(timeout=None, retry_delay=1))
    flow = flow_of(a, config_llm_call_policy=lambda self: policy)()
    merged = a(flow).get_llm_call_policy()
    assert (merged.attempts, merged.timeout, merged.retry_delay) == (5, None, 1)
    assert B(flow).get_llm_call_policy() is policy


def test_a_logic_step_must_say_what_comes_next() -> None:
    FlowDefinition(flow_of(stage("L", base=LogicStep)))
