"""The ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio
from anyio import CancelScope
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from stepwell.engine import Engine
from stepwell.flow import Flow
from stepwell.models import ModelGateway
from stepwell.models.providers import Providers
from stepwell.sessions import SessionStore
from stepwell.transport import Codec
from stepwell.wire import ChannelProvider

from ._access import Access, caller_of
from ._api import Api
from ._conversations import Agent, Conversations
from ._guard import Guard
from ._jwt import JwtAuth
from ._problems import problem_of, stopping
from ._routes import ROUTES, Endpoint

__all__ = ["ServerApp", "create_app"]

_REQUEST_HEADERS = (
    "Authorization",
    "Content-Type",
    "Idempotency-Key",
    "X-API-Key",
    "CHAT_SESSION_ID",
    "CHAT-SESSION-ID",
)
_RESPONSE_HEADERS = ("CHAT_SESSION_ID", "CHAT-SESSION-ID", "Retry-After")

_SCOPE = "stepwell.scope"
_READS_SECONDS = 5.0
"""How long requests without a turn may take to finish when the server stops."""


def make_conversations(
    agents: Mapping[str, Agent] | Agent | None,
    channels: ChannelProvider | str | None,
    codec: Codec[Any, Any] | None,
    prefix: str,
) -> Conversations | None:
    """What serves channels, where that is asked for."""
    if agents is None and channels is None:
        return None
    named = {} if agents is None else {"default": agents} if callable(agents) else dict(agents)
    return Conversations(channels or "memory://", named, codec, prefix)


def create_app(
    engine: Engine | None = None,
    *,
    flows: Sequence[type[Flow]] = (),
    models: Providers | Mapping[str, ModelGateway] | None = None,
    store: SessionStore | str = "memory://",
    api_keys: Iterable[str] | None = None,
    jwt: JwtAuth | None = None,
    no_auth: bool = False,
    agents: Mapping[str, Agent] | Agent | None = None,
    channels: ChannelProvider | str | None = None,
    codec: Codec[Any, Any] | None = None,
    channel_prefix: str = "",
    cors: Sequence[str] = (),
    body_bytes: int | None = None,
    grace: float = 20.0,
    **options: Any,
) -> ServerApp:
    """An ASGI application that serves an engine's flows, agents without flows on channels, or both.

    With `flows` it makes an engine and owns its life, bound to the application's lifespan. With `engine` that one is
    the caller's to start and close. Another application may mount it; mounting does not run a lifespan, so then either
    give it an engine, or run `app.lifespan()` inside that of the other.

    Who may call: with keys, whoever presents one, or a token that is accepted. Without, callers of this machine only
    (no proxy, no other host name, no page of another origin). With `no_auth`, everybody: something around the
    application has to decide.

    Args:
        engine: An engine; instead of all of its options.
        flows: Flow classes; for the rest see `Engine`.
        models: See `Engine`.
        store: See `Engine`.
        api_keys: Keys, each `KEY` or `NAME:KEY`; by default those of `STEPWELL_API_KEYS` (comma separated).
            Idempotency keys of callers with different names never meet.
        jwt: What tokens are accepted; by default what the environment says (see `JwtAuth.from_env`).
        no_auth: See above.
        agents: Agents that answer inputs on channels, by name, or the only one. Each is called with its `AgentRun`,
            which is started, and which is ended when the call is over.
        channels: Where conversations are: a provider, or the URL of one (see `open_channels`), which is opened and
            closed with the lifespan. `memory://` where there are agents and nothing is given.
        codec: What is said on the channels; UI messages by default.
        channel_prefix: See `stepwell.wire.session_channel`.
        cors: Origins of pages that may call, `"*"` for all; none by default.
        body_bytes: Limit of a body; by default four times what the engine accepts of a message.
        grace: Seconds that turns get to finish when the lifespan ends; what is open then is left for recovery.
        **options: Further options of `Engine`.

    Raises:
        FlowDefinitionError: A flow is wrong.
        LlmSetupError: A model of a flow cannot be called.
        InvalidInputError: A key cannot be one.
        TypeError: Both an engine and options of one, or neither and no agents.
    """
    conversations = make_conversations(agents, channels, codec, channel_prefix)
    access = Access(api_keys, jwt=jwt, no_auth=no_auth, origins=cors)
    given = engine_options(engine, flows, models, store, options, alone=conversations is not None)
    made = engine or Engine(**given)
    return ServerApp(
        made,
        access,
        owned=engine is None,
        conversations=conversations,
        cors=cors,
        body_bytes=body_bytes,
        grace=grace,
    )


def engine_options(
    engine: Engine | None,
    flows: Sequence[type[Flow]],
    models: Providers | Mapping[str, ModelGateway] | None,
    store: SessionStore | str,
    options: Mapping[str, Any],
    *,
    alone: bool = False,
) -> dict[str, Any]:
    """Options of the engine to make; none where there is one. `alone`: it may be one without flows."""
    if engine is None:
        if not flows and not alone:
            raise TypeError("create_app needs an engine, or the flows of one.")
        return {"flows": flows, "models": models, "store": store, **options}
    if flows or models is not None or store != "memory://" or options:
        raise TypeError("create_app takes either an engine or the options of one.")
    return {}


class ServerApp:
    """The application that `create_app` makes. Call it as ASGI says.

    Attributes:
        engine: The engine it serves.
        access: Who may call.
        body_bytes: Limit of a body.
        accepting: Whether new turns may begin.
        conversations: The channels it serves, if it does.
        routes: What it answers.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        *,
        owned: bool,
        conversations: Conversations | None = None,
        cors: Sequence[str],
        body_bytes: int | None,
        grace: float,
    ) -> None:
        self.engine = engine
        self.access = access
        self.body_bytes = 4 * engine.limits.message_bytes if body_bytes is None else body_bytes
        self.accepting = True
        self.conversations = conversations
        self.routes = ROUTES
        self._owned = owned
        self._grace = grace
        self._api = Api(self)
        self._reads: set[CancelScope] = set()  # of requests that do not wait for a turn
        self._turns: set[CancelScope] = set()
        self._fewer = asyncio.Event()
        self._draining = asyncio.Lock()
        self._drained = False
        self._router = Router(self._routes(), redirect_slashes=False, lifespan=lambda app: self.lifespan())
        self._app: ASGIApp = Guard(self._route, access)
        if cors:
            self._app = CORSMiddleware(
                self._app,
                allow_origins=cors,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=_REQUEST_HEADERS,
                expose_headers=_RESPONSE_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        await (self._router if scope["type"] == "lifespan" else self._app)(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette raises what it does not find only inside an application; `Guard` answers.
        scope.setdefault("app", self)
        await self._router(scope, receive, send)

    def _routes(self) -> list[Route]:
        by_path: dict[str, dict[str, Endpoint]] = {}
        for route in ROUTES:
            by_path.setdefault(route.path, {})[route.method] = route
        return [
            # Ids of flows may hold slashes, those of sessions may not.
            Route(path.replace("/flows/{id}", "/flows/{id:path}"), self._answer(path, known), methods=list(known))
            for path, known in by_path.items()
        ]

    def _answer(self, path: str, known: Mapping[str, Endpoint]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            request.scope["stepwell.route"] = path
            route = known["GET" if request.method == "HEAD" else request.method]
            with CancelScope() as scope:
                request.scope[_SCOPE] = scope
                self._reads.add(scope)
                try:
                    if route.needs is not None:
                        caller_of(request.scope).check(route.needs)
                    return await route.answer(self._api, request)
                except Exception as error:
                    problem = problem_of(error)
                    if problem is None or problem.status == 500:
                        raise  # to be logged
                    return problem.response()
                finally:
                    self._left(self._reads, scope)
            # Only `drain` cancels it.
            return stopping().response()

        return answer

    # -- life

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """What surrounds the time in which requests are answered; servers of ASGI enter it by themselves."""
        async with AsyncExitStack() as stack:
            if self._owned:
                await self.engine.start()
            stack.push_async_callback(self.drain, self._grace)
            if self.conversations is not None:
                await stack.enter_async_context(self.conversations.running())
            yield

    @contextmanager
    def waiting(self, request: Request) -> Generator[None]:
        """Around the wait of a request for its turn.

        Raises:
            Problem: The server is stopping.
        """
        if not self.accepting:
            raise stopping()
        scope: CancelScope = request.scope[_SCOPE]
        self._turns.add(scope)
        self._left(self._reads, scope)
        try:
            yield
        finally:
            self._left(self._turns, scope)

    async def drain(self, grace: float) -> None:
        """Begin no turn any more, and let those under way finish.

        An engine of its own is closed: what is open after `grace` seconds is left for recovery. On another one the
        turns go on, and only the requests that wait for them are answered.
        """
        self.accepting = False
        if self.conversations is not None:
            self.conversations.stop_streams()  # watchers connect elsewhere, and continue from their cursor
        async with self._draining:
            if self._drained:
                return
            start = anyio.current_time()
            # Those that still read a body would find the store closed.
            await self._empty(self._reads, min(grace, _READS_SECONDS))
            grace = max(0.0, grace - (anyio.current_time() - start))
            if self._owned:
                await self.engine.close(grace)
            else:
                await self._empty(self._turns, grace)
            self._drained = True

    async def _empty(self, requests: set[CancelScope], seconds: float) -> None:
        """Wait until none is left; after `seconds` they are told to ask again."""
        with anyio.move_on_after(seconds):
            while requests:
                self._fewer.clear()
                await self._fewer.wait()
        for scope in list(requests):
            scope.cancel()

    def _left(self, requests: set[CancelScope], scope: CancelScope) -> None:
        requests.discard(scope)
        self._fewer.set()
