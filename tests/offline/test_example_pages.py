"""The pages about the examples say what the examples are: every excerpt is their code, every transcript is a run."""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from stepwell import Engine
from stepwell.models.offline import OfflineModel

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / f"docs/examples/{name}.md").read_text(encoding="utf-8") for name in ("hotel", "intake", "invoice")
}


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"(?ms)^```{re.escape(kind)}\n(.*?)\n```$", PAGES[name])


@pytest.mark.parametrize("name", PAGES)
def test_every_excerpt_is_code_of_the_example(name: str) -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "examples" / name / name).glob("*.py"))
    pieces = [piece for block in blocks(name, "python {.excerpt}") for piece in re.split(r"\n\n+(?=@)", block)]
    assert len(pieces) >= 3
    for piece in pieces:
        assert piece in sources or textwrap.indent(piece, "    ") in sources, piece


@pytest.mark.anyio
@pytest.mark.parametrize(("name", "flow"), [("hotel", "HotelFlow"), ("intake", "IntakeFlow")])
async def test_every_transcript_is_a_run(name: str, flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / name)
    cls: Any = getattr(importlib.import_module(name), flow)
    lines = (ROOT / "examples" / name / "conversation.txt").read_text(encoding="utf-8").splitlines()
    shown: list[str] = []
    session: str | None = None
    async with Engine([cls], models={"offline": OfflineModel()}) as engine:
        for line in lines:
            config = {"today": "2026-12-01"} if session is None else None
            result = await engine.run_or_raise(flow, line, session_id=session, config=config)
            session = result.session_id
            shown.append(f"> {line}\n{result.message}")
    assert blocks(name, "text") == ["\n\n".join(shown)]


@pytest.mark.anyio
async def test_the_invoice_of_the_page_is_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "invoice")
    cls: Any = importlib.import_module("invoice").InvoiceFlow
    document = (ROOT / "examples/invoice/documents/hardware.txt").read_text(encoding="utf-8")
    async with Engine([cls], models={"offline": OfflineModel()}) as engine:
        result = await engine.run_or_raise("InvoiceFlow", document)
    assert [json.loads(block) for block in blocks("invoice", "json")] == [json.loads(str(result.message))]
