"""A Redis server of a test's own, for tests that stop, kill or configure it; and one that only says errors."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import redis


class RedisServer:
    """A real server on a free port, with its data in a directory, so that it can be started again.

    Args:
        directory: Of its data.
        *options: As on its command line.
    """

    def __init__(self, directory: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._directory = directory
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it and wait until it answers."""
        binary = shutil.which("redis-server")
        assert binary, "redis-server is not installed: apt-get install redis-server"
        self._process = subprocess.Popen(
            [
                binary,
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always", *self._options),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if b"Ready to accept connections" in line:
                return
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        """As if the machine's power went."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def do(self, *command: Any) -> Any:
        """Send a command."""
        client = redis.Redis(port=self.port)
        try:
            return client.execute_command(*command)
        finally:
            client.close()


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
