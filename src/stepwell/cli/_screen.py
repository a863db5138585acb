"""What a turn looks like while it runs: on a terminal redrawn in place, in a pipe line by line when it is final."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from stepwell.engine import (
    Accepted,
    CandidateClassified,
    ReasoningDelta,
    StageEntered,
    Superseded,
    TextDelta,
    ToolFinished,
    ToolInputDelta,
    ToolProgress,
    ToolStarted,
    TurnEvent,
    TurnResult,
    UnitStarted,
    Warned,
)

from ._render import render, render_live
from ._terminal import Terminal

if TYPE_CHECKING:
    from rich.live import Live

__all__ = ["Screen"]

_ARGS = 60
"""Characters of a tool's arguments that are shown."""


class Screen:
    """Shows one turn. Text stays changeable until its unit is over: a superseded attempt leaves nothing behind.

    Args:
        terminal: Where to.
        stage: The stage in which the person was before this turn, as far as known.
    """

    def __init__(self, terminal: Terminal, stage: str = "") -> None:
        self._terminal = terminal
        self._stage = stage
        self._text: list[str] = []
        self._final: str | None = None
        self._status = ""
        self._args: dict[str, Any] = {}
        self._live: Live | None = None
        self._spinner: Any = None

    def __enter__(self) -> Self:
        if self._terminal.fancy:
            from rich.live import Live
            from rich.spinner import Spinner

            self._spinner = Spinner("dots", style="cyan")
            self._live = Live(
                console=self._terminal.out, get_renderable=self._draw, transient=True, refresh_per_second=20
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._text.clear()
            self._status = ""
            self._spinner = None
            self._live.stop()

    def show(self, event: TurnEvent) -> None:
        """Take one event of the turn."""
        handle = _HANDLERS.get(type(event))
        if handle is not None:
            handle(self, event)

    # -- events

    def _unit(self, event: UnitStarted) -> None:
        self._flush()
        self._status = event.stage

    def _delta(self, event: TextDelta) -> None:
        self._text.append(event.text)

    def _superseded(self, event: Superseded) -> None:
        self._text.clear()

    def _accepted(self, event: Accepted) -> None:
        self._text = [event.text]
        self._final = event.text

    def _thinking(self, event: ReasoningDelta) -> None:
        self._status = "thinking"

    def _input(self, event: ToolInputDelta) -> None:
        self._status = event.name

    def _classified(self, event: CandidateClassified) -> None:
        if event.verdict not in ("accepted", "cancelled"):
            self._status = "trying again"
            self._aside(f"attempt {event.attempt}: {event.verdict.replace('_', ' ')}")

    def _tool_started(self, event: ToolStarted) -> None:
        self._args[event.call] = event.args
        self._status = event.name

    def _progress(self, event: ToolProgress) -> None:
        self._status = f"{event.name}: {_short(event.value)}"

    def _tool_finished(self, event: ToolFinished) -> None:
        args: Any = self._args.pop(event.call, None)
        shown = ", ".join(f"{k}={_short(v)}" for k, v in args.items()) if isinstance(args, dict) else ""  # pyright: ignore[reportUnknownVariableType]
        outcome = "" if event.outcome == "ok" else f"  {event.outcome.replace('_', ' ')}"
        self._aside(f"{event.name}({_cut(shown, _ARGS)}){outcome}")

    def _entered(self, event: StageEntered) -> None:
        self._moved(event.stage)

    def _warned(self, event: Warned) -> None:
        self._aside(f"warning: {event.text}", "yellow")

    def finish(self, result: TurnResult) -> None:
        """The turn is over: print what it ends with."""
        if not result.success:
            self._text.clear()
            self._final = None
        self._flush(result.content_type)
        if result.success and result.current:
            self._moved(result.current)

    # -- output

    def _moved(self, stage: str) -> None:
        if stage != self._stage:
            if self._stage:
                self._aside(f"→ {stage}")
            self._stage = stage

    def _aside(self, text: str, style: str = "dim") -> None:
        """A line about what happens, above what is still changing."""
        self._terminal.out.print(f"  {text}", style=style, markup=False, soft_wrap=not self._terminal.fancy)

    def _flush(self, content_type: str = "text/plain") -> None:
        """Print what the unit showed: it is final now."""
        text, self._final = self._final, None
        self._text.clear()
        if text:
            if self._live is not None:
                self._terminal.out.print(render(text, content_type))
            else:
                self._terminal.line(text)

    def _draw(self) -> Any:
        """What is below the last final line now: the growing text, or who works."""
        from rich.text import Text

        text = "".join(self._text)
        if text:
            return render_live(text, self._terminal.out)
        if self._spinner is None:
            return Text()
        self._spinner.update(text=Text(self._status, style="dim"))
        return self._spinner


_HANDLERS: dict[type[Any], Callable[[Screen, Any], None]] = {
    UnitStarted: Screen._unit,  # pyright: ignore[reportPrivateUsage]
    TextDelta: Screen._delta,  # pyright: ignore[reportPrivateUsage]
    Superseded: Screen._superseded,  # pyright: ignore[reportPrivateUsage]
    Accepted: Screen._accepted,  # pyright: ignore[reportPrivateUsage]
    ReasoningDelta: Screen._thinking,  # pyright: ignore[reportPrivateUsage]
    ToolInputDelta: Screen._input,  # pyright: ignore[reportPrivateUsage]
    CandidateClassified: Screen._classified,  # pyright: ignore[reportPrivateUsage]
    ToolStarted: Screen._tool_started,  # pyright: ignore[reportPrivateUsage]
    ToolProgress: Screen._progress,  # pyright: ignore[reportPrivateUsage]
    ToolFinished: Screen._tool_finished,  # pyright: ignore[reportPrivateUsage]
    StageEntered: Screen._entered,  # pyright: ignore[reportPrivateUsage]
    Warned: Screen._warned,  # pyright: ignore[reportPrivateUsage]
}


def _short(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError):
        return type(value).__name__
    return _cut(text, _ARGS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
