"""The parser, and what an error becomes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.kit import DESK, HOTEL, Command
from stepwell.cli import main

COMMANDS = ("demo", "new", "chat", "serve", "check", "draw", "bench", "sessions")


def test_help_and_version(command: Command) -> None:
    ran = command("--help")
    assert ran.code == 0
    for name in COMMANDS:
        assert f" {name} " in ran.out
        own = command(name, "--help")
        assert own.code == 0
        assert own.out.startswith(f"Usage: stepwell {name}")
    assert command("--version").out.strip() == importlib.metadata.version("stepwell")
    assert command().code == 0


def test_help_imports_no_command() -> None:
    code = (
        "import sys; from stepwell.cli import main; main(['--help']); print([m for m in sys.modules if '.cli._' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1]
    assert "stepwell.cli._app" in loaded
    assert "_chat" not in loaded
    assert "_sessions" not in loaded


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["chat"],
        ["chat", DESK, "--colour"],
        ["chat", DESK, "--session"],
        ["sessions", "fly"],
        ["check"],
        ["serve"],
        ["sessions", "list", "--limit", "many"],
        ["sessions", "list", "--limit", "0"],
        ["sessions", "list", "--status", "odd"],
        ["sessions", "delete"],
        ["bench", "--seconds", "0"],
        ["bench", "--sessions", "0"],
    ],
)
def test_wrong_use(command: Command, argv: list[str]) -> None:
    command.fails(*argv, code=2)


def test_an_unexpected_error_is_one_sentence_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("nothing to divide.")

    monkeypatch.setattr("stepwell.cli._targets.load_flow", broken)
    ran = command("draw", DESK)
    assert ran.code == 1
    assert ran.err == (
        "error: ZeroDivisionError: nothing to divide.\nSet STEPWELL_DEBUG=1 to see where it comes from.\n"
    )
    monkeypatch.setenv("STEPWELL_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        command("draw", DESK)
    with pytest.raises(Exception, match="no session"):
        command("sessions", "show", "x", "--store", "memory://")


def test_an_interrupt_ends_with_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stepwell.cli._targets.load_flow", interrupted)
    assert command("draw", DESK).code == 130


def test_a_broken_pipe_is_quiet(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("stepwell.cli._targets.load_flow", broken)
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["draw", DESK]) == 1
        out.write("into nothing")
    assert (tmp_path / "out").read_text() == ""


def test_a_reader_that_goes_away_is_no_failure_to_talk_about() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "stepwell.cli", "draw", str(HOTEL)], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""


def test_the_script_is_installed() -> None:
    script = Path(sys.executable).with_name("stepwell")
    began = time.perf_counter()
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Exit codes" in done.stdout
    assert time.perf_counter() - began < 30
    assert subprocess.run([script, "fly"], capture_output=True, check=False).returncode == 2
