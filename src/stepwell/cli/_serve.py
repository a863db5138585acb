"""`stepwell serve`: flows and agents over HTTP."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from ._options import DEFAULT_CHANNELS, DEFAULT_STORE, Channels, Debug, Json, Models, Store
from ._terminal import CommandError, Terminal, UsageError

__all__ = ["serve"]

_NEEDED: Final = ("starlette", "uvicorn", "jwt", "prometheus_client")
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


def _at_commas(kind: object, value: str, **_: object) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def serve(
    *targets: Annotated[str, Parameter(help="Flows: module:Flow, path/to/file.py:Flow, or packages' directories.")],
    host: Annotated[str, Parameter(env_var="STEPWELL_HOST", help="Name or address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(env_var="STEPWELL_PORT", help="Port; 0 takes a free one.")] = 8000,
    store: Store = DEFAULT_STORE,
    models: Models = "env",
    agent: Annotated[
        list[str] | None,
        Parameter(
            name="--agent",
            negative="",
            help="An agent on channels: module:function, path/to/file.py:function, or NAME= and that; may be repeated.",
        ),
    ] = None,
    channels: Channels | None = None,
    api_key: Annotated[
        list[str] | None,
        Parameter(
            name="--api-key",
            negative="",
            help="KEY or NAME:KEY that callers may use; may be repeated. Better in STEPWELL_API_KEYS, with commas.",
        ),
    ] = None,
    jwt_key_file: Annotated[
        Path | None,
        Parameter(
            name="--jwt-key-file",
            env_var="STEPWELL_JWT_KEY_FILE",
            help="Accept tokens that are signed with the secret, or for the public key (PEM), in this file. "
            "STEPWELL_JWT_SECRET holds a secret itself.",
        ),
    ] = None,
    jwt_audience: Annotated[
        str, Parameter(name="--jwt-audience", env_var="STEPWELL_JWT_AUDIENCE", help="Audience of tokens.")
    ] = "stepwell",
    jwt_issuer: Annotated[
        str | None, Parameter(name="--jwt-issuer", env_var="STEPWELL_JWT_ISSUER", help="Who has to have issued them.")
    ] = None,
    no_auth: Annotated[
        bool, Parameter(name="--no-auth", negative="", help="Ask for no keys; only on a loopback address.")
    ] = False,
    cors: Annotated[
        list[str] | None,
        Parameter(
            name="--cors",
            env_var="STEPWELL_CORS",
            env_var_split=_at_commas,
            negative="",
            help="Origin of pages that may call, as https://host, or *; may be repeated, in the variable with commas.",
        ),
    ] = None,
    grace: Annotated[float, Parameter(help="Seconds that running turns get when the server stops.")] = 20.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve flows, and agents on channels, over HTTP until it is stopped.

    With --channels turns stream to whoever watches their session, from any process, and clients publish inputs; with
    --agent agents answer these. Without agents of its own the server streams what others write on the same channels.

    Callers send a key, or a token, as "Authorization: Bearer ...". Without keys only this machine is answered, on a
    loopback address. On SIGTERM or Ctrl-C running turns get --grace seconds; those still open are left for recovery.
    """
    if not (targets or agent or channels):
        raise UsageError(
            "Name the flows to serve: module:Flow, path/to/file.py:Flow or a package's directory. Or --agent, or "
            "--channels."
        )
    if not 0 <= port <= 65535:
        raise UsageError("--port is a number from 0 to 65535.")
    if grace < 0:
        raise UsageError("--grace is a number of seconds from 0.")
    if wrong := [origin for origin in cors or () if not _ORIGIN.fullmatch(origin)]:
        raise UsageError(f"--cors {wrong[0]} is no origin: write it as https://host or https://host:port, or *.")
    if missing := [
        name for name in ("starlette", "uvicorn", "jwt", "prometheus_client") if importlib.util.find_spec(name) is None
    ]:
        raise CommandError(f"The server needs {' and '.join(missing)}: pip install 'stepwell[server]'.")
    from ._targets import load_agents, load_flows, load_providers

    flows = load_flows(targets)
    agents = load_agents(agent or ())
    providers = load_providers(models)
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if not debug:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    terminal = Terminal()

    def ready(url: str) -> None:
        names = [flow.id for flow in flows]
        if json:
            terminal.json({"url": url, "flows": names, "agents": list(agents)}, indent=0)
        else:
            terminal.line(f"Serving {', '.join([*names, *agents]) or 'channels'} at {url} (Ctrl-C stops)", "green")

    from stepwell.server import JwtAuth
    from stepwell.server import serve as run

    environ = {**os.environ, "STEPWELL_JWT_AUDIENCE": jwt_audience, "STEPWELL_JWT_ISSUER": jwt_issuer or ""}
    if jwt_key_file is not None:
        environ["STEPWELL_JWT_KEY_FILE"] = str(jwt_key_file)
    run(
        flows=flows,
        store=store,
        models=providers,
        host=host,
        port=port,
        api_keys=api_key,
        jwt=None if no_auth else JwtAuth.from_env(environ),
        no_auth=no_auth,
        agents=agents or None,
        channels=channels or (DEFAULT_CHANNELS if agents else None),
        cors=cors or (),
        grace=grace,
        ready=ready,
    )
