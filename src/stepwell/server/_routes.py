"""The routes: a table, and what answers each."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import anyio
import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from stepwell.engine import Engine, TurnResult
from stepwell.errors import StepwellError, UnknownSessionError
from stepwell.messages import UserMessage
from stepwell.transport import Invocation
from stepwell.wire import Cursor, WireMessage

from ._answers import Cancelled, Ended, Envelope, FlowList, Health, Invoked, Published, SessionPage, describe
from ._bodies import (
    AiRunBody,
    CancelBody,
    EventsQuery,
    InputsBody,
    InvocationBody,
    SessionsQuery,
    TurnBody,
    read_body,
    read_query,
)
from ._conversations import Conversations
from ._events import EventStream, LogEvents, ViewEvents
from ._guard import ANONYMOUS, principal_of
from ._openapi import document
from ._problems import Problem, problem_of, refusal_of, stopping

if TYPE_CHECKING:
    from ._app import ServerApp

__all__ = ["ROUTES", "Api", "Endpoint"]

CHAT_SESSION: Final = "CHAT_SESSION_ID"
KEY_LENGTH: Final = 200
"""Characters of an `Idempotency-Key`; the engine's limit leaves room for the caller's name."""

_MIME: Final = re.compile(r"[\w.+-]+/[\w.+-]+(\s*;\s*[\w.+-]+=(\"[\w .:+-]*\"|[\w.:+-]+))*", re.ASCII)
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_READY_SECONDS: Final = 5.0

_encode: Final = msgspec.json.Encoder().encode


class Api:
    """The handlers. Each gets a request that `Guard` let through.

    Args:
        app: The application they belong to.
    """

    def __init__(self, app: ServerApp) -> None:
        self._app = app
        self._engine: Engine = app.engine
        definitions = list(dict.fromkeys(self._engine.definitions.values()))
        self._flows = _encode(FlowList(tuple(describe(definition) for definition in definitions)))
        self._names = _encode([definition.id for definition in definitions])

    async def flows(self, request: Request) -> Response:
        """`GET /v1/flows`."""
        return _json(self._flows)

    async def turn(self, request: Request) -> Response:
        """`POST /v1/flows/{id}/turns`."""
        _check_accept(request)
        body = await read_body(request, TurnBody, self._app.body_bytes)
        result = await self._turn(
            request,
            request.path_params["id"],
            body.said,
            session_id=body.session_id,
            config=body.config,
            on_busy=body.on_busy,
        )
        return _json(_encode(result))

    async def sessions(self, request: Request) -> Response:
        """`GET /v1/sessions`."""
        query = read_query(request, SessionsQuery)
        page, cursor = await self._engine.list_sessions(
            flow=query.flow, status=query.status, after=query.after, limit=query.limit
        )
        return _json(_encode(SessionPage(page, cursor)))

    async def export(self, request: Request) -> Response:
        """`GET /v1/sessions/{id}`."""
        return _json(_encode(await self._engine.export_session(_session_of(request))))

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/sessions/{id}`."""
        session = _session_of(request)
        if not await self._engine.delete_session(session):
            raise _unknown(session)
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/cancel`."""
        session = _session_of(request)
        body = await read_body(request, CancelBody, self._app.body_bytes, optional=True)
        done = await self._engine.cancel(session, reason=body.reason, run_id=body.run_id)
        return _json(_encode(Cancelled(done)))

    # -- channels

    async def events(self, request: Request) -> Response:
        """`GET /v1/sessions/{id}/events`."""
        conversations = self._conversations(begins=True)
        session, query = _session_of(request), read_query(request, EventsQuery)
        after = request.headers.get("last-event-id") or query.after
        # Opened here, so that what is wrong with the request is still a problem document; left by the response.
        opened = AsyncExitStack()
        if query.view == "1":
            watched = await opened.enter_async_context(conversations.watching(session))
            return EventStream(ViewEvents(watched), opened, conversations.streams)
        channel = await conversations.open(session)
        cursor = None if after is None else Cursor(after)
        subscription = await opened.enter_async_context(channel.subscribe(after=cursor))
        history = query.history == "1" and after is None
        events = LogEvents(channel, subscription, conversations.encoded, history=history)
        return EventStream(events, opened, conversations.streams)

    async def invocations(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/invocations`."""
        conversations = self._conversations(begins=True)
        body = await read_body(request, InvocationBody, self._app.body_bytes)
        invocation = Invocation(input_event_id=body.inputEventId, session_name=body.sessionName)
        invoked = await conversations.invoke(_session_of(request), invocation, body.agent)
        return _json(_encode(Invoked(invoked.run_id, invoked.invocation_id)))

    async def inputs(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/inputs`."""
        conversations = self._conversations()
        body = await read_body(request, InputsBody, self._app.body_bytes)
        caller = principal_of(request.scope)
        messages = [
            WireMessage(
                name=one.name,
                data=one.data,
                extras=one.extras,
                client_id=one.clientId or (None if caller == ANONYMOUS else caller),
                idempotency_id=one.id,
            )
            for one in body.messages
        ]
        return _json(_encode(Published(await conversations.publish(_session_of(request), messages))))

    def _conversations(self, *, begins: bool = False) -> Conversations:
        """What serves channels. `begins`: for something that goes on, which a server that stops does not begin."""
        conversations = self._app.conversations
        if conversations is None:
            raise Problem(404, "no_channels", "This server serves no channels: start it with agents or channels.")
        if not conversations.ready or (begins and not self._app.accepting):
            raise stopping()
        return conversations

    # -- the older contract

    async def ai_flows(self, request: Request) -> Response:
        """`GET /ai/flows`."""
        return _json(self._names)

    async def ai_run(self, request: Request) -> Response:
        """`POST /ai/run`."""
        session: str | None = None
        try:
            session = _chat_session(request)
            body = await read_body(request, AiRunBody, self._app.body_bytes)
            result = await self._turn(request, body.flowName, body.said, session_id=session, config=body.config)
        except (Problem, StepwellError) as error:
            problem = problem_of(error)
            if problem is None or problem.status in (408, 413, 415, 500):
                raise  # what a proxy could have said as well, or has to be logged, is no answer of a flow
            return _ai_failure(problem.explain(), problem.session_id or session, problem.headers)
        session = result.session_id or None
        if result.error is not None:
            return _ai_failure(result.error.message, session, {}, completed=result.completed)
        kind = result.content_type
        if kind.partition(";")[0].strip().lower() != "text/plain" and _MIME.fullmatch(kind):
            return Response(result.message, 200, _chat_headers(session), media_type=kind)
        return _json(
            _encode(Envelope(True, result.completed, result.message, session, kind)), headers=_chat_headers(session)
        )

    async def ai_end(self, request: Request) -> Response:
        """`POST /ai/end`."""
        session = _chat_session(request)
        if session is not None and _SESSION_ID.fullmatch(session):
            await self._engine.delete_session(session)
        return _json(_encode(Ended(True, session)))

    # -- operations

    async def healthz(self, request: Request) -> Response:
        """`GET /healthz`."""
        return _json(_encode(Health("ok")))

    async def readyz(self, request: Request) -> Response:
        """`GET /readyz`."""
        if not self._app.accepting:
            raise stopping()
        with anyio.move_on_after(_READY_SECONDS) as scope:
            await self._engine.list_sessions(limit=1)
        if scope.cancelled_caught:
            raise Problem(503, "store_busy", "The session store does not answer.", retryable=True)
        return _json(_encode(Health("ok")))

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return _json(_encode(document(ROUTES, self._app.access.mode == "keys", request.scope.get("root_path", ""))))

    async def _turn(
        self,
        request: Request,
        flow: str,
        message: str | UserMessage | None,
        *,
        session_id: str | None,
        config: Mapping[str, Any] | None,
        on_busy: Literal["queue", "reject"] | None = None,
    ) -> TurnResult:
        """Run a turn that no lost connection cancels.

        Raises:
            Problem: It did not begin, or does not end here.
            StepwellError: Misuse.
        """
        key = _idempotency_key(request)
        with self._app.waiting(request):
            async with self._engine.stream(
                flow,
                message,
                detached=True,
                session_id=session_id,
                config=config,
                idempotency_key=key,
                on_busy=on_busy,
            ) as turn:
                await turn.done.wait()
        if turn.result.error is not None and (problem := refusal_of(turn.result.error)) is not None:
            raise problem from turn.error
        return turn.result


