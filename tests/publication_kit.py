"""Engines that publish, clients that watch, on any store with any channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepwell import Engine, Flow, TurnResult
from stepwell.channels import MemoryChannels, open_channels
from stepwell.models import ModelGateway
from stepwell.sessions import MemoryStore, SessionStore, open_store
from stepwell.testing import FakeClock
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Channel, ChannelProvider, Delivery, Name, session_channel, transport_headers

BACKENDS = ("memory", "sqlite", "postgres", "redis")
"""Where sessions and channels live together; Redis is for channels, with sessions on Postgres."""

Client = ClientSession[Any, Any]


class House:
    """A store and its channels, the engines that work there and the clients that watch one session.

    Attributes:
        clock: Of engines and clients; `None` on servers and files, where time is real.
        session: Of the last turn; the next one goes on with it.
    """

    def __init__(self, store: SessionStore, channels: ChannelProvider, clock: FakeClock | None = None) -> None:
        self.store = store
        self.channels = channels
        self.clock = clock
        self.session = ""

    @classmethod
    def in_memory(cls) -> House:
        clock = FakeClock(auto_advance=True)
        return cls(MemoryStore(clock), MemoryChannels(clock=clock), clock)

    def engine(self, flow: type[Flow], model: ModelGateway, **options: Any) -> Engine:
        """Of a process of its own, as far as the house is concerned."""
        options = {"store": self.store, "channels": self.channels, "recovery_interval": None, **options}
        if self.clock is not None:
            options.setdefault("clock", self.clock)
        names = ("scripted", "anthropic")
        return Engine([flow], models=dict.fromkeys(names, model), **options)

    async def say(self, engine: Engine, text: str, **options: Any) -> TurnResult:
        flow = next(iter(engine.definitions))
        result = await engine.run(flow, text, session_id=self.session or None, **options)
        self.session = result.session_id
        return result

    async def channel(self, session: str | None = None) -> Channel:
        return await self.channels.open(session_channel(session or self.session))

    @asynccontextmanager
    async def client(self, session: str | None = None) -> AsyncGenerator[Client]:
        """One that connects now and has read all that there is."""
        async with ClientSession(await self.channel(session), UIMessageCodec(), clock=self.clock) as client:
            while client.view.has_older:
                await client.view.load_older(100)
            yield client

    async def shown(self) -> list[list[Any]]:
        """What a client shows that comes now."""
        async with self.client() as client:
            return shown(client)

    async def log(self, session: str | None = None) -> list[Delivery]:
        """All that is on the channel, whatever superseded it, oldest first; streams as far as they came."""
        page = await (await self.channel(session)).history(limit=1000)
        return list(reversed(page.items))

    async def names(self) -> list[str]:
        """Of all on the channel but outputs, in order, with their reasons."""
        found: list[str] = []
        for one in await self.log():
            headers = transport_headers(one.extras)
            reason = headers.get("step-reason") or headers.get("run-reason")
            if one.name != Name.OUTPUT:
                found.append(f"{one.name}".removeprefix("ai-") + (f" {reason}" if reason else ""))
        return found


@asynccontextmanager
async def house_on(backend: str, request: pytest.FixtureRequest, path: Path) -> AsyncGenerator[House]:
    """A house of its own on one of `BACKENDS`."""
    if backend == "memory":
        yield House.in_memory()
        return
    store = channels = f"sqlite:///{path / 'house.db'}"
    if backend != "sqlite":
        store = channels = request.getfixturevalue("postgres_database")
    if backend == "redis":
        channels = request.getfixturevalue("redis_database")
    opened = open_store(store)
    try:
        async with open_channels(channels) as provider:
            yield House(opened, provider)
    finally:
        await opened.close()


def shown(client: Client) -> list[list[Any]]:
    """Role and parts of each message, as short as can be."""
    return [[entry.message["role"], *map(part, entry.message["parts"])] for entry in client.view.messages]


def part(given: dict[str, Any]) -> Any:
    """Text as it is, `|` for the beginning of a step, tools by name, state and what they came to."""
    kind = given["type"]
    if kind in ("text", "reasoning"):
        return given["text"] if kind == "text" else ("thought", given["text"])
    if kind.startswith("tool-"):
        more = {key: given[key] for key in ("approval", "output", "errorText") if key in given}
        return kind.removeprefix("tool-"), given["state"], more
    return "|" if kind == "step-start" else (kind, given.get("id"), given.get("data"))


async def until(client: Client, found: Callable[[Client], bool]) -> None:
    """Wait until a client shows it."""
    changes = client.view.changes()
    try:
        async with asyncio.timeout(20):
            while not found(client):
                await anext(changes)
    except TimeoutError:
        runs = [(run.status, [step.status for step in run.steps]) for run in client.view.runs]
        pytest.fail(f"The client never showed it, but {shown(client)}, of runs {runs}.")


def said(text: str) -> Callable[[Client], bool]:
    """Whether the newest message says exactly this."""
    return lambda client: (
        bool(client.view.messages)
        and "".join(one["text"] for one in client.view.messages[-1].message["parts"] if one["type"] == "text") == text
    )


def ended(run: str, status: str = "complete") -> Callable[[Client], bool]:
    """Whether a run has ended so."""

    def look(client: Client) -> bool:
        known = client.view.run(run)
        return known is not None and known.status == status

    return look


def step_ended(status: str) -> Callable[[Client], bool]:
    """Whether the newest step of the newest run has ended so."""

    def look(client: Client) -> bool:
        runs = client.view.runs
        return bool(runs and runs[-1].steps) and runs[-1].steps[-1].status == status

    return look
