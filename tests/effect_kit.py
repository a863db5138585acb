"""A flow whose tools charge cards, a bank that remembers, and processes that die between any two of their acts."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from anyio import CancelScope

from stepwell import Engine, Flow, Outcome, Step, ToolCall, ToolContext, TurnResult, go, stay, tool, tools
from stepwell.errors import NotDone, StoreError
from stepwell.messages import HistoryCheck, ToolResult, UserMessage
from stepwell.models import ModelRequest
from stepwell.sessions import SessionStore
from stepwell.testing import Call, FakeClock, Reply, ScriptedModel


class Dead(StoreError):
    """The process does nothing any more."""


class Life:
    """One process, which dies at the so-many-th point that it passes: around each call of the store and each charge."""

    def __init__(self, ends_at: int | None = None) -> None:
        self.ends_at = ends_at
        self.points = 0
        self.dead = False

    def point(self) -> None:
        self.points += 1
        if self.points == self.ends_at:
            self.dead = True
        if self.dead:
            raise Dead("This process is dead.")


class Mortal:
    """A store as a process has it.

    Attributes:
        calls: How often each method was called.
        before: Awaited before a method does anything, with its name and arguments.
        behind: Awaited when it is done.
    """

    def __init__(self, inner: SessionStore, life: Life | None = None) -> None:
        self._inner, self._life = inner, life or Life()
        self.calls: Counter[str] = Counter()
        self.before: Callable[..., Awaitable[object]] = _nothing
        self.behind: Callable[..., Awaitable[object]] = _nothing

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            self._life.point()
            await self.before(name, *args)
            result = await found(*args, **options)
            await self.behind(name, *args)
            self._life.point()
            return result

        return call


async def _nothing(*_: object) -> None:
    return None


class Bank:
    """What happened outside, over all processes of a test. It knows its keys: the same one is charged once."""

    def __init__(self) -> None:
        self.life = Life()
        self.tried: list[tuple[str, str, int]] = []
        self.gate = asyncio.Event()
        self.reached = asyncio.Event()
        self.shield = False
        self.looked: Callable[[], Awaitable[object]] = _nothing

    def charge(self, tool: str, context: ToolContext) -> None:
        self.life.point()
        self.tried.append((tool, context.idempotency_key, context.attempt))
        self.life.point()

    def of(self, tool: str) -> list[tuple[str, int]]:
        """Keys and attempts."""
        return [(key, attempt) for name, key, attempt in self.tried if name == tool]


class PayStep(Step):
    bank: ClassVar[Bank]

    def get_prompt(self) -> str:
        return "Pay."

    def _paid(self, tool: str, context: ToolContext) -> str:
        self.save_state({tool: "begun"})
        self.bank.charge(tool, context)
        self.save_state({tool: context.idempotency_key.rpartition("-")[2]})
        return f"paid by {tool}"

    @tool(effect=True)
    async def fail(self, ctx: ToolContext) -> str:
        """Pay; if nobody knows, say so."""
        return self._paid("fail", ctx)

    @tool(effect=True, on_unknown="ask")
    async def ask(self, ctx: ToolContext) -> str:
        """Pay; if nobody knows, ask."""
        return self._paid("ask", ctx)

    @tool(effect=True, on_unknown="retry")
    async def retry(self, ctx: ToolContext) -> str:
        """Pay; if nobody knows, pay again under the same key."""
        return self._paid("retry", ctx)

    @tool(effect=True, approval=True, on_unknown="ask")
    async def allowed(self, ctx: ToolContext) -> str:
        """Pay, where a person allows it."""
        return self._paid("allowed", ctx)

    @tool
    async def look(self) -> str:
        """Look."""
        self.bank.life.point()
        await self.bank.looked()
        return "seen"

    @tool(effect=True)
    async def decline(self, ctx: ToolContext) -> str:
        """Is declined."""
        self.save_state({"decline": "begun"})
        self.bank.charge("decline", ctx)
        raise NotDone("the card was declined")

    @tool(effect=True)
    async def leave(self, ctx: ToolContext) -> Outcome:
        """Pay, and go on elsewhere."""
        self._paid("leave", ctx)
        self.get_memory().append(UserMessage(content="Paid on leaving.", by="code"))
        return go(ThanksStep).with_state({"tip": {"given": True}}).with_message("They paid.").with_tool_feedback("bye")

    @tool(effect=True, on_error="report")
    async def boom(self, ctx: ToolContext) -> str:
        """Break."""
        self.bank.charge("boom", ctx)
        raise ValueError("the line broke")

    @tool(effect=True, on_error="raise")
    async def crash(self, ctx: ToolContext) -> str:
        """Break, and fail the turn."""
        self.bank.charge("crash", ctx)
        raise ValueError("the line broke")

    @tool(effect=True, timeout=20, on_error="report")
    async def slow(self, ctx: ToolContext) -> str:
        """Wait for the test."""
        self.bank.reached.set()
        with CancelScope(shield=self.bank.shield):
            await self.bank.gate.wait()
        return self._paid("slow", ctx)

    @tool(effect=True)
    async def give(self, ctx: ToolContext) -> str:
        """Give."""
        return self._paid("give", ctx)

    @tool(effect=True)
    async def take(self, ctx: ToolContext) -> str:
        """Take."""
        return self._paid("take", ctx)

    @tools("give", "take", effect=True)
    async def both(self, calls: Sequence[ToolCall], ctx: ToolContext) -> Outcome:
        return stay(self._paid("both", ctx))


class ThanksStep(Step):
    def get_prompt(self) -> str:
        return "Thank."


class PayFlow(Flow):
    def config_model(self) -> str:
        return "scripted:m"

    def define_steps(self) -> list[Step[Any, Any]]:
        return [PayStep(self), ThanksStep(self)]


class SideBySideFlow(PayFlow):
    parallel_tools = True


def talk(request: ModelRequest) -> Any:
    """`tool, tool` of the person's newest message as calls of one reply; then what came of them, as text."""
    results: list[str] = []
    for message in reversed(request.messages):
        if isinstance(message, ToolResult):
            results.insert(0, f"{message.name} {message.outcome}")
        elif isinstance(message, UserMessage) and message.by == "user":
            if results or request.system != "Pay.":
                break
            return Reply.tool_calls(*(Call(name, id=f"c-{at}") for at, name in enumerate(message.text.split(", "))))
    return ", ".join(results) or "Thank you."


