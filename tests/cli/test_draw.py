"""`stepwell draw`: edges read from code, Mermaid text, and a picture of our own."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from cli.kit import DESK, HOTEL, Command
from stepwell.cli._edges import Edge, Graph, Stage
from stepwell.cli._svg import picture

SVG = "{http://www.w3.org/2000/svg}"


def edges(command: Command, target: str | Path) -> set[tuple[str, str, str, str]]:
    graph = command("draw", target, "--json").json
    return {(edge["source"], edge["target"] or "end", edge["kind"], " ".join(edge["via"])) for edge in graph["edges"]}


def test_edges_are_read_from_the_code(command: Command) -> None:
    assert edges(command, DESK) == {
        ("AskStep", "RouteStep", "go", "note"),
        ("AskStep", "end", "finish", "leave"),  # through a function of the module
        ("RouteStep", "AnswerStep", "direct_to", "run_logic"),  # by name
        ("RouteStep", "AnswerStep", "go", "run_logic"),
        ("RouteStep", "CloseDesk", "go", "run_logic"),
        ("AnswerStep", "AskStep", "go", "on_response"),  # a returned class
        ("AnswerStep", "end", "finish", "leave"),
        ("CloseDesk", "end", "finish", ""),
    }
    graph = command("draw", DESK, "--json").json
    assert graph["computed"] == ["AnswerStep.again"]
    assert [(stage["id"], stage["kind"]) for stage in graph["stages"]] == [
        ("AskStep", "step"),
        ("RouteStep", "logic"),
        ("AnswerStep", "step"),
        ("CloseDesk", "end"),
    ]


CODE = """
import stepwell
from stepwell import Flow, Step, direct_to as answer, outcomes

ALL = {"x": 1}

def outside(step):
    return stepwell.go("Three") if step else outside(None)

class One(Step):
    async def on_response(self, result):
        if not isinstance(self, Two):
            return outcomes.go(target=Two)
        else:
            return go_back(self)

    async def on_llm_error(self, context):
        Two = context.attempt
        return stepwell.go(Two)

    @property
    def where(self):
        return outcomes.finish() or None

    async def on_llm_blocked(self, context):
        ALL["x"]()
        (lambda: 1)()
        if isinstance(self, ALL) or isinstance(context, One):
            return answer(Two, "x")
        return isinstance(self, (One, Two)) and "text" or Two

    @staticmethod
    def other(): return outside(1)

    computed = property(lambda self: None)

def go_back(step):
    return outcomes.go(One)

class Two(One):
    aliases = ("Old",)
    async def on_llm_error(self, context):
        return outcomes.go("Old") if isinstance(self, Two) else Three

class Three(Step):
    async def on_response(self, result):
        return [Two, 3] or outcomes.go(3) or outcomes.go()

class CodeFlow(Flow):
    def config_model(self): return "offline:rules"
    def define_steps(self): return [One(self), Two(self), Three(self)]
"""


def test_ways_of_writing_it(command: Command, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "flowcode.py").write_text(CODE)
    assert edges(command, "flowcode.py") == {
        ("One", "Two", "go", "on_response on_llm_blocked"),
        ("One", "end", "finish", "where"),
        ("One", "Two", "direct_to", "on_llm_blocked"),
        ("One", "Three", "go", "other"),
        ("Two", "Three", "go", "other"),
        ("Two", "One", "go", "on_response"),
        ("Two", "Two", "go", "on_llm_error on_llm_blocked"),
        ("Two", "Two", "direct_to", "on_llm_blocked"),
        ("Two", "end", "finish", "where"),
    }
    assert command("draw", "flowcode.py", "--json").json["computed"] == ["One.on_llm_error", "Three.on_response"]


CLOSURE = """
from stepwell import Flow, Step, go

def make():
    class Two(Step):
        pass

    late = 1

    class One(Step):
        async def on_response(self, result):
            return go(Two)

        async def on_llm_error(self, context):
            return go(late)

    exec("async def on_llm_blocked(self, context): return go(Two)", made := {"Two": Two, "go": go})
    One.on_llm_blocked = made["on_llm_blocked"]
    del late

    class MadeFlow(Flow):
        def config_model(self): return "offline:rules"
        def define_steps(self): return [One(self), Two(self)]

    return MadeFlow

