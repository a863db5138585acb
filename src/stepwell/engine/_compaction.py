"""Compaction: at the end of a turn, old messages become a summary. It may fail, it must not hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepwell.flow import SummaryRule
from stepwell.loop import Watchdog
from stepwell.messages import AssistantMessage, DirectMessage, Message, ToolResult, Usage, UserMessage, exchanges
from stepwell.models import Deadlines, Finish, ModelRequest, StopReason, TextDelta, UsageEvent
from stepwell.sessions import Summary

from ._working import Working

__all__ = ["compact", "due_for_compaction"]

PROMPT = (
    "Summarise the conversation below for somebody who has to continue it: facts, decisions, names, numbers and open "
    "questions. Only the summary, shorter than the conversation."
)


async def compact(working: Working, rules: Sequence[SummaryRule], waiting: Callable[[], bool]) -> None:
    """Apply the rules that are due.

    Abandoned between namespaces when an input waits. A failure is a warning in the session log.
    """
    for rule in rules:
        if waiting():
            break
        try:
            await _compact(working, rule, working.histories[rule.ns].messages)
        except Exception as error:  # noqa: BLE001 - compaction never fails a turn
            working.log("warning", "compaction failed", {"namespace": rule.ns, "error": type(error).__name__})


def due_for_compaction(working: Working, rule: SummaryRule) -> bool:
    """Whether a namespace has grown to what its rule wants compacted."""
    history = working.histories.get(rule.ns)
    return history is not None and len(history.messages) >= rule.min_messages


async def _compact(working: Working, rule: SummaryRule, messages: Sequence[Message]) -> None:
    latest = len(messages) - rule.recent_messages
    # Providers want a user message first, and no call without its result: cut where an exchange begins with a person.
    cut = max((i for i in exchanges(messages) if i <= latest and isinstance(messages[i], UserMessage)), default=0)
    if cut == 0:
        return
    memory = working.head.memories[rule.ns]
    lines = [f"Summary of what came before: {memory.summary.text}"] if memory.summary else []
    lines += [line for message in messages[:cut] if (line := _line(message))]
    text = "\n".join(lines)
    request = ModelRequest(
        selection=rule.model,
        system=PROMPT,
        messages=[UserMessage(content=text, by="code")],
        deadlines=Deadlines(connect=10.0, first_token=60.0, idle=60.0, attempt=120.0),
        conversation=working.head.id,
    )
    summary, usage, complete = await _ask(working, request)
    working.add_usage(rule.model, usage)
    if not complete or not summary.strip() or len(summary) >= len(text):
        working.log("warning", "compaction skipped: the summary is not shorter, or not whole", {"namespace": rule.ns})
        return
    through = messages[cut - 1].id
    working.cut(rule.ns, len(messages) - cut)
    memory.summary = Summary(summary.strip(), through)


async def _ask(working: Working, request: ModelRequest) -> tuple[str, Usage | None, bool]:
    parts: list[str] = []
    usage: Usage | None = None
    complete = False
    with Watchdog(working.alarm, request.deadlines) as watchdog:
        async with working.gateway(request.selection).stream(request) as events:
            async for event in events:
                watchdog.last = working.clock.monotonic()
                if isinstance(event, TextDelta):
                    parts.append(event.text)
                elif isinstance(event, UsageEvent):
                    usage = event.usage
                elif isinstance(event, Finish):
                    complete = event.stop is StopReason.COMPLETE
                    break
    return "".join(parts), usage, complete


def _line(message: Message) -> str:
    match message:
        case UserMessage():
            return f"Person: {message.text}"
        case AssistantMessage():
            calls = ", ".join(call.name for call in message.calls)
            return f"Assistant: {message.text}{f' (used {calls})' if calls else ''}"
        case DirectMessage():
            return f"Assistant: {message.text}"
        case ToolResult():
            return f"Result of {message.name}: {message.content}"
