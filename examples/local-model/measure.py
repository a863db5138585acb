"""Two turns through the engine on the local model, with the time of every token; prints a transcript."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time

from flow import LocalFlow

from stepwell import Engine
from stepwell.engine import TextDelta


async def main() -> None:
    """Run the turns."""
    questions = sys.argv[1:] or ["The capital of France is", "A hotel receptionist says:"]
    async with Engine([LocalFlow], store="sqlite:///local-model.db") as engine:
        session: str | None = None
        for question in questions:
            times: list[float] = []
            asked = time.perf_counter()
            async with engine.stream("LocalFlow", question, session_id=session) as turn:
                async for event in turn:
                    if isinstance(event, TextDelta):
                        times.append(time.perf_counter())
            result = turn.result
            session = result.session_id or session
            print(f"> {question}")
            print(result.message if result.success else f"failed: {result.error}")
            if len(times) > 1:
                gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
                print(
                    f"  [{len(times)} tokens, first after {times[0] - asked:.3f} s, then "
                    f"{statistics.median(gaps) * 1000:.1f} ms each, {len(gaps) / (times[-1] - times[0]):.0f} tokens/s]\n"
                )


asyncio.run(main())
