"""TurnHarness: the real engine on a memory store with a scripted model and a fake clock."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from stepwell.engine import Engine, Turn, TurnEvent, TurnResult
from stepwell.flow import Flow
from stepwell.messages import JsonObject, Message, UserMessage
from stepwell.models import ModelGateway
from stepwell.models.providers import Providers
from stepwell.sessions import LogEntry, MemoryStore, SequenceEntry, SessionStore

from ._clock import FakeClock
from ._scripted import ScriptedModel

__all__ = ["TurnHarness"]


class TurnHarness:
    """Talk to a flow as a person would, and look at everything afterwards.

    ```python
    async with TurnHarness(GreetFlow, model=ScriptedModel(["Hello!"])) as h:
        result = await h.say("hi")
        assert result.message == "Hello!"
        assert h.document["workflow"]["current"] == "GreetStep"
    ```

    Leaving it checks that the script was used up.

    Args:
        flow: The flow class (others may be given as `also`).
        model: Answers for every provider that the flows name.
        store: A memory store by default; any store works. It stays open.
        clock: A self-advancing fake clock by default.
        providers: Names that `model` is registered under besides those of the flows.
        **options: Of `Engine`; `recovery_interval` is `None` here by default.

    Attributes:
        engine: The engine.
        events: All events of all turns, deltas included.
        results: All results.
        session_id: The session of the last turn; the next one goes on with it.
    """

    def __init__(
        self,
        flow: type[Flow],
        *,
        model: ModelGateway,
        also: tuple[type[Flow], ...] = (),
        store: SessionStore | None = None,
        clock: FakeClock | None = None,
        providers: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.flow = flow
        self.model = model
        self.clock = clock or FakeClock(auto_advance=True)
        if isinstance(model, ScriptedModel):
            model.clock = self.clock
        self.store: SessionStore = store if store is not None else MemoryStore(self.clock)
        self.events: list[TurnEvent] = []
        self.results: list[TurnResult] = []
        self.turn: Turn | None = None
        self.session_id: str | None = None
        names = dict.fromkeys((*providers, "scripted", "openai", "anthropic", "google", "offline"))
        self._flows = (flow, *also)
        # Nothing is recovered but when the test says so.
        self._options: dict[str, Any] = {
            "models": Providers({name: _Named(model) for name in names}),
            "recovery_interval": None,
            **options,
        }
        self.engine: Engine = self._engine()

    def _engine(self) -> Engine:
        return Engine(self._flows, store=self.store, clock=self.clock, **self._options)

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.engine.close()
        if kind is None and isinstance(self.model, ScriptedModel):
            self.model.assert_done()

    async def say(self, message: str | UserMessage | None = None, **options: Any) -> TurnResult:
        """Run a turn on the current session (a new one at first) and return its result.

        Args:
            message: What the person says.
            **options: Of `Engine.run`; `session_id=None` starts a new session.
        """
        options.setdefault("session_id", self.session_id)
        async with self.engine.stream(self.flow.id, message, **options) as turn:
            self.turn = turn
            async for event in turn:
                self.events.append(event)
            await turn.ended.wait()
        self.session_id = turn.result.session_id or self.session_id
        self.results.append(turn.result)
        return turn.result

    async def restart(self) -> None:
        """A new engine on the same store, as after a restart of the process: nothing warm, nothing transient."""
        await self.engine.close()
        self.engine = self._engine()
        await self.engine.start()

    @property
    def shown(self) -> str:
        """What a person sees of the last turn."""
        return self.turn.text if self.turn else ""

    async def document(self) -> JsonObject:
        """The head of the session's document."""
        return await self.engine.get_session(self.session_id or "")

    async def state(self, stage: str) -> Mapping[str, Any]:
        """A stage's stored state, without the framework's keys."""
        stages = (await self.document()).get("stages", {})
        return {k: v for k, v in stages.get(stage, {}).get("state", {}).items() if not k.startswith("_")}

    async def history(self, ns: str) -> list[Message]:
        """The stored messages of a namespace."""
        rows = await self.engine.store.load_messages(self.session_id or "", ns)
        return [row.message for row in rows]

    async def log(self) -> list[LogEntry]:
        """The session log."""
        return await self.engine.store.load_log(self.session_id or "")

    async def sequence(self) -> list[SequenceEntry]:
        """Which stages were entered, in order."""
        return await self.engine.store.load_sequence(self.session_id or "")

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one type, over all turns."""
        return [event for event in self.events if isinstance(event, kind)]


class _Named:
    """The model under a provider's name, without that provider's checks."""

    def __init__(self, model: ModelGateway) -> None:
        self.stream = model.stream
        self.validate = model.validate
