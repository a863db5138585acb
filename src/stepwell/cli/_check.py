"""`stepwell check`: every definition error that can be found without a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ._options import Json, Models
from ._terminal import Terminal, UsageError

if TYPE_CHECKING:
    from stepwell.flow import Flow, Step
    from stepwell.models.providers import Providers

__all__ = ["check", "steps_of"]


def check(
    *targets: Annotated[str, Parameter(help="Flows: module:Flow, path/to/file.py:Flow, or packages' directories.")],
    models: Models = "env",
    json: Json = False,
) -> int:
    """Find what is wrong with flows before anybody talks to them.

    Registers the flows as an engine would, loads the client libraries of their models, and prints what there is: flows,
    stages, tools and models. Exit code 1 if anything is wrong. No model is called.
    """
    if not targets:
        raise UsageError("Name the flows to check: module:Flow, path/to/file.py:Flow or a package's directory.")
    from ._targets import load_flows, load_providers

    flows = load_flows(targets)
    providers = load_providers(models)
    terminal = Terminal()
    reports: list[dict[str, Any]] = []
    with terminal.err.status("Checking ...") as status:
        for cls in flows:
            status.update(f"Checking {cls.id} ...")
            reports.append(_report(cls, providers))
    _find_twins(reports)
    wrong = sum(len(report["errors"]) for report in reports)
    if json:
        terminal.json({"ok": not wrong, "flows": reports})
        return 1 if wrong else 0
    rows: list[list[str]] = []
    for report in reports:
        for at, stage in enumerate(report["stages"]):
            name = str(report["id"]) if not at else ""
            mark = " (first)" if stage["id"] == report["initial"] else ""
            model = stage["model"] or "code decides"
            rows.append([name, stage["id"] + mark, model, stage["memory"], ", ".join(stage["tools"]) or "-"])
    if rows:
        terminal.table({"Flow": "bold", "Stage": "", "Model": "cyan", "Memory": "dim", "Tools": ""}, rows)
    for report in reports:
        for error in report["errors"]:
            terminal.error(f"{report['id']}: {error['message']}")
    stages = sum(len(report["stages"]) for report in reports)
    if not wrong:
        terminal.line(f"{_count(len(reports), 'flow')} with {_count(stages, 'stage')}: nothing is wrong.", "green")
    return 1 if wrong else 0


def _report(cls: type[Flow], providers: Providers) -> dict[str, Any]:
    """What a flow consists of, and what is wrong with it. Its first definition error hides the rest of it."""
    from stepwell.errors import StepwellError
    from stepwell.flow import FlowDefinition

    report: dict[str, Any] = {"id": cls.id, "aliases": list(cls.aliases), "initial": "", "stages": [], "errors": []}
    try:
        definition = FlowDefinition(cls)
    except StepwellError as error:
        report["errors"].append(_error(error))
        return report
    report["initial"] = definition.initial
    selections = [definition.model]
    for step in steps_of(cls):
        built = definition.steps[type(step)]
        model = None if step.is_logic() else step.get_model_selection()
        report["stages"].append(
            {
                "id": step.id,
                "model": model.id if model else None,
                "memory": step.get_memory_space(),
                "tools": list(built.schemas),
                "structured": built.output is not None,
            }
        )
        if model is not None and model not in selections:
            selections.append(model)
    for selection in selections:
        try:
            providers.validate(selection)
            providers.preload(selection)
        except StepwellError as error:
            report["errors"].append(_error(error))
    return report


def steps_of(cls: type[Flow]) -> list[Step[Any, Any]]:
    """The steps of a flow object that is only looked at, as its definition does."""
    from stepwell.flow import _definition

    probe = cls()
    probe._runtime = _definition._Probe()  # pyright: ignore[reportPrivateUsage]
    probe._register()  # pyright: ignore[reportPrivateUsage]
    return list(probe._by_class.values())  # pyright: ignore[reportPrivateUsage]


def _find_twins(reports: list[dict[str, Any]]) -> None:
    """Two flows that one engine could not tell apart."""
    owners: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name in (report["id"], *report["aliases"]):
            if owners.setdefault(name, report) is not report:
                sentence = f"Two flows answer to {name!r}: ids and aliases are unique."
                report["errors"].append({"code": "flow_definition", "message": sentence, "ids": {"flow": name}})


def _error(error: Any) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "ids": error.ids}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
