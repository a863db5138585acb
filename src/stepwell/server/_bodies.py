"""What a request's body may be, and how it is read: size, media type, JSON, fields, in this order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

import anyio
import msgspec
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from starlette.requests import Request

from stepwell._json import json_copy
from stepwell.errors import NonJsonValueError
from stepwell.messages import FilePart, TextPart, UserMessage

from ._problems import Problem

__all__ = [
    "AiRunBody",
    "AnswerBody",
    "CancelBody",
    "EventsQuery",
    "InputsBody",
    "InvocationBody",
    "MessageBody",
    "SessionsQuery",
    "SteerBody",
    "TurnBody",
    "read_body",
    "read_query",
]

BODY_SECONDS = 60.0
"""How long a client may take to send a body."""

DRAIN_BYTES = 16 * 1024 * 1024
DRAIN_SECONDS = 5.0
"""How much of a body that is too large is thrown away, so that a simple client comes to read why it was refused."""

DEPTH = 100
"""Levels of nesting of a body."""

Model = TypeVar("Model", bound=BaseModel)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextBody(_Strict):
    """Text of a message."""

    type: Literal["text"]
    text: str


class FileBody(_Strict):
    """A file of a message: either `data` (base64) or `url`."""

    type: Literal["file"]
    media_type: str = Field(pattern=r"^[\w.+-]+/[\w.+-]+$", max_length=255, examples=["application/pdf"])
    data: str | None = Field(None, pattern=r"^[A-Za-z0-9+/]*={0,2}$", description="Base64.")
    url: str | None = Field(None, pattern=r"^https?://\S+$", max_length=8192)
    name: str | None = Field(None, max_length=255)

    @model_validator(mode="after")
    def _one_source(self) -> FileBody:
        if (self.data is None) == (self.url is None):
            raise ValueError("a file has either data or url")
        if self.data is not None and len(self.data) % 4:
            raise ValueError("data is not base64: its length is no multiple of four")
        return self


def _tag_of(value: Any) -> str | None:
    # Tags become part of pydantic's locations; # keeps them apart from the names of fields.
    kind: Any = cast("Mapping[str, Any]", value).get("type") if isinstance(value, Mapping) else None
    return f"#{kind}" if kind in ("text", "file") else None


class MessageBody(_Strict):
    """A message of several parts."""

    parts: list[
        Annotated[
            Annotated[TextBody, Tag("#text")] | Annotated[FileBody, Tag("#file")],
            Discriminator(
                _tag_of,
                custom_error_type="part",
                custom_error_message='a part is an object with "type": "text" or "file"',
            ),
        ]
    ] = Field(min_length=1, max_length=100)

    def message(self) -> UserMessage:
        """As the engine takes it."""
        return UserMessage(
            content=tuple(
                TextPart(part.text)
                if isinstance(part, TextBody)
                else FilePart(part.media_type, part.data, part.url, part.name)
                for part in self.parts
            )
        )


def _message_tag(value: Any) -> str | None:
    return "#string" if isinstance(value, str) else "#parts" if isinstance(value, Mapping) else None


Message = Annotated[
    Annotated[str, Tag("#string")] | Annotated[MessageBody, Tag("#parts")],
    Discriminator(
        _message_tag, custom_error_type="message", custom_error_message='a message is a string or {"parts": [...]}'
    ),
]


class TurnBody(_Strict):
    """One turn: what a person says to a flow."""

    message: Message | None = Field(None, description="What the person says. Some flows start without.")
    session_id: str | None = Field(None, description="The session to go on with; leave it out to start a new one.")
    config: dict[str, Any] | None = Field(None, description="Context of a new session; ignored with a warning later.")
    on_busy: Literal["queue", "reject"] | None = Field(
        None, description="What happens while another turn has the session; the flow's own rule by default."
    )

    @property
    def said(self) -> str | UserMessage | None:
        """The message as the engine takes it."""
        return self.message.message() if isinstance(self.message, MessageBody) else self.message


class SteerBody(_Strict):
    """What a person says while a turn runs."""

    message: Message

    @property
    def said(self) -> str | UserMessage:
        """The message as the engine takes it."""
        return self.message.message() if isinstance(self.message, MessageBody) else self.message


class AnswerBody(_Strict):
    """An answer that a suspended turn waits for."""

    request_id: str = Field(min_length=1, max_length=1024, description="`id` of what is `pending`.")
    value: Any = Field(
        description="Of an approval `true`, `false` or `{approved, reason}`; of a question or a client's tool any JSON."
    )


class InvocationBody(BaseModel):
    """An input that a client has published and wants answered. Other fields are the application's."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    inputEventId: str = Field(min_length=1, max_length=512, description="The input's `event-id`.")  # noqa: N815
    sessionName: str = Field(min_length=1, max_length=256, description="Name of the channel.")  # noqa: N815
    agent: str | None = Field(
        None, max_length=128, description="Which agent or flow is to answer, where there are several."
    )


