"""Promise P5 in one process and on a file: the process is killed, another goes on from the last unit."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

SCRIPT = r'''
import asyncio, json, os, sys
sys.path.insert(0, {tests!r})
from engine_flows import BookFlow
from stepwell import Engine
from stepwell.testing import Reply, ScriptedModel
from {module} import {store} as Store

class Killed(Store):
    """Kills its own process right before or after the n-th commit."""
    count = 0
    async def _maybe(self, when):
        if (os.environ.get("KILL") or "") == f"{{when}}{{Killed.count}}":
            os.kill(os.getpid(), 9)
    async def create(self, commit, **options):
        Killed.count += 1
        await self._maybe("before")
        result = await super().create(commit, **options)
        await self._maybe("after")
        return result
    async def save(self, lease, commit, expected_revision):
        Killed.count += 1
        await self._maybe("before")
        result = await super().save(lease, commit, expected_revision)
        await self._maybe("after")
        return result

def answer(request):
    """A stateless model: what it says depends only on the history, as with a real one."""
    with open({calls!r}, "a") as file:
        file.write(f"{{len(request.messages)}}\n")
    last = request.messages[-1]
    text = getattr(last, "content", "")
    if text == "Ada":
        return Reply.tool_call("note", {{"text": "first"}})
    if text == "noted first":
        return Reply.tool_call("save_name", {{"name": "Ada"}})
    return "Is Ada right?"

async def main():
    model = ScriptedModel(default=answer)
    store = Killed({place!r})
    async with Engine([BookFlow], models={{"scripted": model}}, store=store) as engine:
        sessions, _ = await engine.list_sessions()
        if sessions:
            result = await engine.run("BookFlow", "and now?", session_id=sessions[0].id)
        else:
            result = await engine.run("BookFlow", "Ada")
        print(json.dumps(result.to_json()))
    await store.close()
asyncio.run(main())
'''


SQLITE = ("stepwell.sessions", "SqliteStore")
POSTGRES = ("stepwell.sessions.postgres", "PostgresStore")


def run(backend: tuple[str, str], place: str, calls: Path, kill: str) -> subprocess.CompletedProcess[str]:
    module, store = backend
    tests = str(Path(__file__).parents[1])
    code = SCRIPT.format(tests=tests, module=module, store=store, place=place, calls=str(calls))
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KILL": kill}, capture_output=True, text=True, check=False
    )


def check_integrity(db: Path) -> None:
    with closing(sqlite3.connect(db)) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)


def kill_and_go_on(backend: tuple[str, str], place: str, calls: Path, kill: str) -> None:
    first = run(backend, place, calls, kill)
    assert first.returncode == -signal.SIGKILL, first.stderr
    made = len(calls.read_text().splitlines()) if calls.exists() else 0
    if backend is SQLITE:
        check_integrity(Path(place))
    second = run(backend, place, calls, "")
    assert second.returncode == 0, second.stderr
    result = json.loads(second.stdout)
    assert result["success"], result
    assert result["message"] == "Is Ada right?"
    # Committed replies were not asked for again: at most the unit that was cut off is repeated.
    total = len(calls.read_text().splitlines())
    undisturbed = 3 if kill == "before1" else 4
    assert total <= undisturbed + 1
    assert made <= 3


KILLS = [f"{when}{n}" for n in range(1, 7) for when in ("before", "after")]


@pytest.mark.parametrize("kill", KILLS)
def test_promise_p5_a_killed_process_is_followed_by_one_that_goes_on_from_the_last_unit(
    tmp_path: Path, kill: str
) -> None:
    kill_and_go_on(SQLITE, str(tmp_path / "s.db"), tmp_path / "calls", kill)


@pytest.mark.parametrize("kill", KILLS)
def test_promise_p5_on_postgres(tmp_path: Path, postgres_database: str, kill: str) -> None:
    kill_and_go_on(POSTGRES, postgres_database, tmp_path / "calls", kill)