def _json(data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(data, status, headers, media_type="application/json")


def _check_accept(request: Request) -> None:
    accept = ",".join(request.headers.getlist("accept"))
    kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    if "text/event-stream" in kinds and not kinds & {"application/json", "application/*", "*/*"}:
        raise Problem(
            406,
            "not_acceptable",
            "This version does not stream turns over HTTP yet: send Accept: application/json for the turn's result.",
        )


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not key.strip() or len(key) > KEY_LENGTH:
        detail = f"An idempotency key is not blank and has at most {KEY_LENGTH} characters."
        raise Problem(422, "invalid_input", detail, errors=[{"header": "Idempotency-Key", "detail": detail}])
    # Two callers with the same key mean two different inputs.
    return f"{principal_of(request.scope)}:{key}"


def _session_of(request: Request) -> str:
    session: str = request.path_params["id"]
    if not _SESSION_ID.fullmatch(session):
        raise _unknown(session)
    return session


def _unknown(session: str) -> UnknownSessionError:
    return UnknownSessionError(f"There is no session {session!r}.", session_id=session)


def _chat_session(request: Request) -> str | None:
    """The header, by either name: some proxies drop names with underscores."""
    given = {value for name in ("chat_session_id", "chat-session-id") for value in request.headers.getlist(name)}
    given = {value.strip() for value in given if value.strip()}
    if len(given) > 1:
        raise Problem(
            400, "invalid_input", "The headers CHAT_SESSION_ID and CHAT-SESSION-ID name different sessions: send one."
        )
    return given.pop() if given else None


def _chat_headers(session: str | None) -> dict[str, str]:
    if session is None or not _SESSION_ID.fullmatch(session):
        return {}
    return {CHAT_SESSION: session, CHAT_SESSION.replace("_", "-"): session}


def _ai_failure(message: str, session: str | None, headers: Mapping[str, str], *, completed: bool = False) -> Response:
    envelope = Envelope(False, completed, message, session, "text/plain")
    return _json(_encode(envelope), 400, {**headers, **_chat_headers(session)})


# -- the table


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
        result: Type of the 200 response; `None` for an empty 204.
        problems: Statuses of the problems it may answer with, besides those that every route may.
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
    problems: tuple[int, ...] = ()
    open: bool = False


_KEY: Final = ("Idempotency-Key", "The same key and body give the same turn, also after a lost answer.")
_CHAT: Final = (CHAT_SESSION, "The session; CHAT-SESSION-ID means the same.")

ROUTES: Final = (
    Endpoint(
        method="GET",
        path="/v1/flows",
        answer=Api.flows,
        summary="Registered workflows",
        description="With their stages, tools, initial stage and model.",
        result=FlowList,
    ),
    Endpoint(
        method="POST",
        path="/v1/flows/{id}/turns",
        answer=Api.turn,
        summary="Run a turn",
        description=(
            "The turn goes on when the connection is lost. A turn that ran and failed is a 200 whose `success` is "
            "false and whose `error` says why; the session is as it was after its last committed unit. Problems say "
            "that the turn did not begin, or (503) that the server stops and the turn goes on later."
        ),
        body=TurnBody,
        headers=(_KEY,),
        result=TurnResult,
        problems=(400, 404, 406, 408, 409, 413, 415, 422, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/sessions",
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
        answer=Api.export,
        summary="Export a session",
        description="Everything of it in one JSON document, for `import`. It holds the whole conversation.",
        result=dict[str, Any],
        problems=(404, 503),
    ),
    Endpoint(
        method="DELETE",
        path="/v1/sessions/{id}",
        answer=Api.delete,
        summary="Delete a session",
        description="With all its rows. A running turn of it ends.",
        problems=(404, 503),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/cancel",
        answer=Api.cancel,
        summary="Cancel the running turn",
        description="Answers when the cancel is recorded.",
        body=CancelBody,
        optional=True,
        result=Cancelled,
        problems=(400, 404, 408, 413, 415, 422, 503),
    ),
    Endpoint(
        method="GET",
        path="/v1/sessions/{id}/events",
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
        result=str,
        problems=(404, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/invocations",
        answer=Api.invocations,
        summary="Let an agent answer an input",
        description=(
            "Answers when the run has begun; it goes on when the connection is lost. The same input again is the same "
            "run. 504: the input is not on the channel."
        ),
        body=InvocationBody,
        result=Invoked,
        problems=(400, 404, 408, 409, 413, 415, 422, 503, 504),
    ),
    Endpoint(
        method="POST",
        path="/v1/sessions/{id}/inputs",
        answer=Api.inputs,
        summary="Say something on a session's channel",
        description="Inputs and cancels of a client, as the wire protocol has them; published together, or not at all.",
        body=InputsBody,
        result=Published,
        problems=(400, 404, 408, 413, 415, 422, 503),
    ),
    Endpoint(
        method="POST",
        path="/ai/run",
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
        answer=Api.ai_flows,
        summary="Names of the workflows (older contract)",
        result=list[str],
    ),
    Endpoint(
        method="POST",
        path="/ai/end",
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
    Endpoint(method="GET", path="/openapi.json", answer=Api.openapi, summary="This document", result=dict[str, Any]),
)
"""Every route, in the order of the documentation."""
