"""The routes: a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from stepwell.engine import TurnResult

from ._access import Capability
from ._answers import Cancelled, Ended, Envelope, FlowList, Health, Invoked, Published, SessionPage
from ._api import CHAT_SESSION, Api
from ._bodies import (
    AiRunBody,
    AnswerBody,
    CancelBody,
    EventsQuery,
    InputsBody,
    InvocationBody,
    SessionsQuery,
    SteerBody,
    TurnBody,
)

__all__ = ["ROUTES", "Endpoint"]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One method of one route: how it is reached, what answers it, and all that its documentation says.

    Attributes:
        method: HTTP method.
        path: Route.
        answer: The handler.
        summary: In a few words.
        description: What a client has to know.
        body: Model of the body.
        optional: Whether the body may be left out.
        query: Model of the query string.
        headers: Header fields it looks at, with their meaning.
        result: Type of the 200 response; `None` for an empty 204, or `media` alone.
        media: Media types of 200 responses that are not JSON.
        problems: Statuses of the problems it may answer with, besides those that every route may.
        needs: What the caller has to be able to do; `None`: nothing but to be known.
        open: Whether it asks for no key.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    answer: Callable[[Api, Request], Awaitable[Response]]
    summary: str
    description: str = ""
    body: type[BaseModel] | None = None
    optional: bool = False
    query: type[BaseModel] | None = None
    headers: tuple[tuple[str, str], ...] = ()
    result: Any = None
    media: tuple[str, ...] = ()
    problems: tuple[int, ...] = ()
    needs: Capability | None = None
    open: bool = False


_KEY: Final = ("Idempotency-Key", "The same key and body give the same turn, also after a lost answer.")
_CHAT: Final = (CHAT_SESSION, "The session; CHAT-SESSION-ID means the same.")

ROUTES: Final = (
    Endpoint(
        method="GET",
        path="/v1/flows",
        needs="read",
        answer=Api.flows,
        summary="Registered workflows",
        description="With their stages, tools, initial stage and model.",
        result=FlowList,
    ),
    Endpoint(
        method="POST",
        path="/v1/flows/{id}/turns",
        needs="run",
        answer=Api.turn,
        summary="Run a turn",
        description=(
            "The turn goes on when the connection is lost. A turn that ran and failed is a 200 whose `success` is "
            "false and whose `error` says why; the session is as it was after its last committed unit. Problems say "
            "that the turn did not begin, or (503) that the server stops and the turn goes on later. With `Accept: "
            "text/event-stream` a `turn` event with its ids, `message` events as `/events` has them (a server without "
            "channels: `progress` events), and at last `result`, or `error` with a problem."
        ),
        body=TurnBody,
        headers=(_KEY,),
        result=TurnResult,
        media=("text/event-stream",),
        problems=(400, 404, 408, 409, 413, 415, 422, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/sessions",
        needs="admin",
        answer=Api.sessions,
        summary="List sessions",
        description="Newest first.",
        query=SessionsQuery,
        result=SessionPage,
        problems=(422, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/sessions/{id}",
        needs="admin",
        answer=Api.export,
        summary="Export a session",
        description="Everything of it in one JSON document, for `import`. It holds the whole conversation.",
        result=dict[str, Any],
        problems=(404, 503),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/sessions/{id}",
        needs="admin",
        answer=Api.delete,
        summary="Delete a session",
        description="With all its rows. A running turn of it ends.",
        problems=(404, 503),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/cancel",
        needs="cancel",
        answer=Api.cancel,
        summary="Cancel the running turn",
        description="Answers when the cancel is recorded.",
        body=CancelBody,
        optional=True,
        result=Cancelled,
        problems=(400, 404, 408, 413, 415, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/steer",
        needs="run",
        answer=Api.steer,
        summary="Say something while a turn runs",
        description=(
            "The running turn takes it up before its next reply, in whatever process; where none does, it is a turn of "
            "its own. Answers with the result of the turn that took it up, which goes on when the connection is lost."
        ),
        body=SteerBody,
        headers=(_KEY,),
        result=TurnResult,
        problems=(400, 404, 408, 409, 413, 415, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/answers",
        needs="run",
        answer=Api.answers,
        summary="Answer what a suspended turn waits for",
        description=(
            "With the last answer the turn goes on, and its result is answered; else `status` is `suspended`, and "
            "`pending` says what is still waited for. The same answer again is the same result. The turn goes on when "
            "the connection is lost. 404: nothing waits for it."
        ),
        body=AnswerBody,
        result=TurnResult,
        problems=(400, 404, 408, 409, 413, 415, 422, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/sessions/{id}/events",
        needs="read",
        answer=Api.events,
        summary="Watch a session's channel",
        description=(
            "Server-sent events. Without a cursor they begin now (`history=1`: with all messages so far), with a "
            "`ready` event; `message` events are the mutations of the log, their ids cursors to continue from. "
            "`gap`: part of the log is gone, and all messages follow. With `view=1`: a `snapshot` of the conversation, "
            "then `patch` events with the messages and runs that changed."
        ),
        query=EventsQuery,
        headers=(("Last-Event-ID", "The cursor to continue from."),),
        media=("text/event-stream",),
        problems=(404, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/invocations",
        needs="run",
        answer=Api.invocations,
        summary="Let a flow or an agent answer an input",
        description=(
            "Of an input that a client published on the session's channel: a message, or an answer to a call that "
            "waits. Answers when the run has begun; it goes on when the connection is lost. The same input again is "
            "the same run. A session that is not there yet is begun. 422: edits and regenerations, which flows do not "
            "take up. 504: the input is not on the channel."
        ),
        body=InvocationBody,
        result=Invoked,
        problems=(400, 404, 408, 409, 413, 415, 422, 503, 504),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/inputs",
        needs="run",
        answer=Api.inputs,
        summary="Say something on a session's channel",
        description=(
            "Inputs and cancels of a client, as the wire protocol has them; published together, or not at all. A "
            "cancel of a flow's run is done when it is answered."
        ),
        body=InputsBody,
        result=Published,
        problems=(400, 404, 408, 413, 415, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/ai/run",
        needs="run",
        answer=Api.ai_run,
        summary="Run a turn (older contract)",
        description=(
            "The reply itself, with its MIME type, where that is not text/plain. 400 with `success` false where the "
            "turn failed or did not begin. The session's id is in the header CHAT_SESSION_ID."
        ),
        body=AiRunBody,
        headers=(_CHAT, _KEY),
        result=Envelope,
        problems=(408, 413, 415),
    ),
    Endpoint(
        method="GET",
        path="/ai/flows",
        needs="read",
        answer=Api.ai_flows,
        summary="Names of the workflows (older contract)",
        result=list[str],
    ),
    Endpoint(
        method="POST",
        path="/ai/end",
        needs="admin",
        answer=Api.ai_end,
        summary="Delete the session (older contract)",
        description="An unknown or missing session is a success.",
        headers=(_CHAT,),
        result=Ended,
        problems=(400, 503),
    ),
    Endpoint(
        method="GET",
        path="/healthz",
        answer=Api.healthz,
        summary="Whether the process answers",
        result=Health,
        open=True,
    ),
    Endpoint(
        method="GET",
        path="/readyz",
        answer=Api.readyz,
        summary="Whether turns can run",
        description="The session store answers, and the server is not stopping.",
        result=Health,
        problems=(503,),
        open=True,
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        needs="metrics",
        answer=Api.metrics,
        summary="Counts, for Prometheus",
        description="Of this process, in the text format.",
        media=("text/plain",),
    ),
    Endpoint(method="GET", path="/openapi.json", answer=Api.openapi, summary="This document", result=dict[str, Any]),
)
"""Every route, in the order of the documentation."""
