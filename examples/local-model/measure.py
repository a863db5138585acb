"""Two turns through the engine on the local model, with the time of every token; prints a transcript."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from itertools import pairwise

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
                        # The time it came, not when all of them were there.
                        times.append(time.perf_counter())  # noqa: PERF401
            result = turn.result
            session = result.session_id or session
            print(f"> {question}")
            print(result.message if result.success else f"failed: {result.error}")
            if len(times) > 1:
                gaps = [b - a for a, b in pairwise(times)]
                first, each = times[0] - asked, statistics.median(gaps) * 1000
                rate = len(gaps) / (times[-1] - times[0])
                print(f"  [{len(times)} tokens, first after {first:.3f} s, ", end="")
                print(f"then {each:.1f} ms each, {rate:.0f} tokens/s]\n")


asyncio.run(main())
