"""What a hook returned, checked whole before anything of it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec

from stepwell._json import check_text, is_text_clean, json_copy
from stepwell.errors import HistoryError, InvalidOutcomeError, NonJsonValueError
from stepwell.flow._step import Step, checked_patch
from stepwell.messages import HistoryCheck, JsonValue, Message, UserMessage
from stepwell.outcomes import Direct, DirectTo, Finish, Go, Outcome, RequestKind, Stay, Suspend, SuspendRequest
from stepwell.stage import Stage

if TYPE_CHECKING:
    from stepwell.flow._runtime import Runtime

__all__ = ["TOOL", "as_message", "attach", "checked", "handled", "json_text"]

TOOL = "tool"
"""The hook's name for tool handlers; which tool is said beside it."""

MAX_WAIT = 1e10
"""Seconds a request may wait: a time that any clock can hold."""

MAX_REQUEST_ID = 255
"""Characters of a request's id."""

_LEGAL: Mapping[str, tuple[type[Any], ...]] = {
    TOOL: (Go, Stay, Direct, DirectTo, Finish, Suspend),
    "run_logic": (Go, DirectTo, Finish),
    "on_response": (Go, Direct, DirectTo, Finish, str, type(None)),
    "on_llm_blocked": (Go, Direct, DirectTo, Finish, str),
    "on_llm_error": (Go, Direct, DirectTo, Finish, str),
    "run": (Direct,),  # around the content that it returned
}


def checked(step: Step[Any, Any], hook: str, value: Any, tool: str | None = None) -> Any:
    """Return what a hook returned: an outcome with its content as text, or text, or `None`.

    A stage class means `go`. Objects as content become JSON text, with that content type unless another is given.

    Raises:
        InvalidOutcomeError: It is not legal in this hook, names a stage that is not registered, or holds something that
            is not JSON. Names hook, stage and kind of value.
    """
    if _is_stage(value):
        value = Go(value)
    if not isinstance(value, _LEGAL[hook]):
        what = type(value).__name__
        raise _illegal(step, hook, value, tool, f"returned a {what}, which is not legal there: see the outcomes")
    if not isinstance(value, Outcome):
        if value is not None and not is_text_clean(value):
            raise _illegal(step, hook, value, tool, "returned a text that is not valid Unicode")
        return value
    if hook != TOOL and (value.feedback is not None or value.messages or value.cleanup):
        raise _illegal(step, hook, value, tool, "attached tool feedback, messages or a cleanup: only tool handlers may")
    if isinstance(value, (Go, DirectTo)) and step.flow._find(value.target) is None:  # pyright: ignore[reportPrivateUsage]
        name = value.target if isinstance(value.target, str) else getattr(value.target, "__name__", "?")
        raise _illegal(
            step, hook, value, tool, f"names {name!r}, which {step.flow.id} does not register: add it to define_steps"
        )
    _check_attached(step, hook, value, tool)
    if isinstance(value, (Direct, DirectTo, Finish)):
        return _with_text(step, hook, value, tool)
    if isinstance(value, Suspend):
        return msgspec.structs.replace(value, request=_request(step, hook, value, tool))
    return value


def handled(step: Step[Any, Any], value: Any, tool: str) -> Outcome:
    """What a tool handler returned: an outcome as `checked` returns it, anything else as feedback of a `Stay`.

    Raises:
        InvalidOutcomeError: See `checked`.
    """
    plain = not isinstance(value, Outcome) and not _is_stage(value)
    try:
        if plain and value is not None:
            return Stay(feedback=json_copy(value))
        outcome: Outcome = checked(step, TOOL, Stay() if plain else value, tool)
        return msgspec.structs.replace(outcome, feedback=json_copy(outcome.feedback))
    except NonJsonValueError as error:
        where = error.path or "the whole"
        raise _illegal(step, TOOL, value, tool, f"returned a result that is not JSON ({where})") from error


def _is_stage(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Stage)


