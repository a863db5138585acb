"""Sessions: the document, the store protocol and the stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._open import open_store
from .document import (
    SCHEMA,
    DeferredRecord,
    LogEntry,
    MemoryHead,
    ModelUsage,
    OutRecord,
    PendingRecord,
    SequenceEntry,
    SessionHead,
    SessionStatus,
    SessionSummary,
    StageRecord,
    SteerRecord,
    Summary,
    TurnRecord,
    VisitRecord,
    WorkflowRecord,
    decode_head,
    encode_head,
)
from .memory import MemoryStore
from .migrations import Migration, MigrationFunction, migrate_head
from .store import (
    Acquired,
    Commit,
    DueSession,
    InboxRow,
    InboxUpdate,
    JournalRow,
    Lease,
    NewMessage,
    SessionStore,
    StoredMessage,
)
from .transfer import FORMAT, export_session, import_session

if TYPE_CHECKING:
    from .sqlite import SqliteStore

__all__ = [
    "FORMAT",
    "SCHEMA",
    "Acquired",
    "Commit",
    "DeferredRecord",
    "DueSession",
    "InboxRow",
    "InboxUpdate",
    "JournalRow",
    "Lease",
    "LogEntry",
    "MemoryHead",
    "MemoryStore",
    "Migration",
    "MigrationFunction",
    "ModelUsage",
    "NewMessage",
    "OutRecord",
    "PendingRecord",
    "SequenceEntry",
    "SessionHead",
    "SessionStatus",
    "SessionStore",
    "SessionSummary",
    "SqliteStore",
    "StageRecord",
    "SteerRecord",
    "StoredMessage",
    "Summary",
    "TurnRecord",
    "VisitRecord",
    "WorkflowRecord",
    "decode_head",
    "encode_head",
    "export_session",
    "import_session",
    "migrate_head",
    "open_store",
]


def __getattr__(name: str) -> Any:
    """Load what needs `sqlite3` when it is first asked for: most of the import time of this package."""
    if name == "SqliteStore":
        from .sqlite import SqliteStore

        return SqliteStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
