"""What tests of Redis need besides a server: a word with it, and a server that only says errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import redis

from servers import RedisServer


def do(server: RedisServer, *command: Any) -> Any:
    """Send a command to database 0."""
    with redis.Redis.from_url(server.url) as client:
        return client.execute_command(*command)


@contextlib.asynccontextmanager
async def server_that_says(error: str) -> AsyncGenerator[str]:
    """The URL of a server that answers everything but the handshake with an error."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                parts = [await _bulk(reader) for _ in range(int((await reader.readuntil(b"\n"))[1:]))]
                writer.write(b"+OK\r\n" if parts[0] == b"CLIENT" else f"-{error}\r\n".encode())
                await writer.drain()
        writer.close()
        done.set()

    done = asyncio.Event()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        await done.wait()


async def _bulk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\n"))[1:])
    return (await reader.readexactly(size + 2))[:-2]
