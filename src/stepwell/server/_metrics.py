"""What a server counts, as Prometheus reads it. Labels are names that code gave: never an id, never what was said."""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0

from stepwell.engine import (
    AttemptStarted,
    CandidateClassified,
    Committed,
    TurnEvent,
    TurnFinished,
    TurnResult,
    TurnStarted,
)
from stepwell.errors import TurnCancelledError
from stepwell.messages import Usage

__all__ = ["Metrics"]

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH"})
_SECONDS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application. A `Listener` of its engine's turns; never told of a single token."""

    content_type: Final = CONTENT_TYPE_PLAIN_1_0_0

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._turns = Counter(
            "stepwell_turns", "Turns that ended in this process.", ("flow", "outcome"), registry=registry
        )
        self._open = Gauge("stepwell_turns_open", "Turns that run in this process.", ("flow",), registry=registry)
        self._seconds = Histogram(
            "stepwell_turn_seconds", "How long turns ran.", ("flow",), registry=registry, buckets=_SECONDS
        )
        self._recoveries = Counter(
            "stepwell_recoveries", "Turns of other processes that were gone on with.", ("flow",), registry=registry
        )
        self._suspensions = Counter(
            "stepwell_suspensions", "Turns that ended by waiting for answers.", ("flow",), registry=registry
        )
        self._tokens = Counter(
            "stepwell_tokens",
            "Tokens that models reported; reasoning is part of output, cache_... of input.",
            ("model", "kind"),
            registry=registry,
        )
        self._attempts = Counter("stepwell_attempts", "Attempts of models.", ("verdict",), registry=registry)
        self._commits = Counter("stepwell_commits", "Units in the store.", registry=registry)
        self._streamed = Counter("stepwell_events_streamed", "Events sent to clients.", registry=registry)
        self._requests = Counter(
            "stepwell_http_requests", "Requests that were answered.", ("method", "route", "status"), registry=registry
        )
        self._running: dict[str, tuple[str, float]] = {}  # by invocation: the flow, and since when
        self._asked: dict[str, str] = {}  # by step: the model that an attempt is under way with

    def __call__(self, event: TurnEvent) -> None:
        """See `Listener`."""
        match event:
            case AttemptStarted():
                self._asked[event.step] = f"{event.provider}:{event.model}"
            case CandidateClassified():
                self._classified(event)
            case Committed():
                self._commits.inc()
            case TurnStarted():
                self._running[event.invocation] = event.flow, time.monotonic()
                self._open.labels(event.flow).inc()
                if event.recovered:
                    self._recoveries.labels(event.flow).inc()
            case TurnFinished():
                self._finished(event.result)
            case _:
                pass

    def _classified(self, event: CandidateClassified) -> None:
        self._attempts.labels(event.verdict).inc()
        model, usage = self._asked.pop(event.step, None), event.usage
        if model is None or usage is None:
            return
        for kind in Usage.__struct_fields__:
            if count := getattr(usage, kind):
                self._tokens.labels(model, kind).inc(count)

    def _finished(self, result: TurnResult) -> None:
        known = self._running.pop(result.invocation_id, None)
        if known is None:
            return  # it did not begin
        for step in [step for step in self._asked if step.startswith(result.invocation_id)]:
            del self._asked[step]
        flow, began = known
        outcome = _outcome(result)
        self._open.labels(flow).dec()
        self._turns.labels(flow, outcome).inc()
        self._seconds.labels(flow).observe(time.monotonic() - began)
        if outcome == "suspended":
            self._suspensions.labels(flow).inc()

    def streamed(self, events: int) -> None:
        """So many events were sent to a client."""
        self._streamed.inc(events)

    def answered(self, method: str, route: str, status: int) -> None:
        """A request was answered; `route` as the table has it."""
        self._requests.labels(method if method in _METHODS else "other", route, status).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)


def _outcome(result: TurnResult) -> str:
    if result.error is not None:
        return "cancelled" if result.error.code == TurnCancelledError.code else "failed"
    return "suspended" if result.status == "suspended" else "complete"
