"""The golden traces as a channel would deliver them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wire.bridge import Delivered

TRACES = Path(__file__).parents[1] / "fixtures" / "wire"


def trace(name: str) -> dict[str, Any]:
    return json.loads((TRACES / f"golden-{name}.json").read_text(encoding="utf-8"))


def deliveries(trace: dict[str, Any]) -> list[Delivered]:
    """Every create, append and update of a trace, in order; without presence and what the channel refused."""
    out: list[Delivered] = []
    for entry in trace["published"]:
        if entry["op"] == "presence" or "error" in entry:
            continue
        if entry["op"] == "publish":
            changes = [
                ("create", message, serial) for message, serial in zip(entry["messages"], entry["serials"], strict=True)
            ]
        else:
            changes = [(entry["op"], entry["message"], entry["versionSerial"])]
        for action, message, version in changes:
            timestamp = int(version[:14])
            out.append(
                {
                    "serial": version,
                    **message,
                    "version": {"serial": version, "timestamp": timestamp},
                    "action": f"message.{action}",
                    "timestamp": timestamp,
                    "clientId": entry["by"],
                }
            )
    return out
