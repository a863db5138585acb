"""What a model is told of a tool, and how its arguments are checked."""

import datetime
import enum
import functools
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import pytest
from pydantic import BaseModel, Field

from flow_kit import call, flow_of, harness, lines, stage
from stepwell import Step, ToolContext, ToolDefinition, stay, tool, tools
from stepwell.errors import FlowDefinitionError
from stepwell.flow import FlowDefinition
from stepwell.messages import ToolCall
from stepwell.testing import Call, Reply

pytestmark = pytest.mark.anyio


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Guest(BaseModel):
    """A guest."""

    name: str
    age: int = Field(ge=0)


class Booking(Step):
    got: ClassVar[list[Any]] = []

    @tool
    async def book(
        self,
        city: Annotated[str, Field(min_length=2, description="Where.")],
        nights: int,
        ctx: ToolContext,
        size: Size = Size.SMALL,
        guests: list[Guest] = [],  # noqa: B006
        note: str | None = None,
        board: Literal["half", "full"] | None = None,
        since: datetime.date | None = None,
        percent: float = Field(default=0.5, le=1, description="Of the price."),
    ) -> Any:
        """Book a room.

        At once, without asking.

        Args:
            nights: How many nights.
            size: Of the room.
        """
        self.got.append((city, nights, ctx.call_id, size, guests, note, board, since, percent))
        return stay()

    @tool("other_name", description="Said here.")
    def _plain(self, json: str, copy: bool = False, model_config: str = "", _x: int = 0) -> Any:
        """Not this."""
        self.got.append((json, copy, model_config, _x))


async def shown(*steps: type[Step]) -> list[Any]:
    async with harness(flow_of(*steps), "Ok.") as h:
        await h.say("hi")
        return list(h.model.requests[0].tools)  # type: ignore[attr-defined]


