"""`stepwell check`: what there is, and everything that is wrong with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli.kit import FLOWS, HOTEL, Command

WRONG = """
from stepwell import Flow, Step, tool

class Base(Flow):
    model = "offline:rules"
    def config_model(self): return self.model
    def define_steps(self): return [Step(self)]

class GoodFlow(Base):
    aliases = ("OldFlow",)

class TwinFlow(Base):
    id = "OldFlow"

class EmptyFlow(Base):
    def define_steps(self): return []

class LostFlow(Base):
    model = "nowhere:model"
    def define_steps(self): return [Step(self).use_model("offline:poet")]

__all__ = ["GoodFlow", "TwinFlow", "EmptyFlow", "LostFlow"]
"""


def test_a_table_of_what_there_is(command: Command) -> None:
    desk = FLOWS / "desk.py"
    ran = command("check", f"{desk}:DeskFlow", HOTEL, "--models", f"{desk}:always")
    assert ran.code == 0, ran
    lines = ran.out.splitlines()
    assert lines[0].split() == ["Flow", "Stage", "Model", "Memory", "Tools"]
    assert lines[1].split() == [
        "DeskFlow",
        "AskStep",
        "(first)",
        "scripted:model",
        "AskStep",
        "leave,",
        "note,",
        "break_down",
    ]
    assert lines[2].split() == ["RouteStep", "code", "decides", "RouteStep", "-"]
    assert lines[4].split() == ["CloseDesk", "scripted:model", "temp", "-"]
    assert lines[-1] == "2 flows with 9 stages: nothing is wrong."


def test_json(command: Command) -> None:
    ran = command("check", HOTEL, "--json")
    assert ran.code == 0
    assert ran.json["ok"] is True
    flow = ran.json["flows"][0]
    assert (flow["id"], flow["initial"], flow["errors"]) == ("HotelFlow", "ExploreStep", [])
    assert flow["stages"][3] == {
        "id": "BookStep",
        "model": "offline:rules",
        "memory": "booking",
        "tools": ["plan_trip", "show_hotels", "start_over", "say_goodbye", "give_contact", "confirm_booking"],
        "structured": False,
    }


def test_everything_that_is_wrong(command: Command, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    ran = command("check", "wrong.py")
    assert ran.code == 1
    errors = ran.err.splitlines()
    assert [line.split(":")[1].strip() for line in errors] == ["OldFlow", "EmptyFlow", "LostFlow", "LostFlow"]
    assert "Two flows answer to 'OldFlow'" in errors[0]
    assert "registers no step" in errors[1]
    assert "'nowhere' is unknown" in errors[2]
    assert "offline:rules" in errors[3]
    assert "GoodFlow" in ran.out
    assert "nothing is wrong" not in ran.out
    ran = command("check", "wrong.py", "--json")
    assert ran.code == 1
    assert ran.json["ok"] is False
    assert [len(flow["errors"]) for flow in ran.json["flows"]] == [0, 1, 1, 2]
    ran = command("check", "wrong.py:EmptyFlow")
    assert (ran.code, ran.out) == (1, "")


def test_a_client_library_that_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "from stepwell import Flow, Step\nclass OneFlow(Flow):\n    def config_model(self): return 'openai:gpt-5.1'\n"
        "    def define_steps(self): return [Step(self)]\n"
    )
    # In a process of its own: a client library that is half imported here would break the tests of providers.
    code = (
        "import sys; sys.modules['openai'] = None\nfrom stepwell.cli import main; sys.exit(main(['check', 'one.py']))"
    )
    env = {**os.environ, "OPENAI_API_KEY": "sk-secret-of-the-tests"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "stepwell[openai]" in ran.stderr
    assert "secret" not in ran.stderr
