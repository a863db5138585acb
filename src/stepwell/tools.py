"""Tools: what a model may call, how a method becomes one, and how a call finds its handler.

`@tool` on a method of a stage defines, exposes and handles a tool. Schemas come from the signature and the docstring,
built once per class by pydantic, which is imported only then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
    overload,
)
from uuid import NAMESPACE_OID, uuid5

import msgspec

from stepwell._signal import CancelSignal

from ._schema import Schema, problems
from .errors import FlowDefinitionError
from .messages import JsonObject, JsonValue, ToolCall
from .models import ToolSchema
from .outcomes import SuspendRequest

__all__ = [
    "ArgumentsError",
    "Handler",
    "OnUnknown",
    "ToolContext",
    "ToolDefinition",
    "ToolErrors",
    "ToolTable",
    "request_id",
    "tool",
    "tools",
]

ToolErrors: TypeAlias = Literal["raise", "report"]
OnUnknown: TypeAlias = Literal["retry", "ask", "fail"]
P = ParamSpec("P")
S = TypeVar("S")
R = TypeVar("R")

_MARK = "__stepwell_tool__"


class ArgumentsError(Exception):
    """Arguments do not match; `str()` has one line per field, for the model."""


class ToolContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler may know of the call it serves; injected into the parameter annotated with this type.

    Attributes:
        call_id: The provider's id of the call.
        idempotency_key: Unique for ever; give it to systems that de-duplicate.
        attempt: How often this call was started, from 1; higher after a crash in the middle of an effect.
        run_id: The run.
        deadline: Monotonic seconds of the engine's clock when the handler's time ends, or `None`.
        cancelled: Set when the call is cancelled or out of time; a handler in a thread should look at it.
        progress: Call with any JSON value to show progress to clients; it is not stored.
    """

    call_id: str
    idempotency_key: str
    run_id: str
    attempt: int = 1
    deadline: float | None = None
    cancelled: CancelSignal = msgspec.field(default_factory=CancelSignal)
    progress: Callable[[JsonValue], None] = lambda value: None


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool that `define_tools` declares; some class handles it with `@tool(defined=False)` or `@tools`.

    Attributes:
        name: Unique over a flow and its steps; letters, digits, `_` and `-`, at most 64 characters.
        description: What the model is told.
        parameters: A pydantic model class, or a JSON schema of an object. Default: no parameters.
        on_error: `raise` fails the turn, `report` tells the model; `None` uses the stage's `tool_errors`.
        timeout: Seconds a handler may take, `None` for no limit.
    """

    name: str
    description: str = ""
    parameters: type[Any] | JsonObject | None = None
    on_error: ToolErrors | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64 or not self.name.replace("_", "").replace("-", "").isalnum():
            raise FlowDefinitionError(
                f"{self.name!r} is not a tool name: use letters, digits, _ and -, at most 64.", tool=self.name
            )
        if self.timeout is not None and self.timeout <= 0:
            raise FlowDefinitionError(f"timeout of tool {self.name} must be positive seconds or None.", tool=self.name)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a decorator notes on a function."""

    names: tuple[str, ...]
    batch: bool
    defined: bool
    description: str | None
    on_error: ToolErrors | None
    timeout: float | None
    asks: Literal["approval", "client_tool"] | None = None
    on_unknown: OnUnknown | None = None


_Method: TypeAlias = Callable[Concatenate[S, P], R]


