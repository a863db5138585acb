"""A world in which everything happens in an order that a seed decides.

Real engines, real clients, the memory store and the memory channels run in one event loop that has no clock and no
sockets. Every call of a store or a channel, and every token of the model, waits at a point until the world lets it go
on. Whenever nothing can go on by itself, the world does one thing: lets somebody go on, loses a request or an answer,
kills a process, lets time pass, starts a process, lets a client come or a person say something. At the end time is
given to everybody, and what clients see is compared with what is stored.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
import selectors
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from stepwell import Engine, Flow, NotDone, Step, SuspendRequest, ToolContext, go, suspend, tool
from stepwell.channels import MemoryChannels
from stepwell.engine import Committed, TurnEvent, UnitStarted
from stepwell.errors import ChannelBusyError, ModelInvocationError, StoreBusyError, UnknownRequestError
from stepwell.loop import CallPolicy
from stepwell.messages import AssistantMessage, DirectMessage, ToolCall, ToolResult, UserMessage
from stepwell.models import Finish, ModelEvent, ModelRequest, StopReason, TextDelta, ToolCallEnd, ToolCallStart
from stepwell.sessions import MemoryStore
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import H, Name, transport_headers

LEASE = 15.0
DEFINITIONS: dict[str, Any] = {}
_owner: contextvars.ContextVar[Owner | None] = contextvars.ContextVar("sim_owner", default=None)


class Owner:
    """Whose task something is: a process, a client, or the people outside."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.stalled_until = 0  # the step up to which it does nothing at all, and does not know it
        self.overdue: list[_Timer] = []
        self.tasks: set[asyncio.Task[Any]] = set()


class _Nothing(selectors.BaseSelector):
    """No file is ever ready; being asked to wait means that nothing can go on by itself."""

    def __init__(self, idle: Callable[[], None]) -> None:
        self._idle = idle
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Any:
        return self._keys

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout != 0:
            self._idle()
        return []


class _Timer:
    __slots__ = ("action", "context", "owner")

    def __init__(self, action: Callable[[], object] | None) -> None:
        self.action = action
        self.owner = _owner.get()
        self.context = contextvars.copy_context()

    def cancel(self) -> None:
        self.action = None


