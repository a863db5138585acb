"""`stepwell sessions`: list, show, export, import, delete."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.kit import Command
from stepwell.cli import main


@pytest.fixture
def made(command: Command) -> list[str]:
    """Three sessions, the newest first: two that run, one that is completed."""
    ids = [
        command.chat(*script, "--json", stdin=talk).lines[-1]["session_id"]
        for script, talk in (
            (("talks",), "hello\nabout rooms\nshow me\nbye\n"),
            (("always",), "a\n"),
            (("always",), "b\n"),
        )
    ]
    return ids[::-1]


def listed(command: Command, *options: str) -> list[str]:
    return [one["id"] for one in command("sessions", "list", "--json", *options).json["sessions"]]


def test_list(command: Command, made: list[str]) -> None:
    ran = command("sessions", "list")
    assert ran.code == 0
    head, *rows = ran.out.splitlines()
    assert head.split() == ["Session", "Flow", "Status", "Stage", "Saved"]
    assert [row.split()[0] for row in rows] == made
    assert rows[2].split()[1:4] == ["DeskFlow", "completed", "AnswerStep"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "just now"), (59, "just now"), (61, "1 min ago"), (7300, "2 h ago"), (200_000, "2 d ago")],
)
@pytest.mark.usefixtures("made")
def test_list_says_how_long_ago(command: Command, monkeypatch: pytest.MonkeyPatch, seconds: int, said: str) -> None:
    now = time.time() + seconds
    monkeypatch.setattr("stepwell.cli._sessions.time", SimpleNamespace(time=lambda: now))
    assert said in command("sessions", "list").out.splitlines()[1]


def test_an_id_is_never_wrapped(command: Command, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert set(made) <= set(command("sessions", "list").out.split())


def test_list_filters_and_pages(command: Command, made: list[str]) -> None:
    assert listed(command) == made
    assert listed(command, "--status", "completed") == made[2:]
    assert listed(command, "--flow", "DeskFlow") == made
    assert listed(command, "--flow", "OtherFlow") == []
    assert command("sessions", "list", "--flow", "OtherFlow").out == "There are no such sessions.\n"
    first = command("sessions", "list", "--json", "--limit", "2").json
    assert [one["id"] for one in first["sessions"]] == made[:2]
    assert listed(command, "--after", first["next"]) == made[2:]
    assert f"There are more: --after {first['next']}" in command("sessions", "list", "--limit", "2").out


def test_show(command: Command, made: list[str]) -> None:
    ran = command("sessions", "show", made[2])
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == f"Session      {made[2]}"
    assert lines[1] == "Flow         DeskFlow (version 1)"
    assert "Status       completed" in lines
    talk = ran.out.partition("\n\n")[2].split("\n\n")
    assert talk[0] == "you > hello"
    assert talk[1] == "AskStep > What is it about?"
    assert talk[-1] == "AnswerStep > Goodbye.\n"
    assert command("sessions", "show", made[2], "--json").json["head"]["id"] == made[2]
    assert "no session" in command.fails("sessions", "show", "nobody", code=1)


def test_a_store_that_is_not_there_is_not_made(command: Command, tmp_path: Path) -> None:
    for argv in (["list"], ["show", "x"], ["export", "x"], ["delete", "x", "--yes"]):
        assert "no session store stepwell.db" in command.fails("sessions", *argv, code=1)
    assert not list(tmp_path.iterdir())


def test_export_and_import(command: Command, made: list[str], tmp_path: Path) -> None:
    exported = command("sessions", "export", made[2])
    assert exported.code == 0
    assert command("sessions", "export", made[2], "one.json").out == "Wrote one.json.\n"
    assert json.loads((tmp_path / "one.json").read_text()) == exported.json
    other = ("--store", "sqlite:///other.db")
    ran = command("sessions", "import", "one.json", *other)
    assert (ran.code, ran.out) == (0, f"Imported session {made[2]}.\n")
    ran = command("sessions", "import", "--session", "again", "--json", *other, stdin=exported.out)
    assert ran.json == {"session": "again"}
    ran = command("sessions", "import", "-", "--session", "third", *other, stdin=exported.out)
    assert ran.code == 0
    assert set(listed(command, *other)) == {made[2], "again", "third"}
    assert command("sessions", "show", "again", *other).out.count("you > ") == 4
    assert "again" in command.fails("sessions", "import", "one.json", "--session", "again", *other, code=1)


@pytest.mark.parametrize("content", ["", "{", '"text"', "[" * 5000, '{"format": "else"}'])
def test_what_is_no_exported_session(command: Command, content: str) -> None:
    command.fails("sessions", "import", code=1, stdin=content)


def test_files_that_cannot_be_used(command: Command, made: list[str]) -> None:
    assert "none.json cannot be read" in command.fails("sessions", "import", "none.json", code=1)
    assert "cannot be written" in command.fails("sessions", "export", made[0], "no/where.json", code=1)


def test_delete(command: Command, made: list[str]) -> None:
    assert "--yes" in command.fails("sessions", "delete", made[0], code=2)
    assert command("sessions", "delete", made[0], "--yes").out == f"Deleted session {made[0]}.\n"
    ran = command("sessions", "delete", made[0], made[1], "-y", "--json")
    assert ran.code == 1
    assert ran.json == {made[0]: False, made[1]: True}
    assert f"There is no session {made[0]}." in ran.err
    assert listed(command) == made[2:]


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("Yes", 0), ("", 1), ("no", 1)])
def test_delete_asks(
    command: Command,
    made: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str,
    code: int,
) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("builtins.input", lambda: answer)
    monkeypatch.setattr(sys, "stdin", Keyboard())
    assert main(["sessions", "delete", made[0], made[1]]) == code
    assert "Delete 2 sessions? It cannot be undone. [y/N] " in capsys.readouterr().err
    assert len(listed(command)) == (1 if code == 0 else 3)
