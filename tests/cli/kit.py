"""The command, run in this process."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepwell.cli import main

FLOWS = Path(__file__).parent / "flows"
ROOT = Path(__file__).parents[2]
DESK = f"{FLOWS / 'desk.py'}:DeskFlow"
HOTEL = ROOT / "examples" / "hotel"


@dataclass(frozen=True)
class Ran:
    """What the command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """JSON, line by line."""
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """`stepwell`, with what was typed on standard input."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._patch = patch

    def __call__(self, *argv: str | Path, stdin: str | bytes = "") -> Ran:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        with self._patch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
            code = main([str(one) for one in argv])
        out, err = self._capsys.readouterr()
        return Ran(code, out, err)

    def chat(self, models: str, *argv: str | Path, flow: str = "DeskFlow", stdin: str | bytes = "") -> Ran:
        """Talk to a flow of desk.py with one of its models."""
        place = FLOWS / "desk.py"
        return self("chat", f"{place}:{flow}", "--models", f"{place}:{models}", *argv, stdin=stdin)

    def fails(self, *argv: str | Path, code: int, stdin: str | bytes = "") -> str:
        """Run, expect this exit code, nothing on standard output and one sentence on standard error; returns that."""
        ran = self(*argv, stdin=stdin)
        assert (ran.code, ran.out) == (code, ""), ran
        first, *hints = ran.err.splitlines()
        assert first.startswith("error: ")
        assert first.endswith((".", ")", "?"))
        assert len(hints) <= 1
        assert "Traceback" not in ran.err
        return first.removeprefix("error: ")