def _check_attached(step: Step[Any, Any], hook: str, value: Outcome, tool: str | None) -> None:
    if value.state is not None:
        try:
            checked_patch(value.state, step.id)
        except (NonJsonValueError, InvalidOutcomeError) as error:
            why = f"attached a state that cannot be saved: {error.message}"
            raise _illegal(step, hook, value, tool, why) from error
    for name in ("prompt", "content_type"):
        text = getattr(value, name)
        if text is not None and not (isinstance(text, str) and is_text_clean(text)):
            raise _illegal(step, hook, value, tool, f"attached a {name} that is no text")
    given = () if value.message is None else (value.message,)
    for message in (*given, *value.messages):
        if not isinstance(message, str | Message):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _illegal(step, hook, value, tool, "attached what is no message: use text or a message record")
        try:
            HistoryCheck().add(as_message(message))
        except HistoryError as error:
            why = f"attached a message that cannot be stored: {error.message}"
            raise _illegal(step, hook, value, tool, why) from error


def _request(step: Step[Any, Any], hook: str, value: Suspend, tool: str | None) -> SuspendRequest:
    """The request of a `Suspend`, checked, with a copy of its payload."""
    request: Any = value.request
    if not isinstance(request, SuspendRequest) or request.kind not in get_args(RequestKind):
        kinds = ", ".join(get_args(RequestKind))
        raise _illegal(step, hook, value, tool, f"suspends for what is no SuspendRequest of a known kind ({kinds})")
    after: Any = request.expires_in
    if after is not None and not (isinstance(after, int | float) and 0 < after < MAX_WAIT):
        raise _illegal(step, hook, value, tool, "suspends with an expires_in that is no positive number of seconds")
    name: Any = request.id
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_REQUEST_ID or not is_text_clean(name):
        raise _illegal(
            step, hook, value, tool, f"names its request with no text of at most {MAX_REQUEST_ID} characters"
        )
    if value.feedback is not None or value.content_type is not None:
        raise _illegal(
            step, hook, value, tool, "gives feedback or a content type with suspend: its answer is the result"
        )
    try:
        return msgspec.structs.replace(request, payload=json_copy(request.payload))
    except NonJsonValueError as error:
        where = error.path or "the whole"
        raise _illegal(step, hook, value, tool, f"suspends with a payload that is not JSON ({where})") from error


def _with_text(step: Step[Any, Any], hook: str, value: Direct | DirectTo | Finish, tool: str | None) -> Outcome:
    content = value.content
    if content is None:
        return value
    try:
        if isinstance(content, str):
            check_text(content, "")
            return value
        text = json_text(content)
    except NonJsonValueError as error:
        where = error.path or "the whole"
        raise _illegal(step, hook, value, tool, f"answers with content that is not JSON ({where})") from error
    return msgspec.structs.replace(value, content=text, content_type=value.content_type or "application/json")


def _illegal(step: Step[Any, Any], hook: str, value: Any, tool: str | None, what: str) -> InvalidOutcomeError:
    who = f"{hook} of {step.id}" if tool is None else f"The handler of tool {tool} of {step.id}"
    kind = type(value).__name__
    return InvalidOutcomeError(f"{who} {what}.", flow=step.flow.id, stage=step.id, hook=hook, tool=tool, value=kind)


def json_text(value: JsonValue) -> str:
    """A JSON value, or an object of a pydantic model, as JSON text.

    Raises:
        NonJsonValueError: It is neither.
    """
    if hasattr(value, "model_dump_json"):
        return cast("str", value.model_dump_json())
    return msgspec.json.encode(json_copy(value)).decode()


def as_message(value: Message | str) -> Message:
    """Text becomes a user message by code."""
    return UserMessage(content=value, by="code") if isinstance(value, str) else value


def attach(runtime: Runtime, stage: str, outcome: Outcome) -> None:
    """Write an outcome's prompt and state into a stage."""
    if outcome.prompt is not None:
        runtime.write_state(stage, "save", {"_prompt": outcome.prompt})
    if outcome.state is not None:
        runtime.write_state(stage, "save", checked_patch(outcome.state, stage))
