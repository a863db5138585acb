"""How a reply looks on a terminal: Markdown, JSON, tables of code and plain text, told apart by type or by look."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["render", "render_live"]

_RULE = re.compile(r"-+(?: {2,}-+)+ *")
_MARKDOWN = re.compile(
    r"^#{1,6} \S|^```|^\s*[-*+] \S|^\s*\d+[.)] \S|^> \S|\*\*\S[^*\n]*\*\*|`[^`\n]+`|\[[^\]\n]+\]\([^)\s]+\)"
    r"|^\|.*\|\s*$",
    re.MULTILINE,
)
_ALIGNED = re.compile(r"^\S.*\S {3,}\S", re.MULTILINE)


def render(text: str, content_type: str = "text/plain") -> RenderableType:
    """A finished reply."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind == "text/plain" and text.lstrip()[:1] in ("{", "[")):
        try:
            pretty = msgspec.json.format(text)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return Text(text)
        from rich.syntax import Syntax

        return Syntax(pretty, "json", background_color="default", word_wrap=True)
    if kind == "text/markdown" or (kind == "text/plain" and _is_markdown(text)):
        from rich.markdown import Markdown

        return Markdown(text)
    return _with_tables(text) if _RULE.search(text) else Text(text)


def render_live(text: str, console: Console) -> Text:
    """The end of a reply that is still coming, as much as fits on the screen."""
    width, height = console.size
    lines = Text(text).wrap(console, width)
    return Text("\n").join(lines[-max(1, height - 2) :])


def _is_markdown(text: str) -> bool:
    """Whether plain text is meant as Markdown. Columns that were aligned with spaces would not survive it."""
    return bool(_MARKDOWN.search(text)) and not _ALIGNED.search(text) and not _RULE.search(text)


def _with_tables(text: str) -> RenderableType:
    """Text in which columns over a rule of dashes become tables, so that cells wrap and not lines."""
    from rich.console import Group

    lines = text.split("\n")
    parts: list[RenderableType] = []
    plain: list[str] = []
    at = 0
    while at < len(lines):
        if at + 1 < len(lines) and _RULE.fullmatch(lines[at + 1]):
            if plain:
                parts.append(Text("\n".join(plain)))
                plain = []
            end = at + 2
            while end < len(lines) and lines[end].strip():
                end += 1
            parts.append(_table(lines[at], lines[at + 1], lines[at + 2 : end]))
            at = end
        else:
            plain.append(lines[at])
            at += 1
    if plain:
        parts.append(Text("\n".join(plain)))
    return Group(*parts)


def _table(head: str, rule: str, rows: list[str]) -> Table:
    spans = [match.span() for match in re.finditer("-+", rule)]
    ends = [start for start, _ in spans[1:]] + [None]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for (start, _), end in zip(spans, ends, strict=True):
        table.add_column(Text(head[start:end].strip()), overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[start:end].strip()) for (start, _), end in zip(spans, ends, strict=True)))
    return table
