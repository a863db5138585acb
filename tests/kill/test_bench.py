"""The benchmarks' command: what it counts, and what it leaves of a page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(120)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_writers_are_killed_and_counted_and_the_rest_of_the_page_stays(tmp_path: Path) -> None:
    page, found = tmp_path / "benchmarks.md", tmp_path / "found.json"
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    arguments = ("--bench", "none", "--channels", "sqlite", "--kills", "2", "--docs", str(page), "--json", str(found))
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr
    [killed] = json.loads(found.read_text(encoding="utf-8"))["kills"]
    assert killed["backend"] == "sqlite"
    assert [killed[key] for key in ("runs", "doubled", "lost", "unequal")] == [2, 0, 0, 0]
    assert sum(killed["places"].values()) == 2
    begin = "<!-- kills: begin -->"
    assert page.read_text(encoding="utf-8").partition(begin)[0] == text.partition(begin)[0]
    assert f"| sqlite | 2 | {killed['killed']} | 0 | 0 | 0 |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--bench", "nothing"), "there is no nothing"),
        (("--channels", "memory,elsewhere"), "there is no elsewhere"),
        (("--bench", "none", "--docs", "README.md"), "is no page with the marks of bars"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: tuple[str, ...], why: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert why in done.stderr
