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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

INSTALL = "tests/servers/install.sh (as root) installs what is missing"
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
    """A running server.

    Attributes:
        name: What it is, for messages.
        port: On 127.0.0.1.
        url: As its clients take it.
        directory: Of its data, removed when it is stopped.
        ready: How it said that it is ready.
    """

    name = "server"
    ends_by: signal.Signals = signal.SIGTERM
    """How it is asked to stop at once, without waiting for its clients."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        directory: Path,
        ready: str,
        timeout: float = 30,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it and wait until a line of its output matches.

        Args:
            command: Program and arguments.
            port: That it was told to listen on; 0 when it says one itself, in the group `port` of the match.
            directory: In which it runs and which goes with it.
            ready: A pattern that a line of its output or errors contains when it can be used.
            timeout: Seconds that it may take until then.
            user: As whom it runs, when not as the user of this process.
            environment: Its variables, when not those of this process.

        Raises:
            ServerNotStarted: It did not come up.
        """
        self.port = port
        self.directory = directory
        self._lines: deque[str] = deque(maxlen=400)
        self._news = threading.Condition()
        self._match: re.Match[str] | None = None
        self._silent = False
        self._stopped = False
        identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=None if environment is None else dict(environment),
            start_new_session=True,  # Ctrl-C is for the process that started it, which still needs it to end its tests
            **identity,
        )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "guard", str(int(self.ends_by)), str(self._process.pid), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(re.compile(ready),), name=self.name, daemon=True)
        self._reader.start()
        with self._news:
            self._news.wait_for(lambda: self._match or self._silent, timeout)
            self.ready = self._match
        if self.ready is None:
            ended = self._silent
            self._end()
            how = f"exited with {self._process.returncode}" if ended else f"was not ready after {timeout:g} s"
            raise ServerNotStarted(f"{self.name} {how}: {' '.join(command)}\n{self.log_tail()}")
        if not port:
            self.port = int(self.ready["port"])

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def pid(self) -> int:
        return self._process.pid

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

    def stop(self) -> None:
        """End it and remove its data. Its clients are cut off. A second call does nothing."""
        if not self._stopped:
            self._stopped = True
            self._end()

    def wait(self) -> None:
        """Block until it ends."""
        self._process.wait()

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(self.ends_by)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(5)
        self._guard.kill()
        self._guard.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read(self, ready: re.Pattern[str]) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                with self._news:
                    self._lines.append(line)
                    if self._match is None and (found := ready.search(line)):
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
            self.stop()


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
