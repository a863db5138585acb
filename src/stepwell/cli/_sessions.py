"""`stepwell sessions`: what a store holds."""

from __future__ import annotations

import asyncio
import heapq
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import unquote

import msgspec
from cyclopts import App, Parameter

from ._options import DEFAULT_STORE, Json, Store
from ._terminal import CommandError, Terminal, UsageError

if TYPE_CHECKING:
    from stepwell.messages import Message
    from stepwell.sessions import SessionStore

__all__ = ["conversation", "sessions"]

T = TypeVar("T")

sessions = App(name="sessions", help="List, show, export, import and delete stored sessions.", help_format="plaintext")

_STATUS_STYLES = {"running": "green", "completed": "cyan", "aborted": "red", "suspended": "yellow"}


@sessions.command(name="list")
def list_sessions(
    *,
    store: Store = DEFAULT_STORE,
    flow: Annotated[str | None, Parameter(help="Only this flow's.")] = None,
    status: Annotated[str | None, Parameter(help="Only running, completed, aborted or suspended ones.")] = None,
    limit: Annotated[int, Parameter(help="How many.")] = 20,
    after: Annotated[str | None, Parameter(help="Cursor that an earlier page ended with.")] = None,
    json: Json = False,
) -> None:
    """List sessions, newest first."""
    if limit < 1:
        raise UsageError("--limit is at least 1.")
    if status is not None and status not in _STATUS_STYLES:
        raise UsageError(f"--status is one of {', '.join(_STATUS_STYLES)}.")

    async def work(opened: SessionStore) -> Any:
        return await opened.list(flow=flow, status=status, after=after, limit=limit)

    found, cursor = _with_store(store, work)
    terminal = Terminal()
    if json:
        terminal.json({"sessions": found, "next": cursor})
        return
    if not found:
        terminal.line("There are no such sessions.", "dim")
        return
    now = time.time()
    rows = [[one.id, one.flow, one.status, one.current, _ago(now - one.saved_at)] for one in found]
    terminal.table(
        {"Session": "bold", "Flow": "", "Status": "", "Stage": "", "Saved": "dim"},
        rows,
        cells={(at, 2): _STATUS_STYLES.get(one.status, "") for at, one in enumerate(found)},
        whole="Session",  # it is there to be copied
    )
    if cursor:
        terminal.line(f"There are more: --after {cursor}", "dim")


@sessions.command
def show(
    session: Annotated[str, Parameter(help="Its id.")], /, *, store: Store = DEFAULT_STORE, json: Json = False
) -> None:
    """Show one session: where it stands, and what was said."""
    from stepwell.sessions import export_session

    async def work(opened: SessionStore) -> Any:
        if json:
            return await export_session(opened, session), []
        head, _ = await opened.load(session)
        return head, await conversation(opened, session)

    head, said = _with_store(store, work)
    terminal = Terminal()
    if json:
        terminal.json(head)
        return
    style = _STATUS_STYLES.get(head.status, "")
    facts = {
        "Session": head.id,
        "Flow": f"{head.workflow.id} (version {head.workflow.schema_version})",
        "Status": f"{head.status}{' with an open turn' if head.turn else ''}",
        "Stage": head.workflow.current,
        "Created": _time(head.created_at),
        "Saved": f"{_time(head.saved_at)}, revision {head.revision}",
        "Tokens": _tokens(head.usage),
        "Continued in": head.successor or "",
    }
    for name, value in facts.items():
        if value:
            terminal.out.print(f"{name:<13}", style="bold", end="")
            terminal.line(value, style if name == "Status" else None)
    for speaker, text in said:
        terminal.line()
        terminal.out.print(f"{speaker} > ", style="bold green" if speaker == "you" else "bold cyan", end="")
        terminal.line(text)


@sessions.command
def export(
    session: Annotated[str, Parameter(help="Its id.")],
    file: Annotated[Path | None, Parameter(help="Where to; standard output without.")] = None,
    /,
    *,
    store: Store = DEFAULT_STORE,
) -> None:
    """Write a session as one JSON document. It holds the whole conversation."""
    from stepwell.sessions import export_session

    document = _with_store(store, lambda opened: export_session(opened, session))
    terminal = Terminal()
    if file is None:
        terminal.json(document)
        return
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}.") from None
    terminal.line(f"Wrote {file}.", "dim")


