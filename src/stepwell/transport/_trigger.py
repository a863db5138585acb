"""The input that a run answers, and where on the channel that puts the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stepwell.wire import Delivery, H, transport_headers

from ._nodes import RunNode
from ._tree import ConversationTree

__all__ = ["NO_TRIGGER", "Trigger", "is_first_part", "read_trigger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """What an input says about the run that answers it.

    Attributes:
        serial: Of the input; empty for a run that begins by itself.
        codec_message_id: Of the input.
        publisher: Who published it, as the channel knows it.
        owner: Whose run it is to be, as the input says.
        run_id: The run that it continues; None for a new one.
        anchor: What the run's outputs hang on.
        parent: What the run itself hangs on.
        fork_of: The input that this one replaces.
        regenerates: The message to be made anew.
    """

    serial: str = ""
    codec_message_id: str | None = None
    publisher: str | None = None
    owner: str | None = None
    run_id: str | None = None
    anchor: str | None = None
    parent: str | None = None
    fork_of: str | None = None
    regenerates: str | None = None


NO_TRIGGER = Trigger()


def is_first_part(serial: str | None) -> bool:
    """Whether nothing of an input can be on an older page of history than the part of that serial.

    An input of several parts is one publish, and a page may begin within it. Serials end in the part's number.
    """
    return serial is not None and serial.endswith(":000")


def read_trigger(tree: ConversationTree[Any, Any], delivery: Delivery) -> Trigger:
    """Read an input that was taken into the tree.

    It is a node of the tree (something said), belongs to a run (a tool's result, which forks it), or neither (a
    regeneration, which only asks): then everything hangs on what the input itself hangs on.
    """
    headers = transport_headers(delivery.extras)
    message_id, parent = headers.get(H.CODEC_MESSAGE_ID), headers.get(H.PARENT)
    node = tree.node_of(message_id) if message_id is not None else None
    anchor = message_id if node is not None else parent
    return Trigger(
        serial=delivery.serial,
        codec_message_id=message_id,
        publisher=delivery.client_id,
        owner=headers.get(H.RUN_CLIENT_ID),
        run_id=headers.get(H.RUN_ID),
        anchor=anchor,
        parent=parent if isinstance(node, RunNode) else anchor,
        fork_of=headers.get(H.FORK_OF),
        regenerates=headers.get(H.MSG_REGENERATE),
    )
