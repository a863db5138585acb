"""The intake with a scripted model, and by free typing on the offline model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest
from intake import IntakeFlow, checks

from stepwell import Engine, TurnResult
from stepwell.messages import ToolResult
from stepwell.models.offline import OfflineModel
from stepwell.testing import Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

CONVERSATION = Path(__file__).parents[1].joinpath("conversation.txt").read_text(encoding="utf-8").splitlines()
CONFIG = {"today": "2026-12-01"}

call = Reply.tool_call


async def typed(lines: Sequence[str]) -> list[TurnResult]:
    """Type lines into a new session on the offline model."""
    results: list[TurnResult] = []
    async with Engine([IntakeFlow], models={"offline": OfflineModel()}) as engine:
        for line in lines:
            session = results[-1].session_id if results else None
            config = CONFIG if session is None else None
            results.append(await engine.run_or_raise("IntakeFlow", line, session_id=session, config=config))
    return results


async def test_an_adult_goes_to_the_review() -> None:
    script = [
        call("capture_name", {"name": "Ada Lovelace"}),
        "When were you born?",
        call("capture_birth", {"born": "1985-12-10"}),
        "Where do you live?",
        call("capture_address", {"street": "12 Baker Street", "postcode": "NW1 6XE", "city": "London"}),
        "Is all of that correct?",
        call("confirm_details"),
    ]
    async with TurnHarness(IntakeFlow, model=ScriptedModel(script)) as h:
        for line in ("Ada Lovelace", "10 December 1985", "12 Baker Street, NW1 6XE London", "yes"):
            result = await h.say(line, config=CONFIG if h.session_id is None else None)
        assert result.completed
        assert result.content_type == "application/json"
        assert json.loads(str(result.message)) == {
            "name": "Ada Lovelace",
            "born": "1985-12-10",
            "address": "12 Baker Street, NW1 6XE London",
        }
        visited = [entry.stage for entry in await h.sequence()]
        assert "GuardianStep" not in visited
        assert visited.count("RouteStep") == 3


async def test_wrong_values_are_refused_by_code_and_by_the_schema() -> None:
    script = [
        call("capture_name", {"name": "Ada"}),
        call("capture_name", {"name": "Ada L0velace"}),
        call("capture_name", {"name": "Ada Lovelace"}),
        call("capture_birth", {"born": "soon"}),
        call("capture_birth", {"born": "2027-01-01"}),
        call("capture_birth", {"born": "1815-12-10"}),
        "When were you born, really?",
    ]
    async with TurnHarness(IntakeFlow, model=ScriptedModel(script)) as h:
        await h.say("Ada", config=CONFIG)
        results = [str(m.content) for m in await h.history("intake") if isinstance(m, ToolResult)]
    words = ["one name only", "made of letters", "ok", "born: ", "in the future", "would be 210 years"]
    assert len(results) == len(words)
    assert [(w, r) for w, r in zip(words, results, strict=True) if w not in r] == []


async def test_a_minor_passes_by_a_guardian_and_may_correct() -> None:
    lines = ["hello", "I'm Tim Smith", "I was born on 3 May 2015", "Ann", "Ann-Marie Smith"]
    lines += ["Hauptstrasse 5, 10115 Berlin", "no, the address is wrong", "Hauptstrasse 6, 10115, Berlin", "yes"]
    results = await typed(lines)
    stages = ["NameStep", "BirthStep", "GuardianStep", "GuardianStep", "AddressStep", "ReviewStep", "AddressStep"]
    assert [result.current for result in results] == [*stages, "ReviewStep", "ReviewStep"]
    assert json.loads(str(results[-1].message)) == {
        "name": "Tim Smith",
        "born": "2015-05-03",
        "address": "Hauptstrasse 6, 10115 Berlin",
        "guardian": "Ann-Marie Smith",
    }


async def test_the_conversation_of_the_documentation() -> None:
    results = await typed(CONVERSATION)
    replies = [str(result.message) for result in results]
    assert replies[1].startswith("That is one name only.")
    assert replies[3].startswith("2090-12-10 is in the future.")
    assert replies[5].startswith("The house number is missing.")
    assert results[-1].completed


async def test_any_detail_can_be_corrected() -> None:
    details = ["Ada Lovelace", "10 December 1985", "12 Baker Street, NW1 6XE London"]
    wrong = ["the name is wrong", "Ada King", "my birthday is wrong", "11 December 1985", "yes"]
    results = await typed(["hi", *details, *wrong])
    stages = ["NameStep", "ReviewStep", "BirthStep", "ReviewStep", "ReviewStep"]
    assert [result.current for result in results[4:]] == stages
    assert json.loads(str(results[-1].message))["name"] == "Ada King"
    assert json.loads(str(results[-1].message))["born"] == "1985-12-11"


async def test_a_birthday_makes_an_adult() -> None:
    results = await typed(["Tim Smith", "I am Tim Smith", "1 December 2008"])
    assert results[-1].current == "AddressStep"


def test_ages_are_full_years() -> None:
    assert checks.age_on(date(2026, 12, 1), date(2008, 12, 1)) == 18
    assert checks.age_on(date(2026, 12, 1), date(2008, 12, 2)) == 17


async def test_today_is_the_real_day_without_configuration() -> None:
    async with Engine([IntakeFlow], models={"offline": OfflineModel()}) as engine:
        result = await engine.run_or_raise("IntakeFlow", "my name is Ada Lovelace")
    assert result.current == "BirthStep"
