"""The flow of the intake."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell import Flow, Step

from .steps import AddressStep, BirthStep, GuardianStep, NameStep, ReviewStep, RouteStep


class IntakeFlow(Flow):
    """Take down a patient's details.

    All stages share one memory. `config`: `model` (default the offline model), `today` as an ISO date.
    """

    def config_model(self) -> str:
        return self.get_context("config.model") or "offline:rules"

    def define_steps(self) -> Sequence[Step]:
        stages = [NameStep, BirthStep, AddressStep, GuardianStep, RouteStep, ReviewStep]
        return [stage(self).use_memory("intake") for stage in stages]
