"""`stepwell chat` with a flow that waits for the person: what is asked, and what their lines answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.kit import FLOWS, Command, Ran
from stepwell import PendingRequest
from stepwell.cli._pending import asked, typed
from stepwell.outcomes import RequestKind
from suspension_flows import DeskStep

PLACE = FLOWS / "waiting.py"


def chat(command: Command, *argv: str | Path, stdin: str) -> Ran:
    DeskStep.ran = []
    return command("chat", f"{PLACE}:DeskFlow", "--models", f"{PLACE}:models", *argv, stdin=stdin)


def test_the_next_lines_answer_what_the_session_waits_for(command: Command) -> None:
    ran = chat(command, stdin="refund 5, ask red, locate\nyes\ndark\n[1, 2]\nlook a\n")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "you > refund 5, ask red, locate\n"
        "\n"
        "Allow refund(amount=5)? (yes, no, or why not)\n"
        "you > yes\n"
        "\n"
        "red\n"
        "you > dark\n"
        "\n"
        "Run locate(), and give its result (JSON or text).\n"
        "you > [1, 2]\n"
        "DeskStep > refund=refunded 5; ask={'answered': 'dark'}; locate=[1, 2]\n"
        "\n"
        "you > look a\n"
        '  look(what="a")\n'
        "look=saw a\n"
        "\n"
    )
    assert DeskStep.ran == ["ask red", "refund 5", "answer question", "answer client_tool", "look a"]


def test_a_session_that_waits_is_asked_for_again_when_it_goes_on(command: Command) -> None:
    first = chat(command, "--json", stdin="refund 5\n")
    session = first.lines[-1]["session_id"]
    assert first.lines[-1]["status"] == "suspended"
    ran = chat(command, "--session", session, stdin="too much\n")
    assert ran.out.splitlines()[-4:] == [
        "Allow refund(amount=5)? (yes, no, or why not)",
        "you > too much",
        "DeskStep > refund={'approved': False, 'reason': 'too much'}",
        "",
    ]
    assert DeskStep.ran == []


def test_each_answer_has_a_result_in_json(command: Command) -> None:
    ran = chat(command, "--json", stdin="ask red, ask blue\nR\nB\n")
    assert [(one["status"], len(one["pending"])) for one in ran.lines] == [
        ("suspended", 2),
        ("suspended", 1),
        ("running", 0),
    ]
    assert ran.lines[-1]["message"] == "ask={'answered': 'R'}; ask={'answered': 'B'}"


def test_what_expired_meanwhile_is_told(command: Command) -> None:
    first = chat(command, "--json", stdin="ask red 0.001, ask blue\n")
    session = first.lines[-1]["session_id"]
    ran = chat(command, "--session", session, stdin="R\nB\n")
    assert "waits for no answer" in ran.err
    assert "ask={'expired': True}; ask={'answered': 'B'}" in ran.out


@pytest.mark.parametrize(
    ("kind", "payload", "sentence"),
    [
        ("approval", {"tool": "pay", "args": {"to": "Bob"}}, 'Allow pay(to="Bob")? (yes, no, or why not)'),
        ("approval", {"sum": 5}, 'Allow pay: {"sum":5}? (yes, no, or why not)'),
        ("approval", None, "Allow pay? (yes, no, or why not)"),
        ("question", "When?", "When?"),
        ("question", {"text": "When?", "more": 1}, "When?"),
        ("question", {"choices": [1]}, '{"choices":[1]}'),
        ("client_tool", {"tool": "pay", "args": {}}, "Run pay(), and give its result (JSON or text)."),
    ],
)
def test_what_is_asked(kind: RequestKind, payload: object, sentence: str) -> None:
    assert asked(PendingRequest(id="r", kind=kind, tool="pay", call="c", payload=payload)) == sentence


@pytest.mark.parametrize(
    ("kind", "line", "value"),
    [
        ("approval", "Yes", True),
        ("approval", "n", False),
        ("approval", "later", {"approved": False, "reason": "later"}),
        ("question", "yes", "yes"),
        ("client_tool", '{"a": 1}', {"a": 1}),
        ("client_tool", "done.", "done."),
    ],
)
def test_what_a_line_answers(kind: RequestKind, line: str, value: object) -> None:
    assert typed(PendingRequest(id="r", kind=kind, tool="pay", call="c"), line) == value
