"""How hard the loop tries: attempts, delays, deadlines, empty replies, rounds, tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Final, Literal, Self, TypeAlias

from stepwell.models import Deadlines

__all__ = [
    "DEFAULT_POLICY",
    "NO_OVERRIDE",
    "UNSET",
    "AskShorter",
    "CallPolicy",
    "CallPolicyOverride",
    "EmptyPolicy",
    "RaiseCap",
    "Unset",
]


class Unset:
    """The type of `UNSET`: a field that was not given and inherits."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final = Unset()

AutoReject: TypeAlias = Literal["truncated", "schema"]


def _number(name: str, value: object, *, least: float = 0, whole: bool = False, above: bool = False) -> None:
    """Refuse what is no finite number of at least (or above) `least`."""
    kind = "whole number" if whole else "finite number"
    allowed = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        raise ValueError(f"{name} must be a {kind}, not {value!r}.")
    if value < least or (above and value == least):
        raise ValueError(f"{name} must be {'above' if above else 'at least'} {least:g}, not {value!r}.")


@dataclass(frozen=True, kw_only=True)
class EmptyPolicy:
    """What to do with a reply that says nothing.

    Attributes:
        retries: Nudges before `on_llm_error`; `None`: each uses one of the round's attempts.
        nudge: What the model is told; it never stays in history.
        accept: Accept silence as `None`.
    """

    retries: int | None = None
    nudge: str = "Your last reply was empty. Please answer."
    accept: bool = False

    def __post_init__(self) -> None:
        if self.retries is not None:
            _number("retries", self.retries, whole=True)
        if not self.nudge.strip():
            raise ValueError("nudge must be text; use CallPolicy(empty=None) for no nudge.")


@dataclass(frozen=True, kw_only=True)
class RaiseCap:
    """Raise the output cap once after a rejected reply that was cut off: `factor` times, at most to `limit` tokens.

    A selection without `max_tokens` gets `limit`. A cap that is above `limit` already stays.
    """

    factor: float = 2.0
    limit: int

    def __post_init__(self) -> None:
        _number("factor", self.factor, least=1, above=True)
        _number("limit", self.limit, least=1, whole=True)


@dataclass(frozen=True)
class AskShorter:
    """Ask once for less after a rejected reply that was cut off."""

    nudge: str = "Your last reply was cut off at the output limit. Answer again, shorter."

    def __post_init__(self) -> None:
        if not self.nudge.strip():
            raise ValueError("nudge must be text; leave on_truncated out for no nudge.")


@dataclass(frozen=True, kw_only=True)
class CallPolicy:
    """Limits of the model calls of a flow. Times in seconds, positive; `None` is no limit. Never stored.

    Attributes:
        attempts: Tries of one round for thrown and rejected candidates (a selection's own wins).
        retry_delay: Wait between attempts.
        max_retry_after: The longest `Retry-After` of a provider that is honoured instead of `retry_delay`.
        default_retry: What happens to a thrown error if no hook decides: `transient` retries unless the HTTP status
            says it cannot succeed (400, 401, 403, 404, 413, 422), `always` retries while attempts last.
        timeout: One attempt, whole.
        connect_timeout: Until the connection is there.
        first_token_timeout: Until the first event of the stream.
        idle_timeout: Between events.
        empty: See `EmptyPolicy`; `None`: no nudge, straight to `on_llm_error`.
        auto_reject: Which candidates are rejected before `check_response`: truncated or malformed tool calls
            (`truncated`), objects that do not match the schema (`schema`).
        on_truncated: `RaiseCap` or `AskShorter` for the attempt after a rejected reply that was cut off at the output
            cap, once per round.
        max_agent_rounds: Rounds per visit.
        max_total_tokens: Tokens per turn; checked before each call.

    Raises:
        ValueError: A value makes no sense.
    """

    attempts: int = 3
    retry_delay: float = 0.5
    max_retry_after: float = 30.0
    default_retry: Literal["transient", "always"] = "transient"
    timeout: float | None = 120.0
    connect_timeout: float | None = 10.0
    first_token_timeout: float | None = 60.0
    idle_timeout: float | None = 60.0
    empty: EmptyPolicy | None = EmptyPolicy()
    auto_reject: frozenset[AutoReject] = frozenset({"truncated", "schema"})
    on_truncated: RaiseCap | AskShorter | None = None
    max_agent_rounds: int = 25
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        _number("attempts", self.attempts, least=1, whole=True)
        _number("max_agent_rounds", self.max_agent_rounds, least=1, whole=True)
        _number("retry_delay", self.retry_delay)
        _number("max_retry_after", self.max_retry_after)
        for name in ("timeout", "connect_timeout", "first_token_timeout", "idle_timeout"):
            if (value := getattr(self, name)) is not None:
                _number(name, value, above=True)
        if self.max_total_tokens is not None:
            _number("max_total_tokens", self.max_total_tokens, least=1, whole=True)
        if self.default_retry not in ("transient", "always"):
            raise ValueError(f"default_retry is 'transient' or 'always', not {self.default_retry!r}.")
        if unknown := set(self.auto_reject) - {"truncated", "schema"}:
            raise ValueError(f"auto_reject knows 'truncated' and 'schema', not {', '.join(sorted(unknown))}.")

    @cached_property
    def deadlines(self) -> Deadlines:
        """The time limits, as a model request carries them."""
        return Deadlines(
            connect=self.connect_timeout,
            first_token=self.first_token_timeout,
            idle=self.idle_timeout,
            attempt=self.timeout,
        )

    def merge(self, override: CallPolicyOverride) -> Self:
        """This policy with the fields that `override` gives."""
        given = {f.name: v for f in fields(override) if (v := getattr(override, f.name)) is not UNSET}
        return replace(self, **given) if given else self


@dataclass(frozen=True, kw_only=True)
class CallPolicyOverride:
    """Fields of `CallPolicy` for one stage: an omitted field inherits, `None` removes the limit."""

    attempts: int | Unset = UNSET
    retry_delay: float | Unset = UNSET
    max_retry_after: float | Unset = UNSET
    default_retry: Literal["transient", "always"] | Unset = UNSET
    timeout: float | Unset | None = UNSET
    connect_timeout: float | Unset | None = UNSET
    first_token_timeout: float | Unset | None = UNSET
    idle_timeout: float | Unset | None = UNSET
    empty: EmptyPolicy | Unset | None = UNSET
    auto_reject: frozenset[AutoReject] | Unset = UNSET
    on_truncated: RaiseCap | AskShorter | Unset | None = UNSET
    max_agent_rounds: int | Unset = UNSET
    max_total_tokens: int | Unset | None = UNSET

    def __post_init__(self) -> None:
        CallPolicy().merge(self)


DEFAULT_POLICY: Final = CallPolicy()
"""What a flow that says nothing gets; one object, since a turn builds nothing but its own data."""

NO_OVERRIDE: Final = CallPolicyOverride()
"""What a stage that says nothing gets."""
