"""What an agent publishes, scenario by scenario: the same as the JavaScript SDK's agent, up to ids, serials and times.

All 19 traces, operation by operation. Where we do better, what is expected is made of the trace: see `EXPECTED`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from agent_kit import Operation, assert_as_recorded
from agent_scenarios import SCENARIOS, stage_of
from stepwell.transport import AgentSession
from stepwell.transport.codecs import UIMessage
from transport_kit import TRACES, trace

pytestmark = pytest.mark.anyio

STEP_OF_MISUSE = re.compile(r"inv-m-step-\d+")


def without_an_empty_step(recorded: list[Operation]) -> list[Operation]:
    """The reference opens a step for an output that it then cannot encode; here no step is without output."""
    return [one for index, one in enumerate(recorded) if index not in (37, 38)]


def as_if_nothing_was_lost(recorded: list[Operation]) -> list[Operation]:
    """A refused append is repeated at once, so what is appended is whole and there is nothing to replace."""
    return [one for one in recorded if one["op"] != "update"]


def without_what_follows_the_end(recorded: list[Operation]) -> list[Operation]:
    """The reference writes on until it has read its own run-end: nine operations, and the next input hangs on them.

    And a step that it refused to start before its run leaves its client id, none, to the steps behind it.
    """
    asked, answer = (
        recorded[index]["messages"][0]["extras"]["ai"]["transport"]["codec-message-id"] for index in (0, 8)
    )
    said = json.dumps([*recorded[:7], *recorded[16:]]).replace(f'"parent": "{answer}"', f'"parent": "{asked}"')
    return json.loads(said.replace('"step-client-id": ""', '"step-client-id": "user-a"'))


EXPECTED: dict[str, Callable[[list[Operation]], list[Operation]]] = {
    "all-chunks": without_an_empty_step,
    "append-recovery": as_if_nothing_was_lost,
    "misuse": without_what_follows_the_end,
}


def steps_in_order(operations: Any) -> Any:
    """The steps of the trace `misuse` by number: which of the calls that it refuses uses a number up is not told."""
    names: dict[str, str] = {}
    said = json.dumps(operations)
    return json.loads(STEP_OF_MISUSE.sub(lambda found: names.setdefault(found[0], f"step-{len(names)}"), said))


def test_every_trace_has_its_scenario() -> None:
    assert sorted(SCENARIOS) == TRACES


@pytest.mark.parametrize("name", TRACES)
async def test_an_agent_publishes_what_the_trace_records(name: str) -> None:
    stage = stage_of(name)
    await SCENARIOS[name](stage)
    recorded = trace(name)["published"]
    expected = EXPECTED.get(name, list)(recorded)
    assert_as_recorded(steps_in_order(stage.record), steps_in_order(expected))


def test_sessions_are_generic_in_the_message() -> None:
    assert AgentSession[UIMessage, Any] is not None
