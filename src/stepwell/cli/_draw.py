"""`stepwell draw`: a flow as Mermaid text, or as a picture of our own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from ._options import Json, Target
from ._terminal import CommandError, Terminal

if TYPE_CHECKING:
    from ._edges import Graph

__all__ = ["draw"]

NOTE = "Edges are read from the code of the steps (go, direct_to, finish, returned classes)."


def draw(
    target: Target,
    /,
    *,
    svg: Annotated[
        Path | None,
        Parameter(name="--svg", allow_leading_hyphen=True, help="Draw a picture into this file; - for stdout."),
    ] = None,
    json: Json = False,
) -> None:
    """Draw a flow's stages and the ways between them.

    Prints Mermaid text, or with --svg a picture that needs no other program. Steps say in code what comes next, so the
    edges are read from that code; targets that are computed there are not found, and are listed.
    """
    from ._edges import read_graph
    from ._targets import load_flow

    graph = read_graph(load_flow(target))
    terminal = Terminal()
    if json:
        terminal.json(graph)
    elif svg is not None:
        from ._svg import picture

        content = picture(graph)
        if str(svg) == "-":
            terminal.line(content)
            return
        try:
            svg.write_text(content, encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{svg} cannot be written: {error.strerror}.") from None
        terminal.line(f"Drew {graph.flow} ({len(graph.stages)} stages, {len(graph.edges)} edges) into {svg}.", "dim")
        if graph.computed:
            terminal.line(f"Not drawn, because the target is computed: {', '.join(graph.computed)}.", "yellow")
    else:
        terminal.line("\n".join(mermaid(graph)))


def mermaid(graph: Graph) -> Iterator[str]:
    """The lines of a Mermaid flow chart."""
    names = {stage.id: f"s{number}" for number, stage in enumerate(graph.stages)}
    names[""] = "done"
    yield f"%% {graph.flow}. {NOTE}"
    for place in graph.computed:
        yield f"%% Not drawn, because the target is computed: {place}"
    yield "flowchart TD"
    yield '    begin(("start"))'
    for stage in graph.stages:
        before, after = {"step": ("[", "]"), "logic": ("{{", "}}"), "end": ("([", "])")}[stage.kind]
        yield f"    {names[stage.id]}{before}{_quoted(stage.id)}{after}"
    if any(edge.target == "" for edge in graph.edges):
        yield '    done((("end")))'
    yield f"    begin --> {names[graph.initial]}"
    for edge in graph.edges:
        arrow = "-.->" if edge.kind == "direct_to" else "-->"
        label = f"|{_quoted(', '.join(edge.via))}|" if edge.via else ""
        yield f"    {names[edge.source]} {arrow}{label} {names[edge.target]}"
    if any(edge.kind == "direct_to" for edge in graph.edges):
        yield "    %% A dotted edge answers from code: its stage gets the next turn."


def _quoted(text: str) -> str:
    return msgspec.json.encode(text.replace('"', "'")).decode()
