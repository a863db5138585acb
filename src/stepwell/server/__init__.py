"""HTTP: an ASGI application over an engine, and a server for it. Needs the extra `server`."""

try:
    import starlette as _starlette  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import uvicorn as _uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise ImportError('The HTTP server needs the extra "server": pip install "stepwell[server]".') from error

from ._app import ServerApp, create_app
from ._conversations import Agent
from ._jwt import JwtAuth
from ._serve import serve

__all__ = ["Agent", "JwtAuth", "ServerApp", "create_app", "serve"]
