"""The OpenAPI document, made from the table of routes and the types they name."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from pydantic.json_schema import models_json_schema

if TYPE_CHECKING:
    from ._routes import Endpoint

__all__ = ["document"]

_REF: Final = "#/components/schemas/{name}"

_PROBLEM: Final[dict[str, Any]] = {
    "type": "object",
    "title": "Problem",
    "description": "Why a request was refused or failed (RFC 9457).",
    "required": ["type", "title", "status", "detail", "code", "session_id", "retryable"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What to do."},
        "code": {"type": "string", "description": "Stable name of the kind of problem."},
        "session_id": {"type": ["string", "null"]},
        "retryable": {"type": "boolean", "description": "Whether the same request may succeed later."},
        "instance": {"type": "string", "description": "This one occurrence, as in the server's log."},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["detail"],
                "properties": {
                    "pointer": {"type": "string", "description": "JSON pointer into the body."},
                    "parameter": {"type": "string", "description": "Query parameter."},
                    "header": {"type": "string", "description": "Header field."},
                    "detail": {"type": "string"},
                },
            },
        },
    },
}

_RETRY_AFTER: Final = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}}}


def document(routes: Sequence[Endpoint], keys: bool, root: str) -> dict[str, Any]:
    """The document.

    Args:
        routes: The table.
        keys: Whether API keys are asked for.
        root: Where the application is mounted.
    """
    bodies = [route.body for route in routes if route.body is not None]
    results = [route.result for route in routes if route.result is not None]
    refs, pydantic_parts = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas, msgspec_parts = msgspec.json.schema_components(results, ref_template=_REF)
    by_result = dict(zip(map(id, results), schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        body = refs[route.body, "validation"] if route.body is not None else None
        result = by_result[id(route.result)] if route.result is not None else None
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, body, result, keys)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Stepwell",
            "version": version("stepwell"),
            "description": "Conversations that run in stages.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": {"Problem": _PROBLEM, **msgspec_parts, **cast("dict[str, Any]", pydantic_parts["$defs"])},
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key, or a JSON web token whose `capabilities` say what it may do (`admin`: "
                    "everything) and whose `sessions` or `session_prefix` may limit it.",
                },
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}] if keys else [],
    }


def _operation(route: Endpoint, body: Any, result: Any, keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.answer.__name__,
        "summary": route.summary,
        "tags": ["ai" if route.path.startswith("/ai/") else "v1" if route.path.startswith("/v1/") else "operations"],
        "responses": _responses(route, result, keys),
    }
    needs = f"A token needs the capability `{route.needs}`." if route.needs else ""
    if described := " ".join(part for part in (route.description, needs) if part):
        operation["description"] = described
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": not route.optional, "content": {"application/json": {"schema": body}}}
    if route.open:
        operation["security"] = []
    return operation


def _parameters(route: Endpoint) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if "{id}" in route.path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if route.query is not None:
        for name, schema in route.query.model_json_schema()["properties"].items():
            parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    for name, meaning in route.headers:
        parameters.append(
            {"name": name, "in": "header", "required": False, "description": meaning, "schema": {"type": "string"}}
        )
    return parameters


def _responses(route: Endpoint, result: Any, keys: bool) -> dict[str, Any]:
    responses: dict[str, dict[str, Any]] = {}
    content: dict[str, Any] = {"application/json": {"schema": result}} if result is not None else {}
    content |= {media: {"schema": {"type": "string"}} for media in route.media}
    if content:
        responses["200"] = {"description": "Done.", "content": content}
    else:
        responses["204"] = {"description": "Done."}
    if route.path == "/ai/run":
        session = {"description": "The session.", "schema": {"type": "string"}}
        responses["200"]["headers"] = {"CHAT_SESSION_ID": session}
        responses["200"]["content"]["*/*"] = {"schema": {"type": "string", "description": "The reply itself."}}
        responses["400"] = {
            "description": "The turn failed or did not begin.",
            "headers": {"CHAT_SESSION_ID": session},
            "content": {"application/json": {"schema": result}},
        }
    always = (500,) if route.open else (401, 403, 421, 500)
    for status in sorted({*always, *route.problems}):
        response: dict[str, Any] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}},
        }
        if status in (409, 503):
            response["headers"] = _RETRY_AFTER
        responses[str(status)] = response
    return responses
