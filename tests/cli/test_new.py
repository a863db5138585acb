"""`stepwell new`: a project that passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.kit import Command


def test_a_new_project_passes_its_own_tests(command: Command, tmp_path: Path) -> None:
    ran = command("new", "front-desk")
    assert ran.code == 0
    assert "stepwell chat front_desk" in ran.out
    project = tmp_path / "front-desk"
    made = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert made == {
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "front_desk/__init__.py",
        "front_desk/flow.py",
        "front_desk/steps.py",
        "tests/test_flow.py",
    }
    assert not [name for name in made if "__NAME__" in (project / name).read_text()]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COVERAGE", "COV_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:langsmith_plugin"],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_it_is_clean_code_and_works_with_the_command(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("new", "front-desk")
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "--line-length=120", "--select=E,F,I,UP,B"]
    monkeypatch.chdir("front-desk")
    subprocess.run([*ruff, "."], check=True, capture_output=True)
    ran = command("check", "front_desk", "--json")
    assert [stage["id"] for stage in ran.json["flows"][0]["stages"]] == ["WhoStep", "WhenStep"]
    ran = command("chat", "front_desk", stdin="hello\nAda Lovelace\nnext monday\n")
    assert ran.code == 0
    assert "Noted: Ada Lovelace on Monday" in ran.out
    assert "The session is completed." in ran.out
    assert command("draw", ".").code == 0


def test_names(command: Command, tmp_path: Path) -> None:
    made = command("new", "Care_Desk", "--json").json
    assert (made["package"], made["flow"]) == ("care_desk", "CareDeskFlow")
    assert len(made["files"]) == 7
    (tmp_path / "ready").mkdir()
    assert command("new", tmp_path / "ready").code == 0
    for name in ("9lives", "a b", "-x", "é", "a--b", "json", "class", "stepwell", "tests"):
        command.fails("new", "--", name, code=2)


def test_nothing_is_overwritten(command: Command, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    assert "not an empty directory" in command.fails("new", "full", code=1)
    (tmp_path / "file").write_text("mine")
    assert "not an empty directory" in command.fails("new", "file", code=1)
    assert "cannot be written" in command.fails("new", "file/inside", code=1)
