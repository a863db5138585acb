"""`stepwell bench`: figures of this machine."""

from __future__ import annotations

import pytest

from cli.kit import DESK, FLOWS, HOTEL, Command


def test_figures(command: Command) -> None:
    ran = command("bench", "--seconds", "0.05", "--sessions", "3", "--json")
    assert ran.code == 0, ran
    assert ran.json["flow"] == "BenchFlow"
    names = [case["case"] for case in ran.json["cases"]]
    assert names == ["memory, one session", "SQLite, one session", "memory, 3 at once", "SQLite, 3 at once"]
    for case in ran.json["cases"]:
        assert case["turns"] > 0
        assert case["turns_per_second"] > 0
        assert 0 < case["p50_ms"] <= case["p99_ms"]
        assert case["units_per_turn"] == 1


def test_a_table_for_a_flow_of_ones_own(command: Command) -> None:
    ran = command("bench", HOTEL, "--seconds", "0.05")
    assert ran.code == 0
    head, *rows, note = ran.out.splitlines()
    assert head.split()[:2] == ["HotelFlow", "turns/s"]
    assert len(rows) == 4
    assert note.startswith("ms:")
    assert ran.err == ""


def test_a_session_does_not_grow_for_ever(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.cli._bench.KEEP", 3)
    ran = command("bench", "--seconds", "0.05", "--json")
    assert all(case["turns"] > 6 for case in ran.json["cases"])


def test_sessions_that_end_begin_again(command: Command) -> None:
    ran = command("bench", f"{FLOWS / 'desk.py'}:OnceFlow", "--seconds", "0.05", "--json")
    assert all(case["turns"] > 1 for case in ran.json["cases"])


def test_a_flow_that_fails_is_not_measured(command: Command) -> None:
    assert "A turn failed" in command.fails("bench", f"{FLOWS / 'desk.py'}:FormFlow", code=1)
    assert "JSON object" in command.fails("bench", DESK, "--config", "[]", code=2)
