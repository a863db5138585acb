"""Bringing a stored session to the current version of its workflow.

Two numbers have versions: the document's own format (`schema`, see `decode_head`) and the workflow's `schema_version`,
which its author raises when the shape of its state changes. This module is about the second. Messages are not
migrated: `decode_message` upcasts each record when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import msgspec

from stepwell._json import json_copy
from stepwell.errors import MigrationError, NewerSchemaError, NonJsonValueError, StepwellError
from stepwell.messages import JsonObject

from .document import SessionHead

__all__ = ["Migration", "MigrationFunction", "migrate_head"]

MigrationFunction: TypeAlias = Callable[[JsonObject], JsonObject]
"""Takes a head as plain JSON (its own copy, to change as it likes), returns the next version's. Pure: no I/O."""


@dataclass(frozen=True)
class Migration:
    """One step of a workflow's history: from version `from_version` to `from_version + 1`."""

    from_version: int
    migrate: MigrationFunction


def migrate_head(
    head: SessionHead | JsonObject,
    *,
    flow: str,
    version: int,
    migrations: Sequence[Migration] = (),
    aliases: Collection[str] = (),
) -> SessionHead:
    """Bring a head to the current version of its workflow. What is stored is not touched; the caller saves the result.

    A migration may change anything in the head but what tells whose it is and where its rows lie: the session's `id`,
    `schema`, `revision`, and the positions in `memories`.

    Args:
        head: The stored head, or the same as plain JSON. It is not changed.
        flow: The workflow's stable id.
        version: The workflow's `schema_version` now.
        migrations: Its migrations, in any order.
        aliases: Ids it had before.

    Returns:
        The head with `workflow.id` and `workflow.schema_version` of today; `head` itself if it is that already.

    Raises:
        NewerSchemaError: The session was written by a newer version of the workflow.
        MigrationError: It is another workflow's, a migration is missing or there twice, or one failed or returned
            something that is no head of this session.
    """
    data: JsonObject = msgspec.to_builtins(head) if isinstance(head, SessionHead) else head
    ids: dict[str, str | int | None] = {"session_id": str(data.get("id", "")), "flow": flow}
    workflow = _workflow(data, ids)
    stored = workflow["schema_version"]
    name = workflow["id"]
    if name != flow and name not in aliases:
        raise MigrationError(
            f"The session belongs to workflow {name!r}, not to {flow!r}: if it was renamed, declare the old id as an "
            "alias.",
            **ids,
        )
    if stored > version:
        raise NewerSchemaError(
            f"The session was written by version {stored} of {flow!r}, this is version {version}: deploy the newer.",
            **ids,
        )
    if stored == version and name == flow and isinstance(head, SessionHead):
        return head
    steps = _steps(migrations, stored, version, ids)
    # Its own copy: a migration that fails half way must not have changed the caller's.
    data = _copy(data, "The stored head", ids)
    fixed = _fixed(data)
    for step in steps:
        what = f"The migration of {flow!r} from version {step.from_version} to {step.from_version + 1}"
        data = _run(step, data, what, ids)
        if _fixed(data) != fixed:
            raise MigrationError(
                f"{what} changed what tells whose session it is, or where its rows lie: id, schema, revision and the "
                "positions in memories must stay.",
                **ids,
            )
        now = _workflow(data, ids)
        if now["id"] != flow and now["id"] not in aliases:
            raise MigrationError(f"{what} gave the session to another workflow, {now['id']!r}.", **ids)
        data["workflow"]["schema_version"] = step.from_version + 1
    data["workflow"]["id"] = flow
    try:
        return msgspec.convert(data, SessionHead)
    except msgspec.ValidationError as error:
        raise MigrationError(f"The migrated session of {flow!r} is not a session document: {error}.", **ids) from error


def _steps(
    migrations: Sequence[Migration], stored: int, version: int, ids: dict[str, str | int | None]
) -> list[Migration]:
    by_version: dict[int, Migration] = {}
    for migration in migrations:
        if migration.from_version in by_version:
            raise MigrationError(f"There are two migrations from version {migration.from_version}.", **ids)
        by_version[migration.from_version] = migration
    wanted = range(stored, version)
    missing = [number for number in wanted if number not in by_version]
    if missing:
        gap = ", ".join(f"{number} to {number + 1}" for number in missing)
        raise MigrationError(
            f"The session has version {stored} of {ids['flow']!r}, this is version {version}, and there is no "
            f"migration from {gap}: add it.",
            **ids,
        )
    return [by_version[number] for number in wanted]


def _run(step: Migration, data: JsonObject, what: str, ids: dict[str, str | int | None]) -> JsonObject:
    try:
        result: Any = step.migrate(data)
    except StepwellError:
        raise
    except Exception as error:  # whatever the author's function raises
        raise MigrationError(f"{what} failed: {type(error).__name__}.", **ids) from error
    if not isinstance(result, dict):
        raise MigrationError(f"{what} returned a {type(result).__name__}, not the head as a JSON object.", **ids)
    return _copy(result, f"{what} returned something that is not JSON; it", ids)


def _copy(data: Any, what: str, ids: dict[str, str | int | None]) -> JsonObject:
    try:
        return json_copy(data)
    except NonJsonValueError as error:
        raise MigrationError(f"{what} cannot be stored: {error.message}", **ids) from error


def _workflow(data: JsonObject, ids: dict[str, str | int | None]) -> JsonObject:
    """The workflow's id and version; its other fields are the migrations' business."""
    workflow: Any = data.get("workflow")
    if isinstance(workflow, dict):
        record = cast("JsonObject", workflow)
        name, version = record.get("id"), record.get("schema_version", 1)
        if isinstance(name, str) and isinstance(version, int) and version > 0:
            return {"id": name, "schema_version": version}
    raise MigrationError(
        "The head of the session does not say whose it is: workflow.id, workflow.schema_version.", **ids
    )


def _fixed(data: JsonObject) -> Any:
    """What no migration may change: the rows beside the head are found by it."""
    memories: Any = data.get("memories", {})
    positions = memories
    if isinstance(memories, dict):
        namespaces = cast("JsonObject", memories)
        positions = {ns: _positions(memory) for ns, memory in namespaces.items()}
    return data.get("id"), data.get("schema"), data.get("revision", 0), positions


def _positions(memory: Any) -> Any:
    if not isinstance(memory, dict):
        return memory
    record = cast("JsonObject", memory)
    return record.get("first", 0), record.get("next", 0)
