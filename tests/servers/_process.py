"""A server as a process of ours: started, waited for, looked at, stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

INSTALL = "tests/servers/install.sh (as root) installs what is missing"
START_SECONDS = 60
PORT_TAKEN = re.compile("address already in use", re.IGNORECASE)

# Ends the server and removes its data when the process that started it is gone and so its end of the pipe is closed.
GUARD = """
read -r _
kill -"$1" "$2" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$2" 2>/dev/null || break; sleep 0.2; done
kill -KILL "$2" 2>/dev/null
rm -rf "$3"
"""


class ServerNotStarted(Exception):
    """It ended, or said nothing, before it was ready. The message ends with the last lines of its log."""


class ServerDied(Exception):
    """It ended although nobody stopped it. The message ends with the last lines of its log."""


class Server:
    """A server and its data. A context manager, at whose end both are gone.

    Attributes:
        name: What it is, for messages.
        port: On 127.0.0.1; the same after it was stopped and started again.
        url: As its clients take it.
        directory: Of its data.
    """

    name = "server"
    ends_by: signal.Signals = signal.SIGTERM
    """How it is asked to stop at once, without waiting for its clients."""

    def __init__(
        self, command: Sequence[str], *, port: int, directory: Path, ready: str, user: str | None = None
    ) -> None:
        """Start it.

        Args:
            command: Program and arguments.
            port: That it is told to listen on; 0 when it says one itself, in the group `port` of the match.
            directory: In which it runs and which goes with it.
            ready: A pattern that a line of its output or errors contains when it can be used.
            user: As whom it runs, when not as the user of this process.

        Raises:
            ServerNotStarted: It did not come up; nothing of it is left.
        """
        self.port = port
        self.directory = directory
        self._command = command
        self._ready = re.compile(ready)
        self._identity: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self._lines: deque[str] = deque(maxlen=400)
        self._news = threading.Condition()
        self._stopped = True
        try:
            self.start()
        except ServerNotStarted:
            self.close()
            raise

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start it on the data it had and wait until it is ready. Does nothing when it is running.

        Raises:
            ServerNotStarted: It did not come up.
        """
        if not self._stopped:
            return
        self._match: re.Match[str] | None = None
        self._silent = False
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            start_new_session=True,  # Ctrl-C is for the process that started it, which still needs it to end its tests
            **self._identity,
        )
        self._stopped = False
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(int(self.ends_by)), str(self._process.pid), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._reader.start()
        with self._news:
            self._news.wait_for(lambda: self._match or self._silent, START_SECONDS)
            match, ended = self._match, self._silent
        if match is None:
            self.stop()
            how = f"exited with {self._process.returncode}" if ended else f"was not ready after {START_SECONDS} s"
            raise ServerNotStarted(f"{self.name} {how}: {' '.join(self._command)}\n{self.log_tail()}")
        if not self.port:
            self.port = int(match["port"])

    def stop(self, how: signal.Signals | None = None) -> None:
        """End it at once, cutting off its clients, and keep its data. Does nothing when it is stopped.

        Args:
            how: SIGKILL is a crash of the server; for PostgreSQL, whose processes are many, SIGQUIT is.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._process.poll() is None:
            self._process.send_signal(how or self.ends_by)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5)
        self._guard.kill()
        self._guard.communicate()

    def close(self) -> None:
        """End it and remove its data."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def wait(self) -> None:
        """Block until it ends."""
        self._process.wait()

    def log_tail(self, lines: int = 30) -> str:
        """The last of what it said."""
        with self._news:
            said = list(self._lines)[-lines:]
        return "\n".join(f"    {line}" for line in said) or "    (it said nothing)"

    def check(self) -> None:
        """Is it still there?

        Raises:
            ServerDied: It is not, and nobody has stopped it.
        """
        if not self._stopped and self._process.poll() is not None:
            self._reader.join(5)
            raise ServerDied(
                f"{self.name} (port {self.port}) ended by itself with {self._process.returncode}\n{self.log_tail()}"
            )

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                with self._news:
                    self._lines.append(line)
                    if self._match is None and (found := self._ready.search(line)):
                        self._match = found
                        self._news.notify_all()
        with self._news:
            self._silent = True
            self._news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.check()
        finally:
            self.close()


def find(program: str, *patterns: str) -> str:
    """Its path.

    Args:
        program: Its name, looked for beside this Python and on the path.
        *patterns: Of further places, below the root; the highest version wins.

    Raises:
        ServerNotStarted: It is not installed.
    """
    if places := sorted((path for pattern in patterns for path in Path("/").glob(pattern)), key=_version):
        return str(places[-1])
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if found := shutil.which(program, path=search):
        return found
    raise ServerNotStarted(f"{program} is not installed: {INSTALL}")


def _version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def data_directory(name: str) -> Path:
    """A new empty directory, outside of the checkout."""
    return Path(tempfile.mkdtemp(prefix=f"stepwell-{name}-"))


def on_free_port(start: Callable[[int], T]) -> T:
    """Call with a port that is free; again with another one when somebody was faster, as the server said in its log."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            return start(port)
        except ServerNotStarted as failure:
            if not PORT_TAKEN.search(str(failure)) or time.monotonic() > deadline:
                raise
