"""Promise P5 for the examples: killed at every point there is, a conversation ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from crash_kit import TIMERS, Play, Theatre, document, talk, watch

pytestmark = pytest.mark.timeout(180)

KILLED = -9


@pytest.fixture(scope="module")
def theatre() -> Theatre:
    return Theatre()


class Run:
    """One conversation, said by process after process, with three clients that look on."""

    def __init__(self, theatre: Theatre, play: Play) -> None:
        self.theatre, self.play = theatre, play
        self.clients: dict[str, Any] = {}

    def join(self, who: str) -> None:
        self.clients[who] = self.theatre.start(watch, self.play, who)

    def views(self) -> dict[str, Any]:
        for who, client in self.clients.items():
            client.join(30)
            assert client.exitcode == 0, f"the client {who} never saw the end"
        return {who: json.loads(self.play.file(who).read_text(encoding="utf-8")) for who in self.clients}

    def bookings(self) -> set[str]:
        file = self.play.file("bookings")
        return set(file.read_text(encoding="utf-8").splitlines()) if file.exists() else set()


def check(run: Run, expected: dict[str, Any]) -> None:
    assert asyncio.run(document(run.play)) == expected["document"]
    for who, view in run.views().items():
        assert view["shown"] == expected["shown"], who
        assert set(view["steps"]) == {"complete"}, who
    assert [line.partition(" ")[2] for line in run.bookings()] == expected["bookings"], "booked once, under one key"


def killed_everywhere(theatre: Theatre, example: str, store: str, channels: str, directory: Path) -> list[str]:
    """At each point that an undisturbed conversation passes, one process is killed; returns the points."""
    calm = Run(theatre, Play(example, "calm", store, channels, directory))
    assert theatre.run(talk, calm.play, None) == 0
    calm.join("after")
    expected: dict[str, Any] = {
        "document": asyncio.run(document(calm.play)),
        "shown": calm.views()["after"]["shown"],
        "bookings": [line.partition(" ")[2] for line in calm.bookings()],
    }
    assert expected["document"]["open"] == (None, None, [])
    trace = json.loads(calm.play.file("trace").read_text(encoding="utf-8"))
    points = [point for point in dict.fromkeys(trace) if point not in TIMERS]
    left, number = list(points), 0
    while left:
        run = Run(theatre, Play(example, f"killed-{number}", store, channels, directory))
        number += 1
        run.join("connected")
        before = len(left)
        while (code := theatre.run(talk, run.play, left[0] if left else None)) == KILLED:
            left.pop(0)
            if "between" not in run.clients:
                run.join("between")
        assert code == 0
        assert len(left) < before, f"{left[0]} is never passed"
        run.join("after")
        check(run, expected)
    return points


@pytest.mark.parametrize("example", ["hotel", "intake"])
def test_promise_p5_killed_at_every_point_on_sqlite(theatre: Theatre, tmp_path: Path, example: str) -> None:
    url = f"sqlite:///{tmp_path / 'house.db'}"
    points = killed_everywhere(theatre, example, url, url, tmp_path)
    assert {"acquire", "fence:done", "open", "model", "token", "commit:done", "step-end", "close", "run-end"} <= set(
        points
    )
    assert ("intent:done" in points) is ("book:done" in points) is (example == "hotel")


@pytest.mark.parametrize("example", ["hotel", "intake"])
def test_promise_p5_killed_at_every_point_on_postgres_and_redis(
    theatre: Theatre, tmp_path: Path, postgres_database: str, redis_database: str, example: str
) -> None:
    killed_everywhere(theatre, example, postgres_database, redis_database, tmp_path)
