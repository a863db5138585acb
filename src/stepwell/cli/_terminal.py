"""Where output goes: the terminal as a person or a script sees it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

__all__ = ["CommandError", "Terminal", "UsageError"]

PIPE_WIDTH = 200
"""Columns of a table that nobody looks at directly."""


class CommandError(Exception):
    """The command cannot do it; a sentence that says why and what to do. Exit code 1."""


class UsageError(Exception):
    """The command was used wrongly; a sentence that says what is right. Exit code 2."""


class Terminal:
    """Standard output and standard error.

    Attributes:
        out: Standard output.
        err: Standard error.
    """

    def __init__(self) -> None:
        self.out = _console(stderr=False)
        self.err = _console(stderr=True)

    @property
    def fancy(self) -> bool:
        """Whether a person looks at standard output, so that it may be redrawn."""
        return self.out.is_terminal and not self.out.is_dumb_terminal

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print text as it is, without markup and without wrapping."""
        self.out.print(text, style=style, markup=False, soft_wrap=True)

    def json(self, value: Any, *, indent: int = 2) -> None:
        """Print a value as JSON; `indent=0` puts it into one line."""
        text = msgspec.json.format(msgspec.json.encode(value), indent=indent) if indent else msgspec.json.encode(value)
        sys.stdout.write(text.decode() + "\n")
        sys.stdout.flush()

    def error(self, sentence: str, hint: str = "") -> None:
        """Say on standard error what went wrong."""
        self.err.print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True)
        if hint:
            self.err.print(hint, style="dim", markup=False, soft_wrap=True)

    def table(
        self,
        columns: Mapping[str, str],
        rows: Sequence[Sequence[str]],
        cells: Mapping[tuple[int, int], str] | None = None,
        whole: str = "",
    ) -> None:
        """Print a table.

        Args:
            columns: A style for each heading.
            rows: The cells, as they are.
            cells: Styles of single cells, by row and column.
            whole: Heading of a column that is never wrapped.
        """
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name, style in columns.items():
            table.add_column(name, style=style or None, overflow="fold", no_wrap=name == whole)
        for at, row in enumerate(rows):
            table.add_row(*(Text(cell, (cells or {}).get((at, column), "")) for column, cell in enumerate(row)))
        self.out.print(table)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def reconfigure(stream: Any) -> None:
    """Let a text stream replace what it cannot decode, instead of raising in the middle of a conversation."""
    change = getattr(cast("object", stream), "reconfigure", None)
    if change is not None:
        change(errors="replace")
