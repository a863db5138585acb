"""Session, Run and Step on a channel: the agent's side, the client's side, and codecs. Usable without any flow."""

from ._changes import BulkChange, OutputChange, RunChange, StepChange, StructureChange, TreeChange
from ._client import ClientSession
from ._handle import ClientRun, Steer, SteerOutcome
from ._history import HistoryWalk
from ._invocation import Invocation
from ._nodes import InputNode, Node, RunInfo, RunNode, StepInfo
from ._tree import ConversationTree
from ._view import BranchSelection, View, ViewChange, ViewChanges

__all__ = [
    "BranchSelection",
    "BulkChange",
    "ClientRun",
    "ClientSession",
    "ConversationTree",
    "HistoryWalk",
    "InputNode",
    "Invocation",
    "Node",
    "OutputChange",
    "RunChange",
    "RunInfo",
    "RunNode",
    "Steer",
    "SteerOutcome",
    "StepChange",
    "StepInfo",
    "StructureChange",
    "TreeChange",
    "View",
    "ViewChange",
    "ViewChanges",
]
