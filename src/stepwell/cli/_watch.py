"""`stepwell watch`: a conversation on a channel, as its clients see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ._options import DEFAULT_CHANNELS, Channels, Json
from ._render import render
from ._terminal import Terminal, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepwell.transport import ClientSession, RunInfo

__all__ = ["watch"]

_STATUS = {
    "active": "yellow",
    "suspended": "magenta",
    "complete": "green",
    "cancelled": "dim",
    "failed": "red",
    "error": "red",
}


def watch(
    session: Annotated[str, Parameter(help="The session, or the whole name of a channel.")],
    *,
    channels: Channels = DEFAULT_CHANNELS,
    codec: Annotated[Literal["ui", "text"], Parameter(help="What is said on the channel.")] = "ui",
    limit: Annotated[int, Parameter(help="How many older messages to begin with.")] = 20,
    once: Annotated[bool, Parameter(name="--once", negative="", help="Show it as it is now, and end.")] = False,
    json: Json = False,
) -> None:
    """Watch a conversation: its messages, with superseded text replaced in place, and its runs and steps beside them.

    Ends with Ctrl-C. With --json: a line with a snapshot, then one for each change. Where no person looks at the output
    it is shown once.
    """
    if limit < 1:
        raise UsageError("--limit is at least 1.")
    if channels.startswith("memory:"):
        raise UsageError("Channels in memory are those of one process: name a file or a server with --channels.")
    terminal = Terminal()
    work = _watch(terminal, session, channels, codec, limit, once=once or not (json or terminal.fancy), json=json)
    asyncio.run(work)


async def _watch(terminal: Terminal, name: str, url: str, codec: str, limit: int, *, once: bool, json: bool) -> None:
    from stepwell.channels import open_channels
    from stepwell.transport import ClientSession, ViewPatches
    from stepwell.transport.codecs import TextCodec, UIMessageCodec

    chosen: Any = UIMessageCodec() if codec == "ui" else TextCodec()
    async with open_channels(url) as provider:
        channel = await provider.open(name)
        async with ClientSession(channel, chosen) as session:
            await session.view.load_older(limit)
            if json:
                patches = ViewPatches(session.view)
                terminal.json({"type": "snapshot", **patches.snapshot()}, indent=0)
                while not once:
                    terminal.json({"type": "patch", **await patches.next()}, indent=0)
            elif once:
                terminal.out.print(picture(session))
            else:
                await _live(terminal, session)


async def _live(terminal: Terminal, session: ClientSession[Any, Any]) -> None:
    changes = session.view.changes()
    with Live(picture(session), console=terminal.out, auto_refresh=False, vertical_overflow="visible") as live:
        async for _ in changes:
            live.update(picture(session, height=terminal.out.height), refresh=True)
            # What comes while a person could not see the difference is drawn as one change.
            await asyncio.sleep(0.03)


def picture(session: ClientSession[Any, Any], height: int | None = None) -> RenderableType:
    """The conversation on the left, runs and steps on the right.

    Args:
        session: What to draw.
        height: Lines of the terminal: only the newest messages that may fit are drawn.
    """
    messages = session.view.messages
    if height is not None:
        messages = messages[-max(1, height // 3) :]
    said: list[RenderableType] = [_message(one.message) for one in messages]
    if session.view.has_older:
        said.insert(0, Text("... older messages: --limit", "dim"))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(ratio=3)
    table.add_column(ratio=1, min_width=24)
    table.add_row(Group(*said) if said else Text("Nothing was said yet.", "dim"), _runs(session.view.runs))
    return table


def _message(message: Any) -> RenderableType:
    from stepwell.transport.codecs import TextMessage

    if isinstance(message, TextMessage):
        message = {"role": message.role, "parts": [{"type": "text", "text": message.text}]}
    role: str = message["role"]
    parts: Sequence[Any] = message["parts"]
    shown = [drawn for part in parts if (drawn := _part(part)) is not None]
    style = "cyan" if role == "user" else "green"
    return Panel(Group(*shown) if shown else Text("..."), title=role, title_align="left", border_style=style)


def _part(part: Any) -> RenderableType | None:
    kind: str = part["type"]
    if kind == "text":
        return render(part["text"])
    if kind == "reasoning":
        return Text(part["text"], "dim italic")
    if kind == "dynamic-tool" or kind.startswith("tool-"):
        name = part.get("toolName") or kind.removeprefix("tool-")
        return Text.assemble((name, "bold"), (f" {part.get('state', '')}", "dim"))
    if kind == "step-start":
        return None
    return Text(f"[{kind}]", "dim")


def _runs(runs: Sequence[RunInfo]) -> RenderableType:
    lines: list[RenderableType] = []
    for run in runs:
        lines.append(Text.assemble(("run ", "bold"), run.run_id[-8:], " ", (run.status, _STATUS.get(run.status, ""))))
        if run.error is not None:
            lines.append(Text(f"  {run.error.code} {run.error.message}", "red"))
        for step in run.steps:
            again = f" attempt {step.attempt_count}" if step.attempt_count > 1 else ""
            name = step.step_id.rpartition("-step-")[2] if "-step-" in step.step_id else step.step_id[-12:]
            status = (step.status, _STATUS.get(step.status, ""))
            lines.append(Text.assemble(f"  step {name} ", status, (again, "yellow")))
    return Panel(
        Group(*lines) if lines else Text("no run", "dim"), title="runs", title_align="left", border_style="dim"
    )
