"""The flow of the tests of suspension, for the command."""

from stepwell import Providers
from stepwell.testing import ScriptedModel
from suspension_flows import DeskFlow, talk

__all__ = ["DeskFlow"]

models = Providers({"scripted": ScriptedModel(default=talk)})
