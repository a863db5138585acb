"""The flow: which stages there are, and what they share."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell import Flow, Step, TerminateSessionStep

from .steps import BookStep, CompareStep, ExploreStep, PresentStep


class HotelFlow(Flow):
    """Find and book a hotel.

    The three stages of the search share one memory, so that "the second one" is understood in each; the booking has its
    own. `config`: `model` (default the offline model), `today` as an ISO date (default the real one).
    """

    def config_model(self) -> str:
        return self.get_context("config.model") or "offline:rules"

    def define_steps(self) -> Sequence[Step]:
        return [
            ExploreStep(self).use_memory("search"),
            PresentStep(self).use_memory("search"),
            CompareStep(self).use_memory("search"),
            BookStep(self).use_memory("booking"),
            TerminateSessionStep(self).use_memory("closing"),
        ]
