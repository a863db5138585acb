"""`stepwell watch`, on a file that another process would write to."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepwell.channels import open_channels
from stepwell.transport import AgentSession, ClientSession
from stepwell.transport.codecs import TextCodec, UIMessageCodec

SESSION = "chat-1"


def text(*pieces: str, name: str = "t") -> list[dict[str, Any]]:
    deltas = [{"type": "text-delta", "id": name, "delta": piece} for piece in pieces]
    return [{"type": "text-start", "id": name}, *deltas, {"type": "text-end", "id": name}]


async def converse(url: str, attempts: Sequence[Sequence[Any]], *, codec: Any = None, reason: Any = "complete") -> None:
    """A question, and a step with one attempt after another; all but the last fail."""
    codec = codec or UIMessageCodec()
    async with open_channels(url) as provider:
        channel = await provider.open(SESSION)
        async with ClientSession(channel, codec) as client, AgentSession(channel, codec) as agent:
            asked = await client.view.send(codec.create_user_message("How are you?"))
            run = agent.create_run(asked.to_invocation())
            await run.start()
            for number, outputs in enumerate(attempts, 1):
                step = run.create_step("draft")
                await step.start()
                await step.pipe(list(outputs))
                await step.end("complete" if number == len(attempts) else "failed")
            await run.end(reason)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'channels.db'}"


def test_it_shows_the_conversation_once_where_nobody_looks(command: Any, url: str) -> None:
    tool = [
        {"type": "tool-input-available", "toolCallId": "c", "toolName": "weather", "input": {"q": 1}},
        {"type": "data-chart", "data": {"n": 1}},
    ]
    thought = [
        {"type": "reasoning-start", "id": "r"},
        {"type": "reasoning-delta", "id": "r", "delta": "hmm"},
        {"type": "reasoning-end", "id": "r"},
    ]
    asyncio.run(converse(url, [text("Terrib"), [*thought, *tool, *text("Very ", "well.")]]))
    ran = command("watch", SESSION, "--channels", url)
    assert ran.code == 0
    for seen in ("How are you?", "Very well.", "hmm", "weather", "[data-chart]", "complete", "attempt 2"):
        assert seen in ran.out
    assert "Terrib" not in ran.out


def test_older_messages_are_announced(command: Any, url: str) -> None:
    asyncio.run(converse(url, [text("one")]))
    asyncio.run(converse(url, [text("two")], reason="error"))
    ran = command("watch", SESSION, "--channels", url, "--limit", "1", "--once")
    assert "two" in ran.out
    assert "one" not in ran.out
    assert "--limit" in ran.out
    assert "error" in ran.out


def test_plain_text(command: Any, url: str) -> None:
    asyncio.run(converse(url, [["Very ", "well."]], codec=TextCodec()))
    ran = command("watch", SESSION, "--channels", url, "--codec", "text")
    assert "Very well." in ran.out


def test_an_empty_channel(command: Any, url: str) -> None:
    ran = command("watch", "nobody", "--channels", url)
    assert "Nothing was said yet." in ran.out
    assert "no run" in ran.out


def test_json_for_scripts(command: Any, url: str) -> None:
    asyncio.run(converse(url, [text("fine")]))
    [snapshot] = command("watch", SESSION, "--channels", url, "--json", "--once").lines
    assert snapshot["type"] == "snapshot"
    assert [one["message"]["role"] for one in snapshot["messages"]] == ["user", "assistant"]
    assert snapshot["runs"][0]["status"] == "complete"


def test_what_cannot_be_watched(command: Any, url: str) -> None:
    assert "--channels" in command.fails("watch", SESSION, "--channels", "memory://", code=2)
    assert "--limit" in command.fails("watch", SESSION, "--channels", url, "--limit", "0", code=2)
    assert "Channels are" in command.fails("watch", SESSION, "--channels", "nonsense://", code=2)
    assert "channel name" in command.fails("watch", "a b", "--channels", url, code=1)


def test_changes_are_told_line_by_line(url: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "stepwell.cli", "watch", SESSION, "--channels", url, "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        messages: dict[str, Any] = {}
        order: list[str] = []
        assert json.loads(process.stdout.readline())["messages"] == []
        asyncio.run(converse(url, [text("Terrib"), text("Very ", "well.")]))
        for line in process.stdout:
            patch = json.loads(line)
            messages |= {one["codecMessageId"]: one["message"] for one in patch.get("messages", ())}
            order = patch.get("order", order)
            if [run["status"] for run in patch.get("runs", ())] == ["complete"]:
                break
        process.terminate()
    shown = ["".join(part.get("text", "") for part in messages[key]["parts"]) for key in order]
    assert shown == ["How are you?", "Very well."]


def test_a_terminal_is_redrawn_until_ctrl_c(url: str) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "stepwell.cli", "watch", SESSION, "--channels", url],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(slave)
    seen = b""
    while b"Nothing was said yet." not in seen:
        seen += os.read(master, 4096)
    asyncio.run(converse(url, [text("Terrib"), text("Very well.")]))
    while b"Very well." not in seen or b"complete" not in seen:
        seen += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    os.close(master)