class WireBody(_Strict):
    """A message for the channel."""

    name: Literal["ai-input", "ai-cancel"]
    data: str | dict[str, Any] | list[Any] | None = None
    extras: dict[str, Any] | None = None
    clientId: str | None = Field(None, max_length=512, description="Who says it; the caller by default.")  # noqa: N815
    id: str | None = Field(None, max_length=512, description="The same message again is not stored again.")


class InputsBody(_Strict):
    """What a client says on a channel: published together, or not at all."""

    messages: list[WireBody] = Field(min_length=1, max_length=100)


class EventsQuery(_Strict):
    """How a channel is watched."""

    after: str | None = Field(
        None, max_length=256, description="A cursor to continue from; `Last-Event-ID` says it too."
    )
    view: Literal["0", "1"] = Field("0", description="`1`: the conversation, as a snapshot and patches.")
    history: Literal["0", "1"] = Field("0", description="`1`: all messages so far first.")


class CancelBody(_Strict):
    """Why a turn is cancelled, and which."""

    reason: str | None = Field(None, max_length=1000, description="Recorded with the turn.")
    run_id: str | None = Field(None, max_length=255, description="Cancel only this run.")


class AiRunBody(BaseModel):
    """One turn, in the older contract. Further members are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    flowName: str  # noqa: N815
    message: Message | None = None
    config: dict[str, Any] | None = None

    @property
    def said(self) -> str | UserMessage | None:
        """The message as the engine takes it."""
        return self.message.message() if isinstance(self.message, MessageBody) else self.message


class SessionsQuery(BaseModel):
    """Which sessions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flow: str | None = Field(None, description="Only of this flow.")
    status: Literal["running", "completed", "aborted", "suspended"] | None = Field(None, description="Only these.")
    after: str | None = Field(None, description="`next` of the page before.")
    limit: int = Field(50, ge=1, le=200)


# -- reading


async def read_body(request: Request, model: type[Model], limit: int, *, optional: bool = False) -> Model:
    """Read and check a body.

    Args:
        request: The request.
        model: What it has to be.
        limit: Bytes that are read at most.
        optional: Whether no body is like an empty object.

    Raises:
        Problem: 400, 408, 413, 415 or 422, saying what is wrong and where.
    """
    data = await _read(request, limit)
    if not data and optional:
        return model()
    _check_media_type(request)
    return checked(_decode(data), model)


