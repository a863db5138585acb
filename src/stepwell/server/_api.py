"""What answers each route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from stepwell.engine import Engine, Turn, TurnResult
from stepwell.errors import InvalidInputError, StepwellError, UnknownSessionError
from stepwell.flow import BusyPolicy
from stepwell.messages import UserMessage
from stepwell.transport import Invocation
from stepwell.wire import Cursor, H, Name, WireMessage, transport_headers

from ._access import ANONYMOUS, Caller, caller_of
from ._answers import Cancelled, Ended, Envelope, FlowList, Health, Invoked, Published, SessionPage, describe
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
    read_body,
    read_query,
)
from ._conversations import Conversations
from ._events import HEARTBEAT_SECONDS, LogEvents, ViewEvents
from ._openapi import document
from ._problems import Problem, problem_of, refusal_of, stopping
from ._turns import ids_of, turn_events

if TYPE_CHECKING:
    from ._app import ServerApp

__all__ = ["CHAT_SESSION", "Api"]

CHAT_SESSION: Final = "CHAT_SESSION_ID"
KEY_LENGTH: Final = 200
"""Characters of an `Idempotency-Key`; the engine's limit leaves room for the caller's name."""

_MIME: Final = re.compile(r"[\w.+-]+/[\w.+-]+(\s*;\s*[\w.+-]+=(\"[\w .:+-]*\"|[\w.:+-]+))*", re.ASCII)
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_READY_SECONDS: Final = 5.0
_PREDECESSORS: Final = 16
"""Ended sessions in a row that a limited caller's session may continue."""