@overload
def tool(fn: _Method[S, P, R], /) -> _Method[S, P, R]: ...
@overload
def tool(
    name: str | None = None,
    /,
    *,
    description: str | None = None,
    defined: bool = True,
    on_error: ToolErrors | None = None,
    timeout: float | None = None,
    approval: bool = False,
    client: bool = False,
    effect: bool = False,
    on_unknown: OnUnknown | None = None,
) -> Callable[[_Method[S, P, R]], _Method[S, P, R]]: ...
def tool(
    name: Any = None,
    /,
    *,
    description: str | None = None,
    defined: bool = True,
    on_error: ToolErrors | None = None,
    timeout: float | None = None,
    approval: bool = False,
    client: bool = False,
    effect: bool = False,
    on_unknown: OnUnknown | None = None,
) -> Any:
    """Make a method of a stage a tool: defined, exposed and handled by it.

    Args:
        name: The tool's name; the method's name by default.
        description: What the model is told; the docstring by default.
        defined: `False`: only handle a tool that the flow or another stage defines.
        on_error: `raise` (the turn fails), `report` (the model is told), default the stage's `tool_errors`.
        timeout: Seconds the handler may take; then `ToolTimeoutError` under `on_error`.
        approval: Suspend the run before the handler runs, with a request of kind `approval`; approved, it runs, denied,
            the model is told.
        client: The client runs the tool: the method's body never runs, its signature and docstring describe the tool.
            The run suspends with a request of kind `client_tool`, whose answer is the call's result.
        effect: The handler changes something outside that must not happen twice. That it is about to run, and how it
            ended, is on disk before anything else happens; a call that ended is not run again, whatever crashes.
        on_unknown: What becomes of an effect that was interrupted, so that nobody knows whether it happened. `retry`:
            it runs again under the same key, which the system outside must recognise. `ask`: the run suspends with a
            question, and the answer is the call's result. `fail`, the default: the model is told that it is unknown.

    Raises:
        FlowDefinitionError: `on_unknown` is none of these, or is given without `effect`.

    A plain (non-async) method runs in a worker thread. It returns an outcome, a stage class, or any JSON value,
    which is then the call's result.
    """

    def mark(fn: Callable[..., Any]) -> Callable[..., Any]:
        label = name if isinstance(name, str) else fn.__name__
        if approval and client:
            raise FlowDefinitionError(
                f"Tool {label} is to be approved and to run on the client: the client asks its person itself.",
                tool=label,
            )
        if effect and client:
            raise FlowDefinitionError(
                f"Tool {label} is to run on the client: what it does there is no effect of its handler.", tool=label
            )
        asks: Literal["approval", "client_tool"] | None = "approval" if approval else "client_tool" if client else None
        policy = _on_unknown(label, effect, on_unknown)
        setattr(fn, _MARK, _Mark((label,), False, defined, description, on_error, timeout, asks, policy))
        return fn

    return mark(name) if callable(name) else mark


def _on_unknown(label: str, effect: bool, given: OnUnknown | None) -> OnUnknown | None:
    """What becomes of an effect nobody knows the end of; `None`: it is no effect."""
    if given is not None and given not in get_args(OnUnknown):
        raise FlowDefinitionError(f"on_unknown of tool {label} is {', '.join(get_args(OnUnknown))}.", tool=label)
    if given is not None and not effect:
        raise FlowDefinitionError(
            f"Tool {label} says on_unknown and is no effect: add effect=True, or drop on_unknown.", tool=label
        )
    return given or "fail" if effect else None


def tools(
    *names: str,
    on_error: ToolErrors | None = None,
    timeout: float | None = None,
    effect: bool = False,
    on_unknown: OnUnknown | None = None,
) -> Callable[[_Method[S, P, R]], _Method[S, P, R]]:
    """Handle exactly this set of tools when one reply calls all of them and no other (order and counts do not matter).

    The method gets `calls: Sequence[ToolCall]` (arguments validated where a definition allows it) and returns one
    outcome or JSON value for the whole batch. It wins over single handlers, never falls back, and exposes nothing.

    The options are those of `tool`; as an effect it is one, under the key of the first call.
    """
    if not names:
        raise FlowDefinitionError("@tools needs the names of the tools that it handles together.")

    def mark(fn: _Method[S, P, R]) -> _Method[S, P, R]:
        policy = _on_unknown(", ".join(names), effect, on_unknown)
        if policy == "ask":
            raise FlowDefinitionError(
                f'@tools({", ".join(map(repr, names))}) says on_unknown="ask": a question belongs to one call, so use '
                '"retry" or "fail", or a @tool for each.',
                tool=names[0],
            )
        setattr(fn, _MARK, _Mark(tuple(sorted(set(names))), True, False, None, on_error, timeout, on_unknown=policy))
        return fn

    return mark


