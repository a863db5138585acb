"""Every test of the command runs in an empty directory, without keys."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.kit import FLOWS, ROOT, Command

_FOREIGN = ("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_", "STEPWELL_")
_LOOK = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "NO_COLOR")


_EXAMPLES = {"hotel", "intake", "invoice"}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Command]:
    """The command; what it imports and changes is forgotten again."""
    for name in list(os.environ):
        if name.startswith(_FOREIGN) or name in _LOOK:
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    logger = logging.getLogger("stepwell")
    level, handlers = logger.level, list(logger.handlers)
    for name in list(sys.modules):
        if name.partition(".")[0] in _EXAMPLES:  # the examples' own tests import them from another directory
            monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield Command(capsys, monkeypatch)
    logger.setLevel(level)
    logger.handlers[:] = handlers
    for name in set(sys.modules) - before:
        place = Path(getattr(sys.modules[name], "__file__", None) or "/")
        if any(place.is_relative_to(root) for root in (tmp_path, FLOWS, ROOT / "examples")):
            del sys.modules[name]
