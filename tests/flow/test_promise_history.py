"""P8. History a provider accepts: whatever fails, is cancelled, erased or cut, every call has its result, once."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, ClassVar

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flow_kit import flow_of, stage
from stepwell import CallPolicy, Flow, Step, direct, direct_to, finish, go, stay, tool, tools
from stepwell.messages import HistoryCheck
from stepwell.models import ModelRequest
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel, TurnHarness

TOOLS = (
    "note", "fail", "report", "slow", "thread", "move", "answer", "hand_over", "end", "wrong", "erase", "attach",
    "pair_a", "pair_b", "nothing",
)  # fmt: skip


class Busy(Step):
    clock: ClassVar[FakeClock]

    @tool
    async def note(self) -> Any:
        self.get_memory().append("a note")
        return stay("noted").with_message("for later")

    @tool
    async def fail(self) -> None:
        raise RuntimeError("no")

    @tool(on_error="report")
    async def report(self) -> None:
        self.get_memory().append("never")
        raise RuntimeError("no")

    @tool(timeout=1, on_error="report")
    async def slow(self) -> None:
        await self.clock.sleep(math.inf)

    @tool
    def thread(self) -> str:
        self.get_memory().append("from a thread")
        return "done"

    @tool
    async def move(self) -> Any:
        return go(self.other).with_message("Hello.")

    @tool
    async def answer(self) -> Any:
        return direct("From code.")

    @tool
    async def hand_over(self) -> Any:
        return direct_to(self.other, "Over to the other.")

    @tool
    async def end(self) -> Any:
        return finish("Bye.")

    @tool
    async def wrong(self) -> Any:
        self.get_memory().append("never")
        return go("Nowhere")

    @tool
    async def erase(self) -> str:
        self.erase_memory()
        return "erased"

    @tool
    async def attach(self) -> Any:
        return stay().with_messages("a picture")

    @tool
    async def pair_a(self) -> str:
        return "a"

    @tool
    async def pair_b(self) -> str:
        return "b"

    @tools("pair_a", "pair_b")
    async def pair(self, calls: Any) -> Any:
        return stay("both").with_messages("of both")

    @property
    def other(self) -> str:
        return "B" if self.id == "A" else "A"

    async def on_enter(self) -> None:
        self.get_memory().append("entered")

    async def on_response(self, result: str) -> Any:
        match result:
            case "rewrite":
                return "Mine."
            case "route":
                return go(self.other)
            case "drop":
                self.erase_memory()
        return None


calls = st.builds(
    Call,
    st.sampled_from(TOOLS),
    id=st.sampled_from(["same", "", "other", None]),
    raw=st.sampled_from([None, None, None, "[1]"]),
)
texts = st.sampled_from(["Fine.", "rewrite", "drop", "route"]).map(Reply.text)
batches = st.lists(calls, min_size=1, max_size=4).map(lambda c: Reply.tool_calls(*c))
troubles = st.sampled_from([
    Reply.error(status=503), Reply.error(status=400), Reply.empty(), Reply.refusal("No."),
    Reply.truncated("Half a", calls=[Call("note", raw='{"', ended=False)]), Reply.truncated("Half a text"),
    Reply.text("Broken").failing(after=1, status=500), Reply.blocked(text="Bad", calls=[Call("note")]),
    Reply.text("Hangs").stalling(after=1), Reply.tool_call("note").stopping("malformed_tool_call"),
])  # fmt: skip
turns = st.lists(st.one_of(texts, batches, batches, troubles), min_size=1, max_size=4)


def talkative(shared: bool, parallel: bool, summary: bool) -> type[Flow]:
    a, b = stage("A", base=Busy), stage("B", base=Busy)

    def define_steps(self: Flow) -> list[Step]:
        return [a(self).use_memory("talk"), b(self).use_memory("talk")] if shared else [a(self), b(self)]

    async def init(self: Flow) -> None:
        if summary:
            for ns in ("talk", "A", "B"):
                self.memory.enable_summary(ns, model="scripted:sum", min_messages=4, recent_messages=1)

    return flow_of(
        a,
        b,
        define_steps=define_steps,
        init=init,
        parallel_tools=parallel,
        config_llm_call_policy=lambda self: CallPolicy(attempts=2, idle_timeout=5, max_agent_rounds=6),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    script=st.lists(turns, min_size=1, max_size=5),
    cancel=st.sets(st.integers(0, 4), max_size=2),
    restart=st.booleans(),
    shared=st.booleans(),
    parallel=st.booleans(),
    summary=st.booleans(),
)
def test_every_stored_history_is_one_that_a_provider_accepts(
    script: list[list[Any]], cancel: set[int], restart: bool, shared: bool, parallel: bool, summary: bool
) -> None:
    flow = talkative(shared, parallel, summary)
    anyio.run(_talk, flow, script, cancel, restart)


async def _talk(flow: type[Flow], script: list[list[Any]], cancel: set[int], restart: bool) -> None:
    queue: deque[Any] = deque()

    def reply(request: ModelRequest) -> Any:
        if request.selection.name == "sum":
            return "Short."
        return queue.popleft() if queue else "Fine."

    model = ScriptedModel(default=reply)
    sessions: set[str] = set()
    harness = TurnHarness(flow, model=model)
    Busy.clock = harness.clock
    async with harness.engine:
        for number, replies in enumerate(script):
            queue.extend(replies)
            async with harness.engine.stream(flow.id, f"turn {number}", session_id=harness.session_id) as turn:
                seen = 0
                async for _ in turn:
                    seen += 1
                    if number in cancel and seen == 3 + number:
                        turn.cancel()
            harness.session_id = turn.result.session_id or harness.session_id
            sessions.add(str(harness.session_id))
            queue.clear()
            for session in sessions:
                await _check(harness, session)
            if restart:
                await harness.restart()
        await harness.engine.close()
    for request in model.requests:
        check = HistoryCheck()
        check.add_all(request.messages)
        assert not check.open, "a model was asked while calls were open"


async def _check(harness: TurnHarness, session: str) -> None:
    head = await harness.engine.get_session(session)
    assert head.get("turn") is None
    for ns in head.get("memories", {}):
        rows = await harness.store.load_messages(session, ns)
        check = HistoryCheck()
        check.add_all(row.message for row in rows)
        assert not check.open
        ids = [row.message.id for row in rows]
        assert len(set(ids)) == len(ids)
        assert not any(getattr(row.message, "text", "") == "never" for row in rows)
