"""`stepwell serve`: what it hands to the server, and a server that is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import stepwell.server
from cli.kit import DESK, FLOWS, HOTEL, Command
from stepwell.transport.codecs import UIMessageCodec


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
    expected: dict[str, Any] = {"host": "127.0.0.1", "port": 8000, "grace": 20.0, "api_keys": None, "no_auth": False}
    expected |= {"agents": None, "channels": None, "cors": ()}
    assert {name: given[name] for name in expected} == expected
    assert given["store"] == "sqlite:///stepwell.db"
    monkeypatch.setenv("STEPWELL_HOST", "::1")
    monkeypatch.setenv("STEPWELL_PORT", "9000")
    ran = command(
        "serve", HOTEL, "--json", "--api-key", "one", "--api-key", "two:2", "--grace", "0", "--no-auth", "--debug"
    )
    assert ran.json == {"url": "http://somewhere", "flows": ["HotelFlow"], "agents": []}
    assert (given["host"], given["port"], given["api_keys"]) == ("::1", 9000, ["one", "two:2"])
    assert (given["grace"], given["no_auth"]) == (0.0, True)


def test_origins(command: Command, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    command("serve", HOTEL, "--cors", "https://shop.example", "--cors", "http://localhost:3000")
    assert given["cors"] == ["https://shop.example", "http://localhost:3000"]
    monkeypatch.setenv("STEPWELL_CORS", "https://shop.example, *")
    command("serve", HOTEL)
    assert given["cors"] == ["https://shop.example", "*"]
    for wrong in ("shop.example", "https://shop.example/", "https://shop.example/page"):
        assert f"{wrong} is no origin" in command.fails("serve", HOTEL, "--cors", wrong, code=2)


AGENT = """
async def answer(run):
    said = run.messages[-1]["parts"][0]["text"]
    await run.pipe([
        {"type": "text-start", "id": "t"},
        {"type": "text-delta", "id": "t", "delta": f"You said {said}."},
        {"type": "text-end", "id": "t"},
    ])

def no_agent(run): ...
"""


def test_agents_and_channels(
    command: Command, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "an_agent.py"
    place.write_text(AGENT)
    ran = command("serve", HOTEL, "--agent", f"{place}:answer")
    assert ran.out == "Serving HotelFlow, answer at http://somewhere (Ctrl-C stops)\n"
    assert (list(given["agents"]), given["channels"]) == (["answer"], "sqlite:///stepwell.db")
    ran = command("serve", "--agent", f"one={place}:answer", "--agent", f"two={place}:answer", "--json")
    assert ran.json == {"url": "http://somewhere", "flows": [], "agents": ["one", "two"]}
    monkeypatch.setenv("STEPWELL_CHANNELS", "sqlite:///other.db")
    assert command("serve").out == "Serving channels at http://somewhere (Ctrl-C stops)\n"
    assert (given["agents"], given["channels"]) == (None, "sqlite:///other.db")
    command("serve", "--agent", f"{place}:answer", "--channels", "sqlite:///third.db")
    assert given["channels"] == "sqlite:///third.db"
    monkeypatch.delenv("STEPWELL_CHANNELS")
    assert "--agent, or --channels" in command.fails("serve", code=2)
    assert "no async function" in command.fails("serve", "--agent", f"{place}:no_agent", code=2)
    assert "has no nothing" in command.fails("serve", "--agent", f"{place}:nothing", code=2)
    assert "write module:attribute" in command.fails("serve", "--agent", "answer", code=2)
    twice = command.fails("serve", "--agent", f"{place}:answer", "--agent", f"{place}:answer", code=2)
    assert "Two agents are named answer" in twice


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


@contextmanager
def serving(directory: Path, *options: str) -> Generator[tuple[subprocess.Popen[str], str]]:
    """`stepwell serve` in a process of its own, and its URL."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("STEPWELL_")}
    argv = [sys.executable, "-m", "stepwell.cli", "serve", *options, "--port", "0", "--json", "--models", "offline"]
    with subprocess.Popen(
        argv, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield server, json.loads(server.stdout.readline())["url"]
        finally:
            server.kill()


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_an_agent_is_served_and_watched(command: Command, tmp_path: Path) -> None:
    (tmp_path / "an_agent.py").write_text(AGENT)
    transport = {"event-id": "e-1", "codec-message-id": "m-1"}
    [said] = UIMessageCodec().encode_input(UIMessageCodec().create_user_message("hi"), transport)
    with serving(tmp_path, "--agent", "an_agent.py:answer", "--channels", "sqlite:///c.db") as (server, url):
        message = {"name": said.name, "data": said.data, "extras": said.extras}
        post(f"{url}/v1/sessions/s1/inputs", {"messages": [message]})
        run = post(f"{url}/v1/sessions/s1/invocations", {"inputEventId": "e-1", "sessionName": "s1"})
        with urllib.request.urlopen(f"{url}/v1/sessions/s1/events?history=1", timeout=20) as events:
            assert any(b"ai-run-end" in line for line in events)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
    ran = command("watch", "s1", "--channels", f"sqlite:///{tmp_path / 'c.db'}", "--once", "--json")
    [snapshot] = ran.lines
    texts = ["".join(part.get("text", "") for part in one["message"]["parts"]) for one in snapshot["messages"]]
    assert texts == ["hi", "You said hi."]
    assert [(one["runId"], one["status"]) for one in snapshot["runs"]] == [(run["runId"], "complete")]


def test_a_server(tmp_path: Path) -> None:
    with serving(tmp_path, str(HOTEL)) as (server, url):
        result = post(f"{url}/v1/flows/HotelFlow/turns", {"message": "Hello!"})
        assert result["success"]
        assert "welcome to Stepwell Travel" in result["message"]
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=30)
    assert server.returncode == 0
    assert "/v1/flows/{id}/turns 200" in log
    assert "welcome" not in log
    assert (tmp_path / "stepwell.db").exists()