async def test_schemas_come_from_signature_and_docstring() -> None:
    book, other = await shown(Booking)
    assert book.name == "book"
    assert book.description == "Book a room.\n\nAt once, without asking."
    schema = book.parameters
    assert list(schema["properties"]) == [
        "city", "nights", "size", "guests", "note", "board", "since", "percent",
    ]  # fmt: skip
    assert schema["required"] == ["city", "nights"]
    assert schema["additionalProperties"] is False
    assert "title" not in schema
    properties = schema["properties"]
    assert properties["city"] == {"type": "string", "minLength": 2, "description": "Where."}
    assert properties["nights"] == {"type": "integer", "description": "How many nights."}
    assert properties["size"]["description"] == "Of the room."
    assert properties["size"]["default"] == "s"
    assert schema["$defs"]["Size"]["enum"] == ["s", "l"]
    assert properties["guests"]["items"] == {"$ref": "#/$defs/Guest"}
    assert schema["$defs"]["Guest"]["required"] == ["name", "age"]
    assert properties["note"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    assert properties["board"]["anyOf"][0] == {"enum": ["half", "full"], "type": "string"}
    assert properties["percent"]["maximum"] == 1
    assert (other.name, other.description) == ("other_name", "Said here.")
    assert list(other.parameters["properties"]) == ["json", "copy", "model_config", "_x"]


async def test_arguments_arrive_as_what_they_are_annotated() -> None:
    Booking.got = []
    args = {
        "city": "Rome", "nights": 2, "size": "l", "guests": [{"name": "Ann", "age": 3}], "since": "2026-01-02",
    }  # fmt: skip
    replies = [
        Reply.tool_call("book", args, id="one"),
        call("other_name", json="x", copy=True, model_config="m", _x=2),
        "Done.",
    ]
    async with harness(flow_of(Booking), *replies) as h:
        await h.say("hi")
        assert lines(await h.history("Booking"))[2] == "ok: input validated"
        assert lines(await h.history("Booking"))[4] == "ok: ok"
    assert Booking.got == [
        ("Rome", 2, "one", Size.LARGE, [Guest(name="Ann", age=3)], None, None, datetime.date(2026, 1, 2), 0.5),
        ("x", True, "m", 2),
    ]


async def test_wrong_arguments_go_back_to_the_model_one_line_per_field() -> None:
    Booking.got = []
    args = {"city": "R", "size": "xl", "guests": [{"name": "Ann", "age": -1}], "unknown": 1}
    async with harness(flow_of(Booking), Reply.tool_call("book", args), Reply.tool_call("book", raw="[1]"), "Oh.") as h:
        result = await h.say("hi")
        history = await h.history("Booking")
    assert result.success
    assert not Booking.got
    first, second = history[2], history[4]
    assert first.outcome == second.outcome == "error"  # type: ignore[union-attr]
    assert first.content["accepted"] is False  # type: ignore[union-attr]
    problems = first.content["error"].splitlines()  # type: ignore[union-attr]
    assert [line.split(":")[0] for line in problems] == ["city", "nights", "size", "guests.0.age", "unknown"]
    assert problems[1] == "nights: Field required"
    assert second.content == {"accepted": False, "error": "The arguments are not a JSON object."}  # type: ignore[union-attr]


async def test_the_context_of_a_call() -> None:
    got: list[ToolContext] = []

    @tool(timeout=20)
    async def first(self: Any, ctx: ToolContext) -> Any:
        got.append(ctx)
        ctx.progress({"half": True})

    @tool
    def second(self: Any, where: ToolContext) -> Any:
        got.append(where)

    replies = [Reply.tool_calls(Call("first", id="x"), Call("second", id="y")), call("first"), "Done."]
    async with harness(flow_of(stage("A", first=first, second=second)), *replies) as h:
        result = await h.say("hi")
        from stepwell.engine import ToolProgress

        assert [(e.name, e.value) for e in h.of(ToolProgress)] == [("first", {"half": True})] * 2
    one, two, _ = got
    assert (one.call_id, two.call_id, one.attempt) == ("x", "y", 1)
    assert {c.run_id for c in got} == {result.run_id}
    assert one.deadline is not None
    assert two.deadline is None
    keys = [c.idempotency_key for c in got]
    assert len(set(keys)) == 3
    assert keys[0] == f"{result.invocation_id}-step-0::0"
    assert not one.cancelled.is_set()


# -- definitions apart from handlers


class Search(BaseModel):
    """Ignored."""

    city: str
    limit: int = 3


DEFINED = [
    ToolDefinition("by_model", "By a model.", Search),
    ToolDefinition("by_schema", "By a schema.", {"type": "object", "properties": {"x": {"type": "integer"}}}),
    ToolDefinition("by_nothing", "No parameters."),
]


class Handles(Step):
    got: ClassVar[list[Any]] = []

    def use_tools(self) -> list[str]:
        return [d.name for d in DEFINED]

    @tools("by_model", "by_schema")
    async def both(self, calls: list[ToolCall], ctx: ToolContext) -> Any:
        """Both."""
        self.got.append(([(c.name, c.args) for c in calls], ctx.call_id))
        return "both"

    @tool("by_model", defined=False)
    async def model(self, city: str, limit: int = 1) -> str:
        return f"{city} {limit}"

    @tool("by_nothing", defined=False)
    async def nothing(self) -> None:
        """Nothing."""


async def test_definitions_of_the_flow_are_exposed_where_a_step_names_them() -> None:
    async with harness(flow_of(Handles, define_tools=lambda self: DEFINED), call("by_model", city="Rome"), "Ok.") as h:
        await h.say("hi")
        one, two, three = h.model.requests[0].tools  # type: ignore[attr-defined]
        assert lines(await h.history("Handles"))[2] == "ok: Rome 1"
    assert (one.description, list(one.parameters["properties"])) == ("By a model.", ["city", "limit"])
    assert two.parameters == {"type": "object", "properties": {"x": {"type": "integer"}}}
    assert three.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


async def test_a_set_is_checked_by_its_handlers_and_definitions() -> None:
    Handles.got = []
    good = Reply.tool_calls(Call("by_schema", {"x": 1}), Call("by_model", {"city": "Rome"}), Call("by_schema"))
    bad = Reply.tool_calls(Call("by_schema", {"x": "no"}), Call("by_model", {"city": "Rome"}))
    worse = Reply.tool_calls(Call("by_schema", raw="7"), Call("by_model", {"city": 7}))
    async with harness(flow_of(Handles, define_tools=lambda self: DEFINED), good, bad, worse, "Ok.") as h:
        assert (await h.say("hi")).success
        history = lines(await h.history("Handles"))
    assert Handles.got == [
        ([("by_schema", {"x": 1}), ("by_model", {"city": "Rome", "limit": 1}), ("by_schema", {})], "call_1")
    ]
    assert history[2:5] == ["ok: both"] * 3
    assert "$.x: 'no' is not of type 'integer'" in history[6]
    assert "Not run: another call" in history[7]
    assert "not a JSON object" in history[9]
    assert "city: Input should be a valid string" in history[10]


async def test_a_model_class_as_parameters_reaches_a_set_as_values() -> None:
    got: ClassVar[list[Any]] = []

    @tools("by_model")
    async def only(self: Any, calls: Any) -> Any:
        got.extend(c.args for c in calls)

    a = stage("A", only=only, use_tools=lambda self: ["by_model"], define_tools=lambda self: DEFINED[:1])
    async with harness(flow_of(a), call("by_model", city="Rome"), call("by_model"), "Ok.") as h:
        await h.say("hi")
        assert "city: Field required" in lines(await h.history("A"))[4]
    assert got == [{"city": "Rome", "limit": 3}]


# -- what no schema can be made of


def bad_member(**members: Any) -> Any:
    return lambda: FlowDefinition(flow_of(stage("A", **members)))


@tool
async def star(self: Any, *values: int) -> None: ...


@tool
async def named(self: Any, **values: int) -> None: ...


@tool
async def positional(self: Any, x: int, /) -> None: ...


@tool
async def strange(self: Any, x: "functools.partial[int]") -> None: ...


@tool
async def missing(self: Any, x: "NotImported") -> None: ...  # type: ignore[name-defined]  # noqa: F821


@tools("star")
async def no_calls(self: Any) -> None: ...


@tools("star")
async def too_many(self: Any, calls: Any, ctx: ToolContext, more: int) -> None: ...


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (star, "star takes \\*values"), (named, "named takes \\*\\*values"), (positional, "positional takes x"),
        (strange, "No JSON schema"), (missing, "'NotImported'.*import it at module level"),
        (no_calls, "takes 0 parameters"), (too_many, "takes 3 parameters"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)  # fmt: skip
def test_signatures_without_a_schema_are_refused(member: Any, words: str) -> None:
    with pytest.raises(FlowDefinitionError, match=words) as caught:
        bad_member(**{member.__name__: member})()
    assert caught.value.ids["stage"] == "A"
    assert caught.value.ids["tool"] == member.__name__


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "string"}, "of type object"), ({"type": 7}, "not a valid JSON schema"), (int, "neither a pydantic"),
        (pydantic.RootModel[list[int]], "of type object"),
    ],
    ids=["string", "invalid", "class", "list"],
)  # fmt: skip
def test_parameters_that_are_no_object_are_refused(parameters: Any, words: str) -> None:
    definition = ToolDefinition("t", parameters=parameters)
    with pytest.raises(FlowDefinitionError, match=words):
        FlowDefinition(flow_of(stage("A"), define_tools=lambda self: [definition]))


@pytest.mark.parametrize("spec", [int, {"type": 7}], ids=["class", "invalid"])
def test_output_schemas_that_are_none_are_refused(spec: Any) -> None:
    with pytest.raises(FlowDefinitionError, match="struct_output_schema of A cannot be used"):
        FlowDefinition(flow_of(stage("A", struct_output_schema=lambda self: spec)))


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a.b"])
def test_tool_names(name: str) -> None:
    with pytest.raises(FlowDefinitionError, match="is not a tool name"):
        ToolDefinition(name)


def test_a_tool_without_time_or_a_set_without_names_is_refused() -> None:
    with pytest.raises(FlowDefinitionError, match="timeout of tool t must be positive"):
        ToolDefinition("t", timeout=0)
    with pytest.raises(FlowDefinitionError, match="names of the tools"):
        tools()
