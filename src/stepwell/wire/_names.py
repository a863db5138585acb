"""The names on the wire: nine messages and the headers of `extras.ai.transport`. The authority is docs/wire.md."""

from __future__ import annotations

from typing import Final

__all__ = ["NAMES", "SUCCESSOR", "H", "Name"]


class Name:
    """`WireMessage.name` of the nine messages. Anything else on a channel belongs to other applications."""

    INPUT: Final = "ai-input"
    OUTPUT: Final = "ai-output"
    CANCEL: Final = "ai-cancel"
    RUN_START: Final = "ai-run-start"
    RUN_RESUME: Final = "ai-run-resume"
    RUN_SUSPEND: Final = "ai-run-suspend"
    RUN_END: Final = "ai-run-end"
    STEP_START: Final = "ai-step-start"
    STEP_END: Final = "ai-step-end"


NAMES: Final = frozenset(value for key, value in vars(Name).items() if key.isupper())

SUCCESSOR: Final = "stepwell-successor"
"""`WireMessage.name` of the pointer on an ended session's channel; `data` is `{"session", "channel"}`. It is no message
of the protocol, so other clients pass it over."""


class H:
    """Keys of the transport headers. Every value is text."""

    RUN_ID: Final = "run-id"
    INVOCATION_ID: Final = "invocation-id"
    EVENT_ID: Final = "event-id"
    CODEC_MESSAGE_ID: Final = "codec-message-id"
    ROLE: Final = "role"
    RUN_CLIENT_ID: Final = "run-client-id"
    INPUT_CLIENT_ID: Final = "input-client-id"
    INPUT_CODEC_MESSAGE_ID: Final = "input-codec-message-id"
    PARENT: Final = "parent"
    FORK_OF: Final = "fork-of"
    MSG_REGENERATE: Final = "msg-regenerate"
    SUPERSEDES: Final = "supersedes"
    RUN_REASON: Final = "run-reason"
    ERROR_CODE: Final = "error-code"
    ERROR_MESSAGE: Final = "error-message"
    STEP_ID: Final = "step-id"
    STEP_START_SERIAL: Final = "step-start-serial"
    STEP_CLIENT_ID: Final = "step-client-id"
    STEP_REASON: Final = "step-reason"
    STEER_CODEC_MESSAGE_IDS: Final = "steer-codec-message-ids"
    STREAM: Final = "stream"
    STATUS: Final = "status"
    STREAM_ID: Final = "stream-id"
    DISCRETE: Final = "discrete"
