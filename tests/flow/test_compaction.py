"""Compaction: old messages become a summary, at a place no provider minds, and it never hurts a turn."""

from __future__ import annotations

from typing import Any

import pytest

from flow_kit import call, flow_of, harness, lines, stage
from stepwell import Flow, tool
from stepwell.testing import Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

TALK = [f"A long enough answer, number {n}, so that a summary is shorter." for n in range(20)]


def summarising(min_messages: int = 4, recent_messages: int = 2, **members: Any) -> type[Flow]:
    async def init(self: Flow) -> None:
        self.memory.enable_summary(
            "A", model="scripted:sum", min_messages=min_messages, recent_messages=recent_messages
        )

    return flow_of(stage("A", **members), init=init)


def model(*summaries: Any, talk: list[Any] = TALK) -> ScriptedModel:
    return ScriptedModel({"m": list(talk), "sum": list(summaries)})


async def test_a_summary_takes_the_place_of_old_messages() -> None:
    replies = model(Reply.text("They greeted.").with_usage(50, 5), "Again.", talk=TALK[:3])
    async with TurnHarness(summarising(), model=replies) as h:
        first = await h.say("one")
        assert (await h.document())["memories"]["A"].get("summary") is None  # below min_messages
        before = await h.history("A")
        second = await h.say("two")
        head = (await h.document())["memories"]["A"]
        assert head["summary"] == {"text": "They greeted.", "through": before[-1].id}
        assert lines(await h.history("A")) == ["user: two", f"model: {TALK[1]}"]
        await h.restart()
        third = await h.say("three")
        assert third.success
        request = [r for r in replies.requests if r.selection.name == "m"][-1]
        assert request.system == "Summary of the conversation so far:\nThey greeted."
        assert [m.text for m in request.messages] == ["two", TALK[1], "three"]  # type: ignore[union-attr]
        asked = next(r for r in replies.requests if r.selection.name == "sum")
        assert "Person: one" in asked.messages[0].text  # type: ignore[union-attr]
        assert "two" not in asked.messages[0].text  # type: ignore[union-attr]
        usage = (await h.document())["usage"]["scripted:sum"]
    assert first.success
    assert second.success
    assert (usage["usage"], usage["attempts"], usage["unknown"]) == ({"input": 50, "output": 5}, 2, 1)


async def test_the_prompt_stays_in_front_of_the_summary() -> None:
    replies = model("Short.", "Again.", talk=TALK[:3])
    async with TurnHarness(summarising(get_prompt=lambda self: "Be kind."), model=replies) as h:
        for said in ("one", "two", "three"):
            await h.say(said)
    assert replies.requests[-2].system == "Be kind.\n\nSummary of the conversation so far:\nShort."


async def test_a_later_summary_contains_the_earlier_one() -> None:
    replies = model("First.", "Second.", talk=TALK[:3])
    async with TurnHarness(summarising(), model=replies) as h:
        for said in ("one", "two", "three"):
            await h.say(said)
        asked = [r for r in replies.requests if r.selection.name == "sum"][-1]
        assert asked.messages[0].text.startswith("Summary of what came before: First.\n")  # type: ignore[union-attr]
        assert (await h.document())["memories"]["A"]["summary"]["text"] == "Second."


async def test_the_cut_is_never_between_a_call_and_its_result() -> None:
    @tool
    async def look(self: Any) -> Any:
        self.get_memory().append(f"a note that is long enough to be worth a summary {len(self.get_memory())}")
        return {"found": ["something", "that", "is", "long", "enough"]}

    script = [call("look"), call("look"), TALK[0], call("look"), TALK[1], TALK[2]]
    for recent in range(1, 8):
        flow = summarising(min_messages=9, recent_messages=recent, look=look)
        async with TurnHarness(flow, model=ScriptedModel({"m": script}, default="Short.")) as h:
            for said in ("one", "two", "three"):
                assert (await h.say(said)).success
            history = await h.history("A")
            text = lines(history)
            assert text[0].startswith(("user:", "code:"))
            assert len(history) >= min(recent, 4)


@pytest.mark.parametrize(
    ("summary", "entry"),
    [
        ("x" * 5000, "compaction skipped: the summary is not shorter, or not whole"),
        (" ", "compaction skipped: the summary is not shorter, or not whole"),
        (Reply.truncated("Sho"), "compaction skipped: the summary is not shorter, or not whole"),
        (Reply.error(status=500), "compaction failed"),
        (Reply.text("Sho").failing(), "compaction failed"),
        (Reply.text("Sho").stalling(), "compaction skipped: the summary is not shorter, or not whole"),
    ],
    ids=["longer", "blank", "truncated", "error", "broken", "stalled"],
)
async def test_what_goes_wrong_is_a_warning_and_nothing_else(summary: Any, entry: str) -> None:
    replies = model(summary, "Short.", talk=TALK[:3])
    async with TurnHarness(summarising(), model=replies) as h:
        for said in ("one", "two"):
            assert (await h.say(said)).success
        assert len(await h.history("A")) == 4
        assert (await h.document())["memories"]["A"].get("summary") is None
        assert [(e.level, e.text) for e in await h.log()] == [("warning", entry)]
        assert (await h.say("three")).success
        assert (await h.document())["memories"]["A"]["summary"]["text"] == "Short."


async def test_erasing_the_memory_drops_the_summary() -> None:
    @tool
    async def forget(self: Any) -> str:
        return "ok"

    async def on_visit(self: Any, message: Any) -> None:
        if message.text == "forget":
            self.erase_memory()
            self.get_memory().append(message)

    replies = model("Short.", talk=[*TALK[:2], "Done."])
    async with TurnHarness(summarising(on_visit=on_visit), model=replies) as h:
        for said in ("one", "two", "forget"):
            await h.say(said)
        assert (await h.document())["memories"]["A"].get("summary") is None
        assert lines(await h.history("A")) == ["user: forget", "model: Done."]
    assert replies.requests[-1].system is None


async def test_namespaces_without_messages_are_left_alone() -> None:
    async def init(self: Flow) -> None:
        self.memory.enable_summary("nobody", model="scripted:sum")

    async with harness(flow_of(stage("A"), init=init), "Ok.") as h:
        assert (await h.say("hi")).success
