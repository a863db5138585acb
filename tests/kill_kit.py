"""A writer is killed with -9 anywhere in its run; another process finishes it; three clients look at what is left.

For the test of it, and for the benchmarks, which do it more often and count.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepwell.channels import open_channels
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Channel, H, Name, transport_headers

WRITER = str(Path(__file__).with_name("kill") / "writer.py")
ASKED = "Say something"
FIRST = "This is what the first process says before it dies"
SECOND = "And this is what is left of it"
MOMENTS = 6 + len(FIRST.split(" "))
"""Words that a writer says while it works."""

DELAY = 0.004
"""Seconds, at most, from a word to the kill: twice what lies between two pieces."""


@dataclass
class Killed:
    """One writer that was killed, and what was found afterwards.

    Attributes:
        place: The last that it said; "not" if it was done before the signal came.
        doubled: What is there more than once.
        lost: What should be there and is not.
        unequal: Clients that see something else than the first.
    """

    place: str
    doubled: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return self.doubled + self.lost + self.unequal


async def kills(url: str, runs: int, *, seed: int = 7) -> AsyncIterator[Killed]:
    """Kill so many writers: each moment once, then any."""
    dice = random.Random(seed)
    for number in range(runs):
        moment = 1 + (number % MOMENTS if number < MOMENTS else dice.randrange(MOMENTS))
        yield await killed_once(url, number, moment, dice.uniform(0, DELAY) if number >= MOMENTS else 0.0)


async def killed_once(url: str, number: int, moment: int, delay: float) -> Killed:
    """Kill a writer so many seconds after its so-many-th word, and let another go on."""
    name, run_id = f"kill:{number}", f"run-{number}"
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(open_channels(url))
        channel = await channels.open(name)

        async def join() -> ClientSession[Any, Any]:
            client = await stack.enter_async_context(ClientSession(channel, UIMessageCodec()))
            await client.view.load_older(50)
            return client

        connected = await join()
        asked = await connected.view.send(connected.codec.create_user_message(ASKED))
        arguments = (url, name, asked.to_invocation().input_event_id, run_id)
        killed = Killed(await _write(*arguments, FIRST, kill=(moment, delay)))
        between = await join()
        await _write(*arguments, SECOND, kill=None)
        clients = {"connected": connected, "between": between, "after": await join()}
        for who, client in clients.items():
            if not await _settled(client):
                killed.lost.append(f"the end of the run, for the client {who}")
        await _compare(killed, clients, channel)
        return killed


async def _compare(killed: Killed, clients: dict[str, ClientSession[Any, Any]], channel: Channel) -> None:
    for who, client in clients.items():
        said = _shown(client)
        # The first may have been killed when all was said: then the second had nothing to do.
        answers = [text for text in (FIRST + " ", SECOND + " ") for shown in said[1:] if text in shown]
        if said[:1] != [ASKED]:
            killed.lost.append(f"the question, for the client {who}")
        if not answers or (len(said) == 2 and said[1] != answers[0]):
            killed.lost.append(f"the answer, or a part of it, for the client {who}: {said[1:]}")
        if len(said) > 2 or len(answers) > 1:
            killed.doubled.append(f"the answer, for the client {who}: {said[1:]}")
        if statuses := [step.status for run in client.view.runs for step in run.steps if step.status != "complete"]:
            killed.lost.append(f"the end of a step, for the client {who}: {statuses}")
        steps = sum(len(run.steps) for run in client.view.runs)
        if steps != 1:
            (killed.doubled if steps else killed.lost).append(f"the step, for the client {who}: there are {steps}")
        if _parts(client) != _parts(clients["connected"]):
            killed.unequal.append(f"{who}: {said}, and not {_shown(clients['connected'])}")
    page = await channel.history(limit=1000)
    log = [(one.name, transport_headers(one.extras)) for one in page.items]
    for what in (Name.RUN_START, Name.RUN_END):
        count = [name for name, _ in log].count(what)
        if count > 1:
            killed.doubled.append(f"{what}, {count} times")
        if count < 1:
            killed.lost.append(what)
    ends = [headers[H.RUN_REASON] for name, headers in log if name == Name.RUN_END]
    if ends and ends[0] != "complete":
        killed.lost.append(f"the complete run: it ended {ends[0]}")


async def _write(url: str, name: str, event_id: str, run_id: str, text: str, *, kill: tuple[int, float] | None) -> str:
    """Run a writer, and kill it. Returns the last that it said, or "not" if it was not killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, WRITER, url, name, event_id, run_id, text, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    words = 0
    word = ""
    while line := await process.stdout.readline():
        word = line.decode().strip()
        words += 1
        if kill is not None and words == kill[0]:
            await asyncio.sleep(kill[1])
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            said = (await process.stdout.read()).decode().split("\n")
            word = said[-2] if len(said) > 1 else word
            break
    code = await process.wait()
    if code not in ((0,) if kill is None else (0, -signal.SIGKILL)):
        raise RuntimeError(f"A writer ended by itself with {code}, after {word!r}.")
    return word if code else "not"


def _shown(client: ClientSession[Any, Any]) -> list[str]:
    return ["".join(part.get("text", "") for part in message["parts"]) for message in _parts(client)]


def _parts(client: ClientSession[Any, Any]) -> list[Any]:
    return [one.message for one in client.view.messages]


async def _settled(client: ClientSession[Any, Any]) -> bool:
    changes = client.view.changes()
    try:
        async with asyncio.timeout(20):
            while [run.status for run in client.view.runs] != ["complete"]:
                await anext(changes)
    except TimeoutError:
        return False
    return True
