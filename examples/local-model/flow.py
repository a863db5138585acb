"""A flow of one stage on a local model without chat tuning: it shows the path, not a conversation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from stepwell import CallPolicy, Flow, ModelSelection, Step


class CompleteStep(Step):
    """Let the model write on."""

    def get_prompt(self) -> str:
        return "You complete the text of the user."


class LocalFlow(Flow):
    """Served by whatever `OPENAI_BASE_URL` names."""

    def config_model(self) -> ModelSelection:
        # The server ignores max_completion_tokens and takes only max_tokens: it goes into the extra body.
        body = {"max_tokens": 48, "seed": 7}
        return ModelSelection("openai", os.environ.get("OPENAI_MODEL", "gemma-3-270m"), {"extra_body": body})

    def config_llm_call_policy(self) -> CallPolicy:
        return CallPolicy(first_token_timeout=120)

    def define_steps(self) -> Sequence[Step[Any, Any]]:
        return [CompleteStep(self)]
