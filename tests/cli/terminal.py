"""A pseudo-terminal with a process on it, and the screen that a person would see."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from types import TracebackType
from typing import Self

COLUMNS, LINES = 90, 500
"""So many lines that nothing scrolls away."""

_TOKEN = re.compile(
    r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>]|[\r\n\b\x07\x01\x02]|[^\x1b\r\n\b\x07\x01\x02]+"
)


_PARTIAL = re.compile(r"\x1b(?:\[[0-9;?]*|[()])?$")


class Screen:
    """As much of a VT100 as rich and readline use."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = [[]]
        self.x = self.y = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        text = self._rest + text
        # The end of an escape sequence may come with the next piece.
        end = _PARTIAL.search(text)
        text, self._rest = (text[: end.start()], text[end.start() :]) if end else (text, "")
        for match in _TOKEN.finditer(text):
            token, code = match.group(), match.group(2)
            if code:
                self._control(code, match.group(1))
            elif token == "\r":
                self.x = 0
            elif token == "\n":
                self._down(1)
            elif token == "\b":
                self.x = max(0, self.x - 1)
            elif token >= " " and token[0] != "\x1b":
                for char in token:
                    self._put(char)

    def _control(self, code: str, given: str) -> None:
        count = int(given) if given.isdigit() else 1
        if code == "A":
            self.y = max(0, self.y - count)
        elif code == "B":
            self._down(count)
        elif code == "C":
            self.x += count
        elif code == "D":
            self.x = max(0, self.x - count)
        elif code == "G":
            self.x = count - 1
        elif code == "K":
            row = self.rows[self.y]
            row[:] = [] if given == "2" else row[: self.x]
        elif code == "J":
            self.rows[self.y][:] = self.rows[self.y][: self.x]
            del self.rows[self.y + 1 :]

    def _down(self, count: int) -> None:
        self.y += count
        while self.y >= len(self.rows):
            self.rows.append([])

    def _put(self, char: str) -> None:
        if self.x >= COLUMNS:
            self.x = 0
            self._down(1)
        row = self.rows[self.y]
        row += [" "] * (self.x + 1 - len(row))
        row[self.x] = char
        self.x += 1

    def __str__(self) -> str:
        return "\n".join("".join(row).rstrip() for row in self.rows)


class Terminal:
    """A process on a pseudo-terminal.

    Args:
        *argv: Arguments of `python -m stepwell.cli`.
        cwd: Where it runs.
    """

    def __init__(self, *argv: str, cwd: Path) -> None:
        self.raw = ""
        self.screen = Screen()
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
        env |= {"TERM": "xterm-256color", "PYTHONDONTWRITEBYTECODE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stepwell.cli", *argv],
            cwd=cwd,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=_own_terminal,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, seen: Callable[[Terminal], bool], seconds: float = 30) -> None:
        """Read until the screen is as expected."""
        end = time.monotonic() + seconds
        while not seen(self):
            if time.monotonic() > end:
                raise AssertionError(f"Not seen in {seconds} s. The screen:\n{self.screen}")
            self._read()

    def shows(self, text: str, times: int = 1) -> None:
        """Read until the screen has a text so often."""
        self.until(lambda terminal: str(terminal.screen).count(text) >= times)

    def exits(self, typing: str = "") -> int:
        """Read to the end; the exit code.

        Args:
            typing: What a person goes on typing until it ends. A Ctrl-C that comes right between the prompt and
                the `select` of the readline module is seen only with the next key.
        """
        end = time.monotonic() + 30
        typed = 0.0
        while time.monotonic() < end:
            if typing and time.monotonic() > typed + 1:
                typed = time.monotonic()
                self.type(typing)
            if not self._read():
                break
        return self._process.wait(timeout=30)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 0.2)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end was closed
            return False
        text = self._decode(data)
        self.raw += text
        self.screen.feed(text)
        return bool(data)


def _own_terminal() -> None:
    """Make the terminal the process's own, so that Ctrl-C typed there reaches it."""
    os.setsid()
    ioctl(0, termios.TIOCSCTTY, 0)
