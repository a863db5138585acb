"""JSON web tokens: which are accepted, what each may do, and on which sessions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest

from server.kit import Served, application, served
from stepwell.errors import InvalidInputError
from stepwell.server import JwtAuth, create_app
from stepwell.server._jwt import InvalidTokenError
from stepwell.testing import Reply, ScriptedModel

pytestmark = pytest.mark.anyio

SECRET = "a secret of more than sixty-four bytes, made by nobody in particular, for tests"
OTHER = "other " + SECRET


def token(secret: Any = SECRET, algorithm: str = "HS256", **claims: Any) -> str:
    said: dict[str, Any] = {"sub": "ana", "aud": "stepwell", "exp": time.time() + 600, "capabilities": ["admin"]}
    said |= claims
    return jwt.encode({key: value for key, value in said.items() if value is not None}, secret, algorithm)


def bearer(**claims: Any) -> dict[str, str]:
    return {"Authorization": f"Bearer {token(**claims)}"}


@pytest.mark.parametrize(
    ("presented", "why"),
    [
        (token(OTHER), "its signature is wrong"),
        (token(exp=time.time() - 60), "it has expired"),
        (token(exp=None), "a claim is missing"),
        (token(aud="elsewhere"), "it is for another audience"),
        (token(aud=None), "a claim is missing"),
        (token(sub=None), "a claim is missing"),
        (token(sub=""), "sub is text"),
        (token(sub="x" * 256), "sub is text"),
        (token(nbf=time.time() + 600), "it is not valid yet"),
        (token(algorithm="HS512"), "its algorithm is not the one"),
        (jwt.encode({"sub": "ana"}, "", "none"), "its algorithm is not the one"),
        (token(capabilities=7), "capabilities is an array"),
        (token(capabilities={"admin": True}), "capabilities is an array"),
        (token(sessions=[1]), "sessions is an array"),
        (token(sessions={}), "sessions is an array"),
        (token(session_prefix=""), "session_prefix is text"),
        (token(session_prefix=["a"]), "session_prefix is text"),
        (token(exp=1e400), "malformed"),
        ("a.b.c", "it is malformed"),
    ],
)
async def test_a_token_that_is_not_accepted_is_a_401_that_says_why(presented: str, why: str) -> None:
    async with served(jwt=JwtAuth(SECRET)) as s:
        answer = await s.client.get("/v1/flows", headers={"Authorization": f"Bearer {presented}"})
    assert answer.status_code == 401
    assert answer.json()["code"] == "unauthenticated"
    assert why in answer.json()["detail"]
    assert 'error="invalid_token"' in answer.headers["www-authenticate"]
    assert presented not in answer.text


async def test_a_claim_that_is_null_limits_nothing_away() -> None:
    # `sessions: null` is a claim that is there and says nothing: it must not open every session.
    auth = JwtAuth(SECRET)
    for claim in ("sessions", "session_prefix", "capabilities"):
        said = {"sub": "ana", "aud": "stepwell", "exp": time.time() + 600, claim: None}
        with pytest.raises(InvalidTokenError):
            auth.verify(jwt.encode(said, SECRET, "HS256"))


async def test_the_issuer_is_checked_where_one_is_named() -> None:
    auth = JwtAuth(SECRET, issuer="https://id.example.org", audience="shop")
    async with served(jwt=auth) as s:
        for claims, status in (
            ({"aud": "shop", "iss": "https://id.example.org"}, 200),
            ({"aud": ["other", "shop"], "iss": "https://id.example.org"}, 200),
            ({"aud": "shop", "iss": "https://evil.example.org"}, 401),
            ({"aud": "shop"}, 401),
            ({"iss": "https://id.example.org"}, 401),
        ):
            assert (await s.client.get("/v1/flows", headers=bearer(**claims))).status_code == status


async def test_api_keys_and_tokens_side_by_side() -> None:
    async with served(jwt=JwtAuth(SECRET), api_keys=["ops:some.api.key"]) as s:
        for headers in ({"X-API-Key": "some.api.key"}, {"Authorization": "Bearer some.api.key"}, bearer()):
            assert (await s.client.get("/v1/sessions", headers=headers)).status_code == 200
        assert (await s.client.get("/v1/sessions", headers={"X-API-Key": token()})).status_code == 401
        assert (await s.client.get("/v1/sessions")).status_code == 401
        assert (await s.client.get("/healthz")).status_code == 200


ASKS: list[tuple[str, str, str]] = [
    ("GET", "/v1/flows", "read"),
    ("GET", "/ai/flows", "read"),
    ("GET", "/v1/sessions/mine/events", "read"),
    ("POST", "/v1/flows/TalkFlow/turns", "run"),
    ("POST", "/v1/sessions/mine/invocations", "run"),
    ("POST", "/v1/sessions/mine/inputs", "run"),
    ("POST", "/ai/run", "run"),
    ("POST", "/v1/sessions/mine/steer", "run"),
    ("POST", "/v1/sessions/mine/answers", "run"),
    ("POST", "/v1/sessions/mine/cancel", "cancel"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/v1/sessions", "admin"),
    ("GET", "/v1/sessions/mine", "admin"),
    ("DELETE", "/v1/sessions/mine", "admin"),
    ("POST", "/ai/end", "admin"),
]


@pytest.mark.parametrize(("method", "path", "needed"), ASKS)
async def test_every_route_asks_for_its_capability(method: str, path: str, needed: str) -> None:
    async with served(jwt=JwtAuth(SECRET)) as s:
        for capability in ("run", "read", "cancel", "metrics", "admin", "nothing"):
            headers = {**bearer(capabilities=[capability]), "CHAT_SESSION_ID": "mine"}
            answer = await s.client.request(method, path, headers=headers)
            allowed = capability in (needed, "admin")
            refused = answer.status_code == 403
            assert refused is not allowed, (capability, answer.text)
            if refused:
                assert needed in answer.headers["www-authenticate"]


async def test_every_route_that_is_not_open_names_a_capability() -> None:
    app = application(ScriptedModel())
    without = {route.path for route in app.routes if route.needs is None and not route.open}
    assert without == {"/openapi.json"}


async def test_capabilities_may_be_words_of_the_claim_scope() -> None:
    async with served(jwt=JwtAuth(SECRET)) as s:
        headers = bearer(capabilities=None, scope="openid read")
        assert (await s.client.get("/v1/flows", headers=headers)).status_code == 200
        assert (await s.client.get("/v1/sessions", headers=headers)).status_code == 403


async def _turn(s: Served, session: str | None, **claims: Any) -> Any:
    return await s.turn("hello", session_id=session, headers=bearer(capabilities=["run", "cancel"], **claims))


@pytest.mark.parametrize(
    "limit",
    [{"session_prefix": "ana-"}, {"sessions": ["ana-1"]}, {"sessions": "ana-1"}],
)
async def test_a_token_is_limited_to_its_sessions(limit: dict[str, Any]) -> None:
    async with served("One.", "Two.", "Three.", jwt=JwtAuth(SECRET)) as s:
        first = await _turn(s, "ana-1", **limit)
        assert (first.status_code, first.json()["session_id"]) == (200, "ana-1"), first.text
        assert (await _turn(s, "ana-1", **limit)).json()["message"] == "Two."
        other = (await s.turn("hello", headers=bearer())).json()["session_id"]
        for session in (other, "bob-1", "an", None):
            refused = await _turn(s, session, **limit)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        headers = bearer(capabilities=["cancel"], **limit)
        assert (await s.client.post("/v1/sessions/ana-1/cancel", headers=headers)).json() == {"cancelled": False}
        for session in (other, "bob-1"):  # whether it is there or not
            assert (await s.client.post(f"/v1/sessions/{session}/cancel", headers=headers)).status_code == 403
        admin = bearer(**limit)
        assert (await s.client.get("/v1/sessions", headers=admin)).status_code == 403
        assert (await s.client.get("/v1/sessions/ana-1", headers=admin)).status_code == 200
        assert (await s.client.delete(f"/v1/sessions/{other}", headers=admin)).status_code == 403
        ended = await s.client.post("/ai/end", headers={**admin, "CHAT_SESSION_ID": other})
        assert ended.status_code == 403


async def test_a_token_with_no_session_reaches_none() -> None:
    async with served(jwt=JwtAuth(SECRET)) as s:
        assert (await _turn(s, "ana-1", sessions=[])).status_code == 403
        assert (await _turn(s, None, sessions=[])).status_code == 403


async def test_only_a_limited_token_names_the_session_it_begins() -> None:
    async with served(jwt=JwtAuth(SECRET)) as s:
        assert (await _turn(s, "nobody-knows-it")).status_code == 404


async def test_what_continues_an_ended_session_is_covered_with_it() -> None:
    leave = Reply.tool_call("leave")
    async with served(leave, leave, "Again.", "And again.", jwt=JwtAuth(SECRET)) as s:
        limit: dict[str, Any] = {"sessions": ["ana-1"], "capabilities": ["run"]}

        async def turn(session: str) -> Any:
            return await s.turn("hello", "WorkFlow", session_id=session, headers=bearer(**limit))

        assert (await turn("ana-1")).json()["completed"]
        second = (await turn("ana-1")).json()
        assert second["previous_session_id"] == "ana-1"
        assert second["completed"]
        third = (await turn(second["session_id"])).json()
        assert third["message"] == "Again."
        assert (await turn(third["session_id"])).json()["message"] == "And again."
        stranger = await s.turn(
            "hello", "WorkFlow", session_id=third["session_id"], headers=bearer(**{**limit, "sessions": ["bob-1"]})
        )
        assert stranger.status_code == 403


async def test_callers_with_the_same_idempotency_key_never_meet() -> None:
    async with served("To ana.", "To bob.", jwt=JwtAuth(SECRET)) as s:
        answers = [
            (await s.turn("hello", headers={**bearer(sub=sub), "Idempotency-Key": "k"})).json()
            for sub in ("ana", "bob", "ana")
        ]
        assert [answer["message"] for answer in answers] == ["To ana.", "To bob.", "To ana."]
        assert answers[0]["session_id"] == answers[2]["session_id"] != answers[1]["session_id"]


async def test_a_token_speaks_for_its_subject_alone() -> None:
    async with served(jwt=JwtAuth(SECRET), channels="memory://") as s:

        async def say(name: str | None, **claims: Any) -> Any:
            message = {"name": "ai-input", "data": "hi"} | ({"clientId": name} if name else {})
            return await s.client.post("/v1/sessions/s1/inputs", json={"messages": [message]}, headers=bearer(**claims))

        run = {"capabilities": ["run"]}
        assert (await say(None, **run)).status_code == 200
        assert (await say("ana", **run)).status_code == 200
        refused = await say("bob", **run)
        assert (refused.status_code, refused.json()["errors"][0]["pointer"]) == (403, "/messages/0/clientId")
        assert (await say("bob")).status_code == 200  # an administrator's service passes on what others say
        conversations = s.app.conversations
        assert conversations is not None
        said = await (await conversations.open("s1")).history()
        assert [item.client_id for item in reversed(said.items)] == ["ana", "ana", "bob"]
        cancel = {"messages": [{"name": "ai-cancel"}]}
        assert (await s.client.post("/v1/sessions/s1/inputs", json=cancel, headers=bearer(**run))).status_code == 403


async def test_the_log_does_not_name_the_subject(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "stepwell.server")
    async with served(jwt=JwtAuth(SECRET)) as s:
        await s.client.get("/v1/flows", headers=bearer(sub="ana@example.org"))
    [line] = [record.getMessage() for record in caplog.records if record.name == "stepwell.server.access"]
    assert " jwt:" in line
    assert "example" not in line


# -- keys


def _pem(make: Callable[[], Any]) -> tuple[Any, str]:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    private = make()
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return private, public.decode()


def _keys() -> list[tuple[str, Callable[[], Any]]]:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    return [
        ("RS256", lambda: rsa.generate_private_key(65537, 2048)),
        ("ES256", lambda: ec.generate_private_key(ec.SECP256R1())),
        ("EdDSA", ed25519.Ed25519PrivateKey.generate),
    ]


@pytest.mark.parametrize(("algorithm", "make"), _keys())
def test_a_public_key_pins_its_algorithm(algorithm: str, make: Callable[[], Any], tmp_path: Path) -> None:
    private, public = _pem(make)
    file = tmp_path / "key.pem"
    file.write_text(public)
    auth = JwtAuth(key_file=file)
    assert auth.verify(token(private, algorithm)).subject == "ana"
    with pytest.raises(InvalidInputError, match="does not fit the key"):
        JwtAuth(key_file=file, algorithm="HS256")
    # Signed with the public key as if it were a shared secret: an old attack.
    import base64
    import hashlib
    import hmac
    import json

    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    claims = {"sub": "ana", "aud": "stepwell", "exp": time.time() + 600, "capabilities": ["admin"]}
    head = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}"
    mac = hmac.new(public.strip().encode(), head.encode(), hashlib.sha256).digest()
    forged = f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
    with pytest.raises(InvalidTokenError, match="algorithm"):
        auth.verify(forged)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "one of them"),
        ({"secret": SECRET, "key_file": "x"}, "one of them"),
        ({"secret": "short"}, "at least 32 bytes"),
        ({"secret": SECRET[:63], "algorithm": "HS512"}, "at least 64 bytes"),
        ({"secret": SECRET, "algorithm": "none"}, "does not fit"),
        ({"secret": SECRET, "algorithm": "RS256"}, "does not fit"),
        ({"key_file": "/nowhere/key.pem"}, "cannot be read"),
    ],
)
def test_keys_that_cannot_be_used(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInputError, match=why) as caught:
        JwtAuth(**options)
    assert SECRET not in caught.value.message


def test_a_private_key_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = ec.generate_private_key(ec.SECP256R1())
    file = tmp_path / "key.pem"
    file.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(InvalidInputError, match="no public key"):
        JwtAuth(key_file=file)


async def test_the_environment_says_which_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    monkeypatch.setenv("STEPWELL_JWT_KEY_FILE", str(file))
    monkeypatch.setenv("STEPWELL_JWT_AUDIENCE", "shop")
    monkeypatch.setenv("STEPWELL_JWT_ISSUER", "us")
    monkeypatch.setenv("STEPWELL_JWT_ALGORITHM", "HS512")
    async with served() as s:
        good = token(aud="shop", iss="us", algorithm="HS512")
        assert (await s.client.get("/v1/flows", headers={"Authorization": f"Bearer {good}"})).status_code == 200
        assert (await s.client.get("/v1/flows", headers=bearer())).status_code == 401
        assert (await s.client.get("/v1/flows")).status_code == 401
    monkeypatch.setenv("STEPWELL_JWT_SECRET", SECRET)
    with pytest.raises(InvalidInputError, match="one of them"):
        create_app(application(ScriptedModel(), no_auth=True).engine)