class Handler:
    """A method that serves calls, with everything that can be known of it once per class."""

    __slots__ = (
        "_aliases",
        "_checks",
        "_context",
        "_invalid",
        "_model",
        "_validate",
        "asks",
        "batch",
        "function",
        "is_async",
        "name",
        "names",
        "on_error",
        "on_unknown",
        "timeout",
    )

    def __init__(self, owner: type[Any], name: str, function: Callable[..., Any], mark: _Mark) -> None:
        self.name = name
        self.function = function
        self.names = mark.names
        self.batch = mark.batch
        self.on_error: ToolErrors | None = mark.on_error
        self.timeout = mark.timeout
        self.asks: Literal["approval", "client_tool"] | None = mark.asks
        self.on_unknown = mark.on_unknown
        self.is_async = inspect.iscoroutinefunction(function)
        self._model: Any = None
        self._checks: dict[str, Schema] = {}
        if mark.batch:
            self._context = _batch_context(owner, function)
        else:
            from pydantic import ValidationError

            self._invalid: type[Exception] = ValidationError
            self._model, self._context = _arguments(owner, function, mark.names[0])
            # Not `model_validate` and `model_fields`: they and what is around them cost more than the validation.
            self._validate: Callable[[JsonObject], Any] = self._model.__pydantic_validator__.validate_python
            self._aliases = [(name, about.alias) for name, about in self._model.model_fields.items()]

    @property
    def schema(self) -> JsonObject:
        """JSON schema of the arguments."""
        schema = cast("JsonObject", self._model.model_json_schema())
        schema.pop("title", None)
        for value in schema.get("properties", {}).values():
            value.pop("title", None)
        return schema

    def arguments(self, call: ToolCall, context: ToolContext) -> dict[str, Any]:
        """Validate a call's arguments into keyword arguments.

        Raises:
            ArgumentsError: They do not match.
        """
        try:
            parsed: dict[str, Any] = self._validate(_object(call.args)).__dict__
        except self._invalid as error:
            raise ArgumentsError(problems(error, "arguments")) from None
        values = {alias: parsed[name] for name, alias in self._aliases}
        if self._context is not None:
            values[self._context] = context
        return values

    def request(self, call: ToolCall) -> SuspendRequest | None:
        """What a call has to wait for before it is run, where its tool says so: the same whenever it is asked."""
        if self.asks is None:
            return None
        return SuspendRequest(self.asks, {"tool": call.name, "args": call.args}, id=request_id(call))

    def accepts(self, call: ToolCall) -> bool:
        """Whether the arguments of a call are valid."""
        try:
            self._validate(_object(call.args))
        except (self._invalid, ArgumentsError):
            return False
        return True

    def check_by(self, definitions: Mapping[str, ToolDefinition]) -> None:
        """Let a `@tools` handler validate calls by what their definitions declare."""
        for name in self.names:
            parameters = definitions[name].parameters
            if parameters is not None:
                self._checks[name] = Schema(parameters)

    def batch_call(self, call: ToolCall) -> ToolCall:
        """A call for a `@tools` handler, with arguments validated where its definition declares them.

        Raises:
            ArgumentsError: They do not match.
        """
        values = _object(call.args)
        check = self._checks.get(call.name)
        if check is not None:
            try:
                values = dict(check.parse(values))  # a mapping, or a model, which iterates over its fields
            except ValueError as error:
                raise ArgumentsError(str(error)) from None
        return ToolCall(call.id, call.name, values, call.key)

    def batch_arguments(self, context: ToolContext) -> dict[str, Any]:
        """Keyword arguments of a `@tools` handler, besides the calls."""
        return {} if self._context is None else {self._context: context}


def request_id(call: ToolCall, why: str = "") -> str:
    """Id of the request that a call waits for before it is run (again): it follows from the call, whoever asks."""
    return uuid5(NAMESPACE_OID, call.key + why).hex


def _object(args: Any) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise ArgumentsError("The arguments are not a JSON object.")
    return cast("dict[str, Any]", args)


