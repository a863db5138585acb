"""Every code block of README.md and of docs/ runs, and what the pages show is what happens."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from docs.kit import PROVIDERS, ROOT, Runner, blocks, edited, same

TUTORIAL = sorted((ROOT / "docs/tutorial").glob("[0-9]*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in TUTORIAL),
]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PROVIDERS):
            monkeypatch.delenv(name)


def _runnable(page: Path) -> bool:
    return any(block.language in ("python", "console", "json") for block in blocks(page))


@pytest.mark.parametrize("page", [page for page in PAGES if _runnable(page)], ids=lambda page: page.stem)
def test_every_block_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    directory, home = tmp_path / "work", tmp_path / "home"
    directory.mkdir()
    home.mkdir()
    for name in ("hotel", "intake", "invoice"):
        shutil.copytree(ROOT / "examples" / name, directory / "examples" / name)
    with Runner(directory, home) as runner:
        runner.page(page)


@pytest.mark.timeout(180)
def test_every_block_of_the_tutorial_runs_page_after_page(tmp_path: Path) -> None:
    directory, home = tmp_path / "hotel", tmp_path / "home"
    directory.mkdir()
    home.mkdir()
    with Runner(directory, home) as runner:
        for page in TUTORIAL:
            runner.page(page)
            runner.stop()


def test_the_readme_names_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        code = "\n".join(block.code for block in blocks(page))
        assert set(re.findall(r"\bmake ([a-z]+)", code)) <= targets


def test_the_pages_name_no_machine_and_load_nothing() -> None:
    """No path of a developer's machine; no picture or script of another site."""
    for page in (*PAGES, *TUTORIAL):
        text = page.read_text(encoding="utf-8")
        assert str(ROOT) not in text, page
        assert not re.search(r"/home/|/root/", text), page
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(?:script|img|iframe|link)\b", text), page


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page.name}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
                slugs = [re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
                assert anchor in slugs, f"{page.name}: {link}"


# -- the runner itself


@pytest.mark.parametrize(
    ("shown", "real", "equal"),
    [
        ("a  b\nc", "a b c", True),
        ("a ... d", "a b c d", True),
        ("a", "a b", False),
        ("...", "", True),
        ("id 0197f5c5-7c50-7a21-8b1c-6a5e2f4d9c01 ...", "id 0198aaaa-7c50-7a21-8b1c-6a5e2f4d9c01, 2", True),
        ("took 12.5 ms", "took 3 ms", True),
        ("2 rooms", "3 rooms", False),
    ],
)
def test_what_counts_as_the_same_output(shown: str, real: str, equal: bool) -> None:
    assert same(shown, real) is equal


def test_definitions_are_replaced_or_added() -> None:
    source = "import a\n\n\nclass One:\n    x = 1\n\n\nTWO = 2\n"
    new = edited(source, "imports, One, Three", "import b\n\nclass One:\n    y = 1\n\nclass Three:\n    pass\n", "here")
    assert new == "import b\n\n\nclass One:\n    y = 1\n\n\nTWO = 2\n\n\nclass Three:\n    pass\n"