MadeFlow = make()
"""


def test_classes_made_in_a_function(command: Command, tmp_path: Path) -> None:
    (tmp_path / "closures.py").write_text(CLOSURE)
    # Of a function without source nothing can be said.
    assert edges(command, "closures.py") == {("One", "Two", "go", "on_response")}
    assert command("draw", "closures.py", "--json").json["computed"] == ["One.on_llm_error"]


def test_mermaid(command: Command) -> None:
    ran = command("draw", DESK)
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "%% DeskFlow. Edges are read from the code of the steps (go, direct_to, finish, returned classes).",
        "%% Not drawn, because the target is computed: AnswerStep.again",
        "flowchart TD",
        '    begin(("start"))',
        '    s0["AskStep"]',
        '    s1{{"RouteStep"}}',
        '    s2["AnswerStep"]',
        '    s3(["CloseDesk"])',
        '    done((("end")))',
        "    begin --> s0",
        '    s0 -->|"note"| s1',
        '    s0 -->|"leave"| done',
        '    s1 -.->|"run_logic"| s2',
        '    s1 -->|"run_logic"| s2',
        '    s1 -->|"run_logic"| s3',
        '    s2 -->|"on_response"| s0',
        '    s2 -->|"leave"| done',
        "    s3 --> done",
        "    %% A dotted edge answers from code: its stage gets the next turn.",
    ]


def test_a_picture_has_every_stage_and_every_edge(command: Command, tmp_path: Path) -> None:
    ran = command("draw", HOTEL, "--svg", "hotel.svg")
    assert (ran.code, ran.out) == (0, "Drew HotelFlow (5 stages, 20 edges) into hotel.svg.\n")
    root = ET.fromstring((tmp_path / "hotel.svg").read_text())
    assert root.tag == f"{SVG}svg"
    stages = [g.attrib["data-stage"] for g in root.iter(f"{SVG}g") if "data-stage" in g.attrib]
    assert stages == ["ExploreStep", "PresentStep", "CompareStep", "BookStep", "TerminateSessionStep"]
    drawn = {(g.attrib["data-from"], g.attrib["data-to"]) for g in root.iter(f"{SVG}g") if "data-from" in g.attrib}
    assert drawn == {(one, two) for one, two, *_ in edges(command, HOTEL)} | {("begin", "ExploreStep")}
    text = "".join(root.itertext())
    for word in ("ExploreStep", "compare_hotels", "choose_hotel", "closes the session", "7 tools"):
        assert word in text
    inside(root)
    ran = command("draw", DESK, "--svg", "-")
    assert ET.fromstring(ran.out).attrib["role"] == "img"
    ran = command("draw", DESK, "--svg", "desk.svg")
    assert "Not drawn, because the target is computed: AnswerStep.again." in ran.out
    assert "cannot be written" in command.fails("draw", DESK, "--svg", "no/where.svg", code=1)


def boxes(root: ET.Element) -> list[tuple[float, float, float, float]]:
    found = []
    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


def inside(root: ET.Element) -> None:
    """Nothing lies outside of the picture, and no box on another."""
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    found = boxes(root)
    for left, top, right, bottom in found:
        assert left >= 0
        assert top >= 0
        assert right <= width + 0.5
        assert bottom <= height + 0.5
    for number, (left, top, right, bottom) in enumerate(found):
        for l2, t2, r2, b2 in found[number + 1 :]:
            assert right <= l2 + 0.2 or r2 <= left + 0.2 or bottom <= t2 + 0.2 or b2 <= top + 0.2


@pytest.mark.parametrize("seed", range(12))
def test_pictures_of_any_graph(seed: int) -> None:
    dice = random.Random(seed)
    names = [f"Stage<{number}>" + "x" * dice.randrange(20) for number in range(dice.randrange(1, 12))]
    stages = tuple(
        Stage(name, dice.choice(["step", "logic", "end"]), ("a", "b")[: dice.randrange(3)]) for name in names
    )
    ways = {
        (dice.choice(names), dice.choice([*names, ""]), dice.choice(["go", "direct_to", "finish"]))
        for _ in range(dice.randrange(25))
    }
    tools = ("first_tool", "second", "third & last", "fourth", "fifth", "sixth")
    graph = Graph(
        "Any & all",
        names[0],
        stages,
        tuple(Edge(*way, tools[: dice.randrange(7)]) for way in sorted(ways)),  # type: ignore[arg-type]
        ("Stage.method",),
    )
    svg = picture(graph)
    root = ET.fromstring(svg)
    drawn = [g for g in root.iter(f"{SVG}g") if "data-from" in g.attrib]
    assert len(drawn) == len(ways) + 1
    assert len([g for g in root.iter(f"{SVG}g") if "data-stage" in g.attrib]) == len(names)
    assert not re.search(r"nan|inf\b", svg)
    inside(root)
    assert picture(graph) == svg
