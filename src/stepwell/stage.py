"""What a Step and an LlmNode have in common: identity, hooks of the model loop, tools, what is built once per class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from stepwell._schema import Schema
from stepwell.errors import FlowDefinitionError
from stepwell.loop import (
    NO_OVERRIDE,
    CallPolicyOverride,
    LlmAttemptErrorContext,
    LlmBlockedContext,
    LlmErrorContext,
    StreamMode,
)
from stepwell.messages import JsonObject, JsonValue
from stepwell.models import Candidate
from stepwell.outcomes import Direct, DirectTo, Finish, Go, RetryWithModel
from stepwell.tools import ToolDefinition, ToolErrors, ToolTable

__all__ = [
    "BlockedResult",
    "ErrorResult",
    "OutputSchema",
    "Stage",
    "build_tools",
    "overridden",
    "refuse_private_overrides",
]

BlockedResult: TypeAlias = Go | Direct | DirectTo | Finish | type["Stage"] | str | None
"""What `on_llm_blocked` may return; `None` delegates."""

ErrorResult: TypeAlias = RetryWithModel | BlockedResult
"""What `on_llm_error` may return; `None` delegates."""


class Stage:
    """Base of all stages. Subclass `Step` or `LlmNode`, not this."""

    id: ClassVar[str] = "Stage"
    """Persisted identity; the class name unless given."""

    aliases: ClassVar[tuple[str, ...]] = ()
    """Older ids under which stored documents may know this stage."""

    stream_mode: StreamMode | None = None
    """`live`, `held` or `off`; `None` inherits."""

    parallel_tools: bool | None = None
    stream_partial_objects: bool | None = None
    tool_errors: ToolErrors | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "id" not in vars(cls):
            cls.id = cls.__name__

    # -- hooks: configuration

    def config_llm_call_policy(self) -> CallPolicyOverride:
        """Change fields of the workflow's call policy for this stage."""
        return NO_OVERRIDE

    def define_tools(self) -> Sequence[ToolDefinition]:
        """Declare tools; they are exposed only where `use_tools` names them. Read once per class."""
        return ()

    def use_tools(self) -> Sequence[str]:
        """Names of tools, defined elsewhere or by `define_tools`, that this stage exposes now. Asked every round."""
        return ()

    def struct_output_schema(self) -> type[Any] | JsonObject | None:
        """A pydantic model class or a JSON schema the reply must match; `on_response` then gets the parsed object."""
        return None

    # -- hooks: the model loop

    def check_response(self, candidate: Candidate) -> bool:
        """Judge a whole candidate: `False` accepts, `True` asks for another. Deterministic, without side effects."""
        return False

    async def on_llm_blocked(self, context: LlmBlockedContext) -> BlockedResult:
        """The provider refused the prompt or the answer. `None` asks the workflow."""
        return None

    def should_retry_llm_error(self, context: LlmAttemptErrorContext) -> bool | None:
        """An ordinary error was raised and attempts remain: stop early with `False`. `None` asks the workflow."""
        return None

    async def on_llm_error(self, context: LlmErrorContext) -> ErrorResult:
        """The budget is spent, or retry was declined. `None` asks the workflow."""
        return None


class OutputSchema:
    """A structured output: its JSON schema, and how a reply is parsed against it. Built once per class."""

    __slots__ = ("_schema", "schema")

    def __init__(self, spec: type[Any] | JsonObject, stage: str) -> None:
        try:
            self._schema = Schema(spec)
        except ValueError as error:
            raise FlowDefinitionError(
                f"struct_output_schema of {stage} cannot be used: {error}.", stage=stage
            ) from error
        self.schema: JsonObject = self._schema.json

    def parse(self, text: str) -> JsonValue:
        """Parse and validate.

        Raises:
            ValueError: It does not match; the text has one line per field, for the model.
        """
        try:
            data = msgspec.json.decode(_unfenced(text))
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            raise ValueError("The reply is not JSON.") from None
        return self._schema.parse(data)


def _unfenced(text: str) -> str:
    """The text without the code fence that some models put around JSON."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped:
        return stripped[stripped.index("\n") + 1 : -3]
    return stripped


def overridden(cls: type[Any], base: type[Any]) -> frozenset[str]:
    """Names of `base` that `cls` or a class between them defines anew."""
    stop = base.__mro__
    own = {name for c in stop for name in getattr(c, "__annotations__", ())}  # what its objects keep
    return frozenset(
        name for c in cls.__mro__ if c not in stop for name in vars(c) if hasattr(base, name) or name in own
    )


def refuse_private_overrides(cls: type[Any], base: type[Any], hooks: frozenset[str], flow: str) -> None:
    """Refuse a class that redefines run-time plumbing.

    Raises:
        FlowDefinitionError: Naming class and member.
    """
    for name in sorted(overridden(cls, base)):
        if name in hooks or (name.startswith("__") and name.endswith("__")):
            continue
        raise FlowDefinitionError(
            f"{cls.__name__} redefines {name}, which belongs to the runtime: choose another name.",
            flow=flow,
            stage=cls.__name__,
        )


def build_tools(stage: Stage, flow: str) -> ToolTable:
    """Collect the tools of a stage's class, with what its `define_tools` declares.

    Raises:
        FlowDefinitionError: See `ToolTable.of`; also a tool that is defined twice.
    """
    table = ToolTable.of(type(stage))
    for definition in stage.define_tools():
        if definition.name in table.definitions:
            raise FlowDefinitionError(
                f"Tool {definition.name} is defined twice in {stage.id}: rename one.",
                flow=flow,
                stage=stage.id,
                tool=definition.name,
            )
        table.define(definition)
    return table
