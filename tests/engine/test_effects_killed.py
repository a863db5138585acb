"""An effect in a process that is killed with -9: between the intent, the charge, the result and the commit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = r"""
import asyncio, json, os, sys
sys.path.insert(0, sys.argv[1])
from stepwell import Engine, Flow, Step, ToolContext, tool
from stepwell.testing import Call, Reply, ScriptedModel
from {module} import {store} as Store

PLACE, KILL, CHARGES = sys.argv[2], sys.argv[3], sys.argv[4]
DOOMED = "charge_ask" if KILL.endswith("ask") else "charge"

def die(where, tool):
    if KILL == where + (" ask" if tool == "charge_ask" else ""):
        os.kill(os.getpid(), 9)

class Killed(Store):
    async def journal_put(self, lease, row):
        tool = json.loads(row.data)["tool"]
        die(f"before {{row.state}}", tool)
        await super().journal_put(lease, row)
        die(f"after {{row.state}}", tool)
    async def save(self, lease, commit, expected_revision):
        if commit.clear_journal:
            die("before commit", DOOMED)
        revision = await super().save(lease, commit, expected_revision)
        if commit.clear_journal:
            die("after commit", DOOMED)
        return revision

class PayStep(Step):
    def charged(self, name, ctx):
        die("in the body", name)
        with open(CHARGES, "a") as file:
            file.write(f"{{name}} {{ctx.idempotency_key}}\n")
            file.flush()
            os.fsync(file.fileno())
        die("behind the charge", name)
        self.save_state({{name: True}})
        return "paid"
    @tool(effect=True)
    async def charge(self, ctx: ToolContext) -> str:
        return self.charged("charge", ctx)
    @tool(effect=True, on_unknown="ask")
    async def charge_ask(self, ctx: ToolContext) -> str:
        return self.charged("charge_ask", ctx)

class PayFlow(Flow):
    def config_model(self):
        return "scripted:m"
    def define_steps(self):
        return [PayStep(self)]

def answer(request):
    results = [m for m in request.messages if hasattr(m, "outcome")]
    if results:
        return ", ".join(f"{{m.name}} {{m.outcome}}" for m in results)
    return Reply.tool_calls(Call("charge"), Call("charge_ask"))

async def main():
    store = Killed(PLACE)
    async with Engine([PayFlow], models={{"scripted": ScriptedModel(default=answer)}}, store=store) as engine:
        sessions, _ = await engine.list_sessions()
        if sessions:
            result = await engine.recover(sessions[0].id)
            asked = [one.kind for one in result.pending]
            if asked:
                result = await engine.answer(sessions[0].id, result.pending[0].id, "it did not")
            # Where the last unit was committed, recovery only closes the turn.
            history = await store.load_messages(sessions[0].id, "PayStep")
            head, _ = await store.load(sessions[0].id)
            print(json.dumps({{
                "success": result.success, "asked": asked, "state": sorted(head.stages["PayStep"].state),
                "outcomes": {{row.message.name: row.message.outcome for row in history
                             if hasattr(row.message, "outcome")}},
                "journal": len(await store.journal_load(sessions[0].id)), "open": head.turn is not None,
            }}))
        else:
            await engine.run("PayFlow", "pay")
    await store.close()
asyncio.run(main())
"""

SQLITE = ("stepwell.sessions", "SqliteStore")
POSTGRES = ("stepwell.sessions.postgres", "PostgresStore")

# Where the process dies, and then: outcomes of both calls, whether somebody was asked, how often each was charged.
KILLS: list[tuple[str, tuple[str, str], bool, tuple[int, int]]] = [
    ("before intent", ("ok", "ok"), False, (1, 1)),
    ("after intent", ("unknown", "ok"), False, (0, 1)),
    ("in the body", ("unknown", "ok"), False, (0, 1)),
    ("behind the charge", ("unknown", "ok"), False, (1, 1)),
    ("before done", ("unknown", "ok"), False, (1, 1)),
    ("after done", ("ok", "ok"), False, (1, 1)),
    ("before intent ask", ("ok", "ok"), False, (1, 1)),
    ("after intent ask", ("ok", "ok"), True, (1, 0)),
    ("behind the charge ask", ("ok", "ok"), True, (1, 1)),
    ("before done ask", ("ok", "ok"), True, (1, 1)),
    ("after done ask", ("ok", "ok"), False, (1, 1)),
    ("before commit", ("ok", "ok"), False, (1, 1)),
    ("after commit", ("ok", "ok"), False, (1, 1)),
]


def run(backend: tuple[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(module=backend[0], store=backend[1])
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)


def kill_and_recover(backend: tuple[str, str], place: str, charges: Path, kill: tuple[Any, ...]) -> None:
    where, outcomes, asked, counts = kill
    charges.touch()
    first = run(backend, place, where, str(charges))
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = run(backend, place, "", str(charges))
    assert second.returncode == 0, second.stderr
    found = json.loads(second.stdout)
    assert found["success"]
    assert found["outcomes"] == dict(zip(("charge", "charge_ask"), outcomes, strict=True))
    assert found["asked"] == (["question"] if asked else [])
    lines = charges.read_text().split("\n")[:-1]
    names = [line.split()[0] for line in lines]
    assert (names.count("charge"), names.count("charge_ask")) == counts
    # What a handler wrote counts where its result is known, and only there.
    known = [name for name, outcome in zip(("charge", "charge_ask"), outcomes, strict=True) if outcome == "ok"]
    assert [key for key in found["state"] if key != "_saved_at"] == [
        name for name in known if not (asked and name == "charge_ask")
    ]
    assert (found["journal"], found["open"]) == (0, False)


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill[0])
def test_scenario_C23_killed_around_an_effect_on_sqlite(tmp_path: Path, kill: tuple[Any, ...]) -> None:  # noqa: N802
    kill_and_recover(SQLITE, str(tmp_path / "s.db"), tmp_path / "charges", kill)


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill[0])
def test_scenario_C23_killed_around_an_effect_on_postgres(  # noqa: N802
    tmp_path: Path, postgres_database: str, kill: tuple[Any, ...]
) -> None:
    kill_and_recover(POSTGRES, postgres_database, tmp_path / "charges", kill)
