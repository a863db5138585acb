"""`stepwell serve`: flows over HTTP."""

from __future__ import annotations

import importlib.util
import logging
from typing import Annotated

from cyclopts import Parameter

from ._options import DEFAULT_STORE, Debug, Json, Models, Store
from ._terminal import CommandError, Terminal, UsageError

__all__ = ["serve"]


def serve(
    *targets: Annotated[str, Parameter(help="Flows: module:Flow, path/to/file.py:Flow, or packages' directories.")],
    host: Annotated[str, Parameter(env_var="STEPWELL_HOST", help="Name or address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(env_var="STEPWELL_PORT", help="Port; 0 takes a free one.")] = 8000,
    store: Store = DEFAULT_STORE,
    models: Models = "env",
    api_key: Annotated[
        list[str] | None,
        Parameter(
            name="--api-key",
            negative="",
            help="KEY or NAME:KEY that callers may use; may be repeated. Better in STEPWELL_API_KEYS, with commas.",
        ),
    ] = None,
    no_auth: Annotated[
        bool, Parameter(name="--no-auth", negative="", help="Ask for no keys; only on a loopback address.")
    ] = False,
    grace: Annotated[float, Parameter(help="Seconds that running turns get when the server stops.")] = 20.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve flows over HTTP until it is stopped.

    Callers send a key as "Authorization: Bearer KEY". Without keys only this machine is answered, on a loopback
    address. On SIGTERM or Ctrl-C running turns get --grace seconds; those still open are left for recovery.
    """
    if not targets:
        raise UsageError("Name the flows to serve: module:Flow, path/to/file.py:Flow or a package's directory.")
    if not 0 <= port <= 65535:
        raise UsageError("--port is a number from 0 to 65535.")
    if grace < 0:
        raise UsageError("--grace is a number of seconds from 0.")
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise CommandError(f"The server needs {' and '.join(missing)}: pip install 'stepwell[server]'.")
    from ._targets import load_flows, load_providers

    flows = load_flows(targets)
    providers = load_providers(models)
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if not debug:
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
    terminal = Terminal()

    def ready(url: str) -> None:
        if json:
            terminal.json({"url": url, "flows": [flow.id for flow in flows]}, indent=0)
        else:
            terminal.line(f"Serving {', '.join(flow.id for flow in flows)} at {url} (Ctrl-C stops)", "green")

    from stepwell.server import serve as run

    run(
        flows=flows,
        store=store,
        models=providers,
        host=host,
        port=port,
        api_keys=api_key,
        no_auth=no_auth,
        grace=grace,
        ready=ready,
    )