_KINDS: Final = ("application/json", "text/event-stream")

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
        self._only_flow = definitions[0].id if len(definitions) == 1 else None

    async def flows(self, request: Request) -> Response:
        """`GET /v1/flows`."""
        return _json(self._flows)

    async def turn(self, request: Request) -> Response:
        """`POST /v1/flows/{id}/turns`."""
        body = await read_body(request, TurnBody, self._app.body_bytes)
        turn = self._turn_of(
            request,
            request.path_params["id"],
            body.said,
            session_id=body.session_id,
            config=body.config,
            on_busy=body.on_busy,
        )
        await self._permit(request, body.session_id)
        if _wants_events(request):
            return await self._streamed(request, turn)
        return _json(_encode(await self._result(request, turn)))

    async def sessions(self, request: Request) -> Response:
        """`GET /v1/sessions`."""
        caller_of(request.scope).check_unlimited()
        query = read_query(request, SessionsQuery)
        page, cursor = await self._engine.list_sessions(
            flow=query.flow, status=query.status, after=query.after, limit=query.limit
        )
        return _json(_encode(SessionPage(page, cursor)))

    async def export(self, request: Request) -> Response:
        """`GET /v1/sessions/{id}`."""
        return _json(_encode(await self._engine.export_session(await self._session(request))))

    async def delete(self, request: Request) -> Response:
        """`DELETE /v1/sessions/{id}`."""
        session = await self._session(request)
        if not await self._engine.delete_session(session):
            raise _unknown(session)
        return Response(status_code=204)

    async def cancel(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/cancel`."""
        session = await self._session(request)
        body = await read_body(request, CancelBody, self._app.body_bytes, optional=True)
        done = await self._engine.cancel(session, reason=body.reason, run_id=body.run_id)
        return _json(_encode(Cancelled(done)))

    async def steer(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/steer`."""
        session = await self._session(request)
        body = await read_body(request, SteerBody, self._app.body_bytes)
        key = _idempotency_key(request)
        return await self._of_its_own(request, lambda: self._engine.steer(session, body.said, idempotency_key=key))

    async def answers(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/answers`."""
        session = await self._session(request)
        body = await read_body(request, AnswerBody, self._app.body_bytes)
        return await self._of_its_own(request, lambda: self._engine.answer(session, body.request_id, body.value))

    # -- channels

    async def events(self, request: Request) -> Response:
        """`GET /v1/sessions/{id}/events`."""
        conversations = self._conversations(begins=True)
        session, query = await self._session(request), read_query(request, EventsQuery)
        after = request.headers.get("last-event-id") or query.after
        expires = caller_of(request.scope).expires
        # Opened here, so that what is wrong with the request is still a problem document; left by the response.
        opened = AsyncExitStack()
        if query.view == "1":
            watched = await opened.enter_async_context(conversations.watching(session))
            return self._app.event_stream(ViewEvents(watched), opened, conversations.streams, expires)
        channel = await conversations.open(session)
        cursor = None if after is None else Cursor(after)
        subscription = await opened.enter_async_context(channel.subscribe(after=cursor))
        history = query.history == "1" and after is None
        events = LogEvents(channel, subscription, self._app.encoded, history=history)
        return self._app.event_stream(events, opened, conversations.streams, expires)

    async def invocations(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/invocations`."""
        conversations = self._conversations(begins=True)
        session = await self._session(request)
        body = await read_body(request, InvocationBody, self._app.body_bytes)
        name = conversations.name_of(session)
        if body.sessionName != name:
            raise InvalidInputError(
                f"The invocation is of another channel than {name}: post it to its own session.", "/sessionName"
            )
        if await self._is_of_agent(conversations, session, body.agent):
            invocation = Invocation(input_event_id=body.inputEventId, session_name=name)
            invoked = await conversations.invoke(session, invocation, body.agent)
            return _json(_encode(Invoked(invoked.run_id, invoked.invocation_id)))
        with self._app.waiting(request):
            turn = await self._engine.invoke(session, body.inputEventId, flow=body.agent or self._only_flow)
            await turn.begun.wait()
        if turn.done.is_set():
            _check_refused(turn)
        return _json(_encode(Invoked(*ids_of(turn))))

    async def inputs(self, request: Request) -> Response:
        """`POST /v1/sessions/{id}/inputs`."""
        conversations = self._conversations()
        body = await read_body(request, InputsBody, self._app.body_bytes)
        caller = caller_of(request.scope)
        if any(one.name == Name.CANCEL for one in body.messages):
            caller.check("cancel")
        messages = [
            WireMessage(
                name=one.name,
                data=one.data,
                extras=one.extras,
                client_id=_speaker(caller, one.clientId, place),
                idempotency_id=one.id,
            )
            for place, one in enumerate(body.messages)
        ]
        session = await self._session(request)
        serials = await conversations.publish(session, messages)
        for message in messages:
            if message.name == Name.CANCEL:
                await self._cancel_as(session, transport_headers(message.extras))
        return _json(_encode(Published(serials)))

    async def _is_of_agent(self, conversations: Conversations, session: str, name: str | None) -> bool:
        """Whether an agent without flows is to answer in a session, rather than the flow that it is of.

        Raises:
            InvalidInputError: That cannot be told.
        """
        flows = self._engine.definitions if self._engine.channels is not None else {}
        if name is not None:
            return name not in flows
        if not flows or (conversations.agents and not await self._is_stored(session)):
            return True
        if self._only_flow is None and not await self._is_stored(session):
            raise InvalidInputError(f"Which flow? Give one of {', '.join(sorted(flows))}.", "/agent")
        return False

    async def _is_stored(self, session: str) -> bool:
        try:
            await self._engine.store.load(session)
        except UnknownSessionError:
            return False
        return True

    async def _cancel_as(self, session: str, headers: Mapping[str, str]) -> None:
        """What a client's cancel means for a turn of a flow: that run, or the run of that input."""
        run, said = headers.get(H.RUN_ID), headers.get(H.INPUT_CODEC_MESSAGE_ID)
        if self._engine.channels is None or not (run or said):
            return
        with suppress(UnknownSessionError):  # an agent's: it reads the channel itself
            await self._engine.cancel(session, run_id=run, input_id=None if run else said)

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
            await self._permit(request, session)
            turn = self._turn_of(request, body.flowName, body.said, session_id=session, config=body.config)
            result = await self._result(request, turn)
        except (Problem, StepwellError) as error:
            problem = problem_of(error)
            if problem is None or problem.status in (403, 408, 413, 415, 500):
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
            await self._permit(request, session)
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

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        return Response(self._app.metrics.text(), media_type=self._app.metrics.content_type)

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return _json(
            _encode(document(self._app.routes, self._app.access.mode == "keys", request.scope.get("root_path", "")))
        )

    # -- inside

    async def _session(self, request: Request) -> str:
        """The session that the path names.

        Raises:
            UnknownSessionError: It is not an id.
            Problem: See `_permit`.
        """
        session: str = request.path_params["id"]
        if not _SESSION_ID.fullmatch(session):
            raise _unknown(session)
        await self._permit(request, session)
        return session

    async def _permit(self, request: Request, session: str | None) -> None:
        """Refuse a session that the caller may not name. Those that continue an ended one count as that one.

        Raises:
            Problem: 403, whether there is such a session or not.
        """
        caller = caller_of(request.scope)
        named = session
        for _ in range(_PREDECESSORS):
            if not caller.limited or (named and caller.covers(named)):
                return
            if not named or not _SESSION_ID.fullmatch(named):
                break
            try:
                named = (await self._engine.get_session(named)).get("previous")
            except UnknownSessionError:
                break
        raise Problem(403, "forbidden", "The token is limited to some sessions: name one of them.")

    def _turn_of(
        self,
        request: Request,
        flow: str,
        message: str | UserMessage | None,
        *,
        session_id: str | None,
        config: Mapping[str, Any] | None,
        on_busy: BusyPolicy | None = None,
    ) -> AbstractAsyncContextManager[Turn]:
        """A turn that no lost connection cancels; it begins when the block is entered."""
        return self._engine.stream(
            flow,
            message,
            detached=True,
            session_id=session_id,
            config=config,
            idempotency_key=_idempotency_key(request),
            on_busy=on_busy,
            # Whoever may name some sessions only begins theirs under a name of these.
            create_session=caller_of(request.scope).limited,
        )

    async def _result(self, request: Request, started: AbstractAsyncContextManager[Turn]) -> TurnResult:
        """Wait for a turn's result.

        Raises:
            Problem: It did not begin, or does not end here.
            StepwellError: Misuse.
        """
        with self._app.waiting(request):
            async with started as turn:
                await turn.done.wait()
        _check_refused(turn)
        return turn.result

    async def _of_its_own(self, request: Request, call: Callable[[], Coroutine[Any, Any, TurnResult]]) -> Response:
        """The result of a turn whose caller would cancel it: a task is its caller, not the connection.

        Raises:
            Problem: See `_result`.
            StepwellError: Misuse.
        """
        with self._app.waiting(request):
            result = await asyncio.shield(self._app.spawn(call()))
        if result.error is not None and (problem := refusal_of(result.error)) is not None:
            raise problem
        return _json(_encode(result))

    async def _streamed(self, request: Request, started: AbstractAsyncContextManager[Turn]) -> Response:
        """A turn as events. What is refused within the time of a heartbeat is still a problem document.

        Raises:
            Problem: See `_result`.
            StepwellError: Misuse.
        """
        conversations = self._app.conversations if self._engine.channels is not None else None
        open_channel = conversations.open if conversations is not None else None
        opened = AsyncExitStack()
        with self._app.waiting(request):
            try:
                turn, events = await turn_events(opened, started, open_channel, self._app.encoded)
                with anyio.move_on_after(HEARTBEAT_SECONDS):
                    await events.begin()
                if turn.done.is_set():
                    _check_refused(turn)
            except BaseException:
                await opened.aclose()
                raise
        return self._app.event_stream(events, opened, self._app.turns)


def _json(data: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(data, status, headers, media_type="application/json")


def _check_refused(turn: Turn) -> None:
    if turn.result.error is not None and (problem := refusal_of(turn.result.error)) is not None:
        raise problem from turn.error


def _wants_events(request: Request) -> bool:
    """Whether a client takes events rather than JSON: that is what it names, and names first."""
    accept = ",".join(request.headers.getlist("accept"))
    kinds = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return next((kind for kind in kinds if kind in _KINDS), None) == "text/event-stream"


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not key.strip() or len(key) > KEY_LENGTH:
        detail = f"An idempotency key is not blank and has at most {KEY_LENGTH} characters."
        raise Problem(422, "invalid_input", detail, errors=[{"header": "Idempotency-Key", "detail": detail}])
    # Two callers with the same key mean two different inputs.
    return f"{caller_of(request.scope).name}:{key}"


def _speaker(caller: Caller, named: str | None, place: int) -> str | None:
    """Who says something on a channel. A token speaks for its subject alone."""
    if caller.client_id is not None and not caller.may("admin"):
        if named is not None and named != caller.client_id:
            detail = "The token speaks for its subject alone: leave clientId out, or give the token's sub."
            raise Problem(
                403, "forbidden", detail, errors=[{"pointer": f"/messages/{place}/clientId", "detail": detail}]
            )
        return caller.client_id
    return named or caller.client_id or (None if caller.name == ANONYMOUS else caller.name)


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
