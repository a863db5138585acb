"""`stepwell chat`: piped, as JSON, resumed, and when things go wrong."""

from __future__ import annotations

import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from cli.kit import DESK, FLOWS, Command
from stepwell.cli import main
from stepwell.cli._render import render_live

TALK = "hello\nabout rooms\n\nshow me\nbye\nnobody hears this\n"


def test_lines_are_turns_and_the_command_ends_with_the_session(command: Command) -> None:
    ran = command.chat("talks", stdin=TALK)
    assert ran.code == 0
    assert ran.err == ""
    assert ran.out == (
        "you > hello\n"
        "What is it about?\n"
        "\n"
        "you > about rooms\n"
        '  note(topic="rooms")\n'
        "  → RouteStep\n"
        "  → AnswerStep\n"
        "Rooms, fine.\n"
        "\n"
        "you > show me\n"
        "  table()\n"
        "Two rooms:\n\n#  Room  Has\n-  ----  --------\n1  Blue  a window\n2  Red   a door\n\nWhich?\n"
        "\n"
        "you > bye\n"
        "  leave()\n"
        "Goodbye.\n"
        "The session is completed.\n"
    )


def test_json_has_one_result_in_a_line(command: Command) -> None:
    ran = command.chat("talks", "--json", stdin=TALK)
    assert ran.code == 0
    assert [result["message"].partition("\n")[0] for result in ran.lines] == [
        "What is it about?",
        "Rooms, fine.",
        "Two rooms:",
        "Goodbye.",
    ]
    assert [result["completed"] for result in ran.lines] == [False, False, False, True]
    assert len({result["session_id"] for result in ran.lines}) == 1


def test_the_end_of_the_input_ends_the_command_and_the_session_goes_on_later(command: Command) -> None:
    first = command.chat("talks", "--json", stdin="hello\nabout rooms")
    session = first.lines[-1]["session_id"]
    ran = command.chat("always", "--session", session, "--config", '{"ignored": true}', stdin="and?\n/session\n")
    assert ran.code == 0
    assert ran.out == (
        f"Session {session} goes on in AnswerStep.\n"
        "you > hello\n"
        "AskStep > What is it about?\n"
        "you > about rooms\n"
        "AnswerStep > Rooms, fine.\n"
        "you > and?\n"
        "Yes.\n"
        "\n"
        "you > /session\n"
        f"{session}\n"
    )
    assert command.chat("always", "--session", session, "--json", stdin="x").lines[0]["session_id"] == session


def test_a_session_that_cannot_go_on(command: Command) -> None:
    where = (DESK, "--models", f"{FLOWS / 'desk.py'}:always")
    assert "nobody" in command.fails("chat", *where, "--session", "nobody", code=1, stdin="x")
    assert "letters" in command.fails("chat", *where, "--session", "../x", code=2, stdin="x")
    session = command.chat("talks", "--json", stdin="hello").lines[0]["session_id"]
    other = (f"{FLOWS / 'desk.py'}:OnceFlow", "--models", f"{FLOWS / 'desk.py'}:always")
    assert "belongs to flow DeskFlow, not to OnceFlow" in command.fails(
        "chat", *other, "--session", session, code=2, stdin="x"
    )


def test_commands_of_the_conversation(command: Command) -> None:
    ran = command.chat("always", stdin="/session\n/help\n/what\n/quit\nnever\n")
    assert ran.code == 0
    assert "The session begins with the first turn." in ran.out
    assert "/quit ends" in ran.out
    assert "you > /what\nYes.\n" in ran.out
    assert "never" not in ran.out
    assert command.chat("always", stdin="/exit\nnever\n").out == "you > /exit\n"


def test_a_failed_turn_is_told_and_the_conversation_goes_on(command: Command) -> None:
    ran = command.chat("fails", stdin="hello\nbreak\nhello\n")
    assert ran.code == 0
    assert "RuntimeError" in ran.err
    assert "secret" not in ran.out + ran.err
    assert "Traceback" not in ran.err
    assert "Run the command with --debug to see the traceback." in ran.err
    assert ran.out.endswith("you > hello\nFine again.\n\n")


def test_the_exit_code_is_that_of_the_last_turn(command: Command) -> None:
    ran = command.chat("fails_last", "--json", stdin="hello\nbreak\n")
    assert ran.code == 1
    assert [result["success"] for result in ran.lines] == [True, False]
    ran = command.chat("fails_last", flow="AbortFlow", stdin="hello\nbreak\nnobody hears this\n")
    assert ran.code == 1
    assert "nobody" not in ran.out


def test_a_failure_for_now_says_so(command: Command) -> None:
    ran = command.chat("refuses", stdin="hello\n")
    assert ran.code == 1
    assert "say it again to try again" in ran.err
    assert "  attempt 1: thrown\n  attempt 2: thrown\n" in ran.out


