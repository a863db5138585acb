"""Input that is refused: before the engine sees it, with a status, a code and a pointer."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.kit import FLOWS, served
from stepwell.server import _bodies
from stepwell.testing import ScriptedModel

pytestmark = pytest.mark.anyio

TURNS = "/v1/flows/TalkFlow/turns"
JSON = {"Content-Type": "application/json"}


def deep(levels: int) -> bytes:
    return b'{"message": "x", "config": {"a": ' + b"[" * levels + b"]" * levels + b"}}"


def check_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == code
    assert problem["status"] == status
    assert {"type", "title", "detail", "session_id", "retryable"} <= problem.keys()
    assert problem["detail"].endswith(".")
    return dict(problem)


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        (b"", 400, "malformed_json", None),
        (b"{", 400, "malformed_json", None),
        (b"hello", 400, "malformed_json", None),
        (b'{"message": NaN}', 400, "malformed_json", None),
        (b'{"message": "x", "config": {"a": -Infinity}}', 400, "malformed_json", None),
        (b'{"message": "\xff"}', 400, "malformed_json", None),
        ('{"message": "x"}'.encode("utf-16"), 400, "malformed_json", None),
        (b'\xef\xbb\xbf{"message": "x"}', 400, "malformed_json", None),
        (b'{"message": "x"} {}', 400, "malformed_json", None),
        (b'{"message": "x", "config": {"n": 1' + b"0" * 5000 + b"}}", 400, "malformed_json", None),
        (b'{"message": "\\ud800"}', 422, "invalid_input", "/message"),
        (b'{"message": "a\\udc00b"}', 422, "invalid_input", "/message"),
        (b'{"message": "x", "config": {"a": ["\\ud800"]}}', 422, "invalid_input", "/config/a/0"),
        (b'{"message": "x", "config": {"\\ud800": 1}}', 422, "invalid_input", "/config/?"),
        (b'{"message": "x", "config": {"a": 1e999}}', 422, "invalid_input", "/config/a"),
        (b"[]", 422, "invalid_input", ""),
        (b'"x"', 422, "invalid_input", ""),
        (b"null", 422, "invalid_input", ""),
        (b"7", 422, "invalid_input", ""),
        (b'{"message": 7}', 422, "invalid_input", "/message"),
        (b'{"message": []}', 422, "invalid_input", "/message"),
        (b'{"message": ""}', 422, "invalid_input", "/message"),
        (b'{"message": "  \\n"}', 422, "invalid_input", "/message"),
        (b"{}", 422, "invalid_input", "/message"),
        (b'{"message": {}}', 422, "invalid_input", "/message/parts"),
        (b'{"message": {"parts": []}}', 422, "invalid_input", "/message/parts"),
        (b'{"message": {"parts": [7]}}', 422, "invalid_input", "/message/parts/0"),
        (b'{"message": {"parts": [{"type": "sound"}]}}', 422, "invalid_input", "/message/parts/0"),
        (b'{"message": {"parts": [{"type": "text"}]}}', 422, "invalid_input", "/message/parts/0/text"),
        (b'{"message": {"parts": [{"type": "text", "text": 1}]}}', 422, "invalid_input", "/message/parts/0/text"),
        (b'{"message": {"parts": [{"type": "text", "text": " "}]}}', 422, "invalid_input", "/message"),
        (
            b'{"message": {"parts": [{"type": "text", "text": "a", "a/b": 1}]}}',
            422,
            "invalid_input",
            "/message/parts/0/a~1b",
        ),
        (
            b'{"message": {"parts": [{"type": "file", "media_type": "a/b"}]}}',
            422,
            "invalid_input",
            "/message/parts/0",
        ),
        (
            b'{"message": {"parts": [{"type": "file", "media_type": "a/b", "data": "abc"}]}}',
            422,
            "invalid_input",
            "/message/parts/0",
        ),
        (
            b'{"message": {"parts": [{"type": "file", "media_type": "a/b", "url": "file:///etc/passwd"}]}}',
            422,
            "invalid_input",
            "/message/parts/0/url",
        ),
        (b'{"message": "x", "session_id": 7}', 422, "invalid_input", "/session_id"),
        (b'{"message": "x", "session_id": "a b"}', 422, "invalid_input", "/session_id"),
        (b'{"message": "x", "config": []}', 422, "invalid_input", "/config"),
        (b'{"message": "x", "on_busy": "panic"}', 422, "invalid_input", "/on_busy"),
        (b'{"message": "x", "massage": "y"}', 422, "invalid_input", "/massage"),
        (b'{"message": "x", "session_id": "unknown"}', 404, "unknown_session", None),
        (deep(200), 413, "input_too_large", None),
        (deep(100_000), 413, "input_too_large", None),
        (b"[" * 100_000, 413, "input_too_large", None),
        (b'{"message": "\\ud800", "config": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}", 413, "input_too_large", None),
        (
            b'{"message": "\\ud800", "config": {"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}}",
            413,
            "input_too_large",
            None,
        ),
        (b'{"message": "' + b"x" * 2_000_000 + b'"}', 413, "input_too_large", "/message"),
        (b'{"message": "' + b"x" * 5_000_000 + b'"}', 413, "input_too_large", None),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_bad_bodies_are_typed_refusals(body: bytes, status: int, code: str, pointer: str | None) -> None:
    async with served() as s:
        answer = await s.client.post(TURNS, content=body, headers=JSON)
        problem = check_problem(answer, status, code)
        assert (problem.get("errors") or [{}])[0].get("pointer") == pointer
        assert await s.engine.list_sessions() == ([], None)


async def test_every_field_at_fault_is_named() -> None:
    async with served() as s:
        answer = await s.client.post(TURNS, json={"message": 1, "session_id": 2, "config": 3})
        assert [error["pointer"] for error in answer.json()["errors"]] == ["/message", "/session_id", "/config"]


async def test_a_repeated_key_is_fine_the_last_one_counts() -> None:
    async with served("Hello.") as s:
        answer = await s.client.post(TURNS, content=b'{"message": 1, "message": "x"}', headers=JSON)
        assert answer.json()["message"] == "Hello."


async def test_a_nesting_that_is_allowed_is_taken() -> None:
    async with served("Hello.") as s:
        answer = await s.client.post(TURNS, content=deep(90), headers=JSON)
        assert answer.json()["success"]


async def test_an_unknown_flow_is_named_with_what_there_is() -> None:
    async with served() as s:
        problem = check_problem(await s.turn(flow="NoFlow"), 404, "unknown_flow")
        assert "TalkFlow" in problem["detail"]


async def test_a_session_of_another_flow_is_refused() -> None:
    async with served("Hello.") as s:
        session = (await s.turn()).json()["session_id"]
        problem = check_problem(await s.turn(flow="HookFlow", session_id=session), 422, "invalid_input")
        assert problem["errors"][0]["pointer"] == "/session_id"
        assert problem["session_id"] == session


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "json"]
)
async def test_a_body_that_does_not_say_it_is_json_is_refused(kind: str | None) -> None:
    async with served() as s:
        headers = {"Content-Type": kind} if kind else {}
        answer = await s.client.post(TURNS, content=b'{"message": "x"}', headers=headers)
        problem = check_problem(answer, 415, "unsupported_media_type")
        assert "application/json" in problem["detail"]


@pytest.mark.parametrize("kind", ["application/json", 'Application/JSON; charset="UTF-8"', "application/x+json"])
async def test_ways_to_say_json(kind: str) -> None:
    async with served("Hello.") as s:
        answer = await s.client.post(TURNS, content=b'{"message": "x"}', headers={"Content-Type": kind})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/event-stream", "text/event-stream"),
        ("text/event-stream;q=0.9, text/html", "text/event-stream"),
        ("text/event-stream, application/json", "text/event-stream"),
        ("application/json, text/event-stream", "application/json"),
        ("text/html, */*", "application/json"),
        ("application/json", "application/json"),
    ],
)
async def test_a_client_gets_the_kind_that_it_names_first(accept: str, kind: str) -> None:
    async with served("Hello.") as s:
        answer = await s.turn(headers={"Accept": accept})
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == kind


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", TURNS, {"POST"}),
        ("GET", TURNS, {"POST"}),
        ("POST", "/v1/flows", {"GET", "HEAD"}),
        ("POST", "/v1/sessions/x", {"GET", "HEAD", "DELETE"}),
        ("GET", "/v1/sessions/x/cancel", {"POST"}),
        ("DELETE", "/healthz", {"GET", "HEAD"}),
    ],
)
async def test_a_wrong_method_is_told_the_right_one(method: str, path: str, allowed: set[str]) -> None:
    async with served() as s:
        answer = await s.client.request(method, path)
        check_problem(answer, 405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/flows/", "/v1/flows/TalkFlow", "/v1/sessions/a/b", "/nothing"])
async def test_an_unknown_route_points_to_the_document(path: str) -> None:
    async with served() as s:
        assert "/openapi.json" in check_problem(await s.client.get(path), 404, "unknown_route")["detail"]


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=many", "limit"),
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("status=tired", "status"),
        ("after=x", "after"),
        ("color=red", "color"),
    ],
)
async def test_wrong_query_parameters_are_named(query: str, parameter: str) -> None:
    async with served() as s:
        problem = check_problem(await s.client.get(f"/v1/sessions?{query}"), 422, "invalid_input")
        assert [error["parameter"] for error in problem["errors"]] == [parameter]


@pytest.mark.parametrize("session", ["unknown", "a%20b", "x" * 129, "%F0%9F%98%80"])
async def test_unknown_sessions(session: str) -> None:
    async with served() as s:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            check_problem(await s.client.request(method, f"/v1/sessions/{session}{path}"), 404, "unknown_session")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"reason": 1}', b'{"why": "x"}'])
async def test_a_cancel_checks_its_body(body: bytes) -> None:
    async with served() as s:
        answer = await s.client.post("/v1/sessions/x/cancel", content=body, headers=JSON)
        assert answer.status_code == (400 if body == b"{" else 422)


# -- reading


async def test_a_chunked_body_is_counted_while_it_is_read() -> None:
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b"x" * 100_000

    async with served() as s:
        answer = await s.client.post(TURNS, content=chunks(), headers=JSON)
        check_problem(answer, 413, "input_too_large")


async def test_a_chunked_body_may_pass_the_limit_with_its_last_piece() -> None:
    async def chunks() -> Any:
        yield b"x" * 8
        yield b"x" * 8

    async with served(body_bytes=10) as s:
        check_problem(await s.client.post(TURNS, content=chunks(), headers=JSON), 413, "input_too_large")


async def test_the_limit_of_a_body_can_be_set() -> None:
    async with served(body_bytes=10) as s:
        assert "10 bytes" in check_problem(await s.turn(), 413, "input_too_large")["detail"]


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bodies, "BODY_SECONDS", 0.01)

    async def never() -> Any:
        yield b"{"
        await anyio.sleep_forever()

    async with served() as s:
        answer = await s.client.post(TURNS, content=never(), headers=JSON)
        assert check_problem(answer, 408, "request_timeout")["retryable"]


async def test_a_body_that_breaks_off_is_refused() -> None:
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": TURNS,
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "query_string": b"",
        "client": ("127.0.0.1", 1),
    }
    async with served() as s:
        await s.app(scope, receive, send)
    assert sent[0]["status"] == 400


async def test_with_expect_continue_nothing_is_read_of_a_body_that_is_too_large() -> None:
    async def receive() -> Any:
        raise AssertionError("read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-length", b"9999999"), (b"expect", b"100-continue")]
    scope = {"type": "http", "method": "POST", "path": TURNS, "headers": headers, "query_string": b""}
    async with served() as s:
        await s.app({**scope, "client": ("127.0.0.1", 1)}, receive, send)
    assert sent[0]["status"] == 413


# -- anything at all

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
turn_bodies = st.fixed_dictionaries(
    {},
    optional={
        "message": json_values
        | st.fixed_dictionaries(
            {
                "parts": st.lists(
                    st.fixed_dictionaries(
                        {"type": st.sampled_from(["text", "file", "x"])},
                        optional=dict.fromkeys(("text", "data", "url", "media_type", "name"), json_values),
                    ),
                    max_size=3,
                )
            }
        ),
        "session_id": json_values,
        "config": json_values,
        "on_busy": json_values | st.sampled_from(["queue", "reject"]),
        "flowName": json_values | st.sampled_from([flow.id for flow in FLOWS]),
    },
)
bodies = st.binary(max_size=60) | (json_values | turn_bodies).map(lambda value: json.dumps(value).encode())
paths = st.sampled_from([TURNS, "/v1/flows/SilentFlow/turns", "/ai/run", "/v1/sessions/x/cancel", "/ai/end"])
headers = st.dictionaries(
    st.sampled_from(["Idempotency-Key", "CHAT_SESSION_ID", "CHAT-SESSION-ID", "Accept", "Expect", "Origin"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20),
    max_size=2,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=paths, body=bodies, extra=headers)
async def test_no_body_is_a_500(path: str, body: bytes, extra: dict[str, str]) -> None:
    raw = [(b"content-type", b"application/json")]
    raw += [(name.encode(), value.strip().encode("latin-1")) for name, value in extra.items()]
    async with served(default="Hello.") as s:
        answer = await s.client.post(path, content=body, headers=raw)
    assert answer.status_code < 500, answer.text
    if answer.status_code != 204:
        answer.json()


@settings(max_examples=100, deadline=None)
@given(path=st.binary(max_size=30), query=st.text(max_size=30))
async def test_no_path_is_a_500(path: bytes, query: str) -> None:
    async with served() as s:
        for prefix in ("/", "/v1/sessions/", "/v1/flows/"):
            assert (await s.client.get(prefix + quote(path, safe="/"))).status_code < 500
        answer = await s.client.get("/v1/sessions", params={"flow": query, "after": query})
        assert answer.status_code < 500


def test_the_scripted_model_is_never_asked_for_what_is_refused() -> None:
    # `served` checks the script on leaving; this is what it relies on.
    model = ScriptedModel(["never"])
    with pytest.raises(AssertionError):
        model.assert_done()
