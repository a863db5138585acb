"""For agents that are written as Temporal activities: step ids that survive retries, and runs framed by a workflow.

Extra `stepwell[temporal]`. In the module of a workflow import it within `workflow.unsafe.imports_passed_through()`.
"""

from importlib.util import find_spec

if find_spec("temporalio") is None:
    raise ModuleNotFoundError("stepwell.temporal needs temporalio: pip install 'stepwell[temporal]'", name="temporalio")

from ._framing import Framing, Reason, RunRef
from ._step_id import step_id_for
from ._workflow import WorkflowRun, run

__all__ = ["Framing", "Reason", "RunRef", "WorkflowRun", "run", "step_id_for"]