def _hints(owner: type[Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Resolve the annotations of the parameters (never the return type, which may be for type checkers only)."""
    plain: Any = inspect.unwrap(function)
    notes = {k: v for k, v in plain.__annotations__.items() if k != "return"}
    scope = {**plain.__globals__, **_closure(plain)}
    try:
        return get_type_hints(
            SimpleNamespace(__annotations__=notes), scope, {owner.__name__: owner}, include_extras=True
        )
    except NameError as error:
        raise FlowDefinitionError(
            f"The annotations of {owner.__name__}.{function.__name__} name {error.name!r}, which cannot be found when "
            "the tool is built: import it at module level, outside of TYPE_CHECKING.",
            stage=owner.__name__,
            tool=function.__name__,
        ) from error


def _closure(function: Any) -> dict[str, Any]:
    """What a function sees of the functions around it, as far as it is there yet."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell: assigned later
            found[name] = cell.cell_contents
    return found


def _arguments(owner: type[Any], function: Callable[..., Any], name: str) -> tuple[type[Any], str | None]:
    """Build the pydantic model of a handler's arguments; also the name of its context parameter."""
    import docstring_parser
    import pydantic

    hints = _hints(owner, function)
    docs = {p.arg_name: p.description for p in docstring_parser.parse(inspect.getdoc(function) or "").params}
    context: str | None = None
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if hints.get(parameter.name) is ToolContext:
            context = parameter.name
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise FlowDefinitionError(
                f"{owner.__name__}.{function.__name__} takes {parameter}: a tool's parameters are named one by one.",
                stage=owner.__name__,
                tool=name,
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        # The model's own names say nothing: a parameter may be called as a method of pydantic's models is.
        about = pydantic.Field(alias=parameter.name)
        if description := docs.get(parameter.name):
            about = pydantic.Field(alias=parameter.name, description=description)
        fields[f"arg_{len(fields)}"] = (Annotated[hints.get(parameter.name, Any), about], default)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    try:
        model = pydantic.create_model(f"{name}_arguments", __config__=config, **fields)
        model.model_json_schema()
    except Exception as error:
        raise FlowDefinitionError(
            f"No JSON schema can be made of the parameters of {owner.__name__}.{function.__name__}: use types that "
            f"pydantic can describe ({type(error).__name__}).",
            stage=owner.__name__,
            tool=name,
        ) from error
    return model, context


def _batch_context(owner: type[Any], function: Callable[..., Any]) -> str | None:
    """Name of the context parameter of a `@tools` handler, which takes the calls and, if it likes, a context."""
    names = list(inspect.signature(function).parameters)[1:]
    if not 1 <= len(names) <= 2:
        raise FlowDefinitionError(
            f"{owner.__name__}.{function.__name__} takes {len(names)} parameters: a @tools handler takes the calls "
            "and, if it likes, a ToolContext.",
            stage=owner.__name__,
            tool=function.__name__,
        )
    return names[1] if len(names) == 2 else None


class ToolTable:
    """The tools of one class: definitions, exposure in order (base first), and dispatch (nearest class wins)."""

    __slots__ = ("definitions", "exposed", "handlers", "sets")

    def __init__(self) -> None:
        self.definitions: dict[str, tuple[ToolDefinition, ToolSchema]] = {}
        self.exposed: list[str] = []
        self.handlers: dict[str, Handler] = {}
        self.sets: dict[frozenset[str], Handler] = {}

    @classmethod
    def of(cls, owner: type[Any]) -> ToolTable:
        """Collect the decorated methods of `owner` and its bases.

        Raises:
            FlowDefinitionError: Two handlers for one tool on one class, or a signature without a schema.
        """
        table = cls()
        for base in reversed(owner.__mro__):
            seen: dict[tuple[bool, tuple[str, ...]], str] = {}
            for attribute, function in vars(base).items():
                mark = getattr(function, _MARK, None)
                if not isinstance(mark, _Mark) or not inspect.isfunction(function):
                    continue
                key = (mark.batch, mark.names)
                if key in seen:
                    raise FlowDefinitionError(
                        f"{base.__name__} has two handlers for {', '.join(mark.names)}: {seen[key]} and {attribute}. "
                        "Keep one.",
                        stage=owner.__name__,
                        tool=mark.names[0],
                    )
                seen[key] = attribute
                table._add(owner, attribute, function, mark)
        return table

    def _add(self, owner: type[Any], attribute: str, function: Callable[..., Any], mark: _Mark) -> None:
        handler = Handler(owner, attribute, function, mark)
        if mark.batch:
            self.sets[frozenset(mark.names)] = handler
            return
        name = mark.names[0]
        self.handlers[name] = handler
        if mark.defined:
            self.define(ToolDefinition(name, _description(function, mark), None, mark.on_error, mark.timeout), handler)
            if name not in self.exposed:
                self.exposed.append(name)

    def define(self, definition: ToolDefinition, handler: Handler | None = None) -> None:
        """Add a definition; its schema is the handler's, or what it says itself."""
        schema = handler.schema if handler else schema_of(definition)
        self.definitions[definition.name] = (
            definition,
            ToolSchema(definition.name, definition.description, schema),
        )

    def find(self, names: Iterable[str]) -> Handler | None:
        """The `@tools` handler for exactly this set of names."""
        return self.sets.get(frozenset(names)) if self.sets else None


def _description(function: Callable[..., Any], mark: _Mark) -> str:
    if mark.description is not None:
        return mark.description
    import docstring_parser

    return (docstring_parser.parse(inspect.getdoc(function) or "").description or "").strip()


def schema_of(definition: ToolDefinition) -> JsonObject:
    """JSON schema of a definition's parameters.

    Raises:
        FlowDefinitionError: There is none, or it is not that of an object.
    """
    if definition.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    try:
        schema = Schema(definition.parameters).json
    except ValueError as error:
        raise FlowDefinitionError(
            f"The parameters of tool {definition.name} cannot be used: {error}.", tool=definition.name
        ) from error
    if schema.get("type") != "object":
        raise FlowDefinitionError(
            f"The parameters of tool {definition.name} must be a JSON schema of type object.", tool=definition.name
        )
    return schema
