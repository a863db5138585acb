"""Stands for a model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from temporalio import activity

from stepwell.transport.codecs import UIMessage


async def slow_model(messages: Sequence[UIMessage], *, delay: float = 0.3) -> AsyncIterator[dict[str, Any]]:
    """Says something in words that come slowly, so that there is time to kill the worker.

    Args:
        messages: The conversation; the last one is answered.
        delay: Seconds before each word.
    """
    question = messages[-1]["parts"][0]["text"]
    text = f"This is attempt {activity.info().attempt} to answer {question!r}: a long sentence, one word at a time."
    yield {"type": "start"}
    yield {"type": "text-start", "id": "t"}
    for word in text.split():
        await asyncio.sleep(delay)
        yield {"type": "text-delta", "id": "t", "delta": f"{word} "}
    yield {"type": "text-end", "id": "t"}
    yield {"type": "finish", "finishReason": "stop"}
