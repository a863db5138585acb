"""`stepwell serve`: what it hands to the server, and a server that is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import stepwell.server
from cli.kit import DESK, FLOWS, HOTEL, Command


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server is called with."""
    found: dict[str, Any] = {}

    def serve(**options: Any) -> None:
        found.update(options)
        options["ready"]("http://somewhere")

    monkeypatch.setattr(stepwell.server, "serve", serve)
    return found


def test_options(command: Command, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    models = f"{FLOWS / 'desk.py'}:always"
    ran = command("serve", DESK, HOTEL, "--models", models)
    assert (ran.code, ran.out) == (0, "Serving DeskFlow, HotelFlow at http://somewhere (Ctrl-C stops)\n")
    assert [flow.id for flow in given["flows"]] == ["DeskFlow", "HotelFlow"]
    assert "scripted" in given["models"]
    assert "offline" in given["models"]
    expected = {"host": "127.0.0.1", "port": 8000, "grace": 20.0, "api_keys": None, "no_auth": False}
    assert {name: given[name] for name in expected} == expected
    assert given["store"] == "sqlite:///stepwell.db"
    monkeypatch.setenv("STEPWELL_HOST", "::1")
    monkeypatch.setenv("STEPWELL_PORT", "9000")
    ran = command(
        "serve", HOTEL, "--json", "--api-key", "one", "--api-key", "two:2", "--grace", "0", "--no-auth", "--debug"
    )
    assert ran.json == {"url": "http://somewhere", "flows": ["HotelFlow"]}
    assert (given["host"], given["port"], given["api_keys"]) == ("::1", 9000, ["one", "two:2"])
    assert (given["grace"], given["no_auth"]) == (0.0, True)


def test_wrong_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--port" in command.fails("serve", HOTEL, "--port", "70000", code=2)
    assert "--grace" in command.fails("serve", HOTEL, "--grace=-1", code=2)
    assert "API keys" in command.fails("serve", HOTEL, "--host", "0.0.0.0", code=2)
    assert "API keys" in command.fails("serve", HOTEL, "--host", "0.0.0.0", "--no-auth", code=2)
    sentence = command.fails("serve", HOTEL, "--api-key", "sécret", code=2)
    assert "cret" not in sentence
    find = "stepwell.cli._serve.importlib.util.find_spec"
    monkeypatch.setattr(find, lambda name: None)
    assert "pip install 'stepwell[server]'" in command.fails("serve", HOTEL, code=1)


def test_a_server(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}
    argv = [sys.executable, "-m", "stepwell.cli", "serve", str(HOTEL), "--port", "0", "--json", "--models", "offline"]
    with subprocess.Popen(
        argv, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        ready = json.loads(server.stdout.readline())
        request = urllib.request.Request(
            f"{ready['url']}/v1/flows/HotelFlow/turns",
            data=json.dumps({"message": "Hello!"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            result = json.load(answer)
        assert result["success"]
        assert "welcome to Stepwell Travel" in result["message"]
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "/v1/flows/{id}/turns 200" in log
    assert "welcome" not in log
    assert (tmp_path / "stepwell.db").exists()
