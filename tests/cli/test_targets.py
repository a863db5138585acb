"""What a target may be, and what it says about one that is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cli.kit import DESK, FLOWS, HOTEL, Command

ONE = "from stepwell import Flow, Step\nclass OneFlow(Flow):\n    def config_model(self): return 'offline:rules'\n"
ONE += "    def define_steps(self): return [Step(self)]\n"


def flows(command: Command, *targets: str | Path) -> list[str]:
    return [flow["id"] for flow in command("check", *targets, "--models", "offline", "--json").json["flows"]]


def test_what_may_be_given(command: Command, tmp_path: Path) -> None:
    shutil.copytree(HOTEL / "hotel", tmp_path / "hotel")
    (tmp_path / "alone.py").write_text(ONE)
    for target in (
        "hotel:HotelFlow",
        "hotel",
        "./hotel",
        "hotel/flow.py",
        "hotel/flow.py:HotelFlow",
        "hotel.flow",
        ".",
    ):
        assert flows(command, target) == ["HotelFlow"], target
    assert flows(command, "alone.py", "alone", "alone:OneFlow", "hotel") == ["OneFlow", "HotelFlow"]


def test_a_project_may_have_its_package_in_src(command: Command, tmp_path: Path) -> None:
    shutil.copytree(HOTEL / "hotel", tmp_path / "src" / "hotel")
    assert flows(command, tmp_path) == ["HotelFlow"]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nowhere", "no module nowhere"),
        ("no where", "no module"),
        (".hidden", "no module"),
        ("", "no target"),
        (":Flow", "no target"),
        ("none.py", "no file none.py"),
        ("empty", "empty is no package"),
        ("two", "two/one or two/other"),
        ("plain.py", "plain.py has no flow"),
        ("plain.py:Thing", "Thing is no flow in plain.py (which has no flow)"),
        (f"{FLOWS / 'desk.py'}:Nothing", "Nothing is not there"),
        (str(FLOWS / "desk.py"), "has 4 flows: say which one"),
        ("json.py", "another module is named json"),
    ],
)
def test_what_is_no_target(command: Command, tmp_path: Path, target: str, why: str) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("one", "other"):
        (tmp_path / "two" / name).mkdir(parents=True)
        (tmp_path / "two" / name / "__init__.py").write_text(ONE)
    (tmp_path / "plain.py").write_text("class Thing: pass\n")
    (tmp_path / "json.py").write_text("x = 1\n")
    assert why in command.fails("draw", target, code=2)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import nothing_like_this", "ModuleNotFoundError: No module named 'nothing_like_this' (broken.py, line 2)."),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 2)."),
        ("raise ValueError('first.\\nsecond')", "ValueError: first (broken.py, line 2)."),
    ],
)
def test_code_that_cannot_be_imported(command: Command, tmp_path: Path, source: str, why: str) -> None:
    (tmp_path / "broken.py").write_text(f"\n{source}\n")
    assert command.fails("check", "broken.py", code=1) == f"broken.py cannot be imported: {why}"
    assert command.fails("check", "broken:Flow", code=1) == f"broken cannot be imported: {why}"


def test_providers(command: Command) -> None:
    assert command.chat("mapping", stdin="x\n").out == "you > x\nMapped.\n\n"
    desk = FLOWS / "desk.py"
    assert "no Providers object" in command.fails("chat", DESK, "--models", f"{desk}:nothing", code=2)
    assert "has no gone" in command.fails("chat", DESK, "--models", f"{desk}:gone", code=2)
    assert "has no attribute" in command.fails("chat", DESK, "--models", "mine", code=2)
    assert "'scripted' is unknown" in command.fails("chat", DESK, code=1)


def test_a_key_in_the_environment_registers_its_provider(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-tests")
    sentence = command.fails("chat", DESK, code=1)
    assert "registered are openai, openai-responses, offline" in sentence
    assert "secret" not in sentence
    monkeypatch.setenv("OPENAI_BASE_URL", "ftp://secret@nowhere")
    assert "secret" not in command.fails("chat", DESK, code=1)
