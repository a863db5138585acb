"""What a conversation tree tells its listeners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from stepwell.wire import Delivery, RunEvent, StepEvent

from ._nodes import Node, RunNode

__all__ = ["BulkChange", "OutputChange", "RunChange", "StepChange", "StructureChange", "TreeChange"]


class RunChange(msgspec.Struct, frozen=True):
    """A run started, was resumed, was suspended or ended.

    Attributes:
        run: As it is now. `run.known` is false for an end or a suspension of a run that nothing else is known of.
        event: What was said.
        live: It came from the subscription, not from history.
    """

    run: RunNode[Any, Any]
    event: RunEvent
    live: bool


class StepChange(msgspec.Struct, frozen=True):
    """An attempt of a step started or ended. Attributes as in `RunChange`."""

    run: RunNode[Any, Any]
    event: StepEvent
    live: bool


class OutputChange(msgspec.Struct, frozen=True):
    """A node's content changed.

    Attributes:
        node: Which.
        delivery: By what; None where the content was made anew: an attempt was superseded, or an input of this client
            is shown ahead of its echo, or is not shown any more.
        inputs: What was decoded.
        outputs: What was decoded.
        live: See `RunChange`.
    """

    node: Node[Any, Any]
    delivery: Delivery | None
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    live: bool


class StructureChange(msgspec.Struct, frozen=True):
    """Which nodes there are, or how they hang together, changed.

    Attributes:
        node: The node that is new, gone, or has another place; None where it is not known yet.
        renamed: Its key until now, where an answer was taken up by an agent and has got its run id.
    """

    node: Node[Any, Any] | None = None
    renamed: str | None = None


class BulkChange(msgspec.Struct, frozen=True):
    """Much is going to change at once, or has: told before and behind.

    Attributes:
        begins: It is about to change.
        gap: Everything is replaced by a snapshot, because part of the log was gone. Otherwise a page of history is
            taken in; what it changes is told one by one in between, as not live.
    """

    begins: bool
    gap: bool


TreeChange: TypeAlias = RunChange | StepChange | OutputChange | StructureChange | BulkChange
