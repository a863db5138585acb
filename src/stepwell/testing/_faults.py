"""What goes wrong in production, made to happen in a test, at a point of its choice."""

from __future__ import annotations

import inspect
import math
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias, cast

from stepwell._clock import Clock, SystemClock
from stepwell.engine import TurnEvent
from stepwell.errors import ChannelBusyError, ChannelError, LlmSetupError, StepwellError, StoreBusyError, StoreError
from stepwell.models import Finish, ModelEvent, ModelGateway, ModelRequest, ModelSelection
from stepwell.sessions import Commit, SessionStore
from stepwell.wire import Channel, ChannelProvider, Name, WireMessage

__all__ = ["CrashedError", "Faults", "sever"]

FAULT_VARIABLE: Final = "STEPWELL_FAULT"

Deed: TypeAlias = Literal["crash", "kill", "drop", "lose", "repeat", "delay", "stall"]

_DONE: Final = ":done"
_CALLS: Final = {
    "inbox_put": "inbox",
    "acquire": "acquire",
    "renew": "renew",
    "raise_fence": "fence",
    "append": "append",
}
_TOLD: Final = {
    Name.RUN_END: "run-end",
    Name.RUN_SUSPEND: "run-suspend",
    Name.RUN_RESUME: "run-resume",
    Name.RUN_START: "run-start",
    Name.STEP_END: "step-end",
    Name.STEP_START: "step-start",
    Name.OUTPUT: "output",
}
"""In a call that says several things, the first of these is its point."""


class CrashedError(StoreError, ChannelError, LlmSetupError):
    """The process is dead, as far as its store, its channels and its models are concerned. Nobody tries again."""


@dataclass
class _Fault:
    deed: Deed
    point: str
    nth: int
    seconds: float = 0.0


_Pass: TypeAlias = Callable[[str], _Fault | None]


class Faults:
    """One process's faults: wrap its store, channels and model, and say what is to go wrong.

    ```python
    faults = Faults().crash("commit:done", 2)
    engine = Engine(
        [BookFlow],
        store=faults.store(store),
        channels=faults.channels(channels),
        models={"openai": faults.model(model)},
        listeners=[faults.listen],
    )
    ```

    Points are named after what the process is about to do (`commit`) and has done (`commit:done`); the guide lists
    them. Of one that is passed several times a fault takes the n-th. Every method that plans one returns the object.

    Args:
        clock: Of delays and stalls; the machine's by default.

    Attributes:
        passed: How often each point was passed.
        trace: The points, in the order they were passed.
        dead: Whether the process has crashed: all that it asks for since raises `CrashedError`.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.passed: Counter[str] = Counter()
        self.trace: list[str] = []
        self.dead = False
        self._planned: list[_Fault] = []

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The fault that `STEPWELL_FAULT` names for a real process: `commit:done` or `token@3` is killed there.

        Raises:
            ValueError: It does not read so.
        """
        faults, said = cls(), environ.get(FAULT_VARIABLE, "")
        if said:
            found = re.fullmatch(r"([a-z_:-]+)(?:@([1-9]\d*))?", said)
            if found is None:
                raise ValueError(f"{FAULT_VARIABLE} is {said!r}: write a point, or a point and which time, `token@3`.")
            faults.kill(found[1], int(found[2] or 1))
        return faults

    # -- what is to go wrong

    def crash(self, point: str, nth: int = 1) -> Self:
        """Crash there: the engine is abandoned, and can neither store nor say anything more."""
        return self._plan("crash", point, nth)

    def kill(self, point: str, nth: int = 1) -> Self:
        """Kill this very process there, with SIGKILL."""
        return self._plan("kill", point, nth)

    def drop(self, point: str, nth: int = 1) -> Self:
        """Lose a request: nothing is done, and the caller is told that the store or the channel is busy."""
        return self._plan("drop", point, nth)

    def lose_answer(self, point: str, nth: int = 1) -> Self:
        """Lose an answer: it is done, but the caller is told that the store or the channel is busy."""
        return self._plan("lose", point, nth)

    def repeat(self, point: str, nth: int = 1) -> Self:
        """Let a request arrive twice; what comes of the second time is nobody's concern."""
        return self._plan("repeat", point, nth)

    def delay(self, point: str, seconds: float, nth: int = 1) -> Self:
        """Let a request take so many seconds, before anything is done."""
        return self._plan("delay", point, nth, seconds)

    def stall(self, token: int) -> Self:
        """Let the provider hang in front of its so-many-th event, counted over all calls, until it is cancelled."""
        return self._plan("stall", "token", token)

    def _plan(self, deed: Deed, point: str, nth: int, seconds: float = 0.0) -> Self:
        if nth < 1:
            raise ValueError(f"There is no {nth}th time: count from 1.")
        if deed in ("drop", "lose", "repeat") and point.endswith(_DONE):
            raise ValueError(f"{point} is no request: name what is asked for, {point.removesuffix(_DONE)}.")
        self._planned.append(_Fault(deed, point, nth, seconds))
        return self

    # -- what it goes wrong with

    def store(self, inner: SessionStore) -> SessionStore:
        """The store, as this process has it."""
        return cast("SessionStore", _Wrapped(inner, self._pass, self.clock, StoreBusyError, _point_of_store))

    def channels(self, inner: ChannelProvider) -> ChannelProvider:
        """The channels, as this process has them. Reading them never fails."""
        return cast("ChannelProvider", _Channels(inner, self._pass, self.clock))

    def model(self, inner: ModelGateway) -> ModelGateway:
        """The model, as this process has it."""
        return _Model(inner, self._pass, self.clock)

    def listen(self, event: TurnEvent) -> None:
        """Pass a point for a turn event: give it to the engine as a listener. `ToolStarted` is `tool-started`.

        A tool that runs when a process crashes here goes on until it asks for something, see `at`.
        """
        name = re.sub(r"(?<!^)([A-Z])", r"-\1", type(event).__name__).lower()
        with suppress(CrashedError):
            self.at(name)

    def at(self, point: str) -> None:
        """Pass a point; call it for points of your own, such as in the midst of a tool.

        Raises:
            CrashedError: The process has crashed, here or before.
        """
        self._pass(point)

    async def expire(self, store: SessionStore, session: str) -> None:
        """Let the lease of a session run out: whoever holds it is a stale writer, and does not know it yet.

        Args:
            store: The store itself.
            session: Which.
        """
        _, lease = await store.load(session)
        if lease is not None:
            taken = await store.acquire(session, "faults:kit:0:0", ttl=60.0, supersede=lease.owner)
            await store.release(taken.lease)

    # -- inside

    def _pass(self, point: str) -> _Fault | None:
        """Pass a point; returns the fault that is not for here to do."""
        if self.dead:
            raise CrashedError("This process has crashed.")
        self.passed[point] += 1
        self.trace.append(point)
        for fault in self._planned:
            if fault.point == point and fault.nth == self.passed[point]:
                if fault.deed == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault.deed == "crash":
                    self.dead = True
                    raise CrashedError(f"This process crashes at {point}.")
                return fault
        return None


