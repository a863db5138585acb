"""The nine messages: built here, and read here. Sources: docs/wire.md, tables 1.2 to 1.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from ._headers import Headers, make_extras, transport_headers
from ._names import H, Name
from ._records import Delivery, WireMessage

__all__ = [
    "DEFAULT_ERROR_CODE",
    "CancelRequest",
    "ErrorInfo",
    "Lifecycle",
    "RunEvent",
    "RunHeaders",
    "RunVerb",
    "StepEvent",
    "cancel_message",
    "parse_lifecycle",
    "run_end",
    "run_resume",
    "run_start",
    "run_suspend",
    "step_end",
    "step_start",
]

DEFAULT_ERROR_CODE: Final = 104008
"""Of a run that ended with an error and no readable code."""

_DEFAULT_ERROR_MESSAGE: Final = "The run ended with an error."


class ErrorInfo(msgspec.Struct, frozen=True):
    """Why a run ended with an error.

    Attributes:
        code: Number; 104008 is the general one.
        message: For people. Published to every client of the channel: no secrets, no customers' text.
    """

    code: int = DEFAULT_ERROR_CODE
    message: str = _DEFAULT_ERROR_MESSAGE

    @property
    def status_code(self) -> int:
        """The HTTP status that a code stands for: its first three digits where it has five, else 500."""
        return self.code // 100 if 10_000 <= self.code < 60_000 else 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeaders:
    """What every message of an invocation says about its run.

    Attributes:
        run_id: The run.
        invocation_id: The input or answer that is worked on.
        run_client_id: Owner of the run; empty if unknown.
        input_client_id: Who published the input; None leaves the header out.
        input_codec_message_id: The input's message; None leaves the header out.
    """

    run_id: str
    invocation_id: str
    run_client_id: str = ""
    input_client_id: str | None = None
    input_codec_message_id: str | None = None


def _headers(**values: str | None) -> dict[str, str]:
    return {key.replace("_", "-"): value for key, value in values.items() if value is not None}


def _run(name: str, run: RunHeaders, idempotency_id: str | None, extra: Headers | None = None) -> WireMessage:
    headers = _headers(
        run_id=run.run_id,
        run_client_id=run.run_client_id,
        invocation_id=run.invocation_id,
        input_client_id=run.input_client_id,
        input_codec_message_id=run.input_codec_message_id,
    )
    headers.update(extra or {})
    return WireMessage(name=name, extras=make_extras(headers), idempotency_id=idempotency_id)


def run_start(
    run: RunHeaders,
    *,
    parent: str | None = None,
    fork_of: str | None = None,
    regenerate: str | None = None,
    idempotency_id: str | None = None,
) -> WireMessage:
    """`ai-run-start`.

    Args:
        run: Ids.
        parent: Structural parent: see docs/wire.md 1.3.
        fork_of: The input that the answered one replaces.
        regenerate: The message to be made anew.
        idempotency_id: `<run>:open` for a writer that may have to repeat it.
    """
    extra = _headers(parent=parent, fork_of=fork_of, msg_regenerate=regenerate)
    return _run(Name.RUN_START, run, idempotency_id, extra)


def run_resume(run: RunHeaders, *, idempotency_id: str | None = None) -> WireMessage:
    """`ai-run-resume`: an invocation goes on with a suspended run."""
    return _run(Name.RUN_RESUME, run, idempotency_id)


def run_suspend(run: RunHeaders, *, idempotency_id: str | None = None) -> WireMessage:
    """`ai-run-suspend`: the run waits for an answer."""
    return _run(Name.RUN_SUSPEND, run, idempotency_id)


def run_end(
    run: RunHeaders, reason: str, error: ErrorInfo | None = None, *, idempotency_id: str | None = None
) -> WireMessage:
    """`ai-run-end`.

    Args:
        run: Ids.
        reason: `complete`, `cancelled` or `error`.
        error: Only with reason `error`.
        idempotency_id: `<run>:end` for a writer that may have to repeat it.
    """
    extra = {H.RUN_REASON: reason}
    if error is not None and reason == "error":
        extra[H.ERROR_CODE] = str(error.code)
        extra[H.ERROR_MESSAGE] = error.message
    return _run(Name.RUN_END, run, idempotency_id, extra)


def _step(
    name: str, run: RunHeaders, step_id: str, step_client_id: str, extra: Headers, key: str | None
) -> WireMessage:
    headers = _headers(
        run_id=run.run_id,
        step_id=step_id,
        invocation_id=run.invocation_id,
        run_client_id=run.run_client_id,
        input_client_id=run.input_client_id,
        step_client_id=step_client_id,
    )
    headers.update(extra)
    return WireMessage(name=name, extras=make_extras(headers), idempotency_id=key)


def step_start(
    run: RunHeaders, step_id: str, step_client_id: str = "", *, idempotency_id: str | None = None
) -> WireMessage:
    """`ai-step-start`. Its serial is the identity of the attempt."""
    return _step(Name.STEP_START, run, step_id, step_client_id, {}, idempotency_id)


def step_end(
    run: RunHeaders,
    step_id: str,
    start_serial: str,
    reason: str,
    step_client_id: str = "",
    *,
    idempotency_id: str | None = None,
) -> WireMessage:
    """`ai-step-end` of the attempt that `start_serial` began: `complete`, `failed` or `cancelled`."""
    extra = {H.STEP_START_SERIAL: start_serial, H.STEP_REASON: reason}
    return _step(Name.STEP_END, run, step_id, step_client_id, extra, idempotency_id)


def cancel_message(
    event_id: str, *, run_id: str | None = None, input_codec_message_id: str | None = None
) -> WireMessage:
    """`ai-cancel`: of a run by its id, of the run that answers an input, or both."""
    headers = _headers(event_id=event_id, run_id=run_id, input_codec_message_id=input_codec_message_id)
    return WireMessage(name=Name.CANCEL, extras=make_extras(headers))


# --- reading ----------------------------------------------------------------------------------------------------------

RunVerb: TypeAlias = str
"""`start`, `resume`, `suspend` or `end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """A run's lifecycle message. Missing ids are empty text, as on the wire; `reason` of an end is as it came."""

    verb: RunVerb
    run_id: str
    serial: str
    timestamp: int
    client_id: str = ""
    invocation_id: str = ""
    input_client_id: str | None = None
    input_codec_message_id: str | None = None
    parent: str | None = None
    fork_of: str | None = None
    regenerates: str | None = None
    reason: str | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """Start (`reason` None; `start_serial` is its own serial) or end of an attempt of a step."""

    run_id: str
    step_id: str
    start_serial: str
    serial: str
    timestamp: int
    reason: str | None = None
    invocation_id: str = ""
    run_client_id: str = ""
    step_client_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Somebody wants a run to stop.

    Attributes:
        run_id: The run; None if it was not known yet.
        input_codec_message_id: The input whose answer is to stop.
        client_id: Who asked, as the channel knows it.
        message: The message itself.
    """

    run_id: str | None
    input_codec_message_id: str | None
    client_id: str | None
    message: Delivery


Lifecycle: TypeAlias = RunEvent | StepEvent | CancelRequest

_VERBS: Final = {
    Name.RUN_START: "start",
    Name.RUN_RESUME: "resume",
    Name.RUN_SUSPEND: "suspend",
    Name.RUN_END: "end",
}


def parse_lifecycle(delivery: Delivery) -> Lifecycle | None:
    """Read a lifecycle message; None for outputs, inputs, other applications' messages and unusable ones."""
    name = delivery.name
    if name is None or name in (Name.OUTPUT, Name.INPUT):
        return None
    headers = transport_headers(delivery.extras)
    verb = _VERBS.get(name)
    if verb is not None:
        return _parse_run(verb, headers, delivery)
    if name in (Name.STEP_START, Name.STEP_END):
        return _parse_step(name == Name.STEP_END, headers, delivery)
    if name == Name.CANCEL:
        return CancelRequest(
            run_id=headers.get(H.RUN_ID),
            input_codec_message_id=headers.get(H.INPUT_CODEC_MESSAGE_ID),
            client_id=delivery.client_id,
            message=delivery,
        )
    return None


def _parse_run(verb: str, headers: Headers, delivery: Delivery) -> RunEvent | None:
    run_id = headers.get(H.RUN_ID)
    if not run_id:
        return None
    reason = headers.get(H.RUN_REASON, "complete") if verb == "end" else None
    return RunEvent(
        verb=verb,
        run_id=run_id,
        serial=delivery.serial,
        timestamp=delivery.timestamp,
        client_id=headers.get(H.RUN_CLIENT_ID, ""),
        invocation_id=headers.get(H.INVOCATION_ID, ""),
        input_client_id=headers.get(H.INPUT_CLIENT_ID),
        input_codec_message_id=headers.get(H.INPUT_CODEC_MESSAGE_ID),
        parent=headers.get(H.PARENT),
        fork_of=headers.get(H.FORK_OF),
        regenerates=headers.get(H.MSG_REGENERATE),
        reason=reason,
        error=_parse_error(headers) if reason == "error" else None,
    )


def _parse_error(headers: Headers) -> ErrorInfo:
    text = headers.get(H.ERROR_CODE, "")
    code = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else DEFAULT_ERROR_CODE
    return ErrorInfo(code, headers.get(H.ERROR_MESSAGE) or _DEFAULT_ERROR_MESSAGE)


def _parse_step(end: bool, headers: Headers, delivery: Delivery) -> StepEvent | None:
    run_id, step_id = headers.get(H.RUN_ID), headers.get(H.STEP_ID)
    start_serial = headers.get(H.STEP_START_SERIAL) if end else delivery.serial
    if not run_id or not step_id or not start_serial:
        return None
    return StepEvent(
        run_id=run_id,
        step_id=step_id,
        start_serial=start_serial,
        serial=delivery.serial,
        timestamp=delivery.timestamp,
        reason=headers.get(H.STEP_REASON, "complete") if end else None,
        invocation_id=headers.get(H.INVOCATION_ID, ""),
        run_client_id=headers.get(H.RUN_CLIENT_ID, ""),
        step_client_id=headers.get(H.STEP_CLIENT_ID, ""),
    )
