"""The command on sessions in PostgreSQL."""

from __future__ import annotations

import json

import pytest

from cli.kit import Command
from stepwell.cli._options import without_password


def test_sessions_in_postgres(command: Command, postgres_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_STORE", postgres_database)
    first, second = (command.chat("always", "--json", stdin="a\n").lines[-1]["session_id"] for _ in range(2))
    ran = command("sessions", "list", "--json")
    assert [one["id"] for one in ran.json["sessions"]] == [second, first]
    again = command.chat("always", "--session", first, "--json", stdin="more\n").lines[-1]
    assert again["session_id"] == first
    assert command("sessions", "show", first).out.count("you > ") == 2
    exported = command("sessions", "export", first)
    assert exported.json["format"] == "stepwell.export/1"
    ran = command("sessions", "import", "--session", "copy", "--json", stdin=exported.out)
    assert ran.json == {"session": "copy"}
    # Into another store, and back.
    elsewhere = ("--store", "sqlite:///other.db")
    assert command("sessions", "import", *elsewhere, stdin=exported.out).code == 0
    back = command("sessions", "export", first, *elsewhere)
    assert command("sessions", "import", "--session", "back", stdin=back.out).code == 0
    assert command("sessions", "show", "back").out.count("you > ") == 2
    ran = command("sessions", "delete", first, "nobody", "--yes", "--json")
    assert json.loads(ran.out) == {first: True, "nobody": False}
    assert "no session" in command.fails("sessions", "show", first, code=1)


def test_a_server_that_is_not_there(command: Command) -> None:
    url = "postgresql://someone:S3CRET@127.0.0.1:1/x"
    said = command.fails("sessions", "list", "--store", url, code=1)
    assert "PostgreSQL cannot be reached: try again." in said
    assert "S3CRET" not in said
    said = command.fails("sessions", "list", "--store", "postgresql://someone:S3CRET@host/x?nonsense=1", code=2)
    assert "not one of PostgreSQL" in said
    assert "S3CRET" not in said


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("memory://", "memory://"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("postgresql://me:S3CRET@host:5432/db?sslmode=require", "postgresql://me:***@host:5432/db?sslmode=require"),
        ("postgresql://me:S3:CR@ET@host/db", "postgresql://me:***@host/db"),
        ("postgresql:///db?user=me&password=S3CRET&host=h", "postgresql:///db?user=me&password=***&host=h"),
        ("postgresql:///db?sslpassword=S3CRET", "postgresql:///db?sslpassword=***"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_the_demo_shows_no_password(command: Command, postgres_database: str) -> None:
    url = postgres_database.replace("postgres@", "postgres:S3CRET@")
    ran = command("demo", "--store", url, stdin="Hello!\n")
    assert ran.code == 0, ran.err
    assert "postgres:***@" in ran.out
    assert "S3CRET" not in ran.out + ran.err