@sessions.command(name="import")
def import_(
    file: Annotated[
        Path | None,
        Parameter(allow_leading_hyphen=True, help="What export wrote; standard input without, or with -."),
    ] = None,
    /,
    *,
    session: Annotated[str | None, Parameter(help="Another id than the one it had.")] = None,
    store: Store = DEFAULT_STORE,
    json: Json = False,
) -> None:
    """Take an exported session into a store."""
    from stepwell.sessions import import_session

    source = "Standard input" if file is None or str(file) == "-" else str(file)
    try:
        content = sys.stdin.buffer.read() if file is None or str(file) == "-" else file.read_bytes()
        document = msgspec.json.decode(content)
    except OSError as error:
        raise CommandError(f"{source} cannot be read: {error.strerror}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CommandError(f"{source} is not JSON: give what stepwell sessions export wrote.") from None
    name = _with_store(store, lambda opened: import_session(opened, document, session_id=session), create=True)
    terminal = Terminal()
    if json:
        terminal.json({"session": name})
    else:
        terminal.line(f"Imported session {name}.")


@sessions.command
def delete(
    *session: Annotated[str, Parameter(help="Ids.")],
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative="", help="Do not ask.")] = False,
    store: Store = DEFAULT_STORE,
    json: Json = False,
) -> int:
    """Delete sessions with everything that is stored of them."""
    if not session:
        raise UsageError("Name the sessions to delete.")
    terminal = Terminal()
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("Deleting cannot be undone: add --yes to do it without being asked.")
        what = f"session {session[0]}" if len(session) == 1 else f"{len(session)} sessions"
        terminal.err.print(f"Delete {what}? It cannot be undone. \\[y/N] ", end="")
        if input().strip().lower() not in ("y", "yes"):
            terminal.line("Nothing was deleted.", "dim")
            return 1

    async def work(opened: SessionStore) -> dict[str, bool]:
        return {one: await opened.delete(one) for one in dict.fromkeys(session)}

    deleted = _with_store(store, work)
    if json:
        terminal.json(deleted)
    for one, there in deleted.items():
        if not there:
            terminal.error(f"There is no session {one}.")
        elif not json:
            terminal.line(f"Deleted session {one}.")
    return 0 if all(deleted.values()) else 1


async def conversation(store: SessionStore, session: str) -> list[tuple[str, str]]:
    """What was said in a session, over all namespaces in order of time: who, and what."""
    head, _ = await store.load(session)
    lanes: list[list[tuple[str, bool, str, str]]] = []
    for ns in head.memories:
        lane: list[tuple[str, bool, str, str]] = []
        at = ""
        for row in await store.load_messages(session, ns):
            parts = row.message.id.split("|")
            at = max(at, parts[1]) if len(parts) == 3 else at
            if (said := _said(row.message)) is not None:
                speaker, text = said
                lane.append((at, speaker != "you", speaker or ns, text))
        lanes.append(lane)
    # Merged and not sorted: within a namespace the order is known. In one millisecond a question is before its answer.
    return [(speaker, text) for _, _, speaker, text in heapq.merge(*lanes, key=lambda entry: entry[:2])]


def _said(message: Message) -> tuple[str, str] | None:
    """Who said what to whom it may concern; `None` for what was between model and code."""
    from stepwell.messages import AssistantMessage, DirectMessage, UserMessage

    if isinstance(message, UserMessage):
        return ("you", message.text) if message.by == "user" else None
    if isinstance(message, (AssistantMessage, DirectMessage)) and message.text.strip():
        return message.stage, message.text
    return None


def _tokens(usage: dict[str, Any]) -> str:
    return ", ".join(f"{model}: {one.usage.input or 0} in, {one.usage.output or 0} out" for model, one in usage.items())


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC).astimezone():%Y-%m-%d %H:%M:%S}" if at else "-"


def _with_store(url: str, work: Callable[[SessionStore], Awaitable[T]], *, create: bool = False) -> T:
    """Do something with a store and close it."""
    from stepwell.sessions import open_store

    async def main() -> T:
        store = open_store(url)
        try:
            return await work(store)
        finally:
            await store.close()

    if not create:
        _refuse_missing(url)
    return asyncio.run(main())


def _refuse_missing(url: str) -> None:
    """Reading from a file that is not there must not make it."""
    path = unquote(url.removeprefix("sqlite:///").partition("?")[0]) if url.startswith("sqlite:///") else ""
    if path and not Path(path).exists():
        raise CommandError(f"There is no session store {path}: name one with --store, or start a conversation first.")
