"""Redis."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator

import redis

from ._process import Server, data_directory, find, on_free_port

DATABASES = 256


class RedisServer(Server):
    """A Redis server that saves no snapshots."""

    name = "Redis"

    def __init__(self, port: int, *options: str) -> None:
        self._numbers = itertools.count(1)
        program = find("redis-server")
        directory = data_directory("redis")
        super().__init__(
            [
                *(program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)),
                *("--save", "", "--databases", str(DATABASES), *options),
            ],
            port=port,
            directory=directory,
            ready="Ready to accept connections",
        )

    @property
    def url(self) -> str:
        """Of its database 0."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        return f"redis://127.0.0.1:{self.port}/{number}"

    @contextlib.contextmanager
    def database(self) -> Generator[str]:
        """The URL of an empty numbered database, emptied afterwards. Never number 0.

        Channels of PUBLISH, scripts and the list of clients are the whole server's.

        Raises:
            ServerDied: The server ended by itself, before or meanwhile.
        """
        self.check()
        url = self.database_url(1 + next(self._numbers) % (DATABASES - 1))
        with redis.Redis.from_url(url) as client:
            client.flushdb()
            try:
                yield url
            finally:
                self.check()
                client.flushdb()


def start_redis(*options: str, appendonly: bool = False, appendfsync: str = "everysec") -> RedisServer:
    """Start Redis.

    Args:
        *options: As on its command line.
        appendonly: Keep the append-only file.
        appendfsync: When that file goes to the disk: `always`, `everysec` or `no`.

    Raises:
        ServerNotStarted: It did not come up, with the reason.
    """
    aof = ("--appendonly", "yes" if appendonly else "no", "--appendfsync", appendfsync)
    return on_free_port(lambda port: RedisServer(port, *aof, *options))
