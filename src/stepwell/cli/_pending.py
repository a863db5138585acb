"""What a session waits for, asked in the terminal; and what is typed, as an answer."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from stepwell.engine import PendingRequest
from stepwell.messages import JsonObject, JsonValue

__all__ = ["asked", "pending_in", "typed"]

_YES = frozenset({"y", "yes"})
_NO = frozenset({"n", "no"})


def pending_in(head: JsonObject) -> list[PendingRequest]:
    """What a stored session waits for."""
    turn = cast("JsonObject", head.get("turn") or {})
    names = PendingRequest.__struct_fields__
    return [
        msgspec.convert({name: one[name] for name in names if name in one}, PendingRequest)
        for one in cast("list[JsonObject]", turn.get("pending", []))
        if one.get("state", "waiting") == "waiting"
    ]


def asked(request: PendingRequest) -> str:
    """The sentence that asks for an answer."""
    payload: Any = request.payload
    if request.kind == "approval":
        return f"Allow {_words(payload, request.tool)}? (yes, no, or why not)"
    if request.kind == "client_tool":
        return f"Run {_words(payload, request.tool)}, and give its result (JSON or text)."
    if isinstance(payload, dict) and isinstance(payload.get("text"), str):  # pyright: ignore[reportUnknownMemberType]
        return str(cast("JsonObject", payload)["text"])
    return payload if isinstance(payload, str) else msgspec.json.encode(payload).decode()


def _words(payload: Any, tool: str) -> str:
    """A call as one would write it; another payload as JSON."""
    given = cast("JsonObject", payload) if isinstance(payload, dict) else {}
    if set(given) == {"tool", "args"} and isinstance(given["args"], dict):
        args = cast("JsonObject", given["args"])
        return f"{given['tool']}({', '.join(f'{k}={msgspec.json.encode(v).decode()}' for k, v in args.items())})"
    return tool if payload is None else f"{tool}: {msgspec.json.encode(payload).decode()}"


def typed(request: PendingRequest, line: str) -> JsonValue:
    """What a line answers."""
    if request.kind == "approval":
        word = line.lower()
        return word in _YES if word in _YES | _NO else {"approved": False, "reason": line}
    if request.kind == "client_tool":
        try:
            return msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return line
    return line
