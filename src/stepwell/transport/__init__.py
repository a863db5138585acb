"""Session, Run and Step on a channel: the agent's side, the client's side, and codecs. Usable without any flow."""

from ._agent import AgentSession
from ._cancel import CancelEvent
from ._changes import BulkChange, OutputChange, RunChange, StepChange, StructureChange, TreeChange
from ._client import ClientSession
from ._codec import Codec, CodecMessage, Decoded, Decoder, Direction, Encoder, EncoderWriter, FoldMeta, OpenOutput
from ._core import OnCancel, OnError, OnSteer
from ._handle import ClientRun, Steer, SteerOutcome
from ._history import HistoryWalk
from ._invocation import Invocation
from ._nodes import InputNode, Node, RunInfo, RunNode, StepInfo
from ._patches import ViewPatches
from ._pipe import OnCancelled, PipeResult, Source
from ._prompt import PromptView
from ._run import AgentRun
from ._step import RunStep
from ._tree import ConversationTree
from ._view import BranchSelection, View, ViewChange, ViewChanges
from ._writer import ChannelWriter, OutputWriter

__all__ = [
    "AgentRun",
    "AgentSession",
    "BranchSelection",
    "BulkChange",
    "CancelEvent",
    "ChannelWriter",
    "ClientRun",
    "ClientSession",
    "Codec",
    "CodecMessage",
    "ConversationTree",
    "Decoded",
    "Decoder",
    "Direction",
    "Encoder",
    "EncoderWriter",
    "FoldMeta",
    "HistoryWalk",
    "InputNode",
    "Invocation",
    "Node",
    "OnCancel",
    "OnCancelled",
    "OnError",
    "OnSteer",
    "OpenOutput",
    "OutputChange",
    "OutputWriter",
    "PipeResult",
    "PromptView",
    "RunChange",
    "RunInfo",
    "RunNode",
    "RunStep",
    "Source",
    "Steer",
    "SteerOutcome",
    "StepChange",
    "StepInfo",
    "StructureChange",
    "TreeChange",
    "View",
    "ViewChange",
    "ViewChanges",
    "ViewPatches",
]