def checked(value: Any, model: type[Model]) -> Model:
    """Check a decoded body.

    Raises:
        Problem: 413 or 422, with a pointer per field.
    """
    if not isinstance(value, dict):
        raise _invalid("The body is a JSON object, nothing else.", [{"pointer": "", "detail": "must be an object"}])
    if _too_deep(value):
        raise _deep()
    try:
        return model.model_validate(value)
    except ValidationError as error:
        fields = [
            {"pointer": _pointer(one["loc"], value, one["type"]), "detail": one["msg"]}
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise _invalid("The body has fields that are not acceptable: see errors.", fields) from None


def read_query(request: Request, model: type[Model]) -> Model:
    """Check the query string.

    Raises:
        Problem: 422, naming each parameter.
    """
    try:
        return model.model_validate(dict(request.query_params))
    except ValidationError as error:
        fields = [
            {"parameter": str(one["loc"][0]), "detail": one["msg"]}
            for one in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise _invalid("The query has parameters that are not acceptable: see errors.", fields) from None


async def _read(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    announced = int(length) if length.isascii() and length.isdecimal() and len(length) < 19 else 0
    body = bytearray()
    with anyio.move_on_after(BODY_SECONDS):
        if announced > limit:
            if "100-continue" not in request.headers.get("expect", "").lower():
                await _drain(request, announced)
            raise _large(limit)
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise Problem(400, "incomplete_body", "The connection was closed before the body was complete.")
            body += message.get("body", b"")
            if len(body) > limit:
                if message.get("more_body"):
                    await _drain(request, DRAIN_BYTES)
                raise _large(limit)
            if not message.get("more_body"):
                return bytes(body)
    raise Problem(
        408,
        "request_timeout",
        f"The body was not there after {BODY_SECONDS:g} s: send it again.",
        retryable=True,
        headers={"Connection": "close"},
    )


async def _drain(request: Request, announced: int) -> None:
    """Throw the rest of a body away, within limits."""
    left = min(announced, DRAIN_BYTES)
    with anyio.move_on_after(DRAIN_SECONDS):
        while left > 0:
            message = await request.receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                return


def _check_media_type(request: Request) -> None:
    given = request.headers.get("content-type", "")
    kind, *params = (part.strip().lower() for part in given.split(";"))
    charset = next((param.partition("=")[2].strip('"') for param in params if param.startswith("charset=")), "utf-8")
    if (kind == "application/json" or re.fullmatch(r"application/[\w.-]+\+json", kind)) and charset == "utf-8":
        return
    raise Problem(
        415,
        "unsupported_media_type",
        "A body is JSON in UTF-8: send it with the header Content-Type: application/json.",
        headers={"Accept": "application/json"},
    )


def _decode(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise _deep() from None
    except msgspec.DecodeError as error:
        _explain(data, str(error))


def _explain(data: bytes, why: str) -> NoReturn:
    """The decoder refused; another one may tell better why. Only on the way out, so its speed does not matter."""
    try:
        value = json.loads(data, parse_constant=_no_number)
        if _too_deep([value]):
            raise _deep()
        json_copy(value)
    except NonJsonValueError as error:
        pointer = "".join(f"/{key}" for key in re.split(r"[.\[\]]+", error.path.rstrip("]")) if key)
        clean = error.message.encode("utf-8", "replace").decode()
        pointer = pointer.encode("utf-8", "replace").decode()
        raise _invalid(clean, [{"pointer": pointer, "detail": clean}]) from None
    except RecursionError:
        raise _deep() from None
    except _NoNumberError as error:
        raise _malformed(f"{error} is not JSON") from None
    except ValueError:
        pass
    raise _malformed(why.removeprefix("JSON is malformed: "))


class _NoNumberError(Exception):
    pass


def _no_number(name: str) -> NoReturn:
    raise _NoNumberError(name)


def _too_deep(value: Any) -> bool:
    """Whether a decoded body is nested deeper than `DEPTH`, found without recursion."""
    layer: list[Any] = [value]
    for _ in range(DEPTH):
        layer = [
            item
            for entry in layer
            for item in (cast("dict[str, Any]", entry).values() if isinstance(entry, dict) else entry)
            if isinstance(item, (dict, list))
        ]
        if not layer:
            return False
    return True


def _pointer(loc: Sequence[str | int], value: Any, kind: str) -> str:
    """A JSON pointer from pydantic's location, which also holds names of union members."""
    keys: list[str | int] = []
    for index, key in enumerate(loc):
        if (isinstance(value, dict) and key in value) or (isinstance(value, list) and isinstance(key, int)):
            value = cast("Any", value[key])
        elif kind == "missing" and index == len(loc) - 1:
            value = None
        else:
            continue
        keys.append(key)
    return "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


def _invalid(detail: str, errors: Sequence[Mapping[str, str]]) -> Problem:
    return Problem(422, "invalid_input", detail, errors=errors)


def _malformed(why: str) -> Problem:
    return Problem(400, "malformed_json", f"The body is not JSON: {why}. Send one JSON object in UTF-8.")


def _deep() -> Problem:
    return Problem(413, "input_too_large", f"The body is nested deeper than {DEPTH} levels: send a flatter one.")


def _large(limit: int) -> Problem:
    return Problem(
        413,
        "input_too_large",
        f"The body has more than {limit} bytes: send less, or a link to it.",
        headers={"Connection": "close"},
    )
