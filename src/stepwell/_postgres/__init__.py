"""What the session store and the channels in PostgreSQL share: connections, what errors mean, schema versions, arrays.

Imported by those two when they are, because it needs the extra `stepwell[postgres]`.
"""

from __future__ import annotations

from .connections import Connection, Connections, repeat_conflicts
from .part import Part

__all__ = ["Connection", "Connections", "Part", "repeat_conflicts"]
