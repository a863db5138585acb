"""Extraction with a scripted model and with the offline model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from invoice import Invoice, InvoiceFileFlow, InvoiceFlow

from stepwell import Engine
from stepwell.models.offline import OfflineModel
from stepwell.testing import FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

DOCUMENTS = Path(__file__).parents[1] / "documents"
HARDWARE = (DOCUMENTS / "hardware.txt").read_text(encoding="utf-8")
WRONG = (DOCUMENTS / "wrong-total.txt").read_text(encoding="utf-8")

EXTRACTED: dict[str, Any] = {
    "number": "7",
    "issued": "2026-03-03",
    "seller": "Bright Ltd",
    "buyer": "Stepwell",
    "currency": "EUR",
    "lines": [{"description": "Gear", "quantity": 2, "unit_price": 3.5, "amount": 7}],
    "net": 7,
    "vat": 1.33,
    "total": 8.33,
}


async def test_a_reply_that_matches_the_schema_is_the_answer() -> None:
    async with TurnHarness(InvoiceFlow, model=ScriptedModel([Reply.structured(EXTRACTED)])) as h:
        result = await h.say("Invoice 7 of Bright Ltd ...")
        assert result.completed
        assert result.content_type == "application/json"
        answer = json.loads(str(result.message))
        assert answer["problems"] == []
        assert answer["invoice"] == {**EXTRACTED, "due": None}


async def test_a_reply_that_does_not_match_is_asked_for_again() -> None:
    without = {key: value for key, value in EXTRACTED.items() if key != "total"}
    model = ScriptedModel([Reply.structured(without), Reply.structured(EXTRACTED)])
    async with TurnHarness(InvoiceFlow, model=model) as h:
        result = await h.say("Invoice 7")
        assert result.success
        assert "total" in str(model.requests[1].messages)


async def test_the_offline_model_reads_an_invoice() -> None:
    async with Engine([InvoiceFlow], models={"offline": OfflineModel()}) as engine:
        result = await engine.run_or_raise("InvoiceFlow", HARDWARE)
    answer = json.loads(str(result.message))
    assert answer["problems"] == []
    assert answer["invoice"]["number"] == "INV-2026-0117"
    assert answer["invoice"]["due"] == "2026-04-02"
    assert answer["invoice"]["seller"] == "Bright Hardware Ltd"
    assert [line["amount"] for line in answer["invoice"]["lines"]] == [130, 222, 520]
    assert answer["invoice"]["total"] == 1037.68


async def test_a_document_may_come_with_the_configuration() -> None:
    async with Engine([InvoiceFileFlow], models={"offline": OfflineModel()}) as engine:
        result = await engine.run_or_raise("InvoiceFileFlow", None, config={"document": WRONG})
    answer = json.loads(str(result.message))
    assert answer["invoice"]["buyer"] == "Stepwell Travel"
    assert answer["problems"] == ["net and VAT do not add up to the total"]


async def test_what_is_no_invoice_is_an_error_and_nothing_is_made_up() -> None:
    async with Engine([InvoiceFlow], models={"offline": OfflineModel()}, clock=FakeClock(auto_advance=True)) as engine:
        result = await engine.run("InvoiceFlow", "Dear Sir or Madam, it rains.")
    assert not result.success
    assert result.error is not None
    assert result.error.code == "llm_response_rejected"


def test_what_does_not_add_up() -> None:
    line = {"description": "Gear", "quantity": 2, "unit_price": 3.5, "amount": 8}
    invoice = Invoice.model_validate({**EXTRACTED, "lines": [line]})
    assert invoice.problems() == ["line 1: 2.0 x 3.5 is not 8.0", "the lines do not add up to the net amount"]