class WorldClock:
    """The one clock of the world. Whoever is dead has no timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._count = 0

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def monotonic(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        timer = _Timer(callback)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        timer = self.call_at(self.now + seconds, lambda: future.done() or future.set_result(None))
        try:
            await future
        finally:
            timer.cancel()

    def advance(self, seconds: float) -> None:
        """Let time pass, and what is due by then happen."""
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            _, _, timer = heapq.heappop(self._timers)
            if timer.owner is not None and timer.owner.stalled_until:
                timer.owner.overdue.append(timer)
            else:
                self.fire(timer)

    def fire(self, timer: _Timer) -> None:
        """Let what was waited for happen."""
        if timer.action is not None and not (timer.owner and timer.owner.dead):
            asyncio.get_running_loop().call_soon(timer.action, context=timer.context)

    def next_in(self) -> float | None:
        """Seconds to the next timer."""
        while self._timers and (
            self._timers[0][2].action is None or (self._timers[0][2].owner and self._timers[0][2].owner.dead)
        ):
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.now) if self._timers else None


class _Proxy:
    """A store or channel behind a network: requests and answers may be lost, and whoever asks may die meanwhile."""

    def __init__(self, inner: Any, world: World, owner: Owner, error: type[Exception]) -> None:
        self._inner, self._world, self._owner, self._error = inner, world, owner, error

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not asyncio.iscoroutinefunction(found):
            return found
        world, owner = self._world, self._owner

        async def call(*args: Any, **kwargs: Any) -> Any:
            await world.point(owner, name)
            if world.lost():
                raise self._error("The request was lost.")
            result = await found(*args, **kwargs)
            await world.point(owner, f"{name}+")
            if world.lost():
                world.counts["lost answers"] += 1
                raise self._error("The answer was lost.")
            return result

        return call


class _Channels:
    """The channels as one process or client has them."""

    def __init__(self, world: World, owner: Owner) -> None:
        self._world, self._owner = world, owner
        self.capabilities = world.channels.capabilities

    async def open(self, name: str) -> Any:
        return _Channel(await self._world.channels.open(name), self._world, self._owner, ChannelBusyError)

    async def delete(self, name: str) -> None:
        await self._world.channels.delete(name)

    async def close(self) -> None:
        return None


class _Channel(_Proxy):
    @asynccontextmanager
    async def subscribe(self, *, after: Any = None) -> AsyncGenerator[Any]:
        async with self._inner.subscribe(after=after) as subscription:
            yield _Subscription(subscription, self._world, self._owner)


class _Subscription:
    def __init__(self, inner: Any, world: World, owner: Owner) -> None:
        self._inner, self._world, self._owner = inner, world, owner

    @property
    def start(self) -> Any:
        return self._inner.start

    async def read(self, limit: int = 256) -> Any:
        await self._world.point(self._owner, "read")
        return await self._inner.read(self._world.rng.randint(1, 4))


# -- what is run


class Stage(Step[Any, Any]):
    """Says what the model says, unless the model says that it should do something else."""

    def get_prompt(self) -> str:
        return self.id

    @tool
    async def look(self, n: int) -> str:
        """Look something up."""
        await self.flow.world.point(_owner.get(), "tool")
        self.merge_state({"looked": {str(n): True}})
        return f"seen {n}"

    @tool(approval=True)
    async def pay(self, n: int) -> str:
        """Pay for something."""
        await self.flow.world.point(_owner.get(), "tool")
        self.flow.world.counts["paid"] += 1
        return f"paid {n}"

    @tool
    async def fetch(self, n: int) -> Any:
        """Let the client fetch something, in time."""
        await self.flow.world.point(_owner.get(), "tool")
        return suspend(SuspendRequest("client_tool", {"n": n}, 20.0 if n % 3 == 0 else None))

    async def _charged(self, n: int, context: ToolContext) -> str:
        world, owner = self.flow.world, _owner.get()
        await world.point(owner, "tool")
        world.charges[context.idempotency_key] += 1
        await world.point(owner, "tool")
        self.merge_state({"charged": {str(n): True}})
        if n % 4 == 0:
            raise NotDone("the money came back")
        if n % 7 == 0:
            raise ValueError("the line broke")
        return f"charged {n}"

    @tool(effect=True, on_error="report")
    async def charge(self, n: int, ctx: ToolContext) -> str:
        """Charge a card; who does not know whether it was charged says so."""
        return await self._charged(n, ctx)

    @tool(effect=True, on_error="report", on_unknown="ask")
    async def book(self, n: int, ctx: ToolContext) -> str:
        """Charge a card; who does not know whether it was charged asks."""
        return await self._charged(n, ctx)

    @tool(effect=True, on_error="report", on_unknown="retry")
    async def renew(self, n: int, ctx: ToolContext) -> str:
        """Charge a card, where the same key is charged once."""
        return await self._charged(n, ctx)

    async def on_answer(self, request: Any, value: Any) -> Any:
        await self.flow.world.point(_owner.get(), "hook")
        return f"got {value}"

    def check_response(self, candidate: Any) -> bool:
        return "REJECT" in candidate.text

    async def on_response(self, result: Any) -> Any:
        await self.flow.world.point(_owner.get(), "hook")
        if "REWRITE" in result:
            return "code says otherwise"
        if "GO" in result:
            return go(Held if isinstance(self, Live) else Live)
        return None

    async def on_llm_error(self, context: Any) -> Any:
        return "sorry" if self.flow.world.rng.random() < 0.5 else None


class Live(Stage):
    stream_mode = "live"


class Held(Stage):
    stream_mode = "held"


class SimFlow(Flow):
    busy_timeout = 5.0

    @property
    def world(self) -> World:
        owner = _owner.get()
        assert isinstance(owner, Process)
        return owner.world

    def config_model(self) -> str:
        return "sim:m"

    def config_llm_call_policy(self) -> CallPolicy:
        return CallPolicy(attempts=2, retry_delay=0.01)

    def define_steps(self) -> list[Step[Any, Any]]:
        return [Live(self).use_memory("talk"), Held(self).use_memory("talk")]


HOW = ("fine", "fine", "fine", "tools", "tools", "GO ", "REWRITE ", "REJECT ", "broken", "at once")
HOW_IT_WAITS = ("fine", "tools", "tools", "tools", "GO ", "broken")


class Model:
    """Says something random, token by token, and sometimes breaks off."""

    def __init__(self, world: World, owner: Owner) -> None:
        self._world, self._owner = world, owner

    def validate(self, selection: Any) -> None:
        return None

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncGenerator[AsyncIterator[ModelEvent]]:
        yield self._events()

    async def _events(self) -> AsyncGenerator[ModelEvent]:
        world = self._world
        rng = world.rng
        world.said += 1
        number = world.said
        tokens = [f"{number}.{i} " for i in range(rng.randint(1, 4))]
        how = rng.choice(HOW_IT_WAITS if world.waits else HOW)
        if how == "at once":
            raise ModelInvocationError("The provider is away.", status=503)
        if how == "broken":
            tokens = tokens[: rng.randint(1, len(tokens))]
        elif how.isupper():
            tokens.append(how)
        for token in tokens if how != "tools" or rng.random() < 0.5 else ():
            await world.point(self._owner, "token")
            yield TextDelta(token)
        if how == "broken":
            raise ModelInvocationError("The connection broke.", status=None)
        if how == "tools":
            for index in range(rng.randint(1, 3 if world.waits else 2)):
                name = rng.choice(world.tools)
                yield ToolCallStart(index, f"c{number}-{index}", name)
                await world.point(self._owner, "token")
                yield ToolCallEnd(index, {"n": number * 10 + index})
        yield Finish(stop=StopReason.TOOL_CALLS if how == "tools" else StopReason.COMPLETE)


# -- the world


class World:
    """One schedule.

    Args:
        seed: Decides everything.
        inputs: How much is said.
        calm_after: Steps after which nothing bad happens any more.
        faults: How many messages are lost.
        waits: With tools that people and clients have to answer for.
        effects: With tools that must not run twice.
    """

    def __init__(
        self,
        seed: int,
        *,
        inputs: int = 2,
        calm_after: int = 300,
        faults: float = 0.02,
        waits: bool = False,
        effects: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.waits = waits or effects
        self.tools = ("look", *(("charge", "book", "renew") if effects else ("pay", "fetch") if waits else ()))
        self.charges: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.bad: list[str] = []
        self.said = 0
        self.steps = 0
        self._calm_after = calm_after
        self._faults = faults
        self._points: list[tuple[Owner, str, asyncio.Future[None]]] = []
        self._left = [f"input {n}" for n in range(inputs)]
        self._people: list[asyncio.Task[Any]] = []
        self._done: dict[str, Any] = {}
        self._committed: set[str] = set()
        self.processes: list[Process] = []
        self.clients: list[Client] = []
        self.outside = Owner("people")
        self._names = 0
        self._ending = False
        self._over = False

    # -- what everybody calls

    async def point(self, owner: Owner | None, name: str) -> None:
        """Wait until the world lets `owner` go on."""
        assert owner is not None
        if owner.dead:
            raise asyncio.CancelledError
        future = asyncio.get_running_loop().create_future()
        self._points.append((owner, name, future))
        await future

    def lost(self) -> bool:
        """Whether this message is lost."""
        return self.rng.random() < self._faults and not self.calm

    @property
    def calm(self) -> bool:
        """Whether nothing bad happens any more."""
        return self._ending or self.steps > self._calm_after

    def spawn(self, owner: Owner, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """A task of `owner`, and all that it starts."""
        context = contextvars.copy_context()
        context.run(_owner.set, owner)
        return context.run(asyncio.ensure_future, work)

    # -- the schedule

    def run(self) -> World:
        """Play it through; what went wrong is in `bad`."""
        loop = asyncio.SelectorEventLoop(_Nothing(self._step))
        loop.set_task_factory(self._task)
        try:
            loop.run_until_complete(self._main())
        finally:
            loop.close()
        return self

    def _task(self, loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        owner = _owner.get()
        if owner is not None:
            owner.tasks.add(task)
            task.add_done_callback(owner.tasks.discard)
        return task

    async def _main(self) -> None:
        self.clock = WorldClock()
        self.store = MemoryStore(self.clock)
        self.channels = MemoryChannels(clock=self.clock)
        self._finished = asyncio.get_running_loop().create_future()
        await self._finished
        self._over = True
        for owner in (*self.processes, *self.clients, self.outside):
            owner.dead = True
            while owner.tasks:
                for task in list(owner.tasks):
                    task.cancel()
                await asyncio.sleep(0)

    def _step(self) -> None:
        """Nothing can go on by itself: do one thing."""
        self.steps += 1
        if self._over or self._finished.done():
            return None
        if self.steps > 20_000:
            self.bad.append("stuck")
            self._finished.set_result(None)
            return None
        for process in self.processes:
            if process.stalled_until and (self.calm or self.steps > process.stalled_until):
                process.stalled_until = 0
                for timer in process.overdue:
                    self.clock.fire(timer)
                process.overdue.clear()
                return None
        self._points = [one for one in self._points if not one[0].dead and not one[2].done()]
        if self._ending or (not self._left and not self._points and self._settled()):
            return self._end()
        x = self.rng.random()
        alive = [process for process in self.processes if not process.dead]
        if not self.calm:
            if x < 0.02 and alive:
                return self._crash(self.rng.choice(alive))
            if x < 0.03:
                return self.clock.advance(self.rng.choice((0.3, 6.0, LEASE + 1)))
            if x < 0.035 and alive:
                return self._stall(self.rng.choice(alive))
        if not alive or (x < 0.06 and len(alive) < 3):
            return self._start()
        if x < 0.09 and self._left:
            return self._say(self._left.pop())
        if x < 0.12 and len(self.clients) < 3 and self._done_or_begun:
            return self._join()
        if x < 0.125:
            self.spawn(process := self.rng.choice(alive), process.recover())
            return None
        able = [index for index, one in enumerate(self._points) if not one[0].stalled_until]
        if able:
            _, _, future = self._points.pop(self.rng.choice(able))
            return future.set_result(None)
        return self._wait()

    def _wait(self) -> None:
        wait = self.clock.next_in()
        self.clock.advance(wait if wait is not None else 1.0)

    @property
    def _done_or_begun(self) -> bool:
        return bool(self.store._sessions)

    def _crash(self, process: Process) -> None:
        self.counts["crashes"] += 1
        process.dead = True
        process.death.set_result(None)

    def _stall(self, process: Process) -> None:
        """It does nothing for longer than its lease lasts while the others go on; then it goes on as if nothing was."""
        self.counts["stalls"] += 1
        process.stalled_until = self.steps + self.rng.randint(20, 120)
        self.clock.advance(LEASE + 1)

    def _start(self) -> None:
        self._names += 1
        process = Process(self, f"p{self._names}")
        self.processes.append(process)
        self.spawn(process, process.start())

    def _say(self, text: str) -> None:
        self._people.append(self.spawn(self.outside, self._person(text)))

    async def _person(self, text: str) -> None:
        """Says something, and again if it got no answer: under the same key."""
        session = next(iter(self.store._sessions), None)
        while True:
            alive = [process for process in self.processes if not process.dead and process.ready]
            if not alive:
                await self.clock.sleep(0.5)
                continue
            result = await self.rng.choice(alive).ask(text, session)
            error = result.error if result is not None else None
            if error is not None and error.code == "session_suspended":
                await self._answer(result.session_id)
            elif result is not None and not (error is not None and error.retryable):
                self._done[text] = result
                if error is not None:
                    self.bad.append(f"somebody was told {error.code}: {error.message}")
                if self.waits:  # it may wait now, or once somebody recovered it
                    for session in list(self.store._sessions):
                        await self._answer(session)
                return
            await self.clock.sleep(1.0)

    async def _answer(self, session: str) -> None:
        """Answers whatever the session waits for, in any order, some of it twice, until it waits no more."""
        while True:
            head, _ = await self.store.load(session)
            if head.turn is None:
                return
            asked = [one for one in head.turn.pending if one.state == "waiting"]
            alive = [process for process in self.processes if not process.dead and process.ready]
            if alive and asked and head.status == "suspended":
                self.counts["answers"] += 1
                one = self.rng.choice(asked)
                value = self.rng.random() < 0.7 if one.kind == "approval" else self.said
                answers = [self.rng.choice(alive).answer(session, one.id, value) for _ in range(self.rng.randint(1, 2))]
                await asyncio.gather(*answers)
            await self.clock.sleep(self.rng.choice((0.1, 1.0, 8.0)))

    def _join(self) -> None:
        client = Client(self, f"c{len(self.clients)}", next(iter(self.store._sessions)))
        self.clients.append(client)
        self.spawn(client, client.watch())

    def _settled(self) -> bool:
        people = all(task.done() for task in self._people)
        return people and all(not found.head or b'"turn"' not in found.head for found in self.store._sessions.values())

    def note(self, process: Process, event: TurnEvent) -> None:
        """Told of what engines do."""
        if isinstance(event, Committed):
            if event.step in self._committed:
                self.bad.append("a unit was committed twice")
            self._committed.add(event.step)
        elif isinstance(event, UnitStarted) and event.step in self._committed:
            self.bad.append("a committed unit was run again")

    def _end(self) -> None:
        """Everything is said and done: let everybody see it, and compare."""
        if self._points:
            for _, _, future in self._points:
                future.set_result(None)
        elif self._ending:
            self._wait()
        else:
            self._ending = True
            self._check()

    def _check(self) -> None:
        for task in self._people:
            if task.exception() is not None:
                self.bad.append(f"somebody was told {task.exception()!r}")
        self.spawn(self.outside, self._compare())

    async def _compare(self) -> None:
        try:
            for session in list(self.store._sessions):
                want = await document(self.store, session)
                late = Client(self, "late", session)
                self.clients.append(late)
                task = self.spawn(late, late.watch())
                await late.ready.wait()
                for client in self.clients:
                    if client.session_id == session:
                        await client.ready.wait()
                        got = client.seen()
                        if got != want:
                            self.bad.append(f"{client.name} sees\n  {got}\nstored is\n  {want}")
                        if client.open_runs():
                            self.bad.append(f"{client.name}: a run never ended")
                task.cancel()
                for name, count in (await self._said_once(session)).items():
                    if count != 1:
                        self.bad.append(f"said {count} times: {name}")
                await self._check_effects(session)
            self.bad += [f"a call that is not stored was charged: {key}" for key in self.charges]
        except Exception as error:  # noqa: BLE001 - what breaks the comparison is a finding
            self.bad.append(f"comparing: {error!r}")
        self._finished.set_result(None)

    async def _check_effects(self, session: str) -> None:
        """Each is begun once, but for those that may be repeated under their key; and the record says what happened."""
        calls: dict[str, ToolCall] = {}
        for row in await self.store.load_messages(session, "talk"):
            message = row.message
            if isinstance(message, AssistantMessage):
                calls |= {call.id: call for call in message.calls}
            elif isinstance(message, ToolResult) and message.name in ("charge", "book", "renew"):
                call = calls[message.call]
                count, what = self.charges.pop(call.key, 0), f"{call.name} {call.args['n']}"
                self.counts[f"{call.name} {message.outcome}"] += 1
                again = call.name == "renew" or call.args["n"] % 4 == 0  # of a call that was refused, nothing happened
                if count > 1 and not again:
                    self.bad.append(f"{what} was charged {count} times")
                if count < 1 and message.content == f"charged {call.args['n']}":
                    self.bad.append(f"{what} is said to be charged")
                if count > 0 and message.outcome == "not_run" and not again:
                    self.bad.append(f"{what} is said not to have run")
        for row in await self.store.journal_load(session):
            self.bad.append(f"a row of the journal is left: {row.key} {row.state}")

    async def _said_once(self, session: str) -> Counter[str]:
        """What may be in the log of a session only once, however often somebody began to say it."""
        channel = await self.channels.open(session)
        counts: Counter[str] = Counter()
        for delivery in (await channel.history(limit=1000)).items:
            headers = transport_headers(delivery.extras)
            if delivery.name in (Name.RUN_START, Name.RUN_END):
                counts[f"{delivery.name} {headers[H.RUN_ID]}"] += 1
            elif delivery.name in (Name.RUN_SUSPEND, Name.RUN_RESUME):
                counts[f"{delivery.name} {headers[H.INVOCATION_ID]}"] += 1
            elif delivery.name == Name.INPUT:
                counts[f"{delivery.name} {headers[H.EVENT_ID]} {delivery.data}"] += 1
        return counts


class Process(Owner):
    """An engine."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self.world = world
        self.ready = False
        self.death = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.engine = Engine(
            [] if DEFINITIONS else [SimFlow],
            models={"sim": Model(self.world, self)},
            store=_Proxy(self.world.store, self.world, self, StoreBusyError),
            channels=_Channels(self.world, self),
            recovery_interval=None,
            lease_ttl=LEASE,
            clock=self.world.clock,
            listeners=[lambda event: self.world.note(self, event)],
        )
        # Schemas are made once: they would take longer than the schedule.
        DEFINITIONS.update(self.engine.definitions)
        self.engine.definitions = DEFINITIONS
        self.engine._core.owner = self.name
        await self.engine.start()
        self.ready = True

    async def recover(self) -> None:
        if self.ready:
            await self.engine.recover_all()

    async def ask(self, text: str, session: str | None) -> Any:
        """A turn; `None` if the process dies meanwhile."""
        task = self.world.spawn(
            self, self.engine.run("SimFlow", text, session_id=session, idempotency_key=text, busy_timeout=5.0)
        )
        await asyncio.wait({task, self.death}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None

    async def answer(self, session: str, request: str, value: Any) -> None:
        """An answer; what came of it, whoever asks sees in the store."""
        task = self.world.spawn(self, self.engine.answer(session, request, value))
        await asyncio.wait({task, self.death}, return_when=asyncio.FIRST_COMPLETED)
        if (
            task.done()
            and not task.cancelled()
            and not isinstance(task.exception(), UnknownRequestError | StoreBusyError | None)
        ):
            self.world.bad.append(f"an answer was told {task.exception()!r}")


class Client(Owner):
    """A client that watches a session's channel."""

    def __init__(self, world: World, name: str, session_id: str) -> None:
        super().__init__(name)
        self.world = world
        self.session_id = session_id
        self.ready = asyncio.Event()
        self.session: ClientSession[Any, Any] | None = None

    async def watch(self) -> None:
        channels = _Channels(self.world, self)
        async with ClientSession(
            await channels.open(self.session_id), UIMessageCodec(), clock=self.world.clock
        ) as session:
            await session.view.load_older(100)
            self.session = session
            self.ready.set()
            await asyncio.get_running_loop().create_future()

    def seen(self) -> list[Any]:
        """What a person sees: what was said, and for each answer its parts."""
        assert self.session is not None
        found: list[Any] = []
        for entry in self.session.view.messages:
            message = entry.message
            if message["role"] == "user":
                found.append(("user", message["parts"][0]["text"]))
            else:
                found += [part for part in map(_part, message["parts"]) if part is not None]
        return found

    def open_runs(self) -> list[str]:
        assert self.session is not None
        return [run.run_id for run in self.session.view.runs if run.status in ("active", "suspended")]


def _part(part: dict[str, Any]) -> Any:
    if part["type"] == "text":
        return ("text", part["text"])
    if part["type"].startswith("tool-"):
        return ("call", part["toolCallId"], part.get("input"), part.get("output", part.get("errorText")))
    return None


async def document(store: MemoryStore, session: str) -> list[Any]:
    """The same, from what is stored."""
    found: list[Any] = []
    calls: dict[str, int] = {}
    for row in await store.load_messages(session, "talk"):
        message = row.message
        match message:
            case UserMessage(by="code"):
                pass
            case UserMessage():
                found.append(("user", message.text))
            case AssistantMessage():
                if message.text:
                    found.append(("text", message.text))
                for call in message.calls:
                    calls[call.id] = len(found)
                    found.append(("call", call.id, call.args, None))
            case ToolResult():
                at = calls[message.call]
                content = message.content
                if isinstance(content, dict) and not content.get("expired"):
                    content = content.get("error")
                found[at] = (*found[at][:3], content)
                if message.name == "book" and str(content).startswith("got input"):
                    found.append(("user", str(content).removeprefix("got ")))  # a message that answered the question
            case DirectMessage():
                found.append(("text", message.text))
            case _:
                found.append(message)
    return found
