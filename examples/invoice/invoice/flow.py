"""The flows: the document as a message, or as configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepwell import Flow, Step, finish
from stepwell.outcomes import Finish

from .model import Invoice

PROMPT = """\
Extract the invoice as JSON, exactly as it stands there. Leave out what the document does not say; compute nothing."""


class ExtractStep(Step[Invoice]):
    """One model call, checked against the schema by the framework and against arithmetic by code."""

    def get_prompt(self) -> str:
        document = self.get_context("config.document")
        return f"{PROMPT}\n\n{document}" if document else PROMPT

    def struct_output_schema(self) -> type[Invoice]:
        return Invoice

    async def on_response(self, result: Invoice) -> Finish:
        return finish({"invoice": result.model_dump(mode="json"), "problems": result.problems()})


class InvoiceFlow(Flow):
    """The user's message is the document. `config`: `model` (default the offline model)."""

    def config_model(self) -> str:
        return self.get_context("config.model") or "offline:rules"

    def define_steps(self) -> Sequence[Step[Any, Any]]:
        return [ExtractStep(self)]


class InvoiceFileFlow(InvoiceFlow):
    """The document comes with the configuration, as `document`; there is nothing to say."""

    requires_user_message = False
