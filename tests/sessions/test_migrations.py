"""Bringing stored sessions to the current version of their workflow."""

import copy
from typing import Any

import msgspec
import pytest

from stepwell.errors import HandlerError, MigrationError, NewerSchemaError
from stepwell.messages import JsonObject
from stepwell.sessions import MemoryHead, Migration, SessionHead, StageRecord, migrate_head
from stepwell.testing._store_base import make_head


def stored(version: int = 1, flow: str = "Flow") -> SessionHead:
    head = make_head(flow=flow, state="a b", turn=True)
    head.workflow.schema_version = version
    head.memories["A"] = MemoryHead(2, 5)
    head.revision = 7
    return head


def split_name(head: JsonObject) -> JsonObject:
    state = head["stages"]["A"]["state"]
    state["first"], state["last"] = state.pop("value").split()
    return head


def rename_stage(head: JsonObject) -> JsonObject:
    head["stages"]["B"] = head["stages"].pop("A")
    return {**head, "workflow": {**head["workflow"], "current": "B"}}


STEPS = [Migration(2, rename_stage), Migration(1, split_name)]


def test_a_current_head_is_returned_as_it_is() -> None:
    head = stored(3)
    assert migrate_head(head, flow="Flow", version=3, migrations=STEPS) is head


def test_migrations_run_in_order_of_version() -> None:
    head = stored()
    before = copy.deepcopy(head)
    new = migrate_head(head, flow="Flow", version=3, migrations=STEPS)
    assert new.stages == {"B": StageRecord(state={"first": "a", "last": "b"})}
    assert (new.workflow.current, new.workflow.schema_version) == ("B", 3)
    assert (new.id, new.revision, new.memories, new.turn) == (head.id, 7, head.memories, head.turn)
    assert head == before


def test_it_begins_where_the_session_is() -> None:
    new = migrate_head(stored(2), flow="Flow", version=3, migrations=STEPS)
    assert new.stages == {"B": StageRecord(state={"value": "a b"})}


def test_a_head_may_be_given_as_json() -> None:
    data = msgspec.to_builtins(stored())
    before = copy.deepcopy(data)
    new = migrate_head(data, flow="Flow", version=3, migrations=STEPS)
    assert new == migrate_head(stored(), flow="Flow", version=3, migrations=STEPS)
    assert data == before
    assert migrate_head(data, flow="Flow", version=1) == stored()


def test_a_workflow_may_be_known_by_an_alias() -> None:
    new = migrate_head(stored(flow="Old"), flow="Flow", version=1, aliases=["Older", "Old"])
    assert (new.workflow.id, new.workflow.schema_version) == ("Flow", 1)

    def rename(head: JsonObject) -> JsonObject:
        head["workflow"]["id"] = "Flow"
        return head

    old = stored(flow="Old")
    assert migrate_head(old, flow="Flow", version=2, migrations=[Migration(1, rename)], aliases=["Old"]) != old
    with pytest.raises(MigrationError, match=r"belongs to workflow 'Old', not to 'Flow'.*alias"):
        migrate_head(stored(flow="Old"), flow="Flow", version=1)


def test_a_newer_session_is_refused() -> None:
    with pytest.raises(NewerSchemaError, match="version 4 of 'Flow', this is version 3") as caught:
        migrate_head(stored(4), flow="Flow", version=3, migrations=STEPS)
    assert caught.value.ids == {"session_id": "s", "flow": "Flow"}


def test_a_gap_is_named_and_nothing_runs() -> None:
    ran: list[int] = []

    def note(head: JsonObject) -> JsonObject:
        ran.append(1)
        return head

    with pytest.raises(MigrationError, match="no migration from 2 to 3, 4 to 5: add it"):
        migrate_head(stored(), flow="Flow", version=5, migrations=[Migration(1, note), Migration(3, note)])
    assert ran == []


def test_two_migrations_from_one_version() -> None:
    with pytest.raises(MigrationError, match="two migrations from version 1"):
        migrate_head(stored(), flow="Flow", version=3, migrations=[*STEPS, Migration(1, split_name)])


def _set(path: str, value: Any) -> Any:
    def migrate(head: JsonObject) -> Any:
        *parents, last = path.split("/")
        at = head
        for key in parents:
            at = at[key]
        at[last] = value
        return head

    return migrate


@pytest.mark.parametrize(
    ("migrate", "why"),
    [
        (lambda head: head["nothing"], "failed: KeyError"),
        (lambda head: None, "returned a NoneType"),
        (lambda head: [head], "returned a list"),
        (_set("stages/A/state", {"x": {1, 2}}), "not JSON; it cannot be stored.*stages.A.state.x"),
        (_set("stages/A/state", {"x": float("nan")}), "not JSON"),
        (_set("stages/A/state", {"x": "\ud800"}), "not JSON"),
        (_set("id", "other"), "changed what tells whose session it is"),
        (_set("schema", "stepwell.session/9"), "changed what tells whose session it is"),
        (_set("revision", 1), "changed what tells whose session it is"),
        (_set("memories", {}), "changed what tells whose session it is"),
        (_set("memories/A", {"first": 0, "next": 5}), "changed what tells whose session it is"),
        (_set("memories/A", "all"), "changed what tells whose session it is"),
        (_set("memories", "none"), "changed what tells whose session it is"),
        (_set("workflow/id", "Other"), "another workflow, 'Other'"),
        (_set("workflow", "Flow"), "does not say whose it is"),
        (_set("workflow/schema_version", 0), "does not say whose it is"),
        (_set("stages", []), r"not a session document: Expected `object`, got `array` - at `\$.stages`"),
    ],
)
def test_a_migration_that_does_wrong(migrate: Any, why: str) -> None:
    head = stored()
    before = copy.deepcopy(head)
    with pytest.raises(MigrationError, match=why):
        migrate_head(head, flow="Flow", version=2, migrations=[Migration(1, migrate)])
    assert head == before


def test_errors_of_ours_pass_as_they_are() -> None:
    def refuse(head: JsonObject) -> JsonObject:
        raise HandlerError("mine")

    with pytest.raises(HandlerError, match="mine"):
        migrate_head(stored(), flow="Flow", version=2, migrations=[Migration(1, refuse)])


def test_json_that_is_no_head() -> None:
    for data in ({}, {"workflow": {"id": 1}}, {"workflow": {"id": "Flow", "schema_version": "1"}}):
        with pytest.raises(MigrationError, match="does not say whose it is"):
            migrate_head(data, flow="Flow", version=1)
