"""The model/tool loop and the failure policy. Knows gateways, tools and hooks; nothing of stores, channels or flows."""

from stepwell.loop._batch import Answer, Batch, BatchResult, Ran, Waiting, requests_of, verdict_of
from stepwell.loop._contexts import LlmAttemptErrorContext, LlmBlockedContext, LlmErrorContext, Rejection
from stepwell.loop._host import CallScope, LoopHost, LoopObserver, StreamMode, Verdict, VisitState
from stepwell.loop._policy import (
    DEFAULT_POLICY,
    NO_OVERRIDE,
    UNSET,
    AskShorter,
    CallPolicy,
    CallPolicyOverride,
    EmptyPolicy,
    RaiseCap,
    Unset,
)
from stepwell.loop._round import Accepted, Terminal, run_round
from stepwell.loop._watch import Alarm, Watchdog

__all__ = [
    "DEFAULT_POLICY",
    "NO_OVERRIDE",
    "UNSET",
    "Accepted",
    "Alarm",
    "Answer",
    "AskShorter",
    "Batch",
    "BatchResult",
    "CallPolicy",
    "CallPolicyOverride",
    "CallScope",
    "EmptyPolicy",
    "LlmAttemptErrorContext",
    "LlmBlockedContext",
    "LlmErrorContext",
    "LoopHost",
    "LoopObserver",
    "RaiseCap",
    "Ran",
    "Rejection",
    "StreamMode",
    "Terminal",
    "Unset",
    "Verdict",
    "VisitState",
    "Waiting",
    "Watchdog",
    "requests_of",
    "run_round",
    "verdict_of",
]