def test_turns_of_flows_are_on_their_channels(command: Command, tmp_path: Path) -> None:
    place = "sqlite:///one.db"
    with serving(tmp_path, str(HOTEL), "--store", place, "--channels", place) as (server, url):
        request = urllib.request.Request(
            f"{url}/v1/flows/HotelFlow/turns",
            json.dumps({"message": "Hello!"}).encode(),
            {"Content-Type": "application/json", "Accept": "text/event-stream"},
        )
        with urllib.request.urlopen(request, timeout=20) as events:
            lines = [line.decode() for line in events]
        result = json.loads(lines[-2].removeprefix("data: "))
        assert "event: message\n" in lines
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=30)
    assert server.returncode == 0
    ran = command("watch", result["session_id"], "--channels", f"sqlite:///{tmp_path / 'one.db'}", "--once", "--json")
    [snapshot] = ran.lines
    texts = ["".join(part.get("text", "") for part in one["message"]["parts"]) for one in snapshot["messages"]]
    assert texts == ["Hello!", result["message"]]


def test_tokens(command: Command, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import time

    import jwt

    secret = "a secret of more than sixty-four bytes, made by nobody in particular, for tests"
    file = tmp_path / "secret"
    file.write_text(secret)
    assert command("serve", HOTEL).code == 0
    assert given["jwt"] is None
    command("serve", HOTEL, "--jwt-key-file", str(file), "--jwt-issuer", "us", "--jwt-audience", "shop")
    claims = {"sub": "ana", "iss": "us", "aud": "shop", "exp": time.time() + 60, "capabilities": "read"}
    assert given["jwt"].verify(jwt.encode(claims, secret, "HS256")).subject == "ana"
    command("serve", HOTEL, "--jwt-key-file", str(file), "--no-auth")
    assert given["jwt"] is None
    monkeypatch.setenv("STEPWELL_JWT_SECRET", secret)
    command("serve", HOTEL)
    assert given["jwt"].verify(jwt.encode({**claims, "aud": "stepwell"}, secret, "HS256")).subject == "ana"
    assert "one of them" in command.fails("serve", HOTEL, "--jwt-key-file", str(file), code=2)
    monkeypatch.delenv("STEPWELL_JWT_SECRET")
    assert "cannot be read" in command.fails("serve", HOTEL, "--jwt-key-file", "/nowhere", code=2)
