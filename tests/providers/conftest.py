"""The servers the provider tests talk to, each on a free loopback port, and adapters for them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llmock.testing import LLMockServer

from providers.helpers import API_KEY, Adapters
from providers.wire_server import WireServer
from stepwell.models import Anthropic, Google, OpenAIChat, OpenAIResponses

AIMOCK = Path(__file__).parents[1] / "node" / "node_modules" / "@copilotkit" / "aimock" / "dist" / "cli.js"
INSTALL = "npm ci --prefix tests/node --ignore-scripts"
FIXTURES: list[dict[str, Any]] = [
    {
        "match": {"userMessage": "weather"},
        "response": {"toolCalls": [{"name": "get_weather", "arguments": {"city": "Paris"}}]},
    },
    {
        "match": {"userMessage": "limit"},
        "response": {"error": {"message": "no", "type": "rate_limit"}, "status": 429, "retryAfter": 9},
    },
    {"match": {"userMessage": "boom"}, "response": {"error": {"message": "no", "type": "server"}, "status": 500}},
    {"match": {"userMessage": "cut"}, "response": {"content": "one two three four five"}, "truncateAfterChunks": 2},
    {"match": {"userMessage": "slow"}, "response": {"content": "one two three " * 40}, "latency": 250},
    {"match": {"userMessage": "hello"}, "response": {"content": "hello there friend"}},
]


@pytest.fixture(scope="session")
def wire() -> Iterator[WireServer]:
    """Our own server."""
    with WireServer() as server:
        yield server


@pytest.fixture(scope="session")
def llmock_server() -> Iterator[LLMockServer]:
    """llmock, in a thread."""
    with LLMockServer() as server:
        yield server


@pytest.fixture(scope="session")
def aimock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """aimock, in a process of its own; yields its URL."""
    scripts = str(Path(sys.executable).parent)
    node = shutil.which("node", path=os.pathsep.join([scripts, os.environ.get("PATH", "")]))
    if node is None or not AIMOCK.exists():
        pytest.fail(f"aimock is not installed. Run: {INSTALL}", pytrace=False)
    fixtures = tmp_path_factory.mktemp("aimock") / "fixtures.json"
    fixtures.write_text(json.dumps({"fixtures": FIXTURES}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [node, str(AIMOCK), "-p", str(port), "-f", str(fixtures), "-c", "5", "--log-level", "silent"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"aimock did not start. Run: {INSTALL}", pytrace=False)
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
async def adapters() -> AsyncIterator[Callable[..., Adapters]]:
    """Make adapters for a base URL; their connections are closed after the test."""
    made: list[Any] = []

    def make(openai: str, anthropic: str, google: str, *, streaming: bool = True) -> Adapters:
        adapters: Adapters = {
            "chat": OpenAIChat(API_KEY, base_url=openai, streaming=streaming),
            "responses": OpenAIResponses(API_KEY, base_url=openai, streaming=streaming),
            "anthropic": Anthropic(API_KEY, base_url=anthropic, streaming=streaming),
            "gemini": Google(API_KEY, base_url=google, streaming=streaming),
        }
        made.extend(adapters.values())
        return adapters

    yield make
    for adapter in made:
        await adapter.aclose()


@pytest.fixture
def on_wire(wire: WireServer, adapters: Callable[..., Adapters]) -> Callable[..., Adapters]:
    """Adapters for our own server."""

    def make(*, streaming: bool = True) -> Adapters:
        return adapters(f"{wire.url}/v1", wire.url, wire.url, streaming=streaming)

    return make