def test_debug_writes_the_log_with_tracebacks(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    ran = command.chat("fails_last", "--debug", stdin="hello\nbreak\n")
    assert ran.code == 1
    assert any("desk.py" in record.getMessage() for record in caplog.records)
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


def test_warnings_of_the_session_are_shown(command: Command) -> None:
    ran = command.chat("warns", stdin="hello\n")
    assert ran.code == 0
    assert "  warning: a tool that is not exposed was called\n" in ran.out
    assert "  nothing_like_it()  error\n" in ran.out


def test_nothing_of_a_superseded_attempt_stays(command: Command) -> None:
    ran = command.chat("superseded", stdin="hello\n")
    assert ran.out == "you > hello\n  attempt 1: thrown\nThis is it.\n\n"


def test_input_that_no_turn_can_be_made_of(command: Command) -> None:
    ran = command.chat("always", stdin=f"{'x' * 1_100_000}\nshort\n")
    assert ran.code == 0
    assert "the limit is" in ran.err
    assert ran.out.endswith("you > short\nYes.\n\n")
    assert command.chat("always", stdin=b"caf\xe9 \xff\n").code == 0


def test_a_flow_that_needs_no_message_begins_itself(command: Command) -> None:
    ran = command.chat("always", flow="OnceFlow")
    assert ran.code == 0
    assert ran.out == '{"total":12,"said":"Yes."}\nThe session is completed.\n'


@pytest.mark.parametrize("config", ['{"skip": true}', "@c.json"])
def test_the_context_comes_from_the_command_line_or_a_file(command: Command, tmp_path: Path, config: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"skip": True}))
    ran = command.chat("talks", "--config", config, stdin="hello\nrooms\n")
    assert ran.out.endswith('  note(topic="rooms")\n  → RouteStep\nSkipped.\n  → AnswerStep\n\n')


def test_a_context_that_is_none(command: Command) -> None:
    for config, why in (("[1]", "JSON object"), ("{", "JSON object"), ("@none.json", "none.json cannot be read")):
        assert why in command.fails("chat", DESK, "--config", config, code=2)


def test_stores(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command.chat("always", stdin="x\n")
    assert (tmp_path / "stepwell.db").exists()
    monkeypatch.setenv("STEPWELL_STORE", "sqlite:///other.db")
    command.chat("always", stdin="x\n")
    assert (tmp_path / "other.db").exists()
    command.chat("always", "--store", "memory://", stdin="x\n")
    desk = ("chat", DESK, "--models", f"{FLOWS / 'desk.py'}:always")
    assert "Stores are" in command.fails(*desk, "--store", "mongo://secret@host", code=2)
    (tmp_path / "text.db").write_text("not a database" * 100)
    assert "secret" not in command.fails(*desk, "--store", "sqlite:///text.db", code=1)


@pytest.fixture
def screen(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that somebody looks; `command` forgets such settings first."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.usefixtures("screen")
def test_on_a_screen_replies_are_laid_out(command: Command) -> None:
    ran = command.chat("talks", stdin=TALK)
    assert ran.code == 0
    assert "\x1b[" in ran.out
    assert "Blue" in ran.out
    assert "----" not in ran.out  # a table of ours
    ran = command.chat("thinks", stdin="one\ntwo\nthree\n")
    assert "A title" in ran.out
    assert "# A title" not in ran.out
    assert "\x1b" in ran.out.partition('"a"')[2]  # JSON in colour
    assert "{ no JSON" in ran.out


@pytest.mark.usefixtures("screen")
def test_on_a_screen_too_nothing_of_a_superseded_attempt_is_final(command: Command) -> None:
    ran = command.chat("superseded", stdin="hello\n")
    assert "This is it." in ran.out
    ran = command.chat("fails_last", stdin="hello\nbreak\n")
    assert ran.code == 1


@pytest.mark.usefixtures("screen")
def test_what_a_tool_reports_is_shown_while_it_works(command: Command) -> None:
    ran = command.chat("searches", stdin="hello\n")
    assert ran.code == 0
    assert "  search()" in ran.out
    assert "Found." in ran.out


def test_a_growing_reply_shows_its_end() -> None:
    console = Console(file=io.StringIO(), width=20, height=6, force_terminal=True)
    text = "\n".join(f"line {number}" for number in range(50)) + "\n" + "x" * 45
    assert render_live(text, console).plain.split("\n") == ["line 49", "x" * 20, "x" * 20, "x" * 5]
    assert render_live("short", console).plain == "short"


def test_a_person_types(command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Keyboard(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["hello", "/quit"])
    ends: list[type[BaseException]] = [EOFError, KeyboardInterrupt]

    def typed(prompt: str) -> str:
        for line in lines:
            return line
        raise ends.pop()

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Keyboard())
    argv = ["chat", DESK, "--models", f"{FLOWS / 'desk.py'}:always"]
    assert main(argv) == 0
    assert capsys.readouterr().out == "Yes.\n\n"  # the prompt is the terminal's
    assert main(argv) == 0
    assert main(argv) == 0
    assert ends == []


def test_without_signals_it_works_too(command: Command) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(command.chat, "always", stdin="hello\n").result().out == "you > hello\nYes.\n\n"
