"""Who may call, what every response carries, what is logged, and errors that nobody expected."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import httpx
import pytest

from server.kit import FLOWS, application, served
from stepwell.errors import InvalidInputError, MigrationError, NewerSchemaError
from stepwell.server import create_app, serve
from stepwell.server._access import is_loopback
from stepwell.testing import ScriptedModel

pytestmark = pytest.mark.anyio

KEYS = ["alice:k-alice", "k-plain"]


async def status(path: str = "/v1/flows", *, method: str = "GET", app: Any = None, **options: Any) -> int:
    headers = options.pop("headers", {})
    async with served(app=app, **options) if app else served(**options) as s:
        return (await s.client.request(method, path, headers=headers)).status_code


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Bearer k-alice"}, 200),
        ({"Authorization": "bearer  k-plain "}, 200),
        ({"X-API-Key": "k-plain"}, 200),
        ({"X-API-Key": "k-plai"}, 401),
        ({"X-API-Key": "alice:k-alice"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic k-plain"}, 401),
        ({"Authorization": b"Bearer \xff\xfe"}, 401),
        ({"X-API-Key": ""}, 401),
    ],
)
async def test_keys(headers: Any, expected: int) -> None:
    async with served(api_keys=KEYS) as s:
        for path in ("/v1/flows", "/openapi.json", "/nothing", "/v1/sessions/x"):
            answer = await s.client.get(path, headers=headers)
            if expected == 401:
                assert answer.status_code == 401
                assert answer.json()["code"] == "unauthenticated"
                assert answer.headers["www-authenticate"].startswith("Bearer")
            else:
                assert answer.status_code != 401
        for path in ("/healthz", "/readyz"):
            assert (await s.client.get(path, headers=headers)).status_code == 200


async def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_API_KEYS", " bob:k-bob , k-other,")
    assert await status() == 401
    for key in ("k-bob", "k-other"):
        assert await status(headers={"X-API-Key": key}) == 200
    # Given ones count instead.
    assert await status(api_keys=["x"], headers={"X-API-Key": "k-bob"}) == 401
    assert await status(no_auth=True) == 200


@pytest.mark.parametrize("key", ["", "a b", "ä", ":k", "na me:k", "-:k", "x:"])
def test_a_key_that_cannot_be_one_is_refused(key: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        application(ScriptedModel(), api_keys=[key])
    assert caught.value.pointer == "/api_keys"
    assert not key or repr(key) not in caught.value.message


async def test_keys_are_asked_for_from_anywhere() -> None:
    options: dict[str, Any] = {"api_keys": KEYS, "client": {"peer": ("203.0.113.9", 1), "base_url": "http://api.org"}}
    assert await status(**options) == 401
    assert await status(headers={"X-API-Key": "k-plain", "Origin": "https://x.org"}, **options) == 200


@pytest.mark.parametrize(
    ("peer", "base", "headers", "expected"),
    [
        (("127.0.0.1", 1), "http://localhost:8000", {}, 200),
        (("127.8.0.1", 1), "http://127.0.0.1", {}, 200),
        (("::1", 1), "http://[::1]:8000", {}, 200),
        (("::ffff:127.0.0.1", 1), "http://localhost", {}, 200),
        (("203.0.113.9", 1), "http://localhost", {}, 401),
        (None, "http://localhost", {}, 401),
        (("testclient", 1), "http://localhost", {}, 401),
        (("127.0.0.1", 1), "http://localhost", {"X-Forwarded-For": "203.0.113.9"}, 401),
        (("127.0.0.1", 1), "http://localhost", {"Forwarded": "for=203.0.113.9"}, 401),
        (("127.0.0.1", 1), "http://rebound.example.org", {}, 421),
        (("127.0.0.1", 1), "http://localhost.example.org", {}, 421),
        (("127.0.0.1", 1), "http://localhost", {"Origin": "https://x.org"}, 403),
        (("127.0.0.1", 1), "http://localhost", {"Origin": "null"}, 403),
        (("127.0.0.1", 1), "http://localhost:80", {"Origin": "http://localhost"}, 200),
    ],
)
async def test_without_keys_only_this_machine_may_call(
    peer: Any, base: str, headers: dict[str, str], expected: int
) -> None:
    async with served(client={"peer": peer, "base_url": base}) as s:
        answer = await s.client.post("/ai/end", headers=headers)
        assert answer.status_code == expected
        if expected != 200:
            assert answer.headers["content-type"] == "application/problem+json"
        assert (await s.client.get("/healthz", headers=headers)).status_code == 200


async def test_with_no_auth_everybody_may() -> None:
    options: dict[str, Any] = {"no_auth": True, "client": {"peer": ("203.0.113.9", 1), "base_url": "http://api.org"}}
    assert await status("/ai/end", method="POST", headers={"Origin": "https://x.org"}, **options) == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("no_auth", [False, True])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_serve_does_not_open_itself_to_others_without_keys(
    host: str, no_auth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEPWELL_API_KEYS", raising=False)
    keys = ["k"] if no_auth else None
    with pytest.raises(InvalidInputError, match="STEPWELL_API_KEYS") as caught:
        serve(flows=FLOWS, models={"scripted": ScriptedModel()}, host=host, no_auth=no_auth, api_keys=keys)
    assert caught.value.pointer == "/host"


def test_serve_says_why_it_cannot_listen() -> None:
    with pytest.raises(InvalidInputError, match=r"Cannot listen on 127\.0\.0\.1 port 99999"):
        serve(flows=FLOWS, models={"scripted": ScriptedModel()}, port=99999)
    with pytest.raises(InvalidInputError, match=r"Cannot listen on 203\.0\.113\.9 port 0"):
        serve(flows=FLOWS, models={"scripted": ScriptedModel()}, host="203.0.113.9", port=0, api_keys=["k"])


# -- what responses carry


async def test_security_headers_are_on_every_response() -> None:
    async with served(api_keys=KEYS) as s:
        for path in ("/healthz", "/nothing", "/v1/flows"):
            headers = (await s.client.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
            assert headers["referrer-policy"] == "no-referrer"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "access-control-allow-origin" not in headers


async def test_pages_of_other_origins_may_call_when_told_so() -> None:
    origin = {"Origin": "https://app.example.org"}
    async with served(cors=["https://app.example.org"], api_keys=KEYS) as s:
        ask = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = await s.client.options("/v1/flows/TalkFlow/turns", headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin["Origin"]
        refused = await s.client.get("/v1/flows", headers=origin)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin["Origin"])
        assert "CHAT_SESSION_ID" in refused.headers["access-control-expose-headers"]
        other = await s.client.options("/v1/flows", headers={**ask, "Origin": "https://evil.example.org"})
        assert other.status_code == 400
    async with served(cors=["https://app.example.org"]) as s:  # on this machine without keys
        assert (await s.client.post("/ai/end", headers=origin)).status_code == 200
        assert (await s.client.post("/ai/end", headers={"Origin": "https://evil.org"})).status_code == 403


# -- logs


async def test_the_access_log_names_no_session_and_no_content(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "stepwell.server")
    async with served("My secret reply.", api_keys=KEYS) as s:
        key = {"X-API-Key": "k-alice"}
        session = (await s.turn("my secret message", headers=key)).json()["session_id"]
        await s.client.get(f"/v1/sessions/{session}?flow=secret", headers=key)
        await s.client.get(f"/{session}", headers={"X-API-Key": "wrong-secret"})
    lines = [record.getMessage() for record in caplog.records if record.name == "stepwell.server.access"]
    assert [line.split(" ")[:3] + line.split(" ")[-1:] for line in lines] == [
        ["POST", "/v1/flows/{id}/turns", "200", "alice"],
        ["GET", "/v1/sessions/{id}", "200", "alice"],
        ["GET", "-", "401", "-"],
    ]
    text = " ".join(record.getMessage() for record in caplog.records if record.name.startswith("stepwell.server"))
    assert session not in text
    assert "secret" not in text


async def test_an_unexpected_error_leaks_nothing_and_can_be_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(**kwargs: Any) -> Any:
        raise RuntimeError("secret internals at /srv/private")

    async with served() as s:
        monkeypatch.setattr(s.engine, "list_sessions", broken)
        answer = await s.client.get("/v1/sessions")
    assert answer.status_code == 500
    problem = answer.json()
    assert problem["code"] == "internal"
    assert "private" not in answer.text
    assert problem["instance"].startswith("urn:uuid:")
    assert problem["instance"] in caplog.text
    assert "secret internals at /srv/private" in caplog.text
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("error", [NewerSchemaError("Newer."), MigrationError("No way from 1 to 2.")])
async def test_what_the_operator_must_see_to_is_said(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*args: Any, **kwargs: Any) -> Any:
        raise error

    async with served("Hello.") as s:
        session = (await s.turn()).json()["session_id"]
        monkeypatch.setattr(s.engine.store, "acquire", broken)
        answer = await s.turn("more", session_id=session)
        assert answer.status_code == 500
        assert answer.json()["detail"] == str(error)


async def test_an_author_error_outside_a_turn_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.errors import HandlerError

    async def broken(**kwargs: Any) -> Any:
        raise HandlerError("secret internals")

    async with served() as s:
        monkeypatch.setattr(s.engine, "list_sessions", broken)
        answer = await s.client.get("/v1/sessions")
        assert (answer.status_code, answer.json()["code"]) == (500, "handler")
        assert "secret" not in answer.text


async def test_half_a_response_is_not_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    app = application(ScriptedModel())
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            raise OSError("gone")

    scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": [], "query_string": b""}
    with pytest.raises(OSError, match="gone"):
        await app(scope, receive, send)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_a_websocket_is_closed() -> None:
    app = application(ScriptedModel())
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": "/v1/flows", "headers": []}, receive, send)
    assert sent[0]["type"] == "websocket.close"


def test_create_app_wants_an_engine_or_the_flows_of_one() -> None:
    with pytest.raises(TypeError, match="needs an engine"):
        create_app()
    engine = application(ScriptedModel()).engine
    with pytest.raises(TypeError, match="either"):
        create_app(engine, store="sqlite:///x.db")


def test_without_the_extra_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None\ntry: import stepwell.server\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 'The HTTP server needs the extra "server": pip install "stepwell[server]".\n'


def test_importing_stepwell_does_not_import_the_server() -> None:
    code = "import sys, stepwell; print({'starlette', 'uvicorn', 'stepwell.server'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_httpx_is_what_the_tests_think() -> None:
    # `served` relies on it: a peer that is not given is loopback.
    assert httpx.ASGITransport(application(ScriptedModel())).client == ("127.0.0.1", 123)
