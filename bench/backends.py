"""The backends of channels that are measured, each with its configuration; servers are thrown away afterwards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from tests.servers import ServerNotStarted, start_postgres, start_redis

__all__ = ["BACKENDS", "DURABLE", "Backends", "start_backends"]

BACKENDS = {
    "memory": "in this process",
    "sqlite": "a file, synchronous=NORMAL",
    "postgres": "throw-away server of this machine, fsync and synchronous_commit on, all other settings as they come",
    "redis": "throw-away server of this machine, append-only file with appendfsync everysec, no snapshots",
}
DURABLE = ("sqlite", "postgres", "redis")

Url = Callable[[], Any]


class _Server(Protocol):
    def database(self) -> Any: ...


@contextmanager
def _sqlite() -> Iterator[str]:
    # Beside the file system that the caller has chosen for temporary files: one in memory would flatter.
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-", dir=os.environ.get("STEPWELL_BENCH_DIR")) as directory:
        yield f"sqlite:///{Path(directory) / 'channels.db'}"


@contextmanager
def _memory() -> Iterator[str]:
    yield "memory://"


class Backends:
    """Those that could be started. `with backends.fresh(name) as url` is an empty one."""

    def __init__(self) -> None:
        self.fresh_of: dict[str, Url] = {}

    @property
    def names(self) -> list[str]:
        """In the order of `BACKENDS`."""
        return [name for name in BACKENDS if name in self.fresh_of]

    @contextmanager
    def fresh(self, name: str) -> Iterator[str]:
        """The URL of an empty one."""
        with self.fresh_of[name]() as url:
            yield url


@contextmanager
def start_backends(names: Sequence[str], console: Console) -> Generator[Backends]:
    """Start what the backends need; those whose server is not installed are left out."""
    backends = Backends()
    with ExitStack() as stack:
        for name in names:
            try:
                if name == "postgres":
                    backends.fresh_of[name] = stack.enter_context(start_postgres()).database
                elif name == "redis":
                    server = stack.enter_context(start_redis(appendonly=True, appendfsync="everysec"))
                    backends.fresh_of[name] = server.database
                else:
                    backends.fresh_of[name] = _sqlite if name == "sqlite" else _memory
            except ServerNotStarted as error:
                console.print(f"[yellow]{name} is left out: {error}", highlight=False)
        yield backends
