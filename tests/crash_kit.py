"""Conversations of the examples in real processes, which are killed at named points and followed by others.

Processes are forks of a server that has imported everything: starting one takes milliseconds. What they say to each
other goes over the store, the channel, and files.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from publication_kit import shown
from stepwell import Engine, Flow
from stepwell.channels import open_channels
from stepwell.engine._ids import session_id_from
from stepwell.models.offline import OfflineModel
from stepwell.sessions import SessionStore, open_store
from stepwell.testing import Faults
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import session_channel

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = {"today": "2026-12-01"}
TIMERS = ("renew", "renew:done")
"""Points that come with time, not with a turn."""


@dataclass(frozen=True)
class Play:
    """A conversation of an example, on a store with channels.

    Attributes:
        example: `hotel` or `intake`.
        name: Tells it from others of the same example in the same place.
        store: URL.
        channels: URL.
        directory: For files.
        lines: What the person says.
    """

    example: str
    name: str
    store: str
    channels: str
    directory: Path
    lines: Sequence[str] = ()

    @property
    def flow(self) -> str:
        return {"hotel": "HotelFlow", "intake": "IntakeFlow"}[self.example]

    @property
    def said(self) -> Sequence[str]:
        return self.lines or (EXAMPLES / self.example / "conversation.txt").read_text(encoding="utf-8").splitlines()

    @property
    def session(self) -> str:
        return session_id_from(self.flow, f"{self.name}-0")

    def file(self, kind: str) -> Path:
        return self.directory / f"{self.name}-{kind}"


# -- in the processes


def talk(play: Play, point: str | None) -> None:
    """Say everything, also what others have said before; be killed at a point."""
    asyncio.run(_talk(play, point))


async def _talk(play: Play, point: str | None) -> None:
    faults = Faults()
    if point is not None:
        faults.kill(point)
    flow = _flow(play, faults)
    store = open_store(play.store)
    async with open_channels(play.channels) as channels:
        engine = Engine(
            [flow],
            models={"offline": faults.model(OfflineModel())},
            store=faults.store(store),
            channels=faults.channels(channels),
            listeners=[faults.listen],
            recovery_interval=None,
        )
        async with engine:
            session = None
            for number, line in enumerate(play.said):
                result = await engine.run(
                    flow.id, line, session_id=session, idempotency_key=f"{play.name}-{number}", config=CONFIG
                )
                assert result.success, result
                session = result.session_id
    await store.close()
    play.file("trace").write_text(json.dumps(faults.trace), encoding="utf-8")


def _flow(play: Play, faults: Faults) -> type[Flow]:
    sys.path.insert(0, str(EXAMPLES / play.example))
    if play.example == "intake":
        return importlib.import_module("intake").IntakeFlow
    hotel, desk = importlib.import_module("hotel"), importlib.import_module("hotel.desk")

    def book(key: str, reference: str) -> None:
        """The hotels' system, beyond this process: a line for each booking that it was asked for."""
        faults.at("book")
        with play.file("bookings").open("a", encoding="utf-8") as file:
            file.write(f"{key} {reference}\n")
            file.flush()
            os.fsync(file.fileno())
        faults.at("book:done")

    desk.__dict__["book"] = book
    return hotel.HotelFlow


def watch(play: Play, who: str) -> None:
    """Look on as a client until all that the person says is answered, and write down what is shown then."""
    asyncio.run(_watch(play, who))


async def _watch(play: Play, who: str) -> None:
    async with open_channels(play.channels) as channels:
        channel = await channels.open(session_channel(play.session))
        async with ClientSession(channel, UIMessageCodec()) as client:
            while client.view.has_older:
                await client.view.load_older(100)
            play.file(f"{who}-ready").touch()
            changes = client.view.changes()
            while [run.status for run in client.view.runs] != ["complete"] * len(play.said):
                await anext(changes)
            steps = [step.status for run in client.view.runs for step in run.steps]
            play.file(who).write_text(json.dumps({"shown": shown(client), "steps": steps}), encoding="utf-8")


# -- in the test


class Theatre:
    """Where processes are started."""

    def __init__(self) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["crash_kit", "psycopg", "redis.asyncio", "stepwell.sessions.postgres"])

    def start(self, target: Any, *args: Any) -> BaseProcess:
        process = self._context.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    def run(self, target: Any, *args: Any) -> int | None:
        """Start it and wait; the signal's number, negative, if it was killed."""
        process = self.start(target, *args)
        process.join(60)
        return process.exitcode


async def document(play: Play) -> dict[str, Any]:
    """What is stored in the end, without ids that are drawn, times, and counts of commits."""
    store: SessionStore = open_store(play.store)
    try:
        head, lease = await store.load(play.session)
        messages = {
            ns: [
                (
                    row.message.__struct_config__.tag,
                    getattr(row.message, "content", None) or getattr(row.message, "text", None),
                )
                for row in await store.load_messages(play.session, ns)
            ]
            for ns in head.memories
        }
        return {
            "open": (head.turn, lease, await store.journal_load(play.session)),
            "status": head.status,
            "current": head.workflow.current,
            "stages": {
                stage: {key: value for key, value in record.state.items() if key != "_saved_at"}
                for stage, record in head.stages.items()
            },
            "messages": messages,
            "sequence": [(entry.level, entry.stage) for entry in await store.load_sequence(play.session)],
            "inbox": [(row.kind, row.state) for row in await store.inbox_list(play.session)],
        }
    finally:
        await store.close()
