"""The command as a person sees it, on a real terminal."""

from __future__ import annotations

from pathlib import Path

from cli.kit import DESK, FLOWS
from cli.terminal import Terminal


def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    models = f"{FLOWS / 'desk.py'}:slowly"
    with Terminal("chat", DESK, "--models", models, "--store", "sqlite:///s.db", cwd=tmp_path) as terminal:
        terminal.shows("you >")
        terminal.type("hello\r")
        # What an attempt shows before it fails is seen, and then replaced where it stood.
        terminal.until(lambda t: "DEAD words" in t.raw)
        terminal.shows("What counts is this.")
        terminal.shows("you >", times=2)
        assert "DEAD" not in str(terminal.screen)
        assert "**" not in str(terminal.screen)
        assert "  attempt 1: thrown" in str(terminal.screen)
        terminal.type("and now?\r")
        terminal.until(lambda t: "never" in t.raw)
        # Ctrl-C stops the turn, not the command.
        terminal.type("\x03")
        terminal.shows("The turn was cancelled (user).")
        terminal.shows("you >", times=3)
        terminal.type("still there?\r")
        terminal.shows("Still here.")
        terminal.shows("you >", times=4)
        terminal.type("\x04")
        assert terminal.exits() == 0
        text = str(terminal.screen)
    assert "DEAD" not in text
    assert "never" not in text
    assert [line for line in text.splitlines() if line.startswith("you >")] == [
        "you > hello",
        "you > and now?",
        "you > still there?",
        "you >",
    ]


def test_the_demo_on_a_terminal(tmp_path: Path) -> None:
    with Terminal("demo", "--model", "offline:rules", cwd=tmp_path) as terminal:
        terminal.shows("rule-based offline model")
        terminal.shows("you >")
        terminal.type("two people in Lisbon from 12 to 15 May\r")
        terminal.shows("Noted: Lisbon")
        terminal.shows("you >", times=2)
        terminal.type("show me the list\r")
        terminal.shows("→ PresentStep")
        terminal.shows("you >", times=3)
        assert "----" not in str(terminal.screen)
        assert terminal.exits(typing="\x03") == 0
        assert "Look at it: stepwell sessions show" in str(terminal.screen)
