"""Channels over HTTP: agents that are invoked, clients' inputs, and who watches."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, TypeAlias

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from stepwell.channels import open_channels
from stepwell.errors import InvalidInputError, StepwellError
from stepwell.transport import AgentRun, AgentSession, ClientSession, Invocation
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Channel, ChannelProvider, WireMessage, session_channel

from ._events import Streams
from ._problems import stopping

__all__ = ["Agent", "Conversations", "Invoked"]

Agent: TypeAlias = Callable[[AgentRun[Any]], Awaitable[Any]]
"""Answers one input: gets its run, which is started; pipes outputs, and returns. A run that it has neither ended nor
suspended is ended then: `complete`, `cancelled` if it was cancelled, `error` if it raised."""

REMEMBERED: Final = 1_000
"""Invocations that are over and still recognised when they are posted again."""

_logger = logging.getLogger("stepwell.server")


class Invoked:
    """An invocation: under way, or over."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.run_id = ""
        self.invocation_id = ""
        self.error: Exception | None = None


class Conversations:
    """The channels that a server serves, and its agents.

    Args:
        channels: A provider, or the URL of one, which is then this object's to close.
        agents: By name; `default`, or the only one, answers where no name is given.
        codec: What is said on the channels.
        prefix: See `session_channel`.
    """

    def __init__(
        self,
        channels: ChannelProvider | str,
        agents: Mapping[str, Agent],
        codec: Any = None,
        prefix: str = "",
    ) -> None:
        self._given = channels
        self._agents = dict(agents)
        self._codec = codec or UIMessageCodec()
        self._prefix = prefix
        self._provider: ChannelProvider | None = None
        self._group: TaskGroup | None = None
        self._invoked: OrderedDict[tuple[str, str], Invoked] = OrderedDict()
        self._watched: dict[str, _Watched] = {}
        self._working = Streams()  # agents that answer
        self._helpers = Streams()  # what begins to, and what watches for the view
        self.streams = Streams()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Agents can be invoked inside the block. At its end they are let go of: their runs stay open for others."""
        async with AsyncExitStack() as stack:
            provider = open_channels(self._given)
            if isinstance(self._given, str):
                await stack.enter_async_context(provider)
            self._provider = provider
            group = self._group = await stack.enter_async_context(anyio.create_task_group())
            try:
                yield
            finally:
                self._group = None
                self.stop()
                group.cancel_scope.cancel()

    def stop(self) -> None:
        """Let go of all who watch, and of what has not begun yet."""
        self.streams.end()
        self._helpers.end()

    async def finish(self, seconds: float) -> None:
        """Wait until the agents that are at work are done; after `seconds` let go of them: their runs stay open."""
        await self._working.empty(seconds)
        await self._helpers.empty(0.0)

    @property
    def ready(self) -> bool:
        """Whether it runs."""
        return self._group is not None

    def name_of(self, session_id: str) -> str:
        """The channel of a session."""
        return session_channel(session_id, self._prefix)

    @property
    def agents(self) -> Collection[str]:
        """The names of the agents."""
        return self._agents.keys()

    async def open(self, session_id: str) -> Channel:
        """The channel of a session."""
        assert self._provider is not None
        return await self._provider.open(self.name_of(session_id))

    # -- agents

    async def invoke(self, session_id: str, invocation: Invocation, agent: str | None) -> Invoked:
        """Let an agent answer an input, and wait until its run has begun. The same input again is the same run.

        Raises:
            InvalidInputError: There is no such agent.
            StepwellError: The run could not begin.
            Problem: The server is stopping.

        Cancelling the wait cancels no run.
        """
        run = self._agent(agent)
        key = invocation.session_name, invocation.input_event_id
        invoked = self._invoked.get(key)
        if invoked is None:
            if self._group is None:
                raise stopping()
            invoked = self._invoked[key] = Invoked()
            self._group.start_soon(self._answer, key, invoked, run, session_id, invocation)
        await invoked.settled.wait()
        if invoked.error is not None:
            raise invoked.error
        return invoked

    def _agent(self, name: str | None) -> Agent:
        if name is None:
            name = "default" if "default" in self._agents else next(iter(self._agents), "default")
            if len(self._agents) > 1 and name != "default":
                raise InvalidInputError(f"Which agent? Give one of {', '.join(sorted(self._agents))}.", "/agent")
        agent = self._agents.get(name)
        if agent is None:
            known = ", ".join(sorted(self._agents)) or "none"
            raise InvalidInputError(f"There is no agent or flow {name[:80]!r}, the agents are: {known}.", "/agent")
        return agent

    async def _answer(
        self, key: tuple[str, str], invoked: Invoked, agent: Agent, session_id: str, invocation: Invocation
    ) -> None:
        with CancelScope() as scope:
            self._helpers.add(scope)
            try:
                async with AgentSession(await self.open(session_id), self._codec) as session:
                    run = session.create_run(invocation)
                    await run.start()
                    invoked.run_id, invoked.invocation_id = run.run_id, run.invocation_id
                    invoked.settled.set()
                    self._working.add(scope)
                    self._helpers.discard(scope)
                    await self._work(agent, run)
            except Exception as error:  # noqa: BLE001 - told to whoever waits, or logged; other runs go on
                if invoked.settled.is_set():
                    _logger.error(
                        "an agent's run could not be ended", extra={"error": type(error).__name__, "channel": key[0]}
                    )
                invoked.error = error
                self._invoked.pop(key, None)  # it may be tried again
            finally:
                self._helpers.discard(scope)
                self._working.discard(scope)
                if not invoked.settled.is_set():
                    if invoked.error is None:  # only a server that stops cancels this
                        invoked.error = stopping()
                        self._invoked.pop(key, None)
                    invoked.settled.set()
                self._forget()

    def _forget(self) -> None:
        while len(self._invoked) > REMEMBERED:
            oldest = next(iter(self._invoked.values()))
            if not oldest.settled.is_set():
                break
            self._invoked.popitem(last=False)

    async def _work(self, agent: Agent, run: AgentRun[Any]) -> None:
        try:
            await agent(run)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run's clients are told that it ended
            # The text of an author's exception is for the log's reader alone, and may hold what a customer said.
            known = {"error": type(error).__name__, "run_id": run.run_id}
            _logger.error("an agent raised %s", type(error).__name__, extra=known)
            await run.end("error", error)
        else:
            await run.end("cancelled" if run.cancelled.is_set() else "complete")

    # -- clients

    async def publish(self, session_id: str, messages: list[WireMessage]) -> list[str]:
        """Publish what a client says, together or not at all."""
        return await (await self.open(session_id)).publish(messages)

    @asynccontextmanager
    async def watching(self, session_id: str) -> AsyncGenerator[ClientSession[Any, Any]]:
        """A client session that all who watch this session share."""
        watched = self._watched.get(session_id)
        if watched is None:
            if self._group is None:
                raise stopping()
            watched = self._watched[session_id] = _Watched()
            self._group.start_soon(self._watch, session_id, watched)
        watched.users += 1
        try:
            await watched.ready.wait()
            if watched.session is None:
                raise watched.error or stopping()
            yield watched.session
        finally:
            watched.users -= 1
            if not watched.users:
                if self._watched.get(session_id) is watched:
                    del self._watched[session_id]
                watched.scope.cancel()

    async def _watch(self, session_id: str, watched: _Watched) -> None:
        """In a task of its own: a session is left by the task that entered it, and watchers come and go."""
        self._helpers.add(watched.scope)
        try:
            with watched.scope:
                async with ClientSession(await self.open(session_id), self._codec) as session:
                    await session.view.load_older(100)
                    watched.session = session
                    watched.ready.set()
                    await anyio.sleep_forever()
        except StepwellError as error:
            watched.error = error
        finally:
            self._helpers.discard(watched.scope)
            watched.ready.set()
            if self._watched.get(session_id) is watched:
                del self._watched[session_id]


class _Watched:
    """A client session and how many watch it."""

    def __init__(self) -> None:
        self.users = 0
        self.ready = anyio.Event()
        self.scope = CancelScope()
        self.session: ClientSession[Any, Any] | None = None
        self.error: StepwellError | None = None
