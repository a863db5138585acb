"""Which stages lead to which, read from the code of the steps without running it.

Found are `go`, `direct_to` and `finish` calls and returned step classes, in the methods of a step (those it inherits
too) and in the functions of the project that they call by name. What a step computes is not found; the places are
listed instead.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeAlias

from stepwell import outcomes
from stepwell.flow import Flow, FlowDefinition, LogicStep, Step, TerminateSessionStep

__all__ = ["END", "Edge", "Graph", "Stage", "read_graph"]

END = ""
"""Target of an edge that completes the session."""

Kind: TypeAlias = Literal["go", "direct_to", "finish"]
_OUTCOMES: Mapping[Any, Kind] = {outcomes.go: "go", outcomes.direct_to: "direct_to", outcomes.finish: "finish"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the drawing."""

    id: str
    kind: Literal["step", "logic", "end"]
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """A way from one stage to another, with the methods that take it."""

    source: str
    target: str
    kind: Kind
    via: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """What can be said of a flow's ways without running it.

    Attributes:
        flow: Its id.
        initial: Where it begins.
        stages: In order of registration.
        edges: In order of their sources.
        computed: Places (`Stage.method`) whose target is computed and so not among the edges.
    """

    flow: str
    initial: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    computed: tuple[str, ...]


def read_graph(cls: type[Flow]) -> Graph:
    """Read the graph of a flow.

    Raises:
        FlowDefinitionError: The flow is wrong.
    """
    definition = FlowDefinition(cls)
    ids: dict[Any, str] = {}
    for step, built in definition.steps.items():
        ids.update(dict.fromkeys((step, built.id, *step.aliases), built.id))
    stages: list[Stage] = []
    edges: list[Edge] = []
    computed: list[str] = []
    for step, built in definition.steps.items():
        end = issubclass(step, TerminateSessionStep)
        kind: Literal["step", "logic", "end"] = "end" if end else "logic" if issubclass(step, LogicStep) else "step"
        stages.append(Stage(built.id, kind, tuple(built.schemas)))
        ways: dict[tuple[str, Kind], dict[str, None]] = {}
        for method, function in _methods(step):
            for found, target in _Reader(step).outcomes_of(function):
                known = END if found == "finish" else ids.get(target) if isinstance(target, (type, str)) else None
                if known is None:
                    computed.append(f"{built.id}.{method}")
                else:
                    ways.setdefault((known, found), {})[method] = None
        edges += [Edge(built.id, target, found, tuple(via)) for (target, found), via in ways.items()]
        if end:
            edges.append(Edge(built.id, END, "finish", ()))
    return Graph(cls.id, definition.initial, tuple(stages), tuple(edges), tuple(dict.fromkeys(computed)))


def _methods(step: type[Step[Any, Any]]) -> Iterator[tuple[str, FunctionType]]:
    """The methods that a step has, the nearest of each name, without the framework's."""
    seen: set[str] = set()
    for cls in step.__mro__:
        for name, value in vars(cls).items():
            function = inspect.unwrap(value) if callable(value) else getattr(value, "fget", None)
            if name in seen or not isinstance(function, FunctionType):
                continue
            seen.add(name)
            if not _is_ours(function):
                yield name, function


def _is_ours(function: FunctionType) -> bool:
    package, _, rest = (function.__module__ or "").partition(".")
    return package == "stepwell" and not rest.startswith("_demo")


class _Reader:
    """Reads functions on behalf of one step class, so that `isinstance(self, ...)` has an answer."""

    def __init__(self, step: type[Step[Any, Any]]) -> None:
        self._step = step
        self._seen: set[FunctionType] = set()

    def outcomes_of(self, function: FunctionType) -> Iterator[tuple[Kind, Any]]:
        """Every outcome with its target: a class, a name, or `None` where it is computed."""
        if function in self._seen:
            return
        self._seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError):  # made by exec, or a lambda in the middle of an expression
            return
        names = _scope(function)
        for node in self._walk(tree, names):
            if isinstance(node, ast.Call):
                yield from self._call(node, names)
            elif isinstance(node, ast.Return) and node.value is not None:
                for value in self._alternatives(node.value, names):
                    target = _resolve(value, names)
                    if isinstance(target, type) and issubclass(target, Step):
                        yield "go", target

    def _call(self, node: ast.Call, names: Mapping[str, Any]) -> Iterator[tuple[Kind, Any]]:
        called = _resolve(node.func, names)
        try:
            kind = _OUTCOMES.get(called)
        except TypeError:  # something that is not hashable was called
            return
        if kind == "finish":
            yield kind, None
        elif kind is not None:
            given = node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "target"), None)
            for value in self._alternatives(given, names) if given is not None else ():
                yield kind, value.value if isinstance(value, ast.Constant) else _resolve(value, names)
        elif isinstance(called, FunctionType) and not _is_ours(called) and self._is_local(called):
            yield from self.outcomes_of(called)

    def _is_local(self, function: FunctionType) -> bool:
        """Whether a function belongs to the project of the step: others know nothing of its stages."""
        return (function.__module__ or "").partition(".")[0] == self._step.__module__.partition(".")[0]

    def _walk(self, node: ast.AST, names: Mapping[str, Any]) -> Iterator[ast.AST]:
        """Every node but the branches that this step never takes."""
        yield node
        if isinstance(node, (ast.If, ast.IfExp)) and (taken := self._test(node.test, names)) is not None:
            branch = node.body if taken else node.orelse
            for child in branch if isinstance(branch, list) else [branch]:
                yield from self._walk(child, names)
            return
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, names)

    def _alternatives(self, node: ast.expr, names: Mapping[str, Any]) -> Iterator[ast.expr]:
        """The expressions of which this one is one."""
        if isinstance(node, ast.IfExp):
            taken = self._test(node.test, names)
            for value, possible in ((node.body, taken is not False), (node.orelse, taken is not True)):
                if possible:
                    yield from self._alternatives(value, names)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._alternatives(value, names)
        else:
            yield node

    def _test(self, test: ast.expr, names: Mapping[str, Any]) -> bool | None:
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                inner = self._test(operand, names)
                return None if inner is None else not inner
            case ast.Call(ast.Name("isinstance"), [ast.Name("self"), classes]):
                found = _resolve(classes, names)
                return issubclass(self._step, found) if isinstance(found, type) else None
            case _:
                return None


def _scope(function: FunctionType) -> dict[str, Any]:
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells = {name: cell.cell_contents for name, cell in closure.items() if _filled(cell)}
    names = {**function.__globals__, **cells}
    for name in function.__code__.co_varnames:  # a local name hides the module's
        names.pop(name, None)
    return names


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _resolve(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object that a dotted name stands for at module level; `None` where that is not known."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, names)
        return inspect.getattr_static(owner, node.attr, None) if owner is not None else None
    return None
