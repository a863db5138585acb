"""`stepwell demo`: the hotel, with whatever model there is."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import stepwell
from cli.kit import HOTEL, Command
from stepwell.cli._demo import choose
from stepwell.errors import LlmSetupError

TALK = (HOTEL / "conversation.txt").read_text()


def test_the_conversation_of_the_example_books_a_room(command: Command, tmp_path: Path) -> None:
    ran = command("demo", stdin=TALK)
    assert ran.code == 0, ran
    assert ran.err == ""
    assert "You talk to a rule-based offline model: no weights, no network, no key." in ran.out
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENAI_BASE_URL (and OPENAI_MODEL)"):
        assert variable in ran.out
    assert "  confirm_booking()" in ran.out
    assert "Booked under SW-" in ran.out
    assert "Goodbye, Ada Lovelace." in ran.out
    assert "The session is completed." in ran.out
    session = ran.out.split()[-1]
    assert (tmp_path / "stepwell.db").exists()
    assert command("sessions", "show", session).out.count("you >") == 14


def test_as_json(command: Command) -> None:
    ran = command("demo", "--json", "--store", "memory://", stdin="Hello!\nI'd like a few days in Lisbon\n")
    assert ran.code == 0
    assert [result["current"] for result in ran.lines] == ["ExploreStep", "ExploreStep"]
    assert "Lisbon" in ran.lines[1]["message"]


def test_it_goes_on_in_a_session(command: Command) -> None:
    first = command("demo", "--store", "sqlite:///d.db", stdin="I'd like a few days in Lisbon\n")
    assert "--store sqlite:///d.db" in first.out.splitlines()[-1]
    session = first.out.splitlines()[-1].split()[1].removesuffix(".")
    again = command("demo", "--store", "sqlite:///d.db", "--session", session, stdin="12 to 15 May\n")
    assert again.code == 0
    assert "goes on in ExploreStep" in again.out
    assert "Say for example" not in again.out
    assert "Noted: Lisbon, 12 May to 15 May" in again.out


def test_a_banner_on_a_screen_names_the_model(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "90")):
        monkeypatch.setenv(name, value)
    ran = command("demo", "--store", "memory://", stdin="")
    assert "╭─" in ran.out
    assert "rule-based offline model" in ran.out
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-tests")
    ran = command("demo", "--store", "memory://", stdin="")
    assert ran.code == 0
    assert "You talk to" in ran.out
    assert "openai:gpt-5.1" in ran.out
    assert "rule-based" not in ran.out
    assert "secret" not in ran.out + ran.err
    ran = command("demo", "--model", "offline:rules", "--store", "memory://", stdin="")
    assert "rule-based" in ran.out


def test_a_model_that_is_none(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "set ANTHROPIC_API_KEY" in command.fails("demo", "--model", "anthropic:claude-haiku-4-5", code=2)
    assert "offline:rules" in command.fails("demo", "--model", "offline:poet", code=2)
    monkeypatch.setenv("STEPWELL_MODEL", "nonsense")
    command.fails("demo", code=2)


@pytest.mark.parametrize(
    ("env", "model"),
    [
        ({}, "offline:rules"),
        ({"OPENAI_API_KEY": " "}, "offline:rules"),
        ({"OPENAI_API_KEY": "k"}, "openai:gpt-5.1"),
        ({"OPENAI_API_KEY": "k", "OPENAI_MODEL": "gpt-4o", "GEMINI_API_KEY": "k"}, "openai:gpt-4o"),
        ({"ANTHROPIC_API_KEY": "k"}, "anthropic:claude-haiku-4-5"),
        ({"ANTHROPIC_API_KEY": "k", "ANTHROPIC_MODEL": "claude-opus-4-5"}, "anthropic:claude-opus-4-5"),
        ({"GEMINI_API_KEY": "k"}, "google:gemini-2.5-flash"),
        ({"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_MODEL": "mine"}, "openai:mine"),
        ({"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}, "openai:gpt-5.1"),
    ],
)
def test_the_environment_chooses_the_model(env: dict[str, str], model: str) -> None:
    providers, chosen = choose(None, env)
    assert chosen == model
    assert "offline" in providers


class Models(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that lists its models to those who have the key."""

    body = b""

    def do_GET(self) -> None:
        known = self.path == "/v1/models" and self.headers.get("Authorization") in (None, "Bearer k")
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        """One chat completion, streamed as OpenAI streams it."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = [f"I am {request['model']}", " and heard: ", request["messages"][-1]["content"]]
        chunks: list[dict[str, Any]] = [{"delta": {"role": "assistant", "content": word}} for word in words]
        chunks.append({"delta": {}, "finish_reason": "stop"})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for choice in chunks:
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": request["model"]}
            chunk["choices"] = [{"index": 0, "finish_reason": None, **choice}]
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"data": [{"id": "local-7b"}, {"id": "other"}]}', "openai:local-7b"),
        (b'{"data": []}', "openai:gpt-5.1"),
        (b"[]", "openai:gpt-5.1"),
        (b"hello", "openai:gpt-5.1"),
    ],
)
@pytest.mark.parametrize("key", [{}, {"OPENAI_API_KEY": "k"}])
def test_a_server_of_ones_own_is_asked_for_its_model(
    served: str, monkeypatch: pytest.MonkeyPatch, body: bytes, model: str, key: dict[str, str]
) -> None:
    monkeypatch.setattr(Models, "body", body)
    assert choose(None, {"OPENAI_BASE_URL": served, **key})[1] == model


def test_the_same_command_talks_to_a_real_endpoint(
    command: Command, served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Models, "body", b'{"data": [{"id": "local-7b"}]}')
    monkeypatch.setenv("OPENAI_BASE_URL", served)
    ran = command("demo", "--store", "memory://", stdin="Hello!\n")
    assert ran.code == 0, ran
    assert "You talk to openai:local-7b" in ran.out
    assert "you > Hello!\nI am local-7b and heard: Hello!\n" in ran.out
    monkeypatch.setenv("OPENAI_MODEL", "other")
    assert "I am other and heard: Hi" in command("demo", "--store", "memory://", stdin="Hi\n").out


def test_an_environment_that_is_wrong() -> None:
    with pytest.raises(LlmSetupError):
        choose(None, {"OPENAI_BASE_URL": "nowhere"})
    with pytest.raises(LlmSetupError):
        choose(None, {"OPENAI_API_KEY": "k", "OPENAI_MODEL": "gpt-5-pro"})  # not in this interface


def test_a_wheel_has_the_flow_with_it_and_without_there_is_a_sentence(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "stepwell"
    package.mkdir(parents=True)
    monkeypatch.setattr(stepwell, "__file__", str(package / "__init__.py"))
    assert "not installed" in command.fails("demo", code=1)
    (package / "_demo").mkdir()
    (package / "_demo" / "hotel").symlink_to(HOTEL / "hotel")
    monkeypatch.setattr(stepwell, "__file__", str(package / "__init__.py"))
    # The real place is imported, and that is another one.
    assert command("demo", stdin="").code in (0, 2)
