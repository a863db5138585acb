"""The client and the unmodified JavaScript client, side by side: the same view after every mutation.

Random conversations of several agents and clients; in each somebody is there from the beginning and two join at random
and read history at once.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import anyio
import msgspec

from servers import node
from transport_kit import LogChannel, client, settled, steps
from transport_model import BEGINNING, OFTEN, Talk

CASES = 120


def conversation(random: Random) -> dict[str, Any]:
    channel = LogChannel()
    talk = Talk(channel, tidy=True)
    for kind in [*BEGINNING, *random.choices(OFTEN, k=random.randrange(10, 45))]:
        talk.act(kind, Random(random.random()))
    joins = sorted(random.randrange(1, len(channel.log) + 1) for _ in range(2))
    return {"log": channel.log, "joins": [0, *joins]}


def state(session: Any) -> dict[str, Any]:
    return {
        "messages": [[one.codec_message_id, one.message] for one in session.view.messages],
        "runs": [
            [run.run_id, run.status, run.client_id, run.invocation_id, [list(one.values()) for one in steps(run)]]
            for run in session.view.runs
        ],
    }


async def play(said: dict[str, Any]) -> list[list[Any]]:
    log, joins = said["log"], list(said["joins"])
    channel, states = LogChannel(), list[list[Any]]()
    async with AsyncExitStack() as stack:
        readers: list[Any] = []
        for row in range(len(log) + 1):
            while joins and joins[0] == row:
                readers.append(await stack.enter_async_context(client(channel)))
                if joins.pop(0):
                    await readers[-1].view.load_older(10_000)
            await settled()
            states.append([state(one) for one in readers])
            if row < len(log):
                channel._add(log[row])
    return states


def test_this_client_shows_what_the_javascript_client_shows_after_every_mutation() -> None:
    cases = [conversation(Random(seed)) for seed in range(CASES)]
    given = msgspec.json.encode(cases).decode()
    answer = subprocess.run(node("views.mjs"), input=given, capture_output=True, check=True, text=True, timeout=60)
    for case, wanted in zip(cases, json.loads(answer.stdout), strict=True):
        for row, (mine, theirs) in enumerate(zip(anyio.run(play, case), wanted, strict=True)):
            assert json.loads(msgspec.json.encode(mine)) == theirs, f"before row {row} of {case['log']}"
