"""Whatever order answers, expiries, repeats and deaths of processes come in: a call gets what it was given first."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell import Engine, TurnResult
from stepwell.channels import MemoryChannels
from stepwell.errors import UnknownRequestError
from stepwell.messages import HistoryCheck, ToolResult
from stepwell.sessions import InboxRow, MemoryStore
from stepwell.testing import FakeClock, ScriptedModel
from suspension_flows import DeskFlow, DeskStep, talk

CALLS = ["refund 5", "ask red", "locate", "ask blue 100", "look sky", "ask green 300"]
VALUES: dict[str, list[Any]] = {"approval": [True, False], "question": ["dark", {"a": 1}], "client_tool": [1, "x"]}

actions = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 5), st.integers(0, 1), st.integers(0, 1)),
    st.tuples(st.just("written"), st.integers(0, 5), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("recover"), st.just(0), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("restart"), st.just(0), st.just(0), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([10, 60, 150]), st.just(0), st.just(0)),
)


class Desk:
    """Two processes on one session, and what it must come to."""

    def __init__(self, channels: bool) -> None:
        self.clock = FakeClock(auto_advance=True)
        self.store = MemoryStore(self.clock)
        self.channels = MemoryChannels(clock=self.clock) if channels else None
        self.engines: list[Engine] = []
        self.want: dict[str, Any] = {}  # by call: what was answered first, in time

    async def start(self) -> Engine:
        model = ScriptedModel(default=talk)
        model.clock = self.clock
        return await Engine.create(
            [DeskFlow], models={"scripted": model}, store=self.store, channels=self.channels, clock=self.clock,
            recovery_interval=None,
        )  # fmt: skip

    async def play(self, calls: list[str], script: list[tuple[str, int, int, int]]) -> None:
        DeskStep.ran = []
        self.engines = [await self.start(), await self.start()]
        try:
            self.waits = await self.engines[0].run("DeskFlow", ", ".join(calls))
            for action, what, value, engine in script:
                await self.act(action, what, value, engine)
            await self.finish()
            await self.check(calls)
        finally:
            for engine in self.engines:
                await engine.close()

    async def act(self, action: str, what: int, value: int, engine: int) -> None:
        session = self.waits.session_id
        if action == "wait":
            await self.clock.advance(what)
        elif action == "recover":
            await self.engines[engine].recover_all()
        elif action == "restart":
            await self.engines[engine].close()
            self.engines[engine] = await self.start()
        elif self.waits.pending:
            one = self.waits.pending[what % len(self.waits.pending)]
            given = VALUES[one.kind][value]
            late = one.expires is not None and one.expires <= self.clock.time()
            if action == "answer":
                await self.answer(self.engines[engine], one.id, given, late=late and one.call not in self.want)
            elif not late:
                await self.store.inbox_put(session, InboxRow(one.id, "answer", msgspec.json.encode({"value": given})))
            if not late:
                self.want.setdefault(one.call, given)

    async def answer(self, engine: Engine, request: str, value: Any, *, late: bool) -> None:
        try:
            result = await engine.answer(self.waits.session_id, request, value)
        except UnknownRequestError:
            assert late
        else:
            assert not late
            assert isinstance(result, TurnResult)
            assert result.error is None

    async def finish(self) -> None:
        """Whatever is left is answered by one process, in order."""
        for at, one in enumerate(self.waits.pending):
            if one.call not in self.want and (one.expires or self.clock.time() + 1) > self.clock.time():
                await self.act("answer", at, 0, 0)
        await self.engines[0].recover_all()
        await self.engines[1].recover_all()

    async def check(self, calls: list[str]) -> None:
        head, _ = await self.store.load(self.waits.session_id)
        assert (head.turn, head.status) == (None, "running")
        assert await self.store.due() == []
        rows = [row.message for row in await self.store.load_messages(self.waits.session_id, "DeskStep")]
        HistoryCheck().add_all(rows)
        got = {row.call: row.content for row in rows if isinstance(row, ToolResult)}
        assert got == {f"c-{at}": self.result(f"c-{at}", call) for at, call in enumerate(calls)}
        assert [type(row).__name__ for row in rows][-1] == "AssistantMessage"
        assert rows[-1].text == "; ".join(f"{call.split()[0]}={got[f'c-{at}']}" for at, call in enumerate(calls))  # type: ignore[union-attr]
        for call in calls:
            if call.startswith(("ask", "look")):
                assert DeskStep.ran.count(" ".join(call.split()[:2])) == 1
        assert DeskStep.ran.count("refund 5") <= 1

    def result(self, call: str, said: str) -> Any:
        if said.startswith("look"):
            return "saw sky"
        if call not in self.want:
            return {"expired": True}
        value = self.want[call]
        if said.startswith("refund"):
            return "refunded 5" if value else {"approved": False}
        return {"answered": value} if said.startswith("ask") else value


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(CALLS), min_size=1, max_size=4, unique=True),
    st.lists(actions, max_size=12),
    st.booleans(),
)
def test_every_order_comes_to_what_was_answered_first(
    calls: list[str], script: list[tuple[str, int, int, int]], channels: bool
) -> None:
    asyncio.run(Desk(channels).play(calls, script))
