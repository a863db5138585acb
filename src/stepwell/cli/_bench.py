"""`stepwell bench`: turns per second on this machine, with a model that costs nothing."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ._chat import read_config, write_log
from ._options import Config, Json, Target
from ._terminal import CommandError, Terminal, UsageError

if TYPE_CHECKING:
    from stepwell.flow import Flow
    from stepwell.testing import ScriptedModel

__all__ = ["bench"]

REPLY = "This is an answer of twelve words, as short as they come."
KEEP = 1000
"""Turns of one session before the next one begins, and requests that the scripted model remembers."""


def bench(
    target: Target | None = None,
    /,
    *,
    message: Annotated[str, Parameter(help="What is said in every turn.")] = "Hello",
    seconds: Annotated[float, Parameter(help="How long each measurement takes.")] = 2.0,
    sessions: Annotated[int, Parameter(help="Conversations at the same time, in the last measurements.")] = 20,
    config: Config = None,
    json: Json = False,
) -> None:
    """Measure turns per second on this machine.

    Every turn runs on the real engine and store; the model is scripted and answers at once with the same twelve words,
    so what is measured is what Stepwell itself costs. Without a target a flow with one stage is taken. Files are made
    in the system's temporary directory.
    """
    if seconds <= 0 or sessions < 1:
        raise UsageError("--seconds is positive, and --sessions at least 1.")
    from ._targets import load_flow

    write_log(False)
    given = read_config(config)
    flow = load_flow(target) if target is not None else _flow()
    terminal = Terminal()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="stepwell-bench-") as directory, terminal.err.status("") as status:
        for number, (name, store, at_once) in enumerate(_cases(Path(directory), sessions)):
            status.update(f"Measuring {name} ({number + 1} of 4) ...")
            rows.append({"case": name, **asyncio.run(_measure(flow, store, message, given, seconds, at_once))})
    if json:
        terminal.json({"flow": flow.id, "seconds": seconds, "cases": rows})
        return
    columns = {flow.id: "bold", "turns/s": "green", "ms": "", "p50 ms": "", "p99 ms": "", "units/turn": "dim"}
    cells = [
        [
            row["case"],
            f"{row['turns_per_second']:,.0f}",
            f"{1000 / row['turns_per_second']:.2f}",
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.2f}",
            f"{row['units_per_turn']:.1f}",
        ]
        for row in rows
    ]
    terminal.table(columns, cells)
    terminal.line("ms: of this machine for one turn. p50, p99: from the message to the result.", "dim")


def _cases(directory: Path, sessions: int) -> Sequence[tuple[str, str, int]]:
    return (
        ("memory, one session", "memory://", 1),
        ("SQLite, one session", f"sqlite:///{directory / 'one.db'}", 1),
        (f"memory, {sessions} at once", "memory://", sessions),
        (f"SQLite, {sessions} at once", f"sqlite:///{directory / 'many.db'}", sessions),
    )


def _flow() -> type[Flow]:
    from stepwell.flow import Flow, Step

    class TalkStep(Step):
        def get_prompt(self) -> str:
            return "Answer in twelve words."

    class BenchFlow(Flow):
        def config_model(self) -> str:
            return "scripted:model"

        def define_steps(self) -> Sequence[Step]:
            return [TalkStep(self)]

    return BenchFlow


async def _measure(
    flow: type[Flow], store: str, message: str, config: dict[str, Any] | None, seconds: float, at_once: int
) -> dict[str, Any]:
    """Run turns one after the other in each of `at_once` conversations, until the time is over."""
    from stepwell.engine import Engine
    from stepwell.testing import ScriptedModel

    model = ScriptedModel(default=REPLY)
    took: list[float] = []
    units = 0
    async with Engine([flow], models=_providers(flow, model), store=store) as engine:

        async def talk(until: float) -> None:
            nonlocal units
            session: str | None = None
            turns = 0
            while (began := time.perf_counter()) < until:
                result = await engine.run(
                    flow.id, message, session_id=session, config=config if session is None else None
                )
                took.append(time.perf_counter() - began)
                if result.error is not None:
                    raise CommandError(f"A turn failed, so there is nothing to measure: {result.error.message}")
                units += result.units
                turns += 1
                over = result.completed or turns >= KEEP
                session, turns = (None, 0) if over else (result.session_id, turns)
                if len(model.requests) > KEEP:
                    model.requests.clear()

        await talk(time.perf_counter() + min(0.2, seconds / 4))  # imports, schemas, caches
        took.clear()
        units = 0
        began = time.perf_counter()
        outcomes = await asyncio.gather(*(talk(began + seconds) for _ in range(at_once)), return_exceptions=True)
        elapsed = time.perf_counter() - began
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
    took.sort()
    return {
        "turns": len(took),
        "turns_per_second": len(took) / elapsed,
        "p50_ms": took[len(took) // 2] * 1000,
        "p99_ms": took[min(len(took) - 1, len(took) * 99 // 100)] * 1000,
        "units_per_turn": units / len(took),
    }


def _providers(flow: type[Flow], model: ScriptedModel) -> Any:
    """The scripted model, under the name of every provider that the flow's stages name."""
    from stepwell.flow import FlowDefinition
    from stepwell.models.providers import Providers

    from ._check import steps_of

    names = {FlowDefinition(flow).model.provider}
    names |= {step.get_model_selection().provider for step in steps_of(flow) if not step.is_logic()}
    return Providers(dict.fromkeys(sorted(names), model))
