"""The OpenAPI document: valid, complete, and what the routes really do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.applications import Starlette
from starlette.routing import Mount

from server.kit import application, served, until
from stepwell.server._routes import ROUTES
from stepwell.testing import Reply, ScriptedModel

pytestmark = pytest.mark.anyio


async def document(**options: Any) -> dict[str, Any]:
    async with served(**options) as s:
        return dict((await s.client.get("/openapi.json", headers={"X-API-Key": "k"})).json())


@pytest.mark.parametrize("keys", [None, ["k"]])
async def test_the_document_is_valid(keys: Any) -> None:
    spec = await document(api_keys=keys)
    OpenAPIV31SpecValidator(spec).validate()
    assert spec["openapi"] == "3.1.0"
    assert spec["security"] == ([{"bearer": []}, {"key": []}] if keys else [])
    assert spec["servers"] == [{"url": "/"}]
    asks = {path for path, item in spec["paths"].items() for operation in item.values() if "security" not in operation}
    assert set(spec["paths"]) - asks == {"/healthz", "/readyz"}
    assert spec["paths"]["/healthz"]["get"]["security"] == []


async def test_every_route_is_in_it() -> None:
    spec = await document()
    described = {(method.upper(), path) for path, item in spec["paths"].items() for method in item}
    assert described == {(route.method, route.path) for route in ROUTES}
    assert described == {
        ("GET", "/v1/flows"),
        ("POST", "/v1/flows/{id}/turns"),
        ("GET", "/v1/sessions"),
        ("GET", "/v1/sessions/{id}"),
        ("DELETE", "/v1/sessions/{id}"),
        ("GET", "/v1/sessions/{id}/events"),
        ("POST", "/v1/sessions/{id}/invocations"),
        ("POST", "/v1/sessions/{id}/inputs"),
        ("POST", "/v1/sessions/{id}/cancel"),
        ("POST", "/v1/sessions/{id}/steer"),
        ("POST", "/v1/sessions/{id}/answers"),
        ("POST", "/ai/run"),
        ("GET", "/ai/flows"),
        ("POST", "/ai/end"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
    }
    operations = [operation for item in spec["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)


async def test_every_reference_is_there_and_every_schema_is_used() -> None:
    spec = await document()

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    schemas = {f"#/components/schemas/{name}" for name in spec["components"]["schemas"]}
    assert set(references(spec)) == schemas


async def test_what_is_answered_is_what_is_described() -> None:
    gate = anyio.Event()
    async with served("Hello.", Reply.tool_call("nonsense"), Reply.text("Slow.").gated(gate), "Hello.") as s:
        spec = (await s.client.get("/openapi.json")).json()

        def check(answer: httpx.Response, path: str) -> None:
            operation = spec["paths"][path][answer.request.method.lower()]
            response = operation["responses"][str(answer.status_code)]
            kind = answer.headers.get("content-type")
            if kind is None:
                assert "content" not in response
                return
            schema = {**response["content"][kind]["schema"], "components": spec["components"]}
            jsonschema.Draft202012Validator(schema).validate(answer.json())
            if "retry-after" in answer.headers:
                assert "Retry-After" in response["headers"]

        turns, client = "/v1/flows/{id}/turns", s.client
        first = await s.turn()
        session = first.json()["session_id"]
        check(first, turns)
        check(await s.turn(flow="WorkFlow"), turns)
        check(await s.turn(flow="NoFlow"), turns)
        check(await s.turn(7), turns)
        slow = asyncio.create_task(s.turn(session_id=session))
        await until(lambda: s.model.open)
        busy = await s.turn(session_id=session, on_busy="reject")
        assert "retry-after" in busy.headers
        check(busy, turns)
        gate.set()
        check(await slow, turns)
        check(await client.post("/v1/flows/TalkFlow/turns"), turns)
        check(await client.get("/v1/flows"), "/v1/flows")
        check(await client.get("/v1/sessions"), "/v1/sessions")
        check(await client.get("/v1/sessions?limit=x"), "/v1/sessions")
        check(await client.get(f"/v1/sessions/{session}"), "/v1/sessions/{id}")
        check(await client.post(f"/v1/sessions/{session}/cancel"), "/v1/sessions/{id}/cancel")
        check(await client.delete(f"/v1/sessions/{session}"), "/v1/sessions/{id}")
        check(await client.delete(f"/v1/sessions/{session}"), "/v1/sessions/{id}")
        check(await client.post("/ai/run", json={"flowName": "TalkFlow", "message": "x"}), "/ai/run")
        check(await client.post("/ai/run", json={"flowName": "NoFlow"}), "/ai/run")
        check(await client.get("/ai/flows"), "/ai/flows")
        check(await client.post("/ai/end"), "/ai/end")
        check(await client.get("/healthz"), "/healthz")
        check(await client.get("/readyz"), "/readyz")
        check(await client.get("/openapi.json"), "/openapi.json")
        await s.app.drain(0)
        check(await s.turn(), turns)
        check(await client.get("/readyz"), "/readyz")


# -- mounted


async def test_another_application_may_mount_it() -> None:
    model = ScriptedModel(["Hello."])
    app = application(model)
    outer = Starlette(routes=[Mount("/chat", app)], lifespan=lambda _: app.lifespan())
    transport = httpx.ASGITransport(outer)
    async with (
        outer.router.lifespan_context(outer),
        httpx.AsyncClient(transport=transport, base_url="http://localhost/chat") as client,
    ):
        spec = (await client.get("/openapi.json")).json()
        assert spec["servers"] == [{"url": "/chat"}]
        answer = await client.post("/v1/flows/TalkFlow/turns", json={"message": "hello"})
        assert answer.json()["message"] == "Hello."
        for method, path, status in (("GET", "/no", 404), ("PUT", "/ai/run", 405), ("GET", "/v1/sessions/x", 404)):
            refused = await client.request(method, path)
            assert refused.status_code == status
            assert refused.headers["content-type"] == "application/problem+json"
        assert (await client.get("/healthz")).status_code == 200


async def test_a_mounted_application_whose_lifespan_does_not_run_says_so() -> None:
    transport = httpx.ASGITransport(application(ScriptedModel()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/v1/flows/TalkFlow/turns", json={"message": "hello"})
        assert (answer.status_code, answer.json()["code"]) == (503, "engine_closed")
