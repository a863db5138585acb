"""The ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

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
from ._events import EncodedDeliveries, Events, EventStream, Streams
from ._guard import Guard
from ._jwt import JwtAuth
from ._metrics import Metrics
from ._problems import problem_of, stopping
from ._routes import ROUTES, Endpoint

__all__ = ["ServerApp", "create_app"]

T = TypeVar("T")

_REQUEST_HEADERS = (
    "Accept",
    "Last-Event-ID",
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
        channels: Where conversations are, the turns of flows among them: a provider, or the URL of one (see
            `open_channels`), which is closed with the lifespan. `memory://` where there are agents and nothing is
            given. An engine that is given and has channels brings them.
        codec: What agents say on the channels; UI messages by default, as flows do.
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
    access = Access(api_keys, jwt=jwt, no_auth=no_auth, origins=cors)
    made, conversations = make_parts(engine, flows, models, store, agents, channels, codec, channel_prefix, options)
    return ServerApp(
        made,
        access,
        owned=engine is None,
        conversations=conversations,
        cors=cors,
        body_bytes=body_bytes,
        grace=grace,
    )


def make_parts(
    engine: Engine | None,
    flows: Sequence[type[Flow]],
    models: Providers | Mapping[str, ModelGateway] | None,
    store: SessionStore | str,
    agents: Mapping[str, Agent] | Agent | None,
    channels: ChannelProvider | str | None,
    codec: Codec[Any, Any] | None,
    channel_prefix: str,
    options: Mapping[str, Any],
) -> tuple[Engine, Conversations | None]:
    """The engine, and what serves channels, where there are any. See `create_app`."""
    if channels is None and agents is not None and (engine is None or engine.channels is None):
        channels = "memory://"
    if engine is None:
        if not flows and channels is None:
            raise TypeError("create_app needs an engine, or the flows of one.")
        engine = Engine(flows, models=models, store=store, channels=channels, channel_prefix=channel_prefix, **options)
    elif flows or models is not None or store != "memory://" or options:
        raise TypeError("create_app takes either an engine or the options of one.")
    elif engine.channels is not None and (channels is not None or channel_prefix):
        raise TypeError("The engine has channels: they are served, and no others.")
    if engine.channels is not None:
        channels, channel_prefix = engine.channels, engine.channel_prefix
    if channels is None:
        return engine, None
    named = {} if agents is None else {"default": agents} if callable(agents) else dict(agents)
    return engine, Conversations(channels, named, codec, channel_prefix)


class ServerApp:
    """The application that `create_app` makes. Call it as ASGI says.

    Attributes:
        engine: The engine it serves.
        access: Who may call.
        body_bytes: Limit of a body.
        accepting: Whether new turns may begin.
        conversations: The channels it serves, if it does.
        routes: What it answers.
        metrics: What it counts.
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
        self.metrics = Metrics()
        engine.listen(self.metrics)
        self.conversations = conversations
        self.routes = ROUTES
        self._owned = owned
        self._grace = grace
        self._api = Api(self)
        self._reads = Streams()  # requests that do not wait for a turn
        self.turns = Streams()  # and those that do
        self.encoded = EncodedDeliveries()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining = asyncio.Lock()
        self._drained = False
        self._router = Router(self._routes(), redirect_slashes=False, lifespan=lambda app: self.lifespan())
        self._app: ASGIApp = Guard(self._route, access, self.metrics)
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
                    self._reads.discard(scope)
            # Only `drain` cancels it.
            return stopping().response()

        return answer

    def event_stream(
        self, events: Events, opened: AsyncExitStack, streams: Streams, expires: float | None = None
    ) -> EventStream:
        """A response of events; see `EventStream`."""
        return EventStream(events, opened, streams, streamed=self.metrics.streamed, expires=expires)

    def spawn(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that goes on when whoever waits for it is gone; its failure is theirs alone."""
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    # -- life

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """What surrounds the time in which requests are answered; servers of ASGI enter it by themselves."""
        async with AsyncExitStack() as stack:
            if self._owned:
                await self.engine.start()
            try:
                if self.conversations is not None:
                    await stack.enter_async_context(self.conversations.running())
                yield
            finally:
                await self.drain(self._grace)

    @contextmanager
    def waiting(self, request: Request) -> Generator[None]:
        """Around the wait of a request for its turn.

        Raises:
            Problem: The server is stopping.
        """
        if not self.accepting:
            raise stopping()
        scope: CancelScope = request.scope[_SCOPE]
        self.turns.add(scope)
        self._reads.discard(scope)
        try:
            yield
        finally:
            self.turns.discard(scope)

    async def drain(self, grace: float) -> None:
        """Begin no turn any more, and let those under way finish.

        An engine of its own is closed: what is open after `grace` seconds is left for recovery. On another one the
        turns go on, and only the requests that wait for them are answered.
        """
        self.accepting = False
        if self.conversations is not None:
            self.conversations.stop()  # watchers connect elsewhere, and continue from their cursor
        async with self._draining:
            if self._drained:
                return
            deadline = anyio.current_time() + grace
            # Those that still read a body would find the store closed.
            await self._reads.empty(min(grace, _READS_SECONDS))
            if self.conversations is not None:
                await self.conversations.finish(max(0.0, deadline - anyio.current_time()))
            left = max(0.0, deadline - anyio.current_time())
            if self._owned:
                await self.engine.close(left)
            else:
                await self.turns.empty(left)
            self._drained = True
