"""Flow and Step: conversations whose transitions are owned by code, with one durable cursor."""

from stepwell.flow._definition import FlowDefinition, StepDefinition
from stepwell.flow._flow import BusyPolicy, Flow, StepTarget
from stepwell.flow._host import StepHost
from stepwell.flow._memory import Conversation, FlowMemory, Memory, SummaryRule
from stepwell.flow._returned import as_message, attach
from stepwell.flow._runtime import Runtime, UnitRuntime
from stepwell.flow._step import LogicResult, LogicStep, ResponseResult, Step, TerminateSessionStep
from stepwell.flow._visit import Again, Decided, Decision, Reply, Visit, Wait, logic, settle

__all__ = [
    "Again",
    "BusyPolicy",
    "Conversation",
    "Decided",
    "Decision",
    "Flow",
    "FlowDefinition",
    "FlowMemory",
    "LogicResult",
    "LogicStep",
    "Memory",
    "Reply",
    "ResponseResult",
    "Runtime",
    "Step",
    "StepDefinition",
    "StepHost",
    "StepTarget",
    "SummaryRule",
    "TerminateSessionStep",
    "UnitRuntime",
    "Visit",
    "Wait",
    "as_message",
    "attach",
    "logic",
    "settle",
]
