"""Flows of the server's tests, and how they are served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from stepwell import Engine, Flow, LogicStep, Step, TerminateSessionStep, direct, finish, go, tool
from stepwell.models import ModelGateway
from stepwell.server import ServerApp, create_app
from stepwell.server._serve import Server, listen
from stepwell.testing import FakeClock, Scripted, ScriptedModel

TESTS = Path(__file__).parents[1]


class Scripty(Flow):
    def config_model(self) -> str:
        return "scripted:m"


class Talk(Step):
    def get_prompt(self) -> str:
        return "Talk."


class TalkFlow(Scripty):
    aliases = ("OldTalk", "team/talk")

    def define_steps(self) -> Sequence[Step]:
        return [Talk(self)]


class Work(Step):
    """A stage whose tools go wrong in every way."""

    def get_prompt(self) -> str:
        return "Work."

    @tool
    def count(self, number: int) -> str:
        """Count."""
        self.save_state({"number": number})
        return f"counted {number}"

    @tool
    def nonsense(self) -> Any:
        """Return what is no JSON."""
        return object()

    @tool
    def boom(self) -> str:
        """Raise."""
        raise RuntimeError("secret internals at /srv/private")

    @tool
    def page(self) -> Any:
        """Answer with HTML."""
        return direct("<p>Olé</p>").with_content_type("text/html")

    @tool
    def odd(self) -> Any:
        """Answer with a type that is none."""
        return direct("x").with_content_type("no type\r\nx: y")

    @tool
    def leave(self) -> Any:
        """End."""
        return finish("Bye.")


class Router(LogicStep):
    async def run_logic(self) -> Any:
        return go(Work)


class WorkFlow(Scripty):
    def define_steps(self) -> Sequence[Step]:
        return [Work(self), Router(self), TerminateSessionStep(self).use_memory("temp")]


class Hooked(Step):
    def get_prompt(self) -> str:
        return "Hooked."

    async def on_visit(self, message: Any) -> None:
        if message is not None and message.text == "break":
            raise LookupError("secret internals at /srv/private")
        self.save_state({"visits": self.get_state("visits", default=0) + 1})


class HookFlow(Scripty):
    def define_steps(self) -> Sequence[Step]:
        return [Hooked(self)]


class SilentFlow(Scripty):
    requires_user_message = False

    def define_steps(self) -> Sequence[Step]:
        return [Talk(self)]


FLOWS = (TalkFlow, WorkFlow, HookFlow, SilentFlow)


@dataclass
class Served:
    """What a test talks to."""

    client: httpx.AsyncClient
    model: ScriptedModel
    app: ServerApp

    @property
    def engine(self) -> Engine:
        return self.app.engine

    async def turn(self, message: Any = "hello", flow: str = "TalkFlow", **options: Any) -> httpx.Response:
        headers = options.pop("headers", None)
        return await self.client.post(f"/v1/flows/{flow}/turns", json={"message": message, **options}, headers=headers)


def application(model: ModelGateway, **options: Any) -> ServerApp:
    options.setdefault("flows", FLOWS)
    return create_app(models={"scripted": model}, **options)


@asynccontextmanager
async def served(*script: Scripted, default: Scripted | None = None, **options: Any) -> AsyncGenerator[Served]:
    """The application, called in process."""
    model = ScriptedModel(script, default=default)
    if options.pop("fake", False):
        options["clock"] = model.clock = FakeClock(auto_advance=True)
    client_options = options.pop("client", {})
    app = application(model, **options)
    transport = httpx.ASGITransport(app, client=client_options.pop("peer", ("127.0.0.1", 5)))
    async with (
        app.lifespan(),
        httpx.AsyncClient(transport=transport, **{"base_url": "http://localhost", **client_options}) as client,
    ):
        yield Served(client, model, app)
    model.assert_done()


@asynccontextmanager
async def listening(app: ServerApp, *, grace: float = 20.0) -> AsyncGenerator[Server]:
    """The application on a real uvicorn in this loop, on a free port."""
    ready = asyncio.get_running_loop().create_future()
    server = Server(app, listen("127.0.0.1", 0), grace=grace, ready=ready.set_result)
    task = asyncio.create_task(server.serve())
    try:
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task  # it could not start, and says why
        yield server
    finally:
        server.should_exit = True
        await task


async def until(happened: Callable[[], object]) -> None:
    """Let the loop run until it did."""
    while not happened():
        await asyncio.sleep(0)


class Event(dict[str, Any]):
    """An event of a stream."""


async def events_of(response: httpx.Response) -> AsyncIterator[Event]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            key, _, value = line.partition(": ")
            fields[key] = value
        elif fields:
            yield Event(fields, data=json.loads(fields["data"]))
            fields = {}


async def until_event(events: AsyncIterator[Event], done: Callable[[Event], object]) -> list[Event]:
    seen: list[Event] = []
    async with asyncio.timeout(10):
        async for event in events:
            seen.append(event)
            if done(event):
                return seen
    raise AssertionError(f"the stream ended after {seen}")


class Process:
    """`serve` in a process of its own; answers once it is made."""

    def __init__(self, code: str, *args: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **env},
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise AssertionError(self.process.communicate()[1])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self, *signals: signal.Signals) -> tuple[int, str]:
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out + err

    def curl(self, path: str, body: Any = None, *headers: str, method: str | None = None) -> tuple[int, Any]:
        """Status and body, by the command people use."""
        command = ["curl", "-sS", "-w", "\n%{http_code}", self.url + path]
        for header in headers:
            command += ["-H", header]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        if method is not None:
            command += ["-X", method]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        text, _, status = done.stdout.rpartition("\n")
        return int(status), json.loads(text) if text else None
