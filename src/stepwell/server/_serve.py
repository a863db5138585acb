"""The application on uvicorn, in the foreground, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import uvicorn

from stepwell.engine import Engine
from stepwell.errors import InvalidInputError
from stepwell.flow import Flow
from stepwell.models import ModelGateway
from stepwell.models.providers import Providers
from stepwell.sessions import SessionStore
from stepwell.transport import Codec
from stepwell.wire import ChannelProvider

from ._access import Access, is_loopback
from ._app import ServerApp, make_parts
from ._conversations import Agent
from ._jwt import JwtAuth

__all__ = ["Server", "serve"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def serve(
    engine: Engine | None = None,
    *,
    flows: Sequence[type[Flow]] = (),
    models: Providers | Mapping[str, ModelGateway] | None = None,
    store: SessionStore | str = "memory://",
    host: str = "127.0.0.1",
    port: int = 8000,
    grace: float = 20.0,
    api_keys: Iterable[str] | None = None,
    jwt: JwtAuth | None = None,
    no_auth: bool = False,
    agents: Mapping[str, Agent] | Agent | None = None,
    channels: ChannelProvider | str | None = None,
    codec: Codec[Any, Any] | None = None,
    channel_prefix: str = "",
    cors: Sequence[str] = (),
    body_bytes: int | None = None,
    ready: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve flows over HTTP until SIGTERM or SIGINT; returns when everything is closed.

    On the signal the server stops accepting connections and turns. Turns under way get `grace` seconds; those still
    open then are left in the store for recovery, and their callers are told to ask again. A second signal does not
    wait.

    Client libraries of the models that the flows name are loaded before the port is opened.

    Args:
        engine: An engine that is not started, instead of its options; closed at the end.
        flows: See `create_app`.
        models: See `Engine`.
        store: See `Engine`.
        host: Name or address to listen on.
        port: Port; 0 takes a free one.
        grace: See above, seconds.
        api_keys: See `create_app`. Needed on a host that is not loopback.
        jwt: See `create_app`.
        no_auth: Ask for no keys although there are some; only on loopback.
        agents: See `create_app`.
        channels: See `create_app`.
        codec: See `create_app`.
        channel_prefix: See `create_app`.
        cors: See `create_app`.
        body_bytes: See `create_app`.
        ready: Called with the URL once the server answers.
        **options: Further options of `Engine`.

    Raises:
        InvalidInputError: The host would be open to others without keys, or cannot be listened on.
        FlowDefinitionError: A flow is wrong.
        LlmSetupError: A model of a flow cannot be called, or its client library is missing.
    """
    access = Access(api_keys, jwt=jwt, no_auth=no_auth, local=True, origins=cors)
    if access.mode != "keys" and not is_loopback(host):
        raise InvalidInputError(
            f"{host} can be reached from other machines, so callers need API keys or tokens: set STEPWELL_API_KEYS or "
            "STEPWELL_JWT_SECRET, or listen on 127.0.0.1.",
            "/host",
        )
    made, conversations = make_parts(engine, flows, models, store, agents, channels, codec, channel_prefix, options)
    app = ServerApp(
        made,
        access,
        owned=True,
        conversations=conversations,
        cors=cors,
        body_bytes=body_bytes,
        grace=grace,
    )
    app.engine.providers.preload(*{definition.model for definition in app.engine.definitions.values()})
    server = Server(app, listen(host, port), host, grace, ready)
    server.run()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        InvalidInputError: It cannot be opened; says why.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo
        raise InvalidInputError(f"Cannot listen on {host} port {port}: a port is 0 to 65535.", "/port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except OSError:
            opened.close()
            raise
    except OSError as error:
        raise InvalidInputError(f"Cannot listen on {host} port {port}: {error}.", "/port") from error
    return opened


class Server(uvicorn.Server):
    """uvicorn with this package's way of stopping.

    Args:
        app: The application.
        opened: A bound socket.
        host: Its name in the URL.
        grace: See `serve`.
        ready: See `serve`.
    """

    def __init__(
        self,
        app: ServerApp,
        opened: socket.socket,
        host: str = "127.0.0.1",
        grace: float = 20.0,
        ready: Callable[[str], None] | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            lifespan="on",
            # The loop that everything is tested on, whatever else happens to be installed.
            loop="asyncio",
            ws="none",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            # The application lets go of its requests after the grace; this is for connections that hang.
            timeout_graceful_shutdown=math.ceil(grace) + 5,
        )
        super().__init__(config)
        self._app = app
        self._opened = opened
        self._grace = grace
        self._ready = ready
        name = f"[{host.strip('[]')}]" if opened.family == socket.AF_INET6 else host
        self.url = f"http://{name}:{opened.getsockname()[1]}"

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal, or `should_exit` is set."""
        await super().serve(sockets or [self._opened])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets)
        if self._ready is not None and self.started:
            self._ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, let turns finish, let go of the rest."""
        for server in self.servers:
            server.close()
        draining = asyncio.create_task(self._app.drain(self._grace))
        try:
            await super().shutdown(sockets)
            if not self.force_exit:
                await draining
        finally:
            draining.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle signals of this loop, without raising them again at the end: being told to stop is no failure."""
        loop = asyncio.get_running_loop()
        caught: list[signal.Signals] = []
        for number in _SIGNALS:
            # Outside the main thread whoever runs the loop decides when to stop.
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self._signalled)
                caught.append(number)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