class _Wrapped:
    """A store or a channel whose calls pass points."""

    def __init__(
        self,
        inner: Any,
        pass_: _Pass,
        clock: Clock,
        busy: type[StepwellError],
        point_of: Callable[[str, Sequence[Any]], str],
    ) -> None:
        self._inner, self._pass, self._clock, self._busy, self._point_of = inner, pass_, clock, busy, point_of

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "close" or not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **options: Any) -> Any:
            return await self._call(self._point_of(name, args), lambda: found(*args, **options))

        return call

    async def _call(self, point: str, act: Callable[[], Awaitable[Any]]) -> Any:
        fault = self._pass(point)
        deed = fault.deed if fault is not None else None
        if fault is not None and deed == "delay":
            await self._clock.sleep(fault.seconds)
            self._pass(f"{point}:late")
        if deed == "drop":
            raise self._busy(f"The fault kit dropped {point}.")
        result = await act()
        if deed == "repeat":
            with suppress(StepwellError):
                await act()
        if deed == "lose":
            raise self._busy(f"The fault kit lost the answer to {point}.")
        self._pass(point + _DONE)
        return result


class _Channels:
    def __init__(self, inner: ChannelProvider, pass_: _Pass, clock: Clock) -> None:
        self._inner, self._pass, self._clock = inner, pass_, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def open(self, name: str) -> Channel:
        channel = await self._inner.open(name)
        return cast("Channel", _Wrapped(channel, self._pass, self._clock, ChannelBusyError, _point_of_channel))


class _Model:
    def __init__(self, inner: ModelGateway, pass_: _Pass, clock: Clock) -> None:
        self._inner, self._pass, self._clock = inner, pass_, clock

    def validate(self, selection: ModelSelection) -> None:
        self._inner.validate(selection)

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncGenerator[AsyncIterator[ModelEvent]]:
        self._pass("model")
        async with self._inner.stream(request) as events:
            yield self._events(events)

    async def _events(self, events: AsyncIterator[ModelEvent]) -> AsyncGenerator[ModelEvent]:
        async for event in events:
            fault = self._pass("model:done" if isinstance(event, Finish) else "token")
            if fault is not None and fault.deed == "stall":
                await self._clock.sleep(math.inf)
            yield event


def _point_of_store(name: str, args: Sequence[Any]) -> str:
    if name == "create":
        return "open"
    if name == "save":
        return _point_of_commit(args[1])
    if name == "journal_put":
        return "intent" if args[1].state == "intent" else "effect"
    return _CALLS.get(name, name.replace("_", "-"))


def _point_of_commit(commit: Commit) -> str:
    turn = commit.head.turn
    if commit.release or turn is None:
        return "release"
    if turn.phase != "open":
        return "close" if turn.phase == "closing" else "suspend"
    return "commit" if turn.unit else "open"


def _point_of_channel(name: str, args: Sequence[Any]) -> str:
    if name != "publish":
        return _CALLS.get(name, name)
    messages: Sequence[WireMessage] = args[0]
    names = {message.name for message in messages}
    return next((point for told, point in _TOLD.items() if told in names), "publish")


async def sever(url: str) -> int:
    """Cut every other connection to a database: `postgresql://` of this database, `redis://` of the whole server.

    Returns:
        How many were cut.

    Raises:
        ValueError: It is no such URL.
    """
    if url.startswith("postgresql://"):
        import psycopg

        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            cursor = await connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            row = await cursor.fetchone()
            return int(row[0]) if row else 0
    if url.startswith("redis://"):
        from redis.asyncio import Redis

        async with Redis.from_url(url) as redis:  # pyright: ignore[reportUnknownMemberType]
            cut = 0
            for kind in ("normal", "pubsub"):
                cut += cast("int", await redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"))  # pyright: ignore[reportUnknownMemberType]
            return cut
    raise ValueError("Only connections to postgresql:// and redis:// can be cut.")
