"""Flows and stores that the engine's tests share."""

from __future__ import annotations

from typing import Any

import anyio

from stepwell import Flow, Step, TerminateSessionStep, go, tool
from stepwell.errors import StoreBusyError, StoreError
from stepwell.sessions import MemoryStore

SECRET = "a secret of the customer"


class TalkStep(Step):
    def get_prompt(self) -> str:
        return "Talk."


class TalkFlow(Flow):
    def config_model(self) -> str:
        return "scripted:m"

    def define_steps(self) -> list[Step[Any, Any]]:
        return [TalkStep(self)]


class AskStep(Step):
    def get_prompt(self) -> str:
        return "Ask for the name."

    @tool
    async def save_name(self, name: str) -> Any:
        """Save the name."""
        self.save_state({"name": name})
        return go(ConfirmStep)

    @tool
    async def note(self, text: str) -> str:
        """Take a note."""
        self.merge_state({"notes": {text: True}})
        return f"noted {text}"

    @tool
    async def fail(self) -> str:
        """Fail."""
        raise RuntimeError(SECRET)


class ConfirmStep(Step):
    def get_prompt(self) -> str:
        return f"Confirm {self.flow.get_step_state(AskStep, 'name')}."

    @tool
    async def done(self) -> Any:
        """All is right."""
        return TerminateSessionStep


class BookFlow(Flow):
    def config_model(self) -> str:
        return "scripted:m"

    def define_steps(self) -> list[Step[Any, Any]]:
        return [AskStep(self), ConfirmStep(self), TerminateSessionStep(self)]


class FaultyStore(MemoryStore):
    """A memory store whose calls can be counted, refused, or lose their answers."""

    def __init__(self, clock: Any = None) -> None:
        super().__init__(*(() if clock is None else (clock,)))
        self.calls: list[str] = []
        self.refuse_saves = 0
        self.lose_answers = 0
        self.refuse_renewals = 0
        self.break_saves = False
        self.gate: anyio.Event | None = None

    async def save(self, lease: Any, commit: Any, expected_revision: int) -> int:
        self.calls.append("save")
        if self.gate is not None:
            await self.gate.wait()
        if self.break_saves:
            raise StoreError("The disk is full.")
        if self.refuse_saves:
            self.refuse_saves -= 1
            raise StoreBusyError("The store is away for a moment.")
        revision = await super().save(lease, commit, expected_revision)
        if self.lose_answers:
            self.lose_answers -= 1
            raise StoreBusyError("The answer got lost.")
        return revision

    async def renew(self, lease: Any, *, ttl: float) -> Any:
        self.calls.append("renew")
        if self.refuse_renewals:
            self.refuse_renewals -= 1
            raise StoreBusyError("The store is away for a moment.")
        return await super().renew(lease, ttl=ttl)

    async def load_messages(self, session: str, ns: str, **options: Any) -> Any:
        self.calls.append("load_messages")
        return await super().load_messages(session, ns, **options)
