"""Kill writers of channels with -9, and count what is found afterwards. The machinery is the tests'."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

from rich.console import Console
from tests.kill_kit import kills

from bench.backends import DURABLE, Backends
from bench.progress import progress_of

__all__ = ["PLACES", "kill_writers"]

PLACES = {
    "not": "not killed: it was done before",
    "open": "channel opened",
    "started": "run started",
    "step": "step begun",
    "piece": "within the stream",
    "piped": "stream ended",
    "ended step": "step ended",
    "ended": "run ended",
}
"""The last that a writer had said when it was killed."""


def kill_writers(backends: Backends, runs: int, console: Console) -> list[dict[str, Any]]:
    """So many in each durable backend; one object of counts each."""
    # Clients that leave amid a query: psycopg says each time that it closes the connection.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    names = [name for name in backends.names if name in DURABLE]
    return [asyncio.run(_kill(backends, name, runs, console)) for name in names]


async def _kill(backends: Backends, name: str, runs: int, console: Console) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    places: Counter[str] = Counter()
    faults: list[str] = []
    with backends.fresh(name) as url, progress_of(console) as progress:
        task = progress.add_task(f"kill -9 of writers: {name}", total=runs)
        async for killed in kills(url, runs):
            counts["runs"] += 1
            counts["killed"] += killed.place != "not"
            for fault in ("doubled", "lost", "unequal"):
                counts[fault] += bool(getattr(killed, fault))
            places[killed.place] += 1
            faults += killed.faults
            progress.advance(task)
            if killed.faults or (not console.is_terminal and counts["runs"] % 25 == 0):
                console.print(f"kill -9, {name}: {dict(counts)} {'; '.join(killed.faults)}", highlight=False)
    ordered = {place: places[place] for place in PLACES if places[place]}
    keys = ("runs", "killed", "doubled", "lost", "unequal")
    return {"backend": name, **{key: counts[key] for key in keys}, "places": ordered, "faults": faults[:20]}
