"""Stepwell: the work of `common.py` as flows on an engine, configured as by default.

* `one_turn`, `conv3`, `stream`: memory store. `conv3_persist`, `chat_turn`: an SQLite file (NORMAL), a commit
  per unit. No telemetry, no listener, no channel.
* Three stages share one memory, so the history flows through; each hands the cursor on with its answer
  (`direct_to`), so that the next message starts in the next stage: 6 model calls and 3 tool calls, 12 commits.
* Sessions stay warm between the turns of a process (the default): `acquire` compares revision and epoch with the store
  and takes the lease there, but does not read the history again. `STEPWELL_WARM=0` turns that off: every turn then
  loads head and messages from the store, as the peers do.
* `resume`: sessions that wait for an approval in the file; nothing of them is in memory. Each is answered: it is
  loaded, its tool runs, and the model is called once more.
* Fan-out comes with a later part.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing

from common import ANSWER, SYS, TOK, USER, Base, model_called, tool_called

from stepwell import Engine, Flow, Step, direct_to, tool
from stepwell.engine import TextDelta as Shown
from stepwell.messages import UserMessage
from stepwell.models import Finish, StopReason, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart

SAYS = (TextDelta(ANSWER), Finish(stop=StopReason.COMPLETE))
CALLS = (
    ToolCallStart(0, "c1", "lookup"),
    ToolCallDelta(0, '{"q": "order"}'),
    ToolCallEnd(0),
    Finish(stop=StopReason.TOOL_CALLS),
)
WARM = int(os.environ.get("STEPWELL_WARM", "1000"))


class Stream:
    """An answer that is there at once."""

    __slots__ = ("events", "position")

    def __init__(self, events):
        self.events = events
        self.position = -1

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.position += 1
        if self.position == len(self.events):
            raise StopAsyncIteration
        return self.events[self.position]


class Fake:
    """A model gateway without a model."""

    def __init__(self):
        self.text = SAYS

    def validate(self, selection):
        return None

    def stream(self, request):
        model_called()
        return Stream(CALLS if request.tools and type(request.messages[-1]) is UserMessage else self.text)


class Chat(Step):
    """One stage without tools."""

    def get_prompt(self):
        return SYS["A"]


class Stage(Step):
    """A stage that looks something up, answers, and lets the next stage have the next message."""

    next: str | None = None

    def get_prompt(self):
        return SYS[self.id]

    @tool
    async def lookup(self, q: str) -> str:
        """Look up q."""
        tool_called()
        return "42"

    async def on_response(self, result):
        return direct_to(self.next, result) if self.next else None


class A(Stage):
    next = "B"


class B(Stage):
    next = "C"


class C(Stage):
    pass


class Guarded(Step):
    """A stage whose tool waits for an approval."""

    def get_prompt(self):
        return SYS["A"]

    @tool(approval=True)
    async def lookup(self, q: str) -> str:
        """Look up q."""
        tool_called()
        return "42"


class WaitingFlow(Flow):
    def config_model(self):
        return "fake:model"

    def define_steps(self):
        return [Guarded(self)]


class ChatFlow(Flow):
    def config_model(self):
        return "fake:model"

    def define_steps(self):
        return [Chat(self)]


class StagesFlow(Flow):
    def config_model(self):
        return "fake:model"

    def define_steps(self):
        return [stage(self).use_memory("main") for stage in (A, B, C)]


class Adapter(Base):
    name = "stepwell"
    fanout = None

    async def setup(self, tmp):
        await super().setup(tmp)
        self.model = Fake()
        self.memory, self.stored = [
            await Engine.create(
                [ChatFlow, StagesFlow, WaitingFlow], models={"fake": self.model}, store=store, warm_sessions=WARM
            )
            for store in ("memory://", f"sqlite:///{self.db_path}")
        ]
        self.sessions = {}

    async def one_turn(self):
        return (await self.memory.run_or_raise("ChatFlow", USER)).message

    async def _conversation(self, engine):
        session = None
        for _ in range(3):
            result = await engine.run_or_raise("StagesFlow", USER, session_id=session)
            session = result.session_id
        return result.message

    async def conv3(self):
        return await self._conversation(self.memory)

    async def conv3_persist(self, sid):
        return await self._conversation(self.stored)

    async def chat_turn(self, sid):
        result = await self.stored.run_or_raise("ChatFlow", USER, session_id=self.sessions.get(sid))
        self.sessions[sid] = result.session_id
        return result.message

    async def suspend(self, n):
        return [await self.stored.run_or_raise("WaitingFlow", USER) for _ in range(n)]

    async def resume(self, waits):
        return (await self.stored.answer(waits.session_id, waits.pending[0].id, True)).message

    async def stream(self, n):
        self.model.text = (*(TextDelta(TOK) for _ in range(n)), Finish(stop=StopReason.COMPLETE))
        count = 0
        async with self.memory.stream("ChatFlow", USER) as turn:
            async for event in turn:
                if type(event) is Shown:
                    count += 1
        return count

    async def checkpoint(self):
        """Copy the log into the file, as often as it takes: the store may be doing the same in its thread."""
        for _ in range(200):
            with closing(sqlite3.connect(self.db_path, timeout=5)) as connection:
                busy, _, _ = connection.execute("pragma wal_checkpoint(truncate)").fetchone()
            if not busy:
                return
            await asyncio.sleep(0.01)

    async def teardown(self):
        await self.memory.close()
        await self.stored.close()
