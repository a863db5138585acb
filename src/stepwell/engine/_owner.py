"""Who holds a lease: `host:boot:pid:start`, so that a dead process can be told from a slow one on the same machine."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

__all__ = ["owner_id", "owner_is_dead"]


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _start(pid: int) -> str | None:
    """When a process started, in clock ticks since boot; `None` if there is no such process, `0` if nobody can tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else "0"
    except OSError:
        return "0"
    # The second field is the command in parentheses and may hold anything; the start time is the 22nd.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else fields[19]


def owner_id() -> str:
    """This process."""
    return f"{socket.gethostname()}:{_boot()}:{os.getpid()}:{_start(os.getpid()) or '0'}"


def owner_is_dead(owner: str) -> bool:
    """Whether an owner was a process of this machine and boot that is gone. `False` when nobody can tell."""
    host, boot, pid, start = ([*owner.rsplit(":", 3), "", "", ""])[:4]
    if host != socket.gethostname() or boot != _boot() or boot == "unknown" or not pid.isdecimal():
        return False
    now = _start(int(pid))
    return now is None or (now != "0" and start != "0" and now != start)