def engine_on(store: Any, clock: FakeClock, flow: type[Flow] = PayFlow, **options: Any) -> Engine:
    options.setdefault("recovery_interval", None)
    model = ScriptedModel(default=talk)
    model.clock = clock
    return Engine([flow], models={"scripted": model}, store=store, clock=clock, **options)


async def live(
    bank: Bank,
    store: SessionStore,
    clock: FakeClock,
    life: Life,
    text: str | None,
    flow: type[Flow] = PayFlow,
    dice: random.Random | None = None,
) -> TurnResult | None:
    """A process from its start to its end, or death: says something, or recovers what is there. `None`: it died.

    With `dice` its store takes a while, which is another one each time.
    """
    bank.life = life
    mortal = Mortal(store, life)
    if dice is not None:

        async def dawdle(*__: object) -> None:
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)

        mortal.before = mortal.behind = dawdle
    engine = engine_on(mortal, clock, flow)
    try:
        await engine.start()
        with suppress(Dead):
            if text is not None:
                result = await engine.run(flow.id, text, session_id=None, idempotency_key="k")
            else:
                [session], _ = await store.list()
                result = await engine.recover(session.id)
            return None if life.dead else result
    finally:
        await engine.close()
        bank.life = Life()
    return None


async def stored(store: SessionStore, ns: str = "PayStep") -> dict[str, tuple[str, Any]]:
    """What came of each call, by its tool, from a history that providers accept."""
    [session], _ = await store.list()
    rows = await store.load_messages(session.id, ns)
    HistoryCheck().add_all([row.message for row in rows])
    return {
        row.message.name: (row.message.outcome, row.message.content)
        for row in rows
        if isinstance(row.message, ToolResult)
    }


async def outcomes(store: SessionStore) -> list[str]:
    """How each call ended, in order, from a history that providers accept."""
    [session], _ = await store.list()
    history = [row.message for row in await store.load_messages(session.id, "PayStep")]
    HistoryCheck().add_all(history)
    return [message.outcome for message in history if isinstance(message, ToolResult)]


async def state(store: SessionStore, stage: str = "PayStep") -> dict[str, Any]:
    """What a stage has kept."""
    [session], _ = await store.list()
    head, _ = await store.load(session.id)
    record = head.stages.get(stage)
    return {k: v for k, v in record.state.items() if not k.startswith("_")} if record else {}


async def journal(store: SessionStore) -> list[str]:
    """The states of the rows that are left."""
    [session], _ = await store.list()
    return [row.state for row in await store.journal_load(session.id)]
